"""Members of outcomes become rows, and rows become padded micro-batches: pure, in numpy, the same every time.

Padding is known by lengths, never by token id: a padding id may be the stop token's, which must be learnt. Rows are
padded on the right, so causal attention needs no mask: no token can see what stands after it.

Shapes: T = tokens of a row or padded width, S = sampled tokens of a row, B = rows. Position t holds what belongs to
token t; the model's output for token t stands at position t - 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from schemas.packing import unpack_bits, unpack_floats, unpack_ints
from schemas.records import KEPT, Member, Outcome, Role, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on."""

    tokens_T: NDArray[np.int32]
    mask_T: NDArray[np.bool_]
    """The trainable tokens."""
    behaviour_T: NDArray[np.float32]
    """Log-probs under the distribution sampled from; 0 where nothing was sampled."""
    advantage: float
    temperature: float
    reward: float
    num_unusable: int
    """Tokens that the record calls trainable and that cannot be trained on (see `row_of`)."""
    rewards_T: NDArray[np.float32] | None = None
    """The reward where it was earned: each step reward at the end of its turn, the rest of the row's reward at its last
    trainable token. None: all of it there."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    group: str = ""
    task: str = ""
    group_mean: float = math.nan
    """Mean reward of all valid members of its group."""
    cut_off: bool = False
    """Whether it ended at a limit and not by itself."""
    age: int = -1
    """Versions between its oldest token and the weights that are trained; -1 where age does not apply."""

    @property
    def num_trainable(self) -> int:
        """L: trainable tokens."""
        return int(self.mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows padded on the right to one width; what stands in the padding means nothing and is masked."""

    tokens_BT: NDArray[np.int64]
    mask_BT: NDArray[np.bool_]
    behaviour_BT: NDArray[np.float32]
    advantages_BT: NDArray[np.float32]
    lengths_B: NDArray[np.int64]
    temperature_B: NDArray[np.float32]
    places_B: NDArray[np.int64]
    """Which row of the step each one is."""
    first: int
    """The first position where any row is trainable (T where none is): outputs are needed from `first - 1` on."""

    @property
    def num_trainable(self) -> int:
        """Trainable tokens of all rows."""
        return int(self.mask_BT.sum())


def row_of(member: Member) -> Row:
    """A kept member's columns as one row.

    Two kinds of token are masked out although the record calls them trainable: a sampled token at position 0, which
    stands after nothing, so no model output says how likely it was; and a token whose log-prob is not finite.
    """
    tokens_T = unpack_ints(member.tokens)
    wanted_T = unpack_bits(member.loss_mask, len(tokens_T))
    sampled_T = np.zeros(len(tokens_T), dtype=np.bool_)
    at = 0
    for segment in member.segments:
        sampled_T[at : at + segment.count] = segment.role == Role.SAMPLED
        at += segment.count
    behaviour_T = np.zeros(len(tokens_T), dtype=np.float32)
    behaviour_T[sampled_T] = unpack_floats(member.logprobs)
    mask_T = wanted_T & sampled_T & np.isfinite(behaviour_T)
    mask_T[:1] = False
    assert member.reward is not None, f"member {member.index} is kept and has no reward"
    cut_off = member.status == Status.TRUNCATED
    return Row(
        tokens_T=tokens_T,
        mask_T=mask_T,
        behaviour_T=behaviour_T,
        advantage=member.advantage,
        temperature=member.temperature,
        reward=member.reward,
        num_unusable=int(wanted_T.sum() - mask_T.sum()),
        rewards_T=_rewards_of(member, mask_T) if member.step_rewards else None,
        reward_parts=member.reward_parts,
        cut_off=cut_off,
    )


def _rewards_of(member: Member, mask_T: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Step rewards at the last trainable token of their turn (that of the row for more of them than turns)."""
    rewards_T = np.zeros(len(mask_T), dtype=np.float32)
    trainable = mask_T.nonzero()[0]
    if not len(trainable):
        return rewards_T
    ends: list[int] = []
    at, inside_turn = 0, False
    for segment in member.segments:
        inside = trainable[(trainable >= at) & (trainable < at + segment.count)]
        at += segment.count
        is_sampled = segment.role == Role.SAMPLED
        if is_sampled:  # segments side by side are one turn, taken up again
            end = int(inside[-1]) if len(inside) else int(trainable[-1])
            ends = [*ends[:-1], end] if inside_turn else [*ends, end]
        inside_turn = is_sampled
    for i, reward in enumerate(member.step_rewards):
        rewards_T[ends[i] if i < len(ends) else trainable[-1]] += reward
    rewards_T[trainable[-1]] += (member.reward or 0.0) - sum(member.step_rewards)
    return rewards_T


def rows_of_step(outcomes: Iterable[Outcome], *, version: int = -1) -> list[Row]:
    """The rows of a planned batch: its kept members, by name of the group and number of the member.

    By name, not by the order of arrival: the bits of a step then do not depend on who was quicker. `version`: of the
    weights that are trained, for the ages of the rows.
    """
    rows = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.group):
        rewards = [member.reward for member in outcome.members if member.reward is not None]
        own = (outcome.source_run, outcome.source_policy) == (outcome.run, outcome.policy) and version >= 0
        for member in sorted(outcome.members, key=lambda m: m.index):
            if member.disposition == KEPT:
                age = version - min((run.version for run in member.versions), default=version) if own else -1
                mean = sum(rewards) / max(len(rewards), 1)
                task = outcome.task or outcome.environment
                row = replace(row_of(member), group=outcome.group, task=task, group_mean=mean, age=age)
                rows.append(row)
    return rows


def num_trainable(outcome: Outcome) -> int:
    """Trainable tokens of the rows that an outcome becomes."""
    return sum(row_of(member).num_trainable for member in outcome.members if member.disposition == KEPT)


def rows_of(members: Iterable[Member]) -> list[Row]:
    """Rows of kept members, in the given order."""
    return [row_of(member) for member in members]


def micro_batches(rows: Sequence[Row], max_tokens: int, places: Sequence[int] | None = None) -> list[MicroBatch]:
    """All rows in micro-batches of at most `max_tokens` padded tokens; a longer row gets one of its own.

    places: of these rows in their step; as they stand here where it is not given.

    Longest first, so that rows of like length meet and little is padded; rows of equal length keep their order.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens_T))
    batches: list[MicroBatch] = []
    start = 0
    while start < len(order):
        width = max(len(rows[order[start]].tokens_T), 1)
        count = max(max_tokens // width, 1)
        taken = order[start : start + count]
        batches.append(pad([rows[i] for i in taken], [places[i] for i in taken] if places else taken))
        start += count
    return batches


def pad(rows: Sequence[Row], places: Sequence[int] | None = None) -> MicroBatch:
    """Rows side by side, padded to the longest."""
    lengths_B = np.array([len(row.tokens_T) for row in rows], dtype=np.int64)
    shape = (len(rows), int(lengths_B.max()))
    real_BT = np.arange(shape[1]) < lengths_B[:, None]
    tokens_BT = np.zeros(shape, dtype=np.int64)
    mask_BT = np.zeros(shape, dtype=np.bool_)
    behaviour_BT = np.zeros(shape, dtype=np.float32)
    tokens_BT[real_BT] = np.concatenate([row.tokens_T for row in rows])
    mask_BT[real_BT] = np.concatenate([row.mask_T for row in rows])
    behaviour_BT[real_BT] = np.concatenate([row.behaviour_T for row in rows])
    advantages_B = np.array([row.advantage for row in rows], dtype=np.float32)
    trainable_T = mask_BT.any(axis=0)
    return MicroBatch(
        tokens_BT=tokens_BT,
        mask_BT=mask_BT,
        behaviour_BT=behaviour_BT,
        advantages_BT=np.where(mask_BT, advantages_B[:, None], np.float32(0)),
        lengths_B=lengths_B,
        temperature_B=np.array([row.temperature for row in rows], dtype=np.float32),
        places_B=np.array(range(len(rows)) if places is None else places, dtype=np.int64),
        first=int(trainable_T.argmax()) if trainable_T.any() else shape[1],
    )


def deal(batches: Sequence[MicroBatch], rank: int, size: int) -> list[MicroBatch]:
    """One rank's share of an update: every `size`-th micro-batch that has something to train on.

    All ranks get the same number, since each gradient is exchanged by all of them at once: who has one too few gets
    `nothing()`, which weighs zero.
    """
    useful = [batch for batch in batches if batch.num_trainable]
    mine = useful[rank::size]
    return mine + [nothing()] * (-(-len(useful) // size) - len(mine))


def nothing() -> MicroBatch:
    """A micro-batch of two tokens that weighs zero: it goes through the model and adds nothing."""
    pair = (1, 2)
    return MicroBatch(
        tokens_BT=np.zeros(pair, dtype=np.int64),
        mask_BT=np.zeros(pair, dtype=np.bool_),
        behaviour_BT=np.zeros(pair, dtype=np.float32),
        advantages_BT=np.zeros(pair, dtype=np.float32),
        lengths_B=np.array([2], dtype=np.int64),
        temperature_B=np.ones(1, dtype=np.float32),
        places_B=np.zeros(1, dtype=np.int64),
        first=1,
    )
