"""AdamW's settings, how a step is cut up, and the learning rate of each step: a pure function of the step's number."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """How weights are changed."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    """After the warm-up: "constant", "linear" or "cosine"."""
    decay_steps: int = 0
    """Steps from the end of the warm-up to the floor."""
    floor_share: float = 0.0
    """The floor, as a share of `learning_rate`."""
    max_grad_norm: float = 1.0
    updates_per_step: int = 1
    """Parts that a batch is dealt into; each row is in one of them."""
    epochs: int = 1
    """Times that each part is trained on."""
    micro_batch_tokens: int = 16384

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then the schedule down to its floor.

        >>> [Optimisation(learning_rate=1.0, warmup_steps=4).rate(step) for step in (0, 1, 3, 9)]
        [0.25, 0.5, 1.0, 1.0]
        >>> linear = Optimisation(learning_rate=1.0, schedule="linear", warmup_steps=2, decay_steps=4, floor_share=0.2)
        >>> [round(linear.rate(step), 3) for step in (0, 1, 2, 4, 6, 99)]
        [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]
        >>> cosine = Optimisation(learning_rate=2.0, schedule="cosine", decay_steps=4)
        >>> [round(cosine.rate(step), 3) for step in (0, 1, 2, 3, 4, 5)]
        [2.0, 1.707, 1.0, 0.293, 0.0, 0.0]
        """
        warm = min(1.0, (step + 1) / max(self.warmup_steps, 1))
        done = min(max(step - self.warmup_steps, 0) / max(self.decay_steps, 1), 1.0)
        left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}[self.schedule]
        if left == 1.0:
            return self.learning_rate * warm
        return self.learning_rate * warm * (self.floor_share + (1.0 - self.floor_share) * left)
