"""Demonstrations: which training settings may eat tokens that no policy sampled, and of which no log-probs exist."""

from __future__ import annotations

from infra.settings import TrainTable

LOSSES_WITHOUT_LOGPROBS = frozenset({"supervised"})
"""Losses that look at no log-prob but that of the weights being trained."""


def takes_demonstrations(table: TrainTable) -> bool:
    """Whether demonstrations may be trained on: a loss without a ratio, and no correction, for those are made of ratios.

    >>> takes_demonstrations(TrainTable(loss="supervised", correction="none", max_staleness=0)), takes_demonstrations(TrainTable())
    (True, False)
    """
    return table.loss in LOSSES_WITHOUT_LOGPROBS and all(name == "none" for name in table.corrections)
