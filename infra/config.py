"""Reads the settings of a run: defaults < TOML file < environment < `--set`, strictly, with the origin of every value.

- Environment: `OFFSETRL_RUN__NAME`, `OFFSETRL_POLICIES__MAIN__TRAIN__STEPS` (a `_` in a policy's or region's name means
  `-`). `KAFKA_BOOTSTRAP_SERVERS` is accepted, below `OFFSETRL_KAFKA__BOOTSTRAP_SERVERS`.
- `--set policies.main.train.learning_rate=0`; `policies.*.` means all policies.
- Values from environment and `--set` are read as TOML where a number, switch, list or table is wanted, and are taken as
  they stand where text is wanted. Nothing is converted between text and numbers: `group_size = "8"` is refused in every layer.
- Relative paths start at the TOML file's folder, whichever layer gives them.
- Secrets are taken from the environment alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr, ValidationError

from infra.config_errors import dotted, explain, report
from infra.config_keys import Key, is_text, locate, path_defaults
from infra.secrecy import MASK, is_secret, mask_url
from infra.settings import Settings
from schemas.errors import SettingError

DEFAULT = "default"
_PREFIX = "OFFSETRL_"
_SECRET_TABLES = ("kafka", "s3", "regions")
_FILE_KEY = re.compile(r"(^|_)(path|file|folder)$")


class Leaf(NamedTuple):
    """A value and the layer that gave it; `text` where it still has to be read."""

    value: Any
    origin: str
    text: bool = False


Leaves = dict[Key, Leaf]


@dataclass(frozen=True)
class Loaded:
    """Settings, and where each value came from (by dotted key)."""

    settings: Settings
    origins: Mapping[str, str]
    path: Path | None


def load(path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Loaded:
    """Read and check all layers. Raises SettingError that lists every wrong setting in a sentence.

    Without a file (None): the defaults, with one policy `main` whose model folder is `model`.
    """
    environ = os.environ if environ is None else environ
    folder = (path.parent if path else Path()).resolve()
    leaves: Leaves = {key: Leaf(value, DEFAULT) for key, value in path_defaults().items()}
    if path is None:
        leaves["policies", "main", "model"] = Leaf("model", DEFAULT)
    else:
        _lay(leaves, _file_leaves(path))
    _lay(leaves, _environment_leaves(environ))
    for override in overrides:
        _lay(leaves, _override_leaves(override, leaves))
    settings = _validate(leaves, folder)
    origins = {dotted(key): _origin(key, leaves) for key, _ in flat(settings)}
    return Loaded(settings, origins, path)


def flat(settings: Settings) -> list[tuple[Key, Any]]:
    """Every value with its key, in the order of the tables."""
    return list(_flatten(settings.model_dump()))


def shown(key: Key, value: Any) -> Any:
    """A value as it may be printed: secrets masked, paths as text."""
    if isinstance(value, SecretStr) or (value not in (None, "") and is_secret(key)):
        return MASK
    if isinstance(value, (list, tuple)):
        return [shown(key, item) for item in value]
    if isinstance(value, dict):
        return {name: shown((*key, str(name)), item) for name, item in value.items()}
    return mask_url(str(value)) if isinstance(value, (str, Path)) else value


def masked(settings: Settings) -> dict[str, Any]:
    """All settings as plain nested data that may be printed."""
    return _nest({key: shown(key, value) for key, value in flat(settings)})


def secrets(settings: Settings) -> list[str]:
    """Every secret value in the settings, for `infra.secrecy.redact`. An access key is a name, not a secret."""
    found = [(key, value) for key, value in flat(settings) if is_secret(key) and key[-1] != "access_key"]
    texts = [value.get_secret_value() if isinstance(value, SecretStr) else str(value) for _, value in found if value]
    file = settings.kafka.sasl_password_file
    return [*texts, read_secret(file)] if file else texts


def read_secret(path: Path) -> str:
    """The content of a password file, without the line end."""
    try:
        return path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"kafka.sasl_password_file: cannot read {path} ({type(error).__name__})") from None


def config_digest(settings: Settings, policy: str) -> str:
    """SHA-256 over what shapes a policy's results: run name, seed, partitions and the policy's table.

    Left out: endpoints, secrets, local folders and the model's path (version 0's manifest names the model by content).
    """
    content = {
        "run": settings.run.model_dump(mode="json", include={"name", "seed", "partitions"}),
        "policy": settings.policies[policy].model_dump(mode="json", exclude={"model"}),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_leaves(path: Path) -> Leaves:
    try:
        text = path.read_text(encoding="utf-8-sig")
        tree = tomllib.loads(text)
    except FileNotFoundError:
        raise SettingError(f"there is no settings file {path}: give one with --config FILE") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not a valid TOML file: {error}") from None
    except OSError as error:
        raise SettingError(f"cannot read the settings file {path}: {error.strerror}") from None
    return {key: Leaf(value, f"file {path.name}") for key, value in _flatten(tree)}


def _environment_leaves(environ: Mapping[str, str]) -> Leaves:
    leaves: Leaves = {}
    if servers := environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        leaves["kafka", "bootstrap_servers"] = Leaf(servers, "environment KAFKA_BOOTSTRAP_SERVERS", text=True)
    for name in sorted(environ):
        if name.startswith(_PREFIX) and "__" in name:
            parts = name.removeprefix(_PREFIX).lower().split("__")
            if len(parts) > 1 and parts[0] in ("policies", "regions"):
                parts[1] = parts[1].replace("_", "-")
            leaves[tuple(parts)] = Leaf(environ[name], f"environment {name}", text=True)
    return leaves


def _override_leaves(override: str, below: Leaves) -> Leaves:
    name, equals, text = override.partition("=")
    try:
        if not equals:
            raise tomllib.TOMLDecodeError("no '='")
        ((key, _),) = _flatten(tomllib.loads(name.strip().replace(".*.", '."*".') + " = 0"))
    except (tomllib.TOMLDecodeError, ValueError):
        shown_name = name.strip() or "nothing"
        raise SettingError(f"--set takes KEY=VALUE such as run.seed=7, and got {shown_name!r} as its key") from None
    keys = [key]
    if key[:2] == ("policies", "*"):
        names = dict.fromkeys(known[1] for known in below if known[0] == "policies" and len(known) > 1)
        keys = [("policies", policy, *key[2:]) for policy in names]
    return {key: Leaf(text.strip(), "--set", text=True) for key in keys}


def _lay(below: Leaves, above: Leaves) -> None:
    """Put a layer on top: a value replaces whatever stood at, under or above its key."""
    for key, leaf in above.items():
        for old in [old for old in below if old[: len(key)] == key or old == key[: len(old)]]:
            del below[old]
        below[key] = leaf


def _validate(leaves: Leaves, folder: Path) -> Settings:
    problems: list[str] = []
    values: dict[Key, Any] = {}
    for key, leaf in leaves.items():
        place = locate(key)
        if isinstance(place, str):
            problems.append(f"{place} ({leaf.origin})")
            continue
        if is_secret(key) and key[0] in _SECRET_TABLES and not leaf.origin.startswith("environment"):
            problems.append(_misplaced(key, leaf.origin))
            continue
        value = _read(leaf.value, place.annotation) if leaf.text else leaf.value
        in_task = "task" in key[:-1] and bool(_FILE_KEY.search(key[-1]))
        if isinstance(value, str) and value and (place.is_path or in_task):
            value = str(folder / Path(value).expanduser())
        values[key] = value
    if problems:
        raise report(problems)
    _name_buckets(values)
    try:
        # JSON mode is strict about types and still takes text for a path and a list for a tuple
        return Settings.model_validate_json(json.dumps(_nest(values), default=str), strict=True)
    except ValidationError as error:
        origins = {key: leaf.origin for key, leaf in leaves.items()}
        raise report([explain(dict(item), origins) for item in error.errors(include_url=False)]) from None


def _name_buckets(values: dict[Key, Any]) -> None:
    """Give each region on the embedded store a bucket named after it, unless one is set."""
    home = values.get(("s3", "bucket"), Settings.model_fields["s3"].get_default(call_default_factory=True).bucket)
    for name in {key[1] for key in values if key[0] == "regions" and len(key) > 1}:
        own = values.get(("regions", name, "endpoint_url")) or values.get(("regions", name, "aws"))
        if not own and values.get(("regions", name), {}) == {}:
            values.pop(("regions", name), None)  # [regions.NAME] without a line
            values.setdefault(("regions", name, "bucket"), f"{home}-{name}")


def _misplaced(key: Key, origin: str) -> str:
    variable = _PREFIX + "__".join(re.sub(r"\W", "_", part).upper() for part in key)
    return f"{dotted(key)} is a secret and may not come from {origin}: put it in the environment as {variable}"


def _read(text: str, annotation: Any) -> Any:
    """A value from environment or command line: text where text is wanted, else TOML, else the text itself."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if set(tree) != {"value"} or (is_text(annotation) and not isinstance(tree["value"], str)):
        return text
    return tree["value"]


def _flatten(tree: Mapping[str, Any], prefix: Key = ()) -> list[tuple[Key, Any]]:
    leaves: list[tuple[Key, Any]] = []
    for name, value in tree.items():
        key = (*prefix, str(name))
        leaves += _flatten(value, key) if isinstance(value, Mapping) and value else [(key, value)]
    return leaves


def _nest(values: Mapping[Key, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        table = tree
        for name in key[:-1]:
            table = table.setdefault(name, {})
        table[key[-1]] = value
    return tree


def _origin(key: Key, leaves: Leaves) -> str:
    """The layer of a value; an empty table such as `[regions.east]` gives none of the values in it."""
    above = (key[:end] for end in range(len(key), 0, -1))
    return next(
        (leaves[part].origin for part in above if part in leaves and (part == key or leaves[part].value != {})), DEFAULT
    )
