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
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy.typing as npt

from kvstate import runs
from kvstate.blocks import Loss, Node
from kvstate.config import Config
from kvstate.core import hand_back
from kvstate.device import CALLS, Completion, Device, Event, Stream
from kvstate.errors import (
    ArgumentError,
    DeviceError,
    DeviceFault,
    HostExhausted,
    KvStateError,
    LawViolation,
)
from kvstate.events import Format, Hashes
from kvstate.guard import ending, guarded
from kvstate.handles import Handle
from kvstate.keys import Identity
from kvstate.plan import Plan, Run
from kvstate.publisher import MOST_PENDING_BLOCKS, Publisher
from kvstate.reuse import Leaving
from kvstate.rewinding import Rewinding
from kvstate.runs import runs_of, slots_of
from kvstate.sequence import Sequence, Transfer
from kvstate.spans import Passage
from kvstate.spec.compiled import MACHINES, ObjectEvent, ObjectRow
from kvstate.spec.facts import Ledger
from kvstate.spec.host import COMING
from kvstate.spec.sequence import CLOSED, CLOSING
from kvstate.stats import Stats, stats
from kvstate.tensors import TensorView, check_stays, view_of_all, views
from kvstate.values import able, flag, ids, instance, whole

if TYPE_CHECKING:
    from kvstate.observe import Watch

log = logging.getLogger("kvstate")

_GROW: Final = MACHINES.object("sequence.grow")
_SHRINK: Final = MACHINES.object("sequence.shrink")
_SUSPEND: Final = MACHINES.object("sequence.suspend")
_DROP: Final = MACHINES.object("sequence.drop")
_CLOSE: Final = MACHINES.object("sequence.close")
_DEVICE: Final = (*CALLS, "check_stream", "poll", "ended", "pace", "ledger", "close")


OnViolation = Literal["raise", "log"] | Callable[[LawViolation], object]
"""What a manager does when a law does not hold."""


def _check_on_violation(value: object, *, debug: bool) -> None:
    """Raise ArgumentTypeError for what is none, and ArgumentError without `debug`."""
    if not isinstance(value, str):
        able("on_violation", value, ("__call__",))
    elif value not in ("raise", "log"):
        raise ArgumentError(f'on_violation is {value!r}: "raise", "log" or a callable is wanted')
    if value != "raise" and not debug:
        raise ArgumentError("on_violation is for debug=True: without it no law is checked")


class Manager(Rewinding, Handle):
    """KV memory of one level on one device, for many sequences.

    Takes the device over and closes it; a device has one manager. Belongs to the thread and to the
    process that made it. Runs one call at a time; one that is cut short (by Ctrl-C, say) has
    changed nothing, or poisons it. Use it as a context manager, or call `close`.
    """

    instead = "open another one, on a device of its own"

    def __init__(
        self,
        config: Config,
        device: Device,
        *,
        debug: bool = False,
        order: bool = False,
        record: Callable[[bytes], object] | None = None,
        on_violation: OnViolation = "raise",
    ) -> None:
        """Reserve addresses and host memory; frames are allocated when they are needed.

        With `debug`, every law is checked after every call, and freed memory is overwritten; with
        `order`, only that whatever touches the same bytes is ordered (law 17). Either way `device`
        is then a wrapper around the one given: record events on that.
        `record` is called with every public call as one line of a trace (see `kvstate.trace`); the
        `write` of a file that was opened in binary mode will do.
        `on_violation` says what `debug` does when a law does not hold after a call: "raise" poisons
        the manager and raises LawViolation, "log" writes it to the log at level ERROR, and a
        callable is given the LawViolation; with these two the manager goes on, with books that may
        be wrong. What is found out of order always poisons.
        If anything goes wrong, the device is as it was. Raises IllegalTransition if it has a
        manager already, or was closed.
        """
        instance("config", config, Config)
        able("device", device, _DEVICE)
        debug, order = flag("debug", debug), flag("order", order)
        _check_on_violation(on_violation, debug=debug)
        if record is not None:
            able("record", record, ("__call__",))
        mark, before = object(), device.ledger()
        try:
            device.attach(mark)
            if debug or order:
                from kvstate.order_device import ordered

                device = ordered(device)
            super().__init__(config, device)
            self.watches: list[Watch] = []
            """Those that look at its calls."""
            self.replayed: Callable[[], list[str]] | None = None
            """Compares the events with the index, if somebody does."""
            self.left: Ledger | None = None
            """What the device held when the manager had given everything back itself; None before,
            or if it could not."""
            if debug or order or record:
                from kvstate.observe import observe

                observe(self, debug=debug, record=record, on_violation=on_violation)
        except BaseException:
            vars(self).pop("life", None)  # it was never opened
            hand_back(device, before, mark)
            raise

    @guarded
    def check_laws(self) -> None:
        """See `kvstate.check`."""
        self._enter()
        from kvstate.observe import check_laws

        check_laws(self)

    @guarded
    def dummy(self, length_tokens: int, stream: Stream = None) -> Sequence:
        """An ACTIVE sequence of that length with undefined bytes: for warm-up and graph
        capture."""
        self._enter()
        tokens = whole("length_tokens", length_tokens, 1, self.config.max_tokens)
        self.device.check_stream(stream)
        identity = Identity(b"", None, self.reuse.epoch)
        seq = self._admit(b"", tokens, identity, {}, commit=False)
        try:
            self._begin(seq, stream, None)
            self._resize(seq, tokens)
        except KvStateError:
            self._close_sequence(seq, None)
            raise
        self.columns.set_lengths(seq.row, tokens)
        return seq

    # Memory.

    @guarded
    def tensors(
        self, seq: Sequence, layer: int, tokens: int | None = None
    ) -> tuple[TensorView, TensorView]:
        """K and V of one layer as tensors [tokens, kv_heads, head_dim] over the sequence's memory.

        Layers count from 0, in the order of `config.layers`. `tokens` may be anything up to the
        capacity; by default it is what was scheduled. Nothing is copied, held or waited for: see
        `TensorView` for the stream to use them on and for how long they are good. Raises
        IllegalTransition if the sequence has no GPU memory, ArgumentError if it has no such layer
        or no room for so many tokens, and ConfigError on a device without memory.
        """
        self._enter(seq)
        return views(seq, layer, tokens)

    @guarded
    def tensors_all(self, seq: Sequence, tokens: int | None = None) -> TensorView:
        """All layers as one tensor [tokens, layers, 2, kv_heads, head_dim] (K, then V) over the
        sequence's memory.

        `tokens` may be anything up to the sequence's `max_tokens`, which is the default: so one
        export serves a whole stay (see `Sequence.stay`), whatever grows. Only what is below
        `capacity_tokens` is sure to be mapped, and a read or a write beyond it may fault; before
        the first token has memory, a library that asks the driver about the address may refuse the
        view. Raises as `tensors` does, and ConfigError if not all layers have one shape and type.
        O(specs).
        """
        self._enter(seq)
        return view_of_all(seq, tokens)

    @guarded
    def reads(self, stays: Iterable[tuple[Sequence, int | None]]) -> None:
        """Say that addresses are about to be used which were taken in these stays, as a replay of a
        CUDA graph does: for each sequence, what `Sequence.stay` was then.

        Raises StaleAddress for the first whose stay has ended, naming what has ended it, and
        ArgumentError for a stay of None: there were no addresses. Changes nothing. O(pairs).
        """
        self._enter()
        check_stays(self.columns, stays)

    @guarded
    def resize(self, seq: Sequence, capacity_tokens: int) -> None:
        """Map and charge memory for that many tokens, or give back what is beyond them.

        Given-back frames stay mapped at the end of the range, to be grown into again or to be
        reclaimed. Raises OutOfFrames, and ArgumentError below the scheduled tokens.
        """
        self._enter(seq)
        tokens = whole("capacity_tokens", capacity_tokens, 0, self.config.max_tokens)
        self._resize(seq, tokens)

    def _resize(self, seq: Sequence, tokens: int) -> None:
        range_, frames = seq.range, self.geometry.frames(tokens)
        shrinks = range_ is not None and frames < range_.used
        self._legal(_SHRINK if shrinks else _GROW, seq)
        self._check_length(seq, "resize", seq.written_tokens, tokens, seq.max_tokens)
        if shrinks and seq.steps and self.flight.ignored is None:
            self.flight.quiesce()  # a step whose tokens were taken back may still write there
            self._legal(_SHRINK, seq)
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
            "excess": ((seq.range.frames, frames - seq.range.shared, seq.range.charged),),
        }
        plan.move(_SHRINK, seq)
        self.actor.run(plan)
        self.flight.settle(plan)
        self._set_capacity(seq)

    # Giving memory up.

    @guarded
    def suspend(self, seq: Sequence, after: Event = None) -> None:
        """Copy the written tokens to the host and give the GPU memory up, without waiting.

        The copy runs after `after`, or else after everything launched on the sequence's stream so
        far. Raises HostExhausted with the sequence intact, and StreamCaptured if that stream is
        being captured and there is no `after`. If the copy fails later, the sequence is DROPPED.
        """
        self._enter(seq)
        self._check_leaves(seq, after)
        self.flight.arrive(seq)
        plan, passage, slots = self._attempt(_SUSPEND, seq, self._plan_suspend, after)
        if not plan.room:
            self._fence(seq, after)
        self.actor.run(plan)
        range_ = seq.range
        assert range_ is not None
        if plan.token is not None:
            transfer = Transfer(plan.token, seq, range_, plan.room, outward=True)
            self.flight.issue(transfer, plan.size_bytes)
        self._left_behind(seq, passage)
        self.flight.settle(plan)
        if passage is not None:
            self.reuse.give_way(seq, passage.span.nodes)
        runs.hand_over(seq, plan.operands)
        self.reuse.away(seq)
        seq.slots, seq.held_tokens = slots, seq.scheduled_tokens
        self.counters["suspends"] += 1

    def _plan_suspend(
        self, chosen: ObjectRow, seq: Sequence, after: Event
    ) -> tuple[Plan, Passage | None, Sequence_[Run]]:
        assert seq.range is not None
        tokens = seq.written_tokens
        blocks = self.geometry.blocks(tokens)
        passage = self.spans.passage(seq, self.reuse.epoch, closing=False)
        there = self.reuse.mirrors_of(seq, passage)
        room = self.host.room(blocks - len(there))
        if room is None:
            host = self.host
            coming = host.coming + host.stale
            spare = seq.nodes[max(there)] if there else None
            raise HostExhausted(
                str(seq), blocks, host.free, coming, host.capacity, len(there), spare
            )
        plan = self.flight.plan()
        plan.base, plan.room, plan.stream, plan.event = seq.range.base, room, seq.stream, after
        plan.size_bytes = tokens * self.geometry.row_bytes
        operands = runs.freeing(seq, self.geometry, blocks)
        plan.operands = operands = operands | self.spans.passing(passage)
        operands["room"], slots = room, room
        if there:
            operands["taken"] = runs_of(self.host.cells, there.values())
            slots = self._besides(plan, there, blocks)
        plan.move(_SUSPEND, seq, chosen)
        return plan, passage, slots

    def _besides(self, plan: Plan, there: dict[int, int], blocks: int) -> list[Run]:
        """Copy only those pages that the host has not; the slots of all, in order."""
        size, fresh = self.geometry.block_bytes, slots_of(plan.room)
        slots = [there[at] if at in there else next(fresh) for at in range(blocks)]
        bare = [at for at in range(blocks) if at not in there]
        plan.pieces = pieces = runs.joined(
            [plan.base + at * size for at in bare],
            [self.host.address + slots[at] * size for at in bare],
            size,
        )
        if bare and bare[-1] == blocks - 1:
            page, place, length = pieces[-1]
            pieces[-1] = page, place, length - (blocks * size - plan.size_bytes)
        plan.size_bytes = sum(length for _, _, length in pieces)
        return runs_of(self.host.cells, slots)

    @guarded
    def drop(self, seq: Sequence, after: Event = None) -> None:
        """Give up the bytes, on the GPU or on the host, and keep the sequence: it can be refilled.

        GPU memory is reused once `after`, steps in flight and copies are done. Raises
        StreamCaptured as `suspend` does.
        """
        self._enter(seq)
        self._check_leaves(seq, after)
        blocks = self.geometry.blocks(seq.written_tokens)
        self._leave(_DROP, seq, after, runs.freeing(seq, self.geometry, blocks))
        seq.forget_tokens()
        self.counters["drops"] += 1

    @guarded
    def close_sequence(self, seq: Sequence, after: Event = None) -> None:
        """End the sequence, in whatever state it is. Its memory is reused as `drop` says.

        What it committed and nobody else has is copied to the host, as far as there is room or can
        be made, and is found by others with the same prefix once it is there.
        """
        self._enter(seq)
        self._check_leaves(seq, after)
        self._close_sequence(seq, after)

    def _close_sequence(self, seq: Sequence, after: Event) -> None:
        self._leave(_CLOSE, seq, after, runs.leaving(seq, self.geometry))
        if seq.state == CLOSED.code:
            self._retire(seq)
        else:
            seq.forget_tokens()
        self.counters["closes"] += 1

    def _leave(
        self, event: ObjectEvent, seq: Sequence, after: Event, leaves: runs.Operands
    ) -> None:
        self._legal(event, seq)
        passage = self.spans.passage(seq, self.reuse.epoch, closing=event is _CLOSE)
        leaving = self._leaving(event, seq, passage)
        leaves = leaves | self.spans.passing(passage)
        plan, slots = self._plan_leave(event, seq, after, leaves, leaving)
        why = self._why_lost(event, seq)
        self._fence(seq, after)
        try:
            self.actor.run(plan)
        except DeviceError:
            if not plan.room:
                raise
            why = Loss.FAILED
            self.counters["failed_copies"] += 1
            log.warning("%s: what it committed could not be kept", seq)
            leaving = self.reuse.leaving(seq, 0, passage, retains=bool(leaving.retained))
            plan, slots = self._plan_leave(event, seq, after, leaves, leaving)
            self.actor.run(plan)
        if plan.token is not None:
            assert seq.range is not None
            transfer = Transfer(plan.token, seq, seq.range, plan.room, leaving.kept, keeps=True)
            self.flight.issue(transfer, plan.size_bytes)
        self._left_behind(seq, passage)
        self._retain(seq, passage, leaving)
        self.flight.settle(plan)
        runs.hand_over(seq, plan.operands)
        if seq.slots:
            self.reuse.bequeath(seq, leaving.kept, slots)
        else:
            self.reuse.keep(leaving.kept, slots, plan.token)
        seq.transfer, seq.slots = None, ()
        self.reuse.left(leaving, why)

    def _why_lost(self, event: ObjectEvent, seq: Sequence) -> Loss:
        """Why blocks are lost that the sequence has and cannot leave to another."""
        if seq.loading and not seq.slots:
            return Loss.UNARRIVED
        return Loss.CLOSED if event is _CLOSE else Loss.DROPPED

    def _leaving(self, event: ObjectEvent, seq: Sequence, passage: Passage | None) -> Leaving:
        """What it means for the index, once there is room on the host for what can be kept there:
        all that it has there, and if it closes what it has on the GPU."""
        look, host = self.reuse.leaving, self.host
        if not self.reuse.keeping or seq.identity.weights_epoch != self.reuse.epoch:
            return look(seq, 0, passage)
        if seq.slots:
            return look(seq, 0, passage, room=host.capacity)
        if event is not _CLOSE or seq.transfer is not None or seq.range is None:
            return look(seq, 0, passage)
        retains = self.config.retain
        leaving = look(seq, 0, passage, retains=retains, room=host.capacity)
        if len(leaving.kept) <= host.free:
            return leaving
        self.reuse.make_room(len(leaving.kept))
        return look(seq, 0, passage, retains=retains, room=host.free)

    def _retain(self, seq: Sequence, passage: Passage | None, leaving: Leaving) -> None:
        """The range that the sequence is about to leave retains what nobody else has."""
        if leaving.retained and seq.range is not None:
            first = self.spans.shared_frames(seq.range, passage)
            tokens = (leaving.retained[-1].ordinal + 1) * self.config.tokens_per_block
            seq.range.kept_frames = self.geometry.frames(tokens) - first
            self.reuse.retained(leaving, seq.range)

    def _plan_leave(
        self, event: ObjectEvent, seq: Sequence, after: Event, leaves: runs.Operands,
        leaving: Leaving,
    ) -> tuple[Plan, list[int]]:  # fmt: skip
        """The plan, and the host slots of the blocks that get some."""
        plan, slots = self.flight.plan(), list[int]()
        plan.operands = operands = leaves | runs.hosted(seq) | leaving.operands
        if leaving.retained:
            kept = runs_of(seq.pages, [node.ordinal for node in leaving.retained])
            own = [run for whole in leaves["resident"] for run in runs.besides(whole, kept)]
            operands |= {"retained": kept, "resident": own}
        if seq.slots:
            slots = self._plan_bequest(operands, seq, leaving.kept)
        elif leaving.kept:
            slots = self._plan_keep(plan, operands, seq, leaving)
            plan.stream, plan.event = seq.stream, after
        plan.move(event, seq)
        return plan, slots

    def _plan_keep(
        self, plan: Plan, operands: runs.Operands, seq: Sequence, leaving: Leaving
    ) -> list[int]:
        """Copy blocks to the host: what it leaves to others there, and then what nobody has."""
        assert seq.range is not None
        nodes, block_bytes = leaving.kept, self.geometry.block_bytes
        plan.room = self.host.room(len(nodes)) or []
        slots, most = list(slots_of(plan.room)), leaving.stay
        pages = [seq.range.base + node.ordinal * block_bytes for node in nodes]
        places = [self.host.address + slot * block_bytes for slot in slots]
        plan.size_bytes = len(nodes) * block_bytes
        plan.pieces = runs.joined(pages, places, block_bytes)
        operands |= {
            "mirrored": runs_of(self.host.cells, slots[:most]),
            "kept_room": runs_of(self.host.cells, slots[most:]),
            "stale": runs_of(self.host.pages, slots[most:]),
        }
        return slots

    def _plan_bequest(self, operands: runs.Operands, seq: Sequence, kept: list[Node]) -> list[int]:
        """Leave the host copies of blocks where they are, or where a copy brings them."""
        held, cells, pages = list(slots_of(seq.slots)), self.host.cells, self.host.pages
        slots = [held[node.ordinal] for node in kept]
        left, states = set(held).difference(slots), cells.states
        operands |= {
            "kept": runs_of(cells, slots),
            "inherited": runs_of(pages, [s for s in slots if states[s] != COMING.code]),
            "awaited": runs_of(pages, [s for s in slots if states[s] == COMING.code]),
            "slots": runs_of(cells, [slot for slot in held if slot in left]),
        }
        return slots

    def _fence(self, seq: Sequence, after: Event) -> None:
        """Let the caller's event hold the range that the sequence is about to leave."""
        if after is not None and seq.range is not None:
            token = self.actor.fence(after)
            self.flight.issue(Transfer(token, seq, seq.range, ()))

    # Time, and the end.

    @guarded
    def poll(self, deliver: npt.ArrayLike | None = None) -> list[Completion]:
        """Deliver the copies that have ended, without waiting; what was delivered.

        When a copy's end is delivered decides what later calls find. Managers that shall act alike,
        such as those of the ranks of one model, agree on the ends (see `ended`) and name them by
        their tokens in `deliver`, a row of numbers: those are delivered, in that order, and no
        others. One that has not ended here is waited for. Raises ArgumentError for what is not in
        flight.
        """
        self._enter()
        tokens = None if deliver is None else self._in_flight(deliver)
        if self.mirrors is not None:
            self.mirrors.copy_out()
        self.ladder.regain()
        return self.flight.poll() if tokens is None else self.flight.finish(tokens)

    def _in_flight(self, deliver: npt.ArrayLike) -> list[int]:
        """Tokens of copies whose end was not delivered, each once. Raises ArgumentError."""
        tokens: list[int] = ids("deliver", deliver).tolist()
        for at, token in enumerate(tokens):
            if token not in self.flight.transfers or token in tokens[:at]:
                known = ", ".join(map(str, self.flight.transfers)) or "none"
                raise ArgumentError(
                    f"deliver[{at}] is {token}: a copy in flight, named once, is wanted; in flight "
                    f"are {known}"
                )
        return tokens

    @guarded
    def ended(self) -> list[int]:
        """The tokens of the copies that `poll` would deliver now. Delivers none, and waits for
        none."""
        return self.actor.ask(self.device.ended)

    @guarded
    def wait(self, seq: Sequence) -> list[Completion]:
        """Wait for the copy that moves the sequence's bytes, if one is in flight, and deliver its
        end alone; what was delivered. If it has failed, `seq.state_name` says what is left."""
        self._enter(seq)
        return self.flight.finish([seq.transfer.token] if seq.transfer is not None else [])

    @guarded
    def clear_reuse(self) -> None:
        """Forget in every tier what anybody could have from others: after the weights have changed.

        Nothing that was written so far is found any more, from the return of this call on and also
        if it raises DeviceError. Waits for the device. Running sequences go on, and what they have
        is theirs alone; a sequence that is dropped or waits begins anew. Their memory leaves with
        them; everything else is given up.
        """
        self._enter()
        self.life.change()
        self.reuse.index.retire()
        self.flight.quiesce()
        self.reuse.make_room(self.host.capacity)
        for range_ in tuple(self.arena.retaining.values()):
            self.ladder.give_up(range_)
        self.ladder.spill_spans(self.gpu.budget_frames, all_of_them=True)

    @guarded
    def trim(self, keep_frames: int = 0) -> None:
        """Give memory that nobody uses back to the driver, but for `keep_frames` pooled frames."""
        self._enter()
        keep = whole("keep_frames", keep_frames)
        if self.gpu.parked or self.gpu.coming or self.spans.registered:
            self.flight.quiesce()
            self.ladder.spill(self.gpu.budget_frames)
            self.ladder.spill_spans(self.gpu.budget_frames)
        self.ladder.release(keep)
        self.ladder.regain()

    @guarded
    def events(
        self, rank: int | None = None, most_events: int | None = None, *,
        format: Format = "maps", hashes: Hashes = "bytes",  # noqa: A002
        most_pending_blocks: int = MOST_PENDING_BLOCKS,
    ) -> Publisher:  # fmt: skip
        """What routers of requests want to know: which blocks which tier has, from now on.

        Hold what is returned for as long as it is to hear anything, and `drain` it at any time; see
        docs/events.md. Costs the digest of every block.
        """
        self.life.change()
        publisher = Publisher(
            self.reuse.index, rank, most_events, format=format, hashes=hashes,
            most_pending_blocks=most_pending_blocks,
        )  # fmt: skip
        publisher.life = self.life
        return publisher

    @guarded
    def stats(self) -> Stats:
        """A snapshot of states, charges, refusals and device calls. O(states)."""
        return stats(self)

    @ending
    def close(self) -> None:
        """End everything and give all memory back. May be called twice, and again if it was cut
        short.

        Raises StreamCaptured with nothing changed while a stream of a sequence is being captured.
        Whatever else comes of it, the device is closed. A poisoned manager releases nothing itself;
        its device gives everything back once it is quiet, and keeps it if it does not become so: a
        copy may still read it. In the child of a fork there is nothing to give back.
        """
        try:
            if self.actor.fault is None:
                self._end()
        except (DeviceError, DeviceFault) as error:
            self.actor.poison(f"closing failed: {error}")
            log.error("closing failed, the device gives back the rest: %s", error)
        self.reuse.index.close()

    def _end(self) -> None:
        if self.sequences:
            log.warning("closing with %d sequences open", len(self.sequences))
        self.reuse.keeping = False
        for seq in list(self.sequences.values()):
            if seq.state != CLOSING.code:
                self._enter(seq)
                self._close_sequence(seq, None)
        self._enter()
        self.flight.quiesce()
        self.reuse.index.close()
        self.ladder.spill(self.gpu.budget_frames)
        self.ladder.spill_spans(self.gpu.budget_frames, all_of_them=True)
        self.ladder.release(0)
        self.device.unreserve(self.arena.base)
        if self.host.address:
            self.device.host_unreserve(self.host.address)
        self.left = self.device.ledger()

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
        life = getattr(self, "life", None)
        if life is not None and not life.over:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)
