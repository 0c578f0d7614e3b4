"""Shapes: no record type can drift away from its schema, and reading fills every field."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from schemas.codec import decode, encode, schema_text
from schemas.records import DeadReason, Trajectory
from schemas.shape import Shape
from support.samples import EXAMPLES, trajectory

TREE = json.loads(schema_text(Trajectory))


def field(tree: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in tree["fields"] if one["name"] == name)
    return found


def drop(tree: dict[str, Any]) -> None:
    tree["fields"].remove(field(tree, "reward"))


def misspell(tree: dict[str, Any]) -> None:
    field(tree, "reward")["name"] = "rewrad"


def retype(tree: dict[str, Any]) -> None:
    field(tree, "index")["type"] = "int"


def forget_null(tree: dict[str, Any]) -> None:
    field(tree, "reward")["type"] = "double"


def swap_symbols(tree: dict[str, Any]) -> None:
    symbols = field(tree, "status")["type"]["symbols"]
    symbols[0], symbols[1] = symbols[1], symbols[0]


def forget_default(tree: dict[str, Any]) -> None:
    del field(tree, "status")["type"]["default"]


def change_inside(tree: dict[str, Any]) -> None:
    field(tree["fields"][[one["name"] for one in tree["fields"]].index("sampling")]["type"], "top_p")["type"] = "float"


@pytest.mark.parametrize(
    "spoil",
    [drop, misspell, retype, forget_null, swap_symbols, forget_default, change_inside],
    ids=lambda f: str(f.__name__),
)
def test_a_schema_that_differs_from_its_dataclass_is_refused(spoil: Callable[[dict[str, Any]], None]) -> None:
    tree = copy.deepcopy(TREE)
    Shape(Trajectory, tree)
    spoil(tree)
    with pytest.raises(AssertionError):
        Shape(Trajectory, tree)


def test_words_about_a_field_may_differ() -> None:
    tree = copy.deepcopy(TREE)
    field(tree, "run")["doc"] = "another"
    Shape(Trajectory, tree)


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda cls: str(cls.__name__))
def test_reading_fills_every_field_and_leaves_the_record_frozen(cls: type[Any]) -> None:
    record = decode(encode(EXAMPLES[cls]))
    for one in fields(cls):
        assert getattr(record, one.name) == getattr(EXAMPLES[cls], one.name)
        with pytest.raises(AttributeError):
            setattr(record, one.name, None)


def test_types_that_were_refused_are_not_remembered() -> None:
    shape = Shape(Trajectory, TREE)
    for _ in range(2):
        for index in (True, 1.0, "1"):
            with pytest.raises(Exception, match=r"Trajectory\.index"):
                shape.write(trajectory(index=index), [].extend)
    shape.write(trajectory(), [].extend)
    shape.write(trajectory(reward=None), [].extend)
    shape.write(trajectory(error=DeadReason.EMPTY), [].extend)  # allowed, and not remembered: subclasses have no end
    assert len(shape._seen) == 2
