"""GPU memory that is short, given back or counted: frames, ranges, charges, admission."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, Final

from kvstate import trace
from kvstate.config import Config, Geometry, GpuTier, LayerSpec
from kvstate.errors import IllegalTransition
from kvstate.gpu import NullDevice
from kvstate.manager import Manager
from tests.corpus.case import (
    REACHED,
    Case,
    capacity,
    config,
    counted,
    expect,
    frames,
    grew,
    length,
    opened,
    pages,
    planted,
    said,
)
from tests.faults.planted import Fault

RESERVED: Final = "the reserved row is nobody's"
FRESH: Final = "a batch is as its sequences are now"
COSTS: Final = "growth costs what it adds"
ONE_QUIESCE: Final = "one quiesce a call"
BOUNDED: Final = "what is kept is bounded"
ONE, OTHER = [1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4]


def _lines(call: Callable[[], object]) -> int:
    """How many lines of Python a call executes. What is collected meanwhile does not count."""
    count = 0

    def follow(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return follow

    before = sys.gettrace()
    gc.disable()
    sys.settrace(follow)
    try:
        call()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def _growth_costs_the_same() -> None:
    with Manager(config(frames=64, max_tokens=256), NullDevice()) as kv:
        seq = kv.create(max_tokens=256)
        seq.resume()
        costs = [_lines(partial(seq.resize, 4 * frames)) for frames in range(1, 65)]
        expect(REACHED, "frames mapped", len(kv.device.ledger().mappings), 64)
        expect(COSTS, "lines for one frame more, later on", set(costs[2:]), {costs[1]})


def _layers_follow_one_another() -> None:
    layers = (LayerSpec(2, 8, "float16", count=3), LayerSpec(1, 8, "float8_e4m3fn", count=2))
    geometry = Geometry(Config(layers=layers, gpu=GpuTier(1 << 16, 4096), tokens_per_block=4))
    end = 0
    for number in range(geometry.layer_count):
        spec, offset = geometry.layer(number)
        expect("bytes", f"layer {number} begins at", offset, end)
        end += spec.token_bytes // spec.count
    expect("bytes", "the layers of a token end at", end, geometry.token_bytes)


def _the_reserved_row() -> None:
    with Manager(config(max_sequences=2), NullDevice()) as kv:
        gone, last = kv.create(max_tokens=8), kv.create(max_tokens=8)
        last.resume()
        kv.settle(kv.step(kv.batch([last]), 3))
        expect(REACHED, "the row of who stays", last.row, kv.columns.rows - 1)
        gone.close()
        expect(RESERVED, "tokens of who is gone", gone.length_tokens, 0)
        expect(RESERVED, "tokens of who stays", last.length_tokens, 3)


def _a_kept_batch() -> None:
    with Manager(config(max_sequences=1), NullDevice()) as kv:
        first = kv.create(max_tokens=8)
        first.resume()
        first.resize(8)
        batch = kv.batch([first])
        kv.settle(kv.step(batch, 2))
        first.close()
        other = kv.create(max_tokens=8)
        other.resume()
        other.resize(8)
        expect(REACHED, "the row of the other", other.row, batch.rows[0])
        try:
            kv.step(batch, 2)
        except IllegalTransition:
            expect(FRESH, "tokens of the other", other.scheduled_tokens, 0)
        else:
            expect(FRESH, "a step of who is gone", "issued", "refused")


MEMORY: Final = (
    Case(
        name="every frame is counted wherever it goes",
        entries=("S12",),
        law="law 1 (conservation)",
        fault=Fault(
            "frames that change their owner are not counted",
            "kvstate/plan.py",
            "        if cells.counts is not None:\n",
            "        if cells.counts is not None and into is None:\n",
            "S12",
        ),
        config=config(frames=5),
        program=(
            *said(1, range(16)),
            trace.Drop(seq=1),
            *opened(2),
            counted("adoptions", 1),
            *grew(2, 9),
            frames(MAPPED=3, PARKED=1, ABSENT=1),
            trace.Trim(),
            frames(MAPPED=3, PARKED=0, ABSENT=2),
        ),
    ),
    Case(
        name="growth does not look again at what is mapped",
        entries=("S14",),
        law=COSTS,
        fault=Fault(
            "growth counts what is mapped, one by one",
            "kvstate/runs.py",
            "    mapped, charged = len(own.ids), range_.charged\n",
            "    mapped, charged = 0, range_.charged\n"
            "    while mapped < len(own.ids):\n        mapped += 1\n",
            "S14",
        ),
        run=_growth_costs_the_same,
    ),
    Case(
        name="a length that ends inside a frame can be asked for again",
        entries=("S22",),
        law="law 16 (counters are sums)",
        fault=Fault(
            "capacity is what the frames hold, and not at most what was asked for",
            "kvstate/core.py",
            "        return min(seq.max_tokens, self.geometry.tokens(frames))\n",
            "        return self.geometry.tokens(frames)\n",
            "S22",
        ),
        config=config(),
        program=(
            *opened(1, max_tokens=13),
            trace.Resize(seq=1, tokens=13),
            trace.Resize(seq=1, tokens=13),
            capacity(1, 13),
            trace.Resize(seq=1, tokens=14, error="ArgumentError"),
            *grew(1, 13),
        ),
    ),
    Case(
        name="layers of different shapes do not share bytes",
        entries=("S23",),
        law="bytes",
        fault=Fault(
            "a spec of many layers counts as one of them",
            "kvstate/config.py",
            "            offset += spec.token_bytes\n        raise AssertionError",
            "            offset += spec.token_bytes // spec.count\n        raise AssertionError",
            "S23",
        ),
        run=_layers_follow_one_another,
    ),
    Case(
        name="memory that was freed is handed to one sequence",
        entries=("B01",),
        law="law 11 (ranges follow)",
        fault=planted("adopted range stays on offer"),
        config=config(),
        program=(
            *said(1, range(8)),
            trace.Drop(seq=1),
            frames(PARKED=2),
            *opened(2),
            counted("adoptions", 1),
            *opened(3),
            counted("adoptions", 1),
            *grew(2, 8),
            *grew(3, 8),
        ),
    ),
    Case(
        name="a closed sequence is released by one path, once",
        entries=("B04",),
        law="law 11 (ranges follow)",
        fault=planted("range released twice"),
        config=config(slots=0),
        program=(
            *said(1, range(4)),
            trace.Step(step=5, seqs=[1], tokens=[4]),
            trace.Close(seq=1),
            frames(COMING=2),
            trace.Settle(step=5),
            frames(PARKED=2),
            *opened(2),
            *opened(3),
            counted("adoptions", 1),
            *grew(2, 8),
            *grew(3, 8),
        ),
    ),
    Case(
        name="who gets a range does not get the records of who had it",
        entries=("B16",),
        law="law 11 (ranges follow)",
        fault=Fault(
            "an adopted range keeps the records of who had it",
            "kvstate/admission.py",
            "        range_.pages.states.clear()\n",
            "",
            "B16",
        ),
        config=config(),
        program=(
            *said(1, ONE),
            trace.Drop(seq=1),
            *opened(2),
            counted("adoptions", 1),
            *grew(2, 3),
            trace.Drop(seq=2),
            *opened(3),
            counted("adoptions", 2),
            *grew(3, 2),
        ),
    ),
    Case(
        name="a block that reaches into a frame that stays is not given back",
        entries=("B166",),
        law="law 19 (pages)",
        fault=Fault(
            "a shrink rounds down which blocks stay",
            "kvstate/manager.py",
            '"emptied": ((seq.pages, blocks(capacity), blocks(seq.capacity_tokens)),),',
            '"emptied": ((seq.pages, capacity // 3, blocks(seq.capacity_tokens)),),',
            "B166",
        ),
        config=config(block=3),
        program=(
            *opened(1),
            *grew(1, 6),
            trace.Resize(seq=1, tokens=16),
            pages(1, *["ACTIVE"] * 6),
            trace.Resize(seq=1, tokens=7),
            pages(1, *["ACTIVE"] * 3, *["VACANT"] * 3),
            frames(MAPPED=2, PARKED=2),
            trace.Drop(seq=1),
            frames(MAPPED=0, PARKED=4),
        ),
    ),
    Case(
        name="room in a block that ends in the next frame is counted",
        entries=("B131",),
        law="law 16 (counters are sums)",
        fault=Fault(
            "only blocks that a frame holds whole are counted",
            "kvstate/config.py",
            "        return frames * self.frame_bytes // self.row_bytes\n",
            "        blocks = frames * self.frame_bytes // self.block_bytes\n"
            "        return blocks * self.tokens_per_block\n",
            "B131",
        ),
        config=config(block=3),
        program=(
            *opened(1),
            *grew(1, 4),
            capacity(1, 4),
            frames(MAPPED=1),
            *grew(1, 4),
            capacity(1, 8),
            frames(MAPPED=2),
        ),
    ),
    Case(
        name="memory of a burst is given back",
        entries=("B133",),
        law=BOUNDED,
        fault=Fault(
            "four times of what was asked for is kept",
            "kvstate/reclaim.py",
            "        plan.fire(_RELEASE, pool, keep, len(pool.ids), self.gpu.absent(0)[0])\n",
            "        plan.fire(_RELEASE, pool, 4 * keep, len(pool.ids), self.gpu.absent(0)[0])\n",
            "B133",
        ),
        config=config(frames=16),
        program=(
            *(call for seq in range(1, 5) for call in said(seq, range(16))),
            frames(MAPPED=16),
            *(trace.Drop(seq=seq) for seq in range(1, 5)),
            frames(PARKED=16),
            trace.Trim(keep=2),
            frames(BOUNDED, POOLED=2, ABSENT=14),
        ),
    ),
    Case(
        name="frames of rejected drafts are freed with the others",
        entries=("B53",),
        law="law 1 (payers)",
        fault=Fault(
            "only frames of settled tokens are freed",
            "kvstate/runs.py",
            '        "frames": ((range_.frames, 0, len(range_.frames.ids)),),\n'
            '        "left": (_left(range_, blocks - own),),\n',
            '        "frames": ((range_.frames, 0, geometry.frames(seq.length_tokens)),),\n'
            '        "left": (_left(range_, blocks - own),),\n',
            "B53",
        ),
        config=config(),
        program=(
            *opened(1),
            trace.Step(step=2, seqs=[1], tokens=[12]),
            trace.Settle(step=2, accepted=[3]),
            frames(MAPPED=3),
            trace.Close(seq=1),
            frames(PARKED=3),
            trace.Trim(),
            frames(ABSENT=8),
        ),
    ),
    Case(
        name="a frame that is half full is freed with the others",
        entries=("B55",),
        law="law 1 (payers)",
        fault=Fault(
            "only frames that are full are freed",
            "kvstate/runs.py",
            '        "frames": ((range_.frames, 0, len(range_.frames.ids)),),\n'
            '        "left": (_left(range_, blocks - own),),\n',
            '        "frames": ((range_.frames, 0, seq.length_tokens // geometry.tokens(1)),),\n'
            '        "left": (_left(range_, blocks - own),),\n',
            "B55",
        ),
        config=config(),
        program=(
            *said(1, ONE),
            frames(MAPPED=2),
            trace.Close(seq=1),
            trace.Poll(),
            frames(PARKED=2),
            trace.Trim(),
            frames(ABSENT=8),
        ),
    ),
    Case(
        name="a shrink is never in the way of itself",
        entries=("B122",),
        law="law 19 (pages)",
        fault=Fault(
            "a shrink keeps a frame more than it says",
            "kvstate/manager.py",
            '"excess": ((seq.range.frames, frames - seq.range.shared, seq.range.charged),),',
            '"excess": ((seq.range.frames, frames + 1, seq.range.charged),),',
            "B122",
        ),
        config=config(),
        program=(
            *said(1, range(5)),
            trace.Resize(seq=1, tokens=16),
            trace.Step(step=2, seqs=[1], tokens=[2]),
            trace.Resize(seq=1, tokens=7),
            frames(MAPPED=2, PARKED=2),
            trace.Settle(step=2),
            trace.Resize(seq=1, tokens=7),
            trace.Trim(),
            frames(MAPPED=2, PARKED=0),
        ),
    ),
    Case(
        name="a step goes to the end of its sequence and not beyond",
        entries=("B88",),
        law="law 19 (contiguity)",
        fault=Fault(
            "nobody asks how long a sequence may become",
            "kvstate/stepping.py",
            '            self._check_length(seq, "step", 0, end, seq.max_tokens)\n',
            "",
            "B88",
        ),
        config=config(),
        program=(
            *opened(1, max_tokens=8),
            *opened(2),
            *grew(1, 8),
            trace.Step(step=3, seqs=[1], tokens=[1], error="ArgumentError"),
            trace.Step(step=3, seqs=[2, 1], tokens=[4, 9], error="ArgumentError"),
            *grew(2, 8),
        ),
    ),
    Case(
        name="a row that is used again has nothing of who had it",
        entries=("B89",),
        law="law 11 (leaving releases)",
        fault=Fault(
            "the lengths of a row are those of who had it",
            "kvstate/core.py",
            "        columns.set_lengths(row, 0)\n        seq.row = columns.rows\n",
            "        seq.row = columns.rows\n",
            "B89",
        ),
        config=config(max_sequences=1),
        program=(
            *said(1, ONE),
            trace.Close(seq=1),
            *opened(2),
            length(2, 0),
            *grew(2, 2),
        ),
    ),
    Case(
        name="who is gone is in the row of nobody",
        entries=("B91",),
        law=RESERVED,
        fault=Fault(
            "who is gone is in the last row",
            "kvstate/core.py",
            "        seq.row = columns.rows\n",
            "        seq.row = columns.rows - 1\n",
            "B91",
        ),
        run=_the_reserved_row,
    ),
    Case(
        name="a batch that is kept sees who has left",
        entries=("B85",),
        law=FRESH,
        fault=Fault(
            "a batch is not told that a state has changed",
            "kvstate/stepping.py",
            "        if batch.version != columns.version or",
            "        if batch.version < 0 or",
            "B85",
        ),
        run=_a_kept_batch,
    ),
    Case(
        name="drafts have memory, also those that are rejected",
        entries=("B112",),
        law="law 19 (lengths)",
        fault=planted("frontier one frame short"),
        config=config(),
        program=(
            *said(1, range(7)),
            trace.Step(step=5, seqs=[1], tokens=[4]),
            frames(MAPPED=3),
            trace.Settle(step=5, accepted=[1]),
            length(1, 8),
        ),
    ),
)
