"""What waits for what: calls and an engine's own work beside copies that are on the way.

Each figure is the time of one thing beside others that it has nothing to do with; `raw` is the same
thing alone, in the same run, and the ratio says how much of its speed is left. Only public calls
are used, so that the file runs over older trees too; what a tree has not is said in `words`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from statistics import median
from time import perf_counter
from typing import Any, Final

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.config import MIB
from kvstate.device import Direction
from tests.bench.card_common import FRAME, GIB, Card, CudaRaw, Figure, Report

ROW: Final = 128 << 10
FRAME_TOKENS: Final = FRAME // ROW
LATE_S: Final = 0.2
OTHER_S: Final = 0.15
REPEATS: Final = 5
MANY: Final = 256
PACED: Final = "pace_bytes" in signature(HostTier).parameters


def flight(card: Card) -> Report:
    """Calls beside copies in flight"""
    report = Report("what waits for what")
    if not card.on_gpu:
        report.words.append("only a card has copies that take their time")
        return report
    if not PACED:
        report.words.append("this tree paces no suspends")
    with Bench(card) as bench:
        for measure in (short_suspend, fork_behind_loads, resume_after_suspend, polls):
            report.figures += bench.alone(measure)
    for pace in (None, 64 * MIB, 256 * MIB) if PACED else (None,):
        with Bench(card, pace) as bench:
            for measure in (growth, readback, partial(throughput, 1e-3), partial(throughput, 5e-3)):
                report.figures += bench.alone(measure)
    with Bench(card) as bench:
        report.figures += there_and_back(bench)
    return report


class Bench:
    """A manager with 10 GiB in each tier, and streams."""

    def __init__(self, card: Card, pace: int | None = None) -> None:
        paced = {"pace_bytes": pace} if pace else {}
        config = Config(
            layers=[LayerSpec(kv_heads=8, head_dim=128, dtype="bfloat16", count=32)],
            gpu=GpuTier(10 * GIB, FRAME), host=HostTier(10 * GIB, **paced),
            tokens_per_block=16, max_tokens=9 * GIB // ROW, max_sequences=400,
            max_utilization_for_resume=1.0, write_through="off",
        )  # fmt: skip
        self.pace = "all at once" if pace is None else f"{pace // MIB} MiB"
        self.device: Any = card.open()
        self.raw: Any = CudaRaw(card.ordinal)
        self.kv = Manager(config, self.device)
        self.stream, self.other = self.device.stream(), self.device.stream()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize(self.stream)
        self.raw.synchronize()
        self.kv.close()
        self.raw.close()

    def alone(self, measure: Callable[[Bench], list[Figure]]) -> list[Figure]:
        """Measure something; then no sequence is left."""
        found = measure(self)
        self.landed(*self.kv.sequences.values())
        for seq in list(self.kv.sequences.values()):
            seq.close()
        return found

    def running(self, size_bytes: int, count: int = 1, stream: Any = None) -> list[Sequence]:
        """Sequences of that size, whose tokens are settled."""
        seqs = [self.kv.create(max_tokens=max(size_bytes // ROW, 512)) for _ in range(count)]
        for seq in seqs:
            seq.resume(stream or self.stream)
            self.kv.settle(self.kv.step(self.kv.batch([seq]), size_bytes // ROW))
        return seqs

    def landed(self, *seqs: Sequence) -> None:
        """Poll until no copy of these is in flight."""
        while any(seq.transfer is not None for seq in seqs):
            self.kv.poll()

    def suspended(self, *seqs: Sequence) -> None:
        for seq in seqs:
            seq.suspend()
        self.landed(*seqs)

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Another stream runs a kernel for about that long."""
        self.raw.hold(self.raw.stream, seconds)
        yield
        self.raw.synchronize()

    def late(self) -> Any:
        """An event behind that."""
        return self.device.record(self.raw.stream)


def timed(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def beside(name: str, alone: list[float], ours: list[float], **details: float) -> Figure:
    """Milliseconds of something beside others, and alone."""
    raw, mine = median(alone) * 1e3, median(ours) * 1e3
    return Figure(name, mine, "ms", raw, raw / mine, details={"longest": max(ours) * 1e3} | details)


def short_suspend(bench: Bench) -> list[Figure]:
    """Of 20 tokens, behind one that waits for a late event."""
    slow, short = bench.running(20 * ROW, 2)
    alone, ours = [], []

    def there() -> None:
        short.suspend()
        bench.landed(short)

    for _ in range(REPEATS):
        alone.append(timed(there))
        short.resume(bench.stream)
        bench.landed(short)
        with bench.busy(LATE_S):
            slow.suspend(after=bench.late())
            ours.append(timed(there))
        bench.landed(slow)
        for seq in (slow, short):
            seq.resume(bench.stream)
        bench.landed(slow, short)
    return [beside("suspend of 20 tokens behind a late one", alone, ours)]


def fork_behind_loads(bench: Bench) -> list[Figure]:
    """Copies on the device beside 8 GiB that come back."""
    (parent,), (big,) = bench.running(20 * ROW), bench.running(8 * GIB)
    stream = bench.device.stream()
    alone, ours = [], []

    def there() -> None:
        child = parent.fork(max_tokens=512, stream=stream)
        bench.device.synchronize(stream)
        child.close()

    there()
    for _ in range(3):
        alone.append(timed(there))
        bench.suspended(big)
        big.resume(bench.stream)
        ours.append(timed(there))
        bench.landed(big)
    return [beside("fork behind 8 GiB of loads", alone, ours)]


def resume_after_suspend(bench: Bench) -> list[Figure]:
    """Its copy out has ended and nobody has polled; another stream runs a kernel."""
    (seq,) = bench.running(20 * ROW)
    alone, ours = [], []

    def there() -> None:
        seq.resume(bench.stream)
        bench.device.synchronize(bench.stream)

    for _ in range(REPEATS):
        bench.suspended(seq)
        alone.append(timed(there))
        bench.landed(seq)
        seq.suspend()
        time.sleep(0.05)
        if hasattr(bench.kv, "ended"):
            bench.kv.ended()
            time.sleep(0.05)
        with bench.busy(OTHER_S):
            ours.append(timed(there))
        bench.landed(seq)
    return [beside("resume after a suspend that has ended", alone, ours)]


def polls(bench: Bench) -> list[Figure]:
    """With many copies in flight."""
    seqs = bench.running(20 * ROW, MANY)
    alone = [timed(bench.kv.poll) for _ in range(50)]
    with bench.busy(LATE_S * 2):
        event = bench.late()
        for seq in seqs:
            seq.suspend(after=event)
        ours = [timed(bench.kv.poll) for _ in range(50)]
    bench.landed(*seqs)
    return [beside(f"poll with {MANY} copies in flight", alone, ours)]


def growth(bench: Bench) -> list[Figure]:
    """Steps of 128 sequences that map a frame each, beside a suspend of 4 GiB."""
    (big,), seqs = bench.running(4 * GIB), bench.running(ROW, 128)
    batch, kv = bench.kv.batch(seqs), bench.kv

    def step() -> float:
        took = timed(lambda: kv.settle(kv.step(batch, FRAME_TOKENS)))
        kv.poll()
        return took

    alone = [step() for _ in range(5)]
    big.suspend()
    ours = [step() for _ in range(5)]
    bench.landed(big)
    name = f"step that maps 128 frames beside a suspend, {bench.pace}"
    return [beside(name, alone, ours, sum=sum(ours) * 1e3)]


def readback(bench: Bench) -> list[Figure]:
    """An engine reads 4 KiB back, beside a suspend of 8 GiB."""
    raw, (big,) = bench.raw, bench.running(8 * GIB)
    source, target = raw.alloc(4096), raw.pin(4096)

    def read() -> None:
        raw.copy(Direction.OUT, target, source, 4096)
        while not raw.driver.idle(raw.stream):
            pass

    read()
    alone = [timed(read) for _ in range(20)]
    big.suspend()
    ours = []
    while big.transfer is not None:
        ours.append(timed(read))
        bench.kv.poll()
    return [beside(f"4 KiB read back beside a suspend of 8 GiB, {bench.pace}", alone, ours)]


def throughput(every_s: float, bench: Bench) -> list[Figure]:
    """GB/s of a suspend of 8 GiB by polls at intervals."""
    (big,) = bench.running(8 * GIB)

    def there() -> None:
        big.suspend()
        while big.transfer is not None:
            time.sleep(every_s)
            bench.kv.poll()

    took = timed(there)
    name = f"suspend of 8 GiB, {bench.pace}, a poll each {every_s * 1e3:g} ms"
    return [Figure(name, 8 * GIB / took / 1e9, "GB/s")]


def there_and_back(bench: Bench) -> list[Figure]:
    """64 sequences out and in, against one memcpy of as much; and both directions at once."""
    raw, each, count = bench.raw, 64 * MIB, 64
    seqs = bench.running(each, count)
    on_gpu, on_host = raw.alloc(each * count), raw.pin(each * count)

    def bare(direction: Direction) -> None:
        ends = (on_host, on_gpu) if direction is Direction.OUT else (on_gpu, on_host)
        raw.copy(direction, *ends, each * count)
        raw.synchronize()

    def bare_both() -> None:
        half, api = each * count // 2, raw.api
        raw.copy(Direction.OUT, on_host, on_gpu, half)
        other = bench.other.handle
        raw.call(api.cuMemcpyHtoDAsync, on_gpu + half, on_host + half, half, other)
        raw.synchronize()

    def back() -> None:
        for seq in seqs:
            seq.resume(bench.stream)
        bench.device.synchronize(bench.stream)

    found = defaultdict[str, list[float]](list)
    half = seqs[: count // 2]
    for _ in range(3):
        found["raw out"].append(timed(lambda: bare(Direction.OUT)))
        found["out"].append(timed(lambda: bench.suspended(*seqs)))
        found["raw in"].append(timed(lambda: bare(Direction.IN)))
        found["in"].append(timed(back))
        bench.landed(*seqs)
        bench.suspended(*half)
        found["both"].append(timed(lambda: both(bench, half, seqs[count // 2 :])))
        found["raw both"].append(timed(bare_both))
        bench.landed(*seqs)
        for seq in seqs[count // 2 :]:
            seq.resume(bench.stream)
        bench.landed(*seqs)
    gb = each * count / 1e9
    figures = []
    for way in ("out", "in"):
        ours, bare_s = median(found[way]), median(found[f"raw {way}"])
        name = f"64 sequences {way}, against one memcpy"
        figures.append(Figure(name, gb / ours, "GB/s", gb / bare_s, bare_s / ours, 0.97))
    took, bare_s = median(found["both"]), median(found["raw both"])
    name = "32 out and 32 in at once, against two memcpys"
    return [*figures, Figure(name, gb / took, "GB/s", gb / bare_s, bare_s / took, 0.97)]


def both(bench: Bench, waiting: list[Sequence], running: list[Sequence]) -> None:
    """Some leave while others come back."""
    for gone, come in zip(running, waiting, strict=True):
        gone.suspend()
        come.resume(bench.other)
    bench.landed(*running, *waiting)
