"""What every device keeps: counts of calls, failures to come, and a ledger of what is held.

The ledger is written by the device calls themselves and by nothing else, so that a law can compare
what the manager believes with what was really asked for.

A call is made of steps: a map call maps each frame and then allows access to each run. Each of them
is a *point* at which the call can be told to fail, so that a test can try the k-th point of a
scenario for every k. A call whose later steps fail takes the earlier ones back, and taking back is
made of points too.

An interrupt may come between any two lines, and then nothing is taken back: memory is noted where
it is made, before anything else, so that `close` finds all of it whatever the ledger says. In the
child of a fork a device refuses every call and gives nothing back: all of it is the parent's.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final
from weakref import ref

import numpy as np

from kvstate.device import CALLS, CopyRun, MapRun, Stream, UnmapRun
from kvstate.errors import ConfigError, DeviceError, DeviceFault, DeviceFull, IllegalTransition
from kvstate.handles import Handle
from kvstate.spec.facts import Ledger, Work

STEPS: Final = (
    "frame", "freeing", "mapping", "access", "unmapping", "register", "unregister", "filling",
    "wait", "issue", "event",
)  # fmt: skip
"""The steps that calls are made of. A frame is created or freed, mapped, made accessible, unmapped;
host memory is registered; memory is filled; a stream waits, gets a run of a copy or an event."""
FAILURES: Final = (*CALLS, *STEPS, "complete", "hang", "any")
"""What `fail_next` may name: a kind of call or step, the end of a copy, the end that never comes,
or a point of any kind but that."""

Undo = list[Callable[[], object]]

_NOTHING, _READABLE, _WRITABLE = b"\0", b"\1", b"\2"
_DEVICES: Final[set[ref[Books]]] = set()
"""Of this process."""


class Books(Handle):
    """The common base of devices: counts, planned failures and the ledger."""

    instead = "open another one"
    name = "books"
    granularity_bytes = 4096
    staged: list[tuple[str, int]] | None = None
    """What happens to staging buffers, if somebody wants to know: `fill` and `free`, and which."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.points = 0
        """At how many places calls could have failed so far."""
        self.hung: set[int] = set()
        """Copies that were told never to end."""
        self._failing: dict[str, list[int]] = {}
        self.frame_bytes = 0
        self.frames: set[int] = set()
        self.reservations: dict[int, int] = {}
        self.mappings: dict[int, int] = {}
        self.read_only: set[int] = set()
        self._allowed: dict[int, bytearray] = {}
        """What may be done with each frame of a reservation: an index of the mappings."""
        self.host_memory: dict[int, int] = {}
        self.copies: set[int] = set()
        self.faults: list[str] = []
        self.closed = False
        self.kept = False
        """It was closed while something had not ended, and has kept all its memory."""
        self.owed: Undo = []
        """Steps that could not be taken back; closing tries again."""
        self.pid = os.getpid()
        self.forked = False
        """It is the copy in the child of a fork."""
        self._most: int | None = None
        """Frames that it has memory for, if others have the rest."""
        self._taken_by: object = None
        """What stands for its manager."""
        _DEVICES.add(ref(self, _DEVICES.discard))

    @property
    def lost(self) -> str | None:
        """Why the device cannot be used any more; None while it can."""
        return None

    # Whose it is.

    def attach(self, mark: object) -> None:
        """It has a manager from now on. Raises IllegalTransition if it has one, or had one."""
        self.present("attach")
        if self.closed or self._taken_by is not None:
            state = "CLOSED" if self.closed else "OPEN"
            reason = "it was closed" if self.closed else "it has a manager, and can have only one"
            raise IllegalTransition(
                f"the {self.name} device", "attach", state, f"{reason}; open another device"
            )
        self._taken_by = mark

    def detach(self, mark: object) -> None:
        """That manager could not be opened."""
        if self._taken_by is mark:
            self._taken_by = None

    def present(self, call: str) -> None:
        """Raise IllegalTransition in the child of a fork."""
        if self.forked:
            reason = (
                f"process {self.pid} opened it, and this is its child {os.getpid()}, where its "
                "memory is not; open another one here"
            )
            raise IllegalTransition(f"the {self.name} device", call, "FORKED", reason)

    def leave(self) -> None:
        """This is the child of a fork: let go of what the child has of it, without touching what is
        the parent's."""
        self.forked = True

    @property
    def unclosed(self) -> bool:
        """Somebody should have closed it."""
        return not (self.closed or self.kept or self.forked)

    # Failures to come.

    def fail_next(self, kind: str, nth: int = 1) -> None:
        """Make the `nth` next call or step of that kind fail, once.

        `complete` is the end of the `nth` next copy that is issued, and with `hang` that end never
        comes. `any` is the `nth` point of whatever kind.
        """
        if kind not in FAILURES or nth < 1:
            raise ConfigError(f"call {nth} of {kind!r} cannot fail; kinds: {', '.join(FAILURES)}")
        self._failing.setdefault(kind, []).append(nth)

    def cancel_failures(self) -> None:
        """Forget planned failures; a copy that was issued to fail will still fail."""
        self._failing.clear()

    def fails(self, kind: str) -> bool:
        """Pass one point of that kind; whether it was told to fail."""
        self.points += 1
        return bool(self._failing) and bool(self._due(kind) | self._due("any"))

    def _due(self, kind: str) -> bool:
        """Count one of that kind; whether it was told to fail."""
        waiting = self._failing.get(kind)
        if not waiting:
            return False
        left = [nth - 1 for nth in waiting if nth > 1]
        fails = len(left) < len(waiting)
        self._failing[kind] = left
        return fails

    def enter(self, kind: str) -> None:
        """The beginning of every call: count it, or fail it if that was asked for."""
        if self.forked:
            self.present(kind)
        self.calls[kind] += 1
        self.step(kind)

    def step(self, kind: str) -> None:
        """The beginning of every step of a call: fail it if that was asked for."""
        if self.fails(kind):
            raise DeviceError(kind, "it was told to fail")

    @contextmanager
    def whole(self) -> Iterator[Undo]:
        """All steps of a call or none: each adds how it is taken back.

        Raises DeviceFault if one cannot be taken back: nobody knows then what is held.
        """
        undo: Undo = []
        try:
            yield undo
        except DeviceError as error:
            try:
                _take_back(undo)
            except DeviceError as again:
                self.owed += undo
                raise DeviceFault(f"{error}, and could not be undone: {again}") from again
            raise

    def pay(self) -> None:
        """Try once more to take back what could not be: a device that is closed must hold nothing.

        What fails again is left to whoever gives everything back.
        """
        while self.owed:
            with suppress(DeviceError):
                _take_back(self.owed)
            del self.owed[-1:]

    @contextmanager
    def final(self) -> Iterator[None]:
        """The steps of a call that cannot be taken back: if one fails, that is a DeviceFault."""
        try:
            yield
        except DeviceError as error:
            raise DeviceFault(f"{error}, and could not be undone") from error

    def ends_well(self, runs: Sequence[CopyRun], followers: Sequence[Stream]) -> bool:
        """Pass the points of a copy that is issued; whether it shall succeed.

        Where work runs at the time of its issue, a copy that is issued in part is one that fails.
        """
        kinds = ("issue",) * len(runs) + ("event",) + ("wait",) * len(followers) + ("complete",)
        return not any(map(self.fails, kinds))

    def hangs(self) -> bool:
        """Whether the copy that is issued shall never end."""
        return bool(self._failing) and self._due("hang")

    # Memory that others have.

    def limit(self, frames: int | None) -> None:
        """See `kvstate.device.ByteDevice.limit`."""
        self._most = frames

    @property
    def left(self) -> int:
        """Frames that it was left to create."""
        return sys.maxsize if self._most is None else max(0, self._most - len(self.frames))

    def room(self, frame_bytes: int) -> int:
        """See `kvstate.device.Device.room`."""
        self.present("room")
        return self.left

    # Checks: each raises DeviceError before anything is done.

    def check_create(self, count: int, frame_bytes: int) -> None:
        """Frames of one size, the same for all of a device's."""
        unit = self.granularity_bytes
        if count < 0 or frame_bytes < 1 or frame_bytes % unit:
            raise DeviceError(
                "create", f"{count} frames of {frame_bytes} bytes: not a multiple of {unit}"
            )
        if self.frames and frame_bytes != self.frame_bytes:
            raise DeviceError("create", f"frames here have {self.frame_bytes} bytes")
        if count > self.left:
            raise DeviceFull(count, self.left)

    def check_release(self, frames: Sequence[int]) -> None:
        """Frames that exist, mapped nowhere, each named once."""
        mapped = self.frames.intersection(self.mappings.values())
        if len(set(frames)) < len(frames):
            raise DeviceError("release", "a frame is named twice")
        for frame in frames:
            if frame in mapped or frame not in self.frames:
                raise DeviceError("release", f"frame {frame} is mapped or does not exist")

    def check_map(self, runs: Sequence[MapRun]) -> dict[int, int]:
        """Existing frames at free addresses of a reservation; the frame by address."""
        places: dict[int, int] = {}
        for address, frames, _ in runs:
            self._check_inside("map", address, len(frames))
            for at, frame in enumerate(frames):
                place = address + at * self.frame_bytes
                if place in self.mappings or place in places:
                    raise DeviceError("map", f"{place:#x} is mapped already")
                if frame not in self.frames:
                    raise DeviceError("map", f"frame {frame} does not exist")
                places[place] = frame
        return places

    def check_unmap(self, runs: Sequence[UnmapRun]) -> list[int]:
        """Mapped addresses, each named once; all of them."""
        size = self.frame_bytes
        places = [run.address + at * size for run in runs for at in range(run.count_frames)]
        if len(set(places)) < len(places):
            raise DeviceError("unmap", "an address is named twice")
        for place in places:
            if place not in self.mappings:
                raise DeviceError("unmap", f"nothing is mapped at {place:#x}")
        return places

    def check_unreserve(self, address: int) -> int:
        """A reservation in which nothing is mapped; its size."""
        size = self.reservations.get(address)
        if size is None:
            raise DeviceError("unreserve", f"nothing was reserved at {address:#x}")
        inside = sum(address <= place < address + size for place in self.mappings)
        if inside:
            raise DeviceError("unreserve", f"{inside} frames are mapped in it")
        return size

    def check_host(self, address: int) -> int:
        """Host memory of ours; its size."""
        size = self.host_memory.get(address)
        if size is None:
            raise DeviceError("host_unreserve", f"there is no host memory at {address:#x}")
        return size

    def check_access(self, call: str, address: int, size_bytes: int, *, write: bool) -> None:
        """Memory that is there, and may be written if that is wanted."""
        missing = self.missing(address, size_bytes, write=write)
        if missing is not None:
            raise DeviceError(call, f"{size_bytes} bytes at {address:#x}: {missing}")

    def missing(self, address: int, size_bytes: int, *, write: bool) -> str | None:
        """Why memory cannot be read or written, in words; None if it can."""
        base = self._reservation(address)
        if base is None:
            return None if self.in_host(address, size_bytes) else "no memory of this device"
        size = self.frame_bytes or self.granularity_bytes
        low, high = (address - base) // size, -(-(address + size_bytes - base) // size)
        held = self._allowed.get(base, b"")[low:high]
        enough = _WRITABLE if write else _WRITABLE + _READABLE
        if len(held) == high - low and not held.translate(None, enough):
            return None
        wrong = next((at for at, one in enumerate(held) if one not in enough), len(held))
        place, there = base + (low + wrong) * size, held[wrong : wrong + 1] == _READABLE
        return f"{place:#x} is mapped read-only" if there else f"nothing is mapped at {place:#x}"

    def owns(self, address: int, size_bytes: int) -> bool:
        """Whether these are addresses of ours at all, mapped or not."""
        base = self._reservation(address)
        if base is None:
            return self.in_host(address, size_bytes)
        return address + size_bytes <= base + self.reservations[base]

    def _check_inside(self, call: str, address: int, count: int) -> None:
        base = self._reservation(address)
        end = address + count * self.frame_bytes
        if base is None or end > base + self.reservations[base]:
            raise DeviceError(call, f"{count} frames at {address:#x} are in no reservation")
        if (address - base) % max(1, self.frame_bytes):
            raise DeviceError(call, f"{address:#x} is not a whole number of frames into it")

    def _reservation(self, address: int) -> int | None:
        for base, size in self.reservations.items():
            if base <= address < base + size:
                return base
        return None

    def in_host(self, address: int, size_bytes: int) -> bool:
        """Whether all of that is host memory of ours."""
        for base, size in self.host_memory.items():
            if base <= address and address + size_bytes <= base + size:
                return True
        return False

    def _allow(self, address: int, count: int, access: bytes) -> None:
        """Enter what may be done with frames from an address on."""
        base = self._reservation(address)
        assert base is not None
        known, first = self._allowed.setdefault(base, bytearray()), address - base
        first //= self.frame_bytes
        known.extend(_NOTHING * (first + count - len(known)))
        known[first : first + count] = access * count

    # Entries.

    def note_map(self, runs: Sequence[MapRun], places: dict[int, int]) -> None:
        """Enter mappings."""
        self.mappings |= places
        for address, frames, read_only in runs:
            self._allow(address, len(frames), _READABLE if read_only else _WRITABLE)
            if read_only:
                self.read_only.update(
                    range(address, address + len(frames) * self.frame_bytes, self.frame_bytes)
                )

    def note_unmap(self, runs: Sequence[UnmapRun], places: list[int]) -> None:
        """Strike mappings out."""
        for place in places:
            del self.mappings[place]
        self.read_only.difference_update(places)
        for address, count in runs:
            self._allow(address, count, _NOTHING)

    def mapped_at(self, place: int) -> MapRun:
        """What is mapped at an address, so that it can be mapped again."""
        return MapRun(place, [self.mappings[place]], place in self.read_only)

    def forget(self) -> None:
        """Strike everything out: the device is closed."""
        for held in (self.reservations, self.mappings, self.host_memory, self._allowed):
            held.clear()
        for names in (self.frames, self.copies, self.read_only, self.hung):
            names.clear()
        self.closed, self.kept = True, False

    def books(self, work: tuple[Work, ...]) -> Ledger:
        """The ledger, with the pending work that the device knows of."""
        self.present("ledger")
        return Ledger(
            dict(self.reservations),
            frozenset(self.frames),
            dict(self.mappings),
            frozenset(self.read_only),
            dict(self.host_memory),
            frozenset(self.copies),
            work,
        )


def address_of(region: mmap.mmap) -> int:
    """The first address of a mapping."""
    return int(np.frombuffer(region, np.uint8).ctypes.data)


def never_unmap(regions: Iterable[mmap.mmap]) -> None:
    """In the child of a fork, where they are not mapped: others may have the addresses there."""
    for region in regions:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(region))


def _forked() -> None:
    for one in tuple(_DEVICES):
        device = one()
        if device is not None:
            device.leave()


os.register_at_fork(after_in_child=_forked)


def _take_back(undo: Undo) -> None:
    """Take steps back, the last first; those that are left when one fails stay in the list."""
    while undo:
        undo[-1]()
        undo.pop()
