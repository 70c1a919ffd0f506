"""The naive model: what each sequence must read back, and nothing else.

It knows no frames, no slots and no tables. It is told what a caller did and what came of it, and
from that alone says how long every sequence is, in which phase its caller believes it to be, and
who wrote each of its tokens. Whatever the manager does to memory in between must not be visible
here.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from kvstate import pattern

SegmentRow = tuple[int, int, int, int, int]
"""A row of `SEGMENT`."""


Writers = tuple[tuple[int, int], ...]
"""(count, key) runs of those who wrote some tokens."""
Block = tuple[bytes, tuple[int, ...]]
"""What a block must be found by: its tenant, and all tokens up to its end."""


class Library:
    """Who may have written each block that was ever committed: what a hit may bring."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.known: dict[Block, list[Writers]] = {}

    def enter(self, story: Story, known: int) -> None:
        """Blocks of the story have become full since it knew that many tokens."""
        size = self.block_tokens
        for end in range(known - known % size + size, story.known + 1, size):
            writers = story.writers(end - size, end)
            entries = self.known.setdefault(self._block(story, end), [])
            if writers not in entries:
                entries.append(writers)

    def candidates(self, story: Story, end: int) -> list[Writers]:
        """Who may have written the block of the story's prompt that ends there: runs of each."""
        return self.known.get(self._block(story, end, story.prompt), [])

    def _block(self, story: Story, end: int, tokens: list[int] | None = None) -> Block:
        return story.tenant, tuple((story.tokens if tokens is None else tokens)[:end])


@define(eq=False)
class Story:
    """One sequence, as its caller sees it."""

    uid: int
    max_tokens: int
    tenant: bytes
    committing: bool
    phase: str = "CREATED"
    settled: int = 0
    scheduled: int = 0
    known: int = 0
    life: int = 0
    """Ends when its bytes are lost: steps of an earlier life mean nothing."""
    writer: int = 0
    """Changes whenever tokens are taken back, so that old bytes do not look like new ones."""
    written: list[tuple[int, int]] = field(factory=list)
    """(count, key) runs, from the first token on."""
    undefined: bool = False
    """A dummy: its bytes mean nothing."""
    tokens: list[int] = field(factory=list)
    """The ids of its known tokens."""
    prompt: list[int] = field(factory=list)
    """What it is known to begin with."""
    block_tokens: int = 1

    def write(self, count: int) -> int:
        """The next tokens are written; the key of their writer."""
        key = pattern.key(self.uid, self.writer, self.tenant)
        if self.written and self.written[-1][1] == key:
            self.written[-1] = (self.written[-1][0] + count, key)
        elif count:
            self.written.append((count, key))
        self.scheduled += count
        return key

    def name(self, tokens: Iterable[int]) -> None:
        """The ids of the next tokens are known."""
        self.tokens += tokens
        self.known = len(self.tokens)

    def begin(self, runs: list[tuple[int, int]]) -> None:
        """It begins with tokens of its prompt that others have written: (count, key) of each."""
        self.written = runs
        self.scheduled = self.settled = self.known = sum(count for count, _ in runs)
        self.tokens = self.prompt[: self.known]

    def writers(self, start: int, end: int) -> Writers:
        """Who wrote the tokens from `start` up to `end`: (count, key) runs."""
        found, first = [], 0
        for count, key in self.written:
            low, high = max(first, start), min(first + count, end)
            if low < high:
                found.append((high - low, key))
            first += count
        return tuple(found)

    def take_back(self, length: int) -> None:
        """Only the first `length` tokens are left, and whoever writes next is somebody else."""
        kept, left = [], length
        for count, key in self.written:
            if left > 0:
                kept.append((min(count, left), key))
            left -= count
        self.written = kept
        self.scheduled = self.settled = length
        del self.tokens[length:]
        self.known = len(self.tokens)
        self.writer += 1

    def lose(self, phase: str) -> None:
        """All its bytes are gone. Of its tokens it remembers the whole blocks."""
        whole = len(self.tokens) - len(self.tokens) % self.block_tokens
        self.prompt = max(self.prompt, self.tokens[:whole], key=len)
        self.take_back(0)
        self.life += 1
        self.phase = phase

    def rows(
        self, address: int, start: int, end: int, row_bytes: int, row: int = -1
    ) -> list[SegmentRow]:
        """What the tokens from `start` up to `end` must be, as rows of `SEGMENT`.

        `address` is where the first token of the sequence is, or would be; relative to what the
        device's table has for `row`, if one is given.
        """
        found: list[SegmentRow] = []
        first = 0
        for count, key in self.written:
            low, high = max(first, start), min(first + count, end)
            if low < high:
                found.append((address + low * row_bytes, low, high - low, key, row))
            first += count
        return found
