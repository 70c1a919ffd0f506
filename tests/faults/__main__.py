"""Plays every scenario with a failure at every point, and says how much that was.

`PYTHONPATH=. python -m tests.faults [--device cuda] [--streams eager]`
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from time import monotonic

from kvstate.device import ByteDevice
from kvstate.gpu import open_device
from kvstate.gpu.streams import MODES as STREAMS
from tests.faults.exhaust import MODES, Tally, base_of, plans_of, play
from tests.faults.scenarios import SCENARIOS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host")
    parser.add_argument("--streams", choices=STREAMS, action="append")
    asked = parser.parse_args()
    logging.disable()
    started, tally, points, copies = monotonic(), Tally(), Counter[str](), 0

    def opened(streams: str) -> ByteDevice:
        return open_device(asked.device, streams=streams, seed=1, limit_s=0.3)

    for streams in asked.streams or STREAMS:
        for scenario in SCENARIOS:
            base = base_of(scenario, streams, opened)
            points[streams] += sum(base.points)
            copies += sum(base.copies)
            for plan in plans_of(scenario, streams, base):
                tally.add(plan, play(plan, base, opened))
    print(f"{asked.device}: {len(SCENARIOS)} scenarios, fallible points {dict(points)},")
    print(f"{copies} copies; runs {dict(tally.runs)}, {sum(tally.runs.values())} in all")
    for mode in MODES:
        came = {k.partition(": ")[2]: n for k, n in sorted(tally.outcomes.items())
                if k.startswith(f"{mode}:")}  # fmt: skip
        print(f"  {mode}: {came}")
    print(f"violations {len(tally.problems)}, {monotonic() - started:.0f} s")
    print(*tally.problems[:20], sep="\n")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
