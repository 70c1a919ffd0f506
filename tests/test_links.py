"""Every link of the coupling fires: in a case, a scenario, a known failure, or in a program that
was made for it. A link that none fires is none that anything needs."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest

from kvstate import trace
from kvstate.campaign import fuzz
from kvstate.campaign.fuzz import LINKS
from kvstate.campaign.player import Player
from kvstate.device import ByteDevice
from kvstate.gpu import HostDevice
from kvstate.plan import Plan
from kvstate.spec.compiled import ObjectEvent, ObjectRow
from tests.corpus.case import See
from tests.corpus.cases import CASES
from tests.faults.scenarios import SCENARIOS

HERE: Final = Path(__file__).parent
RARE: Final = sorted((HERE / "links").glob("*.jsonl"))
"""Programs of the fuzz, shrunk to what fires one link that hardly anything fires."""


def opened(streams: str, seed: int) -> ByteDevice:
    return HostDevice(streams=streams, seed=seed)


def fired(path: Path) -> set[str]:
    """The links that a trace fires. Everything else holds after every call."""
    return set(fuzz.play(*trace.read(path), opened).coverage.links)


def name_of(link: str) -> str:
    """What the file of a link is called."""
    return "-".join(re.split(" -> | over | when ", link))


@pytest.mark.parametrize("path", RARE, ids=lambda path: path.stem)
def test_a_program_fires_the_link_that_it_is_for(path: Path) -> None:
    (link,) = (one for one in LINKS if name_of(one) == path.stem)
    assert link in fired(path)


def test_every_link_is_fired_by_some_program() -> None:
    seen = set[str]()
    for path in (*RARE, *(HERE / "known").glob("*.jsonl")):
        seen |= fired(path)
    for case in CASES:
        if case.config is not None:
            seen |= played(trace.Header(kvstate_trace=1, config=case.config), case.program)
    for scenario in SCENARIOS:
        seen |= played(scenario.header(4096, "eager"), scenario.program)
    assert set(LINKS) - seen == set()


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
    for path in (*RARE, *(HERE / "known").glob("*.jsonl")):
        fired(path)
    for name in islice(fuzz.episodes(2027), 60):
        assert not fuzz.episode(name, opened, fuzz.ANY).failures
    assert left == set()


def _is_some(target: object) -> bool:
    """A run of cells that has any, or an object."""
    return not isinstance(target, tuple) or target[1] < target[2]


def played(header: trace.Header, program: tuple[trace.AnyCall | See, ...]) -> set[str]:
    player = Player(header, HostDevice())
    player.play(call for call in program if not isinstance(call, See))
    return set(player.coverage.links)
