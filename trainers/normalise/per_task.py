"""per-task: advantages standardised among the step's rows of the same task, so that no task drowns the others."""

from __future__ import annotations

import torch

from trainers.checks import check_not_negative
from trainers.masked import row_mean
from trainers.normalise import NormaliserInputs, NormaliserOutputs


def per_task(inputs: NormaliserInputs, *, centre: bool = False, eps: float = 1e-6) -> NormaliserOutputs:
    """A / (std of the task + eps), or (A - mean of the task) / (std of the task + eps) if `centre`; sample deviation.

    Mean and deviation are those of the mean advantages of the task's rows in this step. Tasks whose rewards have another
    scale or spread then push equally hard. Advantages that a processor made are centred in their groups already, hence
    no centring as given; a task with a single row, or of equal rows, stays as it is, or is 0 if `centre`.

    Task a has the deviation 1.4142, task b 14.142:

    >>> inputs = NormaliserInputs(advantages_BT=torch.tensor([[1.0], [-1.0], [10.0], [-10.0]]), tasks=list("aabb"),
    ...     mask_BT=torch.ones(4, 1, dtype=torch.bool), rewards_B=torch.zeros(4), rewards_BT=torch.zeros(4, 1))
    >>> per_task(inputs).advantages_BT[:, 0].double().round(decimals=4).tolist()
    [0.7071, -0.7071, 0.7071, -0.7071]
    """
    check_not_negative("per-task", "eps", eps)
    advantages_BT, mask_BT = inputs.advantages_BT, inputs.mask_BT
    rows_B, trained_B = row_mean(advantages_BT, mask_BT)[:, 0].double(), mask_BT.any(dim=1)
    out_BT, figures = torch.zeros_like(advantages_BT), dict[str, float]()
    for task in sorted(set(inputs.tasks)):
        of_task_B = torch.tensor([name == task for name in inputs.tasks], device=mask_BT.device) & trained_B
        found_N = rows_B[of_task_B]
        if not len(found_N):
            continue
        at_BT = mask_BT & of_task_B[:, None]
        std = float(found_N.std(correction=1)) if len(found_N) > 1 else 0.0
        figures[f"advantage_std.{task}"] = std
        if std > 0 and bool(found_N.max() != found_N.min()):
            shifted = advantages_BT[at_BT].double() - (found_N.mean() if centre else 0.0)
            out_BT[at_BT] = (shifted / (std + eps)).to(out_BT.dtype)
        elif not centre:
            out_BT[at_BT] = advantages_BT[at_BT]
    return NormaliserOutputs(advantages_BT=out_BT, figures=figures)
