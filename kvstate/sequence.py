"""The objects that a caller holds, and the columns that a step touches.

Every number that a step changes is a column over the rows of sequences. A step works on the entries
of its batch in them, so it is a few numpy operations, however long the sequences; only one that
crosses a frame or a block costs any Python. Of a batch of a good part of all rows the entries are
whole columns, which are several times faster than as many entries picked one by one; of a smaller
one they are those of its members, so that it does not pay for all rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstate.arena import Range
from kvstate.blocks import Node
from kvstate.device import Event, Stream
from kvstate.errors import ArgumentError, ArgumentTypeError
from kvstate.guard import guarded
from kvstate.handles import Handle
from kvstate.keys import Extras, Identity
from kvstate.life import Life
from kvstate.plan import Cells, Run
from kvstate.spec.page import (
    DROPPED,
    HOST_HELD_ACTIVE,
    HOST_HELD_COMMITTED,
    HOST_HELD_PRIVATE,
)
from kvstate.spec.sequence import CLOSED, CREATED, SEQUENCE
from kvstate.spec.transfer import ISSUED, STEP, STEP_ISSUED
from kvstate.values import article, counts, described

if TYPE_CHECKING:
    from kvstate.manager import Manager

Column = npt.NDArray[np.int64]
_HELD = (HOST_HELD_ACTIVE, HOST_HELD_COMMITTED, HOST_HELD_PRIVATE)
_PICKED = 4
"""How many times faster a whole column is than as many entries that are picked."""


class Columns:
    """One number a row. The last row belongs to no sequence and stays 0."""

    def __init__(self, rows: int, tokens_per_block: int, max_tokens: int) -> None:
        self.rows, self.max_tokens = rows, max_tokens
        self.free = list(range(rows - 1, -1, -1))
        self.states = bytearray([CLOSED.code]) * (rows + 1)
        """Of each row's sequence; CLOSED if it has none."""
        self.counts = [0] * len(SEQUENCE.states)
        """How many rows are in each state."""
        self.counts[CLOSED.code] = rows
        self.promised_frames = 0
        """Frames that running sequences were promised and do not have yet."""
        self.scheduled: Column = np.zeros(rows + 1, np.int64)
        """Tokens written, counting steps in flight."""
        self.settled: Column = np.zeros(rows + 1, np.int64)
        """Tokens written by settled steps."""
        self.known: Column = np.zeros(rows + 1, np.int64)
        """Tokens whose ids were committed."""
        self.capacity: Column = np.zeros(rows + 1, np.int64)
        """Tokens that the mapped and charged memory has room for; 0 unless ACTIVE."""
        self.ample: Column = np.zeros(rows + 1, np.int64)
        """Tokens up to which nothing must be charged and no frame of the margin is lacking."""
        self.steps: Column = np.zeros(rows + 1, np.int64)
        """Steps in flight."""
        self.life: Column = np.zeros(rows + 1, np.int64)
        self.base: Column = np.zeros(rows + 1, np.int64)
        """The address of the first token row on the GPU; 0 unless ACTIVE."""
        self.open_block = np.zeros((rows + 1, tokens_per_block), np.int32)
        """The known token ids of the block that is not full yet."""
        self.version = 0
        """Grows with every change that could make a step illegal."""
        self.stays = 0
        """Stays of sequences in ranges so far: their numbers."""

    def enter(self, row: int, code: int) -> None:
        """The sequence of a row comes to be in that state. The one place that counts them."""
        self.counts[self.states[row]] -= 1
        self.counts[code] += 1
        self.states[row] = code

    def set_life(self, row: int, life: int) -> None:
        """Change one row. Batches must look again: they remember what their members have."""
        self.life[row] = life
        self.version += 1

    def set_base(self, row: int, address: int) -> None:
        """Change one row. Batches must look again: they remember what their members have."""
        self.base[row] = address
        self.version += 1

    def set_lengths(self, row: int, tokens: int) -> None:
        """All three lengths of one row: nothing is in flight, and ids are known at most so far."""
        self.scheduled[row] = self.settled[row] = tokens
        self.known[row] = min(tokens, int(self.known[row]))


class Transfer:
    """A copy between tiers that was issued, or (with neither direction) a wait for an event."""

    __slots__ = (
        "inward", "keeps", "kind", "life", "nodes", "onboards", "outward", "partial", "pieces",
        "range", "seq", "slots", "sources", "state", "token",
    )  # fmt: skip

    def __init__(
        self, token: int, seq: Sequence | None, range_: Range, slots: Sequence_[Run] = (),
        nodes: Sequence_[Node] = (), *, outward: bool = False, inward: bool = False,
        keeps: bool = False, onboards: bool = False,
    ) -> None:  # fmt: skip
        self.token, self.range, self.slots = token, range_, slots
        self.seq = seq
        """Whose bytes it moves; None if they are canonical pages, of however many sequences."""
        self.nodes = nodes
        """What the index calls the pages that it keeps, or that are hits."""
        self.partial: Node | None = None
        """The block of which only the first tokens are a hit."""
        self.sources: Sequence_[Range] = ()
        """Ranges of others that hits are read from."""
        self.pieces: Sequence_[tuple[int, int, int]] = ()
        """(address, where from, bytes) of the hits."""
        self.outward, self.inward, self.keeps, self.onboards = outward, inward, keeps, onboards
        self.kind = "transfer" if outward or inward or keeps or onboards else "fence"
        """As what it holds its range: a copy, or a wait for the caller's event."""
        self.life = -1 if seq is None else seq.life
        self.state = ISSUED.code

    def __str__(self) -> str:
        return f"transfer {self.token}" + ("" if self.seq is None else f" of {self.seq}")

    def enter(self, code: int) -> None:
        """Change the state."""
        self.state = code

    @property
    def loads(self) -> bool:
        """It brings bytes to the GPU."""
        return self.inward or self.onboards

    @property
    def current(self) -> bool:
        """The sequence's bytes still live the life that the transfer was issued in."""
        return self.seq is not None and self.seq.life == self.life


class Arrived(NamedTuple):
    """What guards read of a sequence of which no copy is in flight."""

    state: int
    steps: int
    committing: bool
    life: int
    writing: bool = False
    loading: bool = False


class Sequence(Handle):
    """One sequence. Every method is the manager's call of that name; see `Manager`."""

    __slots__ = (
        "_life", "columns", "commits", "editions", "extent_frames", "extras", "held_tokens",
        "identity", "keys", "kv", "last_stay", "matched_tokens", "max_tokens", "nodes", "pages",
        "promised_frames", "prompt", "range", "reserves", "row", "slots", "state", "stream",
        "transfer", "uid",
    )  # fmt: skip
    instead = "pass it on as it is, or `fork` it for one that goes its own way"

    def __init__(
        self, kv: Manager, uid: int, row: int, max_tokens: int, identity: Identity, prompt: bytes,
        commits: bool,
    ) -> None:  # fmt: skip
        self.kv, self.uid, self.row = kv, uid, row
        self.columns = kv.columns
        self.max_tokens, self.identity, self.commits = max_tokens, identity, commits
        self.prompt = prompt
        """The ids that it is known to begin with, as int32: of its prompt, or of an earlier
        life."""
        self.extras: Extras = {}
        """What some blocks depend on besides token ids, by number."""
        self.reserves = False
        """It was promised room for all its tokens when it was let in."""
        self.matched_tokens = 0
        """Tokens of its prompt whose bytes somebody else had written. Known for sure after
        `resume`."""
        self.extent_frames = kv.geometry.extent(max_tokens)
        """The addresses that its range must have, in frames."""
        self._life = int(self.columns.life[row])
        self.columns.enter(row, CREATED.code)
        self.state = CREATED.code
        """The code of its state."""
        self.promised_frames = 0
        """Frames that it may still ask for and nobody else may have."""
        blocks = kv.geometry.blocks(max_tokens)
        self.pages = Cells(self, bytearray(blocks), kv.arena.counts.pages)
        self.range: Range | None = None
        self.last_stay = 0
        """The number of its present stay in a range, or of the last one."""
        self.slots: Sequence_[Run] = ()
        """Its host slots, in the order of its pages."""
        self.held_tokens = 0
        """Tokens whose bytes its host slots have, or will have."""
        self.transfer: Transfer | None = None
        """The copy of this life that is in flight."""
        self.stream: Stream = None
        self.keys: list[bytes] = []
        """The token ids of each committed block, as int32 bytes."""
        self.editions: list[int] = []
        """Whose bytes each committed block has: a number of its own, or that of what it copied."""
        self.nodes: list[Node] = []
        """What the index calls each committed block. One that is gone from it is of no use."""

    def __str__(self) -> str:
        return f"sequence {self.uid}"

    __repr__ = __str__

    # What guards and effects of the sequence table read and write.

    def enter(self, code: int) -> None:
        """Change the state."""
        if code != self.state:
            self.columns.enter(self.row, code)
            self.state = code
            self.columns.version += 1

    @property
    def life(self) -> int:
        """The number of this life of its bytes."""
        return self._life

    @life.setter
    def life(self, life: int) -> None:
        self._life = life
        self.columns.set_life(self.row, life)

    @property
    def steps(self) -> int:
        """Steps in flight that name it."""
        return self.columns.steps.item(self.row)

    @property
    def writing(self) -> bool:
        """A copy of it to the host is in flight."""
        return self.transfer is not None and self.transfer.outward

    @property
    def loading(self) -> bool:
        """A copy of it to the GPU is in flight."""
        return self.transfer is not None and self.transfer.loads

    @property
    def arrived(self) -> Sequence | Arrived:
        """What it is to guards once its copy to the GPU, if one is in flight, has arrived."""
        return Arrived(self.state, self.steps, self.commits, self.life) if self.loading else self

    @property
    def committing(self) -> bool:
        """Full blocks become read-only."""
        return self.commits

    @committing.setter
    def committing(self, value: int) -> None:
        self.commits = bool(value)
        self.columns.version += 1

    # What a caller reads.

    @property
    def state_name(self) -> str:
        """The name of its state."""
        return SEQUENCE.states[self.state].name

    @property
    def length_tokens(self) -> int:
        """Tokens that settled steps have written."""
        return self.columns.settled.item(self.row)

    @property
    def scheduled_tokens(self) -> int:
        """Tokens written once every step in flight is done."""
        return self.columns.scheduled.item(self.row)

    @property
    def committed_tokens(self) -> int:
        """Tokens whose ids are known; whole blocks of them are read-only."""
        return self.columns.known.item(self.row)

    @property
    def known_ids(self) -> bytes:
        """The ids of its committed tokens, as int32. O(tokens)."""
        size, known = self.kv.reuse.index.block_bytes, self.committed_tokens
        rest = self.columns.open_block[self.row, : known % self.columns.open_block.shape[1]]
        return b"".join(key[:size] for key in self.keys) + rest.tobytes()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that there is mapped and charged memory for."""
        return self.columns.capacity.item(self.row)

    @property
    def base(self) -> int | None:
        """The address of its first token row on the GPU; None while it has no range."""
        return None if self.range is None else self.range.base

    @property
    def stay(self) -> int | None:
        """The number of its present stay in a range; None while it has no GPU memory.

        Addresses of the sequence, tensor views, and CUDA graphs that were captured over either are
        good while this is what it was. `resume`, `fork` (for the child), `dummy` and a `rewind`
        that moves begin a stay; `suspend`, `drop`, `close` and a load that fails end it. No other
        call changes it. No two stays of a manager have the same number.
        """
        return None if self.range is None else self.last_stay

    @property
    def written_tokens(self) -> int:
        """Tokens that memory on the GPU has, or will have once copies and steps are done."""
        return max(self.scheduled_tokens, self.held_tokens)

    @property
    def held_pages(self) -> int:
        """Pages that are on the host."""
        states = self.pages.states
        return sum(states.count(state.code) for state in _HELD)

    @property
    def dropped_pages(self) -> int:
        """Pages whose bytes were given up."""
        return self.pages.states.count(DROPPED.code)

    @property
    def shared_tokens(self) -> int:
        """Tokens at its beginning in memory that other sequences map too: a rewind cannot go into
        them."""
        range_ = self.range
        if range_ is None:
            return 0
        span, geometry = range_.home_of, self.kv.geometry
        mapped = span is not None and span.users
        frames = span.end if span is not None and mapped else len(range_.aliases.states)
        return geometry.tokens(frames)

    def set_capacity(self, tokens: int) -> None:
        """Its range, if it has one, has room for so many tokens. The one place that counts what was
        promised: that is what a range has not."""
        self.columns.capacity[self.row] = tokens
        self.set_ample()
        if self.reserves:
            whole, range_ = self.kv.geometry.frames(self.max_tokens), self.range
            promised = 0 if range_ is None else max(0, whole - range_.used)
            self.columns.promised_frames += promised - self.promised_frames
            self.promised_frames = promised

    def set_ample(self) -> None:
        """Its range, if it has one, is mapped as far as it is now."""
        tokens, range_, geometry = self.capacity_tokens, self.range, self.kv.geometry
        ahead = self.kv.config.gpu.map_ahead_frames
        if ahead and range_ is not None and range_.mapped < geometry.frames(self.max_tokens):
            tokens = min(tokens, geometry.tokens(range_.mapped - ahead))
        self.columns.ample[self.row] = tokens

    def forget_tokens(self) -> None:
        """Its bytes are gone: it has no tokens. Their ids are remembered, for a hit later."""
        size = self.kv.reuse.index.block_bytes
        known = b"".join(key[:size] for key in self.keys)
        self.prompt = max(self.prompt, known, key=len)
        self.columns.known[self.row] = 0
        self.columns.set_lengths(self.row, 0)
        self.slots, self.keys, self.nodes, self.held_tokens = (), [], [], 0
        self.editions = []
        self.matched_tokens = 0

    # What a caller does.

    def resume(self, stream: Stream = None) -> None:
        """See `Manager.resume`."""
        self.kv.resume(self, stream)

    def fork(self, max_tokens: int | None = None, stream: Stream = None) -> Sequence:
        """See `Manager.fork`."""
        return self.kv.fork(self, max_tokens, stream)

    def resize(self, capacity_tokens: int) -> None:
        """See `Manager.resize`."""
        self.kv.resize(self, capacity_tokens)

    def rewind(self, length_tokens: int) -> None:
        """See `Manager.rewind`."""
        self.kv.rewind(self, length_tokens)

    def commit(self, tokens: npt.ArrayLike) -> None:
        """See `Manager.commit`."""
        self.kv.commit(self, tokens)

    def stop_committing(self) -> None:
        """See `Manager.stop_committing`."""
        self.kv.stop_committing(self)

    def suspend(self, after: Event = None) -> None:
        """See `Manager.suspend`."""
        self.kv.suspend(self, after)

    def drop(self, after: Event = None) -> None:
        """See `Manager.drop`."""
        self.kv.drop(self, after)

    def close(self, after: Event = None) -> None:
        """See `Manager.close_sequence`."""
        self.kv.close_sequence(self, after)


class Batch(Handle):
    """Sequences that are stepped together. Build one with `Manager.batch`.

    Keep it from step to step and change it with `add` and `remove`: what it has worked out about
    its sequences is then worked out once.
    """

    __slots__ = (
        "_counts", "_tokens", "bases", "columns", "commit_version", "entries", "life", "lives",
        "mask", "members", "named", "places", "rows", "seqs", "streams", "version",
    )  # fmt: skip
    instead = "make another one with `batch`"
    members: dict[Sequence, int]
    """Its sequences, in order, with their numbers in it. Replaced and never written into."""
    rows: Column
    """Their rows, in the batch's order."""
    entries: slice | Column
    """What it works on of each column."""
    places: Column
    """Where in that its members are, in the batch's order."""
    mask: Column
    """1 for the entries of its members; `named` is the same as truth values."""
    named: npt.NDArray[np.bool_]
    _counts: Column
    _tokens: int | None

    def __init__(self, life: Life, columns: Columns, seqs: Iterable[Sequence]) -> None:
        self.life, self.columns = life, columns
        self.version = -1
        """The version of the columns at which every member was found ready to step."""
        self.streams: list[Stream] = []
        """Those of its members, at that version."""
        self.lives = self.bases = np.zeros(0, np.int64)
        """Those of its entries, at that version. Replaced and never written into."""
        self.commit_version = -1
        """The same for committing."""
        members = dict[Sequence, None]()
        for seq in seqs:
            self._check_new(seq, members)
            members[seq] = None
        self._change(members)

    def __str__(self) -> str:
        return "a batch"

    @property
    def state_name(self) -> str:
        """That of its members, if it may be stepped."""
        return "ACTIVE"

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.members)

    def __contains__(self, seq: object) -> bool:
        return seq in self.members

    @guarded
    def add(self, seq: Sequence) -> None:
        """Put a sequence at the end of the batch. Raises ArgumentError if it is in it already.
        O(batch)."""
        self._check_new(seq, self.members)
        self.life.change()
        self._change([*self.members, seq])

    @guarded
    def remove(self, seq: Sequence) -> None:
        """Take a sequence out. Raises ArgumentError if it is not in it. O(batch)."""
        self._check(seq)
        if seq not in self.members:
            raise ArgumentError(f"{seq} is not in the batch")
        self.life.change()
        self._change([one for one in self.members if one is not seq])

    def counts(self, tokens: int | npt.ArrayLike) -> Column:
        """Tokens an entry: `tokens` for each member, or one number for each in the batch's order.
        Raises ArgumentError if one is not from 0 to the longest that a sequence may be."""
        if type(tokens) is int and tokens == self._tokens:
            return self._counts
        numbers = counts("tokens", tokens, len(self), self.columns.max_tokens, one=True)
        found = np.zeros_like(self.mask)
        found[self.places] = numbers
        self._tokens = None  # an interrupt may leave one of the two, and never both of two calls
        self._counts = found
        self._tokens = None if numbers.ndim else int(numbers)
        return found

    def place(self, seq: Sequence) -> int:
        """Where the entry of a member is."""
        return self.places.item(self.members[seq])

    def ready(self) -> None:
        """Every member was found ready to step, as things are. O(batch)."""
        self.streams = list({id(seq.stream): seq.stream for seq in self.seqs}.values())
        self.lives = self.columns.life[self.entries].copy()
        self.bases = self.columns.base[self.entries].copy()
        self.version = self.columns.version

    def _check(self, seq: Sequence) -> None:
        if type(seq) is not Sequence or seq.columns is not self.columns:
            raise foreign(seq, Sequence)

    def _check_new(self, seq: Sequence, members: Container[Sequence]) -> None:
        self._check(seq)
        if seq in members:
            raise ArgumentError(f"{seq} is in the batch already")

    def _change(self, members: Iterable[Sequence]) -> None:
        """Be these from now on."""
        self.members = {seq: at for at, seq in enumerate(members)}
        self.seqs = tuple(self.members)
        self.rows = np.fromiter((seq.row for seq in self.seqs), np.int64, len(self.seqs))
        whole = len(self.rows) * _PICKED >= self.columns.rows
        self.entries = slice(None) if whole else self.rows
        self.places = self.rows if whole else np.arange(len(self.rows))
        self.mask = np.zeros(self.columns.rows + 1 if whole else len(self.rows), np.int64)
        self.mask[self.places] = 1
        self.named = self.mask.astype(np.bool_)
        self._counts, self._tokens = self.mask, None
        self.version = self.commit_version = -1


def foreign(subject: object, kind: type[Sequence | Batch | Step]) -> ArgumentError:
    """The error for what is no such object, or is one that another manager has made: all that is
    known of it is in that one's books."""
    name = kind.__name__
    if type(subject) is kind:
        return ArgumentError(f"{subject} is used by another manager than the manager that made it")
    found = f"{name.lower()} is {described(subject)}"
    return ArgumentTypeError(f"{found}: {article(name)} of this manager is wanted")


class Step(Handle):
    """One step of a batch: who writes how many tokens from which position. Made by
    `Manager.step`."""

    __slots__ = (
        "bases", "columns", "counts", "ends", "entries", "fenced", "lives", "mask", "members",
        "number", "places", "rows", "seqs", "state", "streams", "version",
    )  # fmt: skip
    instead = "settle it as it is"

    def __init__(self, number: int, batch: Batch, counts: Column, ends: Column) -> None:
        self.number, self.columns = number, batch.columns
        self.seqs, self.members, self.rows = batch.seqs, batch.members, batch.rows
        self.entries, self.places, self.mask = batch.entries, batch.places, batch.mask
        self.counts, self.ends = counts, ends
        self.lives, self.bases = batch.lives, batch.bases
        self.version = self.columns.version
        self.streams = batch.streams
        """On which its work is launched."""
        self.state = STEP_ISSUED.code
        self.fenced: list[Range] = []
        """Freed ranges whose fence waits for this step."""

    def __str__(self) -> str:
        return f"step {self.number}"

    @property
    def state_name(self) -> str:
        """The name of its state."""
        return STEP.states[self.state].name

    def enter(self, code: int) -> None:
        """Change the state."""
        self.state = code

    @property
    def start_tokens(self) -> Column:
        """The position of the first new token of each sequence, in the batch's order."""
        return self.ends[self.places] - self.count_tokens

    @property
    def count_tokens(self) -> Column:
        """How many new tokens each sequence has, in the batch's order."""
        return self.counts[self.places]

    @property
    def living(self) -> npt.NDArray[np.bool_]:
        """Which entries are of bytes that still live the life that the step was issued in."""
        living: npt.NDArray[np.bool_] = self.columns.life[self.entries] == self.lives
        return living

    def names(self, seq: Sequence) -> bool:
        """The step writes tokens of this sequence."""
        return seq in self.members

    def place(self, seq: Sequence) -> int:
        """Where the entry of a sequence that it names is."""
        return self.places.item(self.members[seq])

    def void(self, seq: Sequence) -> None:
        """Make the step mean nothing for one sequence: the tokens it continued were rejected."""
        self.lives = self.lives.copy()
        self.lives[self.place(seq)] = -1
