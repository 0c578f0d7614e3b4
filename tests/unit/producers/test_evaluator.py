"""The evaluator on a log in memory: each version once, with its own weights, outside everything that training counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from infra.audit import audit
from infra.heartbeat import Heart
from infra.lifecycle import Exit, Stop
from infra.memory_log import MemoryLog
from infra.memory_store import MemoryStore
from infra.settings import Settings
from producers.agenda import Wanted
from producers.evaluator import Evaluator
from schemas.errors import BrokerError, DependencyError, SettingError, StoreError
from schemas.names import manifest_key
from schemas.records import Address, Announcement, Eval, Version
from schemas.validate import check_eval
from support import graded
from support.loop import POLICY, RUN, Codec, InlineCalls, StubHeart, append, make_daemon, make_log, make_settings, said
from support.samples import claim, evaluation, plan, result
from support.weights import put

ENGINE = {"engine": "support.graded:make", "concurrency": 7}


class Scene:
    """A log and a store that outlive evaluators."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        changed: dict[str, Any] = {"rollout": ENGINE, "eval": {"episodes": 40}, "sampling": {"max_tokens": 4}, **tables}
        self.settings: Settings = make_settings(folder, **changed)
        self.log: MemoryLog = make_log(self.settings)
        self.store, self.heart, self.stop = MemoryStore(), StubHeart(), Stop()

    def publish(self, *versions: int, epoch: int = 1) -> None:
        for version in versions:
            announced: list[Announcement] = []
            put(self.store, version, epoch=epoch, nonce=f"n{epoch}", announced=announced)
            append(self.log, "weights", *announced, key=str(epoch).encode())

    def start(self, name: str = "e", **wanted: Any) -> Evaluator:
        daemon = make_daemon(self.log, self.settings, name=name, store=self.store, stop=self.stop)
        return Evaluator(daemon, cast(Heart, self.heart), Wanted(**wanted))

    def evals(self) -> list[Eval]:
        return [record for record in said(self.log, "evals") if isinstance(record, Eval)]

    def measured(self) -> list[str]:
        return [f"{record.epoch}-{record.version}" for record in self.evals()]


def turns(evaluator: Evaluator, count: int = 8) -> None:
    for _ in range(count):
        if not evaluator.done:
            evaluator.turn()
    evaluator.close()


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    monkeypatch.setattr("producers.evaluator.Tokenizer", Codec)
    monkeypatch.setattr("producers.evaluator.Calls", InlineCalls)
    monkeypatch.setattr("producers.evaluator._POLL_S", 0.0)
    graded.LOADED.clear()

    def made(**tables: Any) -> Scene:
        return Scene(tmp_path, **tables)

    yield made


@pytest.fixture
def scene(make: Callable[..., Scene]) -> Scene:
    return make()


def test_the_newest_version_is_measured_and_then_it_ends(scene: Scene) -> None:
    scene.publish(0, 5)
    evaluator = scene.start()
    turns(evaluator)
    assert evaluator.done and evaluator.code == 0
    (record,) = scene.evals()
    check_eval(record, run=RUN, policy=POLICY)
    assert (record.epoch, record.version, record.split, record.num_episodes, record.num_failed) == (
        1,
        5,
        "held-out",
        40,
        0,
    )
    assert record.mean_reward is not None and 0.3 < record.mean_reward < 0.8, "it knows about half"
    assert record.low is not None and record.high is not None and 0 < record.low < record.mean_reward < record.high < 1
    assert record.metrics["part:exact"] == record.mean_reward and record.metrics["truncated"] == 0
    assert [str(version) for version, _ in graded.LOADED] == ["1-5"]


def test_each_version_is_asked_the_same_and_answers_with_its_own_weights(scene: Scene) -> None:
    scene.publish(0, 2, 4, 6, 8, 10)
    evaluator = scene.start(follow=True, every=1)
    turns(evaluator, 12)
    assert scene.measured() == ["1-0", "1-2", "1-4", "1-6", "1-8", "1-10"] and evaluator.done
    means = [record.mean_reward or 0.0 for record in scene.evals()]
    assert means == sorted(means) and means[0] == 0.0 and means[-1] == 1.0, "who knows more is right wherever it was"
    assert [str(version) for version, _ in graded.LOADED] == scene.measured()
    assert [folder.name for _, folder in graded.LOADED] == scene.measured()
    kept = [path.name for path in graded.LOADED[0][1].parent.iterdir()]
    assert kept == ["1-10"], "folders of versions that are measured do not pile up"


def test_a_run_of_tokens_ends_with_the_version_that_its_steps_name(make: Callable[..., Scene]) -> None:
    scene = make(train={"steps": 0, "tokens": 3, "batch_groups": 1})
    scene.publish(0, 1, 2)
    owner: dict[str, Any] = {"epoch": 1, "nonce": "n1"}
    append(scene.log, "steps", claim(**owner))
    for step in range(3):
        samples = (Address(0, step, step, 1),)
        append(scene.log, "steps", plan(step=step, samples=samples, drops=(), num_tokens=1, **owner))
        append(scene.log, "steps", result(step=step, version=step + 1, **owner))
    evaluator = scene.start(follow=True, every=2)
    for _ in range(4):
        evaluator.turn()
    assert scene.measured() == ["1-0", "1-2"] and not evaluator.done, "version 3 is still to come"
    scene.publish(3)
    turns(evaluator, 4)
    assert scene.measured() == ["1-0", "1-2", "1-3"] and evaluator.done and evaluator.code == 0


def test_a_restarted_evaluator_repeats_nothing(scene: Scene) -> None:
    scene.publish(0, 1)
    turns(scene.start(follow=True, every=1), 3)
    scene.publish(2, 3)
    turns(scene.start(follow=True, every=1), 4)
    turns(scene.start(version="1-2"))
    assert scene.measured() == ["1-0", "1-1", "1-2", "1-3"]


def test_of_two_at_once_the_second_record_is_a_repeat_that_readers_skip(scene: Scene) -> None:
    scene.publish(3)
    one, two = scene.start("one"), scene.start("two")
    two._read()
    turns(one)
    append(scene.log, "evals", scene.evals()[0], key=None)
    turns(two)
    assert scene.measured() == ["1-3", "1-3"], "the second evaluator has seen the first one's record in time"


def test_nothing_that_training_counts_is_touched(scene: Scene) -> None:
    scene.publish(0, 1)
    before = {name: scene.log.bounds(name) for name in scene.log.topics()}
    turns(scene.start(follow=True, every=1))
    changed = {name for name in scene.log.topics() if scene.log.bounds(name) != before[name]}
    assert changed == {f"{RUN}.{POLICY}.evals"}
    assert audit(scene.log, RUN, POLICY, max_tokens=99).accounts.produced == 0


def test_items_are_held_out_and_never_asked_twice(make: Callable[..., Scene], tmp_path: Path) -> None:
    rows = "\n".join(json.dumps({"prompt": f"{n % 2}{n // 2 % 2}>", "row": n}) for n in range(60))
    (tmp_path / "rows.jsonl").write_text(rows)
    task = {
        "environment": "prompts",
        "settings": {"file": str(tmp_path / "rows.jsonl"), "reward": "support.prompt_rewards:exact"},
    }
    scene = make(task=task, eval={"episodes": 40, "share": 0.25})
    scene.publish(10)
    held = scene.start()._exam.items
    trained = scene.start(split="training", episodes=60)._exam.items
    assert 5 < len(held) < 25 and len(set(held)) == len(held)
    assert set(held) | set(trained) == set(range(60)) and not set(held) & set(trained)


def test_a_finite_task_without_a_share_has_nothing_held_out(make: Callable[..., Scene], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "0>"}\n{"prompt": "1>"}\n')
    settings = {"file": str(tmp_path / "rows.jsonl"), "reward": "support.prompt_rewards:exact"}
    scene = make(task={"environment": "prompts", "settings": settings})
    with pytest.raises(SettingError, match=r"policies.main.eval.share is 0: of 2 items 0 are in the split 'held-out'"):
        scene.start()


def test_greedy_is_a_setting_that_every_engine_knows(make: Callable[..., Scene]) -> None:
    assert make().start()._exam.sampling.top_k == 1
    warm = make(eval={"temperature": 0.5}).start()._exam.sampling
    assert (warm.top_k, warm.temperature) == (0, 0.5)


def test_one_that_is_told_to_stop_appends_nothing_and_the_next_does_it(scene: Scene) -> None:
    scene.publish(5)
    evaluator = scene.start()
    scene.stop.request()
    evaluator.turn()
    evaluator.close()
    assert not scene.evals() and not evaluator.done
    scene.stop = Stop()
    turns(scene.start())
    assert scene.measured() == ["1-5"]


def test_a_result_is_kept_while_the_log_is_away(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.publish(5)
    evaluator = scene.start()
    scene.log.fail_sends(1)
    assert evaluator.turn() > 0, "a rest before the next turn"
    assert not scene.evals()
    turns(evaluator)
    assert scene.measured() == ["1-5"] and len(graded.LOADED) == 1


def test_somebodys_record_that_came_meanwhile_is_not_repeated(scene: Scene) -> None:
    scene.publish(5)
    evaluator = scene.start()
    scene.log.fail_sends(1)
    evaluator.turn()
    other = evaluation(epoch=1, version=5, task="sort-digits", environment="sort-digits", split="held-out")
    append(scene.log, "evals", other)
    turns(evaluator)
    assert scene.evals() == [other] and evaluator.done


def test_a_store_that_is_away_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.publish(5)
    evaluator, real = scene.start(), scene.store.get
    failing = [True]

    def get(*arguments: Any, **options: Any) -> bytes:
        if failing:
            failing.pop()
            raise StoreError("away")
        return real(*arguments, **options)

    monkeypatch.setattr(scene.store, "get", get)
    assert evaluator.turn() > 0
    turns(evaluator)
    assert scene.measured() == ["1-5"] and evaluator.code == 0


def test_a_version_that_is_gone_or_broken_is_passed_over_while_following(scene: Scene) -> None:
    scene.publish(0, 1, 2)
    scene.store.put(manifest_key(RUN, POLICY, 1, 1), b"{broken")
    evaluator = scene.start(follow=True, every=1)
    turns(evaluator, 4)
    assert scene.measured() == ["1-0", "1-2"] and evaluator.code == 0


def test_a_named_version_that_is_not_there_is_a_failure(scene: Scene) -> None:
    scene.publish(0)
    evaluator = scene.start(version="1-7")
    turns(evaluator)
    assert evaluator.done and evaluator.code == Exit.FAILED and not scene.evals()


def test_failed_episodes_are_counted_and_are_in_no_mean(make: Callable[..., Scene]) -> None:
    scene = make(rollout={**ENGINE, "max_model_len": 8}, task={"settings": {"digits": 2, "alphabet": "01"}})
    scene.publish(10)
    evaluator = scene.start()
    environment, opened = evaluator._environment, []

    def open_some(item: int, payload: str, seed: int) -> Any:
        opened.append(item)
        if item % 4 == 0:
            raise RuntimeError("no such item")
        return type(environment).open(cast(Any, environment), item, payload, seed)

    environment.open = open_some  # type: ignore[method-assign]
    turns(evaluator)
    (record,) = scene.evals()
    assert (record.num_episodes, record.num_failed, record.mean_reward) == (40, 10, 1.0)
    assert len(opened) == 40


def test_where_every_episode_fails_the_record_says_so(scene: Scene) -> None:
    scene.publish(5)
    evaluator = scene.start()
    evaluator._environment.open = lambda item, payload, seed: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    turns(evaluator)
    (record,) = scene.evals()
    assert (record.num_failed, record.mean_reward, record.low, record.high) == (40, None, None, None)


class First:
    """Keys of the first few calls that are made."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __contains__(self, key: object) -> bool:
        self.left -= 1
        return self.left >= 0


def stuck(make: Callable[..., Scene]) -> Scene:
    """A scene in which two calls may never come back."""
    scene = make(rollout={**ENGINE, "tool_timeout_s": 0.05, "max_stuck_calls": 2}, eval={"episodes": 8})
    scene.publish(0, 1)
    return scene


def test_after_too_many_calls_that_never_came_back_it_ends_behind_the_version_in_hand(
    make: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = stuck(make)
    evaluator = scene.start(follow=True, every=1)
    evaluator._calls.hung = First(3)  # type: ignore[attr-defined]
    writer, failing = scene.log.writer, [True]

    def away() -> Any:
        if failing:
            raise BrokerError("away")
        return writer()

    monkeypatch.setattr(scene.log, "writer", away)
    assert evaluator.turn() > 0 and not scene.evals(), "measured, and the broker was away"
    failing.clear()
    with pytest.raises(DependencyError, match=r"3 calls into .*sort-digits.* of 2 allowed .*: this evaluator ends"):
        evaluator.turn()
    evaluator.close()
    (record,) = scene.evals()
    assert (record.version, record.num_failed) == (0, 3) and scene.heart.beats[-1][1]["stuck_calls"] == 3.0
    turns(scene.start(follow=True, every=1), 3)
    assert scene.measured() == ["1-0", "1-1"], "a fresh one goes on"


@pytest.mark.parametrize(("count", "wanted"), [(2, {"follow": True, "every": 1}), (3, {"version": "1-0"})])
def test_as_many_as_allowed_or_nothing_left_to_do_is_no_reason(
    count: int, wanted: dict[str, Any], make: Callable[..., Scene]
) -> None:
    scene = stuck(make)
    evaluator = scene.start(**wanted)
    evaluator._calls.hung = First(count)  # type: ignore[attr-defined]
    turns(evaluator, 3)
    assert scene.measured() == (["1-0", "1-1"] if "follow" in wanted else ["1-0"])
    assert scene.evals()[0].num_failed == count and evaluator.done is ("version" in wanted)


def test_without_any_weights_it_gives_up_in_the_end(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluator = scene.start()
    evaluator.turn()
    assert not evaluator.done
    monkeypatch.setattr(evaluator, "_first_by", 0.0)
    evaluator.turn()
    assert evaluator.done and evaluator.code == Exit.DEADLINE
    evaluator.close()


def test_its_heartbeats_say_what_it_measures(scene: Scene) -> None:
    scene.publish(5)
    turns(scene.start())
    _, fields = scene.heart.beats[-1]
    assert (fields["epoch"], fields["version"], fields["evaluations"]) == (1, 5, 1.0)
    assert max(beat["running"] for _, beat in scene.heart.beats) > 1


def test_versions_are_names(scene: Scene) -> None:
    scene.publish(0, 1)
    turns(scene.start(version=str(Version(1, 0))))
    assert scene.measured() == ["1-0"]
