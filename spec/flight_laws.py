"""What must hold of what is in flight: who holds what, which slots copies name, what issued work
touches, and in which order.

Each function here is asked by the law of its name in `laws.py`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from kvstate.spec import host, page
from kvstate.spec import range as range_
from kvstate.spec.facts import RangeFact, TransferFact, View, Work
from kvstate.spec.index_laws import slot_name
from kvstate.spec.memory_laws import code_at
from kvstate.spec.span_laws import aliases_hold, shared

Hold = tuple[str, int]
_LOADING: Final = frozenset(
    state.code for state in (page.LOADING_ACTIVE, page.LOADING_COMMITTED, page.LOADING_PRIVATE)
)


def named_holders(view: View) -> Iterator[str]:
    """A range is held by the copies in flight that read or write it, by the caller's events that
    were said to come before its reuse, and by the steps that may still run and that its fence waits
    for; and by nothing else. A fence waits for something."""
    holding = _holding(view)
    for fact in view.ranges:
        wanted = holding.pop(fact.number, set())
        yield from (f"range {fact.number} is held by {h}: gone" for h in fact.holders - wanted)
        yield from (f"{h} does not hold range {fact.number}" for h in wanted - fact.holders)
        fenced = fact.state == range_.FENCED.code
        if fenced and not fact.holders:
            yield f"range {fact.number} is FENCED and waits for nothing"
        if not fenced and any(kind == "steps" for kind, _ in fact.holders):
            yield f"range {fact.number} is not FENCED, but held by steps"
    for number, holders in holding.items():
        yield f"{sorted(holders)} name range {number}, which is none"
    yield from aliases_hold(view)
    naming = Counter(row for step in view.steps for row, _, _ in step.issued)
    for seq in view.sequences:
        if seq.steps != naming[seq.row]:
            yield f"sequence {seq.uid} counts {seq.steps} steps, {naming[seq.row]} name it"


def _holding(view: View) -> defaultdict[int, set[Hold]]:
    """What must hold each range, by its number."""
    holding = defaultdict[int, set[Hold]](set)
    for copy in view.transfers:
        for number in (copy.range, *copy.sources):
            holding[number].add(copy.holder)
    for step in view.steps:
        for number in () if step.landed else step.fenced:
            holding[number].add(("steps", step.number))
    return holding


def fences_wait_for_steps(view: View) -> Iterator[str]:
    """Where a step in flight was told that a sequence is, it still is; or the sequence has left,
    and the fence of its memory waits for the step."""
    at_base = {fact.base: fact for fact in view.ranges}
    for step in view.steps:
        for (row, _, _), base in zip(() if step.landed else step.issued, step.bases, strict=False):
            fact, seq = at_base.get(base), view.by_row.get(row)
            stays = fact is not None and seq is not None and seq.range == fact.number
            waits = fact is not None and ("steps", step.number) in fact.holders
            if stays == waits:
                yield f"step {step.number} may write at {base:#x}, where row {row} was, and is not"


def transfers_have_their_memory(view: View) -> Iterator[str]:
    """A copy's memory on the GPU is the sequence's that waits for it, or is behind a fence; only
    copies to the host, and fences, may be of memory that others have. It names each range once, and
    is of a sequence unless it keeps canonical pages."""
    for copy in view.transfers:
        if copy.keeps != (copy.uid is None):
            yield f"transfer {copy.token} is of sequence {copy.uid}, keeps pages: {copy.keeps}"
        fact, seq = view.range_of.get(copy.range), view.by_uid.get(copy.uid)
        waited = seq is not None and seq.transfer == copy.token
        if fact is None:
            continue  # said already: nothing holds it
        has = waited and seq is not None and seq.range == copy.range
        if copy.loads and (not has if waited else fact.state != range_.FENCED.code):
            yield f"transfer {copy.token} loads into range {copy.range}, which is not its own"
        if copy.outward and fact.state != range_.FENCED.code:
            yield f"transfer {copy.token} reads range {copy.range}, which its sequence has left"
        names = (copy.range, *copy.sources)
        if len(set(names)) != len(names):
            yield f"transfer {copy.token} names a range twice: {names}"


def slots_in_flight(view: View) -> Iterator[str]:
    """What a host slot says of copies, they say of it: one writes what is COMING, FILLING or
    MIRRORING, one reads what is HELD_READ, some read what is STALE_HELD, and what is DRAINING was
    left to some. A slot that nothing in flight names says nothing of the kind."""
    naming = defaultdict[int, list[TransferFact]](list)
    for copy in view.transfers:
        for slot in copy.slots:
            naming[slot].append(copy)
    for slot, copies in naming.items():
        state = code_at(view.host_states, slot)
        right = state is not None and state in _SAYS and all(_SAYS[state](one) for one in copies)
        if not right or (len(copies) > 1 and state not in _SEVERAL):
            tokens = [copy.token for copy in copies]
            yield f"host slot {slot} is {slot_name(view, slot)}, and transfers {tokens} name it"
    for slot, code in enumerate(view.host_states):
        if code in _SAYS and slot not in naming:
            yield f"host slot {slot} is {slot_name(view, slot)}, and no transfer names it"
    yield from _slots_in_order(view)


_SAYS: Final = {
    host.COMING.code: lambda copy: copy.outward,
    host.HELD_READ.code: lambda copy: copy.inward,
    host.FILLING.code: lambda copy: copy.keeps,
    host.MIRRORING.code: lambda copy: copy.keeps,
    host.STALE_HELD.code: lambda copy: copy.onboards,
    host.DRAINING.code: lambda copy: copy.moves or copy.keeps,
}
"""What must be so of the copies that name a slot, by the state of the slot."""
_SEVERAL: Final = (host.STALE_HELD.code, host.DRAINING.code)
"""States of slots that several copies may name."""


def _slots_in_order(view: View) -> Iterator[str]:
    """The copy of a sequence's own pages has the sequence's slots, in their order."""
    for seq in view.sequences:
        copy = view.transfer_of.get(seq.transfer)
        if copy is None or copy.onboards:
            continue
        named = set(copy.slots)
        own = tuple(slot for slot in seq.slots if slot in named)
        if own != copy.slots or (copy.inward and own != seq.slots):
            yield f"transfer {copy.token} has slots {copy.slots}, sequence {seq.uid} {seq.slots}"


def no_reuse_in_flight(view: View) -> Iterator[str]:
    """Pending work touches only mapped memory of ranges in use, and slots that are not free. A
    copy touches only its own range, those that it reads from, and its own slots."""
    owned = []
    for fact in view.ranges if view.ledger.work else ():
        in_use = fact.state in (range_.RESERVED.code, range_.FENCED.code)
        frames = shared(view, fact) + (len(fact.frame_ids) if in_use else 0)
        if in_use or fact.home_of is not None:
            owned.append((fact.base, fact.base + frames * view.frame_bytes))
    for work in view.ledger.work:
        for address, size in work.reads + work.writes:
            if _in_arena(view, address):
                if not any(low <= address and address + size <= high for low, high in owned):
                    yield f"{work.name} touches {size} bytes at {address:#x}, not in use"
            else:
                yield from _slots_in_use(view, work.name, address, size)
        copy = view.transfer_of.get(work.copy)
        if copy is not None:
            yield from _within_its_own(view, work, copy)


def _in_arena(view: View, address: int) -> bool:
    return view.arena_base <= address < view.arena_base + view.arena_bytes


def _slots_in_use(view: View, name: str, address: int, size: int) -> Iterator[str]:
    for slot in _slots_at(view, address, size):
        if code_at(view.host_states, slot) == host.FREE.code:
            yield f"{name} touches host slot {slot}, which is free"


def _slots_at(view: View, address: int, size: int) -> range:
    """The host slots in which so many bytes are."""
    first, block = address - view.host_address, max(1, view.block_bytes)
    return range(first // block, -(-(first + max(size, 1)) // block))


def _within_its_own(view: View, work: Work, copy: TransferFact) -> Iterator[str]:
    """The device copies what the books say: whole token rows between the host slots of the copy
    and its ranges, to the first of them if it loads."""
    own, slots = (copy.range,), frozenset(copy.slots)
    reads, writes = (copy.sources, own) if copy.loads else ((*own, *copy.sources), ())
    for runs, ranges, hosted in (
        (work.reads, reads, copy.loads), (work.writes, writes, not copy.loads),
    ):  # fmt: skip
        for address, size in runs:
            there = [fact for number in ranges if (fact := view.range_of.get(number))]
            inside = any(_inside(view, fact, address, size) for fact in there)
            if not inside and hosted and not _in_arena(view, address):
                inside = slots.issuperset(_slots_at(view, address, size))
            if not inside or size % max(1, view.row_bytes):
                yield f"{work.name} touches {size} bytes at {address:#x}, which are not its own"
    if sum(size for _, size in work.reads) != sum(size for _, size in work.writes):
        yield f"{work.name} reads {work.reads} and writes {work.writes}"
    yield from _brings_what_is_held(view, work, copy)


def _inside(view: View, fact: RangeFact, address: int, size: int) -> bool:
    """These are token rows that are mapped in the range."""
    frames, first = shared(view, fact) + len(fact.frame_ids), address - fact.base
    whole = not first % max(1, view.row_bytes)
    return whole and first >= 0 and first + size <= frames * view.frame_bytes


def _brings_what_is_held(view: View, work: Work, copy: TransferFact) -> Iterator[str]:
    """A load ends with the last token that is said to come."""
    seq, fact = view.by_uid.get(copy.uid), view.range_of.get(copy.range)
    if copy.loads and seq is not None and fact is not None and seq.transfer == copy.token:
        end = max((address + size for address, size in work.writes), default=0) - fact.base
        if end != seq.held_tokens * view.row_bytes:
            yield f"{work.name} ends {end} bytes into range {fact.number}, not at {seq.held_tokens}"


def copies_write_what_loads(view: View) -> Iterator[str]:
    """A copy in flight writes only pages that are being loaded, or memory that its sequence has
    left; and nothing that a span's frames are behind."""
    for work in view.ledger.work:
        copy = view.transfer_of.get(work.copy)
        fact = None if copy is None else view.range_of.get(copy.range)
        if copy is None or fact is None:
            continue
        for address, size in work.writes:
            if _in_arena(view, address):
                yield from _writes(view, work, fact, address - fact.base, size)


def _writes(view: View, work: Work, fact: RangeFact, first: int, size: int) -> Iterator[str]:
    owner = view.by_uid.get(fact.owner)
    if first < len(fact.aliases) * view.frame_bytes:
        yield f"{work.name} writes what range {fact.number} aliases"
    block = max(1, view.block_bytes)
    pages = range(first // block, -(-(first + size) // block))
    if owner is not None and any(code_at(owner.pages, at) not in _LOADING for at in pages):
        found = owner.pages[pages.start : pages.stop].hex()
        yield f"{work.name} writes pages {found} of sequence {owner.uid}"


def one_terminal(view: View) -> Iterator[str]:
    """The transfers in flight are the copies whose end the device has not reported."""
    ours = Counter(copy.token for copy in view.transfers)
    yield from (f"copy {token} is {n} transfers" for token, n in ours.items() if n > 1)
    lost = ours.keys() - view.ledger.copies
    yield from (f"copy {token} will never end here" for token in lost)
    strange = view.ledger.copies - ours.keys()
    yield from (f"copy {token} is nobody's transfer" for token in strange)
    for work in view.ledger.work:
        if work.copy is not None and work.copy not in view.ledger.copies:
            yield f"{work.name} is pending, and copy {work.copy} has ended"


def device_order(view: View) -> Iterator[str]:
    """Of two pending pieces of work that touch the same bytes, one writing, one comes first."""
    before: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for work in view.ledger.work:
        if work.number in before or max(work.waits, default=0) >= work.number:
            yield f"{work.name}, number {work.number}, waits for {work.waits}"
        direct = {*work.waits} | ({last[work.stream]} if work.stream in last else set())
        before[work.number] = direct.union(*(before.get(number, set()) for number in direct))
        last[work.stream] = work.number
    for late in view.ledger.work:
        for early in view.ledger.work:
            if early.number >= late.number or early.number in before[late.number]:
                continue
            if _conflict(early, late):
                yield f"{early.name} and {late.name} touch the same bytes and are not ordered"


def _conflict(one: Work, other: Work) -> bool:
    return (
        _overlap(one.writes, other.writes)
        or _overlap(one.writes, other.reads)
        or _overlap(one.reads, other.writes)
    )


def _overlap(ours: tuple[tuple[int, int], ...], theirs: tuple[tuple[int, int], ...]) -> bool:
    return any(a < b + m and b < a + n for a, n in ours for b, m in theirs)
