"""Facts: what laws look at. Read off a manager and its device; pure data.

Laws are written against these and not against the manager, so that anything that can state the
same facts (another engine, a recorded trace, a model) can be held to the same laws.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import frozen


@frozen
class SequenceFact:
    """A sequence, as it stands."""

    uid: int
    row: int
    state: int
    life: int
    row_state: int
    """What its row says of its state."""
    row_life: int
    max_tokens: int
    scheduled: int
    settled: int
    known: int
    capacity: int
    ample: int
    """Tokens up to which it is said to need no frame and to lack none of its margin."""
    steps: int
    held_tokens: int
    pages: bytes
    range: int | None
    slots: tuple[int, ...]
    transfer: int | None
    committing: bool
    tenant: bytes
    reserves: bool
    """It was promised room for all its tokens."""
    open: bytes
    """The token ids, as bytes, of known tokens in the block that is not full."""
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
    offers: tuple[str, ...]
    """Where it is on offer: as memory to `adopt`, or as what is `retaining` something."""


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
    registered: bool
    """The registry has it."""


@frozen
class TransferFact:
    """A transfer in flight."""

    token: int
    uid: int | None
    """The sequence whose bytes it moves; None if it keeps canonical pages, of several perhaps."""
    life: int
    """The life of the sequence in which it was issued."""
    outward: bool
    inward: bool
    keeps: bool
    onboards: bool
    range: int
    sources: tuple[int, ...]
    """Ranges of others that it reads."""
    slots: tuple[int, ...]
    blocks: tuple[int | None, ...]
    """What the index calls the pages that it keeps, or that are hits; None for one that it has no
    more."""

    @property
    def loads(self) -> bool:
        """It brings bytes to the GPU."""
        return self.inward or self.onboards

    @property
    def moves(self) -> bool:
        """It moves bytes of the sequence itself, which waits for it."""
        return self.outward or self.loads

    @property
    def holder(self) -> tuple[str, int]:
        """As what it holds ranges."""
        return "transfer" if self.moves or self.keeps else "fence", self.token


@frozen
class BlockFact:
    """A block that the index names."""

    name: int
    parent: int | None
    ordinal: int
    tenant: bytes
    epoch: int
    """Of the weights that its bytes are of."""
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
    waits: bool
    """It waits for a copy on the host."""


@frozen
class StepFact:
    """A step that is not settled."""

    number: int
    landed: bool
    issued: tuple[tuple[int, int, int], ...]
    """(row, first token, end) of each of its sequences, as its kernels were told."""
    bases: tuple[int, ...]
    """The address of the first token row of each, as of the issue."""
    lives: tuple[int, ...]
    """The life of each, as of the issue; -1 if the step means nothing for it."""
    fenced: frozenset[int]
    """Ranges whose fences wait for it."""


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
    copy: int | None = None
    """The token of the copy, if it is one."""


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
class Refusal:
    """A call that was refused because something is full, and what it had asked for."""

    call: str
    place: str
    """The check that refused: that of an error, or `host` or `rows`."""
    uids: tuple[int, ...] = ()
    """The sequences that it named. One that it was to make is not there."""
    tokens: tuple[int, ...] = ()
    """What it named of each, or of the one that it was to make."""
    prompt_tokens: int = 0
    """So many tokens of its prompt the named one could have from others."""
    roomy: bool = False
    """There are addresses for two ranges of each row and for one more, all of the greatest size."""
    room: int = 0
    """For how many more frames the device has memory, if nobody else can take it."""


@frozen
class Failure:
    """How a call failed."""

    touched: frozenset[int]
    """Sequences whose copies ended in the call, by uid."""
    lost: bool
    """Some of these copies failed."""
    illegal: bool
    """The call should not have been made at all."""


@frozen
class GivenUp:
    """What a call gave up of what could be found."""

    why: Mapping[int, str]
    """The reasons, by block."""
    failed: bool
    """A copy has failed, or could not be begun."""


@frozen(slots=False)
class View:
    """Everything a law may look at: the manager's books, and the device's. Laws find facts by
    their names here; each table of names is made once."""

    row_bytes: int
    block_bytes: int
    frame_bytes: int
    align_bytes: int
    tokens_per_block: int
    guard_frames: int
    protected_share: float
    max_utilization: float
    budget_frames: int
    ahead_frames: int
    """What every running sequence has mapped beyond its need, while frames are to spare."""
    arena_base: int
    arena_bytes: int
    free_addresses: tuple[tuple[int, int], ...]
    """(address, frames) of the runs of the arena that no range has."""
    host_address: int
    frame_counts: tuple[int, ...]
    pool_states: bytes
    denied_states: bytes
    """Of frames that the device had no memory for."""
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
    doubles: frozenset[int]
    """Sequences that a reclaim asks for copies of what a span has."""
    copying: frozenset[int]
    """Sequences that have such copies."""
    reuses: bool
    mirrors: bool
    """Whether every canonical page is to have a copy on the host."""
    epoch: int
    """Of the weights: how often what can be found was cleared."""
    sequences: tuple[SequenceFact, ...]
    ranges: tuple[RangeFact, ...]
    spans: tuple[SpanFact, ...]
    span_clock: int
    """How often spans were used so far."""
    idle_span_frames: int
    """How many frames are said to be in spans that no sequence maps."""
    spare_span_frames: int
    """How many of these are said to be in none of the protected share."""
    transfers: tuple[TransferFact, ...]
    loads: int
    """How many of them are said to bring bytes to the GPU."""
    steps: tuple[StepFact, ...]
    rows: int
    """How many there are."""
    free_rows: tuple[int, ...]
    sequence_counts: tuple[int, ...]
    """How many rows are said to be of sequences in each state; CLOSED, if of none."""
    page_counts: tuple[int, ...]
    """How many pages of sequences and of ranges are said to be in each state but VACANT."""
    range_counts: tuple[int, ...]
    """How many ranges are said to be in each state but VACANT."""
    promised_frames: int
    """How many frames are said to be promised to running sequences that do not have them yet."""
    ledger: Ledger

    @cached_property
    def by_uid(self) -> Mapping[int | None, SequenceFact]:
        """Sequences by uid."""
        return {seq.uid: seq for seq in self.sequences}

    @cached_property
    def by_row(self) -> Mapping[int, SequenceFact]:
        """Sequences by row."""
        return {seq.row: seq for seq in self.sequences}

    @cached_property
    def range_of(self) -> Mapping[int | None, RangeFact]:
        """Ranges by number."""
        return {fact.number: fact for fact in self.ranges}

    @cached_property
    def span_of(self) -> Mapping[int | None, SpanFact]:
        """Spans by number."""
        return {one.number: one for one in self.spans}

    @cached_property
    def block_of(self) -> Mapping[int | None, BlockFact]:
        """Blocks by what the index calls them."""
        return {block.name: block for block in self.blocks}

    @cached_property
    def transfer_of(self) -> Mapping[int | None, TransferFact]:
        """Transfers by token."""
        return {copy.token: copy for copy in self.transfers}

    def living(self, step: StepFact) -> list[tuple[SequenceFact, int, int]]:
        """(sequence, first token, end) of those that still live the life of the step."""
        found = []
        for (row, first, end), life in zip(step.issued, step.lives, strict=False):
            seq = self.by_row.get(row)
            if seq is not None and seq.life == life:
                found.append((seq, first, end))
        return found
