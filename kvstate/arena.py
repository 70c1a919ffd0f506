"""The arena: one address reservation, cut into ranges that are parked and adopted.

Addresses are plentiful and mappings are dear, so a freed range keeps its mapping and waits to be
adopted whole. Extents are rounded (see `Geometry.extent`), which makes parked ranges fit later
sequences. Behind every range stand addresses that are never mapped, so that an overrun faults
instead of reading a neighbour.

Rejected: one fixed range a row. It is simpler, but a range must then be as long as the longest
sequence, and a row that is free again is the only one that can use its mapping.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

from kvstate.config import Geometry
from kvstate.plan import Cells, Frames
from kvstate.spec.frame import MAPPED, PARKED
from kvstate.spec.range import VACANT


class Range:
    """A run of addresses. Its frames are MAPPED up to the capacity, then PARKED up to the
    frontier."""

    __slots__ = (
        "base", "extent_frames", "frames", "holders", "number", "owner", "pages", "parked_at",
        "state",
    )  # fmt: skip

    def __init__(self, number: int, base: int, extent_frames: int, counts: list[int]) -> None:
        self.number = number
        self.base = base
        """Address of its first byte."""
        self.extent_frames = extent_frames
        self.state = VACANT.code
        self.frames = Frames(self, counts)
        self.pages = Cells(self, bytearray())
        """Its own page records, while no sequence keeps them."""
        self.holders: set[tuple[str, int]] = set()
        self.owner: Any = None
        self.parked_at = 0

    def __str__(self) -> str:
        return f"range {self.number}"

    def enter(self, code: int) -> None:
        """Change the state."""
        self.state = code

    @property
    def holds(self) -> int:
        """How many holders its fence still waits for."""
        return len(self.holders)

    @property
    def mapped(self) -> int:
        """The frontier, in frames."""
        return len(self.frames.ids)

    @property
    def charged(self) -> int:
        """Frames that its sequence pays for."""
        return self.frames.states.count(MAPPED.code)

    def in_place(self, end: int) -> int:
        """How many of the first `end` frames are mapped and not charged."""
        return max(0, min(end, self.mapped) - self.charged)

    @property
    def tail(self) -> int:
        """Frames at its end that are mapped and in nobody's use."""
        return self.frames.states.count(PARKED.code)


class Addresses:
    """Free runs of an address reservation; first fit, neighbours merged."""

    def __init__(self, base: int, size_frames: int) -> None:
        self.free: list[tuple[int, int]] = [(base, size_frames)]
        """(first frame, count), by address."""

    def find(self, count: int) -> int | None:
        """The first frame of a free run of that many; None if there is none. O(free runs)."""
        for first, size in self.free:
            if size >= count:
                return first
        return None

    def take(self, first: int, count: int) -> None:
        """Take the beginning of the free run that `find` named. O(free runs)."""
        at = bisect_left(self.free, (first, 0))
        size = self.free[at][1]
        self.free[at : at + 1] = [] if size == count else [(first + count, size - count)]

    def give(self, first: int, count: int) -> None:
        """Return a run. O(free runs)."""
        at = bisect_left(self.free, (first, 0))
        if at < len(self.free) and self.free[at][0] == first + count:
            count += self.free.pop(at)[1]
        if at and sum(self.free[at - 1]) == first:
            self.free[at - 1] = (self.free[at - 1][0], self.free[at - 1][1] + count)
        else:
            self.free.insert(at, (first, count))


class Arena:
    """Every range of one layer group, and which of them wait to be adopted."""

    def __init__(self, geometry: Geometry, base: int, counts: list[int]) -> None:
        self.geometry, self.base, self.counts = geometry, base, counts
        frame = geometry.frame_bytes
        self.addresses = Addresses(base // frame, geometry.arena_bytes // frame)
        self.ranges: dict[int, Range] = {}
        """Every range that is not VACANT, by number."""
        self.parked: dict[int, list[Range]] = {}
        """PARKED ranges by extent, the latest last."""
        self.extents: list[int] = []
        """The extents that have parked ranges, sorted."""
        self.clock = 0
        self.made = 0

    def fitting(self, extent_frames: int) -> Range | None:
        """The parked range to adopt: of the smallest extent that fits, the latest parked.
        O(log)."""
        at = bisect_left(self.extents, extent_frames)
        return self.parked[self.extents[at]][-1] if at < len(self.extents) else None

    def vacant(self, extent_frames: int) -> Range | None:
        """A VACANT range over free addresses, not taken yet; None if there are none."""
        first = self.addresses.find(extent_frames + self.geometry.guard_frames)
        if first is None:
            return None
        base = first * self.geometry.frame_bytes
        return Range(self.made + 1, base, extent_frames, self.counts)

    def reserve(self, range_: Range) -> None:
        """Take the addresses of a range that `vacant` gave, and enter it in the books."""
        self.made += 1
        self.addresses.take(*self._addresses(range_))
        self.ranges[range_.number] = range_

    def unreserve(self, range_: Range) -> None:
        """Give a VACANT range's addresses back, and strike it from the books."""
        self.addresses.give(*self._addresses(range_))
        del self.ranges[range_.number]

    def slot(self, range_: Range) -> int:
        """The slot of the range's first block; the others follow in order."""
        return (range_.base - self.base) // self.geometry.block_bytes

    def _addresses(self, range_: Range) -> tuple[int, int]:
        first = range_.base // self.geometry.frame_bytes
        return first, range_.extent_frames + self.geometry.guard_frames

    def park(self, range_: Range) -> None:
        """Put a range that has become PARKED up for adoption."""
        self.clock += 1
        range_.parked_at = self.clock
        waiting = self.parked.get(range_.extent_frames)
        if waiting is None:
            insort(self.extents, range_.extent_frames)
            waiting = self.parked[range_.extent_frames] = []
        waiting.append(range_)

    def unpark(self, range_: Range) -> None:
        """Take a range that is PARKED no longer out of the offer."""
        waiting = self.parked[range_.extent_frames]
        waiting.remove(range_)
        if not waiting:
            del self.parked[range_.extent_frames]
            self.extents.remove(range_.extent_frames)

    def oldest_parked(self) -> list[Range]:
        """Parked ranges, the longest parked first. O(n log n) in the parked ranges."""
        waiting = [range_ for group in self.parked.values() for range_ in group]
        return sorted(waiting, key=lambda range_: range_.parked_at)
