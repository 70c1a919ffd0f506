"""What every device keeps: counts of calls, failures to come, and a ledger of what is held.

The ledger is written by the device calls themselves and by nothing else, so that a law can compare
what the manager believes with what was really asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from kvstate.device import CALLS, MapRun, UnmapRun
from kvstate.errors import ConfigError, DeviceError
from kvstate.spec.facts import Ledger, Work

FAILURES: Final = (*CALLS, "complete")
"""What `fail_next` may name: a kind of call, or the end of a copy."""

_NOTHING, _READABLE, _WRITABLE = b"\0", b"\1", b"\2"


class Books:
    """The common base of devices: counts, planned failures and the ledger."""

    name = "books"
    granularity_bytes = 4096

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
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

    @property
    def lost(self) -> str | None:
        """Why the device cannot be used any more; None while it can."""
        return None

    # Failures to come.

    def fail_next(self, kind: str, nth: int = 1) -> None:
        """Make the `nth` next call of that kind fail, once.

        `complete` is the end of the `nth` next copy that is issued.
        """
        if kind not in FAILURES or nth < 1:
            raise ConfigError(f"call {nth} of {kind!r} cannot fail; kinds: {', '.join(FAILURES)}")
        self._failing.setdefault(kind, []).append(nth)

    def cancel_failures(self) -> None:
        """Forget planned failures; a copy that was issued to fail will still fail."""
        self._failing.clear()

    def fails(self, kind: str) -> bool:
        """Count one call of that kind; whether it was told to fail."""
        waiting = self._failing.get(kind)
        if not waiting:
            return False
        left = [nth - 1 for nth in waiting if nth > 1]
        fails = len(left) < len(waiting)
        self._failing[kind] = left
        return fails

    def enter(self, kind: str) -> None:
        """The beginning of every call: count it, or fail it if that was asked for."""
        self.calls[kind] += 1
        if self._failing and self.fails(kind):
            raise DeviceError(kind, "it was told to fail")

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
            return None if self._in_host(address, size_bytes) else "no memory of this device"
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
            return self._in_host(address, size_bytes)
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

    def _in_host(self, address: int, size_bytes: int) -> bool:
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

    def forget(self) -> None:
        """Strike everything out: the device is closed."""
        for held in (self.reservations, self.mappings, self.host_memory, self._allowed):
            held.clear()
        for names in (self.frames, self.copies, self.read_only):
            names.clear()
        self.closed = True

    def books(self, work: tuple[Work, ...]) -> Ledger:
        """The ledger, with the pending work that the device knows of."""
        return Ledger(
            dict(self.reservations),
            frozenset(self.frames),
            dict(self.mappings),
            frozenset(self.read_only),
            dict(self.host_memory),
            frozenset(self.copies),
            work,
        )
