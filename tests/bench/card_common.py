"""What the benchmarks of the CUDA device share: the raw calls beside ours, clocks, pairs, figures.

A figure alone says little on a shared machine, so each stands beside a raw measurement of the same
run. Both are taken in turn, pair by pair, after a warm-up; what is reported is the median of ours,
the median of the raw, and the median of the pairs' ratios (1: as fast as the raw; more is better).

Two clocks. `wall` is a whole call as its caller sees it, with the wait for its end where one is
meant. `GPU` is what lies between two events on the stream, which is held back by a kernel that
only spins until everything is issued: so nothing that Python does is in it.

On the host device there are no raw calls to compare with: most of them then do nothing, and the
ratios mean nothing. It is there to rehearse.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np

from kvstate import Config, Manager
from kvstate.config import MIB
from kvstate.device import SEGMENT, ByteDevice, CopyRun, Device, Direction, Segments, Stream
from kvstate.gpu import open_device
from kvstate.gpu.driver import Driver
from kvstate.gpu.kernels import Kernels

T = TypeVar("T")

KIB: Final = 1 << 10
GIB: Final = 1 << 30
FRAME: Final = 2 * MIB
REPEATS: Final = 7
LEAST_HOLD_S: Final = 1e-3
CLOCK_HZ: Final = 2e9
"""At least what the GPU's clock does: a hold may be longer than asked for, and not shorter."""


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """One measured number, and the raw one beside it."""

    name: str
    ours: float
    unit: str
    raw: float | None = None
    ratio: float | None = None
    """How fast ours is against the raw: the median over the pairs."""
    aim: float | None = None
    """The least ratio that is wanted."""
    clock: str = "wall"
    details: Mapping[str, float] = {}


class Report(msgspec.Struct):
    """What one benchmark found. `error` says why it did not finish; None if it did."""

    title: str
    seconds: float = 0
    figures: list[Figure] = []
    words: list[str] = []
    error: str | None = None


# Time.


class Laps(dict[str, float]):
    """Seconds by name."""

    def time(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call and enter how long it took; what it gives back."""
        started = perf_counter()
        result = call(*args)
        self[name] = perf_counter() - started
        return result


def wall(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = perf_counter()
    call()
    return perf_counter() - started


class Pair(NamedTuple):
    """Medians in seconds, and the median of raw / ours. Without a raw measurement, None."""

    ours: float
    raw: float | None
    ratio: float | None


Side = Callable[[], Mapping[str, float]]


def pairs(ours: Side, raw: Side, repeats: int = REPEATS, warm: int = 1) -> dict[str, Pair]:
    """Measure both sides in turn, the one or the other first; the pair of each name of ours."""
    found: list[tuple[Mapping[str, float], Mapping[str, float]]] = []
    for at in range(warm + repeats):
        if at % 2:
            mine = ours()
            found.append((mine, raw()))
        else:
            bare = raw()
            found.append((ours(), bare))
    del found[:warm]
    return {name: _pair(name, found) for name in found[0][0]}


def _pair(name: str, found: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> Pair:
    ours = median(mine[name] for mine, _ in found)
    if name not in found[0][1]:
        return Pair(ours, None, None)
    ratio = median(bare[name] / max(mine[name], 1e-9) for mine, bare in found)
    return Pair(ours, median(bare[name] for _, bare in found), ratio)


def micros(name: str, pair: Pair, **more: Any) -> Figure:
    """A figure in microseconds."""
    raw = None if pair.raw is None else pair.raw * 1e6
    return Figure(name, pair.ours * 1e6, "us", raw, pair.ratio, **more)


def rate(name: str, pair: Pair, moved: int, raw_moved: int | None = None, **more: Any) -> Figure:
    """A figure in GB/s: bytes that ours moved, and bytes that the raw moved in its time."""
    bare = moved if raw_moved is None else raw_moved
    raw = None if pair.raw is None else bare / pair.raw / 1e9
    ratio = None if pair.ratio is None else pair.ratio * moved / bare
    return Figure(name, moved / pair.ours / 1e9, "GB/s", raw, ratio, **more)


# Raw calls.


class Raw:
    """The raw side on the host: memory and copies; what has no counterpart does nothing."""

    def __init__(self) -> None:
        self._memory: list[Any] = []
        self.stream = 0

    def alloc(self, size_bytes: int) -> int:
        """Memory of the device, with a page behind every address."""
        memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
        memory.fill(1)
        self._memory.append(memory)
        return int(memory.ctypes.data)

    def pin(self, size_bytes: int) -> int:
        """Host memory in one run, registered as one."""
        return self.alloc(size_bytes)

    def reserve(self, size_bytes: int) -> int:
        """Addresses to map at."""
        return 0

    def create(self, count: int, frame_bytes: int) -> list[Any]:
        """Frames."""
        return []

    def map(self, address: int, frames: Sequence[Any], frame_bytes: int) -> None:
        """Map frames one after the other, and allow access to all of them at once."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap a run."""

    def release(self, frames: Sequence[Any]) -> None:
        """Free frames."""

    def record(self) -> None:
        """Record an event."""

    def synchronize(self) -> None:
        """Wait for the whole device."""

    def copy(self, direction: Direction, target: int, source: int, size_bytes: int) -> None:
        """Issue one copy between the tiers."""
        ctypes.memmove(target, source, size_bytes)

    def move(self, target: int, source: int, size_bytes: int) -> None:
        """Issue one copy on the device."""
        ctypes.memmove(target, source, size_bytes)

    def batch(self, runs: Sequence[CopyRun]) -> Callable[[], None]:
        """What issues one copy of many runs; everything it needs is made before."""
        return lambda: None

    def hold(self, stream: int, seconds: float) -> None:
        """Keep the stream from doing anything for about that long."""

    def begin(self, stream: int) -> None:
        """Record the beginning of what is timed."""

    def end(self, stream: int) -> None:
        """Record its end."""

    def elapsed(self) -> float | None:
        """Seconds between the two, once both are past; None where there is no GPU."""
        return None

    def gpu(self, call: Callable[[], object], stream: int | None = None) -> float:
        """Seconds that the issued work takes on the GPU; on the host, the call's."""
        return wall(call)

    def close(self) -> None:
        """Give everything back."""
        self._memory.clear()


class CudaRaw(Raw):
    """Bare driver calls, in the same context as the measured device's."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self.driver = driver = Driver(ordinal).retain()
        self.api, self.call = driver.api, driver.call
        self.call(self.api.cuCtxSetCurrent, driver.context)  # for as long as the process lives
        self.kernels = Kernels(driver)
        self.stream = int(self.call(self.api.cuStreamCreate, 1))
        self._start, self._stop, self._mark = (
            self.call(self.api.cuEventCreate, flags) for flags in (0, 0, 2)
        )
        self._allocated: list[int] = []
        self._registered: list[int] = []
        self._reserved: list[tuple[int, int]] = []
        self._held_s = LEAST_HOLD_S
        api = self.api
        self._property, self._access = api.CUmemAllocationProp(), api.CUmemAccessDesc()
        self._property.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for place in (self._property.location, self._access.location):
            place.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            place.id = ordinal
        self._access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def alloc(self, size_bytes: int) -> int:
        self._allocated.append(int(self.call(self.api.cuMemAlloc, size_bytes)))
        return self._allocated[-1]

    def pin(self, size_bytes: int) -> int:
        address = super().alloc(size_bytes)
        self.call(self.api.cuMemHostRegister, address, size_bytes, 1)
        self._registered.append(address)
        return address

    def reserve(self, size_bytes: int) -> int:
        address = int(self.call(self.api.cuMemAddressReserve, size_bytes, 0, 0, 0))
        self._reserved.append((address, size_bytes))
        return address

    def create(self, count: int, frame_bytes: int) -> list[Any]:
        call, create, kind = self.call, self.api.cuMemCreate, self._property
        return [call(create, frame_bytes, kind, 0) for _ in range(count)]

    def map(self, address: int, frames: Sequence[Any], frame_bytes: int) -> None:
        for at, frame in enumerate(frames):
            self.call(self.api.cuMemMap, address + at * frame_bytes, frame_bytes, 0, frame, 0)
        size = len(frames) * frame_bytes
        self.call(self.api.cuMemSetAccess, address, size, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self.call(self.api.cuMemUnmap, address, size_bytes)

    def release(self, frames: Sequence[Any]) -> None:
        for frame in frames:
            self.call(self.api.cuMemRelease, frame)

    def record(self) -> None:
        self.call(self.api.cuEventRecord, self._mark, self.stream)

    def synchronize(self) -> None:
        self.call(self.api.cuCtxSynchronize)

    def copy(self, direction: Direction, target: int, source: int, size_bytes: int) -> None:
        out = direction is Direction.OUT
        function = self.api.cuMemcpyDtoHAsync if out else self.api.cuMemcpyHtoDAsync
        self.call(function, target, source, size_bytes, self.stream)

    def move(self, target: int, source: int, size_bytes: int) -> None:
        self.call(self.api.cuMemcpyDtoDAsync, target, source, size_bytes, self.stream)

    def batch(self, runs: Sequence[CopyRun]) -> Callable[[], None]:
        api = self.api
        kind = api.CUmemcpyAttributes()
        kind.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        targets = [api.CUdeviceptr(run.target) for run in runs]
        sources = [api.CUdeviceptr(run.source) for run in runs]
        sizes = [run.size_bytes for run in runs]
        rest = (targets, sources, sizes, len(runs), [kind], [0], 1, self.stream)
        return lambda: self.call(api.cuMemcpyBatchAsync, *rest)

    def hold(self, stream: int, seconds: float) -> None:
        self.kernels.spin(stream, int(seconds * CLOCK_HZ))

    def begin(self, stream: int) -> None:
        self.call(self.api.cuEventRecord, self._start, stream)

    def end(self, stream: int) -> None:
        self.call(self.api.cuEventRecord, self._stop, stream)

    def elapsed(self) -> float | None:
        self.call(self.api.cuEventSynchronize, self._stop)
        return float(self.call(self.api.cuEventElapsedTime, self._start, self._stop)) / 1000

    def gpu(self, call: Callable[[], object], stream: int | None = None) -> float:
        """Again with a longer hold, if the hold was over before everything was issued."""
        where = self.stream if stream is None else stream
        for _ in range(4):
            held = self._held_s
            self.hold(where, held)
            self.begin(where)
            issued = wall(call)
            self.end(where)
            took = self.elapsed()
            self._held_s = max(LEAST_HOLD_S, held / 2, 2 * issued)
            if issued < held:
                break
        return took or 0.0

    def close(self) -> None:
        self.synchronize()
        for address in self._registered:
            self.call(self.api.cuMemHostUnregister, address)
        for address in self._allocated:
            self.call(self.api.cuMemFree, address)
        for address, size in self._reserved:
            self.call(self.api.cuMemAddressFree, address, size)
        for event in (self._start, self._stop, self._mark):
            self.call(self.api.cuEventDestroy, event)
        self.call(self.api.cuStreamDestroy, self.stream)
        for held in self.driver.held:
            held.free_all()
        self.driver.release()
        super().close()


class Card:
    """What is measured: a device by name, at full or tiny size. Keeps the GPU's context alive."""

    def __init__(self, kind: str, *, tiny: bool) -> None:
        self.kind, self.tiny = kind, tiny
        name, _, ordinal = kind.partition(":")
        self.on_gpu, self.ordinal = name == "cuda", int(ordinal or 0)
        self.driver = Driver(self.ordinal).retain() if self.on_gpu else None

    @property
    def hardware(self) -> str:
        """What it is, by its maker's name."""
        if self.driver is None:
            return platform.processor() or platform.machine()
        name = self.driver.call(self.driver.api.cuDeviceGetName, 256, self.driver.device)
        return bytes(name).split(b"\0")[0].decode()

    def close(self) -> None:
        """Let the context go."""
        if self.driver is not None:
            self.driver.release()

    def open(self) -> ByteDevice:
        """A device of its own."""
        return open_device(self.kind)

    def raw(self) -> Raw:
        """The raw side."""
        return CudaRaw(self.ordinal) if self.on_gpu else Raw()

    def pick(self, full: T, tiny: T) -> T:
        """A size."""
        return tiny if self.tiny else full


@contextmanager
def opened(config: Config, device: Device) -> Iterator[Manager]:
    """A manager whose sequences are closed before it is."""
    with Manager(config, device) as kv:
        yield kv
        for seq in list(kv.sequences.values()):
            seq.close()


def handle(device: ByteDevice, stream: Stream) -> int:
    """The driver's handle of a stream; 0 on the host."""
    handle_of = getattr(device, "handle_of", None)
    return handle_of(stream) if handle_of else 0


# Bytes.


def segments(places: Sequence[tuple[int, int]]) -> Segments:
    """Segments of (address, token rows), each by a writer of its own."""
    found = np.zeros(len(places), SEGMENT)
    found["address"] = [address for address, _ in places]
    found["count"] = [count for _, count in places]
    found["key"] = np.arange(len(places), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    found["row"] = -1
    return found


def must_hold(device: ByteDevice, stream: Stream, written: Segments) -> None:
    """Fail unless every byte is what was written, and no rule of memory was broken."""
    check = device.verify(stream, written)
    device.synchronize(stream)
    wrong = sum(check.wrong)
    if wrong or device.faults or check.size_bytes == 0:
        raise AssertionError(
            f"{wrong} token rows of {int(written['count'].sum())} are wrong; {device.faults[:3]}"
        )
