"""What a step reports: sums gathered over micro-batches, turned into means at its end.

Means are over the step's trainable tokens unless the name says otherwise. l = log-prob under the weights being trained,
lp = under those at the start of the step, lmu = under the distribution sampled from, w = exp(lp - lmu).
Shapes: B = rows, T = positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainers.batching import Row

MAX_TASKS = 32
TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """The figures of one step."""

    loss: float
    """Mean over updates."""
    grad_norm: float
    """Before clipping; mean over updates that were not skipped."""
    learning_rate: float
    updates: int
    updates_skipped: int
    """Updates left out because the gradient was not finite, or nothing was trainable."""
    rows: int
    tokens: int
    """Trainable tokens."""
    tokens_total: int
    tokens_unusable: int
    """Tokens that records call trainable and that cannot be trained on."""
    reward_mean: float
    """Mean over rows."""
    advantage_abs_mean: float
    """Mean over rows."""
    entropy: float
    """Estimate from the sampled tokens: sum(-w l) / sum(w), in nats per token."""
    lag_mean: float
    """|lp - lmu|: how far the sampler's weights are from the trainer's."""
    lag_max: float
    lag_kl: float
    """Estimate of KL(behaviour, proximal): w - 1 - ln w."""
    ess: float
    """Effective sample size of the weights, sum(w)^2 / sum(w^2), as a share of the tokens."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Those of the loss and of the correction, such as `truncated`, `clipped_low`, `clipped_high`."""

    def as_dict(self) -> dict[str, float]:
        """All figures by name."""
        own = {f.name: float(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "figures"}
        return own | dict(self.figures)


def _alone(value: Tensor) -> Tensor:
    return value


class Figures:
    """Sums of a step while it runs. Per-token sums stay on the device until `metrics`."""

    def __init__(self, rows: Sequence[Row], *, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._rows = rows
        self._sums: dict[str, Tensor] = {}
        self._lag_max = torch.zeros(())
        self._norms: list[float] = []
        self._updates = 0
        self._facts = facts_of(rows)
        self._ages_R = torch.tensor([row.age for row in rows], dtype=torch.int64)
        self._ages_A = torch.tensor(sorted({row.age for row in rows if row.age >= 0}), dtype=torch.int64)
        self._by_age: dict[str, Tensor] = {}

    def add_facts(self, facts: Mapping[str, float]) -> None:
        """Figures of the whole step that need no mean, such as those of normalisers."""
        self._facts |= facts

    def add_update(self, grad_norm: float) -> None:
        """An update with this gradient norm; skipped if that is not finite."""
        self._updates += 1
        if math.isfinite(grad_norm):
            self._norms.append(grad_norm)

    @torch.no_grad()
    def add_tokens(
        self,
        mask_BT: Tensor,
        logprobs_BT: Tensor,
        log_weight_BT: Tensor,
        loss: Tensor,
        figures_BT: Mapping[str, Tensor],
        places_B: Tensor | None = None,
    ) -> None:
        """A micro-batch's tokens; `log_weight_BT` is lp - lmu, 0 where the mask is False. places_B: of its rows."""
        l_N, log_N = logprobs_BT[mask_BT], log_weight_BT[mask_BT]
        w_N = log_N.exp()
        lag_N = log_N.abs()
        lag_max = lag_N.max() if len(lag_N) else lag_N.new_zeros(())
        self._lag_max = torch.maximum(self._lag_max.to(lag_N.device), lag_max)
        sums = {
            "tokens": torch.ones_like(w_N),
            "w": w_N,
            "w2": w_N * w_N,
            "wl": -w_N * l_N,
            "lag": lag_N,
            "kl": w_N - 1.0 - log_N,
        }
        sums |= {f"figure.{name}": value_BT[mask_BT] for name, value_BT in figures_BT.items()}
        for name, value_N in sums.items():
            self._add(name, value_N.double().sum())
        self._add("loss", loss.double())
        if places_B is not None:
            rows_N = places_B[:, None].to(mask_BT.device).expand_as(mask_BT)[mask_BT]
            truncated_BT = figures_BT.get(TRUNCATED, torch.zeros_like(log_weight_BT))
            self._add_by_age(rows_N, {"tokens": sums["tokens"], "kl": sums["kl"], TRUNCATED: truncated_BT[mask_BT]})

    def _add_by_age(self, rows_N: Tensor, numbers: Mapping[str, Tensor]) -> None:
        ages_N = self._ages_R.to(rows_N.device)[rows_N]
        of_age_AN = ages_N == self._ages_A.to(rows_N.device)[:, None]
        for name, numbers_N in numbers.items():
            sums_A = (of_age_AN * numbers_N.double()).sum(dim=1)
            self._by_age[name] = self._by_age[name] + sums_A if name in self._by_age else sums_A

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def metrics(
        self, summed: Callable[[Tensor], Tensor] = _alone, greatest: Callable[[Tensor], Tensor] = _alone
    ) -> StepMetrics:
        """The figures, once the step is done; `summed` and `greatest` take a tensor over all ranks.

        Every rank has gone through the same number of micro-batches and so has the same names.
        """
        names = sorted(self._sums)
        values_N = summed(torch.stack([self._sums[name] for name in names])) if names else torch.zeros(0)
        sums = dict(zip(names, values_N.tolist(), strict=True))
        num_tokens = round(sums.get("tokens", 0.0))
        by_age = {name: summed(sums_A).tolist() for name, sums_A in sorted(self._by_age.items())}
        tokens, rows = max(num_tokens, 1), max(len(self._rows), 1)
        return StepMetrics(
            loss=sums.get("loss", 0.0) / max(self._updates, 1),
            grad_norm=sum(self._norms) / max(len(self._norms), 1),
            learning_rate=self.learning_rate,
            updates=self._updates,
            updates_skipped=self._updates - len(self._norms),
            rows=len(self._rows),
            tokens=num_tokens,
            tokens_total=sum(len(row.tokens_T) for row in self._rows),
            tokens_unusable=sum(row.num_unusable for row in self._rows),
            reward_mean=sum(row.reward for row in self._rows) / rows,
            advantage_abs_mean=sum(abs(row.advantage) for row in self._rows) / rows,
            entropy=sums.get("wl", 0.0) / (sums.get("w", 0.0) or 1.0),
            lag_mean=sums.get("lag", 0.0) / tokens,
            lag_max=float(greatest(self._lag_max)),
            lag_kl=sums.get("kl", 0.0) / tokens,
            ess=sums.get("w", 0.0) ** 2 / (sums.get("w2", 0.0) or 1.0) / tokens,
            figures=self._facts
            | self._of_ages(by_age)
            | {name[7:]: sums[name] / tokens for name in names if name.startswith("figure.")},
        )

    def _of_ages(self, by_age: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Per age in versions: how far the sampler was away, and the share of tokens whose weight was cut."""
        found: dict[str, float] = {}
        for i, age in enumerate(self._ages_A.tolist() if by_age else []):
            tokens = by_age["tokens"][i] or 1.0
            found[f"lag_kl.age-{age}"] = by_age["kl"][i] / tokens
            found[f"{TRUNCATED}.age-{age}"] = by_age[TRUNCATED][i] / tokens
        return found


def facts_of(rows: Sequence[Row]) -> dict[str, float]:
    """Figures that rows have before they are trained on: mean reward by task, share of rows by age in versions.

    Beyond `MAX_TASKS` the tasks that come last in the alphabet are put together as "others".
    """
    tasks = sorted({row.task for row in rows if row.task})
    named = set(tasks[:MAX_TASKS])
    rewards: dict[str, list[float]] = {}
    ages: dict[int, int] = {}
    for row in rows:
        if row.task:
            rewards.setdefault(row.task if row.task in named else "others", []).append(row.reward)
        if row.age >= 0:
            ages[row.age] = ages.get(row.age, 0) + 1
    found = {f"reward.{task}": sum(of_task) / len(of_task) for task, of_task in sorted(rewards.items())}
    return found | {f"rows.age-{age}": count / len(rows) for age, count in sorted(ages.items())}
