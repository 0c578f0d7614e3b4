"""Plain columns of text, as wide as they must be: made for eyes, grep and cut alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from infra.safe_text import safe


def columns(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A line of heads and one per row; numbers stand to the right, texts are made safe.

    >>> columns(("what", "n"), [("a", 1), ("bc", 10)])
    ['what   n', 'a      1', 'bc    10']
    """
    rows = [tuple(row) for row in rows]
    cells = [tuple(heads), *(tuple(safe(str(cell)) for cell in row) for row in rows)]
    right = [
        bool(rows) and all(isinstance(row[column], int | float) or row[column] == "-" for row in rows)
        for column in range(len(heads))
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]
