"""What the prefix index tells the outside, and a replica that is rebuilt from it.

Routers that send a request to where its prefix is already cached follow the events of an engine.
The shape is vLLM's, field by field and position by position, since that is what they read: arrays,
tagged with the name of the event, in batches `[time, events, rank]`. Numbers of batches travel in a
frame of their own, as there. Consumers that know only that shape can read these.

What one can rely on (law 22): a listener that has every batch from the first one knows exactly
which digest has its bytes in which tier. A block is told before its children and leaves after them,
so no prefix of the events has a hole either. `Replica` holds a stream to that.

Salts are not told: whoever reads events must not learn what keeps tenants apart. They and the
weights epoch are in the digests.

Rejected: fields of our own behind theirs (readers in other languages refuse a longer array, or read
a newer field of vLLM's there); a wall clock (no decision and no test may depend on one).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated, Final, NamedTuple

import msgspec
from attrs import field, frozen
from msgspec import Meta, Struct

from kvstate.blocks import Medium, Node
from kvstate.errors import TraceError
from kvstate.handles import Handle
from kvstate.index import Index
from kvstate.keys import Adapter
from kvstate.life import Life

Number = Annotated[int, Meta(ge=0)]
NUMBER_BYTES: Final = 8


class BlockStored(Struct, array_like=True, tag=True):
    """A tier has these blocks of one chain now. `token_ids` are those of all of them, in order."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """The block before the first of them; None if that is the first of its prefix."""
    token_ids: list[int]
    block_size: Annotated[int, Meta(ge=1)]
    """In tokens."""
    lora_id: int | None
    """The adapter, if it is a number."""
    medium: Medium
    lora_name: str | None
    """The adapter, if it is a text; or bytes, in hexadecimal. Digests tell the two apart."""
    extra_keys: list[tuple[bytes, ...] | None] | None = None
    """The extra keys of each of them; None if none has any."""


class BlockRemoved(Struct, array_like=True, tag=True):
    """A tier does not have these blocks any more."""

    block_hashes: list[bytes]
    medium: Medium


class AllBlocksCleared(Struct, array_like=True, tag=True):
    """No tier has any block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, array_like=True):
    """Events in the order in which they happened. `ts` is whatever time the caller said; its
    number, if none."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Numbered(NamedTuple):
    """A batch and its number: 0, 1, 2 and so on, without gaps."""

    number: int
    batch: EventBatch


_encoder: Final = msgspec.msgpack.Encoder()
_batch: Final = msgspec.msgpack.Decoder(EventBatch)


def encode(numbered: Numbered) -> tuple[bytes, bytes]:
    """The two frames of a batch: its number, 8 bytes big-endian, and the batch as msgpack."""
    return numbered.number.to_bytes(NUMBER_BYTES, "big"), _encoder.encode(numbered.batch)


def decode(number: bytes, batch: bytes) -> Numbered:
    """A batch from its frames, checked field by field. Raises TraceError."""
    if len(number) != NUMBER_BYTES:
        raise TraceError(f"the number of a batch has {len(number)} bytes, not {NUMBER_BYTES}")
    found = int.from_bytes(number, "big")
    try:
        return Numbered(found, _batch.decode(batch))
    except msgspec.DecodeError as error:
        raise TraceError(f"batch {found}: {error}") from error


class Publisher(Handle):
    """Makes events of what an index changes. It listens to the index, and first tells what is there
    already.

    Stores that follow each other down a chain are one event; so are removals from one tier. Costs
    the digest of each block, once, whether anybody drains or not.

    It belongs to the thread of its manager. Batches that were drained change no more: encode and
    send them on any thread.
    """

    instead = "make another one with `events`"
    life: Life | None = None
    """Of the manager, if it is one's: who may call, and when."""

    def __init__(
        self, index: Index, rank: int | None = None, most_events: int | None = None
    ) -> None:
        self.index, self.rank, self.most_events = index, rank, most_events
        self.number = 0
        """Of the next batch."""
        self._events: list[Event] = []
        index.listen(self)

    def close(self) -> None:
        """Hear nothing more. What was not drained can still be."""
        self._check("close")
        if self in self.index.listeners:
            self.index.listeners.remove(self)

    def stored(self, node: Node, medium: Medium) -> None:
        """See `Listener.stored`."""
        index, last = self.index, self._events[-1] if self._events else None
        parent = None if node.parent is None else index.digest(node.parent)
        if not _continues(last, parent, medium):
            assert node.root is not None
            lora = _lora(node.root.identity.adapter)
            last = BlockStored([], parent, [], index.block_tokens, lora[0], medium, lora[1])
            self._events.append(last)
        assert isinstance(last, BlockStored)
        extra = index.extra(node) or None
        if extra or last.extra_keys is not None:
            last.extra_keys = [*(last.extra_keys or [None] * len(last.block_hashes)), extra]
        last.block_hashes.append(index.digest(node))
        last.token_ids += index.tokens(node)

    def removed(self, node: Node, medium: Medium) -> None:
        """See `Listener.removed`."""
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockRemoved) or last.medium != medium:
            last = BlockRemoved([], medium)
            self._events.append(last)
        last.block_hashes.append(self.index.digest(node))

    def cleared(self) -> None:
        """See `Listener.cleared`."""
        self._events.append(AllBlocksCleared())

    def drain(self, ts: float | None = None) -> list[Numbered]:
        """The batches since the last drain: none if nothing happened; several if there are more
        than `most_events` events. `ts` is the caller's time."""
        self._check("drain")
        events, self._events = self._events, []
        size, batches = self.most_events or max(1, len(events)), []
        for at in range(0, len(events), size):
            time = float(self.number) if ts is None else ts
            batch = EventBatch(time, events[at : at + size], self.rank)
            batches.append(Numbered(self.number, batch))
            self.number += 1
        return batches

    def _check(self, call: str) -> None:
        if self.life is not None:
            self.life.look(call, sys._getframe(2))


def _continues(last: Event | None, parent: bytes | None, medium: Medium) -> bool:
    """The next block of the chain that the last event stored, in the same tier."""
    return (
        isinstance(last, BlockStored) and last.medium == medium and last.block_hashes[-1] == parent
    )


def _lora(adapter: Adapter) -> tuple[int | None, str | None]:
    if isinstance(adapter, int):
        return adapter, None
    return None, adapter.hex() if isinstance(adapter, bytes) else adapter


@frozen
class Block:
    """What a replica knows of a block. `tiers` is not empty."""

    parent: bytes | None
    tokens: tuple[int, ...]
    tiers: frozenset[Medium]
    extra: tuple[bytes, ...] = ()
    children: set[bytes] = field(factory=set, eq=False, repr=False)


class Replica:
    """Which digest has its bytes in which tier, as the events say.

    An event that does not fit is refused with TraceError, which says batch, event and block. Then
    the stream or its source is wrong: the replica knows what was before that event and takes no
    more.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.number = 0
        """Of the next batch."""
        self.refused: str | None = None
        """What did not fit."""

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
        """Take over a batch, the next one. Raises TraceError."""
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
            return
        if isinstance(event, BlockStored):
            changes = self._stored(event, place)
        else:
            changes = self._removed(event, place)
        for digest, block in changes.items():
            self._settle(digest, block)

    def _settle(self, digest: bytes, block: Block | None) -> None:
        if block is None:
            parent = self.blocks.pop(digest).parent
        else:
            self.blocks[digest], parent = block, block.parent
        if parent is not None:
            children = self.blocks[parent].children
            (children.discard if block is None else children.add)(digest)

    def _stored(self, event: BlockStored, place: str) -> dict[bytes, Block | None]:
        """Each block as it is to be known, if the event fits."""
        size, parent = event.block_size, event.parent_block_hash
        count = len(event.block_hashes)
        extras = event.extra_keys or [None] * count
        if len(event.token_ids) != count * size or len(extras) != count or not count:
            told = f"{len(event.token_ids)} tokens and {len(extras)} extra keys"
            raise TraceError(f"{place}: {count} blocks of {size} tokens have {told}")
        if parent is not None and parent not in self.blocks:
            raise TraceError(f"{place}: the parent {parent.hex()} is unknown")
        changes: dict[bytes, Block | None] = {}
        for at, digest in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[at * size : (at + 1) * size])
            told_block = Block(parent, tokens, frozenset((event.medium,)), extras[at] or ())
            known = None if digest in changes else self.blocks.get(digest)
            if digest in changes or (known is not None and event.medium in known.tiers):
                raise TraceError(f"{place}: {digest.hex()} is stored twice in {event.medium}")
            changes[digest] = _joined(known, told_block, f"{place}: {digest.hex()}")
            parent = digest
        return changes

    def _removed(self, event: BlockRemoved, place: str) -> dict[bytes, Block | None]:
        """Each block as it is to be known then, if the event fits; None if it is gone."""
        changes: dict[bytes, Block | None] = {}
        for digest in event.block_hashes:
            known = None if digest in changes else self.blocks.get(digest)
            if known is None or event.medium not in known.tiers:
                what = (
                    "has" if known is None else f"is in {', '.join(sorted(known.tiers))}, and has"
                )
                raise TraceError(f"{place}: {digest.hex()} {what} nothing in {event.medium}")
            tiers = known.tiers - {event.medium}
            left = {child for child in known.children if changes.get(child, known) is not None}
            if left and not tiers:
                raise TraceError(f"{place}: {digest.hex()} leaves before {len(left)} children")
            changes[digest] = _with(known, tiers) if tiers else None
        return changes


def _with(block: Block, tiers: frozenset[Medium]) -> Block:
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
