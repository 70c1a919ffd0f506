"""Memory that several sequences map: who may map it, for how long, and who may write it."""

from __future__ import annotations

from typing import Final

from kvstate import trace
from kvstate.campaign.player import Player
from kvstate.view import view
from tests.corpus.case import (
    Case,
    See,
    config,
    counted,
    found,
    frames,
    in_span,
    matched,
    opened,
    pages,
    planted,
    refused,
    said,
    slots,
    state,
    wrote,
)
from tests.faults.planted import Fault

PROBE: Final = "a probe changes nothing"
STANDS: Final = "what somebody stands on stays in the index"
IDS: Final = [1, 2, 3, 4, 5, 6, 7, 8]
"""Four blocks, two frames."""
MORE: Final = [*IDS, 9]
OTHER: Final = [8, 7, 6, 5]


def _probed(prompt: list[int]) -> See:
    """A probe that finds something, and whether anything is otherwise after it."""

    def read(player: Player) -> object:
        before = view(player.kv)
        return player.kv.probe_reuse(prompt), before == view(player.kv)

    return See("tokens, and nothing has changed", read, (len(prompt) - 1, True), PROBE)


SPANS: Final = (
    # Looking.
    Case(
        name="a look-up that cannot use a span leaves it as it is",
        entries=("S08",),
        law="law 5 (index coherence)",
        fault=Fault(
            "a span is emptied by who finds that it does not fit",
            "kvstate/spans.py",
            "        return span if canonical and self._full(",
            "        canonical or span.nodes.clear()\n"
            "        return span if canonical and self._full(",
            "S08",
        ),
        config=config(slots=0),
        program=(
            *said(1, IDS[:4]),
            *opened(2, IDS[:5]),
            *wrote(2, IDS[4:6]),
            *wrote(1, IDS[4:8]),
            pages(1, "COMMITTED", "COMMITTED", "PRIVATE", "COMMITTED"),
            counted("hit_blocks.alias", 2),
            *opened(3, MORE),
            matched(3, 8),
            counted("hit_blocks.alias", 4),
            counted("hit_blocks.live", 2),
        ),
    ),
    Case(
        name="a probe of a span is not a use of it",
        entries=("S08",),
        law=PROBE,
        fault=Fault(
            "a probe makes its span the latest",
            "kvstate/admission.py",
            "        return self._tokens(found)\n",
            "        sharing = self.spans.sharing(found.nodes)\n"
            "        sharing and self.spans.touch(sharing.span)\n"
            "        return self._tokens(found)\n",
            "S08",
        ),
        config=config(frames=4, slots=0, spans="all"),
        program=(
            *in_span(1, IDS[:4]),
            *in_span(2, OTHER),
            frames(SPAN=2),
            _probed(IDS[:5]),
            *opened(3),
            trace.Step(step=3, seqs=[3], tokens=[12]),
            found(IDS[:5], 0, PROBE),
            found([*OTHER, 1], 4, PROBE),
            trace.Settle(step=3),
        ),
    ),
    # Whoever stands on one.
    Case(
        name="a span that went before the resume is not mapped",
        entries=("S13",),
        law="law 5 (index coherence)",
        fault=Fault(
            "blocks with a copy on the host stay those of the span that went",
            "kvstate/lines.py",
            "        for node in lost[:kept]:\n            self.index.lose_owner(node, owner)\n",
            "",
            "S13",
        ),
        config=config(frames=5, spans="all"),
        program=(
            *in_span(1, IDS),
            trace.Poll(),
            frames(SPAN=2),
            slots(MIRROR=4),
            trace.Create(seq=2, max_tokens=16, prompt=MORE),
            matched(2, 8),
            *said(3, [9] * 16),
            counted("spilled_spans", 1),
            trace.Drop(seq=3),
            trace.Resume(seq=2),
            matched(2, 8),
            counted("hit_blocks.alias", 0),
            counted("hit_blocks.host", 4),
            trace.Poll(),
            *wrote(2, [9]),
        ),
    ),
    Case(
        name="a span is not given up under a sequence that maps it",
        entries=("B13",),
        law="legal call refused",
        fault=planted("a span is given up under a sequence that maps it"),
        config=config(frames=4, slots=0),
        program=(
            *said(1, IDS),
            *opened(2, MORE),
            trace.Close(seq=1),
            frames(SPAN=2),
            *wrote(2, [9]),
            *opened(3),
            trace.Step(step=3, seqs=[3], tokens=[8], error="OutOfFrames"),
            refused("budget", 1),
            *wrote(2, [9]),
            found([*MORE, 9, 9], 10),
            trace.Close(seq=2),
            trace.Step(step=3, seqs=[3], tokens=[16]),
            counted("spilled_spans", 1),
            trace.Settle(step=3),
        ),
    ),
    Case(
        name="what a suspended sequence stands on stays when its span goes",
        entries=("B13",),
        law=STANDS,
        fault=Fault(
            "a span that goes takes what others have too",
            "kvstate/reuse.py",
            "        inherited, lost = self._inherited(nodes)\n        self._fire",
            "        inherited, lost = list[tuple[Node, Sequence]](), nodes\n        self._fire",
            "B13",
        ),
        config=config(slots=4),
        program=(
            *said(1, IDS),
            *opened(2, MORE),
            trace.Suspend(seq=2),
            trace.Poll(),
            pages(2, *["HOST_HELD_PRIVATE"] * 4),
            trace.Close(seq=1),
            frames(SPAN=2),
            trace.Trim(),
            counted("spilled_spans", 1),
            trace.Resume(seq=2),
            trace.Poll(),
            found(MORE, 8, STANDS),
            pages(2, *["COMMITTED"] * 4),
            *wrote(2, [9, 9]),
            found([*MORE, 9, 9], 10),
        ),
    ),
    Case(
        name="memory that several map is free when the last of them goes",
        entries=("B07",),
        law="law 2 (named holders)",
        fault=planted("an alias does not hold its span"),
        config=config(slots=0),
        program=(
            *said(1, IDS),
            *opened(2, MORE),
            *opened(3, MORE),
            trace.Close(seq=1),
            trace.Close(seq=2),
            frames(SPAN=2),
            trace.Trim(),
            frames(SPAN=2),
            *wrote(3, [9]),
            trace.Close(seq=3),
            trace.Trim(),
            frames(SPAN=0, ABSENT=8),
        ),
    ),
    Case(
        name="what its owner leaves to others is not parked with the rest",
        entries=("B07",),
        law="law 2 (named holders)",
        fault=planted("the frames of a span are parked with its owner's range"),
        config=config(slots=0),
        program=(
            *said(1, [*MORE, 9, 9, 9]),
            *opened(2, MORE),
            frames(LIVE_SPAN=2, MAPPED=1),
            trace.Close(seq=1),
            frames(SPAN=2, PARKED=1),
            *wrote(2, [9]),
        ),
    ),
    Case(
        name="what several have mapped is released once",
        entries=("B02",),
        law="device",
        fault=Fault(
            "a span is released by each range that mapped it",
            "kvstate/reclaim.py",
            '            "passed": [(span.frames, 0, count, self.gpu.pool)],\n',
            '            "passed": [(span.frames, 0, count, self.gpu.pool)] * len(ranges),\n',
            "B02",
        ),
        config=config(slots=0),
        program=(
            *said(1, IDS),
            *opened(2, MORE),
            *opened(3, MORE),
            trace.Close(seq=2),
            trace.Close(seq=1),
            trace.Close(seq=3),
            frames(SPAN=2),
            trace.Trim(),
            frames(SPAN=0, POOLED=0, ABSENT=8),
        ),
    ),
    Case(
        name="what hangs behind a span that goes comes back",
        entries=("B32",),
        law="law 1 (conservation)",
        fault=Fault(
            "what a span takes with it is not freed",
            "kvstate/lines.py",
            "        self.free(cut)\n",
            "",
            "B32",
        ),
        config=config(slots=1, spans="all"),
        program=(
            *said(9, [9] * 2),
            trace.Suspend(seq=9),
            *in_span(1, IDS[:4]),
            trace.Drop(seq=9),
            trace.Poll(),
            slots(FREE=1),
            *opened(2, IDS[:5]),
            *wrote(2, IDS[4:6]),
            trace.Close(seq=2),
            trace.Poll(),
            slots(STALE=1),
            found(IDS[:7], 6),
            trace.Trim(),
            frames(SPAN=0),
            slots(FREE=1),
        ),
    ),
    # The bytes.
    Case(
        name="what is given up is found no more, though it is still mapped",
        entries=("B67",),
        law="law 5 (index coherence)",
        fault=planted("a spilled span stays in the index"),
        config=config(frames=4, slots=0, spans="all", scrub=True),
        program=(
            *in_span(1, IDS),
            *opened(2),
            trace.Step(step=2, seqs=[2], tokens=[12], fail={"unmap": 1}, error="DeviceError"),
            frames(SPAN=2),
            found(MORE, 0),
            *opened(3, MORE),
            matched(3, 0),
            trace.Close(seq=3),
            trace.Step(step=2, seqs=[2], tokens=[16]),
            frames(SPAN=0, MAPPED=4),
            trace.Settle(step=2),
        ),
    ),
    Case(
        name="pages that are still on their way are nobody's to map",
        entries=("B151",),
        law="bytes",
        fault=planted("a span takes pages whose bytes are not there yet"),
        config=config(spans="all"),
        program=(
            trace.Create(seq=1, max_tokens=16, prompt=IDS),
            trace.Resume(seq=1),
            *wrote(1, IDS),
            trace.Suspend(seq=1),
            trace.Poll(),
            trace.Resume(seq=1, fail={"complete": 1}),
            pages(1, *["LOADING_COMMITTED"] * 4),
            trace.Close(seq=1),
            *opened(2, MORE),
            matched(2, 0),
            *wrote(2, MORE),
        ),
    ),
    Case(
        name="an alias cannot be written",
        entries=("B116",),
        law="law 20 (shared is immutable)",
        fault=planted("an alias is mapped so that it can be written"),
        config=config(slots=0),
        program=(*said(1, IDS), *opened(2, MORE), pages(2, *["ALIASED"] * 4), *wrote(2, [9])),
    ),
    Case(
        name="a rewind does not go into what others map",
        entries=("B116",),
        law="crash KeyError in arena.py:unpark",
        fault=planted("a rewind goes into memory that others map"),
        config=config(slots=0),
        program=(
            *said(1, MORE),
            *opened(2, MORE),
            trace.Rewind(seq=1, tokens=7, error="IllegalTransition"),
            trace.Rewind(seq=2, tokens=7, error="IllegalTransition"),
            trace.Rewind(seq=1, tokens=8),
            *wrote(1, [0]),
            *wrote(2, [9]),
        ),
    ),
    Case(
        name="what is written again is mapped by nobody else, not even by who is gone",
        entries=("B116",),
        law="legal call refused",
        fault=Fault(
            "parked ranges still map what is written again",
            "kvstate/manager.py",
            "            self.ladder.unalias(seq.range)\n",
            "            pass\n",
            "B116",
        ),
        config=config(slots=0),
        program=(
            *said(1, IDS),
            *opened(2, MORE),
            trace.Close(seq=2),
            frames(LIVE_SPAN=2),
            trace.Rewind(seq=1, tokens=2),
            frames(LIVE_SPAN=0, MAPPED=2),
            *wrote(1, [9, 9]),
            state(1, "ACTIVE"),
        ),
    ),
    Case(
        name="nothing of another tenant is mapped",
        entries=("B71",),
        law="bytes",
        fault=planted("another tenant's prefix is found"),
        config=config(slots=0),
        program=(
            *said(1, IDS, salt="01"),
            *opened(2, MORE, salt="02"),
            matched(2, 0),
            *opened(3, MORE, salt="01"),
            matched(3, 8),
        ),
    ),
)
