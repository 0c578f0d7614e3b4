"""Names of what a trainer computes, and the algorithms that it follows.

A new one needs a file, a line in the table of its kind and a test file. One of your own is given as
`package.module:name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.components import check_settings, load
from schemas.errors import SettingError
from schemas.names import nearest
from trainers.batch_corrections import BATCH_CORRECTIONS
from trainers.corrections import CORRECTIONS, Correction, product
from trainers.losses import FITS, LOSSES, Loss
from trainers.normalise import NORMALISERS, Normaliser
from trainers.probes import check_once
from trainers.reductions import REDUCTIONS, Reduction

WITH_PROXIMAL = frozenset({"kl-in-reward", "reinforce-plus-plus"})
"""Normalisers that may look at log-probs of the weights being trained and of a reference."""
WITH_VALUES = frozenset({"gae"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is added to the loss; 0 leaves a term out."""

    kl: float = 0.0
    """Coefficient of the KL to the reference."""
    kl_estimator: str = "k3+"
    entropy: float = 0.0
    """Coefficient of the entropy bonus."""
    value: float = 0.5
    """Coefficient of the value head's loss, where there is one."""
    value_clip: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithms:
    """What a step computes; plain functions, settings already bound."""

    loss: Loss
    correction: Correction
    reduction: Reduction
    batch_corrections: Sequence[Correction] = ()
    normalisers: Sequence[Normaliser] = ()
    terms: Terms = field(default_factory=Terms)
    needs_proximal: bool = False
    """Whether log-probs of all rows are needed before the first update."""
    needs_reference: bool = False
    needs_values: bool = False


def make_algorithms(
    *,
    loss: str = "ppo-clip",
    correction: str = "token-truncated",
    reduction: str = "token-mean",
    further_corrections: Sequence[str] = (),
    batch_corrections: Sequence[str] = (),
    normalisers: Sequence[str] = (),
    terms: Terms | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Algorithms:
    """The algorithms of these names, with settings by component name, each tried once on a few tokens of no run.

    Raises SettingError before anything runs.

    >>> make_algorithms(settings={"ppo-clp": {"clip_low": 0.1}})
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: there are settings for 'ppo-clp', which is not used here; did you mean 'ppo-clip'? \
known: ppo-clip, token-mean, token-truncated
    """
    given, terms = settings or {}, terms or Terms()
    used = (loss, correction, reduction, *further_corrections, *batch_corrections, *normalisers)
    for name in given:
        if name not in used:
            raise SettingError(f"there are settings for {name!r}, which is not used here; {nearest(name, used)}")

    def bound(kind: str, name: str, table: Mapping[str, str]) -> Callable[..., Any]:
        function = load(kind, name, table)
        ready = functools.partial(function, **check_settings(kind, name, function, given.get(name, {})))
        check_once(kind, name, ready)
        return ready

    own = any(":" in name for name in normalisers)
    corrections = [bound("correction", name, CORRECTIONS) for name in (correction, *further_corrections)]
    with_reference = terms.kl > 0 or not WITH_PROXIMAL.isdisjoint(normalisers)
    return Algorithms(
        loss=bound("loss", loss, LOSSES),
        correction=corrections[0] if len(corrections) == 1 else product(corrections),
        reduction=bound("reduction", reduction, REDUCTIONS),
        batch_corrections=[bound("batch correction", name, BATCH_CORRECTIONS) for name in batch_corrections],
        normalisers=[bound("normaliser", name, NORMALISERS) for name in normalisers],
        terms=terms,
        needs_proximal=bool(batch_corrections) or not WITH_PROXIMAL.isdisjoint(normalisers) or own,
        needs_reference=with_reference,
        needs_values=not WITH_VALUES.isdisjoint(normalisers),
    )


def check_fit(*, loss: str, reduction: str, corrections: Sequence[str]) -> None:
    """Raise SettingError where a loss is put together with what makes another algorithm of it.

    >>> check_fit(loss="gspo", reduction="token-mean", corrections=["none"])
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: loss 'gspo' is itself only with reduction 'seq-mean-token-mean', and reduction is 'token-mean'
    """
    fit = FITS.get(loss)
    if fit is None:
        return
    if fit.only and reduction != fit.reduction:
        raise SettingError(
            f"loss {loss!r} is itself only with reduction {fit.reduction!r}, and reduction is {reduction!r}"
        )
    weighing = [name for name in corrections if name != "none"]
    if fit.corrects and weighing:
        raise SettingError(
            f"loss {loss!r} corrects by itself, or knows no sampler, and {weighing[0]!r} would weigh once more: "
            "set correction = 'none', and leave further and batch corrections out"
        )
