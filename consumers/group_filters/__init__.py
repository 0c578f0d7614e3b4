"""Filters of whole groups: `[G] rewards (float64) of the valid members, *, <settings> -> reason or None`; None keeps.

| name | drops |
|---|---|
| zero-spread | groups whose members all earned the same: nothing to learn from |
"""
