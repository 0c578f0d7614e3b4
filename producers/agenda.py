"""Which version an evaluator measures next, from what stands on the log and in the store. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from infra.weights.announce import Heads, fold
from producers.splits import HELD_OUT, SPLITS, Split
from schemas.errors import SettingError
from schemas.names import nearest
from schemas.records import Announcement, Claim, Eval, Record, Version
from schemas.rules.ending import StopAt
from schemas.rules.evals import Evaluated, about
from schemas.rules.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which versions, and how. `follow`: every `every`-th as it comes, and the run's last; else one: the newest, or `version`."""

    follow: bool = False
    version: str = ""
    every: int = 0
    """0: as the settings say."""
    episodes: int = 0
    """0: as the settings say."""
    split: str = HELD_OUT


class Agenda:
    """A fold over `weights` and `evals`, and over `steps` where these alone tell the run's last version."""

    def __init__(self, wanted: Wanted, *, run: str, policy: str, task: str, every: int, stop_at: StopAt) -> None:
        self._follow, self._every, self._stop_at = wanted.follow, every, stop_at
        self._one = parse_version(wanted.version) if wanted.version else None
        self._task, self._split = task, wanted.split
        self._given_up: set[Version] = set()
        self.heads = Heads(run, policy)
        self.found: dict[Evaluated, Eval] = {}
        self._ledger = Ledger()

    @property
    def needs_steps(self) -> bool:
        """Whether `steps` is to be read: a run that ends by tokens or hours says there which version is its last."""
        return self._follow and bool(self._stop_at.tokens or self._stop_at.hours)

    @property
    def named(self) -> bool:
        """Whether one version is wanted, and it is known which."""
        return self._one is not None

    def read(self, record: Record | None) -> None:
        """The next record of `weights` or `evals`; None for one that cannot be read."""
        if isinstance(record, Eval):
            self.found.setdefault(about(record), record)
        elif isinstance(record, (Announcement, Claim)):
            self.heads = fold(self.heads, record)

    def read_step(self, offset: int, record: Record | None, time_ms: int) -> None:
        """The next record of `steps`, appended at `time_ms`."""
        self._ledger.take(offset, record, time_ms)

    def forget(self) -> None:
        """All topics are read again from their beginnings."""
        self.heads, self.found, self._ledger = Heads(self.heads.run, self.heads.policy), {}, Ledger()

    def give_up(self, name: Version) -> None:
        """Measure this version no more in this process."""
        self._given_up.add(name)

    def next(self, stored: Callable[[], Iterable[Version]]) -> Version | None:
        """The version to measure now; None while there is none. `stored`: versions in the store, asked for if needed."""
        head = self.heads.head
        if self._one is None and not self._follow and head is not None:
            self._one = head.name  # what is announced from here on is not what was asked for
        due = self._due(stored) if self._follow else [self._one] if self._one else []
        return next((name for name in due if not self._is_over(name)), None)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, now or later."""
        if not self._follow:
            return self._one is not None and self._is_over(self._one)
        head, last = self.heads.head, self._last
        return last is not None and head is not None and head.name.version >= last and self._is_over(head.name)

    @property
    def _last(self) -> int | None:
        """The run's last version; None while it is not known."""
        return self._ledger.steps_planned if self._ledger.ended(self._stop_at) else self._stop_at.steps or None

    def result(self) -> Eval | None:
        """What was found of the one version wanted."""
        return self.found.get(self._about(self._one)) if self._one else None

    def _due(self, stored: Callable[[], Iterable[Version]]) -> list[Version]:
        """Versions that are published and not void: every n-th and the last, oldest first."""
        if self.heads.head is None:
            return []
        names = [name for name in stored() if self.heads.covers(name)]
        return sorted(name for name in names if name.version % self._every == 0 or name.version == self._last)

    def _is_over(self, name: Version) -> bool:
        return self._about(name) in self.found or name in self._given_up

    def _about(self, name: Version) -> Evaluated:
        return Evaluated(name, self._task, self._split)


def parse_version(text: str) -> Version:
    """EPOCH-VERSION as a version. Raises SettingError.

    >>> parse_version("1-40")
    Version(epoch=1, version=40)
    """
    epoch, dash, version = text.partition("-")
    if not (dash and epoch.isdecimal() and version.isdecimal()):
        raise SettingError(f"--version {text!r} is no version: give epoch and number, such as 1-40")
    return Version(int(epoch), int(version))


def check_split(name: str, split: Split, setting: str) -> None:
    """Refuse, with SettingError, a split that is not known or has no two items."""
    if name not in SPLITS:
        raise SettingError(f"--split {name!r} is not known; {nearest(name, SPLITS)}")
    there = split.num_held_out if name == HELD_OUT else split.num_training
    if there is not None and there < 2:
        raise SettingError(
            f"{setting} is {split.share:g}: of {split.num_items} items {there} are in the split {name!r}, and an "
            "evaluation needs 2; set another share (before training starts: what was trained on is not held out)"
        )
