"""The standard scenarios: programs of public calls that between them make all device calls.

Each is short, so that it can be played once for every point at which a device call of it can fail.
"""

from __future__ import annotations

from typing import Final

from attrs import evolve, frozen

from kvstate import trace
from kvstate.campaign.directed import scaled
from kvstate.config import Config
from tests.corpus.case import config, grew, in_span, left_on_host, opened, said, wrote

IDS: Final = list(range(1, 15))
SHORT: Final = IDS[:8]
Program = tuple[trace.AnyCall, ...]


@frozen
class Scenario:
    """A program, and the configuration that it is for."""

    name: str
    config: Config
    program: Program

    def header(self, frame_bytes: int, streams: str) -> trace.Header:
        """For a device whose frames are multiples of that: the same tokens a frame."""
        config = scaled(self.config, frame_bytes)
        return trace.Header(
            kvstate_trace=trace.VERSION, config=config, streams=streams, strict=False
        )


def _both(step: int, tokens: int) -> list[trace.AnyCall]:
    """Sequences 1 and 2 write that many tokens each."""
    return [trace.Step(step=step, seqs=[1, 2], tokens=[tokens] * 2), trace.Settle(step=step)]


def _few_addresses(roomy: Config) -> Config:
    """With room for two ranges of the longest sequence."""
    return evolve(roomy, gpu=evolve(roomy.gpu, arena_bytes=2 * 5 * roomy.gpu.frame_bytes))


SCENARIOS: Final = (
    Scenario(
        "growth of a batch",
        config(frames=8, ahead=1),
        (
            *opened(1), *opened(2),
            trace.Resize(seq=1, tokens=4),
            *_both(3, 6), *_both(4, 3),
            trace.Resize(seq=1, tokens=16),
            trace.Resize(seq=1, tokens=9),
            trace.Rewind(seq=2, tokens=2),
            trace.Resize(seq=2, tokens=2),
            trace.Dummy(seq=3, tokens=4),
            trace.Close(seq=3),
        ),
    ),
    Scenario(
        "a prefix hit from the host",
        config(frames=8),
        (
            *left_on_host(1, IDS[:7]), trace.Trim(),
            *opened(2, [*IDS[:6], 9]), trace.Poll(), *grew(2, 2),
            *opened(3, IDS[:5], stream=1), *grew(3, 4),
            trace.Close(seq=2), trace.Close(seq=3, after=True), trace.Poll(),
        ),
    ),
    Scenario(
        "an alias, and a span that is spilled",
        config(frames=6, slots=8, spans="all"),
        (
            *opened(1, SHORT), *wrote(1, SHORT),
            *opened(2, [*SHORT, 1, 2]), *grew(2, 3),
            trace.Suspend(seq=2), trace.Poll(), trace.Resume(seq=2), *grew(2, 1),
            trace.Close(seq=1), trace.Close(seq=2), trace.Poll(),
            *opened(3), *grew(3, 16), trace.Resize(seq=3, tokens=16), *opened(4, max_tokens=8),
            *grew(4, 8),
        ),
    ),
    Scenario(
        "spans that nest, and are rewound",
        config(frames=8, slots=0, spans="all"),
        (
            *in_span(1, IDS[:4]),
            *opened(2, IDS[:8]), *wrote(2, IDS[4:8]),
            *opened(3, IDS[:9]), *grew(3, 1),
            trace.Close(seq=3), trace.Rewind(seq=2, tokens=4), *wrote(2, [20] * 4),
            trace.Close(seq=2), trace.Trim(),
        ),
    ),
    Scenario(
        "a fork, and its copies",
        config(frames=8, partial_blocks=True),
        (
            *said(1, IDS[:7]),
            trace.Fork(seq=1, child=2, max_tokens=16), *_both(3, 2),
            trace.Fork(seq=2, child=4, max_tokens=12, stream=1), *grew(4, 2),
            trace.Drop(seq=1), trace.Resume(seq=1), trace.Poll(),
            trace.Close(seq=2, after=True), trace.Close(seq=4),
        ),
    ),
    Scenario(
        "copies that are remapped onto a span",
        config(frames=10, slots=8),
        (
            *left_on_host(1, IDS),
            *opened(2, [*IDS, 0, 0]), *opened(3, [*IDS, 1, 1]),
            trace.Dummy(seq=9, tokens=4), trace.Close(seq=9), trace.Trim(),
            *opened(4, IDS), *opened(5), trace.Resize(seq=5, tokens=16),
            trace.Close(seq=3), trace.Drop(seq=2),
        ),
    ),
    Scenario(
        "mirrors of what was committed",
        config(frames=8, slots=6, write_through="on_commit"),
        (
            *said(1, IDS[:6]), trace.Poll(), *wrote(1, IDS[6:8]), *grew(1, 1), trace.Poll(),
            trace.Suspend(seq=1, after=True), trace.Poll(), trace.Resume(seq=1),
            *said(2, IDS[8:14]), trace.Poll(), trace.Close(seq=1), trace.Poll(),
            trace.Close(seq=2),
        ),
    ),
    Scenario(
        "suspended and resumed",
        config(frames=6, slots=12),
        (
            *said(1, IDS[:5]), *said(2, IDS[5:11], stream=1),
            trace.Suspend(seq=1), trace.Resume(seq=1), *grew(1, 1),
            trace.Suspend(seq=1, after=True), trace.Suspend(seq=2), trace.Poll(), trace.Trim(),
            trace.Resume(seq=2, stream=2), trace.Resume(seq=1), *_both(4, 1),
            trace.Suspend(seq=2), trace.Drop(seq=2, after=True), trace.Resume(seq=2),
        ),
    ),
    Scenario(
        "the ladder: tails, parked ranges, spans",
        config(frames=8, slots=0, spans="all", adopt=False),
        (
            *in_span(1, IDS[:4]),
            *said(2, IDS[4:8]), trace.Drop(seq=2),
            *opened(3), trace.Resize(seq=3, tokens=16), trace.Resize(seq=3, tokens=4),
            *opened(4), *grew(4, 16), *grew(3, 4), trace.Step(step=9, seqs=[3], tokens=[8]),
            trace.Settle(step=9), trace.Trim(),
        ),
    ),
    Scenario(
        "addresses that run out",
        _few_addresses(config(frames=8, slots=0, spans="all")),
        (
            *in_span(1, IDS[:4]), *said(2, IDS[4:8]), trace.Drop(seq=2),
            *opened(3, IDS[:5], max_tokens=12), *grew(3, 8), trace.Close(seq=3),
            *opened(4), *grew(4, 9),
        ),
    ),
    Scenario(
        "parked memory that is hit, and then wanted",
        config(frames=8, slots=4, spans="off", retain=True, partial_blocks=True, scrub=True),
        (
            *said(1, IDS[:6]), trace.Close(seq=1), trace.Poll(),
            *opened(2, [*IDS[:6], 9]), *opened(3, IDS[:5], stream=1), trace.Poll(),
            *grew(2, 2), *grew(3, 2), trace.Close(seq=3, after=True),
            *opened(4), *grew(4, 16), trace.Close(seq=2), trace.Poll(), trace.Clear(),
        ),
    ),
    Scenario(
        "rewinds into what others map",
        config(frames=8, slots=0, spans="all"),
        (
            *opened(1, SHORT), *wrote(1, SHORT), *opened(2, [*SHORT, 1]), *grew(2, 1),
            trace.Rewind(seq=1, tokens=5), *grew(1, 2), trace.Poll(),
            trace.Rewind(seq=2, tokens=3), trace.Poll(), *grew(2, 4),
            trace.Close(seq=1), trace.Close(seq=2, after=True), trace.Poll(),
        ),
    ),
    Scenario(
        "everything is forgotten",
        config(frames=8, slots=8, spans="all"),
        (
            *in_span(1, SHORT), trace.Poll(), *said(2, IDS[8:13]),
            *opened(3, [*SHORT, 1]), trace.Suspend(seq=2), trace.Clear(),
            trace.Resume(seq=2), trace.Close(seq=3), trace.Clear(), trace.Trim(keep=1),
        ),
    ),
    Scenario(
        "closed with copies on the way",
        config(frames=8, slots=16),
        (
            *said(1, IDS[:6]), *said(2, IDS[6:12]),
            trace.Suspend(seq=1), trace.Close(seq=1),
            trace.Suspend(seq=2), trace.Poll(), trace.Resume(seq=2), trace.Close(seq=2),
            *said(3, IDS[:6]), trace.Step(step=4, seqs=[3], tokens=[2]),
            trace.Close(seq=3, after=True), *opened(5, [*IDS[:6], 1]), trace.Close(seq=5),
            trace.Settle(step=4), trace.Poll(),
        ),
    ),
)  # fmt: skip
"""Every scenario plays without a failure to its end; tests/test_faults.py sees to that."""
