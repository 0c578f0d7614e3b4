"""Rows and micro-batches: what is trained on is known by lengths and masks, never by token ids."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from support.training import make_member, make_row, random_rows
from trainers.batching import micro_batches, pad, row_of, rows_of

EOS = 2


def test_the_stop_token_stays_trainable_when_padding_shares_its_id() -> None:
    a = make_row([5, 6, EOS], [1, 1, 1])
    b = make_row([7, 8, 9, 4, EOS], [1, 1, 1, 1, 1])
    batch = pad([a, b])
    assert batch.mask_BT.tolist() == [[True, True, True, False, False], [True] * 5]
    assert batch.num_trainable == 8


def test_a_stop_id_inside_the_text_stays_trainable() -> None:
    assert pad([make_row([5, EOS, 6], [1, 1, 1])]).mask_BT.tolist() == [[True, True, True]]


def test_log_probs_stand_at_their_tokens() -> None:
    member = make_member(
        [5, 6, 7, 8, 9, 4], [0, 1, 1, 0, 0, 1], logprobs=[-0.5, -0.25, -2.0], advantage=0.75, temperature=0.5
    )
    row = row_of(member)
    assert row.behaviour_T.tolist() == [0, -0.5, -0.25, 0, 0, -2.0]
    assert row.mask_T.tolist() == [False, True, True, False, False, True]
    assert (row.advantage, row.temperature, row.reward, row.num_trainable) == (0.75, 0.5, 0.5, 3)


def test_a_sampled_token_may_be_masked_and_keeps_its_log_prob() -> None:
    row = row_of(make_member([5, 6, 7], [0, 1, 1], loss_mask=b"\x04", logprobs=[-0.5, -0.25]))
    assert row.mask_T.tolist() == [False, False, True]
    assert row.behaviour_T.tolist() == [0, -0.5, -0.25]


def test_unusable_tokens_are_masked_and_counted() -> None:
    """The first token of all has nothing before it; a log-prob that is no number says nothing."""
    row = row_of(make_member([5, 6, 7, 8], [1, 1, 1, 1], logprobs=[-1.0, math.nan, -math.inf, -1.0]))
    assert row.mask_T.tolist() == [False, False, False, True]
    assert row.num_unusable == 3


def test_rows_keep_their_order() -> None:
    members = [make_member([5, 6], [0, 1], index=i, reward=float(i)) for i in range(4)]
    assert [row.reward for row in rows_of(members)] == [0, 1, 2, 3]


def test_micro_batches_start_where_outputs_are_needed() -> None:
    batch = pad([make_row([5, 6, 7, 8], [0, 0, 1, 1]), make_row([5, 6, 7], [0, 0, 0])])
    assert batch.first == 2
    assert pad([make_row([5, 6, 7], [0, 0, 0])]).first == 3


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 10))
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(count: int, budget: int, seed: int) -> None:
    rows = random_rows(count, seed)
    batches = micro_batches(rows, budget)
    assert sum(len(batch.lengths_B) for batch in batches) == count
    assert all(batch.tokens_BT.size <= budget or len(batch.lengths_B) == 1 for batch in batches)
    found = sorted(
        (tokens[:length].tolist(), mask[:length].tolist())
        for batch in batches
        for tokens, mask, length in zip(batch.tokens_BT, batch.mask_BT, batch.lengths_B, strict=True)
    )
    assert found == sorted((row.tokens_T.tolist(), row.mask_T.tolist()) for row in rows)
    assert all(
        not (batch.mask_BT & (np.arange(batch.mask_BT.shape[1]) >= batch.lengths_B[:, None])).any() for batch in batches
    )


def test_the_same_rows_give_the_same_micro_batches() -> None:
    rows = random_rows(20)
    first, second = micro_batches(rows, 64), micro_batches(rows, 64)
    assert all(np.array_equal(a.tokens_BT, b.tokens_BT) for a, b in zip(first, second, strict=True))
