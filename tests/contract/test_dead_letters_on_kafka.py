"""Every kind of unreadable record on a real broker: buried byte for byte before the position moves, listed, and put back.

The client, the broker's storage and the topic's settings are the real ones, so what they do to empty values, headers and
broken batches is seen here and nowhere else.
"""

from __future__ import annotations

import json
import math
import secrets
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest

from consumers.components import make_recipe
from consumers.partitions import Partitions
from consumers.pipeline import Route
from infra.arrivals import dead_letters
from infra.audit import audit
from infra.dead_letters import collect
from infra.dead_letters_command import list_letters, replay_letters, show_letter, shown
from infra.dead_letters_replay import REPLAYED_HEADER
from infra.drops_command import drops_of
from infra.kafka_log import KafkaLog
from infra.log import Committed, Envelope, Log, Place, Reader
from infra.ownership import read_all
from infra.provision import topic_specs
from infra.settings import Settings
from schemas import codec
from schemas.codec import HEADER_BYTES, MAX_ITEMS, decode, encode
from schemas.packing import pack_floats
from schemas.records import KEPT, DeadLetter, Outcome, Status
from schemas.rules.chain import Chain
from support.samples import close, request, trajectory
from support.servers import session_state

pytestmark = pytest.mark.broker

HEADERS = (("producer", b"w1"), ("traceparent", b"\x00\xff\x1b[2J"))
BROKEN = b"this record's batch will rot"
LIFETIME_MS = 600_000


def _varint(value: int) -> bytes:
    value, found = value << 1, b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def _claims_items(count: int) -> bytes:
    """A trajectory whose array of step rewards says that it holds so many."""
    mark = struct.pack("<d", 1234.5)
    data = encode(trajectory(step_rewards=(1234.5,)))
    assert data.count(b"\x02" + mark) == 1
    return data.replace(b"\x02" + mark, _varint(count) + mark)


def _with_number(number: float, **changes: Any) -> bytes:
    """A trajectory in whose one 1234.5 stands a number that our own writer refuses."""
    mark, data = struct.pack("<d", 1234.5), encode(trajectory(**changes))
    assert data.count(mark) == 1
    return data.replace(mark, struct.pack("<d", number))


def _really_has_items(count: int) -> bytes:
    """A trajectory that a writer without limits made: small on the log, large once decoded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "MAX_ITEMS", 10 * count)
        return encode(trajectory(timings={f"{n:x}": 0.0 for n in range(count)}))


def _poison(run: str) -> dict[str, tuple[bytes | None, str]]:
    """What stands on the log, and the reason that it must be given."""
    here: dict[str, Any] = {"run": run, "partition": 0}
    whole = encode(trajectory(**here))
    return {
        "two bytes": (b"\x00\xff", "not-ours"),
        "a tombstone": (None, "empty"),
        "no bytes": (b"", "empty"),
        "Avro without the marker": (whole[HEADER_BYTES:], "not-ours"),
        "a registry's framing": (b"\x00\x00\x00\x00\x2a" + whole[HEADER_BYTES:], "not-ours"),
        "the marker alone": (b"\xc3\x01", "not-ours"),
        "a foreign schema": (b"\xc3\x01" + bytes(8) + whole[HEADER_BYTES:], "unknown-schema"),
        "cut": (whole[:-3], "undecodable"),
        "bytes behind": (whole + b"\x00", "undecodable"),
        "text": (b'{"group": "g1", "reward": 1.0}\x1b[31m', "not-ours"),
        "another kind": (encode(request(**here)), "wrong-kind"),
        "another partition": (encode(trajectory(run=run, partition=1)), "wrong-place"),
        "another policy": (encode(trajectory(**here, policy="other")), "wrong-place"),
        "another run": (encode(trajectory(partition=0)), "wrong-place"),
        "a close record for another policy": (encode(close(**here, policy="other")), "wrong-place"),
        "a status of later": (encode(trajectory(**here, status=Status.UNKNOWN, reward=None)), "unknown-status"),
        "a reward that is no number": (_with_number(math.nan, **here, reward=1234.5), "invalid"),
        "an infinite part": (_with_number(math.inf, **here, reward_parts={"a": 1234.5}), "invalid"),
        "log-probs that are no numbers": (
            encode(trajectory(**here, logprobs=pack_floats([-0.5, math.nan, 0.0]))),
            "invalid",
        ),
        "a reward of a failure": (encode(trajectory(**here, status=Status.TIMEOUT, reward=0.0)), "invalid"),
        "too many tokens": (encode(_long(here)), "invalid"),
        "a claim of 2^40 items": (_claims_items(2**40), "undecodable"),
        "more items than allowed": (_really_has_items(MAX_ITEMS + 1), "undecodable"),
    }


def _long(here: Mapping[str, Any]) -> Any:
    from schemas.packing import pack_bits, pack_ints
    from schemas.records import Role, Segment, VersionRun

    return trajectory(
        **here, tokens=pack_ints([1] * 2000), loss_mask=pack_bits([True] * 2000), logprobs=pack_floats([-1.0] * 2000),
        segments=(Segment(Role.SAMPLED, 2000),), versions=(VersionRun(1, 0, 2000),),
    )  # fmt: skip


MAX_TOKENS = 1000


class Watched:
    """A log whose polls are short, and whose every commit is held against the dead letters that stand there by then."""

    def __init__(self, log: KafkaLog, run: str, bad: set[int]) -> None:
        self._log, self._run, self._bad, self.commits = log, run, bad, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def reader(self, positions: Mapping[Place, int]) -> Reader:
        found = self._log.reader(positions)
        poll = found.poll
        found.poll = lambda timeout_s, max_records=1000: poll(timeout_s, 4)  # type: ignore[method-assign]
        return found

    def commit(self, group: str, positions: Mapping[Place, Committed]) -> None:
        buried = {letter.offset for _, letter in dead_letters(cast("Log", self._log), self._run, "main") if letter}
        for place, committed in positions.items():
            note = json.loads(committed.note)
            missing = {at for at in self._bad if at < max(committed.offset, note["dead_until"])} - buried
            assert place.partition == 1 or not missing, f"the position moved to {committed} before {missing}"
        self.commits += 1
        self._log.commit(group, positions)


@pytest.fixture
def log(bootstrap: str) -> Iterator[KafkaLog]:
    found = KafkaLog(bootstrap)
    yield found
    found.close()


def _member(run: str, index: int, now_ms: int) -> bytes:
    return encode(
        trajectory(
            run=run, group="g1", group_size=3, index=index, partition=0, first_request_time_ms=now_ms,
            lifetime_ms=LIFETIME_MS, reward=index / 2,
        )
    )  # fmt: skip


def _send(log: KafkaLog, topic: str, values: list[bytes | None]) -> list[int]:
    writer = log.writer()
    pending = [
        writer.send(topic, 0, cast("bytes", value), key=b"key%d" % n, headers=HEADERS) for n, value in enumerate(values)
    ]
    writer.flush(20.0)
    writer.close()
    return [sent.result(0).offset for sent in pending]


def _rot(topic: str) -> None:
    """Flip a bit of a batch on the broker's disk, under its feet."""
    (segment,) = (session_state() / "kafka" / "data" / f"{topic}-0").glob("*.log")
    with segment.open("r+b") as file:
        at = file.read().index(BROKEN)
        file.seek(at)
        file.write(b"T")


def _processor(log: Any, run: str) -> Partitions:
    route = Route(run=run, policy="main", source_run=run, source_policy="main")
    recipe = make_recipe(group_filters=[], min_members=2, group_size=3)
    return Partitions(log, route, recipe, patience_s=20.0, commit_every_s=0.0, max_tokens=MAX_TOKENS)


def _work_off(log: KafkaLog, partitions: Partitions, source: str) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        partitions.work(0.1)
        if all(partitions.positions[p] >= bounds.end for p, bounds in log.bounds(source).items()):
            partitions.commit()
            partitions.discard()
            return
    raise AssertionError(f"the end of {source} was never reached: {partitions.positions}")


def _everything(log: KafkaLog, topic: str) -> list[Envelope]:
    return list(read_all(log, Place(topic, 0), log.bounds(topic)[0]))


def _outcomes(log: KafkaLog, run: str) -> list[Outcome]:
    chain, found = Chain(), []
    for envelope in _everything(log, f"{run}.main.samples"):
        outcome = decode(envelope.value)
        if isinstance(outcome, Outcome) and chain.take(outcome.previous, outcome.closing_offset):
            found.append(outcome)
    return found


def test_every_kind_is_buried_and_blocks_nothing(
    log: KafkaLog, bootstrap: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = _new_run(log, bootstrap)
    run = settings.run.name
    source, place = f"{run}.main.trajectories", Place(f"{run}.main.trajectories", 0)
    now_ms = time.time_ns() // 1_000_000
    kinds = _poison(run)
    values, half = [value for value, _ in kinds.values()], len(kinds) // 2
    members = [_member(run, index, now_ms) for index in range(3)]
    last = _send(log, source, [members[0], *values[:half], members[1], *values[half:], members[2]])[-1]
    sent = _everything(log, source)
    good = {0, half + 1, last}
    bad = [envelope for envelope in sent if envelope.offset not in good]
    watched = Watched(log, run, {envelope.offset for envelope in bad})
    _work_off(log, _processor(watched, run), source)
    assert watched.commits > len(sent) // 8

    # All of them, in order, to the byte, each with its reason.
    letters = [cast("DeadLetter", decode(envelope.value)) for envelope in _everything(log, f"{run}.main.dead-letters")]
    assert [letter.offset for letter in letters] == [envelope.offset for envelope in bad]
    for letter, envelope, (kind, (value, reason)) in zip(letters, bad, kinds.items(), strict=True):
        assert (letter.value, letter.reason) == (value, reason), kind
        assert (letter.topic, letter.partition, letter.time_ms) == (source, 0, envelope.time_ms), kind
        assert (letter.key, letter.headers) == (envelope.key, HEADERS), kind

    # Nothing was held up: the group is whole, once, and the position is past all of them.
    (outcome,) = _outcomes(log, run)
    assert (outcome.disposition, {member.offset for member in outcome.members}) == (KEPT, good)
    group = f"{run}.main.process"
    assert log.committed(group, [place])[place].offset == log.bounds(source)[0].end == last + 1

    # A restart repeats nothing; one whose position is lost repeats letters that count once.
    _work_off(log, _processor(log, run), source)
    assert len(_everything(log, f"{run}.main.dead-letters")) == len(bad)
    log.commit(group, {place: Committed(0)})
    _work_off(log, _processor(log, run), source)
    found, strangers = collect(log, run, "main")
    assert [letter.origin.offset for letter in found] == [envelope.offset for envelope in bad] and strangers == 0
    assert {letter.copies for letter in found} == {2} and len(_outcomes(log, run)) == 1
    accounts = audit(log, run, "main", max_tokens=MAX_TOKENS).accounts
    assert accounts.ok and (accounts.dead_lettered, accounts.pending) == (len(bad), 3)

    _people(log, settings, run, source, bad, capsys)


def test_a_batch_that_rots_on_the_disk_is_buried_and_never_put_back(log: KafkaLog, bootstrap: str) -> None:
    settings = _new_run(log, bootstrap)
    run = settings.run.name
    source, now_ms = f"{run}.main.trajectories", time.time_ns() // 1_000_000
    for value in (_member(run, 0, now_ms), BROKEN, _member(run, 1, now_ms), _member(run, 2, now_ms)):
        _send(log, source, [value])
    _rot(source)
    _work_off(log, _processor(Watched(log, run, {1}), run), source)
    (letter,) = (letter for _, letter in dead_letters(log, run, "main") if letter is not None)
    # The bytes as found. Its key and headers are not to be trusted either, and are not kept.
    assert (letter.offset, letter.reason, letter.value) == (1, "corrupt-batch", b"T" + BROKEN[1:])
    (outcome,) = _outcomes(log, run)
    assert [member.offset for member in outcome.members] == [0, 2, 3]
    asked: dict[str, Any] = {"policy": "main", "places": [], "dry_run": False, "as_json": False}
    assert replay_letters(settings, reasons=["corrupt-batch"], force=True, **asked) == 1
    assert log.bounds(source)[0].end == 4


def _new_run(log: KafkaLog, bootstrap: str) -> Settings:
    settings = Settings.model_validate(
        {
            "run": {"name": f"poison-{secrets.token_hex(4)}"},
            "kafka": {"bootstrap_servers": bootstrap},
            "policies": {"main": {"model": "m"}},
        }
    )
    log.create(topic_specs(settings))
    return settings


def _people(
    log: KafkaLog, settings: Settings, run: str, source: str, bad: list[Envelope], capsys: pytest.CaptureFixture[str]
) -> None:
    """List, show, replay and drops, on the same topics."""
    capsys.readouterr()
    list_letters(settings, policies=["main"], reasons=[], as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == len(bad) + 1
    for envelope in bad[:2]:
        show_letter(settings, policy="main", place=f"0:{envelope.offset}", max_bytes=64, as_json=False)
    out = capsys.readouterr().out
    for position, letter in dead_letters(log, run, "main"):
        assert letter is not None
        out += "\n".join(shown(letter, position, 64))
    assert "\x1b" not in out and "\\x1b[31m" not in out and "\\x1b[2J" in out  # headers are told, values are dumped
    asked: dict[str, Any] = {"policy": "main", "places": [], "dry_run": False, "as_json": False}
    end = log.bounds(source)[0].end
    assert replay_letters(settings, reasons=["not-ours"], force=False, **asked) == 1
    assert log.bounds(source)[0].end == end
    assert replay_letters(settings, reasons=["not-ours"], force=True, **asked) == 0
    _work_off(log, _processor(log, run), source)
    copies = _everything(log, source)[end:]
    not_ours = [value for value, reason in _poison(run).values() if reason == "not-ours"]
    assert [copy.value for copy in copies] == not_ours
    assert all(copy.headers[-1][0] == REPLAYED_HEADER and copy.headers[:-1] == HEADERS for copy in copies)
    accounts = audit(log, run, "main", max_tokens=MAX_TOKENS).accounts
    assert accounts.ok and accounts.dead_lettered == len(bad) + len(copies)
    assert drops_of(log, settings, "main", 1.0).left_out.trajectories == len(bad) + len(copies)
