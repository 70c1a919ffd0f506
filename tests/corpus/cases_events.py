"""What routers are told: in a shape that they read, of everything that is gone, and what cannot be
told is not taken.

Their classes, version by version, are in `tests/vllm_events.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvstate import Manager
from kvstate.blocks import Loss, Node
from kvstate.errors import KvStateError, TraceError
from kvstate.events import Format, Numbered, decode
from kvstate.gpu import NullDevice
from kvstate.index import Index
from kvstate.keys import Identity
from kvstate.publisher import Publisher
from kvstate.replica import Replica
from tests.corpus.case import REACHED, Case, config, expect
from tests.corpus.cases_keys import IDS, KEY, OWNER, REPLAYS
from tests.faults.planted import Fault
from tests.vllm_events import VERSIONS

OLD, NEW = (one for one in VERSIONS if one.name in ("vLLM 0.23", "vLLM 0.24"))


def _opened(**how: object) -> tuple[Index, Publisher]:
    index = Index(2, key=KEY)
    return index, Publisher(index, **how)  # type: ignore[arg-type]


def _chain(index: Index) -> list[Node]:
    return index.extend(Identity(), index.keys(IDS), OWNER)


def _take(replica: Replica, batches: Iterable[Numbered]) -> None:
    """The replica takes these over."""
    try:
        for batch in batches:
            replica.apply(batch)
    except TraceError as error:
        expect(REPLAYS, "the replica", str(error), "takes the batch over")


def _told(index: Index, replica: Replica) -> None:
    expect(REPLAYS, "what the replica knows", replica.blocks, Replica.of(index).blocks)


def _close_is_told() -> None:
    """An engine ends while nothing runs."""
    kv = Manager(config(), NullDevice())
    publisher, replica = kv.events(), Replica()
    seq = kv.create([1, 2, 3, 4], 16)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 4))
    seq.commit([1, 2, 3, 4])
    seq.close()
    kv.poll()
    _take(replica, publisher.drain())
    expect(REACHED, "blocks that a router knows", len(replica.blocks), 2)
    kv.close()
    _take(replica, publisher.drain())
    expect(REPLAYS, "blocks that a router knows after the end", len(replica.blocks), 0)


def _written(format_: Format) -> tuple[bytes, bytes]:
    """A batch with a store, a removal and a clear."""
    index, publisher = _opened(format=format_)
    first, *_ = _chain(index)
    index.lose_owner(first, OWNER, why=Loss.CLOSED)
    index.retire()
    (batch,) = publisher.drain()
    return publisher.encode(batch)


def _names_and_places() -> None:
    """Each of two versions of an engine reads what is written for it, and is read."""
    for version in (OLD, NEW):
        number, payload = _written(version.format)
        try:
            theirs = version.read(payload)
        except msgspec.DecodeError as error:
            expect(REPLAYS, f"what {version.name} reads", str(error), "the batch")
        expect(REACHED, "events", len(theirs.events), 3)
        try:
            read = decode(number, msgspec.msgpack.encode(theirs)).batch.events
        except TraceError as error:
            expect(REPLAYS, f"what is read of {version.name}", str(error), "the batch")
        for one, other in zip(read, theirs.events, strict=True):
            names = set(one.__struct_fields__) & set(other.__struct_fields__)
            found, wanted = ({name: getattr(e, name) for name in names} for e in (one, other))
            expect(REPLAYS, "an event", found, wanted)


def _accepted_is_told() -> None:
    """Adapters whose names no event can carry: refused, or carried."""
    for adapter in (2**70, -(2**63) - 1, "a\ud800", 2**64 - 1):
        index, publisher = _opened()
        try:
            index.extend(Identity(adapter=adapter), index.keys(IDS), OWNER)
        except KvStateError:
            continue
        (batch,) = publisher.drain()
        try:
            publisher.encode(batch)
        except (OverflowError, UnicodeEncodeError) as error:
            expect(REPLAYS, f"a batch about adapter {adapter!r}", repr(error), "encoded")
    expect(REACHED, "the last adapter", adapter, 2**64 - 1)


def _snapshot() -> None:
    """A router misses a batch, sees it by the numbers, and asks for a snapshot."""
    index, publisher = _opened()
    replica = Replica()
    nodes = _chain(index)
    _take(replica, publisher.drain())
    index.lose_owner(nodes[1], OWNER, why=Loss.CLOSED)
    publisher.drain()
    index.give_slot(nodes[0], 3)
    try:
        for batch in publisher.drain():
            replica.apply(batch)
    except TraceError as error:
        expect(REACHED, "what it says", str(error), "batch 2, but 1 is next")
    _take(replica, publisher.snapshot())
    _told(index, replica)


def _loss() -> None:
    """A publisher is not drained for long: the router must not go on with half of what happened."""
    index, publisher = _opened(most_pending_blocks=2)
    replica = Replica()
    nodes = _chain(index)[:2]
    replica.apply(publisher.snapshot()[0])
    expect(REACHED, "blocks that the router knows", len(replica.blocks), 3)
    index.lose_owner(nodes[0], OWNER, why=Loss.CLOSED)
    expect(REACHED, "too much happened", publisher.behind, True)
    _take(replica, publisher.drain())
    expect(REPLAYS, "blocks that the router knows", len(replica.blocks), 0)
    _take(replica, publisher.snapshot())
    _told(index, replica)


EVENTS: Final = (
    Case(
        name="the end of an engine is told",
        entries=("B171",),
        law=REPLAYS,
        fault=Fault(
            "the end is not told",
            "kvstate/telling.py",
            "            self._forget_told(Loss.CLOSED)\n",
            "            pass\n",
            "B171",
        ),
        run=_close_is_told,
    ),
    Case(
        name="events in places and with names are read",
        entries=("B172",),
        law=REPLAYS,
        fault=Fault(
            "events are read by their names alone",
            "kvstate/events.py",
            "    if isinstance(event, list) and event and isinstance(event[0], str):\n",
            "    if False:\n",
            "B172",
        ),
        run=_names_and_places,
    ),
    Case(
        name="a reader by names finds every name that it must find",
        entries=("B172",),
        law=REPLAYS,
        fault=Fault(
            "whatever says nothing is left out",
            "kvstate/events.py",
            "    for name in maybe + ours:\n",
            "    found = {name: value for name, value in found.items() if value is not None}\n"
            "    for name in maybe + ours:\n",
            "B172",
        ),
        run=_names_and_places,
    ),
    Case(
        name="an adapter that no event can carry is not taken",
        entries=("B173",),
        law=REPLAYS,
        fault=Fault(
            "adapters are numbers of any size",
            "kvstate/keys.py",
            'whole("adapter", found, -LARGEST - 1, LARGEST_ADAPTER)',
            "found",
            "B173",
        ),
        run=_accepted_is_told,
    ),
    Case(
        name="a router that has missed something begins anew",
        entries=("B158",),
        law=REPLAYS,
        fault=Fault(
            "a snapshot does not say that it is one",
            "kvstate/publisher.py",
            "        script.cleared(SNAPSHOT)\n",
            "",
            "B158",
        ),
        run=_snapshot,
    ),
    Case(
        name="what was not kept is told to be missing",
        entries=("B158",),
        law=REPLAYS,
        fault=Fault(
            "what is thrown away is not told",
            "kvstate/publisher.py",
            "        events = ([] if self.loss is None else [self.loss]) + self.events\n",
            "        events = self.events\n",
            "B158",
        ),
        run=_loss,
    ),
)
