"""What a record must be to be used at all, beyond being readable: pure checks, the same for who writes and who reads.

A producer calls them before it sends, so nothing broken reaches a topic from our own code; a processor and a trainer
call them on what they read, and a record that fails becomes a dead letter. Whether a good record is trained on is
another matter, settled by filters.

T = tokens of a sequence, S = sampled tokens of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import attrgetter

import numpy as np

from schemas.errors import RecordError
from schemas.packing import pack_bits, unpack_floats, unpack_ints
from schemas.records import (
    KEPT,
    REWARDED,
    DeadReason,
    Eval,
    Finish,
    Member,
    Outcome,
    Partial,
    Request,
    Role,
    Sampling,
    Segment,
    Status,
    Trajectory,
    VersionRun,
)

LOGPROB_SLACK = 1e-4
"""How far above 0 a log-prob may come out of an engine's arithmetic."""
_FEW_SEGMENTS = 32
_SHORT_TOKENS = 4096
_SURE = bytes([*range(0x38), *range(0x80, 0xFF)])
"""Top bytes of little-endian float32 that are certainly finite and at most LOGPROB_SLACK: below 3.1e-5, or negative."""
_SAMPLED, _UNKNOWN = Role.SAMPLED, Status.UNKNOWN
_NUMBERS = ("attempt", "item", "seed", "first_request_time_ms", "lifetime_ms")
_numbers = attrgetter(*_NUMBERS)


def check_trajectory(trajectory: Trajectory, *, run: str, policy: str, partition: int, max_tokens: int) -> None:
    """Raise RecordError unless the trajectory belongs here and is sound; `max_tokens` bounds T, not the sampled part."""
    _check_place(trajectory, run, policy, partition)
    _check_status(trajectory.status)
    numbers = _numbers(trajectory)
    if min(numbers) < 0:
        name, number = next((name, number) for name, number in zip(_NUMBERS, numbers, strict=True) if number < 0)
        raise _invalid(name, number, "0 or more")
    _demand(trajectory.group != "", "group", trajectory.group, "a name")
    _demand(trajectory.group_size >= 1, "group_size", trajectory.group_size, "1 or more")
    _check_index(trajectory.index, trajectory.group_size)
    _check_sampling(trajectory.sampling)
    _check_reward(trajectory.status, trajectory.reward)
    _check_finite("reward_parts", trajectory.reward_parts.values())
    _check_finite("step_rewards", trajectory.step_rewards)
    _check_finite("timings", trajectory.timings.values())
    num_tokens, num_sampled = _check_columns(trajectory)
    if num_tokens > max_tokens:
        raise _invalid("tokens", f"{num_tokens} tokens", f"at most {max_tokens}")
    if not 0 <= trajectory.resumed_tokens <= num_sampled:
        raise _invalid("resumed_tokens", trajectory.resumed_tokens, f"0 to the {num_sampled} sampled tokens")


def check_request(request: Request, *, run: str, policy: str, partitions: int) -> None:
    """Raise RecordError unless a worker of this policy can serve the request and its trajectory will have a place."""
    _check_place(request, run, policy, request.partition)
    _demand(0 <= request.partition < partitions, "partition", request.partition, f"0 to {partitions - 1}")
    _demand(request.group != "", "group", request.group, "a name")
    _check_index(request.index, request.group_size)
    _demand(request.attempt >= 0, "attempt", request.attempt, "0 or more")
    _check_sampling(request.sampling)
    rising = all(before < after for before, after in zip((-1, *request.resume), request.resume, strict=False))
    _demand(rising, "resume", request.resume, "offsets of 0 or more, each above the one before it")


def check_partial(partial: Partial, *, run: str, policy: str, partition: int, max_tokens: int) -> None:
    """Raise RecordError unless the chunk belongs here and is sound; `max_tokens` bounds the whole sequence up to its end."""
    _check_place(partial, run, policy, partition)
    _demand(partial.group != "", "group", partial.group, "a name")
    _demand(partial.session != "", "session", partial.session, "a name")
    if min(partial.index, partial.attempt, partial.start) < 0:
        raise _invalid("index, attempt, start", (partial.index, partial.attempt, partial.start), "0 or more")
    num_tokens, _ = _check_columns(partial)
    end = partial.start + num_tokens
    _demand(end <= max_tokens, "tokens", f"{end} tokens", f"at most {max_tokens}")
    ends = [partial.start, *(turn.end for turn in partial.turns), end]
    _demand(ends == sorted(ends), "turns", ends[1:-1], f"ends in order, from {partial.start} to {end}")
    for turn in partial.turns:
        _demand(
            turn.finish in (Finish.STOP, Finish.LENGTH), "turns", turn.finish, "stop or length: a turn that is over"
        )


def check_eval(evaluation: Eval, *, run: str, policy: str) -> None:
    """Raise RecordError unless the evaluation belongs here and its numbers agree."""
    _check_place(evaluation, run, policy, None)
    _demand(evaluation.task != "", "task", evaluation.task, "a name")
    failed, total = evaluation.num_failed, evaluation.num_episodes
    _demand(total >= 1, "num_episodes", total, "1 or more")
    _demand(0 <= failed <= total, "num_failed", failed, f"0 to {total}")
    found = [number for number in (evaluation.low, evaluation.mean_reward, evaluation.high) if number is not None]
    if len(found) != (3 if failed < total else 0) or not all(map(math.isfinite, found)) or found != sorted(found):
        got = f"{evaluation.mean_reward} within {evaluation.low} and {evaluation.high} of {total - failed} rewards"
        raise _invalid("mean_reward, low, high", got, "low <= mean <= high, or none of them without a reward")


def check_outcome(outcome: Outcome, *, run: str, policy: str, partition: int, columns: bool = True) -> None:
    """Raise RecordError unless the outcome belongs here and what it gives to train on is whole.

    `columns` may be False for whoever made the members himself, of trajectories that passed `check_trajectory`: packed
    columns are never changed, so they are not looked at twice.
    """
    _check_place(outcome, run, policy, partition)
    _demand(outcome.group != "", "group", outcome.group, "a name")
    _demand(outcome.group_size >= 1, "group_size", outcome.group_size, "1 or more")
    _demand(outcome.previous >= -1, "previous", outcome.previous, "an offset, or -1 for the first")
    if outcome.closing_offset <= outcome.previous:
        raise _invalid("closing_offset", outcome.closing_offset, f"above previous {outcome.previous}")
    seen: set[int] = set()
    for member in outcome.members:
        _check_index(member.index, outcome.group_size)
        if member.index in seen:
            raise _invalid("members", f"index {member.index} twice", "each index once")
        seen.add(member.index)
        if outcome.kept and member.disposition == KEPT:
            _check_kept(member, columns)
    _check_oldest(outcome)


def _check_oldest(outcome: Outcome) -> None:
    if not outcome.kept:
        return
    versions = [run.version for member in outcome.members if member.disposition == KEPT for run in member.versions]
    _demand(bool(versions), "disposition", KEPT, "a group with at least one kept member")
    if outcome.oldest_version != (oldest := min(versions)):
        raise _invalid("oldest_version", outcome.oldest_version, str(oldest))


def _check_kept(member: Member, columns: bool) -> None:
    _check_status(member.status)
    _check_reward(member.status, member.reward)
    _demand(member.status in REWARDED, "status", member.status, "kept members with a reward only")
    _check_finite("advantage", (member.advantage,))
    _check_finite("reward_parts", member.reward_parts.values())
    _check_finite("step_rewards", member.step_rewards)
    _demand(0 < member.temperature < math.inf, "temperature", member.temperature, "above 0 and finite")
    if columns:
        num_tokens, num_sampled = _check_columns(member)
        if member.num_tokens != num_tokens:
            raise _invalid("num_tokens", member.num_tokens, f"{num_tokens}, as in tokens")
        if member.num_sampled != num_sampled:
            raise _invalid("num_sampled", member.num_sampled, f"{num_sampled}, as in segments")
    _demand(member.num_sampled > 0, "num_sampled", member.num_sampled, "1 or more in a kept member")


def _check_columns(record: Trajectory | Member | Partial) -> tuple[int, int]:
    """(T, S) of packed columns that agree with their segments and version runs."""
    if len(record.tokens) % 4:
        raise _invalid("tokens", f"{len(record.tokens)} bytes", "a multiple of 4")
    num_tokens = len(record.tokens) // 4
    _check_runs("segments", record.segments, num_tokens)
    num_sampled = sum([count for role, count in record.segments if role is _SAMPLED])
    _check_runs("versions", record.versions, num_sampled)
    for run in record.versions:
        if run[0] < 0 or run[1] < 0:
            raise _invalid("versions", run, "an epoch and a version of 0 or more")
    if len(record.loss_mask) != (size := (num_tokens + 7) // 8):
        raise _invalid("loss_mask", f"{len(record.loss_mask)} bytes", f"{size} for {num_tokens} tokens")
    if len(record.logprobs) != (size := 4 * num_sampled):
        raise _invalid("logprobs", f"{len(record.logprobs)} bytes", f"{size} for {num_sampled} sampled")
    if num_tokens:
        _check_tokens(record, num_tokens)
    return num_tokens, num_sampled


def _check_tokens(record: Trajectory | Member | Partial, num_tokens: int) -> None:
    # A quick look at the top byte of each number settles nearly every sequence that is not very long; numpy's calls cost
    # more than that, above all when they are cold. What is not settled so is looked at exactly.
    is_short = num_tokens <= _SHORT_TOKENS
    if not (is_short and record.tokens[3::4].isascii()):
        lowest = int(np.minimum.reduce(unpack_ints(record.tokens)))
        if lowest < 0:
            raise _invalid("tokens", f"token id {lowest}", "0 or more")
    wrong = int.from_bytes(record.loss_mask, "little") & ~_sampled_bits(record.segments)
    if wrong:  # also in the last byte's padding, which must be 0
        at = (wrong & -wrong).bit_length() - 1
        raise _invalid("loss_mask", f"1 at position {at} of {num_tokens}", "1 on sampled tokens only")
    if record.logprobs and not (is_short and not record.logprobs[3::4].translate(None, _SURE)):
        logprobs = unpack_floats(record.logprobs)
        # NaN, infinity and positive values are refused alike: none of them lies in the interval; NaN wins both folds.
        if not -np.inf < np.minimum.reduce(logprobs) <= np.maximum.reduce(logprobs) <= LOGPROB_SLACK:
            at = int(((logprobs > -np.inf) & (logprobs <= LOGPROB_SLACK)).argmin())
            raise _invalid("logprobs", f"{logprobs[at]} at sampled token {at}", "finite numbers of at most 0")


def _sampled_bits(segments: tuple[Segment, ...]) -> int:
    """A number with the bit of every sampled token set: as the loss mask would be, if all of them were trained on.

    >>> bin(_sampled_bits((Segment(Role.PROMPT, 3), Segment(Role.SAMPLED, 2))))
    '0b11000'
    """
    if len(segments) > _FEW_SEGMENTS:  # one whole number after the other would take quadratic time
        sampled = np.repeat([s.role == Role.SAMPLED for s in segments], [s.count for s in segments])
        return int.from_bytes(pack_bits(sampled), "little")
    bits = at = 0
    for role, count in segments:
        if role is _SAMPLED:
            bits |= ((1 << count) - 1) << at
        at += count
    return bits


def _check_runs(name: str, runs: Iterable[Segment] | Iterable[VersionRun], total: int) -> None:
    counts = [run[-1] for run in runs]  # the last item of both kinds of run
    if counts and min(counts) <= 0:
        raise _invalid(name, counts, "counts of 1 or more")
    if sum(counts) != total:
        raise _invalid(name, f"a sum of {sum(counts)}", f"a sum of {total}")


def _check_place(
    record: Trajectory | Outcome | Partial | Request | Eval, run: str, policy: str, partition: int | None
) -> None:
    got = record.run, record.policy, getattr(record, "partition", None)
    wanted = run, policy, partition
    if got != wanted:
        raise RecordError(
            DeadReason.WRONG_PLACE,
            f"a record of run {got[0]!r}, policy {got[1]!r}, partition {got[2]} "
            f"in run {wanted[0]!r}, policy {wanted[1]!r}, partition {wanted[2]}",
        )


def _check_status(status: Status) -> None:
    if status == _UNKNOWN:
        raise RecordError(
            DeadReason.UNKNOWN_STATUS,
            f"a status that this version does not know; it knows {', '.join(Status)}; update readers before writers",
        )


def _check_index(index: int, group_size: int) -> None:
    if not 0 <= index < group_size:
        raise _invalid("index", index, f"0 to {group_size - 1} in a group of {group_size}")


def _check_sampling(sampling: Sampling) -> None:
    # Log-probs are divided by the temperature, so greedy decoding has none that could be trained on.
    if not 0 < sampling.temperature < math.inf:
        raise _invalid("sampling.temperature", sampling.temperature, "above 0 and finite")
    if not 0 < sampling.top_p <= 1:
        raise _invalid("sampling.top_p", sampling.top_p, "above 0, at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise _invalid("sampling.min_p", sampling.min_p, "0 to 1")
    if sampling.top_k < 0:
        raise _invalid("sampling.top_k", sampling.top_k, "0 (no limit) or more")
    if sampling.max_tokens < 1:
        raise _invalid("sampling.max_tokens", sampling.max_tokens, "1 or more")


def _check_reward(status: Status, reward: float | None) -> None:
    if status not in REWARDED:
        if reward is not None:
            raise _invalid("reward", reward, f"none with status {status}: a failure is not a reward")
        return
    if reward is None or not math.isfinite(reward):
        raise _invalid("reward", reward, f"a finite number with status {status}")


def _check_finite(name: str, values: Iterable[float]) -> None:
    if not all(map(math.isfinite, values)):
        raise _invalid(name, next(value for value in values if not math.isfinite(value)), "finite numbers")


def _demand(good: bool, name: str, got: object, allowed: str) -> None:
    if not good:
        raise _invalid(name, got, allowed)


def _invalid(name: str, got: object, allowed: str) -> RecordError:
    return RecordError(DeadReason.INVALID, f"{name}: got {got}, allowed: {allowed}")
