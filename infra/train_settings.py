"""The settings of a trainer: [policies.NAME.train]."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from infra.settings_table import Table
from schemas.rules.ending import StopAt

OWN_RATIO = ("aipo", "dppo-kl", "dppo-tv")
"""Losses that weigh by the ratio to the sampler themselves, and go with the correction "none"."""


class TrainTable(Table):
    """[policies.NAME.train]: plans, steps, publishing."""

    batch_groups: int = Field(16, ge=1, description="Groups per step (B).")
    max_staleness: int = Field(2, ge=0, description="Greatest age in versions (eta); 0 is synchronous on-policy.")
    window_groups: int = Field(0, ge=0, description="Outcomes looked at when planning, oldest version first; 0: 2 B.")
    steps: int = Field(
        0, ge=0, description="Stop after so many steps; 0: no limit. The limit reached first ends a run."
    )
    tokens: int = Field(0, ge=0, description="Stop when so many tokens were trained on; 0: no limit.")
    hours: float = Field(0.0, ge=0, description="Stop so many hours after the run's first claim; 0: no limit.")
    loss: str = Field("ppo-clip", description="The loss; or one of your own as package.module:name.")
    correction: str = Field("token-truncated", description="Off-policy correction; or one of your own.")
    further_corrections: list[str] = Field(
        default_factory=list, description="More corrections, whose weights are multiplied with the first's."
    )
    batch_corrections: list[str] = Field(
        default_factory=list, description="Corrections over all rows of an update at once, multiplied as well."
    )
    allow_uncorrected: bool = Field(
        False, description="Allow max_staleness above 0 without any correction: biased, and less stable the staler."
    )
    normalisers: list[str] = Field(
        default_factory=list, description="What is done to advantages over the whole step, in order."
    )
    kl_coefficient: float = Field(0.0, ge=0, description="Weight of the KL to the reference in the loss; 0: none.")
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = Field("k3+", description="Estimator of that KL.")
    reference: Path | None = Field(
        None,
        description="Model folder of the reference; none: the model that the policy began with, where one is needed.",
    )
    reference_version: str = Field(
        "", pattern=r"^(\d+-\d+)?$", description="EPOCH-VERSION of this policy as the reference, instead of a folder."
    )
    entropy_coefficient: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss; 0: none.")
    value_coefficient: float = Field(
        0.5, gt=0, description="Weight of the value head's loss; with normaliser gae alone."
    )
    value_clip: float = Field(0.2, gt=0, description="How far a value may move in a step before its loss stops it.")
    settings: dict[str, dict[str, Any]] = Field(default_factory=dict, description="Settings by component name.")
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        "token-mean", description="How per-token losses become one number; divisors are those of the whole step."
    )
    learning_rate: float = Field(1e-6, ge=0, description="AdamW's learning rate; 0 changes nothing.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decay of the weights, times the learning rate.")
    betas: tuple[float, float] = Field((0.9, 0.99), description="AdamW's decay of the gradient's two means.")
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after the warm-up, down to its floor."
    )
    decay_steps: int = Field(0, ge=0, description="Steps from the warm-up to the floor; 0: up to the run's last step.")
    floor_share: float = Field(0.0, ge=0, le=1, description="The floor, as a share of learning_rate.")
    max_grad_norm: float = Field(1.0, gt=0, description="Clip the gradient's global norm to this.")
    updates_per_step: int = Field(1, ge=1, description="Parts that a planned batch is dealt into, an update for each.")
    epochs: int = Field(1, ge=1, description="Times that each part of a planned batch is trained on.")
    micro_batch_tokens: int = Field(16384, ge=1, description="Padded tokens per micro-batch.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Of computing and of published weights; trained weights and the optimiser are float32 in any case.",
    )
    ranks: int = Field(
        1, ge=1, le=64, description="Processes of this machine that train together; a launcher's count wins."
    )
    rank_timeout_s: float = Field(600.0, gt=0, description="A rank that does not answer for so long is taken for lost.")
    shard: bool = Field(False, description="Shard weights and optimiser over the ranks (FSDP2); needs several GPUs.")
    gradient_checkpointing: bool = Field(
        False, description="Keep no activations inside layers and compute them again: less memory, a third more time."
    )
    lora_rank: int = Field(
        0, ge=0, le=1024, description="Rank of a LoRA adapter, which alone is trained; 0: all weights are."
    )
    lora_alpha: float = Field(32.0, gt=0, description="What the adapter adds is multiplied by lora_alpha / lora_rank.")
    lora_targets: list[str] = Field(
        default_factory=list,
        description="Linear layers with an adapter, by last name (q_proj, ...); none: all but the output layer.",
    )
    lora_publish: Literal["merged", "adapter"] = Field(
        "merged", description="Publish whole weights, or the adapter alone beside the base's files."
    )
    threads: int = Field(
        1, ge=0, description="CPU threads of each rank; fixed threads make steps repeatable bit for bit."
    )
    publish_every: int = Field(1, ge=1, description="Publish every k steps; k <= max_staleness + 1.")
    checkpoint_every: int = Field(20, ge=1, description="Steps between checkpoints.")
    checkpoints_kept: int = Field(2, ge=1, description="Newest checkpoints that stay on disk.")

    checkpoint_upload: bool = Field(
        False, description="Send checkpoints to the bucket too; a trainer that finds none on its disk fetches one."
    )
    fork_from: Path | None = Field(
        None, description="Folder of a checkpoint, of any run, whose weights become version 0 of this new run."
    )
    fork_optimizer: bool = Field(True, description="With fork_from: take the optimiser's state along.")
    trackers: list[str] = Field(
        default_factory=lambda: ["jsonl", "tensorboard"],
        description="Where a step's figures go: jsonl, and trackers of accelerate (wandb, trackio, mlflow, ...).",
    )

    @model_validator(mode="after")
    def _publish(self) -> TrainTable:
        if self.publish_every > self.max_staleness + 1:
            raise ValueError(
                f"publish_every is {self.publish_every}, but at most max_staleness + 1 = {self.max_staleness + 1} "
                "keeps workers fed: publish more often or allow more staleness"
            )
        if self.schedule != "constant" and not (self.decay_steps or self.steps > self.warmup_steps):
            raise ValueError(
                f"schedule is {self.schedule!r} without an end: set decay_steps, or steps beyond warmup_steps "
                f"({self.warmup_steps}; tokens and hours give no number of steps), or the schedule to 'constant'"
            )
        if self.max_staleness > 0 and not (self.corrected or self.allow_uncorrected):
            raise ValueError(
                f"max_staleness is {self.max_staleness} without an off-policy correction: set correction to "
                "'token-truncated', or max_staleness to 0, or allow_uncorrected to true"
            )
        if self.lora_rank and self.shard:
            raise ValueError("lora_rank and shard exclude each other: set lora_rank to 0, or shard to false")
        if not self.lora_rank and (self.lora_targets or self.lora_publish != "merged"):
            raise ValueError("lora_targets or lora_publish without an adapter: set lora_rank, or leave them out")
        if self.reference is not None and self.reference_version:
            raise ValueError("reference and reference_version exclude each other: leave one of them out")
        return self

    @property
    def stop_at(self) -> StopAt:
        """Where the run ends."""
        return StopAt(self.steps, self.tokens, self.hours)

    @property
    def corrections(self) -> list[str]:
        """All of them, of single rows and of the whole update."""
        return [self.correction, *self.further_corrections, *self.batch_corrections]

    @property
    def corrected(self) -> bool:
        """Whether stale tokens are weighed: by a correction, or by a loss that has its own ratio to the sampler."""
        return self.loss in OWN_RATIO or any(name != "none" for name in self.corrections)
