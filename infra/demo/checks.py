"""The demo checks itself: figures of a run, from the log alone, and what must hold of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from infra.audit import Audit
from infra.audit_command import FIGURES, facts

MIN_RISE = 0.05
"""Least rise of the mean reward from the first tenth of the steps to the last."""
MIN_TRAINED = 0.8
"""Least share of what was produced that must have been trained on."""


class Finding(NamedTuple):
    """One check."""

    name: str
    ok: bool
    said: str


def tenths(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the first and of the last tenth (at least one value each); NaN where there is none.

    >>> tenths([0.0] * 10 + [1.0] * 10)
    (0.0, 1.0)
    """
    if not values:
        return math.nan, math.nan
    count = max(1, len(values) // 10)
    return sum(values[:count]) / count, sum(values[-count:]) / count


def policy_facts(found: Audit, *, max_staleness: int) -> dict[str, Any]:
    """The figures of one policy."""
    rewards = [result.metrics.get("reward_mean", math.nan) for result in found.ledger.results]
    first, last = tenths(rewards)
    return facts(found) | {"reward_first": first, "reward_last": last, "max_staleness_allowed": max_staleness}


def check(policy: str, figures: dict[str, Any], *, steps: int) -> list[Finding]:
    """What must hold of a policy's figures after the drain."""
    rise = figures["reward_last"] - figures["reward_first"]
    share = figures["trained"] / figures["produced"] if figures["produced"] else 0.0
    seen = figures["versions_in_trained_tokens"]
    wanted = min(5, max(2, steps // 4))
    return [
        Finding("steps", figures["steps"] >= steps, f"{figures['steps']} of {steps} steps trained"),
        Finding(
            "reward rises",
            rise >= MIN_RISE,
            f"mean reward {figures['reward_first']:.3f} -> {figures['reward_last']:.3f} (at least +{MIN_RISE} wanted)",
        ),
        Finding(
            "weights are picked up",
            seen >= wanted,
            f"trained tokens come from {seen} versions (at least {wanted} wanted) of {figures['versions_published']} published",
        ),
        Finding(
            "staleness is bounded",
            figures["max_staleness_seen"] <= figures["max_staleness_allowed"],
            f"greatest age {figures['max_staleness_seen']}, allowed {figures['max_staleness_allowed']}",
        ),
        Finding(
            "accounting closes",
            bool(figures["ok"]) and figures["pending"] == 0,
            f"pending {figures['pending']}, unaccounted {figures['unaccounted']}, twice {figures['twice']}"
            + "".join(f"; {finding}" for finding in figures["findings"]),
        ),
        Finding(
            "little is wasted", share >= MIN_TRAINED, f"{share:.1%} of produced trained (at least {MIN_TRAINED:.0%})"
        ),
    ]


def combine(by_policy: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One set of figures for all policies: counts are added up, of rewards and ages the worst stands."""
    every = list(by_policy.values())
    total: dict[str, Any] = {name: sum(figures[name] for figures in every) for name in FIGURES}
    total |= {
        "reward_first": max(figures["reward_first"] for figures in every),
        "reward_last": min(figures["reward_last"] for figures in every),
        "steps": min(figures["steps"] for figures in every),
        "versions_published": min(figures["versions_published"] for figures in every),
        "versions_in_trained_tokens": min(figures["versions_in_trained_tokens"] for figures in every),
        "max_staleness_allowed": max(figures["max_staleness_allowed"] for figures in every),
        "max_staleness_seen": max(figures["max_staleness_seen"] for figures in every),
    }
    return total
