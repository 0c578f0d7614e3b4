"""Named components: a table says where each name lives, and `package.module:name` brings one of your own.

A component is a function; its keyword-only parameters are its settings. Nothing is registered at import, and nothing is
imported before it is asked for.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

from schemas.errors import SettingError
from schemas.names import nearest

_PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("text", (str,)),
    dict: ("a table", (dict,)),
    list: ("a list", (list, tuple)),
}


def load(kind: str, name: str, table: Mapping[str, str]) -> Callable[..., Any]:
    """The function that `name` stands for: an entry of the table, or `package.module:name`. Raises SettingError.

    >>> load("function", "json:dumps", {})([1])
    '[1]'
    """
    target = table.get(name, name)
    module_name, colon, attribute = target.partition(":")
    if not colon:
        raise SettingError(
            f"{kind} {name!r} is not known; {nearest(name, table)}; one of your own: package.module:name"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingError(
            f"{kind} {name!r}: cannot import {module_name!r} ({error}); install it into this environment, or put its "
            "folder on PYTHONPATH"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [entry for entry, value in vars(module).items() if callable(value) and not entry.startswith("_")]
        raise SettingError(
            f"{kind} {name!r}: {module_name!r} has no function {attribute!r}; {nearest(attribute, known)}"
        )
    return typing.cast(Callable[..., Any], found)


def check_settings(kind: str, name: str, function: Callable[..., Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, if `function` takes them as keyword-only parameters. Raises SettingError naming the nearest key.

    >>> def clip(values: list[float], *, limit: float = 1.0) -> list[float]: ...
    >>> check_settings("filter", "clip", clip, {"limit": 2})
    {'limit': 2}
    """
    parameters = inspect.signature(function).parameters.values()
    known = {p.name: p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    is_open = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for key in settings:
        if key not in known and not is_open:
            hint = nearest(key, known) if known else "it has no settings"
            raise SettingError(f"{kind} {name!r} has no setting {key!r}; {hint}")
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in settings:
            raise SettingError(f"{kind} {name!r} needs the setting {key!r}; {nearest(key, known)}")
    hints = _hints(function)
    for key, value in settings.items():
        _check_type(f"{kind} {name!r}: setting {key!r}", hints.get(key), value)
    return dict(settings)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}  # names that only a type checker can see: values then go unchecked to the function


def _check_type(where: str, hint: Any, value: Any) -> None:
    said, types = _PLAIN.get(typing.get_origin(hint) or hint, ("", (object,)))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types and object not in types):
        raise SettingError(f"{where} is {value!r}; it must be {said}")
