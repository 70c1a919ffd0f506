"""The spans of the registry by when they were used, with what of them can be given up as a sum.

The latest used that fit in the protected share are kept apart from those before them. So a use, a
newcomer or a loss moves the border between both by what it changed, and no call goes over all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from kvstate.spec.span import REGISTERED

if TYPE_CHECKING:
    from kvstate.spans import Span


class Registered:
    """Every registered span, by number. Each call costs O(1), and the spans that come to be
    protected, or are no longer."""

    def __init__(self, protected_frames: int) -> None:
        self._older: OrderedDict[int, Span] = OrderedDict()
        self._latest: OrderedDict[int, Span] = OrderedDict()
        """The latest used, up to the first that does not fit in the protected share."""
        self._left = protected_frames
        """What the latest leave of it."""
        self.idle_frames = 0
        """Frames of spans that no sequence maps, nor a span behind them."""
        self._protected_idle = 0
        """Those of them that the latest have."""

    def __len__(self) -> int:
        return len(self._older) + len(self._latest)

    def __iter__(self) -> Iterator[Span]:
        """Those that were used longest ago first, and of a chain the last."""
        return chain(self._older.values(), self._latest.values())

    def __contains__(self, span: Span) -> bool:
        return span.number in self._latest or span.number in self._older

    def protects(self, span: Span) -> bool:
        """It is one of the latest used."""
        return span.number in self._latest

    def spare_frames(self, *, protected: bool) -> int:
        """Frames that nobody needs; if the latest are `protected`, without theirs."""
        return self.idle_frames - (self._protected_idle if protected else 0)

    def use(self, span: Span) -> None:
        """A registered span is the latest used."""
        if span.number in self._latest:
            self._latest.move_to_end(span.number)
        else:
            del self._older[span.number]
            self._protect(span, last=True)
            self._balance()

    def add(self, span: Span) -> None:
        """Enter a span, as the latest used."""
        self.idle_frames += 0 if span.needed else span.own_frames
        self._protect(span, last=True)
        self._balance()

    def remove(self, span: Span) -> None:
        """Strike a span."""
        self.idle_frames -= 0 if span.needed else span.own_frames
        if span.number in self._older:
            del self._older[span.number]
        else:
            self._unprotect(span)
            self._balance()

    def offer(self, span: Span) -> None:
        """A span is the next to be given up."""
        if span.number in self._latest:
            self._unprotect(span)
        self._older[span.number] = span
        self._older.move_to_end(span.number, last=False)
        self._balance()

    def need(self, span: Span, by: int) -> None:
        """It is needed from now on, or (by -1) no more."""
        self.idle_frames -= by * span.own_frames
        if span.number in self._latest:
            self._protected_idle -= by * span.own_frames

    def _balance(self) -> None:
        """Move the border to where it belongs."""
        while self._left < 0:
            span = next(iter(self._latest.values()))
            self._unprotect(span)
            self._older[span.number] = span
        while self._older:
            span = next(reversed(self._older.values()))
            if span.own_frames > self._left or span.state != REGISTERED.code:
                return
            del self._older[span.number]
            self._protect(span, last=False)

    def _protect(self, span: Span, *, last: bool) -> None:
        self._latest[span.number] = span
        self._latest.move_to_end(span.number, last=last)
        self._left -= span.own_frames
        self._protected_idle += 0 if span.needed else span.own_frames

    def _unprotect(self, span: Span) -> None:
        del self._latest[span.number]
        self._left += span.own_frames
        self._protected_idle -= 0 if span.needed else span.own_frames
