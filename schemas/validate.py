"""What a record must be to be used at all, beyond being readable: pure checks, the same for who writes and who reads.

A producer calls them before it sends, so nothing broken reaches a topic from our own code; a processor and a trainer
call them on what they read, and a record that fails becomes a dead letter. Whether a good record is trained on is
another matter, settled by filters.

T = tokens of a sequence, S = sampled tokens of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from schemas.errors import RecordError
from schemas.packing import unpack_bits, unpack_floats, unpack_ints
from schemas.records import (
    KEPT,
    REWARDED,
    DeadReason,
    Member,
    Outcome,
    Role,
    Sampling,
    Segment,
    Status,
    Trajectory,
    VersionRun,
)

LOGPROB_SLACK = 1e-4
"""How far above 0 a log-prob may come out of an engine's arithmetic."""


def check_trajectory(trajectory: Trajectory, *, run: str, policy: str, partition: int, max_tokens: int) -> None:
    """Raise RecordError unless the trajectory belongs here and is sound; `max_tokens` bounds T, not the sampled part."""
    _check_place(trajectory, run, policy, partition)
    _check_status(trajectory.status)
    for name in ("attempt", "item", "seed", "first_request_time_ms", "lifetime_ms"):
        _demand(getattr(trajectory, name) >= 0, name, getattr(trajectory, name), "0 or more")
    _demand(trajectory.group != "", "group", trajectory.group, "a name")
    _demand(trajectory.group_size >= 1, "group_size", trajectory.group_size, "1 or more")
    _check_index(trajectory.index, trajectory.group_size)
    _check_sampling(trajectory.sampling)
    _check_reward(trajectory.status, trajectory.reward)
    _check_finite("reward_parts", trajectory.reward_parts.values())
    _check_finite("step_rewards", trajectory.step_rewards)
    _check_finite("timings", trajectory.timings.values())
    num_tokens, _ = _check_columns(trajectory)
    _demand(num_tokens <= max_tokens, "tokens", f"{num_tokens} tokens", f"at most {max_tokens}")


def check_outcome(outcome: Outcome, *, run: str, policy: str, partition: int) -> None:
    """Raise RecordError unless the outcome belongs here and what it gives to train on is whole."""
    _check_place(outcome, run, policy, partition)
    _demand(outcome.group != "", "group", outcome.group, "a name")
    _demand(outcome.group_size >= 1, "group_size", outcome.group_size, "1 or more")
    _demand(outcome.previous >= -1, "previous", outcome.previous, "an offset, or -1 for the first")
    _demand(
        outcome.closing_offset > outcome.previous,
        "closing_offset",
        outcome.closing_offset,
        f"above previous {outcome.previous}",
    )
    seen: set[int] = set()
    for member in outcome.members:
        _check_index(member.index, outcome.group_size)
        _demand(member.index not in seen, "members", f"index {member.index} twice", "each index once")
        seen.add(member.index)
        if outcome.kept and member.disposition == KEPT:
            _check_kept(member)
    _check_oldest(outcome)


def _check_oldest(outcome: Outcome) -> None:
    if not outcome.kept:
        return
    versions = [run.version for member in outcome.members if member.disposition == KEPT for run in member.versions]
    _demand(bool(versions), "disposition", KEPT, "a group with at least one kept member")
    _demand(outcome.oldest_version == min(versions), "oldest_version", outcome.oldest_version, str(min(versions)))


def _check_kept(member: Member) -> None:
    _check_status(member.status)
    _check_reward(member.status, member.reward)
    _demand(member.status in REWARDED, "status", member.status, "kept members with a reward only")
    _check_finite("advantage", (member.advantage,))
    _check_finite("reward_parts", member.reward_parts.values())
    _check_finite("step_rewards", member.step_rewards)
    _demand(0 < member.temperature < math.inf, "temperature", member.temperature, "above 0 and finite")
    num_tokens, num_sampled = _check_columns(member)
    _demand(member.num_tokens == num_tokens, "num_tokens", member.num_tokens, f"{num_tokens}, as in tokens")
    _demand(member.num_sampled == num_sampled, "num_sampled", member.num_sampled, f"{num_sampled}, as in segments")
    _demand(num_sampled > 0, "num_sampled", 0, "1 or more in a kept member")


def _check_columns(record: Trajectory | Member) -> tuple[int, int]:
    """(T, S) of packed columns that agree with their segments and version runs."""
    _demand(len(record.tokens) % 4 == 0, "tokens", f"{len(record.tokens)} bytes", "a multiple of 4")
    num_tokens = len(record.tokens) // 4
    _check_runs("segments", record.segments, num_tokens)
    num_sampled = sum(segment.count for segment in record.segments if segment.role == Role.SAMPLED)
    _check_runs("versions", record.versions, num_sampled)
    for run in record.versions:
        _demand(run.epoch >= 0 and run.version >= 0, "versions", run, "an epoch and a version of 0 or more")
    size = (num_tokens + 7) // 8
    _demand(
        len(record.loss_mask) == size, "loss_mask", f"{len(record.loss_mask)} bytes", f"{size} for {num_tokens} tokens"
    )
    size = 4 * num_sampled
    _demand(
        len(record.logprobs) == size, "logprobs", f"{len(record.logprobs)} bytes", f"{size} for {num_sampled} sampled"
    )
    if num_tokens:
        _check_tokens(record, num_tokens)
    return num_tokens, num_sampled


def _check_tokens(record: Trajectory | Member, num_tokens: int) -> None:
    lowest = int(unpack_ints(record.tokens).min())
    _demand(lowest >= 0, "tokens", f"token id {lowest}", "0 or more")
    allowed = np.zeros(8 * len(record.loss_mask), dtype=np.bool_)  # also over the last byte's padding, which must be 0
    at = 0
    for segment in record.segments:
        allowed[at : at + segment.count] = segment.role == Role.SAMPLED
        at += segment.count
    wrong = unpack_bits(record.loss_mask, len(allowed)) & ~allowed
    if wrong.any():
        raise _invalid("loss_mask", f"1 at position {int(wrong.argmax())} of {num_tokens}", "1 on sampled tokens only")
    if record.logprobs:
        # One comparison refuses NaN, infinity and positive values alike: none of them lies in the interval.
        logprobs = unpack_floats(record.logprobs)
        good = (logprobs > -np.inf) & (logprobs <= LOGPROB_SLACK)
        if not good.all():
            at = int(good.argmin())
            raise _invalid("logprobs", f"{logprobs[at]} at sampled token {at}", "finite numbers of at most 0")


def _check_runs(name: str, runs: Iterable[Segment] | Iterable[VersionRun], total: int) -> None:
    counts = [run.count for run in runs]
    _demand(all(count > 0 for count in counts), name, counts, "counts of 1 or more")
    _demand(sum(counts) == total, name, f"a sum of {sum(counts)}", f"a sum of {total}")


def _check_place(record: Trajectory | Outcome, run: str, policy: str, partition: int) -> None:
    got, wanted = (record.run, record.policy, record.partition), (run, policy, partition)
    if got != wanted:
        raise RecordError(
            DeadReason.WRONG_PLACE,
            f"a record of run {got[0]!r}, policy {got[1]!r}, partition {got[2]} "
            f"in run {wanted[0]!r}, policy {wanted[1]!r}, partition {wanted[2]}",
        )


def _check_status(status: Status) -> None:
    if status == Status.UNKNOWN:
        raise RecordError(
            DeadReason.UNKNOWN_STATUS,
            f"a status that this version does not know; it knows {', '.join(Status)}; update readers before writers",
        )


def _check_index(index: int, group_size: int) -> None:
    _demand(0 <= index < group_size, "index", index, f"0 to {group_size - 1} in a group of {group_size}")


def _check_sampling(sampling: Sampling) -> None:
    # Log-probs are divided by the temperature, so greedy decoding has none that could be trained on.
    _demand(0 < sampling.temperature < math.inf, "sampling.temperature", sampling.temperature, "above 0 and finite")
    _demand(0 < sampling.top_p <= 1, "sampling.top_p", sampling.top_p, "above 0, at most 1")
    _demand(0 <= sampling.min_p <= 1, "sampling.min_p", sampling.min_p, "0 to 1")
    _demand(sampling.top_k >= 0, "sampling.top_k", sampling.top_k, "0 (no limit) or more")
    _demand(sampling.max_tokens >= 1, "sampling.max_tokens", sampling.max_tokens, "1 or more")


def _check_reward(status: Status, reward: float | None) -> None:
    if status not in REWARDED:
        _demand(reward is None, "reward", reward, f"none with status {status}: a failure is not a reward")
        return
    _demand(reward is not None and math.isfinite(reward), "reward", reward, f"a finite number with status {status}")


def _check_finite(name: str, values: Iterable[float]) -> None:
    for value in values:
        _demand(math.isfinite(value), name, value, "finite numbers")


def _demand(good: bool, name: str, got: object, allowed: str) -> None:
    if not good:
        raise _invalid(name, got, allowed)


def _invalid(name: str, got: object, allowed: str) -> RecordError:
    return RecordError(DeadReason.INVALID, f"{name}: got {got}, allowed: {allowed}")
