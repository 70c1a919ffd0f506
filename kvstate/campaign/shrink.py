"""Shrinking: from a program that fails to the shortest one found that fails in the same way.

Delta debugging over the recorded calls. A program that has lost a call still means something,
because a call that names what was never made is skipped, and because each call carries the seed
that schedules it, or who is preempted there. Simpler schedules are tried too. Hypothesis' own
shrinker was slower by an order of magnitude on such programs and stopped earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvstate import trace
from kvstate.gpu.streams import MODES

Program = list[trace.AnyCall]
Fails = Callable[[Program], bool]
Scheduled = tuple[trace.Header, Program]
CALLS = 20_000
"""How many are played to shrink a program."""
SEEDS = 4
"""How many of another mode are tried."""


def shrink_schedule(
    header: trace.Header, program: Program, fails: Callable[[trace.Header, Program], bool]
) -> Scheduled:
    """The same calls on the simplest schedule found for which `fails` still holds."""
    simpler = _simpler_schedules(header, program)
    return next((one for one in simpler if fails(*one)), (header, program))


def _simpler_schedules(header: trace.Header, program: Program) -> Iterator[Scheduled]:
    """The simplest first. Only where moments are drawn does a call's seed mean anything."""
    bare = [replace(call, seed=None, preempt=None) for call in program]
    for mode in MODES[: MODES.index(header.streams)]:
        for seed in range(SEEDS if mode == "pct" else 1):
            yield replace(header, streams=mode, seed=seed), bare
    if header.streams == "pct" and bare != program:
        yield header, bare


class Budget:
    """Whether a program fails; none does any more once `calls` calls were played."""

    def __init__(self, fails: Fails, calls: int = CALLS) -> None:
        self.fails, self.calls = fails, calls

    @property
    def spent(self) -> bool:
        """There was more to try."""
        return self.calls < 0

    def __call__(self, program: Program) -> bool:
        """Play it, if there is anything left to play with."""
        self.calls -= len(program)
        return self.calls >= 0 and self.fails(program)


def renumbered(program: Program) -> Program:
    """The same with sequences and steps numbered from 1 as they come; what a trace has no name for
    stays 0."""
    sequences, steps = {0: 0}, {0: 0}

    def number(names: dict[int, int], name: int) -> int:
        return names.setdefault(name, len(names))

    def one(call: trace.AnyCall) -> trace.AnyCall:
        changed: dict[str, Any] = {
            field: number(names, getattr(call, field))
            for field, names in (("seq", sequences), ("child", sequences), ("step", steps))
            if hasattr(call, field)
        }
        if hasattr(call, "seqs"):
            changed["seqs"] = [number(sequences, name) for name in call.seqs]
        return replace(call, **changed)

    return list(map(one, program))


def shrink(program: Program, fails: Fails) -> Program:
    """The shortest program found for which `fails` still holds; it must hold for `program`. See
    `Budget` for an end."""
    before = None
    while before != program:
        before = program
        program = _fewer(program, fails)
        program = _without_each(program, fails)
        program = _simpler(program, fails)
    return program


def _fewer(program: Program, fails: Fails) -> Program:
    """Take runs of calls out, large ones first, from the end."""
    size = max(1, len(program) // 2)
    while True:
        at = len(program) - size
        while at > -size:
            shorter = program[: max(at, 0)] + program[max(at, 0) + size :]
            if len(shorter) < len(program) and fails(shorter):
                program = shorter
            at -= size
        if size == 1:
            return program
        size = max(1, size // 2)


def _without_each(program: Program, fails: Fails) -> Program:
    """Take out all that one sequence does, or one step and its end: none of it may go alone."""
    sequences = dict.fromkeys(call.seq for call in program if isinstance(call, trace.Create))
    steps = dict.fromkeys(call.step for call in program if isinstance(call, trace.Step))
    for without in [*(partial(_without, name) for name in sequences),
                    *(partial(_without_step, name) for name in steps)]:  # fmt: skip
        shorter = [call for call in map(without, program) if call is not None]
        if len(shorter) < len(program) and fails(shorter):
            program = shorter
    return program


def _without(name: int, call: trace.AnyCall) -> trace.AnyCall | None:
    """What is left of a call without a sequence."""
    if isinstance(call, trace.Step | trace.CommitEach) and name in call.seqs:
        kept = [at for at, seq in enumerate(call.seqs) if seq != name]
        seqs, tokens = [call.seqs[at] for at in kept], [call.tokens[at] for at in kept]
        return replace(call, seqs=seqs, tokens=tokens) if kept else None
    return None if getattr(call, "seq", None) == name else call


def _without_step(name: int, call: trace.AnyCall) -> trace.AnyCall | None:
    """What is left of a call without a step."""
    return None if getattr(call, "step", None) == name else call


def _simpler(program: Program, fails: Fails) -> Program:
    """Make the calls that are left plainer."""
    for at in range(len(program)):
        for plainer in _plainer(program[at]):
            changed = [*program[:at], plainer, *program[at + 1 :]]
            if fails(changed):
                program = changed
    return program


def _plainer(call: trace.AnyCall) -> Iterator[trace.AnyCall]:
    """Versions of a call that say less."""
    if call.memory is not None:
        yield replace(call, memory=None)
    if call.fail:
        yield replace(call, fail={})
        for kind, which in call.fail.items() if len(call.fail) > 1 else ():
            yield replace(call, fail={kind: which})
    if call.seed is not None:
        yield replace(call, seed=None)
    if call.preempt is not None:
        yield replace(call, preempt=None)
    if isinstance(call, trace.Step) and len(call.seqs) > 1:
        for at in range(len(call.seqs)):
            kept = [call.seqs[:at] + call.seqs[at + 1 :], call.tokens[:at] + call.tokens[at + 1 :]]
            yield replace(call, seqs=kept[0], tokens=kept[1])
    plain: dict[str, Any] = {
        "after": False, "stream": 0, "salt": "", "accepted": None, "keep": 0,
        "adapter": None, "extra_keys": {}, "reserve": False, "commit": True,
    }  # fmt: skip
    for name, value in plain.items():
        if getattr(call, name, value) != value:
            yield replace(call, **{name: value})
