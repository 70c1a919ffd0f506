"""Pinned host memory: the host tier of a GPU.

Pages are touched from several threads and then registered in units: on an H200's host that takes a
quarter of the time of `cuMemHostAlloc` (limits measured: touching 3.7 to 4.3 GiB/s and registering
touched pages 13 to 25 GiB/s, against 2.0 GiB/s). A copy may not cross from one registered unit
into the next (the driver refuses it), so copies are cut there.

Runs and units are noted before they are touched and registered, so that they are given back
whatever comes in between. A fork does not inherit them: it would wait until all pages were copied.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

from kvstate.device import CopyRun
from kvstate.errors import DeviceError
from kvstate.gpu.books import Books, address_of, never_unmap
from kvstate.gpu.driver import Driver

UNIT_BYTES: Final = 512 << 20
MOST_BYTES: Final = 128 << 20
"""Of one copy."""
THREADS: Final = 8
_TOUCH_BYTES: Final = 16 << 20
_PORTABLE: Final = 0x01
_ANONYMOUS: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class Pinned:
    """Runs of host memory that the device can copy to and from."""

    def __init__(self, driver: Driver, books: Books) -> None:
        self.driver, self.books, self.unit_bytes = driver, books, UNIT_BYTES
        self._runs: dict[int, mmap.mmap] = {}
        """By their addresses."""
        self.units: dict[int, list[int]] = {}
        """The first addresses of the registered units, by the address of their run."""

    def reserve(self, size_bytes: int) -> int:
        """Touched and registered memory; if anything fails, none."""
        try:
            run = mmap.mmap(-1, size_bytes, _ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DeviceError("host_reserve", f"{size_bytes} bytes of memory: {error}") from error
        run.madvise(mmap.MADV_DONTFORK)
        address = address_of(run)
        self._runs[address], self.units[address] = run, []
        with self.books.whole() as undo:
            undo.append(partial(self._forget, address))
            self._touch(address, size_bytes)
            for first, size in self._units(address, size_bytes):
                self.units[address].append(first)
                self._register(first, size)
                undo.append(partial(self._unregister, first))
        return address

    def unreserve(self, address: int, size_bytes: int) -> None:
        """Unregister and give back; if anything fails, neither."""
        with self.books.whole() as undo:
            for first, size in self._units(address, size_bytes):
                self._unregister(first)
                undo.append(partial(self._register, first, size))
        self._forget(address)

    def free(self) -> None:
        """Give everything back, whatever was registered of it."""
        while self._runs:
            address, units = next(iter(self.units.items()))
            for first in units:
                with suppress(DeviceError):  # it may not have come to that
                    self.driver.call(self.driver.api.cuMemHostUnregister, first)
            self._forget(address)

    def leave(self) -> None:
        """This is the child of a fork: nothing of it is here."""
        never_unmap(self._runs.values())

    def _forget(self, address: int) -> None:
        self._runs[address].close()
        del self._runs[address], self.units[address]

    def _register(self, first: int, size_bytes: int) -> None:
        self.books.step("register")
        self.driver.call(self.driver.api.cuMemHostRegister, first, size_bytes, _PORTABLE)

    def _unregister(self, first: int) -> None:
        self.books.step("unregister")
        self.driver.call(self.driver.api.cuMemHostUnregister, first)

    def pieces(self, runs: Sequence[CopyRun], most_bytes: int | None = None) -> Iterator[CopyRun]:
        """The runs of a copy, cut where host memory passes into another unit, or they are long.

        A copy begins when its call returns, and a call takes longer the more frames it is over.
        """
        most = min(MOST_BYTES, max(most_bytes or MOST_BYTES, 1))
        for run in runs:
            cut = self._cut(run, most)
            while cut:
                yield CopyRun(run.target, run.source, cut)
                run = CopyRun(run.target + cut, run.source + cut, run.size_bytes - cut)
                cut = self._cut(run, most)
            if run.size_bytes:
                yield run

    def _cut(self, run: CopyRun, most: int) -> int:
        """Bytes up to where the run must be cut; 0 if nowhere."""
        for base, units in self.units.items():
            end = units[-1] + self.unit_bytes if units else base
            for side in (run.target, run.source):
                left = self.unit_bytes - (side - base) % self.unit_bytes
                if base <= side < end and left < run.size_bytes:
                    return min(left, most)
        return most if run.size_bytes > most else 0

    def _touch(self, address: int, size_bytes: int) -> None:
        """Make the system back every page, from several threads (the call runs without the
        lock)."""
        firsts = range(address, address + size_bytes, _TOUCH_BYTES)
        with ThreadPoolExecutor(THREADS) as pool:
            end = address + size_bytes
            list(pool.map(lambda at: ctypes.memset(at, 0, min(_TOUCH_BYTES, end - at)), firsts))

    def _units(self, address: int, size_bytes: int) -> list[tuple[int, int]]:
        """(first address, size in bytes) of the units that are registered one by one."""
        end, unit = address + size_bytes, self.unit_bytes
        return [(at, min(unit, end - at)) for at in range(address, end, unit)]
