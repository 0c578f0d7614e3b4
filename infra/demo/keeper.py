"""Starts the embedded servers again when one of them dies under the demo; its daemons wait for it meanwhile."""

from __future__ import annotations

import time

from infra import wiring
from infra.settings import Settings

_LOOK_EVERY_S = 1.0


class Keeper:
    """Looks after the embedded servers of a run; servers of the user's own are the user's."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._looked_s = time.monotonic()

    def tend(self) -> list[str]:
        """Names of the servers that had died and serve again now; waits for them."""
        now = time.monotonic()
        if now - self._looked_s < _LOOK_EVERY_S:
            return []
        self._looked_s = now
        dead = self._dead()
        if dead:
            wiring.endpoints(self._settings, start=True)
        return dead

    def _dead(self) -> list[str]:
        from infra.embedded import servers

        return servers.dead(self._settings.embedded.state, wiring.embedded(self._settings))
