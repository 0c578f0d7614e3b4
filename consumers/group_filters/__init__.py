"""Filters of whole groups: `GroupRewards of the valid members, *, <settings> -> reason or None`; None keeps.

| name | drops |
|---|---|
| zero-spread | groups whose members all earned the same: nothing to learn from |
| difficulty-band | groups whose mean reward lies outside a range: "too-hard" or "too-easy" |
| short-group | groups with too small a share of valid members |
"""
