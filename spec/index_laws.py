"""What must hold of the index of blocks: the part of several laws that speaks of it.

Each function here is the law of its name in `laws.py`; they stand together because a reader who
changes what the index names must see all of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from kvstate.spec import host, page
from kvstate.spec.facts import BlockFact, SequenceFact, View
from kvstate.spec.span_laws import retained_are_named, spans_are_of_their_tenants, spans_are_whole

ID_BYTES: Final = 4
"""Of one token id."""
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
FILLED: Final = frozenset((host.STALE.code, host.STALE_HELD.code, host.MIRROR.code))
"""Those that have the bytes."""
_MIRRORS: Final = frozenset((host.MIRRORING.code, host.MIRROR.code))


def publish_after_write(view: View) -> Iterator[str]:
    """A block's owner has settled all its tokens and no step in flight writes them; what is said to
    be on the host has arrived there."""
    writes = defaultdict[int | None, list[tuple[int, int]]](list)
    for step in view.steps:
        for seq, start, end in () if step.landed else view.living(step):
            writes[seq.uid].append((start, end))
    for block in view.blocks:
        start, end = (at * view.tokens_per_block for at in (block.ordinal, block.ordinal + 1))
        owner = view.by_uid.get(block.owner)
        if owner is not None and end > owner.settled:
            has = f"sequence {owner.uid}, which has {owner.settled} tokens"
            yield f"block {block.ordinal} is of {has}"
        for first, last in writes.get(block.owner, ()):
            if max(first, start) < min(last, end):
                yield f"block {block.ordinal} is found while a step writes from {first} to {last}"
        if block.slot is not None and block.landed != (slot_state(view, block.slot) in FILLED):
            yield f"block {block.ordinal} has {slot_name(view, block.slot)}, landed: {block.landed}"


def index_coherence(view: View) -> Iterator[str]:
    """A block's owner has it canonical and readable, its slot has it, and nothing is left out:
    whoever has a block is its owner, or stands in line for it."""
    yield from (f"the index: {fault}" for fault in view.index_faults)
    yield from spans_are_whole(view)
    yield from retained_are_named(view)
    yield from _host_pages(view)
    for block in view.blocks:
        if block.owner is not None:
            yield from _names(block, view.by_uid.get(block.owner), _CANONICAL)
        for uid in block.line:
            yield from _names(block, view.by_uid.get(uid), _PRIVATE)
    owned = {(block.owner, block.ordinal) for block in view.blocks}
    standing = Counter((uid, block.name) for block in view.blocks for uid in block.line)
    for seq in view.sequences if view.reuses else ():
        for at, code in enumerate(seq.pages):
            if code in _CANONICAL and (seq.uid, at) not in owned:
                yield f"page {at} of sequence {seq.uid} is committed and not in the index"
        yield from _stands_in_line(view, seq, standing)


def _host_pages(view: View) -> Iterator[str]:
    """What is on record of pages of nobody's is what their slots say, which the index names."""
    slots = {block.slot for block in view.blocks}
    if len(view.host_pages) != len(view.host_states):
        yield f"{len(view.host_states)} host slots have {len(view.host_pages)} records of pages"
    for slot, (code, record) in enumerate(zip(view.host_states, view.host_pages, strict=False)):
        if record != NOBODYS.get(code, page.VACANT.code):
            yield f"host slot {slot} is {slot_name(view, slot)}, its page {record}"
        if code in NOBODYS and slot not in slots:
            yield f"host slot {slot} is {slot_name(view, slot)} and not in the index"


def _names(block: BlockFact, seq: SequenceFact | None, codes: frozenset[int]) -> Iterator[str]:
    """The sequence has that very block, in one of these states."""
    at = block.ordinal
    if seq is None:
        yield f"block {at} is said to be of a sequence that is gone"
    elif not 0 <= at < min(len(seq.blocks), len(seq.pages)) or seq.blocks[at] != block.name:
        yield f"block {at} is said to be of sequence {seq.uid}, which has another"
    elif seq.pages[at] not in codes:
        yield f"block {at} is of sequence {seq.uid}, whose page is {page_name(seq.pages[at])}"


def _stands_in_line(
    view: View, seq: SequenceFact, standing: Counter[tuple[int, int]]
) -> Iterator[str]:
    for at, name in enumerate(seq.blocks):
        block = view.block_of.get(name)
        if block is not None and standing[seq.uid, block.name] != (block.owner != seq.uid):
            yield f"block {at} is of {block.owner}, and sequence {seq.uid} not once in line for it"


def blocks_follow(view: View) -> Iterator[str]:
    """The index is a tree: a block is there once, it comes behind the one before it and is of the
    same tenant, and no two behind one another have the same key. At most one has it on the GPU."""
    blocks = len(view.blocks)
    if len(view.block_of) != blocks:
        yield f"{blocks} blocks are in the index, some twice: {len(view.block_of)} different ones"
    keys = {(block.parent, block.tenant, block.key) for block in view.blocks}
    if len(keys) != blocks:
        yield f"{blocks} blocks have {len(keys)} different keys"
    size = ID_BYTES * view.tokens_per_block
    for block in view.blocks:
        parent = view.block_of.get(block.parent)
        if parent is None and (block.parent is not None or block.ordinal):
            yield f"block {block.ordinal} comes behind one that is not there"
        if parent is not None and block.ordinal != parent.ordinal + 1:
            yield f"block {block.ordinal} comes behind block {parent.ordinal}"
        if parent is not None and block.tenant != parent.tenant:
            yield f"block {block.ordinal} and the one before it are of two tenants"
        if len(block.key) < size:
            yield f"block {block.ordinal} has a key of {len(block.key)} bytes"
        if sum(one is not None for one in (block.owner, block.span, block.range)) > 1:
            yield f"block {block.ordinal} is in several places on the GPU"
    if view.blocks and not view.reuses:
        yield f"{len(view.blocks)} blocks are in the index, and nothing is to be found"


def whole_keys(view: View) -> Iterator[str]:
    """Each full block of a sequence whose tokens are known is in the index, with the same tokens
    and tenant; of the block that is not full the ids are known, one of each known token."""
    for seq in view.sequences:
        full, rest = divmod(seq.known, max(1, view.tokens_per_block))
        if len(seq.keys) != full or len(seq.open) != rest * ID_BYTES:
            yield f"sequence {seq.uid} knows {seq.known} tokens, {len(seq.keys)} blocks"
        if len(seq.blocks) != (len(seq.keys) if view.reuses else 0):
            yield f"sequence {seq.uid} knows {len(seq.keys)} blocks, the index {len(seq.blocks)}"
        parent = None
        for at, (name, key) in enumerate(zip(seq.blocks, seq.keys, strict=False)):
            block = view.block_of.get(name)
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
    reading = defaultdict[int, set[int]](set)
    for copy in view.transfers:
        for slot in copy.slots if copy.onboards else ():
            reading[slot].add(copy.token)
    if reading != view.readers:
        yield f"copies read {dict(reading)}, the books say {dict(view.readers)}"
    for slot, code in enumerate(view.host_states):
        idle = code == host.STALE_HELD.code and slot not in reading
        if idle or (slot in reading and code not in (host.STALE_HELD.code, host.DRAINING.code)):
            yield f"host slot {slot} is {slot_name(view, slot)}, and read by {reading.get(slot)}"


def blocks_are_held(view: View) -> Iterator[str]:
    """Whoever holds a block is a copy in flight that keeps it, or whose last hit it is; and each of
    those holds it."""
    holding = defaultdict[int | None, set[tuple[str, int]]](set)
    for copy in view.transfers:
        for name in copy.blocks if copy.keeps else ():
            holding[name].add(("write", copy.token))
        if copy.onboards and copy.blocks:
            holding[copy.blocks[-1]].add(("load", copy.token))
        names = [name for name in copy.blocks if name is not None]
        if len(set(names)) != len(names):
            yield f"transfer {copy.token} names a block twice"
    for block in view.blocks:
        wanted = holding.pop(block.name, set())
        if block.holders != wanted:
            yield (
                f"block {block.ordinal} is held by {sorted(block.holders)}, and should be by "
                f"{sorted(wanted)}"
            )
    for name, holders in holding.items():
        if name is not None:
            yield f"{sorted(holders)} hold a block that is not in the index"


def tier_order(view: View) -> Iterator[str]:
    """Owners and those in line for a block are that for its parent too: so nothing that somebody
    has is cut off. Whoever owns a block and is on the host has the only copy there."""
    held = {
        (seq.uid, at)
        for seq in view.sequences
        for at, code in enumerate(seq.pages)
        if code == page.HOST_HELD_COMMITTED.code
    }
    users: dict[int | None, set[int | None]] = {
        b.name: {b.owner, *b.line} - {None} for b in view.blocks
    }
    for block in view.blocks:
        missing = users[block.name] - users.get(block.parent, set())
        if block.parent is not None and missing:
            yield f"block {block.ordinal} is of {missing}, the one before it is not"
        if block.slot is not None and (block.owner, block.ordinal) in held:
            yield f"block {block.ordinal} is on the host twice: slot {block.slot} has it too"
        on_gpu = any(one is not None for one in (block.owner, block.span, block.range))
        mirrors = block.slot is not None and slot_state(view, block.slot) in _MIRRORS
        if (not on_gpu and block.slot is None) or on_gpu != (block.slot is None or mirrors):
            slot = "no slot" if block.slot is None else slot_name(view, block.slot)
            yield f"block {block.ordinal} is on the GPU: {on_gpu}, on the host: {slot}"


def isolation(view: View) -> Iterator[str]:
    """Whoever owns a block, or is in line for it, is of its tenant; so is whoever maps a span."""
    yield from spans_are_of_their_tenants(view)
    for block in view.blocks:
        for uid in block.line if block.owner is None else (block.owner, *block.line):
            seq = view.by_uid.get(uid)
            if seq is None or seq.tenant != block.tenant:
                yield f"block {block.ordinal} of tenant {block.tenant!r} is of sequence {uid}"


def slot_state(view: View, slot: int) -> int | None:
    """The code of the state of a host slot; None if there is no such slot."""
    return view.host_states[slot] if 0 <= slot < len(view.host_states) else None


def slot_name(view: View, slot: int) -> str:
    """The state of a host slot, in words."""
    code = slot_state(view, slot)
    known = code is not None and code < len(host.HOST.states)
    return host.HOST.states[code].name if code is not None and known else f"no state: {code}"


def page_name(code: int) -> str:
    """The state of a page, in words."""
    return page.PAGE.states[code].name if code < len(page.PAGE.states) else f"no state: {code}"
