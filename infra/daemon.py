"""What a daemon is given, and the edge around it: settings, checks, wiring, signals, exit codes.

A daemon's module has `def run(daemon: Daemon) -> int`; the command line names it as `module:function`, so that nothing
of it is imported before it runs.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from infra import logs
from infra.config import Loaded, load, secrets
from infra.lifecycle import Exit, Stop, die_with_parent, exit_code, one_home
from infra.log import Log
from infra.secrecy import redact
from infra.settings import PolicyTable, Settings
from infra.store import ObjectStore
from schemas.errors import OffsetRLError, SettingError
from schemas.names import check_name, nearest


@dataclass(frozen=True)
class Daemon:
    """One process: one role of one policy, with everything it may speak to."""

    settings: Settings
    policy: str
    name: str
    """Of this process; workers of a policy differ in it."""
    region: str
    """"" is the home of the trainers."""
    log: Log
    store: ObjectStore
    """The region's own bucket."""
    stop: Stop

    @property
    def table(self) -> PolicyTable:
        """The settings of this daemon's policy."""
        return self.settings.policies[self.policy]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says, as plain data."""

    config: Path | None = None
    overrides: Sequence[str] = ()
    policy: str = ""
    name: str = ""
    region: str = ""
    verbosity: int = 0


def resolve(target: str) -> Callable[..., Any]:
    """The function behind `package.module:name`. Raises SettingError with the name that is missing."""
    module_name, _, function = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        extra = {"torch": "train", "accelerate": "train", "transformers": "train", "vllm": "rollout-cpu"}
        hint = f": pip install 'offsetrl[{extra[error.name]}]'" if error.name in extra else ""
        raise SettingError(f"{target} needs the package {error.name!r}, which is not installed{hint}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise SettingError(f"{module_name} has no function {function!r}")
    return found  # type: ignore[no-any-return]  # a callable of unknown shape


def choose_policy(settings: Settings, policy: str) -> str:
    """The policy asked for; the only one when none is. Raises SettingError."""
    if not policy and len(settings.policies) == 1:
        return next(iter(settings.policies))
    if policy not in settings.policies:
        asked = f"there is no policy {policy!r}" if policy else "this run has several policies: choose with --policy"
        raise SettingError(f"{asked}; {nearest(policy, settings.policies)}")
    return policy


def main(target: str, role: str, options: Options, **wanted: Any) -> int:
    """Run a daemon until it ends; returns the exit code, see `infra.lifecycle`. `wanted` is passed to its function."""

    def body() -> int:
        die_with_parent()
        one_home()
        stop = Stop()
        stop.install()
        loaded = load(options.config, options.overrides)
        return _run(resolve_later(target, **wanted), role, options, loaded, stop)

    return edge(body)


def resolve_later(target: str, **wanted: Any) -> Callable[[Daemon], int]:
    """The daemon's function, imported at its first call: settings are checked before torch or vLLM is imported."""
    return lambda daemon: int(resolve(target)(daemon, **wanted))


def _run(body: Callable[[Daemon], int], role: str, options: Options, loaded: Loaded, stop: Stop) -> int:
    from infra import preflight, wiring  # kafka and boto3 come with these
    from infra.writers import Following

    settings = loaded.settings
    redact.add(secrets(settings))
    policy = choose_policy(settings, options.policy)
    name = check_name("daemon", options.name or default_name(role))
    fields = {"role": role, "run": settings.run.name, "policy": policy, "name": name}
    logs.configure(options.verbosity, {**fields, "region": options.region} if options.region else fields)
    preflight.check_settings(settings, policy, role, options.region)
    preflight.check_services(settings, options.region)
    log = wiring.open_log(settings, client_id=f"{role}-{name}")
    try:
        store = wiring.open_store(settings, options.region)
        preflight.check_connected(log, store, settings, options.region)
        logger = structlog.get_logger("offsetrl")
        logger.info("started")
        with Following(log, settings):
            code = body(Daemon(settings, policy, name, options.region, log, store, stop))
        logger.info("ended", exit_code=code)
        return code
    finally:
        log.close()


def default_name(role: str) -> str:
    """Name of a process where none is given: the role's; where there may be several, the machine's and the pid.

    >>> default_name("train")
    'train'
    """
    if role not in ("rollout", "eval"):
        return role
    host = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in socket.gethostname().lower())
    return f"{host.strip('-')[:50] or role}-{os.getpid()}"


def edge(body: Callable[[], int]) -> int:
    """Run a command; errors of our tree become one message and their exit code, bugs keep their traceback."""
    try:
        return int(body())
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except OffsetRLError as error:
        sys.stderr.write(redact(f"offsetrl: {type(error).__name__}: {error}") + "\n")
        return exit_code(error)
    except Exception:  # noqa: BLE001  # a daemon's edge: whatever is left is a bug of ours
        sys.stderr.write(redact(traceback.format_exc()) + "offsetrl: this is a bug, please report the lines above\n")
        return Exit.BUG
