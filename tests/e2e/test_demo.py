"""`offsetrl demo` as a newcomer runs it: it passes, says so in JSON and HTML, works again, with two policies, with vLLM."""

from __future__ import annotations

import json
import re

import pytest

from support.demo import Finished, Home

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(1200)]

FIELDS = {
    *("engine", "seconds_to_first_step", "seconds_total", "reward_first", "reward_last", "steps", "versions_published"),
    *("versions_in_trained_tokens", "produced", "trained", "dropped", "dead_lettered", "late", "superseded", "pending"),
    *("unaccounted", "twice", "max_staleness_allowed", "max_staleness_seen", "ok"),
}


def books_close(figures: Finished) -> None:
    found = figures.figures
    assert (found["pending"], found["unaccounted"], found["twice"]) == (0, 0, 0)
    assert found["produced"] == sum(
        found[name] for name in ("trained", "dropped", "dead_lettered", "late", "superseded")
    )
    assert found["trained"] >= 0.8 * found["produced"]


def test_it_passes_from_an_empty_folder(finished: Finished) -> None:
    found = finished.figures
    assert set(found) >= FIELDS
    assert found["ok"] is True and found["engine"] == "transformers"
    assert found["steps"] == 30 and found["versions_published"] == 31
    assert found["versions_in_trained_tokens"] >= 5
    assert 0 <= found["max_staleness_seen"] <= found["max_staleness_allowed"]
    assert found["reward_last"] - found["reward_first"] >= 0.05
    assert 0 < found["seconds_to_first_step"] < found["seconds_total"]
    books_close(finished)


def test_its_servers_went_with_it_and_the_same_command_works_again(home: Home, finished: Finished) -> None:
    assert home.serves or home.left() == []
    again = home.demo("--steps", "12").expect()
    assert again.figures["steps"] == 12
    books_close(again)


def test_the_report_needs_nothing_but_itself(home: Home, finished: Finished) -> None:
    text = (home.folder / "first.html").read_text()
    assert text.count("<svg") == 6 and "<script" not in text and "<link" not in text and "<img" not in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!["']?#)[^"'\s>]+""", re.sub(r"xmlns(:\w+)?=\S+", "", text))
    assert not re.findall(r"url\((?!#)", text) and "@import" not in text
    assert "first" in text and "passed" in text
    shown = re.findall(r'title="version (\d+), log-prob', text)
    assert len(set(shown)) >= 5, "transcripts are coloured by the versions that made them"


def test_what_it_printed_names_steps_checks_and_the_report(finished: Finished) -> None:
    assert "first step trained after" in finished.out and "drained; auditing" in finished.out
    assert "FAIL" not in finished.out and "first.html" in finished.out
    assert "\x1b[" not in finished.out, "plain lines where there is no terminal"


def test_the_audit_says_the_same_afterwards(served: Home, finished: Finished) -> None:
    report = served.folder / "audit.json"
    served.command("audit", "--config", str(finished.config), "--json", str(report)).expect()
    (found,) = json.loads(report.read_text())
    same = ("produced", "trained", "dropped", "late", "superseded", "pending", "unaccounted", "twice", "steps")
    assert {name: found[name] for name in same} == {name: finished.figures[name] for name in same}


def test_two_policies_go_side_by_side_each_at_its_own_pace(served: Home) -> None:
    done = served.demo("--policies", "2", "--steps", "15").expect()
    policies = done.figures["policies"]
    assert set(policies) == {"alpha", "beta"}
    assert all(figures["ok"] and figures["steps"] == 15 and figures["pending"] == 0 for figures in policies.values())
    assert policies["alpha"]["versions_published"] == 16
    assert policies["beta"]["versions_published"] < 16, "it publishes every second step"
    assert done.figures["produced"] == sum(figures["produced"] for figures in policies.values())


def test_it_passes_with_vllm(served: Home) -> None:
    with served.started("--steps", "15", engine="vllm") as running:
        done = running.finish().expect()
    assert done.figures["engine"] == "vllm" and done.figures["versions_in_trained_tokens"] >= 3
    books_close(done)


@pytest.mark.prove
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_at_full_length_it_learns(served: Home, engine: str) -> None:
    with served.started(engine=engine) as running:
        done = running.finish(600).expect()
    found = done.figures
    assert found["reward_first"] <= 0.2 and found["reward_last"] >= 0.45
    assert found["versions_published"] >= 20 and found["versions_in_trained_tokens"] >= 5
    books_close(done)


@pytest.mark.prove
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_passes_with_other_seeds(served: Home, seed: int) -> None:
    books_close(served.demo("--steps", "30", "--set", f"run.seed={seed}").expect())
