"""Which weights are the newest valid ones: a pure fold over the `weights` topic, the same for every reader.

Rules, in log order:
- the greatest epoch claimed so far owns the topic; what a lower epoch announces after that claim is void;
- within an epoch, announcements by another nonce than the claim's are void (when the claim is still there);
- a version number never goes back, and one version has one content: anything else is void.

The topic is compacted by epoch, so an old claim or announcement may be missing. Nothing is lost by that: a claim
carries the head that its owner inherits, and an announcement proves that its epoch was claimed. For this the trainer
writes its claim here only after it has won the epoch on `steps`; `take_over` does it so that the head is the true one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from infra.log import Ack, Envelope, Log, Place, Reader
from schemas.codec import decode, encode
from schemas.errors import DeadlineExceeded, LogGap, RecordError, Superseded
from schemas.names import manifest_key, topic
from schemas.records import Announcement, Claim, Record, Version


@dataclass(frozen=True, slots=True)
class Head:
    """The newest valid version. An empty digest: known only from a claim, so the manifest vouches for itself."""

    name: Version
    key: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Heads:
    """What a reader knows of the topic so far."""

    run: str
    policy: str
    epoch: int = -1
    """Greatest epoch claimed; -1 for none."""
    nonce: str = ""
    inherited: Version | None = None
    """Newest version when that epoch was claimed."""
    head: Head | None = None

    def covers(self, name: Version) -> bool:
        """Whether this version is in the head's lineage as far as the topic tells: no newer than it, and not void.

        A reader whose bucket lacks the head itself may take such a version meanwhile.
        """
        head = self.head.name if self.head else None
        return any(top is not None and top.epoch == name.epoch and name <= top for top in (head, self.inherited))


def fold(heads: Heads, record: Record) -> Heads:
    """What is known after one more record of the topic.

    >>> def said(epoch, version, nonce="a"):
    ...     return Announcement(run="r", policy="p", epoch=epoch, nonce=nonce, version=version,
    ...                         manifest_key="", manifest_digest="ab", size_bytes=1)
    >>> heads = fold(Heads("r", "p"), Claim(run="r", policy="p", role="train", epoch=2, nonce="a"))
    >>> heads = fold(fold(fold(heads, said(2, 5)), said(1, 9)), said(2, 6, nonce="b"))
    >>> str(heads.head.name)
    '2-5'
    """
    if not isinstance(record, (Claim, Announcement)) or (record.run, record.policy) != (heads.run, heads.policy):
        return heads
    return _claimed(heads, record) if isinstance(record, Claim) else _announced(heads, record)


def fold_all(run: str, policy: str, records: Iterable[Record]) -> Heads:
    """`fold` over many records, from the beginning."""
    heads = Heads(run, policy)
    for record in records:
        heads = fold(heads, record)
    return heads


def _claimed(heads: Heads, claim: Claim) -> Heads:
    """The head is what the claim says: an announcement that it does not name was void, or is given up by it."""
    own = heads.head is not None and heads.head.name.epoch == claim.epoch  # repeated after its owner has announced
    if claim.epoch < heads.epoch or own or (claim.epoch == heads.epoch and heads.nonce not in ("", claim.nonce)):
        return heads
    name = Version(claim.head_epoch, claim.head_version)
    if name.version < 0:
        return Heads(heads.run, heads.policy, claim.epoch, claim.nonce)
    key = manifest_key(heads.run, heads.policy, name.epoch, name.version)
    head = heads.head if heads.head and heads.head.name == name else Head(name, key)
    return replace(heads, epoch=claim.epoch, nonce=claim.nonce, inherited=name, head=head)


def _announced(heads: Heads, said: Announcement) -> Heads:
    if said.epoch < heads.epoch or (said.epoch == heads.epoch and heads.nonce not in ("", said.nonce)):
        return heads
    if said.epoch > heads.epoch:
        # Its claim was compacted away, and with it the word that what stands before may be void: so that is forgotten.
        heads = Heads(heads.run, heads.policy, said.epoch, said.nonce)
    if heads.head is not None and said.version <= heads.head.name.version:
        return heads
    key = manifest_key(heads.run, heads.policy, said.epoch, said.version)
    return replace(heads, head=Head(Version(said.epoch, said.version), key, said.manifest_digest))


def read_heads(log: Log, run: str, policy: str, *, timeout_s: float, end: int | None = None) -> Heads:
    """Everything on the topic below offset `end`, or up to its present end.

    Raises BrokerError, or DeadlineExceeded naming how far it came.
    """
    place = Place(topic(run, policy, "weights"), 0)
    bounds, limit, heads = log.bounds(place.topic)[0], time.monotonic() + timeout_s, Heads(run, policy)
    end = bounds.end if end is None else end
    reader = log.reader({place: bounds.start})
    try:
        while reader.position(place) < end:
            if time.monotonic() > limit:
                raise DeadlineExceeded(
                    f"reading {place.topic}[0] up to offset {end} took longer than {timeout_s} s; "
                    f"it came to {reader.position(place)}"
                )
            heads = fold_envelopes(heads, (envelope for envelope in _poll(reader) if envelope.offset < end))
    finally:
        reader.close()
    return heads


def fold_envelopes(heads: Heads, envelopes: Iterable[Envelope]) -> Heads:
    """`fold` over records as they stand on the log; what cannot be read announces nothing."""
    for envelope in envelopes:
        try:
            heads = heads if envelope.value is None else fold(heads, decode(envelope.value))
        except RecordError:
            continue
    return heads


def take_over(log: Log, claim: Claim, *, timeout_s: float) -> Heads:
    """Write a trainer's claim into `weights` with the head that it really inherits; returns what is known then.

    To be called once, after the epoch was won on `steps` and before anything is announced under it. The owner before
    may announce between reading and writing: what stands before the claim is inherited, so it is written once more.
    The next version must be above `heads.head`. Raises Superseded, SendFailed, BrokerError, DeadlineExceeded.
    """
    before = read_heads(log, claim.run, claim.policy, timeout_s=timeout_s)
    written = _write_claim(log, claim, before, timeout_s)
    named, before = before.head, read_heads(log, claim.run, claim.policy, timeout_s=timeout_s, end=written.offset)
    if named != before.head:
        _write_claim(log, claim, before, timeout_s)
    heads = read_heads(log, claim.run, claim.policy, timeout_s=timeout_s)
    if (heads.epoch, heads.nonce) != (claim.epoch, claim.nonce):
        raise Superseded(
            f"{topic(claim.run, claim.policy, 'weights')}: epoch {claim.epoch} ({claim.nonce}) was claimed, but "
            f"epoch {heads.epoch} ({heads.nonce}) owns it; a newer trainer runs, so this one must end"
        )
    return heads


def _write_claim(log: Log, claim: Claim, before: Heads, timeout_s: float) -> Ack:
    name = before.head.name if before.head else Version(0, -1)
    return send(log, replace(claim, head_epoch=name.epoch, head_version=name.version), timeout_s=timeout_s)


def send(log: Log, record: Claim | Announcement, *, timeout_s: float) -> Ack:
    """Append a record to its policy's `weights` topic and wait until it is acknowledged. Raises SendFailed, DeadlineExceeded."""
    writer = log.writer()
    try:
        name = topic(record.run, record.policy, "weights")
        return writer.send(name, 0, encode(record), key=str(record.epoch).encode()).result(timeout_s)
    finally:
        writer.close()


def announcer(log: Log, *, timeout_s: float) -> Callable[[Announcement], Ack]:
    """`send` for `publish`: announces and waits. Versions must rise; only the newest may be repeated."""
    newest = Version(-1, -1)

    def announce(announcement: Announcement) -> Ack:
        nonlocal newest
        name = Version(announcement.epoch, announcement.version)
        assert name >= newest, f"{name} after {newest}: compaction would keep {name} alone"
        newest = name
        return send(log, announcement, timeout_s=timeout_s)

    return announce


def _poll(reader: Reader) -> list[Envelope]:
    """One poll; a gap loses nothing here, since each claim repeats what matters of the records before it."""
    try:
        return reader.poll(timeout_s=0.5)
    except LogGap:
        return []
