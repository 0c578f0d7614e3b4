"""A loss as a user would bring it, named `support.own_loss:negated`."""

from __future__ import annotations

from trainers.losses import LossInputs, LossOutputs


def negated(values: LossInputs, *, scale: float = 1.0) -> LossOutputs:
    """x = -scale * l."""
    return LossOutputs(per_token_BT=-scale * values.logprobs_BT)
