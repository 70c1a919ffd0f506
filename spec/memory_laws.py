"""What must hold of memory: the part of several laws that speaks of frames, ranges, addresses and
host slots, and of the sums over them.

Each function here is asked by the law of its name in `laws.py`. What a view says is looked up and
never taken for granted: a fact that names what is not there is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from math import lcm
from typing import Any, Final

from kvstate.spec import frame, host, page, sequence, span
from kvstate.spec import range as range_
from kvstate.spec.facts import RangeFact, SequenceFact, View
from kvstate.spec.index_laws import NOBODYS, slot_name
from kvstate.spec.span_laws import mapped, shared, spare_spans

INT31: Final = (1 << 31) - 1
_CHARGED: Final = (frame.MAPPED.code, frame.LIVE_SPAN.code)
_OUTLIVES: Final = bytes((page.PARKED.code, page.RETAINED.code))


def conservation(view: View) -> Iterator[str]:
    """Frames: the books name each existing frame once. Slots: each one in use has one user."""
    ids = Counter(view.pool_ids)
    for fact in view.ranges:
        ids.update(fact.frame_ids)
    for one in view.spans:
        ids.update(one.frame_ids)
    yield from (f"frame {name} is in {count} places" for name, count in ids.items() if count > 1)
    if ids.keys() != view.ledger.frames:
        yield f"the books have {len(ids)} frames, the device {len(view.ledger.frames)}"
    absent = next(iter(view.frame_counts), 0) + len(view.denied_states)
    if absent + len(ids) != view.budget_frames:
        yield f"{len(ids)} frames and {absent} absent ones are not {view.budget_frames}"
    if view.denied_states.strip(bytes((frame.DENIED.code,))):
        yield f"frames that the device did not have are {view.denied_states.hex()}"
    yield from _slots_have_one_user(view)


def _slots_have_one_user(view: View) -> Iterator[str]:
    users = Counter(block.slot for block in view.blocks if block.slot is not None)
    for slot in users:
        if code_at(view.host_states, slot) not in NOBODYS:
            yield f"host slot {slot} is {slot_name(view, slot)}, and in the index"
    for seq in view.sequences:
        users.update(seq.slots)
    for slot, code in enumerate(view.host_states):
        wanted = 0 if code in (host.FREE.code, host.DRAINING.code) else 1
        if users.pop(slot, 0) != wanted:
            yield f"host slot {slot} is {slot_name(view, slot)}, and does not have {wanted} users"
    yield from (f"host slot {slot} is used, and is none" for slot in users)


def payers(view: View) -> Iterator[str]:
    """Who pays for a frame follows from where it is. In the range of a sequence it is LIVE_SPAN as
    far as others may map it, that is as far as the sequence's span goes; then MAPPED, then PARKED.
    Behind a fence it is COMING, in a range of nobody's PARKED, in a span of the registry SPAN."""
    pooled = bytes([frame.POOLED.code]) * len(view.pool_ids)
    if view.pool_states != pooled:
        yield f"{len(view.pool_ids)} frames are in the pool as {view.pool_states.hex()}"
    for fact in view.ranges:
        wanted = _frame_states(view, fact)
        if fact.frame_states != wanted or len(wanted) != len(fact.frame_ids):
            found = fact.frame_states.hex()
            yield f"range {fact.number} has frames {found}, and should have {wanted.hex()}"
    for one in view.spans:
        lives = one.state == span.LIVE.code
        frames = b"" if lives else bytes([frame.SPAN.code]) * (one.end - one.first_frame)
        if one.frame_states != frames or len(frames) != len(one.frame_ids):
            yield f"span {one.number} has frames {one.frame_states.hex()}, not {frames.hex()}"


def _frame_states(view: View, fact: RangeFact) -> bytes:
    """What the states of a range's own frames should be, by their number and its state."""
    count = len(fact.frame_states)
    if fact.state == range_.FENCED.code:
        return bytes([frame.COMING.code]) * count
    if fact.state != range_.RESERVED.code:
        return bytes([frame.PARKED.code]) * count
    own = view.span_of.get(fact.home_of)
    live = 0 if own is None else own.end - own.first_frame
    tail = fact.frame_states.count(frame.PARKED.code)
    return (
        bytes([frame.LIVE_SPAN.code]) * live
        + bytes([frame.MAPPED.code]) * (count - live - tail)
        + bytes([frame.PARKED.code]) * tail
    )


def charged(fact: RangeFact) -> int:
    """The frames of a range that its sequence pays for."""
    return sum(fact.frame_states.count(code) for code in _CHARGED)


def ranges_follow(view: View) -> Iterator[str]:
    """A range that has an owner is RESERVED, and is the one that its owner has; one that waits for
    something is FENCED, unless it is the home of a span that is read; what waits to be adopted is
    on offer, once. Without an owner it has the records of its pages itself, of all of them."""
    for fact in view.ranges:
        reserved = fact.state == range_.RESERVED.code
        owner = view.by_uid.get(fact.owner)
        if (owner is not None and owner.range == fact.number) != reserved:
            yield f"range {fact.number} is said to be of sequence {fact.owner}, and is not"
        if fact.state == range_.PARKED.code and fact.holders and fact.home_of is None:
            yield f"range {fact.number} is on offer, and held by {sorted(fact.holders)}"
        offers = ("retaining",) if fact.kept_frames else ("adopt",)
        wanted = offers if fact.state == range_.PARKED.code else ()
        if fact.offers != wanted:
            yield f"range {fact.number} is on offer as {fact.offers}, and should be as {wanted}"
        frames = 0 if reserved else len(fact.frame_ids) + shared(view, fact)
        blocks = _ceil(frames * view.frame_bytes, view.block_bytes)
        if len(fact.pages) != blocks or fact.pages.strip(_OUTLIVES):
            yield f"range {fact.number} has pages {fact.pages.hex()}, and memory of {blocks}"


def counters_are_sums(view: View) -> Iterator[str]:
    """Every count is what counting again gives, and none is negative."""
    states = view.pool_states + view.denied_states
    states += b"".join(fact.frame_states for fact in view.ranges)
    states += b"".join(one.frame_states for one in view.spans)
    sums = [states.count(state.code) for state in frame.FRAME.states]
    sums[frame.ABSENT.code] = view.budget_frames - sum(sums[1:])
    yield from _differences("frames", frame.FRAME.states, view.frame_counts, sums)
    sums = [view.host_states.count(state.code) for state in host.HOST.states]
    yield from _differences("host slots", host.HOST.states, view.host_counts, sums)
    yield from _objects(view)
    if min(view.frame_counts + view.host_counts, default=0) < 0:
        yield f"a count is negative: {view.frame_counts}, {view.host_counts}"
    share = int(view.protected_share * view.budget_frames)
    for frames, left in ((view.idle_span_frames, 0), (view.spare_span_frames, share)):
        if frames != spare_spans(view, left):
            there = spare_spans(view, left)
            yield f"{frames} frames of spans are said to be spare but for {left}, {there} are"
    if view.promised_frames != promised(view):
        yield f"{view.promised_frames} frames are said to be promised, {promised(view)} are"
    loads = sum(copy.loads for copy in view.transfers)
    if view.loads != loads:
        yield f"{view.loads} loads are said to be in flight, there are {loads}"
    for seq in view.sequences:
        fact = view.range_of.get(seq.range)
        if fact is not None:
            frames = len(fact.aliases) + charged(fact)
            tokens = frames * view.frame_bytes // max(1, view.row_bytes)
            if seq.capacity != min(tokens, seq.max_tokens):
                yield f"sequence {seq.uid} has capacity {seq.capacity}, its frames hold {tokens}"
        if seq.ample != _ample(view, seq, fact):
            yield f"sequence {seq.uid} is said to lack nothing up to {seq.ample} of {seq.capacity}"


def _ample(view: View, seq: SequenceFact, fact: RangeFact | None) -> int:
    """Up to how many tokens a sequence needs no frame and has all of its margin."""
    frames = 0 if fact is None else len(mapped(view, fact))
    if not view.ahead_frames or fact is None or frames >= frames_of(view, seq.max_tokens):
        return seq.capacity
    left = (frames - view.ahead_frames) * view.frame_bytes // max(1, view.row_bytes)
    return min(seq.capacity, left)


def _objects(view: View) -> Iterator[str]:
    """The counts of rows, pages and ranges; nobody counts pages and ranges that are VACANT."""
    states = bytes(seq.state for seq in view.sequences)
    sums = [states.count(state.code) for state in sequence.SEQUENCE.states]
    sums[sequence.CLOSED.code] += view.rows - len(states)
    yield from _differences("rows", sequence.SEQUENCE.states, view.sequence_counts, sums)
    pages = b"".join([seq.pages for seq in view.sequences] + [fact.pages for fact in view.ranges])
    there = page.PAGE.states[page.VACANT.code + 1 :]
    sums = [pages.count(state.code) for state in there]
    yield from _differences("pages", there, view.page_counts, sums)
    states, made = bytes(fact.state for fact in view.ranges), range_.RANGE.states
    made = made[range_.VACANT.code + 1 :]
    sums = [states.count(state.code) for state in made]
    yield from _differences("ranges", made, view.range_counts, sums)


def _differences(
    what: str, states: tuple[Any, ...], counts: tuple[int, ...], sums: list[int]
) -> Iterator[str]:
    if len(counts) != len(states):
        yield f"{what} are counted in {len(counts)} states, there are {len(states)}"
    for state, count, found in zip(states, counts, sums, strict=False):
        if count != found:
            yield f"{count} {what} are said to be {state}, {found} are"


def rows_agree(view: View) -> Iterator[str]:
    """A row says of its sequence's state and life what the sequence says."""
    for seq in view.sequences:
        if (seq.row_state, seq.row_life) != (seq.state, seq.life):
            yield f"the row of sequence {seq.uid} says {seq.row_state}, life {seq.row_life}: {seq}"


def contiguity(view: View) -> Iterator[str]:
    """The device maps exactly the frames that the books have, in order, and nothing beyond."""
    expected = {}
    for fact in view.ranges:
        names = mapped(view, fact)
        if len(names) > fact.extent_frames:
            yield f"range {fact.number} is mapped beyond its extent"
        for at, name in enumerate(names):
            expected[fact.base + at * view.frame_bytes] = name
    if expected != view.ledger.mappings:
        differ = expected.keys() ^ view.ledger.mappings.keys()
        yield f"books and device map differently at {sorted(hex(place) for place in differ)}"


def addresses(view: View) -> Iterator[str]:
    """The arena is what the device has reserved. Every run of its addresses is free, or a range
    with the gap behind it; ranges begin at a slot and a frame, and are long enough for whom they
    are of."""
    yield from _sizes(view)
    taken = [
        (fact.base, fact.extent_frames + view.guard_frames, f"range {fact.number}")
        for fact in view.ranges
    ]
    free = [(first, frames, "what is free") for first, frames in view.free_addresses]
    at, end = view.arena_base, view.arena_base + view.arena_bytes
    for first, frames, name in sorted(taken + free):
        if first != at or frames <= 0:
            yield f"{name} begins at {first:#x}, and should at {at:#x}: {frames} frames"
        at = first + frames * view.frame_bytes
    if at != end:
        yield f"the arena ends at {end:#x}, what is in it at {at:#x}"
    for (first, frames), (following, _) in pairwise(view.free_addresses):
        if first + frames * view.frame_bytes >= following:
            yield f"free addresses at {first:#x} and {following:#x} are not joined, or in disorder"
    for fact in view.ranges:
        if (fact.base - view.arena_base) % max(1, view.align_bytes):
            yield f"range {fact.number} does not begin at a slot and a frame"
        owner = view.by_uid.get(fact.owner)
        if owner is not None and fact.extent_frames < extent(view, owner.max_tokens):
            yield f"range {fact.number} is too short for the {owner.max_tokens} tokens of its owner"


def _sizes(view: View) -> Iterator[str]:
    """The sizes fit each other, and what the device has reserved."""
    sizes = view.row_bytes, view.block_bytes, view.frame_bytes, view.tokens_per_block
    if min(*sizes, view.align_bytes, view.guard_frames) < 1:
        yield f"a size is not positive: {sizes}, {view.align_bytes}, {view.guard_frames}"
    if view.block_bytes != view.row_bytes * view.tokens_per_block:
        yield f"{view.tokens_per_block} rows of {view.row_bytes} are no {view.block_bytes} bytes"
    if view.align_bytes != lcm(view.frame_bytes, view.block_bytes):
        yield f"{view.align_bytes} bytes are not the least common unit of frames and blocks"
    if view.guard_frames * view.frame_bytes != view.align_bytes:
        yield f"a gap of {view.guard_frames} frames is not {view.align_bytes} bytes"
    if view.arena_bytes // max(1, view.block_bytes) > INT31:
        yield "slots do not fit in 31 bits"
    if view.ledger.reservations != {view.arena_base: view.arena_bytes}:
        yield f"the device has reserved {dict(view.ledger.reservations)}"
    slots = len(view.host_states)
    if view.ledger.host != ({view.host_address: slots * view.block_bytes} if slots else {}):
        yield f"the device has host memory {dict(view.ledger.host)}, for {slots} slots"


def frames_of(view: View, tokens: int) -> int:
    """The frames that back that many tokens from a range's base."""
    return _ceil(tokens * view.row_bytes, view.frame_bytes)


def extent(view: View, tokens: int) -> int:
    """The frames of addresses that a sequence of that many tokens gets: whole units, as many as
    have three significant bits."""
    unit = max(1, view.align_bytes // max(1, view.frame_bytes))
    units = _ceil(frames_of(view, tokens), unit)
    step = 1 << max(0, units.bit_length() - 3)
    return _ceil(units, step) * step * unit


def blocks_of(view: View, tokens: int) -> int:
    """The blocks that have that many tokens."""
    return _ceil(tokens, view.tokens_per_block)


def code_at(states: bytes, at: int) -> int | None:
    """The state there; None where there is none."""
    return states[at] if 0 <= at < len(states) else None


def used(view: View, fact: RangeFact) -> int:
    """Frames from a range's base that back the capacity of its sequence."""
    return shared(view, fact) + charged(fact)


def promise(view: View, seq: SequenceFact) -> int:
    """Frames that a sequence was promised and does not have yet."""
    fact = view.range_of.get(seq.range)
    if fact is None or not seq.reserves:
        return 0
    return max(0, frames_of(view, seq.max_tokens) - used(view, fact))


def promised(view: View) -> int:
    """All that was promised."""
    return sum(promise(view, seq) for seq in view.sequences)


def _ceil(number: int, unit: int) -> int:
    return -(-number // max(1, unit))
