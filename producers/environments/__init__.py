"""Environments by name. Importing this package imports none of them.

| name | what |
|---|---|
| sort-digits | sort n digits; endless, generated from the seed |
| reasoning-gym | the generated tasks of the reasoning-gym package, with guarded scorers |
| calculator | a sum to work out with a calculator as a tool; several turns, endless |
| prompts | your own prompts from a JSONL or Parquet file, with a reward function of your own |

One of your own is given as `package.module:name`: a function `(seed: int, *, <settings>) -> Environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from producers.environment import Environment
from schemas.components import check_settings, load
from schemas.errors import SettingError

ENVIRONMENTS: Mapping[str, str] = {
    "sort-digits": "producers.environments.sort_digits:sort_digits",
    "reasoning-gym": "producers.environments.reasoning_gym_tasks:reasoning_gym_tasks",
    "calculator": "producers.environments.calculator:calculator",
    "prompts": "producers.environments.prompts:prompts",
}


def make_environment(name: str, settings: Mapping[str, Any], seed: int) -> Environment:
    """The environment `name` with these settings; `seed` is the run's. Raises SettingError.

    Reads no prompt file yet, so that a worker elsewhere needs none: see `check_environment`.
    """
    factory = load("environment", name, ENVIRONMENTS)
    return cast(Environment, factory(seed, **check_settings("environment", name, factory, settings)))


def check_environment(name: str, settings: Mapping[str, Any], seed: int) -> Environment:
    """The environment, after it has read all its data and opened its first item. Raises SettingError.

    For whoever starts a run: a broken line of a prompt file is met here, before anything is asked of a worker.
    """
    environment = make_environment(name, settings, seed)
    if environment.num_items is not None and environment.num_items < 1:
        raise SettingError(f"environment {name!r} has no items; it needs at least one")
    environment.open(0, environment.payload(0), seed).observe()
    return environment
