"""Claims: the first claim of an epoch wins; a record below the greatest claim before it is void.

Whoever must be alone (the trainer of a policy, the dispatcher of a policy) appends a claim with an epoch above all that
it has read, reads on up to its own record, and owns the partition if its claim is the one that won. A nonce tells two
claimants of the same epoch apart.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Claims:
    """A fold over the claims of one partition, in offset order.

    >>> claims = Claims()
    >>> claims.claim(1, "a"), claims.claim(1, "b"), claims.owns(1, "a"), claims.owns(1, "b")
    (True, False, True, False)
    >>> claims.claim(3, "c"), claims.claim(2, "d"), claims.owns(1, "a"), claims.next_epoch
    (True, False, False, 4)
    """

    epoch: int = 0
    """Epoch of the winning claim; 0 before the first."""
    nonce: str = ""

    def claim(self, epoch: int, nonce: str) -> bool:
        """Take in a claim; True if it now owns the partition."""
        if epoch <= self.epoch:
            return False
        self.epoch, self.nonce = epoch, nonce
        return True

    def owns(self, epoch: int, nonce: str) -> bool:
        """Whether a record that names this epoch and nonce counts here."""
        return epoch == self.epoch and nonce == self.nonce

    @property
    def next_epoch(self) -> int:
        """The epoch that the next claimant should ask for."""
        return self.epoch + 1
