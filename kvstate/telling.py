"""What the index tells of its blocks, to whom, and why a block is told no more.

A block is told in a tier when its bytes are there, after the block before it, and until one of the
two is not so any more: no prefix of what is told has a hole.

Listeners are held weakly. An engine that lets go of a publisher without closing it has no way to
close it later; if the index kept it, every change would be written down for no reader, for ever.
Rejected: a finaliser of the publisher that closes it. It may run on any thread, in the middle of a
change.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal
from weakref import ref

from kvstate.blocks import Listener, Loss, Medium, Node, descendants

log = logging.getLogger("kvstate")


class Telling(ABC):
    """The part of the index that tells listeners what changes."""

    def __init__(self) -> None:
        self.epoch = 0
        """Of the weights: newcomers find only what is of the same."""
        self.closed = False
        """Nothing is told any more."""
        self._ears: tuple[ref[Listener], ...] = ()

    @abstractmethod
    def walk(self) -> Iterator[Node]:
        """Every block, a parent before its children."""

    def close(self) -> None:
        """The memory of all blocks is given back: listeners are to forget everything, and hear
        nothing more. A second close does nothing. O(blocks)."""
        if not self.closed:
            self.closed = True
            self._forget_told(Loss.CLOSED)

    def listen(self, listener: Listener) -> None:
        """Tell a listener what changes from now on, for as long as its owner holds it; `recite`
        tells it what is there. Cost: everything, for the first one."""
        if not self._listening():
            for node in self.walk():
                node.told = self._shown(node)
        self._ears += (ref(listener),)

    def ignore(self, listener: Listener) -> None:
        """Tell it nothing more, if it listens."""
        self._ears = tuple(ear for ear in self._ears if ear() is not listener)

    def hears(self, listener: Listener) -> bool:
        """It is told what changes."""
        return any(ear() is listener for ear in self._ears)

    def recite(self, listener: Listener) -> None:
        """Tell a listener what all listeners know. At least one must listen. Cost: everything."""
        for node in self.walk():
            for medium in node.told:
                listener.stored(node, medium)

    def _listening(self) -> list[Listener]:
        """The listeners that are still held by their owners."""
        found = [listener for ear in self._ears if (listener := ear()) is not None]
        if len(found) < len(self._ears):
            self._ears = tuple(ear for ear in self._ears if ear() is not None)
        return found

    def _shown(self, node: Node) -> tuple[Medium, ...]:
        """The tiers that listeners are to know of."""
        of_old = node.root is not None and node.root.identity.weights_epoch < self.epoch
        if self.closed or of_old or (node.parent is not None and not node.parent.told):
            return ()
        return node.media if node.landed else node.media[: node.owner is not None]

    def _tell(self, node: Node, why: Loss | None = None) -> None:
        """Tell listeners what has become of a block, and with it of those behind it."""
        waiting = [node] if self._ears else []
        while waiting:
            one = waiting.pop()
            waiting += list(one.children.values())[::-1] if self._retell(one, why) else []

    def _retell(self, node: Node, why: Loss | None) -> bool:
        """Tell what has become of one block; whether those behind it can be told now."""
        before, wanted = node.told, self._shown(node)
        if before and not wanted:
            for one in [*descendants(node.children)][::-1]:
                self._hide(one, Loss.CUT)
        for medium in before:
            if medium not in wanted:
                self._tell_all("removed", node, medium, why)
        node.told = wanted
        for medium in wanted:
            if medium not in before:
                self._tell_all("stored", node, medium)
        return bool(wanted and not before)

    def _hide(self, node: Node, why: Loss) -> None:
        """A block is not told any more."""
        for medium in node.told:
            self._tell_all("removed", node, medium, why)
        node.told = ()

    def _forget_told(self, why: Loss) -> None:
        for node in self.walk():
            node.told = ()
        self._tell_all("cleared", why)

    def _tell_all(self, what: Literal["stored", "removed", "cleared"], *told: object) -> None:
        """Tell all listeners. One that raises is at fault, and the call that is told of is not."""
        for listener in self._listening():
            try:
                getattr(listener, what)(*told)
            except Exception:
                log.exception("%r raised, and hears nothing more", listener)
                self.ignore(listener)
