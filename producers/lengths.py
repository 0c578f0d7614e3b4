"""Predicted lengths: long groups start first, as long as the prediction is worth anything. Pure.

Started last, one long group keeps everybody waiting; started first, short ones fill up behind it (the rule of longest
processing time first). A prediction that orders groups no better than chance only delays them, so its rank correlation
with what came is measured, and below a threshold groups start in the order of their arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from producers.curriculum import History

_WINDOW = 256
_LEAST_PAIRS = 24
_LEAST_CORRELATION = 0.2


def predicted_length(item: int, history: History) -> float | None:
    """Sampled tokens per member that a group of this item will take: the mean of its past groups; None without any.

    >>> from producers.curriculum import Finished
    >>> history = History(memory=4, partitions=1)
    >>> for number, length in enumerate((10.0, 30.0)):
    ...     history.saw(0, Finished(number, 7, (), length))
    >>> predicted_length(7, history), predicted_length(8, history)
    (20.0, None)
    """
    lengths = [entry.num_sampled for entry in history.of(item) if entry.num_sampled]
    return sum(lengths) / len(lengths) if lengths else None


class Predictions:
    """How well predicted lengths ordered the groups that came lately, and the order that follows from it."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def came(self, predicted: float | None, actual: float) -> None:
        """A group came whose length was predicted before."""
        if predicted is not None and actual > 0:
            self._pairs.append((predicted, actual))

    @property
    def correlation(self) -> float:
        """Rank correlation over the newest pairs; 0 while there are too few to tell."""
        return rank_correlation(list(self._pairs)) if len(self._pairs) >= _LEAST_PAIRS else 0.0

    def order(self, predicted: Sequence[float | None]) -> list[int]:
        """Places of these groups, longest first, unknown lengths as the mean of the known; as they came where predictions do not help.

        >>> Predictions().order([5.0, 9.0])
        [0, 1]
        """
        places = list(range(len(predicted)))
        known = [length for length in predicted if length is not None]
        if not known or self.correlation < _LEAST_CORRELATION:
            return places
        mean = sum(known) / len(known)
        lengths = [mean if length is None else length for length in predicted]
        return sorted(places, key=lambda place: -lengths[place])


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's rho: the correlation of ranks, equal values sharing their mean rank; 0 where one side is constant.

    >>> rank_correlation([(1, 10), (2, 20), (3, 15)])
    0.5
    """
    first, second = _ranks([one for one, _ in pairs]), _ranks([other for _, other in pairs])
    mean = (len(pairs) - 1) / 2
    across = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second)
    return float(across / spread**0.5) if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks
