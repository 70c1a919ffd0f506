"""What single calls of the device cost, and how many of them a request costs in a steady state.

`calls`: microseconds as the caller sees them (wall), through the device and, beside it, the bare
driver calls that it makes: the difference is our bookkeeping. Nothing waits inside what is timed,
but for `quiesce`.

`steady`: equal requests, many at a time, through a manager on the device, and in turn the same on
the null device, which is the bookkeeping alone: the ratio says what the device's calls cost. No
bytes move and none are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, Final

import numpy as np

from kvstate import Config, GpuTier, LayerSpec, Manager, Sequence
from kvstate.device import MAPPING_CALLS, ByteDevice, CopyRun, Device, Direction, MapRun, UnmapRun
from kvstate.gpu import NullDevice
from tests.bench.card_common import (
    FRAME,
    KIB,
    Card,
    Figure,
    Laps,
    Raw,
    Report,
    Side,
    micros,
    pairs,
    segments,
    wall,
)

FRAMES: Final = 16
ROW: Final = 128 * KIB
RUNS: Final = 64
RUN_BYTES: Final = 16 * KIB
SPREAD_BYTES: Final = 2 * RUNS * RUN_BYTES
"""Of the runs with the gaps between them: one frame."""


def calls(card: Card) -> Report:
    """Microseconds of single calls, beside the bare driver calls."""
    report, repeats = Report("Calls of the device (wall)"), card.pick(200, 7)
    with closing(card.open()) as device, closing(card.raw()) as raw:
        sides = [_mapping(device, raw, 1), _mapping(device, raw, FRAMES)]
        sides += [_issuing(device, raw), (_launching(device), dict)]
        for ours, bare in sides:
            for name, pair in pairs(ours, bare, repeats, warm=3).items():
                added = {} if pair.raw is None else {"added us": 1e6 * (pair.ours - pair.raw)}
                report.figures.append(micros(name, pair, details=added))
        if device.faults:
            raise AssertionError(device.faults[:3])
    return report


def _mapping(device: ByteDevice, raw: Raw, count: int) -> tuple[Side, Side]:
    """Create, map, unmap and release that many frames, in one call each."""
    size = count * FRAME
    base, place = device.reserve(size, FRAME), raw.reserve(size)
    names = [f"{name} {count}" for name in ("create", "map", "unmap", "release")]

    def ours() -> Laps:
        laps = Laps()
        frames = laps.time(names[0], device.create, count, FRAME)
        laps.time(names[1], device.map, [MapRun(base, frames)])
        laps.time(names[2], device.unmap, [UnmapRun(base, count)])
        laps.time(names[3], device.release, frames)
        return laps

    def bare() -> Laps:
        laps = Laps()
        frames = laps.time(names[0], raw.create, count, FRAME)
        laps.time(names[1], raw.map, place, frames, FRAME)
        laps.time(names[2], raw.unmap, place, size)
        laps.time(names[3], raw.release, frames)
        return laps

    device.quiesce()
    return ours, bare


def _issuing(device: ByteDevice, raw: Raw) -> tuple[Side, Side]:
    """Events, copies and waits."""
    size, stream = SPREAD_BYTES, device.stream()
    base = device.reserve(FRAME, FRAME)
    device.map([MapRun(base, device.create(1, FRAME))])
    runs = _runs(device.host_reserve(size), base)
    place, buffer = raw.alloc(size), raw.pin(size)
    batch = raw.batch(_runs(buffer, place))

    def ours() -> Laps:
        laps = Laps()
        laps.time("record", device.record, stream)
        _copied(laps, "copy of 1 run", device.copy, device.quiesce, Direction.OUT, runs[:1])
        _copied(laps, f"copy of {RUNS} runs", device.copy, device.quiesce, Direction.OUT, runs)
        laps.time("poll, nothing pending", device.poll)
        laps.time("quiesce, idle", device.quiesce)
        return laps

    def bare() -> Laps:
        laps = Laps()
        laps.time("record", raw.record)
        one = (Direction.OUT, buffer, place, RUN_BYTES)
        _copied(laps, "copy of 1 run", raw.copy, raw.synchronize, *one)
        _copied(laps, f"copy of {RUNS} runs", batch, raw.synchronize)
        laps.time("quiesce, idle", raw.synchronize)
        return laps

    return ours, bare


def _runs(host: int, gpu: int) -> list[CopyRun]:
    """Runs with gaps between them, out to the host."""
    return [CopyRun(host + at, gpu + at, RUN_BYTES) for at in range(0, SPREAD_BYTES, 2 * RUN_BYTES)]


def _copied(
    laps: Laps, name: str, copy: Callable[..., Any], wait: Callable[[], Any], *args: Any
) -> None:
    """Time the issue, and not the wait after it."""
    laps.time(name, copy, *args)
    wait()


def _launching(device: ByteDevice) -> Side:
    """Launches of what a simulated engine does: 16 rows of its table, 2 MiB of tokens."""
    base, stream = device.reserve(FRAME, FRAME), device.stream()
    device.map([MapRun(base, device.create(1, FRAME))])
    device.set_rows(ROW)
    rows, one = list(range(16)), segments([(base, FRAME // ROW)])

    def ours() -> Laps:
        laps = Laps()
        for name, call, *args in (
            ("publish 16 rows", device.publish, rows, [base] * 16, rows),
            ("write, 1 segment", device.write, one),
            ("verify, 1 segment", device.verify, one),
        ):
            check = laps.time(name, call, stream, *args)
            device.synchronize(stream)
        if sum(check.wrong):
            raise AssertionError(f"{sum(check.wrong)} token rows are wrong")
        return laps

    return ours


# The steady state.

LAYERS: Final = 32
CHUNK: Final = 256


def serving(device: Device, running: int, tokens: int, layers: int = LAYERS) -> Manager:
    """A manager of an 8B model's shape, whose budget is just what runs."""
    row = LayerSpec(kv_heads=8, head_dim=128, count=layers)
    frames = -(-tokens * row.token_bytes // FRAME)
    config = Config(
        layers=[row],
        gpu=GpuTier(running * frames * FRAME, FRAME),
        max_tokens=tokens,
        max_sequences=running,
        max_utilization_for_resume=1.0,
    )
    return Manager(config, device)


def serve(kv: Manager, requests: int, prompt: int, answer: int) -> int:
    """Requests from their creation to their close, one more a step while there is room; steps."""
    running, batch, steps = kv.config.max_sequences, kv.batch([]), 0
    written: dict[Sequence, int] = {}
    while requests or written:
        if requests and len(written) < running:
            seq = kv.create(max_tokens=prompt + answer)
            seq.resume()
            batch.add(seq)
            written[seq] = 0
            requests -= 1
        counts = [max(1, min(CHUNK, prompt - done)) for done in written.values()]
        kv.settle(kv.step(batch, np.array(counts)))
        steps += 1
        for seq, count in zip(list(written), counts, strict=True):
            written[seq] += count
            if written[seq] == prompt + answer:
                seq.close()
                batch.remove(seq)
                del written[seq]
    return steps


def steady(card: Card) -> Report:
    """Mapping calls a request once everything is mapped, and steps a second."""
    running, prompt, answer = card.pick((64, 512, 128), (4, 64, 16))
    rounds, requests = card.pick(6, 3), 4 * running
    layers = card.pick(LAYERS, 4)
    with (
        serving(card.open(), running, prompt + answer, layers) as kv,
        serving(NullDevice(), running, prompt + answer, layers) as books,
    ):
        first = serve(kv, requests * rounds // 10, prompt, answer)
        serve(books, requests * rounds // 10, prompt, answer)
        before = _mapping_calls(kv)
        steps: list[int] = []

        def ours() -> dict[str, float]:
            return {"step": wall(lambda: steps.append(serve(kv, requests, prompt, answer)))}

        pair = pairs(
            ours, lambda: {"step": wall(lambda: serve(books, requests, prompt, answer))}, rounds
        )["step"]
        served, made = len(steps) * requests, _mapping_calls(kv) - before
    report = Report("Steady state: mapping calls a request (aim: 0)")
    counts = {"requests": served, "calls": made, "calls before": before, "steps before": first}
    report.figures += [
        Figure("create, map, unmap, release", made / served, "calls/request", details=counts),
        Figure(
            "steps, beside the null device", steps[-1] / pair.ours, "1/s",
            steps[-1] / (pair.raw or 1), pair.ratio,
            details={"running": running, "MiB a request": (prompt + answer) * layers * 4 // 1024},
        ),
    ]  # fmt: skip
    return report


def _mapping_calls(kv: Manager) -> int:
    return sum(kv.device.calls.get(name, 0) for name in MAPPING_CALLS)
