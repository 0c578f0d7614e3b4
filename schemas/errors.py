"""The error tree: every error names the boundary that was crossed and says what to do.

OffsetRLError
├── SettingError (ValueError)      a setting, a name or a file of the user's is wrong; nothing was started
├── RecordError                    bytes from the log that cannot be used: they become a dead letter
├── DependencyError                something outside us is away or broken; retried within a bound
│   ├── BrokerError                Kafka
│   ├── StoreError                 the object store
│   │   └── ObjectMissing          no object under that key
│   ├── EngineError                the inference engine; the worker ends and is restarted
│   └── RankLost                   another process of the same trainer; all of them end and are restarted
├── DeadlineExceeded               a wait hit its limit; the text names what was waited for
├── SendFailed                     a record was not acknowledged; its writer is finished and positions go back
├── RecordTooLarge (SettingError)  refused before anything was sent
├── LogGap                         retention removed unread records; says how many
├── LogTruncated                   the log is shorter than, or differs from, what a checkpoint saw
├── WeightsError                   a manifest or blob fails its digest, size or shape check
└── Superseded                     a newer owner has claimed the partition; this process must end
"""

from __future__ import annotations


class OffsetRLError(Exception):
    """Root of every error that OffsetRL raises on purpose."""


class SettingError(OffsetRLError, ValueError):
    """A setting, a name or a user's file is wrong; nothing has been started."""


class RecordError(OffsetRLError):
    """Bytes on the log that cannot be used; `reason` is one of `schemas.records.DeadReason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class DependencyError(OffsetRLError):
    """Something outside OffsetRL is away or broken."""


class BrokerError(DependencyError):
    """Kafka did not do what was asked."""


class StoreError(DependencyError):
    """The object store did not do what was asked."""


class ObjectMissing(StoreError):
    """There is no object under that key."""


class EngineError(DependencyError):
    """The inference engine can no longer be trusted; its process must end."""


class RankLost(DependencyError):
    """Another process of the same trainer died or hangs; all of them must end."""


class DeadlineExceeded(OffsetRLError):
    """A wait hit its limit; the text names what was waited for."""


class SendFailed(OffsetRLError):
    """A record was not acknowledged; the writer that sent it must be thrown away."""


class RecordTooLarge(SettingError):
    """A record is larger than the agreed limit; it was refused before anything was sent."""


class LogGap(OffsetRLError):
    """Retention removed unread records of one partition: offsets `start` up to `end` (exclusive)."""

    def __init__(self, topic: str, partition: int, start: int, end: int) -> None:
        super().__init__(
            f"{topic}[{partition}]: offsets {start} to {end - 1} ({end - start} records) were removed "
            "before they were read; raise the topic's retention or read sooner"
        )
        self.topic, self.partition, self.start, self.end = topic, partition, start, end


class LogTruncated(OffsetRLError):
    """The log is shorter than, or differs from, what a checkpoint has seen."""


class WeightsError(OffsetRLError):
    """A manifest or a blob fails its digest, size, name or shape check."""


class Superseded(OffsetRLError):
    """A newer owner has claimed the partition; this process must end."""
