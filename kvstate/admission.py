"""Admission: how sequences come to be, and come to have memory.

A sequence begins with what others have: the frames of a span, mapped; copies of pages that the host
or a running sequence has; and of the block where it goes its own way, the tokens before that. A
fork begins with all that its parent has. What was suspended begins with what the host holds for it.

What a sequence could have is looked up again when its range is planned, never remembered: between
`create` and `resume` anything may have gone (report B79).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

import numpy as np
import numpy.typing as npt
from attrs import frozen

from kvstate import runs
from kvstate.arena import Range
from kvstate.blocks import Node
from kvstate.device import Stream
from kvstate.errors import KvStateError, OutOfRows
from kvstate.guard import guarded
from kvstate.keys import ID_BYTES, Adapter, Extras, Identity, checked_extras, token_bytes
from kvstate.lines import source_of
from kvstate.plan import Plan, Run
from kvstate.runs import runs_of
from kvstate.sequence import Sequence, Transfer
from kvstate.spans import Sharing
from kvstate.spec.compiled import MACHINES, ObjectRow
from kvstate.spec.page import ALIASED
from kvstate.spec.sequence import ACTIVE, CLOSED
from kvstate.stepping import Stepping
from kvstate.values import flag, whole

if TYPE_CHECKING:
    from kvstate.manager import Manager

_RESUME: Final = MACHINES.object("sequence.resume")
_FORK: Final = MACHINES.object("sequence.fork")


@frozen
class Match:
    """What a sequence can begin with."""

    nodes: list[Node]
    """Whole blocks, from the first on."""
    tail_tokens: int = 0
    """Tokens of the block after them, or of a parent's blocks that the index does not have."""
    partial: Node | None = None
    """The block that has the tail, unless a parent has it."""
    parent: Sequence | None = None


NOTHING: Final = Match([])


@frozen
class Start:
    """A planned beginning."""

    plan: Plan
    range: Range
    match: Match
    sharing: Sharing | None
    copied: list[Node]
    """Whole blocks that are copied and not mapped."""


class Admission(Stepping):
    """The calls that admit sequences and give them memory."""

    @guarded
    def create(
        self,
        prompt_tokens: npt.ArrayLike | None = None,
        max_tokens: int | None = None,
        *,
        salt: bytes = b"",
        adapter: Adapter = None,
        extra_keys: Extras | None = None,
        commit: bool = True,
        reserve: bool = False,
    ) -> Sequence:
        """Admit a sequence of at most `max_tokens` tokens. It holds no memory yet.

        `prompt_tokens` is one row of int32 (see `values.ids`). Its longest prefix that
        somebody has comes with `resume`; `matched_tokens` says how long that is, now as a forecast
        (it may be gone by then, report B79), afterwards for sure. `salt` names its tenant and
        `adapter` its adapter: nothing is found across them. `extra_keys` says of blocks, by their
        number, what their bytes depend on besides tokens (the digest of an image, say). With
        `commit=False` its blocks stay writable and private. With `reserve` it is let in only if all
        its `max_tokens` fit beside what others have reserved or hold, and then it never waits for
        memory in the middle. Raises ArgumentError, OutOfRows, or OutOfFrames if it could not even
        run alone (report B140).
        """
        self._enter()
        prompt = b"" if prompt_tokens is None else token_bytes(prompt_tokens, "prompt_tokens")
        tokens = self._longest(max_tokens, self.config.max_tokens)
        extras = checked_extras(extra_keys, self.geometry.blocks(tokens))
        identity = Identity(salt, adapter, self.reuse.epoch)
        commits, reserves = flag("commit", commit), flag("reserve", reserve)
        seq = self._admit(prompt, tokens, identity, extras, commit=commits)
        seq.reserves = reserves
        seq.matched_tokens = self._tokens(self._match_of(seq))
        return seq

    def _admit(
        self, prompt: bytes, tokens: int, identity: Identity, extras: Extras, *,
        commit: bool,
    ) -> Sequence:  # fmt: skip
        frames = self.geometry.frames(tokens)
        if frames > self.gpu.budget_frames:
            raise self._refused(self._short(f"a sequence of {tokens} tokens", frames, "limit"))
        if not self.columns.free:
            rows = self.columns.rows
            raise self._refused(OutOfRows(f"all {rows} rows are in use; close a sequence first"))
        self.life.change()
        self._created += 1
        row = self.columns.free.pop()
        seq = Sequence(cast("Manager", self), self._created, row, tokens, identity, prompt, commit)
        seq.extras = extras
        self.sequences[seq.uid] = seq
        return seq

    def _longest(self, max_tokens: int | None, default: int) -> int:
        if max_tokens is None:
            return default
        return whole("max_tokens", max_tokens, 1, self.config.max_tokens)

    # Looking up.

    @guarded
    def probe_reuse(
        self,
        prompt_tokens: npt.ArrayLike,
        *,
        salt: bytes = b"",
        adapter: Adapter = None,
        extra_keys: Extras | None = None,
    ) -> int:
        """How many tokens a sequence with this prompt would have from others now.

        Changes nothing, not even what is used least.
        """
        self._enter()
        prompt, epoch = token_bytes(prompt_tokens, "prompt_tokens"), self.reuse.epoch
        longest = self.config.max_tokens
        extras = checked_extras(extra_keys, self.geometry.blocks(longest))
        found = self._look_up(Identity(salt, adapter, epoch), prompt, extras, longest)
        return self._tokens(found)

    def _match_of(self, seq: Sequence) -> Match:
        identity = self.reuse.current(seq.identity)
        return self._look_up(identity, seq.prompt, seq.extras, seq.max_tokens)

    def _look_up(self, identity: Identity, prompt: bytes, extras: Extras, max_tokens: int) -> Match:
        """What others have of a prompt. Its last token is always computed."""
        most = min(max(0, len(prompt) // ID_BYTES - 1), max_tokens)
        nodes = self.reuse.hits(identity, prompt, extras, most // self.config.tokens_per_block)
        if not self.config.partial_blocks:
            return Match(nodes)
        start = len(nodes) * self.config.tokens_per_block
        rest = prompt[start * ID_BYTES : most * ID_BYTES]
        found = self.reuse.partial(identity, nodes, rest, extras.get(len(nodes)))
        return Match(nodes) if found is None else Match(nodes, found[1], found[0])

    def _tokens(self, match: Match) -> int:
        return len(match.nodes) * self.config.tokens_per_block + match.tail_tokens

    def _copy_of(self, parent: Sequence) -> Match:
        """All that a parent has: whole blocks as far as the index names its own, then its tail."""
        length, block = parent.length_tokens, self.config.tokens_per_block
        nodes = parent.nodes[: length // block]
        own = (self._exact(parent, node) for node in nodes)
        count = next((at for at, exact in enumerate(own) if not exact), len(nodes))
        return Match(nodes[:count], length - count * block, None, parent)

    def _exact(self, seq: Sequence, node: Node) -> bool:
        """The canonical page of the block is the sequence's, or is what it maps."""
        aliased = seq.pages.states[node.ordinal] == ALIASED.code
        return source_of(node) is not None and (aliased or node.owner is seq)

    @guarded
    def admits(self, capacity_tokens: int) -> bool:
        """Whether the gate would let a sequence of that many tokens in now.

        It does if the charge stays within `max_utilization_for_resume` of the budget, or if
        nothing else runs and the sequence fits at all. Parked memory does not count against it,
        nor do spans that may be given up.
        Changes nothing.
        """
        tokens = whole("capacity_tokens", capacity_tokens)
        frames = max(1, self.geometry.frames(tokens))
        return frames <= self.gpu.usable_frames and self._admits(frames)

    def _admits(self, frames: int, sharing: Sharing | None = None) -> bool:
        if not self._running:
            return frames <= self.gpu.budget_frames
        limit = self.config.max_utilization_for_resume * self.gpu.usable_frames
        kept = self.gpu.in_spans - self.spans.frames_without(sharing)
        return self.gpu.charged + kept + frames <= limit

    @property
    def _running(self) -> int:
        """Sequences that run: whoever begins beside none may have the protected share too."""
        return self.columns.counts[ACTIVE.code]

    def _unpromised(self, sharing: Sharing | None = None, *, competing: bool) -> int:
        """Frames that no sequence has and that none was promised; without the protected share if
        somebody is `competing` for them."""
        kept = self.gpu.in_spans - self.spans.frames_without(sharing, competing=competing)
        return self.gpu.usable_frames - self.gpu.charged - kept - self.columns.promised_frames

    @guarded
    def fits(self, max_tokens: int, shared_tokens: int = 0) -> int:
        """How many more sequences of that length could all run to their end now, if each maps the
        same `shared_tokens` that somebody has already. Whole frames are shared, as in `resume`."""
        self._enter()
        tokens, unit = whole("max_tokens", max_tokens, 1), self.spans.unit_frames
        alike = whole("shared_tokens", shared_tokens, 0, tokens)
        shared = self.geometry.whole_frames(alike) // unit * unit
        each = max(1, self.geometry.frames(tokens) - shared)
        one = not self._running and self._unpromised(competing=False) >= each
        return max(int(one), self._unpromised(competing=True) // each)

    @guarded
    def largest_max_tokens(self, sequences: int = 1) -> int:
        """The longest that this many sequences can all become in the whole budget, in tokens."""
        frames = self.gpu.budget_frames // whole("sequences", sequences, 1)
        return min(self.config.max_tokens, self.geometry.tokens(frames))

    # Beginning.

    @guarded
    def resume(self, seq: Sequence, stream: Stream = None) -> None:
        """Give the sequence a range; if it was suspended, copy its bytes back.

        One that begins (again) gets the longest prefix of its prompt that somebody has: it then has
        `matched_tokens` tokens, which need not be computed. Whole frames of it that are on the GPU
        are mapped, free of charge; the rest is copied. A copy is issued, not waited for: later work
        of `stream` waits for it on the device. Only its own copy to the host is waited for, if that
        has not ended. Raises OutOfFrames, from the gate too (see
        `admits`), DeviceError if the stream is of another device, and StreamCaptured if it is being
        captured. If the copy fails, the
        sequence is SUSPENDED again, or DROPPED if it was a prefix, and steps issued meanwhile mean
        nothing.
        """
        self._enter(seq)
        self._begin(seq, stream, None)

    @guarded
    def fork(
        self, parent: Sequence, max_tokens: int | None = None, stream: Stream = None
    ) -> Sequence:
        """A new sequence that has all settled tokens of another: whole frames of whole blocks are
        mapped, the rest is copied on the device.

        It is ACTIVE, and each goes its own way from there. `stream` as in `resume`; whatever wrote
        the tokens must be done, but for a copy to the GPU, which is waited for. Raises OutOfFrames
        or OutOfRows with nothing changed. If the copy fails later, the new one is DROPPED.
        """
        self._enter(parent)
        tokens = self._longest(max_tokens, parent.max_tokens)
        self.device.check_stream(stream)
        self._legal_once_arrived(_FORK, parent)
        least = max(1, parent.length_tokens)
        self._check_length(parent, "fork", least, tokens, self.config.max_tokens)
        self.flight.arrive(parent)
        self._legal(_FORK, parent)
        child = self._admit(
            parent.known_ids, tokens, parent.identity, parent.extras, commit=parent.commits
        )
        try:
            self._begin(child, stream, parent)
        except KvStateError:
            self.columns.enter(child.row, CLOSED.code)
            self.sequences.pop(child.uid)
            self.columns.free.append(child.row)
            raise
        self.counters["forks"] += 1
        return child

    def _begin(self, seq: Sequence, stream: Stream, parent: Sequence | None) -> None:
        self.device.check_stream(stream)
        if seq.writing and seq.transfer is not None:
            self.flight.finish([seq.transfer.token])
        start = self._attempt(_RESUME, seq, self._plan_begin, stream, parent)
        plan, range_ = start.plan, start.range
        fresh = not seq.slots
        self.actor.run(plan)
        if plan.token is not None:
            self.flight.issue(self._load(seq, start, fresh=fresh), plan.size_bytes)
        self.flight.settle(plan)
        self._share(seq, start)
        if fresh:
            self._match(seq, start.match)
        else:
            self.reuse.doubles.add(seq)
        self._occupy(seq, range_, stream)
        self.counters["starts" if fresh else "resumes"] += 1

    def _occupy(self, seq: Sequence, range_: Range, stream: Stream) -> None:
        """The range is the sequence's."""
        if range_.number in self.arena.ranges:
            self.arena.unpark(range_)
            self.counters["adoptions"] += 1
        else:
            self.arena.reserve(range_)
        range_.pages.states.clear()
        seq.range, seq.stream = range_, stream
        range_.give(seq)
        self.columns.set_base(seq.row, range_.base)
        self.columns.stays += 1
        seq.last_stay = self.columns.stays
        self._set_capacity(seq)

    def _load(self, seq: Sequence, start: Start, *, fresh: bool) -> Transfer:
        """The copy that brings what the sequence begins with."""
        plan, match, copied = start.plan, start.match, start.copied
        assert plan.token is not None
        kind = {"onboards": True} if fresh else {"inward": True}
        transfer = Transfer(plan.token, seq, start.range, plan.room, copied, **kind)
        transfer.partial, transfer.pieces = match.partial, plan.pieces
        transfer.sources = self._sources(match, copied)
        return transfer

    def _sources(self, match: Match, copied: list[Node]) -> list[Range]:
        """The ranges that a copy of these blocks and of the tail reads."""
        read = copied if match.partial is None else [*copied, match.partial]
        sources = [source_of(node) for node in read]
        if match.parent is not None and match.tail_tokens:
            sources.append(match.parent.range)
        return list(dict.fromkeys(source for source in sources if source is not None))

    def _share(self, seq: Sequence, start: Start) -> None:
        """What is mapped of others is settled."""
        sharing = start.sharing
        if sharing is not None:
            self.spans.shared(sharing, start.range)
            self.reuse.lined_up(sharing.nodes)
            mapped = start.match.nodes[: sharing.blocks]
            self.reuse.joined(seq, mapped)
            self.reuse.index.touch(mapped[-1:])
            self.counters["hit_blocks.alias"] += sharing.blocks
            self.counters["aliased_frames"] += sharing.frames

    def _match(self, seq: Sequence, match: Match) -> None:
        """The sequence begins with what was found."""
        nodes, tokens = match.nodes, self._tokens(match)
        if match.parent is None:
            seq.identity = self.reuse.current(seq.identity)
        seq.matched_tokens = 0 if match.parent is not None else tokens
        if seq.transfer is not None:
            self.reuse.onboard(seq.transfer, seq)
            seq.held_tokens = tokens
        seq.nodes, seq.keys = list(nodes), [node.key for node in nodes]
        seq.editions = [node.edition for node in nodes]
        self.columns.set_lengths(seq.row, tokens)
        self.columns.known[seq.row] = len(nodes) * self.config.tokens_per_block
        if 0 < match.tail_tokens < self.config.tokens_per_block:
            self._open(seq, match.tail_tokens)

    def _open(self, seq: Sequence, tail_tokens: int) -> None:
        """The ids of the tokens in the block that is not full are known, as far as its prompt says
        them."""
        start = int(self.columns.known[seq.row])
        ids = np.frombuffer(seq.prompt, np.int32)[start : start + tail_tokens]
        self.columns.open_block[seq.row, : len(ids)] = ids
        self.columns.known[seq.row] += len(ids)

    def _plan_begin(
        self, chosen: ObjectRow, seq: Sequence, stream: Stream, parent: Sequence | None
    ) -> Start:
        match = self._beginning(seq, parent)
        tokens = seq.held_tokens or self._tokens(match)
        sharing, range_, parked = self._lodging(seq, match, tokens)
        shared = 0 if sharing is None else sharing.blocks
        nodes, frames = match.nodes, self.geometry.frames(tokens)
        copied = nodes[shared:]
        operands = {} if sharing is None else self.spans.operands(sharing, range_, seq.pages)
        plan = self._plan_frames(seq, {range_: frames}, self._margin(seq, frames))
        plan.base, plan.stream = range_.base, stream
        plan.room = seq.slots or self._served(match, copied)
        plan.size_bytes = tokens * self.geometry.row_bytes
        if not seq.slots:
            plan.pieces = self._hit_pieces(range_, match, copied)
            plan.size_bytes = sum(size for _, at, size in plan.pieces if self.host.owns(at))
        blocks, full = self.geometry.blocks(tokens), len(nodes)
        opened = self.geometry.blocks(min(seq.max_tokens, self.geometry.tokens(frames)))
        operands |= self._growth(plan, seq, range_, frames, blocks) | runs.hosted(seq, opened)
        operands |= self._taking(range_, parked=parked)
        if not seq.slots:
            operands |= {
                "hits": ((seq.pages, shared, full),),
                "primed": ((seq.pages, full, blocks),),
                "served": plan.room,
            }
        plan.operands = operands
        plan.move(_RESUME, seq, chosen)
        if parent is not None:
            plan.move(_FORK, parent)
        return Start(plan, range_, match, sharing, copied)

    def _lodging(
        self, seq: Sequence, match: Match, tokens: int
    ) -> tuple[Sharing | None, Range, bool]:
        """What of the match is mapped, the range that the sequence gets, and whether it is a parked
        one. Nothing is mapped if spans would take the addresses that sequences need."""
        sharing = self._sharing(seq, match)
        found = self._range_beside(seq, match, tokens, sharing)
        if sharing is not None and not self.arena.leaves_room(found[0], sharing.span):
            sharing, found = None, self._range_beside(seq, match, tokens, None)
        return sharing, *found

    def _range_beside(
        self, seq: Sequence, match: Match, tokens: int, sharing: Sharing | None
    ) -> tuple[Range, bool]:
        """The range of a sequence that the gate lets in with what it maps, and copies the rest."""
        self._check_gate(seq, tokens, sharing)
        copied = match.nodes[0 if sharing is None else sharing.blocks :]
        return self._range_for(seq, tokens, sharing, self._sources(match, copied))

    def _taking(self, range_: Range, *, parked: bool) -> runs.Operands:
        """What it means to take a range over, or fresh addresses."""
        return {
            "adopted" if parked else "reserved": (range_,),
            "parked_pages": ((range_.pages, 0, len(range_.pages.states)),),
        }

    def _beginning(self, seq: Sequence, parent: Sequence | None) -> Match:
        if parent is not None:
            return self._copy_of(parent)
        if seq.slots:
            return NOTHING
        return self._match_of(seq)

    def _whole(self, seq: Sequence, sharing: Sharing | None) -> int:
        """The frames of its own that a sequence of full length needs."""
        return self.geometry.frames(seq.max_tokens) - (0 if sharing is None else sharing.frames)

    def _sharing(self, seq: Sequence, match: Match) -> Sharing | None:
        """What of the match is mapped; nothing if a copy is faster and memory is plenty. One that
        begins alone can be finished beside it."""
        alone = None if self._running else seq.max_tokens
        sharing, share = self.spans.sharing(match.nodes, alone), self.config.gpu.copy_share
        if sharing is None or share == 1:
            return sharing
        mapped = self.arena.fitting(seq.extent_frames, (sharing.span.number, sharing.frames))
        free = self.gpu.free + self.gpu.parked - sharing.frames
        return None if mapped is None and free >= share * self.gpu.budget_frames else sharing

    def _check_gate(self, seq: Sequence, tokens: int, sharing: Sharing | None) -> None:
        """Raise OutOfFrames if a sequence that begins with so many tokens is not let in."""
        needed = self._needed(tokens, sharing)
        if not self._admits(needed, sharing):
            raise self._short(str(seq), needed, "gate")
        whole = self._whole(seq, sharing) if seq.reserves else needed
        if not seq.reserves and not self.columns.promised_frames:
            return
        if whole > self._unpromised(sharing, competing=self._running > 0):
            raise self._short(str(seq), whole, "reserve")

    def _needed(self, tokens: int, sharing: Sharing | None) -> int:
        """Frames of its own that a sequence needs for its first tokens."""
        return max(1, self.geometry.frames(tokens) - (0 if sharing is None else sharing.frames))

    def _range_for(
        self, seq: Sequence, tokens: int, sharing: Sharing | None, spare: list[Range]
    ) -> tuple[Range, bool]:
        """The range that the sequence gets, and whether it is a parked one. None of those to
        `spare`, from which it copies."""
        frames, extent = self.geometry.frames(tokens), seq.extent_frames
        needed = self._needed(tokens, sharing)
        begins = None if sharing is None else (sharing.span.number, sharing.frames)
        parked = self.arena.fitting(extent, begins) if self.config.adopt else None
        if parked is None and self.config.adopt and needed > self.gpu.free:
            retaining = self.arena.retained(extent, begins, spare)
            if retaining is not None:
                raise self._short(str(seq), needed, "retained", {retaining: frames})
        range_ = parked or self.arena.vacant(extent)
        if range_ is None:
            raise self._short(str(seq), extent, "addresses")
        return range_, parked is not None

    def _margin(self, seq: Sequence, frames: int) -> int:
        """How many frames beyond these it will need soon: its prompt is written next."""
        if not self.config.gpu.map_ahead_frames or not frames:
            return 0
        prompt = self.geometry.frames(len(seq.prompt) // ID_BYTES)
        return min(max(prompt, frames) + 1, self.geometry.frames(seq.max_tokens)) - frames

    def _served(self, match: Match, copied: list[Node]) -> list[Run]:
        """The host slots that are read."""
        read = copied if match.partial is None else [*copied, match.partial]
        slots = [node.slot for node in read if source_of(node) is None]
        return runs_of(self.host.cells, [slot for slot in slots if slot is not None])

    def _hit_pieces(
        self, range_: Range, match: Match, copied: list[Node]
    ) -> list[tuple[int, int, int]]:
        """(address, where from, bytes) of what is copied."""
        size, full = self.geometry.block_bytes, len(match.nodes)
        places = [self._place(node) for node in copied]
        pieces = runs.joined([range_.base + node.ordinal * size for node in copied], places, size)
        if match.tail_tokens:
            parent = None if match.parent is None else match.parent.base
            place = self._place(match.partial) if match.partial else (parent or 0) + full * size
            length = match.tail_tokens * self.geometry.row_bytes
            pieces.append((range_.base + full * size, place, length))
        return pieces

    def _place(self, node: Node) -> int:
        """Where the bytes of a block can be read: on the GPU, else on the host."""
        source, size = source_of(node), self.geometry.block_bytes
        if source is not None:
            return source.base + node.ordinal * size
        assert node.slot is not None
        return self.host.address + node.slot * size
