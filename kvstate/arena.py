"""The arena: one address reservation, cut into ranges that are parked and adopted.

Addresses are plentiful and mappings are dear, so a freed range keeps its mapping and waits to be
adopted whole. Extents are rounded (see `Geometry.extent`), which makes parked ranges fit later
sequences. Behind every range stand addresses that are never mapped, so that an overrun faults
instead of reading a neighbour.

Rejected: one fixed range a row. It is simpler, but a range must then be as long as the longest
sequence, and a row that is free again is the only one that can use its mapping.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstate.config import Geometry
from kvstate.plan import Cells, Frames
from kvstate.spec.frame import LIVE_SPAN, MAPPED, PARKED
from kvstate.spec.page import PAGE
from kvstate.spec.range import RANGE, VACANT

if TYPE_CHECKING:
    from kvstate.blocks import Node
    from kvstate.spans import Span


class Counts(NamedTuple):
    """How many are in each state, by its code; nobody counts what is VACANT."""

    frames: list[int]
    pages: list[int]
    """Of sequences and of ranges."""
    ranges: list[int]


Signature = tuple[int, int] | None
"""What a parked range begins with: the number of a span and how many of its frames."""


class Range:
    """A run of addresses: frames of spans first, then its own.

    Its own frames are LIVE_SPAN if others map them too, then MAPPED up to the capacity, then PARKED
    up to the frontier.
    """

    __slots__ = (
        "aliases", "base", "counts", "extent_frames", "frames", "holders", "home_of", "kept_frames",
        "nodes", "number", "owner", "pages", "parked_at", "span", "state",
    )  # fmt: skip

    def __init__(self, number: int, base: int, extent_frames: int, counts: Counts) -> None:
        self.number = number
        self.base = base
        """Address of its first byte."""
        self.extent_frames = extent_frames
        self.state = VACANT.code
        self.counts = counts.ranges
        self.frames = Frames(self, counts.frames)
        self.aliases = Cells(self, bytearray())
        """Frames of `span` that it begins with."""
        self.span: Span | None = None
        self.home_of: Span | None = None
        """The span whose frames follow its aliases: its own, or those that it has left."""
        self.pages = Cells(self, bytearray(), counts.pages)
        """Its own page records, while no sequence keeps them."""
        self.holders: set[tuple[str, int]] = set()
        self.owner: Any = None
        self.parked_at = 0
        self.nodes: list[Node] = []
        """What the index calls the pages that it retains."""
        self.kept_frames = 0
        """Its own frames up to the last that has one: their bytes are as its owner left them."""

    def __str__(self) -> str:
        return f"range {self.number}"

    def enter(self, code: int) -> None:
        """Change the state. The one place that counts them."""
        self.counts[self.state] -= 1
        self.counts[code] += 1
        self.state = code

    def give(self, owner: Any) -> None:
        """It is a sequence's, or nobody's if that is None. What it aliases is needed meanwhile."""
        self.owner = owner
        if self.span is not None and (self.home_of is None or not self.home_of.needed):
            self.span.need(-1 if owner is None else 1)

    @property
    def holds(self) -> int:
        """How many holders its fence still waits for."""
        return len(self.holders)

    @property
    def shared(self) -> int:
        """Frames at its beginning that it does not own."""
        left = 0 if self.home_of is None else len(self.home_of.frames.ids)
        return len(self.aliases.states) + left

    def first(self, cells: Cells) -> int:
        """Where the first of its aliases or of its own frames is, in frames from its base."""
        return 0 if cells is self.aliases else self.shared

    @property
    def mapped(self) -> int:
        """The frontier, in frames."""
        return self.shared + len(self.frames.ids)

    @property
    def charged(self) -> int:
        """Own frames that its sequence pays for."""
        states = self.frames.states
        return states.count(MAPPED.code) + states.count(LIVE_SPAN.code)

    @property
    def used(self) -> int:
        """Frames from its base that back its sequence's capacity."""
        return self.shared + self.charged

    @property
    def signature(self) -> Signature:
        """What a sequence that adopts it must begin with. A home is never adopted."""
        if self.home_of is not None:
            return self.home_of.number, -1
        return None if self.span is None else (self.span.number, len(self.aliases.states))

    @property
    def tail(self) -> int:
        """Frames at its end that are mapped and in nobody's use."""
        return self.frames.states.count(PARKED.code)


Uses = Mapping["Range", int]
"""How far ranges are used, in frames from their bases."""


def missing(uses: Uses, margin: int = 0) -> int:
    """Frames that are not mapped and would be with a margin beyond each use, as far as the extent
    goes."""
    return sum(
        max(0, max(end, min(end + margin, range_.extent_frames)) - range_.mapped)
        for range_, end in uses.items()
    )


class Addresses:
    """Free runs of an address reservation; best fit, neighbours merged.

    Rejected: the first run that fits. Homes of spans cut the addresses into many runs that fit
    nothing, and every one before it would be looked at.
    """

    def __init__(self, base: int, size_frames: int) -> None:
        self.free: list[tuple[int, int]] = [(base, size_frames)]
        """(first frame, count), by address."""
        self._sizes: list[tuple[int, int]] = [(size_frames, base)]
        """The same by count."""

    def find(self, count: int) -> int | None:
        """The first frame of a free run of that many; None if there is none. O(log free runs)."""
        at = bisect_left(self._sizes, (count, 0))
        return self._sizes[at][1] if at < len(self._sizes) else None

    def rooms(self, count: int, most: int) -> int:
        """How many runs of that many there is room for; no more are counted than `most`. O(free
        runs that have room for one, up to the longest that have room for `most`)."""
        found = 0
        for size, _ in reversed(self._sizes):
            if size < count or found >= most:
                break
            found += size // count
        return min(found, most)

    def take(self, first: int, count: int) -> None:
        """Take what `find` named out of the free run that it lies in: others may have been merged
        with it meanwhile."""
        start, size = self._strike(bisect_right(self.free, first, key=itemgetter(0)) - 1)
        self._put(start, first - start)
        self._put(first + count, start + size - first - count)

    def give(self, first: int, count: int) -> None:
        """Return a run."""
        at = bisect_left(self.free, (first, 0))
        if at < len(self.free) and self.free[at][0] == first + count:
            count += self._strike(at)[1]
        if at and sum(self.free[at - 1]) == first:
            first, before = self._strike(at - 1)
            count += before
        self._put(first, count)

    def _put(self, first: int, count: int) -> None:
        if count:
            insort(self.free, (first, count))
            insort(self._sizes, (count, first))

    def _strike(self, at: int) -> tuple[int, int]:
        first, count = self.free.pop(at)
        del self._sizes[bisect_left(self._sizes, (count, first))]
        return first, count


def _frames(range_: Range) -> int:
    return len(range_.frames.ids)


class Shelf:
    """Parked ranges that may stand in for one another."""

    def __init__(self) -> None:
        self.extents: list[int] = []
        """The extents that it has, sorted."""
        self._ranges: dict[int, list[Range]] = {}
        """By extent, those with the most frames last."""

    def __iter__(self) -> Iterator[Range]:
        return chain.from_iterable(self._ranges.values())

    def fitting(self, extent_frames: int) -> Range | None:
        """Of the smallest extent that fits, the one with the most frames mapped when it was parked,
        which saves most mappings; of equals the latest. O(log)."""
        at = bisect_left(self.extents, extent_frames)
        return self._ranges[self.extents[at]][-1] if at < len(self.extents) else None

    def put(self, range_: Range) -> None:
        """Add a range. O(extents)."""
        extent = range_.extent_frames
        if extent not in self._ranges:
            insort(self.extents, extent)
        insort(self._ranges.setdefault(extent, []), range_, key=_frames)

    def take(self, range_: Range) -> None:
        """Remove a range. O(ranges of its extent)."""
        extent = range_.extent_frames
        self._ranges[extent].remove(range_)
        if not self._ranges[extent]:
            del self._ranges[extent]
            self.extents.remove(extent)


class Arena:
    """Every range of one layer group, and which of them wait to be adopted."""

    def __init__(self, geometry: Geometry, base: int, counts: list[int]) -> None:
        self.geometry, self.base = geometry, base
        self.counts = Counts(counts, [0] * len(PAGE.states), [0] * len(RANGE.states))
        frame = geometry.frame_bytes
        self.addresses = Addresses(base // frame, geometry.arena_bytes // frame)
        self.ranges: dict[int, Range] = {}
        """Every range that is not VACANT, by number."""
        self.parked: dict[Signature, Shelf] = {}
        """PARKED ranges that retain nothing, by what they begin with."""
        self.retaining: dict[int, Range] = {}
        """Those that retain something, by number; the longest parked first."""
        self.clock = 0
        self.made = 0

    def fitting(self, extent_frames: int, signature: Signature = None) -> Range | None:
        """The parked range to adopt that begins with just that. O(log)."""
        shelf = self.parked.get(signature)
        return None if shelf is None else shelf.fitting(extent_frames)

    def retained(
        self, extent_frames: int, signature: Signature, spare: Container[Range]
    ) -> Range | None:
        """The longest parked range to adopt that retains something, besides those to `spare`.
        O(retaining ranges)."""
        for range_ in self.retaining.values():
            fits = range_.extent_frames >= extent_frames and range_.signature == signature
            if fits and range_ not in spare:
                return range_
        return None

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

    def trim_homes(self) -> None:
        """Give back the addresses behind what is mapped in parked homes of spans. O(parked)."""
        for range_ in self.oldest_parked():
            if range_.home_of is not None:
                self.unpark(range_)
                self._offer(range_)

    def _trim(self, range_: Range) -> None:
        """No sequence will have the range: the home of a span is never adopted."""
        unit = self.geometry.align_bytes // self.geometry.frame_bytes
        keep = max(1, -(-range_.mapped // unit)) * unit
        if keep < range_.extent_frames:
            first, count = self._addresses(range_)
            range_.extent_frames = keep
            kept = self._addresses(range_)[1]
            self.addresses.give(first + kept, count - kept)

    def leaves_room(self, newcomer: Range, span: Span) -> bool:
        """Whether each row without a range, and one sequence that must move, could still have one
        of the greatest extent if that range maps the span: what sequences use stays, all else is
        given up.

        O(1) where one free run has room for all; O(n log n) in the ranges where free runs have not.
        """
        size, wanted = self.geometry.longest_frames, self.geometry.rows + 1
        if self.addresses.rooms(size, wanted + 1) > wanted:
            return True
        used = self._in_use(newcomer, span)
        wanted -= sum(range_.owner is not None for range_ in used)
        wanted -= newcomer.owner is None
        at = self.base // self.geometry.frame_bytes
        end = at + self.geometry.arena_bytes // self.geometry.frame_bytes
        for first, count in sorted([*map(self._addresses, used), (end, 0)]):
            wanted -= max(0, first - at) // size
            at = first + count
        return wanted <= 0

    def _in_use(self, newcomer: Range, span: Span) -> list[Range]:
        """The ranges that sequences have, and the homes of the spans that they map."""
        found = dict[int, Range]()
        owned = (range_ for range_ in self.ranges.values() if range_.owner is not None)
        waiting = [newcomer, span.home, *owned]
        while waiting:
            range_ = waiting.pop()
            if range_.number not in found:
                found[range_.number] = range_
                waiting += [] if range_.span is None else [range_.span.home]
        return list(found.values())

    def slot(self, range_: Range) -> int:
        """The slot of the range's first block; the others follow in order."""
        return (range_.base - self.base) // self.geometry.block_bytes

    def _addresses(self, range_: Range) -> tuple[int, int]:
        first = range_.base // self.geometry.frame_bytes
        return first, range_.extent_frames + self.geometry.guard_frames

    def park(self, range_: Range) -> None:
        """Put a range that has become PARKED up for adoption; the home of a span gives up addresses
        instead."""
        self.clock += 1
        range_.parked_at = self.clock
        self._offer(range_)

    def _offer(self, range_: Range) -> None:
        if range_.home_of is not None:
            self._trim(range_)
        if range_.kept_frames:
            self.retaining[range_.number] = range_
        else:
            self.parked.setdefault(range_.signature, Shelf()).put(range_)

    def unpark(self, range_: Range) -> None:
        """Take a range that is PARKED no longer out of the offer."""
        if self.retaining.pop(range_.number, None) is not None:
            return
        shelf = self.parked[range_.signature]
        shelf.take(range_)
        if not shelf.extents:
            del self.parked[range_.signature]

    def oldest_parked(self) -> list[Range]:
        """Parked ranges, the longest parked first, and those last that retain something.
        O(n log n) in the parked ranges."""
        waiting = [range_ for shelf in self.parked.values() for range_ in shelf]
        waiting += self.retaining.values()
        return sorted(waiting, key=lambda range_: (range_.kept_frames > 0, range_.parked_at))
