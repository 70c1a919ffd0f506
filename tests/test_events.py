"""The events: what a publisher says, and a replica that refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvstate import Manager
from kvstate.blocks import Loss, Node
from kvstate.errors import TraceError
from kvstate.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Hash,
    Numbered,
    decode,
    encode,
)
from kvstate.index import Index
from kvstate.keys import Identity, token_bytes
from kvstate.observe import Listening
from kvstate.publisher import Publisher
from kvstate.replica import Replica, replay
from tests.conftest import Open
from tests.test_reuse import PROMPT, go_on, said

ME = Identity(salt=b"secret")
OWNER = "a sequence"
D1, D2, D3 = b"1" * 16, b"2" * 16, b"3" * 16


def index_with(*chains: tuple[int, ...], identity: Identity = ME) -> Index:
    index = Index(2, key=b"test")
    for chain in chains:
        extend(index, *chain, identity=identity)
    return index


def extend(index: Index, *tokens: int, identity: Identity = ME) -> list[Node]:
    return index.extend(identity, index.keys(token_bytes(tokens)), OWNER)


def drained(publisher: Publisher) -> list[Event]:
    return [event for numbered in publisher.drain() for event in numbered.batch.events]


def stored(*digests: Hash, parent: Hash | None = None, medium: Any = "GPU",
           tokens: list[int] | None = None, **changes: Any) -> BlockStored:  # fmt: skip
    ids = list(range(2 * len(digests))) if tokens is None else tokens
    told = BlockStored(list(digests), parent, ids, 2, None, medium, None)
    return msgspec.structs.replace(told, **changes)


def batch(*events: Event, number: int = 0) -> Numbered:
    return Numbered(number, EventBatch(0.0, list(events)))


# What a publisher says.


def test_a_chain_stored_in_one_tier_is_one_event() -> None:
    index = index_with()
    publisher = Publisher(index)
    one, two = extend(index, 1, 2, 3, 4)
    names: list[Hash] = [index.digest(one), index.digest(two)]
    assert drained(publisher) == [BlockStored(names, None, [1, 2, 3, 4], 2, None, "GPU", None)]
    (_, _, three) = extend(index, 1, 2, 3, 4, 5, 6)
    assert drained(publisher) == [
        BlockStored([index.digest(three)], names[1], [5, 6], 2, None, "GPU", None)
    ]


def test_another_chain_or_another_tier_is_another_event() -> None:
    index = index_with()
    publisher = Publisher(index)
    one, two = extend(index, 1, 2, 3, 4)
    (_, other) = extend(index, 1, 2, 7, 8)
    index.give_slot(one, 5)
    index.give_slot(two, 6)
    extend(index, 1, 2, identity=Identity(b"another"))
    told = [event for event in drained(publisher) if isinstance(event, BlockStored)]
    names = [index.digest(node) for node in (one, two, other)]
    assert [(event.block_hashes, event.parent_block_hash, event.medium) for event in told[:3]] == [
        ([names[0], names[1]], None, "GPU"),
        ([names[2]], names[0], "GPU"),
        ([names[0], names[1]], None, "CPU"),
    ]
    assert (told[3].token_ids, told[3].parent_block_hash) == ([1, 2], None)
    assert told[3].block_hashes[0] not in names


def test_removals_from_one_tier_are_one_event_and_children_go_first() -> None:
    index = index_with((1, 2, 3, 4, 5, 6))
    publisher = Publisher(index)
    one, two, three = extend(index, 1, 2, 3, 4, 5, 6)
    names = [index.digest(node) for node in (one, two, three)]
    index.give_slot(two, 0)
    drained(publisher)
    index.lose_owner(two, OWNER, why=Loss.CLOSED)
    index.lose_owner(one, OWNER, why=Loss.CLOSED)
    assert drained(publisher) == [
        BlockRemoved([names[1], names[2]], "GPU", reason="closed"),
        BlockRemoved([names[1]], "CPU", reason="cut"),
        BlockRemoved([names[0]], "GPU", reason="closed"),
    ]


def test_a_publisher_that_comes_late_tells_what_is_there() -> None:
    index = index_with((1, 2, 3, 4), (1, 2, 5, 6))
    index.give_slot(extend(index, 1, 2)[0], 3)
    assert replay(Publisher(index).drain()).blocks == Replica.of(index).blocks
    assert len(Replica.of(index).blocks) == 3


@pytest.mark.parametrize(
    ("adapter", "told"),
    [
        (None, (None, None)),
        (7, (7, None)),
        ("7", (None, "7")),
        (b"7", (None, "37")),
        (0, (0, None)),
    ],
)
def test_an_adapter_is_told_as_number_or_name(adapter: Any, told: Any) -> None:
    publisher = Publisher(index_with((1, 2), identity=Identity(adapter=adapter)))
    (event,) = drained(publisher)
    assert isinstance(event, BlockStored)
    assert (event.lora_id, event.lora_name) == told


def test_extra_keys_are_told_block_by_block() -> None:
    index = index_with()
    publisher = Publisher(index)
    data = token_bytes([1, 2, 3, 4, 5, 6])
    index.extend(ME, index.keys(data, {1: (b"cat", b"0")}), OWNER)
    index.extend(ME, index.keys(data, {0: b""}), OWNER)
    first, second = drained(publisher)
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.extra_keys == [None, (b"cat", b"0"), None]
    assert second.extra_keys == [(b"",), None, None]
    replica = replay([batch(first, second)])
    assert replica.blocks == Replica.of(index).blocks
    assert replica.blocks[first.block_hashes[1]].extra == (b"cat", b"0")


def test_a_handover_says_nothing_and_a_clear_says_so() -> None:
    index = index_with((1, 2))
    publisher = Publisher(index)
    drained(publisher)
    index.lose_owner(extend(index, 1, 2)[0], OWNER, heir="another")
    assert drained(publisher) == []
    index.retire()
    assert drained(publisher) == [AllBlocksCleared("cleared")]


def test_batches_are_numbered_without_gaps() -> None:
    index = index_with()
    publisher = Publisher(index, rank=3, most_events=2)
    assert publisher.drain() == []
    for token in range(5):
        extend(index, token, token)
    told = publisher.drain(ts=1.5)
    assert [(one.number, one.batch.ts, len(one.batch.events)) for one in told] == [
        (0, 1.5, 2), (1, 1.5, 2), (2, 1.5, 1),
    ]  # fmt: skip
    assert publisher.drain() == []
    extend(index, 9, 9)
    (last,) = publisher.drain()
    assert (last.number, last.batch.ts, last.batch.data_parallel_rank) == (3, 3.0, 3)
    assert replay([*told, last]).blocks == Replica.of(index).blocks


# What a replica refuses.

CHAIN = stored(D1, D2)
UNFIT: dict[str, tuple[list[Event], str]] = {
    "stored twice": ([CHAIN, stored(D1, tokens=[0, 1])], "event 1: 31.* is stored twice in GPU"),
    "twice in one event": ([stored(D1, D1)], "stored twice in GPU"),
    "an unknown parent": ([stored(D2, parent=D1)], "parent 31.* is unknown"),
    "unknown and removed": ([BlockRemoved([D1], "GPU")], "has nothing in GPU"),
    "removed elsewhere": ([CHAIN, BlockRemoved([D2], "CPU")], "is in GPU, and has nothing in CPU"),
    "removed twice": ([CHAIN, BlockRemoved([D2, D2], "GPU")], "has nothing in GPU"),
    "a parent first": ([CHAIN, BlockRemoved([D1, D2], "GPU")], "leaves before 1 children"),
    "a parent alone": ([CHAIN, BlockRemoved([D1], "GPU")], "leaves before 1 children"),
    "after a clear": ([CHAIN, AllBlocksCleared(), BlockRemoved([D1], "GPU")], "has nothing in GPU"),
    "other tokens": (
        [CHAIN, stored(D1, tokens=[8, 9], medium="CPU")],
        "event 1: 31.* has another parent, other tokens",
    ),
    "another parent": (
        [CHAIN, stored(D2, tokens=[2, 3], medium="CPU")],
        "event 1: 32.* has another parent, other tokens",
    ),
    "other extra keys": (
        [CHAIN, stored(D1, tokens=[0, 1], medium="CPU", extra_keys=[(b"x",)])],
        "extra keys than before",
    ),
    "too few tokens": ([stored(D1, D2, tokens=[1, 2, 3])], "2 blocks of 2 tokens have 3 tokens"),
    "too few extra keys": ([stored(D1, D2, extra_keys=[None])], "and 1 extra keys"),
    "no block": ([stored()], "0 blocks"),
    "another group's": ([stored(D1, group_idx=2)], "group 2; a replica follows group 0 alone"),
    "another group's removal": ([CHAIN, BlockRemoved([D2], "GPU", 1)], "group 1; a replica"),
    "a number twice": (
        [stored(5, tokens=[0, 1]), stored(5, tokens=[0, 1])],
        "event 1: 5 is stored twice",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_refused(name: str) -> None:
    events, message = UNFIT[name]
    replica = replay([batch(*events[:-1])])
    before = dict(replica.blocks)
    with pytest.raises(TraceError, match="batch 1, event 0: "):
        replica.apply(batch(events[-1], number=1))
    assert replica.blocks == before
    with pytest.raises(TraceError, match=message):
        replay([batch(*events)])
    with pytest.raises(TraceError, match="refused before: batch 1"):
        replica.apply(batch(number=1))


@pytest.mark.parametrize("number", [0, 2])
def test_a_batch_that_is_not_the_next_is_refused(number: int) -> None:
    replica = replay([batch(CHAIN)])
    with pytest.raises(TraceError, match=f"batch {number}, but 1 is next"):
        replica.apply(batch(number=number))


def test_a_clear_makes_what_was_missed_not_matter() -> None:
    replica = replay([batch(CHAIN)])
    with pytest.raises(TraceError):
        replica.apply(batch(stored(D3), number=2))
    with pytest.raises(TraceError, match="refused before"):
        replica.apply(batch(stored(D3), AllBlocksCleared(), number=3))
    replica.apply(batch(AllBlocksCleared(), stored(D3), number=7))
    assert list(replica.blocks) == [D3]
    replica.apply(batch(stored(D1), number=8))
    with pytest.raises(TraceError, match="batch 8, but 9 is next"):
        replica.apply(batch(AllBlocksCleared(), number=8))


def test_the_replica_says_that_it_is_behind() -> None:
    replica = replay([batch(CHAIN)])
    assert not replica.behind
    replica.apply(batch(AllBlocksCleared("lost", 9), number=1))
    assert (replica.blocks, replica.behind) == ({}, True)
    replica.apply(batch(AllBlocksCleared("snapshot"), stored(D1), number=2))
    assert (list(replica.blocks), replica.behind) == ([D1], False)


def test_a_block_is_known_until_its_last_tier_loses_it() -> None:
    replica = replay([batch(CHAIN, stored(D1, D2, medium="CPU"), BlockRemoved([D1, D2], "GPU"))])
    assert {name: block.tiers for name, block in replica.blocks.items()} == {
        D1: {"CPU"}, D2: {"CPU"},
    }  # fmt: skip
    assert [replica.blocks[name].tokens for name in (D1, D2)] == [(0, 1), (2, 3)]
    assert [replica.blocks[name].parent for name in (D1, D2)] == [None, D1]
    replica.apply(batch(BlockRemoved([D2, D1], "CPU"), stored(D3), number=1))
    assert list(replica.blocks) == [D3]
    replica.apply(batch(AllBlocksCleared(), CHAIN, number=2))
    assert list(replica.blocks) == [D1, D2]


SPOILT: dict[str, Callable[[list[Event]], object]] = {
    "an event is lost": lambda events: events.pop(0),
    "an event comes twice": lambda events: events.insert(0, events[0]),
    "two change places": lambda events: events.insert(0, events.pop(1)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_stream_that_was_spoilt_is_noticed(name: str) -> None:
    index = index_with()
    publisher = Publisher(index)
    one, _ = extend(index, 1, 2, 3, 4)
    index.lose_owner(one, OWNER, why=Loss.CLOSED)
    events = drained(publisher)
    SPOILT[name](events)
    with pytest.raises(TraceError, match=r"event [01]"):
        replay([batch(*events)])


# What a manager tells.


def tiers(kv: Manager, replica: Replica) -> list[set[str]]:
    """Which tiers a router believes the blocks of the manager to be in, in the index's order."""
    index = kv.reuse.index
    return [set(replica.blocks[index.digest(node)].tiers) for node in index if node.told]


def test_a_router_hears_of_tiers_when_the_bytes_are_there(open_manager: Open) -> None:
    kv = open_manager()
    events, replica = kv.events(rank=3), Replica()

    def heard() -> list[set[str]]:
        for batch in events.drain():
            assert batch.batch.data_parallel_rank == 3
            replica.apply(decode(*encode(batch)))
        return tiers(kv, replica)

    seq = said(kv, PROMPT)
    assert heard() == [{"GPU"}] * 4
    seq.close()
    assert heard() == [], "the copies have not ended"
    kv.poll()
    assert heard() == [{"CPU"}] * 4
    again = kv.create([*PROMPT, 0], 16)
    again.resume()
    kv.poll()
    assert heard() == [{"GPU", "CPU"}] * 4, "the newcomer is canonical, the host has mirrors"
    again.rewind(3)
    assert heard() == [{"GPU", "CPU"}, {"CPU"}, {"CPU"}, {"CPU"}]
    kv.clear_reuse()
    assert heard() == [], "though the sequence still has its block"
    go_on(kv, again, PROMPT)
    assert heard() == [], "it goes on with the old weights"
    said(kv, PROMPT)
    assert heard() == [{"GPU"}] * 4
    again.close()
    kv.poll()
    assert heard() == [{"GPU"}] * 4


def test_a_block_is_not_told_while_the_one_before_it_is_nowhere() -> None:
    """The host has a block, the one before it is still on the way there."""
    index, told = Index(1), list[tuple[str, int, str]]()

    class Ear:
        def stored(self, node: Node, medium: str) -> None:
            told.append(("stored", node.ordinal, medium))

        def removed(self, node: Node, medium: str, why: Loss) -> None:
            told.append((why, node.ordinal, medium))

        def cleared(self, why: Loss) -> None:
            told.append((why, 0, ""))

    ear = Ear()
    index.listen(ear)
    first, second = index.extend(Identity(), index.keys(token_bytes([1, 2])), "me")
    index.give_slot(second, 1)
    index.give_slot(first, 0, landed=False)
    told.clear()
    index.lose_owner(second, "me", why=Loss.CLOSED)
    index.lose_owner(first, "me", why=Loss.CLOSED)
    assert told == [("closed", 1, "GPU"), ("cut", 1, "CPU"), ("closed", 0, "GPU")]
    told.clear()
    index.land(first)
    assert told == [("stored", 0, "CPU"), ("stored", 1, "CPU")]


def test_a_publisher_that_is_closed_hears_nothing_more(open_manager: Open) -> None:
    kv = open_manager()
    events = kv.events()
    said(kv, PROMPT)
    events.close()
    events.close()
    said(kv, [7, 7])
    (batch,) = events.drain()
    (stored,) = batch.batch.events
    assert isinstance(stored, BlockStored)
    assert len(stored.block_hashes) == 4
    assert events.drain() == []


def test_law_22_notices(open_manager: Open) -> None:
    kv = open_manager()
    seq = said(kv, PROMPT)
    assert isinstance(kv.replayed, Listening)
    assert kv.replayed() == []
    node = next(iter(kv.reuse.index))
    node.told = ()
    kv.replayed.publisher.removed(node, "GPU", Loss.CLOSED)
    assert kv.replayed(), "something was told that is not so"
    kv.replayed = None
    seq.close()
