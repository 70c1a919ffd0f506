"""Simulated streams: when issued work runs, and in which order.

Eager: at once. Adversarial: at some later moment, in any order that the order inside streams and
the events between them allow; which one is decided by a seed, so that a race is a failure that
repeats. A copy reads its source when it runs, not when it was issued, as on a GPU.

What this models: launch order within a stream, events between streams, work that runs late. What
it does not: two pieces of work that run at the same time, or a kernel that is half done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Final

from attrs import define, field

from kvstate.errors import ConfigError
from kvstate.spec.facts import Work

MODES: Final = ("eager", "adversarial")

Runs = tuple[tuple[int, int], ...]


@define(eq=False)
class SimulatedStream:
    """Work of one stream runs in the order of its launch."""

    owner: object
    number: int
    name: str
    queue: deque[Work] = field(factory=deque)
    barrier: set[int] = field(factory=set)
    """Work of other streams that the next launch waits for."""
    last: int = 0
    """The number of the work launched last."""


@define(eq=False)
class SimulatedEvent:
    """Passed when the work of these numbers has run."""

    device: object
    numbers: frozenset[int]


class Streams:
    """Launches, orders and runs work. Deterministic for a seed and a sequence of calls."""

    def __init__(self, mode: str, seed: int) -> None:
        if mode not in MODES:
            raise ConfigError(f"there is no stream mode {mode!r}; choose one of {', '.join(MODES)}")
        self.mode = mode
        self.eager = mode == "eager"
        self.random = Random(seed)
        self.streams: list[SimulatedStream] = []
        self.pending: dict[int, tuple[Work, Callable[[], None]]] = {}
        self.never: set[int] = set()
        """Pending work that never runs, and so nothing does that waits for it."""
        self.launched = 0
        self.busy = False
        """Work was issued since somebody last waited for all of it."""

    def new(self, name: str) -> SimulatedStream:
        """A stream of its own."""
        stream = SimulatedStream(self, len(self.streams), name)
        self.streams.append(stream)
        return stream

    def launch(
        self,
        stream: SimulatedStream,
        name: str,
        run: Callable[[], None],
        *,
        waits: Iterable[int] = (),
        reads: Runs = (),
        writes: Runs = (),
        never: bool = False,
    ) -> int:
        """Put work at the end of a stream; its number. It waits for the numbers in `waits` too, and
        with `never` it does not run, however long anybody waits."""
        self.busy = True
        self.launched += 1
        number = stream.last = self.launched
        if self.eager:
            run()
            return number
        before = {*waits, *stream.barrier} & self.pending.keys()
        stream.barrier.clear()
        work = Work(name, stream.number, number, reads, writes, tuple(sorted(before)))
        stream.queue.append(work)
        self.pending[number] = (work, run)
        if never:
            self.never.add(number)
        self.tick()
        return number

    def wait(self, stream: SimulatedStream, number: int) -> None:
        """Whatever is launched on the stream from now on waits for the work of that number."""
        if number in self.pending:
            stream.barrier.add(number)

    def tick(self) -> None:
        """Let some of the pending work run: often none, at times all that can."""
        if self.mode == "eager":
            self.drain()
        elif self.pending:
            for _ in range(self.random.choice((0, 0, 0, 0, 0, 0, 1, 2, len(self.pending)))):
                if not self._run_one():
                    return

    def finish(self, number: int) -> bool:
        """Run work until the work of that number has run: mostly only what it waits for, at times
        anything, in any allowed order. False if it never will."""
        needed = None if self.random.random() < 0.25 else self._needed(number)
        while number in self.pending:
            if not self._run_one(needed):
                return False
        return True

    def _needed(self, number: int) -> set[int]:
        """The pending work that must run before that of this number, and that itself."""
        needed, waiting = set[int](), [number]
        while waiting:
            one = waiting.pop()
            if one in self.pending and one not in needed:
                needed.add(one)
                work, _ = self.pending[one]
                queue = self.streams[work.stream].queue
                waiting += work.waits
                waiting += [early.number for early in queue if early.number < one]
        return needed

    def drain(self) -> bool:
        """Run everything that is pending. False if something never will."""
        while self._run_one():
            pass
        return not self.pending

    def works(self) -> tuple[Work, ...]:
        """The pending work, in the order of its launch."""
        return tuple(work for work, _ in self.pending.values())

    def _run_one(self, among: set[int] | None = None) -> bool:
        heads = [stream.queue[0] for stream in self.streams if stream.queue]
        ready = [
            work
            for work in heads
            if (among is None or work.number in among)
            and work.number not in self.never
            and self.pending.keys().isdisjoint(work.waits)
        ]
        if not ready:
            return False
        work = self.random.choice(ready)
        self.streams[work.stream].queue.popleft()
        _, run = self.pending.pop(work.number)
        run()
        return True
