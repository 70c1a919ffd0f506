"""The host device: real frames, mappings, copies and faults, without a GPU.

Physical frames are ranges of a memfd, so the same frame can be mapped at two addresses and read
back through either. Mapping is `mmap(MAP_FIXED)` over a `PROT_NONE` reservation. Bytes move by
`process_vm_readv` and `process_vm_writev` on our own process: an address that is not mapped, or
not writable, is then an error code that we catch, and never a signal.

Address runs are `mmap` objects: whoever is interrupted before one is noted loses it, and with it
the addresses. The memory is not inherited by a fork.

What it models: lost, stale, misplaced and foreign bytes; reads of unmapped memory; writes to
read-only mappings; late copies. What it does not: caches, kernels that run at the same time, a
driver that blocks.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
from collections.abc import Sequence
from functools import partial
from io import FileIO
from typing import Final

import numpy as np
from attrs import define, field

from kvstate import pattern
from kvstate.device import CopyRun, FillRun, MapRun, Segments, Stream, UnmapRun
from kvstate.errors import DeviceError
from kvstate.gpu.books import Undo, address_of, never_unmap
from kvstate.gpu.simulated import SimulatedDevice

PAGE_BYTES: Final = 4096
IOV_MAX: Final = 1024
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_PUNCH_HOLE: Final = 0x03
_NOTHING: Final = 0
_READ_ONLY: Final = mmap.PROT_READ
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_size, _long = ctypes.c_size_t, ctypes.c_long
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [_size, _size, ctypes.c_int, ctypes.c_int, ctypes.c_int, _long]
_libc.madvise.argtypes = [_size, _size, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, _long, _long]
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, _size, ctypes.c_ulong, _size, ctypes.c_ulong, ctypes.c_ulong]


@define
class HostCheck:
    """The outcome of a byte check; see `kvstate.device.Check`."""

    done: bool = False
    size_bytes: int = 0
    wrong: list[int] = field(factory=list)
    first: list[int] = field(factory=list)


class HostDevice(SimulatedDevice):
    """Memory of this process, mapped and copied as a GPU's would be."""

    name = "host"
    granularity_bytes = PAGE_BYTES
    memory = ("cpu", 0)

    def __init__(self, *, streams: str = "eager", seed: int = 0) -> None:
        super().__init__(streams=streams, seed=seed)
        self._made = 0
        self._released: list[int] = []
        self._regions: dict[int, mmap.mmap] = {}
        """Runs of addresses, by the one that the caller knows."""
        self._row_bytes = 0
        self._table: dict[int, tuple[int, int]] = {}
        """Base and length by row, as the work that has run sees them."""
        self._published: dict[int, tuple[int, int]] = {}
        """The same as it will be when everything launched has run."""
        self._staging: list[tuple[int, dict[int, tuple[int, int]]]] = []
        """Buffers that entries of the table wait in: the work that reads each of them, and they."""
        self._scratch = np.zeros(1 << 14, np.uint32)
        self._memory = FileIO(os.memfd_create("kvstate-frames", os.MFD_CLOEXEC), "r+")

    # Addresses and frames.

    def reserve(self, size_bytes: int, align_bytes: int) -> int:
        """Map nothing over a run of addresses."""
        self.enter("reserve")
        region = self._region("reserve", size_bytes + align_bytes, _NOTHING, _RESERVED)
        address = -(-address_of(region) // align_bytes) * align_bytes
        self._regions[address] = region
        self.reservations[address] = size_bytes
        return address

    def unreserve(self, address: int) -> None:
        """Give the addresses back."""
        self.enter("unreserve")
        self.check_unreserve(address)
        self._regions[address].close()
        del self._regions[address], self.reservations[address]

    def create(self, count: int, frame_bytes: int) -> list[int]:
        """Extend the memfd, after what was released before is used again."""
        self.enter("create")
        self.check_create(count, frame_bytes)
        if count:
            self.step("frame")
        reused = self._released[len(self._released) - min(count, len(self._released)) :]
        fresh = list(range(self._made, self._made + count - len(reused)))
        try:
            os.ftruncate(self._memory.fileno(), (self._made + len(fresh)) * frame_bytes)
        except OSError as error:
            raise DeviceError("create", str(error)) from error
        del self._released[len(self._released) - len(reused) :]
        self._made += len(fresh)
        self.frame_bytes = frame_bytes
        self.frames.update(reused, fresh)
        return reused + fresh

    def release(self, frames: Sequence[int]) -> None:
        """Give the memory of the frames back to the system."""
        self.enter("release")
        self.check_release(frames)
        size = self.frame_bytes
        for frame in frames:
            self.step("freeing")  # one that is freed and still exists has lost its bytes only
            if _libc.fallocate(self._memory.fileno(), _PUNCH_HOLE, frame * size, size):
                raise DeviceError("release", os.strerror(ctypes.get_errno()))
        self.frames.difference_update(frames)
        self._released += frames

    def map(self, runs: Sequence[MapRun]) -> None:
        """Map frames; neighbours in the memfd in one call."""
        self.enter("map")
        places = self.check_map(runs)
        with self.whole() as undo:
            for run in runs:
                self._map_run(run, undo)
        self.note_map(runs, places)

    def _map_run(self, run: MapRun, undo: Undo) -> None:
        size, protection = self.frame_bytes, _READ_ONLY if run.read_only else _READ_WRITE
        for at, count in _neighbours(run.frames):
            self.step("mapping")
            place = run.address + at * size
            self._mmap(
                "map", place, count * size, protection, mmap.MAP_SHARED | _MAP_FIXED,
                self._memory.fileno(), run.frames[at] * size,
            )  # fmt: skip
            undo.append(partial(self._map_nothing, place, count))
            self.step("access")

    def unmap(self, runs: Sequence[UnmapRun]) -> None:
        """Put nothing where the frames were."""
        self.enter("unmap")
        places = self.check_unmap(runs)
        self.check_quiet(runs)
        with self.whole() as undo:
            for address, count in runs:
                self._map_nothing(address, count)
                for place in range(address, address + count * self.frame_bytes, self.frame_bytes):
                    undo.append(partial(self._map_run, self.mapped_at(place), []))
        self.note_unmap(runs, places)

    def _map_nothing(self, address: int, count: int) -> None:
        if count:
            self.step("unmapping")
            size = count * self.frame_bytes
            self._mmap("unmap", address, size, _NOTHING, _RESERVED | _MAP_FIXED, -1, 0)

    def host_reserve(self, size_bytes: int) -> int:
        """Anonymous memory."""
        self.enter("host_reserve")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        region = self._region("host_reserve", size_bytes, _READ_WRITE, flags)
        self.step("register")
        address = address_of(region)
        self._regions[address] = region
        self.host_memory[address] = size_bytes
        return address

    def host_unreserve(self, address: int) -> None:
        """Give the memory back."""
        self.enter("host_unreserve")
        self.check_host(address)
        self.step("unregister")
        self._regions[address].close()
        del self._regions[address], self.host_memory[address]

    def close(self, streams: Sequence[Stream] = ()) -> None:
        """Unmap and close everything; nothing, while a copy that never ends may read it."""
        if self.closed or self.forked or not self.rests():
            return
        self.pay()
        for region in self._regions.values():
            region.close()
        self._regions.clear()
        self._memory.close()
        self.forget()

    def leave(self) -> None:
        """See `Books.leave`."""
        super().leave()
        if hasattr(self, "_memory"):
            never_unmap(self._regions.values())
            self._memory.close()

    def __del__(self) -> None:
        if hasattr(self, "_memory") and self.unclosed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)
            self._memory.close()

    # Bytes.

    def fill(self, runs: Sequence[FillRun], value: int) -> None:
        """Overwrite memory at once."""
        self.enter("fill")
        for address, size_bytes in runs:
            self.check_access("fill", address, size_bytes, write=True)
        for run in runs[:1]:
            self._fill_run(run, value)
        with self.final():
            for run in runs[1:]:
                self._fill_run(run, value)

    def _fill_run(self, run: FillRun, value: int) -> None:
        self.step("filling")
        self._put(run.address, bytes([value]) * run.size_bytes)

    def move(self, runs: Sequence[CopyRun]) -> bool:
        """Move bytes between addresses of ours; whether every one of them was there.

        Memory of this process that is not the device's is never touched.
        """
        for run in runs:
            for address in run[:2]:
                if not self.owns(address, run.size_bytes):
                    self._note_fault(run, f"{address:#x} is no memory of this device")
                    return False
        return self._move(runs)

    def _move(self, runs: Sequence[CopyRun]) -> bool:
        for at in range(0, len(runs), IOV_MAX):
            part = runs[at : at + IOV_MAX]
            local = _vectors([(run.target, run.size_bytes) for run in part])
            remote = _vectors([(run.source, run.size_bytes) for run in part])
            if not self._transfer(_libc.process_vm_readv, local, remote, len(part), part):
                return False
        return True

    def spoil(self, runs: Sequence[CopyRun]) -> None:
        """Leave noise where a failed copy might have written anything."""
        for run in runs:
            if self.missing(run.target, run.size_bytes, write=True) is None:
                self._put(run.target, b"\xbd" * run.size_bytes)

    def peek(self, address: int, size_bytes: int) -> bytes:
        """Read memory at once. Raises DeviceError if it is not there."""
        self.present("peek")
        self.check_access("peek", address, size_bytes, write=False)
        return ctypes.string_at(address, size_bytes)

    def poke(self, address: int, data: bytes) -> None:
        """Write memory at once. Raises DeviceError if it is not there or is read-only."""
        self.present("poke")
        self.check_access("poke", address, len(data), write=True)
        self._put(address, data)

    def _put(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def strays(self, runs: Sequence[FillRun], values: bytes) -> int:
        """How many bytes are none of the values."""
        self.present("strays")
        return sum(len(self.peek(*run).translate(None, values)) for run in runs)

    def set_rows(self, row_bytes: int) -> None:
        """The size of a token row."""
        self._row_bytes = row_bytes

    def publish(
        self, stream: Stream, rows: Sequence[int], bases: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Launch the update of the device's table."""
        self.present("publish")
        owned = self._live("publish", stream)
        entries = {r: (b, n) for r, b, n in zip(rows, bases, lengths, strict=True)}
        self._published |= entries
        at = self._idle_buffer()
        self._staging[at] = 0, entries
        self._stage("fill", at)
        number = self.streams.launch(
            owned, "publish", lambda: self._table.update(self._staging[at][1])
        )
        self._staging[at] = number, entries

    def _idle_buffer(self) -> int:
        """A staging buffer that no work is going to read."""
        for at, (number, _) in enumerate(self._staging):
            if number not in self.streams.pending:
                self._stage("free", at)
                return at
        self._staging.append((0, {}))
        return len(self._staging) - 1

    def _stage(self, what: str, at: int) -> None:
        if self.staged is not None:
            self.staged.append((what, at))

    def write(self, stream: Stream, segments: Segments) -> None:
        """Launch the writing of token rows."""
        self.present("write")
        segments = segments.copy()
        self.streams.launch(
            self._live("write", stream), "write", lambda: self._write_rows(segments),
            writes=self._extents(segments),
        )  # fmt: skip

    def verify(
        self, stream: Stream, segments: Segments, most_bytes: int | None = None
    ) -> HostCheck:
        """Launch the comparison of token rows."""
        self.present("verify")
        owned = self._live("verify", stream)
        check, segments = HostCheck(), segments.copy()
        total = int(segments["count"].sum()) * self._row_bytes
        stride = 1 if most_bytes is None else max(1, -(-total // max(1, most_bytes)))
        self.streams.launch(
            owned, "verify", lambda: self._verify_rows(segments, check, stride),
            reads=self._extents(segments),
        )  # fmt: skip
        return check

    def _write_rows(self, segments: Segments) -> None:
        for address, position, count, key, row in segments.tolist():
            rows = pattern.rows(key, position, count, self._row_bytes)
            base = self._base(row, position + count)
            run = CopyRun((base or 0) + address, rows.ctypes.data, rows.nbytes)
            if base is not None and self.owns(run.target, rows.nbytes):
                self._write(run)
            else:
                self._note_fault(run, f"{run.target:#x} is no memory of this device")

    def _verify_rows(self, segments: Segments, check: HostCheck, stride: int) -> None:
        for number, (address, position, count, key, row) in enumerate(segments.tolist()):
            base = self._base(row, position + count)
            if base is None:
                bad: Sequence[int] = range(count)
            else:
                bad = self._wrong_in(base + address, position, count, key, stride, number)
            check.size_bytes += -(-count // stride) * self._row_bytes
            check.wrong.append(len(bad))
            check.first.append(position + bad[0] if bad else 0)
        check.done = True

    def _base(self, row: int, end: int) -> int | None:
        """What the table has for a row, if it has that many tokens; 0 for no row."""
        if row < 0:
            return 0
        base, length = self._table.get(row, (0, 0))
        return base if end <= length else None

    def _wrong_in(
        self, address: int, position: int, count: int, key: int, stride: int, number: int
    ) -> Sequence[int]:
        """Which token rows differ, looking at every `stride`-th of them."""
        if stride == 1:
            return self._wrong_rows(address, position, count, key)
        bad: list[int] = []
        for at in range(number % stride, count, stride):
            where = address + at * self._row_bytes
            bad += [at for _ in self._wrong_rows(where, position + at, 1, key)]
        return bad

    def _wrong_rows(self, address: int, position: int, count: int, key: int) -> Sequence[int]:
        """Which token rows differ from what their writer wrote; all, if they cannot be read."""
        size = count * self._row_bytes
        if not size:
            return ()
        if size > self._scratch.nbytes:
            self._scratch = np.zeros(size // 4, np.uint32)
        run = CopyRun(self._scratch.ctypes.data, address, size)
        if not self.owns(address, size):
            self._note_fault(run, f"{address:#x} is no memory of this device")
            return range(count)
        if not self._move([run]):
            return range(count)
        found = self._scratch[: size // 4].reshape(count, -1)
        wanted = pattern.rows(key, position, count, self._row_bytes)
        if np.array_equal(found, wanted):
            return ()
        return [int(at) for at in np.flatnonzero((found != wanted).any(axis=1))]

    def _extents(self, segments: Segments) -> tuple[tuple[int, int], ...]:
        """What a launch will touch, by what was published last."""
        if self.streams.eager:
            return ()
        found = []
        for address, _, count, _, row in segments.tolist():
            base = 0 if row < 0 else self._published.get(row, (0, 0))[0]
            found.append((base + address, count * self._row_bytes))
        return tuple(found)

    def _write(self, run: CopyRun) -> bool:
        local = _vectors([(run.source, run.size_bytes)])
        remote = _vectors([(run.target, run.size_bytes)])
        return self._transfer(_libc.process_vm_writev, local, remote, 1, [run])

    def _transfer(
        self, call: object, local: ctypes.Array[_Vector], remote: ctypes.Array[_Vector], count: int,
        runs: Sequence[CopyRun],
    ) -> bool:  # fmt: skip
        assert callable(call)
        where = ctypes.addressof(local), count, ctypes.addressof(remote), count
        moved = call(self.pid, *where, 0)
        wanted = sum(run.size_bytes for run in runs)
        if moved == wanted:
            return True
        reason = os.strerror(ctypes.get_errno() if moved < 0 else errno.EFAULT)
        at = max(moved, 0)
        for run in runs:
            if at < run.size_bytes:
                self._note_fault(run, reason)
                return False
            at -= run.size_bytes
        raise AssertionError(f"{moved} bytes moved of {wanted}")

    def _note_fault(self, run: CopyRun, reason: str) -> None:
        self.faults.append(
            f"{run.size_bytes} bytes from {run.source:#x} to {run.target:#x}: {reason}"
        )

    def _mmap(
        self, call: str, address: int, size: int, protection: int, flags: int, file: int, at: int
    ) -> int:
        result: int = _libc.mmap(address, size, protection, flags, file, at)
        if result == _FAILED:
            reason = os.strerror(ctypes.get_errno())
            raise DeviceError(call, f"mmap of {size} bytes at {address:#x}: {reason}")
        _libc.madvise(address, size, mmap.MADV_DONTFORK)
        return result

    def _region(self, call: str, size: int, protection: int, flags: int) -> mmap.mmap:
        """A run of addresses of its own, which goes with the object."""
        try:
            region = mmap.mmap(-1, size, flags, protection)
        except (OSError, OverflowError) as error:
            raise DeviceError(call, f"mmap of {size} bytes: {error}") from error
        region.madvise(mmap.MADV_DONTFORK)
        return region


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_size_t), ("size", ctypes.c_size_t))


def _vectors(runs: Sequence[tuple[int, int]]) -> ctypes.Array[_Vector]:
    return (_Vector * len(runs))(*(_Vector(*run) for run in runs))


def _neighbours(frames: Sequence[int]) -> list[tuple[int, int]]:
    """(index, count) of the runs of frames that follow one another in the memfd."""
    found = []
    start = 0
    for at in range(1, len(frames) + 1):
        if at == len(frames) or frames[at] != frames[at - 1] + 1:
            found.append((start, at - start))
            start = at
    return found
