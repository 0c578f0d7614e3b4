"""reasoning-gym: more than a hundred generated tasks, each an entry of (config, seed, index), with guarded scorers.

What is guarded: a scorer that raises or returns no finite number is a grader error without a reward; scores are clamped
to 0..1; `strict` pays only for what is right; the raw score stands beside the reward; a task whose scorer pays for
garbage is refused. Prompts are the task's question, or a template over the entry's fields.
"""

from __future__ import annotations

import functools
import math
import numbers
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from producers.environment import Observation, Verdict
from schemas.errors import SettingError
from schemas.names import nearest
from schemas.records import Status
from schemas.seeds import derive_seed

HOLES: Mapping[str, str] = {
    "game_of_life_halting": "it pays 1.0 for any text at all when the game halts",
}
"""Tasks whose scorer pays in full for garbage, as of 0.1.25. (Several more pay 0.01 to 0.25 for it: use `strict`.)"""

_STRICT_FROM = 0.99


class Task(NamedTuple):
    """One task: its name and the dataset that generates and scores its entries."""

    name: str
    dataset: Any


def score(scorer: Callable[[str, Any], Any], entry: Any, answer: str, *, strict: bool, truncated: bool) -> Verdict:
    """Judge an answer with a scorer that is not trusted.

    >>> score(lambda answer, entry: 1.7, {}, "4", strict=False, truncated=False).reward
    1.0
    >>> score(lambda answer, entry: float(answer), {}, "four", strict=False, truncated=False).reward is None
    True
    """
    try:
        raw = scorer(answer, entry)
    except Exception as error:  # noqa: BLE001 - the edge to a foreign scorer: any failure of it is one status
        return Verdict(status=Status.GRADER_ERROR, reward=None, error=f"{type(error).__name__}: {error}"[:2000])
    if not isinstance(raw, numbers.Real) or not math.isfinite(raw):
        return Verdict(
            status=Status.GRADER_ERROR, reward=None, error=f"the scorer returned {raw!r}, not a finite number"
        )
    reward = min(1.0, max(0.0, float(raw)))
    if strict:
        reward = float(reward >= _STRICT_FROM)
    return Verdict(status=Status.TRUNCATED if truncated else Status.OK, reward=reward, parts={"raw": float(raw)})


def between(text: str, tag: str) -> str | None:
    """What stands in the last `<tag>...</tag>` of a text; None when there is none.

    >>> between("so <answer>3</answer>, no: <answer> 4 </answer>", "answer"), between("4", "answer")
    (' 4 ', None)
    """
    start, end = text.rfind(f"<{tag}>"), text.rfind(f"</{tag}>")
    return text[start + len(tag) + 2 : end] if 0 <= start < end else None


class ReasoningGymSession:
    """One question, one answer."""

    def __init__(self, prompt: str, entry: Any, scorer: Callable[[str, Any], Any], strict: bool, tag: str) -> None:
        self.prompt, self.entry = prompt, entry
        self.done = False
        self._scorer, self._strict, self._tag = scorer, strict, tag
        self._answer = ""
        self._truncated = False

    def observe(self) -> Observation:
        """The question, in its template."""
        return Observation(text=self.prompt)

    def act(self, text: str, truncated: bool) -> None:
        """The answer; there is one."""
        self._answer, self._truncated, self.done = text, truncated, True

    def verdict(self) -> Verdict:
        """The guarded score; without the tag that was asked for, an invalid action that earns 0."""
        answer = between(self._answer, self._tag) if self._tag else self._answer
        if answer is None:
            status = Status.TRUNCATED if self._truncated else Status.INVALID_ACTION
            return Verdict(status=status, reward=0.0, error=f"no <{self._tag}>...</{self._tag}> in the answer")
        return score(self._scorer, self.entry, answer.strip(), strict=self._strict, truncated=self._truncated)


class ReasoningGym:
    """The environment; `reasoning_gym_tasks` makes it. Item i is entry i // k of task i mod k, of k tasks."""

    rebuildable = True

    def __init__(self, tasks: list[Task], size: int, template: str, strict: bool, tag: str) -> None:
        self.tasks = tasks
        self.num_items: int | None = size * len(tasks)
        self._template, self._strict, self._tag = template, strict, tag
        # A group opens the same item several times, and some entries take half a second to make.
        self._entry = functools.lru_cache(maxsize=256)(self._make_entry)
        self._lock = threading.Lock()  # sessions are opened from several threads, and some generators keep state

    def payload(self, item: int) -> str:
        """Empty: an entry is a pure function of (config, seed, index)."""
        return ""

    def open(self, item: int, payload: str, seed: int) -> ReasoningGymSession:
        """The session of one item; the session's own seed changes nothing."""
        entry = self._entry(item)
        prompt = fill(self._template, entry)
        scorer = self.tasks[item % len(self.tasks)].dataset.score_answer
        return ReasoningGymSession(prompt, entry, scorer, self._strict, self._tag)

    def _make_entry(self, item: int) -> Any:
        with self._lock:
            return self.tasks[item % len(self.tasks)].dataset[item // len(self.tasks)]


def fill(template: str, entry: Mapping[str, Any]) -> str:
    """The prompt: the template over `question` and the entry's metadata. Raises SettingError.

    >>> fill("{expression}=", {"question": "Calculate 1 + 2.", "metadata": {"expression": "1 + 2"}})
    '1 + 2='
    """
    fields = {**entry["metadata"], "question": entry["question"]}
    try:
        return template.format_map(fields)
    except (KeyError, ValueError, IndexError, AttributeError, TypeError) as error:
        missing = nearest(str(error.args[0]), fields) if isinstance(error, KeyError) else str(error)
        raise SettingError(f"environment 'reasoning-gym': cannot fill the template {template!r}; {missing}") from error


def reasoning_gym_tasks(
    seed: int,
    *,
    task: str = "",
    config: dict[str, Any] | None = None,
    tasks: dict[str, dict[str, Any]] | None = None,
    size: int = 10_000,
    template: str = "{question}",
    strict: bool = False,
    tag: str = "",
    allow_holes: bool = False,
) -> ReasoningGym:
    """One `task` with its `config`, or several `tasks` (name = its config) in turn, each of `size` entries.

    template: the prompt, over `question` and the entry's metadata, e.g. "{expression}=".
    strict: a score from 0.99 is 1, anything less is 0. tag: judge only what stands in the last <tag>...</tag>.
    """
    if bool(task) == bool(tasks):
        raise SettingError(
            "environment 'reasoning-gym' needs either 'task' (a name) or 'tasks' (a table: name = config)"
        )
    wanted = tasks or {task: config or {}}
    if tasks and config:
        raise SettingError(
            "environment 'reasoning-gym': with 'tasks', each task's config stands in that table, not in 'config'"
        )
    if size < 1:
        raise SettingError(f"environment 'reasoning-gym': size is {size}; it must be at least 1")
    made = [_make_task(name, own, seed, size, allow_holes) for name, own in wanted.items()]
    return ReasoningGym(made, size, template, strict, tag)


def _make_task(name: str, config: Mapping[str, Any], seed: int, size: int, allow_holes: bool) -> Task:
    if name in HOLES and not allow_holes:
        raise SettingError(
            f"reasoning-gym task {name!r} is refused: {HOLES[name]}, so a policy learns nothing but that; "
            "set allow_holes = true to have it all the same"
        )
    known, create = _library()
    if name not in known:
        raise SettingError(f"reasoning-gym has no task {name!r}; {nearest(name, known)}")
    own_seed = derive_seed(seed, "reasoning-gym", name) % 2**31
    try:
        return Task(name, create(name, **{"seed": own_seed, "size": size, **config}))
    except (TypeError, ValueError, AssertionError) as error:
        raise SettingError(f"reasoning-gym task {name!r} does not take the config {dict(config)!r}: {error}") from error


def _library() -> tuple[list[str], Callable[..., Any]]:
    """Names of all tasks, and the function that makes one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies, when it is first compiled
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise SettingError(
                "environment 'reasoning-gym' needs the extra 'tasks': install offsetrl[tasks]"
            ) from error
    return sorted(DATASETS), reasoning_gym.create_dataset
