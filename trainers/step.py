"""One planned step: rows in, optimiser updates, figures out. Knows accelerate; knows no algorithm and no log.

    lp     = log-probs of the weights at the start of the step      (proximal, no gradient)
    w      = correction(lp - lmu)                                   (off-policy weight, no gradient)
    loss   = sum over the whole update of reduction * w * x(l, lp, A)

One update per step: lp is l without its gradient, exactly, so no forward pass is spent on it. Several: the rows are
dealt at random into as many parts, and lp comes from one pass over all of them before the first update.

Denominators count the whole update, so micro-batches do not change a step. What is random is drawn from torch's own
generator, seeded by the step's seed: a step is a function of weights, optimiser, plan and rows. One process so far.
Shapes: B = rows of a micro-batch, T = positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer

from schemas.errors import SettingError, WeightsError
from trainers.batching import MicroBatch, Row, micro_batches
from trainers.components import Algorithms
from trainers.corrections import CorrectionInputs
from trainers.losses import LossInputs, log_ratio
from trainers.metrics import Figures, StepMetrics
from trainers.model import Policy, model_tensors, restore_model, token_logprobs
from trainers.reductions import Totals

Tensors = dict[str, dict[str, Tensor]]
"""Tensors by part ("model", "optimizer", "rng") and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimisation:
    """AdamW's settings, and how a step is cut up."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    updates_per_step: int = 1
    """Each row is in one of them."""
    micro_batch_tokens: int = 16384

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then constant.

        >>> [Optimisation(learning_rate=1.0, warmup_steps=4).rate(step) for step in (0, 1, 3, 9)]
        [0.25, 0.5, 1.0, 1.0]
        """
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup_steps, 1))


class Stepper:
    """A model, its optimiser and the algorithms that change it, under accelerate. Belongs to one thread."""

    def __init__(
        self, model: Policy, algorithms: Algorithms, how: Optimisation, accelerator: Accelerator | None = None
    ) -> None:
        self._algorithms, self._how = algorithms, how
        self._accelerator = accelerator or Accelerator()
        assert self._accelerator.gradient_accumulation_steps == 1  # accelerate would divide the loss once more
        if self._accelerator.num_processes != 1:
            raise SettingError(
                f"{self._accelerator.num_processes} training processes were started; a policy is trained by one: "
                "start it without a launcher"
            )
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=how.learning_rate, betas=how.betas, weight_decay=how.weight_decay, fused=True
        )
        self._model, self._stepping = self._accelerator.prepare(model, self._optimizer)

    @property
    def model(self) -> Policy:
        """The model itself, without what accelerate wraps around it."""
        model: Policy = self._accelerator.unwrap_model(self._model)
        return model

    def execute(self, rows: Sequence[Row], *, step: int, seed: int) -> StepMetrics:
        """Take one step over these rows. `step` sets the learning rate, `seed` everything drawn at random."""
        torch.manual_seed(seed)
        figures = Figures(rows, learning_rate=self._how.rate(step))
        for group in self._optimizer.param_groups:
            group["lr"] = figures.learning_rate
        parts = self._parts(rows)
        proximal = [self._proximal(part) if len(parts) > 1 else None for part in parts]
        for part, proximal_of in zip(parts, proximal, strict=True):
            self._update(part, proximal_of, figures)
        return figures.metrics()

    def _parts(self, rows: Sequence[Row]) -> list[list[MicroBatch]]:
        """The micro-batches of each update; every row is in one of them."""
        num_parts = self._how.updates_per_step
        order = torch.randperm(len(rows)).tolist() if num_parts > 1 else list(range(len(rows)))
        dealt = [order[i::num_parts] for i in range(num_parts)]
        return [micro_batches([rows[i] for i in part], self._how.micro_batch_tokens) for part in dealt if part]

    def _proximal(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        with torch.no_grad():
            return [token_logprobs(self._model, batch) for batch in batches]

    def _update(self, batches: Sequence[MicroBatch], proximal: Sequence[Tensor] | None, figures: Figures) -> None:
        """One optimiser update; skipped, and counted, when its gradient is not finite or nothing is trainable."""
        totals = Totals(
            tokens=sum(batch.num_trainable for batch in batches),
            sequences=sum(int(batch.mask_BT.any(axis=1).sum()) for batch in batches),
        )
        self._stepping.zero_grad(set_to_none=True)
        for i, batch in enumerate(batches):
            if batch.num_trainable:
                self._accelerator.backward(self._loss(batch, proximal[i] if proximal else None, totals, figures))
        norm = self._clipped_norm() if totals.tokens else math.nan
        figures.add_update(norm)
        if math.isfinite(norm) and figures.learning_rate > 0:  # at rate 0 AdamW would still turn a -0.0 into 0.0
            self._stepping.step()
        self._stepping.zero_grad(set_to_none=True)

    def _clipped_norm(self) -> float:
        """The gradient's global norm before it is clipped."""
        return float(self._accelerator.clip_grad_norm_(self._model.parameters(), self._how.max_grad_norm))

    def _loss(self, batch: MicroBatch, proximal_BT: Tensor | None, totals: Totals, figures: Figures) -> Tensor:
        """This micro-batch's part of the update's loss."""
        device = self._accelerator.device
        mask_BT = torch.from_numpy(batch.mask_BT).to(device)
        behaviour_BT = torch.from_numpy(batch.behaviour_BT).to(device)
        logprobs_BT = token_logprobs(self._model, batch)
        proximal_BT = logprobs_BT.detach() if proximal_BT is None else proximal_BT
        log_weight_BT = log_ratio(proximal_BT, behaviour_BT, mask_BT)
        correction = self._algorithms.correction(CorrectionInputs(log_weight_BT=log_weight_BT, mask_BT=mask_BT))
        loss = self._algorithms.loss(
            LossInputs(
                logprobs_BT=logprobs_BT,
                proximal_BT=proximal_BT,
                behaviour_BT=behaviour_BT,
                advantages_BT=torch.from_numpy(batch.advantages_BT).to(device),
                mask_BT=mask_BT,
            )
        )
        per_token_BT = torch.where(mask_BT, loss.per_token_BT * correction.weights_BT.detach(), 0.0)
        total: Tensor = (self._algorithms.reduction(mask_BT, totals) * per_token_BT).sum()
        figures.add_tokens(
            mask_BT, logprobs_BT.detach(), log_weight_BT, total.detach(), {**loss.figures_BT, **correction.figures_BT}
        )
        return total

    def tensors(self) -> Tensors:
        """Everything that the next step depends on, to be saved; live tensors, not copies."""
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        return {"model": model_tensors(self.model), "optimizer": optimizer_tensors(self._optimizer), "rng": rng}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take back what `tensors` gave, bit for bit. Raises WeightsError when it is of another model."""
        restore_model(self.model, tensors["model"])
        load_optimizer(self._optimizer, tensors["optimizer"])
        torch.set_rng_state(tensors["rng"]["cpu"])
        if "cuda" in tensors["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng"]["cuda"])


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named `<number of the parameter>.<key>`; live, not copies."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{key}": value for number, entries in state.items() for key, value in entries.items()}


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Take back what `optimizer_tensors` gave, bit for bit; rates and other settings stay as they are now.

    Raises WeightsError when it does not fit the optimiser's parameters.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, key = name.partition(".")
        if not number.isdecimal() or int(number) >= len(parameters):
            raise WeightsError(f"optimiser tensor {name!r} belongs to none of the {len(parameters)} parameters")
        if tensor.dim() and tensor.shape != parameters[int(number)].shape:
            raise WeightsError(f"optimiser tensor {name!r} is {list(tensor.shape)}, unlike its parameter")
        state.setdefault(int(number), {})[key] = tensor.clone()
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
