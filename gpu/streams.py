"""Simulated streams: when issued work runs, and in which order.

Eager: at once. All others run work at some later moment, in an order that the order inside streams
and the events between them allow. *Adversarial* draws moment and order from a seed. *Latest* runs
work only when somebody waits for it, and then no more than must run, the newest first. *Pct* gives
every stream a priority, and the caller too: who is ready and has the highest goes on, so a stream
runs at once, or late, or only when the caller waits; at a few given steps, drawn by whoever asks,
the one that is about to go on is put behind the others. A fault that needs d such decisions is
then met with a probability that can be stated: Burckhardt, Kothari, Musuvathi and Nagarakatte, "A
Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010.

All follow from a seed and the calls, so that a race is a failure that repeats. A copy reads its
source when it runs, not when it was issued, as on a GPU. Rejected: to search all orders. A run of
one hundred calls has too many, and the faults that were seen need one or two of these decisions.

What this models: launch order within a stream, events between streams, work that runs late. What
it does not: two pieces of work that run at the same time, or a kernel that is half done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Final, Protocol

from attrs import define, field

from kvstate.handles import Handle
from kvstate.spec.facts import Work
from kvstate.values import one_of, whole

MODES: Final = ("eager", "latest", "pct", "adversarial")
"""The simplest first."""
_CALLER: Final = -1
"""As which stream the caller has a priority."""

Runs = tuple[tuple[int, int], ...]


@define(eq=False)
class SimulatedStream(Handle):
    """Work of one stream runs in the order of its launch."""

    owner: object
    number: int
    name: str
    queue: deque[Work] = field(factory=deque)
    barrier: set[int] = field(factory=set)
    """Work of other streams that the next launch waits for."""
    last: int = 0
    """The number of the work launched last."""

    def __str__(self) -> str:
        return f"{self.name} stream {self.number}"


@define(eq=False)
class SimulatedEvent(Handle):
    """Passed when the work of these numbers has run."""

    device: object
    numbers: frozenset[int]


class Order(Protocol):
    """Decides when and in which order work runs that may run."""

    def schedule(self, seed: int | None, preempt: int | None) -> None:
        """Decide by this seed from here on, and preempt whoever takes that step, counted from
        1."""

    def most(self, pending: int) -> int:
        """How many pieces of the pending work may run before the caller goes on."""

    def only_needed(self) -> bool:
        """Whether nothing runs while the caller waits but what it waits for."""

    def choose(self, ready: list[Work], waiting: bool) -> Work | None:
        """Which one runs next; None if the caller goes on, unless it is waiting."""


class Adversarial:
    """Any moment and any order. Often nothing runs, at times all that can; and who waits mostly
    gets only what it waits for."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def schedule(self, seed: int | None, preempt: int | None) -> None:
        """See `Order`."""
        if seed is not None:
            self.random.seed(seed)

    def most(self, pending: int) -> int:
        """See `Order`."""
        return self.random.choice((0, 0, 0, 0, 0, 0, 1, 2, pending))

    def only_needed(self) -> bool:
        """See `Order`."""
        return self.random.random() >= 0.25

    def choose(self, ready: list[Work], waiting: bool) -> Work | None:
        """See `Order`."""
        return self.random.choice(ready)


class Latest:
    """As late as possible, the newest first."""

    def schedule(self, seed: int | None, preempt: int | None) -> None:
        """See `Order`."""

    def most(self, pending: int) -> int:
        """See `Order`."""
        return 0

    def only_needed(self) -> bool:
        """See `Order`."""
        return True

    def choose(self, ready: list[Work], waiting: bool) -> Work | None:
        """See `Order`."""
        return max(ready, key=lambda work: work.number)


class Pct:
    """By priority. Those of streams that were not preempted yet are above all others, and depend
    on nothing but seed and stream, so that a program that has lost calls still has the same."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.priorities: dict[int, float] = {}
        self.preempts: list[int] = []
        """Steps from here to each one at which somebody is preempted."""

    def schedule(self, seed: int | None, preempt: int | None) -> None:
        """See `Order`."""
        if preempt is not None:
            self.preempts.append(preempt)

    def most(self, pending: int) -> int:
        """See `Order`."""
        return pending

    def only_needed(self) -> bool:
        """See `Order`."""
        return False

    def choose(self, ready: list[Work], waiting: bool) -> Work | None:
        """See `Order`. Everybody's step counts, the caller's too."""
        by_stream: dict[int, Work | None] = {work.stream: work for work in ready}
        if not waiting:
            by_stream[_CALLER] = None
        self.preempts = [left - 1 for left in self.preempts]
        for _ in range(self.preempts.count(0)):
            self.priorities[max(by_stream, key=self._priority)] = self.random.random() - 1
        self.preempts = [left for left in self.preempts if left]
        return by_stream[max(by_stream, key=self._priority)]

    def _priority(self, stream: int) -> float:
        if stream not in self.priorities:
            self.priorities[stream] = Random(f"{self.seed}/{stream}").random()
        return self.priorities[stream]


def checked(mode: object, seed: object) -> tuple[str, int]:
    """A mode and a seed, as a caller has passed them. Raises ArgumentError."""
    return one_of("streams", mode, MODES), whole("seed", seed)


def order_of(mode: str, seed: int) -> Order:
    """The order of a mode."""
    if mode == "adversarial":
        return Adversarial(seed)
    return Pct(seed) if mode == "pct" else Latest()


class Streams:
    """Launches, orders and runs work. Deterministic for a seed and a sequence of calls."""

    def __init__(self, mode: str, seed: int) -> None:
        self.mode = mode
        self.order = order_of(mode, seed)
        self.eager = mode == "eager"
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
        copy: int | None = None,
    ) -> int:
        """Put work at the end of a stream; its number. It waits for the numbers in `waits` too, and
        with `never` it does not run, however long anybody waits. `copy` is its token, if it is
        one."""
        self.busy = True
        self.launched += 1
        number = stream.last = self.launched
        if self.eager:
            run()
            return number
        before = {*waits, *stream.barrier} & self.pending.keys()
        stream.barrier.clear()
        work = Work(name, stream.number, number, reads, writes, tuple(sorted(before)), copy)
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
        """The caller goes on: let some of the pending work run before."""
        if self.mode == "eager":
            self.drain()
        elif self.pending:
            for _ in range(self.order.most(len(self.pending))):
                if not self._run_one():
                    return

    def finish(self, number: int) -> bool:
        """Run work until the work of that number has run. False if it never will."""
        if number not in self.pending:
            return True
        needed = self._needed(number) if self.order.only_needed() else None
        while number in self.pending:
            if not self._run_one(needed, waiting=True):
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
        while self._run_one(waiting=True):
            pass
        return not self.pending

    def works(self) -> tuple[Work, ...]:
        """The pending work, in the order of its launch."""
        return tuple(work for work, _ in self.pending.values())

    def _run_one(self, among: set[int] | None = None, *, waiting: bool = False) -> bool:
        heads = [stream.queue[0] for stream in self.streams if stream.queue]
        ready = [
            work
            for work in heads
            if (among is None or work.number in among)
            and work.number not in self.never
            and self.pending.keys().isdisjoint(work.waits)
        ]
        work = self.order.choose(ready, waiting) if ready else None
        if work is None:
            return False
        # Of work that an interrupt has caught here, or at its launch, one of the two is left.
        _, run = self.pending.pop(work.number, (work, None))
        self.streams[work.stream].queue.popleft()
        if run is not None:
            run()
        return True
