"""Numbers of a whole step, row by row: what needs all rows of a step, or the weights that it began with.

Ranks compute their share of the rows and add them up, so every rank knows every row. Micro-batches look up their own.
Shapes: R = rows of the step, T = positions of the longest, B and T of a micro-batch, padded to a width of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainers.batching import MicroBatch, Row
from trainers.components import Algorithms
from trainers.corrections import CorrectionInputs, product
from trainers.gae import rewards_at_end
from trainers.losses import log_ratio
from trainers.normalise import NormaliserInputs, normalise


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """None: not needed, or what the micro-batch has itself is right."""

    advantages_RT: Tensor | None = None
    proximal_RT: Tensor | None = None
    """lp: log-probs of the weights at the step's beginning."""
    reference_RT: Tensor | None = None
    values_RT: Tensor | None = None
    returns_RT: Tensor | None = None
    weights_RT: Tensor | None = None
    """Of the batch corrections."""


def rows_in(numbers_RT: Tensor | None, batch: MicroBatch) -> Tensor | None:
    """A micro-batch's part of a step's numbers."""
    if numbers_RT is None:
        return None
    places_B = torch.from_numpy(batch.places_B).to(numbers_RT.device)
    return numbers_RT[places_B, : batch.mask_BT.shape[1]]


def scanned(
    batches: Sequence[MicroBatch],
    numbers_of: Callable[[MicroBatch], Tensor],
    whole: MicroBatch,
    summed: Callable[[Tensor], Tensor],
    device: torch.device,
) -> Tensor:
    """`numbers_of` every micro-batch of this rank, and what the other ranks found, [R, T]; without gradient."""
    out_RT = torch.zeros(whole.mask_BT.shape, device=device)
    with torch.no_grad():
        for batch in batches:
            found_BT = numbers_of(batch)
            if batch.num_trainable:
                places_B = torch.from_numpy(batch.places_B).to(device)
                out_RT[places_B, : found_BT.shape[1]] = found_BT.float()
        return summed(out_RT)


def normalised(
    rows: Sequence[Row],
    whole: MicroBatch,
    algorithms: Algorithms,
    device: torch.device,
    *,
    proximal_RT: Tensor | None,
    reference_RT: Tensor | None,
    values_RT: Tensor | None,
    bootstrap_R: Tensor | None,
) -> tuple[Tensor, Tensor | None, dict[str, float]]:
    """Advantages and returns as the normalisers make them, [R, T], and their figures."""
    mask_RT = torch.from_numpy(whole.mask_BT).to(device)
    rewards_R = torch.tensor([row.reward for row in rows], dtype=torch.float32, device=device)
    rewards_RT = rewards_at_end(rewards_R, mask_RT)
    for i, row in enumerate(rows):
        if row.rewards_T is not None:
            rewards_RT[i, : len(row.rewards_T)] = torch.from_numpy(row.rewards_T).to(device)
    names = sorted({name for row in rows for name in row.reward_parts})
    out = normalise(
        algorithms.normalisers,
        NormaliserInputs(
            advantages_BT=torch.from_numpy(whole.advantages_BT).to(device),
            mask_BT=mask_RT,
            rewards_B=rewards_R,
            rewards_BT=rewards_RT,
            reward_parts={
                name: torch.tensor([row.reward_parts.get(name, np.nan) for row in rows], device=device)
                for name in names
            },
            groups=[row.group for row in rows],
            tasks=[row.task for row in rows],
            group_means_B=torch.tensor([row.group_mean for row in rows], dtype=torch.float32, device=device),
            proximal_BT=proximal_RT,
            reference_BT=reference_RT,
            values_BT=values_RT,
            bootstrap_B=bootstrap_R,
        ),
    )
    return out.advantages_BT, out.returns_BT, dict(out.figures)


def batch_weights(
    parts: Sequence[Sequence[MicroBatch]],
    whole: MicroBatch,
    proximal_RT: Tensor,
    advantages_RT: Tensor,
    algorithms: Algorithms,
    figures: dict[str, float],
) -> Tensor:
    """Weights of the batch corrections, [R, T]: each update's from all its own rows, on whatever rank they are."""
    device = proximal_RT.device
    mask_RT = torch.from_numpy(whole.mask_BT).to(device)
    behaviour_RT = torch.from_numpy(whole.behaviour_BT).to(device)
    weights_RT = torch.ones_like(proximal_RT)
    correct = product(algorithms.batch_corrections)
    num_tokens = max(int(mask_RT.sum()), 1)
    for part in parts:
        places = np.concatenate([batch.places_B for batch in part]) if part else np.zeros(0, dtype=np.int64)
        inside_R = torch.zeros(len(mask_RT), dtype=torch.bool, device=device)
        inside_R[torch.from_numpy(places).to(device)] = True
        mask_of_part_RT = mask_RT & inside_R[:, None]
        out = correct(
            CorrectionInputs(
                log_weight_BT=log_ratio(proximal_RT, behaviour_RT, mask_of_part_RT),
                mask_BT=mask_of_part_RT,
                behaviour_BT=behaviour_RT,
                advantages_BT=advantages_RT,
            )
        )
        weights_RT = torch.where(mask_of_part_RT, out.weights_BT, weights_RT)
        for name, numbers_RT in out.figures_BT.items():
            share = float(numbers_RT[mask_of_part_RT].double().sum()) / num_tokens
            figures[name] = figures.get(name, 0.0) + share
    return weights_RT
