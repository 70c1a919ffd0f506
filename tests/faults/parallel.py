"""The runs of all scenarios, in several processes.

They are not in `__main__`: processes that are spawned do not find what is defined there.
"""

from __future__ import annotations

import logging
import multiprocessing
from collections import Counter
from functools import partial
from itertools import product
from typing import Final

from kvstate.device import ByteDevice
from kvstate.gpu import open_device
from kvstate.gpu.driver import Driver
from tests.faults.exhaust import Tally, base_of, plans_of, play
from tests.faults.scenarios import SCENARIOS

Job = tuple[str, int, int]
"""A mode of streams, the number of a scenario, and which part of its runs."""
PARTS: Final = 8
LIMIT_S: Final = 1.0
"""How long is waited for a copy that never ends: more than a busy card takes for all others."""


def play_all(device: str, modes: tuple[str, ...], workers: int) -> Tally:
    """Play every run on that device, in each of these modes of streams."""
    total, jobs = Tally(), list(product(modes, range(len(SCENARIOS)), range(PARTS)))
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _begin, (device,)) as pool:
        for tally in pool.imap_unordered(partial(_play, device), jobs):
            total.merge(tally)
    return total


def _begin(device: str) -> None:
    """A worker is quiet, and keeps the context of a card while devices come and go: to make one
    takes longer than a run."""
    logging.disable()
    if device.startswith("cuda"):
        _held.append(Driver(0).retain())


_held: list[Driver] = []


def _play(device: str, job: Job) -> Tally:
    """Some of the runs of one scenario."""
    streams, number, part = job

    def opened(streams: str) -> ByteDevice:
        return open_device(device, streams=streams, seed=1, limit_s=LIMIT_S)

    scenario, tally = SCENARIOS[number], Tally()
    base = base_of(scenario, streams, opened)
    if not part:
        tally.points, tally.copies = Counter({streams: sum(base.points)}), sum(base.copies)
    for plan in list(plans_of(scenario, streams, base))[part::PARTS]:
        tally.add(plan, play(plan, base, opened))
    return tally
