"""Bench `swap`: new weights under requests that run, on real vLLM and a tiny model, against finishing those first.

One engine, `RUNNING` requests at any time, each replaced when it is done. In every round two versions are swapped in, in
turns: in flight (load between two engine steps; what runs goes on), and by draining (nothing new begins, what runs is
finished, then the load, then what waited begins). The pause of a swap is the time from offering the weights until the
first token that they made.

`drain`: pause in flight over pause by draining, the median of the rounds' own; `lost`: requests that did not come back
exactly once and whole. Held against reading the same file into tensors.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

from safetensors.numpy import load_file

from bench.harness import Bench
from infra.settings import RolloutTable
from producers.engine import Engine, Generation, GenerationRequest
from producers.engines import make_engine
from schemas.records import Finish, Sampling, Version

ROUNDS = 7
RUNNING = 16
MAX_TOKENS = 256
STEPS_BETWEEN = 60
MOST = 0.2
ALPHABET = "".join(map(chr, range(32, 127)))


def run(bench: Bench) -> None:
    """On vLLM, with a model of random weights."""
    from trainers.new_model import create

    with tempfile.TemporaryDirectory(prefix="offsetrl-swap-") as name:
        folders = [Path(name) / str(seed) for seed in (0, 1)]
        for seed, folder in enumerate(folders):
            create(folder, alphabet=ALPHABET, hidden=64, heads=2, max_positions=2 * MAX_TOKENS, seed=seed)
        table = RolloutTable(engine="vllm", concurrency=RUNNING, max_model_len=2 * MAX_TOKENS)
        engine = make_engine("vllm", folder=folders[0], version=Version(1, 0), table=table)
        try:
            compare(bench, engine, folders, ROUNDS)
        finally:
            engine.close()


def compare(bench: Bench, engine: Engine, folders: list[Path], rounds: int) -> None:
    """Swap the weights in `folders` in turns, in both ways, under a load that never stops."""
    load = Load(engine)
    flying: list[float] = []
    draining: list[float] = []
    load.steps(STEPS_BETWEEN)
    for number in range(rounds):
        for turn in (number, number + 1):  # another one first in each round
            version = Version(1, engine.version.version + 1)
            folder = folders[version.version % len(folders)]
            if turn % 2:
                draining.append(load.drain_and_swap(folder, version))
            else:
                flying.append(load.swap_in_flight(folder, version))
            load.steps(STEPS_BETWEEN)
    load.finish()
    for name, pauses in (("in flight", flying), ("drained first", draining)):
        bench.note(
            f"{name:<14} pause {1e3 * statistics.median(pauses):8.1f} ms  from {1e3 * min(pauses):.1f} to "
            f"{1e3 * max(pauses):.1f}  over {len(pauses)} swaps"
        )
    bench.note(
        f"{len(load.submitted)} requests, {load.tokens} tokens; {load.over_a_swap} requests ran over a swap and carry "
        f"both versions; a step {1e3 * statistics.median(load.steps_s):.1f} ms"
    )
    bench.check("drain", statistics.median(a / b for a, b in zip(flying, draining, strict=True)), MOST, "lower")
    bench.check("lost", load.lost, 0, "lower")
    started = time.perf_counter()
    load_file(folders[0] / "model.safetensors")
    bench.hold_against("reading the file into tensors", 1e3 * (time.perf_counter() - started), "ms")


class Load:
    """Keeps `RUNNING` requests on an engine and an account of them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.submitted: list[str] = []
        self.steps_s: list[float] = []
        self.tokens = self.over_a_swap = 0
        self._returned: Counter[str] = Counter()
        self._broken = 0

    def steps(self, count: int) -> None:
        """So many steps under full load."""
        for _ in range(count):
            self._top_up()
            started = time.perf_counter()
            self._step()
            self.steps_s.append(time.perf_counter() - started)

    def swap_in_flight(self, folder: Path, version: Version) -> float:
        """Seconds until the first token of `version`; what runs goes on."""
        self._top_up()
        started = time.perf_counter()
        self._engine.load(folder, version)
        self._step_to(version)
        return time.perf_counter() - started

    def drain_and_swap(self, folder: Path, version: Version) -> float:
        """The same, after everything that runs is finished."""
        self._top_up()
        started = time.perf_counter()
        while self._engine.num_running:
            self._step()
        self._engine.load(folder, version)
        self._top_up()
        self._step_to(version)
        return time.perf_counter() - started

    def finish(self) -> None:
        """Let everything come back."""
        while self._engine.num_running:
            self._step()

    @property
    def lost(self) -> int:
        """Requests that came back never, twice, or not whole."""
        return sum(self._returned[name] != 1 for name in self.submitted) + self._broken

    def _top_up(self) -> None:
        while self._engine.num_running < RUNNING:
            number = len(self.submitted)
            self.submitted.append(str(number))
            prompt = tuple(2 + (number * 7 + place) % len(ALPHABET) for place in range(8))
            sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=MAX_TOKENS)
            self._engine.submit(GenerationRequest(id=str(number), prompt=prompt, sampling=sampling, seed=number))

    def _step(self) -> list[Generation]:
        done = self._engine.step()
        for generation in done:
            self._returned[generation.id] += 1
            self.tokens += len(generation.tokens)
            self.over_a_swap += len(generation.versions) > 1
            counted = sum(run.count for run in generation.versions)
            whole = len(generation.tokens) == len(generation.logprobs) == counted > 0
            self._broken += not whole or generation.finish not in (Finish.STOP, Finish.LENGTH)
        return done

    def _step_to(self, version: Version) -> None:
        """Steps until some request holds a token of these weights."""
        while True:
            given = [*self._step(), *(self._engine.progress(name) for name in self.submitted[-2 * RUNNING :])]
            if any(one is not None and one.versions and one.versions[-1][:2] == version for one in given):
                return
