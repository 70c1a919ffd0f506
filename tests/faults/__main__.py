"""Plays every scenario with a failure at every point, and says how much that was.

`PYTHONPATH=. python -m tests.faults [--device cuda] [--streams eager] [--workers 2]`
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
from collections import Counter
from functools import partial
from itertools import product
from time import monotonic

from kvstate.device import ByteDevice
from kvstate.gpu import open_device
from kvstate.gpu.driver import Driver
from kvstate.gpu.streams import MODES as STREAMS
from tests.faults.exhaust import MODES, Tally, base_of, plans_of, play
from tests.faults.scenarios import SCENARIOS

Job = tuple[str, int, int]
"""A mode of streams, the number of a scenario, and which part of its runs."""
PARTS = 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="host")
    parser.add_argument("--streams", choices=STREAMS, action="append")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    started, total = monotonic(), Tally()
    jobs = list(product(asked.streams or STREAMS, range(len(SCENARIOS)), range(PARTS)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(asked.workers, _begin, (asked.device,)) as pool:
        for tally in pool.imap_unordered(partial(_play, asked.device), jobs):
            total.merge(tally)
    print(f"{asked.device}: {len(SCENARIOS)} scenarios, fallible points {dict(total.points)},")
    print(f"{total.copies} copies; runs {dict(total.runs)}, {sum(total.runs.values())} in all")
    for mode in MODES:
        came = {k.partition(": ")[2]: n for k, n in sorted(total.outcomes.items())
                if k.startswith(f"{mode}:")}  # fmt: skip
        print(f"  {mode}: {came}")
    print(f"violations {len(total.problems)}, {monotonic() - started:.0f} s")
    print(*total.problems[:20], sep="\n")
    return 1 if total.problems else 0


def _begin(device: str) -> None:
    """A worker is quiet, and keeps the context of a card while devices come and go: to make one
    takes longer than a run."""
    logging.disable()
    if device.startswith("cuda"):
        _held.append(Driver(0))


_held: list[Driver] = []


def _play(device: str, job: Job) -> Tally:
    """Some of the runs of one scenario."""
    streams, number, part = job

    def opened(streams: str) -> ByteDevice:
        return open_device(device, streams=streams, seed=1, limit_s=0.3)

    scenario, tally = SCENARIOS[number], Tally()
    base = base_of(scenario, streams, opened)
    if not part:
        tally.points, tally.copies = Counter({streams: sum(base.points)}), sum(base.copies)
    for plan in list(plans_of(scenario, streams, base))[part::PARTS]:
        tally.add(plan, play(plan, base, opened))
    return tally


if __name__ == "__main__":
    sys.exit(main())
