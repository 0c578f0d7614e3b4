"""Seeds: derived by a stable hash, so that every process and every replay draws the same numbers."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A seed in [0, 2**63) from the run's seed and a path of names and numbers.

    >>> derive_seed(0, "main", "g7", 3) == derive_seed(0, "main", "g7", 3)
    True
    >>> derive_seed(0, "main", "g7", 3) == derive_seed(0, "main", "g73", 0)
    False
    """
    text = "\x1f".join([str(run_seed), *(f"{type(part).__name__}:{part}" for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
