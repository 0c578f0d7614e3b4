"""Which group numbers are over, so that each number is asked for once and none is left out."""

from __future__ import annotations

from collections.abc import Container, Iterable


class Numbers:
    """A set of ended numbers, kept as a floor below which all have ended and the few above it.

    >>> numbers = Numbers()
    >>> numbers.end(0), numbers.end(2), numbers.floor, numbers.is_over(2), numbers.fresh({1})
    (None, None, 1, True, 3)
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        """The lowest number that has not ended."""
        self._over: set[int] = set()

    def end(self, number: int) -> None:
        """This number's group has ended."""
        if number >= self.floor:
            self._over.add(number)
        while self.floor in self._over:
            self._over.remove(self.floor)
            self.floor += 1

    def raise_floor(self, floor: int) -> None:
        """Everything below `floor` has ended."""
        self.floor = max(self.floor, floor)
        self._over = {number for number in self._over if number >= self.floor}
        while self.floor in self._over:
            self._over.remove(self.floor)
            self.floor += 1

    def end_all_but(self, alive: Iterable[int], until: int) -> None:
        """Every number below `until` has ended, except those alive."""
        alive = {number for number in alive if number >= self.floor}
        self._over |= set(range(self.floor, until)) - alive
        self.raise_floor(self.floor)

    def is_over(self, number: int) -> bool:
        """Whether this number's group has ended."""
        return number < self.floor or number in self._over

    def fresh(self, taken: Container[int]) -> int:
        """The lowest number that is neither over nor taken: the next to ask for.

        A number below others in use was left out by a dispatcher that died between two writes; it gets its turn now.
        """
        number = self.floor
        while number in self._over or number in taken:
            number += 1
        return number
