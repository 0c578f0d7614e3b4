"""Normalisers of whole steps: against slow twins, for any order of rows, masks, padding, missing inputs."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from schemas.components import load
from schemas.errors import SettingError
from trainers.gae import rewards_at_end
from trainers.normalise import NORMALISERS, Normaliser, NormaliserInputs, normalise, standardised
from trainers.normalise.gae import gae
from trainers.normalise.kl_in_reward import kl_in_reward
from trainers.normalise.per_task import per_task
from trainers.normalise.reinforce_plus_plus import reinforce_plus_plus
from trainers.normalise.reinforce_plus_plus_baseline import reinforce_plus_plus_baseline
from trainers.normalise.whiten import whiten

BY_NAME: dict[str, Normaliser] = {name: load("normaliser", name, NORMALISERS) for name in sorted(NORMALISERS)}
each = pytest.mark.parametrize("name", sorted(BY_NAME))
few = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 10_000)
ROWS, WIDTH = 6, 5
PER_ROW = ("rewards_B", "bootstrap_B")


def batch(seed: int) -> NormaliserInputs:
    """Rows of three groups and two tasks, interleaved, with holes; some may have no trainable token."""
    rng = np.random.default_rng(seed)
    mask = torch.tensor(rng.random((ROWS, WIDTH)) < 0.7)
    mask[rng.integers(ROWS)] = False
    mask[rng.integers(ROWS)] = True

    def table() -> Tensor:
        return torch.tensor(rng.normal(0, 1, (ROWS, WIDTH)))

    order = rng.permutation(ROWS)
    rewards_B = torch.tensor(rng.normal(0, 1, ROWS))
    return NormaliserInputs(
        advantages_BT=torch.tensor(rng.normal(0, 1, (ROWS, 1)) * np.ones((ROWS, WIDTH))),
        mask_BT=mask,
        rewards_B=rewards_B,
        rewards_BT=rewards_at_end(rewards_B, mask),
        groups=[["a", "a", "b", "b", "b", "c"][i] for i in order],
        tasks=[["x", "x", "x", "x", "y", "y"][i] for i in order],
        proximal_BT=-table().abs(),
        reference_BT=-table().abs(),
        values_BT=table(),
        bootstrap_B=torch.tensor(rng.normal(0, 1, ROWS)),
    )


def changed(inputs: NormaliserInputs, tokens: Any, rows: Any, names: Any) -> NormaliserInputs:
    """All columns put through one of three functions: of [B, T], of [B], of names."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(inputs):
        value = getattr(inputs, f.name)
        if f.name.endswith("_BT"):
            values[f.name] = tokens(value)
        elif f.name in PER_ROW:
            values[f.name] = rows(value)
        elif f.name in ("groups", "tasks"):
            values[f.name] = names(value)
    return NormaliserInputs(**values)


def _std(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def _scores(values: list[float], *, eps: float, inside: bool) -> list[float]:
    if len(values) < 2 or max(values) == min(values):
        return [0.0] * len(values)
    mean, std = math.fsum(values) / len(values), _std(values)
    return [(v - mean) / (math.sqrt(std**2 + eps) if inside else std + eps) for v in values]


def twin(name: str, inputs: NormaliserInputs) -> list[list[float]]:
    """The advantages of every row's trainable tokens."""
    masks = [[t for t in range(WIDTH) if inputs.mask_BT[i, t]] for i in range(ROWS)]
    used = [i for i in range(ROWS) if masks[i]]
    a = [float(inputs.advantages_BT[i, 0]) for i in range(ROWS)]
    r = [float(x) for x in inputs.rewards_B]
    v, ends = inputs.values_BT, inputs.bootstrap_B
    assert v is not None and ends is not None

    def on_tokens(values: dict[int, float]) -> list[list[float]]:
        return [[values.get(i, 0.0)] * len(masks[i]) for i in range(ROWS)]

    def whitened(values: list[list[float]]) -> list[list[float]]:
        flat = iter(_scores([x for row in values for x in row], eps=1e-8, inside=True))
        return [[next(flat) for _ in row] for row in values]

    def gae_row(i: int) -> list[float]:
        out, later, after = [], 0.0, float(ends[i])
        for t in reversed(masks[i]):
            now = r[i] if t == masks[i][-1] else 0.0
            later = now + after - float(v[i, t]) + 0.95 * later
            after = float(v[i, t])
            out.append(later)
        return out[::-1]

    if name == "whiten":
        return whitened(on_tokens(dict(enumerate(a))))
    if name == "gdpo-batch":
        return on_tokens(dict(zip(used, _scores([a[i] for i in used], eps=1e-6, inside=False), strict=True)))
    if name == "per-task":
        found = dict(enumerate(a))
        for task in "xy":
            rows = [i for i in used if inputs.tasks[i] == task]
            if len(rows) > 1:
                found |= {i: a[i] / (_std([a[j] for j in rows]) + 1e-6) for i in rows}
        return on_tokens(found)
    if name == "reinforce-plus-plus":
        return whitened(on_tokens(dict(enumerate(r))))
    if name == "reinforce-plus-plus-baseline":
        peers = {i: [r[j] for j in range(ROWS) if inputs.groups[j] == inputs.groups[i]] for i in range(ROWS)}
        return whitened(on_tokens({i: r[i] - math.fsum(peers[i]) / len(peers[i]) for i in range(ROWS)}))
    if name == "gae":
        return [gae_row(i) for i in range(ROWS)]
    assert name == "kl-in-reward"
    return on_tokens(dict(enumerate(a)))


@each
@pytest.mark.parametrize("seed", range(10))
def test_equals_its_formula(name: str, seed: int) -> None:
    inputs = batch(seed)
    found = BY_NAME[name](inputs)
    for row_T, mask_T, expected in zip(found.advantages_BT, inputs.mask_BT, twin(name, inputs), strict=True):
        np.testing.assert_allclose(row_T[mask_T].numpy(), expected, rtol=1e-6, atol=1e-9)
        assert not row_T[~mask_T].any()
    assert all(math.isfinite(value) for value in found.figures.values())


@each
@few
@given(seed=seeds, right=st.integers(0, 4))
def test_neither_padding_nor_what_is_masked_matters(name: str, seed: int, right: int) -> None:
    clean = batch(seed)

    def tokens(values: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(values, (0, right))
        return wide if values.dtype == torch.bool else torch.where(mask_BT, wide, math.nan)

    mask_BT = torch.nn.functional.pad(clean.mask_BT, (0, right))
    found = BY_NAME[name](changed(clean, tokens, lambda values: values, lambda names: names))
    expected = BY_NAME[name](clean)
    torch.testing.assert_close(found.advantages_BT[:, :WIDTH], expected.advantages_BT, rtol=1e-12, atol=1e-12)
    assert not found.advantages_BT[:, WIDTH:].any()
    for ours, theirs in ((found.returns_BT, expected.returns_BT), (found.rewards_BT, expected.rewards_BT)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours[:, :WIDTH], theirs, rtol=1e-12, atol=1e-12)


@each
@few
@given(seed=seeds)
def test_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    inputs = batch(seed)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(seed))
    mixed = changed(inputs, lambda v: v[order], lambda v: v[order], lambda names: [names[i] for i in order])
    found, expected = BY_NAME[name](mixed), BY_NAME[name](inputs)
    torch.testing.assert_close(found.advantages_BT, expected.advantages_BT[order], rtol=1e-9, atol=1e-9)


@each
def test_nothing_trainable_gives_zeros(name: str) -> None:
    inputs = dataclasses.replace(batch(0), mask_BT=torch.zeros(ROWS, WIDTH, dtype=torch.bool))
    found = BY_NAME[name](inputs)
    assert not found.advantages_BT.any()
    assert all(math.isfinite(value) for value in found.figures.values())


def plain(advantages: list[list[float]], **others: Any) -> NormaliserInputs:
    tensor = torch.tensor(advantages)
    mask = torch.ones(tensor.shape, dtype=torch.bool)
    given = {"rewards_B": torch.zeros(len(tensor)), "rewards_BT": torch.zeros(tensor.shape), **others}
    return NormaliserInputs(advantages_BT=tensor, mask_BT=mask, **given)


@pytest.mark.parametrize("values", [[[0.1], [0.1], [0.1]], [[0.7]], [[1e6 + 0.1]] * 3])
@pytest.mark.parametrize("component", [whiten, functools.partial(whiten, over="rows"), BY_NAME["gdpo-batch"]])
def test_equal_advantages_and_a_lone_one_give_exactly_zero(component: Normaliser, values: list[list[float]]) -> None:
    """Never a rounding error blown up by a tiny deviation, and never a NaN."""
    assert not component(plain(values)).advantages_BT.any()
    assert not standardised(torch.tensor([0.7]), eps=0.0).any()


def test_a_large_common_part_does_not_cost_precision() -> None:
    """In float32 the variance of numbers near 1e6 would be noise."""
    found = whiten(plain([[1e6], [1e6 + 1.0], [1e6 + 2.0]])).advantages_BT[:, 0]
    assert found.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_baselines_are_by_group_alone_and_know_members_that_are_not_here() -> None:
    """The mean of the whole batch would push the group of fives; the lone row of d has a group mean that it does not show."""
    rewards = torch.tensor([1.0, 5.0, 2.0, 0.0, 5.0, 4.0, 5.0, 1.0])
    given = plain([[0.0]] * 8, rewards_B=rewards, groups=list("abcabcbd"))
    found = reinforce_plus_plus_baseline(given).advantages_BT[:, 0]
    assert found[[1, 4, 6, 7]].tolist() == [0.0] * 4
    scale = torch.tensor([0.5, 0, -1, -0.5, 0, 1, 0, 0]).std(correction=1).item()
    assert found.tolist() == pytest.approx([x / scale for x in [0.5, 0, -1, -0.5, 0, 1, 0, 0]], rel=1e-5, abs=1e-6)
    means = torch.tensor([0.5, 5, 3, 0.5, 5, 3, 5, 0.25])
    whole = reinforce_plus_plus_baseline(dataclasses.replace(given, group_means_B=means)).advantages_BT[:, 0]
    assert whole[7] > 0 and len(set(whole[[1, 4, 6]].tolist())) == 1


def test_a_missing_group_is_an_error_and_no_fallback() -> None:
    with pytest.raises(SettingError, match="needs the group of each row: 2 rows, 0 groups given"):
        reinforce_plus_plus_baseline(plain([[0.0], [1.0]]))


def test_a_task_of_one_row_is_left_alone_or_zero() -> None:
    given = plain([[1.0], [-1.0], [7.0]], tasks=list("aab"))
    assert per_task(given).advantages_BT[2].item() == 7.0
    assert per_task(given, centre=True).advantages_BT[2].item() == 0.0
    shifted = plain([[11.0], [9.0], [7.0]], tasks=list("aab"))
    assert per_task(shifted, centre=True).advantages_BT[:2, 0].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)


def test_a_chain_hands_on_rewards_and_keeps_returns() -> None:
    """KL in the reward, then GAE, then whitening: each sees what the one before made."""
    inputs = batch(3)
    chain: list[Normaliser] = [functools.partial(kl_in_reward, beta=0.5), gae, whiten]
    found = normalise(chain, inputs)
    paid = kl_in_reward(inputs, beta=0.5)
    assert paid.rewards_BT is not None
    estimated = gae(dataclasses.replace(inputs, rewards_BT=paid.rewards_BT))
    assert found.returns_BT is not None and estimated.returns_BT is not None
    assert torch.equal(found.returns_BT, estimated.returns_BT)
    expected = whiten(dataclasses.replace(inputs, advantages_BT=estimated.advantages_BT)).advantages_BT
    assert torch.equal(found.advantages_BT, expected)
    assert {"reference_kl", "return_mean", "advantage_std"} <= found.figures.keys()


def test_an_empty_chain_changes_nothing() -> None:
    inputs = batch(1)
    found = normalise([], inputs)
    assert torch.equal(found.advantages_BT[inputs.mask_BT], inputs.advantages_BT[inputs.mask_BT])
    assert found.returns_BT is None and found.rewards_BT is None


def test_kl_in_the_reward_is_paid_at_each_token_and_summed_into_the_return() -> None:
    inputs = batch(5)
    assert inputs.proximal_BT is not None and inputs.reference_BT is not None
    found = reinforce_plus_plus(inputs, beta=0.1)
    assert found.returns_BT is not None
    for i in range(ROWS):
        at = [t for t in range(WIDTH) if inputs.mask_BT[i, t]]
        for k, t in enumerate(at):
            paid = sum(float(inputs.proximal_BT[i, s] - inputs.reference_BT[i, s]) for s in at[k:])
            assert found.returns_BT[i, t].item() == pytest.approx(float(inputs.rewards_B[i]) - 0.1 * paid)


@pytest.mark.parametrize(
    ("component", "missing", "said"),
    [
        (gae, "values_BT", "gae needs values"),
        (kl_in_reward, "reference_BT", "kl-in-reward needs a reference"),
        (kl_in_reward, "proximal_BT", "kl-in-reward needs log-probs"),
        (functools.partial(reinforce_plus_plus, beta=0.1), "reference_BT", "needs a reference"),
    ],
)
def test_what_is_needed_and_missing_is_named(component: Normaliser, missing: str, said: str) -> None:
    nothing: dict[str, Any] = {missing: None}
    with pytest.raises(SettingError, match=said):
        component(dataclasses.replace(batch(0), **nothing))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("whiten", {"over": "row"}, "over is 'row'; did you mean 'rows'"),
        ("whiten", {"eps": -1.0}, "whiten: eps"),
        ("gdpo-batch", {"eps": math.nan}, "gdpo-batch: eps"),
        ("per-task", {"eps": -1.0}, "per-task: eps"),
        ("reinforce-plus-plus", {"gamma": 1.5}, "gamma is 1.5; it must be from 0 to 1"),
        ("reinforce-plus-plus", {"beta": -1.0}, "reinforce-plus-plus: beta"),
        ("reinforce-plus-plus", {"eps": -1.0}, "reinforce-plus-plus: eps"),
        ("reinforce-plus-plus-baseline", {"eps": -1.0}, "baseline: eps"),
        ("kl-in-reward", {"beta": math.nan}, "kl-in-reward: beta"),
        ("kl-in-reward", {"estimator": "k33"}, "did you mean 'k3"),
        ("gae", {"gamma": -0.1}, "gae: gamma"),
        ("gae", {"lam": 1.1}, "gae: lam"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        functools.partial(BY_NAME[name], **wrong)(batch(0))
