"""Curricula by name. Importing this package imports none of them.

| name | what |
|---|---|
| in-order | the items as they stand, pass after pass |
| shuffled | every item once a pass, each pass in a seeded order of its own |
| skip-solved | shuffled, but an item that was solved again and again rests for a while |
| difficulty-band | mostly items whose mean reward lies within a band, the rest shuffled |

One of your own is given as `package.module:name`: a function `(draw, history, *, <settings>) -> item`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, cast

from producers.curriculum import Curriculum, Draw, History
from schemas.components import check_settings, load

CURRICULA: Mapping[str, str] = {
    "in-order": "producers.curricula.in_order:in_order",
    "shuffled": "producers.curricula.shuffled:shuffled",
    "skip-solved": "producers.curricula.skip_solved:skip_solved",
    "difficulty-band": "producers.curricula.difficulty_band:difficulty_band",
}


def make_curriculum(name: str, settings: Mapping[str, Any]) -> Curriculum:
    """The curriculum `name` with these settings, after a first draw, which may refuse them. Raises SettingError."""
    function = load("curriculum", name, CURRICULA)
    found = cast(Curriculum, functools.partial(function, **check_settings("curriculum", name, function, settings)))
    found(Draw(number=0, num_items=1, seed=0), History(0, 1))
    return found
