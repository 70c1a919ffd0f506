"""What a fuzz spends on looking: the calls of some episodes, drawn with every check on, and played
again with each of them alone, on the host device.

Run by hand: `PYTHONPATH=. python tests/bench/looks.py`. Processor time, the middle of three rounds
in turn. Drawing and the schedule of failures are the same in all, so what differs is the looking.
"""

from __future__ import annotations

import logging
from statistics import median
from time import process_time
from typing import Any
from unittest.mock import patch

from kvstate import trace
from kvstate.campaign import fuzz
from kvstate.campaign.player import ALL, Look, Player
from kvstate.device import ByteDevice
from kvstate.gpu import open_device

EPISODES, ROUNDS, SEED = 25, 3, 1
LOOKS = {
    "production": Look(0), "order": Look.ORDER, "bytes": Look.BYTES, "laws": Look.LAWS,
    "laws and bytes": Look.LAWS | Look.BYTES, "everything": ALL,
}  # fmt: skip
Program = tuple[trace.Header, list[trace.AnyCall]]


def opened(streams: str, seed: int) -> ByteDevice:
    """A host device."""
    return open_device("host", streams=streams, seed=seed)


def drawn() -> list[Program]:
    """The programs of the first episodes of a campaign."""
    programs: list[Program] = []

    class Noting(Player):
        def __init__(self, header: trace.Header, device: ByteDevice, *rest: Any) -> None:
            super().__init__(header, device, *rest)
            programs.append((header, []))

        def apply(self, call: trace.AnyCall) -> trace.AnyCall:
            done = super().apply(call)
            programs[-1][1].append(done)
            return done

    with patch.object(fuzz, "Player", Noting):
        for number in range(EPISODES):
            assert not fuzz.episode(f"{SEED}/0/{number}", opened, fuzz.ANY).failures
    return programs


def took(programs: list[Program], look: Look) -> float:
    """Seconds of processor time to play them."""
    begun = process_time()
    for header, calls in programs:
        player = Player(header, opened(header.streams, header.seed), look)
        for call in calls:
            player.apply(call)
        player.abandon()
    return process_time() - begun


def main() -> None:
    logging.disable()
    programs = drawn()
    calls = sum(len(one) for _, one in programs)
    rounds = [{name: took(programs, look) for name, look in LOOKS.items()} for _ in range(ROUNDS)]
    print(f"{calls} calls in {EPISODES} episodes; microseconds of processor time a call")
    middle = {name: median(one[name] for one in rounds) for name in LOOKS}
    for name, seconds in middle.items():
        times = seconds / middle["production"]
        print(f"  {name:16} {seconds / calls * 1e6:7.0f}  {times:5.2f} times production")


if __name__ == "__main__":
    main()
