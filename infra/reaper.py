"""Kills process groups when its parent is gone, whatever ended the parent; run as a script by `infra.supervisor`.

Knows nothing but its standard input: lines `+PID` and `-PID` add and remove a group. The end of the input means that the
supervisor has ended, even by SIGKILL; every group still listed is then killed. Imports next to nothing and is not part
of the supervisor's process group, so it survives what kills the supervisor.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the end of the input, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        groups.add(group) if line.startswith("+") else groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
