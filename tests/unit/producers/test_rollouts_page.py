"""The environment on the page about rollouts runs as it stands there, through a real episode."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.settings import RolloutTable
from producers.engine import GenerationRequest
from producers.engines.scripted_engine import ScriptedEngine
from producers.environment import rebuildable
from producers.environments import check_environment
from producers.episode import WorkerInfo
from producers.episode_runner import EpisodeRunner
from producers.prompting import PlainPrompts
from schemas.records import Role, Sampling, Status, Version
from support.loop import Clock, InlineCalls
from support.samples import request

PAGE = Path(__file__).parents[3] / "infra/docs/rollouts.md"


class Bytes:
    """One id per byte."""

    def encode(self, text: str, *, first: bool = True) -> Sequence[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()


def _next_guess(asked: GenerationRequest) -> Sequence[int]:
    """Halves what is left, from what stands in the prompt."""
    low, high = 0, 7
    text = bytes(asked.prompt).decode().partition(":")[2]
    for said in text.split(":")[:-1]:
        number, hint = int(said.split()[0]), said.split()[1]
        low, high = (number + 1, high) if hint == "more" else (low, number - 1)
    return str((low + high) // 2).encode()


def test_the_example_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guess.py").write_text(PAGE.read_text("utf-8").split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guess", raising=False)
    environment = check_environment("guess:guess", {"largest": 7}, 3)
    assert rebuildable(environment)
    engine = ScriptedEngine(Version(1, 0), answer=_next_guess, vocab_size=256, stop_ids=())
    calls: Any = InlineCalls()
    runner = EpisodeRunner(
        engine=engine, environment=environment, codec=Bytes(), make_prompts=lambda: PlainPrompts(Bytes()),
        calls=calls, table=RolloutTable(), clock=Clock().monotonic,
    )  # fmt: skip
    info = WorkerInfo(name="w", session="s", region="", model="", tokenizer="", max_model_len=200)
    for item in range(4):
        runner.start(request(index=item, item=item, sampling=Sampling(max_tokens=1)), 0, info)
    for _ in range(20):
        runner.step()
    found = {one.item: one for one in runner.finished}
    assert [found[item].reward for item in range(4)] == [1.0] * 4
    assert found[0].status is Status.TRUNCATED, "each answer was as long as allowed"
    assert {segment.role for segment in found[1].segments} == {Role.PROMPT, Role.SAMPLED, Role.OBSERVATION}
