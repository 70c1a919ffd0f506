"""What a call may change, and what must be left at the end: laws that compare a view with the one
before the call, or that speak of what comes last.

Each function here is the law of its name in `laws.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import Final

from attrs import evolve

from kvstate.spec import frame, host, page, sequence
from kvstate.spec.facts import BlockFact, Failure, Ledger, SequenceFact, StepFact, View
from kvstate.spec.index_laws import FILLED, slot_state
from kvstate.spec.memory_laws import charged
from kvstate.spec.span_laws import Memory, remapped

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


def all_or_nothing(before: View, after: View, failed: Failure) -> Iterator[str]:
    """Sequences that completions did not touch are the same, and so is where their bytes are and
    who holds them.

    Parked, pooled and coming memory may have changed places, nobody's pages may be gone, and copies
    may have become aliases. A call that should not have been made has changed nothing, nor has it
    let completions in.
    """
    old = {seq.uid: seq for seq in before.sequences if seq.uid not in failed.touched}
    new = {seq.uid: seq for seq in after.sequences if seq.uid not in failed.touched}
    for uid in old.keys() ^ new.keys():
        yield f"sequence {uid} appeared or vanished in a call that failed"
    charged_before, charged_after = _memory(before), _memory(after)
    for uid in old.keys() & new.keys():
        if _same(old[uid]) != _same(new[uid]):
            yield f"sequence {uid} changed from {old[uid]} to {new[uid]}"
        if not remapped(charged_before.get(uid), charged_after.get(uid)):
            yield f"the memory of sequence {uid} changed"
    yield from _holds(before, after, failed.touched)
    if failed.illegal and not failed.lost:
        yield from _unchanged(before, after)


def _same(seq: SequenceFact) -> SequenceFact:
    """What a failed call must not change. Whose page is canonical may have changed: it may have
    evicted somebody else's; and how much of its margin is there."""
    return evolve(seq, pages=seq.pages.translate(_ROLES), blocks=(), ample=0)


def _memory(view: View) -> dict[int | None, Memory]:
    """How much of each sequence's memory is a span's, and the frames that it pays for, by uid."""
    return {
        fact.owner: (len(fact.aliases), fact.frame_ids[: charged(fact)]) for fact in view.ranges
    }


def _holds(before: View, after: View, touched: Container[int | None]) -> Iterator[str]:
    """A failed call leaves the holders of ranges and blocks as they were, but for what has ended;
    it may have begun to wait for the caller's event, and to copy out what is committed. Steps hold
    a range that their sequence has left because its copy failed."""
    left = {f"range {one.number}" for one in before.ranges if one.owner in touched}
    alive = {copy.holder for copy in after.transfers}
    alive |= {("write", copy.token) for copy in after.transfers if copy.keeps}
    alive |= {("load", copy.token) for copy in after.transfers if copy.onboards}
    alive |= {("steps", step.number) for step in after.steps if not step.landed}
    fresh = {
        copy.token for copy in after.transfers if copy.keeps or copy.holder[0] == "fence"
    } - before.transfer_of.keys()
    for name, was, now in (
        *((f"range {one.number}", one.holders, after.range_of.get(one.number))
          for one in before.ranges),
        *((f"block {one.ordinal}", one.holders, after.block_of.get(one.name))
          for one in before.blocks),
    ):  # fmt: skip
        if now is None or was == now.holders:
            continue
        for holder in (was - now.holders) & alive:
            yield f"{name} is not held by {holder} any more, after a call that failed"
        for holder in now.holders - was:
            if holder[1] not in fresh and not (holder[0] == "steps" and name in left):
                yield f"{name} is held by {holder} since a call that failed"


def _unchanged(before: View, after: View) -> Iterator[str]:
    """The books are what they were. The device may have gone on with what was issued before."""
    delivered = {copy.token for copy in before.transfers} - after.transfer_of.keys()
    if delivered:
        yield f"an illegal call has let the ends of copies {sorted(delivered)} in"
    elif evolve(before, ledger=after.ledger) != after:
        yield f"an illegal call has changed {_changes(before, after)}"


def _changes(before: View, after: View) -> str:
    names = (name for name in View.__annotations__ if name != "ledger")
    return ", ".join(n for n in names if getattr(before, n) != getattr(after, n))


def fresh_tables(before: View, after: View) -> Iterator[str]:
    """No call changes what a step in flight was issued with: where it begins and how many tokens it
    has, at which addresses, and of whom. A sequence that runs on stays where the step was told."""
    told = {step.number: step for step in before.steps}
    for step in after.steps:
        old = told.get(step.number)
        if old is None:
            continue
        if (old.issued, old.bases) != (step.issued, step.bases):
            yield f"step {step.number} was issued as {old}, and is {step} now"
        for row, _, _ in step.issued:
            was, now = before.by_row.get(row), after.by_row.get(row)
            if was is None or now is None or was.uid != now.uid:
                yield f"step {step.number} names row {row}, which has another sequence now"
        for seq, _, _ in after.living(step):
            was = before.by_uid.get(seq.uid)
            if was is not None and _runs_on(was, seq) and was.range != seq.range:
                yield f"sequence {seq.uid} has moved while step {step.number} writes to it"


def _runs_on(before: SequenceFact, after: SequenceFact) -> bool:
    return before.state == after.state == sequence.ACTIVE.code


def margins_are_spread(before: View, after: View) -> Iterator[str]:
    """A call maps few frames that nobody needs yet: one for each sequence that gets a range, and in
    a step one more than its tokens fill, where a sequence counts for two at the most."""
    told = {step.number for step in before.steps}
    most = sum(_pace(after, step) for step in after.steps if step.number not in told)
    ahead = 0
    for fact in (fact for fact in after.ranges if fact.owner is not None):
        was = before.range_of.get(fact.number)
        most += was is None or was.owner != fact.owner
        ahead += len({*fact.frame_ids[charged(fact) :]} - {*(was.frame_ids if was else ())})
    if ahead > most:
        yield f"{ahead} frames were mapped ahead in one call, which may map {most}"


def _pace(view: View, step: StepFact) -> int:
    """How many frames a step may map ahead."""
    filled = [(end - first) * view.row_bytes for _, first, end in step.issued]
    whole = sum(size >= view.frame_bytes for size in filled)
    rest = sum(size for size in filled if size < view.frame_bytes)
    return 2 * whole + rest // max(1, view.frame_bytes) + 1


def victims_are_leaves(before: View, after: View) -> Iterator[str]:
    """A block whose host copy was given up for room had no child on the host that stays there."""
    hosted = {block.name: block.slot for block in before.blocks if block.slot is not None}
    children = defaultdict[int | None, list[BlockFact]](list)
    for block in after.blocks:
        slot = hosted.get(block.name)  # one that was given up too may have another copy coming
        if slot is not None and block.slot == slot and slot_state(after, slot) in FILLED:
            children[block.parent].append(block)
    for block in before.blocks:
        if block.name in children and _was_evicted(block, before, after):
            left = children[block.name][0]
            yield f"block {block.ordinal} left the host, block {left.ordinal} behind it did not"


def _was_evicted(block: BlockFact, before: View, after: View) -> bool:
    """It had a copy on the host, and has none, though whoever has it on the GPU still has it."""
    now = after.block_of.get(block.name)
    if block.slot is None or slot_state(before, block.slot) not in FILLED:
        return False
    if now is None or now.slot is not None:
        return now is None
    owner = after.by_uid.get(now.owner)
    suspended = owner is not None and owner.state != sequence.ACTIVE.code
    there = (block.owner, block.span, block.range) == (now.owner, now.span, now.range)
    return there and not suspended


def clean_end(left: Ledger | None, ledger: Ledger, believed: Iterable[str] = ()) -> Iterator[str]:
    """The manager has given everything back itself, before the device was closed; no frame,
    mapping, reservation, host memory or pending work is left when it is, and no router believes
    that there is a block."""
    yield from believed
    if left is None:
        yield "the manager has given nothing back: it was left to the device"
    elif not left.empty:
        yield f"the manager has not given back {left}"
    if not ledger.empty:
        yield f"the device still holds {ledger}"


def all_at_rest(view: View) -> Iterator[str]:
    """With nothing in use and nothing kept, every frame is ABSENT and every slot FREE, all rows and
    all addresses are free, the index is empty, and the device has the two reservations."""
    for name in (
        "sequences", "ranges", "spans", "steps", "transfers", "blocks", "doubles", "readers",
        "pool_ids",
    ):  # fmt: skip
        left = getattr(view, name)
        if left:
            yield f"{len(left)} {name} are left: {left}"
    absent = view.frame_counts[frame.ABSENT.code] + view.frame_counts[frame.DENIED.code]
    if absent != view.budget_frames:
        yield f"{absent} of {view.budget_frames} frames are ABSENT"
    if view.host_states.strip(bytes([host.FREE.code])):
        yield f"host slots are not free: {view.host_states.hex()}"
    if sorted(view.free_rows) != list(range(view.rows)):
        yield f"the free rows are {view.free_rows}, of {view.rows}"
    whole = (view.arena_base, view.arena_bytes // view.frame_bytes)
    if view.free_addresses != (whole,):
        yield f"the free addresses are {view.free_addresses}, and not all: {whole}"
    held = view.ledger
    if any((held.frames, held.mappings, held.read_only, held.copies, held.work)):
        yield f"the device still holds {held}"
