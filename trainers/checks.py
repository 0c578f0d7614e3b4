"""What settings of several components must satisfy; each raises SettingError, which stops a trainer at its start."""

from __future__ import annotations

import math
from collections.abc import Collection

from schemas.errors import SettingError
from schemas.names import nearest


def check_range(component: str, low: float, high: float, *, above: float = 0.0) -> None:
    """Raise unless `above` <= low <= high; NaN is no bound.

    >>> check_range("icepop", 5.0, 0.5)
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: icepop: low is 5.0 and high is 0.5; low must not be above high
    """
    if not low <= high:
        raise SettingError(f"{component}: low is {low} and high is {high}; low must not be above high")
    if not low >= above:
        raise SettingError(f"{component}: low is {low}; it must be {above:g} or more")


def check_positive(component: str, name: str, value: float, *, above: float = 0.0) -> None:
    """Raise unless the value is greater than `above`; infinity is allowed, and stands for no limit.

    >>> check_positive("dual-clip", "cap", 1.0, above=1.0)
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: dual-clip: cap is 1.0; it must be greater than 1
    """
    if not value > above:
        raise SettingError(f"{component}: {name} is {value}; it must be greater than {above:g}")


def check_not_negative(component: str, name: str, value: float) -> None:
    """Raise unless the value is 0 or more, and finite."""
    if not 0 <= value < math.inf:
        raise SettingError(f"{component}: {name} is {value}; it must be 0 or more")


def check_share(component: str, name: str, value: float) -> None:
    """Raise unless the value is from 0 to 1."""
    if not 0 <= value <= 1:
        raise SettingError(f"{component}: {name} is {value}; it must be from 0 to 1")


def check_one_of(component: str, name: str, value: str, allowed: Collection[str]) -> None:
    """Raise unless the value is one of those allowed.

    >>> check_one_of("rejection", "level", "tokens", ("token", "row-mean"))
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: rejection: level is 'tokens'; did you mean 'token'? known: row-mean, token
    """
    if value not in allowed:
        raise SettingError(f"{component}: {name} is {value!r}; {nearest(value, allowed)}")


def check_clip(component: str, clip_low: float, clip_high: float) -> None:
    """Raise unless 0 <= clip_low <= 1 and clip_high >= 0: the band 1 - clip_low .. 1 + clip_high holds 1, and no negatives.

    >>> check_clip("ppo-clip", 1.2, 0.28)
    Traceback (most recent call last):
        ...
    schemas.errors.SettingError: ppo-clip: clip_low is 1.2; it must be from 0 to 1
    """
    check_share(component, "clip_low", clip_low)
    check_not_negative(component, "clip_high", clip_high)
