"""What must hold of the index of blocks: the part of several laws that speaks of it.

Each function here is the law of its name in `laws.py`; they stand together because a reader who
changes what the index names must see all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstate.spec import host, page, sequence
from kvstate.spec.facts import BlockFact, SequenceFact, View
from kvstate.spec.span_laws import retained_are_named, spans_are_of_their_tenants, spans_are_whole

_CANONICAL: Final = frozenset(
    state.code for state in (page.COMMITTED, page.LOADING_COMMITTED, page.HOST_HELD_COMMITTED)
)
_PRIVATE: Final = frozenset(
    state.code
    for state in (page.PRIVATE, page.LOADING_PRIVATE, page.HOST_HELD_PRIVATE, page.ALIASED)
)
NOBODYS: Final = {
    host.FILLING.code: page.LOADING_STALE.code,
    host.STALE.code: page.STALE.code,
    host.STALE_HELD.code: page.STALE.code,
    host.MIRRORING.code: page.VACANT.code,
    host.MIRROR.code: page.VACANT.code,
}
"""Slots that the index names, and what is on record of pages there: those that are nobody's."""


_FILLED: Final = frozenset((host.STALE.code, host.STALE_HELD.code, host.MIRROR.code))
_MIRRORS: Final = frozenset((host.MIRRORING.code, host.MIRROR.code))


def publish_after_write(view: View) -> Iterator[str]:
    """A block's owner has settled all its tokens and no step in flight writes them; what is said to
    be on the host has arrived there."""
    sequences = {seq.uid: seq for seq in view.sequences}
    writes = {seq.uid: list[tuple[int, int]]() for seq in view.sequences}
    uids = {seq.row: seq.uid for seq in view.sequences}
    for step in view.steps:
        for row, start, end in () if step.landed else step.writes:
            if row in uids:
                writes[uids[row]].append((start, end))
    for block in view.blocks:
        start, end = (at * view.tokens_per_block for at in (block.ordinal, block.ordinal + 1))
        seq = sequences.get(block.owner or 0)
        if seq is not None and end > seq.settled:
            yield f"block {block.ordinal} is of sequence {seq.uid}, which has {seq.settled} tokens"
        for first, last in writes.get(block.owner or 0, ()):
            if max(first, start) < min(last, end):
                yield f"block {block.ordinal} is found while a step writes from {first} to {last}"
        if block.slot is not None and block.landed != (view.host_states[block.slot] in _FILLED):
            yield f"block {block.ordinal} has {slot_name(view, block.slot)}, landed: {block.landed}"


def index_coherence(view: View) -> Iterator[str]:
    """A block's owner has it canonical and readable, its slot has it, and nothing is left out."""
    yield from (f"the index: {fault}" for fault in view.index_faults)
    yield from spans_are_whole(view)
    yield from retained_are_named(view)
    sequences = {seq.uid: seq for seq in view.sequences}
    slots = {block.slot for block in view.blocks}
    for block in view.blocks:
        if block.owner is not None:
            yield from _names(block, sequences.get(block.owner), _CANONICAL)
        for uid in block.line:
            yield from _names(block, sequences.get(uid), _PRIVATE)
    owned = {(block.owner, block.ordinal) for block in view.blocks}
    for seq in view.sequences if view.reuses else ():
        for at, code in enumerate(seq.pages):
            if code in _CANONICAL and (seq.uid, at) not in owned:
                yield f"page {at} of sequence {seq.uid} is committed and not in the index"
    for slot, code in enumerate(view.host_states):
        if view.host_pages[slot] != NOBODYS.get(code, page.VACANT.code):
            yield f"host slot {slot} is {slot_name(view, slot)}, its page {view.host_pages[slot]}"
        if code in NOBODYS and slot not in slots:
            yield f"host slot {slot} is {slot_name(view, slot)} and not in the index"


def _names(block: BlockFact, seq: SequenceFact | None, codes: frozenset[int]) -> Iterator[str]:
    """The sequence has that very block, in one of these states."""
    if seq is None:
        yield f"block {block.ordinal} is said to be of a sequence that is gone"
    elif block.ordinal >= len(seq.blocks) or seq.blocks[block.ordinal] != block.name:
        yield f"block {block.ordinal} is said to be of sequence {seq.uid}, which has another"
    elif seq.pages[block.ordinal] not in codes:
        state = page.PAGE.states[seq.pages[block.ordinal]]
        yield f"block {block.ordinal} is of sequence {seq.uid}, whose page is {state}"


def whole_keys(view: View) -> Iterator[str]:
    """Each full block of a sequence whose tokens are known is in the index, with the same tokens
    and tenant."""
    known = {block.name: block for block in view.blocks}
    for seq in view.sequences if view.reuses else ():
        if seq.state == sequence.CLOSING.code:
            continue
        if len(seq.blocks) != len(seq.keys) or len(seq.keys) != seq.known // view.tokens_per_block:
            yield f"sequence {seq.uid} knows {seq.known} tokens, {len(seq.blocks)} blocks"
        parent = None
        for at, (name, key) in enumerate(zip(seq.blocks, seq.keys, strict=False)):
            block = known.get(name or 0)
            if block is None:
                yield f"block {at} of sequence {seq.uid} is not in the index"
                break
            if (block.key, block.tenant, block.ordinal) != (key, seq.tenant, at):
                yield f"block {at} of sequence {seq.uid} is another in the index"
            if block.parent != parent:
                yield f"block {at} of sequence {seq.uid} has another before it in the index"
            parent = name


def hits_stay(view: View) -> Iterator[str]:
    """Each slot that is nobody's knows the copies that read it, and is held while there are any."""
    reading: dict[int, set[int]] = {}
    for copy in view.transfers:
        for slot in copy.slots if copy.onboards else ():
            reading.setdefault(slot, set()).add(copy.token)
    if reading != view.readers:
        yield f"copies read {reading}, the books say {dict(view.readers)}"
    for slot, code in enumerate(view.host_states):
        idle = code == host.STALE_HELD.code and slot not in reading
        if idle or (slot in reading and code not in (host.STALE_HELD.code, host.DRAINING.code)):
            yield f"host slot {slot} is {slot_name(view, slot)}, and read by {reading.get(slot)}"


def tier_order(view: View) -> Iterator[str]:
    """Owners and those in line for a block are that for its parent too: so nothing that somebody
    has is cut off. Whoever owns a block and is on the host has the only copy there."""
    held = {
        (seq.uid, at)
        for seq in view.sequences
        for at, code in enumerate(seq.pages)
        if code == page.HOST_HELD_COMMITTED.code
    }
    users = {b.name: {b.owner, *b.line} - {None} for b in view.blocks}
    for block in view.blocks:
        if block.parent is not None and not users[block.name] <= users[block.parent]:
            missing = users[block.name] - users[block.parent]
            yield f"block {block.ordinal} is of {missing}, the one before it is not"
        if block.slot is not None and (block.owner, block.ordinal) in held:
            yield f"block {block.ordinal} is on the host twice: slot {block.slot} has it too"
        on_gpu = any(one is not None for one in (block.owner, block.span, block.range))
        mirrors = block.slot is not None and view.host_states[block.slot] in _MIRRORS
        if (not on_gpu and block.slot is None) or on_gpu != (block.slot is None or mirrors):
            slot = "no slot" if block.slot is None else slot_name(view, block.slot)
            yield f"block {block.ordinal} is on the GPU: {on_gpu}, on the host: {slot}"


def isolation(view: View) -> Iterator[str]:
    """Whoever owns a block, or is in line for it, is of its tenant; so is whoever maps a span."""
    tenants = {seq.uid: seq.tenant for seq in view.sequences}
    yield from spans_are_of_their_tenants(view, tenants)
    for block in view.blocks:
        users = block.line if block.owner is None else (block.owner, *block.line)
        for uid in users:
            if tenants.get(uid) != block.tenant:
                yield f"block {block.ordinal} of tenant {block.tenant!r} is of sequence {uid}"


def slot_name(view: View, slot: int) -> str:
    """The state of a host slot, in words."""
    return host.HOST.states[view.host_states[slot]].name
