"""Who has which page of a block besides the one that is canonical, and who comes next.

Everybody else with the same tokens stands in line for the block. When the canonical page goes, the
first in line has the next one; what nobody has any more is on the host or cut from the index. Here
is also how host slots are given up, since that may make somebody's page canonical.

The same tokens are not the same bytes: several may have computed them. So each page has an
*edition*, and a copy on the host is good only for the edition that it was made of.

Rejected: making the line the index's own. It would have to know sequences and their pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from typing import Final

from kvstate.act import Actor
from kvstate.arena import Range
from kvstate.blocks import Loss, Node, descendants
from kvstate.flight import Flight
from kvstate.index import Index
from kvstate.plan import Plan, Run
from kvstate.runs import runs_of
from kvstate.sequence import Sequence
from kvstate.spans import Span
from kvstate.spec.compiled import MACHINES
from kvstate.spec.page import (
    COMMITTED,
    HOST_HELD_PRIVATE,
    LOADING_PRIVATE,
    PRIVATE,
    RETAINED,
)
from kvstate.tiers import HostSlots

_EVICT_SLOT: Final = MACHINES.cell("host.evict")
_EVICT_PAGE: Final = MACHINES.cell("page.evict")
_PROMOTE: Final = MACHINES.cell("page.promote")
_YIELD: Final = MACHINES.cell("page.yield")
_RELEASE: Final = MACHINES.cell("page.release")
READY: Final = (PRIVATE.code,)
"""The page of an heir whose bytes can be read on the GPU."""
_HEIRS: Final = (*READY, HOST_HELD_PRIVATE.code, LOADING_PRIVATE.code)
"""Those of all heirs, the best first. A block of a suspended sequence is not found until that runs
again; and a copy that has not arrived may fail."""


class Lines:
    """The lines of one index, and the host slots that it gives up."""

    def __init__(self, index: Index, host: HostSlots, actor: Actor, flight: Flight) -> None:
        self.index, self.host, self.actor, self.flight = index, host, actor, flight
        self.doubles: set[Sequence] = set()
        """Sequences that may have copies of what a span has."""
        self.lines: dict[Node, dict[int, Sequence]] = {}
        """Who else has a page with the same tokens as a block, the first in line first."""
        self.counters: Counter[str] = flight.counters

    # Standing in line.

    def _line_up(self, node: Node, seq: Sequence) -> None:
        self.doubles.add(seq)
        self.lines.setdefault(node, {})[seq.uid] = seq

    def _step_out(self, node: Node, seq: Sequence) -> None:
        line = self.lines.get(node)
        if line is not None and line.pop(seq.uid, None) is not None and not line:
            del self.lines[node]

    def joined(self, seq: Sequence, nodes: list[Node]) -> None:
        """The sequence has pages of these blocks too."""
        for node in nodes:
            self._line_up(node, seq)

    def lined_up(self, nodes: Iterable[Node]) -> None:
        """A span has these blocks now: others may have copies of them."""
        for node in nodes:
            self.doubles.update(self.lines.get(node, {}).values())

    def _inherited(
        self, nodes: Iterable[Node], codes: tuple[int, ...] = _HEIRS
    ) -> tuple[list[tuple[Node, Sequence]], list[Node]]:
        """Those blocks that another sequence has too, and whose page of each is canonical then; and
        those that none has. In their order; they need not be a chain."""
        inherited: list[tuple[Node, Sequence]] = []
        lost: list[Node] = []
        for node in nodes:
            heir = self._heir(node, codes)
            if heir is None:
                lost.append(node)
            else:
                inherited.append((node, heir))
        return inherited, lost

    def _succession(
        self, nodes: Iterable[Node], kept: Container[Node] = ()
    ) -> tuple[list[tuple[Node, Sequence]], list[Node]]:
        """Who has the canonical pages of blocks that lose theirs, and which have none on the GPU
        then. A page that cannot be read there is better than none, and a copy on the host, that
        there is or that is being made for the `kept` ones, is better than that."""
        if not self.lines:
            return [], list(nodes)
        inherited, lost = self._inherited(nodes, READY)
        late, _ = self._inherited(n for n in lost if n.slot is None and n not in kept)
        gone = dict(late)
        return inherited + late, [node for node in lost if node not in gone]

    def _heir(self, node: Node, codes: tuple[int, ...]) -> Sequence | None:
        """The first in line for a block whose page is in the first of these states that any is in.
        O(line), unless the first in line is in the first of them."""
        line = self.lines.get(node, {}).values()
        for code in codes:
            for seq in line:
                if seq.pages.states[node.ordinal] == code:
                    return seq
        return None

    # Coming next.

    def _promote(self, found: list[tuple[Node, Sequence]]) -> None:
        """These sequences have the canonical pages of blocks that had none on the GPU."""
        self._fire_promote(found)
        for node, heir in found:
            self._step_out(node, heir)
            self.index.give_owner(node, heir)

    def _fire_promote(self, found: list[tuple[Node, Sequence]]) -> None:
        """These pages of sequences are canonical."""
        plan = self.flight.plan()
        for run in pages_of(found):
            plan.fire(_PROMOTE, *run)
        plan.settle()

    def _inherited_from(self, owner: object, inherited: list[tuple[Node, Sequence]]) -> None:
        """These blocks have the heirs' pages as canonical ones."""
        for node, heir in inherited:
            self._step_out(node, heir)
            self.index.lose_owner(node, owner, heir)
        stale = self._changed(inherited) + [pair for pair in inherited if pair[1].range is None]
        self._drop_copies(stale)

    def _changed(self, found: list[tuple[Node, Sequence]]) -> list[tuple[Node, Sequence]]:
        """Those whose new canonical page has bytes of somebody else than the old one."""
        changed = [pair for pair in found if pair[0].edition != pair[1].editions[pair[0].ordinal]]
        for node, heir in changed:
            node.edition = heir.editions[node.ordinal]
        return changed

    def _hand_on(self, seq: Sequence) -> None:
        """Of the canonical blocks of a suspended sequence, those that others have on the GPU are
        theirs, so that they can still be found."""
        found = list[tuple[Node, Sequence]]()
        for node in seq.nodes:
            heir = self._heir(node, READY) if node.owner is seq else None
            if heir is not None:
                found.append((node, heir))
        self._take_over(found)

    def _take_over(self, found: list[tuple[Node, Sequence]]) -> None:
        """These pages on the GPU are canonical, and no longer those of suspended sequences, which
        cannot be found."""
        of: dict[Sequence, list[tuple[Node, Sequence]]] = {}
        for pair in found:
            assert isinstance(pair[0].owner, Sequence)
            of.setdefault(pair[0].owner, []).append(pair)
        self._fire_promote(found)
        for owner, pairs in of.items():
            self._inherited_from(owner, pairs)
            self.give_way(owner, [node for node, _ in pairs])

    def give_way(self, seq: Sequence, nodes: list[Node]) -> None:
        """A suspended sequence has copies, and others have the canonical pages."""
        plan = self.flight.plan()
        for run in runs_of(seq.pages, [node.ordinal for node in nodes]):
            plan.fire(_YIELD, *run)
        plan.settle()
        self.joined(seq, nodes)

    # Giving up.

    def _bereave(self, lost: list[Node], owner: object, why: Loss) -> None:
        """Blocks have no owner any more: those stay that the host has, if all before them stay."""
        cut = self._cut_all([node for node in lost if node.slot is None], why)
        for node in reversed(lost):  # the last first, or others would be told as cut
            if node.findable:
                self.index.lose_owner(node, owner, why=why)
        self.free(cut)

    def _cut_all(self, nodes: list[Node], why: Loss) -> list[int]:
        """Take blocks and all below them out of the index; the slots of those below."""
        return [slot for node in nodes if node.findable for slot in self._cut(node, why)]

    def _cut(self, node: Node, why: Loss) -> list[int]:
        """Take a block and all below it out of the index; the slots that those below had.

        Copies go on that write some of them, or that bring them to whoever leaves now: what they
        bring is not wanted any more. Whoever else copies them stands in line for them.
        """
        below = [node]
        for one in below:
            below += one.children.values()
            for holder in tuple(one.holders):
                self.index.release(one, holder)
        self._release(below)
        gone = (
            self.index.lose_slot(node, why=why)
            if node.owner is None
            else self.index.lose_owner(node, node.owner, why=why)
        )
        return [cut.slot for cut in gone if cut.slot is not None]

    def _release(self, nodes: list[Node]) -> None:
        """Parked memory retains no block that cannot be found."""
        plan, gone = self.flight.plan(), dict[Range, set[Node]]()
        for node in nodes:
            range_, at = node.owner, node.ordinal
            if isinstance(range_, Range) and range_.pages.states[at] == RETAINED.code:
                plan.fire(_RELEASE, range_.pages, at, at + 1)
                gone.setdefault(range_, set()).add(node)
        plan.settle()
        for range_, cut in gone.items():
            range_.nodes = [node for node in range_.nodes if node not in cut]

    def _drop_copies(self, found: list[tuple[Node, Sequence]]) -> None:
        """Other pages are canonical than those that the host has copies of, or pages that are on
        the host themselves."""
        slots = []
        for node, _ in found:
            if node.slot is not None:
                slots.append(node.slot)
                self.index.lose_slot(node, why=Loss.REPLACED)
        self.free(slots)

    def make_room(self, slots: int, spare: Iterable[Node] = ()) -> bool:
        """Evict pages that are nobody's, or on the GPU too, until that many slots are free, or none
        can go; whether that was enough.

        The least recently used first, and never one that something is kept behind; none of `spare`
        nor what comes before them.
        """
        self.actor.life.change()
        spare = dict.fromkeys(spare)
        for node in spare:
            self.index.hold(node, ("room", 0))
        self._make_room(slots)
        for node in spare:
            self.index.release(node, ("room", 0))
        return slots <= self.host.free

    def _make_room(self, slots: int) -> None:
        while slots > self.host.free:
            short = slots - self.host.free
            victims = self.index.victims(short) or self._outlived(short)
            if not victims and not self._uncover():
                return
            self._inherit([node for node in victims if node.owner is None and node in self.lines])
            self.free([node.slot for node in victims if node.slot is not None])
            for node in victims:
                self.index.lose_slot(node, why=Loss.EVICTED)

    def _outlived(self, most: int) -> list[Node]:
        """Pages that are nobody's and that somebody has too, who gets the canonical one; the least
        recently used. Cost: O(blocks that several have)."""
        nodes = [n for n in self.lines if n.slot is not None and n.owner is None and not n.pins]
        return sorted(nodes, key=lambda node: (node.used, node.serial))[:most]

    def _uncover(self) -> bool:
        """Give up what parked memory retains behind a page that is nobody's, the least recently
        used: it cannot be found without that. Whether there was any. Cost: O(index)."""
        covered = [node for node in self.index.slots.values() if _only_retained_behind(node)]
        if not covered:
            return False
        node = min(covered, key=lambda node: (node.used, -node.ordinal))
        self.free(self._cut_all(list(node.children.values()), Loss.EVICTED))
        return True

    def _inherit(self, nodes: list[Node]) -> None:
        """Blocks lose their host copies, and somebody has pages of them: theirs are canonical."""
        inherited, _ = self._inherited(nodes)
        if inherited:
            self._promote(inherited)
            self._changed(inherited)

    def free(self, slots: list[int]) -> None:
        """Free slots of pages that cannot be found any more; those that a copy names, later."""
        if slots:
            plan = self.flight.plan()
            self._evict(plan, slots)
            self.actor.run(plan)
            plan.settle()
            self.counters["evicted_blocks"] += len(slots)

    def _evict(self, plan: Plan, slots: list[int]) -> None:
        for cells, low, high in runs_of(self.host.cells, slots):
            plan.fire(_EVICT_SLOT, cells, low, high)
        records = [slot for slot in slots if self.host.pages.states[slot]]
        for cells, low, high in runs_of(self.host.pages, records):
            plan.fire(_EVICT_PAGE, cells, low, high)


def _only_retained_behind(node: Node) -> bool:
    """The host has the block for nobody, and all behind it is retained by parked ranges."""
    if node.owner is not None or node.pins or node.host_children or not node.children:
        return False
    return all(isinstance(one.owner, Range) for one in descendants(node.children))


def source_of(node: Node) -> Range | None:
    """The range in which somebody has the canonical page on the GPU, and it can be read."""
    owner = node.owner
    if isinstance(owner, Range):
        return owner
    if isinstance(owner, Span):
        return owner.home
    if not isinstance(owner, Sequence) or owner.range is None:
        return None
    readable = owner.pages.states[node.ordinal] == COMMITTED.code
    return owner.range if readable else None


def pages_of(inherited: Iterable[tuple[Node, Sequence]]) -> Iterator[Run]:
    """The heirs' pages."""
    for node, heir in inherited:
        yield heir.pages, node.ordinal, node.ordinal + 1
