"""Which blocks only the GPU has, and which of them gets a copy on the host next.

With `write_through="on_commit"` every canonical page is to have a copy on the host, and one that
has lost its copy, or never got one, waits for the next: after a suspend, a full host, a failed
copy, an eviction. What is nearest to the beginning of its prefix goes first, because a copy is of
no use behind a block that has none.

A block that was just committed may push out what was used least; one whose copy was pushed out
waits for a slot that is free. Else two sequences that do not both fit would take turns for ever.

Rejected: a list that each pass empties. What it could not copy was forgotten, and so was everything
that was committed behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from kvstate.blocks import Node


class Uncopied:
    """Blocks that wait for a copy on the host."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, int, Node]] = []
        """(blocks before it, blocks inserted before it, block): the least comes first."""
        self.fresh: set[Node] = set()
        """Those that were committed and have had no copy yet."""
        self.rights = 0
        """How many others may be pushed out for them."""
        self.added = 0
        """How many have begun to wait so far."""

    def add(self, node: Node) -> None:
        """The GPU has the block and the host does not. O(log n)."""
        if not node.uncopied:
            self.added += 1
            self.put_back(node)

    def commit(self, node: Node) -> None:
        """A block was committed. O(log n)."""
        self.add(node)
        self.fresh.add(node)
        self.rights += 1

    def put_back(self, node: Node) -> None:
        """A block that was taken goes on waiting. O(log n)."""
        node.uncopied = True
        heapq.heappush(self._queue, (node.ordinal, node.serial, node))

    def pop(self) -> Node | None:
        """The next one, which does not wait any more. O(log n)."""
        while self._queue:
            node = heapq.heappop(self._queue)[-1]
            node.uncopied = False
            if node.owner is not None and node.slot is None:
                return node
            self.fresh.discard(node)
        return None

    def pushed_out(self, others: int) -> None:
        """Copies of that many others were given up for those that wait."""
        self.rights = min(self.rights - others, len(self.fresh))

    def __iter__(self) -> Iterator[Node]:
        """All of them, and some that have gone or have a copy by now, in no order."""
        return (node for *_, node in self._queue)

    def __len__(self) -> int:
        return len(self._queue)
