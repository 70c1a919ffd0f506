"""Rewinding: tokens are taken back, exactly.

Blocks that a rewind goes into become writable again, in place. Memory that others map too cannot: a
write there would be seen by all of them. So the sequence *moves*: it leaves its range as if it were
suspended, what others map stays with them, and goes on in another range, where it maps what it
still shares in whole and has a copy of the rest (reports B115, B116).

Rejected: putting private frames at the same addresses. Whoever owns the memory would have to give
its span another home first, all for an address that engines look up at every step anyway.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from attrs import frozen

from kvstate import runs
from kvstate.admission import Admission, Match, Start
from kvstate.blocks import Loss, Node
from kvstate.guard import guarded
from kvstate.plan import Cells
from kvstate.reuse import Leaving
from kvstate.sequence import Sequence, Transfer
from kvstate.spans import Passage, Sharing
from kvstate.spec.compiled import MACHINES, ObjectRow
from kvstate.values import whole

_REWIND: Final = MACHINES.object("sequence.rewind")
_MOVE: Final = MACHINES.object("sequence.move")


@frozen
class Move:
    """A planned move to another range."""

    start: Start
    pages: Cells
    """The page records that the sequence has there."""
    leaving: Leaving
    passage: Passage | None


class Rewinding(Admission):
    """The call that takes tokens back."""

    @guarded
    def rewind(self, seq: Sequence, length_tokens: int) -> None:
        """Take tokens back, exactly. No step of the sequence may be in flight; copies of its
        memory are waited for.

        Committed blocks that the rewind goes into become writable again. Its memory stays, unless
        the rewind goes below `shared_tokens`, into memory that others map too: then the sequence
        goes on in another range, with a copy of what it cannot map. So its base changes, later
        work of its stream waits for the copy, and OutOfFrames may be raised, with nothing changed.
        If the copy fails, the sequence is DROPPED.
        """
        self._enter(seq)
        tokens = whole("length_tokens", length_tokens, 0, self.config.max_tokens)
        self._legal_once_arrived(_REWIND, seq)
        self._check_length(seq, "rewind", 0, tokens, seq.length_tokens)
        self.flight.arrive(seq)
        self._legal(_REWIND, seq)
        if seq.range is not None:
            self.flight.finish(sorted(token for _, token in seq.range.holders))
        if tokens < seq.shared_tokens:
            self.device.check_stream(seq.stream)
            self._move(seq, tokens)
        else:
            self._rewind(seq, tokens)

    def _rewind(self, seq: Sequence, length_tokens: int) -> None:
        block = self.config.tokens_per_block
        full, known = length_tokens // block, seq.committed_tokens // block
        ends = self.spans.rewound(seq, full)
        if ends:
            self.ladder.unalias(seq.range)
        plan, leaving = self.flight.plan(), self.reuse.leaving(seq, full)
        plan.operands = {"rewound": ((seq.pages, full, known),)} | leaving.operands | ends
        plan.move(_REWIND, seq)
        self.flight.settle(plan)
        if ends and seq.range is not None:
            self.spans.ended(seq.range)
        self.reuse.left(leaving, Loss.REWOUND)
        self._shorten(seq, length_tokens)

    def _shorten(self, seq: Sequence, length_tokens: int) -> None:
        """Its tokens, and what is known of them, are so many."""
        block = self.config.tokens_per_block
        full = length_tokens // block
        if full < len(seq.keys):
            self.columns.open_block[seq.row] = np.frombuffer(seq.keys[full], np.int32, block)
            del seq.keys[full:], seq.editions[full:]
        self.columns.set_lengths(seq.row, length_tokens)

    # Into another range.

    def _move(self, seq: Sequence, length_tokens: int) -> None:
        move = self._attempt(_MOVE, seq, self._plan_move, length_tokens)
        start, plan, old = move.start, move.start.plan, seq.range
        assert old is not None
        self.actor.run(plan)
        if plan.token is not None:
            transfer = Transfer(plan.token, seq, start.range, onboards=True)
            transfer.pieces, transfer.sources = plan.pieces, [old]
            self.flight.issue(transfer)
            seq.held_tokens = length_tokens
        self._left_behind(seq, move.passage)
        self.flight.settle(plan)
        runs.hand_over(seq, plan.operands)
        self.reuse.left(move.leaving, Loss.REWOUND)
        seq.pages = move.pages
        self._shorten(seq, length_tokens)
        if start.sharing is not None:
            self.spans.shared(start.sharing, start.range)
        self.reuse.joined(seq, seq.nodes)
        self._occupy(seq, start.range, seq.stream)
        self.counters["moves"] += 1

    def _plan_move(self, chosen: ObjectRow, seq: Sequence, length_tokens: int) -> Move:
        assert seq.range is not None
        block = self.config.tokens_per_block
        full, blocks = length_tokens // block, self.geometry.blocks(length_tokens)
        sharing = self._still_shared(seq, full)
        shared = 0 if sharing is None else sharing.blocks
        passage = self.spans.passage(seq, self.reuse.epoch, closing=False)
        self._check_promise(seq, sharing, passage)
        leaving = self.reuse.leaving(seq, full, passage)
        pages = Cells(seq, bytearray(len(seq.pages.states)), seq.pages.counts)
        range_, parked = self._range_for(seq, length_tokens, sharing, [])
        frames = self.geometry.frames(length_tokens)
        plan = self._plan_frames(seq, {range_: frames}, self._margin(seq, frames))
        plan.base, plan.stream = range_.base, seq.stream
        at = shared * self.geometry.block_bytes
        size_bytes = length_tokens * self.geometry.row_bytes - at
        plan.pieces = [(range_.base + at, seq.range.base + at, size_bytes)] if size_bytes else []
        operands = {} if sharing is None else self.spans.operands(sharing, range_, pages)
        operands |= runs.leaving(seq, self.geometry) | leaving.operands
        operands |= self.spans.passing(passage)
        operands |= self._growth(plan, seq, range_, frames, blocks, pages)
        operands |= self._taking(range_, parked=parked)
        operands |= {"hits": ((pages, shared, full),), "primed": ((pages, full, blocks),)}
        plan.operands = operands
        plan.move(_MOVE, seq, chosen)
        return Move(Start(plan, range_, Match([]), sharing, []), pages, leaving, passage)

    def _check_promise(
        self, seq: Sequence, sharing: Sharing | None, passage: Passage | None
    ) -> None:
        """Who was promised all its room needs more if it shares less, and gets back what it leaves.
        Raises OutOfFrames if that is not to be had."""
        range_, gpu = seq.range, self.gpu
        if not seq.reserves or range_ is None:
            return
        left = range_.charged - self.spans.passed_frames(passage)
        had = gpu.free + gpu.parked + gpu.coming + self.spans.spillable_frames + left
        whole = self._whole(seq, sharing)
        if whole > had - (self.columns.promised_frames - seq.promised_frames):
            raise self._short(str(seq), whole, "reserve")

    def _still_shared(self, seq: Sequence, full: int) -> Sharing | None:
        """What it can map of its first blocks: those whose bytes the index has just as it has
        them."""
        same = list[Node]()
        for node, edition in zip(seq.nodes[:full], seq.editions, strict=False):
            if node.edition != edition:
                break
            same.append(node)
        return self.spans.sharing(same)

    def _left_behind(self, seq: Sequence, passage: Passage | None) -> None:
        """Whatever was planned is about to be settled: the span that the sequence leaves to others
        is the registry's."""
        if passage is not None:
            self.spans.passed(passage)
            self.reuse.lined_up(passage.nodes)
            self.reuse.passed(seq, passage.span)
