"""The naive model: what each sequence must read back, and nothing else.

It knows no frames, no slots and no tables. It is told what a caller did and what came of it, and
from that alone says how long every sequence is, in which phase its caller believes it to be, and
who wrote each of its tokens. Whatever the manager does to memory in between must not be visible
here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, TypeAlias

from attrs import define, field

from kvstate import pattern

SegmentRow = tuple[int, int, int, int, int]
"""A row of `SEGMENT`."""
Ids: TypeAlias = "array[int]"
"""Token ids, packed as int32: long prompts are many, and a block's key is a slice of them."""
Writers = tuple[tuple[int, int], ...]
"""(count, key) runs of those who wrote some tokens."""


BlockKey = tuple[bytes, bytes]
"""The ids of a block's tokens, and what else it depends on."""


def packed(ids: Iterable[int] = ()) -> Ids:
    """The ids as they are kept. Raises OverflowError for one that is no int32."""
    return array("i", ids)


class Broken(AssertionError):
    """Something that must hold does not. `kind` says what; equal kinds are the same failure."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


class Library:
    """Who may have written each block that was ever committed: what a hit may bring.

    A block is known by its tenant and by all tokens up to its end.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._names: dict[object, dict[BlockKey, int]] = {}
        """A number for each block, by the one before it (or the root) and its key."""
        self._writers: list[list[Writers]] = []
        self.parents: dict[int, int] = {}
        """The block before each one that is not the first."""

    def enter(self, story: Story) -> None:
        """Blocks of the story may have become full."""
        size = self.block_tokens
        while (len(story.path) + 1) * size <= story.known:
            start = len(story.path) * size
            names = self._names.setdefault(story.above(story.path), {})
            key = self._key(story, len(story.path), story.tokens)
            name = names.setdefault(key, len(self._writers))
            if name == len(self._writers):
                self._writers.append([])
                self.parents.update({name: story.path[-1]} if story.path else {})
            story.path.append(name)
            writers = story.writers(start, start + size)
            if writers not in self._writers[name]:
                self._writers[name].append(writers)

    def find(self, above: object, key: BlockKey) -> int | None:
        """The block with that key behind another one, or first of a root."""
        return self._names.get(above, {}).get(key)

    def path(self, story: Story, tokens: Ids) -> list[int]:
        """The blocks that these tokens fill whole, if they are said by a story like that one."""
        found: list[int] = []
        for at in range(len(tokens) // self.block_tokens):
            name = self.find(story.above(found), self._key(story, at, tokens))
            assert name is not None, "they were entered"
            found.append(name)
        return found

    def candidates(self, story: Story, blocks: int) -> list[list[Writers]]:
        """Who may have written each of the first blocks of the story's prompt; and its path."""
        path: list[int] = []
        for _ in range(blocks):
            key = self._key(story, len(path), story.prompt)
            name = self._names.get(story.above(path), {}).get(key)
            if name is None:
                return []
            path.append(name)
        story.path = path
        return [self._writers[name] for name in path]

    def partly(self, story: Story, tokens: int) -> list[Writers]:
        """Who may have written the next tokens of the story's prompt, as the first of some block
        behind those that `candidates` has found."""
        ids, extra = self._key(story, len(story.path), story.prompt)
        wanted = ids[: tokens * story.prompt.itemsize]
        names = self._names.get(story.above(story.path), {}).items()
        alike = [name for (ids, other), name in names if ids.startswith(wanted) and other == extra]
        return [_first(writers, tokens) for name in alike for writers in self._writers[name]]

    def _key(self, story: Story, block: int, tokens: Ids) -> BlockKey:
        start = block * self.block_tokens
        ids = tokens[start : start + self.block_tokens]
        return ids.tobytes(), story.extras.get(block, b"")


def _first(writers: Writers, tokens: int) -> Writers:
    """Who wrote the first of these tokens."""
    found = []
    for count, key in writers:
        if tokens > 0:
            found.append((min(count, tokens), key))
        tokens -= count
    return tuple(found)


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same (count, key) runs, with neighbours of one key as one."""
    joined: list[tuple[int, int]] = []
    for count, key in runs:
        before = joined.pop()[0] if joined and joined[-1][1] == key else 0
        joined.append((before + count, key))
    return joined


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
    tokens: Ids = field(factory=packed)
    """The ids of its known tokens."""
    prompt: Ids = field(factory=packed, converter=packed)
    """What it is known to begin with."""
    block_tokens: int = 1
    path: list[int] = field(factory=list)
    """What the library calls its full known blocks."""
    extras: dict[int, bytes] = field(factory=dict)
    """What some of its blocks depend on besides tokens."""
    born: Any = None
    """The call that made it."""
    epoch: int = 0
    """Of the weights that its bytes are of."""

    def above(self, path: list[int]) -> object:
        """What the library finds the next block behind a path by."""
        return path[-1] if path else (self.tenant, self.epoch)

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
        self.tokens.extend(tokens)
        self.known = len(self.tokens)

    def begin(self, runs: list[tuple[int, int]]) -> None:
        """It begins with tokens of its prompt that others have written: (count, key) of each."""
        self.written = _joined(runs)
        self.scheduled = self.settled = self.known = sum(count for count, _ in runs)
        self.tokens = self.prompt[: self.known]

    def fork(self, uid: int, max_tokens: int, known: int) -> Story:
        """Another one that has all its settled tokens, and knows so many of their ids."""
        child = Story(uid, max_tokens, self.tenant, self.committing, phase="ACTIVE")
        child.written = list(_first(tuple(self.written), self.settled))
        child.scheduled = child.settled = self.settled
        child.prompt, child.tokens = packed(self.tokens), self.tokens[:known]
        child.known, child.block_tokens, child.epoch = known, self.block_tokens, self.epoch
        child.extras, child.path = self.extras, self.path[: known // self.block_tokens]
        child.undefined, child.born = self.undefined, self.born
        return child

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
        del self.path[length // self.block_tokens :]
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
