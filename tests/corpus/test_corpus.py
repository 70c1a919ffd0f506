"""The corpus: every case passes, and with its mistake planted every case fails, as what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvstate.spec.laws import LAWS
from tests.corpus.apart import Apart
from tests.corpus.case import REACHED, Case
from tests.corpus.cases import CASES
from tests.corpus.page import PAGE, page
from tests.corpus.reports import LEFT, REPORTS
from tests.test_planted import patched

NUMBERED = list(enumerate(CASES))
NAMES = [case.name for case in CASES]
LATER_LAWS = {"law 22 (events replay)"}
"""Laws of the design whose feature is tested apart from the manager."""


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_report_is_ruled_out(case: Case) -> None:
    case.play()


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    with Apart() as processes:
        yield processes


@pytest.mark.parametrize(("number", "case"), NUMBERED, ids=NAMES)
def test_the_planted_mistake_is_seen(number: int, case: Case, apart: Apart) -> None:
    with TemporaryDirectory() as folder:
        patched(case.fault, Path(folder))
        assert case.law in apart.kinds(number, Path(folder))


def test_every_case_says_what_it_is_for() -> None:
    laws = {f"law {law.number} ({law.name})" for law in LAWS} | LATER_LAWS
    assert len(set(NAMES)) == len(CASES)
    for case in CASES:
        assert case.law != REACHED
        assert case.law in laws or not case.law.startswith("law"), case.name
        assert (case.run is None) == bool(case.program) == (case.config is not None), case.name


def test_every_report_has_a_case_and_every_case_a_report() -> None:
    assert {entry for case in CASES for entry in case.entries} == set(REPORTS)
    assert not set(REPORTS) & set(LEFT)
    assert all(report.why for report in LEFT.values())


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page()
