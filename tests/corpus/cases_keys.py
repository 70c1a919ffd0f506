"""What a block is found by, and what the outside is told: the index, the keys and the events alone.

Most of these reports are about what a call of a manager does not show: their cases are functions
over the same index that the manager uses.
"""

from __future__ import annotations

from itertools import combinations
from typing import Final

from kvstate import trace
from kvstate.blocks import Loss, Node
from kvstate.errors import TraceError
from kvstate.index import Index
from kvstate.keys import Extras, Identity, token_bytes
from kvstate.publisher import Publisher
from kvstate.replica import Replica
from tests.corpus.case import REACHED, Case, config, expect, found, grew, said, slots
from tests.faults.planted import Fault

WHOLE: Final = "law 6 (whole keys)"
COHERENT: Final = "law 5 (index coherence)"
REPLAYS: Final = "law 22 (events replay)"
TIERS: Final = "law 21 (tier order)"
SIX: Final = [1, 2, 3, 4, 5, 6]
IDS: Final = token_bytes(SIX)
KEY: Final = b"corpus"
OWNER: Final = object()


def _chain(index: Index, identity: Identity, extras: Extras | None = None) -> list[Node]:
    return index.extend(identity, index.keys(IDS, extras), OWNER)


def _fields_are_apart() -> None:
    """The same bytes as an adapter of each type, as a salt, and cut in two."""
    identities = [
        Identity(),
        Identity(salt=b"X"),
        Identity(adapter="X"),
        Identity(adapter=b"X"),
        Identity(adapter=88),
        Identity(salt=b"X", adapter="X"),
        Identity(salt=b"XX"),
    ]
    for one, other in combinations(identities, 2):
        index = Index(2, key=KEY)
        nodes = _chain(index, one)
        expect(REACHED, f"{one} finds", index.match(one, IDS), nodes)
        expect(WHOLE, f"{other} finds of {one}", index.match(other, IDS), [])


def _extras_reach_on() -> None:
    """Two prompts that differ in the image of their first block, and in nothing else."""
    index, identity = Index(2, key=KEY), Identity()
    one, other = (_chain(index, identity, {0: image}) for image in (b"cat", b"dog"))
    expect(REACHED, "the keys behind the image", one[1].key == other[1].key, True)
    expect(WHOLE, "blocks in common", set(one) & set(other), set())
    names = {index.digest(node) for node in (*one, *other)}
    expect(WHOLE, "names of six blocks", len(names), 6)


def _images_whole() -> None:
    """Two images whose digests begin alike, and the prompt without any."""
    index, identity = Index(2, key=KEY), Identity()
    one, other = bytes(31) + b"\x01", bytes(31) + b"\x02"
    nodes = _chain(index, identity, {1: one})
    expect(REACHED, "found with it", index.match(identity, IDS, {1: one}), nodes)
    for wrong in ({1: other}, {1: one[:2]}, {1: (one, b"")}, {0: one}, {}):
        shared = 0 if 0 in wrong else 1
        expect(WHOLE, f"found with {wrong}", index.match(identity, IDS, wrong), nodes[:shared])


def _host_leaf() -> None:
    """x, y and z on the host; z comes to the GPU too: y has a child on the host all the same."""
    index = Index(2, key=KEY)
    x, y, z = _chain(index, Identity())
    for slot, node in enumerate((x, y, z)):
        index.give_slot(node, slot)
    index.lose_owner(x, OWNER, why=Loss.CLOSED)
    index.lose_owner(y, OWNER, why=Loss.CLOSED)
    expect(REACHED, "tiers of z", z.media, ("GPU", "CPU"))
    expect(TIERS, "what may go", index.victims(9), [z])
    index.lose_slot(z, why=Loss.EVICTED)
    expect(TIERS, "what may go when only the GPU has z", index.victims(9), [])


def _told(index: Index, publisher: Publisher, replica: Replica) -> None:
    """The replica hears what has happened, and knows what there is."""
    try:
        for batch in publisher.drain():
            replica.apply(batch)
    except TraceError as error:
        expect(REPLAYS, "events", str(error), "accepted")
    expect(REPLAYS, "what the replica knows", replica.blocks, Replica.of(index).blocks)


def _tiers_are_apart() -> None:
    """Blocks of both tiers: the last one leaves the host, then the first leaves the GPU."""
    index, replica = Index(2, key=KEY), Replica()
    publisher = Publisher(index)
    nodes = _chain(index, Identity())
    for slot, node in enumerate(nodes):
        index.give_slot(node, slot)
    _told(index, publisher, replica)
    index.lose_slot(nodes[2], why=Loss.CLOSED)
    index.lose_owner(nodes[0], OWNER, why=Loss.CLOSED)
    _told(index, publisher, replica)
    expect(REACHED, "tiers", [node.media for node in nodes], [("CPU",), ("GPU", "CPU"), ("GPU",)])


def _late_listener() -> None:
    """Whoever listens from the middle on is told what is there first: no parent is missing."""
    index, replica = Index(2, key=KEY), Replica()
    nodes = _chain(index, Identity())
    publisher = Publisher(index)
    index.insert(nodes[-1], index.keys(IDS)[0], OWNER)
    _told(index, publisher, replica)
    expect(REACHED, "blocks of the replica", len(replica.blocks), 4)


KEYS: Final = (
    Case(
        name="an adapter, a salt and their types are different things",
        entries=("B71",),
        law=WHOLE,
        fault=Fault(
            "adapters and salts share a field",
            "kvstate/keys.py",
            '        return tagged(b"s", self.salt) + _adapter_bytes(self.adapter) + epoch\n',
            "        return self.salt + _adapter_bytes(self.adapter)[9:] + epoch\n",
            "B71",
        ),
        run=_fields_are_apart,
    ),
    Case(
        name="what precedes a block is part of it, with its extra keys",
        entries=("B73",),
        law=WHOLE,
        fault=Fault(
            "the name of a block is made of tokens alone",
            "kvstate/index.py",
            'name = step.name = self._hash(b"block", name + step.key)',
            'name = step.name = self._hash(b"block", name + step.key[: self.block_bytes])',
            "B73",
        ),
        run=_extras_reach_on,
    ),
    Case(
        name="an image is told apart by all of its digest",
        entries=("B74",),
        law=WHOLE,
        fault=Fault(
            "16 bits of an extra key count",
            "kvstate/keys.py",
            '    return b"".join(tagged(b"x", one) for one in fields)\n',
            '    return b"".join(tagged(b"x", one[:2]) for one in fields)\n',
            "B74",
        ),
        run=_images_whole,
    ),
    Case(
        name="a reset forgets every tier",
        entries=("B68",),
        law="law 5 (nothing forgotten)",
        fault=Fault(
            "a reset forgets what the host has, and not the rest",
            "kvstate/index.py",
            "        self.epoch += 1\n",
            "",
            "B68",
        ),
        config=config(write_through="on_commit", spans="off"),
        program=(
            *said(1, SIX),
            *said(2, [9, 9]),
            trace.Poll(),
            slots(MIRROR=4, FREE=12),
            found([*SIX, 7], 6),
            trace.Clear(),
            found([*SIX, 7], 0, COHERENT),
            slots(FREE=16),
        ),
    ),
    Case(
        name="a leaf of the host is judged by the host",
        entries=("B143",),
        law=TIERS,
        fault=Fault(
            "only children that are not on the GPU count",
            "kvstate/blocks.py",
            "        and node.host_children == taken\n"
            "        and (node.owner is not None or len(node.children) == cut)\n",
            "        and sum(one.owner is None for one in node.children.values()) == taken\n",
            "B143",
        ),
        run=_host_leaf,
    ),
    Case(
        name="a reset is told to who listens",
        entries=("B158",),
        law=REPLAYS,
        fault=Fault(
            "a reset is not told",
            "kvstate/publisher.py",
            "        self.events.append(AllBlocksCleared(why))\n",
            "",
            "B158",
        ),
        config=config(),
        program=(
            *said(1, SIX),
            found([*SIX, 7], 6),
            trace.Clear(),
            *grew(1, 2),
            trace.Close(seq=1),
        ),
    ),
    Case(
        name="what leaves one tier has not left the other",
        entries=("B157",),
        law=REPLAYS,
        fault=Fault(
            "removals are told together, whatever their tiers",
            "kvstate/publisher.py",
            "(last.medium, last.reason) != (medium, why)",
            "last.reason != why",
            "B157",
        ),
        run=_tiers_are_apart,
    ),
    Case(
        name="who listens from the middle on misses no parent",
        entries=("B158",),
        law=REPLAYS,
        fault=Fault(
            "what is there already is not told",
            "kvstate/telling.py",
            "            for medium in node.told:\n                listener.stored(node, medium)\n",
            "            pass\n",
            "B158",
        ),
        run=_late_listener,
    ),
)
