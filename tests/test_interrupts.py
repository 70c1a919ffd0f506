"""A few of the lines at which a call can be cut short, and a few signals.

All lines are played by `python -m tests.interrupts`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from kvstate import Manager
from kvstate.gpu import open_device
from tests.device.factories import FAKE, opened, segments
from tests.faults.cut import CUT_FAULTS, CutFault
from tests.faults.scenarios import Scenario
from tests.interrupts import ERRORS, FINALISER, AtLine, play_all, play_opening, quiet
from tests.runs import PLAYED, calls_of, left
from tests.test_planted import patched

ROOT: Final = Path(__file__).parent.parent
EVERY: Final = {
    "KeyboardInterrupt": 499,
    "MemoryError": 997,
    "RecursionError": 1499,
    FINALISER: 997,
}
"""Of the lines of each scenario, every so many are played here."""
CARD_EVERY: Final = {"KeyboardInterrupt": 199, "MemoryError": 499}
"""The same, of the lines of a card's device alone."""
OPENING_EVERY: Final = 41
SIGNALS: Final = 40


def test_every_public_call_is_played() -> None:
    public = {name for name in dir(Manager) if not name.startswith("_")}
    calls = {name for name in public if callable(getattr(Manager, name))}
    played = {name for scenario in PLAYED for name, _ in calls_of(scenario)}
    assert calls - {"close"} == played - {"open", "end"}


@pytest.mark.parametrize("what", EVERY)
@pytest.mark.parametrize("kind", ["host", "null"])
@pytest.mark.parametrize("scenario", PLAYED, ids=lambda one: one.name)
def test_a_line_that_is_cut_short(scenario: Scenario, kind: str, what: str) -> None:
    first = PLAYED.index(scenario) * 17 % EVERY[what]
    tally = play_all(scenario, kind, what, EVERY[what], first)
    assert tally.problems == []
    assert tally.lines > 3
    wanted = {"intact", "poisoned", "closing", "intact, and done"} if what in ERRORS else None
    assert wanted is None or tally.outcomes.keys() <= wanted


@pytest.fixture
def only_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lines of devices count."""
    monkeypatch.setattr(AtLine, "within", "gpu/")


@pytest.mark.usefixtures("only_gpu")
@pytest.mark.parametrize("what", CARD_EVERY)
@pytest.mark.parametrize("scenario", PLAYED, ids=lambda one: one.name)
def test_a_line_of_a_card_that_is_cut_short(scenario: Scenario, what: str) -> None:
    """On a driver without a card, which counts what it makes and takes back."""
    first = PLAYED.index(scenario) * 17 % CARD_EVERY[what]
    tally = play_all(scenario, "fake", what, CARD_EVERY[what], first)
    assert tally.problems == []
    assert tally.lines > 3
    assert tally.outcomes.keys() <= {"intact", "poisoned", "closing", "intact, and done"}


@pytest.mark.usefixtures("only_gpu")
@pytest.mark.parametrize("what", CARD_EVERY)
def test_a_card_that_is_cut_short_while_it_is_opened_leaves_nothing(what: str) -> None:
    tally = play_opening("fake", what, OPENING_EVERY)
    assert tally.problems == []
    assert tally.lines > 20


def test_a_byte_check_of_a_card_that_is_cut_short_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AtLine, "within", "gpu/checks")
    before = left("fake")
    with quiet() as unraisable:
        for nth in count(1):
            place = AtLine(nth, interrupt)
            with opened(FAKE[0]) as rig:
                address = rig.mapped(1)
                with suppress(KeyboardInterrupt), place:
                    rig.write(segments((address, 0, 16, 1)))
                    assert list(rig.verify(segments((address, 0, 16, 1))).wrong) == [0]
            assert left("fake") == before
            if not place.place:
                break
    assert nth > 100
    assert {one.partition("(")[0] for one in unraisable} <= {"KeyboardInterrupt"}, "in a finaliser"


@pytest.mark.parametrize("kind", ["host", "null"])
def test_a_device_that_is_cut_short_while_it_is_opened_leaves_nothing(kind: str) -> None:
    device: Any = None
    with quiet() as unraisable:
        before = left()
        for nth in count(1):
            try:
                with AtLine(nth, interrupt):
                    device = open_device(kind)
            except KeyboardInterrupt:
                assert left() == before
            else:
                break
        device.close()
    assert unraisable == []
    assert nth > 20


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.hunt
@pytest.mark.parametrize("fault", CUT_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_of_the_guard_is_found(fault: CutFault, tmp_path: Path) -> None:
    patched(fault, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.interrupts", "--device", fault.device, "--what", fault.what,
         "--scenario", fault.scenario, "--call", fault.call, "--within", fault.within,
         "--workers", "1"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"{fault.wrong}:" in done.stdout


def test_signals_in_an_ordinary_loop() -> None:
    """Whenever they come."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.signals", str(SIGNALS), "1"], cwd=ROOT, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    hit = found["outcomes"].pop("in a finaliser, where it is lost", 0)
    assert sum(found["outcomes"].values()) == SIGNALS, f"{hit} are counted as not hit too"
