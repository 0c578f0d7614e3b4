"""What settings of several components must satisfy; each raises SettingError, which stops a processor at its start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from schemas.errors import SettingError


def check_range(component: str, low: float, high: float) -> None:
    """Raise unless low <= high; NaN is no bound."""
    if not low <= high:
        raise SettingError(f"{component}: low is {low} and high is {high}; low must not be above high")


def check_not_negative(component: str, name: str, value: float) -> None:
    """Raise unless the value is 0 or more, and finite."""
    if not 0 <= value < math.inf:
        raise SettingError(f"{component}: {name} is {value}; it must be 0 or more")


def check_coefficients(component: str, parts: Mapping[str, Any]) -> None:
    """Raise unless this is a table of finite numbers by name."""
    if not isinstance(parts, Mapping):
        raise SettingError(f"{component}: parts is {parts!r}; it must be a table, as {{ accuracy = 1.0 }}")
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise SettingError(f"{component}: the coefficient of part {name!r} is {value!r}; it must be a number")
