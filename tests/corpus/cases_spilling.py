"""Spans under pressure: which are given up, how much, after how many waits, and what counts as
theirs."""

from __future__ import annotations

from typing import Final

from kvstate import trace
from tests.corpus.case import (
    Case,
    Program,
    See,
    config,
    counted,
    found,
    frames,
    grew,
    in_span,
    matched,
    opened,
    refused,
    said,
)
from tests.faults.planted import Fault

ONE_QUIESCE: Final = "one quiesce a call"
SHORT: Final = "no more is given up than is short"
BOUNDED: Final = "what is kept is bounded"
KNOWS: Final = "the gate counts what is protected"
IDS: Final = [1, 2, 3, 4, 5, 6, 7, 8]
"""Four blocks, two frames."""
MORE: Final = [*IDS, 9]
OTHER: Final = [8, 7, 6, 5]


def _admits(tokens: int, wanted: bool, kind: str) -> See:
    """Whether the gate would let that many tokens in."""
    return See(f"room for {tokens} tokens", lambda p: p.kv.admits(tokens), wanted, kind)


TWO_RUNGS: Final[Program] = (
    *in_span(1, IDS[:4]),
    *in_span(2, OTHER),
    *said(3, [9] * 8),
    trace.Drop(seq=3),
    frames(SPAN=2, PARKED=2, ABSENT=2),
    *opened(4, max_tokens=24),
    trace.Step(step=4, seqs=[4], tokens=[24]),
    counted("quiesces", 1, ONE_QUIESCE),
    counted("spilled_spans", 2),
    frames(MAPPED=6),
    trace.Settle(step=4),
)
"""All that there is must be had: what is free, what is parked, and two spans."""

SPILLING: Final = (
    Case(
        name="parked memory and spans are had in the same pass",
        entries=("S09",),
        law="law 12 (progress)",
        fault=Fault(
            "spans are given up only if nothing was parked",
            "kvstate/reclaim.py",
            "        self.spill_spans(fresh - gpu.free)\n",
            "        if not gpu.counts[POOLED.code]:\n"
            "            self.spill_spans(fresh - gpu.free)\n",
            "S09",
        ),
        config=config(frames=6, slots=0, max_tokens=24, spans="all", adopt=False),
        program=TWO_RUNGS,
    ),
    Case(
        name="parked memory and all spans are had after one wait",
        entries=("S09",),
        law=ONE_QUIESCE,
        fault=Fault(
            "each span that is given up is waited for",
            "kvstate/reclaim.py",
            "            wanted -= span.own_frames\n",
            "            wanted -= span.own_frames\n"
            "            self.flight._quiet_in = -1\n            self.flight.quiesce()\n",
            "S09",
        ),
        config=config(frames=6, slots=0, max_tokens=24, spans="all", adopt=False),
        program=TWO_RUNGS,
    ),
    Case(
        name="a burst does not take the prefixes that are protected",
        entries=("S10",),
        law="replay",
        fault=Fault(
            "nothing is protected",
            "kvstate/spans.py",
            "        return self.columns.counts[ACTIVE.code] > 1\n",
            "        return False\n",
            "S10",
        ),
        config=config(slots=0, spans="all", protected=0.3),
        program=(
            *in_span(1, IDS),
            frames(SPAN=2),
            *said(2, [9] * 16),
            *opened(3),
            trace.Step(step=3, seqs=[3], tokens=[12], error="OutOfFrames"),
            refused("budget", 1),
            frames(SPAN=2),
            found(MORE, 8),
            trace.Close(seq=2),
            *grew(3, 16),
            found(MORE, 8),
        ),
    ),
    Case(
        name="the gate knows what is protected",
        entries=("S10",),
        law=KNOWS,
        fault=Fault(
            "the gate takes all spans for free",
            "kvstate/admission.py",
            "        kept = self.gpu.in_spans - self.spans.frames_without(sharing)\n",
            "        kept = 0\n",
            "S10",
        ),
        config=config(slots=0, spans="all", protected=0.3),
        program=(
            *in_span(1, IDS),
            *in_span(2, [9] * 8),
            frames(SPAN=4, ABSENT=4),
            *opened(3),
            *grew(3, 8),
            *opened(4),
            _admits(16, True, KNOWS),
            _admits(17, False, KNOWS),
            *grew(4, 16),
            found(MORE, 0),
            found([9] * 9, 8),
        ),
    ),
    Case(
        name="no more spans are given up than are short",
        entries=("B134",),
        law=SHORT,
        fault=Fault(
            "spans are given up for the whole need",
            "kvstate/reclaim.py",
            "        self.spill_spans(fresh - gpu.free)\n",
            "        self.spill_spans(fresh)\n",
            "B134",
        ),
        config=config(frames=6, slots=0, spans="all"),
        program=(
            *in_span(1, IDS),
            *in_span(2, OTHER),
            frames(SPAN=3, ABSENT=3),
            *opened(3),
            *grew(3, 16),
            counted("spilled_spans", 1, SHORT),
            found([*OTHER, 1], 4, SHORT),
        ),
    ),
    Case(
        name="what is mapped once more does not count as free too",
        entries=("B82",),
        law="replay",
        fault=Fault(
            "the gate counts a span twice",
            "kvstate/spans.py",
            "_chain(None if sharing is None else sharing.span) if found",
            "_chain(None) if found",
            "B82",
        ),
        config=config(frames=4, slots=0, spans="all"),
        program=(
            *in_span(1, IDS),
            *said(2, [9] * 8),
            frames(SPAN=2, MAPPED=2),
            trace.Create(seq=3, max_tokens=16, prompt=MORE),
            trace.Resume(seq=3, error="OutOfFrames"),
            refused("gate", 1),
            trace.Drop(seq=2),
            trace.Resume(seq=3),
            matched(3, 8),
            *grew(3, 8),
        ),
    ),
    Case(
        name="memory that several map is charged to one",
        entries=("S12",),
        law="replay",
        fault=Fault(
            "what is mapped once more is charged once more",
            "kvstate/admission.py",
            "self.geometry.frames(tokens) - (0 if sharing is None else sharing.frames))\n",
            "self.geometry.frames(tokens))\n",
            "S12",
        ),
        config=config(frames=4, slots=0),
        program=(
            *said(1, [*IDS, *OTHER]),
            *opened(2, [*IDS, *OTHER, 9]),
            *opened(3, [*IDS, *OTHER, 9]),
            frames(LIVE_SPAN=3, MAPPED=0, ABSENT=1),
            *grew(2, 4),
        ),
    ),
    Case(
        name="spans are given back with the rest when nobody runs",
        entries=("B133",),
        law=BOUNDED,
        fault=Fault(
            "a trim leaves the spans",
            "kvstate/manager.py",
            "            self.ladder.spill_spans(self.gpu.budget_frames)\n",
            "",
            "B133",
        ),
        config=config(slots=0, spans="all", protected=0.9),
        program=(
            *in_span(1, IDS),
            *in_span(2, [9] * 8),
            *in_span(3, OTHER),
            frames(SPAN=5),
            trace.Trim(),
            frames(BOUNDED, SPAN=0, ABSENT=8),
        ),
    ),
)
