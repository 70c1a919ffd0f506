"""What a router knows that follows the events of one manager, and holds them to what they promise.

Strict on purpose: our events have no hole and no repetition (law 22), so what does not fit is a
fault of the manager that wrote it or of the network, and is said with batch, event and block. Other
engines promise less. Of theirs, `decode` alone is the part to use: vLLM lets a block leave before
those behind it, and tells one block once for each group of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import field, frozen

from kvstate.errors import TraceError
from kvstate.events import (
    LOST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Hash,
    Numbered,
    hash_text,
)
from kvstate.index import Index


@frozen
class Block:
    """What a replica knows of a block. `tiers` is not empty."""

    parent: Hash | None
    tokens: tuple[int, ...]
    tiers: frozenset[str]
    extra: tuple[Any, ...] = ()
    children: set[Hash] = field(factory=set, eq=False, repr=False)


class Replica:
    """Which digest has its bytes in which tier, as the events say.

    An event that does not fit is refused with TraceError, which says batch, event and block. Then
    the stream or its source is wrong, or a batch was missed: the replica knows what was before that
    event and takes no more, until a batch that begins with an AllBlocksCleared. Whatever was missed
    before that does not matter.
    """

    def __init__(self) -> None:
        self.blocks: dict[Hash, Block] = {}
        self.number = 0
        """Of the next batch."""
        self.refused: str | None = None
        """What did not fit."""
        self.behind = False
        """The publisher has lost something: ask it for a snapshot."""

    @classmethod
    def of(cls, index: Index) -> Replica:
        """What a replica of this index must know. Cost: everything."""
        replica = cls()
        for node in index.walk():
            parent = None if node.parent is None else index.digest(node.parent)
            tokens, tiers = tuple(index.tokens(node)), frozenset(node.told)
            if not tiers:
                continue
            known = Block(parent, tokens, tiers, index.extra(node))
            replica.blocks[index.digest(node)] = known
            if parent is not None:
                replica.blocks[parent].children.add(index.digest(node))
        return replica

    def apply(self, numbered: Numbered) -> None:
        """Take over a batch: the next one, or a later one that begins with an AllBlocksCleared.
        Raises TraceError."""
        if numbered.number >= self.number and _begins_anew(numbered):
            self.number, self.refused = numbered.number, None
        if self.refused is not None:
            raise TraceError(f"the replica refused before: {self.refused}")
        try:
            if numbered.number != self.number:
                raise TraceError(f"batch {numbered.number}, but {self.number} is next")
            for at, event in enumerate(numbered.batch.events):
                self._apply(event, f"batch {numbered.number}, event {at}")
        except TraceError as error:
            self.refused = str(error)
            raise
        self.number += 1

    def _apply(self, event: Event, place: str) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.behind = event.reason == LOST
            return
        if event.group_idx:
            raise TraceError(f"{place}: group {event.group_idx}; a replica follows group 0 alone")
        if isinstance(event, BlockStored):
            changes = self._stored(event, place)
        else:
            changes = self._removed(event, place)
        for digest, block in changes.items():
            self._settle(digest, block)

    def _settle(self, digest: Hash, block: Block | None) -> None:
        if block is None:
            parent = self.blocks.pop(digest).parent
        else:
            self.blocks[digest], parent = block, block.parent
        if parent is not None:
            children = self.blocks[parent].children
            (children.discard if block is None else children.add)(digest)

    def _stored(self, event: BlockStored, place: str) -> dict[Hash, Block | None]:
        """Each block as it is to be known, if the event fits."""
        size, parent = event.block_size, event.parent_block_hash
        count = len(event.block_hashes)
        extras = event.extra_keys or [None] * count
        if len(event.token_ids) != count * size or len(extras) != count or not count:
            told = f"{len(event.token_ids)} tokens and {len(extras)} extra keys"
            raise TraceError(f"{place}: {count} blocks of {size} tokens have {told}")
        if parent is not None and parent not in self.blocks:
            raise TraceError(f"{place}: the parent {hash_text(parent)} is unknown")
        changes: dict[Hash, Block | None] = {}
        for at, digest in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            told_block = Block(parent, tokens, frozenset((event.medium,)), extras[at] or ())
            known = None if digest in changes else self.blocks.get(digest)
            if digest in changes or (known is not None and event.medium in known.tiers):
                raise TraceError(f"{place}: {hash_text(digest)} is stored twice in {event.medium}")
            changes[digest] = _joined(known, told_block, f"{place}: {hash_text(digest)}")
            parent = digest
        return changes

    def _removed(self, event: BlockRemoved, place: str) -> dict[Hash, Block | None]:
        """Each block as it is to be known then, if the event fits; None if it is gone."""
        changes: dict[Hash, Block | None] = {}
        for digest in event.block_hashes:
            known = None if digest in changes else self.blocks.get(digest)
            if known is None or event.medium not in known.tiers:
                what = (
                    "has" if known is None else f"is in {', '.join(sorted(known.tiers))}, and has"
                )
                raise TraceError(f"{place}: {hash_text(digest)} {what} nothing in {event.medium}")
            tiers = known.tiers - {event.medium}
            left = {child for child in known.children if changes.get(child, known) is not None}
            if left and not tiers:
                raise TraceError(f"{place}: {hash_text(digest)} leaves before {len(left)} children")
            changes[digest] = _with(known, tiers) if tiers else None
        return changes


def _begins_anew(numbered: Numbered) -> bool:
    events = numbered.batch.events
    return bool(events) and isinstance(events[0], AllBlocksCleared)


def _with(block: Block, tiers: frozenset[str]) -> Block:
    return Block(block.parent, block.tokens, tiers, block.extra, block.children)


def _joined(known: Block | None, told: Block, place: str) -> Block:
    """A block in one more tier. It must be the same block."""
    if known is None:
        return told
    if (known.parent, known.tokens, known.extra) != (told.parent, told.tokens, told.extra):
        raise TraceError(f"{place} has another parent, other tokens or extra keys than before")
    return _with(known, known.tiers | told.tiers)


def replay(batches: Iterable[Numbered]) -> Replica:
    """The replica that batches from the first one make. Raises TraceError."""
    replica = Replica()
    for numbered in batches:
        replica.apply(numbered)
    return replica
