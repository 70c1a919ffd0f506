"""What must hold of spans and aliases: the part of several laws that speaks of them.

Each function here is asked by the law of that number in `laws.py`; they stand together because a
reader who changes what a span is must see all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstate.spec import alias, page, span
from kvstate.spec import range as range_
from kvstate.spec.facts import RangeFact, View

_ALIASED: Final = bytes([alias.ALIASED.code])
_UNUSED: Final = frozenset((range_.PARKED.code, range_.FENCED.code))


def aliases_hold(view: View) -> Iterator[str]:
    """A range that aliases a span holds it, and nothing else does; a span has its home."""
    aliasing = {fact.number: fact.span for fact in view.ranges if fact.span is not None}
    holding = {number: one.number for one in view.spans for number in one.holders}
    if aliasing != holding:
        yield f"ranges alias the spans {aliasing}, but these are held {holding}"
    homes = sorted((fact.home_of, fact.number) for fact in view.ranges if fact.home_of is not None)
    if homes != sorted((one.number, one.home) for one in view.spans):
        yield f"the spans have the homes {homes}"
    for fact in view.ranges:
        if bool(fact.aliases) != (fact.span is not None) or fact.aliases.strip(_ALIASED):
            yield f"range {fact.number} aliases span {fact.span} with {fact.aliases.hex()}"


def shared(view: View, fact: RangeFact) -> int:
    """Frames at the beginning of a range that are not its own."""
    left = view.span_of.get(fact.home_of)
    return len(fact.aliases) + (0 if left is None else len(left.frame_ids))


def spans_are_whole(view: View) -> Iterator[str]:
    """Each block of a span is canonical there, or with the sequence in whose range it lies."""
    owners = {fact.home_of: fact.owner for fact in view.ranges if fact.home_of is not None}
    of_spans: dict[int | None, int] = {
        block.name: block.span for block in view.blocks if block.span is not None
    }
    unit = max(1, view.align_bytes // max(1, view.frame_bytes))
    for one in view.spans:
        lives = one.state == span.LIVE.code
        for name in one.blocks:
            block = view.block_of.get(name)
            if lives and (block is None or block.owner != owners.get(one.number)):
                yield f"a block of span {one.number} is not its owner's"
            if not lives and of_spans.pop(name, None) != one.number:
                yield f"a block of span {one.number} is not canonical there"
        size = len(one.blocks) * view.block_bytes
        whole = size == (one.end - one.first_frame) * view.frame_bytes and not one.end % unit
        if not whole if one.state != span.EMPTY.code else one.blocks:
            yield f"span {one.number} has {len(one.blocks)} blocks, frames up to {one.end}"
        pinned = b"" if lives else bytes([page.PINNED.code]) * len(one.blocks)
        if (one.pages.strip(b"\0") if lives else one.pages) != pinned:
            yield f"span {one.number} has pages {one.pages.hex()}, and {len(one.blocks)} blocks"
    if of_spans:
        yield f"{len(of_spans)} blocks are said to be of spans that do not have them"


def spans_follow(view: View) -> Iterator[str]:
    """A span lives while its home has an owner, else the registry has it. It begins where the
    aliases of its home end, its blocks follow one another, and nothing behind it was used after
    it."""
    for one in view.spans:
        home = view.range_of.get(one.home)
        lives = one.state == span.LIVE.code
        if (home is not None and home.owner is not None) != lives or one.registered == lives:
            state = span.SPAN.states[one.state]
            yield f"span {one.number} is {state}, registered: {one.registered}, home {one.home}"
        if home is not None and one.first_frame != len(home.aliases):
            yield f"span {one.number} begins at {one.first_frame}, not where aliases end"
        first = one.first_frame * view.frame_bytes // max(1, view.block_bytes)
        blocks = [view.block_of.get(name) for name in one.blocks]
        ordinals = [block.ordinal for block in blocks if block is not None]
        if ordinals != list(range(first, first + len(ordinals))):
            yield f"span {one.number} has blocks {ordinals}, from {first} on"
        before = None if home is None else view.span_of.get(home.span)
        if not 0 <= one.used <= (view.span_clock if before is None else before.used):
            yield f"span {one.number} was used at {one.used}, of {view.span_clock}"
        if one.state == span.DEAD.code:
            yield f"span {one.number} is DEAD, and still in the books"
        if one.state == span.EMPTY.code and one.used:
            yield f"span {one.number} is EMPTY, and not the first to go"


def retained_are_named(view: View) -> Iterator[str]:
    """What parked memory retains is what the index says, in frames that were left as they are."""
    named = {(block.range, block.ordinal) for block in view.blocks if block.range is not None}
    found = set()
    for fact in view.ranges:
        pages = [at for at, code in enumerate(fact.pages) if code == page.RETAINED.code]
        found |= {(fact.number, at) for at in pages}
        end = shared(view, fact) + fact.kept_frames
        if pages and (pages[-1] + 1) * view.block_bytes > end * view.frame_bytes:
            yield f"range {fact.number} retains page {pages[-1]} beyond frame {end}"
        if not 0 <= fact.kept_frames <= len(fact.frame_ids):
            yield f"range {fact.number} keeps {fact.kept_frames} of {len(fact.frame_ids)} frames"
        if fact.kept_frames and fact.state not in _UNUSED:
            yield f"range {fact.number} is in use and keeps {fact.kept_frames} frames"
    if named != found:
        yield f"the index and parked ranges differ in what is retained: {sorted(named ^ found)}"


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
    waiting = sorted(registered, key=lambda one: -one.first_frame)
    for one in waiting:  # the longest chains first: a span is needed by those behind it
        for number in one.holders:
            holder = view.range_of.get(number)
            if holder is not None and (holder.owner is not None or holder.home_of in kept):
                kept.add(one.number)
    return sum(size for number, size in sizes.items() if number not in kept)


def mapped(view: View, fact: RangeFact) -> tuple[int, ...]:
    """The frames that must be behind a range, from its base: aliases, what it left, its own."""
    left = view.span_of.get(fact.home_of)
    own = fact.frame_ids if left is None else left.frame_ids + fact.frame_ids
    aliased: tuple[int, ...] = ()
    chain, end, one = set[int](), len(fact.aliases), view.span_of.get(fact.span)
    while one is not None and one.number not in chain:
        chain.add(one.number)
        home = view.range_of.get(one.home)
        if home is None:
            break
        first, frames = len(home.aliases), one.frame_ids + home.frame_ids
        aliased = frames[: max(0, end - first)] + aliased
        end, one = min(end, first), view.span_of.get(home.span)
    return aliased + own


def aliases_are_read_only(view: View) -> Iterator[str]:
    """The device maps read-only what is aliased, and nothing else."""
    expected = {
        fact.base + at * view.frame_bytes for fact in view.ranges for at in range(len(fact.aliases))
    }
    if expected != view.ledger.read_only:
        differ = sorted(hex(place) for place in expected ^ view.ledger.read_only)
        yield f"what is aliased and what is read-only differ at {differ}"


def spans_are_of_their_tenants(view: View) -> Iterator[str]:
    """Whoever maps a span is of the tenant of its blocks."""
    tenants = {
        one.number: {block.tenant for name in one.blocks if (block := view.block_of.get(name))}
        for one in view.spans
    }
    for fact in view.ranges:
        owner = view.by_uid.get(fact.owner)
        if owner is not None and fact.span in tenants and tenants[fact.span] != {owner.tenant}:
            yield f"range {fact.number} maps span {fact.span}, which is of another tenant"


Memory = tuple[int, tuple[int, ...]]
"""How much of a sequence's memory is a span's, and the frames that it pays for."""


def remapped(before: Memory | None, after: Memory | None) -> bool:
    """The same memory, but that a span may have taken the place of the first frames."""
    if before is None or after is None:
        return before is after
    return before[0] <= after[0] and before[1][after[0] - before[0] :] == after[1]
