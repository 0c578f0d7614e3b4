"""Normalisers: `NormaliserInputs, *, <settings> -> NormaliserOutputs`, over all rows of a step at once.

What needs more than one group of samples, a reference or a value head is done here, in the trainer; what needs only the
group is `consumers.advantages`. A step applies a list of them in order (`normalise`); each sees what the one before made.

| name | advantages become | source |
|---|---|---|
| whiten | (A - mean) / sqrt(var + eps) over the step's tokens or rows | REINFORCE++, arXiv 2501.03262 |
| gdpo-batch | (A - mean) / (std + eps) over the step's rows, after the processor's gdpo | arXiv 2601.05242 |
| per-task | (A - mean) / (std + eps) over the rows of one task | multi-task training |
| reinforce-plus-plus | return-to-go of r - beta k(lp, lr), whitened | arXiv 2501.03262 |
| reinforce-plus-plus-baseline | R - mean of the row's group, whitened | arXiv 2501.03262 |
| kl-in-reward | (rewards only) r - beta k(lp, lr) at each token | arXiv 2203.02155 |
| gae | A = sum of (gamma lam)^k d, from a value head; also its targets | arXiv 1506.02438 |

Means and deviations are the sample's (divided by n - 1). Numbers that are all equal, and a lone one, give exactly 0.
Shapes: B = rows of the whole step, padded on the right, T = positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from schemas.errors import SettingError
from trainers.masked import masked

NORMALISERS: Mapping[str, str] = {
    "gae": "trainers.normalise.gae:gae",
    "gdpo-batch": "trainers.normalise.gdpo_batch:gdpo_batch",
    "kl-in-reward": "trainers.normalise.kl_in_reward:kl_in_reward",
    "per-task": "trainers.normalise.per_task:per_task",
    "reinforce-plus-plus": "trainers.normalise.reinforce_plus_plus:reinforce_plus_plus",
    "reinforce-plus-plus-baseline": "trainers.normalise.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline",
    "whiten": "trainers.normalise.whiten:whiten",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserInputs:
    """What a normaliser may look at. Values at places where `mask_BT` is False mean nothing and may be NaN."""

    advantages_BT: Tensor
    mask_BT: Tensor
    """bool: the trainable tokens."""
    rewards_B: Tensor
    """Of whole rows, as the processor shaped them."""
    rewards_BT: Tensor
    """Step rewards and the row's own, each on the trainable token that earned it (`trainers.gae.rewards_at_end`)."""
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> [B]; NaN where a row lacks that part."""
    groups: Sequence[str] = ()
    """The group of each row."""
    tasks: Sequence[str] = ()
    """The task of each row."""
    group_means_B: Tensor | None = None
    """Mean reward of all valid members of the row's group, those included that no row was made of."""
    proximal_BT: Tensor | None = None
    """lp: log-probs of the trainer's weights at the step's beginning."""
    reference_BT: Tensor | None = None
    """lr: log-probs of the reference weights."""
    values_BT: Tensor | None = None
    """V of each token's state, before the token is known."""
    bootstrap_B: Tensor | None = None
    """V of the state after a row's last token where the row was cut off, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliserOutputs:
    """Advantages, 0 where the mask is False; and what else has changed."""

    advantages_BT: Tensor
    returns_BT: Tensor | None = None
    """Targets of the value head."""
    rewards_BT: Tensor | None = None
    """In place of those given, for the normalisers that follow."""
    figures: Mapping[str, float] = field(default_factory=dict)


Normaliser = Callable[[NormaliserInputs], NormaliserOutputs]


def normalise(normalisers: Sequence[Normaliser], inputs: NormaliserInputs) -> NormaliserOutputs:
    """All of them in order, each given the advantages and rewards that the one before left; figures side by side.

    >>> from trainers.normalise.whiten import whiten
    >>> mask = torch.tensor([[True, True, False]])
    >>> inputs = NormaliserInputs(advantages_BT=torch.tensor([[1.0, 3.0, 9.0]]), mask_BT=mask,
    ...     rewards_B=torch.zeros(1), rewards_BT=torch.zeros(1, 3))
    >>> [round(a, 4) for a in normalise([whiten], inputs).advantages_BT[0].tolist()]
    [-0.7071, 0.7071, 0.0]
    """
    result = NormaliserOutputs(advantages_BT=masked(inputs.advantages_BT, inputs.mask_BT))
    for normaliser in normalisers:
        out = normaliser(inputs)
        result = NormaliserOutputs(
            advantages_BT=out.advantages_BT,
            returns_BT=result.returns_BT if out.returns_BT is None else out.returns_BT,
            rewards_BT=result.rewards_BT if out.rewards_BT is None else out.rewards_BT,
            figures={**result.figures, **out.figures},
        )
        rewards_BT = inputs.rewards_BT if out.rewards_BT is None else out.rewards_BT
        inputs = dataclasses.replace(inputs, advantages_BT=out.advantages_BT, rewards_BT=rewards_BT)
    return result


def standardised(values_N: Tensor, *, eps: float, inside: bool = False, centre: bool = True) -> Tensor:
    """(x - mean) / (std + eps), or / sqrt(var + eps) if `inside`; sample deviation; without the mean if not `centre`.

    In float64. Exactly 0 where all are equal, and for a lone value; without centring those stay as they are.

    >>> standardised(torch.tensor([1.0, 3.0]), eps=0.0).double().round(decimals=4).tolist()  # mean 2, deviation 1.4142
    [-0.7071, 0.7071]
    >>> standardised(torch.tensor([0.1, 0.1, 0.1]), eps=0.0).tolist()
    [0.0, 0.0, 0.0]
    """
    wide_N = values_N.double()
    if len(wide_N) < 2 or bool(wide_N.max() == wide_N.min()):
        return torch.zeros_like(values_N) if centre else values_N
    variance = wide_N.var(correction=1)
    scale = (variance + eps).sqrt() if inside else variance.sqrt() + eps
    return ((wide_N - wide_N.mean() if centre else wide_N) / scale).to(values_N.dtype)


def whitened(values_BT: Tensor, mask_BT: Tensor, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) over the trainable tokens, 0 elsewhere."""
    out_BT = torch.zeros_like(values_BT)
    out_BT[mask_BT] = standardised(values_BT[mask_BT], eps=eps, inside=True)
    return out_BT


def on_rows(values_B: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """One number per row on all its trainable tokens, in the type of the advantages."""
    return masked(values_B[:, None].to(advantages_BT.dtype), mask_BT)


def spread(values_BT: Tensor, mask_BT: Tensor, name: str) -> dict[str, float]:
    """Figures about a step's numbers before they were normalised: mean and sample deviation over trainable tokens."""
    values_N = values_BT[mask_BT].double()
    std = float(values_N.std(correction=1)) if len(values_N) > 1 else 0.0
    return {f"{name}_mean": float(values_N.mean()) if len(values_N) else 0.0, f"{name}_std": std}


def needed(component: str, what: str, value: Tensor | None) -> Tensor:
    """The value, or SettingError: a step without it cannot use this normaliser."""
    if value is None:
        raise SettingError(f"{component} needs {what}, and this run has none")
    return value
