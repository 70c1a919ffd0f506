"""The laws that look at a call, and at the end: each is seen to fail.

A refusal is made where there is room, so that the refusal is the mistake. A failed call changes
something; a call that should not have been made lets completions in, or begins something. What a
manager does not give back is seen before its device takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import pytest
from attrs import evolve

from kvstate import Manager, Sequence, margins
from kvstate.admission import Admission
from kvstate.arena import Arena
from kvstate.core import Core
from kvstate.errors import ArgumentError, CapacityError, IllegalTransition, OutOfFrames, OutOfRows
from kvstate.gpu import HostDevice
from kvstate.observe import NOTHING, check_end, check_rest
from kvstate.reclaim import Ladder
from kvstate.reuse import Reuse
from kvstate.spec.facts import Failure, View
from kvstate.spec.laws import KINDS, LAWS, Law, laws
from kvstate.stepping import Stepping
from kvstate.tiers import HostSlots
from kvstate.view import view
from tests.conftest import Open, small
from tests.corpus.cases import CASES
from tests.mistakes import Mistake, around, forgets
from tests.test_laws import MISTAKES, OTHER, grow_then_close
from tests.test_reuse import PROMPT, go_on, said
from tests.test_spans import LONG, more

# Refusals: each is made where there is room, so that the refusal is the mistake.


def _short(place: str, needed: int = 1) -> OutOfFrames:
    return OutOfFrames("a call", needed, 0, 0, 0, place)


def _refuses(place: str) -> Callable[..., object]:
    def wrong(right: object, *args: object, **named: object) -> object:
        raise _short(place)

    return wrong


def _narrow(right: Callable[..., bool], kv: Manager, frames: int, sharing: Any = None) -> bool:
    """The gate is half as wide as it should be."""
    return not kv._running or kv.gpu.charged + frames <= kv.gpu.budget_frames // 2


def _gate(kv: Manager) -> None:
    said(kv, LONG)
    more(kv, [9])


def _last_row(right: Callable[..., Sequence], kv: Manager, *args: Any, **named: Any) -> Sequence:
    if len(kv.columns.free) < 2:
        raise kv._refused(OutOfRows("all rows are in use"))
    return right(kv, *args, **named)


def _all_rows(kv: Manager) -> None:
    for _ in range(kv.columns.rows):
        kv.create(max_tokens=4)


def _small_limit(right: Callable[..., Sequence], kv: Manager, *args: Any, **named: Any) -> Sequence:
    if args[1] > 4:
        raise kv._refused(_short("limit", 4))
    return right(kv, *args, **named)


def _room_for_less(right: Callable[..., Any], host: HostSlots, count: int) -> Any:
    return None if count > host.capacity // 2 else right(host, count)


def _one_range(right: Callable[..., Any], arena: Arena, extent: int) -> Any:
    """Only one range at a time."""
    return right(arena, extent) if len(arena.ranges) < 1 else None


def _as_they_are(right: object, ladder: Ladder) -> bool:
    """Nobody looks for addresses that could be freed."""
    return False


def _after_one_left(kv: Manager) -> None:
    grow_then_close(kv)
    more(kv, [9])


def _chat(kv: Manager) -> None:
    """Each turn begins before the one before it is closed, and leaves a span."""
    text, last = list[int](), list[Sequence]()
    for turn in range(16):
        text += [turn] * 4
        last.append(more(kv, [*text, 99]))
        go_on(kv, last[-1], text)
        for seq in last[:-1]:
            seq.close()
        del last[:-1]


def _retains(kv: Manager) -> None:
    """The new one needs the memory in which the range of the one that left retains something."""
    said(kv, LONG).close()
    kv.poll()
    more(kv, [5] * 13).resize(13)


def _gives_nothing_up(right: Callable[..., bool], kv: Manager, short: CapacityError) -> bool:
    retained = isinstance(short, OutOfFrames) and short.place == "retained"
    return not retained and right(kv, short)


def _promised(kv: Manager) -> None:
    """Another one takes what was promised, if it can."""
    promised = kv.create(max_tokens=16, reserve=True)
    promised.resume()
    for greedy in (more(kv, [9]), more(kv, [8])):
        with suppress(OutOfFrames):
            greedy.resize(16)


REFUSALS: Final = (
    Mistake("the gate is too strict", around(Admission, "_admits", _narrow), _gate, "progress",
            "the gate refused a resume of 1 frames", {"slots": 0}),
    Mistake("the last row is not given", around(Admission, "_admit", _last_row), _all_rows,
            "progress", "was refused for want of a row, 1 are free"),
    Mistake("long sequences are refused", around(Admission, "_admit", _small_limit),
            lambda kv: kv.create(max_tokens=8), "progress", "a create of 2 frames was refused"),
    Mistake("frames that are there are refused", around(Core, "_plan_frames", _refuses("budget")),
            lambda kv: kv.create(max_tokens=8).resume(), "progress", "refused 1 frames with 8"),
    Mistake("a step is refused frames", around(Stepping, "_plan_grow", _refuses("budget")),
            lambda kv: said(kv, PROMPT), "progress", "refused 2 frames with 8"),
    Mistake("a promise is kept from everybody",
            around(Core, "_check_promises", _refuses("reserve")), _gate, "progress",
            "of which are promised"),
    Mistake("a promise is not kept", forgets(Core, "_check_promises"), _promised, "promises",
            "frames were promised"),
    Mistake("addresses that are free are refused", around(Arena, "vacant", _one_range),
            _gate, "progress", "frames of addresses", {"slots": 0}),
    Mistake("addresses that nobody uses are refused", around(Ladder, "addresses", _as_they_are),
            _after_one_left, "progress", "in nobody's use",
            {"arena_bytes": 2 * 5 * 4096, "adopt": False}),
    Mistake("spans take the addresses of sequences",
            around(Arena, "leaves_room", lambda *_: True), _chat, "progress", "enough for all",
            {"slots": 0, "spans": "all", "max_sequences": 2, "max_tokens": 256, "frames": 128}),
    Mistake("what is retained is not given up", around(Core, "_find", _gives_nothing_up), _retains,
            "progress", "refused by retained", {"slots": 0, "retain": True, "frames": 4,
            "spans": "off"}),
    Mistake("the host is said to be full", around(HostSlots, "room", _room_for_less),
            lambda kv: said(kv, PROMPT).suspend(), "progress", "refused 4 host slots with 4",
            {"slots": 4}),
)  # fmt: skip


@pytest.mark.parametrize("mistake", REFUSALS, ids=lambda one: one.name)
def test_a_wrong_refusal_is_reported(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake.show(monkeypatch)


# Calls that fail, and calls that should not have been made.


def _scribbles(right: Callable[..., None], kv: Manager, seq: Sequence, *rest: Any) -> None:
    """A call has written down what it was told before it finds out that it is illegal."""
    kv.columns.open_block[seq.row] += 1
    right(kv, seq, *rest)


def _commit_too_much(kv: Manager) -> None:
    seq = said(kv, PROMPT)
    go_on(kv, seq, [*PROMPT, 1])
    with suppress(ArgumentError):
        seq.commit([1, 2, 3])


def _polls_first(right: Callable[..., Any], kv: Manager, *args: Any) -> Any:
    kv.flight.poll()
    return right(kv, *args)


def _settle_out_of_order(kv: Manager) -> None:
    """While a load is in flight."""
    seq = said(kv, PROMPT)
    seq.suspend()
    kv.poll()
    seq.resume()
    _, second = kv.step(kv.batch([seq]), 1), kv.step(kv.batch([seq]), 1)
    with suppress(IllegalTransition):
        kv.settle(second)


def _mirrors_first(right: Callable[..., None], kv: Manager, batch: Any) -> None:
    assert kv.mirrors is not None
    kv.mirrors.copy_out()
    right(kv, batch)


def _step_of_one_that_waits(kv: Manager) -> None:
    said(kv, PROMPT)
    with suppress(IllegalTransition):
        kv.step(kv.batch([kv.create(max_tokens=4)]))


CALLS: Final = (
    Mistake("an illegal commit writes first", around(Core, "_check_length", _scribbles),
            _commit_too_much, "all or nothing", "sequence 1 changed from"),
    Mistake("a settle out of order lets a load end", around(Stepping, "_plan_settle", _polls_first),
            _settle_out_of_order, "all or nothing", "let the ends of copies"),
    Mistake("an illegal step copies out", around(Stepping, "_check_step", _mirrors_first),
            _step_of_one_that_waits, "all or nothing", "an illegal call has changed",
            {"write_through": "on_commit"}),
)  # fmt: skip


@pytest.mark.parametrize("mistake", CALLS, ids=lambda one: one.name)
def test_a_call_that_fails_and_changes_something_is_reported(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake.show(monkeypatch)


def law(name: str) -> Law:
    (one,) = (one for one in LAWS if one.name == name)
    return one


@pytest.fixture
def moment(open_manager: Open) -> View:
    """A running sequence, one on its way to the host, and a step in flight."""
    kv = open_manager(HostDevice(streams="latest"))
    first, second = said(kv, PROMPT), said(kv, OTHER)
    kv.step(kv.batch([first]), 2)
    second.suspend()
    return view(kv)


def test_a_failed_call_adds_no_holder_and_releases_none(moment: View) -> None:
    """But for what has ended, and for the wait that its caller asked for."""
    failed = Failure(touched=frozenset(), lost=False, illegal=False)
    check = law("all or nothing").violations
    (copy,), (first, second) = moment.transfers, moment.ranges
    assert second.holders == {("transfer", copy.token)}
    assert not check(moment, moment, failed)
    for now, says in (
        (evolve(second, holders=frozenset()), "is not held by ('transfer', 1) any more"),
        (evolve(second, holders=second.holders | {("transfer", 9)}), "held by ('transfer', 9)"),
    ):
        after = evolve(moment, ranges=(first, now))
        assert any(says in line for line in check(moment, after, failed))
    ended = evolve(moment, ranges=(first, evolve(second, holders=frozenset())), transfers=())
    assert not check(moment, ended, failed)
    fence = evolve(copy, token=9, outward=False)
    waits = evolve(first, holders=frozenset({("fence", 9)}))
    begun = evolve(moment, ranges=(waits, second), transfers=(copy, fence))
    assert not check(moment, begun, failed)
    assert check(moment, begun, evolve(failed, illegal=True)), "what is illegal changes nothing"


def test_what_a_step_was_told_stays_so(moment: View) -> None:
    (step,), (seq, other) = moment.steps, moment.sequences
    check = law("fresh tables").violations
    assert not check(moment, moment)
    for after, says in (
        (evolve(moment, steps=(evolve(step, bases=(7,)),)), "was issued as"),
        (evolve(moment, steps=(evolve(step, issued=((seq.row, 8, 9),)),)), "was issued as"),
        (evolve(moment, sequences=(evolve(seq, uid=99), other)), "has another sequence now"),
        (evolve(moment, sequences=(evolve(seq, range=9), other)), "has moved while step 3 writes"),
    ):
        assert any(says in line for line in check(moment, after)), says


def _writes(kv: Manager) -> None:
    said(kv, PROMPT[:1])


def test_margins_that_are_made_all_at_once_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    Mistake(
        "margins are made all at once", around(margins, "pace", lambda *_: 100), _writes,
        "margins", "3 frames were mapped ahead in one call, which may map 1",
        {"map_ahead_frames": 3},
    ).show(monkeypatch)  # fmt: skip


# The end.


def _keeps_one(right: Callable[..., None], ladder: Ladder, keep: int) -> None:
    right(ladder, keep + 1)


def _rest(kv: Manager) -> None:
    said(kv, PROMPT).close()
    said(kv, OTHER)
    check_rest(kv)


def _end(kv: Manager) -> None:
    said(kv, PROMPT)
    kv.close()
    check_end(kv)


ENDS: Final = (
    Mistake("a frame is kept", around(Ladder, "release", _keeps_one), _rest, "at rest",
            "1 pool_ids are left"),
    Mistake("host copies are kept", forgets(Reuse, "make_room"), _rest, "at rest",
            "host slots are not free"),
    Mistake("parked memory is kept", forgets(Ladder, "spill"), _rest, "at rest",
            "ranges are left"),
    Mistake("nothing is given back", forgets(Manager, "_end"), _end, "clean end",
            "has given nothing back"),
    Mistake("frames are not released at the end", forgets(Ladder, "release"), _end, "clean end",
            "has not given back Ledger"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", ENDS, ids=lambda one: one.name)
def test_what_is_not_given_back_is_reported(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake.show(monkeypatch)


def test_what_a_closed_device_still_has_is_reported(moment: View) -> None:
    check = law("clean end").violations
    assert not check(NOTHING, NOTHING)
    assert any("the device still holds" in line for line in check(NOTHING, moment.ledger))


def test_a_poisoned_manager_leaves_the_end_to_its_device() -> None:
    kv = Manager(small(), HostDevice())
    said(kv, PROMPT)
    kv.actor.poison("a test says so")
    kv.close()
    check_end(kv)
    assert kv.left is None


def test_a_manager_at_rest_can_be_used_again(open_manager: Open) -> None:
    kv = open_manager(spans="all", write_through="on_commit", retain=True)
    for _ in range(2):
        said(kv, PROMPT).close()
        second = more(kv, [*PROMPT, 0])
        step = kv.step(kv.batch([second]), 1)
        second.suspend() if kv.counters["suspends"] else second.close()
        check_rest(kv)
        assert (step.state_name, kv.stats().frames) == ("SETTLED", {"ABSENT": 8})


# Every law.

ELSEWHERE: Final = {
    "fresh tables": "above",
    "margins": "above",
    "remaps": "tests/test_spans.py",
    "livelock": "tests/test_progress.py",
    "starvation": "tests/test_progress.py",
}
"""Laws that are seen to fail without a mistake that is planted."""


def test_every_law_is_seen_to_fail() -> None:
    planted = {one.law for one in (*MISTAKES, *REFUSALS, *CALLS, *ENDS)}
    cases = {case.law.partition("(")[2].rstrip(")") for case in CASES}
    names = {one.name for one in LAWS}
    assert len(names) == len(LAWS)
    assert planted <= names
    assert names - planted - cases - ELSEWHERE.keys() == set()
    assert {one.kind for one in LAWS} == set(KINDS)
    assert sum(len(laws(kind)) for kind in KINDS) == len(LAWS)
