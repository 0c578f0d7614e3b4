"""What holds for every correction, of rows and of whole updates: its formula, masks, padding, bounds, refused settings."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from schemas.components import load
from schemas.errors import SettingError
from trainers.batch_corrections import BATCH_CORRECTIONS
from trainers.batch_corrections.m2po import m2po
from trainers.corrections import CORRECTIONS, Correction, CorrectionInputs, product
from trainers.corrections.binary_gate import binary_gate
from trainers.corrections.opsm import opsm

Row = NDArray[np.float64]
BY_NAME: dict[str, Correction] = {
    **{name: load("correction", name, CORRECTIONS) for name in CORRECTIONS},
    **{name: load("correction", name, BATCH_CORRECTIONS) for name in BATCH_CORRECTIONS},
}
each = pytest.mark.parametrize("name", sorted(BY_NAME))
of_rows = pytest.mark.parametrize("name", sorted(CORRECTIONS))
few = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10_000)


def batch(seed: int, *, rows: int = 4, width: int = 6, scale: float = 0.4) -> CorrectionInputs:
    """Rows with holes, some without any trainable token."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, width)) < 0.7
    mask[rng.integers(rows)] = rng.random() < 0.5
    behaviour = -rng.uniform(0.05, 2.0, (rows, width))
    log_weight = np.minimum(behaviour + rng.normal(0, scale, (rows, width)), -1e-3) - behaviour
    return CorrectionInputs(
        log_weight_BT=torch.tensor(np.where(mask, log_weight, 0.0)),
        mask_BT=torch.tensor(mask),
        behaviour_BT=torch.tensor(behaviour),
        advantages_BT=torch.tensor(rng.normal(0, 1, (rows, 1)) * np.ones((rows, width))),
    )


def rows_of(inputs: CorrectionInputs) -> list[tuple[Row, Row, float]]:
    """(log weights, lmu, advantage) of each row's trainable tokens."""
    assert inputs.behaviour_BT is not None and inputs.advantages_BT is not None
    return [
        (log.numpy()[mask], behaviour.numpy()[mask], float(advantage[0]))
        for log, behaviour, advantage, mask in zip(
            inputs.log_weight_BT, inputs.behaviour_BT, inputs.advantages_BT, inputs.mask_BT.numpy(), strict=True
        )
    ]


def _m2po(inputs: CorrectionInputs) -> list[list[float]]:
    """The largest set of nearest tokens whose mean square is within the limit, found by trying every size."""
    squares = [[float(x) ** 2 for x in log] for log, _, _ in rows_of(inputs)]
    everything = sorted(itertools.chain.from_iterable(squares))
    sizes = [k for k in range(1, len(everything) + 1) if math.fsum(everything[:k]) / k <= 0.04]
    most = everything[max(sizes) - 1] if sizes else -1.0
    return [[float(x <= most) for x in row] for row in squares]


def _batch_normalised(inputs: CorrectionInputs) -> list[list[float]]:
    weights = [[min(math.exp(x), 2.0) for x in log] for log, _, _ in rows_of(inputs)]
    flat = list(itertools.chain.from_iterable(weights))
    return [[w / (math.fsum(flat) / len(flat)) for w in row] for row in weights]


def twin(name: str, inputs: CorrectionInputs) -> list[list[float]]:
    """The weight of every trainable token, row by row."""

    def rows(of: Callable[[Row, Row, float], list[float]]) -> list[list[float]]:
        return [of(log, behaviour, advantage) for log, behaviour, advantage in rows_of(inputs)]

    def mean(log: Row) -> float:
        return math.fsum(log) / max(len(log), 1)

    formulae: dict[str, Callable[[], list[list[float]]]] = {
        "none": lambda: rows(lambda log, *_: [1.0 for _ in log]),
        "token-truncated": lambda: rows(lambda log, *_: [min(math.exp(x), 2.0) for x in log]),
        "sequence-truncated": lambda: rows(lambda log, *_: [min(math.exp(math.fsum(log)), 2.0) for _ in log]),
        "icepop": lambda: rows(lambda log, *_: [math.exp(x) if 0.5 <= math.exp(x) <= 5 else 0.0 for x in log]),
        "geometric-band": lambda: rows(
            lambda log, *_: [math.exp(x) if 0.99 <= math.exp(mean(log)) <= 1.01 else 0.0 for x in log]
        ),
        "rejection": lambda: rows(lambda log, *_: [float(mean(np.exp(log) - 1 - log) <= 0.05)] * len(log)),
        "opsm": lambda: rows(lambda log, _, a: [float(not (a < 0 and -mean(log) > 0.1))] * len(log)),
        "binary-gate": lambda: rows(
            lambda log, lmu, _: [
                float(abs(math.exp(y) - math.exp(x + y)) <= 0.2) for x, y in zip(log, lmu, strict=True)
            ]
        ),
        "m2po": lambda: _m2po(inputs),
        "batch-normalised": lambda: _batch_normalised(inputs),
    }
    return formulae[name]()


@each
@pytest.mark.parametrize("seed", range(15))
def test_equals_its_formula(name: str, seed: int) -> None:
    inputs = batch(seed, scale=(0.05, 0.3, 0.8)[seed % 3])
    weights_BT = BY_NAME[name](inputs).weights_BT.numpy()
    for found_T, mask_T, expected in zip(weights_BT, inputs.mask_BT.numpy(), twin(name, inputs), strict=True):
        np.testing.assert_allclose(found_T[mask_T], expected, rtol=1e-9)


@each
def test_the_batches_are_neither_all_kept_nor_all_rejected(name: str) -> None:
    kept = [
        BY_NAME[name](inputs).weights_BT[inputs.mask_BT]
        for inputs in (batch(seed, scale=(0.05, 0.3, 0.8)[seed % 3]) for seed in range(15))
    ]
    values = torch.cat(kept)
    assert len(set(values.tolist())) > 1 or name == "none"


@each
@few
@given(seed=seeds, poison=st.sampled_from([math.nan, math.inf, -math.inf, -1e30]))
def test_what_stands_at_masked_places_does_not_matter(name: str, seed: int, poison: float) -> None:
    clean = batch(seed)
    assert clean.behaviour_BT is not None and clean.advantages_BT is not None
    poisoned = CorrectionInputs(
        log_weight_BT=clean.log_weight_BT,
        mask_BT=clean.mask_BT,
        behaviour_BT=torch.where(clean.mask_BT, clean.behaviour_BT, poison),
        advantages_BT=torch.where(clean.mask_BT, clean.advantages_BT, poison),
    )
    ours, theirs = BY_NAME[name](poisoned), BY_NAME[name](clean)
    assert torch.equal(ours.weights_BT[clean.mask_BT], theirs.weights_BT[clean.mask_BT])
    assert torch.isfinite(ours.weights_BT).all()
    assert all(not figure[~clean.mask_BT].any() for figure in ours.figures_BT.values())


@each
@few
@given(seed=seeds, right=st.integers(0, 4), below=st.integers(0, 2))
def test_padding_changes_nothing(name: str, seed: int, right: int, below: int) -> None:
    inputs = batch(seed)
    assert inputs.behaviour_BT is not None and inputs.advantages_BT is not None

    def pad(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, right, 0, below))

    wide = CorrectionInputs(
        log_weight_BT=pad(inputs.log_weight_BT),
        mask_BT=pad(inputs.mask_BT),
        behaviour_BT=pad(inputs.behaviour_BT),
        advantages_BT=pad(inputs.advantages_BT),
    )
    found_BT = BY_NAME[name](wide).weights_BT[:4, :6]
    expected_BT = BY_NAME[name](inputs).weights_BT
    torch.testing.assert_close(found_BT[inputs.mask_BT], expected_BT[inputs.mask_BT], rtol=1e-12, atol=1e-12)


@of_rows
@few
@given(seed=seeds, cut=st.integers(1, 3))
def test_a_row_is_weighed_alike_in_any_micro_batch(name: str, seed: int, cut: int) -> None:
    inputs = batch(seed)
    assert inputs.behaviour_BT is not None and inputs.advantages_BT is not None
    parts = [
        CorrectionInputs(
            log_weight_BT=inputs.log_weight_BT[rows],
            mask_BT=inputs.mask_BT[rows],
            behaviour_BT=inputs.behaviour_BT[rows],
            advantages_BT=inputs.advantages_BT[rows],
        )
        for rows in (slice(cut), slice(cut, None))
    ]
    assert torch.equal(torch.cat([BY_NAME[name](p).weights_BT for p in parts]), BY_NAME[name](inputs).weights_BT)


@each
@pytest.mark.parametrize("rows", [0, 1])
def test_extremes_and_nothing_at_all_stay_finite(name: str, rows: int) -> None:
    log = torch.tensor([[-20.0, 20.0, 20.0, 0.0]])[:rows]
    inputs = CorrectionInputs(
        log_weight_BT=log,
        mask_BT=torch.ones_like(log, dtype=torch.bool),
        behaviour_BT=torch.full_like(log, -1e30),
        advantages_BT=torch.full_like(log, -1.0),
    )
    masked = CorrectionInputs(
        log_weight_BT=torch.zeros_like(log),
        mask_BT=torch.zeros_like(log, dtype=torch.bool),
        behaviour_BT=torch.full_like(log, math.nan),
        advantages_BT=torch.full_like(log, math.nan),
    )
    for given_inputs in (inputs, masked):
        weights_BT = BY_NAME[name](given_inputs).weights_BT
        assert weights_BT.shape == log.shape and torch.isfinite(weights_BT).all() and (weights_BT >= 0).all()


@each
def test_weights_carry_no_gradient(name: str) -> None:
    inputs = batch(1)
    log_BT = inputs.log_weight_BT.clone().requires_grad_()
    out = BY_NAME[name](
        CorrectionInputs(
            log_weight_BT=log_BT,
            mask_BT=inputs.mask_BT,
            behaviour_BT=inputs.behaviour_BT,
            advantages_BT=inputs.advantages_BT,
        )
    )
    assert not out.weights_BT.requires_grad


@few
@given(seed=seeds)
def test_a_product_multiplies_weights_and_keeps_all_figures(seed: int) -> None:
    inputs = batch(seed)
    both = product([BY_NAME["token-truncated"], opsm])(inputs)
    one, other = BY_NAME["token-truncated"](inputs), opsm(inputs)
    assert torch.equal(both.weights_BT, one.weights_BT * other.weights_BT)
    assert both.figures_BT.keys() == {"truncated", "rejected"}
    gates = product([opsm, binary_gate])(inputs)
    assert torch.equal(gates.figures_BT["rejected"].bool(), (gates.weights_BT == 0) & inputs.mask_BT)


def test_m2po_rejects_ties_together_whatever_their_order() -> None:
    log = torch.tensor([[0.1, 0.5, -0.5, 0.1]])
    inputs = CorrectionInputs(log_weight_BT=log, mask_BT=torch.ones(1, 4, dtype=torch.bool))
    # 0.01, 0.01, 0.25, 0.25: with one of the two far ones the mean is 0.09
    assert m2po(inputs, limit=0.1).weights_BT.tolist() == [[1.0, 0.0, 0.0, 1.0]]


def test_a_good_row_is_never_masked_by_opsm_however_far_it_is() -> None:
    inputs = CorrectionInputs(
        log_weight_BT=torch.full((2, 3), -5.0),
        mask_BT=torch.ones(2, 3, dtype=torch.bool),
        advantages_BT=torch.tensor([[1.0], [0.0]]).expand(2, 3),
    )
    assert opsm(inputs).weights_BT.eq(1).all()


@pytest.mark.parametrize(("component", "said"), [(opsm, "opsm looks at advantages"), (binary_gate, "log-probs")])
def test_what_a_correction_needs_and_is_not_given_is_named(component: Correction, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        component(CorrectionInputs(log_weight_BT=torch.zeros(1, 1), mask_BT=torch.ones(1, 1, dtype=torch.bool)))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("token-truncated", {"cap": 0.0}, "token-truncated: cap is 0.0; it must be greater than 0"),
        ("sequence-truncated", {"cap": math.nan}, "sequence-truncated: cap is nan"),
        ("icepop", {"low": 5.0, "high": 0.5}, "low is 5.0 and high is 0.5; low must not be above high"),
        ("icepop", {"low": -1.0}, "low is -1.0"),
        ("geometric-band", {"low": 1.1}, "geometric-band: low is 1.1 and high is 1.01"),
        ("geometric-band", {"cap": -1.0}, "geometric-band: cap"),
        ("rejection", {"estimator": "k1"}, "estimator is 'k1'; did you mean 'k"),
        ("rejection", {"level": "row"}, "level is 'row'; did you mean 'row-"),
        ("rejection", {"limit": -0.1}, "rejection: limit"),
        ("opsm", {"limit": math.nan}, "opsm: limit"),
        ("binary-gate", {"distance": "kll"}, "distance is 'kll'; did you mean 'kl'"),
        ("binary-gate", {"limit": -1.0}, "binary-gate: limit"),
        ("m2po", {"limit": 0.0}, "m2po: limit is 0.0"),
        ("batch-normalised", {"level": "tokn"}, "did you mean 'token'"),
        ("batch-normalised", {"cap": 0.0}, "cap is 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        functools.partial(BY_NAME[name], **wrong)(batch(0))
