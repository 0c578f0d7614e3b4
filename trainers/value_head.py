"""A value head on a policy's last hidden states: one more linear layer, trained with it and published with nothing.

Shapes: B = rows, T = positions, K = positions that outputs are needed for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainers.batching import MicroBatch


class LogitsAndValues(NamedTuple):
    """Of the last K positions."""

    logits: Tensor
    state_values: Tensor


class WithValues(torch.nn.Module):
    """A policy with a value head, zero at first: every state is then worth 0."""

    def __init__(self, policy: torch.nn.Module) -> None:
        super().__init__()
        self.policy = policy
        parameter = next(policy.parameters())
        config: Any = policy.config
        self._no_split_modules = getattr(policy, "_no_split_modules", None)  # by these accelerate shards
        self.value = torch.nn.Linear(int(config.hidden_size), 1, device=parameter.device, dtype=torch.float32)
        torch.nn.init.zeros_(self.value.weight)
        torch.nn.init.zeros_(self.value.bias)

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int) -> LogitsAndValues:
        """Logits [B, K, V], and the value [B, K] of the state in which each next token is chosen."""
        found = self.policy(
            input_ids=input_ids, use_cache=use_cache, logits_to_keep=logits_to_keep, output_hidden_states=True
        )
        hidden_BKH = found.hidden_states[-1][:, -logits_to_keep:].to(self.value.weight.dtype)
        return LogitsAndValues(found.logits, self.value(hidden_BKH).squeeze(-1).float())


def values_with_end(model: torch.nn.Module, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Values [B, T] of each token's state, 0 before `batch.first`; and [B] of the state after each row's last token."""
    device = next(model.parameters()).device
    tokens_BT = torch.from_numpy(batch.tokens_BT).to(device)
    width = tokens_BT.shape[1]
    num_needed = width - batch.first + 1
    values_BK = model(input_ids=tokens_BT, use_cache=False, logits_to_keep=num_needed).state_values
    values_BT1 = torch.nn.functional.pad(values_BK, (batch.first, 0))
    ends_B = values_BT1.gather(1, torch.from_numpy(batch.lengths_B).to(device)[:, None]).squeeze(1)
    return values_BT1[:, :width], ends_B
