"""Dead letters for people: hostile bytes stay off the terminal; what is put back counts once, and the accounts close."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra import preflight, wiring
from infra.audit import Audit, Source, audit
from infra.config import load
from infra.dead_letters import Wanted, collect
from infra.dead_letters_command import facts, list_letters, replay_letters, show_letter, shown
from infra.dead_letters_replay import REPLAYED_HEADER, Fate, Forecast, chosen, forecast, put_back
from infra.glimpse import MAX_ITEMS, glimpse
from infra.log import Place
from infra.memory_log import MemoryLog
from infra.provision import topic_specs
from infra.settings import Settings
from schemas.codec import HEADER_BYTES, decode, encode, fingerprint
from schemas.errors import SettingError
from schemas.packing import pack_bits, pack_floats, pack_ints
from schemas.records import KEPT, DeadLetter, Record, Role, Segment, Trajectory, VersionRun
from support.processor_scenes import (
    DEAD_LETTERS,
    GROUP_SIZE,
    POISON,
    SOURCE,
    Clock,
    buried,
    effective,
    records,
    work_off,
)
from support.samples import EXAMPLES, close, dead_letter, trajectory

STRICT, LOOSE = 3, 1000
"""Longest sound trajectory, tokens: the examples have seven."""
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\n\x08"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "offsetrl.toml"
    path.write_text('[run]\nname = "demo"\npartitions = 1\n[policies.main]\nmodel = "model"\n')
    return load(path, [], {}).settings


@pytest.fixture
def log(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> MemoryLog:
    made = MemoryLog(clock_ms=Clock())
    made.create(topic_specs(settings))
    monkeypatch.setattr(preflight, "check_broker", lambda _: None)
    monkeypatch.setattr(wiring, "open_log", lambda *_, **__: made)
    monkeypatch.setattr(made, "close", lambda: None)
    monkeypatch.setattr("infra.dead_letters_command.time.time_ns", lambda: _clock(made).now_ms * 1_000_000)
    return made


def _clock(log: MemoryLog) -> Clock:
    assert isinstance(log.clock_ms, Clock)
    return log.clock_ms


def _processor(log: MemoryLog, max_tokens: int, run: str = "demo") -> Partitions:
    route = Route(run=run, policy="main", source_run="demo", source_policy="main")
    recipe = make_recipe(group_filters=[], min_members=2, group_size=GROUP_SIZE)
    return Partitions(log, route, recipe, patience_s=5.0, commit_every_s=0.0, max_tokens=max_tokens)


def _audit(log: MemoryLog, max_tokens: int = LOOSE, run: str = "demo") -> Audit:
    return audit(log, run, "main", max_tokens=max_tokens, source=Source("demo", "main"))


def _send(log: MemoryLog, *values: bytes | None, now_ms: int = 1000, key: bytes | None = None) -> None:
    _clock(log).now_ms = now_ms
    writer = log.writer()
    for value in values:
        writer.send(SOURCE, 0, value, key=key, headers=(("producer", b"w1"),))
    writer.close()


def _member(index: int, group: str = "g1", **changes: object) -> bytes:
    fields = {"partition": 0, "group_size": GROUP_SIZE, "first_request_time_ms": 1000, "lifetime_ms": 100, **changes}
    return encode(trajectory(group=group, index=index, reward=index / 2, **fields))


def _bury(log: MemoryLog, letter: DeadLetter) -> None:
    writer = log.writer()
    writer.send(DEAD_LETTERS, 0, encode(letter), key=b"k")
    writer.close()


def _forecast(log: MemoryLog, now_ms: int, *reasons: str, force: bool = False) -> list[Forecast]:
    wanted = Wanted(frozenset(reasons))
    return forecast(log, "demo", "main", wanted, max_tokens=LOOSE, now_ms=now_ms, force=force)


def _fates(log: MemoryLog, now_ms: int) -> dict[int, Fate]:
    return {found.letter.origin.offset: found.fate for found in _forecast(log, now_ms)}


# The terminal ---------------------------------------------------------------------------------------------------------


def _printable(text: str) -> bool:
    return all(char.isprintable() for char in text.replace("\n", ""))


def test_no_control_character_reaches_the_terminal(
    log: MemoryLog, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences in the value, the key, headers, the reason and the names of a forged letter, and in readable fields."""
    raw = EVIL.encode()
    letter = dead_letter(
        topic=SOURCE, partition=0, offset=5, reason=EVIL, detail=EVIL, key=raw, value=raw, headers=((EVIL, raw),),
        run=EVIL, policy=EVIL,
    )  # fmt: skip
    named = dataclasses.replace(letter, offset=6, value=_member(8, group=EVIL, error=EVIL, worker=EVIL))
    foreign = dataclasses.replace(letter, topic=EVIL, offset=7, time_ms=-(2**62))
    for each in (letter, named, foreign):
        _bury(log, each)
    for place in ("0:5", "0:6"):
        for as_json in (False, True):
            show_letter(settings, policy="main", place=place, max_bytes=4096, as_json=as_json)
    for as_json in (False, True):
        list_letters(settings, policies=["main"], reasons=[], as_json=as_json)
    out, err = capsys.readouterr()
    assert "\\x1b]0;owned\\x07" in out and "1b 5d 30 3b 6f" in out and err == ""
    assert _printable(out)


@given(value=st.none() | st.binary(max_size=200), text=st.text(max_size=50), key=st.binary(max_size=20))
def test_whatever_a_letter_holds_is_shown_printably(value: bytes | None, text: str, key: bytes) -> None:
    letter = dead_letter(value=value, key=key, detail=text, topic=text, headers=((text, key),))
    assert _printable("\n".join(shown(letter, 3, 64)))
    assert json.loads(json.dumps(facts(letter, 3)))["detail"] == text


@pytest.mark.parametrize("record", EXAMPLES.values(), ids=lambda record: type(record).__name__)
def test_glimpse_reads_a_whole_record_and_stops_at_each_cut(record: Record) -> None:
    data = encode(record)
    whole = glimpse(data)
    assert (whole.kind, whole.stopped) == (type(record).__name__, "")
    names = [name for name, _ in whole.fields]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(record))
    for end in range(HEADER_BYTES, len(data)):
        part = glimpse(data[:end])
        assert part.stopped and part.fields == whole.fields[: len(part.fields)] and len(part.fields) < len(names)
    assert "1 bytes are left over" in glimpse(data + b"x").stopped


@given(body=st.binary(max_size=300))
def test_glimpse_never_raises(body: bytes) -> None:
    for cls in (Trajectory, DeadLetter):
        found = glimpse(b"\xc3\x01" + fingerprint(cls) + body)
        assert _printable(found.stopped + "".join(text for _, text in found.fields))


def test_glimpse_walks_no_bomb() -> None:
    bomb = encode(trajectory(step_rewards=(0.0,) * (MAX_ITEMS + 1)))
    found = glimpse(bomb)
    assert "more than 1000 items" in found.stopped and ("group", '"g00000042"') in found.fields


def test_show_names_what_can_be_read(log: MemoryLog, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    _send(log, _member(0)[:-3], key=b"g1")
    work_off(_processor(log, LOOSE), log)
    assert show_letter(settings, policy="main", place="0:0", max_bytes=16, as_json=False) == 0
    out = capsys.readouterr().out
    assert "reason     undecodable" in out and 'group                  "g1"' in out and "c3 01" in out
    assert "header     producer = w1" in out and "key        g1" in out and "bytes are wanted at byte" in out
    show_letter(settings, policy="main", place=f"{SOURCE}/0/0", max_bytes=16, as_json=True)
    assert json.loads(capsys.readouterr().out)["readable"]["fields"]["group"] == '"g1"'
    with pytest.raises(SettingError, match=r"no dead letter of demo\.main\.trajectories/0/1"):
        show_letter(settings, policy="main", place="0:1", max_bytes=16, as_json=False)
    with pytest.raises(SettingError, match="PARTITION:OFFSET"):
        show_letter(settings, policy="main", place="seventeen", max_bytes=16, as_json=False)


def test_list_shows_each_origin_once(log: MemoryLog, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    _send(log, *POISON.values())
    work_off(_processor(log, LOOSE), log)
    _bury(log, buried(log)[0])  # a processor that was killed before it noted this one
    writer = log.writer()
    writer.send(DEAD_LETTERS, 0, b"\x1b[31mnot a letter")
    writer.close()
    capsys.readouterr()
    list_letters(settings, policies=["main"], reasons=[], as_json=True)
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert [row["reason"] for row in rows] == list(POISON) and [row["offset"] for row in rows] == list(
        range(len(POISON))
    )
    assert [row["copies"] for row in rows] == [2] + [1] * (len(POISON) - 1)
    assert "1 records on demo.main.dead-letters are no dead letters" in err
    list_letters(settings, policies=["main"], reasons=["invalid", "empty"], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["reason", "topic", "partition", "offset", "time", "bytes", "copies"]
    assert [line.split()[0] for line in lines[1:]] == ["empty", "invalid"]
    with pytest.raises(SettingError, match="did you mean 'invalid'"):
        list_letters(settings, policies=["main"], reasons=["invald"], as_json=False)


# Putting back ---------------------------------------------------------------------------------------------------------


def _make(log: MemoryLog, max_tokens: int) -> Partitions:
    partitions = _processor(log, max_tokens)
    work_off(partitions, log)
    return partitions


def _short(index: int, group: str = "g1") -> bytes:
    """A member of one prompt token and one sampled one."""
    return _member(
        index, group, tokens=pack_ints([1, 2]), loss_mask=pack_bits([False, True]), logprobs=pack_floats([-1.0]),
        segments=(Segment(Role.PROMPT, 1), Segment(Role.SAMPLED, 1)), versions=(VersionRun(1, 0, 1),),
    )  # fmt: skip


def test_a_copy_joins_its_group_and_the_accounts_close_before_and_after(log: MemoryLog) -> None:
    """The processor goes on with a larger limit (no restart that would read the record again): only the copy counts."""
    _send(log, _short(0), _short(1), _member(2), key=b"g1")
    processor = _make(log, STRICT)
    before = _audit(log)
    assert before.accounts.ok and (before.accounts.dead_lettered, before.accounts.pending) == (1, 2)
    processor._max_tokens = LOOSE
    found = _forecast(log, 1050)
    assert [each.fate for each in found] == [Fate.JOINS]
    _clock(log).now_ms = 1050
    assert put_back(log, "demo", "main", chosen(found, force=False), 5.0) == 1
    between = _audit(log)
    assert between.accounts.ok and between.accounts.pending == 3
    work_off(processor, log)
    (outcome,) = effective(log)
    assert (outcome.disposition, [member.offset for member in outcome.members]) == (KEPT, [0, 1, 3])
    original, copy = records(log, SOURCE)[2:]
    assert (copy.value, copy.key) == (original.value, original.key)
    assert copy.headers == (*original.headers, (REPLAYED_HEADER, f"{SOURCE}/0/2".encode()))
    after = _audit(log)
    assert after.accounts.ok and (after.accounts.dead_lettered, after.accounts.pending) == (1, 3)
    assert _fates(log, 1050) == {2: Fate.REPLAYED}
    assert _audit(log, STRICT).accounts.dead_lettered == 1


def test_an_upgraded_processor_that_reads_it_again_needs_no_copy(log: MemoryLog) -> None:
    """Its group was open, so the position stands before it. The outcome names it: then it is no dead letter any more."""
    _send(log, _short(0), _short(1), _member(2))
    _make(log, STRICT)
    _make(log, LOOSE)
    (outcome,) = effective(log)
    assert [member.offset for member in outcome.members] == [0, 1, 2] and len(buried(log)) == 1
    found = _audit(log)
    assert found.accounts.ok and (found.accounts.dead_lettered, found.accounts.pending) == (0, 3)
    assert _fates(log, 1050) == {2: Fate.USED}


def test_what_is_too_late_is_said_and_needs_force(
    log: MemoryLog, settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    _send(log, _short(0), _short(1), _member(2), encode(close(group="g1", partition=0)), _short(0, "g2"))
    _send(log, _member(1, "g2"), now_ms=1090)
    processor = _make(log, STRICT)
    _clock(log).now_ms = 1099
    assert _fates(log, 1099) == {2: Fate.LATE, 5: Fate.JOINS}  # g1 has closed; g2 is open
    _clock(log).now_ms = 1101
    assert _fates(log, 1101) == {2: Fate.LATE, 5: Fate.LATE}
    end = log.bounds(SOURCE)[0].end
    arguments = {"policy": "main", "reasons": ["invalid"], "places": [], "dry_run": False}
    assert replay_letters(settings, force=False, as_json=False, **arguments) == 1  # type: ignore[arg-type]
    out = capsys.readouterr().out
    assert "2  late" in out and "left alone without --force" in out and "offsetrl replay --into" in out
    assert log.bounds(SOURCE)[0].end == end and "0 put back" in out
    assert replay_letters(settings, force=True, as_json=True, **arguments) == 0  # type: ignore[arg-type]
    said = json.loads(capsys.readouterr().out)
    assert said == {"wanted": 2, "fates": {"late": 2}, "chosen": 2, "put_back": 2}
    processor._max_tokens = LOOSE
    _send(log, encode(close(group="g2", partition=0)), now_ms=1102)
    work_off(processor, log)
    found = _audit(log)
    assert found.accounts.ok and (found.accounts.late, found.accounts.dead_lettered) == (2, 2)


def test_a_derived_run_reads_late_ones_at_their_own_place(log: MemoryLog, tmp_path: Path) -> None:
    _send(log, _short(0), _short(1), _member(2), encode(close(group="g1", partition=0)))
    _make(log, STRICT)
    path = tmp_path / "again.toml"
    path.write_text('[run]\nname = "again"\npartitions = 1\n[policies.main]\nmodel = "model"\n')
    log.create(topic_specs(load(path, [], {}).settings))
    _clock(log).now_ms = 999_999
    work_off(_processor(log, LOOSE, run="again"), log)
    taken = [decode(envelope.value) for envelope in records(log, "again.main.samples")]
    assert [[member.offset for member in outcome.members] for outcome in taken] == [[0, 1, 2]]  # type: ignore[union-attr]
    assert _audit(log, run="again").accounts.ok and _audit(log).accounts.ok


def test_what_is_still_unreadable_becomes_a_dead_letter_again(log: MemoryLog) -> None:
    _send(log, b"\x00\xff", key=b"k")
    processor = _make(log, LOOSE)
    found = _forecast(log, 1000)
    assert [each.fate for each in found] == [Fate.UNREADABLE] and chosen(found, force=False) == []
    put_back(log, "demo", "main", chosen(found, force=True), 5.0)
    work_off(processor, log)
    first, second = buried(log)
    assert (second.value, second.key, second.offset, second.reason) == (first.value, first.key, 1, "not-ours")
    assert second.headers == (*first.headers, (REPLAYED_HEADER, f"{SOURCE}/0/0".encode()))
    assert _audit(log).accounts.ok and _audit(log).accounts.dead_lettered == 2
    assert _fates(log, 1000) == {0: Fate.REPLAYED, 1: Fate.UNREADABLE}  # so a second round does not double them
    assert len(chosen(_forecast(log, 1000), force=False)) == 0


def test_several_copies_of_one_member_join_once(log: MemoryLog) -> None:
    _send(log, _short(0), _member(1), _member(1, attempt=1), _member(2))
    processor = _make(log, STRICT)
    found = _forecast(log, 1001)
    assert [each.fate for each in found] == [Fate.JOINS, Fate.SUPERSEDED, Fate.JOINS]
    processor._max_tokens = LOOSE
    _clock(log).now_ms = 1001
    put_back(log, "demo", "main", chosen(found, force=True), 5.0)
    work_off(processor, log)
    (outcome,) = effective(log)
    assert [(member.index, member.offset) for member in outcome.members] == [(0, 0), (1, 4), (2, 6)]
    found_after = _audit(log)
    assert found_after.accounts.ok and found_after.accounts.superseded == 1


@pytest.mark.parametrize(
    ("changes", "fate"),
    [
        ({"topic": "demo.other.trajectories"}, Fate.FOREIGN),
        ({"topic": "demo.main.steps"}, Fate.FOREIGN),
        ({"partition": 7}, Fate.FOREIGN),
        ({"value": None, "reason": "empty"}, Fate.NOTHING),
        ({"value": b"", "reason": "empty"}, Fate.NOTHING),
        ({"reason": "corrupt-batch"}, Fate.DOUBTFUL),
        ({"detail": f"too long [cut: 99999 bytes, SHA-256 {'ab' * 32}]"}, Fate.CUT),
        ({"value": b"forged"}, Fate.DIFFERS),
        ({"key": b"forged"}, Fate.DIFFERS),
        ({"headers": ()}, Fate.DIFFERS),
        ({"offset": 10_000}, Fate.DIFFERS),
    ],
)
def test_some_letters_are_never_put_back(log: MemoryLog, changes: dict[str, object], fate: Fate) -> None:
    """Whoever can write to the dead letters could forge them: the bytes must be those that stood at the origin."""
    _send(log, _member(0), key=b"k")
    fields = {"topic": SOURCE, "partition": 0, "offset": 0, "value": _member(0), "key": b"k", "reason": "invalid"}
    fields |= {"headers": (("producer", b"w1"),), **changes}
    _bury(log, dead_letter(**fields))
    found = _forecast(log, 1001, force=True)
    assert [each.fate for each in found] == [fate]
    assert chosen(found, force=True) == []


def test_a_letter_whose_origin_retention_took_is_taken_at_its_word(log: MemoryLog) -> None:
    _send(log, b"old", _short(0))
    _bury(log, dead_letter(topic=SOURCE, partition=0, offset=0, value=_member(1), reason="invalid"))
    assert _fates(log, 1001) == {0: Fate.DIFFERS}
    log.delete_before(Place(SOURCE, 0), 1)
    assert _fates(log, 1001) == {0: Fate.JOINS}


def test_a_close_record_put_back_closes_once(log: MemoryLog) -> None:
    closing = encode(close(group="g1", partition=0))
    _send(log, _short(0), closing, closing)
    letter = dead_letter(topic=SOURCE, partition=0, offset=1, value=closing, headers=(("producer", b"w1"),))
    _bury(log, letter)
    _bury(log, dataclasses.replace(letter, offset=2))
    assert _fates(log, 1001) == {1: Fate.CLOSES, 2: Fate.CLOSES_NOTHING}


def test_replay_asks_which(log: MemoryLog, settings: Settings) -> None:
    arguments = {"policy": "main", "force": False, "dry_run": True, "as_json": False}
    with pytest.raises(SettingError, match="--reason REASON or --offset"):
        replay_letters(settings, reasons=[], places=[], **arguments)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="no dead letter"):
        replay_letters(settings, reasons=["invalid"], places=["0:3"], **arguments)  # type: ignore[arg-type]
    derived = settings.model_copy(deep=True)
    object.__setattr__(derived.policies["main"].source, "run", "elsewhere")
    with pytest.raises(SettingError, match="a derived run"):
        replay_letters(derived, reasons=["invalid"], places=[], **arguments)  # type: ignore[arg-type]


def test_dry_run_and_offsets(log: MemoryLog, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    _send(log, _short(0), _member(1), _member(2))
    _make(log, STRICT)
    arguments = {"policy": "main", "reasons": [], "force": False, "as_json": False}
    assert replay_letters(settings, places=["0:1"], dry_run=True, **arguments) == 0  # type: ignore[arg-type]
    assert "1 would be put back; nothing was written" in capsys.readouterr().out
    assert log.bounds(SOURCE)[0].end == 3
    assert replay_letters(settings, places=["0:1", f"{SOURCE}/0/2"], dry_run=False, **arguments) == 0  # type: ignore[arg-type]
    assert "2 put back" in capsys.readouterr().out
    assert log.bounds(SOURCE)[0].end == 5


def test_collect_shows_bytes_of_the_first_copy_only(log: MemoryLog) -> None:
    first = dead_letter(topic=SOURCE, value=b"one")
    _bury(log, first)
    _bury(log, dataclasses.replace(first, value=b"two"))
    seen: list[bytes | None] = []
    letters, strangers = collect(log, "demo", "main", lambda letter: seen.append(letter.value))
    assert (len(letters), letters[0].copies, letters[0].position, strangers, seen) == (1, 2, 0, 0, [b"one"])
