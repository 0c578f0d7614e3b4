"""What a starved trainer says: since when it waits, for what, and where the missing groups may be."""

from __future__ import annotations

FIRST_S = 10.0
LONGEST_S = 300.0


class Patience:
    """When to speak while waiting: after 10 s, then at twice the time, at most every 300 s.

    >>> patience = Patience()
    >>> [seconds for seconds in range(0, 100, 5) if patience.is_over(float(seconds))]
    [10, 20, 40, 80]
    """

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def is_over(self, waited_s: float) -> bool:
        """Whether something should be said now."""
        if waited_s < self._next_s:
            return False
        self._next_s = waited_s + min(waited_s, LONGEST_S)
        return True


def starved_line(
    waited_s: float,
    *,
    waiting: int,
    batch_groups: int,
    max_staleness: int,
    set_aside: int,
    planned: int,
    published: int,
) -> str:
    """One line for the log.

    >>> print(starved_line(12.3, waiting=5, batch_groups=16, max_staleness=2, set_aside=2, planned=7, published=6))
    waiting 12 s for outcomes of step 7: 5 of 16 groups there, 2 set aside since the last step; at most 48 are asked for \
ahead ((max_staleness + 1) batch_groups); weights published up to version 6, version 7 follows with publish_every
    """
    behind = "" if published >= planned else f", version {planned} follows with publish_every"
    return (
        f"waiting {waited_s:.0f} s for outcomes of step {planned}: {waiting} of {batch_groups} groups there, {set_aside} set "
        f"aside since the last step; at most {(max_staleness + 1) * batch_groups} are asked for ahead ((max_staleness + 1) "
        f"batch_groups); weights published up to version {published}{behind}"
    )
