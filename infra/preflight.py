"""Checks before anything starts: each failure is one clear sentence within seconds, and nothing was begun.

In order of cost: settings alone, local files, whether servers answer at all, then what they answer.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from infra import provision, wiring
from infra.log import Log
from infra.settings import PolicyTable, Settings
from infra.store import ObjectStore
from schemas.components import load
from schemas.errors import BrokerError, SettingError, StoreError

LEAST_FREE_BYTES = 512 * 1024**2
CONNECT_TIMEOUT_S = 3.0
ENVIRONMENT_CHECK = "producers.environments:check_environment"
CURRICULUM_CHECK = "producers.curricula:make_curriculum"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
_MODEL_ROLES = ("train",)
_TASK_ROLES = ("dispatch", "eval")
_ENGINE_ROLES = ("rollout", "eval")


def check_settings(settings: Settings, policy: str, role: str, region: str = "") -> None:
    """What can be told from settings and local files for one role. Raises SettingError.

    Only a trainer needs the model's folder and only who draws items the task's files: workers elsewhere have neither.
    """
    wiring.region_table(settings, region)
    table = settings.policies[policy]
    if role in _MODEL_ROLES:
        check_model(table.model, f"policies.{policy}.model")
    if role in (*_MODEL_ROLES, *_TASK_ROLES):
        check_sampling(table, policy)
    if role in _TASK_ROLES:
        check_task(table, settings.run.seed, policy)
    if role in _ENGINE_ROLES:
        check_engine(table, policy)
    if role in (*_MODEL_ROLES, *_ENGINE_ROLES):
        check_disk(settings.run.folder)


def check_run(settings: Settings) -> None:
    """Everything of every policy, for a machine that runs all roles (the demo). Raises SettingError."""
    for policy in settings.policies:
        for role in ("train", "dispatch"):
            check_settings(settings, policy, role)


def check_model(folder: Path, setting: str) -> None:
    """The folder holds a model in the Hugging Face layout: config.json, weights and a tokenizer. Raises SettingError."""
    advice = "make one with `offsetrl model new FOLDER`, or download one in the Hugging Face layout"
    if not folder.is_dir():
        raise SettingError(f"{setting}: there is no model folder {folder}: {advice}")
    config = folder / "config.json"
    if not config.is_file():
        raise SettingError(f"{setting}: {folder} has no config.json, so it is no model: {advice}")
    try:
        shape = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"{setting}: {config} cannot be read as JSON ({error})") from None
    if not isinstance(shape, dict) or not shape.get("model_type"):
        raise SettingError(f"{setting}: {config} names no model_type: {advice}")
    if not any(folder.glob("*.safetensors")):
        other = ", ".join(sorted(path.name for path in [*folder.glob("*.bin"), *folder.glob("*.pt")]))
        found = f" (found {other}: these can run code when loaded and are refused; convert them)" if other else ""
        raise SettingError(f"{setting}: {folder} has no weights in *.safetensors{found}")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise SettingError(
            f"{setting}: {folder} has no tokenizer: put tokenizer.json and tokenizer_config.json beside config.json"
        )


def check_sampling(table: PolicyTable, policy: str) -> None:
    """Sampling that cuts or bends the distribution cannot be trained on: log-probs would be of another one."""
    sampling = table.sampling
    wanted = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
    for name, (got, want) in wanted.items():
        if got != want:
            raise SettingError(
                f"policies.{policy}.sampling.{name} is {got}, and training needs {want}: sampling that leaves out "
                "tokens makes log-probs of another distribution than the trainer's"
            )
    if sampling.max_tokens >= table.rollout.max_model_len:
        raise SettingError(
            f"policies.{policy}.sampling.max_tokens ({sampling.max_tokens}) must be less than rollout.max_model_len "
            f"({table.rollout.max_model_len}), which holds the prompt as well"
        )


def check_task(table: PolicyTable, seed: int, policy: str) -> None:
    """The environment is known and has read its data: a broken line of a prompt file is met here. Raises SettingError."""
    try:
        load("check", ENVIRONMENT_CHECK, {})(table.task.environment, table.task.settings, seed)
        load("check", CURRICULUM_CHECK, {})(table.task.curriculum, table.task.curriculum_settings)
    except SettingError as error:
        raise SettingError(f"policies.{policy}.task: {error}") from error


def check_engine(table: PolicyTable, policy: str) -> None:
    """The packages of the engine are installed. Raises SettingError."""
    packages = {"vllm": "rollout-cpu", "transformers": "rollout"}
    engine = table.rollout.engine
    if engine in packages and importlib.util.find_spec(engine) is None:
        raise SettingError(
            f"policies.{policy}.rollout.engine is {engine!r}, which is not installed: "
            f"pip install 'offsetrl[{packages[engine]}]'"
        )


def check_disk(folder: Path) -> None:
    """There is room for checkpoints and fetched weights, and the folder may be written. Raises SettingError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise SettingError(f"run.folder: cannot use {folder} ({error.strerror}): choose another folder") from None
    if free < LEAST_FREE_BYTES:
        raise SettingError(
            f"run.folder: {folder} has {free / 1024**2:.0f} MiB free and needs {LEAST_FREE_BYTES / 1024**2:.0f} MiB: "
            "free some space or choose another folder"
        )


def check_services(settings: Settings, region: str = "") -> None:
    """Broker and object store take connections. Raises BrokerError or StoreError, naming the address."""
    check_broker(settings)
    check_store(settings, region)


def check_given_services(settings: Settings) -> None:
    """As `check_services`, for those that the settings name: embedded servers may still be started."""
    if settings.kafka.bootstrap_servers:
        check_broker(settings)
    if settings.s3.endpoint_url:
        check_store(settings)


def check_store(settings: Settings, region: str = "") -> None:
    """The object store takes connections. Raises StoreError naming it."""
    url = wiring.store_url(settings, region)
    if url:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if why := _unreachable(parts.hostname or "", port):
            own = bool(wiring.region_table(settings, region).endpoint_url)
            raise StoreError(f"cannot reach the object store at {url}: {why}; {_advice(own)}")


def check_broker(settings: Settings) -> None:
    """One of the brokers takes connections. Raises BrokerError naming all that were tried."""
    servers = wiring.endpoints_of_kafka(settings)
    failures: list[str] = []
    for server in filter(None, (part.strip() for part in servers.split(","))):
        host, _, port = server.rpartition(":")
        why = _unreachable(host.strip("[]"), int(port))
        if not why:
            return
        failures.append(f"{server} ({why})")
    tried = ", ".join(failures)
    raise BrokerError(f"cannot reach the Kafka broker at {tried}; {_advice(bool(settings.kafka.bootstrap_servers))}")


def check_connected(log: Log, store: ObjectStore, settings: Settings, region: str = "") -> None:
    """The broker answers and the topics are right (made where missing); the bucket exists and may be listed."""
    try:
        provision.ensure(log, settings)
    except BrokerError as error:
        raise BrokerError(f"Kafka at {wiring.endpoints_of_kafka(settings)} takes connections, but: {error}") from error
    check_bucket(store, wiring.region_table(settings, region).bucket)


def check_bucket(store: ObjectStore, bucket: str) -> None:
    """The bucket exists and may be listed. Raises StoreError naming it."""
    try:
        next(iter(store.list("")), None)
    except StoreError as error:
        text = str(error)
        raise StoreError(text if bucket in text else f"bucket {bucket!r}: {text}") from error


def _unreachable(host: str, port: int) -> str:
    """Why nothing listens there; "" when something does."""
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            return ""
    except TimeoutError:
        return f"no answer within {CONNECT_TIMEOUT_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)


def _advice(own: bool) -> str:
    return "check the address and that it runs" if own else "start the embedded servers with `offsetrl up`"
