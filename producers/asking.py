"""What a dispatcher writes: requests into workers' inboxes, close records on trajectories, its claim on control."""

from __future__ import annotations

from collections.abc import Iterable

from infra.daemon import Daemon
from producers.environments import make_environment
from producers.groups import Group, Worker
from producers.task_order import item_at
from schemas.codec import encode
from schemas.names import control_topic, topic
from schemas.records import Claim, Close, Request, Sampling
from schemas.seeds import derive_seed

_SEND_S = 15.0


class Asker:
    """Writes under one claim; `flush` waits for all of it."""

    def __init__(self, daemon: Daemon) -> None:
        self._settings, self._policy, self._table = daemon.settings, daemon.policy, daemon.table
        self._run_name = daemon.settings.run.name
        task = self._table.task
        self._environment = make_environment(task.environment, task.settings, daemon.settings.run.seed)
        self._sampling = Sampling(**self._table.sampling.model_dump())
        self._epoch, self._nonce = 0, ""
        self._writer = daemon.log.writer()

    def owns(self, claim: Claim) -> None:
        """Write under this claim from now on, and say so on control. Raises SendFailed, DeadlineExceeded."""
        self._epoch, self._nonce = claim.epoch, claim.nonce
        key = f"claim/dispatch/{self._policy}".encode()
        self._writer.send(control_topic(self._run_name), 0, encode(claim), key=key).result(_SEND_S)

    def ask(self, group: Group, indices: Iterable[int], attempt: int, worker: Worker) -> int:
        """Ask a worker for members of a group; how many. A member asked for before keeps its first request's time."""
        item = self._item(group)
        payload = self._environment.payload(item)
        sent = 0
        for index in indices:
            asked = group.asked.get(index)
            request = Request(
                run=self._run_name,
                policy=self._policy,
                epoch=self._epoch,
                nonce=self._nonce,
                group=group.name,
                group_size=group.group_size,
                index=index,
                attempt=attempt,
                partition=self.partition(group),
                task=self._table.task.environment,
                environment=self._table.task.environment,
                item=item,
                payload=payload,
                seed=derive_seed(self._settings.run.seed, self._policy, group.name, index),
                sampling=self._sampling,
                min_version=group.min_version,
                lifetime_ms=int(self._table.dispatch.lifetime_s * 1000),
                first_request_time_ms=asked.first_request_time_ms if asked else 0,
                worker=worker.name,
                session=worker.session,
            )
            self._writer.send(topic(self._run_name, self._policy, "requests"), worker.inbox, encode(request))
            worker.outstanding += 1
            sent += 1
        return sent

    def close(self, group: str, partition: int, reason: str) -> None:
        """Write a close record."""
        record = Close(
            run=self._run_name,
            policy=self._policy,
            epoch=self._epoch,
            nonce=self._nonce,
            group=group,
            partition=partition,
            reason=reason,
        )
        name = topic(self._run_name, self._policy, "trajectories")
        self._writer.send(name, partition, encode(record), key=group.encode())

    def flush(self) -> None:
        """Wait until everything stands on the log. Raises SendFailed, DeadlineExceeded."""
        self._writer.flush(_SEND_S)

    def close_writer(self) -> None:
        """Let go of the connection."""
        self._writer.close()

    def partition(self, group: Group) -> int:
        """The partition of its trajectories."""
        return group.number % self._settings.run.partitions

    def _item(self, group: Group) -> int:
        order_seed = derive_seed(self._settings.run.seed, self._policy, "order")
        return item_at(
            group.number,
            num_items=self._environment.num_items,
            seed=order_seed,
            shuffle=self._table.task.shuffle,
        )
