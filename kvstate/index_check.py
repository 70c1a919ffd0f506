"""What must hold of an index, read off its books: for the laws and for tests.

Nothing here is asked by the index itself; it is the rules of `kvstate.index`, once more and
independently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from kvstate.blocks import Node, entry, expendable
from kvstate.index import Index


def check(index: Index) -> list[str]:
    """What does not hold of the rules above and of the counts, in words; nothing, if all is
    well. Cost: everything."""
    nodes = list(index.walk())
    wrong = [line for node in nodes for line in _check_node(index, node)]
    wrong += _check_roots(index)
    wrong += _check_crowds(index)
    on_host = {id(node): node.slot for node in nodes if node.slot is not None}
    if on_host != {id(node): slot for slot, node in index.slots.items()}:
        wrong.append(f"{len(on_host)} blocks have slots, {len(index.slots)} slots have blocks")
    if index._count != len(nodes):
        wrong.append(f"{index._count} blocks are counted, {len(nodes)} are there")
    return [*wrong, *_check_queue(index, nodes), *_check_waiting(index, nodes)]


def check_lines(lines: Mapping[Node, Mapping[int, object]]) -> Iterator[str]:
    """What does not hold of those who have pages of blocks besides the canonical ones."""
    for node, line in lines.items():
        if not line or not node.findable:
            yield f"{node} is gone, or in nobody's line, and has a line of {len(line)}"


def _check_roots(index: Index) -> Iterator[str]:
    for code, root in index._roots.items():
        if not root.children:
            yield f"a root without blocks for {root.identity}"
        if code != root.identity.code:
            yield f"a root of another identity for {root.identity}"
        for key, node in root.children.items():
            if (node.key, node.parent, node.root, node.ordinal) != (key, None, root, 0):
                yield f"{node} is not what its root says"


def _check_crowds(index: Index) -> Iterator[str]:
    """What is known of many children is what is there."""
    for home, siblings in index.crowds.at.items():
        known, there = Counter(map(id, siblings)), Counter(map(id, home.children.values()))
        if known != there or not there:
            yield f"{len(known)} children of one place are known in order, {len(there)} are there"


def _check_node(index: Index, node: Node) -> Iterator[str]:
    if not node.media:
        yield f"{node} is a hole"
    if node.used > index.clock:
        yield f"{node} was used at {node.used}, after {index.clock}"
    children = node.children.values()
    pins = len(node.holders) + sum(child.pins > 0 for child in children)
    if node.pins != pins:
        yield f"{node} counts {node.pins} pins and has {pins}"
    on_host = sum(child.slot is not None for child in children)
    if node.host_children != on_host:
        yield f"{node} counts {node.host_children} children on the host and has {on_host}"
    for key, child in node.children.items():
        above = (key, node, node.root, node.ordinal + 1)
        if (child.key, child.parent, child.root, child.ordinal) != above:
            yield f"{child} is not what its parent says"
        if child.used > node.used:
            yield f"{child} was used at {child.used}, its parent at {node.used}"


def _check_queue(index: Index, nodes: list[Node]) -> list[str]:
    entries = Counter(id(node) for *_, node in index._queue)
    early = {id(known[-1]) for known in index._queue if known[:3] <= entry(known[-1])[:3]}
    late = [node for node in nodes if expendable(node) and id(node) not in early]
    twice = [node for *_, node in index._queue if entries[id(node)] > 1 or not node.queued]
    return [f"{node} is not where the queue of victims must have it" for node in late + twice]


def _check_waiting(index: Index, nodes: list[Node]) -> Iterator[str]:
    """Those that wait for a copy on the host are in the queue for it, once."""
    waiting = Counter(map(id, index.uncopied or ()))
    for node in nodes:
        if waiting[id(node)] != node.uncopied:
            yield f"{node} waits: {node.uncopied}, and is {waiting[id(node)]} times in the queue"
