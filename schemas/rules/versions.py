"""Versions: the number of completed weight-changing steps, named with the epoch of the trainer that published them."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.records import Version, VersionRun

GIVEN = Version(0, 0)
"""The weights of tokens that no policy sampled: demonstrations. Epochs of trainers begin at 1."""


def oldest_version(runs: Iterable[VersionRun]) -> int | None:
    """Least version among tokens; None where there are none.

    >>> oldest_version([VersionRun(1, 4, 10), VersionRun(1, 5, 2)])
    4
    """
    return min((run.version for run in runs if run.count > 0), default=None)


def is_given(runs: Iterable[VersionRun]) -> bool:
    """Whether some tokens were sampled by no weights: demonstrations.

    >>> is_given([VersionRun(0, 0, 3)]), is_given([VersionRun(1, 0, 3)])
    (True, False)
    """
    return any(run[:2] == GIVEN for run in runs)


def age(planning_version: int, oldest: int) -> int:
    """Versions that completed between the oldest token and planning.

    >>> age(9, 7)
    2
    """
    return planning_version - oldest


def newer(left: Version, right: Version) -> bool:
    """Whether `left` supersedes `right`: by version, then by epoch.

    >>> newer(Version(2, 7), Version(1, 7)), newer(Version(2, 6), Version(1, 7))
    (True, False)
    """
    return (left.version, left.epoch) > (right.version, right.epoch)


class Lineage:
    """Which weights the run really went through: version v counts if its step has an effective result.

    Epoch e may have published v only if the result of step v - 1 came from e itself or from an earlier trainer that e
    inherited; what a superseded trainer went on to make is not in the lineage.

    >>> lineage = Lineage()
    >>> lineage.completed(step=0, epoch=1)
    >>> lineage.holds(1, 0), lineage.holds(1, 1), lineage.holds(2, 1), lineage.holds(1, 2)
    (True, True, True, False)
    >>> lineage.completed(step=1, epoch=2)
    >>> lineage.holds(1, 2), lineage.holds(2, 2)
    (False, True)
    """

    def __init__(self) -> None:
        self._epochs: list[int] = []

    def completed(self, step: int, epoch: int) -> None:
        """Step `step` has an effective result by trainer `epoch`; steps come in order."""
        assert step == len(self._epochs), (step, len(self._epochs))
        self._epochs.append(epoch)

    def holds(self, epoch: int, version: int) -> bool:
        """Whether tokens of these weights may be trained on."""
        if version == 0:
            return True
        return 0 < version <= len(self._epochs) and self._epochs[version - 1] <= epoch

    @property
    def head(self) -> int:
        """The newest version that exists: completed steps."""
        return len(self._epochs)
