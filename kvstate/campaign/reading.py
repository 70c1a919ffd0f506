"""Reading back: what the device must see of a sequence, and who has written what it begins with.

Both the player and the engine ask this; neither the manager nor the model knows it alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import numpy as np

from kvstate.campaign.model import Broken, Library, SegmentRow, Story, Writers
from kvstate.device import SEGMENT, Stream
from kvstate.manager import Manager
from kvstate.sequence import Sequence


def publish(kv: Manager, stream: Stream, seqs: Ordered[Sequence], part: int = 0) -> list[int]:
    """Let the device's table have the base and length of each sequence, as of a step's issue.

    Steps in flight have a `part` of the table each: an earlier one may still read its own. Which
    entries were used is returned.
    """
    entries = [part * kv.columns.rows + seq.row for seq in seqs]
    device = kv.device
    assert hasattr(device, "publish")
    bases, lengths = [seq.base or 0 for seq in seqs], [seq.scheduled_tokens for seq in seqs]
    device.publish(stream, entries, bases, lengths)
    return entries


def begin(kv: Manager, library: Library, seq: Sequence, story: Story, stream: Stream) -> None:
    """The sequence begins with what others wrote: find out who. Raises Broken if that is not what
    its prompt says, or if nobody wrote it."""
    block, tokens = kv.config.tokens_per_block, seq.matched_tokens
    prefix = story.prompt[:tokens].tobytes()
    if seq.known_ids != prefix or tokens >= len(story.prompt):
        raise Broken("model", f"{seq} hits {tokens} tokens that are not those of its prompt")
    found = library.candidates(story, tokens // block)
    if len(found) != tokens // block:
        raise Broken("bytes", f"{seq} hits {tokens} tokens that nobody committed")
    if tokens % block:
        found.append(library.partly(story, tokens % block))
    written: list[tuple[int, int]] = []
    size = kv.geometry.block_bytes
    pieces = () if seq.transfer is None else seq.transfer.pieces
    copied = [source + offset for _, source, length in pieces for offset in range(0, length, size)]
    assert seq.base is not None
    mapped = [seq.base + at * size for at in range(len(found) - len(copied))]
    sources = mapped + copied
    for at, (source, candidates) in enumerate(zip(sources, found, strict=True)):
        written += _written_by(kv, candidates, source, at * block, stream)
    story.begin(written)


def _written_by(
    kv: Manager, candidates: list[Writers], source: int, position: int, stream: Stream
) -> Writers:
    """Which of those who may have written a block did, by the bytes that are copied."""
    row, device = kv.geometry.row_bytes, kv.device
    if len(candidates) == 1:
        return candidates[0]
    assert hasattr(device, "verify")
    assert hasattr(device, "synchronize")
    for writers in candidates:
        segments, at = [], 0
        for count, key in writers:
            segments.append((source + at * row, position + at, count, key, -1))
            at += count
        check = device.verify(stream, np.array(segments, SEGMENT))
        device.synchronize(stream)
        if not sum(check.wrong):
            return writers
    raise Broken("bytes", f"{source:#x} was written by none of {len(candidates)} writers")


def host_rows(kv: Manager, seq: Sequence, story: Story) -> list[SegmentRow]:
    """What the host slots of a suspended sequence must hold, as rows of `SEGMENT`."""
    row, block = kv.geometry.row_bytes, kv.config.tokens_per_block
    rows: list[SegmentRow] = []
    first = 0
    for _, low, high in seq.slots:
        address = kv.host.address + low * kv.host.block_bytes - first * row
        end = first + (high - low) * block
        rows += story.rows(address, first, min(end, story.settled), row)
        first = end
    return rows
