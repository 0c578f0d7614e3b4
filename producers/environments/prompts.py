"""prompts: your own prompts from a JSONL or Parquet file, judged by a reward function of your own.

A row is an object with a text `prompt` and any further fields. The function `module:function` is called as
`reward(row, answer)` and returns a number, or a table of named numbers of which `reward` is the reward and the rest are
kept beside it. What it raises, or a number that is not finite, is a grader error without a reward, never 0.
A payload carries the whole row, so that workers elsewhere need the function but not the file.

The function is called from several threads at once, and has `rollout.tool_timeout_s` seconds: then the episode ends
without a reward, and the call is left behind.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from producers.environment import Observation, Verdict
from schemas.components import load
from schemas.errors import SettingError
from schemas.records import Status

Reward = Callable[[dict[str, Any], str], Any]


def grade(reward: Reward, row: dict[str, Any], answer: str, truncated: bool) -> Verdict:
    """Call the user's function; whatever goes wrong in it is GRADER_ERROR without a reward.

    >>> grade(lambda row, answer: float(answer == row["answer"]), {"answer": "4"}, "4", False).reward
    1.0
    >>> grade(lambda row, answer: 1 / 0, {}, "4", False).status.value
    'grader_error'
    """
    try:
        value = reward(row, answer)
        parts = (
            {str(k): number(v) for k, v in value.items()} if isinstance(value, Mapping) else {"reward": number(value)}
        )
        total = parts.pop("reward")
    except KeyError as error:
        return grader_error(f"KeyError: {error} (a table of parts needs the entry 'reward')")
    except Exception as error:  # noqa: BLE001 - the edge to the user's code: any failure of it is one status
        return grader_error(f"{type(error).__name__}: {error}")
    return Verdict(status=Status.TRUNCATED if truncated else Status.OK, reward=total, parts=parts)


def grader_error(text: str) -> Verdict:
    """A verdict without a reward."""
    return Verdict(status=Status.GRADER_ERROR, reward=None, error=text[:2000])


def number(value: Any) -> float:
    """A finite number, or ValueError.

    >>> number(True)
    1.0
    """
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"the reward function returned {value!r}; it must return a finite number")
    return float(value)


class PromptSession:
    """One prompt, one answer."""

    def __init__(self, row: dict[str, Any], reward: Reward) -> None:
        self.row = row
        self.done = False
        self._reward = reward
        self._answer = ""
        self._truncated = False

    def observe(self) -> Observation:
        """The prompt as it stands in the row."""
        return Observation(text=str(self.row["prompt"]))

    def act(self, text: str, truncated: bool) -> None:
        """The answer; there is one."""
        self._answer, self._truncated, self.done = text, truncated, True

    def verdict(self) -> Verdict:
        """What the user's function says. It gets a copy of the row: what it changes there stays there."""
        return grade(self._reward, json.loads(json.dumps(self.row)), self._answer, self._truncated)


class Prompts:
    """The environment; `prompts` makes it. The file is read when it is first needed, by whoever asks for items."""

    rebuildable = True

    def __init__(self, file: Path, reward: Reward) -> None:
        self.file = file
        self._reward = reward

    @functools.cached_property
    def rows(self) -> list[str]:
        """Every row as one line of JSON. Raises SettingError with the line's number."""
        rows = list(read_rows(self.file))
        if not rows:
            raise SettingError(
                f"{self.file}: there is no prompt in it; each line must be an object with a text 'prompt'"
            )
        return rows

    @property
    def num_items(self) -> int | None:
        """Number of rows."""
        return len(self.rows)

    def payload(self, item: int) -> str:
        """The row."""
        return self.rows[item]

    def open(self, item: int, payload: str, seed: int) -> PromptSession:
        """The session of the row that came with the request."""
        return PromptSession(json.loads(payload), self._reward)


def prompts(seed: int, *, file: str, reward: str) -> Prompts:
    """Prompts from `file` (.jsonl, .ndjson or .parquet), judged by `reward` (`module:function`)."""
    if Path(file).suffix not in _READERS:
        raise SettingError(
            f"environment 'prompts': file is {file!r}; its name must end in one of {', '.join(_READERS)}"
        )
    return Prompts(Path(file), load("reward", reward, {}))


def read_rows(file: Path) -> Iterator[str]:
    """Every row of a prompt file as one line of JSON, checked. Raises SettingError with file and line."""
    try:
        for place, row in _READERS[file.suffix](file):
            yield _checked(f"{file}, {place}", row)
    except OSError as error:
        raise SettingError(f"cannot read the prompt file {file}: {error.strerror or error}") from error


def _checked(where: str, row: Any) -> str:
    if not isinstance(row, dict):
        raise SettingError(f'{where}: expected an object such as {{"prompt": "..."}}, got {type(row).__name__}')
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        got = f"got {prompt!r}" if "prompt" in row else f"there is none among {sorted(map(str, row))}"
        raise SettingError(f"{where}: 'prompt' must be a text of at least one character; {got}")
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SettingError(f"{where}: only what JSON can hold may stand in a row ({error})") from error


def _jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield f"line {line_number}", json.loads(line.decode("utf-8-sig"), parse_constant=_refuse)
            except ValueError as error:  # broken UTF-8 is one too
                raise SettingError(f"{file}, line {line_number}: not a line of JSON ({error})") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SettingError(f"{file}: reading Parquet needs the extra 'tasks': install offsetrl[tasks]") from error
    first = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=4096):
                yield from ((f"row {first + at}", row) for at, row in enumerate(batch.to_pylist(), start=1))
                first += batch.num_rows
    except pyarrow.ArrowException as error:
        raise SettingError(f"{file}: not a Parquet file that can be read, behind row {first} ({error})") from error


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".parquet": _parquet,
}
