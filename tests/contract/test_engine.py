"""What every engine promises (`producers.engine`): one suite for the scripted, the transformers and the vLLM engine.

Engines with weights are held against transformers' log-probs on the same files, before and after weights are swapped.
vLLM starts once per kind of model; a test leaves its engine idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from infra.settings import RolloutTable
from producers.engine import Engine, Generation, GenerationRequest
from producers.engines import make_engine
from schemas.errors import EngineError
from schemas.records import Finish, Sampling, Version, VersionRun
from support.models import POSITIONS, all_logprobs, logprobs_over_a_swap, model_folder, token_logprobs

EOS, VOCAB = 1, 26
TOLERANCE = 1e-3


class Bench:
    """An engine under test and the weights it holds; a new one is started when a test has broken the last."""

    def __init__(self, name: str, tie: bool) -> None:
        self.name, self.tie = name, tie
        self.seed = 0
        self._count = 0
        self._broken = True
        self._engine: Engine | None = None

    @property
    def folder(self) -> Path:
        return model_folder(self.seed, tie=self.tie)

    @property
    def engine(self) -> Any:
        if self._broken:
            self.close()
            table = RolloutTable(max_model_len=POSITIONS, concurrency=64)
            self._engine = make_engine(self.name, folder=self.folder, version=Version(1, self._count), table=table)
            self._broken = False
        return self._engine

    def swap(self, seed: int) -> Version:
        """Load the weights of another seed as the next version."""
        self._count += 1
        self.seed = seed
        self.engine.load(self.folder, Version(1, self._count))
        return Version(1, self._count)

    def spoil(self) -> None:
        self._broken = True

    def submit(self, id: str, prompt: Sequence[int], *, seed: int = 0, **sampling: Any) -> None:
        chosen = Sampling(**{"max_tokens": 12, **sampling})
        self.engine.submit(GenerationRequest(id=id, prompt=tuple(prompt), sampling=chosen, seed=seed))

    def drain(self) -> dict[str, Generation]:
        found: dict[str, Generation] = {}
        for _ in range(10_000):
            if not self.engine.num_running:
                return found
            found.update({generation.id: generation for generation in self.engine.step()})
        raise AssertionError(f"{self.engine.num_running} requests never finished")

    def one(self, prompt: Sequence[int], **options: Any) -> Generation:
        self.submit("one", prompt, **options)
        return self.drain()["one"]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


KINDS = [("scripted", True), ("transformers", True), ("transformers", False), ("vllm", True), ("vllm", False)]


def marks_of(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name == "scripted" else (pytest.mark.model,)


CASES = [
    pytest.param((name, tie), id=f"{name}-{'tied' if tie else 'untied'}", marks=marks_of(name)) for name, tie in KINDS
]


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(*request.param)
    yield bench
    bench.close()


every_engine = pytest.mark.parametrize("bench", CASES, indirect=True, scope="module")
with_weights = pytest.mark.parametrize("bench", CASES[1:], indirect=True, scope="module")


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Ids of digits, different for different starts."""
    return [2 + (start + 3 * place + place * place) % 10 for place in range(length)]


def run_of(version: Version, count: int) -> VersionRun:
    return VersionRun(version.epoch, version.version, count)


@every_engine
def test_generations_end_at_the_end_token_or_at_the_limit(bench: Bench) -> None:
    for index in range(100):
        bench.submit(str(index), prompt_of(5 + index % 7, index), seed=index, max_tokens=20)
    assert bench.engine.num_running == 100
    found = bench.drain()
    assert bench.engine.num_running == 0 and len(found) == 100
    for generation in found.values():
        assert 1 <= len(generation.tokens) <= 20
        assert len(generation.logprobs) == len(generation.tokens)
        assert generation.versions == (run_of(bench.engine.version, len(generation.tokens)),)
        assert not generation.old_kv
        assert EOS not in generation.tokens[:-1]
        if generation.finish == Finish.STOP:
            assert generation.tokens[-1] == EOS  # the model learns to stop only from a token it has sampled
        else:
            assert generation.finish == Finish.LENGTH
            assert len(generation.tokens) == 20 and generation.tokens[-1] != EOS
    assert Counter(generation.finish for generation in found.values()).keys() == {Finish.STOP, Finish.LENGTH}


@every_engine
def test_a_prompt_without_room_is_refused_at_once(bench: Bench) -> None:
    with pytest.raises(ValueError, match="no room"):
        bench.submit("long", prompt_of(POSITIONS))
    with pytest.raises(ValueError, match="empty"):
        bench.submit("empty", [])
    with pytest.raises(ValueError, match="prompt token"):
        bench.submit("strange", [2, VOCAB])
    assert bench.engine.num_running == 0
    last = bench.one(prompt_of(POSITIONS - 1), max_tokens=5)
    assert len(last.tokens) == 1
    assert last.finish == (Finish.STOP if last.tokens == (EOS,) else Finish.LENGTH)


@every_engine
def test_an_id_runs_once_at_a_time(bench: Bench) -> None:
    bench.submit("twin", prompt_of(4))
    with pytest.raises(ValueError, match="running already"):
        bench.submit("twin", prompt_of(4))
    bench.engine.step()
    if bench.engine.num_running:
        with pytest.raises(ValueError, match="running already"):
            bench.submit("twin", prompt_of(4))
    bench.drain()
    assert bench.one(prompt_of(4)) == bench.one(prompt_of(4))


@every_engine
def test_a_cancelled_request_is_never_returned(bench: Bench) -> None:
    alone, seed = bench.one(prompt_of(6, 1), seed=11, max_tokens=30), seed_of_several_tokens(bench)
    bench.submit("gone before its first step", prompt_of(6, 2), seed=3, max_tokens=30)
    bench.submit("gone while running", prompt_of(6, 3), seed=seed, max_tokens=30)
    bench.submit("one", prompt_of(6, 1), seed=11, max_tokens=30)
    bench.engine.cancel("gone before its first step")
    assert bench.engine.num_running == 2
    bench.engine.step()
    bench.engine.cancel("gone while running")
    bench.engine.cancel("never there")
    found = bench.drain()
    assert found.keys() == {"one"}
    assert found["one"].tokens == alone.tokens


def seed_of_several_tokens(bench: Bench) -> int:
    """A seed with which `prompt_of(6, 3)` is continued by at least three tokens."""
    return next(s for s in range(50) if len(bench.one(prompt_of(6, 3), seed=s, max_tokens=3).tokens) == 3)


@every_engine
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(bench: Bench) -> None:
    alone = {seed: bench.one(prompt_of(8), seed=seed) for seed in range(4)}
    for seed in range(4):
        bench.submit(f"again {seed}", prompt_of(8), seed=seed)
    for index in range(30):
        bench.submit(f"other {index}", prompt_of(3 + index, index), seed=index)
    found = bench.drain()
    for seed, generation in alone.items():
        assert found[f"again {seed}"].tokens == generation.tokens
        assert found[f"again {seed}"].logprobs == pytest.approx(generation.logprobs, abs=1e-4)
    assert len({generation.tokens for generation in alone.values()}) == 4


@every_engine
def test_seeds_that_differ_in_high_bits_alone_differ(bench: Bench) -> None:
    for index in range(8):
        bench.submit(str(index), prompt_of(8), seed=index << 40)
    assert len({generation.tokens for generation in bench.drain().values()}) == 8


@every_engine
def test_more_requests_than_run_at_once_wait(bench: Bench) -> None:
    for index in range(150):
        bench.submit(str(index), prompt_of(4, index), seed=index, max_tokens=2)
    bench.engine.step()
    assert bench.engine.num_running >= 150 - 64
    assert len(bench.drain()) <= 150
    assert bench.engine.num_running == 0


@every_engine
def test_a_running_request_carries_both_versions_over_a_swap(bench: Bench) -> None:
    seed = seed_of_several_tokens(bench)
    before = bench.engine.version
    bench.submit("across", prompt_of(6, 3), seed=seed, max_tokens=10)
    bench.submit("after", prompt_of(6, 3), seed=seed, max_tokens=10)
    bench.engine.cancel("after")
    for _ in range(2):
        assert bench.engine.step() == []
    after = bench.swap(1 - bench.seed)
    assert bench.engine.version == after > before
    bench.submit("after", prompt_of(6, 3), seed=seed, max_tokens=10)
    found = bench.drain()
    across = found["across"]
    assert across.versions == (run_of(before, 2), run_of(after, len(across.tokens) - 2))
    assert across.old_kv
    assert [run[:2] for run in found["after"].versions] == [after]
    assert not found["after"].old_kv


@with_weights
def test_logprobs_are_those_of_the_weights_before_and_after_a_swap(bench: Bench) -> None:
    """The guard against weights that an engine loads only in part."""
    for seed in (0, 1, 2, 0):
        bench.swap(seed)
        for index in range(6):
            temperature = (1.0, 0.7, 1.6)[index % 3]
            bench.submit(str(index), prompt_of(6 + index, index), seed=index, temperature=temperature)
        for id, generation in bench.drain().items():
            prompt = prompt_of(6 + int(id), int(id))
            temperature = (1.0, 0.7, 1.6)[int(id) % 3]
            wanted = token_logprobs(bench.folder, prompt, generation.tokens, temperature)
            assert generation.logprobs == pytest.approx(wanted, abs=TOLERANCE)
            others = token_logprobs(model_folder(seed + 1, tie=bench.tie), prompt, generation.tokens, temperature)
            assert deviation(generation, others) > 0.05, "these weights are too alike for the test to mean anything"


@with_weights
def test_tokens_after_a_swap_come_from_new_weights_over_old_keys(bench: Bench) -> None:
    prompt, seed = prompt_of(6, 3), seed_of_several_tokens(bench)
    old = bench.folder
    bench.submit("across", prompt, seed=seed, max_tokens=12)
    bench.engine.step()
    bench.engine.step()
    bench.swap(1 - bench.seed)
    across = bench.drain()["across"]
    assert across.logprobs == pytest.approx(
        logprobs_over_a_swap(old, bench.folder, prompt, across.tokens, 2), abs=TOLERANCE
    )
    clean = token_logprobs(bench.folder, prompt, across.tokens)
    assert len(across.tokens) == 2 or deviation(across, clean) > TOLERANCE


@with_weights
def test_keys_can_be_recomputed_after_a_swap(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.engine, "_recompute_kv", True)
    prompt, seed = prompt_of(6, 3), seed_of_several_tokens(bench)
    old = bench.folder
    bench.submit("across", prompt, seed=seed, max_tokens=12)
    bench.engine.step()
    bench.engine.step()
    bench.swap(1 - bench.seed)
    across = bench.drain()["across"]
    assert [run.count for run in across.versions] == [2, len(across.tokens) - 2]
    assert not across.old_kv
    wanted = [
        *token_logprobs(old, prompt, across.tokens[:2]),
        *token_logprobs(bench.folder, prompt, across.tokens)[2:],
    ]
    assert across.logprobs == pytest.approx(wanted, abs=TOLERANCE)


@with_weights
def test_a_prompt_seen_before_a_swap_is_read_anew_after_it(bench: Bench) -> None:
    """A prefix cache filled by older weights must not answer (prompts longer than one of its blocks)."""
    prompt = prompt_of(200)
    assert deviation_of_one(bench, prompt) < TOLERANCE
    assert deviation_of_one(bench, prompt) < TOLERANCE
    bench.swap(1 - bench.seed)
    assert deviation_of_one(bench, prompt) < TOLERANCE


@with_weights
@pytest.mark.parametrize("bend", [{"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_logprobs_are_of_the_truncated_distribution(bench: Bench, bend: dict[str, float]) -> None:
    prompt = prompt_of(7, 5)
    for index in range(6):
        bench.submit(str(index), prompt, seed=index, temperature=0.8, **bend)
    for generation in bench.drain().values():
        wanted = []
        for row, token in zip(
            all_logprobs(bench.folder, prompt, generation.tokens, 0.8).exp().tolist(), generation.tokens, strict=True
        ):
            kept = kept_tokens(row, bend)
            assert token in kept
            wanted.append(row[token] / sum(row[index] for index in kept))
        assert [2.718281828**logprob for logprob in generation.logprobs] == pytest.approx(wanted, abs=TOLERANCE)


def kept_tokens(probs: list[float], bend: dict[str, float]) -> set[int]:
    """Which tokens a truncation leaves, by its definition."""
    order = sorted(range(len(probs)), key=lambda index: -probs[index])
    if "top_k" in bend:
        return set(order[: int(bend["top_k"])])
    if "min_p" in bend:
        return {index for index in order if probs[index] >= bend["min_p"] * probs[order[0]]}
    kept: set[int] = set()
    mass = 0.0
    for index in order:
        if mass >= bend["top_p"]:
            break
        kept.add(index)
        mass += probs[index]
    return kept


@pytest.mark.model
@pytest.mark.parametrize("bench", [pytest.param(("vllm", True), id="vllm-tied")], indirect=True, scope="module")
def test_the_guards_would_catch_vllms_defects(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a repair taken out, the comparison with transformers fails: so the defects are there, and are caught."""
    from producers.engines import vllm_engine

    with monkeypatch.context() as planted:
        planted.setattr(vllm_engine, "_tie_again", lambda model: None)
        bench.swap(1 - bench.seed)
        assert deviation_of_one(bench, prompt_of(9, 7)) > 0.1
    bench.swap(1 - bench.seed)
    assert deviation_of_one(bench, prompt_of(9, 7)) < TOLERANCE

    with monkeypatch.context() as planted:
        planted.setattr(vllm_engine.VllmEngine, "_salt", lambda self: "always the same")
        assert deviation_of_one(bench, prompt_of(200)) < TOLERANCE
        bench.swap(1 - bench.seed)
        assert deviation_of_one(bench, prompt_of(200)) > 10 * TOLERANCE


def deviation_of_one(bench: Bench, prompt: Sequence[int]) -> float:
    """Greatest distance, in nats, of one fresh generation's log-probs from those of the weights in use."""
    generation = bench.one(prompt, seed=5)
    return deviation(generation, token_logprobs(bench.folder, prompt, generation.tokens))


def deviation(generation: Generation, wanted: Sequence[float]) -> float:
    return max(abs(got - want) for got, want in zip(generation.logprobs, wanted, strict=True))


def truncated(source: Path, target: Path) -> None:
    data = (source / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(data[: len(data) // 2])


def one_tensor_missing(source: Path, target: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, target / "model.safetensors")


def another_shape(source: Path, target: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, target / "model.safetensors")


def nothing_there(source: Path, target: Path) -> None:
    target.rmdir()


BREAKAGES = {
    "scripted": [nothing_there],
    "transformers": [nothing_there, truncated, one_tensor_missing, another_shape],
    "vllm": [truncated],  # it starts anew after each
}


@pytest.mark.parametrize(
    ("bench", "break_it"),
    [
        pytest.param(
            (name, tie), break_it, id=f"{name}-{'tied' if tie else 'untied'}-{break_it.__name__}", marks=marks_of(name)
        )
        for name, tie in KINDS
        for break_it in BREAKAGES[name]
    ],
    indirect=["bench"],
    scope="module",
)
def test_broken_weights_end_the_engine(bench: Bench, break_it: Callable[[Path, Path], None], tmp_path: Path) -> None:
    target = tmp_path / "broken"
    target.mkdir()
    break_it(bench.folder, target)
    engine = bench.engine
    bench.spoil()
    with pytest.raises(EngineError, match="could not be loaded"):
        engine.load(target, Version(9, 9))
    with pytest.raises(EngineError, match="must not be used"):
        engine.step()
    with pytest.raises(EngineError, match="must not be used"):
        engine.load(model_folder(0, tie=bench.tie), Version(9, 10))
    assert engine.version != Version(9, 9)
