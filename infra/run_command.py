"""`offsetrl run`: every role of a run's policies as processes on this machine, until the run has ended or you stop it.

The same daemons as on many machines, under `infra.supervisor`: what dies is started again, nothing is left behind.
Stopped with Ctrl-C or SIGTERM it drains; started again it goes on where the log and the checkpoints say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from infra import preflight, provision, wiring
from infra.audit_command import audit_policy, show
from infra.config import load
from infra.demo.children import children
from infra.demo.loop import drain, watch_until_done
from infra.demo.run import Run
from infra.demo.view import View
from infra.demo.watch import Watch
from infra.lifecycle import Stop
from infra.supervisor import Supervisor


def command(
    config: Path, overrides: Sequence[str], *, json_path: Path | None = None, stall_s: float | None = None
) -> int:
    """Run until done or stopped; then the accounts. 0 when the books close."""
    stop = Stop()
    stop.install()
    settings = load(config, list(overrides)).settings
    engines = sorted({table.rollout.engine for table in settings.policies.values()})
    run = Run(settings, config.resolve(), settings.run.folder, ", ".join(engines), 0, time.monotonic())
    for policy, table in settings.policies.items():
        for role in ("dispatch", "rollout", "process", "train", *(("eval",) if table.eval.every else ())):
            preflight.check_settings(settings, policy, role)
    wiring.endpoints(settings, start=True)
    preflight.check_services(settings)
    log = wiring.open_log(settings, client_id="run")
    try:
        provision.ensure(log, settings)
        with View(f"OffsetRL · run {run.name} · engine {run.engine}") as view:
            watch = Watch(log, settings, run.started_s)
            try:
                with Supervisor(children(run, overrides)) as supervisor:
                    stop.on_abort(supervisor.kill)
                    view.say(f"daemons started; their logs are in {run.folder / 'logs' / run.name}")
                    watch_until_done(run, view, watch, supervisor, stop, math.inf if stall_s is None else stall_s)
                    view.say(f"{watch.ending if watch.done else 'stopping'}; draining")
                    drain(run, log, supervisor, watch, view)
            finally:
                watch.close()
        return show([audit_policy(log, settings, policy) for policy in settings.policies], json_path)
    finally:
        log.close()
