"""Estimators of advantages: `GroupRewards, *, <settings> -> [G] advantages (float64)`, one group at a time.

Each is a file of its own with its formula and source. There is one shape for all: most look at `group.rewards` alone,
some at `group.lengths` or `group.parts` as well (`consumers.group_rewards`). Only members with a valid reward are given,
in the order of their index, however many are missing; which of them are trained on is settled afterwards, by filters.
What needs a whole batch (whitening, for one) is the trainer's.

| name | formula | a lone sample | equal rewards |
|---|---|---|---|
| grpo | (R - mean) / (std + eps) | 0 | 0 |
| dr-grpo | R - mean | 0 | 0 |
| rloo | R - mean of the others | 0 | 0 |
| opo | R - mean weighted by length | 0 | 0 |
| maxrl | (R - mean) / (mean + eps) | 0 | 0 |
| gdpo | sum over parts k of c_k (R_k - mean_k) / (std_k + eps) | 0 | 0 where every part is equal |
| reward | R | R | R |
"""
