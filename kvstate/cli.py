"""The command line: `kvstate fuzz`, `replay`, `diagram`, `doctor`.

The only place that puts managers and devices together by name. Each command prints for people, or
with `--json` one object on standard output; whatever else is said goes to standard error. Exit
codes: 0 all held, 1 something that must hold did not, 2 misuse.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstate import trace
from kvstate.campaign import fuzz as fuzzing
from kvstate.campaign.fuzz import Failure, Tally
from kvstate.campaign.player import Broken
from kvstate.campaign.report import Found, found, fuzz_report, fuzz_table, program_text
from kvstate.campaign.workers import run_workers
from kvstate.device import ByteDevice
from kvstate.errors import KvStateError
from kvstate.gpu import open_device

HELD, BROKEN, MISUSE = 0, 1, 2
FAILURES: Final = Path("fuzz-failures")

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="The lifecycle of KV-cache memory as explicit tables: fuzz it, replay it, draw it.",
)  # fmt: skip
out = Console()
err = Console(stderr=True)


class Kind(StrEnum):
    """A device by name."""

    AUTO = "auto"
    HOST = "host"
    NULL = "null"


class Streams(StrEnum):
    """When simulated work runs."""

    EAGER = "eager"
    ADVERSARIAL = "adversarial"


DeviceOption = Annotated[Kind, typer.Option(help="Where the memory is.")]
StreamsOption = Annotated[Streams, typer.Option(help="When simulated work runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def open_named(kind: str, streams: str, seed: int) -> ByteDevice:
    """A device by name; the name comes first so that it can be fixed for workers."""
    return open_device(kind, streams=streams, seed=seed)


@app.command()
def fuzz(
    *,
    device: DeviceOption = Kind.AUTO,
    seconds: Annotated[float, typer.Option(help="How long, if --calls does not say.")] = 60,
    calls: Annotated[int | None, typer.Option(help="How many calls, at least.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a run; new by default.")] = None,
    streams: StreamsOption = Streams.ADVERSARIAL,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    known: Annotated[
        list[Path] | None, typer.Option(help="Folders of traces to try first.")
    ] = None,
    save: Annotated[Path, typer.Option(help="Where failures are written.")] = FAILURES,
    demand: Annotated[
        bool, typer.Option(help="Fail if a row, state, law or refusal was never seen.")
    ] = True,
    json: JsonOption = False,
) -> None:
    """Stateful fuzz of manager and device: laws and bytes are checked after every call."""
    seed = secrets.randbits(32) if seed is None else seed
    opened = partial(open_named, device.value)
    name = opened("eager", 0).name
    err.print(f"seed {seed}, device {name}, streams {streams.value}, workers {workers}")
    failures = _known([*(known or []), save], opened)
    started = monotonic()
    total = Tally()
    if not failures:
        enough = fuzzing.until(None if calls else seconds, calls)
        with _progress(json) as tell:
            total = run_workers(seed, workers, opened, streams.value, enough, tell)
        failures = [_tell_failure(failure, save) for failure in total.failures]
    took = monotonic() - started
    report = fuzz_report(seed, name, streams.value, workers, took, total, failures, demand)
    _show(report, json, fuzz_table(report))
    raise typer.Exit(BROKEN if report.violations or report.unseen else HELD)


@app.command()
def replay(
    source: Annotated[Path, typer.Argument(help="A kvstate trace.", exists=True, dir_okay=False)],
    *,
    device: DeviceOption = Kind.AUTO,
) -> None:
    """Replay a recorded trace through manager and device, checking everything again."""
    header, calls = trace.read(source)
    player = fuzzing.play(header, calls, partial(open_named, device.value))
    err.print(f"{len(calls)} calls, {player.bytes_verified:,} bytes verified: all held")


def _known(folders: list[Path], opened: fuzzing.OpenDevice) -> list[Found]:
    """Play the failures of earlier runs first; those that still fail."""
    still = []
    for path in sorted(path for folder in set(folders) for path in folder.glob("*.jsonl")):
        header, calls = trace.read(path)
        try:
            fuzzing.play(header, calls, opened)
        except Broken as broken:
            failure = Failure(broken.kind, broken.detail, header, calls, len(calls))
            still.append(_tell_failure(failure, path.parent))
    return still


def _tell_failure(failure: Failure, folder: Path) -> Found:
    """Say what failed, with the program and the command that plays it again."""
    one = found(failure, folder)
    err.print(f"[bold red]{escape(one.kind)}[/]: {escape(one.detail)}")
    err.print(
        f"{one.calls} calls (found with {one.found_calls}), {failure.header.streams} streams:"
    )
    err.print(escape(program_text(failure.program)), highlight=False)
    err.print(f"replay it with: [bold]{escape(one.replay)}[/]")
    return one


@contextmanager
def _progress(json: bool) -> Iterator[Callable[[Tally], None]]:
    """A line on the terminal that follows the sum; silent where nobody looks."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def tell(tally: Tally) -> None:
            rows = sum(1 for key in fuzzing.ROWS if tally.rows[key])
            text = f"{tally.calls:,} calls, {rows} of {len(fuzzing.ROWS)} rows"
            bar.update(task, description=f"{text}, {tally.bytes_verified:,} bytes verified")

        yield tell


def _show(report: msgspec.Struct, json: bool, table: RenderableType) -> None:
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        out.print(table)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    try:
        app()
    except KvStateError as error:
        err.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}")
        sys.exit(MISUSE)
    except Broken as broken:
        err.print(f"[bold red]{escape(broken.kind)}[/]: {escape(broken.detail)}")
        sys.exit(BROKEN)
