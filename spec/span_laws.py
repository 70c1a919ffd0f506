"""What must hold of spans and aliases: the part of several laws that speaks of them.

Each function here is asked by the law of that number in `laws.py`; they stand together because a
reader who changes what a span is must see all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstate.spec import alias, page, span
from kvstate.spec import range as range_
from kvstate.spec.facts import RangeFact, SpanFact, View

_ALIASED: Final = bytes([alias.ALIASED.code])
_UNUSED: Final = frozenset((range_.PARKED.code, range_.FENCED.code))


def aliases_hold(view: View) -> Iterator[str]:
    """A range that aliases a span holds it, and nothing else does; a span has its home."""
    aliasing = {fact.number: fact.span for fact in view.ranges if fact.span is not None}
    holding = {number: one.number for one in view.spans for number in one.holders}
    if aliasing != holding:
        yield f"ranges alias the spans {aliasing}, but these are held {holding}"
    homes = {fact.home_of: fact.number for fact in view.ranges if fact.home_of is not None}
    if homes != {one.number: one.home for one in view.spans}:
        yield f"the spans have the homes {homes}"
    for fact in view.ranges:
        if bool(fact.aliases) != (fact.span is not None) or fact.aliases.strip(_ALIASED):
            yield f"range {fact.number} aliases span {fact.span} with {fact.aliases.hex()}"


def shared(fact: RangeFact, spans: dict[int, SpanFact]) -> int:
    """Frames at the beginning of a range that are not its own."""
    left = 0 if fact.home_of is None else len(spans[fact.home_of].frame_ids)
    return len(fact.aliases) + left


def spans_are_whole(view: View) -> Iterator[str]:
    """Each block of a span is canonical there, or with the sequence in whose range it lies."""
    owners = {fact.home_of: fact.owner for fact in view.ranges if fact.home_of is not None}
    of_spans = {block.name: block.span for block in view.blocks if block.span is not None}
    of_owners = {block.name: block.owner for block in view.blocks}
    unit = view.align_bytes // view.frame_bytes
    for one in view.spans:
        lives = one.state == span.LIVE.code
        for name in one.blocks:
            if lives and of_owners.get(name or -1) != owners.get(one.number):
                yield f"a block of span {one.number} is not its owner's"
            if not lives and of_spans.pop(name or -1, None) != one.number:
                yield f"a block of span {one.number} is not canonical there"
        if one.state == span.EMPTY.code:
            if one.blocks or one.pages:
                yield f"span {one.number} is EMPTY and has {len(one.blocks)} blocks"
            continue
        size = len(one.blocks) * view.block_bytes
        if size != (one.end - one.first_frame) * view.frame_bytes or one.end % unit:
            yield f"span {one.number} has {len(one.blocks)} blocks, frames up to {one.end}"
        if not lives and one.pages != bytes([page.PINNED.code]) * len(one.blocks):
            yield f"span {one.number} has pages {one.pages.hex()}"
    if of_spans:
        yield f"{len(of_spans)} blocks are said to be of spans that do not have them"


def retained_are_named(view: View) -> Iterator[str]:
    """What parked memory retains is what the index says, in frames that were left as they are."""
    named = {(block.range, block.ordinal) for block in view.blocks if block.range is not None}
    found = set()
    for fact in view.ranges:
        pages = [at for at, code in enumerate(fact.pages) if code == page.RETAINED.code]
        found |= {(fact.number, at) for at in pages}
        end = len(fact.aliases) + len(_left(fact, view)) + fact.kept_frames
        if pages and (pages[-1] + 1) * view.block_bytes > end * view.frame_bytes:
            yield f"range {fact.number} retains page {pages[-1]} beyond frame {end}"
        if fact.kept_frames > len(fact.frame_ids):
            yield f"range {fact.number} keeps {fact.kept_frames} of {len(fact.frame_ids)} frames"
        if fact.kept_frames and fact.state not in _UNUSED:
            yield f"range {fact.number} is in use and keeps {fact.kept_frames} frames"
    if named != found:
        yield f"the index and parked ranges differ in what is retained: {sorted(named ^ found)}"


def _left(fact: RangeFact, view: View) -> tuple[int, ...]:
    """The frames of the span that is at home in a range, if the registry has them."""
    return next((one.frame_ids for one in view.spans if one.number == fact.home_of), ())


def spare_spans(view: View, left: int) -> int:
    """Frames of spans that no sequence maps, but for the latest that fit into `left` frames."""
    registered = [one for one in view.spans if one.state != span.LIVE.code]
    sizes = {one.number: len(one.frame_ids) for one in registered}
    kept = set[int]()
    full = [one for one in registered if one.state == span.REGISTERED.code]
    for one in sorted(full, key=lambda one: (-one.used, one.first_frame)):
        left -= sizes[one.number]
        if left < 0:
            break
        kept.add(one.number)
    ranges = {fact.number: fact for fact in view.ranges}
    waiting = sorted(registered, key=lambda one: -one.first_frame)
    for one in waiting:  # the longest chains first: a span is needed by those behind it
        for number in one.holders:
            home = ranges[number].home_of
            if ranges[number].owner is not None or home in kept:
                kept.add(one.number)
    return sum(size for number, size in sizes.items() if number not in kept)


def mapped(
    fact: RangeFact, ranges: dict[int, RangeFact], spans: dict[int, SpanFact]
) -> tuple[int, ...]:
    """The frames that must be behind a range, from its base: aliases, what it left, its own."""
    left = () if fact.home_of is None else spans[fact.home_of].frame_ids
    if fact.span is None:
        return left + fact.frame_ids
    home = ranges[spans[fact.span].home]
    return mapped(home, ranges, spans)[: len(fact.aliases)] + left + fact.frame_ids


def aliases_are_read_only(view: View) -> Iterator[str]:
    """The device maps read-only what is aliased, and nothing else."""
    expected = {
        fact.base + at * view.frame_bytes for fact in view.ranges for at in range(len(fact.aliases))
    }
    if expected != view.ledger.read_only:
        differ = sorted(hex(place) for place in expected ^ view.ledger.read_only)
        yield f"what is aliased and what is read-only differ at {differ}"


def spans_are_of_their_tenants(view: View, tenants: dict[int, bytes]) -> Iterator[str]:
    """Whoever maps a span is of the tenant of its blocks."""
    blocks = {block.name: block.tenant for block in view.blocks}
    spans = {one.number: {blocks.get(name or -1) for name in one.blocks} for one in view.spans}
    for fact in view.ranges:
        if fact.owner is None or fact.span is None:
            continue
        if spans[fact.span] != {tenants[fact.owner]}:
            yield f"range {fact.number} maps span {fact.span}, which is of another tenant"


Memory = tuple[int, tuple[int, ...]]
"""How much of a sequence's memory is a span's, and the frames that it pays for."""


def remapped(before: Memory | None, after: Memory | None) -> bool:
    """The same memory, but that a span may have taken the place of the first frames."""
    if before is None or after is None:
        return before is after
    return before[0] <= after[0] and before[1][after[0] - before[0] :] == after[1]
