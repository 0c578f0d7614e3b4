"""Hostile bytes for a terminal: every control character is shown by its number, bytes are shown as a hexdump.

A terminal obeys what it prints: an escape sequence in a record could clear the screen, rename the window or answer as if
it were typed. Characters that change the direction of writing or take no room could make a text read differently than it is.
"""

from __future__ import annotations

ROW_BYTES = 16


def safe(text: str, limit: int = 200) -> str:
    r"""The text on one line, at most `limit` characters, with all that is not plainly printable as escapes.

    >>> safe("red: \x1b[31m, bell: \x07, reversed: \u202e, new line: \n, plain: ä")
    'red: \\x1b[31m, bell: \\x07, reversed: \\u202e, new line: \\n, plain: ä'
    >>> safe("abcdef", limit=3)
    'abc...'
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:limit])
    return shown + ("..." if len(text) > limit else "")


def safe_bytes(data: bytes | None, limit: int = 200) -> str:
    r"""Bytes as text where they are UTF-8, the rest as escapes; a dash where there are none.

    >>> safe_bytes(b"g1 \xff\x1b"), safe_bytes(None)
    ('g1 \\xff\\x1b', '-')
    """
    if data is None:
        return "-"
    return safe(data[: limit + 1].decode("utf-8", "backslashreplace"), limit)


def hexdump(data: bytes, limit: int) -> list[str]:
    """The first `limit` bytes, sixteen to a line: offset, hex, printable ASCII.

    >>> hexdump(b"ab" + bytes([27, 255]), 16)
    ['00000000  61 62 1b ff                                      |ab..|']
    """
    lines = []
    for at in range(0, min(len(data), limit), ROW_BYTES):
        row = data[at : min(at + ROW_BYTES, limit)]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{at:08x}  {row.hex(' '):<48} |{text}|")
    if len(data) > limit:
        lines.append(f"... {len(data) - limit} more bytes")
    return lines
