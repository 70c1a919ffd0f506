"""A publisher that is let go of, one that is not drained, a drain that is cut off; snapshots."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any
from weakref import ref

import pytest

from kvstate.blocks import Loss, Node
from kvstate.errors import IllegalTransition, TraceError
from kvstate.events import (
    FORMATS,
    LOST,
    SNAPSHOT,
    AllBlocksCleared,
    BlockStored,
    Event,
    Numbered,
    decode,
)
from kvstate.index import Index
from kvstate.keys import Identity
from kvstate.publisher import MOST_PENDING_BLOCKS, Publisher
from kvstate.replica import Replica, replay
from tests.conftest import Open
from tests.test_events import OWNER, drained, extend, index_with
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
