"""Corrections that need all rows of an update at once: the signature of `trainers.corrections`, given every row.

A micro-batch does not know what the rest of its update holds, so these are computed once, over all rows of the update
(and of all ranks) side by side, before the first micro-batch. Rows padded to any width give the same weights.
Applied after those of `trainers.corrections`; weights are multiplied.

| name | weight | source |
|---|---|---|
| m2po | 0 for the tokens of largest (lp - lmu)^2, as few as make the mean of the rest <= limit; else 1 | arXiv 2510.01161 |
| batch-normalised | min(w, cap) / its mean over the update | self-normalised importance sampling |

Shapes: B = rows, T = positions.
"""

from __future__ import annotations

from collections.abc import Mapping

BATCH_CORRECTIONS: Mapping[str, str] = {
    "batch-normalised": "trainers.batch_corrections.batch_normalised:batch_normalised",
    "m2po": "trainers.batch_corrections.m2po:m2po",
}
