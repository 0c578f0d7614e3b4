"""The rules that every reader applies alike: pure functions and folds over log order, without clock, network or settings object.

| file | settles |
|---|---|
| claims.py | who the owner of a partition is |
| closing.py | where a group closes, and what is late or superseded |
| chain.py | which outcomes count |
| versions.py | which weights are in the lineage, and the age of a group |
| admission.py | how many groups may be asked for, and with which weights |
| planning.py | which outcomes the next step eats, and which are too old |
| ledger.py | which plans and results count |
| ending.py | whether a run has reached its end |
| accounting.py | that every record is accounted for exactly once |
"""
