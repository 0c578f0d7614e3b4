"""Admission: how many groups may be asked for so that none can grow older than the bound, and with which weights.

The formula is AReaL's (arXiv 2505.24298), in groups, with the number of planned steps in the place of the version:
what is admitted now is planned after everything admitted before, B groups a step.
"""

from __future__ import annotations


def free_groups(*, capacity: int, running: int, backlog: int, batch_groups: int, max_staleness: int) -> int:
    """min(C - running, (eta + 1) B - (backlog + running)), never below 0.

    running: groups requested and not closed; backlog: groups kept and not planned.

    >>> free_groups(capacity=64, running=10, backlog=16, batch_groups=16, max_staleness=2)
    22
    >>> free_groups(capacity=12, running=10, backlog=0, batch_groups=16, max_staleness=2)
    2
    """
    return max(0, min(capacity - running, (max_staleness + 1) * batch_groups - (backlog + running)))


def target_step(*, steps_planned: int, running: int, backlog: int, batch_groups: int) -> int:
    """The step that will eat the next group asked for; also the version current when it is planned.

    >>> target_step(steps_planned=7, running=10, backlog=16, batch_groups=16)
    8
    """
    return steps_planned + (backlog + running) // batch_groups


def min_version(target: int, max_staleness: int) -> int:
    """Oldest weights that a request may be started with: max(0, target - eta).

    >>> min_version(8, 2), min_version(1, 2)
    (6, 0)
    """
    return max(0, target - max_staleness)


def remaining_groups(*, steps: int, steps_planned: int, running: int, backlog: int, batch_groups: int) -> int | None:
    """Groups still wanted for a run of `steps` steps; None for a run without end.

    >>> remaining_groups(steps=10, steps_planned=8, running=3, backlog=16, batch_groups=16)
    13
    """
    if steps == 0:
        return None
    return max(0, (steps - steps_planned) * batch_groups - (running + backlog))
