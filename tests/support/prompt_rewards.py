"""Reward functions as a user would bring them."""

from __future__ import annotations

from typing import Any


def exact(row: dict[str, Any], answer: str) -> float:
    """1 for the row's answer."""
    return float(answer == row["answer"])


def spoils(row: dict[str, Any], answer: str) -> float:
    """Changes the row and then fails."""
    row["prompt"] = "changed"
    return 1 / len(row.pop("answer")[1:])
