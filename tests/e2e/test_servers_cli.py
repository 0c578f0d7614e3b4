"""`offsetrl up`, `status`, `doctor`, `down`, as a user types them, once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.demo import Home, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.broker, pytest.mark.s3]


def test_up_status_doctor_down_and_up_again(tmp_path: Path) -> None:
    home = Home(tmp_path / "servers")  # the default settings: everything goes to the working folder
    (home.folder / "model").mkdir()
    try:
        found = json.loads(home.command("up", "--json").expect().out)
        again = json.loads(home.command("up", "--json").expect().out)
        assert again == found and found["s3_url"].startswith("http://127.0.0.1:")
        status = json.loads(home.command("status", "--json").expect().out)
        assert status["reachable"] is True and all(server["answers"] for server in status["servers"])
        assert "embedded kafka  serves" in home.command("status").expect().out
        checks = json.loads(home.command("doctor", "--json").out)
        assert {check["name"]: check["got"] for check in checks if not check["ok"]} == {}
        assert "stopped: kafka, s3" in home.command("down").expect().out
        wait_until(lambda: not home.left(), f"the end of {home.left()}")
        assert "nothing was running" in home.command("down").expect().out
        stopped = home.command("doctor").expect(1).out
        assert "BAD" in stopped and "offsetrl up" in stopped
        assert json.loads(home.command("up", "--json").expect().out) == found, "the same ports as before"
    finally:
        home.command("down")
    wait_until(lambda: not home.left(), f"the end of {home.left()}")
