"""The manager: the KV core that an engine embeds.

Every public call has three steps. *Plan*: work out which pages, frames and slots are meant, and
fire the tables' events on them; an illegal one raises, and nothing has changed. *Act*: the device
does what the fired rows ask for, or undoes it. *Settle*: the states change. What may follow what
is said in `spec`, not here; this file finds out which runs a call means, and keeps the lengths.

A call that would fail for lack of memory waits once for what is coming, reclaims once, and tries
again. No decision depends on time: completions enter through `poll` and through that one quiesce,
and nowhere else. Rejected: completions by callback, which made the same calls act differently on a
faster device.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstate import runs
from kvstate.act import Actor
from kvstate.arena import Arena, Range
from kvstate.config import Config, Geometry
from kvstate.device import Completion, Device, Direction, Event, Stream
from kvstate.errors import (
    CapacityError,
    DeviceError,
    DeviceFault,
    HostExhausted,
    IllegalTransition,
    OutOfFrames,
    OutOfRows,
)
from kvstate.flight import Flight
from kvstate.plan import Plan, illegal_object
from kvstate.reclaim import Ladder
from kvstate.sequence import Batch, Column, Columns, Sequence, Step, Transfer
from kvstate.spec.compiled import MACHINES, ObjectEvent, ObjectRow
from kvstate.spec.sequence import ACTIVE, CLOSED, CLOSING
from kvstate.stats import Stats, stats
from kvstate.tiers import FrameBudget, HostSlots

log = logging.getLogger("kvstate")
T = TypeVar("T")

_ROUNDS: Final = 4
"""How often a call looks for what its plan is short of."""

_RESUME: Final = MACHINES.object("sequence.resume")
_GROW: Final = MACHINES.object("sequence.grow")
_SHRINK: Final = MACHINES.object("sequence.shrink")
_REWIND: Final = MACHINES.object("sequence.rewind")
_STEP: Final = MACHINES.object("sequence.step")
_COMMIT: Final = MACHINES.object("sequence.commit")
_STOP: Final = MACHINES.object("sequence.stop_committing")
_SUSPEND: Final = MACHINES.object("sequence.suspend")
_DROP: Final = MACHINES.object("sequence.drop")
_CLOSE: Final = MACHINES.object("sequence.close")
_SETTLE: Final = MACHINES.object("step.settle")


class Manager:
    """KV memory of one level on one device, for many sequences.

    Takes the device over and closes it. Belongs to the thread that made it. Use it as a context
    manager, or call `close`.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        *,
        debug: bool = False,
        record: Callable[[bytes], object] | None = None,
    ) -> None:
        """Reserve addresses and host memory; frames are allocated when they are needed.

        With `debug`, every law is checked after every call. `record` is called with every public
        call as one line of a trace (see `kvstate.trace`); a file's `write` will do.
        """
        self.closed = True
        self.config, self.device = config, device
        self.geometry = geometry = Geometry(config)
        self.columns = Columns(config.max_sequences, config.tokens_per_block)
        self.gpu = FrameBudget(geometry.budget_frames)
        self.host = HostSlots(geometry.host_slots, geometry.block_bytes)
        self.sequences: dict[int, Sequence] = {}
        """Every sequence that is not CLOSED, by uid."""
        self.counters: Counter[str] = Counter()
        self._created = self._stepped = 0
        self.arena = Arena(geometry, self._reserve(geometry), self.gpu.counts)
        self.actor = Actor(device, self.host, geometry.frame_bytes)
        ignored = None if config.scrub else "scrub"
        self.flight = Flight(device, self.columns, self.arena, self.actor, self.counters, ignored)
        ahead = config.gpu.map_ahead_frames
        self.ladder = Ladder(self.gpu, self.arena, self.actor, self.flight, ahead)
        self.closed = False
        if debug or record:
            from kvstate.observe import observe

            observe(self, debug=debug, record=record)

    def _reserve(self, geometry: Geometry) -> int:
        """Reserve host memory and addresses; if either fails, keep neither."""
        base = self.device.reserve(geometry.arena_bytes, geometry.align_bytes)
        try:
            if geometry.host_slots:
                size_bytes = geometry.host_slots * geometry.block_bytes
                self.host.address = self.device.host_reserve(size_bytes)
        except DeviceError:
            self.device.unreserve(base)
            raise
        return base

    # Admission.

    def create(
        self, max_tokens: int | None = None, *, salt: bytes = b"", commit: bool = True
    ) -> Sequence:
        """Admit a sequence of at most `max_tokens` tokens. It holds no memory yet.

        `salt` names its tenant. With `commit=False` its blocks stay writable and private. Raises
        OutOfRows, or OutOfFrames if it could not even run alone (report B140).
        """
        self._enter()
        tokens = self.config.max_tokens if max_tokens is None else max_tokens
        if not 0 < tokens <= self.config.max_tokens:
            reason = f"max_tokens is {tokens}, not from 1 to {self.config.max_tokens}"
            raise IllegalTransition("a new sequence", "create", "CREATED", reason)
        frames = self.geometry.frames(tokens)
        if frames > self.gpu.budget_frames:
            raise self._refused(self._short(f"a sequence of {tokens} tokens", frames, "limit"))
        if not self.columns.free:
            rows = self.columns.rows
            raise self._refused(OutOfRows(f"all {rows} rows are in use; close a sequence first"))
        self._created += 1
        seq = Sequence(self, self._created, self.columns.free.pop(), tokens, salt, commit)
        self.sequences[seq.uid] = seq
        return seq

    def dummy(self, length_tokens: int, stream: Stream = None) -> Sequence:
        """An ACTIVE sequence of that length with undefined bytes: for warm-up and graph
        capture."""
        seq = self.create(length_tokens, commit=False)
        try:
            self.resume(seq, stream)
            self.resize(seq, length_tokens)
        except BaseException:
            self.close_sequence(seq)
            raise
        self.columns.set_lengths(seq.row, length_tokens)
        return seq

    def admits(self, capacity_tokens: int) -> bool:
        """Whether the gate would let a sequence of that many tokens in now.

        It does if the charge stays within `max_utilization_for_resume` of the budget, or if
        nothing else runs and the sequence fits at all. Parked memory does not count against it.
        Changes nothing.
        """
        frames = max(1, self.geometry.frames(capacity_tokens))
        if not self.columns.states.count(ACTIVE.code):
            return frames <= self.gpu.budget_frames
        limit = self.config.max_utilization_for_resume * self.gpu.budget_frames
        return self.gpu.charged + frames <= limit

    def largest_max_tokens(self, sequences: int = 1) -> int:
        """The longest that this many sequences can all become in the whole budget, in tokens."""
        frames = self.gpu.budget_frames // max(1, sequences)
        return min(self.config.max_tokens, self.geometry.tokens(frames))

    # Memory.

    def resume(self, seq: Sequence, stream: Stream = None) -> None:
        """Give the sequence a range; if it was suspended, copy its bytes back.

        The copy is issued, not waited for: later work of `stream` waits for it on the device.
        Raises OutOfFrames, from the gate too (see `admits`). If the copy fails, the sequence is
        SUSPENDED again and steps issued meanwhile mean nothing.
        """
        self._enter()
        if seq.writing:
            self.flight.quiesce()
        plan, range_ = self._attempt(_RESUME, seq, self._plan_resume, stream)
        self.actor.run(plan)
        if plan.token is not None:
            self._issue(plan, Transfer(plan.token, seq, range_, seq.slots, inward=True))
        self.flight.settle(plan)
        if range_.number in self.arena.ranges:
            self.arena.unpark(range_)
            self.counters["adoptions"] += 1
        else:
            self.arena.reserve(range_)
        range_.pages.states.clear()
        range_.owner, seq.range, seq.stream = seq, range_, stream
        self._set_capacity(seq)
        self.counters["starts" if plan.token is None else "resumes"] += 1

    def _plan_resume(self, chosen: ObjectRow, seq: Sequence, stream: Stream) -> tuple[Plan, Range]:
        tokens = seq.held_tokens
        frames, extent = self.geometry.frames(tokens), seq.extent_frames
        if not self.admits(tokens):
            raise self._short(str(seq), max(1, frames), "gate")
        parked = self.arena.fitting(extent) if self.config.adopt else None
        range_ = parked or self.arena.vacant(extent)
        if range_ is None:
            raise self._short(str(seq), extent, "addresses")
        plan = self._plan_frames(seq, {range_: frames})
        plan.base, plan.room, plan.stream = range_.base, seq.slots, stream
        plan.size_bytes = tokens * self.geometry.row_bytes
        plan.operands = operands = runs.hosted(seq)
        operands |= self._growth(plan, seq, range_, frames, self.geometry.blocks(tokens))
        operands["adopted" if parked else "reserved"] = (range_,)
        operands["parked_pages"] = ((range_.pages, 0, len(range_.pages.states)),)
        plan.move(_RESUME, seq, chosen)
        return plan, range_

    def resize(self, seq: Sequence, capacity_tokens: int) -> None:
        """Map and charge memory for that many tokens, or give back what is beyond them.

        Given-back frames stay mapped at the end of the range, to be grown into again or to be
        reclaimed. Raises OutOfFrames. Shrinking below the scheduled tokens is illegal.
        """
        self._enter()
        range_, frames = seq.range, self.geometry.frames(capacity_tokens)
        shrinks = range_ is not None and frames < range_.charged
        self._legal(_SHRINK if shrinks else _GROW, seq)
        self._check_length(seq, "resize", seq.written_tokens, capacity_tokens, seq.max_tokens)
        if shrinks:
            self._shrink(seq, frames)
        else:
            self._grow([(seq, frames)], str(seq))

    def _shrink(self, seq: Sequence, frames: int) -> None:
        assert seq.range is not None
        blocks, capacity = self.geometry.blocks, self._capacity(seq, frames)
        plan = self.flight.plan()
        plan.operands = {
            "emptied": ((seq.pages, blocks(capacity), blocks(seq.capacity_tokens)),),
            "excess": ((seq.range.frames, frames, seq.range.charged),),
        }
        plan.move(_SHRINK, seq)
        self.actor.run(plan)
        self.flight.settle(plan)
        self._set_capacity(seq)

    def _grow(
        self, wanted: list[tuple[Sequence, int]], what: str, batch: Batch | None = None
    ) -> None:
        """Give every sequence that many charged frames, in one pass of maps for all of them."""
        plan = self._attempt(_GROW, wanted[0][0], self._plan_grow, wanted, what, batch)
        self.actor.run(plan)
        self.flight.settle(plan)
        for seq, _ in wanted:
            self._set_capacity(seq)

    def _plan_grow(
        self,
        chosen: ObjectRow,
        first: Sequence,
        wanted: list[tuple[Sequence, int]],
        what: str,
        batch: Batch | None,
    ) -> Plan:
        if batch is not None and batch.version != self.columns.version:
            self._check_step(batch)
        uses = {seq.range: frames for seq, frames in wanted if seq.range is not None}
        plan = self._plan_frames(what, uses)
        for (seq, frames), range_ in zip(wanted, uses, strict=True):
            opened = self.geometry.blocks(seq.capacity_tokens)
            plan.operands = self._growth(plan, seq, range_, frames, opened)
            plan.move(_GROW, seq, chosen if seq is first else None)
        return plan

    def rewind(self, seq: Sequence, length_tokens: int) -> None:
        """Take tokens back, exactly; the memory stays. No step of the sequence may be in flight.

        Committed blocks that the rewind goes into become writable again.
        """
        self._enter()
        self._legal(_REWIND, seq)
        self._check_length(seq, "rewind", 0, length_tokens, seq.length_tokens)
        block = self.config.tokens_per_block
        full, known = length_tokens // block, seq.committed_tokens // block
        plan = self.flight.plan()
        plan.operands = {"rewound": ((seq.pages, full, known),)}
        plan.move(_REWIND, seq)
        self.flight.settle(plan)
        if full < len(seq.keys):
            self.columns.open_block[seq.row] = np.frombuffer(seq.keys[full], np.int32)
            del seq.keys[full:]
        self.columns.set_lengths(seq.row, length_tokens)

    # Steps.

    def batch(self, seqs: Iterable[Sequence]) -> Batch:
        """Sequences to step together. Building it costs O(batch); stepping it does not."""
        return Batch(self.columns.rows + 1, seqs)

    def step(self, batch: Batch, tokens: int | npt.ArrayLike = 1) -> Step:
        """Issue a step: room and positions for the next tokens of every sequence of the batch.

        `tokens` is one number for all, or one for each (chunks, drafts). Maps what must grow, in
        one pass, or raises OutOfFrames with nothing changed. Launch the step's work before the
        next call that takes memory from one of its sequences. Cost: numpy over the rows, and
        Python only for sequences that cross a frame.
        """
        self._enter()
        columns, counts = self.columns, batch.counts(tokens)
        if batch.version != columns.version or self.flight.coverage is not None:
            self._check_step(batch)
        ends = columns.scheduled + counts
        over = (ends > columns.capacity) & batch.named
        if np.count_nonzero(over):
            self._grow_batch(batch, over, ends)
            ends = columns.scheduled + counts
        self._stepped += 1
        step = Step(self._stepped, batch, counts, columns)
        columns.scheduled = ends
        columns.steps += batch.mask
        self.flight.steps[step.number] = step
        return step

    def _check_step(self, batch: Batch) -> None:
        """Find every member ready to step; that holds until a state changes."""
        plan = self.flight.plan()
        for seq in batch.seqs:
            plan.move(_STEP, seq)
        batch.version = self.columns.version

    def _grow_batch(self, batch: Batch, over: npt.NDArray[np.bool_], ends: Column) -> None:
        wanted = []
        for seq in batch.seqs:
            if over[seq.row]:
                end = int(ends[seq.row])
                self._check_length(seq, "step", 0, end, seq.max_tokens)
                wanted.append((seq, self.geometry.frames(end)))
        self._grow(wanted, f"a step of {len(batch)} sequences", batch)

    def settle(self, step: Step, accepted: npt.ArrayLike | None = None) -> tuple[Sequence, ...]:
        """A step is done on the device: its accepted tokens are really there.

        `accepted` is one number a sequence in the batch's order; by default all. Rejected tokens
        are taken back, and with them later steps that continued from them. Returns the sequences
        for which the step meant nothing, because their bytes were lost or taken back meanwhile.
        """
        self._enter()
        columns, steps = self.columns, self.flight.steps
        same = step.version == columns.version and not self.flight.loads
        oldest = next(iter(steps.values()), None) is step
        if accepted is None and same and oldest and self.flight.coverage is None:
            plan, taken = self.flight.plan(), step.counts
            void: tuple[Sequence, ...] = ()
            plan.move(_SETTLE, step)
        else:
            plan, taken, void = self._plan_settle(step, accepted)
        self.flight.settle(plan)
        columns.settled += taken
        columns.steps -= step.mask
        del steps[step.number]
        if taken is not step.counts:
            self._after_settle(step, taken, void)
        return void

    def _plan_settle(
        self, step: Step, accepted: npt.ArrayLike | None
    ) -> tuple[Plan, Column, tuple[Sequence, ...]]:
        """The careful way: some sequence changed since the step, or rejects tokens."""
        self._legal(_SETTLE, step)
        if self.flight.loads and any(seq.loading for seq in step.seqs):
            self.flight.poll()
            if any(seq.loading for seq in step.seqs):
                self.flight.quiesce()
        taken = self._accepted(step, accepted)
        live = self.columns.life == step.life
        members = [seq for seq in step.seqs if live[seq.row]]
        for seq in members:
            self._check_order(step, seq)
        plan = self.flight.plan()
        leavers = [seq for seq in step.seqs if seq.state == CLOSING.code and seq.steps == 1]
        plan.operands = {"members": members, "leavers": leavers}
        plan.move(_SETTLE, step)
        void = tuple(seq for seq in step.seqs if not live[seq.row])
        return plan, np.where(live, taken, 0), void

    def _accepted(self, step: Step, accepted: npt.ArrayLike | None) -> Column:
        taken = step.counts.copy()
        if accepted is not None:
            numbers = np.asarray(accepted, np.int64)
            fits = numbers.shape == step.rows.shape
            if not fits or np.any(numbers < 0) or np.any(numbers > step.count_tokens):
                reason = f"accepted is {numbers}, but the step issued {step.count_tokens} tokens"
                raise IllegalTransition(str(step), "settle", "ISSUED", reason)
            taken[step.rows] = numbers
        return taken

    def _check_order(self, step: Step, seq: Sequence) -> None:
        if step.counts[seq.row] and step.starts[seq.row] != seq.length_tokens:
            reason = (
                f"it begins at {step.starts[seq.row]}, but {seq} is settled up to "
                f"{seq.length_tokens}: settle the earlier step first"
            )
            raise IllegalTransition(str(step), "settle", "ISSUED", reason)

    def _after_settle(self, step: Step, taken: Column, void: tuple[Sequence, ...]) -> None:
        """Take rejected tokens back, and let closed sequences go."""
        for seq in step.seqs:
            if seq.state == CLOSED.code:
                self._retire(seq)
            elif taken[seq.row] < step.counts[seq.row] and seq not in void:
                self.columns.set_scheduled(seq.row, seq.length_tokens)
                self.columns.version += 1
                for later in self.flight.steps.values():
                    if later.number > step.number and later.names(seq):
                        later.void(seq.row)

    def commit(self, seq: Sequence, tokens: npt.ArrayLike) -> None:
        """Name the ids of the next written tokens; blocks that are full become read-only.

        `tokens` is anything that numpy makes int32 of. Illegal beyond the settled length.
        """
        self._enter()
        self._legal(_COMMIT, seq)
        ids = np.atleast_1d(np.asarray(tokens, np.int32)).ravel()
        known, block = seq.committed_tokens, self.config.tokens_per_block
        self._check_length(seq, "commit", known, known + len(ids), seq.length_tokens)
        full = (known + len(ids)) // block
        plan = self.flight.plan()
        plan.operands = {"filled": ((seq.pages, known // block, full),)}
        plan.move(_COMMIT, seq)
        self.flight.settle(plan)
        open_block = self.columns.open_block[seq.row]
        ids = np.concatenate([open_block[: known % block], ids])
        whole = len(ids) - len(ids) % block
        seq.keys += [ids[at : at + block].tobytes() for at in range(0, whole, block)]
        open_block[: len(ids) - whole] = ids[whole:]
        self.columns.known[seq.row] = full * block + len(ids) - whole

    def commit_each(self, batch: Batch, tokens: npt.ArrayLike) -> None:
        """Commit one token of every sequence of the batch: what `commit` does for one, for all.

        All or none. Cost: numpy over the batch, and Python only for sequences whose block is full.
        """
        self._enter()
        columns, block = self.columns, self.config.tokens_per_block
        ids = np.asarray(tokens, np.int32)
        if batch.commit_version != columns.version or self.flight.coverage is not None:
            self._check_commit(batch)
        rows = batch.rows
        places = columns.known[rows]
        if ids.shape != places.shape or np.count_nonzero(places >= columns.settled[rows]):
            self._refuse_commit(batch, ids)
        full = np.flatnonzero((places + 1) % block == 0).tolist()
        plan = self.flight.plan()
        for at in full:
            seq, page = batch.seqs[at], int(places[at]) // block
            plan.operands = {"filled": ((seq.pages, page, page + 1),)}
            plan.move(_COMMIT, seq)
        plan.settle()
        columns.open_block[rows, places % block] = ids
        columns.known += batch.mask
        for at in full:
            seq = batch.seqs[at]
            seq.keys.append(columns.open_block[seq.row].tobytes())

    def _check_commit(self, batch: Batch) -> None:
        """Find every member ready to commit; that holds until a state changes."""
        plan = self.flight.plan()
        for seq in batch.seqs:
            plan.move(_COMMIT, seq)
        batch.commit_version = self.columns.version

    def _refuse_commit(self, batch: Batch, ids: npt.NDArray[np.int32]) -> None:
        if ids.shape != batch.rows.shape:
            reason = f"tokens has the shape {ids.shape}: not one for each of {len(batch)}"
            raise IllegalTransition("a batch", "commit", "ACTIVE", reason)
        for seq in batch.seqs:
            known = seq.committed_tokens
            self._check_length(seq, "commit", known, known + 1, seq.length_tokens)

    def stop_committing(self, seq: Sequence) -> None:
        """From here on the sequence's blocks stay writable and private."""
        self._enter()
        plan = self.flight.plan()
        plan.move(_STOP, seq)
        self.flight.settle(plan)

    # Giving memory up.

    def suspend(self, seq: Sequence, after: Event = None) -> None:
        """Copy the written tokens to the host and give the GPU memory up, without waiting.

        The copy runs after `after`, or else after everything launched on the sequence's stream so
        far. Raises HostExhausted with the sequence intact. If the copy fails later, the sequence
        is DROPPED.
        """
        self._enter()
        if seq.loading:
            self.flight.quiesce()
        plan = self._attempt(_SUSPEND, seq, self._plan_suspend, after)
        if not plan.room:
            self._fence(seq, after)
        self.actor.run(plan)
        assert seq.range is not None
        if plan.token is not None:
            self._issue(plan, Transfer(plan.token, seq, seq.range, plan.room, outward=True))
        self.flight.settle(plan)
        runs.hand_over(seq, plan.operands)
        seq.slots, seq.held_tokens = plan.room, seq.scheduled_tokens
        self.counters["suspends"] += 1

    def _plan_suspend(self, chosen: ObjectRow, seq: Sequence, after: Event) -> Plan:
        assert seq.range is not None
        tokens = seq.written_tokens
        blocks = self.geometry.blocks(tokens)
        room = self.host.room(blocks)
        if room is None:
            host = self.host
            raise HostExhausted(str(seq), blocks, host.free, host.coming, host.capacity)
        plan = self.flight.plan()
        plan.base, plan.room, plan.stream, plan.event = seq.range.base, room, seq.stream, after
        plan.size_bytes = tokens * self.geometry.row_bytes
        plan.operands = operands = runs.freeing(seq, self.geometry, blocks)
        operands["room"] = room
        plan.move(_SUSPEND, seq, chosen)
        return plan

    def drop(self, seq: Sequence, after: Event = None) -> None:
        """Give up the bytes, on the GPU or on the host, and keep the sequence: it can be refilled.

        GPU memory is reused once `after`, steps in flight and copies are done.
        """
        blocks = self.geometry.blocks(seq.written_tokens)
        self._leave(_DROP, seq, after, runs.freeing(seq, self.geometry, blocks))
        seq.forget_tokens()
        self.counters["drops"] += 1

    def close_sequence(self, seq: Sequence, after: Event = None) -> None:
        """End the sequence, in whatever state it is. Its memory is reused as `drop` says."""
        self._leave(_CLOSE, seq, after, runs.leaving(seq, self.geometry))
        if seq.state == CLOSED.code:
            self._retire(seq)
        self.counters["closes"] += 1

    def _leave(
        self, event: ObjectEvent, seq: Sequence, after: Event, leaves: runs.Operands
    ) -> None:
        self._enter()
        plan = self.flight.plan()
        plan.operands = leaves | runs.hosted(seq)
        plan.move(event, seq)
        self._fence(seq, after)
        self.actor.run(plan)
        self.flight.settle(plan)
        runs.hand_over(seq, plan.operands)
        seq.transfer, seq.slots = None, ()

    def _fence(self, seq: Sequence, after: Event) -> None:
        """Let the caller's event hold the range that the sequence is about to leave."""
        if after is not None and seq.range is not None:
            token = self.device.copy(Direction.OUT, (), after=[after])
            self.flight.issue(Transfer(token, seq, seq.range, ()))

    # Time, and the end.

    def poll(self) -> list[Completion]:
        """Deliver the copies that have ended, without waiting; what was delivered."""
        self._enter()
        return self.flight.poll()

    def trim(self, keep_frames: int = 0) -> None:
        """Give memory that nobody uses back to the driver, but for `keep_frames` pooled frames."""
        self._enter()
        if self.gpu.reclaimable or self.gpu.coming:
            self.flight.quiesce()
            self.ladder.spill(self.gpu.budget_frames)
        self.ladder.release(keep_frames)

    def stats(self) -> Stats:
        """A snapshot of states, charges, refusals and device calls. O(sequences and ranges)."""
        return stats(self)

    def close(self) -> None:
        """End everything and give all memory back. May be called twice.

        A poisoned manager gives back what it can once the device is quiet, and otherwise keeps it:
        a copy may still read it.
        """
        if self.closed:
            return
        if self.actor.fault is None:
            try:
                self._end()
            except (DeviceError, DeviceFault) as error:
                self.actor.poison(f"closing failed: {error}")
                log.error("closing failed, the device gives back the rest: %s", error)
        self.closed = True
        self.device.close()

    def _end(self) -> None:
        if self.sequences:
            log.warning("closing with %d sequences open", len(self.sequences))
        for seq in list(self.sequences.values()):
            if seq.state != CLOSING.code:
                self.close_sequence(seq)
        self._enter()
        self.flight.quiesce()
        self.ladder.spill(self.gpu.budget_frames)
        self.ladder.release(0)
        self.device.unreserve(self.arena.base)
        if self.host.address:
            self.device.host_unreserve(self.host.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)

    # Inside.

    def _enter(self) -> None:
        """The beginning of every public call."""
        if self.actor.fault is not None:
            raise DeviceFault(f"the manager is poisoned and refuses work: {self.actor.fault}")
        if self.closed:
            raise IllegalTransition("the manager", "call", "CLOSED", "open a new one")
        self.flight.call += 1

    def _legal(self, event: ObjectEvent, subject: Any) -> None:
        """Refuse an illegal event before anything is looked up, waited for or reclaimed."""
        if event.decide(subject) is None:
            raise illegal_object(event, subject)

    def _attempt(self, event: ObjectEvent, seq: Sequence, build: Callable[..., T], *args: Any) -> T:
        """Build a plan for an event that is legal. If something is short, find it, build again.

        What is found is there for good, and the one quiesce is made once: a few rounds are enough
        for a plan that came to use another range.
        """
        for _ in range(_ROUNDS):
            chosen = event.decide(seq)
            if chosen is None:
                raise illegal_object(event, seq)
            try:
                return build(chosen, seq, *args)
            except CapacityError as error:
                short = error
            try:
                self._find(short)
            except CapacityError:
                break
        raise self._refused(short)

    def _find(self, short: CapacityError) -> None:
        """Find what a plan is short of. Raises `short` if there is nothing to wait for."""
        if isinstance(short, OutOfFrames) and short.place == "budget":
            self.ladder.supply(short)
        elif isinstance(short, OutOfFrames) and short.place == "addresses":
            self.ladder.addresses(short)
        elif isinstance(short, HostExhausted) and short.needed <= short.free + short.coming:
            self.flight.quiesce()
        else:
            raise short

    def _plan_frames(self, what: object, uses: dict[Range, int]) -> Plan:
        """An empty plan that is going to charge each range up to that frame."""
        plan, spare = self.flight.plan(), len(self.gpu.pool.ids)
        for range_, end in uses.items():
            fresh = end - len(range_.frames.ids)
            if fresh > 0:
                spare -= fresh
        plan.spare = spare
        if spare < 0:
            needed = sum(max(0, end - range_.charged) for range_, end in uses.items())
            raise self._short(str(what), needed, "budget", uses)
        return plan

    def _short(
        self, what: str, needed: int, place: str, uses: dict[Range, int] | None = None
    ) -> OutOfFrames:
        gpu = self.gpu
        return OutOfFrames(what, needed, gpu.free, gpu.reclaimable, gpu.coming, place, uses)

    def _refused(self, error: CapacityError) -> CapacityError:
        place = error.place if isinstance(error, OutOfFrames) else type(error).__name__
        self.counters[f"refused.{place}"] += 1
        return error

    def _growth(
        self, plan: Plan, seq: Sequence, range_: Range, frames: int, opened: int
    ) -> runs.Operands:
        ahead = self.config.gpu.map_ahead_frames
        return runs.growth(plan, self.gpu.pool, self.geometry, seq, range_, frames, opened, ahead)

    def _capacity(self, seq: Sequence, frames: int) -> int:
        return min(seq.max_tokens, self.geometry.tokens(frames))

    def _set_capacity(self, seq: Sequence) -> None:
        assert seq.range is not None
        self.columns.capacity[seq.row] = self._capacity(seq, seq.range.charged)

    def _check_length(self, seq: Sequence, event: str, low: int, tokens: int, high: int) -> None:
        if not low <= tokens <= high:
            reason = f"{tokens} tokens is not from {low} to {high}"
            raise IllegalTransition(str(seq), event, seq.state_name, reason)

    def _issue(self, plan: Plan, transfer: Transfer) -> None:
        """Enter the copy that the plan has issued."""
        self.counters["host_bytes_moved"] += plan.size_bytes
        self.flight.issue(transfer)

    def _retire(self, seq: Sequence) -> None:
        """A CLOSED sequence gives its row to the next one."""
        row, columns = seq.row, self.columns
        columns.known[row] = columns.capacity[row] = 0
        columns.set_lengths(row, 0)
        seq.row = columns.rows
        columns.free.append(row)
        del self.sequences[seq.uid]
