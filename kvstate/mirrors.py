"""Mirrors: copies on the host of pages that stay on the GPU.

With `write_through="on_commit"` what was committed is copied out soon after, all of it in one go,
so that leaving copies nothing. What could not be copied waits (see `kvstate.uncopied`); a block is
copied only behind one that the host has, since else nothing could be found there.
"""

from __future__ import annotations

import logging
from operator import itemgetter
from typing import Final

from kvstate.arena import Range
from kvstate.blocks import Node
from kvstate.errors import DeviceError
from kvstate.lines import source_of
from kvstate.reuse import Reuse
from kvstate.runs import joined, slots_of
from kvstate.sequence import Transfer
from kvstate.spec.compiled import MACHINES
from kvstate.uncopied import Uncopied

log = logging.getLogger("kvstate")

_MIRROR: Final = MACHINES.cell("host.mirror")

MOST_PUSHED_OUT: Final = 64
"""Copies that one pass pushes out at the most."""
Page = tuple[int, Node, Range]
"""Where a block can be read."""


class Mirrors:
    """The copies of one manager that go out before they have to."""

    def __init__(self, reuse: Reuse) -> None:
        self.reuse, self.host, self.flight = reuse, reuse.host, reuse.flight
        self._tried: tuple[int, ...] = ()
        """The state in which the last pass did all that could be done."""

    def copy_out(self) -> None:
        """Issue one copy of blocks that wait, if there are free slots or some can be had for them.

        Cost: O(log n) a block that is looked at. Nothing is looked at again unless the host tier
        or what may push out others has changed.
        """
        waiting = self.reuse.index.uncopied
        if not waiting or self._state(waiting) == self._tried:
            return
        self.reuse.actor.life.change()
        ready, later, unread = self._next(waiting)
        pushed_out = self._make_room(ready)
        pages = self._pages(ready)
        done = self._issue(pages)
        copied = {node for _, node, _ in pages} if done else set[Node]()
        waiting.fresh.difference_update(copied, unread)
        waiting.pushed_out(pushed_out)
        for node in later + [node for node in ready if node not in copied]:
            waiting.put_back(node)
        self._tried = self._state(waiting) if done else ()

    def _state(self, waiting: Uncopied) -> tuple[int, ...]:
        """What decides whether a pass can do anything: copies that failed are tried again."""
        return waiting.added, waiting.rights, *self.host.counts

    def _next(self, waiting: Uncopied) -> tuple[list[Node], list[Node], list[Node]]:
        """The blocks that may be copied now, in their order; those before which the host has
        nothing; and those that cannot be read, which wait again once their bytes are there."""
        most = self.host.free + min(waiting.rights, MOST_PUSHED_OUT)
        ready, later, unread, chosen = list[Node](), list[Node](), list[Node](), set[Node]()
        while len(ready) < most and (node := waiting.pop()) is not None:
            above = node.parent
            if source_of(node) is None:
                unread.append(node)
            elif above is None or above.slot is not None or above in chosen:
                chosen.add(node)
                ready.append(node)
            else:
                later.append(node)
        return ready, later, unread

    def _make_room(self, nodes: list[Node]) -> int:
        """Push out what was used least, but nothing that these blocks come behind; how many."""
        free, before = self.host.free, [node.parent for node in nodes if node.parent is not None]
        self.reuse.make_room(len(nodes), [node for node in before if node.slot is not None])
        return self.host.free - free

    def _pages(self, nodes: list[Node]) -> list[Page]:
        """Where these blocks can be read, as many as there are free slots; by address."""
        size, pages = self.host.block_bytes, list[Page]()
        for node in nodes:
            range_ = source_of(node)
            if range_ is not None and len(pages) < self.host.free:
                pages.append((range_.base + node.ordinal * size, node, range_))
        return sorted(pages, key=itemgetter(0))  # neighbours go in one piece

    def _issue(self, pages: list[Page]) -> bool:
        """Copy blocks out; false if the device could not."""
        if not pages:
            return True
        plan, nodes = self.flight.plan(), [node for _, node, _ in pages]
        plan.room = self.host.room(len(pages)) or []
        slots, size = list(slots_of(plan.room)), self.host.block_bytes
        places = [self.host.address + slot * size for slot in slots]
        plan.pieces = joined([address for address, _, _ in pages], places, size)
        for run in plan.room:
            plan.fire(_MIRROR, *run)
        try:
            self.reuse.actor.run(plan)
        except DeviceError as error:
            self.flight.counters["failed_copies"] += 1
            log.warning("%d blocks could not be copied out: %s", len(nodes), error)
            return False
        assert plan.token is not None
        ranges = list(dict.fromkeys(range_ for _, _, range_ in pages))
        transfer = Transfer(plan.token, None, ranges[0], plan.room, nodes, keeps=True)
        transfer.sources = ranges[1:]
        self.flight.issue(transfer, len(nodes) * size)
        plan.settle()
        self.reuse.keep(nodes, slots, plan.token)
        return True
