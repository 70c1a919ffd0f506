"""The page of reports: made from the cases, so that it says what is tested and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.corpus.case import Case
from tests.corpus.cases import CASES
from tests.corpus.reports import ARENA, LEFT, REPORTS, Report

PAGE: Final = Path(__file__).parent.parent.parent / "docs" / "reports.md"

_HEAD: Final = """\
# Public reports, and what rules each of them out

Made by `python -m tests.corpus` from `tests/corpus/`; do not edit.

Each case replays the events of a report, in our own terms, on the real manager and the host device,
with every law and byte check on; a few that are about keys, events or sizes are functions. Each has
a planted mistake too: with that in a copy of the sources the very same case must fail, and as the
last column says. That is a [law](machines/laws.md); `bytes` (somebody reads what he did not write);
`scrub` (free memory holds what somebody wrote);
`fault` (the device was asked for what would crash it); `device` (it refused what it was asked for);
`model` (lengths or states are not what the caller was told); `replay` (a call raised something else
than the case says); `legal call refused`; a crash; or what the case itself asserts, where no law
speaks of it.

Entries `S` were met while an arena-backed manager was built in the open
({arena}).

| report | what went wrong there | test | seen as |
|---|---|---|---|
"""

_LEFT: Final = """
## What has no case, and why

{cases} of {all} reports have cases. The others are about what is not there yet, or not of this
project:

| report | what went wrong there | what it is about |
|---|---|---|
"""

_FOOT: Final = """
## How a case is built, and how to add one

A case is a small configuration and a program: calls of `kvstate.trace`, played by the player of the
fuzz, and between them what has to be so at that point (`matched`, `pages`, `frames`, `counted`), so
that a case which no longer gets to its situation fails. A call that must be refused names its
error. Where order on the device matters, a case has `streams="adversarial"` and several seeds: all
must pass, and with the mistake planted one must fail as named. What has no calls yet (keys, resets,
events) is a function over the index instead. To add one: describe the report in `reports.py`, in
your own words; write its `Case` in the file of its kind; plant the mistake, as a small and
distinctive text that the source has exactly once; put what sees it in `law`; run
`pytest tests/corpus`; and write this page again. Assert nothing that no mistake can break.
"""


def page() -> str:
    """The whole page."""
    left = _LEFT.format(cases=len(REPORTS), all=len(REPORTS) + len(LEFT))
    rows = "".join(f"{row}\n" for row in _rows())
    without = "".join(
        f"| {_where(entry, one)} | {one.wrong} | {one.why} |\n" for entry, one in LEFT.items()
    )
    return _HEAD.format(arena=ARENA) + rows + left + without + _FOOT


def _rows() -> Iterator[str]:
    for entry, report in REPORTS.items():
        for case in _cases(entry):
            yield f"| {_where(entry, report)} | {report.wrong} | {case.name} | {case.law} |"


def _where(entry: str, report: Report) -> str:
    return entry if report.source == ARENA else f"{entry}, {report.source}"


def _cases(entry: str) -> list[Case]:
    return [case for case in CASES if entry in case.entries]
