"""What sharing saves in a serving run, and what a single admission costs in each way.

`sharing`: requests with an 8B model's KV shape, of which every one begins with one of 15 shared
prompts, 256 at a time, through the engine of the replays: real writes, no model. In place of
attention a step reads the whole history of every sequence back, or with `--read` a sample of it, of
so many GiB. The same requests with spans `shared`, `all` and `off`. They come two a step at the
most and say unequally much, so that prompts are shared by requests of every age. A run stops after
some seconds, and says what it reached. What is not of the whole run is from the step that filled
the batch to the one that let the last request in. The raw side of its speed is the run without
spans, of reading a memcpy on the device.

`admission`: from `create` until the stream may read the prefix, with the wait for it: by alias with
a range that is adopted by its signature; by alias into fresh addresses; by a copy on the device
from whoever has it; from the host. A copy goes to an adopted range, or to one whose frames are
mapped for it. Beside it one memcpy of as many bytes, on the device and from pinned memory.

The host device has the same tokens in 1/512 of the memory, so that frames hold as many tokens; the
null device has the whole size, and counts the same mapping calls and hits as the card would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from functools import partial
from random import Random
from time import perf_counter
from typing import Final, NamedTuple

import numpy as np
from attrs import frozen

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.campaign.engine import Engine, Outcome, Pace, Request
from kvstate.campaign.replay import SOURCES, drawn, hit_tokens
from kvstate.campaign.replay import sharing as with_prompts
from kvstate.config import MIB
from kvstate.device import MAPPING_CALLS, ByteDevice, Direction, Stream
from kvstate.spec.frame import ABSENT
from tests.bench.card_common import (
    GIB,
    Card,
    Figure,
    Laps,
    Pair,
    Raw,
    Report,
    must_hold,
    opened,
    pairs,
    segments,
)

LAYER: Final = LayerSpec(kv_heads=8, head_dim=128, count=32)
SMALL: Final = 512
"""The host device has this part of every size in bytes."""
SMALL_LAYER: Final = LayerSpec(kv_heads=1, head_dim=64)
assert LAYER.token_bytes == SMALL * SMALL_LAYER.token_bytes
MODES: Final = ("shared", "all", "off")


@frozen
class Settings:
    """What may be said of the serving runs on the command line."""

    frames_mib: tuple[int, ...] = (2,)
    budget_gib: float = 100
    host_gib: float = 30
    ahead_frames: int = 8
    """The margin of every running sequence: at 2 MiB and 256 sequences 4 GiB, while memory is
    plenty."""
    seconds: float = 35
    """The most that one run takes, apart from opening and closing."""
    read_gib: float | None = None
    """Of what a step reads back, evenly spread pieces of about that much are looked at; None for
    the whole history of everybody."""
    seed: int = 0


DEFAULTS: Final = Settings()


def sharing(card: Card, settings: Settings = DEFAULTS) -> Report:
    """A serving run with shared prompts, by what spans are kept."""
    report = Report("Serving with shared prompts, after the first wave (wall)")
    with closing(card.raw()) as raw:
        for mib in settings.frames_mib:
            _serving(card, raw, settings, mib, report)
    return report


def _small(card: Card) -> int:
    return SMALL if card.kind == "host" else 1


def _layer(card: Card) -> LayerSpec:
    return SMALL_LAYER if card.kind == "host" else LAYER


# Serving.


class Work(NamedTuple):
    """How many requests, and how long they are in tokens. Outputs are half to one and a half."""

    requests: int
    at_once: int
    prompt: int
    output: int
    prompts: int
    """Shared prompts."""
    shared: int
    """Their mean length."""
    most_admitted: int
    """In one step."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return self.prompt + 2 * self.output - self.output // 2


FULL: Final = Work(1000, 256, 1024, 1024, 15, 512, 2)
TINY: Final = Work(80, 16, 256, 64, 5, 128, 2)
CHUNK: Final = 1024
READ_BYTES: Final = GIB
"""Of the memcpy that reading is compared with."""


def _requests(work: Work, seed: int) -> list[Request]:
    """Every request begins with one of the shared prompts."""
    random = Random(seed)
    plain = [Request(work.prompt, drawn(random, work.output)) for _ in range(work.requests)]
    return with_prompts(plain, work.prompts, work.shared, 1.0, seed)


class Watch:
    """Looks on, and takes all counts whenever somebody is let in from the end of the first wave
    on."""

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.engine, self.seconds, self.started = engine, seconds, perf_counter()
        self.marks: list[Counter[str]] = []
        self._frame_steps = self._running = self.allocated = 0

    def __call__(self, outcome: Outcome) -> None:
        """A step is done."""
        gpu, admitted = self.engine.kv.gpu, outcome.requests_admitted
        self._frame_steps += gpu.charged + gpu.in_spans
        self.allocated = max(self.allocated, gpu.budget_frames - gpu.counts[ABSENT.code])
        self._running += len(self.engine.running)
        before = self.marks[-1]["admitted"] if self.marks else self.engine.batch_limit - 1
        if admitted > before:
            self.marks.append(self._counts())

    def over(self) -> bool:
        """The time is up."""
        return perf_counter() - self.started > self.seconds

    def _counts(self) -> Counter[str]:
        """Everything that only grows."""
        outcome, calls = self.engine.outcome, self.engine.device.calls
        return Counter(self.engine.kv.counters) + Counter(
            steps=outcome.steps,
            admitted=outcome.requests_admitted,
            content=outcome.content_tokens,
            verified=outcome.bytes_verified,
            micros=int(1e6 * (perf_counter() - self.started)),
            tokens=outcome.tokens,
            frame_steps=self._frame_steps,
            running=self._running,
            mapping=self.engine.mapping_calls(),
            **{kind: calls.get(kind, 0) for kind in MAPPING_CALLS},
        )

    def since(self, part: float = 0) -> Counter[str]:
        """What was counted after the first wave, or after a part of those that came later."""
        found: Counter[str] = Counter()
        if self.marks:
            found.update(self.marks[-1])
            found.subtract(self.marks[int(part * (len(self.marks) - 1))])
        return found


Measured = dict[tuple[str, str], float]
"""Values by what they are and their unit."""


def _serving(card: Card, raw: Raw, settings: Settings, mib: int, report: Report) -> None:
    """The same requests in every mode: a figure for each thing measured."""
    work, found = card.pick(FULL, TINY), dict[str, Measured]()
    size = READ_BYTES // _small(card)
    move = partial(raw.move, raw.alloc(size), raw.alloc(size), size)
    memcpy = 2 * size / min(raw.gpu(move) for _ in range(5)) / 1e9
    for mode in MODES:
        found[mode], broken = _run(card, settings, work, mib, mode)
        if broken:
            report.error = f"{mib} MiB, spans {mode}: {broken}"
    bare = {READ: memcpy} | {what: found["off"][what] for what in (SPEED, TOKENS)}
    for what in found["shared"]:
        values = {mode: found[mode][what] for mode in MODES}
        report.figures.append(_figure(f"{mib} MiB: {what[0]}", what[1], values, bare.get(what)))
    report.words.append(_words(mib, found))


def _figure(name: str, unit: str, values: dict[str, float], raw: float | None) -> Figure:
    ours = values["shared"]
    ratio = None if raw is None else ours / max(raw, 1e-9)
    return Figure(name, ours, unit, raw, ratio, details=values)


def _run(
    card: Card, settings: Settings, work: Work, mib: int, mode: str
) -> tuple[Measured, str | None]:
    """One run; what was measured, and what is wrong with it."""
    config = _config(card, settings, work, mib, mode)
    requests = _requests(work, settings.seed)
    device = card.open()
    read = settings.read_gib
    most = None if read is None else int(read * GIB) // _small(card)
    pace = Pace(work.most_admitted, read_tokens=None, most_bytes=most, laws_every=None)
    engine = Engine(config, device, work.at_once, CHUNK, pace)
    watch = Watch(engine, settings.seconds)
    outcome = engine.run(requests, watch, watch.over)
    wrong = [*outcome.violations[:3], *device.faults[:3]]
    if outcome.mismatches:
        wrong.append(f"{outcome.mismatches} token rows are wrong")
    if len(watch.marks) < 2:
        wrong.append(f"nobody came after the first wave: {outcome.requests_admitted} were let in")
    return _measured(engine, watch, requests), "; ".join(wrong) or None


def _config(card: Card, settings: Settings, work: Work, mib: int, mode: str) -> Config:
    small, part = _small(card), work.at_once / FULL.at_once
    budget = int(settings.budget_gib * part * GIB) // small
    return Config(
        layers=[_layer(card)],
        gpu=GpuTier(budget, mib * MIB // small, settings.ahead_frames),
        host=HostTier(int(settings.host_gib * part * GIB) // small),
        max_tokens=work.longest,
        max_sequences=2 * work.at_once,
        spans=mode,
    )


ALIAS: Final = ("shared tokens that came by alias", "%")
CALLS: Final = ("mapping calls a request", "")
LATE: Final = ("mapping calls a request, later half", "")
SPEED: Final = ("steps", "1/s")
TOKENS: Final = ("tokens computed", "1/s")
READ: Final = ("read back", "GB/s")


def _measured(engine: Engine, watch: Watch, requests: list[Request]) -> Measured:
    """What is reported of a run; "whole run" is not only what came after the first wave."""
    kv, outcome, since = engine.kv, engine.outcome, watch.since()
    first = outcome.requests_admitted - since["admitted"]
    reached = requests[first : outcome.requests_admitted]
    seconds, steps = max(1, since["micros"]) / 1e6, max(1, since["steps"])
    gib = kv.geometry.frame_bytes / GIB
    return (
        _hits(kv, since, reached)
        | _mapping(watch)
        | {
            ("frames spilled", ""): since["spilled_frames"],
            ("spans spilled", ""): since["spilled_spans"],
            ("promotions", "blocks"): since["promotions"],
            ("quiesces", ""): since["quiesces"],
            ("suspends and drops", ""): since["suspends"] + since["drops"],
            ("to and from the host", "GB"): _host_bytes(kv, since) / 1e9,
            ("memory in use, mean", "GiB"): since["frame_steps"] / steps * gib,
            ("requests at once, mean", ""): since["running"] / steps,
            SPEED: since["steps"] / seconds,
            TOKENS: since["tokens"] / seconds,
            READ: since["verified"] / seconds / 1e9,
            ("requests let in", ""): since["admitted"],
            ("time", "s"): seconds,
            ("requests finished, whole run", ""): outcome.requests_finished,
            ("steps, whole run", ""): outcome.steps,
            ("memory charged, peak, whole run", "GiB"): outcome.frames_peak * gib,
            ("memory allocated, peak, whole run", "GiB"): watch.allocated * gib,
            ("read back, whole run", "GB"): outcome.bytes_verified / 1e9,
            ("mismatches, whole run", "rows"): outcome.mismatches,
        }
    )


def _mapping(watch: Watch) -> Measured:
    """Mapping by those who came after the first wave. While memory is short of its final use,
    frames are made: the later half of them shows less of that."""
    since, late = watch.since(), watch.since(0.5)
    each = max(1, since["admitted"])
    found: Measured = {
        CALLS: since["mapping"] / each,
        LATE: late["mapping"] / max(1, late["admitted"]),
    }
    found |= {(f"{kind} calls a request", ""): since[kind] / each for kind in MAPPING_CALLS}
    return found | {
        ("frames a request by alias", ""): since["aliased_frames"] / each,
        ("ranges adopted a request", ""): since["adoptions"] / each,
    }


def _hits(kv: Manager, since: Counter[str], reached: list[Request]) -> Measured:
    """How the shared prompts came, and how much of them lies in whole units of memory."""
    hits, content = hit_tokens(kv, since), max(1, since["content"])
    unit = kv.geometry.align_bytes // kv.geometry.row_bytes
    tokens = [one.content_tokens for one in reached]
    whole = sum(count // unit * unit for count in tokens) / max(1, sum(tokens))
    return {
        ALIAS: 100 * hits["alias"] / content,
        ("shared tokens in whole units of memory", "%"): 100 * whole,
        ("shared tokens that came from others", "%"): 100 * sum(hits.values()) / content,
    } | {(f"hits, {source}", "tokens"): hits[source] for source in SOURCES}


def _host_bytes(kv: Manager, since: Counter[str]) -> int:
    """Without the hits that came by a copy on the device, which are counted with them."""
    here = since["hit_blocks.live"] + since["hit_blocks.span"]
    return since["host_bytes_moved"] - here * kv.geometry.block_bytes


def _words(mib: int, found: dict[str, Measured]) -> str:
    """What matters most, in one line."""
    each = [
        f"{mode} {values[ALIAS]:.1f}% by alias, {values[CALLS]:.2f} mapping calls a request "
        f"({values[LATE]:.2f} in the later half), {values[SPEED]:.1f} steps/s"
        for mode, values in found.items()
    ]
    return f"{mib} MiB: " + "; ".join(each)


# Admission.

PREFIXES: Final = (512, 4096)
ADMISSION_MIB: Final = (2, 4, 8, 16, 32, 64)
REPEATS: Final = 25
WARM: Final = 3


class Way(NamedTuple):
    """A way in which a prefix comes to a newcomer."""

    name: str
    source: str
    spans: str
    adopts: bool


WAYS: Final = (
    Way("alias, adopted", "alias", "shared", True),
    Way("alias, mapped", "alias", "shared", False),
    Way("copy, adopted", "live", "off", True),
    Way("copy, mapped", "live", "off", False),
    Way("host, adopted", "host", "off", True),
    Way("host, mapped", "host", "off", False),
)
Memcpy = Callable[[], None]


def admission(card: Card) -> Report:
    """What an admission costs, by how its prefix comes."""
    report = Report("Admissions until the stream may read the prefix, microseconds (wall)")
    with closing(card.raw()) as raw:
        report.figures += _admissions(card, raw)
    return report


def _admissions(card: Card, raw: Raw) -> list[Figure]:
    """Every way side by side, by length of the prefix and size of a frame."""
    size = max(PREFIXES) * _layer(card).token_bytes
    target, source, pinned = raw.alloc(size), raw.alloc(size), raw.pin(size)
    figures = []
    for tokens in PREFIXES:
        part = tokens * _layer(card).token_bytes
        move = partial(raw.move, target, source, part)
        copy = partial(raw.copy, Direction.IN, target, pinned, part)
        for mib in card.pick(ADMISSION_MIB, ADMISSION_MIB[::3]):
            found = {
                way: _admission(card, raw, mib, tokens, way, copy if way.source == "host" else move)
                for way in WAYS
            }
            figures += _admission_figures(f"{tokens} tokens, {mib} MiB", found)
    return figures


def _admission(
    card: Card, raw: Raw, mib: int, tokens: int, way: Way, memcpy: Memcpy
) -> dict[str, Pair]:
    """Seconds of one way, of its calls alone, and of a memcpy of as many bytes."""
    config = _single(card, mib, tokens, way)
    repeats = card.pick(REPEATS, 5)
    with opened(config, card.open()) as kv:
        bench = Bench(card, kv, way, tokens)

        def bare() -> Laps:
            laps = Laps()
            laps.time("issue", memcpy)
            laps["whole"] = laps["issue"] + _waited(raw)
            return laps

        found = pairs(bench.admission, bare, repeats, WARM)
        bench.must_be_so(repeats + WARM)
    return found


def _waited(raw: Raw) -> float:
    started = perf_counter()
    raw.synchronize()
    return perf_counter() - started


def _single(card: Card, mib: int, tokens: int, way: Way) -> Config:
    """Room for one that has the prefix, and for newcomers one after the other."""
    size, frame = tokens * _layer(card).token_bytes, mib * MIB // _small(card)
    return Config(
        layers=[_layer(card)],
        gpu=GpuTier(4 * (size + frame), frame),
        host=HostTier(2 * size) if way.source == "host" else None,
        max_tokens=tokens + 1,
        max_sequences=2 * (REPEATS + WARM),
        max_utilization_for_resume=1.0,
        spans=way.spans,
        adopt=way.adopts,
    )


class Bench:
    """One that has the prefix, or has left it on the host; and newcomers with the same."""

    def __init__(self, card: Card, kv: Manager, way: Way, tokens: int) -> None:
        self.card, self.kv, self.way, self.tokens = card, kv, way, tokens
        self.prompt = np.arange(tokens + 1, dtype=np.int32)
        device = kv.device
        assert hasattr(device, "write")
        self.device: ByteDevice = device  # type: ignore[assignment]
        self.device.set_rows(kv.geometry.row_bytes)
        self.stream: Stream = self.device.stream()
        first = self._written()
        if way.source == "host":
            first.close()
            self._settle()

    def _written(self) -> Sequence:
        """A sequence that has computed the prompt."""
        kv, count = self.kv, self.tokens + 1
        seq = kv.create(self.prompt, count)
        seq.resume(self.stream)
        step = kv.step(kv.batch([seq]), count)
        assert seq.base is not None
        self.device.write(self.stream, segments([(seq.base, count)]))
        self.device.synchronize(self.stream)
        kv.settle(step)
        seq.commit(self.prompt)
        return seq

    def admission(self) -> Laps:
        """Let a newcomer in, and out again; what the first took."""
        laps = Laps()
        seq = laps.time("issue", self._issue)
        laps.time("wait", self.device.synchronize, self.stream)
        laps["whole"] = laps["issue"] + laps.pop("wait")
        self._let_out(seq)
        return laps

    def _issue(self) -> Sequence:
        seq = self.kv.create(self.prompt, self.tokens + 1)
        seq.resume(self.stream)
        return seq

    def _let_out(self, seq: Sequence) -> None:
        self._settle()
        seq.close()
        self._settle()
        if not self.way.adopts:
            self.kv.trim(self.kv.gpu.budget_frames)

    def _settle(self) -> None:
        """Wait for every copy, and deliver it."""
        while self.kv.flight.transfers:
            self.kv.poll()

    def must_be_so(self, times: int) -> None:
        """Fail unless all came as it is meant, and a newcomer reads what was written."""
        counters = self.kv.counters
        blocks = self.tokens // self.kv.config.tokens_per_block * times
        came, adopted = counters[f"hit_blocks.{self.way.source}"], counters["adoptions"]
        if came != blocks or (adopted > 0) is not self.way.adopts:
            raise AssertionError(
                f"{self.way.name}: {came} of {blocks} blocks came so, {adopted} ranges were adopted"
            )
        seq = self._issue()
        assert seq.base is not None
        if self.card.kind != "null":
            must_hold(self.device, self.stream, segments([(seq.base, self.tokens)]))
        self._let_out(seq)


def _admission_figures(name: str, found: dict[Way, dict[str, Pair]]) -> list[Figure]:
    """The ways side by side: whole, and the calls alone."""
    figures = []
    for what, label in (("whole", name), ("issue", f"{name}, calls alone")):
        details = {way.name: 1e6 * pair[what].ours for way, pair in found.items()}
        for way, pair in found.items():
            if way.adopts and way.source != "alias":
                memcpy = "pinned memcpy" if way.source == "host" else "memcpy"
                details[memcpy] = 1e6 * (pair[what].raw or 0)
        best = found[WAYS[0]][what]
        raw = None if best.raw is None else 1e6 * best.raw
        figures.append(Figure(label, 1e6 * best.ours, "us", raw, best.ratio, details=details))
    return figures
