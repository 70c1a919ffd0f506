"""The laws: what must hold whatever happens.

A row cannot be checked by the row. A law looks at the whole and knows no transition: it compares
the manager's books with one another and with the device's own ledger. Numbers are those of the
design; a number that is missing here belongs to a feature that is not here yet.

An *always* law holds after every call. A *call* law compares before and after a call, a *change*
law before and after one that failed. A *refusal* law says when a capacity error is right. A *fair*
law says how far an engine comes that gives everybody a turn. An *end* law holds after the last
close.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import pairwise
from typing import Any, Final

from attrs import evolve, frozen

from kvstate.spec import frame, host, page, sequence
from kvstate.spec import range as range_
from kvstate.spec.facts import (
    FairRun,
    Ledger,
    RangeFact,
    SequenceFact,
    View,
    Work,
)
from kvstate.spec.index_laws import (
    NOBODYS,
    hits_stay,
    index_coherence,
    isolation,
    publish_after_write,
    slot_name,
    tier_order,
    whole_keys,
)
from kvstate.spec.span_laws import (
    Memory,
    aliases_are_read_only,
    aliases_hold,
    mapped,
    remapped,
    shared,
    spare_spans,
)

INT31: Final = (1 << 31) - 1
_ROLES: Final = bytes.maketrans(
    bytes(
        state.code
        for state in (page.PRIVATE, page.ALIASED, page.LOADING_PRIVATE, page.HOST_HELD_PRIVATE)
    ),
    bytes(
        state.code
        for state in (
            page.COMMITTED, page.COMMITTED, page.LOADING_COMMITTED, page.HOST_HELD_COMMITTED,
        )
    ),
)  # fmt: skip
"""All are full and read-only."""


@frozen
class Law:
    """A named predicate: `check` yields one line for each violation."""

    number: int
    name: str
    kind: str
    why: str
    check: Callable[..., Iterable[str]]

    def violations(self, *facts: Any) -> list[str]:
        """What is wrong, each with the law's number and name."""
        return [f"law {self.number} ({self.name}): {line}" for line in self.check(*facts)]


LAWS: Final[list[Law]] = []
"""Every law, in the order of this file."""


def _law(number: int, name: str, kind: str, why: str) -> Callable[[Any], Any]:
    def register(check: Callable[..., Iterable[str]]) -> Callable[..., Iterable[str]]:
        LAWS.append(Law(number, name, kind, why, check))
        return check

    return register


@cache
def laws(kind: str) -> tuple[Law, ...]:
    """The laws of one kind: `always`, `call`, `change`, `refusal`, `fair` or `end`."""
    return tuple(law for law in LAWS if law.kind == kind)


_LOADING: Final = bytes(
    state.code for state in (page.LOADING_ACTIVE, page.LOADING_COMMITTED, page.LOADING_PRIVATE)
)
_READABLE: Final = frozenset(state.code for state in page.PAGE.states if state.readable)
_WRITABLE: Final = frozenset(state.code for state in page.PAGE.states if state.writable)
_FULL: Final = frozenset(
    state.code
    for state in (
        page.COMMITTED, page.PRIVATE, page.ALIASED, page.LOADING_COMMITTED, page.LOADING_PRIVATE,
        page.HOST_HELD_COMMITTED, page.HOST_HELD_PRIVATE,
    )
)  # fmt: skip
_TAIL: Final = bytes([frame.PARKED.code])
_SHARED: Final = bytes([frame.LIVE_SPAN.code])
_CHARGED: Final = (frame.MAPPED.code, frame.LIVE_SPAN.code)
_HELD: Final = bytes(
    state.code
    for state in (page.HOST_HELD_ACTIVE, page.HOST_HELD_COMMITTED, page.HOST_HELD_PRIVATE)
)


@_law(1, "conservation", "always", "every frame and host slot is in exactly one place")
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
    absent = view.frame_counts[frame.ABSENT.code]
    if absent + len(ids) != view.budget_frames:
        yield f"{len(ids)} frames and {absent} absent ones are not {view.budget_frames}"
    yield from _slots_have_one_user(view)


def _slots_have_one_user(view: View) -> Iterator[str]:
    users = Counter(block.slot for block in view.blocks if block.slot is not None)
    for slot in users:
        if view.host_states[slot] not in NOBODYS:
            yield f"host slot {slot} is {slot_name(view, slot)}, and in the index"
    for seq in view.sequences:
        users.update(seq.slots)
    draining = Counter(
        slot
        for copy in view.transfers
        for slot in copy.slots
        if view.host_states[slot] == host.DRAINING.code
    )
    for slot, code in enumerate(view.host_states):
        wanted = 0 if code in (host.FREE.code, host.DRAINING.code) else 1
        if users[slot] != wanted:
            yield f"host slot {slot} is {host.HOST.states[code]} and has {users[slot]} users"
        if bool(draining[slot]) != (code == host.DRAINING.code):
            yield f"host slot {slot} is {host.HOST.states[code]}, drained by {draining[slot]}"


@_law(2, "named holders", "always", "a hold has a living holder, and is released by it")
def named_holders(view: View) -> Iterator[str]:
    """A fence waits for something that is in flight; what is in flight holds its range."""
    living = {("transfer", copy.token) for copy in view.transfers}
    living |= {("fence", copy.token) for copy in view.transfers}
    living |= {("steps", step.number) for step in view.steps if not step.landed}
    held = {fact.number: fact.holders for fact in view.ranges}
    for fact in view.ranges:
        yield from (f"range {fact.number} is held by {h}: gone" for h in fact.holders - living)
        fenced = fact.state == range_.FENCED.code
        if fenced and not fact.holders:
            yield f"range {fact.number} is FENCED and waits for nothing"
        if not fenced and any(kind == "steps" for kind, _ in fact.holders):
            yield f"range {fact.number} is not FENCED, but held by steps"
    for copy in view.transfers:
        moves = copy.outward or copy.inward or copy.keeps or copy.onboards
        kind = "transfer" if moves else "fence"
        for number in (copy.range, *copy.sources):
            if (kind, copy.token) not in held.get(number, ()):
                yield f"transfer {copy.token} does not hold range {number}"
    yield from aliases_hold(view)
    naming = Counter(row for step in view.steps for row in step.rows)
    for seq in view.sequences:
        if seq.steps != naming[seq.row]:
            yield f"sequence {seq.uid} counts {seq.steps} steps, {naming[seq.row]} name it"


@_law(3, "no reuse in flight", "always", "what issued work names is nobody else's")
def no_reuse_in_flight(view: View) -> Iterator[str]:
    """Pending work touches only mapped memory of ranges in use, and slots that are not free."""
    spans = {one.number: one for one in view.spans}
    owned = []
    for fact in view.ranges:
        in_use = fact.state in (range_.RESERVED.code, range_.FENCED.code)
        frames = shared(fact, spans) + (len(fact.frame_ids) if in_use else 0)
        if in_use or fact.home_of is not None:
            owned.append((fact.base, fact.base + frames * view.frame_bytes))
    arena_end = view.arena_base + view.arena_bytes
    for work in view.ledger.work:
        for address, size in work.reads + work.writes:
            if view.arena_base <= address < arena_end:
                if not any(low <= address and address + size <= high for low, high in owned):
                    yield f"{work.name} touches {size} bytes at {address:#x}, not in use"
            else:
                yield from _slots_in_use(view, work.name, address, size)


def _slots_in_use(view: View, name: str, address: int, size: int) -> Iterator[str]:
    first = (address - view.host_address) // view.block_bytes
    last = (address + max(size, 1) - 1 - view.host_address) // view.block_bytes
    for slot in range(max(first, 0), min(last + 1, len(view.host_states))):
        if view.host_states[slot] == host.FREE.code:
            yield f"{name} touches host slot {slot}, which is free"


_law(4, "publish after write", "always", "what can be found is written")(publish_after_write)
_law(5, "index coherence", "always", "what the index names still has those bytes")(index_coherence)
_law(6, "whole keys", "always", "a block is found by equal inputs only")(whole_keys)
_law(7, "a hit stays", "always", "what a copy reads is held until the copy has ended")(hits_stay)


@_law(8, "all or nothing", "change", "a failed call changes no sequence")
def all_or_nothing(before: View, after: View, touched: frozenset[int]) -> Iterator[str]:
    """Sequences that completions did not touch are the same, and so is where their bytes are.

    Parked, pooled and coming memory may have changed places, nobody's pages may be gone, and copies
    may have become aliases.
    """
    old = {seq.uid: seq for seq in before.sequences if seq.uid not in touched}
    new = {seq.uid: seq for seq in after.sequences if seq.uid not in touched}
    for uid in old.keys() ^ new.keys():
        yield f"sequence {uid} appeared or vanished in a call that failed"
    charged_before, charged_after = _memory(before), _memory(after)
    for uid in old.keys() & new.keys():
        if _same(old[uid]) != _same(new[uid]):
            yield f"sequence {uid} changed from {old[uid]} to {new[uid]}"
        if not remapped(charged_before.get(uid), charged_after.get(uid)):
            yield f"the memory of sequence {uid} changed"


def _same(seq: SequenceFact) -> SequenceFact:
    """What a failed call must not change. Whose page is canonical may have changed: it may have
    evicted somebody else's."""
    return evolve(seq, pages=seq.pages.translate(_ROLES), blocks=())


def _charged(fact: RangeFact) -> int:
    """The frames of a range that its sequence pays for."""
    return sum(fact.frame_states.count(code) for code in _CHARGED)


def _memory(view: View) -> dict[int | None, Memory]:
    """How much of each sequence's memory is a span's, and the frames that it pays for, by uid."""
    return {
        fact.owner: (len(fact.aliases), fact.frame_ids[: _charged(fact)]) for fact in view.ranges
    }


@_law(9, "a failed load is unreadable", "always", "pages load while a copy fills them")
def loading_pages(view: View) -> Iterator[str]:
    """A page is LOADING exactly while a copy of this life fills it; else what is there is
    readable."""
    filling = {c.uid for c in view.transfers if (c.inward or c.onboards) and c.current}
    for seq in view.sequences:
        loading = sum(seq.pages.count(code) for code in _LOADING)
        if bool(loading) != (seq.uid in filling):
            yield f"sequence {seq.uid} has {loading} pages loading; filled: {seq.uid in filling}"
        if seq.state == sequence.ACTIVE.code and not loading:
            first = _first_without(_READABLE, seq, 0, seq.settled, view.tokens_per_block)
            if first is not None:
                yield f"sequence {seq.uid} has settled tokens in page {first}, which is unreadable"


def _first_without(
    codes: frozenset[int], seq: SequenceFact, start: int, end: int, block: int
) -> int | None:
    """The first page with tokens from `start` up to `end` whose state is none of these."""
    pages = range(start // block, -(-end // block) if end > start else 0)
    return next((at for at in pages if seq.pages[at] not in codes), None)


@_law(10, "one terminal", "always", "what is in flight here is in flight there")
def one_terminal(view: View) -> Iterator[str]:
    """The transfers in flight are the copies whose end the device has not reported."""
    ours = {copy.token for copy in view.transfers}
    yield from (f"copy {token} will never end here" for token in ours - view.ledger.copies)
    yield from (f"copy {token} is nobody's transfer" for token in view.ledger.copies - ours)


@_law(11, "leaving releases", "always", "what a sequence has follows from its state")
def leaving_releases(view: View) -> Iterator[str]:
    """Only an ACTIVE sequence has a range, only one with pages on the host has slots."""
    owners = Counter(seq.range for seq in view.sequences if seq.range is not None)
    onboarding = {copy.uid for copy in view.transfers if copy.onboards and copy.current}
    for seq in view.sequences:
        active = seq.state == sequence.ACTIVE.code
        if active != (seq.range is not None):
            yield f"sequence {seq.uid} is {_name(seq)} and has range {seq.range}"
        own = _HELD if seq.uid in onboarding else _HELD + _LOADING
        on_host = sum(seq.pages.count(code) for code in own)
        if len(seq.slots) != on_host:
            yield f"sequence {seq.uid} has {len(seq.slots)} slots and {on_host} pages on the host"
        if not active and seq.capacity:
            yield f"sequence {seq.uid} is {_name(seq)} and has capacity {seq.capacity}"
        if seq.state == sequence.CLOSED.code:
            yield f"sequence {seq.uid} is CLOSED and still in the books"
    for fact in view.ranges:
        reserved = fact.state == range_.RESERVED.code
        if owners[fact.number] != reserved or (fact.owner is not None) != reserved:
            yield f"range {fact.number} has {owners[fact.number]} owners"
        if fact.state == range_.VACANT.code:
            yield f"range {fact.number} is VACANT and still in the books"
    rows = [seq.row for seq in view.sequences]
    if sorted((*rows, *view.free_rows)) != list(range(view.rows)):
        yield f"the rows in use {rows} and the free ones {view.free_rows} are not {view.rows}"


@_law(12, "progress", "refusal", "nothing is refused that free or reclaimable memory allows")
def progress(view: View, error: Any) -> Iterator[str]:
    """After a refusal, what is free, reclaimable and coming together is still too little."""
    place = getattr(error, "place", "host")
    if place == "budget":
        codes = (frame.ABSENT, frame.POOLED, frame.PARKED, frame.COMING)
        kept = getattr(error, "protected", 0)
        had = sum(view.frame_counts[state.code] for state in codes) + spare_spans(view, kept)
        if kept not in (0, view.protected_frames):
            yield f"{kept} frames were protected, not {view.protected_frames}"
        if error.needed <= had:
            yield f"refused {error.needed} frames with {had} free, parked, coming or in spans"
    if place == "reserve":
        codes = (frame.ABSENT, frame.POOLED, frame.PARKED, frame.COMING)
        had = sum(view.frame_counts[state.code] for state in codes)
        promised = sum(seq.promised for seq in view.sequences)
        if error.needed <= had - promised:
            yield f"refused {error.needed} of {had} frames, {promised} of which are promised"
    if place == "host" and hasattr(error, "needed"):
        states = (
            host.FREE, host.DRAINING, host.STALE, host.STALE_HELD, host.FILLING, host.MIRROR,
            host.MIRRORING,
        )  # fmt: skip
        had = sum(view.host_counts[state.code] for state in states)
        if error.needed <= had:
            yield f"refused {error.needed} host slots with {had} free, draining or nobody's"
    if place in ("gate", "reserve") and not any(
        seq.state == sequence.ACTIVE.code for seq in view.sequences
    ):
        yield f"the {place} check refused {error.needed} frames although nothing runs"


@_law(12, "promises", "always", "what was promised can be had")
def promises_hold(view: View) -> Iterator[str]:
    """What running sequences may still ask for is free, parked, coming or in spans that can go."""
    codes = (frame.ABSENT, frame.POOLED, frame.PARKED, frame.COMING)
    running = sum(seq.state == sequence.ACTIVE.code for seq in view.sequences)
    left = view.protected_frames if running > 1 else 0
    had = sum(view.frame_counts[state.code] for state in codes) + spare_spans(view, left)
    promised = sum(seq.promised for seq in view.sequences)
    if promised > had:
        yield f"{promised} frames were promised, {had} can be had"


@_law(12, "remaps", "always", "whoever has copies of what a span has can be asked for them")
def remaps_are_known(view: View) -> Iterator[str]:
    """The sequences that a reclaim asks for copies of spans are all that have some."""
    for uid in view.unasked:
        yield f"sequence {uid} has copies of a span's blocks, and no reclaim would ask it"


@_law(12, "livelock", "fair", "nobody goes and comes again without a token computed in between")
def nobody_circles(run: FairRun) -> Iterator[str]:
    """A sequence that is resumed gets to compute, or somebody else does, before it must go."""
    for uid, times in run.resumed.items():
        if times > run.most_resumes:
            yield f"sequence {uid} was resumed {times} times, and nobody has computed a token"


@_law(12, "starvation", "fair", "whoever was admitted can be finished, whatever state it is in")
def all_finish(run: FairRun) -> Iterator[str]:
    """An engine that serves the oldest first, and makes room with the youngest, ends with all."""
    for seq in run.left:
        refusals = ", ".join(f"{place} {times}" for place, times in seq.refusals.items())
        yield (
            f"sequence {seq.uid} has {seq.settled} of {seq.max_tokens} tokens after {run.calls} "
            f"calls, of {run.most_calls} that may be needed; refused: {refusals or 'nothing'}"
        )


@_law(14, "groups agree", "always", "a known prefix is there in every layer group, in common units")
def groups_agree(view: View) -> Iterator[str]:
    """There is one group so far. Each block whose tokens are known is readable in it, or will be
    once copies are done; and what is mapped of others is whole units of frames and blocks."""
    unit = view.align_bytes // view.frame_bytes
    for fact in view.ranges:
        if len(fact.aliases) % unit:
            yield f"range {fact.number} maps {len(fact.aliases)} frames, no multiple of {unit}"
    for seq in view.sequences:
        lives = seq.state in (sequence.ACTIVE.code, sequence.SUSPENDED.code)
        for at in range(seq.known // view.tokens_per_block if lives else 0):
            if seq.pages[at] not in _FULL:
                state = page.PAGE.states[seq.pages[at]]
                yield f"sequence {seq.uid} knows block {at}, whose page is {state}"


@_law(16, "counters are sums", "always", "a number beside a state agrees with the states")
def counters_are_sums(view: View) -> Iterator[str]:
    """Every count is what counting again gives, and none is negative."""
    states = view.pool_states + b"".join(fact.frame_states for fact in view.ranges)
    states += b"".join(one.frame_states for one in view.spans)
    for state in frame.FRAME.states[1:]:
        if view.frame_counts[state.code] != states.count(state.code):
            yield f"{view.frame_counts[state.code]} frames are said to be {state}"
    for state in host.HOST.states:
        if view.host_counts[state.code] != view.host_states.count(state.code):
            yield f"{view.host_counts[state.code]} host slots are said to be {state}"
    if min(view.frame_counts + view.host_counts) < 0:
        yield f"a count is negative: {view.frame_counts}, {view.host_counts}"
    mapped = {fact.number: len(fact.aliases) + _charged(fact) for fact in view.ranges}
    for seq in view.sequences:
        if seq.range is not None:
            tokens = mapped[seq.range] * view.frame_bytes // view.row_bytes
            if seq.capacity != min(tokens, seq.max_tokens):
                yield f"sequence {seq.uid} has capacity {seq.capacity}, its frames hold {tokens}"


@_law(17, "device order", "always", "what conflicts is ordered by a stream or an event")
def device_order(view: View) -> Iterator[str]:
    """Of two pending pieces of work that touch the same bytes, one writing, one comes first."""
    before: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    for work in view.ledger.work:
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


@_law(18, "fresh tables", "call", "what a step reads is as of its issue")
def fresh_tables(before: View, after: View) -> Iterator[str]:
    """No call changes where a step in flight begins, or how many tokens it has."""
    told = {step.number: step.issued for step in before.steps}
    for step in after.steps:
        if told.get(step.number, step.issued) != step.issued:
            yield f"step {step.number} was issued as {told[step.number]}, and is {step.issued} now"


@_law(19, "contiguity", "always", "a range is mapped without holes, and slots count up")
def contiguity(view: View) -> Iterator[str]:
    """The device maps exactly the frames that the books have, in order, and nothing beyond."""
    expected, spans = {}, {one.number: one for one in view.spans}
    ranges = {fact.number: fact for fact in view.ranges}
    for fact in view.ranges:
        if (fact.base - view.arena_base) % view.align_bytes:
            yield f"range {fact.number} does not begin at a slot and a frame"
        if len(fact.frame_ids) != len(fact.frame_states):
            yield f"range {fact.number} has frames without a state"
        names = mapped(fact, ranges, spans)
        if len(names) > fact.extent_frames:
            yield f"range {fact.number} is mapped beyond its extent"
        charged = fact.frame_states.rstrip(_TAIL).lstrip(_SHARED)
        if _TAIL in charged or _SHARED in charged:
            yield f"range {fact.number} is charged out of order: {fact.frame_states.hex()}"
        for at, name in enumerate(names):
            expected[fact.base + at * view.frame_bytes] = name
    if expected != view.ledger.mappings:
        differ = expected.items() ^ view.ledger.mappings.items()
        yield f"books and device map differently at {sorted(hex(place) for place, _ in differ)}"
    if view.arena_bytes // view.block_bytes > INT31:
        yield "slots do not fit in 31 bits"
    yield from _disjoint(view)
    for seq in view.sequences:
        yield from _pages_in_order(view, seq)


def _disjoint(view: View) -> Iterator[str]:
    facts = sorted(view.ranges, key=lambda fact: fact.base)
    for fact, following in pairwise(facts):
        frames = fact.extent_frames + view.guard_frames
        if fact.base + frames * view.frame_bytes > following.base:
            yield f"ranges {fact.number} and {following.number} overlap, or have no gap between"


def _pages_in_order(view: View, seq: SequenceFact) -> Iterator[str]:
    """Pages follow from the lengths: committed ones, then open ones, then none."""
    block = view.tokens_per_block
    full = seq.known // block
    if not 0 <= seq.known <= seq.settled <= seq.scheduled <= seq.max_tokens:
        yield f"sequence {seq.uid} has lengths out of order: {seq}"
    if seq.state == sequence.ACTIVE.code:
        if seq.scheduled > seq.capacity:
            yield f"sequence {seq.uid} is scheduled beyond its capacity"
        if seq.transfer is None:
            opened = -(-seq.capacity // block)
            names = (page.COMMITTED, full), (page.ACTIVE, opened - full)
            yield from _expect(seq, names)
    elif seq.state == sequence.SUSPENDED.code:
        held = -(-seq.held_tokens // block)
        names = (page.HOST_HELD_COMMITTED, full), (page.HOST_HELD_ACTIVE, held - full)
        yield from _expect(seq, names)


def _expect(seq: SequenceFact, runs: tuple[tuple[Any, int], ...]) -> Iterator[str]:
    expected = b"".join(bytes([state.code]) * count for state, count in runs)
    if seq.pages.translate(_ROLES).rstrip(b"\0") != expected.rstrip(b"\0"):
        yield f"sequence {seq.uid} has pages {seq.pages.hex()}, its lengths say {expected.hex()}"


@_law(20, "shared is immutable", "always", "a committed page has no writer")
def no_writer(view: View) -> Iterator[str]:
    """A step in flight writes only into pages that may be written, or are still being loaded.
    Aliases are mapped so that nobody can write there."""
    yield from aliases_are_read_only(view)
    rows = {seq.row: seq for seq in view.sequences if seq.state == sequence.ACTIVE.code}
    may = _WRITABLE | {page.LOADING_ACTIVE.code}
    for step in view.steps:
        for row, start, end in step.writes:
            seq = rows.get(row)
            if seq is None or end > seq.capacity:
                continue
            first = _first_without(may, seq, start, end, view.tokens_per_block)
            if first is not None:
                state = page.PAGE.states[seq.pages[first]]
                yield f"step {step.number} writes page {first} of sequence {seq.uid}: {state}"


_law(21, "tier order", "always", "whoever has a block has the block before it")(tier_order)


@_law(22, "events replay", "always", "replaying the emitted events rebuilds the index")
def events_replay(view: View) -> Iterator[str]:
    """A replica that has heard everything knows which tier has which block, and nothing else."""
    yield from (f"the events: {fault}" for fault in view.event_faults)


_law(23, "isolation", "always", "nothing is found across tenants")(isolation)


@_law(24, "clean end", "end", "after the last close nothing is held")
def clean_end(ledger: Ledger) -> Iterator[str]:
    """No frame, mapping, reservation, host memory or pending work is left."""
    if not ledger.empty:
        yield f"the device still holds {ledger}"


def _name(seq: SequenceFact) -> str:
    return sequence.SEQUENCE.states[seq.state].name
