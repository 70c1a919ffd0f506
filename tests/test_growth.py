"""What calls should not depend on they do not depend on, in bytecodes: `tests/bench/growth.py` with
fewer of everything, and without a clock.

What still grows is named, and the list is exact: a call that stands in it and does not grow is as
wrong as one that grows and does not.
"""

from __future__ import annotations

import tracemalloc
from typing import Final

import pytest

from tests.bench.growth import THINGS, measured, opened

FEW: Final = 10
MANY: Final = 40
TOLERANCE: Final = 1.02
"""Deeper heaps and longer numbers."""
ENDING: Final = {"clear_reuse", "trim"}
"""They give everything up."""
GROWS: Final = {
    "turns": {"create", "probe_reuse", "resume", "resume of a dropped one"},
}
"""By thing: calls that grow with it. A prompt that is found in the memory of many turns asks each
of them, and touches each: that is their age."""


@pytest.mark.parametrize("thing", THINGS)
def test_calls_do_not_grow_with_what_they_do_not_touch(thing: str) -> None:
    few, many = (measured(thing, count, lives=0).bytecodes for count in (FEW, MANY))
    grown = {call for call in few if many[call] > few[call] * TOLERANCE} - ENDING
    assert grown == GROWS.get(thing, set()), {call: (few[call], many[call]) for call in grown}


def test_a_step_of_one_has_no_memory_by_the_row() -> None:
    """numpy's work is in no bytecode, but what it makes is counted."""
    rows = 1 << 16
    with opened(rows) as kv:
        seq = kv.create(max_tokens=64)
        seq.resume()
        batch = kv.batch([seq])
        kv.settle(kv.step(batch))
        tracemalloc.start()
        try:
            kv.settle(kv.step(batch))
            kv.commit_each(batch, [7])
            seq.rewind(1)
            seq.suspend()
            seq.resume()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < rows
