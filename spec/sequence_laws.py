"""What must hold of sequences and steps: what a sequence has, and what its pages are, follows from
its state, its lengths, its copies and from what the index says.

Each function here is asked by the law of its name in `laws.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvstate.spec import page, sequence
from kvstate.spec import range as range_
from kvstate.spec.facts import SequenceFact, StepFact, TransferFact, View
from kvstate.spec.flight_laws import transfers_have_their_memory
from kvstate.spec.index_laws import page_name
from kvstate.spec.memory_laws import blocks_of
from kvstate.spec.span_laws import aliases_are_read_only

_BARE: Final = (sequence.CREATED.code, sequence.CLOSING.code, sequence.CLOSED.code)
"""States in which a sequence has no pages at all."""
_LIVES: Final = (sequence.ACTIVE.code, sequence.SUSPENDED.code)
"""States in which it has bytes."""
_OPEN: Final = bytes([page.ACTIVE.code])
_ON_GPU: Final = page.ACTIVE, page.COMMITTED, page.PRIVATE
_ON_HOST: Final = page.HOST_HELD_ACTIVE, page.HOST_HELD_COMMITTED, page.HOST_HELD_PRIVATE
_ON_THE_WAY: Final = page.LOADING_ACTIVE, page.LOADING_COMMITTED, page.LOADING_PRIVATE
_HOSTED, _LOADED = (
    bytes.maketrans(bytes(s.code for s in _ON_GPU), bytes(s.code for s in states))
    for states in (_ON_HOST, _ON_THE_WAY)
)
_LOADING: Final = bytes(state.code for state in _ON_THE_WAY)
_HELD: Final = bytes(state.code for state in _ON_HOST)
_READABLE: Final = frozenset(state.code for state in page.PAGE.states if state.readable)
_WRITABLE: Final = frozenset(state.code for state in page.PAGE.states if state.writable)
_FULL: Final = frozenset(
    state.code
    for state in (
        page.COMMITTED, page.PRIVATE, page.ALIASED, page.LOADING_COMMITTED, page.LOADING_PRIVATE,
        page.HOST_HELD_COMMITTED, page.HOST_HELD_PRIVATE,
    )
)  # fmt: skip


def load_of(view: View, seq: SequenceFact) -> TransferFact | None:
    """The copy in flight that brings it bytes."""
    copy = view.transfer_of.get(seq.transfer)
    return copy if copy is not None and copy.loads else None


def loading_pages(view: View) -> Iterator[str]:
    """A page is LOADING exactly while a copy of this life fills it; else what is there is
    readable."""
    for seq in view.sequences:
        loading, filled = count_of(seq.pages, _LOADING), load_of(view, seq) is not None
        if bool(loading) != filled:
            yield f"sequence {seq.uid} has {loading} pages loading; filled: {filled}"
        if seq.state == sequence.ACTIVE.code and not loading:
            first = first_without(_READABLE, seq, 0, seq.settled, view.tokens_per_block)
            if first is not None:
                yield f"sequence {seq.uid} has settled tokens in page {first}, which is unreadable"


def count_of(pages: bytes, codes: bytes) -> int:
    """How many are in one of these states."""
    return sum(pages.count(code) for code in codes)


def first_without(
    codes: frozenset[int], seq: SequenceFact, start: int, end: int, block: int
) -> int | None:
    """The first page with tokens from `start` up to `end` whose state is none of these."""
    block = max(1, block)
    pages = range(start // block, -(-end // block) if end > start else 0)
    there = range(len(seq.pages))
    return next((at for at in pages if at not in there or seq.pages[at] not in codes), None)


def leaving_releases(view: View) -> Iterator[str]:
    """Only an ACTIVE sequence has a range, only one with pages on the host has slots, only one with
    bytes has tokens, a copy, or copies that a reclaim asks for; a CLOSING one is named by a step.
    A row is free, or of one sequence."""
    rows = [seq.row for seq in view.sequences]
    if sorted((*rows, *view.free_rows)) != list(range(view.rows)):
        yield f"the rows in use {rows} and the free ones {view.free_rows} are not {view.rows}"
    owners = Counter(seq.range for seq in view.sequences if seq.range is not None)
    for seq in view.sequences:
        active, copy = seq.state == sequence.ACTIVE.code, view.transfer_of.get(seq.transfer)
        if active != (seq.range is not None):
            yield f"sequence {seq.uid} is {state_name(seq)} and has range {seq.range}"
        own = _HELD if copy is not None and copy.onboards else _HELD + _LOADING
        if len(seq.slots) != (on_host := count_of(seq.pages, own)):
            yield f"sequence {seq.uid} has {len(seq.slots)} slots and {on_host} pages on the host"
        if not active and seq.capacity:
            yield f"sequence {seq.uid} is {state_name(seq)} and has capacity {seq.capacity}"
        yield from _is_gone(view, seq)
    for uid in view.doubles - view.by_uid.keys():
        yield f"sequence {uid} is gone, and a reclaim would ask it for copies"
    for fact in view.ranges:
        reserved = fact.state == range_.RESERVED.code
        if owners.pop(fact.number, 0) != reserved or (fact.owner is not None) != reserved:
            yield f"range {fact.number} does not have {reserved:d} owners"
        if fact.state == range_.VACANT.code:
            yield f"range {fact.number} is VACANT and still in the books"
    yield from (f"range {number} is some sequence's, and is none" for number in owners)


def _is_gone(view: View, seq: SequenceFact) -> Iterator[str]:
    """What has no bytes has nothing that speaks of them, and what is closed is there for a step."""
    tokens = seq.scheduled, seq.held_tokens, len(seq.keys), seq.transfer is not None
    if seq.state not in _LIVES and (any(tokens) or seq.uid in view.doubles):
        yield f"sequence {seq.uid} is {state_name(seq)} and has tokens: {seq}"
    if seq.state == sequence.CLOSING.code and not seq.steps:
        yield f"sequence {seq.uid} is CLOSING and no step names it"
    if seq.state == sequence.CLOSED.code:
        yield f"sequence {seq.uid} is CLOSED and still in the books"


def copies_are_known(view: View) -> Iterator[str]:
    """A sequence waits for the one copy in flight of its bytes in this life, and for nothing else.
    A copy goes one way."""
    for copy in view.transfers:
        if copy.outward + copy.inward + copy.keeps + copy.onboards > 1:
            yield f"transfer {copy.token} goes several ways: {copy}"
        seq = view.by_uid.get(copy.uid)
        own = copy.moves and seq is not None and seq.life == copy.life
        waits = seq is not None and seq.transfer == copy.token
        if own != waits:
            yield f"transfer {copy.token} is of sequence {copy.uid}: {own}, waited for: {waits}"
        if seq is not None and copy.life > seq.life:
            yield f"transfer {copy.token} is of life {copy.life} of sequence {copy.uid}"
    for seq in view.sequences:
        if seq.transfer is not None and seq.transfer not in view.transfer_of:
            yield f"sequence {seq.uid} waits for transfer {seq.transfer}, which is not in flight"
    yield from transfers_have_their_memory(view)


def groups_agree(view: View) -> Iterator[str]:
    """There is one group so far. Each block whose tokens are known is readable in it, or will be
    once copies are done; and what is mapped of others is whole units of frames and blocks."""
    unit = max(1, view.align_bytes // max(1, view.frame_bytes))
    for fact in view.ranges:
        if len(fact.aliases) % unit:
            yield f"range {fact.number} maps {len(fact.aliases)} frames, no multiple of {unit}"
    for seq in view.sequences:
        known = seq.known // max(1, view.tokens_per_block) if seq.state in _LIVES else 0
        for at, code in enumerate(seq.pages[:known]):
            if code not in _FULL:
                yield f"sequence {seq.uid} knows block {at}, whose page is {page_name(code)}"


def lengths(view: View) -> Iterator[str]:
    """Known tokens are settled, settled ones scheduled, and those have room: on the GPU, or on the
    host, where they are held."""
    for seq in view.sequences:
        if not 0 <= seq.known <= seq.settled <= seq.scheduled <= seq.max_tokens:
            yield f"sequence {seq.uid} has lengths out of order: {seq}"
        if seq.state == sequence.ACTIVE.code and seq.scheduled > seq.capacity:
            yield f"sequence {seq.uid} is scheduled beyond its capacity"
        copy = load_of(view, seq)
        away = copy is not None or seq.state == sequence.SUSPENDED.code
        if seq.held_tokens < 0 or (seq.held_tokens and not away):
            yield f"sequence {seq.uid} is {state_name(seq)} and {seq.held_tokens} tokens are held"
        if seq.state == sequence.SUSPENDED.code and seq.scheduled > seq.held_tokens:
            yield f"of {seq.scheduled} tokens of sequence {seq.uid} {seq.held_tokens} are held"
        if copy is not None and (
            seq.settled > seq.held_tokens or (copy.onboards and seq.settled != seq.held_tokens)
        ):
            yield f"sequence {seq.uid} has {seq.settled} tokens, and {seq.held_tokens} come"


def pages_follow(view: View) -> Iterator[str]:
    """What a page is follows from its sequence. It is ALIASED exactly where an alias is behind it,
    COMMITTED if the index names it as the sequence's and PRIVATE if it does not, ACTIVE up to the
    capacity; on the host, and on the way, as far as tokens are held. What is not ACTIVE or
    SUSPENDED has no pages, but for those whose bytes were dropped."""
    for seq in view.sequences:
        expected = _expected(view, seq)
        if seq.pages != expected:
            yield f"sequence {seq.uid} has pages {seq.pages.hex()}, it follows {expected.hex()}"


def _expected(view: View, seq: SequenceFact) -> bytes:
    pages, held = b"", blocks_of(view, seq.held_tokens)
    if seq.state == sequence.ACTIVE.code:
        pages = _roles(view, seq, max(held, blocks_of(view, seq.capacity)))
        if load_of(view, seq) is not None:
            pages = pages[:held].translate(_LOADED) + pages[held:]
        fact = view.range_of.get(seq.range)
        frames = 0 if fact is None else len(fact.aliases)
        aliased = frames * view.frame_bytes // max(1, view.block_bytes)
        pages = bytes([page.ALIASED.code]) * aliased + pages[aliased:]
    elif seq.state == sequence.SUSPENDED.code:
        pages = _roles(view, seq, held).translate(_HOSTED)
    elif seq.state == sequence.DROPPED.code:
        pages = bytes([page.DROPPED.code]) * seq.pages.count(page.DROPPED.code)
    return pages.ljust(blocks_of(view, seq.max_tokens), b"\0")


def _roles(view: View, seq: SequenceFact, count: int) -> bytes:
    """What so many pages are to their sequence: full and canonical, full, or open."""
    full = seq.known // max(1, view.tokens_per_block)
    blocks = map(view.block_of.get, seq.blocks)
    owns = bytes(
        page.COMMITTED.code if block is not None and block.owner == seq.uid else page.PRIVATE.code
        for block in blocks
    )
    roles = owns[:full] if view.reuses else bytes([page.COMMITTED.code]) * full
    return roles + _OPEN * (count - len(roles))


def steps_follow(view: View) -> Iterator[str]:
    """Steps are in the order of their issue, and those that a quiesce saw land are the first. What
    a step names is there. The tokens that the steps of a sequence write follow one another, from
    what is settled to what is scheduled."""
    numbers = [step.number for step in view.steps]
    if numbers != sorted(set(numbers)):
        yield f"steps are not in the order of their issue: {numbers}"
    landed = [step.landed for step in view.steps]
    if landed != sorted(landed, reverse=True):
        yield f"a step has landed before one that was issued before it: {numbers}, {landed}"
    ends = {seq.uid: seq.settled for seq in view.sequences}
    for step in view.steps:
        yield from _names_what_is_there(view, step)
        for seq, first, end in view.living(step):
            follows = first == ends.get(seq.uid) if end > first else first == end <= seq.scheduled
            if seq.state not in _LIVES or not follows:
                yield (
                    f"step {step.number} writes from {first} to {end} of sequence {seq.uid}, which "
                    f"is {state_name(seq)} and has {ends.get(seq.uid)}"
                )
            ends[seq.uid] = max(end, ends.get(seq.uid, 0))
    for seq in view.sequences:
        if seq.state in _LIVES and ends[seq.uid] != seq.scheduled:
            yield f"sequence {seq.uid} has {seq.scheduled} scheduled, steps end at {ends[seq.uid]}"


def _names_what_is_there(view: View, step: StepFact) -> Iterator[str]:
    rows = [row for row, _, _ in step.issued]
    if not len(rows) == len(set(rows)) == len(step.bases) == len(step.lives):
        yield f"step {step.number} names rows {rows}, at {step.bases}, of lives {step.lives}"
    for row, life in zip(rows, step.lives, strict=False):
        seq = view.by_row.get(row)
        if seq is None:
            yield f"step {step.number} names row {row}, which is nobody's"
        elif not -1 <= life <= seq.life:
            yield f"step {step.number} is of life {life} of sequence {seq.uid}"


def no_writer(view: View) -> Iterator[str]:
    """A step in flight writes only into pages that may be written, or are still being loaded.
    Aliases are mapped so that nobody can write there."""
    yield from aliases_are_read_only(view)
    may = _WRITABLE | {page.LOADING_ACTIVE.code}
    for step in view.steps:
        for seq, start, end in view.living(step):
            if seq.state != sequence.ACTIVE.code or end > seq.capacity:
                continue
            first = first_without(may, seq, start, end, view.tokens_per_block)
            if first is not None and first < len(seq.pages):
                name = page_name(seq.pages[first])
                yield f"step {step.number} writes page {first} of sequence {seq.uid}: {name}"


def state_name(seq: SequenceFact) -> str:
    """The state of a sequence, in words."""
    return sequence.SEQUENCE.states[seq.state].name
