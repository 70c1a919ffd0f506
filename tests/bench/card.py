"""Benchmarks of the CUDA device, run by hand on one GPU.

    PYTHONPATH=. python tests/bench/card.py all --json card.json

or one of `calls`, `steady`, `copies`, `checks`, `frames`, `margins`, `attention`, `sharing`,
`admission` in place of `all`; `sharing` takes `admission` with it, unless `--part` says otherwise.
With `--device host --tiny` the same code runs in seconds without a GPU: to rehearse, not to
measure. `all` takes about six minutes on an H200. Up to 100 GiB of its memory and 30 GiB of the
host's are for `sharing`; the others take 32 GiB and 4 GiB. The JSON document is written again after
each benchmark, so that one that is stopped leaves what it has.

A benchmark that moves a wrong byte fails. Exit codes: 0 all ran, 1 one failed, 2 misuse. Not a
test: machines differ and are shared; what is compared is ours and the raw calls of the same run
(see `card_common`).
"""

from __future__ import annotations

import gc
import platform
import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Annotated, Final

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from kvstate.errors import ConfigError
from tests.bench.card_attention import attention
from tests.bench.card_calls import calls, steady
from tests.bench.card_checks import checks
from tests.bench.card_common import Card, Report
from tests.bench.card_copies import copies
from tests.bench.card_flight import flight
from tests.bench.card_frames import frames
from tests.bench.card_margins import margins
from tests.bench.card_sharing import DEFAULTS, Settings, admission, sharing

Bench = Callable[[Card], Report]
BENCHES: Final[dict[str, Bench]] = {
    "calls": calls, "steady": steady, "copies": copies, "checks": checks, "frames": frames,
    "margins": margins, "flight": flight, "attention": attention, "sharing": sharing,
    "admission": admission,
}  # fmt: skip

KIND: Final = re.compile(r"cuda(:\d+)?|host")
BOOKS_TOO: Final = re.compile(rf"{KIND.pattern}|null")
"""Of a benchmark that also counts what needs no memory."""

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
out = Console(width=180)


class Part(StrEnum):
    """What of `sharing` is measured."""

    SHARING = "sharing"
    ADMISSION = "admission"
    BOTH = "both"


class Document(msgspec.Struct):
    """Everything that one run measured."""

    device: str
    hardware: str
    tiny: bool
    versions: dict[str, str]
    seconds: float = 0
    benchmarks: dict[str, Report] = {}


def main(benches: Mapping[str, Bench], card: Card, file: Path | None) -> bool:
    """Run benchmarks one after the other, print each, and write the document; whether all ran."""
    started = perf_counter()
    document = Document(card.kind, card.hardware, card.tiny, _versions())
    gc.freeze()
    for name, bench in benches.items():
        report = document.benchmarks[name] = _run(bench, card)
        document.seconds = perf_counter() - started
        _show(name, report)
        if file is not None:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    return all(report.error is None for report in document.benchmarks.values())


def _run(bench: Bench, card: Card) -> Report:
    started = perf_counter()
    try:
        report = bench(card)
    except Exception as error:
        traceback.print_exc()
        report = Report(
            getattr(bench, "func", bench).__doc__ or "", error=f"{type(error).__name__}: {error}"
        )
    report.seconds = perf_counter() - started
    gc.collect()
    return report


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "cuda-bindings", "cuda-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _show(name: str, report: Report) -> None:
    """One table: the figures, and a column for each of their details."""
    details = list(dict.fromkeys(key for one in report.figures for key in one.details))
    table = Table(title=f"{name}: {report.title}, {report.seconds:.1f} s", title_justify="left")
    table.add_column("what", no_wrap=True)
    for column in ("ours", "raw", "unit", "ratio", "aim", "clock", *details):
        table.add_column(column, justify="right")
    for one in report.figures:
        ratio = _number(one.ratio)
        if one.aim is not None and one.ratio is not None:
            ratio = f"[{'green' if one.ratio >= one.aim else 'red'}]{ratio}[/]"
        table.add_row(
            one.name, _number(one.ours), _number(one.raw), one.unit, ratio, _number(one.aim),
            one.clock, *(_number(one.details.get(key)) for key in details),
        )  # fmt: skip
    out.print(table)
    for line in [*report.words, *([report.error] if report.error else [])]:
        out.print(line, markup=False)


def _number(value: float | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str | int):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


DeviceOption = Annotated[str, typer.Option(help="cuda, cuda:1, or host to rehearse")]
TinyOption = Annotated[bool, typer.Option(help="small sizes: to rehearse")]
JsonOption = Annotated[Path | None, typer.Option(help="write every figure here")]


def _measure(
    benches: Mapping[str, Bench], device: str, tiny: bool, json: Path | None,
    kinds: re.Pattern[str] = KIND,
) -> None:  # fmt: skip
    if not kinds.fullmatch(device):
        raise typer.BadParameter(f"{device!r}: no such device here", param_hint="device")
    try:
        card = Card(device, tiny=tiny)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="device") from None
    with closing(card):
        held = main(benches, card, json)
    raise typer.Exit(0 if held else 1)


def _command(benches: Mapping[str, Bench], kinds: re.Pattern[str] = KIND) -> Callable[..., None]:
    def command(
        device: DeviceOption = "cuda", tiny: TinyOption = False, json: JsonOption = None
    ) -> None:
        _measure(benches, device, tiny, json, kinds)

    return command


def _sharing(
    *,
    device: Annotated[
        str, typer.Option(help="cuda, cuda:1, host to rehearse, or null to count")
    ] = "cuda",
    tiny: TinyOption = False,
    json: JsonOption = None,
    part: Annotated[Part, typer.Option(help="the serving runs, single admissions")] = Part.BOTH,
    frame: Annotated[
        list[int] | None, typer.Option(min=2, help="MiB of a frame in serving; may be repeated")
    ] = None,
    budget: Annotated[float, typer.Option(help="GiB of frames")] = DEFAULTS.budget_gib,
    host: Annotated[float, typer.Option(help="GiB of host memory")] = DEFAULTS.host_gib,
    ahead: Annotated[
        int, typer.Option(help="frames mapped beyond the need of each sequence")
    ] = DEFAULTS.ahead_frames,
    seconds: Annotated[float, typer.Option(help="of each serving run")] = DEFAULTS.seconds,
    read: Annotated[
        float | None, typer.Option(help="GiB that a step reads back; by default all there is")
    ] = DEFAULTS.read_gib,
    seed: Annotated[int, typer.Option(help="of what requests say")] = DEFAULTS.seed,
) -> None:
    frames_mib = tuple(frame) if frame else DEFAULTS.frames_mib
    settings = Settings(frames_mib, budget, host, ahead, seconds, read, seed)
    benches: dict[str, Bench] = {
        "sharing": partial(sharing, settings=settings),
        "admission": admission,
    }
    if part is not Part.BOTH:
        benches = {part.value: benches[part.value]}
    _measure(benches, device, tiny, json, BOOKS_TOO)


for _name, _bench in BENCHES.items():
    if _bench is not sharing:
        _kinds = BOOKS_TOO if _bench is margins else KIND
        app.command(_name, help=_bench.__doc__)(_command({_name: _bench}, _kinds))
app.command("sharing", help="Serving runs that share prompts, and single admissions.")(_sharing)
app.command("all", help="All of them, one after the other.")(_command(BENCHES))


if __name__ == "__main__":
    app()
