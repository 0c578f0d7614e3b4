"""Terms that are added to a loss, per token and before its reduction: KL to a reference, entropy bonus, value head.

No correction's weight belongs on them: each is about the weights being trained, or about the head.
Shapes: B = rows, R = rows of the step, T = positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from trainers.batching import MicroBatch
from trainers.components import Terms
from trainers.entropy import entropy_bonus
from trainers.kl import kl_estimate
from trainers.masked import masked
from trainers.model import Outputs
from trainers.value_loss import value_loss
from trainers.whole_step import WholeStep, rows_in


class Added(NamedTuple):
    """Terms [B, T], 0 where the mask is False; and figures of theirs without gradient."""

    per_token: list[Tensor]
    figures_BT: Mapping[str, Tensor]


def loss_terms(terms: Terms, batch: MicroBatch, out: Outputs, step_RT: WholeStep, mask_BT: Tensor) -> Added:
    """The terms that have a coefficient, or a head."""
    found: list[Tensor] = []
    figures: dict[str, Tensor] = {}
    if (reference_BT := rows_in(step_RT.reference_RT, batch)) is not None:
        kl_BT = kl_estimate(out.logprobs_BT, reference_BT, mask_BT, estimator=terms.kl_estimator)
        figures["kl"] = kl_BT.detach()
        if terms.kl > 0:
            found.append(terms.kl * kl_BT)
    if out.entropies_BT is not None:
        figures["entropy_exact"] = masked(out.entropies_BT.detach(), mask_BT)
        found.append(entropy_bonus(out.entropies_BT, mask_BT, terms.entropy))
    values_BT, returns_BT = rows_in(step_RT.values_RT, batch), rows_in(step_RT.returns_RT, batch)
    if out.values_BT is not None and values_BT is not None and returns_BT is not None:
        value = value_loss(out.values_BT, values_BT, returns_BT, mask_BT, clip=terms.value_clip)
        figures |= value.figures_BT
        found.append(terms.value * value.per_token_BT)
    return Added(found, figures)
