"""Writers' schemas on `<run>.schemas`: learnt before anything is decoded, whatever else stands there."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from infra import provision, wiring, writers
from infra.doctor import check_schemas
from infra.log import Place
from infra.memory_log import MemoryLog
from infra.settings import Settings
from infra.writers import Following, Writers, learn, open_run, runs_of
from schemas import codec
from schemas.codec import MAX_SCHEMA_CHARS, decode, encode, fingerprint, num_schemas, schema_text
from schemas.errors import BrokerError, DeadlineExceeded, RecordError, SettingError
from schemas.names import schemas_topic
from schemas.records import Close, Plan, Result, SchemaText, Trajectory
from support.generations import another, mark, publish, published, written
from support.loop import RUN, make_log, make_settings
from support.samples import EXAMPLES, close, plan, result

ROOT = Path(__file__).parents[3]
PLACE = Place(schemas_topic(RUN), 0)
V0 = b"\xc3\x01" + bytes.fromhex("37ed544e5e10027c")


@pytest.fixture(autouse=True)
def _fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing learnt yet, nothing said yet."""
    monkeypatch.setattr(codec, "_READERS", dict(codec._READERS))
    monkeypatch.setattr(writers, "_said", set())


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return make_settings(tmp_path)


@pytest.fixture
def log(settings: Settings) -> MemoryLog:
    return make_log(settings)


@pytest.fixture
def said() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as found:
        yield found


def is_unknown(data: bytes) -> bool:
    try:
        decode(data)
    except RecordError as error:
        return error.reason == "unknown-schema"
    return False


def test_records_of_another_release_are_read_once_its_schemas_are_learnt(log: MemoryLog, settings: Settings) -> None:
    texts = {cls: another(cls) for cls in EXAMPLES if cls is not SchemaText}
    data = {cls: written(text, encode(EXAMPLES[cls])) for cls, text in texts.items()}
    assert all(is_unknown(one) for one in data.values())
    publish(log, RUN, *map(published, texts.values()))
    learn(log, settings)
    assert {cls: decode(one) for cls, one in data.items()} == {cls: EXAMPLES[cls] for cls in texts}


def test_a_field_that_was_not_there_yet_has_its_default(log: MemoryLog, settings: Settings) -> None:
    text = another(Plan, without="num_tokens")
    publish(log, RUN, published(text))
    learn(log, settings)
    assert decode(written(text, encode(plan(num_tokens=9)))) == plan(num_tokens=0)


def test_the_runs_that_policies_read_are_learnt_as_well(log: MemoryLog, settings: Settings, tmp_path: Path) -> None:
    text, derived = another(Result), make_settings(tmp_path, source={"run": "older"})
    assert runs_of(derived) == [RUN, "older"] and runs_of(settings) == [RUN]
    provision.ensure(log, settings.model_copy(update={"run": settings.run.model_copy(update={"name": "older"})}))
    publish(log, "older", published(text))
    learn(log, settings)
    assert is_unknown(written(text, encode(result())))
    learn(log, derived)
    assert decode(written(text, encode(result()))) == result()


def test_a_topic_that_is_not_there_yet_teaches_nothing_until_it_is(settings: Settings) -> None:
    log, text = MemoryLog(), another(Close)
    found = learn(log, settings)
    assert found.look() == 0 and found.standing == {RUN: set()}
    log.create(provision.topic_specs(settings))
    publish(log, RUN, published(text))
    assert found.look() == 1 and found.look() == 0
    assert decode(written(text, encode(close()))) == close()


def test_what_came_since_is_learnt_and_nothing_is_read_twice(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Writers(log, [RUN], 5.0)
    publish(log, RUN, published(another(Close)), published(another(Plan)))
    assert found.look() == 2
    publish(log, RUN, published(another(Result)))
    starts, real = [], log.reader

    def noted(positions: Any) -> Any:
        starts.append(dict(positions))
        return real(positions)

    monkeypatch.setattr(log, "reader", noted)
    assert found.look() == 1 and starts == [{PLACE: 2}]
    assert found.look() == 0 and len(starts) == 1


def test_a_topic_that_was_made_anew_is_read_from_its_start(log: MemoryLog, settings: Settings) -> None:
    found = Writers(log, [RUN], 5.0)
    publish(log, RUN, published(another(Close)), published(another(Plan)))
    found.look()
    log._topics[PLACE.topic] = log._topics[f"{RUN}.main.steps"]  # another one, empty
    publish(log, RUN, published(another(Result)))
    assert found.look() == 1


def test_retention_and_compaction_leave_no_gap_that_stops_it(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(log, RUN, *[published(another(cls)) for cls in (Close, Close, Close, Plan, Result)])
    log.compact(PLACE.topic)
    real = log.bounds

    def then_retention(topic: str) -> Any:
        found = real(topic)
        log.delete_before(PLACE, 4)
        return found

    monkeypatch.setattr(log, "bounds", then_retention)
    assert Writers(log, [RUN], 5.0).look() == 1 and num_schemas() == len(codec._FORMS) + 1


HOSTILE: dict[str, Any] = {
    "a tombstone": None,
    "bytes": b"\x00\xff\x1b[2J",
    "another record": close(),
    "no schema": SchemaText(name="Close", fingerprint="aa" * 8, text="{"),
    "no name": SchemaText(name="", fingerprint="", text=another(Close)),
    "a foreign record": SchemaText(name="Nobody", fingerprint="bb" * 8, text='{"type": "record", "name": "N", "fields": []}'),
    "a false name": published(another(Close), fingerprint="cc" * 8),
    "another's name": published(another(Close), fingerprint=mark(another(Plan))),
    "our name": published(another(Close), fingerprint=fingerprint(Close).hex()),
    "an endless one": SchemaText(name="Close", fingerprint="dd" * 8, text=" " * (MAX_SCHEMA_CHARS + 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_schema_of_ours_is_passed_over(
    name: str, log: MemoryLog, settings: Settings, said: list[Any]
) -> None:
    before, last = num_schemas(), another(Result)
    publish(log, RUN, HOSTILE[name], HOSTILE[name], published(last))
    found = learn(log, settings)
    assert num_schemas() == before + 1 and decode(written(last, encode(result()))) == result()
    learn(log, settings)
    warned = [entry for entry in said if entry["log_level"] == "warning"]
    assert len(warned) == len(found.refused) == 1 and warned[0]["schema"] in found.refused, "named once"
    assert decode(encode(close())) == close()


def test_a_broken_batch_is_passed_over(log: MemoryLog, settings: Settings) -> None:
    publish(log, RUN, published(another(Close)), published(another(Result)))
    log.corrupt(PLACE, 0, encode(published(another(Close))))
    found = learn(log, settings)
    assert num_schemas() == len(codec._FORMS) + 1 and len(found.refused) == 1


def test_no_more_are_learnt_than_allowed(log: MemoryLog, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_SCHEMAS", num_schemas() + 1)
    publish(log, RUN, published(another(Close)), published(another(Plan)), published(schema_text(Result)))
    found = learn(log, settings)
    assert num_schemas() == codec.MAX_SCHEMAS and list(found.refused) == [mark(another(Plan))]
    assert "no more are allowed" in found.refused[mark(another(Plan))]
    assert found.standing[RUN] == {mark(another(Close)), fingerprint(Result).hex()}, "known ones stay so"


def test_this_versions_own_schemas_are_not_replaced(log: MemoryLog, settings: Settings) -> None:
    before = dict(codec._READERS)
    provision.publish_schemas(log, settings)
    learn(log, settings)
    assert before == codec._READERS


def test_reading_has_a_limit_in_time(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(log, RUN, published(another(Close)))
    real = log.reader

    def deaf(positions: Any) -> Any:
        reader = real(positions)
        reader.poll = lambda timeout_s, max_records=1000: time.sleep(0.01) or []  # type: ignore[method-assign,func-returns-value]
        return reader

    monkeypatch.setattr(log, "reader", deaf)
    with pytest.raises(
        DeadlineExceeded, match=r"demo\.schemas could not be read to offset 1 within 0\.05 s; it came to 0"
    ):
        Writers(log, [RUN], 0.05).look()


def test_a_broker_that_is_away_is_said(log: MemoryLog, settings: Settings) -> None:
    log.away = True
    with pytest.raises(BrokerError):
        learn(log, settings)


def test_a_run_of_v0_is_refused(log: MemoryLog, settings: Settings) -> None:
    publish(log, RUN, V0 + b"anything")
    for opens in (learn, provision.ensure):
        with pytest.raises(SettingError, match=r"'demo' was written by a release with schemas of v0.*another name"):
            opens(log, settings)
    Writers(log, [RUN], 5.0).look()  # a daemon that runs is not ended by it


# While it runs --------------------------------------------------------------------------------------------------------


def test_an_unknown_schema_is_looked_for_once_behind_each_poll(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    text, asked, real = another(Result), [], log.bounds

    def noted(topic: str) -> Any:
        asked.append(topic)
        return real(topic)

    monkeypatch.setattr(log, "bounds", noted)
    data, found = written(text, encode(result())), Writers(log, [RUN], 5.0)
    assert found.decode(encode(result())) == result() and not asked, "what is known costs nothing"
    for polls in (1, 2):
        for _ in range(3):
            with pytest.raises(RecordError, match="unknown-schema"):
                found.decode(data)
        assert asked == [PLACE.topic] * polls
        found.polled()
    publish(log, RUN, published(text))
    assert found.decode(data) == result() and len(asked) == 3
    with pytest.raises(RecordError, match="not-ours"):
        found.decode(b"other bytes")
    assert found.decode(data) == result() and len(asked) == 3


def test_what_another_thread_learnt_meanwhile_is_read(log: MemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
    text, found = another(Result), Writers(log, [RUN], 5.0)
    monkeypatch.setattr(found, "look", lambda: codec.register_writer(text) and 0)
    assert found.decode(written(text, encode(result()))) == result()


# Publishing -----------------------------------------------------------------------------------------------------------


def test_an_upgraded_release_publishes_what_is_new_and_leaves_the_rest(log: MemoryLog, settings: Settings) -> None:
    texts = {cls: another(cls) for cls in (Trajectory, Plan)}
    publish(log, RUN, *map(published, texts.values()))  # by the release before
    num_types = len(codec._FORMS)
    assert provision.publish_schemas(log, settings) == num_types and provision.publish_schemas(log, settings) == 0
    log.compact(PLACE.topic)
    assert len(log.partition(PLACE).records) == num_types + 2
    assert learn(log, settings).standing[RUN] == {
        *map(mark, texts.values()), *(fingerprint(cls).hex() for cls in EXAMPLES)
    }  # fmt: skip


@pytest.mark.parametrize("value", [None, b"\x00", published(another(Close), fingerprint=fingerprint(Close).hex())])
def test_what_overwrote_one_of_ours_is_put_right(value: Any, log: MemoryLog, settings: Settings) -> None:
    provision.publish_schemas(log, settings)
    publish(log, RUN, value, key=fingerprint(Close).hex())
    assert provision.publish_schemas(log, settings) == 1 and provision.publish_schemas(log, settings) == 0
    log.compact(PLACE.topic)
    assert fingerprint(Close).hex() in learn(log, settings).standing[RUN]


# Who learns -----------------------------------------------------------------------------------------------------------


def test_a_command_has_learnt_before_it_reads(
    log: MemoryLog, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = another(Result)
    publish(log, RUN, published(text))
    monkeypatch.setattr(wiring, "open_log", lambda settings, client_id: log)
    with open_run(settings, "test") as opened:
        assert opened is log and decode(written(text, encode(result()))) == result()
    with pytest.raises(BrokerError, match="closed"):
        log.topics()


def test_everybody_who_opens_a_log_learns() -> None:
    """Whoever calls `wiring.open_log` itself makes the run's topics with it, which learns, or checks them (doctor)."""
    callers = {}
    for path in [
        path for room in ("infra", "producers", "consumers", "trainers") for path in (ROOT / room).rglob("*.py")
    ]:
        text = path.read_text()
        if any(isinstance(n, ast.Attribute) and n.attr == "open_log" for n in ast.walk(ast.parse(text))):
            callers[path.relative_to(ROOT).as_posix()] = text
    assert {
        name for name, text in callers.items() if "provision.ensure(" not in text and "check_connected(" not in text
    } == {
        "infra/writers.py",
        "infra/doctor.py",
    }


def test_a_running_daemon_learns_on(log: MemoryLog, settings: Settings) -> None:
    text = another(Result)
    data = written(text, encode(result()))
    with Following(log, settings, every_s=0.01) as following:
        log.away = True
        time.sleep(0.05)
        assert is_unknown(data)
        log.away = False
        publish(log, RUN, published(text))
        deadline = time.monotonic() + 30
        while is_unknown(data) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert decode(data) == result() and not following._thread.is_alive()


def test_the_doctor_says_what_cannot_be_learnt(log: MemoryLog, settings: Settings) -> None:
    provision.ensure(log, settings)
    assert check_schemas(log, settings).ok
    publish(log, RUN, HOSTILE["a false name"])
    found = check_schemas(log, settings)
    assert not found.ok and "cccccccccccccccc" in found.got and "demo.schemas" in found.remedy
    publish(log, RUN, V0)
    found = check_schemas(log, settings)
    assert not found.ok and "schemas of v0" in found.got and "another name" in found.remedy
