"""What every engine promises (`producers.engine`) while its weights stay as they are: one suite for the scripted, the
transformers and the vLLM engine. Swaps are in `test_engine_swap.py`.

Engines with weights are held against transformers' log-probs on the same files.
"""

from __future__ import annotations

from collections import Counter

import pytest

from producers.engine import Generation
from schemas.records import Finish
from support.engine_bench import (
    CONCURRENCY,
    EOS,
    TOLERANCE,
    VOCAB,
    Bench,
    every_engine,
    prompt_of,
    run_of,
    seed_of_tokens,
    with_weights,
)
from support.models import POSITIONS, all_logprobs, token_logprobs


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
    alone, seed = bench.one(prompt_of(6, 1), seed=11, max_tokens=30), seed_of_tokens(bench)
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


@every_engine
def test_progress_is_what_was_given_so_far_and_only_grows(bench: Bench) -> None:
    seed = seed_of_tokens(bench, 4)
    bench.submit("one", prompt_of(6, 3), seed=seed, max_tokens=6)
    bench.submit("other", prompt_of(9, 1), seed=1, max_tokens=6)
    assert bench.engine.progress("never there") is None
    first = bench.engine.progress("one")
    assert first == Generation(id="one", tokens=(), logprobs=(), versions=(), finish=Finish.ABORT, old_kv=False)
    seen: list[Generation] = [first]
    finished: dict[str, Generation] = {}
    while bench.engine.num_running:
        finished.update({generation.id: generation for generation in bench.engine.step()})
        if (now := bench.engine.progress("one")) is not None:
            assert now.finish == Finish.ABORT and now == bench.engine.progress("one")
            assert now.versions == (run_of(bench.engine.version, len(now.tokens)),)
            seen.append(now)
        else:
            assert "one" in finished
    assert len(seen) >= 4 and len(finished["one"].tokens) == len(seen[-1].tokens) + 1
    assert bench.engine.progress("one") is bench.engine.progress("other") is None
    for earlier, later in zip(seen, [*seen[1:], finished["one"]], strict=True):
        assert len(later.tokens) == len(earlier.tokens) + 1
        assert later.tokens[: len(earlier.tokens)] == earlier.tokens
        assert later.logprobs[: len(earlier.logprobs)] == earlier.logprobs


@every_engine
def test_requests_that_wait_have_been_given_nothing(bench: Bench) -> None:
    for index in range(CONCURRENCY + 3):
        bench.submit(str(index), prompt_of(4, index), seed=index, max_tokens=30)
    bench.engine.step()
    progress = [bench.engine.progress(str(index)) for index in range(CONCURRENCY + 3)]
    given = [len(generation.tokens) for generation in progress if generation is not None]
    assert given[-3:] == [0, 0, 0] and set(given[:-3]) == {1}
    for index in range(CONCURRENCY + 3):
        bench.engine.cancel(str(index))
        assert bench.engine.progress(str(index)) is None
    assert bench.engine.num_running == 0


@with_weights
def test_a_continuation_has_the_logprobs_of_an_uninterrupted_request(bench: Bench) -> None:
    """Where a continuation draws the same token, its log-prob is the same; the others are held against transformers."""
    prompt, temperature = prompt_of(6, 3), 0.1  # nearly greedy, so that many continuations draw the same token
    seed = next(s for s in range(50) if len(bench.one(prompt, seed=s, temperature=temperature).tokens) == 12)
    whole = bench.one(prompt, seed=seed, temperature=temperature)
    for cut in (1, 2, 5, 11):
        bench.submit("whole", prompt, seed=seed, temperature=temperature)
        for _ in range(cut):
            bench.engine.step()
        given = bench.engine.progress("whole")
        bench.engine.cancel("whole")
        assert given is not None and given.tokens == whole.tokens[:cut]
        for index in range(48):
            bench.submit(str(index), [*prompt, *given.tokens], seed=index, temperature=temperature, max_tokens=5)
        alike = 0
        for generation in bench.drain().values():
            wanted = token_logprobs(bench.folder, [*prompt, *given.tokens], generation.tokens, temperature)
            assert generation.logprobs == pytest.approx(wanted, abs=TOLERANCE)
            if generation.tokens[0] == whole.tokens[cut]:
                alike += 1
                assert generation.logprobs[0] == pytest.approx(whole.logprobs[cut], abs=TOLERANCE)
        assert alike


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
    assert bench.engine.num_running >= 150 - CONCURRENCY
    assert len(bench.drain()) <= 150
    assert bench.engine.num_running == 0


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
