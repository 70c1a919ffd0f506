"""Byte checks on a CUDA device: what a launch needs besides its kernel.

Descriptions of segments go through pinned staging into device scratch, in stream order; both come
from a pool and go back when the launch is known to be done, so that nothing is allocated while
work runs. The device's table (base and length by row) is written by a kernel in stream order too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvstate.device import FillRun, Segments
from kvstate.errors import DeviceError
from kvstate.gpu.held import Held
from kvstate.gpu.kernels import SEGMENT_BYTES, TILE_BYTES, UNIT_BYTES, tiles_of

if TYPE_CHECKING:
    from kvstate.gpu.cuda import CudaDevice, CudaEvent

TABLE_ROWS: Final = 4096
LEAST_BYTES: Final = 1 << 16
MOST_RUNS: Final = 1 << 15
"""Runs of one launch: rows of its grid."""
DEVICE_SEGMENT: Final = np.dtype([
    ("address", np.uint64), ("position", np.uint64), ("count", np.uint64), ("key", np.uint64),
    ("row", np.int64), ("flags", np.uint64),
])  # fmt: skip
"""As the kernels read it."""
assert DEVICE_SEGMENT.itemsize == SEGMENT_BYTES


class Scratch:
    """Pinned staging and as much device memory, for one launch at a time."""

    def __init__(self, size_bytes: int, staging: Held, memory: Held) -> None:
        self.size_bytes, self.number = size_bytes, len(memory)
        self.done: CudaEvent | None = None
        self.host = int(staging.make(self.number, size_bytes, 0))
        self.device = int(memory.make(self.number, size_bytes))
        buffer: Any = (ctypes.c_uint8 * size_bytes).from_address(self.host)
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(buffer, np.uint8)


class CudaCheck:
    """The outcome of a byte check; see `kvstate.device.Check`."""

    _scratch: Scratch | None = None

    def __init__(
        self, checker: Checker, scratch: Scratch, launched: list[int], segments: Segments,
        size_bytes: int,
    ) -> None:  # fmt: skip
        self._checker, self._launched = checker, launched
        self._scratch = scratch
        self._positions = segments["position"].tolist()
        self._counts = segments["count"].tolist()
        self._found: list[npt.NDArray[np.uint8]] = []
        self.size_bytes = size_bytes

    @property
    def done(self) -> bool:
        """The check has run."""
        with self._checker.device.driver.here():
            return self._scratch is None or self._checker.passed(self._scratch)

    @property
    def wrong(self) -> list[int]:
        """For each segment, how many token rows differ or cannot be read."""
        self._read()
        return [int(np.count_nonzero(flags)) for flags in self._found]

    @property
    def first(self) -> list[int]:
        """For each segment, the first such token's position."""
        self._read()
        pairs = zip(self._positions, self._found, strict=True)
        return [start + int(flags.argmax()) if flags.any() else 0 for start, flags in pairs]

    def _read(self) -> None:
        if self._scratch is not None:
            with self._checker.device.driver.here():
                launched = self._checker.flags(self._scratch, self._launched)
            self._scratch = None
            # Segments that are not there were not launched: all their rows are wrong.
            self._found = [
                flags if len(flags) == count else np.ones(count, np.uint8)
                for flags, count in zip(launched, self._counts, strict=True)
            ]

    def __del__(self) -> None:
        if self._scratch is not None:
            self._checker.idle.append(self._scratch)


class Checker:
    """Launches of one device."""

    def __init__(self, device: CudaDevice) -> None:
        self.device, self.row_bytes = device, 0
        self.idle: list[Scratch] = []
        call, api = device.driver.call, device.api
        self._staging = Held(device.driver, "cuMemHostAlloc", "cuMemFreeHost")
        self._memory = Held(device.driver, "cuMemAlloc", "cuMemFree")
        self.table = int(self._memory.make("table", TABLE_ROWS * 16))
        call(api.cuMemsetD8Async, self.table, 0, TABLE_ROWS * 16, device.own)
        self.bases: dict[int, int] = {}
        """What was published last, by row."""
        self._warm_up()

    def _warm_up(self) -> None:
        """Run every kernel once: a first launch takes long, and would hide a race."""
        device, self.row_bytes = self.device, 16
        scratch = self._take(LEAST_BYTES)
        segments = np.zeros(1, DEVICE_SEGMENT)
        segments["address"], segments["count"], segments["row"] = scratch.device + 4096, 1, -1
        self._launch(device.own, segments, scratch, verify=None)
        self._launch(device.own, segments, scratch, verify=(1, 0))
        device.kernels.spin(device.own, 1)
        self._give(device.own, scratch)
        self.strays(device.own, [FillRun(self.table, 16)], b"\0\1")
        self.publish(device.own, [0], [0], [0])
        device.driver.call(device.api.cuStreamSynchronize, device.own)

    def publish(
        self, stream: int, rows: Sequence[int], bases: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Launch the update of the table."""
        if not len(rows):
            return
        if max(rows) >= TABLE_ROWS:
            raise DeviceError("publish", f"row {max(rows)} is beyond the table's {TABLE_ROWS}")
        entries = np.array([rows, bases, lengths], np.uint64).T.ravel()
        scratch = self._take(entries.nbytes)
        self._upload(stream, scratch, entries)
        self.device.kernels.publish(stream, self.table, scratch.device, len(rows))
        self._give(stream, scratch)
        self.bases.update(zip(map(int, rows), map(int, bases), strict=True))

    def write(self, stream: int, segments: Segments) -> None:
        """Launch the writing of rows; segments that are not there are noted as faults."""
        there = self._there(segments, write=True)
        wanted = self._described(segments[there])
        if len(wanted):
            scratch = self._take(self._room(wanted))
            self._launch(stream, wanted, scratch, verify=None)
            self._give(stream, scratch)

    def verify(self, stream: int, segments: Segments, most_bytes: int | None) -> CudaCheck:
        """Launch the comparison of rows, or of evenly spread tiles of them."""
        wanted = self._described(segments)
        wanted["count"][~self._there(segments, write=False)] = 0
        tiles = int(tiles_of(wanted["count"], self.row_bytes).sum())
        stride = 1 if most_bytes is None else max(1, -(-tiles * TILE_BYTES // max(1, most_bytes)))
        phase = self.device.random.randrange(min(stride, tiles)) if stride > 1 and tiles else 0
        scratch = self._take(self._room(wanted))
        self._launch(stream, wanted, scratch, verify=(stride, phase))
        scratch.done = self.device.passing(stream)
        launched = wanted["count"].astype(np.int64)
        picked = len(range(phase, tiles, stride)) * TILE_BYTES
        size_bytes = min(int(launched.sum()) * self.row_bytes, picked)
        return CudaCheck(self, scratch, launched.tolist(), segments, size_bytes)

    def strays(self, stream: int, runs: Sequence[FillRun], values: bytes) -> int:
        """Count bytes that are neither of two values, and wait for the result."""
        if any(number % UNIT_BYTES for run in runs for number in run) or len(values) != 2:
            raise DeviceError("strays", f"runs that are no multiples of {UNIT_BYTES}: {runs}")
        call, api, found = self.device.driver.call, self.device.api, 0
        for first in range(0, len(runs), MOST_RUNS):
            part = np.array(runs[first : first + MOST_RUNS], np.uint64)
            scratch = self._take(part.nbytes + 32)
            total = self._upload(stream, scratch, part, np.zeros(1, np.uint64))
            self.device.kernels.strays(stream, scratch.device, len(part), values, total)
            call(api.cuMemcpyDtoHAsync, scratch.host, total, 8, stream)
            call(api.cuStreamSynchronize, stream)
            found += int(scratch.bytes[:8].view(np.uint64)[0])
            self._give(stream, scratch)
        return found

    def passed(self, scratch: Scratch) -> bool:
        """Whether the launch that uses the scratch is done."""
        passed = scratch.done is None or self.device.driver.ready(scratch.done.handle)
        if passed:
            self._stage("free", scratch)
        return passed

    def _stage(self, what: str, scratch: Scratch) -> None:
        if self.device.staged is not None:
            self.device.staged.append((what, scratch.number))

    def flags(self, scratch: Scratch, counts: list[int]) -> list[npt.NDArray[np.uint8]]:
        """Which rows of each segment were found wrong; waits for the launch."""
        call, api = self.device.driver.call, self.device.api
        assert scratch.done is not None
        call(api.cuEventSynchronize, scratch.done.handle)
        flags = np.zeros(sum(counts), np.uint8)
        if int(scratch.bytes[:4].view(np.uint32)[0]) and len(flags):
            place = scratch.device + scratch.size_bytes - len(flags)
            self.device.fetch(flags.ctypes.data, place, len(flags))
        self.idle.append(scratch)
        return np.split(flags, np.cumsum(counts)[:-1]) if counts else []

    def free(self) -> None:
        """The device is closed: nothing holds its events any more."""
        for scratch in self.idle:
            scratch.done = None
        self.idle.clear()

    def _launch(
        self, stream: int, segments: Any, scratch: Scratch, verify: tuple[int, int] | None
    ) -> None:
        """Upload the segments and launch over their tiles. Flags of rows are at the scratch's
        end."""
        call, api, kernels = self.device.driver.call, self.device.api, self.device.kernels
        counts = segments["count"].astype(np.int64)
        tiles = tiles_of(counts, self.row_bytes)
        total, rows = int(tiles.sum()), int(counts.sum())
        flags = scratch.device + scratch.size_bytes - rows
        segments["flags"] = np.cumsum(counts) - counts
        firsts = (np.cumsum(tiles) - tiles).astype(np.uint32)
        at = self._upload(stream, scratch, segments, firsts)
        common = (stream, scratch.device, at, len(segments), self.table, self.row_bytes, total)
        if verify is None:
            kernels.write(*common)
            return
        wrong = scratch.device + scratch.size_bytes - rows - 4 - (scratch.size_bytes - rows) % 4
        call(api.cuMemsetD8Async, wrong, 0, scratch.device + scratch.size_bytes - wrong, stream)
        if total:
            kernels.verify(*common, *verify, flags, wrong)
        call(api.cuMemcpyDtoHAsync, scratch.host, wrong, 4, stream)

    def _upload(self, stream: int, scratch: Scratch, *arrays: Any) -> int:
        """Put arrays one after the other into the scratch; where the last one begins."""
        at = 16
        self._stage("fill", scratch)
        for array in arrays:
            begin, data = at, np.frombuffer(array.tobytes(), np.uint8)
            scratch.bytes[at : at + len(data)] = data
            at += -(-len(data) // 16) * 16
        call, api = self.device.driver.call, self.device.api
        call(api.cuMemcpyHtoDAsync, scratch.device, scratch.host + 16, at - 16, stream)
        return scratch.device + begin - 16

    def _described(self, segments: Segments) -> Any:
        wanted = np.zeros(len(segments), DEVICE_SEGMENT)
        for name in ("address", "position", "count", "key", "row"):
            wanted[name] = segments[name]
        return wanted

    def _there(self, segments: Segments, *, write: bool) -> npt.NDArray[np.bool_]:
        """Which segments are memory of ours, by what was published last; others are faults."""
        there = np.ones(len(segments), np.bool_)
        for at, (address, _, count, _, row) in enumerate(segments.tolist()):
            base = 0 if row < 0 else self.bases.get(row, 0)
            size = count * self.row_bytes
            reason = self.device.missing(base + address, size, write=write) if size else None
            if reason is not None:
                self.device.faults.append(f"{size} bytes at {base + address:#x}: {reason}")
                there[at] = False
        return there

    def _room(self, segments: Any) -> int:
        """Bytes of scratch that a launch over these segments needs."""
        return len(segments) * (SEGMENT_BYTES + 8) + int(segments["count"].sum()) + 256

    def _take(self, size_bytes: int) -> Scratch:
        for at, scratch in enumerate(self.idle):
            if scratch.size_bytes >= size_bytes and self.passed(scratch):
                del self.idle[at]
                return scratch
        size = max(LEAST_BYTES, 1 << (size_bytes - 1).bit_length())
        return Scratch(size, self._staging, self._memory)

    def _give(self, stream: int, scratch: Scratch) -> None:
        """Back to the pool, for when the launch is done."""
        scratch.done = self.device.passing(stream)
        self.idle.append(scratch)
