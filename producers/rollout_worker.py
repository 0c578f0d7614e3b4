"""DAEMON `offsetrl rollout`: runs many episodes at once on an inference engine and publishes each as a trajectory.

| consumes | its inbox (a fresh session per start), weights, control once at start, partials that a request names |
| produces | trajectories; partials: chunks of what is not finished; heartbeats that say where its inbox is |
| waits for | the first weights; requests |
| after a crash | starts as a new session; the dispatcher asks others, or the new session, for what was not published |

New weights are fetched and verified in the background and swapped in between two engine steps; running episodes go on.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter, deque
from typing import NamedTuple

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.weights.follower import FetchedWeights, Follower
from producers.calls import Calls, stuck_error
from producers.engine import Engine
from producers.engines import make_engine, warm_up
from producers.environments import make_environment
from producers.episode import WorkerInfo
from producers.episode_runner import EpisodeRunner
from producers.inbox import Inbox, find_inbox
from producers.outbox import Outbox
from producers.prompting import make_prompts
from producers.take_over import TakeOver
from producers.tokenizer import Tokenizer
from schemas.codec import encode
from schemas.errors import EngineError, RecordError
from schemas.names import topic
from schemas.records import Partial, Request, State, Trajectory, Version
from schemas.validate import check_partial, check_request, check_trajectory

_FIRST_WEIGHTS_S = 300.0
_DRAIN_S = 15.0
_RATE_OVER_S = 2.0
_LOG = structlog.get_logger("offsetrl.rollout")


def run(daemon: Daemon) -> int:
    """Serve until told to stop. An engine that fails ends the process: its state can no longer be trusted."""
    heart = Heart(daemon, "rollout")
    heart.beat(State.STARTING)
    root = daemon.settings.run.folder / daemon.settings.run.name / daemon.policy / "weights" / daemon.name
    follower = Follower(daemon.log, daemon.store, daemon.settings.run.name, daemon.policy, root, poll_s=0.2)
    try:
        warm_up(daemon.table.rollout.engine)  # imports while the first weights are on their way
        first = follower.wait_first(_FIRST_WEIGHTS_S, daemon.stop)
        inbox = find_inbox(daemon, heart.session) if first is not None else None
        if first is not None and inbox is not None:
            worker = RolloutWorker(daemon, heart, follower, first, inbox)
            try:
                while not daemon.stop.requested and not worker.is_stuck:
                    worker.turn()
                worker.hand_over()
            except EngineError:
                worker.leave()
                raise
            finally:
                worker.close()
    finally:
        follower.close()
        heart.close()
    return 0


class _Waiting(NamedTuple):
    """A request that was read and not begun."""

    request: Request
    time_ms: int
    read_s: float


class RolloutWorker:
    """One session: an engine, an inbox, the episodes running."""

    def __init__(self, daemon: Daemon, heart: Heart, follower: Follower, first: FetchedWeights, inbox: Inbox) -> None:
        self._daemon, self._heart, self._follower = daemon, heart, follower
        self._table = daemon.table.rollout
        settings, task = daemon.settings, daemon.table.task
        self._run_name, self._policy = settings.run.name, daemon.policy
        codec = Tokenizer(first.folder)
        self._engine: Engine = make_engine(
            self._table.engine, folder=first.folder, version=first.version, table=self._table
        )
        self._info = WorkerInfo(
            name=daemon.name,
            session=heart.session,
            region=daemon.region,
            model=first.digest,
            tokenizer=codec.digest,
            max_model_len=self._table.max_model_len,
        )
        self._take_over = TakeOver(
            daemon.log,
            run=self._run_name,
            policy=self._policy,
            max_tokens=settings.kafka.max_tokens,
            timeout_s=self._table.resume_timeout_s,
        )
        self._calls = Calls()
        self._episodes = EpisodeRunner(
            engine=self._engine,
            environment=make_environment(task.environment, task.settings, settings.run.seed),
            codec=codec,
            make_prompts=functools.partial(make_prompts, codec, self._table.chat, self._table.system_prompt),
            calls=self._calls,
            table=self._table,
            clock=lambda: time.monotonic(),
            read_past=self._take_over.read,
        )
        self._outbox = Outbox(daemon.log, window_bytes=settings.kafka.buffer_bytes // 4)
        self._chunks = Outbox(daemon.log, window_bytes=settings.kafka.buffer_bytes // 4)
        self._waiting: deque[_Waiting] = deque()
        self._inbox = inbox
        self._rate: deque[tuple[float, int]] = deque()
        self._offered: tuple[Version, str] | None = None
        self._counts: Counter[str] = Counter()
        self._swap_s = 0.0
        _LOG.info("serving", engine=self._table.engine, version=str(self._engine.version), inbox=inbox.number)

    def turn(self) -> None:
        """What one engine step takes with it."""
        self._take_requests()
        self._start_ready()
        self._episodes.step(cut_chunks=len(self._chunks) <= 4 * self._table.concurrency)
        self._publish()
        self._swap()
        self._beat(State.SERVING)

    def close(self) -> None:
        """Let go of everything."""
        self._inbox.close()
        self._outbox.close()
        self._chunks.close()
        self._calls.close()
        self._take_over.close()
        self._engine.close()

    # Requests ------------------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        # Idle also while requests only wait for newer weights: the loop must not spin.
        for request, time_ms in self._inbox.take(idle=not len(self._episodes)):
            if self._has(request.id):
                self._counts["repeated_requests"] += 1
            elif self._is_sound(request):
                self._waiting.append(_Waiting(request, time_ms, time.monotonic()))

    def _has(self, name: str) -> bool:
        """Whether this attempt waits or runs here already: two dispatchers may ask for it one after the other."""
        return name in self._episodes or any(entry.request.id == name for entry in self._waiting)

    def _is_sound(self, request: Request) -> bool:
        try:
            check_request(
                request, run=self._run_name, policy=self._policy, partitions=self._daemon.settings.run.partitions
            )
        except RecordError as error:
            self._counts["refused_requests"] += 1
            _LOG.error("refused: the request is not sound", request=request.id, error=str(error))
            return False
        return True

    def _start_ready(self) -> None:
        """Start what the weights are new enough for, while there is room here and the log takes what is finished."""
        held: deque[_Waiting] = deque()
        now = time.monotonic()
        while self._waiting and len(self._episodes) < self._table.concurrency:
            if len(self._outbox) > 4 * self._table.concurrency:
                break
            entry = self._waiting.popleft()
            if now - entry.read_s > entry.request.lifetime_ms / 1000:
                self._counts["expired_requests"] += 1  # what came of it would be late
            elif entry.request.min_version > self._engine.version.version:
                held.append(entry)
            else:
                self._episodes.start(entry.request, entry.time_ms, self._info)
        held.extend(self._waiting)
        self._waiting = held

    # The log -------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Put what is finished, and chunks of what is not, on their way; forget what is acknowledged."""
        for trajectory in self._episodes.finished:
            self._put(self._outbox, "trajectories", trajectory)
        for chunk in self._episodes.chunks:
            self._put(self._chunks, "partials", chunk)
        self._episodes.finished, self._episodes.chunks = [], []
        self._outbox.settle()
        self._chunks.settle()

    def _put(self, outbox: Outbox, kind: str, record: Trajectory | Partial) -> None:
        check = check_trajectory if isinstance(record, Trajectory) else check_partial
        try:
            check(
                record,  # type: ignore[arg-type]  # each check takes what it was chosen for
                run=self._run_name,
                policy=self._policy,
                partition=record.partition,
                max_tokens=self._daemon.settings.kafka.max_tokens,
            )
            value = encode(record)
        except RecordError as error:
            self._counts["unpublishable"] += 1
            _LOG.error("not published: the record is not sound", kind=kind, attempt=record.id, error=str(error))
            return
        outbox.put(topic(self._run_name, self._policy, kind), record.partition, value, record.group.encode(), record.id)

    def _swap(self) -> None:
        """Load newer weights, if they lie ready: between two engine steps, while running episodes wait."""
        if self._table.pickup and (fetched := self._follower.take()) is not None:
            started = time.monotonic()
            self._engine.load(fetched.folder, fetched.version)
            self._offered = fetched.version, fetched.digest
            self._swap_s = time.monotonic() - started
            self._counts["swaps"] += 1
            _LOG.debug("swapped", version=str(fetched.version), running=len(self._episodes), seconds=self._swap_s)
        if self._offered is not None and self._offered[0] == self._engine.version:  # at once, or once nothing runs
            self._info = dataclasses.replace(self._info, model=self._offered[1])
            self._offered = None

    @property
    def is_stuck(self) -> bool:
        """Whether so many calls into environments never came back that a fresh process is better."""
        return self._calls.num_stuck > self._table.max_stuck_calls

    def hand_over(self) -> None:
        """Finish what runs, within a limit; publish it and the last chunk of what is not finished, for others to go on with.

        Raises DependencyError where calls into environments that never came back are why it ends.
        """
        self._waiting.clear()
        self._beat(State.DRAINING)
        deadline = time.monotonic() + self._table.drain_s
        while len(self._episodes) and time.monotonic() < deadline:
            self._episodes.step()
            self._publish()
        self.leave()
        if self.is_stuck:
            environment = self._daemon.table.task.environment
            raise stuck_error(self._calls.num_stuck, self._table.max_stuck_calls, environment, "worker")

    def leave(self) -> None:
        """Publish what is finished and, for others to go on with, what is not; also when the engine has failed."""
        unfinished = len(self._episodes)
        self._episodes.leave()
        self._publish()
        done = self._outbox.drain(_DRAIN_S) and self._chunks.drain(_DRAIN_S)
        left = len(self._outbox) + len(self._chunks)
        _LOG.info("left", handed_over=unfinished, unacknowledged=0 if done else left)

    @property
    def version(self) -> Version:
        """The weights in use."""
        return self._engine.version

    def _beat(self, state: State) -> None:
        now = time.monotonic()
        self._rate.append((now, self._episodes.num_sampled))
        while now - self._rate[0][0] > _RATE_OVER_S:
            self._rate.popleft()
        self._heart.beat(
            state=state,
            inbox=self._inbox.number,
            capacity=self._table.concurrency,
            running=len(self._episodes),
            epoch=self._engine.version.epoch,
            version=self._engine.version.version,
            metrics={
                "tokens_per_s": (self._episodes.num_sampled - self._rate[0][1]) / _RATE_OVER_S,
                "waiting_requests": float(len(self._waiting)),
                "unacknowledged": float(len(self._outbox)),
                "published": float(self._outbox.acknowledged),
                "partials": float(self._chunks.acknowledged),
                "stuck_calls": float(self._calls.num_stuck),
                "swap_s": self._swap_s,
                "void_requests": float(self._inbox.num_void),
                **{name: float(count) for name, count in (self._counts + self._episodes.counts).items()},
            },
            labels={
                "engine": self._table.engine,
                "tags": ",".join(self._table.tags),
                "weights_error": self._follower.error[:200],
            },
        )
