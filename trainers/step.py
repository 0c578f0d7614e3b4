"""One planned step: rows in, optimiser updates, figures out. Knows no algorithm and no log.

    lp     = log-probs of the weights at the start of the step      (proximal, no gradient)
    A      = normalisers over all rows of the step                  (no gradient)
    w      = corrections(lp - lmu)                                  (off-policy weight, no gradient)
    loss   = sum over the whole update of reduction * (w * x(l, lp, A) + terms)
    terms  = kl * k(l, lr) - entropy * H + value * value loss       (each left out at 0)

One update per step: lp is l without its gradient, exactly, so no forward pass is spent on it. Several: the rows are
dealt at random into as many parts, and lp comes from one pass over all of them before the first update.

Denominators count the whole update, over all micro-batches of all ranks, so neither changes a step. Rows are cut into
the same micro-batches whatever the number of ranks, and those are dealt to them. DDP and FSDP average gradients, so
each loss is multiplied by the number of ranks; gradients meet once per update, at the last micro-batch.

What is random is drawn from torch's own generator, seeded by the step's seed: a step is a function of weights,
optimiser, plan and rows. Shapes: B = rows of a micro-batch, R = rows of the step, T = positions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from schemas.errors import WeightsError
from trainers.acceleration import Accelerator, make_accelerator, prepared
from trainers.batching import MicroBatch, Row, deal, micro_batches, pad
from trainers.components import Algorithms
from trainers.corrections import CorrectionInputs
from trainers.losses import LossInputs, log_ratio
from trainers.metrics import Figures, StepMetrics
from trainers.model import Outputs, Policy, model_tensors, restore_model, token_logprobs, token_outputs
from trainers.optimizer_state import load_optimizer, optimizer_tensors
from trainers.reductions import Totals
from trainers.schedule import Optimisation
from trainers.shards import whole
from trainers.terms import loss_terms
from trainers.value_head import WithValues, values_with_end
from trainers.whole_step import WholeStep, batch_weights, normalised, rows_in, scanned

Tensors = dict[str, dict[str, Tensor]]
"""Tensors by part ("model", "optimizer", "rng", "value") and name."""


class Stepper:
    """A model, its optimiser and the algorithms that change it, under accelerate. Belongs to one thread at a time."""

    def __init__(
        self,
        model: Policy,
        algorithms: Algorithms,
        how: Optimisation,
        accelerator: Accelerator | None = None,
        reference: Policy | None = None,
    ) -> None:
        """`reference`: weights that never change, where the algorithms need some."""
        self._algorithms, self._how = algorithms, how
        self._accelerator = accelerator or make_accelerator()
        assert self._accelerator.gradient_accumulation_steps == 1  # accelerate would divide the loss once more
        self._rank, self._num_ranks = self._accelerator.process_index, self._accelerator.num_processes
        model = WithValues(model) if algorithms.needs_values else model
        self._reference = reference.to(self._accelerator.device) if reference is not None else None
        self._optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=how.learning_rate, betas=how.betas, weight_decay=how.weight_decay, fused=True,
        )  # fmt: skip
        self._model, self._stepping = prepared(self._accelerator, model, self._optimizer)
        self.clean = True
        """Whether the weights are those of a whole step."""

    @property
    def model(self) -> Policy:
        """The model itself, without what accelerate wraps around it."""
        model: Policy = self._accelerator.unwrap_model(self._model)
        return model.policy if isinstance(model, WithValues) else model

    def execute(
        self, rows: Sequence[Row], *, step: int, seed: int, between: Callable[[], None] = lambda: None
    ) -> StepMetrics:
        """Take one step over these rows. `step` sets the learning rate, `seed` everything drawn at random.

        `between` is called before each micro-batch, equally often on every rank, and may raise on all of them at one
        call to leave the step unfinished (see `clean`); under shards no further step may follow, for FSDP2 keeps sums.
        """
        torch.manual_seed(seed)
        figures = Figures(rows, learning_rate=self._how.rate(step))
        for group in self._optimizer.param_groups:
            group["lr"] = figures.learning_rate
        parts = self._parts(rows)
        totals = [totals_of(part) for part in parts]
        mine = [deal(part, self._rank, self._num_ranks) for part in parts]
        order = self._order(len(parts))
        step_RT = self._whole_step(rows, parts, mine, figures, between, several=len(order) > 1)
        for i in order:
            self._update(mine[i], step_RT, totals[i], figures, between)
        self.clean = True
        return figures.metrics(self._summed, self._greatest)

    def _parts(self, rows: Sequence[Row]) -> list[list[MicroBatch]]:
        """The micro-batches of each part, over all ranks."""
        num_parts = self._how.updates_per_step
        order = torch.randperm(len(rows)).tolist() if num_parts > 1 else list(range(len(rows)))
        dealt = [order[i::num_parts] for i in range(num_parts)]
        return [micro_batches([rows[i] for i in part], self._how.micro_batch_tokens, part) for part in dealt if part]

    def _order(self, num_parts: int) -> list[int]:
        """The part of each update: all of them as they were dealt, then all of them in a new order for each epoch."""
        order = list(range(num_parts))
        for _ in range(1, self._how.epochs):
            order += torch.randperm(num_parts).tolist()
        return order

    def _whole_step(
        self,
        rows: Sequence[Row],
        parts: Sequence[Sequence[MicroBatch]],
        mine: Sequence[Sequence[MicroBatch]],
        figures: Figures,
        between: Callable[[], None],
        *,
        several: bool,
    ) -> WholeStep:
        """What is known of all rows before the first update; only what this step needs."""
        needs, device = self._algorithms, self._accelerator.device
        if not (several or needs.needs_proximal or needs.normalisers or self._reference or needs.needs_values):
            return WholeStep()
        all_rows, batches = pad(rows), [batch for part in mine for batch in part]

        def scan(numbers_of: Callable[[MicroBatch], Tensor]) -> Tensor:
            def checked(batch: MicroBatch) -> Tensor:
                between()
                return numbers_of(batch)

            return scanned(batches, checked, all_rows, self._summed, device)

        proximal_RT = (
            scan(lambda batch: token_logprobs(self._model, batch)) if several or needs.needs_proximal else None
        )
        reference = self._reference
        reference_RT = None if reference is None else scan(lambda batch: token_logprobs(reference, batch))
        values_RT = bootstrap_R = None
        if needs.needs_values:
            values_RT = scan(lambda batch: values_with_end(self._model, batch)[0])
            ends_RT = scan(lambda batch: values_with_end(self._model, batch)[1][:, None])
            cut_off_R = torch.tensor([row.cut_off for row in rows], device=device)
            bootstrap_R = torch.where(cut_off_R, ends_RT[:, 0], 0.0)
        advantages_RT = returns_RT = weights_RT = None
        facts: dict[str, float] = {}
        if needs.normalisers:
            advantages_RT, returns_RT, facts = normalised(
                rows, all_rows, needs, device, proximal_RT=proximal_RT, reference_RT=reference_RT,
                values_RT=values_RT, bootstrap_R=bootstrap_R,
            )  # fmt: skip
        if needs.batch_corrections and proximal_RT is not None:
            given_RT = torch.from_numpy(all_rows.advantages_BT).to(device) if advantages_RT is None else advantages_RT
            weights_RT = batch_weights(parts, all_rows, proximal_RT, given_RT, needs, facts)
        figures.add_facts(facts)
        return WholeStep(
            advantages_RT=advantages_RT, proximal_RT=proximal_RT if several else None, reference_RT=reference_RT,
            values_RT=values_RT, returns_RT=returns_RT, weights_RT=weights_RT,
        )  # fmt: skip

    def _update(
        self,
        batches: Sequence[MicroBatch],
        step_RT: WholeStep,
        totals: Totals,
        figures: Figures,
        between: Callable[[], None],
    ) -> None:
        """One optimiser update; skipped, and counted, when its gradient is not finite or nothing is trainable."""
        self._stepping.zero_grad(set_to_none=True)
        for i, batch in enumerate(batches):
            between()
            is_last = i == len(batches) - 1
            with contextlib.nullcontext() if is_last else self._accelerator.no_sync(self._model):
                loss = self._loss(batch, step_RT, totals, figures)
                self._accelerator.backward(loss * self._num_ranks)
        norm = self._clipped_norm() if totals.tokens else math.nan
        figures.add_update(norm)
        if math.isfinite(norm) and figures.learning_rate > 0:  # at rate 0 AdamW would still turn a -0.0 into 0.0
            self.clean = False
            self._stepping.step()
        self._stepping.zero_grad(set_to_none=True)

    def _clipped_norm(self) -> float:
        """The gradient's global norm before it is clipped; the same number on every rank."""
        norm = self._accelerator.clip_grad_norm_(self._model.parameters(), self._how.max_grad_norm)
        return float(whole(norm))

    def _loss(self, batch: MicroBatch, step_RT: WholeStep, totals: Totals, figures: Figures) -> Tensor:
        """This micro-batch's part of the update's loss."""
        device, algorithms = self._accelerator.device, self._algorithms
        mask_BT = torch.from_numpy(batch.mask_BT).to(device)
        behaviour_BT = torch.from_numpy(batch.behaviour_BT).to(device)
        out = token_outputs(self._model, batch, entropy=algorithms.terms.entropy > 0)
        inputs = self._inputs(batch, out, step_RT, mask_BT, behaviour_BT)
        log_weight_BT = log_ratio(inputs.proximal_BT, behaviour_BT, mask_BT)
        correction = algorithms.correction(
            CorrectionInputs(
                log_weight_BT=log_weight_BT,
                mask_BT=mask_BT,
                behaviour_BT=behaviour_BT,
                advantages_BT=inputs.advantages_BT,
            )
        )
        loss = algorithms.loss(inputs)
        weights_BT = correction.weights_BT.detach()
        if (of_batch_BT := rows_in(step_RT.weights_RT, batch)) is not None:
            weights_BT = weights_BT * of_batch_BT
        per_token_BT = torch.where(mask_BT, loss.per_token_BT * weights_BT, 0.0)
        terms = loss_terms(algorithms.terms, batch, out, step_RT, mask_BT)
        for term_BT in terms.per_token:
            per_token_BT = per_token_BT + term_BT
        total: Tensor = (algorithms.reduction(mask_BT, totals) * per_token_BT).sum()
        named_BT = {**loss.figures_BT, **correction.figures_BT, **terms.figures_BT}
        places_B = torch.from_numpy(batch.places_B)
        figures.add_tokens(mask_BT, out.logprobs_BT.detach(), log_weight_BT, total.detach(), named_BT, places_B)
        return total

    def _inputs(
        self, batch: MicroBatch, out: Outputs, step_RT: WholeStep, mask_BT: Tensor, behaviour_BT: Tensor
    ) -> LossInputs:
        proximal_BT, advantages_BT = rows_in(step_RT.proximal_RT, batch), rows_in(step_RT.advantages_RT, batch)
        if advantages_BT is None:
            advantages_BT = torch.from_numpy(batch.advantages_BT).to(mask_BT.device)
        return LossInputs(
            logprobs_BT=out.logprobs_BT,
            proximal_BT=out.logprobs_BT.detach() if proximal_BT is None else proximal_BT,
            behaviour_BT=behaviour_BT,
            advantages_BT=advantages_BT,
            mask_BT=mask_BT,
        )

    def _summed(self, values_N: Tensor) -> Tensor:
        """Over all ranks."""
        summed: Tensor = self._accelerator.reduce(values_N, reduction="sum")
        return summed

    def _greatest(self, value: Tensor) -> Tensor:
        """Over all ranks."""
        gathered_N: Tensor = self._accelerator.gather(value.reshape(1))
        return gathered_N.max()

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and saved buffer once, by name, whole; collective where it is in shards."""
        return {name: whole(tensor) for name, tensor in model_tensors(self.model).items()}

    def tensors(self) -> Tensors:
        """Everything that the next step depends on, to be saved; live tensors, not copies, but for shards."""
        rng = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        parts = {"model": self.weights(), "optimizer": optimizer_tensors(self._optimizer), "rng": rng}
        if (head := self._value_head()) is not None:
            parts["value"] = {name: whole(tensor.detach()) for name, tensor in head.state_dict().items()}
        return parts

    def _value_head(self) -> torch.nn.Module | None:
        model = self._accelerator.unwrap_model(self._model)
        return model.value if isinstance(model, WithValues) else None

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take back what `tensors` gave, bit for bit; of the part "model" alone only the weights.

        Raises WeightsError when it is of another model.
        """
        restore_model(self.model, tensors["model"])
        if "optimizer" not in tensors:
            return
        head = self._value_head()
        if (head is not None) != ("value" in tensors):
            have, want = ("none", "has one") if head is not None else ("one", "has none")
            raise WeightsError(
                f"the checkpoint has {have} of a value head's tensors, and this trainer {want}: keep to the normalisers "
                "that the run began with"
            )
        if head is not None:
            restore_model(head, tensors["value"])
        load_optimizer(self._optimizer, tensors["optimizer"])
        torch.set_rng_state(tensors["rng"]["cpu"])
        if "cuda" in tensors["rng"] and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["rng"]["cuda"])


def totals_of(batches: Sequence[MicroBatch]) -> Totals:
    """Counts of a whole update, over the micro-batches of all ranks."""
    return Totals(
        tokens=sum(batch.num_trainable for batch in batches),
        sequences=sum(int(batch.mask_BT.any(axis=1).sum()) for batch in batches),
    )
