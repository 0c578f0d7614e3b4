"""cispo: the log-prob weighed by a clipped ratio that carries no gradient (CISPO, arXiv 2506.13585)."""

from __future__ import annotations

from trainers.checks import check_clip
from trainers.losses import LossInputs, LossOutputs, log_ratio
from trainers.masked import masked


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossOutputs:
    """x = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A l with r = exp(l - lp).

    ppo-clip leaves a clipped token without a gradient, and the rare tokens that turn an answer are those it clips first;
    here every token keeps one, of bounded weight. The bounds are relative, so the weight lies in 0 .. 5 as given here:
    no lower bound, as in the paper. (TRL's `epsilon_high` is the bound itself: its 5 is clip_high = 4.)

    Ratio 9 counts as 5, so at log-prob ln 9 and advantage 2 the slope is -10:

    >>> import torch
    >>> l = torch.tensor([[9.0]]).log().requires_grad_()
    >>> zeros, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    >>> out = cispo(LossInputs(logprobs_BT=l, proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.tensor([[2.0]]), mask_BT=mask))
    >>> torch.autograd.grad(out.per_token_BT.sum(), l)[0].item()
    -10.0
    """
    check_clip("cispo", clip_low, clip_high)
    mask_BT = inputs.mask_BT
    ratio_BT = log_ratio(inputs.logprobs_BT, inputs.proximal_BT, mask_BT).detach().exp()
    weight_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    per_token_BT = -weight_BT * masked(inputs.advantages_BT, mask_BT) * masked(inputs.logprobs_BT, mask_BT)
    figures = {
        "clipped_low": (ratio_BT < 1.0 - clip_low).float(),
        "clipped_high": (ratio_BT > 1.0 + clip_high).float(),
        "ratio": masked(ratio_BT, mask_BT),
    }
    return LossOutputs(per_token_BT=per_token_BT, figures_BT=figures)
