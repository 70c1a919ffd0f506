"""Which of many blocks at one place begins most like what is wanted.

A shared system prompt has as many blocks behind it as there are conversations, so looking for part
of a block must not go over them. It goes over tokens: a radix tree of the siblings' token ids,
whose branches each know the sibling below that was inserted first. It is made when it is first
wanted, and not for a few siblings: those are compared one by one. What is known here is the index's
own, once more: it may be thrown away at any time.

Rejected: a sorted list, whose neighbours share the most but are not the first of equals; a list of
all siblings in each branch, which a new branch above many would have to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Final

from kvstate.blocks import Node, Root
from kvstate.keys import ID_BYTES

FEW: Final = 8
"""Up to so many siblings are compared one by one."""
_SPARE: Final = 16
"""Entries of a queue that may be dead, besides as many as are not."""
_TOKEN_BITS: Final = 8 * ID_BYTES


class Branch:
    """Siblings that begin alike, two at least; or all of them, and then any number."""

    __slots__ = ("below", "like", "queue", "size_bytes")

    def __init__(self, like: bytes, size_bytes: int) -> None:
        self.like = like
        """A key that begins as all of them do, for so many bytes."""
        self.size_bytes = size_bytes
        self.below: dict[bytes, Branch | Node] = {}
        """By the next token."""
        self.queue: list[tuple[int, bytes]] = []
        """A heap of who is first below each token: never later than it is. Tokens that nothing is
        below any more are dropped when they come up."""

    def put(self, key: bytes, first: int, one: Branch | Node) -> None:
        """Add what goes on as that key does; the serial number of the first of it. O(log n)."""
        if len(self.queue) > 2 * len(self.below) + _SPARE:
            least = {token: first for first, token in sorted(self.queue, reverse=True)}
            self.queue = sorted((least[token], token) for token in self.below)
        token = self.next(key)
        self.below[token] = one
        heappush(self.queue, (first, token))

    def next(self, key: bytes) -> bytes:
        """The token of a key by which it goes on from here."""
        return key[self.size_bytes : self.size_bytes + ID_BYTES]

    def front(self) -> Branch | Node:
        """What has the first entry of the queue."""
        while self.queue[0][1] not in self.below:
            heappop(self.queue)
        return self.below[self.queue[0][1]]


class Siblings:
    """The blocks at one place. Those with other extra keys share nothing."""

    def __init__(self, block_bytes: int, nodes: Iterable[Node]) -> None:
        self.block_bytes = block_bytes
        self.tops: dict[bytes, Branch] = {}
        """By the extra keys, as bytes."""
        for node in nodes:
            self.add(node)

    def __iter__(self) -> Iterator[Node]:
        waiting: list[Branch | Node] = [*self.tops.values()]
        while waiting:
            one = waiting.pop()
            if isinstance(one, Branch):
                waiting += one.below.values()
            else:
                yield one

    def nearest(self, rest: bytes, tail: bytes) -> tuple[Node, int] | None:
        """The sibling with these extra keys that shares the most leading tokens with `rest`, and
        how many; of equals, the first; None if none shares a token. O(tokens), and O(log n) for
        each that has left since, once for each branch that it was in."""
        branch, shared = self.tops.get(tail), 0
        while branch is not None:
            most = min(branch.size_bytes, len(rest))
            shared = shared_bytes(branch.like, rest, shared, most)
            below = branch.below.get(branch.next(rest)) if shared == branch.size_bytes else None
            if below is None:
                return (_first(branch), shared // ID_BYTES) if shared else None
            if isinstance(below, Node):
                shared = shared_bytes(below.key, rest, shared, min(self.block_bytes, len(rest)))
                return below, shared // ID_BYTES
            branch = below
        return None

    def add(self, node: Node) -> None:
        """A block is there now, inserted after all others. O(tokens)."""
        key, shared = node.key, 0
        branch = self.tops.setdefault(key[self.block_bytes :], Branch(b"", 0))
        while (below := branch.below.get(branch.next(key))) is not None:
            like, most = self._beginning(below)
            shared = shared_bytes(like, key, shared, most)
            if isinstance(below, Node) or shared < most:
                split = Branch(key, shared)
                split.put(like, _first(below).serial, below)
                split.put(key, node.serial, node)
                branch.below[branch.next(key)] = split
                return
            branch = below
        branch.put(key, node.serial, node)

    def remove(self, node: Node) -> None:
        """A block is not there any more. O(tokens)."""
        key, tail, above = node.key, node.key[self.block_bytes :], None
        branch = self.tops[tail]
        while (below := branch.below[branch.next(key)]) is not node:
            assert isinstance(below, Branch)
            above, branch = branch, below
        del branch.below[branch.next(key)]
        if above is None and not branch.below:
            del self.tops[tail]
        elif above is not None and len(branch.below) == 1:
            (above.below[above.next(key)],) = branch.below.values()

    def _beginning(self, one: Branch | Node) -> tuple[bytes, int]:
        """A key that begins as all of them do, and for how many bytes."""
        return (one.key, self.block_bytes) if isinstance(one, Node) else (one.like, one.size_bytes)


class Crowds:
    """Places that have many blocks behind them, and at which part of one was looked up: their
    `Siblings`. A place that is not here costs nobody anything."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.at: dict[Node | Root, Siblings] = {}

    def nearest(self, home: Node | Root, rest: bytes, tail: bytes) -> tuple[Node, int] | None:
        """See `Siblings.nearest`. `rest` is whole tokens, at most those of a block."""
        siblings = self.at.get(home)
        if siblings is not None:
            return siblings.nearest(rest, tail)
        children = home.children.values()
        if len(children) <= FEW:
            return nearest_of(children, rest, self.block_bytes, tail)
        # Entered when it is whole: a look-up that is interrupted leaves none.
        siblings = self.at[home] = Siblings(self.block_bytes, children)
        return siblings.nearest(rest, tail)

    def join(self, home: Node | Root, node: Node) -> None:
        """A new child is there."""
        siblings = self.at.get(home)
        if siblings is not None:
            siblings.add(node)

    def leave(self, home: Node | Root, node: Node) -> None:
        """A child is not there any more."""
        siblings = self.at.get(home)
        if siblings is not None:
            siblings.remove(node)
            if len(home.children) <= FEW:
                del self.at[home]


def nearest_of(
    nodes: Iterable[Node], rest: bytes, size: int, tail: bytes
) -> tuple[Node, int] | None:
    """What `Siblings.nearest` says, one by one."""
    best: tuple[Node, int] | None = None
    for node in nodes:
        if node.key[size:] == tail:
            shared = shared_bytes(node.key, rest, 0, min(size, len(rest))) // ID_BYTES
            if shared > (0 if best is None else best[1]):
                best = node, shared
    return best


def shared_bytes(one: bytes, other: bytes, low: int, most: int) -> int:
    """The bytes of leading tokens that both have in common, of so many whole tokens, where the
    first `low` bytes are."""
    left, right = one[low:most], other[low:most]
    if left == right:
        return most
    differ = int.from_bytes(left, "little") ^ int.from_bytes(right, "little")
    return low + ((differ & -differ).bit_length() - 1) // _TOKEN_BITS * ID_BYTES


def _first(one: Branch | Node) -> Node:
    """The sibling below a branch that was inserted first. Entries that are too early by now are
    put right on the way. A loop: blocks may be long."""
    path = list[Branch]()
    while True:
        while isinstance(one, Branch):
            path.append(one)
            one = one.front()
        while path and path[-1].queue[0][0] == one.serial:
            path.pop()
        if not path:
            return one
        heapreplace(path[-1].queue, (one.serial, path[-1].queue[0][1]))
        one = path.pop()
