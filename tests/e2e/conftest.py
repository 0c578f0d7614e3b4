"""One folder with servers for all demos of a session, and one finished run in it that several tests look at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.demo import Finished, Home, wait_until

STEPS = 30


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """The shared folder; the first demo in it starts its own servers, as a newcomer's does."""
    home = Home(tmp_path_factory.mktemp("home"))
    yield home
    end(home)


@pytest.fixture(scope="session")
def finished(home: Home) -> Finished:
    """A whole demo with the light engine, from an empty folder, that passed."""
    return home.demo("--steps", str(STEPS), run="first").expect()


@pytest.fixture(scope="session")
def served(home: Home, finished: Finished) -> Home:
    """The shared folder with its servers up, so that further demos need not start and stop them."""
    home.command("up", "--config", str(finished.config)).expect()
    home.serves = True
    return home


@pytest.fixture
def fresh(tmp_path: Path, home: Home, finished: Finished) -> Iterator[Home]:
    """A folder of its own, without servers, with the model made already; nothing of it may be left running."""
    fresh = Home(tmp_path / "fresh")
    shutil.copytree(home.folder / "models", fresh.folder / "models")
    yield fresh
    end(fresh)


def end(home: Home) -> None:
    """Stop its servers; then nothing of it may be left."""
    if (home.folder / "state").exists():
        home.command("down", "--set", f'embedded.state="{home.folder / "state"}"').expect()
    wait_until(lambda: not home.left(), f"the end of {home.left()}")


@pytest.fixture(autouse=True)
def _no_daemon_is_left(home: Home) -> Iterator[None]:
    """After each test, servers may still run in the shared folder; daemons may not."""
    yield
    wait_until(lambda: not home.daemons(), f"the end of {home.daemons()}")
