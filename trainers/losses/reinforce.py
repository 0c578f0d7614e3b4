"""reinforce: the advantage times the log-prob (Williams 1992)."""

from __future__ import annotations

import torch

from trainers.losses import LossInputs, LossOutputs


def reinforce(inputs: LossInputs) -> LossOutputs:
    """x = -A l. Off-policy correction is not part of x; the step multiplies x by the correction's weights.

    Its value says nothing about progress; its gradient does. Advantage 2 at log-prob -0.5 gives 1, and a token that is
    not trained on gives exactly 0 whatever stands there:

    >>> out = reinforce(LossInputs(logprobs_BT=torch.tensor([[-0.5, float("nan")]]), proximal_BT=torch.zeros(1, 2),
    ...     behaviour_BT=torch.zeros(1, 2), advantages_BT=torch.tensor([[2.0, 2.0]]),
    ...     mask_BT=torch.tensor([[True, False]])))
    >>> out.per_token_BT.sum().item()
    1.0
    """
    logprobs_BT = torch.where(inputs.mask_BT, inputs.logprobs_BT, 0.0)
    advantages_BT = torch.where(inputs.mask_BT, inputs.advantages_BT, 0.0)
    return LossOutputs(per_token_BT=advantages_BT * -logprobs_BT)
