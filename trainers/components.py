"""Names of losses, corrections and reductions, and the algorithms that a trainer follows.

A new one needs a file, a line in the table of its kind and a test file. One of your own is given as
`package.module:name`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.components import check_settings, load
from schemas.errors import SettingError
from schemas.names import nearest
from trainers.corrections import CORRECTIONS, Correction
from trainers.losses import LOSSES, Loss
from trainers.reductions import REDUCTIONS, Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithms:
    """What a step computes; plain functions, settings already bound."""

    loss: Loss
    correction: Correction
    reduction: Reduction


def make_algorithms(
    *,
    loss: str = "ppo-clip",
    correction: str = "token-truncated",
    reduction: str = "token-mean",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Algorithms:
    """The algorithms of these names, with settings by component name. Raises SettingError before anything runs.

    >>> make_algorithms(settings={"ppo-clp": {"clip_low": 0.1}})
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: there are settings for 'ppo-clp', which is not used here; did you mean 'ppo-clip'? \
known: ppo-clip, token-mean, token-truncated
    """
    given = settings or {}
    used = (loss, correction, reduction)
    for name in given:
        if name not in used:
            raise SettingError(f"there are settings for {name!r}, which is not used here; {nearest(name, used)}")

    def bound(kind: str, name: str, table: Mapping[str, str]) -> Callable[..., Any]:
        function = load(kind, name, table)
        return functools.partial(function, **check_settings(kind, name, function, given.get(name, {})))

    return Algorithms(
        loss=bound("loss", loss, LOSSES),
        correction=bound("correction", correction, CORRECTIONS),
        reduction=bound("reduction", reduction, REDUCTIONS),
    )
