"""Estimators and shaping give what verl 0.9.1 gives: its answers are frozen in fixtures by tests/oracle/make_advantages.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consumers.components import make_recipe
from consumers.group_rewards import GroupRewards, Numbers
from consumers.shaping.overlong_penalty import penalty

FROZEN = json.loads((Path(__file__).parent / "fixtures" / "advantages.json").read_text("utf-8"))
OURS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "grpo eps 0.5": ("grpo", {"eps": 0.5}),
    "grpo vectorized": ("grpo", {}),
    "grpo without std": ("dr-grpo", {}),
    "rloo": ("rloo", {}),
    "rloo vectorized": ("rloo", {}),
    "opo": ("opo", {}),
}


def _ours(batch: dict[str, Any], name: str, settings: dict[str, Any]) -> Numbers:
    """Group by group, put back where each member stood in the batch."""
    recipe = make_recipe(advantage=name, settings={name: settings}, group_size=9)
    groups, found = np.array(batch["groups"]), np.full(len(batch["groups"]), np.nan)
    for group in sorted(set(batch["groups"])):
        at = groups == group
        found[at] = recipe.advantage(
            GroupRewards.of(
                np.array(batch["rewards"])[at],
                lengths=np.array(batch["lengths"])[at],
                parts={part: np.array(values)[at] for part, values in batch["parts"].items()},
            )
        )
    return found


@pytest.mark.parametrize("answer", sorted(OURS))
@pytest.mark.parametrize("batch", FROZEN["batches"])
def test_advantages_are_verls(batch: dict[str, Any], answer: str) -> None:
    name, settings = OURS[answer]
    close = 1e-6 if answer == "grpo vectorized" else 1e-12  # that one takes means and deviations in float32
    np.testing.assert_allclose(_ours(batch, name, settings), batch["answers"][answer], rtol=close, atol=close)


@pytest.mark.parametrize("batch", FROZEN["batches"])
def test_gdpo_is_verls_once_whitened_over_the_batch(batch: dict[str, Any]) -> None:
    """Our group step, then verl's last step: (A - mean) / sqrt(var + 1e-8) over tokens, unbiased variance."""
    group_step = _ours(batch, "gdpo", {"parts": batch["coefficients"]})
    tokens = np.repeat(group_step, batch["lengths"])
    whitened = (group_step - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)
    theirs = batch["answers"]["gdpo, whitened over the batch's tokens"]
    np.testing.assert_allclose(whitened, theirs, rtol=2e-4, atol=2e-4)  # verl computes this one in float32


def test_the_batches_hold_what_they_should() -> None:
    assert [len(set(batch["groups"])) for batch in FROZEN["batches"]] == [5] * 4
    assert any(batch["groups"] != sorted(batch["groups"]) for batch in FROZEN["batches"])
    for batch in FROZEN["batches"]:
        assert batch["answers"].keys() == {*OURS, "gdpo, whitened over the batch's tokens"}
        assert all(len(answer) == len(batch["groups"]) for answer in batch["answers"].values())


def test_a_lone_sample_is_where_we_differ() -> None:
    """verl keeps its raw reward, but for the vectorized rloo; a lone sample has no baseline, so ours is exactly 0."""
    lone = FROZEN["lone"]
    assert {name: round(answer[0], 4) for name, answer in lone["answers"].items()} == {
        "grpo": 0.7, "grpo eps 0.5": 0.4667, "grpo vectorized": 0.7, "grpo without std": 0.7, "rloo": 0.7,
        "rloo vectorized": 0.0, "opo": 0.7,
    }  # fmt: skip
    for name, settings in OURS.values():
        assert _ours(lone, name, settings).tolist() == [0.0]


def test_the_overlong_penalty_is_verls_up_to_the_limit() -> None:
    frozen = FROZEN["overlong"]
    settings = {name: frozen[name] for name in ("limit", "cushion", "factor")}
    ours = [1.0 + penalty(length, **settings) for length in frozen["lengths"]]
    np.testing.assert_allclose(ours, frozen["rewards"], atol=1e-6)  # verl keeps rewards in float32
    assert min(ours) == 0.5 and max(ours) == 1.0
