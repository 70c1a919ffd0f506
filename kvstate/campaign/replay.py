"""Replay: a public serving trace, or requests of one size, through a simple engine.

Requests of one size may share prompts: who begins with which, and how long those are, is drawn
from a seed.

Reads the Mooncake format: JSON lines with `timestamp` (ms), `input_length` and `output_length`
(tokens) and `hash_ids` (one number for each 512-token block of the prompt; equal numbers mean
equal content). A line that is not that is refused with its number, and skipped only if asked for.
Arrival times are not kept: the loop is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Annotated, Final

import msgspec
from attrs import evolve
from rich.table import Table

from kvstate.campaign.engine import Engine, Outcome, Piece, Request
from kvstate.config import Config, Geometry, GpuTier, HostTier, LayerSpec
from kvstate.errors import TraceError
from kvstate.manager import Manager
from kvstate.trace import open_lines

Length = Annotated[int, msgspec.Meta(ge=0)]
MOONCAKE_BLOCK_TOKENS: Final = 512
MOST_REQUESTS: Final = 1_000_000
MOST_TOKENS: Final = 100_000_000
"""The most that a replay makes, or a request of a trace may have."""
SPREAD: Final = 0.5
"""How far a drawn length may be from the mean, as a part of it."""
SOURCES: Final = ("alias", "live", "parked", "span", "host")
"""How what others have computed comes to a newcomer."""


class MooncakeLine(msgspec.Struct, frozen=True):
    """One request of the trace. Unknown fields are ignored: the format is not ours."""

    input_length: Length
    output_length: Length
    hash_ids: list[int] = []
    timestamp: float = 0.0


class ReplayReport(msgspec.Struct, frozen=True):
    """The keys of `kvstate replay --json`. They are stable: others may be added."""

    device: str
    requests_total: int
    requests_finished: int
    interrupted: bool
    """It was ended before its time; what ran then was read back and let go of unfinished."""
    requests_cut: int
    """Those that were longer than a sequence may be."""
    lines_skipped: int
    tokens: int
    steps: int
    suspends: int
    resumes: int
    drops: int
    adoptions: int
    driver_calls: dict[str, int]
    driver_calls_steady: int
    """Mapping calls (create, release, map, unmap) after the first tenth of the requests ended."""
    frames_peak: int
    host_bytes_moved: int
    bytes_verified: int
    mismatches: int
    violations: list[str]
    seconds: float
    steps_per_second: float
    hit_rate: float
    """Of the tokens of all prompts, those that came from others."""
    hits: dict[str, int]
    """The same in tokens, by how they came: by `alias`, without a copy; or by one from whoever has
    them (`live`), from memory that waits to be used again (`parked`), from a `span` that outlived
    its owner, or from the `host`."""
    alias_maps: int
    """Frames of spans that newcomers have mapped."""
    promotions: int
    """Blocks that only the host had, and of which a page on the GPU became canonical."""
    remaps: int
    """Frames of copies that a span's frames took the place of."""
    spans_spilled: int
    """Spans that were given up under pressure."""
    kept_blocks: int
    """Blocks that outlived their sequences on the host."""
    evicted_blocks: int


_line = msgspec.json.Decoder(MooncakeLine)


def read_mooncake(path: Path, skip: bool = False) -> Iterator[Request | None]:
    """The requests of a trace, plain or gzipped; None for a malformed line that is skipped.

    Raises TraceError, naming the line, unless `skip`.
    """
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                one = _line.decode(line)
                content = tuple((name, MOONCAKE_BLOCK_TOKENS) for name in one.hash_ids)
                yield _request(one.input_length, one.output_length, content)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                if not skip:
                    raise TraceError(f"line {number}: {error}") from error
                yield None


def first_requests(lines: Iterable[Request | None], count: int | None) -> tuple[list[Request], int]:
    """The first `count` requests of a trace, or all; and how many lines before were skipped."""
    found, skipped = list[Request](), 0
    for request in lines:
        if request is None:
            skipped += 1
            continue
        found.append(request)
        if len(found) == count:
            break
    return found, skipped


def uniform(count: int, prompt_tokens: int, output_tokens: int) -> list[Request]:
    """Requests of one size."""
    return [_request(prompt_tokens, output_tokens)] * count


def sharing(
    requests: list[Request], prompts: int, mean_tokens: int, share: float, seed: int
) -> list[Request]:
    """The requests, of which a `share` begins with one of some prompts, each as likely, and the
    others with a prompt of their own.

    The length of every prompt is drawn from half to one and a half of the mean, each as likely.
    The first of many requests are the same as of few. Raises ValueError for numbers that mean
    nothing.
    """
    if not 1 <= prompts <= MOST_REQUESTS or not 1 <= mean_tokens <= MOST_TOKENS:
        most = f"at most {MOST_REQUESTS:,} prompts of {MOST_TOKENS:,} tokens can"
        raise ValueError(f"{prompts} prompts of {mean_tokens} tokens cannot be shared: {most}")
    if not 0 <= share <= 1:
        raise ValueError(f"a share of {share} is not from 0 to 1")
    random = Random(seed)
    common = [(name, drawn(random, mean_tokens)) for name in range(prompts)]
    found = []
    for own, request in enumerate(requests, prompts):
        shares = random.random() < share
        piece = random.choice(common) if shares else (own, drawn(random, mean_tokens))
        found.append(evolve(request, content=(piece,)))
    return found


def drawn(random: Random, mean_tokens: int) -> int:
    """A length: half to one and a half of the mean, each as likely, and at least one token."""
    return max(1, round(mean_tokens * random.uniform(1 - SPREAD, 1 + SPREAD)))


def serving_config(
    shape: LayerSpec, gpu: GpuTier, host: HostTier | None, *, block: int, batch: int,
    reuse: bool = True, alias: bool = True, retain: bool = False,
) -> Config:  # fmt: skip
    """A configuration whose longest sequence fills the budget."""
    draft = Config(
        layers=[shape], gpu=gpu, host=host, tokens_per_block=block, max_tokens=1,
        write_through="on_free" if reuse else "off", spans="shared" if alias else "off",
        retain=reuse and retain,
    )  # fmt: skip
    sizes = Geometry(draft)
    longest = sizes.tokens(sizes.budget_frames)
    return evolve(draft, max_tokens=longest, max_sequences=8 * batch)


def is_cut(request: Request, scale: float, longest: int) -> bool:
    """Whether `scaled` cuts it."""
    return round(request.prompt_tokens * scale) + round(request.output_tokens * scale) > longest


def scaled(request: Request, scale: float, longest: int) -> Request:
    """The request with its lengths multiplied, and cut to what the configuration allows."""
    prompt = max(1, min(round(request.prompt_tokens * scale), longest - 1))
    output = max(1, min(round(request.output_tokens * scale), longest - prompt))
    content = tuple((name, max(1, round(tokens * scale))) for name, tokens in request.content)
    return Request(prompt, output, content)


def replay_report(
    engine: Engine, outcome: Outcome, total: int, skipped: int, seconds: float,
    *, cut: int = 0, interrupted: bool = False,
) -> ReplayReport:  # fmt: skip
    """The report of a replay."""
    counters, calls = engine.kv.counters, engine.device.calls
    return ReplayReport(
        device=engine.device.name,
        requests_total=total,
        requests_finished=outcome.requests_finished,
        interrupted=interrupted,
        requests_cut=cut,
        lines_skipped=skipped,
        tokens=outcome.tokens,
        steps=outcome.steps,
        suspends=counters["suspends"],
        resumes=counters["resumes"],
        drops=counters["drops"],
        adoptions=counters["adoptions"],
        driver_calls=dict(calls),
        driver_calls_steady=outcome.mapping_calls_end - (outcome.mapping_calls_at_tenth or 0),
        frames_peak=outcome.frames_peak,
        host_bytes_moved=counters["host_bytes_moved"],
        bytes_verified=outcome.bytes_verified,
        mismatches=outcome.mismatches,
        violations=outcome.violations,
        seconds=round(seconds, 2),
        steps_per_second=round(outcome.steps / seconds, 1),
        hit_rate=round(outcome.hit_tokens / max(1, outcome.prompt_tokens), 4),
        hits=hit_tokens(engine.kv, counters),
        alias_maps=counters["aliased_frames"],
        promotions=counters["promotions"],
        remaps=counters["remaps"],
        spans_spilled=outcome.spans_spilled,
        kept_blocks=counters["kept_blocks"],
        evicted_blocks=counters["evicted_blocks"],
    )


def hit_tokens(kv: Manager, counters: Mapping[str, int]) -> dict[str, int]:
    """What counters say of hits, in tokens by how they came."""
    block = kv.config.tokens_per_block
    return {source: counters.get(f"hit_blocks.{source}", 0) * block for source in SOURCES}


def replay_table(report: ReplayReport) -> Table:
    """The report for people."""
    table = Table(title="kvstate replay", show_header=False)
    moved, hits = f"{report.host_bytes_moved:,}", report.hits
    for name, value in (
        ("requests", f"{report.requests_finished:,} of {report.requests_total:,} finished"),
        ("cut to what fits; lines skipped", f"{report.requests_cut:,}; {report.lines_skipped:,}"),
        ("tokens, steps", f"{report.tokens:,} in {report.steps:,} steps"),
        ("speed", f"{report.steps_per_second:,.0f} steps a second"),
        (
            "hit rate",
            f"{report.hit_rate:.1%}, {hits['alias']:,} tokens by alias, {hits['live']:,} copied "
            f"from whoever runs, {hits['parked']:,} from parked ranges, {hits['span']:,} from "
            f"spans, {hits['host']:,} from the host",
        ),
        (
            "frames by alias; spans spilled; promotions",
            f"{report.alias_maps:,}; {report.spans_spilled:,}; {report.promotions:,}",
        ),
        ("blocks kept, evicted", f"{report.kept_blocks:,}, {report.evicted_blocks:,}"),
        ("suspends, resumes, drops", f"{report.suspends}, {report.resumes}, {report.drops}"),
        ("adoptions", f"{report.adoptions:,}"),
        ("mapping calls", f"{report.driver_calls_steady:,} after the first tenth of the requests"),
        ("frames, peak", f"{report.frames_peak:,}"),
        ("bytes moved to and from the host", moved),
        ("bytes verified", f"{report.bytes_verified:,}"),
        ("mismatches", str(report.mismatches)),
        ("violations", str(len(report.violations))),
    ):
        table.add_row(name, value)
    return table


def _request(prompt: int, output: int, content: tuple[Piece, ...] = ()) -> Request:
    if prompt < 1 or output < 0:
        raise ValueError(f"a request of {prompt} prompt and {output} output tokens has no prompt")
    if max(prompt, output) > MOST_TOKENS:
        raise ValueError(f"{prompt} prompt and {output} output tokens: at most {MOST_TOKENS:,} can")
    return Request(prompt, max(1, output), content)
