"""The runs that the coupling table speaks of, worked out from where things stand.

Pure functions: they look and change nothing. What happens to the runs is said in
`spec/coupling.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstate.arena import Range
from kvstate.config import Geometry
from kvstate.plan import Cells, Frames, Plan
from kvstate.sequence import Sequence
from kvstate.spec.page import VACANT

Operands = dict[str, Iterable[Any]]


def growth(
    plan: Plan, pool: Frames, geometry: Geometry, seq: Sequence, range_: Range, frames: int,
    opened: int, ahead_frames: int,
) -> Operands:  # fmt: skip
    """What makes `frames` of the range charged: first what is mapped already, then pooled frames.

    `opened` pages are in use already. A margin of `ahead_frames` is mapped as far as the pool has
    frames that nobody in the plan needs.
    """
    mapped = range_.mapped
    fresh = max(0, frames - mapped)
    margin = min(frames + ahead_frames, range_.extent_frames) - mapped - fresh
    ahead = max(0, min(margin, plan.spare))
    end = len(pool.ids) - plan.taken
    plan.taken += fresh + ahead
    plan.spare -= ahead
    capacity = min(seq.max_tokens, geometry.tokens(frames))
    return {
        "in_place": ((range_.frames, range_.charged, min(frames, mapped)),),
        "fresh": ((pool, end - fresh, end, range_.frames),),
        "ahead": ((pool, end - fresh - ahead, end - fresh, range_.frames),),
        "opened": ((seq.pages, opened, geometry.blocks(capacity)),),
    }


def freeing(seq: Sequence, geometry: Geometry, blocks: int) -> Operands:
    """The range that a sequence leaves while it keeps its page records, `blocks` of them with
    tokens."""
    range_ = seq.range
    if range_ is None:
        return {}
    return {
        "written": ((seq.pages, 0, blocks),),
        "loading": ((seq.pages, 0, blocks),),
        "emptied": ((seq.pages, blocks, geometry.blocks(seq.capacity_tokens)),),
        "range": (range_,),
        "frames": ((range_.frames, 0, range_.mapped),),
        "left": (_left(range_, mapped_blocks(range_, geometry)),),
    }


def leaving(seq: Sequence, geometry: Geometry) -> Operands:
    """The range that a closing sequence leaves together with its page records."""
    range_ = seq.range
    if range_ is None:
        return {}
    blocks = mapped_blocks(range_, geometry)
    own = min(blocks, len(seq.pages.states))
    return {
        "resident": ((seq.pages, 0, own),),
        "range": (range_,),
        "frames": ((range_.frames, 0, range_.mapped),),
        "left": (_left(range_, blocks - own),),
    }


def hosted(seq: Sequence) -> Operands:
    """What a sequence has on the host, and what it has lost."""
    return {
        "held": ((seq.pages, 0, seq.held_pages),),
        "dropped": ((seq.pages, 0, seq.dropped_pages),),
        "slots": seq.slots,
    }


def mapped_blocks(range_: Range, geometry: Geometry) -> int:
    """The blocks of a range that have at least a part of their memory mapped."""
    return -(-range_.mapped * geometry.frame_bytes // geometry.block_bytes)


def hand_over(seq: Sequence, operands: Mapping[str, Iterable[Any]]) -> None:
    """After settling: the range keeps the records of its memory, the sequence has no range."""
    range_ = seq.range
    if range_ is None:
        return
    states = bytearray()
    for name in ("resident", "left"):
        for cells, low, high in operands.get(name, ()):
            states += cells.states[low:high]
    range_.pages.states[:] = states
    range_.owner = seq.range = None
    seq.columns.capacity[seq.row] = 0


def _left(range_: Range, blocks: int) -> tuple[Cells, int, int]:
    return Cells(range_, bytearray([VACANT.code]) * blocks), 0, blocks
