"""The view: what laws may look at, read off a manager and its device without changing them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kvstate.arena import Arena, Range
from kvstate.blocks import Node
from kvstate.index_check import check, check_lines
from kvstate.manager import Manager
from kvstate.plan import Run
from kvstate.sequence import Sequence, Step
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
from kvstate.spec.page import VACANT as PAGE_VACANT
from kvstate.spec.range import VACANT
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
        protected_share=kv.config.gpu.protected_share,
        max_utilization=kv.config.max_utilization_for_resume,
        budget_frames=kv.gpu.budget_frames,
        ahead_frames=kv.config.gpu.map_ahead_frames,
        arena_base=kv.arena.base,
        arena_bytes=geometry.arena_bytes,
        free_addresses=tuple(
            (first * geometry.frame_bytes, frames) for first, frames in kv.arena.addresses.free
        ),
        host_address=kv.host.address,
        frame_counts=tuple(kv.gpu.counts),
        pool_states=bytes(kv.gpu.pool.states),
        denied_states=bytes(kv.gpu.denied.states),
        pool_ids=tuple(kv.gpu.pool.ids),
        host_counts=tuple(kv.host.counts),
        host_states=bytes(kv.host.cells.states),
        host_pages=bytes(kv.host.pages.states),
        readers={slot: frozenset(tokens) for slot, tokens in kv.host.readers.items()},
        blocks=tuple(_blocks(kv)),
        index_faults=(*check(kv.reuse.index), *check_lines(kv.reuse.lines)),
        event_faults=tuple(kv.replayed()) if kv.replayed else (),
        doubles=frozenset(seq.uid for seq in kv.reuse.doubles),
        copying=frozenset(_copying(kv)),
        reuses=kv.reuse.enabled,
        mirrors=kv.mirrors is not None,
        epoch=kv.reuse.epoch,
        sequences=tuple(_sequence(seq) for seq in kv.sequences.values()),
        ranges=tuple(_ranges(kv)),
        spans=tuple(_spans(kv)),
        span_clock=kv.spans.clock,
        idle_span_frames=kv.spans.registered.idle_frames,
        spare_span_frames=kv.spans.frames_without(None, competing=True),
        transfers=tuple(_transfers(kv)),
        loads=kv.flight.loads,
        steps=tuple(_step(step) for step in kv.flight.steps.values()),
        rows=kv.columns.rows,
        free_rows=tuple(kv.columns.free),
        sequence_counts=tuple(kv.columns.counts),
        page_counts=tuple(kv.arena.counts.pages[PAGE_VACANT.code + 1 :]),
        range_counts=tuple(kv.arena.counts.ranges[VACANT.code + 1 :]),
        promised_frames=kv.columns.promised_frames,
        ledger=kv.device.ledger(),
    )


def _sequence(seq: Sequence) -> SequenceFact:
    return SequenceFact(
        uid=seq.uid,
        row=seq.row,
        state=seq.state,
        life=seq.life,
        row_state=seq.columns.states[seq.row],
        row_life=seq.columns.life.item(seq.row),
        max_tokens=seq.max_tokens,
        scheduled=seq.scheduled_tokens,
        settled=seq.length_tokens,
        known=seq.committed_tokens,
        capacity=seq.capacity_tokens,
        ample=seq.columns.ample.item(seq.row),
        steps=seq.steps,
        held_tokens=seq.held_tokens,
        pages=bytes(seq.pages.states),
        range=None if seq.range is None else seq.range.number,
        slots=_slots(seq.slots),
        transfer=None if seq.transfer is None else seq.transfer.token,
        committing=seq.committing,
        tenant=seq.identity.code,
        reserves=seq.reserves,
        open=_open_ids(seq),
        keys=tuple(seq.keys),
        blocks=_names(seq.nodes),
    )


def _copying(kv: Manager) -> Iterator[int]:
    for seq in kv.sequences.values():
        if kv.spans.duplicate(seq) is not None:
            yield seq.uid


def _blocks(kv: Manager) -> list[BlockFact]:
    return [
        BlockFact(
            name=node.serial,
            parent=None if node.parent is None else node.parent.serial,
            ordinal=node.ordinal,
            tenant=node.root.identity.code,
            epoch=node.root.identity.weights_epoch,
            key=node.key,
            owner=node.owner.uid if isinstance(node.owner, Sequence) else None,
            span=node.owner.number if isinstance(node.owner, Span) else None,
            range=node.owner.number if isinstance(node.owner, Range) else None,
            slot=node.slot,
            landed=node.landed,
            holders=frozenset(node.holders),
            line=tuple(kv.reuse.lines.get(node, ())),
            waits=node.uncopied,
        )
        for node in kv.reuse.index
        if node.root is not None
    ]


def _ranges(kv: Manager) -> list[RangeFact]:
    offers = _offers(kv.arena)
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
            offers=tuple(offers.get(item.number, ())),
        )
        for item in kv.arena.ranges.values()
    ]


def _spans(kv: Manager) -> Iterator[SpanFact]:
    """Those of running sequences, and those of the registry."""
    lives = (range_.home_of for range_ in kv.arena.ranges.values())
    found = {span.number: span for span in (*lives, *kv.spans.registered) if span is not None}
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
            blocks=_names(span.nodes),
            holders=frozenset(span.holders),
            used=span.used,
            registered=span in kv.spans.registered,
        )


def _transfers(kv: Manager) -> list[TransferFact]:
    return [
        TransferFact(
            token=item.token,
            uid=None if item.seq is None or item.keeps else item.seq.uid,
            life=item.life,
            outward=item.outward,
            inward=item.inward,
            keeps=item.keeps,
            onboards=item.onboards,
            range=item.range.number,
            sources=tuple(source.number for source in item.sources),
            slots=_slots(item.slots),
            blocks=_names((*item.nodes, item.partial) if item.partial else item.nodes),
        )
        for item in kv.flight.transfers.values()
    ]


def _step(step: Step) -> StepFact:
    rows, starts, counts = step.rows, step.start_tokens, step.count_tokens
    return StepFact(
        number=step.number,
        landed=step.state == STEP_LANDED.code,
        issued=tuple(zip(rows.tolist(), starts.tolist(), (starts + counts).tolist(), strict=True)),
        bases=tuple(step.bases[step.places].tolist()),
        lives=tuple(step.lives[step.places].tolist()),
        fenced=frozenset(range_.number for range_ in step.fenced),
    )


def _offers(arena: Arena) -> Mapping[int, list[str]]:
    """Where each parked range is on offer, by its number."""
    found = defaultdict[int, list[str]](list)
    for shelf in arena.parked.values():
        for range_ in shelf:
            found[range_.number].append("adopt")
    for number in arena.retaining:
        found[number].append("retaining")
    return found


def _open_ids(seq: Sequence) -> bytes:
    columns = seq.columns
    known = columns.known.item(seq.row) % columns.open_block.shape[1]
    return columns.open_block[seq.row, :known].tobytes()


def _names(nodes: Iterable[Node]) -> tuple[int | None, ...]:
    """What the index calls blocks; None for one that it has no more."""
    return tuple(node.serial if node.findable else None for node in nodes)


def _slots(runs: Iterable[Run]) -> tuple[int, ...]:
    return tuple(slot for _, low, high in runs for slot in range(low, high))
