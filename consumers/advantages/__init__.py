"""Estimators of advantages: `[G] rewards (float64), *, <settings> -> [G] advantages`, one group at a time.

Each is a file of its own with its formula and source. Only members with a valid reward are given, in the order of their
index; which of them are trained on is settled afterwards, by filters.

| name | formula | a lone sample | equal rewards |
|---|---|---|---|
| grpo | (R - mean) / (std + eps) | 0 | 0 |
| dr-grpo | R - mean | 0 | 0 |
| rloo | R - mean of the others | 0 | 0 |
"""
