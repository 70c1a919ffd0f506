"""Each law is seen to fail: a mistake of the manager, planted while the test runs, is reported by
the law that is for it.

The mistakes are those that somebody could make in the manager's own code: what is not released,
counted, written down or refused as it should be. Views that are spoiled by hand are in
`test_spoiled.py`; mistakes that the fuzz has to find by itself are in `tests/faults/planted.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from kvstate import Manager, Sequence, runs
from kvstate.act import Actor
from kvstate.admission import Admission
from kvstate.arena import Addresses, Arena, Range
from kvstate.blocks import Loss, Node
from kvstate.flight import Flight
from kvstate.index import Index
from kvstate.keys import Identity
from kvstate.mirrors import Mirrors
from kvstate.plan import Cells
from kvstate.reclaim import Ladder
from kvstate.reuse import Reuse
from kvstate.sequence import Columns, Step, Transfer
from kvstate.spans import Span, Spans
from kvstate.stepping import Stepping
from tests.mistakes import Mistake, around, forgets, nothing
from tests.test_reuse import PROMPT, go_on, said
from tests.test_spans import LONG, more

OTHER: Final = [7, 7, 7, 7]


# Memory.


def _two_map_one(kv: Manager) -> None:
    said(kv, LONG)
    more(kv, LONG)


def _without(name: str) -> Callable[..., Any]:
    """A part of what a call means is left out."""

    def wrong(right: Callable[..., Any], *args: object, **named: object) -> Any:
        found = right(*args, **named)
        found.pop(name, None)
        return found

    return wrong


def grow_then_close(kv: Manager) -> None:
    said(kv, PROMPT)
    said(kv, OTHER).close()
    kv.poll()


def _trim_after_close(kv: Manager) -> None:
    grow_then_close(kv)
    kv.trim()


def _unregistered(right: Callable[..., None], spans: Spans, passage: Any) -> None:
    right(spans, passage)
    spans.registered.remove(passage.span)


def _needed_alone(right: object, span: Span, by: int) -> None:
    """Those before it are not told."""
    span.needed += by


def _touch_one(right: object, spans: Spans, span: Any) -> None:
    spans.clock += 1
    span.used = spans.clock


def _turn_after_turn(kv: Manager) -> None:
    """A span, one behind it, and then the first is used alone."""
    said(kv, LONG[:8])
    second = more(kv, [*LONG, 0])
    go_on(kv, second, LONG)
    more(kv, [*LONG, 1])


def _turns_that_leave(kv: Manager) -> None:
    """A span, one behind it, and then another that maps both."""
    first = said(kv, LONG[:8])
    second = more(kv, [*LONG, 0])
    go_on(kv, second, LONG)
    for seq in (first, second):
        seq.close()
        kv.poll()
    more(kv, [*LONG, 1])


MEMORY: Final = (
    Mistake("what others map is not said to be", around(Spans, "operands", _without("enlisted")),
            _two_map_one, "payers", "should have", {"slots": 0}),
    Mistake("what a mapped page is is not noted", around(Spans, "operands", _without("aliased")),
            _two_map_one, "pages", "it follows", {"slots": 0}),
    Mistake("freed memory is not offered", forgets(Arena, "park"), grow_then_close,
            "ranges follow", "is on offer as (), and should be as ('adopt',)"),
    Mistake("addresses are not given back", forgets(Addresses, "give"), _trim_after_close,
            "addresses", "and should at"),
    Mistake("a span is not registered", around(Spans, "passed", _unregistered),
            lambda kv: said(kv, LONG).close(), "spans follow", "registered: False",
            {"slots": 0, "spans": "all"}),
    Mistake("the span before is not used with it", around(Spans, "touch", _touch_one),
            _turn_after_turn, "spans follow", "was used at", {"slots": 0, "frames": 24,
            "max_tokens": 24, "spans": "all"}),
)  # fmt: skip


# Sequences, and what is counted beside them.


def _enter_alone(right: object, seq: Sequence, code: int) -> None:
    seq.state = code


def _uncounted(right: object, columns: Columns, row: int, code: int) -> None:
    columns.states[row] = code


def _left_uncounted(right: Callable[..., Any], range_: Range, blocks: int) -> Any:
    cells, low, high = right(range_, blocks)
    return Cells(cells.owner, cells.states), low, high


def _range_uncounted(right: object, range_: Range, code: int) -> None:
    range_.state = code


def _not_missed(right: Callable[..., None], ladder: Ladder, range_: Range) -> None:
    owner = range_.owner
    before = None if owner is None else owner.columns.ample.copy()
    right(ladder, range_)
    if owner is not None:
        owner.columns.ample = before


def _taken(kv: Manager) -> None:
    """The margin of a running sequence is unmapped."""
    said(kv, PROMPT[:1])
    kv.trim()


def _unpromised(right: object, seq: Sequence, tokens: int) -> None:
    seq.columns.capacity[seq.row] = tokens


def _of_the_columns(right: Callable[..., None], step: Step, *args: object) -> None:
    right(step, *args)
    step.bases, step.places = step.columns.base, step.rows


def _close_with_a_step(kv: Manager) -> None:
    seq = said(kv, PROMPT)
    step = kv.step(kv.batch([seq]), 1)
    seq.close()
    kv.settle(step)


def _no_leavers(right: Callable[..., Any], kv: Manager, step: Step, accepted: object) -> Any:
    plan, taken, void = right(kv, step, accepted)
    moves = [move for move in plan.moves if not isinstance(move[0], Sequence)]
    plan.moves = moves if any(seq.state_name == "CLOSING" for seq in step.seqs) else plan.moves
    return plan, taken, void


def _suspend_with_a_step(kv: Manager) -> None:
    seq = said(kv, PROMPT)
    kv.step(kv.batch([seq]), 1)
    seq.suspend()


def _reject(kv: Manager) -> None:
    seq = said(kv, PROMPT)
    first, _ = kv.step(kv.batch([seq]), 2), kv.step(kv.batch([seq]), 2)
    kv.settle(first, [1])


def _keeps_doubles(right: Callable[..., None], reuse: Reuse, leaving: Any, why: Loss) -> None:
    before = set(reuse.doubles)
    right(reuse, leaving, why)
    reuse.doubles |= before


def _hit_then_close(kv: Manager) -> None:
    said(kv, PROMPT)
    other = kv.create(PROMPT, 16)
    other.resume()
    kv.poll()
    other.close()


SEQUENCES: Final = (
    Mistake("a row does not say what its sequence is", around(Sequence, "enter", _enter_alone),
            lambda kv: kv.create(max_tokens=4).resume(), "rows", "the row of sequence 1 says"),
    Mistake("a row is not counted when its state changes", around(Columns, "enter", _uncounted),
            lambda kv: kv.create(max_tokens=4), "counters are sums", "0 rows are said to be CREA"),
    Mistake("what a sequence leaves is not counted", around(runs, "_left", _left_uncounted),
            lambda kv: said(kv, PROMPT).drop(), "counters are sums", "are said to be PARKED"),
    Mistake("a range is not counted", around(Range, "enter", _range_uncounted),
            lambda kv: kv.create(max_tokens=4).resume(), "counters are sums",
            "0 ranges are said to be RESERVED, 1 are"),
    Mistake("what is needed of a chain is not counted", around(Span, "need", _needed_alone),
            _turns_that_leave, "counters are sums", "frames of spans are said to be spare",
            {"slots": 0, "frames": 24, "max_tokens": 24, "spans": "all"}),
    Mistake("a margin that was taken is not missed",
            around(Ladder, "_shortened", _not_missed), _taken, "counters are sums",
            "is said to lack nothing up to 4 of 4", {"map_ahead_frames": 1}),
    Mistake("a promise is not counted", around(Sequence, "set_capacity", _unpromised),
            lambda kv: kv.create(max_tokens=16, reserve=True).resume(), "counters are sums",
            "0 frames are said to be promised, 4 are"),
    Mistake("a row keeps the life of who was there", around(Columns, "set_life", nothing),
            lambda kv: said(kv, PROMPT).drop(), "rows", "the row of sequence 1 says"),
    Mistake("who has lost its bytes keeps its tokens", forgets(Sequence, "forget_tokens"),
            lambda kv: said(kv, PROMPT).drop(), "leaving releases", "is DROPPED and has tokens"),
    Mistake("a closed sequence stays when its last step is settled",
            around(Stepping, "_plan_settle", _no_leavers), _close_with_a_step,
            "leaving releases", "is CLOSING and no step names it"),
    Mistake("who is closed is asked for copies", around(Reuse, "left", _keeps_doubles),
            _hit_then_close, "leaving releases", "is gone, and a reclaim would ask it",
            {"spans": "off"}),
    Mistake("what a step was told is written over", around(Step, "__init__", _of_the_columns),
            _suspend_with_a_step, "fences", "was, and is not"),
    Mistake("a fence does not wait for steps", forgets(Flight, "_hold_by_steps"),
            _suspend_with_a_step, "fences", "was, and is not"),
    Mistake("later steps live on", forgets(Step, "void"), _reject, "steps in order",
            "steps end at"),
)  # fmt: skip


# What is in flight.


def _half(right: Callable[..., None], flight: Flight, transfer: Transfer, size: int = 0) -> None:
    transfer.slots = ()
    right(flight, transfer, size)


def _drifts(right: Callable[..., None], flight: Flight, transfer: Transfer, ok: bool) -> None:
    right(flight, transfer, ok)
    flight.loads += transfer.loads


def _ends(right: Callable[..., None], flight: Flight, transfer: Transfer, *rest: Any) -> None:
    right(flight, transfer, *rest)
    assert transfer.seq is not None
    transfer.seq.transfer = transfer


def _round_trip(kv: Manager) -> None:
    seq = said(kv, PROMPT)
    seq.suspend()
    kv.poll()
    seq.resume()
    kv.poll()


def _of_another(right: Callable[..., Transfer], kv: Manager, *args: Any, **how: Any) -> Transfer:
    transfer = right(kv, *args, **how)
    transfer.range = next(one.range for one in kv.sequences.values() if one.range is not None)
    return transfer


def _hit(kv: Manager) -> None:
    said(kv, PROMPT)
    kv.create([*PROMPT, 0], 16).resume()


def _elsewhere(right: Callable[..., Any], actor: Actor, plan: Any) -> list[tuple[int, int, int]]:
    """A copy reads the memory of another: of the next range, which is in use too."""
    extent, gap = 4, 1
    away = (extent + gap) * actor.frame_bytes
    return [(gpu + away, host, size) for gpu, host, size in right(actor, plan)]


def _first_of_two_suspended(kv: Manager) -> None:
    first, _ = said(kv, PROMPT), said(kv, [*OTHER, *OTHER])
    first.suspend()


def _from_the_start(
    right: Callable[..., list[tuple[int, int, int]]], kv: Manager, range_: Any, *rest: Any
) -> list[tuple[int, int, int]]:
    """A copy of hits begins at the base, over what is aliased."""
    pieces = right(kv, range_, *rest)
    first = pieces[0][0] - range_.base if pieces else 0
    return [(address - first, source, size) for address, source, size in pieces]


def _hit_partly_mapped(kv: Manager) -> None:
    said(kv, LONG)
    more(kv, [*LONG[:7], 0])


def _not(kind: str) -> Callable[..., None]:
    def wrong(right: Callable[..., None], index: Index, node: Node, holder: Any) -> None:
        if holder[0] != kind:
            right(index, node, holder)

    return wrong


def _hit_on_the_host(kv: Manager) -> None:
    said(kv, PROMPT).close()
    kv.poll()
    kv.trim()
    kv.create([*PROMPT, 0], 16).resume()


def _readers_lost(right: Callable[..., None], reuse: Reuse, transfer: Transfer) -> None:
    right(reuse, transfer)
    reuse.host.readers.clear()


FLIGHT: Final = (
    Mistake("loads are not counted when they end", around(Flight, "_complete", _drifts),
            _round_trip, "counters are sums", "1 loads are said to be in flight"),
    Mistake("what has arrived stays unreadable",
            around(Flight, "_of_sequence", _without("loading")), _round_trip,
            "a failed load is unreadable", "pages loading; filled: False"),
    Mistake("who reads a slot is not noted", around(Reuse, "_reading", _readers_lost),
            _hit_on_the_host, "a hit stays", "the books say {}", {"spans": "off"}, "latest"),
    Mistake("a copy does not say which slots it has", around(Flight, "issue", _half),
            lambda kv: said(kv, PROMPT).suspend(), "slots in flight", "no transfer names it"),
    Mistake("a sequence waits for what has ended", around(Flight, "_end", _ends), _round_trip,
            "own copies", "which is not in flight"),
    Mistake("a load is said to be of another's memory", around(Admission, "_load", _of_another),
            _hit, "own copies", "which is not its own", {"spans": "off"}),
    Mistake("a copy reads the memory of another", around(Actor, "_pieces", _elsewhere),
            _first_of_two_suspended, "no reuse in flight", "which are not its own", {}, "latest"),
    Mistake("a copy writes where a span is mapped",
            around(Admission, "_hit_pieces", _from_the_start), _hit_partly_mapped,
            "copies write what loads", "aliases", {"slots": 0}, "latest"),
    Mistake("a hit is not held", around(Index, "hold", _not("load")), _hit_on_the_host,
            "held blocks", "and should be by [('load'", {"spans": "off"}, "latest"),
    Mistake("what is kept is not held", around(Index, "hold", _not("write")),
            lambda kv: said(kv, PROMPT).close(), "held blocks", "and should be by [('write'",
            {}, "latest"),
)  # fmt: skip


# The index.


def _ordinal(right: Callable[..., None], node: Node, root: Any, parent: Any, *rest: Any) -> None:
    right(node, root, parent, *rest)
    node.ordinal = 0 if parent is None else parent.ordinal


def _any_victims(right: object, index: Index, count: int) -> list[Node]:
    """The oldest, whatever is behind them."""
    nodes = sorted(index.slots.values(), key=lambda node: node.ordinal)
    return [node for node in nodes if not node.pins][:count]


def _mirrors_then_suspends(kv: Manager) -> None:
    said(kv, PROMPT)
    kv.poll()
    other = said(kv, OTHER[:2], salt=b"other", commit=False)
    other.suspend()


def _out_of_line(right: object, reuse: Reuse, node: Node, seq: Sequence) -> None:
    reuse.doubles.add(seq)


def _two_say_the_same(kv: Manager) -> None:
    for _ in range(2):
        seq = kv.create(max_tokens=16)
        seq.resume()
        go_on(kv, seq, PROMPT)


def _unfilled(right: Callable[..., Any], reuse: Reuse, *args: object) -> Any:
    """What is full and known is not said to be."""
    naming = right(reuse, *args)
    naming.operands.clear()
    return naming


def _any_tenant(right: Callable[..., Any], reuse: Reuse, identity: Identity, *rest: Any) -> Any:
    return right(reuse, Identity(b"", None, identity.weights_epoch), *rest)


def _two_tenants(kv: Manager) -> None:
    said(kv, PROMPT)
    kv.create([*PROMPT, 0], 16, salt=b"another").resume()


INDEX: Final = (
    Mistake("a full block stays open", around(Reuse, "naming", _unfilled),
            lambda kv: said(kv, PROMPT), "groups agree", "knows block 0, whose page is ACTIVE"),
    Mistake("a block of another tenant is found", around(Reuse, "hits", _any_tenant),
            _two_tenants, "isolation", "is of sequence 2"),
    Mistake("blocks are counted wrongly", around(Node, "__init__", _ordinal),
            lambda kv: said(kv, PROMPT), "blocks in order", "comes behind block"),
    Mistake("who says the same does not stand in line", around(Reuse, "_line_up", _out_of_line),
            _two_say_the_same, "index coherence", "not once in line for it"),
    Mistake("what has something behind it is a victim", around(Index, "victims", _any_victims),
            _mirrors_then_suspends, "victims", "behind it did not",
            {"slots": 4, "write_through": "on_commit", "spans": "off"}),
)  # fmt: skip


# What can be found.


def _spilled(
    right: Callable[..., None], reuse: Reuse, nodes: object, owner: object, _: Loss
) -> None:
    right(reuse, nodes, owner, Loss.SPILLED)


def _to_any_heir(right: Callable[..., Any], *args: Any, room: int = 0, **named: Any) -> Any:
    return right(*args, **named)


def _close_while_an_heir_loads(kv: Manager) -> None:
    first = said(kv, PROMPT)
    kv.create([*PROMPT, 0], 16).resume()
    first.close()


KEPT: Final = (
    Mistake("another reason is told", around(Reuse, "_bereave", _spilled),
            lambda kv: said(kv, PROMPT).close(), "nothing forgotten", "is said to be spilled",
            {"slots": 0, "spans": "off"}),
    Mistake("who has lost its copy waits for no other", forgets(Index, "await_copy"),
            _mirrors_then_suspends, "copies awaited", "it waits for no copy",
            {"slots": 4, "write_through": "on_commit", "spans": "off"}),
    Mistake("the host keeps nothing", around(Reuse, "leaving", _to_any_heir),
            _close_while_an_heir_loads, "left to readers", "goes to one that cannot read it",
            {"spans": "off"}, "latest"),
    Mistake("copies wait for a better time", forgets(Mirrors, "copy_out"),
            lambda kv: said(kv, PROMPT) and kv.poll(), "copies go out", "and a slot is free",
            {"write_through": "on_commit"}),
)  # fmt: skip


MISTAKES: Final = (*MEMORY, *SEQUENCES, *FLIGHT, *INDEX, *KEPT)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name)
def test_a_mistake_is_reported(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.show(monkeypatch)
