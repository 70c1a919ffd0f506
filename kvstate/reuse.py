"""What sequences share: which pages the index names, and who comes next if one of them goes.

A page is *canonical* if the index names it: a committed page of a running or suspended sequence,
or a copy on the host that outlived its owner. Others with the same tokens keep pages of their own
(PRIVATE) and stand in line: when the canonical page goes, the first of them has the next one, so
nothing that somebody still has is ever lost to the index. A sequence has every page of its prefix,
so whatever stands below a page in the index stands in line for it too; only pages on the host can
be left hanging, and go with the page before them.

This file works out what a call means for the index; the rows say what happens to the pages. The
index is changed after everything else of a call has succeeded.

Rejected: naming the sequences' ids in the index and asking each who has what. That made leaving
O(sequences).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from attrs import frozen

from kvstate.act import Actor
from kvstate.arena import Range
from kvstate.flight import Flight
from kvstate.index import Holder, Index, Node
from kvstate.keys import Identity
from kvstate.plan import Cells, Plan, Run
from kvstate.runs import Operands
from kvstate.sequence import Sequence, Transfer
from kvstate.spans import Passage, Span
from kvstate.spec.compiled import MACHINES
from kvstate.spec.host import STALE, STALE_HELD
from kvstate.spec.page import COMMITTED, LOADING_STALE
from kvstate.tiers import HostSlots

_EVICT_SLOT: Final = MACHINES.cell("host.evict")
_PROMOTE: Final = MACHINES.cell("page.promote")
_EVICT_PAGE: Final = MACHINES.cell("page.evict")
_SERVED: Final = frozenset((STALE.code, STALE_HELD.code))


class Naming(NamedTuple):
    """What a commit means for the index: which of the sequence's blocks it gets to name."""

    alive: int
    """Blocks of the sequence before these that the index still has."""
    found: list[Node]
    """Blocks after them that it has already: somebody was first."""
    keys: list[bytes]
    """The rest, which it gets now."""
    operands: Operands


@frozen
class Leaving:
    """What it means for the index that a sequence has some of its blocks no more."""

    seq: Sequence
    low: int
    """From this block on."""
    inherited: list[tuple[Node, Sequence]]
    """Blocks of which somebody else has the canonical page now."""
    lost: list[Node]
    """Canonical pages of blocks that nobody else has, the first of them first. Between them may be
    blocks that are on the host already."""
    operands: Operands


class Reuse:
    """The index of one manager, and the pages on the host that it keeps."""

    def __init__(
        self, index: Index, host: HostSlots, actor: Actor, flight: Flight, *, enabled: bool
    ) -> None:
        self.index, self.host, self.actor, self.flight = index, host, actor, flight
        self.enabled = self.keeping = enabled
        """Whether there is an index, and whether what a closing sequence leaves is kept."""
        self.lines: dict[Node, dict[int, Sequence]] = {}
        """Who else has a page with the same tokens as a block, the first in line first."""
        self.counters: Counter[str] = flight.counters
        flight.reuse = self

    # Looking up.

    def hits(self, identity: Identity, prompt: bytes, most_blocks: int) -> list[Node]:
        """The blocks that a newcomer with this prompt could have, from the host or from whoever
        has them on the GPU. Changes nothing."""
        found: list[Node] = []
        for node in self.index.match(identity, prompt, most_blocks=most_blocks):
            if not self._on_host(node) and source_of(node) is None:
                break
            found.append(node)
        return found

    def _on_host(self, node: Node) -> bool:
        return node.slot is not None and self.host.cells.states[node.slot] in _SERVED

    # Committing.

    def naming(self, seq: Sequence, keys: list[bytes]) -> Naming:
        """What it means that these blocks are now full and known."""
        nodes, first = seq.nodes, len(seq.keys)
        if not self.enabled:
            return Naming(0, [], [], {"filled": ((seq.pages, first, first + len(keys)),)})
        alive = first
        while alive and not nodes[alive - 1].findable:
            alive -= 1
        wanted = [*seq.keys[alive:], *keys]
        found = self._below(seq.identity, nodes[alive - 1] if alive else None, wanted)
        known, end = alive + len(found), first + len(keys)
        operands: Operands = {"filled": ((seq.pages, max(known, first), end),)}
        if known != first:
            operands["yielded"] = ((seq.pages, first, min(known, end)),)
            operands["heirs"] = ((seq.pages, known, first),)
        return Naming(alive, found, wanted[len(found) :], operands)

    def _below(self, identity: Identity, node: Node | None, keys: list[bytes]) -> list[Node]:
        """The chain of blocks with these keys, as far as the index has it."""
        found: list[Node] = []
        for key in keys:
            at = self.index.match(identity, key) if node is None else [node.children.get(key)]
            node = at[0] if at else None
            if node is None:
                break
            found.append(node)
        return found

    def named(self, seq: Sequence, naming: Naming) -> None:
        """The commit has happened: the index follows."""
        if not self.enabled:
            return
        nodes = seq.nodes
        del nodes[naming.alive :]
        for node in naming.found:
            self._line_up(node, seq)
        nodes += naming.found
        if naming.keys:
            nodes += self.index.extend(nodes[-1] if nodes else seq.identity, naming.keys, seq)

    # Leaving.

    def leaving(self, seq: Sequence, low: int = 0, passage: Passage | None = None) -> Leaving:
        """What it means that the sequence has its blocks from `low` on no more; those of a span
        that it leaves to others are not lost."""
        own = [node for node in seq.nodes[low:] if node.owner is seq]
        if passage is not None:
            own = own[len(passage.span.nodes) + len(passage.nodes) :]
        inherited = self._inherited(own)
        lost = own[len(inherited) :]
        return Leaving(seq, low, inherited, lost, {"heirs": list(_pages(inherited))})

    def _inherited(self, nodes: Iterable[Node]) -> list[tuple[Node, Sequence]]:
        """Those blocks that somebody else has too, and who is the first in line for each."""
        lines = ((node, self.lines.get(node)) for node in nodes)
        return [(node, next(iter(line.values()))) for node, line in lines if line]

    def _line_up(self, node: Node, seq: Sequence) -> None:
        self.lines.setdefault(node, {})[seq.uid] = seq

    def _step_out(self, node: Node, seq: Sequence) -> None:
        line = self.lines.get(node)
        if line is not None and line.pop(seq.uid, None) is not None and not line:
            del self.lines[node]

    def left(self, leaving: Leaving, kept: int = 0) -> None:
        """The sequence has left: the index follows, and host slots that nobody can find are freed.

        The first `kept` of the lost blocks have a host slot by now.
        """
        seq = leaving.seq
        for node in seq.nodes[leaving.low :]:
            self._step_out(node, seq)
        for node, heir in leaving.inherited:
            self._step_out(node, heir)
            self.index.lose_owner(node, seq, heir)
        for node in leaving.lost[:kept]:
            self.index.lose_owner(node, seq)
        del seq.nodes[leaving.low :]
        if kept < len(leaving.lost):
            self.free(self._cut(leaving.lost[kept]))

    def passed(self, seq: Sequence, span: Span) -> None:
        """A span that the sequence has left has the canonical pages now."""
        for node in span.nodes:
            self.index.lose_owner(node, seq, span)

    def joined(self, seq: Sequence, nodes: list[Node]) -> None:
        """The sequence has pages of these blocks too."""
        for node in nodes:
            self._line_up(node, seq)

    def spilled(self, span: Span) -> None:
        """A span has been given up: who else has its pages has the canonical ones now."""
        inherited = self._inherited(span.nodes)
        plan = self.flight.plan()
        for run in _pages(inherited):
            plan.fire(_PROMOTE, *run)
        plan.settle()
        for node, heir in inherited:
            self._step_out(node, heir)
            self.index.lose_owner(node, span, heir)
        if len(inherited) < len(span.nodes):
            self.free(self._cut(span.nodes[len(inherited)]))

    # Pages on the host that are nobody's.

    def keep(self, nodes: list[Node], slots: Iterable[int], token: int | None) -> None:
        """Lost pages have host slots: at once, or when the copy of that number is done."""
        for node, slot in zip(nodes, slots, strict=True):
            self.index.give_slot(node, slot)
            if token is not None:
                self.index.hold(node, ("write", token))
        self.index.touch(nodes[-1:])
        self.counters["kept_blocks"] += len(nodes)

    def onboard(self, transfer: Transfer) -> None:
        """A copy of hits was issued: they stay until it has ended."""
        for slot in slots_of(transfer.slots):
            self.host.readers.setdefault(slot, set()).add(transfer.token)
        self.index.hold(transfer.nodes[-1], ("load", transfer.token))
        self.index.touch(transfer.nodes)
        for node in transfer.nodes:
            self._line_up(node, transfer.seq)
            self.counters[f"hit_blocks.{_place(node)}"] += 1

    def ending(self, transfer: Transfer, ok: bool) -> Operands:
        """What the end of such a copy means."""
        if transfer.onboards:
            readers, token = self.host.readers, transfer.token
            last = [slot for slot in slots_of(transfer.slots) if readers[slot] == {token}]
            return {"released": runs_of(self.host.cells, last)}
        pages = self.host.pages
        slots = [s for s in slots_of(transfer.slots) if pages.states[s] == LOADING_STALE.code]
        found: Operands = {"stale": runs_of(pages, slots)}
        return found if ok else found | {"heirs": list(_pages(self._failed(transfer)[0]))}

    def ended(self, transfer: Transfer, ok: bool) -> None:
        """The copy has ended and everything else is settled: the index follows."""
        if transfer.onboards:
            self._onboarded(transfer)
            return
        inherited, lost = ([], []) if ok else self._failed(transfer)
        for node in transfer.nodes:
            self._let_go(node, ("write", transfer.token))
        for node, heir in inherited:
            self._step_out(node, heir)
            self.index.give_owner(node, heir)
            self.index.lose_slot(node)
        if lost:
            freed = set(slots_of(transfer.slots))
            self.free([slot for slot in self._cut(lost[0]) if slot not in freed])

    def _failed(self, transfer: Transfer) -> tuple[list[tuple[Node, Sequence]], list[Node]]:
        """Of pages that were to be kept: what others have, and what nobody has."""
        nodes = [node for node in transfer.nodes if node.findable]
        inherited = self._inherited(nodes)
        return inherited, nodes[len(inherited) :]

    def _onboarded(self, transfer: Transfer) -> None:
        readers = self.host.readers
        for slot in slots_of(transfer.slots):
            readers[slot].discard(transfer.token)
            if not readers[slot]:
                del readers[slot]
        self._let_go(transfer.nodes[-1], ("load", transfer.token))

    def _let_go(self, node: Node, holder: Holder) -> None:
        """End a hold, if the block was not cut meanwhile."""
        if holder in node.holders:
            self.index.release(node, holder)

    def make_room(self, slots: int) -> None:
        """Evict pages that are nobody's until that many slots are free, or none can go.

        The least recently used first, and never one that something is kept behind.
        """
        while slots > self.host.free:
            short = slots - self.host.free
            victims = self.index.victims(short) or self._outlived(short)
            if not victims:
                return
            self.free([node.slot for node in victims if node.slot is not None])
            for node in victims:
                self.index.lose_slot(node)

    def _outlived(self, most: int) -> list[Node]:
        """Pages that are nobody's and that somebody has too, who gets the canonical one; the least
        recently used. Cost: O(blocks that several have)."""
        nodes = [n for n in self.lines if n.slot is not None and n.owner is None and not n.pins]
        nodes = sorted(nodes, key=lambda node: (node.used, node.serial))[:most]
        inherited = self._inherited(nodes)
        plan = self.flight.plan()
        for run in _pages(inherited):
            plan.fire(_PROMOTE, *run)
        plan.settle()
        for node, heir in inherited:
            self._step_out(node, heir)
            self.index.give_owner(node, heir)
        return nodes

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
            plan.fire(_EVICT_PAGE, self.host.pages, low, high)

    def _cut(self, node: Node) -> list[int]:
        """Take a block and all below it out of the index; the slots that those below had.

        Copies go on that write some of them, or that bring them to whoever leaves now: what they
        bring is not wanted any more. Whoever else copies them stands in line for them.
        """
        below = [node]
        for one in below:
            below += one.children.values()
            for holder in tuple(one.holders):
                self.index.release(one, holder)
        gone = (
            self.index.lose_slot(node)
            if node.owner is None
            else self.index.lose_owner(node, node.owner)
        )
        return [cut.slot for cut in gone if cut.slot is not None]


def _place(node: Node) -> str:
    """Where a hit comes from, if it is copied."""
    return "host" if node.owner is None else "span" if isinstance(node.owner, Span) else "live"


def source_of(node: Node) -> Range | None:
    """The range in which somebody has the canonical page on the GPU, and it can be read."""
    owner = node.owner
    if isinstance(owner, Span):
        return owner.home
    if not isinstance(owner, Sequence) or owner.range is None:
        return None
    readable = owner.pages.states[node.ordinal] == COMMITTED.code
    return owner.range if readable else None


def slots_of(runs: Iterable[Run]) -> Iterator[int]:
    """Each slot of the runs."""
    for _, low, high in runs:
        yield from range(low, high)


def runs_of(cells: Cells, ordinals: Iterable[int]) -> list[Run]:
    """Runs of ordinals that follow each other, in the order given."""
    found: list[Run] = []
    for at in ordinals:
        if found and found[-1][2] == at:
            found[-1] = (cells, found[-1][1], at + 1)
        else:
            found.append((cells, at, at + 1))
    return found


def _pages(inherited: Iterable[tuple[Node, Sequence]]) -> Iterator[Run]:
    """The heirs' pages."""
    for node, heir in inherited:
        yield heir.pages, node.ordinal, node.ordinal + 1
