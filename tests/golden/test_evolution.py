"""Every generation of every record type is read by every other: what stands on old topics, and what newer writers add.

A generation is a schema text and an example's bytes under `history/<Type>/<fingerprint>`, and is never changed or removed.
`python -m golden.test_evolution` from the folder `tests` adds those of today; a schema that is not in the history fails here.
The history is that of the namespace `offsetrl.v1`, which stays for ever: another one would make every record unreadable.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from schemas.codec import HEADER_BYTES, decode, encode, fingerprint, register_writer, schema_text
from schemas.records import SchemaText, Trajectory
from support.evolution import Generation, findings, problems, unreadable
from support.samples import EXAMPLES

HISTORY = Path(__file__).parent / "history"


def today(cls: type[Any]) -> Generation:
    """A type as the code writes it now."""
    return Generation(fingerprint(cls).hex(), schema_text(cls), encode(EXAMPLES[cls]))


def stored(cls: type[Any], history: Path = HISTORY) -> list[Generation]:
    """Generations in the history, oldest names first."""
    paths = sorted((history / cls.__name__).glob("*.avsc"))
    return [
        Generation(path.stem, path.read_text("utf-8"), bytes.fromhex(path.with_suffix(".hex").read_text()))
        for path in paths
    ]


def add(cls: type[Any], history: Path = HISTORY) -> bool:
    """Add today's generation of a type unless it is there; whether it was added."""
    now = today(cls)
    path = history / cls.__name__ / f"{now.name}.avsc"
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".hex").write_text(now.data.hex() + "\n")
    path.write_text(now.text, "utf-8")
    return True


def wrong(cls: type[Any], history: Path = HISTORY) -> list[str]:
    """What is wrong with a type's history, together with what the code writes now."""
    kept = stored(cls, history)
    now = today(cls)
    found = [] if now.name in [one.name for one in kept] else [f"{now.name} is not in the history: add it (see above)"]
    return found + findings([*(one for one in kept if one.name != now.name), now])


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda cls: str(cls.__name__))
def test_all_generations_read_each_other(cls: type[Any]) -> None:
    assert not wrong(cls)


def test_the_history_holds_every_type_and_nothing_else() -> None:
    assert {path.name for path in HISTORY.iterdir()} == {cls.__name__ for cls in EXAMPLES}
    for cls in EXAMPLES:
        for generation in stored(cls):
            assert generation.name == register_writer(generation.text).hex(), (
                "a file is named by its schema's fingerprint"
            )
            assert bytes.fromhex(generation.name) == generation.data[2:HEADER_BYTES]


def test_the_record_that_carries_schemas_has_one_generation_for_ever() -> None:
    """A reader learns the other schemas from it, so there is nothing from which it could learn a second one of this."""
    (only,) = stored(SchemaText)
    assert only.name == today(SchemaText).name == "629d8951947a2b35"


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda cls: str(cls.__name__))
def test_examples_of_older_generations_become_records(cls: type[Any]) -> None:
    """Avro's defaults must also be what our own types take."""
    for generation in [*stored(cls), today(cls)]:
        register_writer(generation.text)
        assert type(decode(generation.data)) is cls


def test_the_history_of_a_type_grows_and_its_first_generation_counts(tmp_path: Path) -> None:
    assert wrong(Trajectory, tmp_path) == [f"{today(Trajectory).name} is not in the history: add it (see above)"]
    assert add(Trajectory, tmp_path) and not add(Trajectory, tmp_path)
    assert not wrong(Trajectory, tmp_path) and stored(Trajectory, tmp_path) == [today(Trajectory)]
    (path,) = (tmp_path / "Trajectory").glob("*.avsc")
    tree = json.loads(path.read_text())
    tree["fields"] = [field for field in tree["fields"] if field["name"] != "region"]
    old = path.with_name("00.avsc")
    old.write_text(json.dumps(tree))
    old.with_suffix(".hex").write_text(path.with_suffix(".hex").read_text())
    assert any("Trajectory.region: not written" in text for text in wrong(Trajectory, tmp_path))


# Planted changes ------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]


def field(tree: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (entry for entry in tree["fields"] if entry["name"] == name)
    return found  # type: ignore[no-any-return]


def changed(change: Change) -> tuple[str, str]:
    """Schema texts of a trajectory before and after a change."""
    tree = json.loads(schema_text(Trajectory))
    after = copy.deepcopy(tree)
    change(after)
    return json.dumps(tree), json.dumps(after)


def _rename(tree: dict[str, Any]) -> None:
    field(tree, "region")["name"] = "place"


def _remove(tree: dict[str, Any]) -> None:
    tree["fields"].remove(field(tree, "region"))


def _add(tree: dict[str, Any]) -> None:
    tree["fields"].append({"name": "more", "type": "long"})


def _widen(tree: dict[str, Any]) -> None:
    field(tree, "item")["type"] = "double"


def _to_bytes(tree: dict[str, Any]) -> None:
    field(tree, "error")["type"] = "bytes"


def _optional(tree: dict[str, Any]) -> None:
    field(tree, "region")["type"] = ["null", "string"]


def _never_null(tree: dict[str, Any]) -> None:
    field(tree, "reward")["type"] = "double"


def _another_branch(tree: dict[str, Any]) -> None:
    field(tree, "reward")["type"] = ["null", "double", "string"]


def _strict_enum(tree: dict[str, Any]) -> None:
    kind = field(tree, "status")["type"]
    kind["symbols"].remove("timeout")
    del kind["default"]


def _map_of_text(tree: dict[str, Any]) -> None:
    field(tree, "timings")["type"]["values"] = "string"


def _items_of_text(tree: dict[str, Any]) -> None:
    field(tree, "step_rewards")["type"]["items"] = "string"


def _inner_field(tree: dict[str, Any]) -> None:
    field(tree, "sampling")["type"]["fields"].append({"name": "seed", "type": "long"})


def _other_record(tree: dict[str, Any]) -> None:
    field(tree, "sampling")["type"]["name"] = "Drawing"


REFUSED: tuple[Change, ...] = (
    _rename, _remove, _add, _widen, _to_bytes, _optional, _never_null, _another_branch, _strict_enum, _map_of_text,
    _items_of_text, _inner_field, _other_record,
)  # fmt: skip


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: str(change.__name__.strip("_")))
def test_a_change_that_some_reader_does_not_survive_is_found(change: Change) -> None:
    before, after = changed(change)
    assert problems(before, after) or problems(after, before)


@pytest.mark.parametrize("change", [_remove, _add, _optional, _map_of_text])
def test_such_changes_are_found_in_a_history_as_well(change: Change) -> None:
    before, after = changed(change)
    now = today(Trajectory)
    assert findings([Generation("old", before, now.data), Generation("new", after, now.data)])


def _with_default(tree: dict[str, Any]) -> None:
    tree["fields"].insert(3, {"name": "more", "type": "long", "default": 0})


def _inner_with_default(tree: dict[str, Any]) -> None:
    field(tree, "sampling")["type"]["fields"].append({"name": "seed", "type": "long", "default": 0})


def _symbol(tree: dict[str, Any]) -> None:
    field(tree, "status")["type"]["symbols"].insert(0, "lost")


def _other_order(tree: dict[str, Any]) -> None:
    tree["fields"].reverse()


def _other_docs(tree: dict[str, Any]) -> None:
    tree["doc"] = "something else"


ALLOWED: tuple[Change, ...] = (_with_default, _inner_with_default, _symbol, _other_order, _other_docs)


@pytest.mark.parametrize("change", ALLOWED, ids=lambda change: str(change.__name__.strip("_")))
def test_a_change_that_every_reader_survives_is_allowed(change: Change) -> None:
    before, after = changed(change)
    assert not problems(before, after) and not problems(after, before)
    data = today(Trajectory).data
    assert unreadable(data, before, after) is None, "an old record in new hands"
    register_writer(after)  # and a new one in ours


def test_a_new_field_without_which_bytes_cannot_be_read_is_found_by_reading_them() -> None:
    before, after = changed(_add)
    data = today(Trajectory).data
    assert "more" in (unreadable(data, before, after) or "")
    assert "left over" in (unreadable(data + b"\x00", before, before) or "")
    assert unreadable(data[:-1], before, before) is not None and len(data) > HEADER_BYTES


if __name__ == "__main__":
    for example in EXAMPLES:
        add(example)
