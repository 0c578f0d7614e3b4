"""Where a dotted key leads in the tables of `infra.settings`: its type, or a sentence that names the nearest valid key."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import SecretStr

from infra.config_errors import dotted
from infra.settings import Settings, Table
from schemas.names import nearest

Key = tuple[str, ...]


class Location(NamedTuple):
    """What a key may hold."""

    annotation: Any

    @property
    def is_path(self) -> bool:
        """Whether the value is a path."""
        return self.annotation is Path


def locate(key: Key) -> Location | str:
    """The type behind a key; a sentence when there is no such key.

    >>> locate(("policies", "main", "train", "learning_rat"))[:50]
    'policies.main.train.learning_rat is not a setting:'
    >>> locate(("run", "folder")).is_path
    True
    """
    annotation: Any = Settings
    for depth, name in enumerate(key):
        if _is_table(annotation):
            field = annotation.model_fields.get(name)
            if field is None:
                return _unknown(key[: depth + 1], annotation)
            annotation = _plain(field.annotation)
        elif get_origin(annotation) is dict:
            annotation = _plain(get_args(annotation)[1])
        elif annotation is Any:
            return Location(Any)
        else:
            return f"{dotted(key[:depth])} holds one value and is no table: {dotted(key)} is not a setting"
    return Location(annotation)


def is_text(annotation: Any) -> bool:
    """Whether a key holds text as it stands."""
    return annotation in (str, Path, SecretStr) or get_origin(annotation) is Literal


def path_defaults() -> dict[Key, str]:
    """Keys of paths that have a default, which also starts at the TOML file's folder."""
    return {
        (table, name): str(field.default)
        for table, outer in Settings.model_fields.items()
        if _is_table(outer.annotation) and outer.annotation is not None
        for name, field in outer.annotation.model_fields.items()
        if isinstance(field.default, Path)
    }


def _unknown(key: Key, table: type[Table]) -> str:
    elsewhere = [dotted(path) for path in _keys(Settings) if path[-1] == key[-1]]
    hint = f"it exists as {elsewhere[0]}" if elsewhere else nearest(key[-1], table.model_fields)
    return f"{dotted(key)} is not a setting: {hint}"


def _keys(annotation: Any, prefix: Key = ()) -> list[Key]:
    """Every key of the tables; NAME stands for a policy's or region's name."""
    annotation = _plain(annotation)
    if get_origin(annotation) is dict and _is_table(get_args(annotation)[1]):
        return _keys(get_args(annotation)[1], (*prefix, "NAME"))
    if not _is_table(annotation):
        return [prefix]
    return [key for name, field in annotation.model_fields.items() for key in _keys(field.annotation, (*prefix, name))]


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Table)


def _plain(annotation: Any) -> Any:
    """The annotation without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation
