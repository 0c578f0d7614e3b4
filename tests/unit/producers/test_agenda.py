"""Which version is measured next: every n-th, once, none that is void, and when it is over."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest

from producers.agenda import Agenda, Wanted, check_split, parse_version
from producers.splits import Split
from schemas.errors import SettingError
from schemas.records import Version
from support.samples import announcement, claim, evaluation


def make(every: int = 2, last: int = 0, **wanted: Any) -> Agenda:
    return Agenda(Wanted(**wanted), run="demo", policy="main", task="sort-digits", every=every, last=last)


def announced(agenda: Agenda, version: int, epoch: int = 1) -> None:
    agenda.read(announcement(epoch=epoch, nonce=f"n{epoch}", version=version))


def claimed(agenda: Agenda, epoch: int, head: tuple[int, int]) -> None:
    agenda.read(claim(epoch=epoch, nonce=f"n{epoch}", head_epoch=head[0], head_version=head[1]))


def measured(agenda: Agenda, name: Version, split: str = "held-out") -> None:
    agenda.read(evaluation(epoch=name.epoch, version=name.version, split=split, task="sort-digits"))


def stored(*names: tuple[int, int]) -> Any:
    return lambda: [Version(*name) for name in sorted(names, reverse=True)]


def order(agenda: Agenda, *names: tuple[int, int]) -> list[str]:
    """All that is measured now, one after the other."""
    found = []
    while (name := agenda.next(stored(*names))) is not None:
        found.append(str(name))
        measured(agenda, name)
    return found


def test_every_nth_version_is_measured_oldest_first_and_each_once() -> None:
    agenda = make(every=2, follow=True)
    assert agenda.next(stored((1, 0))) is None, "a manifest that was not announced may never be"
    announced(agenda, 5)
    assert order(agenda, *((1, v) for v in range(7))) == ["1-0", "1-2", "1-4"]
    announced(agenda, 6)
    assert order(agenda, *((1, v) for v in range(7))) == ["1-6"] and not agenda.done


def test_the_runs_last_version_is_measured_whatever_its_number() -> None:
    agenda = make(every=4, last=6, follow=True)
    announced(agenda, 6)
    assert order(agenda, *((1, v) for v in range(7))) == ["1-0", "1-4", "1-6"] and agenda.done


def test_it_is_not_over_before_the_last_version_has_reached_this_bucket() -> None:
    agenda = make(every=4, last=6, follow=True)
    announced(agenda, 6)
    assert order(agenda, (1, 0), (1, 4)) == ["1-0", "1-4"] and not agenda.done
    assert order(agenda, (1, 0), (1, 4), (1, 6)) == ["1-6"] and agenda.done


def test_versions_of_a_superseded_trainer_are_not_measured() -> None:
    agenda = make(every=1, follow=True)
    announced(agenda, 2)
    claimed(agenda, 2, (1, 2))
    announced(agenda, 3, epoch=2)
    assert order(agenda, (1, 1), (1, 2), (1, 3), (1, 9), (2, 3)) == ["1-1", "1-2", "2-3"]


def test_another_split_or_task_is_another_measurement() -> None:
    agenda = make(every=1, follow=True)
    announced(agenda, 0)
    measured(agenda, Version(1, 0), split="training")
    agenda.read(evaluation(epoch=1, version=0, task="other"))
    assert order(agenda, (1, 0)) == ["1-0"]


def test_without_following_it_is_the_newest_at_the_start() -> None:
    agenda = make()
    assert agenda.next(stored()) is None and not agenda.done and not agenda.named
    announced(agenda, 7)
    assert agenda.next(stored()) == Version(1, 7) and agenda.named
    announced(agenda, 8)
    assert agenda.next(stored()) == Version(1, 7), "versions that come meanwhile are not what was asked for"
    measured(agenda, Version(1, 7))
    assert agenda.next(stored()) is None and agenda.done and agenda.result() is not None


def test_a_named_version_is_measured_unless_it_was() -> None:
    agenda = make(version="1-3")
    assert agenda.next(stored()) == Version(1, 3) and agenda.result() is None
    measured(agenda, Version(1, 3))
    assert agenda.done and agenda.next(stored()) is None


def test_what_was_given_up_is_left_alone() -> None:
    agenda = make(every=1, last=1, follow=True)
    announced(agenda, 1)
    agenda.give_up(Version(1, 0))
    assert order(agenda, (1, 0), (1, 1)) == ["1-1"] and agenda.done


def test_of_two_records_about_one_thing_the_first_counts() -> None:
    agenda = make(version="1-3")
    agenda.read(evaluation(epoch=1, version=3, task="sort-digits", split="held-out", mean_reward=0.25, low=0.0))
    agenda.read(evaluation(epoch=1, version=3, task="sort-digits", split="held-out", mean_reward=0.5))
    result = agenda.result()
    assert result is not None and result.mean_reward == 0.25
    agenda.read(None)
    agenda.forget()
    assert agenda.result() is None


@pytest.mark.parametrize("text", ["4", "1-", "-4", "1-x", "1-4-2"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="give epoch and number, such as 1-40"):
        parse_version(text)


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        ("heldout", Split(None, 0, 0.0), "did you mean 'held-out'"),
        ("held-out", Split(50, 0, 0.0), "p.eval.share is 0: of 50 items 0 are in the split 'held-out'"),
        ("training", Split(1, 0, 0.0), "of 1 items 1 are in the split 'training'"),
    ],
)
def test_a_split_without_items_is_refused(name: str, split: Split, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        check_split(name, split, "p.eval.share")
    check_split("held-out", Split(None, 0, 0.0), "p.eval.share")


def test_doctests() -> None:
    for module in ("producers.agenda", "schemas.rules.evals"):
        result = doctest.testmod(importlib.import_module(module))
        assert result.attempted and not result.failed
