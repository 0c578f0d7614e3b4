"""opsm: bad rows that the trainer's weights would hardly have sampled are left out (off-policy sequence masking, arXiv 2512.02556)."""

from __future__ import annotations

from schemas.errors import SettingError
from trainers.checks import check_not_negative
from trainers.corrections import CorrectionInputs, CorrectionOutputs, gate
from trainers.masked import row_mean


def opsm(inputs: CorrectionInputs, *, limit: float = 0.1) -> CorrectionOutputs:
    """0 for a row whose mean advantage is negative and whose mean over tokens of lmu - lp is above limit, else 1.

    A mistake that one would no longer make teaches little, and pushing it further down is what destabilises; a success
    from anywhere is worth learning. Kept tokens weigh 1: multiply with token-truncated to correct them as well.

    Two rows that have become rarer by 0.5 nats per token; the one with the negative advantage goes:

    >>> import torch
    >>> out = opsm(CorrectionInputs(log_weight_BT=torch.full((2, 2), -0.5), mask_BT=torch.ones(2, 2).bool(),
    ...     advantages_BT=torch.tensor([[1.0, 1.0], [-1.0, -1.0]])))
    >>> out.weights_BT.tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    check_not_negative("opsm", "limit", limit)
    if inputs.advantages_BT is None:
        raise SettingError("opsm looks at advantages, and none were given: use it where a step has them")
    is_bad_B1 = row_mean(inputs.advantages_BT, inputs.mask_BT) < 0
    is_far_B1 = row_mean(-inputs.log_weight_BT.detach(), inputs.mask_BT) > limit
    return gate(~(is_bad_B1 & is_far_B1), inputs, "rejected")
