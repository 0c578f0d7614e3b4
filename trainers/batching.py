"""Members of outcomes become rows, and rows become padded micro-batches: pure, in numpy, the same every time.

Padding is known by lengths, never by token id: a padding id may be the stop token's, which must be learnt. Rows are
padded on the right, so causal attention needs no mask: no token can see what stands after it.

Shapes: T = tokens of a row or padded width, S = sampled tokens of a row, B = rows. Position t holds what belongs to
token t; the model's output for token t stands at position t - 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.packing import unpack_bits, unpack_floats, unpack_ints
from schemas.records import Member, Role


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
    return Row(
        tokens_T=tokens_T,
        mask_T=mask_T,
        behaviour_T=behaviour_T,
        advantage=member.advantage,
        temperature=member.temperature,
        reward=member.reward,
        num_unusable=int(wanted_T.sum() - mask_T.sum()),
    )


def rows_of(members: Iterable[Member]) -> list[Row]:
    """Rows of kept members, in the given order."""
    return [row_of(member) for member in members]


def micro_batches(rows: Sequence[Row], max_tokens: int) -> list[MicroBatch]:
    """All rows in micro-batches of at most `max_tokens` padded tokens; a longer row gets one of its own.

    Longest first, so that rows of like length meet and little is padded; rows of equal length keep their order.
    """
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens_T))
    batches: list[MicroBatch] = []
    start = 0
    while start < len(order):
        width = max(len(rows[order[start]].tokens_T), 1)
        count = max(max_tokens // width, 1)
        batches.append(pad([rows[i] for i in order[start : start + count]]))
        start += count
    return batches


def pad(rows: Sequence[Row]) -> MicroBatch:
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
        first=int(trainable_T.argmax()) if trainable_T.any() else shape[1],
    )
