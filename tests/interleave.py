"""Interleavings: functions that run in threads of their own, one bytecode after the other, in every
order with few preemptions.

Only one thread runs at any time. Before each bytecode of watched code it waits to be chosen, so a
run is a list of choices and repeats. All runs are gone through that preempt a thread that could go
on at most so many times (Musuvathi and Qadeer, "Iterative Context Bounding", PLDI 2007): most
faults need one or two. Nothing here sleeps or looks at a clock. What it does not see: another order
of the processor's own reads and writes, and what C code does while it has let go of the lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from threading import Semaphore, Thread
from types import FrameType
from typing import Any

from attrs import define, field

Job = Callable[[], object]


@define
class Run:
    """One interleaving, and what came of it."""

    choices: list[int] = field(factory=list)
    """Which thread ran next, at each point."""
    could: list[tuple[int, ...]] = field(factory=list)
    """Which ones could have, those that cost no preemption first."""
    preempted: list[int] = field(factory=list)
    """How many preemptions there had been before each point."""
    results: dict[int, Any] = field(factory=dict)
    errors: dict[int, BaseException] = field(factory=dict)


class _Threads:
    """The threads of one run, each waiting for its turn."""

    def __init__(self, jobs: Sequence[Job], watched: tuple[str, ...], run: Run) -> None:
        self.watched, self.run = watched, run
        self.turns = [Semaphore(0) for _ in jobs]
        self.stopped = Semaphore(0)
        self.done: set[int] = set()
        self.threads = [Thread(target=self._job, args=one) for one in enumerate(jobs)]

    def _job(self, number: int, job: Job) -> None:
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.endswith(self.watched):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "opcode":
                self.stopped.release()
                self.turns[number].acquire()
            return trace

        self.turns[number].acquire()
        sys.settrace(trace)
        try:
            self.run.results[number] = job()
        except BaseException as error:
            self.run.errors[number] = error
        finally:
            sys.settrace(None)
            self.done.add(number)
            self.stopped.release()

    def go(self, wanted: Sequence[int]) -> None:
        """Run all to their end: first by these choices, then without preemption."""
        for thread in self.threads:
            thread.start()
        run, current, preempted = self.run, -1, 0
        while len(self.done) < len(self.threads):
            left = [at for at in range(len(self.threads)) if at not in self.done]
            goes_on = current in left
            could = (current, *(at for at in left if at != current)) if goes_on else tuple(left)
            at = len(run.choices)
            chosen = wanted[at] if at < len(wanted) else could[0]
            assert chosen in could, f"the run does not repeat: {chosen} has ended at point {at}"
            run.choices.append(chosen)
            run.could.append(could)
            run.preempted.append(preempted)
            preempted += goes_on and chosen != current
            current = chosen
            self.turns[current].release()
            self.stopped.acquire()
        for thread in self.threads:
            thread.join()


def interleave(jobs: Sequence[Job], watched: tuple[str, ...], choices: Sequence[int] = ()) -> Run:
    """Run the jobs by these choices; `watched` are ends of the names of source files."""
    run = Run()
    _Threads(jobs, watched, run).go(choices)
    return run


def interleavings(
    make: Callable[[], Sequence[Job]], watched: tuple[str, ...], most_preempted: int = 1
) -> Iterator[Run]:
    """Every run of fresh jobs with at most so many preemptions."""
    prefixes: list[list[int]] = [[]]
    while prefixes:
        prefix = prefixes.pop()
        run = interleave(make(), watched, prefix)
        for at in range(len(prefix), len(run.choices)):
            chosen, *others = run.could[at]
            assert run.choices[at] == chosen
            free = at == 0 or chosen != run.choices[at - 1]
            if free or run.preempted[at] < most_preempted:
                prefixes += [[*run.choices[:at], other] for other in others]
        yield run
