"""Supply and reclaim: where frames come from when the pool has too few.

One ladder, climbed once a call and only when it can help: create within the budget, if the device
has the memory, and else count on that no more until others have given some back; then one
quiesce, which lets everything behind a fence land; map spans where sequences have copies of them,
which loses nothing; and unmap what is parked: first the unused tails of running sequences beyond
their margins, then parked ranges, the longest parked first, and then margins, evenly: as many
frames as are missing (report B134), or a few more, because the quiesce is what is dear and parked
memory holds nothing that anybody reads; and what will be needed soon, while that is in no margin;
then spans, the longest unused first, and no more than are missing.

Nothing is unmapped without the quiesce: on an H200 the driver unmaps under a running kernel
without waiting, and a kernel that reads *nearby* addresses may fault (report S03).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Final

from kvstate.act import Actor
from kvstate.arena import Arena, Range, missing
from kvstate.config import GpuTier
from kvstate.errors import DeviceError, DeviceFull, OutOfFrames
from kvstate.flight import Flight
from kvstate.plan import Frames
from kvstate.reuse import Reuse
from kvstate.runs import runs_of
from kvstate.sequence import Sequence
from kvstate.spans import Sharing, Span, Spans, ranges_behind
from kvstate.spec.compiled import MACHINES, CellEvent
from kvstate.spec.frame import ABSENT, POOLED
from kvstate.spec.page import PRIVATE
from kvstate.spec.range import PARKED, RESERVED
from kvstate.spec.span import REGISTERED
from kvstate.tiers import FrameBudget

log = logging.getLogger("kvstate")

_CREATE: Final = MACHINES.cell("frame.create")
_DENY: Final = MACHINES.cell("frame.deny")
_RETRY: Final = MACHINES.cell("frame.retry")
_RELEASE: Final = MACHINES.cell("frame.release")
_CONDEMN: Final = MACHINES.cell("frame.condemn")
_SPARE: Final = MACHINES.cell("frame.spare")
_REMAP: Final = MACHINES.object("sequence.remap")
_SPILL: Final = MACHINES.object("range.spill")
_EMPTY_RANGE: Final = MACHINES.object("range.empty")
_EMPTY_SPAN: Final = MACHINES.object("span.empty")
_SPILL_SPAN: Final = MACHINES.object("span.spill")
_VACATE: Final = MACHINES.object("range.vacate")


class Takes(dict[Range, int]):
    """How many frames to take from the ends of ranges, until that is as many as wanted."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.wanted = wanted

    def above(self, range_: Range, end: int) -> int:
        """Frames behind so many that can still be taken."""
        taken = self.get(range_, 0)
        return max(0, min(range_.tail, range_.mapped - end) - taken)

    def down_to(self, range_: Range, end: int) -> None:
        """Take what is wanted and not among the first so many frames."""
        take = min(self.wanted, self.above(range_, end))
        if take:
            self[range_] = self.get(range_, 0) + take
            self.wanted -= take

    def level(self, used: Mapping[Range, int], most: int) -> int:
        """The largest margin that all can keep while there are as many frames as wanted."""

        def found(kept: int) -> int:
            return -sum(self.above(range_, end + kept) for range_, end in used.items())

        return max(0, bisect_right(range(most), -self.wanted, key=found) - 1)


class Ladder:
    """Finds frames and addresses for a call that is short of them."""

    def __init__(
        self, gpu: FrameBudget, arena: Arena, actor: Actor, flight: Flight, spans: Spans,
        reuse: Reuse, config: GpuTier,
    ) -> None:  # fmt: skip
        self.ahead_frames = config.map_ahead_frames
        """The margin that each running sequence may have, while frames are to spare."""
        self.least_frames = config.reclaim_frames
        """What one reclaim unmaps at the least."""
        self.gpu, self.arena, self.actor, self.flight = gpu, arena, actor, flight
        self.spans, self.reuse = spans, reuse

    def supply(self, short: OutOfFrames) -> bool:
        """Bring into the pool what the call needs besides its own parked frames; False, with
        nothing done, if that cannot succeed."""
        self.regain()
        for again in (False, True):  # if the device turns out to be full
            if not self._can_supply(short.needed):
                return again  # built again, the call says what there is now
            self._reclaim(short)
            wanted = missing(short.uses) + min(1, short.soon) - self.gpu.counts[POOLED.code]
            if self.create(min(wanted, self.gpu.counts[ABSENT.code])):
                return True
            if missing(short.uses) <= self.gpu.counts[POOLED.code]:
                return True  # for lack of a margin nothing is refused
        return True

    def _can_supply(self, needed: int) -> bool:
        gpu = self.gpu
        had = gpu.free + gpu.parked + gpu.coming + self.spans.spillable_frames
        return needed <= had or needed <= had + self._double_frames()

    def _reclaim(self, short: OutOfFrames) -> None:
        """Bring into the pool what can neither be created nor is there."""
        gpu, fresh = self.gpu, missing(short.uses)
        if fresh <= gpu.free:
            return
        self.flight.quiesce()
        self.remap(fresh - gpu.free)
        if fresh > gpu.free:
            wanted = max(fresh - gpu.free, self.least_frames)
            self.spill(wanted, short.uses, more=short.soon)
        self.spill_spans(fresh - gpu.free)

    def addresses(self) -> bool:
        """Turn every range that nobody uses into free addresses, those of spans too; False if there
        is none."""
        if all(range_.owner is not None for range_ in self.arena.ranges.values()):
            return False
        self.flight.quiesce()
        self.spill(self.gpu.budget_frames, tails=False)
        self.spill_spans(self.gpu.budget_frames, all_of_them=True)
        for range_ in self.arena.oldest_parked():
            if range_.home_of is None:
                self._unshare(range_)
        self.arena.trim_homes()
        return True

    def create(self, count: int) -> bool:
        """Allocate frames into the pool. False if the device was full: what it had is there, and
        the rest of the budget is DENIED until it is asked again."""
        asked = count
        while count > 0:
            try:
                self._create(count)
            except DeviceFull as full:
                count = min(self._note(full.had), count - 1)
            else:
                break
        if count == asked or asked <= 0:
            return True
        self._pass(_DENY, *self.gpu.absent(self.gpu.counts[ABSENT.code]), self.gpu.denied)
        self.flight.counters["device_full"] += 1
        return False

    def _create(self, count: int) -> None:
        plan = self.flight.plan()
        plan.fire(_CREATE, *self.gpu.absent(count), self.gpu.pool)
        self.actor.run(plan)
        plan.settle()

    def _note(self, room: int) -> int:
        """What the device says, which a replay has to say too."""
        gpu = self.gpu
        self.flight.memory_frames = min(gpu.existing + room, gpu.budget_frames)
        return room

    def regain(self) -> bool:
        """Count on the frames again that the device had no memory for and has now; whether there
        are any. It is asked only if there were some."""
        denied, count = self.gpu.denied, 0
        if denied.ids:
            room = self._note(self.actor.device.room(self.actor.frame_bytes))
            count = min(len(denied.ids), room - self.gpu.counts[ABSENT.code])
        if count > 0:
            self._pass(_RETRY, denied, 0, count, self.gpu.absent(0)[0])
        return count > 0

    def _pass(self, event: CellEvent, cells: Frames, low: int, high: int, into: Frames) -> None:
        """Frames that do not exist change their place: nothing for a device."""
        self.actor.life.change()
        plan = self.flight.plan()
        plan.fire(event, cells, low, high, into)
        plan.settle()

    def release(self, keep: int) -> None:
        """Give pooled frames back to the driver until only `keep` are left."""
        pool = self.gpu.pool
        plan = self.flight.plan()
        plan.fire(_RELEASE, pool, keep, len(pool.ids), self.gpu.absent(0)[0])
        self.actor.run(plan)
        plan.settle()

    def spill(
        self, wanted: int, uses: Mapping[Range, int] | None = None, *, tails: bool = True,
        more: int = 0,
    ) -> None:  # fmt: skip
        """Unmap up to that many parked frames into the pool, and so many more that are in nobody's
        margin. Only right after a quiesce.

        Spares the frames that `uses` says are used, up to which one in each range.
        """
        victims = self._victims(wanted, more, uses or {}, tails)
        if victims:
            self._unmap(victims)

    def _doubles(self) -> Iterator[tuple[Sequence, Sharing]]:
        """Sequences with copies of what a span has, the first admitted first; those that have no
        copies of anything are not asked again. O(1) if nobody can have any."""
        for seq in sorted(self.reuse.doubles, key=lambda seq: seq.uid):
            sharing = self.spans.duplicate(seq)
            if sharing is not None and seq.range is not None:
                if self.arena.leaves_room(seq.range, sharing.span):
                    yield seq, sharing
            elif seq.transfer is None and not seq.pages.states.count(PRIVATE.code):
                self.actor.life.change()
                self.reuse.doubles.discard(seq)

    def _double_frames(self) -> int:
        """Frames that hold copies of what a span has."""
        return sum(self.spans.frames_of_copies(*pair) for pair in self._doubles())

    def remap(self, wanted: int) -> None:
        """Map spans where sequences have copies of them, until that many frames are in the pool.
        Only right after a quiesce."""
        for seq, sharing in self._doubles():
            if wanted <= 0:
                return
            wanted -= self._remap(seq, sharing)

    def _remap(self, seq: Sequence, sharing: Sharing) -> int:
        range_ = seq.range
        assert range_ is not None
        count = self.spans.frames_of_copies(seq, sharing)
        scratch = self.arena.addresses.find(count)
        if scratch is None:
            return 0
        plan = self.flight.plan()
        plan.span, plan.scratch = sharing.span, scratch * self.arena.geometry.frame_bytes
        duplicates = ((range_.frames, 0, count, self.gpu.pool),)
        plan.operands = self.spans.remapping(sharing, seq) | {"duplicates": duplicates}
        plan.move(_REMAP, seq)
        self.actor.run(plan)
        plan.settle()
        self.spans.remapped(sharing, range_)
        self.flight.counters["remaps"] += count
        return count

    def spill_spans(self, wanted: int, *, all_of_them: bool = False) -> None:
        """Give up spans until that many frames are in the pool. Only right after a quiesce.

        Those that a sequence maps stay; so does the protected share, unless `all_of_them`.
        """
        for span in self.spans.spillable(all_of_them=all_of_them):
            if wanted <= 0:
                return
            wanted -= span.own_frames
            self._spill_span(span)

    def _spill_span(self, span: Span) -> None:
        """Unmap a span everywhere. The ranges that map it are parked, and go with it."""
        ranges = [*span.holders.values(), span.home]
        own = [(range_, 0, len(range_.frames.ids)) for range_ in ranges if range_.frames.ids]
        if own:
            self._unmap(own)
        if span.state == REGISTERED.code:
            self._empty(span)
        count = len(span.frames.ids)
        plan = self.flight.plan()
        plan.operands = {
            "shared": [(r.aliases, 0, len(r.aliases.states)) for r in ranges if r.span is not None],
            "passed": [(span.frames, 0, count, self.gpu.pool)],
            "parked_pages": [(r.pages, 0, len(r.pages.states)) for r in ranges],
        }
        plan.move(_SPILL_SPAN, span)
        self.actor.run(plan)
        for range_ in ranges:
            self.arena.unpark(range_)
        plan.settle()
        self.spans.spilled(span)
        for range_ in ranges:
            self.spans.unaliased(range_)
            self._vacate(range_)
        self.flight.counters["spilled_frames"] += count
        self.flight.counters["spilled_spans"] += 1

    def _empty(self, span: Span) -> None:
        """Give up the bytes of a span."""
        plan = self.flight.plan()
        plan.operands = self.reuse.orphans(span.nodes) | {
            "pinned": [(span.pages, 0, len(span.pages.states))],
            "wiped": [(span.frames, 0, len(span.frames.ids))],
        }
        plan.move(_EMPTY_SPAN, span)
        self.actor.run(plan)
        plan.settle()
        self.reuse.given_up(span)
        self.spans.emptied(span)

    def give_up(self, range_: Range) -> None:
        """Give up what a parked range retains: its memory is wanted, or must be forgotten."""
        plan = self.flight.plan()
        plan.operands = self.reuse.orphans(range_.nodes) | {
            "retained": runs_of(range_.pages, [node.ordinal for node in range_.nodes]),
            "wiped": [(range_.frames, 0, range_.kept_frames)],
        }
        plan.move(_EMPTY_RANGE, range_)
        self.actor.run(plan)
        plan.settle()
        self.arena.unpark(range_)
        range_.kept_frames = 0
        self.arena.park(range_)
        self.reuse.given_up(range_)

    def unalias(self, home: Range | None) -> None:
        """Unmap what parked ranges alias of a span that is at home there, spans behind it too."""
        span = None if home is None else home.home_of
        if span is None or not span.holders:
            return
        self.flight.quiesce()
        for range_ in reversed(ranges_behind(span)):
            if range_.home_of is not None:
                self._spill_span(range_.home_of)
                continue
            if range_.frames.ids:
                self._unmap([(range_, 0, len(range_.frames.ids))])
            self._unshare(range_)

    def _unshare(self, range_: Range) -> None:
        """Free the addresses of a parked range that has nothing but aliases."""
        plan = self.flight.plan()
        plan.operands = {
            "shared": [(range_.aliases, 0, len(range_.aliases.states))],
            "parked_pages": [(range_.pages, 0, len(range_.pages.states))],
        }
        plan.move(_SPILL, range_)
        self.actor.run(plan)
        self.arena.unpark(range_)
        plan.settle()
        self.spans.unaliased(range_)
        self._vacate(range_)

    def _unmap(self, victims: list[tuple[Range, int, int]]) -> None:
        """Unmap the last own frames of ranges: (range, first, end) of each."""
        for range_, low, _ in victims:
            if low < range_.kept_frames:
                self.give_up(range_)
        condemn = self.flight.plan()
        for range_, low, high in victims:
            condemn.fire(_CONDEMN, range_.frames, low, high)
        condemn.settle()
        plan = self.flight.plan()
        for range_, low, high in victims:
            plan.operands = {
                "tail": [(range_.frames, low, high, self.gpu.pool)],
                "parked_pages": self._pages_above(range_, low),
            }
            plan.move(_SPILL, range_)
        try:
            self.actor.run(plan)
        except DeviceError:
            spare = self.flight.plan()
            for range_, low, high in victims:
                spare.fire(_SPARE, range_.frames, low, high)
            spare.settle()
            raise
        plan.settle()
        frames = sum(high - low for _, low, high in victims)
        self.flight.counters["spilled_frames"] += frames
        log.debug("spilled %d frames from %d ranges", frames, len(victims))
        for range_, _, _ in victims:
            self._shortened(range_)

    def _victims(
        self, wanted: int, more: int, uses: Mapping[Range, int], tails: bool
    ) -> list[tuple[Range, int, int]]:
        """(range, first, end) of the frames to take: tails first as far as they are no margins,
        then the longest parked, then margins, of which all that lose some keep the same."""
        running = [r for r in self.arena.ranges.values() if r.state == RESERVED.code]
        used = {r: max(r.used, uses.get(r, 0)) for r in running if tails}
        takes = Takes(wanted + more)
        for range_, end in used.items():
            takes.down_to(range_, end + self.ahead_frames)
        for range_ in self.arena.oldest_parked():
            takes.down_to(range_, uses.get(range_, 0))
        takes.wanted = max(0, takes.wanted - more)
        kept = takes.level(used, self.ahead_frames) if takes.wanted else 0
        for range_, end in used.items():
            takes.down_to(range_, end + kept)
        return [(r, len(r.frames.ids) - count, len(r.frames.ids)) for r, count in takes.items()]

    def _pages_above(self, range_: Range, own: int) -> list[tuple[object, int, int]]:
        """The page records of a parked range that keep no memory with so few frames of its own."""
        keep = self.arena.geometry.blocks_in(range_.shared + own)
        return [(range_.pages, keep, len(range_.pages.states))]

    def _shortened(self, range_: Range) -> None:
        """Forget the records of pages without memory, and a parked range without frames."""
        if range_.owner is not None:
            range_.owner.set_ample()
        del range_.pages.states[self.arena.geometry.blocks_in(range_.mapped) :]
        if not range_.mapped and range_.state == PARKED.code:
            self.arena.unpark(range_)
            self._vacate(range_)

    def _vacate(self, range_: Range) -> None:
        """Nothing is mapped in a parked range any more: its addresses are free."""
        plan = self.flight.plan()
        plan.move(_VACATE, range_)
        plan.settle()
        self.arena.unreserve(range_)
