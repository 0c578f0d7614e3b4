"""Estimates of KL(policy, reference) from one sampled token each, for the loss or for the reward. Pure.

With d = l - lr (log-prob under the policy less that under the reference):

| name | value | as a loss, on policy, its mean gradient is |
|---|---|---|
| k1 | d | 0: it changes nothing |
| k2 | d^2 / 2 | that of the KL |
| k3 | exp(-d) + d - 1 | that of KL(reference, policy) |
| k3+ | value of k3, gradient of k2 | that of the KL |

k1 is unbiased and noisy, k3 unbiased (but for the cap) and never negative, k2 a little biased. In the reward only the value counts: k1 or
k3. In the loss: k2, k3+, or k3 times the ratio exp(l - lp), whose gradient is the KL's off policy too. d is clamped to
+-20 and the value of k3 to 10 (beyond it, at d < -2.6, k3 itself has no gradient; k3+ does).

Schulman, "Approximating KL divergence" (2020); the gradients: arXiv 2506.09477. Shapes: B = rows, T = positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from trainers.checks import check_one_of
from trainers.losses import log_ratio
from trainers.masked import masked

MAX_K3 = 10.0
"""A token whose probability fell to nothing under the policy would else be the whole step."""


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    return ((-d).exp() + d - 1.0).clamp(max=MAX_K3)


def _k3_plus(d: Tensor) -> Tensor:
    k2 = _k2(d)
    return k2 - k2.detach() + _k3(d).detach()


ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "k3+": _k3_plus}


def kl_estimate(
    logprobs_BT: Tensor,
    reference_BT: Tensor,
    mask_BT: Tensor,
    *,
    estimator: str = "k3+",
    ratio_BT: Tensor | None = None,
) -> Tensor:
    """The estimate at each token, with its gradient; exactly 0 where the mask is False, whatever stands there.

    `ratio_BT` multiplies it: exp(l - lp) with its gradient, which makes the mean of k3 that of the policy being trained
    although lp's policy is taken as the sampler, and its gradient the KL's. Raises SettingError for an unknown name.

    A token of probability 0.5 under the policy and 0.25 under the reference, d = ln 2:

    >>> import torch
    >>> l, lr = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
    >>> mask = torch.tensor([[True]])
    >>> [round(kl_estimate(l, lr, mask, estimator=name).item(), 4) for name in ("k1", "k2", "k3", "k3+")]
    [0.6931, 0.2402, 0.1931, 0.1931]
    """
    check_one_of("kl", "estimator", estimator, ESTIMATORS)
    estimate_BT = ESTIMATORS[estimator](log_ratio(logprobs_BT, reference_BT, mask_BT))
    if ratio_BT is not None:
        estimate_BT = estimate_BT * masked(ratio_BT, mask_BT)
    return masked(estimate_BT, mask_BT)
