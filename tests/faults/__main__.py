"""Plays every scenario with a failure at every point, and says how much that was.

`PYTHONPATH=. python -m tests.faults [--device cuda] [--streams eager] [--workers 2]`
"""

from __future__ import annotations

import argparse
import sys
from time import monotonic

from kvstate.gpu.streams import MODES as STREAMS
from tests.faults.exhaust import MODES
from tests.faults.parallel import play_all
from tests.faults.scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host")
    parser.add_argument("--streams", choices=STREAMS, action="append")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    started = monotonic()
    total = play_all(asked.device, tuple(asked.streams or STREAMS), asked.workers)
    print(f"{asked.device}: {len(SCENARIOS)} scenarios, fallible points {dict(total.points)},")
    print(f"{total.copies} copies; runs {dict(total.runs)}, {sum(total.runs.values())} in all")
    for mode in MODES:
        came = {k.partition(": ")[2]: n for k, n in sorted(total.outcomes.items())
                if k.startswith(f"{mode}:")}  # fmt: skip
        print(f"  {mode}: {came}")
    print(f"violations {len(total.problems)}, {monotonic() - started:.0f} s")
    print(*total.problems[:20], sep="\n")
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
