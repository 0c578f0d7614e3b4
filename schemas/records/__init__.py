"""The records: every word that passes over the log, as frozen plain data.

Per-token arrays are held as packed little-endian bytes (int32 ids, float32 log-probs, bit-packed masks), exactly as
they stand on the wire; `schemas.packing` turns them into numpy views. T = tokens of a sequence, S = sampled tokens of it.
"""

from __future__ import annotations

from schemas.records.operations import DeadLetter, DeadReason, Eval, Heartbeat, SchemaText, State
from schemas.records.outcomes import KEPT, Member, Outcome
from schemas.records.rollouts import Close, Partial, Request, Trajectory
from schemas.records.steps import Address, Announcement, Claim, Plan, PlanDrop, Result
from schemas.records.words import REWARDED, Finish, Role, Sampling, Segment, Status, Turn, Version, VersionRun

__all__ = [
    "KEPT",
    "REWARDED",
    "Address",
    "Announcement",
    "Claim",
    "Close",
    "DeadLetter",
    "DeadReason",
    "Eval",
    "Finish",
    "Heartbeat",
    "Member",
    "Outcome",
    "Partial",
    "Plan",
    "PlanDrop",
    "Record",
    "Request",
    "Result",
    "Role",
    "Sampling",
    "SchemaText",
    "Segment",
    "State",
    "Status",
    "Trajectory",
    "Turn",
    "Version",
    "VersionRun",
]

Record = (
    Request
    | Trajectory
    | Partial
    | Close
    | Outcome
    | Claim
    | Plan
    | Result
    | Announcement
    | DeadLetter
    | Heartbeat
    | SchemaText
    | Eval
)
"""Whatever may stand on a topic."""
