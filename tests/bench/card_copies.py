"""Suspend and resume against one pinned memcpy of the same bytes.

That ranges are contiguous on the GPU is worth what this shows: a sequence goes to an empty host
tier as one copy, whatever its block size, and as few when the free slots lie scattered. Both
directions, from the call until its end was delivered (wall), beside the issue of one memcpy and
the wait for it. Apart from that: what the call alone takes (`issue`), and what the copy itself
takes on the GPU. What one entry a block gives, at the same settings, is measured the same way.

The host tier is scattered by a replay: sequences of mixed lengths fill it and are closed in random
order, at first one for each that comes, then without any more until half of it is free.

The bytes are written once. In each part they go there and back with everything overwritten that is
copied to, and are verified; a wrong one fails the benchmark.

A configuration pads its blocks to a sixteenth of a frame, 128 KiB here, so that no manager has the
two smallest block sizes with such frames; for those alone the padding is made finer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, Final
from unittest import mock

import numpy as np
from attrs import frozen

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.config import MIB
from kvstate.device import ByteDevice, CopyRun, Direction, FillRun, Segments, Stream
from kvstate.gpu.cuda import CudaDevice
from kvstate.gpu.traffic import Pending, Traffic
from kvstate.pattern import SCRUB_BYTE
from tests.bench.card_common import (
    FRAME,
    KIB,
    Card,
    Figure,
    Laps,
    Raw,
    Report,
    must_hold,
    opened,
    pairs,
    rate,
    segments,
    wall,
)

BLOCKS: Final = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
BLOCK_TOKENS: Final = 16
HOST_BYTES: Final = 2304 * MIB
PARTS: Final = (4, 9)
"""The sequence's part of the host tier: 1 GiB of 2.25."""
LIVING: Final = 400
"""About how many sequences fill the host tier in the replay."""
HOLD_S: Final = 5e-3
Calls = Mapping[str, tuple[Callable[[], Any], Callable[[], Any]]]
"""The issue of a copy, and the wait for its end, by name."""
WAYS: Final = {"suspend": Direction.OUT, "resume": Direction.IN}


class TimedTraffic(Traffic):
    """Lets the raw side's events take the GPU time of every copy."""

    raw: Raw

    def _issue(self, one: Pending) -> bool:
        self.raw.begin(self.streams[one.direction])
        issued = super()._issue(one)
        self.raw.end(self.streams[one.direction])
        return issued


class Timed(CudaDevice):
    """A device whose copies are timed."""

    def __init__(self, ordinal: int, raw: Raw) -> None:
        super().__init__(ordinal)
        self.timed = TimedTraffic(self, self.traffic.streams)
        self.traffic, self.timed.raw = self.timed, raw

    def hold(self, direction: Direction, seconds: float) -> None:
        """Keep the next copy that way from beginning for about that long."""
        self.timed.raw.hold(self.traffic.streams[direction], seconds)


@frozen
class Bench:
    """One manager with one large sequence, and the raw side's two buffers."""

    card: Card
    kv: Manager
    device: ByteDevice
    raw: Raw
    seq: Sequence
    stream: Stream
    on_gpu: int
    """The raw side's memory on the device."""
    on_host: int

    @property
    def size_bytes(self) -> int:
        """What a copy of the sequence moves."""
        return self.seq.length_tokens * self.kv.geometry.row_bytes

    @property
    def written(self) -> Segments:
        """All of the sequence's token rows, where they are now."""
        assert self.seq.base is not None
        return segments([(self.seq.base, self.seq.length_tokens)])

    @property
    def calls(self) -> Calls:
        """Suspend and resume of the sequence."""
        kv, seq, stream = self.kv, self.seq, self.stream
        wait = partial(_landed, kv)
        return {
            "suspend": (lambda: kv.suspend(seq), wait),
            "resume": (lambda: kv.resume(seq, stream), wait),
        }

    def memcpy(self, direction: Direction) -> None:
        """One copy of the same size, and the wait for it."""
        self.issue(direction)
        self.raw.synchronize()

    def issue(self, direction: Direction) -> None:
        """One copy of the same size."""
        ends = (self.on_host, self.on_gpu)
        target, source = ends if direction is Direction.OUT else ends[::-1]
        self.raw.copy(direction, target, source, self.size_bytes)

    def ours_s(self, calls: Calls) -> Laps:
        """Seconds of each call with the wait for its end, and of the call alone."""
        laps = Laps()
        for name, (issue, wait) in calls.items():
            laps.time(f"{name}, issue", issue)
            laps[name] = laps[f"{name}, issue"] + wall(wait)
        return laps

    def memcpy_s(self) -> dict[str, float]:
        """Seconds of the memcpy each way."""
        return {name: wall(partial(self.memcpy, way)) for name, way in WAYS.items()}

    def gpu_s(self, calls: Calls, hold_s: float) -> dict[str, float]:
        """Seconds of the copies in calls of ours, on the GPU."""
        found = {}
        for name, (issue, wait) in calls.items():
            if isinstance(self.device, Timed):
                self.device.hold(WAYS[name], hold_s)
            took = wall(issue) + wall(wait)
            found[name] = self.raw.elapsed() or took
        return found


def copies(card: Card) -> Report:
    """Suspend and resume against one pinned memcpy, with an empty and a scattered host tier."""
    report = Report("Copies of one sequence against one pinned memcpy (wall; GPU beside it)")
    with closing(card.raw()) as raw:
        host_bytes = max(_host_bytes(card, block) for block in BLOCKS)
        largest = host_bytes * PARTS[0] // PARTS[1]
        buffers = raw.alloc(largest), raw.pin(largest)
        for block in card.pick(BLOCKS, BLOCKS[::2]):
            # A finer padding than a configuration has, for the two smallest.
            with mock.patch("kvstate.config.SIXTEENTH", max(16, FRAME // block)):
                report.figures += _of_block(card, raw, buffers, block)
    return report


def _of_block(card: Card, raw: Raw, buffers: tuple[int, int], block: int) -> list[Figure]:
    device = _device(card, raw)
    config = _config(card, block)
    with opened(config, device) as kv:
        if kv.geometry.block_bytes != block:
            raise AssertionError(f"blocks have {kv.geometry.block_bytes} bytes, not {block}")
        seq, stream = kv.create(), device.stream()
        seq.resume(stream)
        kv.settle(kv.step(kv.batch([seq]), config.max_tokens))
        device.set_rows(kv.geometry.row_bytes)
        bench = Bench(card, kv, device, raw, seq, stream, *buffers)
        device.write(stream, bench.written)
        figures = _there_and_back(bench, block, "empty", 0.97)
        figures += _block_by_block(bench, block)
        _scatter(kv, np.random.default_rng(block))
        figures += _there_and_back(bench, block, "scattered", 0.9)
        must_hold(device, stream, bench.written)
    return figures


def _host_bytes(card: Card, block: int) -> int:
    """The host tier's size: whole units of the sequence's part, with not too many slots."""
    most = card.pick(HOST_BYTES, max(9 * MIB, 9 * block))
    return most // (block * PARTS[1]) * block * PARTS[1]


def _config(card: Card, block: int) -> Config:
    host, row = _host_bytes(card, block), block // BLOCK_TOKENS
    return Config(
        layers=[LayerSpec(kv_heads=row // 512, head_dim=128)],
        gpu=GpuTier(3 * host, FRAME),
        host=HostTier(host),
        tokens_per_block=BLOCK_TOKENS,
        max_tokens=host * PARTS[0] // PARTS[1] // row,
        max_sequences=2 * LIVING,
        max_utilization_for_resume=1.0,
    )


def _device(card: Card, raw: Raw) -> ByteDevice:
    if not card.on_gpu:
        return card.open()
    return Timed(card.ordinal, raw)


def _there_and_back(bench: Bench, block: int, host: str, aim: float) -> list[Figure]:
    """Suspend and resume, with what they make of the host tier's free slots."""
    runs = _proved(bench, bench.calls)
    details = _sizes(bench, block, len(runs), sum(runs) / len(runs))
    return _compare(bench, bench.calls, host, details, aim)


def _compare(
    bench: Bench, calls: Calls, what: str, details: dict[str, float], aim: float | None
) -> list[Figure]:
    """Whole calls in turn with the memcpy, then the GPU's time of both."""
    found = pairs(lambda: bench.ours_s(calls), bench.memcpy_s)
    held = max(HOLD_S, *(found[name].ours for name in WAYS))
    on_gpu = _on_gpu(bench, calls, held)
    figures = []
    for name in WAYS:
        more = {"issue us": 1e6 * found[f"{name}, issue"].ours} | on_gpu[name]
        title = f"{name}, {what}"
        figures.append(rate(title, found[name], bench.size_bytes, details=details | more, aim=aim))
    return figures


def _on_gpu(bench: Bench, calls: Calls, hold_s: float) -> dict[str, dict[str, float]]:
    """GB/s on the GPU, ours and the memcpy's, by direction."""
    found = pairs(
        lambda: bench.gpu_s(calls, hold_s),
        lambda: {name: bench.raw.gpu(partial(bench.issue, way)) for name, way in WAYS.items()},
        repeats=5,
    )
    size = bench.size_bytes / 1e9
    return {
        name: {"GPU GB/s": size / pair.ours, "GPU memcpy": size / (pair.raw or 1),
               "GPU ratio": pair.ratio or 0}
        for name, pair in found.items()
    }  # fmt: skip


def _proved(bench: Bench, calls: Calls) -> list[int]:
    """There and back with everything overwritten that is copied to; blocks of each run."""
    kv, device, base = bench.kv, bench.device, bench.seq.base
    assert base is not None
    device.fill([FillRun(kv.host.address, kv.host.capacity * kv.host.block_bytes)], SCRUB_BYTE)
    for name, (issue, wait) in calls.items():
        issue()
        wait()
        if name == "suspend":
            runs = [high - low for _, low, high in bench.seq.slots]
            device.fill([FillRun(base, bench.size_bytes)], SCRUB_BYTE)
    must_hold(device, bench.stream, bench.written)
    return runs


def _sizes(bench: Bench, block: int, runs: int, blocks: float) -> dict[str, float]:
    return {
        "block KiB": block // KIB, "MiB": bench.size_bytes / MIB, "runs": runs,
        "blocks a run": blocks, "run KiB": blocks * block / KIB,
    }  # fmt: skip


def _block_by_block(bench: Bench, block: int) -> list[Figure]:
    """The same bytes with one entry a block."""
    base, host, device = bench.seq.base, bench.kv.host.address, bench.device
    assert base is not None
    places = range(0, bench.size_bytes, block)
    out = [CopyRun(host + at, base + at, block) for at in places]
    back = [CopyRun(base + at, host + at, block) for at in places]
    calls: Calls = {
        "suspend": (lambda: device.copy(Direction.OUT, out), device.quiesce),
        "resume": (lambda: device.copy(Direction.IN, back), device.quiesce),
    }
    _proved(bench, calls)
    return _compare(bench, calls, "block by block", _sizes(bench, block, len(out), 1), None)


# The replay that scatters the free slots.


def _scatter(kv: Manager, random: np.random.Generator) -> None:
    """Fill the host tier, replace its sequences in random order, close until half of it is
    free."""
    host, living, lengths = kv.host, list[Sequence](), _lengths(kv, random)
    for tokens in lengths:
        while kv.geometry.blocks(tokens) > host.free:
            _close_one(living, random)
        living.append(_suspended(kv, tokens))
    while host.free * 2 < host.capacity:
        _close_one(living, random)


def _lengths(kv: Manager, random: np.random.Generator) -> list[int]:
    """Lognormal lengths in tokens, so that about `LIVING` of them fill the host tier."""
    mean = kv.host.capacity / LIVING * BLOCK_TOKENS
    found = random.lognormal(np.log(mean) - 0.32, 0.8, 2 * LIVING)
    return [int(one) for one in np.clip(found, 1, kv.config.max_tokens // 2)]


def _suspended(kv: Manager, tokens: int) -> Sequence:
    seq = kv.create(max_tokens=tokens)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), tokens))
    seq.suspend()
    _landed(kv)
    return seq


def _landed(kv: Manager) -> None:
    """Poll until no copy is in flight."""
    while kv.flight.transfers:
        kv.poll()


def _close_one(living: list[Sequence], random: np.random.Generator) -> None:
    living.pop(int(random.integers(len(living)))).close()
