"""The naive model: what each sequence must read back, and nothing else.

It knows no frames, no slots and no tables. It is told what a caller did and what came of it, and
from that alone says how long every sequence is, in which phase its caller believes it to be, and
who wrote each of its tokens. Whatever the manager does to memory in between must not be visible
here.
"""

from __future__ import annotations

from attrs import define, field

from kvstate import pattern

SegmentRow = tuple[int, int, int, int, int]
"""A row of `SEGMENT`."""


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

    def write(self, count: int) -> int:
        """The next tokens are written; the key of their writer."""
        key = pattern.key(self.uid, self.writer, self.tenant)
        if self.written and self.written[-1][1] == key:
            self.written[-1] = (self.written[-1][0] + count, key)
        elif count:
            self.written.append((count, key))
        self.scheduled += count
        return key

    def take_back(self, length: int) -> None:
        """Only the first `length` tokens are left, and whoever writes next is somebody else."""
        kept, left = [], length
        for count, key in self.written:
            if left > 0:
                kept.append((min(count, left), key))
            left -= count
        self.written = kept
        self.scheduled = self.settled = length
        self.known = min(self.known, length)
        self.writer += 1

    def lose(self, phase: str) -> None:
        """All its bytes are gone."""
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
