"""How much work a piece of Python is, in a count that depends on no clock: the bytecodes that it
ran.

So a test can say that a cost does not grow. What C code does beside them (sorting, numpy) is not
seen; calls of functions, which are easier to count, do not see a loop.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Work:
    """What was counted."""

    bytecodes = 0


@contextmanager
def counting() -> Iterator[Work]:
    """Count what runs inside. Whatever traces besides (coverage, say) sees nothing of it, and no
    garbage is collected: the ends of what others left behind are not its work."""
    work, before, collecting = Work(), sys.gettrace(), gc.isenabled()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        work.bytecodes += event == "opcode"
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        yield work
    finally:
        sys.settrace(before)
        if collecting:
            gc.enable()


def bytecodes(call: Callable[[], object]) -> int:
    """The bytecodes of one call."""
    with counting() as work:
        call()
    return work.bytecodes
