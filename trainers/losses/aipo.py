"""aipo: the log-prob weighed by the capped ratio to the sampler (AIPO of LlamaRL, arXiv 2505.24034)."""

from __future__ import annotations

from trainers.checks import check_positive
from trainers.losses import LossInputs, LossOutputs, capped_policy_gradient


def aipo(inputs: LossInputs, *, cap: float = 4.0) -> LossOutputs:
    """x = -sg(min(u, cap)) A l with u = exp(l - lmu): one ratio to what was sampled from, capped on one side only.

    Its correction is built in, so it goes with the correction "none". With one update per step it is reinforce with
    token-truncated weights; with several, u follows the weights being trained. The paper's caps are 2 to 10.

    Ratios of 9 and 0.5 count as 4 and 0.5, so with advantage 1 the slopes are -4 and -0.5:

    >>> import torch
    >>> l = torch.tensor([[9.0, 0.5]]).log().requires_grad_()
    >>> zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    >>> out = aipo(LossInputs(logprobs_BT=l, proximal_BT=zeros, behaviour_BT=zeros,
    ...     advantages_BT=torch.ones(1, 2), mask_BT=mask))
    >>> torch.autograd.grad(out.per_token_BT.sum(), l)[0].tolist()
    [[-4.0, -0.5]]
    """
    check_positive("aipo", "cap", cap)
    return capped_policy_gradient(inputs, inputs.mask_BT, cap=cap)
