"""Shaping of rewards: `trajectory, reward, *, <settings> -> reward`, one valid member at a time, before everything else.

Shapers are applied in the order given; `reward` is what the one before returned, `trajectory.reward` stays as the
environment gave it, and the outcome carries the latter. Group filters see both, advantages come from the shaped ones.

| name | what it does |
|---|---|
| clip-reward | bounds the reward to a range |
| overlong-penalty | takes off up to `factor` from answers near or beyond a length limit |
| weighted-parts | replaces the reward by a weighted sum of its named parts |
"""
