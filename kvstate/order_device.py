"""A device under the order check: every call goes on to the device, and is told to the order.

It stands where the device would, changes nothing about it, and works over any of them. What is out
of order is raised before the device is asked to do it: a card on which memory was unmapped under a
kernel may be lost, and a report is worth more than that.

Rejected: to look into devices. A device that runs everything at once has nothing in flight to look
at, and a card does not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from attrs import frozen

from kvstate.device import (
    Check,
    Completion,
    CopyRun,
    Device,
    Direction,
    Event,
    FillRun,
    MapRun,
    Segments,
    Stream,
    UnmapRun,
)
from kvstate.handles import Handle
from kvstate.order import Agent, Clock, Names, Operation, Order, later
from kvstate.order_memory import Pieces, pieces

D = TypeVar("D", bound=Device)


@frozen(eq=False)
class Mark(Handle):
    """An event, and what it is behind."""

    event: Event
    clock: Clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.event, name)


@frozen(eq=False)
class Remote(Handle):
    """What a remote agent is at."""

    order: Order
    op: Operation

    def done(self) -> None:
        """It has said that it is done. Again means nothing."""
        self.order.answered(self.op)


class Ordered(Handle):
    """A device and the order of what it is asked to do. See `kvstate.device` for the calls.

    An event that was recorded elsewhere is taken to be behind all that was issued when it is used.
    """

    def __init__(self, device: Any) -> None:
        self.device, self.order = device, Order()
        self._agents: dict[object, Agent] = {}
        self._row_bytes = 0
        self._staged: list[tuple[str, int]] = []
        """What the device says of its staging buffers."""
        if hasattr(device, "staged"):
            device.staged = self._staged
        self._bases: dict[int, int] = {}
        """Of each row of the device's table, once all that was launched has run."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)

    # Memory.

    def create(self, count: int, frame_bytes: int) -> list[int]:
        """As the device."""
        frames: list[int] = self.device.create(count, frame_bytes)
        self.order.memory.frame_bytes = frame_bytes
        return frames

    def map(self, runs: Sequence[MapRun]) -> None:
        """As the device."""
        self.device.map(runs)
        for address, frames, read_only in runs:
            self.order.memory.map(address, frames, read_only=read_only)

    def unmap(self, runs: Sequence[UnmapRun]) -> None:
        """As the device, if nothing is in flight."""
        size = self.order.memory.frame_bytes
        self.order.unmap(pieces((run.address, run.count_frames * size) for run in runs))
        self.device.unmap(runs)
        for run in runs:
            self.order.memory.unmap(*run)

    def host_reserve(self, size_bytes: int) -> int:
        """As the device."""
        address: int = self.device.host_reserve(size_bytes)
        self.order.memory.reserve_host(address, size_bytes)
        return address

    def host_unreserve(self, address: int) -> None:
        """As the device, if nothing in flight is there."""
        size_bytes = self.order.memory.host.get(address, 0)
        self.order.at_once("host_unreserve", writes=pieces([(address, size_bytes)]))
        self.device.host_unreserve(address)
        self.order.memory.unreserve_host(address)

    def fill(self, runs: Sequence[FillRun], value: int) -> None:
        """As the device, if nothing in flight is there."""
        self.order.at_once("fill", writes=pieces(runs))
        self.device.fill(runs, value)

    def peek(self, address: int, size_bytes: int) -> bytes:
        """As the device, if nothing in flight writes there."""
        self.order.at_once("peek", reads=pieces([(address, size_bytes)]))
        found: bytes = self.device.peek(address, size_bytes)
        return found

    def poke(self, address: int, data: bytes) -> None:
        """As the device, if nothing in flight is there."""
        self.order.at_once("poke", writes=pieces([(address, len(data))]))
        self.device.poke(address, data)

    def strays(self, runs: Sequence[FillRun], values: bytes) -> int:
        """As the device, if nothing in flight writes there."""
        self.order.at_once("strays", reads=pieces(runs))
        found: int = self.device.strays(runs, values)
        return found

    # Copies and their ends.

    def copy(
        self,
        direction: Direction,
        runs: Sequence[CopyRun],
        after: Sequence[Event] = (),
        before: Sequence[Stream] = (),
    ) -> int:
        """As the device, if what is in flight there comes first."""
        runs, marks = tuple(runs), tuple(after)
        clock: Clock = {}
        for mark in marks:
            known = isinstance(mark, Mark)
            clock = later(clock, mark.clock if known else self.order.everything())
        op = Operation(
            Agent("this copy"), f"copy {direction.value}",
            pieces((run.source, run.size_bytes) for run in runs),
            pieces((run.target, run.size_bytes) for run in runs),
            after=clock,
        )  # fmt: skip
        self.order.check(op)
        events = [mark.event if isinstance(mark, Mark) else mark for mark in marks]
        token: int = self.device.copy(direction, runs, events, before)
        self.order.copied(token, op)
        for stream in before:
            self.order.follow(self.agent(stream), op)
        return token

    def check_event(self, event: Event) -> None:
        """As the device."""
        self.device.check_event(event.event if isinstance(event, Mark) else event)

    def record(self, stream: Stream) -> Mark:
        """As the device. The event is good for this device only."""
        return Mark(self.device.record(stream), self.order.mark(self.agent(stream)))

    def poll(self) -> list[Completion]:
        """As the device."""
        return self._told(self.device.poll())

    def finish(self, tokens: Sequence[int]) -> list[Completion]:
        """As the device."""
        return self._told(self.device.finish(tokens))

    def quiesce(self, streams: Sequence[Stream] = ()) -> list[Completion]:
        """As the device."""
        ended: list[Completion] = self.device.quiesce(streams)
        self.order.quiet(map(self.agent, streams))
        return ended

    def synchronize(self, stream: Stream) -> None:
        """As the device."""
        self.device.synchronize(stream)
        self.order.synchronized(self.agent(stream))

    def remote(
        self, name: str, reads: Iterable[FillRun] = (), writes: Iterable[FillRun] = ()
    ) -> Remote:
        """Say that a remote agent (a network card, another process) begins to read and write these
        (address, bytes). Raises LawViolation if that is not ordered behind what is in flight.

        It begins now: what a stream waits for does not hold it up, an event is not behind it, and a
        quiesce does not wait for it. It goes on until the result is told that it is `done`.
        """
        op = Operation(Agent(name), name, pieces(reads), pieces(writes))
        self.order.remote(op)
        return Remote(self.order, op)

    # The engine's own work.

    def set_rows(self, row_bytes: int) -> None:
        """As the device."""
        self.device.set_rows(row_bytes)
        self._row_bytes = row_bytes

    def publish(
        self, stream: Stream, rows: Sequence[int], bases: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """As the device, if nothing in flight reads these entries."""
        op = Operation(self.agent(stream), "publish", writes_names=_entries(rows))
        self._launch(op, self.device.publish, stream, rows, bases, lengths)
        self._bases.update(zip(rows, bases, strict=True))

    def write(self, stream: Stream, segments: Segments) -> None:
        """As the device, if what is in flight there comes first, and it is part of a step."""
        op = Operation(
            self.agent(stream), "write", writes=self._pieces(segments),
            reads_names=_entries(segments["row"].tolist()),
        )  # fmt: skip
        self._launch(op, self.device.write, stream, segments)

    def verify(self, stream: Stream, segments: Segments, most_bytes: int | None = None) -> Check:
        """As the device, if what is in flight there comes first."""
        op = Operation(
            self.agent(stream), "verify", self._pieces(segments),
            reads_names=_entries(segments["row"].tolist()),
        )  # fmt: skip
        check: Check = self._launch(op, self.device.verify, stream, segments, most_bytes)
        return check

    # Inside.

    def agent(self, stream: Stream) -> Agent:
        """The agent that a stream is, whatever object names it."""
        handle_of = getattr(self.device, "handle_of", None)
        key = handle_of(stream) if handle_of else stream
        if key not in self._agents:
            name = f"stream {len(self._agents)}" if key else "the default stream"
            self._agents[key] = self.order.stream(name)
        return self._agents[key]

    def _launch(self, op: Operation, call: Callable[..., Any], *arguments: Any) -> Any:
        """Launch an operation, which reads the staging buffers that the device fills for it."""
        self.order.check(op)
        self._staged.clear()
        result = call(*arguments)
        for what, number in self._staged:
            buffer = Names({f"staging buffer {number}"})
            if what == "free":
                self.order.free(buffer)
            else:
                self.order.at_once("a staging", writes_names=buffer)
                op.reads_names |= buffer
        self.order.launch(op)
        return result

    def _told(self, ended: list[Completion]) -> list[Completion]:
        self.order.ended(one.token for one in ended)
        return ended

    def _pieces(self, segments: Segments) -> Pieces:
        """The addresses of token rows."""
        bases = [self._bases.get(row, 0) for row in segments["row"].tolist()]
        lows = segments["address"].astype(np.int64) + np.array(bases, np.int64)
        return Pieces(lows, lows + segments["count"].astype(np.int64) * self._row_bytes)


def _entries(rows: Iterable[int]) -> Names:
    return Names(f"entry {row} of the table" for row in rows if row >= 0)


def ordered(device: D) -> D:
    """The device under the order check."""
    return cast("D", Ordered(device))
