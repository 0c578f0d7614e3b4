"""kl-in-reward: each token pays for its distance from a reference (as in RLHF, arXiv 2203.02155)."""

from __future__ import annotations

from trainers.checks import check_not_negative, check_one_of
from trainers.kl import ESTIMATORS, kl_estimate
from trainers.masked import masked
from trainers.normalise import NormaliserInputs, NormaliserOutputs, needed


def kl_in_reward(inputs: NormaliserInputs, *, beta: float = 0.01, estimator: str = "k1") -> NormaliserOutputs:
    """r_t - beta k(lp_t, lr_t) at each trainable token, for a normaliser that follows and makes advantages of rewards.

    By itself it changes no advantage: put gae after it. (reinforce-plus-plus has a `beta` of its own.) The figure
    `reference_kl` is the mean of k over the step's tokens.

    A token twice as likely as under the reference pays 0.5 ln 2:

    >>> import torch
    >>> zeros, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    >>> inputs = NormaliserInputs(advantages_BT=zeros, mask_BT=mask, rewards_B=torch.ones(1), rewards_BT=torch.ones(1, 1),
    ...     proximal_BT=torch.tensor([[0.5]]).log(), reference_BT=torch.tensor([[0.25]]).log())
    >>> round(kl_in_reward(inputs, beta=0.5).rewards_BT.item(), 4)
    0.6534
    """
    check_not_negative("kl-in-reward", "beta", beta)
    check_one_of("kl-in-reward", "estimator", estimator, ESTIMATORS)
    proximal_BT = needed("kl-in-reward", "log-probs of the trainer's weights", inputs.proximal_BT)
    reference_BT = needed("kl-in-reward", "a reference", inputs.reference_BT)
    mask_BT = inputs.mask_BT
    kl_BT = kl_estimate(proximal_BT.detach(), reference_BT.detach(), mask_BT, estimator=estimator)
    return NormaliserOutputs(
        advantages_BT=masked(inputs.advantages_BT, mask_BT),
        rewards_BT=masked(inputs.rewards_BT, mask_BT) - beta * kl_BT,
        figures={"reference_kl": float(kl_BT[mask_BT].double().mean()) if bool(mask_BT.any()) else 0.0},
    )
