"""What a fuzz campaign reports: the keys of `kvstate fuzz --json`, and the same for people."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.table import Table

from kvstate import trace
from kvstate.campaign.fuzz import LINKS, ROWS, STATES, Failure, Tally, save


class Found(msgspec.Struct, frozen=True):
    """A failure that was found, and how to see it again."""

    kind: str
    detail: str
    calls: int
    """Calls of the shortest program found."""
    found_calls: int
    """Calls of the program that failed first."""
    cut_short: bool
    """Shrinking was: `kvstate shrink` on the trace goes on."""
    trace: str
    """The file that it was written to."""
    replay: str
    """The command that plays it."""


class FuzzReport(msgspec.Struct, frozen=True):
    """The keys are stable: others may be added."""

    seed: int
    device: str
    streams: str
    workers: int
    seconds: float
    episodes: int
    calls: int
    calls_per_second: float
    rows_fired: int
    rows_total: int
    links_fired: int
    links_total: int
    states_reached: int
    states_total: int
    laws: dict[str, int]
    """How often each law was checked."""
    refusals: dict[str, int]
    """Capacity errors, by the check that refused."""
    device_calls: dict[str, int]
    bytes_verified: int
    mismatches: int
    """Failures in which bytes were wrong."""
    violations: int
    """All failures."""
    interrupted: bool
    """It was ended before its time, and nothing is demanded of it."""
    unseen: list[str]
    """What a campaign must see at least once, and this one did not."""
    failures: list[Found]


def found(failure: Failure, folder: Path) -> Found:
    """Write a failure down and say where."""
    path = save(failure, folder)
    return Found(
        failure.kind,
        failure.detail,
        len(failure.program),
        failure.found_calls,
        failure.cut_short,
        str(path),
        f"kvstate replay {path}",
    )


def fuzz_report(
    seed: int, device: str, streams: str, workers: int, seconds: float, tally: Tally,
    failures: list[Found], demand: bool,
) -> FuzzReport:  # fmt: skip
    """The report of a campaign; `demand` says whether all must have been seen."""
    return FuzzReport(
        seed=seed,
        device=device,
        streams=streams,
        workers=workers,
        seconds=round(seconds, 2),
        episodes=tally.episodes,
        calls=tally.calls,
        calls_per_second=round(tally.calls / seconds, 1),
        rows_fired=sum(1 for key in ROWS if tally.rows[key]),
        rows_total=len(ROWS),
        links_fired=sum(1 for key in LINKS if tally.links[key]),
        links_total=len(LINKS),
        states_reached=sum(1 for key in STATES if key in tally.states),
        states_total=len(STATES),
        laws=dict(tally.laws),
        refusals=dict(tally.refused),
        device_calls=dict(tally.device_calls),
        bytes_verified=tally.bytes_verified,
        mismatches=sum(failure.kind == "bytes" for failure in failures),
        violations=len(failures),
        interrupted=tally.interrupted,
        unseen=tally.unseen() if demand and not failures and not tally.interrupted else [],
        failures=failures,
    )


def fuzz_table(report: FuzzReport) -> Table:
    """The report for people."""
    table = Table(title=f"kvstate fuzz: seed {report.seed}", show_header=False)
    refusals = sum(report.refusals.values())
    for name, value in (
        ("device, streams", f"{report.device}, {report.streams}"),
        ("calls", f"{report.calls:,} in {report.episodes:,} episodes"),
        ("speed", f"{report.calls_per_second:,.0f} calls a second, {report.workers} workers"),
        ("rows fired", f"{report.rows_fired} of {report.rows_total}"),
        ("links fired", f"{report.links_fired} of {report.links_total}"),
        ("states reached", f"{report.states_reached} of {report.states_total}"),
        ("laws checked", f"{sum(report.laws.values()):,} times, {len(report.laws)} laws"),
        ("refusals", f"{refusals:,} for lack of room, at {len(report.refusals)} places"),
        ("bytes verified", f"{report.bytes_verified:,}"),
        ("mismatches", str(report.mismatches)),
        ("violations", str(report.violations)),
    ):
        table.add_row(name, value)
    if report.interrupted:
        table.add_row("interrupted", "nothing is demanded of what was played until then")
    for missing in report.unseen:
        table.add_row("never seen", missing)
    return table


def program_text(program: list[trace.AnyCall]) -> str:
    """A program as a person reads it: one call a line."""
    lines = []
    for call in program:
        fields = msgspec.to_builtins(call)
        name = fields.pop("call")
        lines.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in fields.items())})")
    return "\n".join(lines)
