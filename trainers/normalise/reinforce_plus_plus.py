"""reinforce-plus-plus: the return from each token on, whitened over the step; no groups, no values (arXiv 2501.03262)."""

from __future__ import annotations

import dataclasses

from trainers.checks import check_not_negative, check_share
from trainers.gae import returns_to_go
from trainers.normalise import NormaliserInputs, NormaliserOutputs, spread, whitened
from trainers.normalise.kl_in_reward import kl_in_reward


def reinforce_plus_plus(
    inputs: NormaliserInputs, *, beta: float = 0.0, gamma: float = 1.0, eps: float = 1e-8
) -> NormaliserOutputs:
    """A = whitened G, G_t = r_t - beta k1(lp_t, lr_t) + gamma G_t', t' the row's next trainable token.

    The whole step is the baseline, so it works with one sample for each prompt; the advantages that the processor made
    are not used. With beta above 0 it needs a reference. `returns_BT` is G, before whitening.

    Rewards 1 and 3 on the last of two tokens give the returns 1, 1, 3, 3: mean 2, deviation 1.1547:

    >>> import torch
    >>> inputs = NormaliserInputs(advantages_BT=torch.zeros(2, 2), mask_BT=torch.ones(2, 2, dtype=torch.bool),
    ...     rewards_B=torch.tensor([1.0, 3.0]), rewards_BT=torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    >>> reinforce_plus_plus(inputs).advantages_BT.double().round(decimals=4).tolist()
    [[-0.866, -0.866], [0.866, 0.866]]
    """
    check_not_negative("reinforce-plus-plus", "beta", beta)
    check_share("reinforce-plus-plus", "gamma", gamma)
    check_not_negative("reinforce-plus-plus", "eps", eps)
    figures: dict[str, float] = {}
    if beta > 0:
        paid = kl_in_reward(inputs, beta=beta, estimator="k1")
        assert paid.rewards_BT is not None
        inputs, figures = dataclasses.replace(inputs, rewards_BT=paid.rewards_BT), dict(paid.figures)
    returns_BT = returns_to_go(inputs.rewards_BT, inputs.mask_BT, gamma=gamma)
    return NormaliserOutputs(
        advantages_BT=whitened(returns_BT, inputs.mask_BT, eps=eps),
        returns_BT=returns_BT,
        figures={**figures, **spread(returns_BT, inputs.mask_BT, "return")},
    )
