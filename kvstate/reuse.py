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

import logging
from collections.abc import Iterable
from typing import Final, NamedTuple

from attrs import field, frozen

from kvstate.act import Actor
from kvstate.arena import Range
from kvstate.blocks import Holder, Loss, Node
from kvstate.flight import Flight
from kvstate.index import Index
from kvstate.keys import Extra, Extras, Identity
from kvstate.lines import READY, Lines, pages_of, source_of
from kvstate.runs import Operands, runs_of, slots_of
from kvstate.sequence import Sequence, Transfer
from kvstate.spans import Passage, Span
from kvstate.spec.compiled import MACHINES
from kvstate.spec.host import FILLING, MIRROR, MIRRORING, STALE, STALE_HELD
from kvstate.spec.page import COMMITTED, LOADING_STALE, PRIVATE
from kvstate.tiers import HostSlots
from kvstate.uncopied import Uncopied

log = logging.getLogger("kvstate")

_REGAIN_SLOT: Final = MACHINES.cell("host.regain")
_REGAIN_PAGE: Final = MACHINES.cell("page.regain")
_MIRROR: Final = MACHINES.cell("host.mirror")
_COMMITTED: Final = COMMITTED.code
_SERVED: Final = frozenset((STALE.code, STALE_HELD.code))
_UNREAD: Final = frozenset((STALE.code, FILLING.code))
_MIRRORS: Final = frozenset((MIRROR.code, MIRRORING.code))


class Naming(NamedTuple):
    """What a commit means for the index: which of the sequence's blocks it gets to name."""

    found: list[Node]
    """Those that it has already: somebody was first."""
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
    """Canonical pages of blocks that nobody else has on the GPU, the first of them first. Some may
    have a copy on the host already."""
    retained: list[Node]
    """Those of them that can still be read in the range that it leaves."""
    kept: list[Node]
    """Blocks that get a host slot: of those that stay on the GPU, and then of the lost ones."""
    stay: int
    """How many of them stay."""
    operands: Operands


@frozen
class Ending:
    """What the end of a copy of canonical pages means for the index."""

    operands: Operands
    inherited: list[tuple[Node, Sequence]] = field(factory=list)
    """Blocks that were to be kept and were not, of which somebody else has a page."""
    lost: list[Node] = field(factory=list)
    """Those of which nobody has one."""


class Reuse(Lines):
    """The index of one manager, and the pages on the host that it keeps."""

    def __init__(
        self, index: Index, host: HostSlots, actor: Actor, flight: Flight, mode: str
    ) -> None:
        super().__init__(index, host, actor, flight)
        self.enabled = self.keeping = mode != "off"
        """Whether there is an index, and whether what a closing sequence leaves is kept."""
        if mode == "on_commit":
            index.uncopied = Uncopied()
        self._editions = 0
        """How many pages were written so far that were committed."""
        self._seen: list[tuple[Node, Sequence]] = []
        """Blocks that only the host had when a sequence committed them, not yet promoted."""
        flight.reuse = self

    @property
    def epoch(self) -> int:
        """Of the weights: newcomers find only what is of the same."""
        return self.index.epoch

    # Looking up.

    def hits(
        self, identity: Identity, prompt: bytes, extras: Extras, most_blocks: int
    ) -> list[Node]:
        """The blocks that a newcomer with this prompt could have, from the host or from whoever
        has them on the GPU. Changes nothing."""
        found = self.index.match(identity, prompt, extras, most_blocks)
        owner: object = None
        states: bytes | bytearray = b""
        for at, node in enumerate(found):
            if node.owner is not owner:  # long runs of one owner are the rule
                owner, states = node.owner, _readable(node.owner)
            if (not states or states[at] != _COMMITTED) and not self.reachable(node):
                return found[:at]
        return found

    def reachable(self, node: Node) -> bool:
        """Somebody has the block's bytes where they can be copied from."""
        return self._on_host(node) or source_of(node) is not None

    def partial(
        self, identity: Identity, nodes: list[Node], rest: bytes, extra: Extra | None
    ) -> tuple[Node, int] | None:
        """The block behind these that shares the most leading tokens with `rest`, and how many."""
        found = self.index.partial(nodes[-1] if nodes else identity, rest, extra)
        return found if found is not None and self.reachable(found[0]) else None

    def current(self, identity: Identity) -> Identity:
        """The identity of a sequence that has no bytes: they will be of the present weights."""
        if identity.weights_epoch == self.epoch:
            return identity
        return Identity(identity.salt, identity.adapter, self.epoch)

    def _on_host(self, node: Node) -> bool:
        return node.slot is not None and self.host.cells.states[node.slot] in _SERVED

    # Committing.

    def naming(self, seq: Sequence, keys: list[bytes]) -> Naming:
        """What it means that these blocks are now full and known."""
        nodes, first = seq.nodes, len(seq.keys)
        if not self.enabled:
            return Naming([], [], {"filled": ((seq.pages, first, first + len(keys)),)})
        found = self._below(seq.identity, nodes[-1] if nodes else None, keys)
        known = first + len(found)
        operands: Operands = {"filled": ((seq.pages, known, first + len(keys)),)}
        if found:
            operands["yielded"] = ((seq.pages, first, known),)
        return Naming(found, keys[len(found) :], operands)

    def _below(self, identity: Identity, node: Node | None, keys: list[bytes]) -> list[Node]:
        """The chain of blocks with these keys, as far as the index has it."""
        found: list[Node] = []
        for key in keys:
            node = self.index.child(identity if node is None else node, key)
            if node is None:
                break
            found.append(node)
        return found

    def named(self, seq: Sequence, naming: Naming) -> None:
        """The commit has happened: the index follows."""
        if not self.enabled:
            return
        nodes, known = seq.nodes, self._editions
        self._editions += len(seq.keys) - len(seq.editions)
        seq.editions += range(known + 1, self._editions + 1)
        for node in naming.found:
            self._line_up(node, seq)
            if node.owner is None or _is_away(node.owner):
                self._seen.append((node, seq))
        nodes += naming.found
        if naming.keys:
            fresh = self.index.append(nodes[-1] if nodes else seq.identity, naming.keys, seq)
            nodes += fresh
            for node in fresh:
                node.edition = seq.editions[node.ordinal]

    # Leaving.

    def leaving(
        self, seq: Sequence, low: int = 0, passage: Passage | None = None, *,
        retains: bool = False, room: int = 0,
    ) -> Leaving:  # fmt: skip
        """What it means that the sequence has its blocks from `low` on no more; those of a span
        that it leaves to others are not lost, nor is anything if its range `retains` it.

        Up to `room` blocks get a host slot. Those that get none are an heir's even if its page
        cannot be read on the GPU: it is suspended, or its copy has not arrived and may fail.
        """
        first = low if passage is None else max(low, passage.end)
        own = [node for node in seq.nodes[first:] if node.owner is seq]
        bare = self._inherited(own, READY)[1]
        retained, left = (bare, []) if retains else ([], bare)
        stay = retained if passage is None else passage.span.nodes + passage.nodes + retained
        kept = [node for node in stay + left if node.slot is None][:room]
        inherited, lost = self._succession(own, {*kept, *retained})
        lost = [] if retains else lost
        operands = self._orphans(lost) | {"heirs": list(pages_of(inherited))}
        staying = min(len(kept), sum(node.slot is None for node in stay))
        return Leaving(seq, low, inherited, lost, retained, kept, staying, operands)

    def orphans(self, nodes: list[Node]) -> Operands:
        """What it means that a span does not have these blocks any more."""
        return self._orphans(self._succession(nodes)[1])

    def _orphans(self, lost: list[Node]) -> Operands:
        slots = [node.slot for node in lost if node.slot is not None]
        if not slots:
            return {}
        states, pages = self.host.cells.states, self.host.pages
        return {
            "orphaned": runs_of(self.host.cells, slots),
            "outlived": runs_of(pages, [s for s in slots if states[s] == MIRROR.code]),
            "awaited": runs_of(pages, [s for s in slots if states[s] == MIRRORING.code]),
        }

    def left(self, leaving: Leaving, why: Loss) -> None:
        """The sequence has left: the index follows, and host slots that nobody can find are freed.

        Lost blocks stay as far as each of them has a host slot by now.
        """
        seq = leaving.seq
        for node in seq.nodes[leaving.low :]:
            self._step_out(node, seq)
        self._inherited_from(seq, leaving.inherited)
        del seq.nodes[leaving.low :]
        if not leaving.low:
            self.doubles.discard(seq)
        self._bereave(leaving.lost, seq, why)

    def passed(self, seq: Sequence, span: Span) -> None:
        """A span that the sequence has left has the canonical pages now."""
        for node in span.nodes:
            self.index.lose_owner(node, seq, span)

    def retained(self, leaving: Leaving, range_: Range) -> None:
        """The range that the sequence has left has the canonical pages now."""
        range_.nodes = leaving.retained
        for node in range_.nodes:
            self.index.lose_owner(node, leaving.seq, range_)

    def given_up(self, owner: Span | Range) -> None:
        """What a span or a parked range had is given up: who else has its pages has the canonical
        ones now."""
        nodes, owner.nodes = owner.nodes, []
        inherited, lost = self._succession(nodes)
        self._fire_promote(inherited)
        self._inherited_from(owner, inherited)
        self._bereave(lost, owner, Loss.SPILLED)

    # Pages on the host that are nobody's.

    def keep(self, nodes: list[Node], slots: Iterable[int], token: int | None) -> None:
        """Pages have host slots: at once, or when the copy of that number is done."""
        for node, slot in zip(nodes, slots, strict=True):
            self.index.give_slot(node, slot, landed=token is None)
            if token is not None:
                self.index.hold(node, ("write", token))
        self.index.touch(nodes[-1:])
        self.counters["kept_blocks"] += len(nodes)

    def bequeath(self, seq: Sequence, nodes: list[Node], slots: list[int]) -> None:
        """Host slots of a sequence that leaves are those of blocks now. A copy that fills some of
        them, or reads them, goes on for whichever sequence wants them next."""
        copy, pairs = seq.transfer, list(zip(nodes, slots, strict=True))
        named = set[int]() if copy is None else set(slots_of(copy.slots))
        writes = copy is not None and copy.outward
        coming = [pair for pair in pairs if writes and pair[1] in named]
        there = [pair for pair in pairs if not writes or pair[1] not in named]
        self.keep([node for node, _ in there], [slot for _, slot in there], None)
        if copy is None or not nodes:
            return
        copy.nodes = [node for node, _ in coming] if writes else nodes
        if writes:
            copy.outward, copy.keeps = False, True
            self.keep(copy.nodes, [slot for _, slot in coming], copy.token)
        else:
            copy.inward, copy.onboards = False, True
            self._reading(copy)

    def promote(self) -> None:
        """Blocks that could be had from the host alone, or not at all because the sequence that has
        them is suspended, and that another has just committed: its page on the GPU is canonical
        from now on. What a copy reads on the host stays as it is. A host copy has another's bytes,
        and is given up."""
        if not self._seen:
            return
        seen, self._seen = self._seen, []
        self._take_over([pair for pair in dict(seen[::-1]).items() if _can_take_over(*pair)])
        found = [pair for pair in dict(seen[::-1]).items() if self._idle(*pair)]
        if found:
            self._promote(found)
            self._drop_copies(self._changed(found))
            self.counters["promotions"] += len(found)

    def _idle(self, node: Node, seq: Sequence) -> bool:
        """Only the host has the block, nobody reads it there, and the sequence has a page of it."""
        if node.owner is not None or node.slot is None:
            return False
        unread = self.host.cells.states[node.slot] == STALE.code
        return unread and seq.pages.states[node.ordinal] == PRIVATE.code

    def arrived(self, seq: Sequence, nodes: Iterable[Node]) -> None:
        """The bytes of these blocks have come to the GPU for a sequence. Where only the host has
        one, or a suspended sequence, the new page is canonical: the index learns that the GPU has
        it (report S07). One that is the sequence's already may be copied out now."""
        nodes = list(nodes)
        self._take_over([(node, seq) for node in nodes if _can_take_over(node, seq)])
        self._regain([(node, seq) for node in nodes if self._regains(node, seq)])
        for node in nodes:
            if node.owner is seq:
                self.index.await_copy(node)

    def _regain(self, found: list[tuple[Node, Sequence]]) -> None:
        """The host has mirrors of these pages from now on."""
        if not found:
            return
        slots = [node.slot for node, _ in found if node.slot is not None]
        plan = self.flight.plan()
        for cells, low, high in runs_of(self.host.cells, slots):
            plan.fire(_REGAIN_SLOT, cells, low, high)
            plan.fire(_REGAIN_PAGE, self.host.pages, low, high)
        plan.settle()
        self._promote(found)
        self.counters["promotions"] += len(found)

    def _regains(self, node: Node, seq: Sequence) -> bool:
        """Only the host has the block, or will have it, and the sequence has a page with the same
        bytes."""
        if node.owner is not None or node.slot is None:
            return False
        unread = self.host.cells.states[node.slot] in _UNREAD
        page = seq.pages.states[node.ordinal]
        return unread and page == PRIVATE.code and node.edition == seq.editions[node.ordinal]

    def onboard(self, transfer: Transfer, seq: Sequence) -> None:
        """A copy of hits was issued: they stay until it has ended."""
        self._reading(transfer)
        self.counters["hit_blocks.partial"] += transfer.partial is not None
        for node in transfer.nodes:
            self._line_up(node, seq)
            self.counters[f"hit_blocks.{_place(node)}"] += 1

    def _reading(self, transfer: Transfer) -> None:
        """A copy reads host slots and blocks that are no sequence's alone."""
        for slot in slots_of(transfer.slots):
            self.host.readers.setdefault(slot, set()).add(transfer.token)
        last = _last(transfer)
        if last is not None:
            self.index.hold(last, ("load", transfer.token))
            self.index.touch((last,))

    def backed(self, seq: Sequence) -> Operands:
        """What it means that a sequence has come back from the host, where all canonical pages are
        to have copies: those that it has there stay, as mirrors."""
        if self.index.uncopied is None or seq.identity.weights_epoch != self.epoch:
            return {}
        held, cells = list(slots_of(seq.slots)), self.host.cells
        slots = [held[node.ordinal] for node in seq.nodes if node.owner is seq]
        stay = set(slots)
        return {
            "slots": runs_of(cells, [slot for slot in held if slot not in stay]),
            "backed": runs_of(cells, slots),
        }

    def came_back(self, seq: Sequence, operands: Operands) -> None:
        """The sequence has come back: the index follows."""
        own = (node for node in seq.nodes if node.owner is seq)
        for slot, node in zip(slots_of(operands.get("backed", ())), own, strict=False):
            self.index.give_slot(node, slot)
        if seq.pages.states.count(PRIVATE.code):
            self.arrived(seq, seq.nodes)

    def ending(self, transfer: Transfer, ok: bool) -> Ending:
        """What the end of such a copy means."""
        if transfer.onboards:
            readers, token = self.host.readers, transfer.token
            last = [slot for slot in slots_of(transfer.slots) if readers[slot] == {token}]
            return Ending({"released": runs_of(self.host.cells, last)})
        pages = self.host.pages
        slots = [s for s in slots_of(transfer.slots) if pages.states[s] == LOADING_STALE.code]
        inherited, lost = ([], []) if ok else self._failed(transfer)
        heirs = list(pages_of(inherited))
        return Ending({"stale": runs_of(pages, slots), "heirs": heirs}, inherited, lost)

    def ended(self, transfer: Transfer, ok: bool, ending: Ending) -> None:
        """The copy has ended and everything else is settled: the index follows."""
        if transfer.onboards:
            self._onboarded(transfer, ok)
            return
        for node in transfer.nodes:
            self._let_go(node, ("write", transfer.token))
        slots = set(slots_of(transfer.slots))
        for node in transfer.nodes:
            if node.slot in slots and ok:
                self.index.land(node)
            elif node.slot in slots and node.owner is not None:
                self.index.lose_slot(node, why=Loss.FAILED)
        for node, heir in ending.inherited:
            self._step_out(node, heir)
            self.index.give_owner(node, heir)
            self.index.lose_slot(node, why=Loss.FAILED)
        self._changed(ending.inherited)
        cut = self._cut_all(ending.lost, Loss.FAILED)
        self.free([slot for slot in cut if slot not in slots])

    def mirrors_of(self, seq: Sequence, passage: Passage | None) -> dict[int, int]:
        """Host slots that have pages of the sequence already, by ordinal; not of those that it
        leaves to others."""
        end = 0 if passage is None else passage.end
        states = self.host.cells.states
        return {
            node.ordinal: node.slot
            for node in seq.nodes
            if node.slot is not None and node.owner is seq and node.ordinal >= end
            if states[node.slot] == MIRROR.code
        }

    def away(self, seq: Sequence) -> None:
        """A sequence is suspended, by a call or because the copy that should bring it back has
        failed: what it has of canonical blocks is its own host copies, or is others' from now on.
        """
        self._taken(seq)
        self._hand_on(seq)

    def _taken(self, seq: Sequence) -> None:
        """Host copies that were there are its own now; it has others of those that are not, or are
        still on the way."""
        states, doubled = self.host.cells.states, list[int]()
        for node in seq.nodes:
            if node.owner is seq and node.slot is not None:
                if states[node.slot] in _MIRRORS:
                    doubled.append(node.slot)
                self.index.lose_slot(node, why=Loss.SUSPENDED)
        self.free(doubled)

    def _failed(self, transfer: Transfer) -> tuple[list[tuple[Node, Sequence]], list[Node]]:
        """Of pages that were to be kept and have no owner: what others have, what nobody has."""
        slots = set(slots_of(transfer.slots))
        return self._inherited(
            node for node in transfer.nodes if node.owner is None and node.slot in slots
        )

    def _onboarded(self, transfer: Transfer, ok: bool) -> None:
        readers = self.host.readers
        for slot in slots_of(transfer.slots):
            readers[slot].discard(transfer.token)
            if not readers[slot]:
                del readers[slot]
        last = _last(transfer)
        if last is not None:
            self._let_go(last, ("load", transfer.token))
        if ok and transfer.seq is not None and transfer.current:
            self.arrived(transfer.seq, transfer.nodes)

    def _let_go(self, node: Node, holder: Holder) -> None:
        """End a hold, if the block was not cut meanwhile."""
        if holder in node.holders:
            self.index.release(node, holder)


def _is_away(owner: object) -> bool:
    """It is a suspended sequence: its pages cannot be had."""
    return isinstance(owner, Sequence) and owner.range is None


def _can_take_over(node: Node, seq: Sequence) -> bool:
    """A suspended sequence has the canonical page, and this one has one that can be read."""
    return _is_away(node.owner) and seq.pages.states[node.ordinal] == PRIVATE.code


def _readable(owner: object) -> bytes | bytearray:
    """The states of a sequence's pages, if it has memory on the GPU."""
    return owner.pages.states if isinstance(owner, Sequence) and owner.range is not None else b""


def _last(transfer: Transfer) -> Node | None:
    """Which of the hits is held: whoever keeps that keeps those before it."""
    return transfer.partial or (transfer.nodes[-1] if transfer.nodes else None)


def _place(node: Node) -> str:
    """Where a hit comes from, if it is copied."""
    if node.owner is None:
        return "host"
    return {Span: "span", Range: "parked"}.get(type(node.owner), "live")
