"""The null device: books and completions, and no memory at all.

For measuring what the bookkeeping itself costs, and for exploring the tables where bytes do not
matter. What it is asked to map, it enters in its ledger, so that the laws hold over it as over a
real device.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from kvstate.device import CopyRun, FillRun, MapRun, Segments, Stream, UnmapRun
from kvstate.gpu.simulated import SimulatedDevice


@frozen
class NoCheck:
    """A byte check on a device without bytes: nothing was compared."""

    done: bool = True
    size_bytes: int = 0
    wrong: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


class NullDevice(SimulatedDevice):
    """Addresses without memory."""

    name = "null"
    memory = None

    def __init__(self, *, streams: str = "eager", seed: int = 0) -> None:
        super().__init__(streams=streams, seed=seed)
        self._next_address = 1 << 40
        self._next_frame = 0

    def reserve(self, size_bytes: int, align_bytes: int) -> int:
        """Addresses that nobody else was given."""
        self.enter("reserve")
        address = -(-self._next_address // align_bytes) * align_bytes
        self._next_address = address + size_bytes
        self.reservations[address] = size_bytes
        return address

    def unreserve(self, address: int) -> None:
        """Forget the reservation."""
        self.enter("unreserve")
        self.check_unreserve(address)
        del self.reservations[address]

    def create(self, count: int, frame_bytes: int) -> list[int]:
        """Frame numbers."""
        self.enter("create")
        self.check_create(count, frame_bytes)
        self._pass("frame", count)
        self.frame_bytes = frame_bytes
        first, self._next_frame = self._next_frame, self._next_frame + count
        self.frames.update(range(first, first + count))
        return list(range(first, first + count))

    def release(self, frames: Sequence[int]) -> None:
        """Forget frames."""
        self.enter("release")
        self.check_release(frames)
        self._pass("freeing", len(frames))
        self.frames.difference_update(frames)

    def map(self, runs: Sequence[MapRun]) -> None:
        """Enter the mappings."""
        self.enter("map")
        places = self.check_map(runs)
        self._pass("mapping", len(places))
        self._pass("access", len(runs))
        self.note_map(runs, places)

    def unmap(self, runs: Sequence[UnmapRun]) -> None:
        """Strike the mappings out."""
        self.enter("unmap")
        places = self.check_unmap(runs)
        self.check_quiet(runs)
        self._pass("unmapping", len(runs))
        self.note_unmap(runs, places)

    def host_reserve(self, size_bytes: int) -> int:
        """Addresses that nobody else was given."""
        self.enter("host_reserve")
        self._pass("register", 1)
        address, self._next_address = self._next_address, self._next_address + size_bytes
        self.host_memory[address] = size_bytes
        return address

    def host_unreserve(self, address: int) -> None:
        """Forget the host memory."""
        self.enter("host_unreserve")
        self.check_host(address)
        self._pass("unregister", 1)
        del self.host_memory[address]

    def fill(self, runs: Sequence[FillRun], value: int) -> None:
        """Nothing to overwrite."""
        self.enter("fill")
        for run in runs:
            self.check_access("fill", run.address, run.size_bytes, write=True)
        self._pass("filling", len(runs))

    def _pass(self, kind: str, times: int) -> None:
        """Pass the points of a call; nothing is done before the last of them."""
        for _ in range(times):
            self.step(kind)

    def peek(self, address: int, size_bytes: int) -> bytes:
        """There are no bytes."""
        self.present("peek")
        return bytes(size_bytes)

    def poke(self, address: int, data: bytes) -> None:
        """There are no bytes."""
        self.present("poke")

    def strays(self, runs: Sequence[FillRun], values: bytes) -> int:
        """None: there is no memory."""
        self.present("strays")
        return 0

    def set_rows(self, row_bytes: int) -> None:
        """Nothing to compare."""

    def write(self, stream: Stream, segments: Segments) -> None:
        """Launch a piece of work that writes nothing."""
        self.present("write")
        self.streams.launch(self._live("write", stream), "write", _nothing)

    def publish(
        self, stream: Stream, rows: Sequence[int], bases: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Launch a piece of work that publishes nothing."""
        self.present("publish")
        self.streams.launch(self._live("publish", stream), "publish", _nothing)

    def verify(self, stream: Stream, segments: Segments, most_bytes: int | None = None) -> NoCheck:
        """Launch a piece of work that compares nothing."""
        self.present("verify")
        self.streams.launch(self._live("verify", stream), "verify", _nothing)
        return NoCheck()

    def move(self, runs: Sequence[CopyRun]) -> bool:
        """No bytes to move."""
        return True

    def spoil(self, runs: Sequence[CopyRun]) -> None:
        """No bytes to spoil."""

    def close(self, streams: Sequence[Stream] = ()) -> None:
        """Forget everything; nothing, while a copy has been told never to end."""
        if not self.forked and self.rests():
            self.forget()


def _nothing() -> None:
    return None
