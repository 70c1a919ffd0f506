"""The two tiers' books: the frames of the GPU level, and the slots of host memory.

Both keep state bytes and one count a state, changed only by settling a plan. Whether something
fits is asked here and answered from these counts; nothing is reserved by asking.
"""

from __future__ import annotations

import numpy as np

from kvstate.plan import Cells, Frames, Run
from kvstate.spec.frame import (
    ABSENT,
    COMING,
    DENIED,
    FRAME,
    LIVE_SPAN,
    MAPPED,
    PARKED,
    POOLED,
    SPAN,
)
from kvstate.spec.host import (
    DRAINING,
    FILLING,
    FREE,
    HELD_READ,
    HOST,
    MIRROR,
    MIRRORING,
    STALE,
    STALE_HELD,
)

_COMING = (DRAINING, HELD_READ, FILLING, STALE_HELD, MIRRORING)


class FrameBudget:
    """Frames of one budget: absent, pooled, or in some range."""

    def __init__(self, budget_frames: int) -> None:
        self.budget_frames = budget_frames
        self.counts = [0] * len(FRAME.states)
        self.counts[ABSENT.code] = budget_frames
        self.pool = Frames(self, self.counts)
        self.denied = Frames(self, self.counts)
        """Those that the device had no memory for."""

    def __str__(self) -> str:
        return "the GPU tier"

    @property
    def free(self) -> int:
        """Frames to be had at once: pooled, or absent and within the budget."""
        return self.counts[ABSENT.code] + self.counts[POOLED.code]

    @property
    def existing(self) -> int:
        """Frames that the device holds."""
        return self.budget_frames - self.counts[ABSENT.code] - self.counts[DENIED.code]

    @property
    def usable_frames(self) -> int:
        """The budget, without what the device had no memory for when it was asked."""
        return self.budget_frames - self.counts[DENIED.code]

    @property
    def parked(self) -> int:
        """Frames that are mapped and in nobody's use."""
        return self.counts[PARKED.code]

    @property
    def in_spans(self) -> int:
        """Frames that the registry of spans pays for."""
        return self.counts[SPAN.code]

    @property
    def coming(self) -> int:
        """Frames behind a fence."""
        return self.counts[COMING.code]

    @property
    def charged(self) -> int:
        """Frames that sequences pay for."""
        return self.counts[MAPPED.code] + self.counts[LIVE_SPAN.code]

    def absent(self, count: int) -> tuple[Frames, int, int]:
        """A run of frames that do not exist yet, to be created or (when 0) to be released into."""
        frames = Frames(self, self.counts)
        frames.ids = [0] * count
        frames.states = bytearray([ABSENT.code]) * count
        return frames, 0, count


class HostSlots:
    """Slots of host memory, each with room for one page."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.counts = [0] * len(HOST.states)
        self.counts[FREE.code] = slots
        self.cells = Cells(self, bytearray([FREE.code]) * slots, self.counts)
        self.pages = Cells("the index", bytearray(slots))
        """The records of pages that are nobody's, by their slots."""
        self.readers: dict[int, set[int]] = {}
        """Copies to the GPU that read what is nobody's: their tokens, by slot."""
        self.address = 0
        self._cursor = 0

    def __str__(self) -> str:
        return "the host tier"

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return len(self.cells.states)

    def owns(self, address: int) -> bool:
        """It is an address of a slot."""
        return 0 <= address - self.address < self.capacity * self.block_bytes

    @property
    def free(self) -> int:
        """Slots to be had at once."""
        return self.counts[FREE.code]

    @property
    def coming(self) -> int:
        """Slots that become free when copies end."""
        return sum(self.counts[state.code] for state in _COMING)

    @property
    def stale(self) -> int:
        """Slots whose pages are nobody's, or are on the GPU too: they can be had for the asking."""
        return self.counts[STALE.code] + self.counts[MIRROR.code]

    def room(self, count: int) -> list[Run] | None:
        """Free slots for that many pages, in as few runs as can be; None if there are too few.

        One run if one is long enough (behind the last one, or the first), else the longest runs
        first. Cost: one scan.
        """
        if count > self.free:
            return None
        if not count:
            return []
        states, wanted = self.cells.states, bytes([FREE.code]) * count
        behind = states.startswith(wanted, self._cursor)
        at = self._cursor if behind else states.find(wanted)
        if at >= 0:
            self._cursor = at + count
            return [(self.cells, at, at + count)]
        return self._longest(count)

    def _longest(self, count: int) -> list[Run]:
        """The longest free runs, until there are enough slots; in the order of their slots."""
        free = np.frombuffer(self.cells.states, np.uint8) == FREE.code
        edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
        lows, sizes = edges[::2], edges[1::2] - edges[::2]
        longest = np.argsort(-sizes, kind="stable")
        enough = np.cumsum(sizes[longest])
        last = int(np.searchsorted(enough, count))
        sizes[longest[last]] -= enough[last] - count
        chosen = np.sort(longest[: last + 1])
        ends = lows[chosen] + sizes[chosen]
        return [
            (self.cells, *run) for run in zip(lows[chosen].tolist(), ends.tolist(), strict=True)
        ]
