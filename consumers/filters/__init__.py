"""Filters of single members: `trajectory, *, <settings> -> reason or None`; None keeps, a reason names why not.

A filtered member still counts in its group's baseline; it is only not trained on. The exception is `invalid-reward`,
which the pipeline applies first and always: without a valid reward there is nothing to count. What becomes of the
others of its group is settled by `min_members`: 0 drops the group as "incomplete", a number uses the valid ones.

| name | drops |
|---|---|
| invalid-reward | a failed attempt, a reward that is missing or not finite, nothing sampled (always applied) |
| max-tokens | more sampled tokens than a limit |
| overlong | more tokens in all (prompt, tools and sampled) than a limit |
| reward-range | rewards outside a range that the task could honestly give |
| truncated | answers cut off at their token limit |
"""
