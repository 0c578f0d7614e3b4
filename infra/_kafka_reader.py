"""The reader of the Kafka log: positions of its own, gaps with exact numbers, a way past broken batches.

Knows no client: it gets feeds (thin wrappers of a consumer, made in `infra.kafka_log`) and is tested against scripted
ones. Traps of the client that this file answers:

- after any error of its poll, the next one spins for ever: the feed is thrown away, and a fresh one starts at the
  positions kept here;
- a broker that is away looks like an idle topic: silence is checked, and longer than the patience it is an error;
- a batch whose checksum is broken raises at every offset in it: its records are fetched once more unchecked, one by
  one, until a checked fetch succeeds behind them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from infra._log_checks import check_offset, truncated
from infra.log import CORRUPT_HEADER, Bounds, Envelope, Place
from schemas.errors import BrokerError, LogGap, SettingError

_PROBE_S = 2.0  # a fetch of records that are known to exist
_RESCUE_S = 1.0  # of one poll, for broken batches
_REST_S = 0.1  # between attempts to reach a broker that is away

Batches = list[tuple[Place, list[Envelope]]]


class FeedOutOfRange(Exception):
    """The broker has nothing at the position asked for."""

    def __init__(self, place: Place, offset: int) -> None:
        super().__init__(f"{place.topic}[{place.partition}] at {offset}")
        self.place, self.offset = place, offset


class FeedUnreadable(Exception):
    """Bytes came that the client cannot take apart; it does not say whose."""


class FeedAway(Exception):
    """The broker did not answer, or the client broke; another attempt may do."""


class Feed(Protocol):
    """A consumer of fixed partitions. After any of the errors above, only `close` and `seek` are called."""

    def poll(self, timeout_s: float, max_records: int) -> Batches:
        """Next records by partition, within the time."""
        ...

    def seek(self, place: Place, offset: int) -> None:
        """Read on from `offset`."""
        ...

    def positions(self) -> dict[Place, int]:
        """Where the client will read on; ahead of its records when a batch ends in removed ones."""
        ...

    def ends(self, timeout_s: float) -> dict[Place, int]:
        """Offsets behind the last records, asked of the broker. Raises FeedAway."""
        ...

    def seen_end(self, place: Place) -> int | None:
        """Offset behind the last record as the newest fetched answer said; None before the first."""
        ...

    def close(self) -> None:
        """Let go; never raises, never waits long."""
        ...


class KafkaReader:
    """Reads fixed partitions; one thread uses it."""

    def __init__(
        self,
        positions: Mapping[Place, int],
        open_feed: Callable[[Mapping[Place, int], bool], Feed],
        bounds: Callable[[Place], Bounds],
        *,
        patience_s: float,
        where: str,
    ) -> None:
        if not positions:
            raise SettingError("a reader was asked for without any partition: give at least one position")
        for place, offset in positions.items():
            check_offset(place, offset)
        self._positions = {Place(*place): offset for place, offset in positions.items()}
        self._open_feed, self._bounds = open_feed, bounds
        self._patience_s, self._where = patience_s, where
        self._feed: Feed | None = open_feed(self._positions, True)
        self.closed = False
        self._alive_s = time.monotonic()  # when the broker last answered
        self._began_s = 0.0  # when the poll under way began
        self._trouble_s: float | None = None  # since when nothing has been answered; time between polls does not count

    def poll(self, timeout_s: float, max_records: int = 1000) -> list[Envelope]:
        """Next records of all partitions; empty after the timeout. Raises LogGap, LogTruncated, BrokerError."""
        if self.closed:
            raise BrokerError("this reader is closed: ask the log for another")
        self._began_s = time.monotonic()
        deadline_s = self._began_s + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            records = self._attempt(min(left_s, max(0.5, self._patience_s / 4)), max_records)
            if records or time.monotonic() >= deadline_s:
                return records

    def seek(self, place: Place, offset: int) -> None:
        """Read on from `offset`."""
        check_offset(place, offset)
        self.position(place)
        self._positions[Place(*place)] = offset
        if self._feed is not None:
            self._feed.seek(place, offset)

    def position(self, place: Place) -> int:
        """Offset of the next record that poll will return."""
        if place not in self._positions:
            raise SettingError(
                f"{place[0]}[{place[1]}] is not read here; this reader has {', '.join(map(_name, self._positions))}"
            )
        return self._positions[place]

    def end(self, place: Place) -> int:
        """Offset behind the last record, as the broker's newest answer said; never before `position`."""
        position = self.position(place)
        seen = self._feed.seen_end(place) if self._feed is not None else None
        return max(position, seen or 0)

    def close(self) -> None:
        """Let go of the connection; never raises, never waits long."""
        self.closed = True
        self._drop_feed()

    def _attempt(self, timeout_s: float, max_records: int) -> list[Envelope]:
        """One try to read: records, or an empty list when there are none or the trouble may pass."""
        try:
            if self._feed is None:
                self._feed = self._open_feed(self._positions, True)
            batches = self._feed.poll(timeout_s, max_records)
            if not batches:
                self._heed_silence(self._feed)
                return []
        except FeedOutOfRange as out:
            self._report_gap(out)
            return []
        except FeedUnreadable as broken:
            self._drop_feed()
            return self._rescue(max_records, broken, timeout_s)
        except (FeedAway, BrokerError) as away:
            self._drop_feed()
            self._bear(away, timeout_s)
            return []
        self._answered()
        records = []
        for place, envelopes in batches:
            self._positions[place] = envelopes[-1].offset + 1
            records += envelopes
        return records

    def _heed_silence(self, feed: Feed) -> None:
        """After an empty poll: step over removed records, and now and then ask whether the broker is there at all."""
        for place, offset in feed.positions().items():
            self._positions[place] = max(self._positions[place], offset)
        if time.monotonic() - self._alive_s > max(0.5, self._patience_s / 4):
            feed.ends(timeout_s=max(0.25, min(2.0, self._patience_s / 4)))
            self._answered()

    def _answered(self) -> None:
        """Note a sign of life."""
        self._alive_s, self._trouble_s = time.monotonic(), None

    def _bear(self, away: Exception, timeout_s: float) -> None:
        """Wait a little for a broker that is away; beyond the patience raise BrokerError."""
        if self._trouble_s is None:
            self._trouble_s = max(self._alive_s, self._began_s)
        silent_s = time.monotonic() - self._trouble_s
        if silent_s > self._patience_s:
            self._trouble_s = None
            raise BrokerError(
                f"Kafka at {self._where} has not answered for {silent_s:.0f} s while {_names(self._positions)} "
                f"was read ({away}); the reader keeps its positions, and a further poll tries again"
            ) from None
        time.sleep(min(timeout_s, _REST_S))

    def _report_gap(self, out: FeedOutOfRange) -> None:
        """Raise what an offset out of range means: a gap (the position moves behind it), or a truncated log."""
        place, asked = out.place, self._positions[out.place]
        start, end = self._bounds(place)
        if asked < start:
            self.seek(place, start)
            raise LogGap(place.topic, place.partition, asked, start)
        if asked > end:
            raise truncated(place, asked, end)

    def _rescue(self, max_records: int, broken: FeedUnreadable, timeout_s: float) -> list[Envelope]:
        """Records of the broken batches at a position, marked and without a value; reading goes on behind them."""
        rescued: list[Envelope] = []
        try:
            for place in self._positions:
                self._rescue_place(place, rescued, max_records)
        except (FeedAway, FeedOutOfRange, BrokerError) as away:
            if not rescued:
                self._bear(away, timeout_s)
        else:
            if not rescued:  # nobody is to blame: the connection was, or the client
                self._bear(broken, timeout_s)
        if rescued:
            self._answered()
        return rescued

    def _rescue_place(self, place: Place, rescued: list[Envelope], max_records: int) -> None:
        """Add the broken records at one partition's position to `rescued`, within a time; none when it is sound."""
        end = self._bounds(place).end
        deadline_s = time.monotonic() + _RESCUE_S
        if self._positions[place] >= end or rescued:
            return
        checked = self._open_feed({place: self._positions[place]}, True)
        unchecked = self._open_feed({place: self._positions[place]}, False)
        try:
            while self._positions[place] < end and _unreadable(checked, place, self._positions[place]):
                rescued.append(self._rescue_one(unchecked, place))
                if len(rescued) >= max_records or time.monotonic() > deadline_s:
                    return
        finally:
            checked.close()
            unchecked.close()

    def _rescue_one(self, unchecked: Feed, place: Place) -> Envelope:
        """The record at a position in a broken batch; the position moves behind it."""
        offset = self._positions[place]
        found: Batches = []
        with suppress(FeedUnreadable):
            unchecked.seek(place, offset)
            found = unchecked.poll(_PROBE_S, 1)
        if found:
            raw = found[0][1][0]
            mark = (CORRUPT_HEADER, raw.value or b"")
            marked = Envelope(*place, raw.offset, raw.time_ms, raw.key, None, (mark, *raw.headers))
        else:  # not even its length can be trusted: its offset is all that is known
            marked = Envelope(*place, offset, 0, None, None, ((CORRUPT_HEADER, b""),))
        self._positions[place] = marked.offset + 1
        return marked

    def _drop_feed(self) -> None:
        """Throw the feed away."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.close()


def _unreadable(checked: Feed, place: Place, offset: int) -> bool:
    """Whether a checked fetch at this offset fails. A feed that failed must be sought anew before it polls again."""
    checked.seek(place, offset)
    try:
        checked.poll(_PROBE_S, 1)
    except FeedUnreadable:
        return True
    return False


def _name(place: Place) -> str:
    return f"{place.topic}[{place.partition}]"


def _names(places: Mapping[Place, int]) -> str:
    """A short list of places for an error."""
    names = [_name(place) for place in places]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
