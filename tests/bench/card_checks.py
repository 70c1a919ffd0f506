"""The kernels that write and verify bytes, against a copy on the device.

A copy of N bytes moves 2 N, a write N and a verify N; the ratio is of bytes moved a second. GPU
time is that of the launch with all that belongs to it (descriptions of the segments up, the count
of wrong rows down); wall time is from the call until the result is known. The segments of a case
lie in shuffled order, spread over the memory.

A sampled verify (at most so many bytes) stands beside a copy that moves as many, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, Final

import numpy as np
from attrs import frozen

from kvstate.config import MIB
from kvstate.device import ByteDevice, MapRun, Segments, Stream
from tests.bench.card_common import (
    FRAME,
    GIB,
    KIB,
    Card,
    Figure,
    Raw,
    Report,
    handle,
    micros,
    must_hold,
    pairs,
    rate,
    segments,
    wall,
)

CASES: Final = (
    (1, 4 * GIB, 128 * KIB),
    (256, 16 * MIB, 128 * KIB),
    (65_536, 64 * KIB, 64 * KIB),
    (1, 4 * GIB, 80 * KIB + 16),
)
TINY: Final = (
    (1, 4 * MIB, 128 * KIB), (8, 512 * KIB, 128 * KIB), (16, 64 * KIB, 64 * KIB),
    (1, 4 * MIB, 80 * KIB + 16),
)  # fmt: skip
"""Segments, bytes of each, bytes of a row."""


@frozen
class Bench:
    """Mapped memory of the device, and as much raw memory twice."""

    device: ByteDevice
    raw: Raw
    stream: Stream
    base: int
    size_bytes: int
    source: int
    target: int

    def memcpy(self, size_bytes: int) -> None:
        """Issue a copy on the device."""
        self.raw.move(self.target, self.source, size_bytes)

    def memcpy_s(self, size_bytes: int) -> dict[str, float]:
        """Seconds of a copy of that size, by clock."""
        issue = partial(self.memcpy, size_bytes)

        def whole() -> None:
            issue()
            self.raw.synchronize()

        return {"wall": wall(whole), "GPU": self.raw.gpu(issue)}

    def ours_s(self, launch: Callable[[], Any], finish: Callable[[Any], Any]) -> dict[str, float]:
        """The same of a launch of ours."""
        where = handle(self.device, self.stream)
        return {"wall": wall(lambda: finish(launch())), "GPU": self.raw.gpu(launch, where)}


def checks(card: Card) -> Report:
    """Write and verify kernels against a copy on the device."""
    report, size = Report("Byte checks against a copy on the device"), card.pick(4 * GIB, 4 * MIB)
    with closing(card.open()) as device, closing(card.raw()) as raw:
        base = device.reserve(size, FRAME)
        device.map([MapRun(base, device.create(size // FRAME, FRAME))])
        bench = Bench(
            device, raw, device.stream(), base, size, raw.alloc(size), raw.alloc(size)
        )  # fmt: skip
        for case in card.pick(CASES, TINY):
            report.figures += _case(bench, *case)
        report.figures += _sampled(bench, card)
    return report


def _places(bench: Bench, count: int, size: int, row: int) -> Segments:
    """That many segments, evenly spread, in shuffled order."""
    places = bench.base + np.random.default_rng(0).permutation(count) * (bench.size_bytes // count)
    return segments([(int(place), size // row) for place in places])


def _case(bench: Bench, count: int, size: int, row: int) -> list[Figure]:
    device, stream = bench.device, bench.stream
    device.set_rows(row)
    wanted = _places(bench, count, size, row)
    moved = size // row * row * count
    calls = {
        "write": (lambda: device.write(stream, wanted), lambda _: device.synchronize(stream)),
        "verify": (lambda: device.verify(stream, wanted), _known),
    }
    figures = []
    for name, (launch, finish) in calls.items():
        found = pairs(partial(bench.ours_s, launch, finish), partial(bench.memcpy_s, moved))
        title = f"{name} {count} x {size // KIB} KiB, rows of {row}"
        for clock, pair in found.items():
            aim = 0.9 if clock == "GPU" else None
            figures.append(rate(title, pair, moved, 2 * moved, clock=clock, aim=aim))
    must_hold(device, stream, wanted)
    return figures


def _known(check: Any) -> None:
    """The result of a verify is known, and good."""
    if sum(check.wrong):
        raise AssertionError(f"{sum(check.wrong)} token rows are wrong")


def _sampled(bench: Bench, card: Card) -> list[Figure]:
    """Time of a verify by `most_bytes`."""
    device, stream, row = bench.device, bench.stream, 128 * KIB
    device.set_rows(row)
    wanted = _places(bench, 1, bench.size_bytes, row)
    device.write(stream, wanted)
    figures = []
    for part in card.pick((1024, 256, 64, 16, 4, 1), (16, 4, 1)):
        most = bench.size_bytes // part
        launch = partial(device.verify, stream, wanted, most)
        check = launch()
        _known(check)
        found = pairs(partial(bench.ours_s, launch, _known), partial(bench.memcpy_s, most // 2))
        for clock, pair in found.items():
            details = {"MiB looked at": check.size_bytes / MIB}
            title = f"verify at most {most / MIB:g} MiB of {bench.size_bytes // MIB}"
            figures.append(micros(title, pair, clock=clock, details=details))
    must_hold(device, stream, wanted)
    return figures
