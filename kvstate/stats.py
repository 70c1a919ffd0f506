"""Statistics: one snapshot of where everything stands and of what was done so far.

Nothing is counted for this, and nothing is gone over: states are counted where they change, and
charges are what the states say.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from kvstate.spec.coupling import TABLES
from kvstate.spec.page import VACANT as PAGE_VACANT
from kvstate.spec.range import VACANT
from kvstate.spec.sequence import CLOSED
from kvstate.spec.table import State

if TYPE_CHECKING:
    from kvstate.manager import Manager


@frozen
class Stats:
    """A snapshot. Keys of the state counts are state names; states that nothing is in are left
    out."""

    sequences: dict[str, int]
    pages: dict[str, int]
    """Without the VACANT ones: there is nothing."""
    frames: dict[str, int]
    host_slots: dict[str, int]
    ranges: dict[str, int]
    frame_charges: dict[str, int]
    """Frames by payer: `sequence`, `registry`, `parked`, `fence`, `pool`."""
    host_charges: dict[str, int]
    """Host slots by payer: `suspended`, `drain`, `index`."""
    steps_in_flight: int
    transfers_in_flight: int
    refusals: dict[str, int]
    """Capacity errors by the check that refused: `gate`, `budget`, `reserve`, `limit`, `addresses`,
    `HostExhausted`, `OutOfRows`."""
    done: dict[str, int]
    """What was done so far; `docs/statistics.md` says what each counts. Those of nothing are left
    out.

    Of sequences: starts (without bytes of their own), resumes (with those of a suspend), forks,
    moves, adoptions, suspends, drops, closes. Of what they begin with: aliased_frames, and
    blocks by where they were: hit_blocks.alias (mapped), hit_blocks.live, hit_blocks.parked,
    hit_blocks.span and hit_blocks.host (copied), hit_blocks.partial (copied in part). Of what
    outlives them: kept_blocks, evicted_blocks and promotions, in blocks; remaps and
    spilled_frames, in frames; spilled_spans. Of the device: host_bytes_moved, quiesces, waits,
    failed_copies, late_completions, device_full."""
    losses: dict[str, int]
    """Blocks that cannot be found any more, by reason; see `kvstate.Loss`."""
    device_calls: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries, for JSON."""
        return asdict(self)


def stats(kv: Manager) -> Stats:
    """Take a snapshot. O(states and counters)."""
    counts = kv.arena.counts
    counters = {name: count for name, count in kv.counters.items() if count}
    refused = "refused."
    return Stats(
        sequences=_counted("sequence", kv.columns.counts, CLOSED),
        pages=_counted("page", counts.pages, PAGE_VACANT),
        frames=_counted("frame", kv.gpu.counts),
        host_slots=_counted("host", kv.host.counts),
        ranges=_counted("range", counts.ranges, VACANT),
        frame_charges=_charges("frame", kv.gpu.counts),
        host_charges=_charges("host", kv.host.counts),
        steps_in_flight=len(kv.flight.steps),
        transfers_in_flight=len(kv.flight.transfers),
        refusals={k.removeprefix(refused): n for k, n in counters.items() if k.startswith(refused)},
        done={k: n for k, n in counters.items() if not k.startswith(refused)},
        losses={why.value: count for why, count in kv.reuse.index.losses.items()},
        device_calls=dict(kv.device.calls),
    )


def _counted(machine: str, counts: list[int], nothing: State | None = None) -> dict[str, int]:
    """The states that anything is in, besides the one that says that there is nothing."""
    states = (state for state in TABLES[machine].states if state is not nothing)
    return {state.name: counts[state.code] for state in states if counts[state.code]}


def _charges(machine: str, counts: list[int]) -> dict[str, int]:
    charges: Counter[str] = Counter()
    for state in TABLES[machine].states:
        if state.payer is not None and counts[state.code]:
            charges[state.payer] += counts[state.code]
    return dict(charges)
