"""The newest valid version, whatever zombies say, whatever compaction took away."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.log import TopicSpec
from infra.memory_log import MemoryLog
from infra.weights import announce
from infra.weights.announce import Heads, announcer, fold, fold_all, read_heads, take_over
from schemas.errors import Superseded
from schemas.names import topic
from schemas.records import Announcement, Claim, Record, Version

RUN, POLICY = "demo", "main"
TOPIC = topic(RUN, POLICY, "weights")


def claim(epoch: int, nonce: str = "", head: Version | None = None) -> Claim:
    head = head or Version(0, -1)
    return Claim(
        run=RUN, policy=POLICY, role="train", epoch=epoch, nonce=nonce or f"n{epoch}", head_epoch=head.epoch,
        head_version=head.version,
    )  # fmt: skip


def said(epoch: int, version: int, nonce: str = "", digest: str = "") -> Announcement:
    return Announcement(
        run=RUN, policy=POLICY, epoch=epoch, nonce=nonce or f"n{epoch}", version=version, manifest_key="k",
        manifest_digest=digest or f"d{epoch}-{version}", size_bytes=1,
    )  # fmt: skip


def head_of(records: Sequence[Record]) -> Version | None:
    head = fold_all(RUN, POLICY, records).head
    return head.name if head else None


def test_the_newest_announcement_of_the_owner_is_the_head() -> None:
    heads = fold_all(RUN, POLICY, [claim(1), said(1, 0), said(1, 1)])
    assert heads.head is not None
    assert (heads.head.name, heads.head.digest, heads.head.key) == (
        Version(1, 1),
        "d1-1",
        "demo/main/manifests/1-1.json",
    )


@pytest.mark.parametrize(
    ("records", "head"),
    [
        ([], None),
        ([claim(1)], None),
        ([claim(1), said(1, 0), said(1, 4), said(1, 3)], Version(1, 4)),
        ([claim(1), said(1, 0), said(1, 1, nonce="other")], Version(1, 0)),
        ([claim(1), said(1, 5), claim(2, head=Version(1, 5)), said(1, 6)], Version(1, 5)),
        ([claim(1), said(1, 5), claim(2, head=Version(1, 5)), said(2, 5), said(2, 4)], Version(1, 5)),
        ([claim(1), said(1, 5), claim(2, head=Version(1, 5)), said(1, 9), said(2, 6)], Version(2, 6)),
        ([claim(2), claim(1), said(1, 3), said(2, 1)], Version(2, 1)),
        ([claim(2), claim(2, nonce="second"), said(2, 1, nonce="second"), said(2, 0)], Version(2, 0)),
        ([claim(3, head=Version(2, 7))], Version(2, 7)),
        ([claim(1), said(1, 2), claim(1)], Version(1, 2)),
        ([said(1, 40), said(2, 39)], Version(2, 39)),
    ],
)
def test_what_is_void(records: list[Record], head: Version | None) -> None:
    assert head_of(records) == head


def test_one_version_has_one_content_and_a_claim_lacks_only_the_digest() -> None:
    heads = fold_all(RUN, POLICY, [claim(1), said(1, 2), said(1, 2, digest="other")])
    assert heads.head is not None and heads.head.digest == "d1-2"
    heads = fold_all(RUN, POLICY, [said(1, 2), said(1, 3), claim(2, head=Version(1, 2))])
    assert heads.head is not None and heads.head.name == Version(1, 2)
    heads = fold_all(RUN, POLICY, [said(1, 2), claim(2, head=Version(1, 2))])
    assert heads.head is not None and heads.head.digest == "d1-2"
    heads = fold_all(RUN, POLICY, [claim(2, head=Version(1, 2))])
    assert heads.head is not None and heads.head.digest == ""


def test_other_policies_and_other_records_are_not_looked_at() -> None:
    heads = Heads(RUN, "critic")
    assert fold(fold(heads, claim(1)), said(1, 1)) == heads


def test_what_a_reader_may_take_while_its_bucket_lacks_the_head() -> None:
    heads = fold_all(RUN, POLICY, [claim(1), said(1, 5), claim(2, head=Version(1, 5)), said(2, 8)])
    covered = [Version(2, 8), Version(2, 7), Version(1, 5), Version(1, 4)]
    assert all(heads.covers(name) for name in covered)
    assert not any(heads.covers(name) for name in [Version(2, 9), Version(3, 1), Version(1, 6), Version(0, 2)])
    assert not Heads(RUN, POLICY).covers(Version(1, 0))


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """What trainers write one after the other, with zombies of older epochs in between."""
    records: list[Record] = []
    epoch, repeats = 0, st.integers(1, 2)
    for _ in range(draw(st.integers(1, 14))):
        owner = fold_all(RUN, POLICY, records)
        version = owner.head.name.version if owner.head else -1
        what = draw(st.sampled_from(["claim", "publish", "publish", "zombie", "repeat", "reclaim"]))
        if what == "claim" or epoch == 0:
            epoch += draw(st.integers(1, 2))
            records += [claim(epoch, head=owner.head.name if owner.head else None)] * draw(repeats)
        elif what == "reclaim" and not (owner.head and owner.head.name.epoch == epoch):
            records.append(claim(epoch, head=owner.inherited))
        elif what == "publish":
            records += [said(epoch, version + draw(st.integers(1, 3)))] * draw(repeats)
        elif what == "zombie" and epoch > 1:
            records.append(said(draw(st.integers(0, epoch - 1)), draw(st.integers(0, version + 5)), digest="zombie"))
        elif what == "repeat" and owner.head and owner.head.name.epoch == epoch:
            records.append(said(epoch, version))
    return records


def compacted(records: Sequence[Record], cleaned: int) -> list[Record]:
    """What a cleaner leaves that has looked at the first `cleaned` records: of each epoch there, the last."""
    last = {
        record.epoch: at for at, record in enumerate(records[:cleaned]) if isinstance(record, (Claim, Announcement))
    }
    return [record for at, record in enumerate(records) if at >= cleaned or at in last.values()]


@settings(deadline=None)
@given(histories())
def test_heads_only_rise_and_come_from_the_owner(records: list[Record]) -> None:
    heads, versions = Heads(RUN, POLICY), [-1]
    for record in records:
        before, heads = heads, fold(heads, record)
        assert heads.epoch >= before.epoch
        if heads.head != before.head:
            assert heads.head is not None and heads.head.digest != "zombie"
            assert heads.head.name.epoch == heads.epoch
            assert before.head is None or heads.head.name > before.head.name
            versions.append(heads.head.name.version)
    assert versions == sorted(set(versions))


@settings(deadline=None)
@given(histories(), st.data())
def test_compaction_changes_nothing(records: list[Record], data: st.DataObject) -> None:
    full, cleaned, kept = head_of(records), 0, list(records)
    for _ in range(data.draw(st.integers(1, 3))):
        cleaned = data.draw(st.integers(0, len(kept)))
        kept = compacted(kept, cleaned)
        assert head_of(kept) == full


@settings(deadline=None)
@given(histories(), st.data())
def test_whoever_reads_on_after_compaction_comes_to_the_same(records: list[Record], data: st.DataObject) -> None:
    """A reader that saw everything up to some point, and then the compacted rest."""
    seen = data.draw(st.integers(0, len(records)))
    rest = compacted(records[seen:], data.draw(st.integers(0, len(records) - seen)))
    assert head_of([*records[:seen], *rest]) == head_of(records)


@pytest.fixture
def log() -> MemoryLog:
    made = MemoryLog()
    made.create([TopicSpec(TOPIC, 1, {"cleanup.policy": "compact"})])
    return made


def test_taking_over_carries_the_head_on(log: MemoryLog) -> None:
    assert take_over(log, claim(1), timeout_s=5).head is None
    announcer(log, timeout_s=5)(said(1, 0))
    heads = take_over(log, claim(2), timeout_s=5)
    assert (heads.epoch, heads.inherited) == (2, Version(1, 0))
    with pytest.raises(Superseded, match=r"epoch 1 .* was claimed, but epoch 2"):
        take_over(log, claim(1), timeout_s=5)
    with pytest.raises(Superseded):
        take_over(log, claim(2, nonce="late"), timeout_s=5)


@pytest.mark.parametrize("in_time", [True, False])
def test_a_word_in_the_last_moment_is_inherited_and_one_after_it_is_not(
    log: MemoryLog, monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    """The old owner announces between the new one's look and its claim, or just after that claim."""
    take_over(log, claim(1), timeout_s=5)
    announcer(log, timeout_s=5)(said(1, 0))
    send, late = announce.send, [said(1, 1)]

    def send_late(log: MemoryLog, record: Claim | Announcement, *, timeout_s: float) -> object:
        if late and in_time:
            send(log, late.pop(), timeout_s=timeout_s)
        ack = send(log, record, timeout_s=timeout_s)
        if late:
            send(log, late.pop(), timeout_s=timeout_s)
        return ack

    monkeypatch.setattr(announce, "send", send_late)
    heads = take_over(log, claim(2), timeout_s=5)
    assert heads.head is not None and heads.head.name == heads.inherited == Version(1, 1 if in_time else 0)
    assert log.bounds(TOPIC)[0].end == (5 if in_time else 4)
    monkeypatch.undo()
    announcer(log, timeout_s=5)(said(1, 2))
    assert read_heads(log, RUN, POLICY, timeout_s=5).head == heads.head


def test_an_owner_that_would_go_back_is_stopped(log: MemoryLog) -> None:
    """Compaction would keep the older version alone."""
    announce_it = announcer(log, timeout_s=5)
    for version in (1, 2, 2):
        announce_it(said(1, version))
    with pytest.raises(AssertionError, match="1-1 after 1-2"):
        announce_it(said(1, 1))


def test_what_cannot_be_read_announces_nothing(log: MemoryLog) -> None:
    writer = log.writer()
    for value in (b"", b"\xc3\x01rubbish", b"x" * 100):
        writer.send(TOPIC, 0, value, key=b"1").result(5)
    writer.close()
    announcer(log, timeout_s=5)(said(1, 3))
    heads = read_heads(log, RUN, POLICY, timeout_s=5)
    assert heads.head is not None and heads.head.name == Version(1, 3)
