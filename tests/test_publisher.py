"""A publisher that is let go of, one that is not drained, snapshots, and why a block is gone."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, cast
from weakref import ref

import pytest

from kvstate import Manager
from kvstate.blocks import Loss, Node
from kvstate.errors import ConfigError, IllegalTransition, TraceError
from kvstate.events import (
    FORMATS,
    LOST,
    SNAPSHOT,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Numbered,
    decode,
)
from kvstate.gpu import HostDevice
from kvstate.index import Index
from kvstate.keys import Identity
from kvstate.publisher import MOST_PENDING_BLOCKS, Publisher
from kvstate.replica import Replica, replay
from tests.conftest import Open, small
from tests.test_events import OWNER, drained, extend, index_with
from tests.test_retained import begun
from tests.test_reuse import PROMPT, go_on, said

IDS = (1, 2, 3, 4, 5, 6)
"""Three blocks of two tokens."""


def listeners(index: Index) -> int:
    """How many the index tells, once it has noticed which are gone."""
    return len(index._listening())


# Publishers that are let go of.


def test_a_publisher_that_nobody_holds_stops_listening(open_manager: Open) -> None:
    kv = open_manager()
    index = kv.reuse.index
    known = listeners(index)
    gc.disable()
    try:
        events = kv.events()
        gone = ref(events)
        said(kv, PROMPT)
        assert listeners(index) == known + 1
        del events
        assert gone() is None, "nothing refers back to it"
        assert listeners(index) == len(index._ears) == known
    finally:
        gc.enable()
    said(kv, [7, 7]).close()


def test_a_publisher_that_comes_after_another_is_gone_hears_all(open_manager: Open) -> None:
    """What is told is only kept up while there is a listener."""
    index = index_with(IDS)
    first = Publisher(index)
    assert len(drained(first)) == 1
    del first
    nodes = extend(index, *IDS, 7, 8)
    index.lose_owner(nodes[-1], OWNER, why=Loss.CLOSED)
    extend(index, *IDS, 9, 9)
    second = Publisher(index)
    assert replay(second.drain()).blocks == Replica.of(index).blocks
    assert len(Replica.of(index).blocks) == 4


class Raising:
    """A listener at fault."""

    heard = 0

    def stored(self, node: Node, medium: str) -> None:
        self.heard += 1
        raise RuntimeError("no room in my list")

    def removed(self, node: Node, medium: str, why: Loss) -> None:
        self.stored(node, medium)

    def cleared(self, why: Loss) -> None:
        self.heard += 1
        raise RuntimeError("nor for this")


def test_a_listener_that_raises_hears_nothing_more_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index, faulty = index_with(), Raising()
    index.listen(faulty)
    publisher = Publisher(index)
    nodes = extend(index, *IDS)
    extend(index, 9, 9)
    index.retire()
    assert faulty.heard == 1
    assert not index.hears(faulty)
    assert [node.ordinal for node in nodes] == [0, 1, 2]
    assert [type(event).__name__ for event in drained(publisher)] == [
        "BlockStored", "BlockStored", "AllBlocksCleared",
    ]  # fmt: skip
    assert caplog.text.count("hears nothing more") == 1


# Publishers that are not drained.


def test_what_is_kept_is_bounded(open_manager: Open) -> None:
    """By a number of changes, whatever they are."""
    kv = open_manager()
    events = kv.events(most_pending_blocks=12)
    salts = count()
    for _ in range(20):
        said(kv, PROMPT, salt=b"%d" % next(salts)).close()
        kv.poll()
        kv.clear_reuse()
        assert sum(map(changes, events._script.events)) <= 12
    events.close()


def changes(event: Event) -> int:
    return 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)


def test_as_much_as_is_allowed_is_kept_and_one_more_is_not() -> None:
    index = index_with()
    exact, short = (Publisher(index, most_pending_blocks=most) for most in (3, 2))
    extend(index, *IDS)
    assert (exact.behind, short.behind) == (False, True)
    assert len(drained(exact)) == 1
    assert drained(short) == [AllBlocksCleared(LOST, 3)]
    extend(index, *IDS, 7, 8, 9, 9, 10, 10)
    assert not exact.behind, "what was drained counts no more"


def test_what_was_there_at_first_is_not_counted() -> None:
    index = index_with(IDS, (7, 8))
    publisher = Publisher(index, most_pending_blocks=1)
    extend(index, 9, 9)
    assert not publisher.behind
    assert replay(publisher.drain()).blocks == Replica.of(index).blocks
    publisher.snapshot()
    extend(index, 10, 10)
    assert not publisher.behind, "nor is a snapshot"


def test_a_loss_is_told_once_and_nothing_until_a_snapshot() -> None:
    index, replica = index_with(), Replica()
    publisher = Publisher(index, most_pending_blocks=2)
    nodes = extend(index, *IDS)
    index.lose_owner(nodes[-1], OWNER, why=Loss.CLOSED)
    extend(index, 8, 8)
    assert publisher.behind
    (marker,) = publisher.drain()
    assert marker.batch.events == [AllBlocksCleared(LOST, 5)]
    for format_ in FORMATS:
        fresh = Replica()
        fresh.apply(decode(*_framed(marker, format_)))
        assert fresh.behind == (format_ == "maps"), "arrays have no reasons"
    replica.apply(marker)
    assert replica.behind
    extend(index, 9, 9)
    assert publisher.drain() == []
    for batch in publisher.snapshot():
        replica.apply(batch)
    assert (publisher.behind, replica.behind) == (False, False)
    assert replica.blocks == Replica.of(index).blocks
    extend(index, 10, 10)
    for batch in publisher.drain():
        replica.apply(batch)
    assert replica.blocks == Replica.of(index).blocks
    assert len(replica.blocks) == 5


def _framed(numbered: Numbered, format_: str) -> tuple[bytes, bytes]:
    publisher = Publisher(index_with(), format=format_)  # type: ignore[arg-type]
    return publisher.encode(numbered)


def test_a_clear_is_told_and_ends_the_loss() -> None:
    """A reader that knows nothing is right when there is nothing."""
    index, replica = index_with(), Replica()
    publisher = Publisher(index, most_pending_blocks=2)
    extend(index, *IDS)
    index.retire()
    assert not publisher.behind
    extend(index, 7, 8, identity=Identity(weights_epoch=1))
    (batch,) = publisher.drain()
    first, second, third = batch.batch.events
    assert (first, second) == (AllBlocksCleared(LOST, 3), AllBlocksCleared("cleared"))
    assert isinstance(third, BlockStored)
    replica.apply(batch)
    assert (replica.behind, replica.blocks) == (False, Replica.of(index).blocks)
    for _ in range(2):
        extend(index, 9, 9, 10, 10, 11, 11, identity=Identity(weights_epoch=1))
    publisher.drain()
    index.retire()
    assert drained(publisher) == [AllBlocksCleared("cleared")], "also after the loss was told"


def test_clears_are_bounded_too() -> None:
    index = index_with()
    publisher = Publisher(index, most_pending_blocks=3)
    for _ in range(50):
        index.retire()
        assert len(publisher._script.events) <= 3
    index.close()
    told = drained(publisher)
    assert told[-1] == AllBlocksCleared("closed")
    assert told[0] == AllBlocksCleared(LOST, 51 - len(told[1:]))


def test_the_bound_that_nobody_named_holds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_with()
    publisher = Publisher(index)
    assert publisher.most_pending_blocks == MOST_PENDING_BLOCKS == 65_536
    monkeypatch.setattr(publisher._script, "_changes", MOST_PENDING_BLOCKS - 1)
    extend(index, 1, 2)
    assert not publisher.behind
    extend(index, 3, 4)
    assert publisher.behind


# A drain that does not return.


def test_a_drain_that_raises_takes_nothing() -> None:
    index = index_with(IDS)
    publisher = Publisher(index, rank=3)
    with pytest.raises(ValueError, match="noon"):
        publisher.drain("noon")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noon"):
        publisher.snapshot("noon")  # type: ignore[arg-type]
    publisher.most_events = -1
    (batch,) = publisher.drain(2.5)
    assert (batch.number, batch.batch.ts) == (0, 2.5)
    assert replay([batch]).blocks == Replica.of(index).blocks


class Interrupt(BaseException):
    """Stands for Ctrl-C."""


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Make a call and raise at that line of it, counted through the module of publishers; whether
    it has that many."""
    seen = count()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.endswith("kvstate/publisher.py"):
            return None
        if event == "line" and next(seen) == line:
            raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("call", ["drain", "snapshot"])
def test_an_interrupt_in_a_drain_loses_nothing_unseen(call: str) -> None:
    """At every line: what was not handed out comes next time; or the numbers have a gap, a reader
    sees it, and a snapshot is right."""
    gaps = 0
    for line in count():
        index, replica = index_with(IDS), Replica()
        publisher = Publisher(index, most_events=1)
        for batch in publisher.drain():
            replica.apply(batch)
        extend(index, *IDS, 7, 8)
        extend(index, 9, 9)
        if not interrupted(getattr(publisher, call), line):
            break
        try:
            for batch in publisher.drain():
                replica.apply(batch)
            assert publisher.drain() == []
            extend(index, 11, 11)
            for batch in publisher.drain():
                replica.apply(batch)
        except TraceError:
            gaps += 1
            for batch in publisher.snapshot():
                replica.apply(batch)
        assert replica.blocks == Replica.of(index).blocks, line
    assert line > 8
    assert gaps <= 1, "only behind the line with which it is handed out"


# Snapshots.


def test_a_snapshot_is_a_clear_and_what_is_there() -> None:
    index = index_with(IDS)
    publisher = Publisher(index, rank=2, most_events=2)
    publisher.drain()
    extend(index, 9, 9)
    index.give_slot(extend(index, 9, 9)[0], 5)
    told = publisher.snapshot(7.5)
    assert [one.number for one in told] == [1, 2]
    assert {(one.batch.ts, one.batch.data_parallel_rank) for one in told} == {(7.5, 2)}
    events = [event for one in told for event in one.batch.events]
    assert events[0] == AllBlocksCleared(SNAPSHOT)
    assert {type(event) for event in events[1:]} == {BlockStored}
    assert sum(map(changes, events)) == 1 + 4 + 1
    assert publisher.drain() == [], "what was not drained is in it"
    assert publisher.number == 3


def test_a_replica_that_comes_late_equals_one_that_heard_all(open_manager: Open) -> None:
    """After each call of a program that makes blocks come and go for most of the reasons."""
    kv = open_manager(slots=4, write_through="on_commit")
    events, whole, late = kv.events(), Replica(), list[Replica]()
    sizes = set()

    def heard() -> None:
        batches = events.drain()
        snapshot = events.snapshot()
        late.append(Replica())
        for replica in (whole, *late[:-1]):
            for batch in batches:
                replica.apply(batch)
        for replica in (whole, *late):
            for batch in snapshot:
                replica.apply(batch)
        assert all(replica.blocks == whole.blocks for replica in late)
        assert whole.blocks == Replica.of(kv.reuse.index).blocks
        sizes.add(len(whole.blocks))

    first = said(kv, PROMPT)
    for call in (
        heard, kv.poll, kv.poll, first.suspend, kv.poll, first.resume, kv.poll,
        lambda: first.rewind(3), lambda: go_on(kv, first, PROMPT), kv.poll, kv.poll, first.close,
        kv.poll, lambda: said(kv, [7] * 8).drop(), kv.poll, kv.clear_reuse,
        lambda: said(kv, PROMPT, salt=b"x"), kv.trim,
    ):  # fmt: skip
        call()
        heard()
    assert sizes >= {0, 4}
    assert len(late) > 15


def test_a_publisher_that_was_closed_has_no_snapshot() -> None:
    index = index_with(IDS)
    publisher = Publisher(index)
    publisher.close()
    with pytest.raises(IllegalTransition, match="the events: snapshot is illegal in state CLOSED"):
        publisher.snapshot()
    assert len(drained(publisher)) == 1, "what it had heard can still be drained"


# Why a block is gone.


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


# Names.


def names(kv: Manager, tokens: list[int], **how: Any) -> list[bytes]:
    """What routers call the blocks of a prompt."""
    index = kv.reuse.index
    return [index.digest(node) for node in said(kv, tokens, **how).nodes]


def test_equal_blocks_of_two_managers_have_equal_names(open_manager: Open) -> None:
    one, other = (open_manager(digest_key=b"of the fleet") for _ in range(2))
    said(one, [9, 9]).close()
    how: dict[str, Any] = {"salt": b"s", "adapter": "a", "extra_keys": {1: b"image"}}
    known = names(one, PROMPT, **how)
    assert names(other, PROMPT, **how) == known
    assert len(set(known)) == 4


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another key": ({"digest_key": b"another"}, {}),
    "a random key": ({"digest_key": None}, {}),
    "blocks of another size": ({"block": 4}, {}),
    "another salt": ({}, {"salt": b"s"}),
    "an adapter": ({}, {"adapter": 1}),
    "an image": ({}, {"extra_keys": {0: b"image"}}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_blocks_that_differ_have_other_names(open_manager: Open, name: str) -> None:
    config, how = DIFFERENT[name]
    known = names(open_manager(digest_key=b"key"), PROMPT)
    other = names(open_manager(**{"digest_key": b"key"} | config), PROMPT, **how)
    assert not set(known) & set(other)


def test_other_weights_have_other_names_and_the_same_again_the_same(open_manager: Open) -> None:
    one, other = (open_manager(digest_key=b"key") for _ in range(2))
    known = names(one, PROMPT)
    other.clear_reuse()
    assert not set(known) & set(names(other, PROMPT))
    one.clear_reuse()
    other.clear_reuse()
    other.clear_reuse()
    one.clear_reuse()
    one.clear_reuse()
    assert names(one, [8, 8]) == names(other, [8, 8])


def test_the_names_of_another_process_are_equal(open_manager: Open) -> None:
    """Whatever its hash seed."""
    script = (
        "from kvstate.index import Index; from kvstate.keys import Identity, token_bytes\n"
        "index = Index(2, key=b'key'); me = Identity(b's', 'a')\n"
        "nodes = index.extend(me, index.keys(token_bytes([1, 2, 3, 4]), {1: b'i'}), 'me')\n"
        "print(*(index.digest(node).hex() for node in nodes))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    kv = open_manager(digest_key=b"key")
    mine = names(kv, [1, 2, 3, 4], salt=b"s", adapter="a", extra_keys={1: b"i"})
    assert found[0] == found[1] == [name.hex() for name in mine]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (b"", "digest_key is 0 bytes; 1 to 64 bytes are wanted"),
        (bytes(65), "digest_key is 65 bytes"),
        ("secret", "digest_key is a str"),
        (5, "digest_key is an int"),
    ],
)
def test_a_key_that_is_none_is_refused(key: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        small(digest_key=key)
    assert "secret" not in str(error.value)


def test_a_key_is_not_written_down() -> None:
    config, lines = small(digest_key=b"very secret key"), list[bytes]()
    with Manager(config, HostDevice(), record=lines.append) as kv:
        said(kv, PROMPT).close()
        assert kv.config.digest_key == b"very secret key"
    text = b"".join(lines).decode() + repr(config)
    assert "very secret" not in text
    assert "dmVyeSBzZWNyZXQ" not in text, "nor in base64"
