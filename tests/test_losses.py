"""What routers are told of a block that is gone: why, and that a closed manager has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from kvstate import Manager
from kvstate.blocks import Loss
from kvstate.events import SNAPSHOT, AllBlocksCleared, BlockRemoved, Event, decode
from kvstate.gpu import HostDevice
from kvstate.keys import Identity
from kvstate.publisher import Publisher
from kvstate.replica import replay
from tests.conftest import Open, small
from tests.test_events import OWNER, drained, extend, index_with
from tests.test_retained import begun
from tests.test_reuse import PROMPT, go_on, said


def reasons(kv: Manager, program: Callable[[Manager], object]) -> list[tuple[str, str, int]]:
    """What a program removes: (medium, reason, blocks), in the order in which it is told."""
    events = kv.events()
    program(kv)
    told = [e for e in _events(events) if isinstance(e, BlockRemoved)]
    assert all(isinstance(event.reason, str) for event in told)
    return [(e.medium, str(e.reason), len(e.block_hashes)) for e in told]


def _events(publisher: Publisher) -> list[Event]:
    """What can be read of it off the wire."""
    batches = [decode(*publisher.encode(batch)) for batch in publisher.drain()]
    return [event for numbered in batches for event in numbered.batch.events]


def _failed(kv: Manager) -> None:
    cast("HostDevice", kv.device).fail_next("complete")
    said(kv, PROMPT).suspend()
    kv.poll()


def _mirrored(kv: Manager) -> Any:
    seq = said(kv, PROMPT)
    kv.poll()
    kv.poll()
    return seq


def _computed_again(kv: Manager) -> Any:
    """The host has four blocks that nobody has; two are computed again, with other bytes."""
    said(kv, PROMPT).close()
    kv.poll()
    seq = kv.create([0], 16)
    seq.resume()
    go_on(kv, seq, PROMPT[:4])
    kv.poll()
    return seq


def _closed_and(last: Callable[[Manager], object], kv: Manager) -> None:
    said(kv, PROMPT).close()
    last(kv)


def _moved(kv: Manager) -> None:
    """A rewind into memory that another maps goes on in another range."""
    first = said(kv, PROMPT)
    kv.create([*PROMPT[:4], 9], 16).resume()
    first.rewind(1)


def _behind_the_host(kv: Manager) -> None:
    """Only parked memory has the block behind those of the host, which wants their room (see
    tests/test_retained.py)."""
    first, second = begun(kv, PROMPT), begun(kv, PROMPT)
    go_on(kv, first, PROMPT[:4])
    hog = kv.create(max_tokens=8, commit=False)
    hog.resume()
    go_on(kv, hog, [7] * 8)
    first.drop()
    go_on(kv, second, PROMPT[:6])
    second.close()
    kv.poll()
    hog.suspend()


def _pressed(kv: Manager) -> None:
    said(kv, PROMPT).close()
    kv.poll()
    said(kv, [7] * 8).close()


def _left_while_loading(kv: Manager) -> None:
    """The owner leaves, and then the one whose copy of it is on its way."""
    owner = said(kv, PROMPT)
    taker = kv.create([*PROMPT, 7], 16)
    taker.resume()
    owner.drop()
    taker.close()


LEFT = ("GPU", "closed", 4)
PROGRAMS: dict[str, tuple[dict[str, Any], Callable[[Manager], object], list[Any]]] = {
    "closed": ({"slots": 0}, lambda kv: said(kv, PROMPT).close(), [LEFT]),
    "closed, and kept": ({}, lambda kv: said(kv, PROMPT).close(), [LEFT]),
    "dropped": ({}, lambda kv: said(kv, PROMPT).drop(), [("GPU", "dropped", 4)]),
    "rewound": ({}, lambda kv: said(kv, PROMPT).rewind(3), [("GPU", "rewound", 3)]),
    "rewound, and moved": ({}, _moved, [("GPU", "rewound", 2)]),
    "evicted, what was retained behind it": (
        {"retain": True, "spans": "off", "slots": 4, "write_through": "on_commit"},
        _behind_the_host,
        [
            ("GPU", "dropped", 2),
            ("CPU", "evicted", 1),
            ("GPU", "evicted", 1),
            ("CPU", "evicted", 2),
        ],
    ),
    "evicted": ({"slots": 4}, _pressed, [LEFT, ("CPU", "evicted", 4), LEFT]),
    "suspended": (
        {"write_through": "on_commit"},
        lambda kv: _mirrored(kv).suspend(),
        [("CPU", "suspended", 4)],
    ),
    "failed": ({}, _failed, [("GPU", "failed", 4)]),
    "spilled": (
        {"spans": "all", "slots": 0},
        partial(_closed_and, Manager.trim),
        [("GPU", "spilled", 4)],
    ),
    "spilled, what a range retained": (
        {"retain": True, "slots": 0, "spans": "off"},
        partial(_closed_and, Manager.trim),
        [("GPU", "spilled", 4)],
    ),
    "unarrived": ({"slots": 0, "spans": "off"}, _left_while_loading, [("GPU", "unarrived", 4)]),
    "replaced": ({}, _computed_again, [LEFT, ("CPU", "replaced", 2)]),
    "cut": (
        {},
        lambda kv: _computed_again(kv).drop(),
        [LEFT, ("CPU", "replaced", 2), ("CPU", "cut", 2), ("GPU", "dropped", 2)],
    ),
    "cleared": ({}, partial(_closed_and, Manager.clear_reuse), [LEFT]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_removal_says_why(open_manager: Open, name: str) -> None:
    config, program, wanted = PROGRAMS[name]
    assert reasons(open_manager(**config), program) == wanted


def test_every_reason_is_seen() -> None:
    seen = {reason for _, _, wanted in PROGRAMS.values() for _, reason, _ in wanted}
    assert seen | {"cleared"} == set(Loss)


def test_a_clear_says_why(open_manager: Open) -> None:
    kv = open_manager()
    events = kv.events()
    said(kv, PROMPT)
    _events(events)
    kv.clear_reuse()
    assert _events(events) == [AllBlocksCleared("cleared")]


def test_what_goes_with_its_owner_goes_for_its_reason() -> None:
    """And what others have below it is cut."""
    index = index_with()
    publisher = Publisher(index)
    first, second = extend(index, 1, 2, 3, 4)
    (_, _, third) = index.extend(
        Identity(b"secret"), [first.key, second.key, bytes(8)], "another owner"
    )
    names = [index.digest(node) for node in (first, second, third)]
    drained(publisher)
    index.lose_owner(first, OWNER, why=Loss.DROPPED)
    assert drained(publisher) == [
        BlockRemoved([names[2]], "GPU", reason="cut"),
        BlockRemoved([names[1], names[0]], "GPU", reason="dropped"),
    ]


# The end.


def closed(kv: Manager, publisher: Publisher) -> tuple[list[Event], dict[Any, Any]]:
    """What a router hears of the close of a manager, and what it knows then."""
    replica = replay(publisher.drain())
    assert replica.blocks
    kv.close()
    batches = publisher.drain()
    for batch in batches:
        replica.apply(batch)
    kv.close()
    assert publisher.drain() == []
    return [event for one in batches for event in one.batch.events], replica.blocks


def test_closing_tells_routers() -> None:
    """A host tier, one sequence of 12 tokens, closed: a router kept three blocks for ever."""
    kv = Manager(small(block=4), HostDevice())
    publisher = kv.events()
    said(kv, list(range(12))).close()
    kv.poll()
    assert closed(kv, publisher) == ([AllBlocksCleared("closed")], {})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"spans": "all"},
        {"spans": "all", "write_through": "on_commit"},
        {"retain": True, "spans": "off"},
    ],
)
def test_closing_with_sequences_open_tells_routers(config: dict[str, Any]) -> None:
    """Nothing that the host still has is told while the GPU gives its memory back."""
    kv = Manager(small(**config), HostDevice())
    publisher = kv.events()
    _mirrored(kv)
    said(kv, [7, 7], salt=b"x").suspend()
    told, known = closed(kv, publisher)
    assert known == {}
    assert told[-1] == AllBlocksCleared("closed")
    assert {event.reason for event in told if isinstance(event, BlockRemoved)} <= {"closed"}


def test_a_poisoned_manager_tells_routers_when_it_is_closed() -> None:
    kv = Manager(small(), HostDevice())
    publisher = kv.events()
    said(kv, PROMPT)
    kv.actor.poison("as a test says")
    assert closed(kv, publisher) == ([AllBlocksCleared("closed")], {})


def test_nothing_is_told_after_the_end() -> None:
    kv = Manager(small(), HostDevice())
    publisher = kv.events()
    said(kv, PROMPT)
    kv.close()
    publisher.drain()
    assert publisher.snapshot()[0].batch.events == [AllBlocksCleared(SNAPSHOT)]
    assert Publisher(kv.reuse.index).drain() == []
