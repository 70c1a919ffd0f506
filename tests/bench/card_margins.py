"""What margins do to decode steps: the longest of them, the middle one, and all together.

`margins`: 256 sequences with an 8B model's KV shape, 16 tokens a frame of 2 MiB, 600 steps of one
token, on a device with nothing in flight. They cross their frames `in phase`, all in the same step,
or `in turn`, as many in each. Ours is with `map_ahead_frames=8`, the raw side of it without
margins, in the same run and in turn: a ratio above 1 says that margins are better. The frames that
a step maps are counted from the device's ledger, and so they are on the null device as well.

It needs nothing that earlier versions did not have: with this file and `card.py` beside their other
benchmarks it measures them too.
"""

from __future__ import annotations

from contextlib import closing
from statistics import median
from typing import Final, NamedTuple

from kvstate import Config, GpuTier, LayerSpec
from kvstate.config import MIB
from kvstate.device import ByteDevice
from tests.bench.card_common import Card, Figure, Laps, Report, opened

FULL: Final = LayerSpec(kv_heads=8, head_dim=128, count=32), 2 * MIB
SMALL: Final = LayerSpec(kv_heads=1, head_dim=64), 4096
"""Layers and the bytes of a frame on the host device, which has less memory."""
FILL: Final = 16
"""Tokens of a frame."""
AHEAD: Final = 8
SHAPES: Final = ("in phase", "in turn")


class Took(NamedTuple):
    """What came of the steps of one manager."""

    longest_ms: float
    median_us: float
    sum_ms: float
    most_frames: int
    sum_frames: int
    mapping_steps: int


UNITS: Final = {
    "longest_ms": ("the longest step", "ms"),
    "median_us": ("the middle step", "us"),
    "sum_ms": ("all steps", "ms"),
    "most_frames": ("frames mapped in one step, at most", "frames"),
    "sum_frames": ("frames mapped in all", "frames"),
    "mapping_steps": ("steps that map", "steps"),
}


def margins(card: Card) -> Report:
    """Steps with margins, and without."""
    report = Report(f"Decode steps with margins of {AHEAD} frames, beside none (wall)")
    for shape in SHAPES:
        found: dict[int, list[Took]] = {AHEAD: [], 0: []}
        for at in range(card.pick(5, 2)):
            for ahead in (AHEAD, 0) if at % 2 else (0, AHEAD):
                with closing(card.open()) as device:
                    found[ahead].append(_steps(card, device, shape, ahead))
        report.figures += [
            _figure(f"{shape}: {name}", unit, found, field) for field, (name, unit) in UNITS.items()
        ]
    return report


def _steps(card: Card, device: ByteDevice, shape: str, ahead: int) -> Took:
    """The steps of one manager, each timed without its settling."""
    sequences, steps = card.pick((256, 600), (16, 60))
    layer, frame = SMALL if card.kind == "host" else FULL
    most = 4 * FILL + steps + (AHEAD + 1) * FILL
    budget = sequences * (most // FILL + 1) * frame
    config = Config(
        layers=[layer], gpu=GpuTier(budget, frame, ahead), max_tokens=most,
        max_sequences=sequences, max_utilization_for_resume=1.0,
    )  # fmt: skip
    laps, times, frames = Laps(), list[float](), list[int]()
    with opened(config, device) as kv:
        seqs = [kv.create() for _ in range(sequences)]
        for at, seq in enumerate(seqs):
            seq.resume()
            phase = at % FILL if shape == "in turn" else 0
            kv.settle(kv.step(kv.batch([seq]), 2 * FILL + phase))
        batch = kv.batch(seqs)
        for _ in range(steps):
            there = len(device.ledger().mappings)
            kv.settle(laps.time("step", kv.step, batch))
            times.append(laps["step"])
            frames.append(len(device.ledger().mappings) - there)
    return Took(
        1e3 * max(times), 1e6 * median(times), 1e3 * sum(times),
        max(frames), sum(frames), sum(count > 0 for count in frames),
    )  # fmt: skip


def _figure(name: str, unit: str, found: dict[int, list[Took]], field: str) -> Figure:
    """The medians over the repeats, and of their ratios."""
    ours, raw = ([getattr(one, field) for one in found[ahead]] for ahead in (AHEAD, 0))
    ratio = median(bare / max(mine, 1e-9) for mine, bare in zip(ours, raw, strict=True))
    clock = "wall" if unit in ("ms", "us") else "counted"
    return Figure(name, median(ours), unit, median(raw), ratio, clock=clock)
