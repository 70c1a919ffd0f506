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
        self.host_memory: dict[int, int] = {}
        self.copies: set[int] = set()
        self.closed = False

    def fail_next(self, kind: str, nth: int = 1) -> None:
        """Make the `nth` next call of that kind fail, once. `complete` is the end of a copy."""
        if kind not in FAILURES:
            raise ConfigError(f"{kind!r} cannot fail; choose one of {', '.join(FAILURES)}")
        self._failing.setdefault(kind, []).append(nth)

    def cancel_failures(self) -> None:
        """Forget planned failures of calls; a copy that was told to fail will still fail."""
        for kind in [kind for kind in self._failing if kind != "complete"]:
            del self._failing[kind]

    def fails(self, kind: str) -> bool:
        """Count one call of that kind; whether it was told to fail."""
        waiting = self._failing.get(kind)
        if not waiting:
            return False
        waiting[:] = [nth - 1 for nth in waiting]
        if 0 not in waiting:
            return False
        waiting.remove(0)
        if not waiting:
            del self._failing[kind]
        return True

    def enter(self, kind: str) -> None:
        """The beginning of every call: count it, or fail it if that was asked for."""
        self.calls[kind] += 1
        if self._failing and self.fails(kind):
            raise DeviceError(kind, "it was told to fail")

    def note_map(self, runs: Sequence[MapRun]) -> None:
        """Enter mappings; refuse an address that is mapped, or a frame that does not exist."""
        size = self.frame_bytes
        places: dict[int, int] = {}
        for address, frames, _ in runs:
            for at, frame in enumerate(frames):
                place = address + at * size
                if place in self.mappings or place in places:
                    raise DeviceError("map", f"{place:#x} is mapped already")
                if frame not in self.frames:
                    raise DeviceError("map", f"frame {frame} does not exist")
                places[place] = frame
        self.mappings |= places

    def note_unmap(self, runs: Sequence[UnmapRun]) -> None:
        """Strike mappings out; refuse an address where nothing is mapped."""
        size = self.frame_bytes
        places = [run.address + at * size for run in runs for at in range(run.count_frames)]
        if len(set(places)) < len(places):
            raise DeviceError("unmap", "an address is named twice")
        for place in places:
            if place not in self.mappings:
                raise DeviceError("unmap", f"nothing is mapped at {place:#x}")
        for place in places:
            del self.mappings[place]

    def note_release(self, frames: Sequence[int]) -> None:
        """Strike frames out; refuse one that is mapped, or that does not exist."""
        mapped = self.frames.intersection(self.mappings.values())
        if len(set(frames)) < len(frames):
            raise DeviceError("release", "a frame is named twice")
        for frame in frames:
            if frame in mapped or frame not in self.frames:
                raise DeviceError("release", f"frame {frame} is mapped or does not exist")
        self.frames.difference_update(frames)

    def note_frame_size(self, frame_bytes: int) -> None:
        """All frames of a device have one size."""
        if frame_bytes % self.granularity_bytes:
            unit = self.granularity_bytes
            raise DeviceError("create", f"{frame_bytes} is not a multiple of {unit} bytes")
        if self.frames and frame_bytes != self.frame_bytes:
            raise DeviceError("create", f"frames here have {self.frame_bytes} bytes")
        self.frame_bytes = frame_bytes

    def books(self, work: tuple[Work, ...]) -> Ledger:
        """The ledger, with the pending work that the device knows of."""
        return Ledger(
            dict(self.reservations),
            frozenset(self.frames),
            dict(self.mappings),
            dict(self.host_memory),
            frozenset(self.copies),
            work,
        )
