"""What is in flight: steps and transfers, who holds which freed range, and what their ends bring.

Completions enter here and nowhere else: from a poll, from a wait for copies that a call names, or
from the one quiesce of a call, in the order in which the device gives them. A completion that names
no transfer in flight changes nothing: it is late, or a duplicate.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from kvstate import runs
from kvstate.act import Actor
from kvstate.arena import Arena, Range
from kvstate.blocks import Loss
from kvstate.device import Completion, Device, Stream
from kvstate.plan import Coverage, Plan
from kvstate.sequence import Columns, Sequence, Step, Transfer
from kvstate.spec.compiled import MACHINES
from kvstate.spec.range import FENCED, PARKED
from kvstate.spec.transfer import STEP_ISSUED

log = logging.getLogger("kvstate")

_LAND: Final = MACHINES.object("range.land")
_READ: Final = MACHINES.object("range.read")
_DONE: Final = MACHINES.object("transfer.done")
_FAIL: Final = MACHINES.object("transfer.fail")
_STEP_LAND: Final = MACHINES.object("step.land")


class Ended(NamedTuple):
    """The end of a copy that a sequence was waiting for."""

    call: int
    """The public call that delivered it."""
    uid: int
    outward: bool
    onboards: bool
    ok: bool


class Flight:
    """Everything issued and not yet done, and the fences that wait for it."""

    def __init__(
        self, device: Device, columns: Columns, arena: Arena, actor: Actor, counters: Counter[str],
        ignored: str | None,
    ) -> None:  # fmt: skip
        self.device, self.columns, self.arena, self.actor = device, columns, arena, actor
        self.counters = counters
        actor.quiesce = self.quiesce
        self.reuse: Any = None
        """What sequences share; whoever keeps it puts it here."""
        self.coverage: Coverage | None = None
        self.ignored = ignored
        self.transfers: dict[int, Transfer] = {}
        """Every transfer that is ISSUED, by token."""
        self.steps: dict[int, Step] = {}
        """Every step that is not SETTLED, by number: the oldest first."""
        self.loads = 0
        """Transfers to the GPU in flight."""
        self.call = 0
        """The number of the public call that runs."""
        self._quiet_in = -1
        self.polled: deque[Completion] = deque(maxlen=4096)
        """The latest completions that polls delivered. Whoever reads them takes them out."""
        self.quiesced: deque[Completion] = deque(maxlen=4096)
        """The same for quiesces, and for waits for single copies."""
        self.memory_frames: int | None = None
        """For how many frames the device had memory when it was last asked, at the most the budget.
        The recorder takes it out."""
        self.ended: deque[Ended] = deque(maxlen=4096)
        """The latest ends of copies of living bytes. Whoever reads them takes them out."""

    def plan(self) -> Plan:
        """An empty plan."""
        return Plan(self.coverage, self.ignored)

    def issue(self, transfer: Transfer, host_bytes: int = 0) -> None:
        """Enter a transfer that the device has accepted; it holds its ranges until its end.

        It moves so many bytes to or from the host.
        """
        self.counters["host_bytes_moved"] += host_bytes
        self.transfers[transfer.token] = transfer
        for range_ in (transfer.range, *transfer.sources):
            self._refence(range_)
            range_.holders.add((transfer.kind, transfer.token))
        if transfer.kind == "transfer":
            self.loads += transfer.loads
            if transfer.seq is not None and not transfer.keeps:
                transfer.seq.transfer = transfer
        self.columns.version += 1

    def _refence(self, range_: Range) -> None:
        """A copy is about to read what a parked range retains: it cannot be adopted meanwhile."""
        if range_.state == PARKED.code and range_.kept_frames:
            self.arena.unpark(range_)
            plan = self.plan()
            plan.operands = {"frames": ((range_.frames, 0, len(range_.frames.ids)),)}
            plan.move(_READ, range_)
            plan.settle()

    def poll(self) -> list[Completion]:
        """Deliver what has ended; does not wait."""
        completions = self.actor.ask(self.device.poll)
        self.polled.extend(completions)
        return self._deliver(completions)

    def finish(self, tokens: Iterable[int]) -> list[Completion]:
        """Wait for these copies, deliver their ends in that order, and those of no others."""
        wanted = list(tokens)
        if not wanted:
            return []
        completions = self.actor.ask(lambda: self.device.finish(wanted))
        self.counters["waits"] += len(wanted)
        self.quiesced.extend(completions)
        return self._deliver(completions)

    def arrive(self, *seqs: Sequence) -> None:
        """Wait until what is on its way to the GPU for these sequences is there, or has failed."""
        if self.loads:
            self.finish(sorted(one.transfer.token for one in seqs if one.transfer and one.loading))

    def steps_of(self, seq: Sequence) -> Iterator[Step]:
        """The steps in flight that name it, the latest first. O(steps since the first of them)."""
        left = seq.steps
        for step in reversed(self.steps.values()) if left else ():
            if step.names(seq):
                yield step
                left -= 1
                if not left:
                    return

    def streams(self) -> list[Stream]:
        """The streams on which work may be that touches memory of a sequence: theirs, and those
        that steps in flight were issued for. Each once. O(ranges)."""
        owners = (range_.owner for range_ in self.arena.ranges.values())
        found = [owner.stream for owner in owners if owner is not None]
        for step in self.steps.values():
            found += step.streams
        return list({id(stream): stream for stream in found}.values())

    def quiesce(self) -> None:
        """Wait for everything issued and deliver it; at most once a call."""
        if self._quiet_in == self.call:
            return
        completions = self.actor.ask(lambda: self.device.quiesce(self.streams()))
        self.quiesced.extend(completions)
        self._quiet_in = self.call
        self.counters["quiesces"] += 1
        for step in self.steps.values():
            if step.state == STEP_ISSUED.code:
                plan = self.plan()
                plan.move(_STEP_LAND, step)
                self.settle(plan)
        self._deliver(completions)

    def settle(self, plan: Plan) -> None:
        """Settle a plan, and let named holders come or go as its rows say."""
        self.actor.life.change()
        plan.settle()
        if plan.holds:
            # All holds first: a range must not land on one's release before another has begun.
            held = [range_ for hold in plan.holds for range_ in self._hold(*hold)]
            for range_ in held:
                if range_.state == FENCED.code and not range_.holders:
                    self._land(range_)

    def _hold(self, subject: Range | Transfer | Step, words: tuple[str, ...]) -> Iterable[Range]:
        """Add or release the holds that a row names; the ranges that they are on."""
        if isinstance(subject, Range):
            if "+steps" in words:
                self._hold_by_steps(subject)
            return (subject,)
        if isinstance(subject, Step):
            for range_ in subject.fenced if "-steps" in words else ():
                range_.holders.discard(("steps", subject.number))
            return subject.fenced
        ranges = (subject.range, *subject.sources)
        for range_ in ranges if f"-{subject.kind}" in words else ():
            range_.holders.discard((subject.kind, subject.token))
        return ranges

    def _hold_by_steps(self, range_: Range) -> None:
        """Each step that may still run and names the sequence holds the range that it leaves."""
        for step in self.steps_of(range_.owner):
            if step.state == STEP_ISSUED.code:
                step.fenced.append(range_)
                range_.holders.add(("steps", step.number))

    def _land(self, range_: Range) -> None:
        plan = self.plan()
        frames, kept = range_.frames, range_.kept_frames
        plan.operands = {
            "retaining": ((frames, 0, kept),),
            "frames": ((frames, kept, len(frames.ids)),),
        }
        plan.move(_LAND, range_)
        self.actor.run(plan)
        plan.settle()
        if range_.state == PARKED.code:
            self.arena.park(range_)
        else:
            self.arena.unreserve(range_)

    def _deliver(self, completions: Iterable[Completion]) -> list[Completion]:
        delivered = list(completions)
        for token, ok in delivered:
            transfer = self.transfers.pop(token, None)
            if transfer is None:
                self.counters["late_completions"] += 1
                log.warning("completion of %d names no transfer in flight; ignored", token)
            else:
                self._complete(transfer, ok)
        return delivered

    def _complete(self, transfer: Transfer, ok: bool) -> None:
        """The end of a transfer: its slots, and the pages of its sequence if their life is still
        the same."""
        seq = transfer.seq
        plan = self.plan()
        plan.operands = operands = runs.Operands(slots=transfer.slots)
        ending = leaving = None
        if transfer.keeps or transfer.onboards:
            ending = self.reuse.ending(transfer, ok)
            operands |= ending.operands
        if seq is not None and transfer.current and seq.transfer is transfer:
            operands |= self._of_sequence(transfer, seq, ok)
            self.ended.append(Ended(self.call, seq.uid, transfer.outward, transfer.onboards, ok))
            if not ok and not transfer.inward:
                leaving = self.reuse.leaving(seq)
                operands |= leaving.operands
        else:
            seq = None
        plan.move(_DONE if ok else _FAIL, transfer)
        self.actor.run(plan)
        self.settle(plan)
        self.loads -= transfer.loads
        if ending is not None:
            self.reuse.ended(transfer, ok, ending)
        if leaving is not None:
            self.reuse.left(leaving, Loss.FAILED)
        self.columns.version += 1
        if not ok:
            self.counters["failed_copies"] += 1
            log.warning("%s failed", transfer)
        if seq is not None:
            self._end(transfer, seq, ok, plan)

    def _of_sequence(self, transfer: Transfer, seq: Sequence, ok: bool) -> runs.Operands:
        """What the end means for the sequence whose life it is of."""
        geometry = self.arena.geometry
        blocks = geometry.blocks(seq.held_tokens)
        held = ((seq.pages, 0, blocks),)
        found = runs.freeing(seq, geometry, blocks) if transfer.loads and not ok else {}
        aliased = 0 if seq.range is None else geometry.blocks_in(len(seq.range.aliases.states))
        loading = ((seq.pages, aliased, blocks),) if ok else held
        if transfer.outward and not ok:
            copied = set(runs.slots_of(transfer.slots))
            there = [slot for slot in runs.slots_of(seq.slots) if slot not in copied]
            found["taken"] = runs.runs_of(seq.slots[0][0], there) if there else ()
        found |= self.reuse.backed(seq) if transfer.inward and ok else {}
        return found | {"sequence": (seq,), "held": held, "loading": loading}

    def _end(self, transfer: Transfer, seq: Sequence, ok: bool, plan: Plan) -> None:
        """What the end of its copy leaves of a sequence."""
        seq.transfer = None
        if transfer.loads and not ok:
            runs.hand_over(seq, plan.operands)
        if transfer.inward and not ok:
            self.columns.scheduled[seq.row] = seq.length_tokens
            self.reuse.away(seq)
        elif transfer.loads or not ok:
            seq.slots, seq.held_tokens = (), 0
        if transfer.inward and ok:
            self.reuse.came_back(seq, plan.operands)
        if not ok and not transfer.inward:
            seq.forget_tokens()
