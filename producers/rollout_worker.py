"""DAEMON `offsetrl rollout`: runs many episodes at once on an inference engine and publishes each as a trajectory.

| consumes | its inbox (a fresh session per start), weights, control once at start |
| produces | trajectories; heartbeats that say where its inbox is |
| waits for | the first weights; requests |
| after a crash | starts as a new session; the dispatcher asks others, or the new session, for what was not published |

New weights are fetched and verified in the background and swapped in between two engine steps; running episodes go on.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from typing import NamedTuple

import structlog

from infra.daemon import Daemon
from infra.heartbeat import Heart
from infra.weights.follower import FetchedWeights, Follower
from producers.engine import Engine, GenerationRequest
from producers.engines import make_engine, warm_up
from producers.environment import Observation, Session, Verdict
from producers.environments import make_environment
from producers.episode import Episode, WorkerInfo
from producers.inbox import Inbox, find_inbox
from producers.outbox import Outbox
from producers.tokenizer import Tokenizer
from schemas.codec import encode
from schemas.errors import RecordError
from schemas.names import topic
from schemas.records import Request, State, Status, Trajectory, Version
from schemas.validate import check_trajectory

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
                while not daemon.stop.requested:
                    worker.turn()
                worker.hand_over()
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


class _Broken:
    """The session of an environment that could not be opened: the episode ends with its error, without a reward."""

    done = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    def observe(self) -> Observation:
        """Raise what opening raised."""
        raise self._error

    def act(self, text: str, truncated: bool) -> None:
        """Never asked."""

    def verdict(self) -> Verdict:
        """Never asked."""
        raise self._error


@dataclasses.dataclass(slots=True)
class _Running:
    """An episode on the engine."""

    episode: Episode
    generation: str
    started_s: float


class RolloutWorker:
    """One session: an engine, an inbox, the episodes running."""

    def __init__(self, daemon: Daemon, heart: Heart, follower: Follower, first: FetchedWeights, inbox: Inbox) -> None:
        self._daemon, self._heart, self._follower = daemon, heart, follower
        self._table = daemon.table.rollout
        settings, task = daemon.settings, daemon.table.task
        self._run_name, self._policy = settings.run.name, daemon.policy
        self._environment = make_environment(task.environment, task.settings, settings.run.seed)
        self._codec = Tokenizer(first.folder)
        self._engine: Engine = make_engine(
            self._table.engine, folder=first.folder, version=first.version, table=self._table
        )
        self._info = WorkerInfo(
            name=daemon.name,
            session=heart.session,
            region=daemon.region,
            model=first.digest,
            tokenizer=self._codec.digest,
            max_model_len=self._table.max_model_len,
        )
        self._trajectories = topic(self._run_name, self._policy, "trajectories")
        self._outbox = Outbox(daemon.log, window_bytes=settings.kafka.buffer_bytes // 4)
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[str, _Running] = {}
        self._inbox = inbox
        self._tokens: deque[tuple[float, int]] = deque()
        self._counts: Counter[str] = Counter()
        self._swap_s = 0.0
        _LOG.info("serving", engine=self._table.engine, version=str(self._engine.version), inbox=inbox.number)

    def turn(self) -> None:
        """What one engine step takes with it."""
        self._take_requests()
        self._start_ready()
        self._advance()
        self._outbox.settle()
        self._swap()
        self._beat(State.SERVING)

    def close(self) -> None:
        """Let go of everything."""
        self._inbox.close()
        self._outbox.close()
        self._engine.close()

    # Requests ------------------------------------------------------------------------------------------------------

    def _take_requests(self) -> None:
        # Idle also while requests only wait for newer weights: the loop must not spin.
        for request, time_ms in self._inbox.take(idle=not self._running):
            if self._has(request.id):
                self._counts["repeated_requests"] += 1
            else:
                self._waiting.append(_Waiting(request, time_ms, time.monotonic()))

    def _has(self, name: str) -> bool:
        """Whether this attempt waits or runs here already: two dispatchers may ask for it one after the other."""
        running = any(entry.episode.request.id == name for entry in self._running.values())
        return running or any(entry.request.id == name for entry in self._waiting)

    def _start_ready(self) -> None:
        """Start what the weights are new enough for, while there is room here and the log takes what is finished."""
        held: deque[_Waiting] = deque()
        now = time.monotonic()
        while self._waiting and len(self._running) < self._table.concurrency:
            if len(self._outbox) > 4 * self._table.concurrency:
                break
            entry = self._waiting.popleft()
            if now - entry.read_s > entry.request.lifetime_ms / 1000:
                self._counts["expired_requests"] += 1  # what came of it would be late
            elif entry.request.min_version > self._engine.version.version:
                held.append(entry)
            else:
                self._start(entry.request, entry.time_ms)
        held.extend(self._waiting)
        self._waiting = held

    def _start(self, request: Request, time_ms: int) -> None:
        session: Session
        try:
            session = self._environment.open(request.item, request.payload, request.seed)
        except Exception as error:  # noqa: BLE001  # the edge to the environment: one bad item must not end the worker
            session = _Broken(error)
        episode = Episode(request, request_time_ms=time_ms, session=session, codec=self._codec, worker=self._info)
        self._go_on(episode, episode.start(), time.monotonic())

    def _go_on(self, episode: Episode, wanted: GenerationRequest | Trajectory, started_s: float) -> None:
        if isinstance(wanted, Trajectory):
            self._publish(wanted, started_s)
            return
        try:
            self._engine.submit(wanted)
        except ValueError as error:
            self._publish(episode.abandon(Status.ENV_ERROR, f"prompt: {error}"), started_s)
            return
        self._running[wanted.id] = _Running(episode, wanted.id, started_s)

    def _advance(self) -> None:
        """One engine step; what finished goes on with its next turn or is published."""
        if not self._running:
            return
        now = time.monotonic()
        for generation in self._engine.step():
            running = self._running.pop(generation.id, None)
            if running is None:
                continue
            self._tokens.append((now, len(generation.tokens)))
            wanted = running.episode.advance(generation)
            self._go_on(running.episode, wanted, running.started_s)
        overdue = [r for r in self._running.values() if now - r.started_s > self._table.episode_timeout_s]
        for running in overdue:
            self._engine.cancel(running.generation)
            del self._running[running.generation]
            limit = self._table.episode_timeout_s
            self._publish(
                running.episode.abandon(Status.TIMEOUT, f"episode took longer than {limit:g} s"), running.started_s
            )

    def _publish(self, trajectory: Trajectory, started_s: float) -> None:
        trajectory = dataclasses.replace(trajectory, timings={"episode_s": time.monotonic() - started_s})
        try:
            check_trajectory(
                trajectory,
                run=self._run_name,
                policy=self._policy,
                partition=trajectory.partition,
                max_tokens=self._daemon.settings.kafka.max_tokens,
            )
            value = encode(trajectory)
        except RecordError as error:
            self._counts["unpublishable"] += 1
            _LOG.error("not published: the record is not sound", trajectory=trajectory.id, error=str(error))
            return
        self._counts[trajectory.status.value] += 1
        self._outbox.put(self._trajectories, trajectory.partition, value, trajectory.group.encode())

    # Weights -------------------------------------------------------------------------------------------------------

    def _swap(self) -> None:
        """Load newer weights, if they lie ready: between two engine steps, while running episodes wait."""
        if not self._table.pickup or (fetched := self._follower.take()) is None:
            return
        started = time.monotonic()
        self._engine.load(fetched.folder, fetched.version)
        self._info = dataclasses.replace(self._info, model=fetched.digest)
        self._swap_s = time.monotonic() - started
        self._counts["swaps"] += 1
        _LOG.debug("swapped", version=str(fetched.version), running=len(self._running), seconds=round(self._swap_s, 3))

    # Ending --------------------------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Finish what runs, within a limit, and publish it; what is not begun or not finished is asked of others."""
        self._waiting.clear()
        self._beat(State.DRAINING)
        deadline = time.monotonic() + _DRAIN_S
        while self._running and time.monotonic() < deadline:
            self._advance()
            self._outbox.settle()
        done = self._outbox.drain(_DRAIN_S)
        _LOG.info("left", unfinished=len(self._running), unacknowledged=0 if done else len(self._outbox))

    @property
    def version(self) -> Version:
        """The weights in use."""
        return self._engine.version

    def _beat(self, state: State) -> None:
        now = time.monotonic()
        while self._tokens and now - self._tokens[0][0] > _RATE_OVER_S:
            self._tokens.popleft()
        self._heart.beat(
            state=state,
            inbox=self._inbox.number,
            capacity=self._table.concurrency,
            running=len(self._running),
            epoch=self._engine.version.epoch,
            version=self._engine.version.version,
            metrics={
                "tokens_per_s": sum(count for _, count in self._tokens) / _RATE_OVER_S,
                "waiting_requests": float(len(self._waiting)),
                "unacknowledged": float(len(self._outbox)),
                "published": float(self._outbox.acknowledged),
                "swap_s": self._swap_s,
                "void_requests": float(self._inbox.num_void),
                **{name: float(count) for name, count in self._counts.items()},
            },
            labels={"engine": self._table.engine, "weights_error": self._follower.error[:200]},
        )
