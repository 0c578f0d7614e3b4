"""`offsetrl demo`: starts everything, watches it learn, drains, audits, checks itself, reports.

Child processes: per policy a dispatcher, a rollout worker, a processor and a trainer, under `infra.supervisor`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from infra import preflight, provision, wiring
from infra.audit_command import audit_policy
from infra.config import load
from infra.demo import checks, recipe
from infra.demo.children import children, make_model
from infra.demo.loop import STALL_S, drain, watch_until_done
from infra.demo.run import Run
from infra.demo.view import View
from infra.demo.watch import Watch
from infra.lifecycle import Exit, Stop
from infra.settings import Settings
from infra.supervisor import Supervisor
from schemas.errors import DeadlineExceeded, OffsetRLError
from schemas.names import check_name


def command(
    overrides: Sequence[str],
    *,
    run: str,
    engine: str,
    policies: int,
    steps: int,
    folder: Path,
    json_path: Path | None,
    stall_s: float = STALL_S,
) -> int:
    """Run the demo; 0 when every check holds."""
    started = time.monotonic()
    stop = Stop()
    stop.install()
    engine = recipe.choose_engine(engine)
    run = check_name("run", run or time.strftime("demo-%m%d-%H%M%S"))
    steps = steps or recipe.STEPS
    folder = folder.resolve()
    config = recipe.write(folder, run=run, engine=engine, policies=policies, steps=steps)
    settings = load(config, list(overrides)).settings
    demo = Run(settings, config, folder, engine, steps, started)
    was_up = _embedded_up(settings)
    with View(f"OffsetRL demo · run {run} · engine {engine}") as view:
        view.say(
            f"run {run}, engine {engine}, {policies} polic{'y' if policies == 1 else 'ies'}, {steps} steps; settings in {_short(config)}"
        )
        try:
            return _through(demo, view, stop, json_path, list(overrides), stall_s)
        finally:
            if not was_up:
                _down(settings)


def _through(demo: Run, view: View, stop: Stop, json_path: Path | None, overrides: list[str], stall_s: float) -> int:
    _prepare(demo, view)
    log = wiring.open_log(demo.settings, client_id="demo")
    try:
        provision.ensure(log, demo.settings)
        watch = Watch(log, demo.settings, demo.started_s)
        failure: OffsetRLError | None = None
        try:
            with Supervisor(children(demo, overrides)) as supervisor:
                view.say("dispatcher, rollout worker, processor and trainer started")
                watch_until_done(demo, view, watch, supervisor, stop, stall_s)
                if not stop.requested:
                    view.say(f"{watch.ending}; draining")
                    drain(demo, log, supervisor, watch, view)
        except OffsetRLError as error:
            failure = error
        finally:
            watch.close()
        if stop.requested:
            raise DeadlineExceeded("interrupted before the end of the run")
        view.say("gave up; auditing" if failure else "drained; auditing")
        demo.audits = {policy: audit_policy(log, demo.settings, policy) for policy in demo.settings.policies}
        code = _finish(demo, view, watch, json_path, failure)
        if failure is not None:
            raise failure
        return code
    finally:
        log.close()


# Before ------------------------------------------------------------------------------------------------------------


def _prepare(demo: Run, view: View) -> None:
    """What can be refused before anything starts; then servers and models, at the same time; then what these tell."""
    for policy in demo.settings.policies:
        for role in ("dispatch", "rollout", "process"):
            preflight.check_settings(demo.settings, policy, role)
    preflight.check_given_services(demo.settings)
    _check_embedded(demo.settings)
    with ThreadPoolExecutor(1) as pool:
        servers = pool.submit(wiring.endpoints, demo.settings, start=True)
        for policy, table in demo.settings.policies.items():
            make_model(table.model, seed=demo.settings.run.seed)
            view.say(f"model of {policy}: {_short(table.model)}")
        found = servers.result()
    kind = "embedded " if found.embedded_kafka else ""
    view.say(f"{kind}broker at {found.bootstrap_servers}, object store at {found.s3_url or 'AWS'}")
    preflight.check_services(demo.settings)
    preflight.check_run(demo.settings)


def _check_embedded(settings: Settings) -> None:
    from infra.embedded import servers

    servers.check(settings.embedded, wiring.embedded(settings))


def _embedded_up(settings: Settings) -> bool:
    from infra.embedded import servers

    return any(status.pid is not None for status in servers.status(settings.embedded.state))


def _down(settings: Settings) -> None:
    from infra.embedded import servers

    servers.down(settings.embedded.state)


# After -------------------------------------------------------------------------------------------------------------


def _finish(demo: Run, view: View, watch: Watch, json_path: Path | None, failure: OffsetRLError | None) -> int:
    """Hold the figures against the checks, write report and JSON. `failure`: what ended the run too early."""
    by_policy = {
        policy: checks.policy_facts(found, max_staleness=demo.settings.policies[policy].train.max_staleness)
        for policy, found in demo.audits.items()
    }
    findings = {policy: checks.check(policy, figures, steps=demo.steps) for policy, figures in by_policy.items()}
    if failure is not None:
        for entries in findings.values():
            entries.insert(0, checks.Finding("runs to its end", False, str(failure)))
    good = all(finding.ok for entries in findings.values() for finding in entries)
    result: dict[str, Any] = {
        "run": demo.name,
        "engine": demo.engine,
        "seconds_to_first_step": round(demo.seconds_to_first_step, 2),
        "seconds_total": round(time.monotonic() - demo.started_s, 2),
        **checks.combine(by_policy),
        "ok": good,
        "policies": by_policy,
        "checks": {policy: [finding._asdict() for finding in entries] for policy, entries in findings.items()},
    }
    for policy, entries in findings.items():
        for finding in entries:
            view.say(
                f"{'ok  ' if finding.ok else 'FAIL'} {policy}: {finding.name}: {finding.said}",
                "" if finding.ok else "red",
            )
    path = _report(demo, view, watch, result)
    if json_path is not None:
        json_path.write_text(json.dumps(_plain(result), indent=2, allow_nan=False) + "\n")
    view.say(
        f"{'passed' if good else 'failed'} after {result['seconds_total']:.0f} s"
        + (f"; report: {_short(path)}" if path else "")
    )
    return Exit.OK if good else Exit.FAILED


def _plain(value: Any) -> Any:
    """A value as JSON knows it: what is no number, because there was no step to take it from, becomes null."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _report(demo: Run, view: View, watch: Watch, result: Mapping[str, Any]) -> Path | None:
    """The HTML report, where the extra for it is installed."""
    try:
        from infra.demo import report
    except ModuleNotFoundError as error:
        view.say(f"no report: {error.name} is not installed; pip install 'offsetrl[report]'")
        return None
    path = demo.folder / f"{demo.name}.html"
    report.write(path, demo=demo, watch=watch, result=result)
    return path


def _short(path: Path) -> str:
    """A path as seen from here, where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
