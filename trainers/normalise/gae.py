"""gae: advantages from a value head, and the targets that it learns (arXiv 1506.02438)."""

from __future__ import annotations

from trainers import gae as estimates
from trainers.checks import check_share
from trainers.normalise import NormaliserInputs, NormaliserOutputs, needed, spread


def gae(
    inputs: NormaliserInputs, *, gamma: float = 1.0, lam: float = 0.95, bootstrap: bool = True
) -> NormaliserOutputs:
    """A_t = d_t + gamma lam A_t', d_t = r_t + gamma V_t' - V_t, t' the row's next trainable token; returns A + V.

    `bootstrap` takes the value after the last token of a row that was cut off, where the step knows it; without, a row
    that was cut off ends with nothing to come. Not whitened: put whiten after it for that (verl does).

    >>> import torch
    >>> inputs = NormaliserInputs(advantages_BT=torch.zeros(1, 2), mask_BT=torch.ones(1, 2, dtype=torch.bool),
    ...     rewards_B=torch.tensor([3.0]), rewards_BT=torch.tensor([[0.0, 3.0]]), values_BT=torch.tensor([[1.0, 2.0]]))
    >>> gae(inputs, lam=0.5).advantages_BT.tolist()
    [[1.5, 1.0]]
    """
    check_share("gae", "gamma", gamma)
    check_share("gae", "lam", lam)
    values_BT = needed("gae", "values", inputs.values_BT).detach()
    found = estimates.gae(
        inputs.rewards_BT,
        values_BT,
        inputs.mask_BT,
        gamma=gamma,
        lam=lam,
        bootstrap_B=inputs.bootstrap_B if bootstrap else None,
    )
    return NormaliserOutputs(
        advantages_BT=found.advantages_BT.to(inputs.advantages_BT.dtype),
        returns_BT=found.returns_BT,
        figures=spread(found.returns_BT, inputs.mask_BT, "return"),
    )
