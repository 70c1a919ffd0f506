"""Steps and commits: how sequences get longer.

A step is numpy over columns; only a sequence that crosses a frame or fills a block costs Python. A
step changes no state while nothing else has: that every member may be stepped is found out through
the table once, and remembered until a state changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstate import margins, runs, values
from kvstate.arena import Range, missing
from kvstate.core import Core
from kvstate.errors import ArgumentError, IllegalTransition
from kvstate.guard import guarded
from kvstate.keys import extra_bytes
from kvstate.plan import Cells, Plan
from kvstate.sequence import Batch, Column, Sequence, Step
from kvstate.spec.compiled import MACHINES, ObjectRow
from kvstate.spec.sequence import CLOSED, CLOSING

_GROW: Final = MACHINES.object("sequence.grow")
_STEP: Final = MACHINES.object("sequence.step")
_COMMIT: Final = MACHINES.object("sequence.commit")
_STOP: Final = MACHINES.object("sequence.stop_committing")
_SETTLE: Final = MACHINES.object("step.settle")


class Stepping(Core):
    """The calls that make sequences longer. See `Manager`."""

    def batch(self, seqs: Iterable[Sequence]) -> Batch:
        """Sequences to step together, in an order and each once. Building it costs O(batch);
        stepping it does not."""
        # What makes them may be calls, so it runs before this one.
        return self._batch(tuple(values.in_order("seqs", seqs)))

    @guarded
    def _batch(self, seqs: tuple[Sequence, ...]) -> Batch:
        return Batch(self.life, self.columns, seqs)

    @guarded
    def step(self, batch: Batch, tokens: int | npt.ArrayLike = 1) -> Step:
        """Issue a step: room and positions for the next tokens of every sequence of the batch.

        `tokens` is one number for all, or one for each (chunks, drafts). Maps what must grow, in
        one pass, or raises OutOfFrames with nothing changed; with margins also a few frames that
        will be needed soon. Launch the step's work before the next call that takes memory from one
        of its sequences. Cost: numpy over the batch, and Python only for sequences that cross a
        frame or get one.
        """
        self._enter(batch, Batch)
        columns, counts = self.columns, batch.counts(tokens)
        if batch.version != columns.version or self.flight.coverage is not None:
            self._check_step(batch)
        ends = columns.scheduled[batch.entries] + counts
        over = (ends > columns.ample[batch.entries]) & batch.named
        wanted = self._wanted(batch, counts, ends) if np.count_nonzero(over) else []
        if self.mirrors is not None:
            self.mirrors.copy_out()
        if wanted:
            self._grow(wanted, f"a step of {len(batch)} sequences", batch, counts)
            ends = columns.scheduled[batch.entries] + counts
        self.life.change()
        self._stepped += 1
        step = Step(self._stepped, batch, counts, ends)
        columns.scheduled[batch.entries] = ends
        columns.steps[batch.entries] += batch.mask
        self.flight.steps[step.number] = step
        return step

    def _check_step(self, batch: Batch) -> None:
        """Find every member ready to step; that holds until a state changes."""
        plan = self.flight.plan()
        for seq in batch.seqs:
            plan.move(_STEP, seq)
        batch.ready()

    def _wanted(self, batch: Batch, counts: Column, ends: Column) -> list[tuple[Sequence, int]]:
        """The frames that each needs who must grow; 0 for those whose margins may get one now."""
        rows, wanted = batch.rows, []
        goal = ends[batch.places]
        needy = goal > self.columns.capacity[rows]
        for at in np.flatnonzero(needy).tolist():
            seq, end = batch.seqs[at], int(goal[at])
            self._check_length(seq, "step", 0, end, seq.max_tokens)
            wanted.append((seq, self.geometry.frames(end)))
        if self.config.gpu.map_ahead_frames and self.gpu.free:
            left, most = self.columns.ample[rows] - goal, margins.pace(self.geometry, counts)
            lacking = margins.lacking(left, needy, most).tolist()
            wanted += [(batch.seqs[at], 0) for at in lacking]
        return wanted

    @guarded
    def settle(self, step: Step, accepted: npt.ArrayLike | None = None) -> tuple[Sequence, ...]:
        """A step is done on the device: its accepted tokens are really there.

        `accepted` is one number a sequence in the batch's order; by default all. Rejected tokens
        are taken back, and with them later steps that continued from them. Returns the sequences
        for which the step meant nothing, because their bytes were lost or taken back meanwhile.
        """
        self._enter(step, Step)
        given = step.counts if accepted is None else self._accepted(step, accepted)
        columns, steps = self.columns, self.flight.steps
        same = step.version == columns.version and not self.flight.loads
        oldest = next(iter(steps.values()), None) is step
        if accepted is None and same and oldest and self.flight.coverage is None:
            plan, taken = self.flight.plan(), given
            void: tuple[Sequence, ...] = ()
            plan.move(_SETTLE, step)
        else:
            plan, taken, void = self._plan_settle(step, given)
        self.flight.settle(plan)
        columns.settled[step.entries] += taken
        columns.steps[step.entries] -= step.mask
        del steps[step.number]
        if taken is not step.counts:
            self._after_settle(step, taken, void)
        return void

    def _plan_settle(self, step: Step, taken: Column) -> tuple[Plan, Column, tuple[Sequence, ...]]:
        """The careful way: some sequence changed since the step, or rejects tokens."""
        self._legal(_SETTLE, step)
        for seq in self._members(step):
            self._check_order(step, seq)
        self.flight.arrive(*step.seqs)
        live, members = step.living, self._members(step)
        plan = self.flight.plan()
        leavers = [seq for seq in step.seqs if seq.state == CLOSING.code and seq.steps == 1]
        plan.operands = {"members": members, "leavers": leavers}
        plan.move(_SETTLE, step)
        void = tuple(seq for seq in step.seqs if not live[step.place(seq)])
        return plan, np.where(live, taken, 0), void

    def _members(self, step: Step) -> list[Sequence]:
        """Those whose bytes still live the life that the step was issued in."""
        live = step.living
        return [seq for seq in step.seqs if live[step.place(seq)]]

    def _accepted(self, step: Step, accepted: npt.ArrayLike) -> Column:
        """What is accepted of each entry. Raises ArgumentError for more than was issued."""
        taken = step.counts.copy()
        taken[step.places] = values.counts("accepted", accepted, len(step.rows), step.count_tokens)
        return taken

    def _check_order(self, step: Step, seq: Sequence) -> None:
        at = step.place(seq)
        start = step.ends[at] - step.counts[at]
        if step.counts[at] and start != seq.length_tokens:
            reason = (
                f"it begins at {start}, but {seq} is settled up to "
                f"{seq.length_tokens}: settle the earlier step first"
            )
            raise IllegalTransition(str(step), "settle", "ISSUED", reason)

    def _after_settle(self, step: Step, taken: Column, void: tuple[Sequence, ...]) -> None:
        """Take rejected tokens back, and let closed sequences go."""
        for seq in step.seqs:
            if seq.state == CLOSED.code:
                self._retire(seq)
            elif taken[at := step.place(seq)] < step.counts[at] and seq not in void:
                self.columns.scheduled[seq.row] = seq.length_tokens
                self.columns.version += 1
                for later in self.flight.steps_of(seq):
                    if later.number > step.number:
                        later.void(seq)

    @guarded
    def commit(self, seq: Sequence, tokens: npt.ArrayLike) -> None:
        """Name the ids of the next written tokens; blocks that are full become read-only.

        `tokens` is one row of int32, in any shape that `values.ids` takes, as in `create`. A copy
        of the sequence to the GPU is waited for. Raises ArgumentError beyond the settled length.
        """
        self._enter(seq)
        ids = values.ids("tokens", tokens)
        self._legal_once_arrived(_COMMIT, seq)
        known, block = seq.committed_tokens, self.config.tokens_per_block
        self._check_length(seq, "commit", known, known + len(ids), seq.length_tokens)
        self.flight.arrive(seq)
        open_block = self.columns.open_block[seq.row]
        ids = np.concatenate([open_block[: known % block], ids])
        whole = len(ids) - len(ids) % block
        self.life.change()
        plan = self.flight.plan()
        self._name(plan, seq, [ids[at : at + block].tobytes() for at in range(0, whole, block)])
        self.flight.settle(plan)
        self.reuse.promote()
        open_block[: len(ids) - whole] = ids[whole:]
        self.columns.known[seq.row] += len(ids) - known % block

    def _name(self, plan: Plan, seq: Sequence, keys: list[bytes]) -> None:
        """The next blocks are full and known: the index names them, or names others.

        The index follows at once, so that the next one of a batch finds them; that the event is
        legal is known by then.
        """
        if seq.extras:
            keys = [key + self._extra(seq, at) for at, key in enumerate(keys, len(seq.keys))]
        naming = self.reuse.naming(seq, keys)
        plan.operands = naming.operands
        plan.move(_COMMIT, seq)
        seq.keys += keys
        self.reuse.named(seq, naming)

    def _extra(self, seq: Sequence, block: int) -> bytes:
        """What the key of a block has besides token ids."""
        extra = seq.extras.get(block)
        return b"" if extra is None else extra_bytes(extra)

    @guarded
    def commit_each(self, batch: Batch, tokens: npt.ArrayLike) -> None:
        """Commit one token of every sequence of the batch: what `commit` does for one, for all.

        All or none. Cost: numpy over the batch, and Python only for sequences whose block is full.
        """
        self._enter(batch, Batch)
        columns, block = self.columns, self.config.tokens_per_block
        ids = values.ids("tokens", tokens)
        if len(ids) != len(batch.rows):
            raise ArgumentError(
                f"tokens has {len(ids)} ids: one for each of {len(batch)} is wanted"
            )
        rows = batch.rows
        places = columns.known[rows]
        if self.flight.loads:
            for seq in batch.seqs:
                self._legal_once_arrived(_COMMIT, seq)
        elif batch.commit_version != columns.version or self.flight.coverage is not None:
            self._check_commit(batch)
        if np.count_nonzero(places >= columns.settled[rows]):
            self._refuse_commit(batch)
        if self.flight.loads:
            self.flight.arrive(*batch.seqs)
            self._check_commit(batch)
        full = np.flatnonzero((places + 1) % block == 0).tolist()
        self.life.change()
        columns.open_block[rows, places % block] = ids
        columns.known[batch.entries] += batch.mask
        plan = self.flight.plan()
        for at in full:
            seq = batch.seqs[at]
            self._name(plan, seq, [columns.open_block[seq.row].tobytes()])
        self.flight.settle(plan)
        self.reuse.promote()

    def _check_commit(self, batch: Batch) -> None:
        """Find every member ready to commit; that holds until a state changes."""
        plan = self.flight.plan()
        for seq in batch.seqs:
            plan.move(_COMMIT, seq)
        batch.commit_version = self.columns.version

    def _refuse_commit(self, batch: Batch) -> None:
        for seq in batch.seqs:
            known = seq.committed_tokens
            self._check_length(seq, "commit", known, known + 1, seq.length_tokens)

    @guarded
    def stop_committing(self, seq: Sequence) -> None:
        """From here on the sequence's blocks stay writable and private."""
        self._enter(seq)
        plan = self.flight.plan()
        plan.move(_STOP, seq)
        self.flight.settle(plan)

    # Growth.

    def _grow(
        self, wanted: list[tuple[Sequence, int]], what: str, batch: Batch | None = None,
        counts: Column | None = None,
    ) -> None:  # fmt: skip
        """Give every sequence that many charged frames, in one pass of maps for all of them. In a
        step margins get a few frames besides."""
        ahead = {} if batch is None or counts is None else self._provide(wanted, batch, counts)
        plan = self._attempt(_GROW, wanted[0][0], self._plan_grow, wanted, what, batch, ahead)
        self.actor.run(plan)
        self.flight.settle(plan)
        for seq, frames in wanted:
            if frames:
                self._set_capacity(seq)
            else:
                seq.set_ample()

    def _plan_grow(
        self,
        chosen: ObjectRow,
        first: Sequence,
        wanted: list[tuple[Sequence, int]],
        what: str,
        batch: Batch | None,
        ahead: dict[Sequence, int],
    ) -> Plan:
        if batch is not None and batch.version != self.columns.version:
            self._check_step(batch)
        plan = self._plan_frames(what, _uses(wanted), batch=batch)
        for seq, frames in wanted:
            assert seq.range is not None
            plan.margin = ahead.get(seq, 0)
            if frames:
                opened = self.geometry.blocks(seq.capacity_tokens)
                plan.operands = self._growth(plan, seq, seq.range, frames, opened)
            else:
                plan.operands = runs.margin(plan, self.gpu.pool, seq.range)
            if plan.operands:
                plan.move(_GROW, seq, chosen if seq is first else None)
        return plan

    def _provide(
        self, wanted: list[tuple[Sequence, int]], batch: Batch, counts: Column
    ) -> dict[Sequence, int]:
        """How many frames of margin each gets in this step, of those that are free. If these are
        enough for what it needs, all that it maps is in the pool then."""
        found, ahead = dict[Sequence, int](), self.config.gpu.map_ahead_frames
        fresh = missing(_uses(wanted))
        free = self.gpu.free - fresh
        if ahead:
            most = min(free, margins.pace(self.geometry, counts))
            ends = [seq.scheduled_tokens + counts.item(batch.place(seq)) for seq, _ in wanted]
            found = margins.soonest(self.geometry, ahead, wanted, ends, most)
        short = fresh + sum(found.values()) - len(self.gpu.pool.ids)
        if short > 0 and free >= 0 and not self.ladder.create(short):
            found.clear()  # the device is full
        return found

    def _growth(
        self, plan: Plan, seq: Sequence, range_: Range, frames: int, opened: int,
        pages: Cells | None = None,
    ) -> runs.Operands:  # fmt: skip
        """See `runs.growth`. `pages` are the sequence's own unless it is about to get others."""
        return runs.growth(plan, self.gpu.pool, self.geometry, seq, range_, frames, opened, pages)


def _uses(wanted: Iterable[tuple[Sequence, int]]) -> dict[Range, int]:
    """The same by ranges."""
    return {seq.range: frames for seq, frames in wanted if seq.range is not None}
