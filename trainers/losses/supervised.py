"""supervised: the negative log-likelihood of tokens that are to be imitated; for warm starts and distillation."""

from __future__ import annotations

from trainers.losses import LossInputs, LossOutputs
from trainers.masked import masked


def supervised(inputs: LossInputs) -> LossOutputs:
    """x = -l. Advantages and the sampler's log-probs are not looked at, so it goes with the correction "none".

    Under token-mean its value is the usual cross-entropy in nats per token. Log-probs of -0.5 and -1.5 give 0.5 and 1.5:

    >>> import torch
    >>> nan = torch.full((1, 3), float("nan"))
    >>> supervised(LossInputs(logprobs_BT=torch.tensor([[-0.5, -1.5, -9.0]]), proximal_BT=nan, behaviour_BT=nan,
    ...     advantages_BT=nan, mask_BT=torch.tensor([[True, True, False]]))).per_token_BT.abs().tolist()
    [[0.5, 1.5, 0.0]]
    """
    return LossOutputs(per_token_BT=-masked(inputs.logprobs_BT, inputs.mask_BT))
