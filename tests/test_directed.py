"""Directed programs show all that a campaign must see, on whatever device: a row, link or refusal
that none of them fires is one that nothing needs, or one that wants a program."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest

from kvstate import trace
from kvstate.campaign import directed, fuzz
from kvstate.campaign.fuzz import Tally
from kvstate.campaign.workers import run_workers
from kvstate.device import ByteDevice
from kvstate.gpu import HostDevice
from kvstate.plan import Plan
from kvstate.spec.compiled import ObjectEvent, ObjectRow

KNOWN: Final = sorted((Path(__file__).parent / "known").glob("*.jsonl"))


def opened(streams: str, seed: int) -> ByteDevice:
    return HostDevice(streams=streams, seed=seed)


@pytest.mark.parametrize("granularity_bytes", [4096, 12288])
def test_they_show_everything(granularity_bytes: int) -> None:
    total = Tally()
    for tally in directed.tallies(opened, granularity_bytes):
        total.add(tally)
    assert total.failures == []
    assert total.unseen() == [], "`python -m tests.directed` chooses them anew"
    assert total.calls == directed.count_calls() < 1000


def test_each_shows_something_that_those_before_it_do_not() -> None:
    total, left = Tally(), len(fuzz.demanded())
    for tally in directed.tallies(opened, 4096):
        total.add(tally)
        assert len(total.unseen()) < left
        left = len(total.unseen())


def test_a_campaign_plays_them_first_and_stops_at_a_failure() -> None:
    (one, *_), told = list(islice(directed.tallies(opened, 4096), 1)), list[int]()
    bad = Tally(calls=3, failures=[fuzz.Failure("bytes", "", *directed.programs()[0], 3)])
    end = run_workers(
        1, 1, opened, "eager", lambda _: pytest.fail("nothing is drawn"),
        lambda now: told.append(now.calls), [one, bad, one],
    )  # fmt: skip
    assert told == [one.calls, one.calls + 3]
    assert end.failures == bad.failures


ENDS: Final = {"sequence", "held", "loading", "written"}
"""What the end of a copy says of its sequence, however it ends: each row takes what it needs."""


def test_nothing_that_a_call_means_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call has found out, some link of what it moves takes. Else a link is missing, and
    nothing says so until the books contradict each other."""
    left = set[str]()
    move = Plan.move

    def notes(
        plan: Plan, event: ObjectEvent, subject: Any, chosen: ObjectRow | None = None
    ) -> None:
        if not plan.moves:
            plan.operands = {over: list(found) for over, found in plan.operands.items()}
            taken[id(plan)] = set()
        taken[id(plan)] |= {over for over, *_ in event.links}
        move(plan, event, subject, chosen)

    def settles(plan: Plan) -> None:
        names = taken.pop(id(plan), set())
        untaken = {over for over, found in plan.operands.items() if any(map(_is_some, found))}
        for over in untaken - names - ENDS if plan.moves else ():
            left.add(f"{over}: {[f'{subject} {row.row}' for subject, row in plan.moves]}")
        settle(plan)

    taken, settle = dict[int, set[str]](), Plan.settle
    monkeypatch.setattr(Plan, "move", notes)
    monkeypatch.setattr(Plan, "settle", settles)
    for header, program in (*directed.programs(), *map(trace.read, KNOWN)):
        fuzz.play(header, program, opened)
    for name in islice(fuzz.episodes(2027), 12):
        assert not fuzz.episode(name, opened, fuzz.ANY).failures
    assert left == set()


def _is_some(target: object) -> bool:
    """A run of cells that has any, or an object."""
    return not isinstance(target, tuple) or target[1] < target[2]
