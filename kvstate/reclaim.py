"""Supply and reclaim: where frames come from when the pool has too few.

One ladder, climbed once a call and only when it can help: create within the budget; then one
quiesce, which lets everything behind a fence land, and unmap what is parked: first the unused
tails of running sequences, then parked ranges, the longest parked first: as many frames as are
missing (report B134), or a few more, because the quiesce is what is dear and parked memory holds
nothing that anybody reads.

Nothing is unmapped without the quiesce: on an H200 the driver unmaps under a running kernel
without waiting, and a kernel that reads *nearby* addresses may fault (report S03).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from kvstate.act import Actor
from kvstate.arena import Arena, Range
from kvstate.config import GpuTier
from kvstate.errors import DeviceError, OutOfFrames
from kvstate.flight import Flight
from kvstate.spec.compiled import MACHINES
from kvstate.spec.frame import ABSENT, POOLED
from kvstate.spec.range import PARKED, RESERVED
from kvstate.tiers import FrameBudget

log = logging.getLogger("kvstate")

_CREATE: Final = MACHINES.cell("frame.create")
_RELEASE: Final = MACHINES.cell("frame.release")
_CONDEMN: Final = MACHINES.cell("frame.condemn")
_SPARE: Final = MACHINES.cell("frame.spare")
_SPILL: Final = MACHINES.object("range.spill")
_VACATE: Final = MACHINES.object("range.vacate")


class Ladder:
    """Finds frames and addresses for a call that is short of them."""

    def __init__(
        self, gpu: FrameBudget, arena: Arena, actor: Actor, flight: Flight, config: GpuTier
    ) -> None:
        self.ahead_frames = config.map_ahead_frames
        """The margin that each growing range may get, while the budget has room."""
        self.least_frames = config.reclaim_frames
        """What one reclaim unmaps at the least."""
        self.gpu, self.arena, self.actor, self.flight = gpu, arena, actor, flight

    def supply(self, short: OutOfFrames) -> None:
        """Bring into the pool what the call needs besides its own parked frames.

        Raises `short` if that cannot succeed.
        """
        gpu = self.gpu
        if short.needed > gpu.free + gpu.reclaimable + gpu.coming:
            raise short
        fresh = short.needed - sum(range_.in_place(end) for range_, end in short.uses.items())
        if fresh > gpu.free:
            self.flight.quiesce()
            self.spill(max(fresh - gpu.free, self.least_frames), short.uses)
        wanted = fresh + self.ahead_frames * len(short.uses)
        self.create(min(wanted - gpu.counts[POOLED.code], gpu.counts[ABSENT.code]))

    def addresses(self, short: OutOfFrames) -> None:
        """Turn every parked range into free addresses. Raises `short` if there is none."""
        if not self.arena.parked and not self.gpu.coming:
            raise short
        self.flight.quiesce()
        self.spill(self.gpu.budget_frames, tails=False)

    def create(self, count: int) -> None:
        """Allocate frames into the pool."""
        if count > 0:
            plan = self.flight.plan()
            plan.fire(_CREATE, *self.gpu.absent(count), self.gpu.pool)
            self.actor.run(plan)
            plan.settle()

    def release(self, keep: int) -> None:
        """Give pooled frames back to the driver until only `keep` are left."""
        pool = self.gpu.pool
        plan = self.flight.plan()
        plan.fire(_RELEASE, pool, keep, len(pool.ids), self.gpu.absent(0)[0])
        self.actor.run(plan)
        plan.settle()

    def spill(
        self, wanted: int, uses: Mapping[Range, int] | None = None, tails: bool = True
    ) -> None:
        """Unmap up to that many parked frames into the pool. Only right after a quiesce.

        Spares the frames that `uses` says are used, up to which one in each range.
        """
        victims = self._victims(wanted, uses or {}, tails)
        if not victims:
            return
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
        for range_, low, _ in victims:
            self._shortened(range_, low)

    def _victims(
        self, wanted: int, uses: Mapping[Range, int], tails: bool
    ) -> list[tuple[Range, int, int]]:
        """(range, first, end) of the frames to take: tails first, then the longest parked."""
        running = [r for r in self.arena.ranges.values() if r.state == RESERVED.code]
        victims = []
        for range_ in (running if tails else []) + self.arena.oldest_parked():
            take = min(wanted, range_.tail, range_.mapped - uses.get(range_, 0))
            if take > 0:
                victims.append((range_, range_.mapped - take, range_.mapped))
                wanted -= take
        return victims

    def _pages_above(self, range_: Range, frames: int) -> list[tuple[object, int, int]]:
        """The page records of a parked range that keep no memory when it is that short."""
        keep = self.arena.geometry.blocks_in(frames)
        return [(range_.pages, keep, len(range_.pages.states))]

    def _shortened(self, range_: Range, frames: int) -> None:
        """Forget the records of pages without memory, and a parked range without frames."""
        del range_.pages.states[self.arena.geometry.blocks_in(frames) :]
        if not frames and range_.state == PARKED.code:
            plan = self.flight.plan()
            plan.move(_VACATE, range_)
            plan.settle()
            self.arena.unpark(range_)
            self.arena.unreserve(range_)
