"""dual-clip: ppo-clip with a further bound where the advantage is negative (arXiv 1912.09729)."""

from __future__ import annotations

import dataclasses

import torch

from trainers.checks import check_clip, check_positive
from trainers.losses import LossInputs, LossOutputs, clipped_surrogate, log_ratio
from trainers.masked import masked


def dual_clip(inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.28, cap: float = 3.0) -> LossOutputs:
    """x = min(x of ppo-clip, -cap A) where A < 0, else x of ppo-clip; cap > 1 + clip_high.

    ppo-clip bounds what a good token may gain, but a bad token that has become likely (r large, A < 0) pushes back with
    r A without end. Here its ratio counts as cap at most, and beyond it has no gradient. TRL's `delta` is this cap.

    A ratio of 9 with advantage -1 counts as 3; ppo-clip would give 9:

    >>> zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> out = dual_clip(LossInputs(logprobs_BT=torch.tensor([[9.0, 9.0]]).log(), proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.tensor([[-1.0, 1.0]]), mask_BT=mask))
    >>> [round(x, 4) for x in out.per_token_BT[0].tolist()], out.figures_BT["capped"].tolist()
    ([3.0, -1.28], [[1.0, 0.0]])
    """
    check_clip("dual-clip", clip_low, clip_high)
    check_positive("dual-clip", "cap", cap, above=1.0 + clip_high)
    ratio_BT = log_ratio(inputs.logprobs_BT, inputs.proximal_BT, inputs.mask_BT).exp()
    clipped = clipped_surrogate(ratio_BT, inputs, clip_low=clip_low, clip_high=clip_high)
    advantages_BT = masked(inputs.advantages_BT, inputs.mask_BT)
    bound_BT = torch.where(advantages_BT < 0, -cap * advantages_BT, torch.inf)
    capped_BT = (clipped.per_token_BT.detach() > bound_BT).float()
    return dataclasses.replace(
        clipped,
        per_token_BT=torch.minimum(clipped.per_token_BT, bound_BT),
        figures_BT={**clipped.figures_BT, "capped": capped_BT},
    )
