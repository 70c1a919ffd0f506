"""Shrinking: from a program that fails to the shortest one found that fails in the same way.

Delta debugging over the recorded calls. A program that has lost a call still means something,
because a call that names what was never made is skipped, and because each call carries the seed
that schedules it. Hypothesis' own shrinker was slower by an order of magnitude on such programs
and stopped earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from msgspec.structs import replace

from kvstate import trace

Program = list[trace.AnyCall]


def shrink(program: Program, fails: Callable[[Program], bool], seconds: float = 20.0) -> Program:
    """The shortest program found for which `fails` still holds; it must hold for `program`."""
    deadline = monotonic() + seconds
    before = None
    while before != program and monotonic() < deadline:
        before = program
        program = _fewer(program, fails, deadline)
        program = _simpler(program, fails, deadline)
    return program


def _fewer(program: Program, fails: Callable[[Program], bool], deadline: float) -> Program:
    """Take runs of calls out, large ones first, from the end."""
    size = max(1, len(program) // 2)
    while True:
        at = len(program) - size
        while at > -size and monotonic() < deadline:
            shorter = program[: max(at, 0)] + program[max(at, 0) + size :]
            if len(shorter) < len(program) and fails(shorter):
                program = shorter
            at -= size
        if size == 1 or monotonic() >= deadline:
            return program
        size = max(1, size // 2)


def _simpler(program: Program, fails: Callable[[Program], bool], deadline: float) -> Program:
    """Make the calls that are left plainer."""
    for at in range(len(program)):
        for plainer in _plainer(program[at]):
            if monotonic() >= deadline:
                return program
            changed = [*program[:at], plainer, *program[at + 1 :]]
            if fails(changed):
                program = changed
    return program


def _plainer(call: trace.AnyCall) -> Iterator[trace.AnyCall]:
    """Versions of a call that say less."""
    if call.fail:
        yield replace(call, fail={})
    if call.seed is not None:
        yield replace(call, seed=None)
    if isinstance(call, trace.Step) and len(call.seqs) > 1:
        for at in range(len(call.seqs)):
            kept = [call.seqs[:at] + call.seqs[at + 1 :], call.tokens[:at] + call.tokens[at + 1 :]]
            yield replace(call, seqs=kept[0], tokens=kept[1])
    plain: dict[str, Any] = {"after": False, "stream": 0, "salt": "", "accepted": None, "keep": 0}
    for name, value in plain.items():
        if getattr(call, name, value) != value:
            yield replace(call, **{name: value})
