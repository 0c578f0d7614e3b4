"""`python -m bench NAME` from the folder `tests`: runs one bench, prints its table and, last, one line of JSON.

Exits 0 when every check is met, 1 when one is not, 2 for a name that is no bench.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from bench.harness import Bench

BENCHES = {
    "async": "bench.async_ratio",
    "codec": "bench.codec",
    "consume": "bench.consume",
    "exactly-once": "bench.exactly_once",
    "groups": "bench.groups",
    "path": "bench.path",
    "produce": "bench.produce",
    "slow-env": "bench.slow_env",
    "spot": "bench.spot",
    "staleness": "bench.staleness",
    "swap": "bench.swap",
    "trainer": "bench.trainer",
}
"""Name -> module with `run(bench: Bench) -> None`; imported only when asked for."""


def main(arguments: list[str]) -> int:
    """Run the bench that the only argument names."""
    if len(arguments) != 1 or arguments[0] not in BENCHES:
        print(f"asked for {' '.join(arguments) or 'nothing'}; benches: {', '.join(sorted(BENCHES))}", file=sys.stderr)
        return 2
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent), str(tests)]  # so that it runs from any folder, installed or not
    bench = Bench(arguments[0])
    importlib.import_module(BENCHES[arguments[0]]).run(bench)
    print(bench.table())
    if bench.seconds > bench.max_s:
        print(f"took {bench.seconds:.0f} s, {bench.max_s:.0f} s are allowed", file=sys.stderr)
    print(bench.summary())
    return bench.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
