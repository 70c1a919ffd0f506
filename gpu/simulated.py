"""Copies, events and completions over simulated streams: what the null and the host device share.

Copies go out on one stream and in on another, apart from the caller's; events order them. A
subclass says what moving bytes means.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from kvstate.device import Completion, CopyRun, Direction, Event, Stream, UnmapRun
from kvstate.errors import DeviceError, DeviceFault
from kvstate.gpu.books import Books
from kvstate.gpu.streams import SimulatedEvent, SimulatedStream, Streams, checked
from kvstate.spec.facts import Ledger

log = logging.getLogger("kvstate")


class SimulatedDevice(Books, ABC):
    """A device whose streams are simulated."""

    def __init__(self, *, streams: str = "eager", seed: int = 0) -> None:
        super().__init__()
        self.streams = Streams(*checked(streams, seed))
        self._passed = SimulatedEvent(self, frozenset())
        self._default = self.streams.new("default")
        self._copy_streams = {
            direction: self.streams.new(f"copy {direction.value}") for direction in Direction
        }
        self._issued = 0
        self._ended: list[Completion] = []
        self._runs: dict[int, tuple[int, Sequence[CopyRun]]] = {}
        """The work number and the runs of each copy in flight."""
        self._script: list[Completion] | None = None
        self._failed: frozenset[int] = frozenset()
        self._doomed: set[int] = set()
        """Copies that were told to fail."""

    def schedule(self, seed: int | None, preempt: int | None = None) -> None:
        """See `ByteDevice`."""
        self.streams.order.schedule(seed, preempt)

    def script(self, ended: Sequence[tuple[int, bool]] | None, failed: Sequence[int] = ()) -> None:
        """Make the next poll deliver exactly these ends, and those after it none, until None."""
        self._script = None if ended is None else [Completion(*one) for one in ended]
        self._failed = frozenset(failed)

    def stream(self) -> SimulatedStream:
        """A stream of the caller's."""
        self.present("stream")
        return self.streams.new("caller")

    def synchronize(self, stream: Stream) -> None:
        """Wait until everything launched on the stream has run."""
        self.present("synchronize")
        if not self.streams.finish(self._own(stream).last):
            raise DeviceFault(self._stuck())

    def wake(self) -> None:
        """Let copies that were told never to end, end after all."""
        self.streams.never.clear()
        self.hung.clear()

    def rests(self) -> bool:
        """Run everything for the last time; whether that could be done, or must be tried again."""
        self.kept = not self.streams.drain()
        if self.kept:
            log.error("%r keeps all its memory: %s", self, self._stuck())
        return not self.kept

    def _stuck(self) -> str:
        """What a wait cannot wait for, in words."""
        names = ", ".join(str(token) for token in sorted(self.copies - self._ended_tokens()))
        return f"copies {names} have not ended, and something waits for them"

    def _ended_tokens(self) -> set[int]:
        return {one.token for one in self._ended}

    def check_stream(self, stream: Stream) -> None:
        """Raises DeviceError if it is no stream of this device."""
        self._own(stream)

    def check_event(self, event: Event) -> None:
        """Raises DeviceError if it is no event of this device."""
        self._numbers(event)

    def record(self, stream: Stream) -> SimulatedEvent:
        """The point behind everything that was launched on the stream so far."""
        self.enter("record")
        owned = self._own(stream)
        self.step("event")
        if self.streams.eager:
            return self._passed
        return SimulatedEvent(self, frozenset({owned.last} | owned.barrier))

    def copy(
        self,
        direction: Direction,
        runs: Sequence[CopyRun],
        after: Sequence[Event] = (),
        before: Sequence[Stream] = (),
    ) -> int:
        """Issue a copy on the stream of its direction."""
        runs = tuple(runs)
        waits = [number for event in after for number in self._numbers(event)]
        followers = [self._own(stream) for stream in before]
        self.enter("copy")
        for _ in after:
            self.step("wait")
        self._issued += 1
        token = self._issued
        self.copies.add(token)
        if not self.ends_well(runs, followers):
            self._doomed.add(token)
        if self.hangs():
            self.hung.add(token)
            self.streams.eager = False  # what waits for it must be able to wait
        if self.streams.eager:
            self.streams.busy = True
            self._runs[token] = (0, runs)
            self._run_copy(token, runs)
            return token
        number = self.streams.launch(
            self._copy_streams[direction],
            f"copy {direction.value} {token}",
            partial(self._run_copy, token, runs),
            waits=waits,
            reads=tuple((run.source, run.size_bytes) for run in runs),
            writes=tuple((run.target, run.size_bytes) for run in runs),
            never=token in self.hung,
            copy=token,
        )
        self._runs[token] = (number, runs)
        for stream in followers:
            self.streams.wait(stream, number)
        return token

    def poll(self) -> list[Completion]:
        """Completions in the order in which the copies ran, or those that the script names."""
        self.present("poll")
        if self._script is not None:
            return self._scripted(self._script)
        if not self.streams.eager:
            self.streams.tick()
        return self._take()

    def quiesce(self) -> list[Completion]:
        """Run everything; completions in issue order."""
        self.enter("quiesce")
        if not self.streams.drain():
            raise DeviceFault(self._stuck())
        self.streams.busy = False
        if self._failed:
            self._ended = [self._failing_end(one) for one in self._ended]
        return sorted(self._take())

    def _failing_end(self, one: Completion) -> Completion:
        if one.token not in self._failed:
            return one
        self.spoil(self._runs[one.token][1])
        return Completion(one.token, ok=False)

    def check_quiet(self, runs: Sequence[UnmapRun]) -> None:
        """Note a fault if anything was issued since the last quiesce: it might read these."""
        if self.streams.busy:
            count = sum(run.count_frames for run in runs)
            self.faults.append(f"{count} frames are unmapped with work issued since the quiesce")

    def ledger(self) -> Ledger:
        """The device's own books."""
        return self.books(self.streams.works())

    @abstractmethod
    def move(self, runs: Sequence[CopyRun]) -> bool:
        """Move the bytes of a copy; whether every address was there."""

    @abstractmethod
    def spoil(self, runs: Sequence[CopyRun]) -> None:
        """What a failed copy leaves: anything at all."""

    def _run_copy(self, token: int, runs: Sequence[CopyRun]) -> None:
        failed = token in self._doomed
        if failed:
            self._doomed.discard(token)
            self.spoil(runs)
        self._ended.append(Completion(token, not failed and self.move(runs)))

    def _scripted(self, script: list[Completion]) -> list[Completion]:
        """Run the copies that the script names, and let them end as it says."""
        self._script = []
        script = [one for one in script if one.token in self._runs]
        for token, ok in script:
            number, runs = self._runs[token]
            if not self.streams.finish(number):
                raise DeviceFault(self._stuck())
            if not ok:
                self.spoil(runs)
        named = {completion.token for completion in script}
        self._ended = [one for one in self._ended if one.token not in named]
        return self._report(script)

    def _take(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return self._report(ended)

    def _report(self, ended: list[Completion]) -> list[Completion]:
        for completion in ended:
            self.copies.discard(completion.token)
            del self._runs[completion.token]
        return ended

    def _own(self, stream: Stream) -> SimulatedStream:
        if stream is None:
            return self._default
        if isinstance(stream, SimulatedStream) and stream.owner is self.streams:
            return stream
        raise DeviceError("stream", f"{stream!r} is not a stream of this device")

    def _numbers(self, event: Event) -> frozenset[int]:
        if isinstance(event, SimulatedEvent) and event.device is self:
            return event.numbers
        raise DeviceError("event", f"{event!r} is not an event of this device")
