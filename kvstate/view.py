"""The view: what laws may look at, read off a manager and its device without changing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstate.arena import Range
from kvstate.index_check import check, check_lines
from kvstate.manager import Manager
from kvstate.plan import Run
from kvstate.sequence import Columns, Sequence, Step
from kvstate.spans import Span
from kvstate.spec.facts import (
    BlockFact,
    RangeFact,
    SequenceFact,
    SpanFact,
    StepFact,
    TransferFact,
    View,
)
from kvstate.spec.transfer import STEP_LANDED


def view(kv: Manager) -> View:
    """Everything as it stands. Cost: O(everything); for checks."""
    geometry = kv.geometry
    return View(
        row_bytes=geometry.row_bytes,
        block_bytes=geometry.block_bytes,
        frame_bytes=geometry.frame_bytes,
        align_bytes=geometry.align_bytes,
        tokens_per_block=geometry.tokens_per_block,
        guard_frames=geometry.guard_frames,
        protected_frames=kv.geometry.protected_frames,
        budget_frames=kv.gpu.budget_frames,
        arena_base=kv.arena.base,
        arena_bytes=geometry.arena_bytes,
        host_address=kv.host.address,
        frame_counts=tuple(kv.gpu.counts),
        pool_states=bytes(kv.gpu.pool.states),
        pool_ids=tuple(kv.gpu.pool.ids),
        host_counts=tuple(kv.host.counts),
        host_states=bytes(kv.host.cells.states),
        host_pages=bytes(kv.host.pages.states),
        readers={slot: frozenset(tokens) for slot, tokens in kv.host.readers.items()},
        blocks=tuple(_blocks(kv)),
        index_faults=(*check(kv.reuse.index), *check_lines(kv.reuse.lines)),
        event_faults=tuple(kv.replayed()) if kv.replayed else (),
        unasked=tuple(_unasked(kv)),
        reuses=kv.reuse.enabled,
        sequences=tuple(_sequence(seq) for seq in kv.sequences.values()),
        ranges=tuple(_ranges(kv)),
        spans=tuple(_spans(kv)),
        transfers=tuple(_transfers(kv)),
        steps=tuple(_step(step, kv.columns) for step in kv.flight.steps.values()),
        rows=kv.columns.rows,
        free_rows=tuple(kv.columns.free),
        ledger=kv.device.ledger(),
    )


def _sequence(seq: Sequence) -> SequenceFact:
    return SequenceFact(
        uid=seq.uid,
        row=seq.row,
        state=seq.state,
        life=seq.life,
        max_tokens=seq.max_tokens,
        scheduled=seq.scheduled_tokens,
        settled=seq.length_tokens,
        known=seq.committed_tokens,
        capacity=seq.capacity_tokens,
        steps=seq.steps,
        held_tokens=seq.held_tokens,
        pages=bytes(seq.pages.states),
        range=None if seq.range is None else seq.range.number,
        slots=_slots(seq.slots),
        transfer=None if seq.transfer is None else seq.transfer.token,
        committing=seq.committing,
        tenant=seq.identity.code,
        promised=seq.promised_frames,
        keys=tuple(seq.keys),
        blocks=tuple(id(node) if node.findable else None for node in seq.nodes),
    )


def _unasked(kv: Manager) -> Iterator[int]:
    for seq in kv.sequences.values():
        if seq not in kv.reuse.doubles and kv.spans.duplicate(seq) is not None:
            yield seq.uid


def _blocks(kv: Manager) -> list[BlockFact]:
    return [
        BlockFact(
            name=id(node),
            parent=None if node.parent is None else id(node.parent),
            ordinal=node.ordinal,
            tenant=node.root.identity.code,
            key=node.key,
            owner=node.owner.uid if isinstance(node.owner, Sequence) else None,
            span=node.owner.number if isinstance(node.owner, Span) else None,
            range=node.owner.number if isinstance(node.owner, Range) else None,
            slot=node.slot,
            landed=node.landed,
            holders=frozenset(node.holders),
            line=tuple(kv.reuse.lines.get(node, ())),
        )
        for node in kv.reuse.index
        if node.root is not None
    ]


def _ranges(kv: Manager) -> list[RangeFact]:
    return [
        RangeFact(
            number=item.number,
            state=item.state,
            base=item.base,
            extent_frames=item.extent_frames,
            frame_states=bytes(item.frames.states),
            frame_ids=tuple(item.frames.ids),
            pages=bytes(item.pages.states),
            holders=frozenset(item.holders),
            owner=None if item.owner is None else item.owner.uid,
            aliases=bytes(item.aliases.states),
            span=None if item.span is None else item.span.number,
            kept_frames=item.kept_frames,
            home_of=None if item.home_of is None else item.home_of.number,
        )
        for item in kv.arena.ranges.values()
    ]


def _spans(kv: Manager) -> Iterator[SpanFact]:
    """Those of running sequences, and those of the registry."""
    lives = (range_.home_of for range_ in kv.arena.ranges.values())
    found = {span.number: span for span in lives if span is not None} | kv.spans.registered
    for span in found.values():
        yield SpanFact(
            number=span.number,
            state=span.state,
            home=span.home.number,
            first_frame=span.first_frame,
            end=span.end,
            frame_states=bytes(span.frames.states),
            frame_ids=tuple(span.frames.ids),
            pages=bytes(span.pages.states),
            blocks=tuple(id(node) if node.findable else None for node in span.nodes),
            holders=frozenset(span.holders),
            used=span.used,
        )


def _transfers(kv: Manager) -> list[TransferFact]:
    return [
        TransferFact(
            token=item.token,
            uid=None if item.seq is None else item.seq.uid,
            current=item.seq is not None and item.seq.transfer is item,
            outward=item.outward,
            inward=item.inward,
            keeps=item.keeps,
            onboards=item.onboards,
            range=item.range.number,
            sources=tuple(source.number for source in item.sources),
            slots=_slots(item.slots),
        )
        for item in kv.flight.transfers.values()
    ]


def _step(step: Step, columns: Columns) -> StepFact:
    rows = step.rows.tolist()
    live = (step.life == columns.life)[step.rows].tolist()
    starts, counts = step.start_tokens.tolist(), step.count_tokens.tolist()
    issued = tuple(
        (row, start, start + count) for row, start, count in zip(rows, starts, counts, strict=True)
    )
    writes = tuple(write for write, lives in zip(issued, live, strict=True) if lives)
    return StepFact(step.number, step.state == STEP_LANDED.code, tuple(rows), writes, issued)


def _slots(runs: Iterable[Run]) -> tuple[int, ...]:
    return tuple(slot for _, low, high in runs for slot in range(low, high))
