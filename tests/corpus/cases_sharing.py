"""What one sequence has from another: what may be found, when, and whose page it is then."""

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
    grew,
    left_on_host,
    length,
    matched,
    opened,
    pages,
    refused,
    said,
    slots,
    wrote,
)
from tests.faults.planted import Fault

PROBE: Final = "a probe changes nothing"
EXACT: Final = "a rewind is exact"
IDS: Final = [1, 2, 3, 4, 5, 6]
MORE: Final = [*IDS, 7]


def _probed(prompt: list[int]) -> See:
    """A probe that finds something, and whether anything is otherwise after it."""

    def read(player: Player) -> object:
        index = player.kv.reuse.index
        before = view(player.kv), [node.used for node in index]
        tokens = player.kv.probe_reuse(prompt)
        return tokens, before == (view(player.kv), [node.used for node in index])

    return See("tokens, and nothing has changed", read, (len(prompt) - 1, True), PROBE)


SHARING: Final = (
    Case(
        name="two of a batch that say the same both keep their pages",
        entries=("S06",),
        law="law 5 (index coherence)",
        fault=Fault(
            "who was not first is canonical too",
            "spec/page.py",
            "            (ACTIVE, PRIVATE),\n            (HOST_HELD_ACTIVE",
            "            (ACTIVE, COMMITTED),\n            (HOST_HELD_ACTIVE",
            "S06",
        ),
        config=config(),
        program=(
            *opened(1),
            *opened(2),
            trace.Step(step=3, seqs=[1, 2], tokens=[2, 2]),
            trace.Settle(step=3),
            trace.CommitEach(seqs=[1, 2], tokens=[7, 7]),
            trace.CommitEach(seqs=[1, 2], tokens=[8, 8]),
            pages(1, "COMMITTED"),
            pages(2, "PRIVATE"),
            trace.Drop(seq=1),
            pages(2, "COMMITTED"),
            found([7, 8, 9], 2),
        ),
    ),
    Case(
        name="a probe changes nothing",
        entries=("S08",),
        law=PROBE,
        fault=Fault(
            "a probe counts as a use",
            "kvstate/admission.py",
            "extras, longest)\n        return self._tokens(found)\n",
            "extras, longest)\n        self.reuse.index.touch(found.nodes)\n"
            "        return self._tokens(found)\n",
            "S08",
        ),
        config=config(slots=4),
        program=(
            *left_on_host(1, IDS[:4]),
            *left_on_host(2, [9] * 4),
            slots(STALE=4),
            _probed(IDS[:5]),
            *said(3, [8] * 4),
            trace.Suspend(seq=3),
            found(IDS[:5], 0, PROBE),
            found([9] * 5, 4, PROBE),
        ),
    ),
    Case(
        name="who is gone by the resume is asked for no bytes",
        entries=("S13", "B29"),
        law="law 8 (all or nothing)",
        fault=Fault(
            "the blocks of the forecast are taken, wherever they are",
            "kvstate/reuse.py",
            "                return found[:at]\n",
            "                continue\n",
            "S13",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            trace.Create(seq=2, max_tokens=16, prompt=MORE),
            trace.Create(seq=3, max_tokens=16, prompt=MORE),
            matched(2, 6),
            trace.Close(seq=1),
            slots(FILLING=3),
            trace.Resume(seq=2),
            length(2, 0),
            trace.Trim(),
            frames(PARKED=0),
            trace.Resume(seq=3),
            matched(3, 6),
            counted("hit_blocks.host", 3),
            counted("hit_blocks.live", 0),
            trace.Poll(),
        ),
    ),
    Case(
        name="what a suspended sequence has is not asked for on the GPU",
        entries=("S16",),
        law="crash AssertionError in index.py:append",
        fault=Fault(
            "a commit does not see what is only on the host",
            "kvstate/reuse.py",
            "            if node is None:\n                break\n            found.append(node)\n",
            "            if node is None or source_of(node) is None:\n"
            "                break\n            found.append(node)\n",
            "S16",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            trace.Suspend(seq=1),
            trace.Poll(),
            *opened(2, MORE),
            matched(2, 0),
            *wrote(2, MORE),
            pages(1, *["HOST_HELD_PRIVATE"] * 3),
            pages(2, *["COMMITTED"] * 3),
            trace.Resume(seq=1),
            trace.Poll(),
            trace.Drop(seq=1),
            pages(2, *["COMMITTED"] * 3),
            found(MORE, 6),
        ),
    ),
    # Not before it is written.
    Case(
        name="tokens of a step in flight are nobody's prefix",
        entries=("B58", "B59"),
        law="law 4 (publish after write)",
        fault=Fault(
            "tokens are named before they are written",
            "kvstate/stepping.py",
            'self._check_length(seq, "commit", known, known + len(ids), seq.length_tokens)',
            'self._check_length(seq, "commit", known, known + len(ids), seq.scheduled_tokens)',
            "B58",
        ),
        config=config(),
        program=(
            *opened(1, MORE),
            trace.Step(step=5, seqs=[1], tokens=[6]),
            trace.Commit(seq=1, tokens=IDS, error="ArgumentError"),
            *opened(2, MORE),
            matched(2, 0),
            trace.Settle(step=5),
            trace.Commit(seq=1, tokens=IDS),
            found(MORE, 6),
        ),
    ),
    Case(
        name="tokens that change are found as they are, never as they were",
        entries=("B61",),
        law="law 4 (publish after write)",
        fault=Fault(
            "a rewind leaves the index as it is",
            "kvstate/rewinding.py",
            "        self.reuse.left(leaving, Loss.REWOUND)\n        self._shorten(",
            "        self._shorten(",
            "B61",
        ),
        config=config(),
        program=(
            *said(1, IDS[:4]),
            found(IDS[:5], 4),
            trace.Rewind(seq=1, tokens=2),
            found(IDS[:5], 2),
            *wrote(1, [9, 9]),
            found(IDS[:5], 2),
            found([1, 2, 9, 9, 0], 4),
            *opened(2, [1, 2, 9, 9, 0]),
            trace.Poll(),
        ),
    ),
    Case(
        name="after a rewind everything is as it was at that length",
        entries=("B110",),
        law="model",
        fault=Fault(
            "a rewind into a block forgets the tokens before it there",
            "kvstate/rewinding.py",
            "self.columns.open_block[seq.row] = np.frombuffer(",
            "_ = np.frombuffer(",
            "B110",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            trace.Rewind(seq=1, tokens=3),
            pages(1, "COMMITTED", "ACTIVE", "ACTIVE"),
            *wrote(1, [9]),
            found([1, 2, 3, 9, 0], 4, EXACT),
            *opened(2, [1, 2, 3, 9, 0]),
            trace.Poll(),
        ),
    ),
    Case(
        name="an aborted sequence leaves nothing to be found",
        entries=("B62",),
        law="law 1 (conservation)",
        fault=Fault(
            "what an aborted sequence said is kept",
            "kvstate/manager.py",
            "        if event is not _CLOSE or seq.transfer is not None",
            "        if seq.transfer is not None",
            "B62",
        ),
        config=config(),
        program=(
            *said(1, IDS[:4]),
            trace.Step(step=5, seqs=[1], tokens=[4]),
            trace.Drop(seq=1),
            trace.Settle(step=5),
            found(IDS[:5], 0),
            slots(FREE=16),
        ),
    ),
    Case(
        name="only blocks that were committed are written out",
        entries=("B38",),
        law="crash ValueError in runs.py:joined",
        fault=Fault(
            "there are as many places as there is capacity",
            "kvstate/manager.py",
            "        plan.room = self.host.room(len(nodes)) or []\n",
            "        blocks = self.geometry.blocks(seq.capacity_tokens)\n"
            "        plan.room = self.host.room(blocks) or []\n",
            "B38",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            *grew(1, 2),
            trace.Resize(seq=1, tokens=16),
            trace.Close(seq=1),
            counted("kept_blocks", 3),
            slots(FILLING=3),
            trace.Poll(),
            found([*MORE, 8, 9], 6),
        ),
    ),
    # Not after it is gone.
    Case(
        name="an evicted block is not found",
        entries=("B64",),
        law="law 1 (conservation)",
        fault=Fault(
            "an evicted block stays in the index",
            "kvstate/lines.py",
            "                self.index.lose_slot(node, why=Loss.EVICTED)\n",
            "                pass\n",
            "B64",
        ),
        config=config(slots=2),
        program=(
            *left_on_host(1, IDS[:4]),
            found(IDS[:5], 4),
            *said(2, [9] * 4),
            trace.Suspend(seq=2),
            counted("evicted_blocks", 2),
            found(IDS[:5], 0),
            *opened(3, IDS[:5]),
            matched(3, 0),
            *wrote(3, IDS[:5]),
        ),
    ),
    Case(
        name="what was matched before a refusal is looked up again",
        entries=("B65",),
        law="model",
        fault=Fault(
            "the count of the first try stands",
            "kvstate/admission.py",
            "        seq.matched_tokens = 0 if match.parent is not None else tokens\n",
            "",
            "B65",
        ),
        config=config(slots=3, frames=4),
        program=(
            *left_on_host(1, IDS),
            trace.Create(seq=2, max_tokens=16, prompt=MORE),
            *said(3, [9] * 12),
            *said(4, [8] * 2),
            trace.Resume(seq=2, error="OutOfFrames"),
            refused("gate", 1),
            matched(2, 6),
            trace.Suspend(seq=4),
            counted("evicted_blocks", 1),
            trace.Drop(seq=3),
            trace.Resume(seq=2),
            length(2, 4),
            matched(2, 4),
            trace.Poll(),
        ),
    ),
    Case(
        name="bytes that were given up are not found",
        entries=("B67",),
        law="law 4 (publish after write)",
        fault=Fault(
            "who gives its bytes up stays in the index",
            "kvstate/lines.py",
            "        cut = self._cut_all([node for node in lost if node.slot is None], why)\n",
            "        cut, lost = list[int](), [node for node in lost if node.slot is not None]\n",
            "B67",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            found(MORE, 6),
            trace.Drop(seq=1),
            found(MORE, 0),
            trace.Resume(seq=1),
            matched(1, 0),
            *wrote(1, IDS),
            found(MORE, 6),
        ),
    ),
    Case(
        name="a dropped sequence has nothing of its earlier life",
        entries=("B116",),
        law="law 6 (whole keys)",
        fault=Fault(
            "a drop forgets the lengths alone",
            "kvstate/sequence.py",
            "        self.slots, self.keys, self.nodes, self.held_tokens = (), [], [], 0\n",
            "        self.slots, self.held_tokens = (), 0\n",
            "B116",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            *opened(2, MORE),
            matched(2, 6),
            trace.Drop(seq=2),
            frames(COMING=1),
            trace.Close(seq=1),
            trace.Poll(),
            trace.Resume(seq=2),
            matched(2, 6),
            trace.Poll(),
            *wrote(2, [8, 8]),
            found([*IDS, 8, 8, 8], 8),
        ),
    ),
)
