"""What a manager's index tells its routers: events, kept until they are drained, within bounds.

What one can rely on (law 22): a reader that has every batch from the first one, or from a snapshot
on, knows exactly which digest has its bytes in which tier. A block is told before its children and
leaves after them, so no prefix of the events has a hole either. `Replica` holds a stream to that.

A publisher that is not drained keeps a bounded number of changes. One more, and all of them are
thrown away: the next drain says so and how many they were, with an AllBlocksCleared of its own
reason, and nothing is kept until `snapshot` tells everything that is there. A reader that knows
nothing sends requests to the wrong place at worst; one with half of the changes never gets right.

Rejected: throwing the oldest events away (what is left fits nothing that a reader knows); a bound
in time (no decision may depend on one); a snapshot at once, unasked (it costs as much as there are
blocks, in the middle of whatever call is next).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from kvstate.blocks import Loss, Medium, Node
from kvstate.errors import IllegalTransition
from kvstate.events import (
    FORMATS,
    HASHES,
    LOST,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Format,
    Hash,
    Hashes,
    Numbered,
    encode,
    int_hash,
)
from kvstate.handles import Handle
from kvstate.index import Index
from kvstate.keys import Adapter
from kvstate.life import Life
from kvstate.values import instance, number, one_of, whole

MOST_PENDING_BLOCKS: Final = 1 << 16
"""Some 86 MB with blocks of 32 tokens, which is 1.3 KB a block."""


class Script:
    """Events in the making: stores that follow each other down a chain are one event, and so are
    removals from one tier for one reason."""

    def __init__(self, index: Index, name: Callable[[Node], Hash], first: int = 0) -> None:
        self.index, self.name = index, name
        self.number = first
        """Of its first batch."""
        self.events: list[Event] = []
        self.most_changes: int | None = None
        """How many changes are kept from now on: blocks stored or removed, clears."""
        self._changes = 0
        self.behind = False
        """Nothing is kept until the next clear."""
        self.loss: AllBlocksCleared | None = None
        """What says so, before everything else; None once it was handed out."""

    def stored(self, node: Node, medium: Medium) -> None:
        """See `Listener.stored`."""
        if self._full():
            self._lose(1)
            return
        index, last = self.index, self.events[-1] if self.events else None
        parent = None if node.parent is None else self.name(node.parent)
        if not _continues(last, parent, medium):
            assert node.root is not None
            number, text = _lora(node.root.identity.adapter)
            last = BlockStored([], parent, [], index.block_tokens, number, medium, text)
            self.events.append(last)
        assert isinstance(last, BlockStored)
        extra = index.extra(node) or None
        if extra and last.extra_keys is None:
            last.extra_keys = [None] * len(last.block_hashes)
        if last.extra_keys is not None:
            last.extra_keys.append(extra)
        last.block_hashes.append(self.name(node))
        last.token_ids += index.tokens(node)

    def removed(self, node: Node, medium: Medium, why: Loss) -> None:
        """See `Listener.removed`."""
        if self._full():
            self._lose(1)
            return
        last = self.events[-1] if self.events else None
        if not isinstance(last, BlockRemoved) or (last.medium, last.reason) != (medium, why):
            last = BlockRemoved([], medium, reason=why)
            self.events.append(last)
        last.block_hashes.append(self.name(node))

    def cleared(self, why: str) -> None:
        """See `Listener.cleared`. It is kept in any case, and what follows fits it."""
        if self._full():
            self.behind, self._changes = False, 1
        self.events.append(AllBlocksCleared(why))

    def _full(self) -> bool:
        """One more change; whether it is one too many. Then none of them is kept."""
        if self.most_changes is None:
            return False
        self._changes += 1
        if not self.behind and self._changes > self.most_changes:
            self.behind, self.loss = True, self.loss or AllBlocksCleared(LOST, 0)
            self._lose(sum(_changes(event) for event in self.events))
            self.events = []
        return self.behind

    def _lose(self, changes: int) -> None:
        """Count changes that are not told, until the drain that says so."""
        if self.loss is not None:
            self.loss.lost_changes = (self.loss.lost_changes or 0) + changes

    def batches(self, time: float | None, rank: int | None, size: int | None) -> list[Numbered]:
        """All of it, up to `size` events in each batch."""
        events = ([] if self.loss is None else [self.loss]) + self.events
        size = max(1, size or len(events))
        cuts = [events[at : at + size] for at in range(0, len(events), size)]
        return [
            Numbered(number, EventBatch(float(number) if time is None else time, cut, rank))
            for number, cut in enumerate(cuts, self.number)
        ]


class Publisher(Handle):
    """Makes events of what an index changes. It listens to the index, and first tells what is there
    already.

    The index does not keep it: hold it for as long as it is to hear anything. Costs the digest of
    each block, once, whether anybody drains or not; and memory for up to `most_pending_blocks`
    blocks that were stored or removed since the last drain, besides those that were there at first.

    It belongs to the thread of its manager. Batches that were drained change no more: encode and
    send them on any thread.
    """

    instead = "make another one with `events`"
    life: Life | None = None
    """Of the manager, if it is one's: who may call, and when."""

    def __init__(
        self, index: Index, rank: int | None = None, most_events: int | None = None, *,
        format: Format = "maps", hashes: Hashes = "bytes",  # noqa: A002
        most_pending_blocks: int = MOST_PENDING_BLOCKS,
    ) -> None:  # fmt: skip
        one_of("format", format, FORMATS)
        one_of("hashes", hashes, HASHES)
        self.index, self.format = index, format
        self.rank = None if rank is None else whole("rank", rank)
        self.most_events = None if most_events is None else whole("most_events", most_events, 1)
        self.most_pending_blocks = whole("most_pending_blocks", most_pending_blocks, 1)
        self._name = index.digest if hashes == "bytes" else _int_names(index)
        self._script = script = Script(index, self._name)
        index.listen(self)
        index.recite(script)
        script.most_changes = self.most_pending_blocks

    @property
    def number(self) -> int:
        """Of the next batch."""
        return self._script.number

    @property
    def behind(self) -> bool:
        """Something was lost: nothing is told until the next `snapshot`, or until all is
        cleared."""
        return self._script.behind

    def close(self) -> None:
        """Hear nothing more. What was not drained can still be."""
        self._check("close")
        self.index.ignore(self)

    def stored(self, node: Node, medium: Medium) -> None:
        """See `Listener.stored`."""
        self._script.stored(node, medium)

    def removed(self, node: Node, medium: Medium, why: Loss) -> None:
        """See `Listener.removed`."""
        self._script.removed(node, medium, why)

    def cleared(self, why: Loss) -> None:
        """See `Listener.cleared`."""
        self._script.cleared(why)

    def drain(self, ts: float | None = None) -> list[Numbered]:
        """The batches since the last drain: none if nothing happened; several if there are more
        than `most_events` events. `ts` is the caller's time.

        If more than `most_pending_blocks` had to be kept, the first event is an AllBlocksCleared
        whose reason is `lost` and whose `lost_changes` says how many changes are not told, and
        nothing follows: ask for a `snapshot`.
        """
        self._check("drain")
        return self._hand_out(self._script, ts)

    def snapshot(self, ts: float | None = None) -> list[Numbered]:
        """Everything that is there, for readers that come late or have missed something: an
        AllBlocksCleared whose reason is `snapshot`, and stores, in the next batch or batches. It
        takes the place of what was not drained. Cost: everything.

        Raises IllegalTransition if the publisher was closed.
        """
        self._check("snapshot")
        if not self.index.hears(self):
            reason = "it was closed and does not know what is there; make a new one"
            raise IllegalTransition("the events", "snapshot", "CLOSED", reason)
        script = Script(self.index, self._name, self.number)
        script.cleared(SNAPSHOT)
        self.index.recite(script)
        return self._hand_out(script, ts)

    def encode(self, numbered: Numbered) -> tuple[bytes, bytes]:
        """The two frames of a batch, in the format that was asked for. May be called on any
        thread."""
        return encode(instance("numbered", numbered, Numbered), self.format)

    def _hand_out(self, script: Script, ts: float | None) -> list[Numbered]:
        """What a script says; from now on another is written."""
        time = None if ts is None else number("ts", ts)
        batches = script.batches(time, self.rank, self.most_events)
        fresh = Script(self.index, self._name, script.number + len(batches))
        fresh.behind, fresh.most_changes = script.behind, self.most_pending_blocks
        self._script = fresh  # last of all, so that nothing is taken that is not handed out
        return batches

    def _check(self, call: str) -> None:
        if self.life is not None:
            self.life.look(call, sys._getframe(2))


def _changes(event: Event) -> int:
    return 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)


def _int_names(index: Index) -> Callable[[Node], Hash]:
    return lambda node: int_hash(index.digest(node))


def _continues(last: Event | None, parent: Hash | None, medium: Medium) -> bool:
    """The next block of the chain that the last event stored, in the same tier."""
    return (
        isinstance(last, BlockStored) and last.medium == medium and last.block_hashes[-1] == parent
    )


def _lora(adapter: Adapter) -> tuple[int | None, str | None]:
    if isinstance(adapter, int):
        return adapter, None
    return None, adapter.hex() if isinstance(adapter, bytes) else adapter
