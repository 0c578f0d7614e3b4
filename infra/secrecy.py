"""What is secret, and how it is hidden: by key when settings are shown, by value in everything that is printed or logged.

>>> mask_url("http://ann:hunter2@store:9000/x")
'http://***@store:9000/x'
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

MASK = "***"
_SECRET = re.compile(r"(passw(or)?d|secret|access_key|api_key|jaas_config|credential|auth_token|private_key)")
_USER_INFO = re.compile(r"(?<=://)[^/\s@'\"]+@")
_LEAST_LENGTH = 4  # hiding the letter "a" everywhere would hide the log itself


def is_secret(path: Sequence[str]) -> bool:
    """Whether a key holds a secret, by its name; a file's name is none.

    >>> is_secret(("kafka", "client", "sasl.plain.password")), is_secret(("kafka", "sasl_password_file"))
    (True, False)
    """
    last = re.sub(r"[.-]", "_", path[-1].lower())
    return bool(_SECRET.search(last)) and not last.endswith(("_file", "_path", "_location", "_env"))


def mask_url(text: str) -> str:
    """The text with user and password of any URL hidden."""
    return _USER_INFO.sub(f"{MASK}@", text)


class Redactor:
    """Replaces known secret values in any text, also as JSON or a URL would write them."""

    def __init__(self) -> None:
        self._values: list[str] = []

    def add(self, values: Iterable[str]) -> None:
        """Learn secrets; the longest are replaced first, so that none leaves a rest behind."""
        known = set(self._values)
        for value in values:
            if len(value) >= _LEAST_LENGTH:
                known |= {value, json.dumps(value)[1:-1], quote(value, safe=""), repr(value)[1:-1]}
        self._values = sorted(known, key=lambda text: (-len(text), text))

    def __call__(self, text: str) -> str:
        """The text without secrets."""
        for value in self._values:
            text = text.replace(value, MASK)
        return mask_url(text)


redact = Redactor()
"""The one redactor of this process: logs, printed errors and reports go through it."""
