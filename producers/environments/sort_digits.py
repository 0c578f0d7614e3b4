"""sort-digits: the prompt is a few digits and '>', the answer is the same digits sorted.

Endless: item i is drawn from (seed, i). Small enough to be learnt from random weights within a minute on a CPU.
"""

from __future__ import annotations

import random

from producers.environment import Observation, Verdict
from schemas.errors import SettingError
from schemas.records import Status
from schemas.seeds import derive_seed

END = ">"


def share_right(answer: str, expected: str) -> float:
    """Share of right characters: matching places / the length of the longer of the two texts, 0..1.

    Every missing and every superfluous character counts as a wrong one.

    >>> share_right("1234", "1234"), share_right("1243", "1234"), share_right("12", "1234"), share_right("12345", "1234")
    (1.0, 0.5, 0.5, 0.8)
    """
    if not expected and not answer:
        return 1.0
    return sum(a == b for a, b in zip(answer, expected, strict=False)) / max(len(answer), len(expected))


class SortDigitsSession:
    """One prompt, one answer."""

    def __init__(self, digits: str, expected: str) -> None:
        self.digits, self.expected = digits, expected
        self.done = False
        self._answer = ""
        self._truncated = False

    def observe(self) -> Observation:
        """The digits and the end sign."""
        return Observation(text=self.digits + END)

    def act(self, text: str, truncated: bool) -> None:
        """The answer; there is one."""
        self._answer, self._truncated, self.done = text, truncated, True

    def verdict(self) -> Verdict:
        """Share of right characters; the part `exact` says whether all of them are."""
        reward = share_right(self._answer, self.expected)
        status = Status.TRUNCATED if self._truncated else Status.OK
        return Verdict(status=status, reward=reward, parts={"exact": float(self._answer == self.expected)})


class SortDigits:
    """The environment; `sort_digits` makes it."""

    num_items: int | None = None
    rebuildable = True

    def __init__(self, seed: int, digits: int, alphabet: str) -> None:
        self.seed, self.digits, self.alphabet = seed, digits, alphabet

    def payload(self, item: int) -> str:
        """Empty: item and seed are enough."""
        return ""

    def open(self, item: int, payload: str, seed: int) -> SortDigitsSession:
        """The session of one item; the session's own seed changes nothing."""
        draw = random.Random(derive_seed(self.seed, "sort-digits", item))
        digits = "".join(draw.choices(self.alphabet, k=self.digits))
        return SortDigitsSession(digits, "".join(sorted(digits, key=self.alphabet.index)))


def sort_digits(seed: int, *, digits: int = 5, alphabet: str = "0123456789") -> SortDigits:
    """Sort `digits` characters drawn with repetition from `alphabet`, in the alphabet's own order.

    >>> session = sort_digits(0, digits=4).open(0, "", 0)
    >>> session.act(session.expected, truncated=False)
    >>> session.verdict().reward
    1.0
    """
    if digits < 1:
        raise SettingError(f"environment 'sort-digits': digits is {digits}; it must be at least 1")
    if len(alphabet) < 2 or len(set(alphabet)) != len(alphabet) or END in alphabet:
        raise SettingError(
            f"environment 'sort-digits': alphabet is {alphabet!r}; it needs 2 or more different characters, without {END!r}"
        )
    return SortDigits(seed, digits, alphabet)
