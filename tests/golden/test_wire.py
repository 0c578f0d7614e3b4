"""The bytes that v1 writes today: one file per record type, in hex. What was written before stays in `history/`.

`python -m golden.test_wire` from the folder `tests` writes the files anew; do that only where a change of the bytes is
wanted, add the new generation to the history (`golden.test_evolution`), and say why in the change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.codec import decode, encode, fingerprint, kind
from schemas.records import Record
from support.samples import EXAMPLES

FOLDER = Path(__file__).parent / "v1"
LINE = 96


def path_of(cls: type[Any]) -> Path:
    """A type's file."""
    return FOLDER / f"{cls.__name__}.hex"


def text_of(record: Record) -> str:
    """Hex in short lines: the header first, by itself."""
    digits = encode(record).hex()
    lines = [digits[:20], *(digits[at : at + LINE] for at in range(20, len(digits), LINE))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("cls", EXAMPLES, ids=lambda cls: str(cls.__name__))
def test_bytes_have_not_changed(cls: type[Any]) -> None:
    golden = path_of(cls).read_text()
    assert text_of(EXAMPLES[cls]) == golden
    data = bytes.fromhex(golden)
    assert decode(data) == EXAMPLES[cls]
    assert kind(data) is cls and data[2:10] == fingerprint(cls)


def test_no_file_is_without_a_type() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {path_of(cls).name for cls in EXAMPLES}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for example in EXAMPLES.values():
        path_of(type(example)).write_text(text_of(example))
