"""The engines under test: vLLM takes seconds to start, so each kind of model has one engine for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.engine_bench import Bench


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An engine by (name, tied embeddings); a test leaves it idle."""
    bench = Bench(*request.param)
    yield bench
    bench.close()


@pytest.fixture(autouse=True)
def _left_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "bench" in request.fixturenames:
        request.getfixturevalue("bench").check_left_idle()
