"""The runs that the coupling table speaks of, worked out from where things stand.

Pure functions: they look and change nothing. What happens to the runs is said in
`spec/coupling.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvstate.arena import Range
from kvstate.config import Geometry
from kvstate.plan import Cells, Frames, Plan, Run
from kvstate.sequence import Sequence
from kvstate.spec.page import VACANT
from kvstate.spec.sequence import DROPPED

Operands = dict[str, Iterable[Any]]


def growth(
    plan: Plan, pool: Frames, geometry: Geometry, seq: Sequence, range_: Range, frames: int,
    opened: int, pages: Cells | None = None,
) -> Operands:  # fmt: skip
    """What makes `frames` of the range charged: first what is mapped already, then pooled frames.

    `opened` pages are in use already: of the sequence, or of `pages` that it is about to have.
    Behind all that is mapped then comes the plan's margin.
    """
    own, found = range_.frames, Operands()
    mapped, charged = len(own.ids), range_.charged
    end_block = geometry.blocks(min(seq.max_tokens, geometry.tokens(frames)))
    frames -= range_.shared
    if charged < frames and charged < mapped:
        found["in_place"] = ((own, charged, min(frames, mapped)),)
    if frames > mapped:
        end = len(pool.ids) - plan.taken
        plan.taken += frames - mapped
        found["fresh"] = ((pool, end - (frames - mapped), end, own),)
    if plan.margin:
        found |= margin(plan, pool, range_)
    if opened < end_block:
        found["opened"] = ((seq.pages if pages is None else pages, opened, end_block),)
    return found


def margin(plan: Plan, pool: Frames, range_: Range) -> Operands:
    """The plan's margin, behind all that is mapped then."""
    if not plan.margin:
        return {}
    end = len(pool.ids) - plan.taken
    plan.taken += plan.margin
    return {"ahead": ((pool, end - plan.margin, end, range_.frames),)}


def freeing(seq: Sequence, geometry: Geometry, blocks: int) -> Operands:
    """The range that a sequence leaves while it keeps `blocks` of its page records."""
    range_ = seq.range
    if range_ is None:
        return {}
    pages = seq.pages
    return {
        "written": ((pages, 0, blocks),),
        "emptied": ((pages, blocks, geometry.blocks(seq.capacity_tokens)),),
        "range": (range_,),
        "frames": ((range_.frames, 0, len(range_.frames.ids)),),
        "left": (_left(range_, geometry.blocks_in(range_.mapped)),),
    }


def leaving(seq: Sequence, geometry: Geometry) -> Operands:
    """The range that a closing sequence leaves together with its page records."""
    range_ = seq.range
    if range_ is None:
        return {}
    blocks = geometry.blocks_in(range_.mapped)
    own = min(blocks, len(seq.pages.states))
    return {
        "resident": ((seq.pages, 0, own),),
        "range": (range_,),
        "frames": ((range_.frames, 0, len(range_.frames.ids)),),
        "left": (_left(range_, blocks - own),),
    }


def besides(run: Run, others: Iterable[Run]) -> list[Run]:
    """What is left of a run without others, which lie in it in order."""
    cells, low, end = run
    found = list[Run]()
    for _, first, after in others:
        if low < first:
            found.append((cells, low, first))
        low = after
    return [*found, (cells, low, end)] if low < end else found


def hosted(seq: Sequence, opened: int = 0) -> Operands:
    """What a sequence has on the host, and what it has lost and does not get now."""
    if seq.slots:
        return {"held": ((seq.pages, 0, seq.held_pages),), "slots": seq.slots}
    if seq.state == DROPPED.code:
        return {"dropped": ((seq.pages, opened, seq.dropped_pages),)}
    return {}


def slots_of(found: Iterable[Run]) -> Iterator[int]:
    """Each slot of the runs."""
    for _, low, high in found:
        yield from range(low, high)


def runs_of(cells: Cells, ordinals: Iterable[int]) -> list[Run]:
    """Runs of ordinals that follow each other, in the order given."""
    found: list[Run] = []
    for at in ordinals:
        if found and found[-1][2] == at:
            found[-1] = (cells, found[-1][1], at + 1)
        else:
            found.append((cells, at, at + 1))
    return found


def joined(pages: Iterable[int], places: Iterable[int], size: int) -> list[tuple[int, int, int]]:
    """(page, place, bytes) of copies between addresses, joined where both follow one another."""
    found: list[tuple[int, int, int]] = []
    for page, place in zip(pages, places, strict=True):
        if found:
            first, other, length = found[-1]
            if (first + length, other + length) == (page, place):
                found[-1] = (first, other, length + size)
                continue
        found.append((page, place, size))
    return found


def hand_over(seq: Sequence, operands: Mapping[str, Iterable[Any]]) -> None:
    """After settling: the range has the records of its memory, the sequence has no range."""
    range_ = seq.range
    if range_ is None:
        return
    states = range_.pages.states
    own = [*operands.get("resident", ()), *operands.get("retained", ())]
    for cells, low, high in (*sorted(own, key=lambda run: run[1]), *operands.get("left", ())):
        states += cells.states[low:high]
        cells.states[low:high] = bytes(high - low)
    seq.range = None
    range_.give(None)
    seq.set_capacity(0)
    seq.columns.set_base(seq.row, 0)


def _left(range_: Range, blocks: int) -> tuple[Cells, int, int]:
    return Cells(range_, bytearray(blocks), range_.pages.counts), 0, blocks


assert VACANT.code == 0, "fresh page records are zeros"
