"""binary-gate: tokens whose probability differs too much between sampler and trainer are left out (arXiv 2602.04879)."""

from __future__ import annotations

from schemas.errors import SettingError
from trainers import binary
from trainers.checks import check_not_negative, check_one_of
from trainers.corrections import CorrectionInputs, CorrectionOutputs, gate
from trainers.masked import masked

DISTANCES = {"tv": binary.total_variation, "kl": binary.kl}


def binary_gate(inputs: CorrectionInputs, *, distance: str = "tv", limit: float = 0.2) -> CorrectionOutputs:
    """1 if the distance <= limit, else 0, seen as a choice between this token and all others: p = e^lmu, q = e^lp.

    `distance`: "tv" is abs(p - q), from 0 to 1; "kl" is p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)), in nats. A rare
    token may change by a large ratio and pass; a likely one may not. Kept tokens weigh 1: multiply with token-truncated
    to correct them as well.

    From 0.5 to 0.9 is too far, from 0.001 to 0.003 is not:

    >>> import torch
    >>> p, q = torch.tensor([[0.5, 0.001]]), torch.tensor([[0.9, 0.003]])
    >>> binary_gate(CorrectionInputs(log_weight_BT=(q / p).log(), mask_BT=torch.ones(1, 2).bool(),
    ...     behaviour_BT=p.log())).weights_BT.tolist()
    [[0.0, 1.0]]
    """
    check_one_of("binary-gate", "distance", distance, DISTANCES)
    check_not_negative("binary-gate", "limit", limit)
    if inputs.behaviour_BT is None:
        raise SettingError("binary-gate looks at the sampler's log-probs, and none were given")
    behaviour_BT = masked(inputs.behaviour_BT, inputs.mask_BT).detach()
    proximal_BT = behaviour_BT + inputs.log_weight_BT.detach()
    return gate(DISTANCES[distance](behaviour_BT, proximal_BT) <= limit, inputs, "rejected")
