"""Small inputs on which a trainer tries its components once, so that settings that cannot work stop it at its start.

Two rows of two tokens and one of padding, with everything that a component may ask for: what a run has or lacks is
told when it is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from schemas.errors import SettingError
from trainers.corrections import CorrectionInputs
from trainers.losses import LossInputs
from trainers.normalise import NormaliserInputs
from trainers.reductions import Totals

_MASK = ((True, True, False), (True, False, False))
TOTALS = Totals(tokens=3, sequences=2)


def mask() -> torch.Tensor:
    """Which places are trainable."""
    return torch.tensor(_MASK)


def loss_inputs() -> LossInputs:
    """On-policy tokens of log-prob -1, one row better than the other."""
    return LossInputs(
        logprobs_BT=torch.full((2, 3), -1.0),
        proximal_BT=torch.full((2, 3), -1.0),
        behaviour_BT=torch.full((2, 3), -1.0),
        advantages_BT=torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        mask_BT=mask(),
    )


def correction_inputs() -> CorrectionInputs:
    """The same tokens: every weight is 1.

    >>> from trainers.corrections.icepop import icepop
    >>> icepop(correction_inputs()).weights_BT[0, 0].item()
    1.0
    """
    inputs = loss_inputs()
    return CorrectionInputs(
        log_weight_BT=torch.zeros(2, 3),
        mask_BT=inputs.mask_BT,
        behaviour_BT=inputs.behaviour_BT,
        advantages_BT=inputs.advantages_BT,
    )


def normaliser_inputs() -> NormaliserInputs:
    """The same tokens, with rewards, values and a reference; one group, one task."""
    inputs = loss_inputs()
    return NormaliserInputs(
        advantages_BT=inputs.advantages_BT,
        mask_BT=inputs.mask_BT,
        rewards_B=torch.tensor([1.0, 0.0]),
        rewards_BT=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        groups=("group", "group"),
        tasks=("task", "task"),
        group_means_B=torch.full((2,), 0.5),
        proximal_BT=inputs.proximal_BT,
        reference_BT=inputs.proximal_BT,
        values_BT=torch.zeros(2, 3),
        bootstrap_B=torch.zeros(2),
    )


def check_once(kind: str, name: str, component: Callable[..., Any]) -> None:
    """Call a component with its settings bound, once. Raises SettingError where its settings cannot work together, or
    where it does not give one finite number per token; what else a component of one's own raises is its own.

    >>> from trainers.losses import LossOutputs
    >>> check_once("loss", "my.module:mean", lambda inputs: LossOutputs(per_token_BT=-inputs.logprobs_BT.mean(dim=0)[:2]))
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: loss 'my.module:mean' gives numbers of shape [2] for tokens of shape [2, 3]: one per token is wanted
    """
    mask_BT = mask()
    if kind == "reduction":
        numbers = component(mask_BT, TOTALS)
    elif kind == "loss":
        numbers = component(loss_inputs()).per_token_BT
    elif kind == "normaliser":
        numbers = component(normaliser_inputs()).advantages_BT
    else:
        numbers = component(correction_inputs()).weights_BT
    try:
        numbers_BT = numbers.broadcast_to(mask_BT.shape)  # a row's one number may stand for all its tokens
    except RuntimeError:
        raise SettingError(
            f"{kind} {name!r} gives numbers of shape {list(numbers.shape)} for tokens of shape {list(mask_BT.shape)}: one "
            "per token is wanted"
        ) from None
    if not numbers_BT[mask_BT].isfinite().all():
        raise SettingError(
            f"{kind} {name!r} gives {numbers_BT[mask_BT].tolist()} for plain tokens of log-prob -1: see its settings"
        )
