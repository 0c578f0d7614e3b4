"""Faults that tests plant, to show that the checks can fail: named in the environment, off everywhere else.

`OFFSETRL_PLANT=lose-outcome` makes the audit overlook one outcome, as if it had been lost.
"""

from __future__ import annotations

import os

import structlog

VARIABLE = "OFFSETRL_PLANT"


def planted(fault: str) -> bool:
    """Whether this fault is planted; says so loudly."""
    found = fault in os.environ.get(VARIABLE, "").split(",")
    if found:
        structlog.get_logger("offsetrl").warning("a fault is planted by the environment", fault=fault)
    return found
