"""Prompts of the user's own: broken files are met before anything starts, broken graders give no reward."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from producers.environments import check_environment, make_environment
from producers.environments.prompts import grade
from schemas.errors import SettingError
from schemas.records import Status

REWARD = "support.prompt_rewards:exact"


def _file(folder: Path, *lines: str | bytes, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_rows_travel_in_the_payload_and_the_worker_needs_no_file(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"prompt": "2+2=", "answer": "4"}', "", '{"prompt": "ü?", "answer": "no", "n": [1]}', "")
    here = check_environment("prompts", {"file": str(path), "reward": REWARD}, 0)
    assert here.num_items == 2
    payload = here.payload(1)
    path.unlink()
    worker = make_environment("prompts", {"file": str(path), "reward": REWARD}, 0)
    session = worker.open(1, payload, 5)
    assert session.observe().text == "ü?"
    session.act("no", truncated=False)
    assert session.done
    verdict = session.verdict()
    assert (verdict.status, verdict.reward, dict(verdict.parts)) == (Status.OK, 1.0, {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{'prompt': 'x'}", "line 3: not a line of JSON"),
        ('{"prompt": "x"', "line 3: not a line of JSON"),
        ('["x"]', "line 3: expected an object"),
        ('{"promt": "x"}', "line 3: 'prompt' must be a text.*promt"),
        ('{"prompt": 3}', "line 3: 'prompt' must be a text.*got 3"),
        ('{"prompt": ""}', "line 3: 'prompt' must be a text"),
        ('{"prompt": "x", "n": NaN}', "line 3: not a line of JSON"),
        (b'{"prompt": "\xff"}', "line 3: not a line of JSON"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, line: str | bytes, said: str) -> None:
    path = _file(tmp_path, '{"prompt": "a"}', "", line, '{"prompt": "b"}')
    with pytest.raises(SettingError, match=said):
        check_environment("prompts", {"file": str(path), "reward": REWARD}, 0)


@pytest.mark.parametrize(
    ("file", "reward", "said"),
    [
        ("none.jsonl", REWARD, "cannot read the prompt file"),
        ("empty.jsonl", REWARD, "no prompt in it"),
        ("prompts.csv", REWARD, "must end in one of .jsonl"),
        ("broken.parquet", REWARD, "not a Parquet file"),
        ("empty.jsonl", "support.prompt_rewards:exakt", "did you mean 'exact'"),
        ("empty.jsonl", "support.no_rewards:exact", "cannot import"),
        ("empty.jsonl", "exact", "package.module:name"),
    ],
)
def test_wrong_files_and_rewards_are_refused(tmp_path: Path, file: str, reward: str, said: str) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(SettingError, match=said):
        check_environment("prompts", {"file": str(tmp_path / file), "reward": reward}, 0)


def test_parquet_rows_are_read_and_what_json_cannot_hold_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), good)
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "n": [1.0, math.nan]}), bad)
    environment = check_environment("prompts", {"file": str(good), "reward": REWARD}, 0)
    assert [json.loads(environment.payload(item))["answer"] for item in range(2)] == ["1", "2"]
    with pytest.raises(SettingError, match="row 2: only what JSON can hold"):
        check_environment("prompts", {"file": str(bad), "reward": REWARD}, 0)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, None, "1", [1.0], {"exact": 1.0}, {"reward": math.nan}, {"reward": 1.0, "x": None}]
)
def test_what_is_no_finite_number_is_a_grader_error_and_never_zero(value: Any) -> None:
    verdict = grade(lambda row, answer: value, {}, "", False)
    assert (verdict.status, verdict.reward) == (Status.GRADER_ERROR, None)
    assert verdict.error


@pytest.mark.parametrize("value", [1, True, np.float32(1), {"reward": 1, "length": 3}])
def test_numbers_of_any_kind_are_rewards(value: Any) -> None:
    verdict = grade(lambda row, answer: value, {}, "", True)
    assert (verdict.status, verdict.reward) == (Status.TRUNCATED, 1.0)
    assert dict(verdict.parts) == ({"length": 3.0} if isinstance(value, dict) else {})


def test_a_raising_reward_is_a_grader_error_with_its_words_and_cannot_spoil_the_row(tmp_path: Path) -> None:
    path = _file(tmp_path, '{"prompt": "a", "answer": "b"}')
    environment = make_environment("prompts", {"file": str(path), "reward": "support.prompt_rewards:spoils"}, 0)
    session = environment.open(0, environment.payload(0), 0)
    session.act("x", truncated=False)
    for _ in range(2):
        verdict = session.verdict()
        assert (verdict.status, verdict.reward) == (Status.GRADER_ERROR, None)
        assert "ZeroDivisionError" in verdict.error
    assert session.observe().text == "a"
