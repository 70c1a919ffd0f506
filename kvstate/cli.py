"""The command line: `kvstate fuzz`, `replay`, `diagram`, `doctor`.

The only place that puts managers and devices together by name. Each command prints for people, or
with `--json` one object on standard output; whatever else is said goes to standard error, and
nothing is wrapped where that is no terminal. Exit codes: 0 all held, 1 something that must hold did
not, 2 misuse, 130 interrupted.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from enum import StrEnum
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Final, NoReturn

import msgspec
import typer
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from typer.core import TyperGroup

from kvstate import __version__, trace
from kvstate import diagram as drawing
from kvstate.campaign import directed as directing
from kvstate.campaign import fuzz as fuzzing
from kvstate.campaign.engine import Engine, Outcome, Request
from kvstate.campaign.fuzz import Failure, Tally
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.campaign.replay import (
    MOST_REQUESTS,
    first_requests,
    is_cut,
    read_mooncake,
    replay_report,
    replay_table,
    scaled,
    serving_config,
    sharing,
)
from kvstate.campaign.replay import uniform as uniform_requests
from kvstate.campaign.report import Found, found, fuzz_report, fuzz_table, program_text
from kvstate.campaign.workers import quiet, run_workers
from kvstate.config import GpuTier, HostTier, LayerSpec
from kvstate.device import ByteDevice
from kvstate.doctor import examine, render
from kvstate.errors import ConfigError, KvStateError
from kvstate.gpu import KINDS, named, open_device
from kvstate.spec.coupling import TABLES

HELD, BROKEN, MISUSE, INTERRUPTED = 0, 1, 2, 130
FAILURES: Final = Path("fuzz-failures")


class Commands(TyperGroup):
    """The commands; an interrupt of any ends it without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Run one."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes are wrapped, whatever they are written to
    help="The lifecycle of KV-cache memory as explicit tables: fuzz it, replay it, draw it.",
)  # fmt: skip
UNWRAPPED: Final = 100_000
"""Columns of what is no terminal."""
out = Console(width=None if sys.stdout.isatty() else UNWRAPPED)
err = Console(stderr=True, width=None if sys.stderr.isatty() else UNWRAPPED)
"""What is wrong."""
said = Console(stderr=True, width=err.width)
"""What happens; nothing, if that is not wanted."""


class Streams(StrEnum):
    """When simulated work runs."""

    EAGER = "eager"
    LATEST = "latest"
    PCT = "pct"
    ADVERSARIAL = "adversarial"


class Search(StrEnum):
    """The same for a campaign, in which each episode may have its own."""

    ANY = fuzzing.ANY
    EAGER = "eager"
    LATEST = "latest"
    PCT = "pct"
    ADVERSARIAL = "adversarial"


class Format(StrEnum):
    """What a drawing is made in."""

    MERMAID = "mermaid"
    DOT = "dot"
    SVG = "svg"


def _device(kind: str) -> str:
    try:
        named(kind)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    return kind


DeviceOption = Annotated[
    str,
    typer.Option(
        help=f"Where the memory is: {', '.join(KINDS)}, or cuda:1 and so on.", callback=_device
    ),
]
StreamsOption = Annotated[Streams, typer.Option(help="When simulated work runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvstate {__version__}")
        raise typer.Exit


@app.callback()
def common(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print it.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Say nothing on standard error but what is wrong.")
    ] = False,
) -> None:
    """The lifecycle of KV-cache memory as explicit tables: fuzz it, replay it, draw it."""
    said.quiet = quiet


def _positive(seconds: float) -> float:
    if not 0 < seconds < inf:
        raise typer.BadParameter(f"{seconds} is no time to play: a number above 0 is wanted")
    return seconds


def open_named(kind: str, streams: str, seed: int) -> ByteDevice:
    """A device by name; the name comes first so that it can be fixed for workers."""
    return open_device(kind, streams=streams, seed=seed)


@app.command()
def fuzz(
    *,
    device: DeviceOption = "auto",
    seconds: Annotated[
        float, typer.Option(help="How long, if --calls does not say.", callback=_positive)
    ] = 60,
    calls: Annotated[
        int | None, typer.Option(min=1, help="How many calls to draw, at least.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Repeat a run; new by default.")] = None,
    streams: Annotated[
        Search, typer.Option(help="When simulated work runs; any: drawn for each episode.")
    ] = Search.ANY,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    known: Annotated[
        list[Path] | None,
        typer.Option(exists=True, file_okay=False, help="Folders of traces to try first."),
    ] = None,
    save: Annotated[Path, typer.Option(help="Where failures are written.")] = FAILURES,
    directed: Annotated[
        bool,
        typer.Option(
            help="Play the programs that show everything first, and fail if a row, link, state, "
            "law or refusal was never seen."
        ),
    ] = True,
    json: JsonOption = False,
) -> None:
    """Stateful fuzz of manager and device: laws and bytes are checked after every call."""
    seed = secrets.randbits(32) if seed is None else seed
    opened = partial(open_named, device)
    with closing(opened("eager", 0)) as probe:
        name, granularity_bytes = probe.name, probe.granularity_bytes
    said.print(f"seed {seed}, device {name}, streams {streams.value}, workers {workers}")
    with quiet():
        failures = _known([*(known or []), save], opened)
    started = monotonic()
    total = Tally()
    if not failures:
        first = directing.tallies(opened, granularity_bytes) if directed else ()
        shown = directing.count_calls() if directed else 0
        enough = fuzzing.until(None if calls else seconds, calls and calls + shown)
        with _progress(json) as tell:
            total = run_workers(
                seed, workers, opened, streams.value, enough,
                lambda now: tell(_fuzz_line(now)), first,
            )  # fmt: skip
        failures = [_tell_failure(failure, save) for failure in total.failures]
    took = monotonic() - started
    report = fuzz_report(seed, name, streams.value, workers, took, total, failures, directed)
    _show(report, json, fuzz_table(report))
    broken = bool(report.violations or report.unseen)
    raise typer.Exit(BROKEN if broken else INTERRUPTED if report.interrupted else HELD)


@app.command()
def replay(
    ctx: typer.Context,
    source: Annotated[
        Path | None,
        typer.Argument(help="A kvstate trace, or a Mooncake one.", exists=True, dir_okay=False),
    ] = None,
    *,
    uniform: Annotated[
        str | None, typer.Option(help="Instead: requests of one size, as PROMPT,OUTPUT.")
    ] = None,
    shared: Annotated[
        str | None,
        typer.Option(help="How they share prompts, as PROMPTS,MEAN,SHARE."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_REQUESTS, help="How many requests: the first of a trace."),
    ] = None,
    scale: Annotated[float, typer.Option(min=0.0, max=1e6, help="Multiply all lengths.")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="Requests that run at one time.")] = 32,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens a request and step.")] = 2048,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 1,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, help="Elements of a head.")] = 8,
    dtype: Annotated[str, typer.Option(help="Type of an element.")] = "float16",
    block: Annotated[int, typer.Option(min=1, help="Tokens a block.")] = 32,
    frame: Annotated[
        int | None, typer.Option(min=1, help="Bytes of a frame; by default the device's least.")
    ] = None,
    gpu: Annotated[int, typer.Option(min=1, help="Frames of GPU memory.")] = 4096,
    host: Annotated[int, typer.Option(min=0, help="Host memory, in frames.")] = 4096,
    reuse: Annotated[
        bool, typer.Option(help="Keep what requests computed for others with the same prefix.")
    ] = True,
    alias: Annotated[
        bool, typer.Option(help="Map what others have on the GPU instead of copying it.")
    ] = True,
    retain: Annotated[
        bool, typer.Option(help="Keep what parked memory holds readable until that is wanted.")
    ] = False,
    device: DeviceOption = "auto",
    streams: StreamsOption = Streams.EAGER,
    seed: Annotated[int, typer.Option(min=0, help="Of what --shared and streams draw.")] = 0,
    skip_malformed: Annotated[bool, typer.Option(help="Skip lines that cannot be read.")] = False,
    json: JsonOption = False,
) -> None:
    """Replay a recorded trace, or a serving trace through a simple batching engine."""
    _one_source(source, uniform, shared)
    if source is not None and trace.is_trace(source):
        _refuse_all_but(ctx, "source", "device", "json")
        _replay_calls(source, device, json)
    shape = LayerSpec(kv_heads, head_dim, dtype, layers)
    if source is not None:
        found, skipped = first_requests(read_mooncake(source, skip_malformed), requests)
    else:
        found, skipped = _uniform(uniform or "", shared, requests or 100, seed), 0
    if not found:
        raise typer.BadParameter(f"{source} has no requests: there is nothing to replay")
    with (
        closing(open_named(device, streams.value, seed)) as opened, _progress(json) as tell,
        _stopping() as stop,
    ):  # fmt: skip
        frame = frame or opened.granularity_bytes
        tiers = GpuTier(gpu * frame, frame), HostTier(host * frame) if host else None
        config = serving_config(
            shape, *tiers, block=block, batch=batch, reuse=reuse, alias=alias, retain=retain
        )
        work = [scaled(request, scale, config.max_tokens) for request in found]
        cut = sum(is_cut(request, scale, config.max_tokens) for request in found)
        engine, started = Engine(config, opened, batch, chunk), monotonic()
        outcome = engine.run(work, lambda now: tell(_replay_line(now, len(work))), stop)
        interrupted, took = stop(), monotonic() - started
    report = replay_report(
        engine, outcome, len(work), skipped, took, cut=cut, interrupted=interrupted
    )
    _show(report, json, replay_table(report))
    broken = report.mismatches or report.violations
    if not broken and interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(BROKEN if broken or report.requests_finished < len(work) else HELD)


@app.command()
def shrink(
    source: Annotated[
        Path, typer.Argument(help="A trace that fails.", exists=True, dir_okay=False)
    ],
    *,
    calls: Annotated[int, typer.Option(min=1, help="How many are played, at the most.")] = 200_000,
    device: DeviceOption = "auto",
    save: Annotated[Path, typer.Option(help="Where what is found is written.")] = FAILURES,
    json: JsonOption = False,
) -> None:
    """Look for a shorter program that fails as a trace does."""
    header, program = trace.read(source)
    opened = _fitting(header, partial(open_named, device))
    with quiet():
        tally = fuzzing.played(header, program, opened, calls)
    if not tally.failures:
        raise typer.BadParameter(f"{source} does not fail: there is nothing to shrink")
    _show(_tell_failure(tally.failures[0], save), json, "")


@app.command()
def diagram(
    machine: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(TABLES)}; all by default.")
    ] = None,
    *,
    as_: Annotated[
        Format | None, typer.Option("--format", help="What to draw it as; by default mermaid.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A file for the drawing; a folder for those of all."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the pages of all into a folder.")
    ] = None,
    check: Annotated[Path | None, typer.Option(help="Say which pages are not up to date.")] = None,
    json: JsonOption = False,
) -> None:
    """Draw the tables, or write their pages."""
    if machine is not None and machine not in TABLES:
        raise typer.BadParameter(f"there is no machine {machine!r}; choose of {', '.join(TABLES)}")
    if (write or check) and (machine or as_ or output or (write and check)):
        raise typer.BadParameter("--write and --check are for the pages of all, each by itself")
    if write is not None:
        _show({"written": [str(path) for path in drawing.write(write)]}, json)
    elif check is not None:
        old = [str(path) for path in drawing.stale(check)]
        _show({"stale": old}, json)
        raise typer.Exit(BROKEN if old else HELD)
    else:
        _draw([machine] if machine else list(TABLES), as_ or Format.MERMAID, output, json)


def _draw(names: list[str], as_: Format, output: Path | None, json: bool) -> None:
    """Draw these machines, on standard output or into files."""
    if as_ is Format.SVG and len(names) > 1 and output is None and not json:
        raise typer.BadParameter("an SVG is one picture: name a machine, or a folder with -o")
    drawn = {name: drawing.FORMATS[as_.value](TABLES[name]) for name in names}
    if output is not None:
        suffix = {Format.MERMAID: "mmd"}.get(as_, as_.value)
        paths = [output] if len(names) == 1 else [output / f"{name}.{suffix}" for name in names]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, drawn.values(), strict=True):
            path.write_text(text, encoding="utf-8", newline="\n")
        _show({"written": list(map(str, paths))}, json)
    else:
        _show(drawn, json, "\n".join(drawn.values()))


@app.command()
def doctor(*, json: JsonOption = False) -> None:
    """Say what this machine can do, and what that means."""
    report = examine()
    _show(report.as_dict(), json, render(report))


def play(path: Path | str, device: str = "host") -> Player:
    """Play a recorded trace again and check everything; the player, for a debugger. Raises Broken
    where something does not hold, and TraceError for what is no trace."""
    header, calls = trace.read(path)
    return fuzzing.play(header, calls, _fitting(header, partial(open_named, device)))


class CallsReport(msgspec.Struct, frozen=True):
    """The keys of `kvstate replay --json` for a trace of calls."""

    calls: int
    bytes_verified: int
    held: bool
    kind: str | None = None
    """The check that noticed what did not hold."""
    detail: str | None = None


def _replay_calls(source: Path, device: str, json: bool) -> NoReturn:
    """Play a trace of calls again, and say what came of it."""
    _, calls = trace.read(source)
    try:
        report = CallsReport(len(calls), play(source, device).bytes_verified, held=True)
    except Broken as broken:
        report = CallsReport(len(calls), 0, held=False, kind=broken.kind, detail=broken.detail)
        err.print(f"[bold red]{escape(broken.kind)}[/]: {escape(broken.detail)}")
    if report.held:
        said.print(f"{report.calls} calls, {report.bytes_verified:,} bytes verified: all held")
    _show(report, json, "")
    raise typer.Exit(HELD if report.held else BROKEN)


def _refuse_all_but(ctx: typer.Context, *fitting: str) -> None:
    """Refuse options that say nothing about a trace of calls."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params if name not in fitting}
    given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"{options}: a trace of calls is played as it was recorded")


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether an interrupt has asked to stop; the next one ends the command at once."""
    heard = list[int]()

    def hear(number: int, _: object) -> None:
        heard.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield lambda: bool(heard)
    finally:
        signal.signal(signal.SIGINT, before)


def _one_source(source: Path | None, uniform: str | None, shared: str | None) -> None:
    """Either a trace or made requests, and what only one of them has with that one."""
    if (source is None) == (uniform is None):
        raise typer.BadParameter("name a trace, or give --uniform PROMPT,OUTPUT, and not both")
    if shared is not None and uniform is None:
        raise typer.BadParameter("--shared says how requests of --uniform begin, not a trace's")


def _uniform(uniform: str, shared: str | None, count: int, seed: int) -> list[Request]:
    """Requests of one size, with the prompts that --shared asks for."""
    try:
        prompt, output = map(int, uniform.split(","))
        requests = uniform_requests(count, prompt, output)
    except ValueError as error:
        wanted = f"--uniform is PROMPT,OUTPUT in tokens, not {uniform!r}"
        raise typer.BadParameter(f"{wanted}: {error}") from error
    if shared is None:
        return requests
    try:
        prompts, mean, share = shared.split(",")
        return sharing(requests, int(prompts), int(mean), float(share), seed)
    except ValueError as error:
        wanted = f"--shared is PROMPTS,MEAN,SHARE, as 15,512,0.9 is, not {shared!r}"
        raise typer.BadParameter(f"{wanted}: {error}") from error


def _replay_line(outcome: Outcome, total: int) -> str:
    finished = f"{outcome.requests_finished:,} of {total:,} requests"
    return f"{finished}, {outcome.steps:,} steps, {outcome.bytes_verified:,} bytes verified"


def _fuzz_line(tally: Tally) -> str:
    rows = sum(1 for key in fuzzing.ROWS if tally.rows[key])
    text = f"{tally.calls:,} calls, {rows} of {len(fuzzing.ROWS)} rows"
    return f"{text}, {tally.bytes_verified:,} bytes verified"


def _known(folders: list[Path], opened: fuzzing.OpenDevice) -> list[Found]:
    """Play the failures of earlier runs first; those that still fail."""
    still = []
    for path in sorted(path for folder in set(folders) for path in folder.glob("*.jsonl")):
        header, calls = trace.read(path)
        try:
            fuzzing.play(header, calls, _fitting(header, opened))
        except Broken as broken:
            failure = Failure(broken.kind, broken.detail, header, calls, len(calls))
            still.append(_tell_failure(failure, path.parent))
    return still


def _fitting(header: trace.Header, opened: fuzzing.OpenDevice) -> fuzzing.OpenDevice:
    """The device, or the host's if the device has no frames as small as a trace's."""
    with closing(opened("eager", 0)) as probe:
        fits = header.config.gpu.frame_bytes % probe.granularity_bytes == 0
    return opened if fits else partial(open_named, "host")


def _tell_failure(failure: Failure, folder: Path) -> Found:
    """Say what failed, with the program and the command that plays it again."""
    one = found(failure, folder)
    err.print(f"[bold red]{escape(one.kind)}[/]: {escape(one.detail)}")
    err.print(
        f"{one.calls} calls (found with {one.found_calls}), {failure.header.streams} streams:"
    )
    err.print(escape(program_text(failure.program)), highlight=False)
    err.print(f"replay it with: [bold]{escape(one.replay)}[/]")
    if one.cut_short:
        err.print(f"there was more to try: [bold]kvstate shrink {escape(one.trace)}[/] goes on")
    return one


@contextmanager
def _progress(json: bool) -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says how far it is; silent where nobody looks."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=said, disable=json or not said.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text: bar.update(task, description=text)


def _show(report: object, json: bool, readable: RenderableType | None = None) -> None:
    """Print a report: one JSON object, or what people read."""
    if json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    elif isinstance(readable, str):
        sys.stdout.write(readable)
    elif readable is not None:
        out.print(readable)
    elif isinstance(report, dict):
        for name, values in report.items():
            out.print(f"{name}: {', '.join(values) or 'none'}")


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
