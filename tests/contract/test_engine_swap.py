"""What every engine promises when its weights are swapped (`producers.engine_parts.swap`): which version made which token,
over which keys and values, and what becomes of requests that run, wait, or come meanwhile.

Engines with weights are held against transformers' log-probs on the old and on the new files.
"""

from __future__ import annotations

import pytest

from producers.engine import Generation
from support.engine_bench import (
    TOLERANCE,
    Bench,
    deviation,
    deviation_of_one,
    engine,
    every_engine,
    every_mode,
    prompt_of,
    run_of,
    seed_of_tokens,
    with_weights,
)
from support.models import logprobs_over_a_swap, token_logprobs

NUM_ACROSS = 4


def start_across(bench: Bench, num: int = NUM_ACROSS) -> None:
    """Start requests with prompts of their own, and give them 3, 2, 2 and 1 tokens and more to come."""
    seeds = [seed_of_tokens(bench, 6, start) for start in range(num)]
    for index, steps in zip(range(num), (1, 0, 1, 1), strict=True):
        bench.submit(f"across {index}", prompt_of(6, index), seed=seeds[index], max_tokens=12)
        for _ in range(steps):
            assert bench.engine.step() == []


def across(found: dict[str, Generation]) -> dict[int, Generation]:
    return {int(id.split()[1]): generation for id, generation in found.items() if id.startswith("across")}


@every_engine
@every_mode
def test_every_token_names_the_version_that_made_it(bench: Bench, swap: str) -> None:
    before = bench.engine.version
    with bench.mode(swap):
        start_across(bench)
        after = bench.swap(1 - bench.seed)
        assert bench.engine.version == (before if swap == "finish" else after)
        bench.submit("new", prompt_of(6, 1), seed=1)
        found = bench.drain()
    assert bench.engine.version == after > before
    given = {0: 3, 1: 2, 2: 2, 3: 1}
    for index, generation in across(found).items():
        rest = len(generation.tokens) - given[index]
        if swap == "finish":
            assert generation.versions == (run_of(before, len(generation.tokens)),)
        else:
            assert rest and generation.versions == (run_of(before, given[index]), run_of(after, rest))
        assert generation.old_kv == (swap == "keep")
    assert found["new"].versions == (run_of(after, len(found["new"].tokens)),)
    assert not found["new"].old_kv
    assert len(found) == NUM_ACROSS + 1


@every_engine
@every_mode
def test_tokens_that_were_reported_stay_over_a_swap(bench: Bench, swap: str) -> None:
    with bench.mode(swap):
        start_across(bench)
        earlier = {index: bench.engine.progress(f"across {index}") for index in range(NUM_ACROSS)}
        bench.swap(1 - bench.seed)
        for index, generation in earlier.items():
            now = bench.engine.progress(f"across {index}")
            assert (now.tokens, now.logprobs, now.versions) == (
                generation.tokens, generation.logprobs, generation.versions
            )  # fmt: skip
            assert now.old_kv == (swap == "keep")
        bench.engine.step()
        for index, generation in earlier.items():
            now = bench.engine.progress(f"across {index}")
            num = len(generation.tokens)
            assert now.tokens[:num] == generation.tokens and len(now.tokens) == num + 1
            assert sum(run.count for run in now.versions) == num + 1 == len(now.logprobs)
            earlier[index] = now
        found = across(bench.drain())
    for index, generation in earlier.items():
        num = len(generation.tokens)
        assert found[index].tokens[:num] == generation.tokens
        assert found[index].logprobs[:num] == generation.logprobs


@every_engine
def test_a_request_can_run_over_several_swaps(bench: Bench) -> None:
    seed, versions = seed_of_tokens(bench, 8), []
    bench.submit("long", prompt_of(6, 3), seed=seed, max_tokens=12)
    for _ in range(3):
        bench.engine.step()
        versions.append(bench.engine.version)
        bench.swap(bench.seed)  # the same weights, so that the seed's tokens come
    versions.append(bench.engine.version)
    long = bench.drain()["long"]
    assert long.versions == tuple(map(run_of, versions, (1, 1, 1, len(long.tokens) - 3)))


@every_engine
def test_finish_waits_for_what_runs_and_lets_nothing_new_begin(bench: Bench) -> None:
    seed, before = seed_of_tokens(bench, 4), bench.engine.version
    with bench.mode("finish"):
        bench.submit("runs", prompt_of(6, 3), seed=seed, max_tokens=4)
        bench.engine.step()
        bench.submit("waits", prompt_of(6, 3), seed=seed, max_tokens=4)
        bench.swap(1 - bench.seed)
        newest = bench.swap(bench.seed)  # takes the place of the one that still waits
        for _ in range(2):
            assert bench.engine.step() == []
            assert bench.engine.version == before and bench.engine.progress("waits").tokens == ()
        assert [generation.id for generation in bench.engine.step()] == ["runs"]
        assert bench.engine.version == newest, "loaded as soon as nothing runs on the older weights"
        waited = bench.drain()["waits"]
    assert waited.versions == (run_of(newest, len(waited.tokens)),)


@every_engine
def test_finish_waits_no_longer_when_the_last_is_cancelled_or_nothing_runs(bench: Bench) -> None:
    with bench.mode("finish"):
        for id in ("runs", "runs too"):
            bench.submit(id, prompt_of(6, 3), seed=seed_of_tokens(bench, 4), max_tokens=4)
        bench.engine.step()
        before, after = bench.engine.version, bench.swap(1 - bench.seed)
        bench.engine.cancel("runs")
        assert bench.engine.version == before
        bench.engine.cancel("runs too")
        assert bench.engine.version == after
        bench.submit("waits", prompt_of(6, 3), max_tokens=4)
        assert bench.engine.version < bench.swap(1 - bench.seed) == bench.engine.version
        assert bench.drain()["waits"].versions[0][:2] == bench.engine.version


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
            others = token_logprobs(bench.weights(seed + 1), prompt, generation.tokens, temperature)
            assert deviation(generation, others) > 0.05, "these weights are too alike for the test to mean anything"


@with_weights
@every_mode
def test_logprobs_over_a_swap_are_those_that_the_mode_says(bench: Bench, swap: str) -> None:
    """Old weights before; then new weights over old keys, new weights alone, or old weights to the end."""
    old, new = bench.folder, bench.weights(1 - bench.seed)
    with bench.mode(swap):
        start_across(bench)
        bench.swap(1 - bench.seed)
        found = across(bench.drain())
    for index, generation in found.items():
        prompt, tokens, num = prompt_of(6, index), generation.tokens, generation.versions[0].count
        if swap == "finish":
            assert generation.logprobs == pytest.approx(token_logprobs(old, prompt, tokens), abs=TOLERANCE)
            continue
        ways = {
            "keep": logprobs_over_a_swap(old, new, prompt, tokens, num),
            "recompute": [*token_logprobs(old, prompt, tokens[:num]), *token_logprobs(new, prompt, tokens)[num:]],
        }
        assert generation.logprobs == pytest.approx(ways.pop(swap), abs=TOLERANCE)
        assert all(deviation(generation, other) > 10 * TOLERANCE for other in ways.values()), "too alike to tell"


@with_weights
def test_a_continuation_after_a_swap_has_the_logprobs_of_the_new_weights_alone(bench: Bench) -> None:
    """Another worker, or this one after a restart, reads the tokens anew: no old keys and values are left."""
    start_across(bench)
    given = {index: bench.engine.progress(f"across {index}") for index in range(NUM_ACROSS)}
    for index, generation in given.items():
        bench.engine.cancel(generation.id)
        prompt = [*prompt_of(6, index), *generation.tokens]
        bench.submit(f"across {index}", prompt, seed=index)
    bench.swap(1 - bench.seed)
    for index, generation in across(bench.drain()).items():
        wanted = token_logprobs(bench.folder, [*prompt_of(6, index), *given[index].tokens], generation.tokens)
        assert generation.logprobs == pytest.approx(wanted, abs=TOLERANCE)
        assert not generation.old_kv


@with_weights
@every_mode
def test_a_prompt_seen_before_a_swap_is_read_anew_after_it(bench: Bench, swap: str) -> None:
    """A prefix cache filled by older weights must not answer (prompts longer than one of its blocks)."""
    prompt = prompt_of(200)
    with bench.mode(swap):
        assert deviation_of_one(bench, prompt) < TOLERANCE
        assert deviation_of_one(bench, prompt) < TOLERANCE
        bench.submit("runs", prompt, max_tokens=20)
        bench.engine.step()
        bench.swap(1 - bench.seed)
        bench.engine.cancel("runs")
        assert deviation_of_one(bench, prompt) < TOLERANCE


@engine("vllm", True)
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
