"""What a step reports: sums gathered over micro-batches, turned into means at its end.

Means are over the step's trainable tokens unless the name says otherwise. l = log-prob under the weights being trained,
lp = under those at the start of the step, lmu = under the distribution sampled from, w = exp(lp - lmu).
Shapes: B = rows, T = positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainers.batching import Row


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


class Figures:
    """Sums of a step while it runs. Per-token sums stay on the device until `metrics`."""

    def __init__(self, rows: Sequence[Row], *, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._rows = rows
        self._sums: dict[str, Tensor] = {}
        self._lag_max = torch.zeros(())
        self._tokens = 0
        self._norms: list[float] = []
        self._updates = 0

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
    ) -> None:
        """A micro-batch's tokens; `log_weight_BT` is lp - lmu, 0 where the mask is False."""
        l_N, log_N = logprobs_BT[mask_BT], log_weight_BT[mask_BT]
        w_N = log_N.exp()
        self._tokens += len(l_N)
        lag_N = log_N.abs()
        self._lag_max = torch.maximum(self._lag_max.to(lag_N.device), lag_N.max())
        sums = {"w": w_N, "w2": w_N * w_N, "wl": -w_N * l_N, "lag": lag_N, "kl": w_N - 1.0 - log_N}
        sums |= {f"figure.{name}": value_BT[mask_BT] for name, value_BT in figures_BT.items()}
        for name, value_N in sums.items():
            self._add(name, value_N.double().sum())
        self._add("loss", loss.double())

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def metrics(self) -> StepMetrics:
        """The figures, once the step is done."""
        sums = {name: float(value) for name, value in self._sums.items()}
        tokens, rows = max(self._tokens, 1), max(len(self._rows), 1)
        return StepMetrics(
            loss=sums.get("loss", 0.0) / max(self._updates, 1),
            grad_norm=sum(self._norms) / max(len(self._norms), 1),
            learning_rate=self.learning_rate,
            updates=self._updates,
            updates_skipped=self._updates - len(self._norms),
            rows=len(self._rows),
            tokens=self._tokens,
            tokens_total=sum(len(row.tokens_T) for row in self._rows),
            tokens_unusable=sum(row.num_unusable for row in self._rows),
            reward_mean=sum(row.reward for row in self._rows) / rows,
            advantage_abs_mean=sum(abs(row.advantage) for row in self._rows) / rows,
            entropy=sums.get("wl", 0.0) / (sums.get("w", 0.0) or 1.0),
            lag_mean=sums.get("lag", 0.0) / tokens,
            lag_max=float(self._lag_max),
            lag_kl=sums.get("kl", 0.0) / tokens,
            ess=sums.get("w", 0.0) ** 2 / (sums.get("w2", 0.0) or 1.0) / tokens,
            figures={name[7:]: value / tokens for name, value in sums.items() if name.startswith("figure.")},
        )
