"""Facts: what laws look at. Read off a manager and its device; pure data.

Laws are written against these and not against the manager, so that anything that can state the
same facts (another engine, a recorded trace, a model) can be held to the same laws.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class SequenceFact:
    """A sequence, as it stands."""

    uid: int
    row: int
    state: int
    life: int
    max_tokens: int
    scheduled: int
    settled: int
    known: int
    capacity: int
    steps: int
    held_tokens: int
    pages: bytes
    range: int | None
    slots: tuple[int, ...]
    transfer: int | None
    committing: bool
    tenant: bytes
    promised: int
    """Frames that it may still ask for, because they were promised to it."""
    keys: tuple[bytes, ...]
    """The token ids of each committed block, as bytes."""
    blocks: tuple[int | None, ...]
    """What the index calls each of them; None if it has that one no more."""


@frozen
class RangeFact:
    """A range, its frames in order, and the page records that it keeps itself."""

    number: int
    state: int
    base: int
    extent_frames: int
    frame_states: bytes
    frame_ids: tuple[int, ...]
    pages: bytes
    holders: frozenset[tuple[str, int]]
    owner: int | None
    aliases: bytes
    span: int | None
    """The span behind its aliases."""
    home_of: int | None
    """The span whose frames follow its aliases."""
    kept_frames: int
    """Its own frames up to the last that has a retained page."""


@frozen
class SpanFact:
    """A span. Frames count from the beginning of the prefix."""

    number: int
    state: int
    home: int
    first_frame: int
    end: int
    frame_states: bytes
    frame_ids: tuple[int, ...]
    """Those that the registry has."""
    pages: bytes
    blocks: tuple[int | None, ...]
    """What the index calls its own blocks; None for one that it has no more."""
    holders: frozenset[int]
    """Ranges."""
    used: int


@frozen
class TransferFact:
    """A transfer in flight."""

    token: int
    uid: int | None
    """The sequence whose bytes it moves; None if they are canonical pages, of several perhaps."""
    current: bool
    outward: bool
    inward: bool
    keeps: bool
    onboards: bool
    range: int
    sources: tuple[int, ...]
    """Ranges of others that it reads."""
    slots: tuple[int, ...]


@frozen
class BlockFact:
    """A block that the index names."""

    name: int
    parent: int | None
    ordinal: int
    tenant: bytes
    key: bytes
    """Its token ids, as bytes."""
    owner: int | None
    """The sequence whose page is canonical."""
    span: int | None
    """The span that has it, if no sequence has."""
    range: int | None
    """The parked range that retains it, if neither has."""
    slot: int | None
    landed: bool
    """Its bytes are said to be in that slot, if it has one."""
    holders: frozenset[tuple[str, int]]
    line: tuple[int, ...]
    """Sequences with pages of their own of the same tokens, the first in line first."""


@frozen
class StepFact:
    """A step that is not settled."""

    number: int
    landed: bool
    rows: tuple[int, ...]
    """The rows of its sequences."""
    writes: tuple[tuple[int, int, int], ...]
    """(row, first token, end) of each sequence that still lives the life of the step."""
    issued: tuple[tuple[int, int, int], ...]
    """The same of every sequence, as its kernels were told."""


@frozen
class Work:
    """A piece of issued work that has not run yet."""

    name: str
    stream: int
    number: int
    reads: tuple[tuple[int, int], ...] = ()
    """(address, size in bytes) runs."""
    writes: tuple[tuple[int, int], ...] = ()
    waits: tuple[int, ...] = ()
    """Numbers of the pending work that must run before it."""


@frozen
class Ledger:
    """A device's own books, for laws that compare them with the manager's."""

    reservations: Mapping[int, int]
    """Size in bytes by address."""
    frames: frozenset[int]
    """Physical frames that exist."""
    mappings: Mapping[int, int]
    """Frame by address."""
    read_only: frozenset[int]
    """Addresses of frames that nobody may write there."""
    host: Mapping[int, int]
    """Host memory: size in bytes by address."""
    copies: frozenset[int]
    """Tokens of copies whose end was not reported yet."""
    work: tuple[Work, ...] = ()
    """Issued work that has not run, where the device can tell."""

    @property
    def empty(self) -> bool:
        """Nothing at all is held."""
        held = (self.reservations, self.frames, self.mappings, self.host, self.copies, self.work)
        return not any(held)


@frozen
class Unfinished:
    """A sequence that a fair engine did not bring to its end."""

    uid: int
    settled: int
    max_tokens: int
    refusals: Mapping[str, int]
    """What was refused to it, and how often."""


@frozen
class FairRun:
    """How far a fair engine came with all sequences that had been admitted."""

    calls: int
    most_calls: int
    """How many it may need."""
    left: tuple[Unfinished, ...]
    resumed: Mapping[int, int]
    """How often who was resumed since anybody has computed a token, by uid."""
    most_resumes: int
    """How often one may be."""


@frozen
class View:
    """Everything a law may look at: the manager's books, and the device's."""

    row_bytes: int
    block_bytes: int
    frame_bytes: int
    align_bytes: int
    tokens_per_block: int
    guard_frames: int
    protected_frames: int
    budget_frames: int
    arena_base: int
    arena_bytes: int
    host_address: int
    frame_counts: tuple[int, ...]
    pool_states: bytes
    pool_ids: tuple[int, ...]
    host_counts: tuple[int, ...]
    host_states: bytes
    host_pages: bytes
    """The records of pages that are nobody's, by slot."""
    readers: Mapping[int, frozenset[int]]
    """Copies that read what is nobody's, by slot."""
    blocks: tuple[BlockFact, ...]
    index_faults: tuple[str, ...]
    """What the index itself finds wrong with its books."""
    event_faults: tuple[str, ...]
    """What replaying the emitted events gets wrong."""
    unasked: tuple[int, ...]
    """Sequences with copies of what a span has, of which a reclaim would not know."""
    reuses: bool
    sequences: tuple[SequenceFact, ...]
    ranges: tuple[RangeFact, ...]
    spans: tuple[SpanFact, ...]
    transfers: tuple[TransferFact, ...]
    steps: tuple[StepFact, ...]
    rows: int
    """How many there are."""
    free_rows: tuple[int, ...]
    ledger: Ledger
