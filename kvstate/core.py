"""What every call of a manager has in common.

The books of one level on one device, the beginning of a call, and the search for what a plan is
short of: a call that would fail for lack of memory waits once for what is coming, reclaims once,
and tries again.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from kvstate.act import Actor
from kvstate.arena import Arena, Range, missing
from kvstate.config import Config, Geometry
from kvstate.device import Device, Event, Stream
from kvstate.errors import (
    ArgumentError,
    CapacityError,
    DeviceError,
    HostExhausted,
    OutOfFrames,
    StreamCaptured,
)
from kvstate.flight import Flight
from kvstate.index import Index
from kvstate.life import Life
from kvstate.mirrors import Mirrors
from kvstate.plan import Plan, illegal_object
from kvstate.reclaim import Ladder
from kvstate.reuse import Reuse
from kvstate.sequence import Batch, Columns, Sequence, Step, foreign
from kvstate.spans import Spans
from kvstate.spec.compiled import ObjectEvent
from kvstate.spec.facts import Ledger
from kvstate.tiers import FrameBudget, HostSlots

log = logging.getLogger("kvstate")
T = TypeVar("T")

_ROUNDS: Final = (3, 2, 1, 0)
"""How often a call may still look for what its plan is short of."""
_NOTHING: Final = object()


class Core:
    """The books, and what calls do with them before and after their own work."""

    def __init__(self, config: Config, device: Device) -> None:
        self.config, self.device = config, device
        self.geometry = geometry = Geometry(config)
        self.columns = Columns(config.max_sequences, config.tokens_per_block, config.max_tokens)
        self.gpu = FrameBudget(geometry.budget_frames)
        self.host = HostSlots(geometry.host_slots, geometry.block_bytes)
        self.sequences: dict[int, Sequence] = {}
        """Every sequence that is not CLOSED, by uid."""
        self.counters: Counter[str] = Counter()
        self._created = self._stepped = 0
        """Sequences and steps so far: their numbers."""
        self.arena = Arena(geometry, self._reserve(geometry), self.gpu.counts)
        self.actor = Actor(device, self.host, geometry.frame_bytes)
        ignored = None if config.scrub else "scrub"
        self.flight = Flight(device, self.columns, self.arena, self.actor, self.counters, ignored)
        self.reuse = Reuse(
            Index(config.tokens_per_block, key=config.digest_key), self.host, self.actor,
            self.flight, config.write_through,
        )  # fmt: skip
        self.spans = Spans(config, geometry, self.columns, self.gpu.counts)
        self.ladder = Ladder(
            self.gpu, self.arena, self.actor, self.flight, self.spans, self.reuse, config.gpu
        )
        self.mirrors = Mirrors(self.reuse) if config.write_through == "on_commit" else None
        self.life = self.actor.life

    @property
    def closed(self) -> bool:
        """It was closed, or never opened."""
        life: Life | None = getattr(self, "life", None)
        return life is None or life.closed

    def _reserve(self, geometry: Geometry) -> int:
        """Reserve host memory and addresses."""
        base = self.device.reserve(geometry.arena_bytes, geometry.align_bytes)
        if geometry.host_slots:
            size_bytes = geometry.host_slots * geometry.block_bytes
            self.host.address = self.device.host_reserve(size_bytes)
        if self.config.host is not None and self.config.host.pace_bytes is not None:
            self.device.pace(self.config.host.pace_bytes)
        return base

    def _enter(
        self, subject: Any = _NOTHING, kind: type[Sequence | Batch | Step] = Sequence
    ) -> None:
        """The beginning of every public call, of one about something that this manager has made."""
        made = subject is _NOTHING or (type(subject) is kind and subject.columns is self.columns)
        if not made:
            raise foreign(subject, kind)
        self.flight.call += 1

    def _check_leaves(self, seq: Sequence, after: Event) -> None:
        """Refuse to let a sequence leave its memory if `after` is no event of the device, whether
        it is used or not; or, without one, if its stream is being captured."""
        if after is not None:
            self.device.check_event(after)
        elif seq.range is not None:
            self._check_captured(seq.stream)

    def _streams_in_use(self) -> list[Stream]:
        """See `Flight.streams`."""
        return self.flight.streams()

    def _check_ends(self) -> None:
        """Raises StreamCaptured if work of a sequence may be on a stream that is being captured:
        its end cannot be waited for."""
        for stream in self._streams_in_use():
            self._check_captured(stream)

    def _check_captured(self, stream: Stream) -> None:
        """Raises StreamCaptured. A stream that is none any more runs nothing, and is let pass."""
        try:
            self.device.check_stream(stream)
        except StreamCaptured:
            raise
        except DeviceError as error:
            log.warning("a stream cannot be used any more: %s", error)

    def _legal(self, event: ObjectEvent, subject: Any) -> None:
        """Refuse an illegal event before anything is looked up, waited for or reclaimed."""
        if event.decide(subject) is None:
            raise illegal_object(event, subject)

    def _legal_once_arrived(self, event: ObjectEvent, seq: Sequence) -> None:
        """The same for an event that waits for the sequence's copy to the GPU."""
        if event.decide(seq.arrived) is None:
            raise illegal_object(event, seq)

    def _attempt(self, event: ObjectEvent, seq: Sequence, build: Callable[..., T], *args: Any) -> T:
        """Build a plan for an event that is legal. If something is short, find it, build again.

        What is found is there for good, and the one quiesce is made once: a few rounds are enough
        for a plan that came to use another range.
        """
        for left in _ROUNDS:
            chosen = event.decide(seq)
            if chosen is None:
                raise illegal_object(event, seq)
            try:
                return build(chosen, seq, *args)
            except CapacityError as error:
                # No variable may keep it: error, traceback and frame would keep each other.
                if not left or not self._find(error):
                    self._refused(error)
                    raise
        raise AssertionError("the last round returns or raises")

    def _find(self, short: CapacityError) -> bool:
        """Find what a plan is short of; False if there is nothing to wait for."""
        if isinstance(short, OutOfFrames) and short.place == "budget":
            return self.ladder.supply(short)
        if isinstance(short, OutOfFrames) and short.place in ("gate", "reserve"):
            return self.ladder.regain()
        if isinstance(short, OutOfFrames) and short.place == "addresses":
            return self.ladder.addresses()
        if isinstance(short, OutOfFrames) and short.place == "retained":
            for range_ in short.uses:
                self.ladder.give_up(range_)
            return True
        if isinstance(short, HostExhausted) and short.needed <= short.free + short.coming:
            self._find_slots(short)
            return True
        return False

    def _find_slots(self, short: HostExhausted) -> None:
        """Make room for what is not there yet; if that is not to be had, for all of it."""
        wanted, spare = short.needed - short.there, [short.spare] if short.spare else []
        if not self.reuse.make_room(wanted, spare):
            self.flight.quiesce()
            if not self.reuse.make_room(wanted, spare):
                self.reuse.make_room(short.needed)

    def _check_promises(self, what: object, uses: dict[Range, int]) -> None:
        """Nobody takes what somebody else was promised."""
        promised = self.columns.promised_frames
        if not promised:
            return
        takes = {range_: max(0, end - range_.used) for range_, end in uses.items()}
        needed = sum(takes.values())
        own = sum(
            min(take, range_.owner.promised_frames)
            for range_, take in takes.items()
            if range_.owner is not None
        )
        gpu = self.gpu
        had = gpu.free + gpu.parked + gpu.coming + self.spans.spillable_frames
        if needed - own > had - promised:
            raise self._short(str(what), needed, "reserve")

    def _plan_frames(
        self, what: object, uses: dict[Range, int], margin: int = 0, batch: Batch | None = None
    ) -> Plan:
        """An empty plan that is going to charge each range up to that frame.

        With a margin, its first frame is mapped too if the pool has one more. A reclaim that cannot
        be avoided finds all of it, and a frame for each of a batch with margins.
        """
        self._check_promises(what, uses)
        pooled, fresh = len(self.gpu.pool.ids), missing(uses)
        if fresh > pooled:
            needed = sum(max(0, end - range_.used) for range_, end in uses.items())
            soon = missing(uses, margin) - fresh
            if batch is not None and self.config.gpu.map_ahead_frames:
                soon = len(batch)
            raise self._short(str(what), needed, "budget", uses, soon)
        plan = self.flight.plan()
        if margin:
            plan.margin = min(missing(uses, 1), pooled) - fresh
        return plan

    def _short(
        self, what: str, needed: int, place: str, uses: dict[Range, int] | None = None,
        soon: int = 0,
    ) -> OutOfFrames:  # fmt: skip
        gpu = self.gpu
        reclaimable = gpu.parked + self.spans.spillable_frames
        protected = self.geometry.protected_frames if self.spans.protecting else 0
        return OutOfFrames(
            what, needed, gpu.free, reclaimable, gpu.coming, place, uses, protected, soon,
            len(gpu.denied.ids),
        )  # fmt: skip

    def _refused(self, error: CapacityError) -> CapacityError:
        place = error.place if isinstance(error, OutOfFrames) else type(error).__name__
        self.counters[f"refused.{place}"] += 1
        return error

    def _capacity(self, seq: Sequence, frames: int) -> int:
        return min(seq.max_tokens, self.geometry.tokens(frames))

    def _set_capacity(self, seq: Sequence) -> None:
        assert seq.range is not None
        seq.set_capacity(self._capacity(seq, seq.range.used))

    def _check_length(self, seq: Sequence, event: str, low: int, tokens: int, high: int) -> None:
        if not low <= tokens <= high:
            raise ArgumentError(f"{seq}: {event}: {tokens} tokens is not from {low} to {high}")

    def _retire(self, seq: Sequence) -> None:
        """A CLOSED sequence gives its row to the next one."""
        row, columns = seq.row, self.columns
        columns.known[row] = columns.capacity[row] = columns.ample[row] = 0
        columns.set_lengths(row, 0)
        seq.row = columns.rows
        columns.free.append(row)
        del self.sequences[seq.uid]


def hand_back(device: Device, before: Ledger, mark: object) -> None:
    """A manager could not be opened: the device has what it had, and may have another one. What it
    will not take back now it gives back when it is closed."""
    now = device.ledger()
    for give, there, old in (
        (device.unreserve, now.reservations, before.reservations),
        (device.host_unreserve, now.host, before.host),
    ):
        for address in there.keys() - old.keys():
            with suppress(DeviceError):
                give(address)
    device.detach(mark)
