"""Spans: what sequences share by mapping the very same frames.

A newcomer's longest prefix that lies in whole units in somebody's memory is mapped into its range,
read-only and free of charge; a unit is the least run of addresses that is both whole frames and
whole blocks, so no page is shared in part. What is beyond the last whole unit is copied.

This file finds the memory and keeps the registry: who has which span, how recently, and which may
be given up. A protected share of the budget is not: without it a burst spills the prefixes exactly
when they are worth most (report S10). Asking changes nothing (report S08).

What can be given up is asked by every admission, so it is a sum (see `registered`): the spans that
sequences need are counted as ranges get and lose their owners. Law 16 compares with the names.

Rejected: a count of aliases in place of their names. A range that is released twice would free
somebody else's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from kvstate.arena import Range
from kvstate.blocks import Node
from kvstate.config import Config, Geometry
from kvstate.keys import ID_BYTES
from kvstate.plan import Cells, Frames
from kvstate.registered import Registered
from kvstate.runs import Operands
from kvstate.sequence import Columns, Sequence
from kvstate.spec.alias import ALIASED
from kvstate.spec.page import COMMITTED, PRIVATE
from kvstate.spec.sequence import ACTIVE
from kvstate.spec.span import LIVE


class Span:
    """Frames of a canonical prefix: those of its home's aliases first, then its own."""

    __slots__ = (
        "end", "first_frame", "frames", "holders", "home", "needed", "nodes", "number", "pages",
        "registry", "state", "used",
    )  # fmt: skip

    def __init__(self, number: int, home: Range, registry: Spans) -> None:
        self.number, self.home, self.registry = number, home, registry
        self.first_frame = self.end = len(home.aliases.states)
        """Its own frames, counted from the beginning of the prefix."""
        self.frames = Frames(self, registry.counts)
        """Its own frames, once they are the registry's."""
        self.nodes: list[Node] = []
        """What the index calls its own blocks."""
        self.pages = Cells(self, bytearray())
        """The records of their pages, once they are the registry's."""
        self.holders: dict[int, Range] = {}
        """Ranges that alias it, by number."""
        self.needed = 0
        """How many of them a sequence has, or are homes of spans that are needed."""
        self.used = 0
        self.state = LIVE.code

    def __str__(self) -> str:
        return f"span {self.number}"

    def enter(self, code: int) -> None:
        """Change the state."""
        self.state = code

    def need(self, by: int) -> None:
        """A range that aliases it is needed from now on, or (by -1) no more. The one place that
        counts what is idle. O(1), and the spans before it that nobody needed, or needs now."""
        span: Span | None = self
        while span is not None:
            span.needed += by
            if span.needed - by and span.needed:
                return
            if span in self.registry.registered:
                self.registry.registered.need(span, by)
            span = span.home.span if span.home.owner is None else None

    @property
    def aliases(self) -> int:
        """Ranges that alias it."""
        return len(self.holders)

    @property
    def users(self) -> int:
        """Sequences that map it, or a span behind it. O(ranges that alias those)."""
        behind = ranges_behind(self)
        return sum(range_.owner is not None for range_ in behind)

    @property
    def base(self) -> int:
        """Where its home maps the beginning of the prefix."""
        return self.home.base

    def first(self, cells: Cells) -> int:
        """Where its own frames begin, in frames from its base."""
        return self.first_frame

    @property
    def own_frames(self) -> int:
        """How many of the frames are not those of a span before it."""
        return self.end - self.first_frame

    def ids(self, count: int) -> list[int]:
        """The first that many frames of the prefix."""
        parts = list[list[int]]()
        for span in _chain(self):
            own = span.home.frames if span.state == LIVE.code else span.frames
            parts.append(own.ids[: max(0, count - span.first_frame)])
            count = min(count, span.first_frame)
        return [name for part in reversed(parts) for name in part]


class Sharing(NamedTuple):
    """What a newcomer maps: the span, how much of it, and which of its blocks are new to it."""

    span: Span
    frames: int
    blocks: int
    nodes: list[Node]
    """What the span gets besides its present blocks."""


class Passage(NamedTuple):
    """The span that a sequence leaves to others, and what it gets besides its present blocks."""

    span: Span
    nodes: list[Node]
    end: int
    """Its blocks then, counted from the beginning of the prefix."""
    pages: Cells
    """The records of the pages of its own blocks, for then."""


class Spans:
    """Every span of one manager."""

    def __init__(
        self, config: Config, geometry: Geometry, columns: Columns, counts: list[int]
    ) -> None:
        self.mode, self.geometry, self.counts = config.spans, geometry, counts
        self.unit_frames: Final = geometry.align_bytes // geometry.frame_bytes
        self.unit_blocks: Final = geometry.align_bytes // geometry.block_bytes
        self.key_bytes: Final = ID_BYTES * geometry.tokens_per_block
        self.columns = columns
        self.registered = Registered(geometry.protected_frames)
        self.clock = self.made = 0

    # Sharing.

    def sharing(self, hits: list[Node], alone_tokens: int | None = None) -> Sharing | None:
        """The longest beginning of these blocks that can be mapped. Changes nothing.

        With `alone_tokens`, only what leaves a sequence of that length room to be finished when
        nothing else runs: it keeps the whole span, what it does not map too.
        """
        if self.mode == "off":
            return None
        for units in range(len(hits) // self.unit_blocks, 0, -1):
            blocks, frames = units * self.unit_blocks, units * self.unit_frames
            span = self._backing(hits, blocks)
            if span is not None and self._leaves_room(span, frames, alone_tokens):
                own = hits[self._blocks(span.end) : blocks]
                return Sharing(span, frames, blocks, own)
        return None

    def _leaves_room(self, span: Span, frames: int, alone_tokens: int | None) -> bool:
        if alone_tokens is None:
            return True
        kept = frames_of(_chain(span)) + max(0, frames - span.end)
        return kept + self.geometry.frames(alone_tokens) - frames <= self.geometry.budget_frames

    def _backing(self, hits: list[Node], blocks: int) -> Span | None:
        """The span that has these blocks, or can have them; one that is new is not entered yet."""
        owner = hits[blocks - 1].owner
        if isinstance(owner, Span):
            return owner
        if not isinstance(owner, Sequence) or owner.range is None:
            return None
        span = self._of(owner.range)
        first = self._blocks(span.end)
        canonical = all(node.owner is owner for node in hits[first:blocks])
        return span if canonical and self._full(owner, first, blocks) else None

    def _of(self, range_: Range) -> Span:
        """The span of a running sequence, or one that it could have."""
        return range_.home_of or Span(self.made + 1, range_, self)

    def _full(self, seq: Sequence, first: int, end: int) -> bool:
        """These pages of the sequence are canonical, and their bytes are there."""
        states = seq.pages.states[first:end]
        return states.count(COMMITTED.code) == len(states)

    def operands(
        self, sharing: Sharing, range_: Range, pages: Cells, first: int | None = None
    ) -> Operands:
        """What mapping it into a range means, which has the `first` frames of it already. A fresh
        range gets the aliases, still VACANT."""
        span, aliases, low = sharing.span, range_.aliases, self._blocks(first or 0)
        found: Operands = {"sharing": (span,), "aliased": ((pages, low, sharing.blocks),)}
        if range_.span is None and first is None:
            aliases.states = bytearray(sharing.frames)
            range_.span = span
            found["shared"] = ((aliases, 0, sharing.frames),)
        if sharing.nodes:
            low = span.end - span.first_frame
            end = sharing.frames - span.first_frame
            found["enlisted"] = ((span.home.frames, low, end),)
        return found

    def shared(self, sharing: Sharing, range_: Range) -> None:
        """The frames are mapped into that range: it holds the span from now on."""
        span = sharing.span
        if sharing.nodes:
            self._enter(span)
            span.nodes += sharing.nodes
            span.end = sharing.frames
        span.holders[range_.number] = range_
        if range_.owner is not None:
            span.need(1)
        self.touch(span)

    def _enter(self, span: Span) -> None:
        if span.home.home_of is None:
            self.made += 1
            span.home.home_of = span

    def touch(self, span: Span) -> None:
        """Make a span, and those before it, the most recently used."""
        self.clock += 1
        for one in _chain(span):
            one.used = self.clock
            if one in self.registered:
                self.registered.use(one)

    # Remapping.

    def duplicate(self, seq: Sequence) -> Sharing | None:
        """What a sequence has copies of and could map instead, at the same addresses."""
        range_ = seq.range
        if range_ is None or range_.home_of is not None or seq.transfer is not None:
            return None
        first = len(range_.aliases.states)
        blocks = seq.committed_tokens // self.geometry.tokens_per_block
        sharing = self.sharing(seq.nodes[:blocks], seq.max_tokens)
        if sharing is None or sharing.frames <= first or sharing.span.home is range_:
            return None
        low, high = self._blocks(first), sharing.blocks
        pages = seq.pages.states[low:high]
        copies = pages.count(PRIVATE.code) == len(pages)
        same = seq.editions[low:high] == [node.edition for node in seq.nodes[low:high]]
        before = [] if range_.span is None else range_.span.ids(first)
        return sharing if copies and same and sharing.span.ids(first) == before else None

    def frames_of_copies(self, seq: Sequence, sharing: Sharing) -> int:
        """Frames of its own that a sequence could do without."""
        return sharing.frames - (0 if seq.range is None else len(seq.range.aliases.states))

    def remapping(self, sharing: Sharing, seq: Sequence) -> Operands:
        """What it means to map that much where the sequence has its copies."""
        range_ = seq.range
        assert range_ is not None
        first = len(range_.aliases.states)
        vacant = Cells(range_, bytearray(self.frames_of_copies(seq, sharing)))
        found = self.operands(sharing, range_, seq.pages, first)
        return found | {"shared": ((vacant, 0, len(vacant.states)),)}

    def remapped(self, sharing: Sharing, range_: Range) -> None:
        """The frames are mapped in place of the sequence's own."""
        if range_.span is not None:
            del range_.span.holders[range_.number]
            range_.span.need(-1)
        range_.aliases.states = bytearray([ALIASED.code]) * sharing.frames
        range_.span = sharing.span
        self.shared(sharing, range_)

    # Leaving.

    def passage(self, seq: Sequence, epoch: int, *, closing: bool) -> Passage | None:
        """The span that a sequence leaves to others when it leaves its range.

        All that was ever shared; if it closes and `spans` is "all", its whole prompt.
        """
        range_ = seq.range
        if range_ is None:
            return None
        span = self._of(range_)
        keeps = closing and self.mode == "all" and seq.identity.weights_epoch == epoch
        nodes = self._rest(seq, span) if keeps else []
        if range_.home_of is None and not nodes:
            return None
        end = self._blocks(span.end) + len(nodes)
        records = bytearray(end - self._blocks(span.first_frame))
        return Passage(span, nodes, end, Cells(span, records))

    def _rest(self, seq: Sequence, span: Span) -> list[Node]:
        """The blocks of its prompt behind the span that could be in it, in whole units."""
        first = self._blocks(span.end)
        last = len(seq.prompt) // self.key_bytes
        nodes = seq.nodes[first : max(first, last)]
        mine = next((at for at, node in enumerate(nodes) if node.owner is not seq), len(nodes))
        mine -= mine % self.unit_blocks
        return nodes[:mine] if self._full(seq, first, first + mine) else []

    def passing(self, passage: Passage | None) -> Operands:
        """What leaving it means. Its frames come before all others of the range."""
        if passage is None:
            return {}
        span, cells = passage.span, passage.span.home.frames
        own, pages = self.passed_frames(passage), passage.pages
        return {
            "frames": ((cells, own, len(cells.ids)),),
            "passing": (span,),
            "passed": ((cells, 0, own, span.frames),),
            "pinned": ((pages, 0, len(pages.states)),),
        }

    def shared_frames(self, range_: Range, passage: Passage | None) -> int:
        """Frames at the beginning of a range that are not its own once its owner has left."""
        return range_.shared if passage is None else self._frames(passage.end)

    def passed_frames(self, passage: Passage | None) -> int:
        """Frames of its own that a sequence leaves to the registry."""
        return 0 if passage is None else self._frames(passage.end) - passage.span.first_frame

    def passed(self, passage: Passage) -> None:
        """The span is the registry's, just before that is settled: ranges land when it is."""
        span = passage.span
        self._enter(span)
        span.nodes += passage.nodes
        span.end, span.pages = self._frames(passage.end), passage.pages
        self.registered.add(span)
        self.touch(span)

    # Giving up.

    def spillable(self, *, all_of_them: bool = False) -> list[Span]:
        """The spans that a reclaim may give up, in this order: no sequence maps them, and they are
        not among the latest used that make up the protected share, which one sequence alone may
        have too. O(spans)."""
        kept = self.protecting and not all_of_them
        spans, protects = self.registered, self.registered.protects
        return [one for one in spans if not one.needed and not (kept and protects(one))]

    @property
    def protecting(self) -> bool:
        """The protected share is kept while sequences compete; one alone may have it all."""
        return self.columns.counts[ACTIVE.code] > 1

    def rewound(self, seq: Sequence, blocks: int) -> Operands:
        """What it means for its own span that a sequence keeps only so many blocks. Nobody else
        maps what it writes again."""
        range_ = seq.range
        span = None if range_ is None else range_.home_of
        if span is None or blocks >= self._blocks(span.end):
            return {}
        return {"ending": (span,), "delisted": ((span.home.frames, 0, span.own_frames),)}

    def frames_without(self, sharing: Sharing | None, *, competing: bool = False) -> int:
        """Frames that a reclaim can take from spans if that much is mapped once more; if somebody
        is `competing`, the protected share is none of them. O(1), and the spans before the one that
        is mapped that nobody needs."""
        spans, protected = self.registered, competing or self.protecting
        found = spans.spare_frames(protected=protected)
        for span in _chain(None if sharing is None else sharing.span) if found else ():
            if span.needed or (protected and spans.protects(span)):
                break  # so are those before it
            found -= span.own_frames if span in spans else 0
        return found

    @property
    def spillable_frames(self) -> int:
        """Frames that a reclaim can take from spans."""
        return self.frames_without(None)

    def unaliased(self, range_: Range) -> None:
        """A range maps nothing of its span any more."""
        if range_.span is not None:
            del range_.span.holders[range_.number]
            range_.span = None
        range_.aliases.states.clear()

    def emptied(self, span: Span) -> None:
        """The bytes of a span are given up: it goes first."""
        span.nodes.clear()
        span.pages.states.clear()
        span.used = 0
        self.registered.offer(span)

    def spilled(self, span: Span) -> None:
        """A span is given up, and so is its home."""
        span.home.home_of = None
        self.registered.remove(span)

    def ended(self, range_: Range) -> None:
        """A running sequence has its span no more."""
        range_.home_of = None

    def _blocks(self, frames: int) -> int:
        return frames // self.unit_frames * self.unit_blocks

    def _frames(self, blocks: int) -> int:
        return blocks // self.unit_blocks * self.unit_frames


def ranges_behind(span: Span) -> list[Range]:
    """The ranges that alias a span, or one behind it: each before those that alias what is at home
    there."""
    found, waiting = list[Range](), [span]
    while waiting:
        for range_ in waiting.pop().holders.values():
            found.append(range_)
            if range_.home_of is not None:
                waiting.append(range_.home_of)
    return found


def _chain(span: Span | None) -> Iterator[Span]:
    """A span and those before it, each of which begins earlier: so it ends."""
    while span is not None:
        yield span
        before = span.home.span
        assert before is None or before.first_frame < span.first_frame, f"{before} is before {span}"
        span = before


def frames_of(spans: Iterable[Span]) -> int:
    """The frames that spans have of their own."""
    return sum(span.own_frames for span in spans)
