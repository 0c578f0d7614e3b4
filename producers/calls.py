"""Calls into environments, each away from the engine's thread: in a thread of its own, or on an event loop if they are async.

What does not come back in time is given up: its thread is left behind (a loop in Python is interrupted, a wait in a
library cannot be) and another takes its place. How many are left behind is counted, for they hold memory and sockets.

Limit: threads share one interpreter. A call that keeps it to itself, such as a regular expression that backtracks
without end, stops the whole worker; such graders belong into a process of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from schemas.errors import DependencyError

_QUICK_S = 0.001
_LOOP_ANSWERS_S = 1.0
Job = Callable[[], Coroutine[Any, Any, Any]]
"""Makes the coroutine where it will run, so that none is left lying about that never did."""


class _Done(NamedTuple):
    """What came of a call: its result, or what it raised."""

    key: str
    number: int
    result: Any
    took_s: float


class _GivenUp(BaseException):
    """Thrown into a thread whose call nobody waits for any longer."""


class _Thread:
    """A daemon thread that takes one call after the other; it may hang without holding up the process's end."""

    def __init__(self, done: SimpleQueue[_Done]) -> None:
        self._done = done
        self._jobs: SimpleQueue[tuple[str, int, Job] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def start(self, key: str, number: int, job: Job) -> None:
        self._jobs.put((key, number, job))

    def stop(self) -> None:
        """End once its call is over."""
        self._jobs.put(None)

    def interrupt(self) -> None:
        """End its call at the next line of Python, if there is one, and itself."""
        self.stop()
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(_GivenUp))

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (found := self._jobs.get()) is not None:
                key, number, job = found
                started = time.monotonic()
                self._done.put(_Done(key, number, _drive(job), time.monotonic() - started))
        except _GivenUp:
            pass


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self, done: SimpleQueue[_Done]) -> None:
        self._done = done
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Touched in the loop's own thread alone."""
        self._asked_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="environment-loop", daemon=True)
        self._thread.start()

    def start(self, key: str, number: int, job: Job) -> None:
        self._loop.call_soon_threadsafe(self._begin, key, number, job)

    def cancel(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._cancel, number)

    def is_stuck(self) -> bool:
        """Whether it did not come round for a while: somebody blocks it. Asks it once more if it did."""
        if self._asked_s is not None:
            return time.monotonic() - self._asked_s > _LOOP_ANSWERS_S
        self._asked_s = time.monotonic()
        self._loop.call_soon_threadsafe(self._answer)
        return False

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._cancel_all())
        finally:
            self._loop.close()

    def _answer(self) -> None:
        self._asked_s = None

    def _begin(self, key: str, number: int, job: Job) -> None:
        task = self._loop.create_task(self._take(key, number, job))
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number, None))

    def _cancel(self, number: int) -> None:
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    async def _cancel_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, key: str, number: int, job: Job) -> None:
        started = time.monotonic()
        try:
            result = await job()
        except Exception as error:  # noqa: BLE001  # whoever takes the result sees it
            result = error
        self._done.put(_Done(key, number, result, time.monotonic() - started))


class Calls:
    """Starts calls under a key, at most one for each at a time, and collects their results. Belongs to one thread."""

    def __init__(self) -> None:
        self._done: SimpleQueue[_Done] = SimpleQueue()
        self._idle: list[_Thread] = []
        self._running: dict[str, tuple[int, _Thread | _Loop]] = {}
        self._ready: list[tuple[str, Any]] = []
        self._left: list[_Thread | _Loop] = []
        self._loop: _Loop | None = None
        self._number = 0
        self._typical_s = 0.0

    @property
    def num_running(self) -> int:
        """Calls whose results are still wanted."""
        return len(self._running)

    @property
    def num_stuck(self) -> int:
        """Threads that were left behind and have not come back since."""
        self._left = [one for one in self._left if one.is_alive]
        return len(self._left)

    def start(self, key: str, job: Job, *, on_loop: bool = False) -> None:
        """Begin a call. A job that does not run on the loop may await nothing that really waits."""
        assert key not in self._running, key
        self._number += 1
        runner: _Thread | _Loop
        if on_loop:
            runner = self._loop = self._loop or _Loop(self._done)
        else:
            runner = self._idle.pop() if self._idle else _Thread(self._done)
        self._running[key] = (self._number, runner)
        runner.start(key, self._number, job)

    def finished(self) -> list[tuple[str, Any]]:
        """(key, result) of each call that came back since; a result may be an exception that it raised."""
        while self._collect(0.0):
            pass
        found, self._ready = self._ready, []
        return found

    def wait(self, timeout_s: float) -> None:
        """Return as soon as a call comes back."""
        if self._running and not self._ready:
            self._collect(timeout_s)

    def settle(self) -> None:
        """Give calls a moment to come back, where they usually need no more than that."""
        deadline = time.monotonic() + _QUICK_S
        while self._running and self._typical_s < _QUICK_S and (left_s := deadline - time.monotonic()) > 0:
            self._collect(left_s)

    def give_up(self, key: str) -> None:
        """Nobody waits for this call any longer; unknown keys do not matter."""
        number, runner = self._running.pop(key, (0, None))
        if isinstance(runner, _Thread):
            runner.interrupt()
            self._left.append(runner)
        elif isinstance(runner, _Loop):
            runner.cancel(number)
            if runner.is_stuck() and runner is self._loop:
                runner.stop()
                self._left.append(runner)
                self._loop = None

    def close(self) -> None:
        """Let go of what is idle; what runs ends with the process."""
        for thread in self._idle:
            thread.stop()
        if self._loop is not None:
            self._loop.stop()
        self._idle, self._running, self._loop = [], {}, None

    def _collect(self, timeout_s: float) -> bool:
        try:
            done = self._done.get(timeout=timeout_s) if timeout_s > 0 else self._done.get_nowait()
        except Empty:
            return False
        number, runner = self._running.get(done.key, (0, None))
        if number == done.number:
            del self._running[done.key]
            self._typical_s += 0.1 * (done.took_s - self._typical_s)
            self._ready.append((done.key, done.result))
            if isinstance(runner, _Thread):
                self._idle.append(runner)
        return True


def stuck_error(num_stuck: int, max_stuck: int, environment: str, who: str) -> DependencyError:
    """The error of a process that ends since more calls than allowed never came back."""
    return DependencyError(
        f"{num_stuck} calls into the environment {environment!r} never came back, of {max_stuck} allowed "
        f"(rollout.max_stuck_calls): this {who} ends, to be started afresh; give tools and reward functions time limits "
        "of their own"
    )


def _drive(job: Job) -> Any:
    """Run a coroutine that never really waits."""
    try:
        coroutine = job()
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    except BaseException as error:  # noqa: BLE001  # also SystemExit of foreign code, which would end the thread unheard
        return error
    coroutine.close()
    return TypeError("awaited something outside an event loop: declare the method with `async def`")
