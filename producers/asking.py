"""What a dispatcher writes: requests into workers' inboxes, close records on trajectories, its claim on control."""

from __future__ import annotations

from collections.abc import Iterable

from infra.daemon import Daemon
from producers.curricula import make_curriculum
from producers.curriculum import Draw, History
from producers.environments import make_environment
from producers.groups import Group, Worker
from producers.splits import Split
from schemas.codec import encode
from schemas.errors import SettingError
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
        self._curriculum = make_curriculum(task.curriculum, task.curriculum_settings)
        self._order_seed = derive_seed(daemon.settings.run.seed, self._policy, "order")
        self._sampling = Sampling(**self._table.sampling.model_dump())
        self._epoch, self._nonce = 0, ""
        self._writer = daemon.log.writer()

    def owns(self, claim: Claim) -> None:
        """Write under this claim from now on, and say so on control. Raises SendFailed, DeadlineExceeded."""
        self._epoch, self._nonce = claim.epoch, claim.nonce
        key = f"claim/dispatch/{self._policy}".encode()
        self._writer.send(control_topic(self._run_name), 0, encode(claim), key=key).result(_SEND_S)

    def choose_item(self, number: int, history: History) -> int:
        """The item of a new group, chosen by its place among those that are not held out."""
        split = Split(self._environment.num_items, self._settings.run.seed, self._table.eval.share)
        num_items = split.num_training
        if num_items == 0:
            raise SettingError(f"eval.share is {split.share:g}: all {split.num_items} items of the task are held out")
        place = self._curriculum(Draw(number=number, num_items=num_items, seed=self._order_seed), split.seen(history))
        if place < 0 or (num_items is not None and place >= num_items):
            raise SettingError(
                f"curriculum {self._table.task.curriculum!r} chose item {place} for group {number}; "
                f"the task has items 0 to {'any number' if num_items is None else num_items - 1}"
            )
        return split.training(place)

    def ask(
        self, group: Group, indices: Iterable[int], attempt: int, worker: Worker, resume: tuple[int, ...] = ()
    ) -> int:
        """Ask a worker for members of a group; how many. A member asked for before keeps its first request's time."""
        payload = self._environment.payload(group.item)
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
                item=group.item,
                payload=payload,
                seed=derive_seed(self._settings.run.seed, self._policy, group.name, index),
                sampling=self._sampling,
                min_version=group.min_version,
                lifetime_ms=int(self._table.dispatch.lifetime_s * 1000),
                first_request_time_ms=asked.first_request_time_ms if asked else 0,
                worker=worker.name,
                session=worker.session,
                resume=resume,
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
