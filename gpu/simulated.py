"""Copies, events and completions over simulated streams: what the null and the host device share.

Every copy runs apart from the caller's streams and from other copies; only events order them, so
that nothing can count on the order in which a card runs copies of one direction. A subclass says
what moving bytes means.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from kvstate.device import Completion, CopyRun, Direction, Event, Stream, UnmapRun
from kvstate.errors import DeviceError, DeviceFault, StreamCaptured
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
        self._lanes: list[SimulatedStream] = []
        """Streams for copies, one for each at a time."""
        self._captured: list[SimulatedStream] = []
        """Streams that are being captured."""
        self._issued = 0
        self._ended: dict[int, Completion] = {}
        """How copies have ended whose end was not reported."""
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

    def capture(self, streams: Sequence[Stream]) -> None:
        """See `ByteDevice`."""
        self._captured = [self._own(stream) for stream in streams]

    def synchronize(self, stream: Stream) -> None:
        """Wait until everything launched on the stream has run."""
        self.present("synchronize")
        self._finish(self._live("synchronize", stream).last)

    def wake(self) -> None:
        """Let copies that were told never to end, end after all."""
        self.streams.never.clear()
        self.hung.clear()

    def rests(self) -> bool:
        """Run everything for the last time; whether that could be done, or must be tried again."""
        done, captured = self.streams.drain(), [str(one) for one in self._captured]
        self.kept = not done or bool(captured)
        if self.kept:
            why = f"{' and '.join(captured)} captured" if done else self._stuck()
            log.error("%r keeps all its memory: %s", self, why)
        return not self.kept

    def _stuck(self) -> str:
        """What a wait cannot wait for, in words."""
        names = ", ".join(str(token) for token in sorted(self.copies - self._ended.keys()))
        return f"copies {names} have not ended, and something waits for them"

    def check_stream(self, stream: Stream) -> None:
        """Raises DeviceError if it is no stream of this device, or is being captured."""
        self._live("stream", stream)

    def check_event(self, event: Event) -> None:
        """Raises DeviceError if it is no event of this device."""
        self._numbers(event)

    def pace(self, size_bytes: int | None) -> None:
        """Copies run at once here, whenever they run: there is nothing to pace."""
        self.present("pace")

    def record(self, stream: Stream) -> SimulatedEvent:
        """The point behind everything that was launched on the stream so far."""
        owned = self._live("record", stream)
        self.enter("record")
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
        """Issue a copy on a stream of its own."""
        runs = tuple(runs)
        waits = [number for event in after for number in self._numbers(event)]
        followers = [self._live("copy", stream) for stream in before]
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
            self._lane(),
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

    def _lane(self) -> SimulatedStream:
        """A stream on which nothing is pending."""
        idle = next((lane for lane in self._lanes if not lane.queue), None)
        if idle is None:
            self._lanes.append(idle := self.streams.new("copy"))
        return idle

    def poll(self) -> list[Completion]:
        """Completions in the order of issue, or those that the script names."""
        self.present("poll")
        if self._script is not None:
            return self._scripted(self._script)
        return self._report([self._ended[token] for token in self.ended()])

    def ended(self) -> list[int]:
        """The copies that have run and were not reported."""
        self.present("ended")
        if not self.streams.eager:
            self.streams.tick()
        return sorted(self._ended)

    def finish(self, tokens: Sequence[int]) -> list[Completion]:
        """Run these copies, and no more than the schedule wants."""
        self.enter("finish")
        for token in tokens:
            self._finish(self._runs[token][0])
        return self._report([self._failing_end(token) for token in tokens])

    def quiesce(self, streams: Sequence[Stream] = ()) -> list[Completion]:
        """Run all copies and what is on these streams; completions in issue order."""
        owned = [self._live("quiesce", stream) for stream in streams]
        self.enter("quiesce")
        for number in (*(one.last for one in owned), *(one[0] for one in self._runs.values())):
            self._finish(number)
        self.streams.busy = bool(self.streams.pending)
        return self._report([self._failing_end(token) for token in sorted(self._ended)])

    def _finish(self, number: int) -> None:
        if not self.streams.finish(number):
            raise DeviceFault(self._stuck())

    def _failing_end(self, token: int) -> Completion:
        """How it has ended, or failed if a replay says so."""
        if token not in self._failed:
            return self._ended[token]
        self.spoil(self._runs[token][1])
        return Completion(token, ok=False)

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
        self._ended[token] = Completion(token, not failed and self.move(runs))

    def _scripted(self, script: list[Completion]) -> list[Completion]:
        """Run the copies that the script names, and let them end as it says."""
        self._script = []
        script = [one for one in script if one.token in self._runs]
        for token, ok in script:
            number, runs = self._runs[token]
            self._finish(number)
            if not ok:
                self.spoil(runs)
        return self._report(script)

    def _report(self, ended: list[Completion]) -> list[Completion]:
        for completion in ended:
            self.copies.discard(completion.token)
            del self._runs[completion.token], self._ended[completion.token]
        return ended

    def _live(self, call: str, stream: Stream) -> SimulatedStream:
        """A stream of ours that is not being captured."""
        owned = self._own(stream)
        if owned in self._captured:
            raise StreamCaptured(call, str(owned))
        return owned

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
