"""What a manager asks of the memory under it: the Device protocol.

The manager decides, a device does. Every call either does all of it or raises `DeviceError` and
has done nothing; whatever is neither raises `DeviceFault`. Nothing here tells the manager how fast
anything was: completions come only out of `poll`, `finish` and `quiesce`.

A copy waits for its own events and for nothing else: not for another copy's event, nor for copies
that go another way. Those to the host may be held back, so that no more than some bytes of them are
in flight at a time (`pace`); each call here that asks about copies lets the next of them begin.

A stream that is being captured into a graph runs nothing: whatever would be launched there becomes
part of the graph, and an event there never passes. So a call that would launch on it, or wait for
it, raises StreamCaptured and has done nothing.

A device belongs to one manager, one thread and one process. In the child of a fork it refuses all
calls with IllegalTransition, and its memory is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstate.spec.facts import Ledger

Stream = Any
"""Whatever the device launches work on, in order: opaque to the manager."""
Event = Any
"""A point in a stream: opaque to the manager."""


class Direction(Enum):
    """Which way a copy goes."""

    OUT = "out"
    """GPU to host."""
    IN = "in"
    """Host to GPU, or from both."""
    WITHIN = "within"
    """GPU to GPU."""


class CopyRun(NamedTuple):
    """`size_bytes` from `source` to `target`, both addresses."""

    target: int
    source: int
    size_bytes: int


class MapRun(NamedTuple):
    """Frames to map one after the other from `address`."""

    address: int
    frames: Sequence[int]
    read_only: bool = False


class UnmapRun(NamedTuple):
    """That many frames to unmap from `address`."""

    address: int
    count_frames: int


class FillRun(NamedTuple):
    """Memory to overwrite with one byte."""

    address: int
    size_bytes: int


class Completion(NamedTuple):
    """The end of the copy that `token` names."""

    token: int
    ok: bool


CALLS: Final = (
    "reserve", "unreserve", "create", "release", "map", "unmap", "host_reserve", "host_unreserve",
    "copy", "fill", "record", "finish", "quiesce",
)  # fmt: skip
"""The kinds of device calls that can fail and are counted."""
MAPPING_CALLS: Final = ("create", "release", "map", "unmap")
"""Those of them that a steady state does without."""


class Device(Protocol):
    """Physical frames, addresses, host memory, copies and the end of copies.

    Addresses are plain integers. A frame is the device's own number for a physical allocation; all
    frames of a device have one size. A stream of None is the default stream. What is passed to a
    call may be changed by its caller once the call has returned.
    """

    @property
    def name(self) -> str:
        """What kind of device it is."""

    @property
    def calls(self) -> Mapping[str, int]:
        """How often each kind of `CALLS` was made."""

    @property
    def granularity_bytes(self) -> int:
        """Frame sizes are multiples of this."""

    @property
    def memory(self) -> tuple[str, int] | None:
        """Whose memory is behind its addresses: `("cuda", ordinal)`, `("cpu", 0)`, or nobody's."""

    def attach(self, mark: object) -> None:
        """It has a manager from now on, which `mark` stands for. Raises IllegalTransition if it has
        one, or had one: completions and memory are one's."""

    def detach(self, mark: object) -> None:
        """That manager could not be opened: it has none. Nothing, if that is not its own."""

    def reserve(self, size_bytes: int, align_bytes: int) -> int:
        """Reserve addresses with nothing behind them; the first one, a multiple of the
        alignment."""

    def unreserve(self, address: int) -> None:
        """Give a whole reservation back; nothing may be mapped in it."""

    def create(self, count: int, frame_bytes: int) -> list[int]:
        """Allocate physical frames. All or none. Raises DeviceFull if there is no memory for that
        many, with the number for which there was."""

    def room(self, frame_bytes: int) -> int:
        """For how many more frames of that size it has memory now. Others may take it meanwhile."""

    def release(self, frames: Sequence[int]) -> None:
        """Free physical frames that are mapped nowhere."""

    def map(self, runs: Sequence[MapRun]) -> None:
        """Map every run, or none. A frame may be mapped at more than one address."""

    def unmap(self, runs: Sequence[UnmapRun]) -> None:
        """Unmap every run, or none. Only with nothing issued since a quiesce, on any stream that
        may touch memory of this device.

        A driver unmaps under a running kernel, and a kernel may fault on nearby addresses (S03).
        """

    def host_reserve(self, size_bytes: int) -> int:
        """Host memory that copies may name; its address."""

    def host_unreserve(self, address: int) -> None:
        """Give host memory back."""

    def copy(
        self,
        direction: Direction,
        runs: Sequence[CopyRun],
        after: Sequence[Event] = (),
        before: Sequence[Stream] = (),
    ) -> int:
        """Issue one copy of any number of runs, without waiting; its token.

        It starts when every event of `after` has passed, as it was recorded when this is called;
        later work of the streams in `before` waits for it, and so does an event that is recorded
        there later. With no runs it is only that wait. Ends once, through `poll`, `finish` or
        `quiesce`; as failed, if it names memory that is not there or may not be written.
        """

    def pace(self, size_bytes: int | None) -> None:
        """From now on at most that many bytes of copies to the host are in flight at a time, and
        one piece of a copy at the least; None: no limit."""

    def fill(self, runs: Sequence[FillRun], value: int) -> None:
        """Overwrite GPU or host memory that no issued work names; done when it returns."""

    def check_stream(self, stream: Stream) -> None:
        """Raises DeviceError if it is no stream of this device, and StreamCaptured if it is being
        captured."""

    def check_event(self, event: Event) -> None:
        """Raises DeviceError if it is no event that a copy here can wait for, and StreamCaptured if
        it was recorded in a capture."""

    def record(self, stream: Stream) -> Event:
        """The point behind everything that was launched on the stream so far."""

    def poll(self) -> list[Completion]:
        """The copies that have ended since the last time, the oldest first; does not wait."""

    def ended(self) -> list[int]:
        """The copies that `poll` would deliver, in its order; delivers none and does not wait."""

    def finish(self, tokens: Sequence[int]) -> list[Completion]:
        """Wait for these copies, none of which was delivered, and for nothing else; deliver them
        in that order. Raises DeviceFault as `quiesce` does."""

    def quiesce(self, streams: Sequence[Stream] = ()) -> list[Completion]:
        """Wait for all copies and for everything launched so far on these streams; completions in
        issue order.

        Raises DeviceFault, naming the copies, if something has not ended when the device's own
        limit of time is over, and StreamCaptured; then nothing is delivered. `poll` has no such
        limit: what never ends is never delivered by it.
        """

    def ledger(self) -> Ledger:
        """What is reserved, created, mapped and pending, from the device's own books."""

    def close(self, streams: Sequence[Stream] = ()) -> None:
        """Wait as `quiesce` does, for what this device launched too, and give everything back that
        is still held. May be called twice.

        While something has not ended, or a stream is being captured, it gives nothing back, since
        that may still be read; called again later, it gives back what it kept.
        """


SEGMENT: Final = np.dtype(
    [
        ("address", np.uint64), ("position", np.uint64), ("count", np.uint64), ("key", np.uint64),
        ("row", np.int64),
    ]
)  # fmt: skip
"""`count` token rows at `address`: the tokens from `position` on, by the writer that `key` names.

With a `row` that is not -1 the address is relative to the base that the device's table has for it,
and tokens beyond the length that the table has do not exist.
"""

Segments = npt.NDArray[np.void]


class Check(Protocol):
    """The outcome of a byte check, once the work before it on its stream is done."""

    @property
    def done(self) -> bool:
        """The check has run."""

    @property
    def size_bytes(self) -> int:
        """How many bytes were compared."""

    @property
    def wrong(self) -> Sequence[int]:
        """For each segment, how many token rows differ or cannot be read."""

    @property
    def first(self) -> Sequence[int]:
        """For each segment, the first such token's position; meaningless where `wrong` is 0."""


class ByteDevice(Device, Protocol):
    """A device whose bytes can be written and checked: what a simulated engine needs."""

    faults: list[str]
    """Broken rules of memory, in words: each one is somebody's bug."""

    @property
    def lost(self) -> str | None:
        """Why the device cannot be used any more, for good; None while it can."""

    points: int
    """At how many places calls could have failed so far."""
    hung: set[int]
    """Copies that were told never to end."""

    def fail_next(self, kind: str, nth: int = 1) -> None:
        """Make the `nth` next call or step of that kind fail, once.

        `complete` is the end of the `nth` next copy that is issued, and with `hang` that end never
        comes. `any` is the `nth` point of whatever kind.
        """

    def limit(self, frames: int | None) -> None:
        """From now on it has memory for that many frames in all, those that it holds among them;
        None: for as many as there are."""

    def capture(self, streams: Sequence[Stream]) -> None:
        """From now on these streams, and no others, are being captured into graphs that nobody
        launches."""

    def wake(self) -> None:
        """Let copies that were told never to end, end after all."""

    def cancel_failures(self) -> None:
        """Forget planned failures; a copy that was issued to fail will still fail."""

    def schedule(self, seed: int | None, preempt: int | None = None) -> None:
        """Decide from here on by this seed when pending work runs, where work is simulated; and
        preempt, if streams have priorities, whoever takes that step, counted from 1."""

    def script(self, ended: Sequence[tuple[int, bool]] | None, failed: Sequence[int] = ()) -> None:
        """Make the next poll deliver exactly these ends (number, success), and wait for them.

        Polls after it deliver nothing, until None: then they deliver whatever has ended. Copies
        that `failed` names end as failed when they are finished, or in the next quiesce.
        """

    def stream(self) -> Stream:
        """A stream of the caller's."""

    def synchronize(self, stream: Stream) -> None:
        """Wait until everything launched on the stream has run."""

    def peek(self, address: int, size_bytes: int) -> bytes:
        """Read memory at once. Raises DeviceError if it is not there."""

    def poke(self, address: int, data: bytes) -> None:
        """Write memory at once. Raises DeviceError if it is not there or is read-only."""

    def strays(self, runs: Sequence[FillRun], values: bytes) -> int:
        """How many bytes of GPU or host memory are none of two values, read at once.

        Runs begin at, and are, multiples of 16 bytes. Raises DeviceError if one is not there.
        """

    def set_rows(self, row_bytes: int) -> None:
        """The size of a token row, for the calls below."""

    def write(self, stream: Stream, segments: Segments) -> None:
        """Launch: every token row of the segments gets the bytes of its writer and position."""

    def verify(self, stream: Stream, segments: Segments, most_bytes: int | None = None) -> Check:
        """Launch: compare every token row of the segments with what its writer wrote.

        With `most_bytes`, only evenly spread pieces of them, about that much in all.
        """

    def publish(
        self, stream: Stream, rows: Sequence[int], bases: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Launch: the device's table has these bases (addresses) and lengths (tokens) from now
        on."""
