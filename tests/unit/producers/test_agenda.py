"""Which version is measured next: every n-th, once, none that is void, and when it is over."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest

from producers.agenda import Agenda, Wanted, check_split, parse_version
from producers.splits import Split
from schemas.errors import SettingError
from schemas.records import Address, Version
from schemas.rules.ending import StopAt
from support.samples import announcement, claim, evaluation, plan, result


def make(every: int = 2, stop_at: StopAt | None = None, **wanted: Any) -> Agenda:
    return Agenda(
        Wanted(**wanted), run="demo", policy="main", task="sort-digits", every=every, stop_at=stop_at or StopAt()
    )


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
    agenda = make(every=4, stop_at=StopAt(steps=6), follow=True)
    announced(agenda, 6)
    assert order(agenda, *((1, v) for v in range(7))) == ["1-0", "1-4", "1-6"] and agenda.done


def test_it_is_not_over_before_the_last_version_has_reached_this_bucket() -> None:
    agenda = make(every=4, stop_at=StopAt(steps=6), follow=True)
    announced(agenda, 6)
    assert order(agenda, (1, 0), (1, 4)) == ["1-0", "1-4"] and not agenda.done
    assert order(agenda, (1, 0), (1, 4), (1, 6)) == ["1-6"] and agenda.done


def planned(agenda: Agenda, num_tokens: int, *, hours: float = 0.0, epoch: int = 1) -> None:
    """Another step of so many tokens, or a plan of none."""
    ledger, ms = agenda._ledger, round(hours * 3_600_000)
    if ledger.claims.epoch < epoch:
        agenda.read_step(ledger.end, claim(epoch=epoch, nonce=f"n{epoch}"), ms)
    step = ledger.steps_planned
    samples = (Address(0, step, step, 1),) if num_tokens else ()
    owner: dict[str, Any] = {"epoch": epoch, "nonce": f"n{epoch}", "step": step}
    agenda.read_step(ledger.end, plan(samples=samples, drops=(), num_tokens=num_tokens, **owner), ms)
    if samples:
        agenda.read_step(ledger.end, result(version=step + 1, **owner), ms)


def test_a_run_of_tokens_says_on_steps_which_version_is_its_last() -> None:
    agenda = make(every=4, stop_at=StopAt(tokens=600), follow=True)
    assert agenda.needs_steps
    for _ in range(5):
        planned(agenda, 100)
    announced(agenda, 5)
    assert order(agenda, *((1, v) for v in range(6))) == ["1-0", "1-4"] and not agenda.done
    planned(agenda, 100)
    assert not agenda.done, "the last version is not announced"
    announced(agenda, 6)
    assert not agenda.done
    assert order(agenda, *((1, v) for v in range(7))) == ["1-6"] and agenda.done


def test_hours_may_be_over_without_a_further_step_or_without_any() -> None:
    agenda = make(every=4, stop_at=StopAt(hours=2.0), follow=True)
    planned(agenda, 100)
    announced(agenda, 1)
    assert order(agenda, (1, 0), (1, 1)) == ["1-0"] and not agenda.done
    planned(agenda, 0, hours=2.0)
    assert order(agenda, (1, 0), (1, 1)) == ["1-1"] and agenda.done
    starved = make(stop_at=StopAt(hours=2.0), follow=True)
    announced(starved, 0)
    planned(starved, 0)
    planned(starved, 0, hours=2.0)
    assert not starved.done
    assert order(starved, (1, 0)) == ["1-0"] and starved.done


def test_steps_are_read_only_where_they_alone_tell_the_end() -> None:
    assert not make(stop_at=StopAt(steps=3), follow=True).needs_steps
    assert not make(stop_at=StopAt(tokens=3)).needs_steps
    assert make(stop_at=StopAt(steps=9, hours=1.0), follow=True).needs_steps


def test_what_was_read_of_steps_is_forgotten_with_the_rest() -> None:
    agenda = make(stop_at=StopAt(tokens=1), follow=True)
    planned(agenda, 1)
    agenda.forget()
    assert agenda._ledger.steps_planned == 0


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
    agenda = make(every=1, stop_at=StopAt(steps=1), follow=True)
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
