"""What must hold of what can be found: the last copy of a block goes for a reason that is one, and
what is to have a copy on the host gets it.

Each function here is the law of its name in `laws.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvstate.spec import host, page, sequence
from kvstate.spec.facts import BlockFact, GivenUp, SequenceFact, View
from kvstate.spec.memory_laws import code_at

_CLOSED: Final = (sequence.CLOSING.code, None)
_GONE: Final = (*_CLOSED, sequence.DROPPED.code)
_LOADING: Final = (page.LOADING_COMMITTED.code, page.LOADING_PRIVATE.code)


def nothing_is_forgotten(before: View, after: View, lost: GivenUp) -> Iterator[str]:
    """A block that could be found can be found until its loss was told, with a reason that is seen
    to be so: what a call asked for, or that there was no room, or a copy that failed."""
    for block in before.blocks:
        why, stays = lost.why.get(block.name), block.name in after.block_of
        if block.epoch != before.epoch:
            continue
        if why is None and not stays:
            yield f"block {block.ordinal} is forgotten, and no reason was told"
        if why == "cleared" and after.epoch == before.epoch:
            yield f"block {block.ordinal} is said to be cleared, and nothing was"
        if why is not None and why != "cleared":
            if stays:
                yield f"block {block.ordinal} is said to be {why}, and is still there"
            elif not _is_so(before, after, block, lost):
                yield f"block {block.ordinal} is said to be {why}, and that is not so"


def _is_so(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """A block, or one before it that its owner has lost with it, went for the reason that is
    told."""
    holds = _REASONS.get(lost.why[block.name])
    return holds is not None and any(
        holds(before, after, one, lost) for one in _because(before, block, lost)
    )


def _because(before: View, block: BlockFact, lost: GivenUp) -> Iterator[BlockFact]:
    """A block, and those before it that its owner has lost for the same reason: what it has behind
    one of them goes with that."""
    yield block
    above = before.block_of.get(block.parent)
    while above is not None and block.owner is not None:
        if above.owner == block.owner and lost.why.get(above.name) == lost.why[block.name]:
            yield above
        above = before.block_of.get(above.parent)


def _evicted(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """Only the host had it, or parked memory behind what only the host had."""
    return block.slot is not None or block.range is not None


def _cut(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """The block before it went too, and not because it was cleared."""
    return block.parent is not None and lost.why.get(block.parent, "cleared") != "cleared"


def _closed(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """Its sequence was closed, and the host had no slot for it, or gave it to another block."""
    given = _bare(block, lost) or any(one.slot == block.slot for one in after.blocks)
    closed = any(state in _CLOSED for state in _states(after, block))
    return closed and given and not _slots_were_free(before, after)


def _slots_were_free(before: View, after: View) -> bool:
    """Slots were free all through a call: more than blocks gave up in it."""
    now = {name: block.slot for name, block in after.block_of.items()}
    slots = ((name, block.slot) for name, block in before.block_of.items())
    given_up = sum(slot is not None and now.get(name) != slot for name, slot in slots)
    return after.host_counts[host.FREE.code] > given_up


def _dropped(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """Its sequence was dropped while only the GPU had it."""
    fates = zip(_states(before, block), _states(after, block), strict=True)
    dropped = any(was == sequence.ACTIVE.code and now in _GONE for was, now in fates)
    return dropped and _bare(block, lost)


def _unarrived(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """Its sequence left while a copy was to bring it."""
    return any(code_at(seq.pages, block.ordinal) in _LOADING for seq in _owners(before, block))


def _rewound(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """Its sequence has taken its tokens back."""
    end = (block.ordinal + 1) * after.tokens_per_block
    return any(seq.known < end for seq in _owners(after, block))


def _failed(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """A copy that was to write it has ended, or none could be begun by a sequence that leaves."""
    ended = before.transfer_of.keys() - after.transfer_of.keys()
    named = (before.transfer_of[token] for token in ended)
    uids = _uids(block)
    written = any(block.name in copy.blocks or copy.uid in uids for copy in named)
    return written or any(state in _GONE for state in _states(after, block))


def _spilled(before: View, after: View, block: BlockFact, lost: GivenUp) -> bool:
    """A span or a parked range had it."""
    return block.span is not None or block.range is not None


_REASONS: Final = {
    "evicted": _evicted, "cut": _cut, "closed": _closed, "dropped": _dropped,
    "unarrived": _unarrived, "rewound": _rewound, "failed": _failed, "spilled": _spilled,
}  # fmt: skip
"""When a reason is one."""


def _uids(block: BlockFact) -> tuple[int | None, ...]:
    """Who had a block, and those in line: in the same call one may have come to have it, and then
    lost it."""
    return block.owner, *block.line


def _owners(view: View, block: BlockFact) -> Iterator[SequenceFact]:
    """Those of them that there are."""
    found = (view.by_uid.get(uid) for uid in _uids(block))
    return (seq for seq in found if seq is not None)


def _states(view: View, block: BlockFact) -> list[int | None]:
    """What has become of them; None of one that is gone."""
    found = (view.by_uid.get(uid) for uid in _uids(block))
    return [None if seq is None else seq.state for seq in found]


def _bare(block: BlockFact, lost: GivenUp) -> bool:
    """The host did not have it, or a copy has failed."""
    return block.slot is None or lost.failed


def what_stays_is_readable(before: View, after: View, lost: GivenUp) -> Iterator[str]:
    """A sequence that is closed leaves what could be read to others that can read it, or to the
    host while that has free slots."""
    if lost.failed or not _slots_were_free(before, after):
        return
    for block in after.blocks:
        was = before.block_of.get(block.name)
        if was is None or was.epoch < before.epoch or not _readable(before, was):
            continue
        if _closes(before, after, was.owner) and not (
            _readable(after, block) or block.slot is not None
        ):
            yield f"block {block.ordinal} could be read, and goes to one that cannot read it"


def _closes(before: View, after: View, uid: int | None) -> bool:
    """A sequence that had memory on the GPU, and no copy under way, is closed."""
    seq = before.by_uid.get(uid)
    if seq is None or seq.state != sequence.ACTIVE.code or seq.transfer is not None:
        return False
    left = after.by_uid.get(uid)
    return left is None or left.state == sequence.CLOSING.code


def copies_go_out(before: View, after: View) -> Iterator[str]:
    """Of what could be copied out before a poll nothing waits after it while slots are free: more
    were than blocks have got in it."""
    had = {name for name, block in before.block_of.items() if block.slot is not None}
    got = sum(block.slot is not None and block.name not in had for block in after.blocks)
    if not before.mirrors or before.host_counts[host.FREE.code] <= got:
        return
    for block in after.blocks:
        waited = before.block_of.get(block.name)
        if waited is not None and _could_go(before, waited) and _could_go(after, block):
            yield f"block {block.ordinal} waits for a copy, and a slot is free"


def _could_go(view: View, block: BlockFact) -> bool:
    """A block waits that can be read, behind one that the host has."""
    above = view.block_of.get(block.parent)
    follows = block.parent is None or (above is not None and above.slot is not None)
    return block.waits and follows and _readable(view, block)


def copies_are_awaited(view: View) -> Iterator[str]:
    """Where all canonical pages are to have a copy on the host, one that can be read and has none
    waits for it. Nothing else waits, and no block is of weights to come."""
    for block in view.blocks:
        present = block.epoch == view.epoch
        if block.epoch > view.epoch:
            yield f"block {block.ordinal} is of epoch {block.epoch}, the weights of {view.epoch}"
        if block.waits and not (view.mirrors and present):
            yield f"block {block.ordinal} waits for a copy that is not to be made"
        wanted = view.mirrors and present and block.slot is None and _readable(view, block)
        if wanted and not block.waits:
            yield f"only the GPU has block {block.ordinal}, and it waits for no copy"


def _readable(view: View, block: BlockFact) -> bool:
    """The canonical page of a block can be read on the GPU."""
    owner = view.by_uid.get(block.owner)
    if owner is None:
        return block.span is not None or block.range is not None
    committed = code_at(owner.pages, block.ordinal) == page.COMMITTED.code
    return committed and owner.state == sequence.ACTIVE.code
