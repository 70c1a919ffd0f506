"""Addresses as the order check sees them: what is mapped, and which addresses are the same bytes.

A frame may be mapped at several addresses, and then all of them are the same bytes. Each frame has
one *home*, the address at which it has been mapped longest; two accesses conflict if they meet
there. Most frames have one address only, so nearly every address is its own home.

Rejected: books by frame and byte. A step of 256 long sequences touches a million frames, and may
cost no more than its few hundred runs of addresses.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class Pieces:
    """Runs of addresses: from `lows` up to `highs`, none of them empty, in any order."""

    __slots__ = ("_furthest", "highs", "lows")

    def __init__(self, lows: Numbers, highs: Numbers) -> None:
        filled = highs > lows
        every = bool(filled.all())
        self.lows, self.highs = (lows, highs) if every else (lows[filled], highs[filled])
        self._furthest: tuple[Numbers, Numbers] | None = None

    def __len__(self) -> int:
        return len(self.lows)

    def met(self, other: Pieces) -> tuple[int, int] | None:
        """The first run of addresses that both have. O((n + m) log n)."""
        if not len(self) or not len(other):
            return None
        lows, furthest = self._sorted()
        before = np.searchsorted(lows, other.highs)
        meets = (before > 0) & (furthest[before - 1] > other.lows)
        if not meets.any():
            return None
        at = int(meets.argmax())
        low, high = int(other.lows[at]), int(other.highs[at])
        mine = int(((self.lows < high) & (self.highs > low)).argmax())
        return max(low, int(self.lows[mine])), min(high, int(self.highs[mine]))

    def within(self, lows: Numbers, highs: Numbers) -> npt.NDArray[np.bool_]:
        """Which of these runs are wholly in one of ours, if ours are apart from one another."""
        if not len(self):
            return np.zeros(len(lows), np.bool_)
        ours, ends = self._sorted()
        at = np.searchsorted(ours, lows, "right") - 1
        return (at >= 0) & (ends[at] >= highs)

    def _sorted(self) -> tuple[Numbers, Numbers]:
        """Where they begin, in order, and how far any up to that one goes."""
        if self._furthest is None:
            order = np.argsort(self.lows)
            self._furthest = self.lows[order], np.maximum.accumulate(self.highs[order])
        return self._furthest


def pieces(runs: Iterable[tuple[int, int]]) -> Pieces:
    """From (address, size in bytes) of each run."""
    table = np.array(list(runs), np.int64).reshape(-1, 2)
    return Pieces(table[:, 0], table[:, 0] + table[:, 1])


NOTHING = pieces(())


class Runs:
    """A set of addresses, as sorted runs that are apart from one another."""

    def __init__(self) -> None:
        self.lows: list[int] = []
        self.highs: list[int] = []
        self._pieces: Pieces | None = None

    def add(self, low: int, high: int) -> None:
        """Put a run in. O(log), and a shift of what is behind it."""
        first, end = bisect_left(self.highs, low), bisect_right(self.lows, high)
        if first < end:
            low, high = min(low, self.lows[first]), max(high, self.highs[end - 1])
        self._replace(first, end, [(low, high)])

    def remove(self, low: int, high: int) -> None:
        """Take a run out. O(log), and a shift of what is behind it."""
        first, end = bisect_right(self.highs, low), bisect_left(self.lows, high)
        if first < end:
            left, right = (self.lows[first], low), (high, self.highs[end - 1])
            self._replace(first, end, [run for run in (left, right) if run[0] < run[1]])

    def missing(self, wanted: Pieces) -> tuple[int, int] | None:
        """The first of the runs that is not wholly in the set."""
        if self._pieces is None:
            self._pieces = Pieces(np.array(self.lows, np.int64), np.array(self.highs, np.int64))
        there = self._pieces.within(wanted.lows, wanted.highs)
        if there.all():
            return None
        at = int(there.argmin())
        return int(wanted.lows[at]), int(wanted.highs[at])

    def _replace(self, first: int, end: int, runs: list[tuple[int, int]]) -> None:
        self.lows[first:end] = [low for low, _ in runs]
        self.highs[first:end] = [high for _, high in runs]
        self._pieces = None


class Memory:
    """What is mapped where, from the calls that map and unmap."""

    def __init__(self) -> None:
        self.frame_bytes = 1
        self.mapped, self.writable = Runs(), Runs()
        self.host: dict[int, int] = {}
        """Size in bytes by address."""
        self.frames: dict[int, int] = {}
        """The frame at each address at which one is mapped."""
        self.places: dict[int, list[int]] = {}
        """Every address of each frame, its home first."""
        self._aliases: list[tuple[int, int, int]] | None = None

    def reserve_host(self, address: int, size_bytes: int) -> None:
        """Host memory, from now on."""
        self.host[address] = size_bytes
        self.mapped.add(address, address + size_bytes)
        self.writable.add(address, address + size_bytes)

    def unreserve_host(self, address: int) -> None:
        """Host memory no more."""
        end = address + self.host.pop(address)
        self.mapped.remove(address, end)
        self.writable.remove(address, end)

    def map(self, address: int, frames: Sequence[int], *, read_only: bool) -> None:
        """Frames are mapped one after the other. O(frames)."""
        end = address + len(frames) * self.frame_bytes
        if not frames:
            return
        self.mapped.add(address, end)
        if not read_only:
            self.writable.add(address, end)
        for at, frame in enumerate(frames):
            place = address + at * self.frame_bytes
            self.frames[place] = frame
            places = self.places.setdefault(frame, [])
            places.append(place)
            if len(places) > 1:
                self._aliases = None

    def unmap(self, address: int, count_frames: int) -> None:
        """Nothing is mapped there any more. O(frames)."""
        end = address + count_frames * self.frame_bytes
        self.mapped.remove(address, end)
        self.writable.remove(address, end)
        for place in range(address, end, self.frame_bytes):
            frame = self.frames.pop(place)
            places = self.places[frame]
            if len(places) > 1:
                self._aliases = None
                places.remove(place)
            else:
                del self.places[frame]

    def frame_at(self, address: int) -> int | None:
        """The frame that is mapped at an address; None for host memory."""
        return self.frames.get(address - address % self.frame_bytes)

    def home(self, wanted: Pieces) -> Pieces:
        """The same bytes at the homes of their frames."""
        aliases = self._alias_runs()
        if not aliases or not len(wanted):
            return wanted
        found: list[tuple[int, int]] = []
        for low, high in zip(wanted.lows.tolist(), wanted.highs.tolist(), strict=True):
            at = bisect_right(aliases, (low, -1, -1))
            at -= at > 0 and aliases[at - 1][1] > low
            while at < len(aliases) and aliases[at][0] < high:
                first, end, home = aliases[at]
                if low < first:
                    found.append((low, first - low))
                    low = first
                end = min(end, high)
                found.append((home + low - first, end - low))
                low, at = end, at + 1
            found.append((low, high - low))
        return pieces(found)

    def _alias_runs(self) -> list[tuple[int, int, int]]:
        """(first, end, home of the first) of addresses that are not homes. O(such frames log) after
        a change."""
        if self._aliases is None:
            size, runs = self.frame_bytes, list[tuple[int, int, int]]()
            doubles = (places for places in self.places.values() if len(places) > 1)
            pairs = sorted((place, places[0]) for places in doubles for place in places[1:])
            for place, home in pairs:
                if runs and runs[-1][1] == place and home - runs[-1][2] == place - runs[-1][0]:
                    runs[-1] = runs[-1][0], place + size, runs[-1][2]
                else:
                    runs.append((place, place + size, home))
            self._aliases = runs
        return self._aliases
