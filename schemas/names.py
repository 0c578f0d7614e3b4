"""Names: of runs, policies, topics, keys in the store; every naming decision in one pure file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from schemas.errors import SettingError

NAME_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
_NAME = re.compile(NAME_PATTERN)
_HEX = re.compile(r"^[0-9a-f]{64}$")


def check_name(kind: str, name: str) -> str:
    """Return `name` if it may stand in topics and keys, else raise SettingError.

    >>> check_name("policy", "solver-2")
    'solver-2'
    """
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"{kind} name {name!r} is not allowed: use 1 to 63 of a-z, 0-9 and '-', starting with a letter or digit"
        )
    return name


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name.

    >>> nearest("learning_rat", ["learning_rate", "loss"])
    "did you mean 'learning_rate'? known: learning_rate, loss"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


KINDS = ("requests", "trajectories", "partials", "samples", "steps", "weights", "dead-letters", "evals")


def topic(run: str, policy: str, kind: str) -> str:
    """Topic of one policy.

    >>> topic("demo", "main", "samples")
    'demo.main.samples'
    """
    assert kind in KINDS, kind
    return f"{check_name('run', run)}.{check_name('policy', policy)}.{kind}"


def control_topic(run: str) -> str:
    """Registry, heartbeats, claims for the eye.

    >>> control_topic("demo")
    'demo.control'
    """
    return f"{check_name('run', run)}.control"


def schemas_topic(run: str) -> str:
    """Writer schemas by fingerprint."""
    return f"{check_name('run', run)}.schemas"


def weights_prefix(run: str, policy: str) -> str:
    """Where a policy's weights stand in the bucket."""
    return f"{check_name('run', run)}/{check_name('policy', policy)}"


def blob_key(run: str, policy: str, sha256: str) -> str:
    """Key of a blob, by its content."""
    if not _HEX.fullmatch(sha256):
        raise SettingError(f"blob digest {sha256!r} is not a SHA-256 in lower-case hex")
    return f"{weights_prefix(run, policy)}/blobs/{sha256}"


def manifests_prefix(run: str, policy: str) -> str:
    """Where manifests stand; listed by readers that have the bucket alone."""
    return f"{weights_prefix(run, policy)}/manifests/"


def manifest_key(run: str, policy: str, epoch: int, version: int) -> str:
    """Key of a version's manifest.

    >>> manifest_key("demo", "main", 2, 31)
    'demo/main/manifests/2-31.json'
    """
    return f"{manifests_prefix(run, policy)}{epoch}-{version}.json"


_MANIFEST = re.compile(r"/manifests/(\d{1,10})-(\d{1,12})\.json$")


def parse_manifest_key(key: str) -> tuple[int, int] | None:
    """(epoch, version) of a manifest's key; None for any other key.

    >>> parse_manifest_key("demo/main/manifests/2-31.json")
    (2, 31)
    """
    match = _MANIFEST.search(key)
    return (int(match[1]), int(match[2])) if match else None


def commit_group(run: str, policy: str, role: str) -> str:
    """Name under which a daemon stores its positions."""
    return f"{check_name('run', run)}.{check_name('policy', policy)}.{check_name('role', role)}"
