"""The settings of a run: one TOML file, one frozen model per table, a sentence and a unit per field.

Layers, later wins: defaults here < the TOML file < environment (`OFFSETRL_<TABLE>__<KEY>`) < `--set a.b=v`
(`infra.config` reads them). Unknown keys fail with the nearest name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, StringConstraints, field_validator, model_validator

from infra.settings_table import Table as Table
from infra.train_settings import TrainTable as TrainTable
from schemas.names import NAME_PATTERN

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Tag = Annotated[str, StringConstraints(pattern=r"^[^,\s]+$")]


class RunTable(Table):
    """[run]: what this run is."""

    name: Name = Field("run", description="Name of the run; part of every topic and key.")
    seed: int = Field(0, description="Every other seed derives from it.")
    folder: Path = Field(Path("runs"), description="Local folder for checkpoints, fetched weights and logs.")
    partitions: int = Field(2, ge=1, le=256, description="Partitions of trajectories and samples; fixed for the run.")
    inboxes: int = Field(16, ge=1, le=1024, description="Inboxes for rollout workers, per policy.")


class KafkaTable(Table):
    """[kafka]: the broker. Empty `bootstrap_servers`: the embedded one."""

    bootstrap_servers: str = Field("", description="host:port, comma separated; empty for the embedded broker.")
    client: dict[str, str] = Field(
        default_factory=dict, description="Further client settings, in Java's dotted or in snake names."
    )
    sasl_password: SecretStr | None = Field(None, description="Only from the environment or `sasl_password_file`.")
    sasl_password_file: Path | None = Field(None, description="File that holds the password.")
    replication_factor: int = Field(1, ge=1, description="Replicas of each topic.")
    max_record_bytes: int = Field(
        16 * 1024 * 1024, ge=65536, description="Largest record: topic, producer and fetch alike."
    )
    patience_s: float = Field(30.0, gt=0, description="How long any one call to the broker may take.")
    buffer_bytes: int = Field(64 * 1024 * 1024, ge=65536, description="Bytes that a writer holds unacknowledged.")

    @property
    def max_tokens(self) -> int:
        """Longest sound trajectory: what a record can hold at four bytes a token, whatever today's model takes."""
        return self.max_record_bytes // 4

    @field_validator("bootstrap_servers")
    @classmethod
    def _servers(cls, value: str) -> str:
        for server in filter(None, (part.strip() for part in value.split(","))):
            host, colon, port = server.rpartition(":")
            if "@" in server or "/" in server or not (colon and host and port.isdigit() and 0 < int(port) < 65536):
                raise ValueError("must be host:port, comma separated, without scheme, user or password")
        return value.strip()


class S3Table(Table):
    """[s3]: the object store. Empty `endpoint_url`: the embedded one (or AWS, with `aws = true`)."""

    endpoint_url: str = Field("", description="URL of an S3-compatible store; empty for the embedded one.")
    aws: bool = Field(False, description="Use AWS itself, without an endpoint URL.")
    bucket: str = Field(
        "offsetrl", min_length=3, description="Bucket of weights; must exist (the embedded one is made)."
    )
    prefix: str = Field("", description="Prefix of every key.")
    region_name: str = Field("us-east-1", description="Region name for signing.")
    access_key: SecretStr | None = Field(None, description="From the environment; empty: the usual credential chain.")
    secret_key: SecretStr | None = Field(None, description="From the environment; empty: the usual credential chain.")
    timeout_s: float = Field(20.0, gt=0, description="Time limit of one request.")

    @field_validator("endpoint_url")
    @classmethod
    def _url(cls, value: str) -> str:
        parts = urlsplit(value)
        if value and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must be a URL that begins with http:// or https://")
        if "@" in parts.netloc:
            raise ValueError("must not hold a user or password: give access_key and secret_key in the environment")
        return value

    @model_validator(mode="after")
    def _one_store(self) -> S3Table:
        if self.aws and self.endpoint_url:
            raise ValueError("aws = true and endpoint_url exclude each other: leave one of them out")
        return self


class EmbeddedTable(Table):
    """[embedded]: the servers that `offsetrl up` starts."""

    state: Path = Field(Path("state"), description="Folder of their data, ports, pids and logs.")
    kafka_version: str = Field("4.2.2", description="Apache Kafka release; 4.3.0 to 4.4.0 lose transaction markers.")
    heap_mb: int = Field(512, ge=128, description="Heap of the broker, MiB.")
    kafka_port: int = Field(0, ge=0, lt=32768, description="Port of the broker on loopback; 0 finds a free one.")
    s3_port: int = Field(0, ge=0, lt=32768, description="Port of the object store on loopback; 0 finds a free one.")


class TaskTable(Table):
    """[policies.NAME.task]: what the policy is asked to do."""

    environment: str = Field(
        "sort-digits", description="A known environment, or one of your own as package.module:name."
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="The environment's own settings.")
    curriculum: str = Field(
        "shuffled",
        description="Which item comes next: in-order, shuffled, skip-solved, difficulty-band, or package.module:name.",
    )
    curriculum_settings: dict[str, Any] = Field(default_factory=dict, description="The curriculum's own settings.")
    memory_groups: int = Field(
        1000, ge=0, description="Newest outcomes that curricula and length predictions know; read again at a restart."
    )
    requires: list[Tag] = Field(
        default_factory=list, description="Tags that a worker must have (rollout.tags) to be asked for this task."
    )


class SamplingTable(Table):
    """[policies.NAME.sampling]: how tokens are drawn."""

    temperature: float = Field(1.0, gt=0, description="Divides the logits.")
    top_p: float = Field(1.0, gt=0, le=1, description="Training needs 1.")
    top_k: int = Field(0, ge=0, description="Training needs 0 (off).")
    min_p: float = Field(0.0, ge=0, le=1, description="Training needs 0 (off).")
    max_tokens: int = Field(16, ge=1, description="Sampled tokens per turn.")


class DispatchTable(Table):
    """[policies.NAME.dispatch]: what is asked for, and until when."""

    group_size: int = Field(8, ge=1, description="Members of a group: samples per item.")
    capacity_groups: int = Field(64, ge=1, description="Groups running at once, at most.")
    lifetime_s: float = Field(120.0, gt=0, description="From a member's first request until its trajectory is late.")
    reissue_after_s: float = Field(40.0, gt=0, description="A member not seen by then is asked for once more.")
    heartbeat_timeout_s: float = Field(
        8.0,
        gt=0,
        description="A worker, or the dispatcher that a standby waits for, silent for so long is taken for lost.",
    )
    standby: bool = Field(
        False, description="Wait while another dispatcher of the policy lives, instead of taking over from it."
    )

    @model_validator(mode="after")
    def _order(self) -> DispatchTable:
        if self.reissue_after_s >= self.lifetime_s:
            raise ValueError(
                f"reissue_after_s ({self.reissue_after_s}) must be less than lifetime_s ({self.lifetime_s}): "
                "a re-issued member needs time before it is late"
            )
        return self


class RolloutTable(Table):
    """[policies.NAME.rollout]: the rollout workers."""

    engine: str = Field("vllm", description="vllm, transformers, or one of your own as package.module:name.")
    engine_settings: dict[str, Any] = Field(default_factory=dict, description="The engine's own settings.")
    concurrency: int = Field(64, ge=1, description="Episodes running at once in a worker.")
    max_model_len: int = Field(256, ge=8, description="Longest prompt plus answer, tokens.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Weights in the engine.")
    threads: int = Field(1, ge=0, description="CPU threads of the engine; 0 leaves it to the library.")
    pickup: bool = Field(True, description="Pick up new weights while serving.")
    episode_timeout_s: float = Field(60.0, gt=0, description="Longest episode.")
    turn_timeout_s: float = Field(
        60.0, gt=0, description="Longest turn: what is sampled, and the environment's answer."
    )
    tool_timeout_s: float = Field(20.0, gt=0, description="Longest answer of an environment: a tool call, a verdict.")
    max_stuck_calls: int = Field(
        16,
        ge=1,
        description="Calls into environments that never came back before a worker or an evaluator ends, to be started afresh.",
    )
    partial_tokens: int = Field(
        256, ge=0, description="Sampled tokens of an unfinished episode after which they are saved; 0 saves none."
    )
    drain_s: float = Field(5.0, ge=0, description="After SIGTERM, time to finish what runs; then it is handed over.")
    resume_timeout_s: float = Field(10.0, gt=0, description="Time to read an unfinished episode that is taken over.")
    chat: bool = Field(False, description="Show observations as messages, through the model's chat template.")
    system_prompt: str = Field("", description="First message of each conversation, with chat.")
    heartbeat_s: float = Field(1.0, gt=0, description="Between heartbeats.")
    tags: list[Tag] = Field(default_factory=list, description="What this worker can do, for tasks that require it.")


class ProcessTable(Table):
    """[policies.NAME.process]: shaping, filters and advantages of a group."""

    shaping: list[str] = Field(default_factory=list, description="Shaping of single members' rewards, in order.")
    filters: list[str] = Field(default_factory=list, description="Filters of single members, in order.")
    group_filters: list[str] = Field(
        default_factory=lambda: ["zero-spread"], description="Filters of whole groups, in order."
    )
    advantage: str = Field("grpo", description="The estimator; or one of your own as package.module:name.")
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Settings by component name.")
    min_members: int = Field(0, ge=0, description="Least valid members of a group; 0: all of them.")
    commit_every_s: float = Field(1.0, gt=0, description="Between commits of the position.")


class EvalTable(Table):
    """[policies.NAME.eval]: evaluation of published versions on items held out from training."""

    every: int = Field(0, ge=0, description="`offsetrl run` evaluates every so many versions, and the last; 0: none.")
    episodes: int = Field(64, ge=2, description="Episodes per version, each on an item of its own.")
    share: float = Field(
        0.0, ge=0, lt=1, description="Share of a finite task's items kept from training; an endless one needs none."
    )
    temperature: float = Field(0.0, ge=0, description="Divides the logits; 0 takes the likeliest token.")


class SourceTable(Table):
    """[policies.NAME.source]: trajectories of another run (replay, distillation); empty: the policy's own."""

    run: str = Field("", pattern=NAME_PATTERN + "|^$", description="Run whose trajectories are processed.")
    policy: str = Field("", pattern=NAME_PATTERN + "|^$", description="Its policy; empty: the same name.")


class PolicyTable(Table):
    """[policies.NAME]: one policy, with topics, task, processor and trainer of its own."""

    model: Path = Field(description="Folder of a causal language model in the Hugging Face layout, with its tokenizer.")
    task: TaskTable = Field(default_factory=TaskTable)
    sampling: SamplingTable = Field(default_factory=SamplingTable)
    dispatch: DispatchTable = Field(default_factory=DispatchTable)
    rollout: RolloutTable = Field(default_factory=RolloutTable)
    process: ProcessTable = Field(default_factory=ProcessTable)
    train: TrainTable = Field(default_factory=TrainTable)
    source: SourceTable = Field(default_factory=SourceTable)
    eval: EvalTable = Field(default_factory=EvalTable)

    @model_validator(mode="after")
    def _heartbeats(self) -> PolicyTable:
        if self.dispatch.heartbeat_timeout_s <= self.rollout.heartbeat_s:
            raise ValueError(
                f"dispatch.heartbeat_timeout_s ({self.dispatch.heartbeat_timeout_s}) must be more than "
                f"rollout.heartbeat_s ({self.rollout.heartbeat_s}), or every worker is taken for lost"
            )
        return self


class Settings(Table):
    """The whole file."""

    run: RunTable = Field(default_factory=RunTable)
    kafka: KafkaTable = Field(default_factory=KafkaTable)
    s3: S3Table = Field(default_factory=S3Table)
    regions: dict[Name, S3Table] = Field(default_factory=dict, description="[regions.NAME]: buckets of other regions.")
    embedded: EmbeddedTable = Field(default_factory=EmbeddedTable)
    policies: dict[Name, PolicyTable] = Field(min_length=1, description="[policies.NAME]: at least one.")

    def bucket(self, region: str = "") -> S3Table:
        """The store of a region; "" is the home of the trainers."""
        return self.regions[region] if region else self.s3

    @model_validator(mode="after")
    def _own_buckets(self) -> Settings:
        seen: dict[tuple[str, bool, str, str], str] = {}
        for region in ("", *self.regions):
            table = self.bucket(region)
            place = (table.endpoint_url, table.aws, table.bucket, table.prefix)
            if place in seen:
                raise ValueError(
                    f"regions.{region} has the same endpoint, bucket and prefix as {seen[place]}: a region's mirror "
                    "needs a bucket of its own"
                )
            seen[place] = f"regions.{region}" if region else "s3"
        return self
