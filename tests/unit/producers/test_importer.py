"""Importing on a log in memory: whole or not at all, once however often, and nothing of a file with a bad line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import producers.importer
from infra.audit import audit
from infra.log import Writer
from infra.memory_log import MemoryLog
from infra.ownership import catch_up
from infra.settings import Settings
from producers.importer import LIFETIME_MS, Importer, Sent, Source, destination
from schemas.errors import DeadlineExceeded, SendFailed, SettingError
from schemas.packing import unpack_floats
from schemas.records import Heartbeat, State, Status, Trajectory, VersionRun
from schemas.validate import check_trajectory
from support.loop import EOS, POLICY, RUN, Clock, Codec, append, make_log, make_settings, said


class Letters(Codec):
    """One id per character of `01>`, and an end."""

    eos_ids: tuple[int, ...] = (EOS,)
    end_id: int | None = EOS

    def chat(self, messages: Any, *, answer: bool = True) -> str:
        raise AssertionError("no chats here")


def lines(count: int, first: int = 0) -> bytes:
    """Demonstrations of so many different prompts."""
    rows = [{"prompt": f"{n:09b}>", "completion": "0" * (n % 3) + "1", "reward": 1 + n} for n in range(count)]
    return b"\n".join(json.dumps(row).encode() for row in rows[first:])


def source(data: bytes, **changes: Any) -> Source:
    fields: dict[str, Any] = {"name": "demos.jsonl", "codec": Letters(Path()), "tokenizer": "ab" * 32}
    fields |= {"data": data, "max_tokens": 16, "vocab_size": EOS + 1, **changes}
    return Source(**fields)


class Scene:
    """A log that outlives imports, and its clock."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        self.clock = Clock()
        self.settings: Settings = make_settings(folder, **tables)
        self.log: MemoryLog = make_log(self.settings, clock_ms=self.clock.ms)

    def send(self, data: bytes, passes: int = 1, **changes: Any) -> Sent:
        return Importer(self.log, self.settings, POLICY).send(source(data, **changes), passes)

    def trajectories(self) -> list[Trajectory]:
        return [record for record in said(self.log, "trajectories") if isinstance(record, Trajectory)]

    def accounts(self) -> Any:
        return audit(self.log, RUN, POLICY, max_tokens=99).accounts


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_each_line_is_a_sound_group_of_one_that_no_weights_made(scene: Scene) -> None:
    assert scene.send(lines(7)) == Sent(7, 0)
    found = scene.trajectories()
    for record in found:
        check_trajectory(record, run=RUN, policy=POLICY, partition=record.partition, max_tokens=99)
        assert (record.group_size, record.status, record.environment) == (1, Status.OK, "import")
        assert record.versions == (VersionRun(0, 0, len(record.logprobs) // 4),)
        assert unpack_floats(record.logprobs).tolist() == [0.0] * (1 + (record.item - 1) % 3 + 1)
        assert record.reward == record.item, "line n has reward n here"
    assert sorted(record.item for record in found) == list(range(1, 8))
    assert len({record.group for record in found}) == 7 and {record.partition for record in found} == {0, 1}
    beats = [record for record in said(scene.log, "control") if isinstance(record, Heartbeat)]
    assert beats[0].role == "import" and beats[-1].state is State.LEFT


@pytest.mark.parametrize("later_s", [1.0, 10 * LIFETIME_MS / 1000])
def test_a_file_imported_again_has_no_further_effect(scene: Scene, later_s: float) -> None:
    scene.send(lines(9))
    scene.clock.now_s += later_s
    assert scene.send(lines(9)) == Sent(0, 9)
    assert len(scene.trajectories()) == 9


def test_another_file_another_tokenizer_and_more_passes_are_others(scene: Scene) -> None:
    scene.send(lines(4))
    assert scene.send(lines(5)) == Sent(5, 0)
    assert scene.send(lines(4), tokenizer="cd" * 32) == Sent(4, 0)
    assert scene.send(lines(4), passes=3) == Sent(8, 4)
    assert scene.send(lines(4), passes=2) == Sent(0, 12)
    assert len({record.group for record in scene.trajectories()}) == 21


class Dying:
    """A writer whose process dies at the n-th record."""

    def __init__(self, inner: Writer, left: list[int]) -> None:
        self._inner, self._left = inner, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, topic: str, *arguments: Any, **options: Any) -> Any:
        if topic.endswith(".trajectories"):
            self._left[0] -= 1
            if self._left[0] < 0:
                raise SendFailed("died")
        return self._inner.send(topic, *arguments, **options)


@pytest.mark.parametrize("alive", [0, 1, 6, 12])
def test_an_import_that_died_is_finished_by_the_next(scene: Scene, monkeypatch: pytest.MonkeyPatch, alive: int) -> None:
    left, real = [alive], scene.log.writer
    monkeypatch.setattr(producers.importer, "_BATCH", 4)
    monkeypatch.setattr(scene.log, "writer", lambda: Dying(real(), left))
    with pytest.raises(SendFailed):
        scene.send(lines(13))
    monkeypatch.undo()
    found = scene.send(lines(13))
    assert found.sent + found.there == 13
    assert len({record.group for record in scene.trajectories()}) == 13
    assert scene.accounts().superseded == 0


def test_of_two_imports_at_once_one_has_an_effect(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has read the log before the first wrote, and goes on after it."""
    _interleave(scene, monkeypatch, lambda: scene.send(lines(6)))
    assert scene.send(lines(6)) == Sent(0, 6)
    accounts = scene.accounts()
    assert (accounts.produced, accounts.superseded, accounts.late, accounts.unaccounted) == (12, 6, 0, 0)


def test_an_import_frozen_beyond_the_lifetime_comes_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile() -> None:
        scene.send(lines(6))
        scene.clock.now_s += LIFETIME_MS / 1000 + 1

    _interleave(scene, monkeypatch, meanwhile)
    accounts = scene.accounts()
    assert (accounts.produced, accounts.late, accounts.superseded, accounts.unaccounted) == (12, 6, 0, 0)


def _interleave(scene: Scene, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> None:
    """An import of six lines, with something else between its reading of the log and its writing."""
    real = Importer._record
    done: list[bool] = []

    def record(self: Importer, *arguments: Any) -> Trajectory:
        if not done:
            done.append(True)
            meanwhile()
        return real(self, *arguments)

    monkeypatch.setattr(Importer, "_record", record)
    scene.send(lines(6))


def test_what_always_comes_late_is_given_up_and_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Importer._record

    def slow(self: Importer, *arguments: Any) -> Trajectory:
        scene.clock.now_s += LIFETIME_MS / 1000 + 1
        return real(self, *arguments)

    monkeypatch.setattr(Importer, "_record", slow)
    with pytest.raises(DeadlineExceeded, match="later than 600 s after it was asked for"):
        scene.send(lines(2))


def test_the_time_is_taken_before_the_log_is_read(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken afterwards, it would call fresh what another import has written since the reading, a lifetime ago."""

    def slow(*arguments: Any) -> None:
        catch_up(*arguments)
        scene.clock.now_s += LIFETIME_MS / 1000 + 1

    monkeypatch.setattr(producers.importer, "catch_up", slow)
    with pytest.raises(DeadlineExceeded):
        scene.send(lines(2))
    assert scene.accounts().late == len(scene.trajectories()) > 0


def test_strangers_on_the_topic_do_not_matter(scene: Scene) -> None:
    scene.send(lines(2))
    (one, two) = scene.trajectories()
    scene.log.writer().send(f"{RUN}.{POLICY}.trajectories", 0, b"junk", key=one.group.encode()).result(5.0)
    append(scene.log, "trajectories", two, partition=two.partition, key=b"other")
    assert scene.send(lines(2)) == Sent(0, 2)


def test_bad_lines_are_all_named_and_nothing_is_read_as_good(tmp_path: Path) -> None:
    data = lines(3) + b"\n\n{]\n" + b'{"prompt": "01>"}\n' + b'{"prompt": "x", "completion": "1"}'
    with pytest.raises(SettingError) as caught:
        source(data).check()
    said_of = str(caught.value)
    assert "3 of 6 lines are bad, so none is sent" in said_of
    assert "demos.jsonl:5: not a line of JSON" in said_of
    assert "demos.jsonl:6: expected either messages" in said_of and "demos.jsonl:7: " in said_of


def test_many_bad_lines_are_counted() -> None:
    with pytest.raises(SettingError, match=r"15 of 15 lines are bad(.|\n)*demos.jsonl:10:(.|\n)*and 5 more"):
        source(b"\n".join([b"{}"] * 15)).check()


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(SettingError, match="holds no line"):
        source(b"\n \n").check()


def test_totals_are_counted() -> None:
    assert source(lines(3)).check() == (3, 3 * 10 + 2 + 3 + 4, 2 + 3 + 4)


@pytest.mark.model
@pytest.mark.parametrize(("loss", "noted"), [("ppo-clip", True), ("supervised", False)])
def test_a_check_reads_the_file_with_the_policys_own_tokenizer_and_sends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, loss: str, noted: bool
) -> None:
    from support.models import model_folder

    monkeypatch.setattr("infra.wiring.open_log", lambda *arguments, **options: pytest.fail("it opened the log"))
    file, train = tmp_path / "demos.jsonl", {"loss": loss, "correction": "none", "max_staleness": 0}
    policy = {"model": str(model_folder()), "train": train}
    settings = Settings.model_validate({"policies": {POLICY: policy}})
    file.write_text('{"prompt": "31>", "completion": "13"}\n')
    assert producers.importer.command(settings, policy=POLICY, file=file, check=True, passes=1) == 0
    said = capsys.readouterr().out
    assert "1 demonstrations of 6 tokens, 3 of them to be learnt" in said
    assert ("set aside as no-logprobs" in said) is noted
    file.write_text('{"prompt": "31>", "completion": "13X"}\n')
    with pytest.raises(SettingError, match=r"demos.jsonl:1: the tokenizer has no token for 'X'"):
        producers.importer.command(settings, policy=POLICY, file=file, check=True, passes=1)
    with pytest.raises(SettingError, match="cannot read"):
        producers.importer.command(settings, policy=POLICY, file=tmp_path / "none", check=True, passes=1)


def test_demonstrations_go_where_the_processor_reads(tmp_path: Path) -> None:
    own, name = destination(make_settings(tmp_path), POLICY)
    assert (own.run.name, name) == (RUN, POLICY)
    apart = Scene(tmp_path, source={"run": "demos"})
    assert apart.send(lines(3)) == Sent(3, 0)
    ends = [bounds.end for bounds in apart.log.bounds(f"demos.{POLICY}.trajectories").values()]
    assert sum(ends) == 3 and not apart.trajectories()
    settings, name = destination(make_settings(tmp_path, source={"run": "demos", "policy": "other"}), POLICY)
    assert (settings.run.name, name, list(settings.policies)) == ("demos", "other", ["other"])
