"""Says in a sentence what is wrong with a setting: the key, what was given and where, what is allowed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from infra.secrecy import MASK, is_secret, mask_url
from schemas.errors import SettingError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ALLOWED = {
    "int_type": "must be a whole number, without quotes",
    "int_parsing": "must be a whole number, without quotes",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number, without quotes",
    "float_parsing": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
    "bool_parsing": "must be true or false, without quotes",
    "string_type": "must be text in quotes",
    "path_type": "must be a path in quotes",
    "list_type": 'must be a list such as ["a", "b"]',
    "tuple_type": "must be a list such as [0.9, 0.99]",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be one of {expected}",
    "string_too_short": "must have at least {min_length} characters",
    "string_pattern_mismatch": "must be 1 to 63 of a-z, 0-9 and '-', starting with a letter or digit",
    "missing": "is missing",
}


def dotted(key: Sequence[str]) -> str:
    """A key as TOML writes it.

    >>> dotted(("kafka", "client", "security.protocol"))
    'kafka.client."security.protocol"'
    """
    return ".".join(name if _BARE.fullmatch(name) else json.dumps(name) for name in key)


def explain(error: Mapping[str, Any], origins: Mapping[tuple[str, ...], str]) -> str:
    """One error of pydantic's as a sentence; secrets masked."""
    location = [str(part) for part in error["loc"]]
    kind, context = error["type"], error.get("ctx", {})
    if location[-1:] == ["[key]"]:  # a name of a policy or region
        return f"{dotted(location[:-2])} name {location[-2]!r} {_ALLOWED['string_pattern_mismatch']}"
    if kind == "too_short" and location == ["policies"]:
        location, kind = ["policies"], "missing"
    key = tuple(location)
    if kind == "value_error":
        allowed = str(context["error"])
        if _origin(key, origins) is None:  # a table as a whole: its own check names its keys
            return f"{dotted(key)}: {allowed}" if key else allowed
    else:
        allowed = _ALLOWED.get(kind, error["msg"]).format(**context)
    if kind == "missing":
        what = ': at least one table [policies.NAME] with model = "FOLDER"' if key == ("policies",) else ""
        return f"{dotted(key)} {allowed}{what}"
    origin = _origin(key, origins) or "default"
    return f"{dotted(key)} = {_given(key, error['input'])} ({origin}) {allowed}"


def report(problems: Sequence[str]) -> SettingError:
    """All problems as one error."""
    if len(problems) == 1:
        return SettingError(problems[0])
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return SettingError(f"{len(problems)} settings are wrong:{lines}")


def _origin(key: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str | None:
    """The layer that gave a value; items of a list have their list's."""
    return next((origins[key[:end]] for end in range(len(key), 0, -1) if key[:end] in origins), None)


def _given(key: tuple[str, ...], value: Any) -> str:
    if is_secret(key):
        return MASK
    text = mask_url(json.dumps(value, default=str))
    text = re.sub(r"[^\s\"',/]+@", f"{MASK}@", text)  # user:password@host without a scheme
    return text if len(text) <= 80 else text[:77] + "..."
