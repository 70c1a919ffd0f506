"""The prefix index: which full block of which prefix has its bytes somewhere, and where.

A trie of blocks. A child is found by the exact bytes of its key (token ids and extra keys), below a
root for everything else that the bytes depend on, so equal inputs are compared and never their
hashes (law 6). Digests only name blocks to the outside.

Rules that hold whatever a caller does:

* **No holes.** Every block here has its bytes on the GPU (an owner) or on the host (a slot). A
  block that loses the last of them leaves, and everything below it leaves with it: its children
  could not be reached. Where a cut block's bytes were is returned, since the caller pays for them.
* **What is held stays.** A hold is on a prefix: it pins the block and all blocks above it, so
  nobody can skip one (sgl-project/sglang#36350). What would cut a pinned block is refused. Where
  the bytes are may change under a hold; that they are somewhere may not (law 7).
* **Victims are leaves of the host tier** (law 21), judged by host slots and never by what is on the
  GPU (sgl-project/sglang#23537), by age alone. A block with a copy on the GPU is no exception:
  losing its slot loses no bytes, but if the owner left later, a child on the host would be lost
  with it. It is preferred no more than its age says either: it costs one copy later, and the
  blocks of a sequence that just runs are the oldest anyway, since nobody looks them up.

Rejected: a hash as the key (a collision is another tenant's answer); a reference count (a double
release goes unseen); holding each block of a match by itself (its order is one more rule to keep);
a free queue in the order of release (NVIDIA/TensorRT-LLM#3735: parents come before children).
"""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import cast

import numpy as np

from kvstate.blocks import (
    DIGEST_BYTES,
    Cut,
    Entry,
    Holder,
    Loss,
    Lost,
    Node,
    Place,
    Root,
    descendants,
    entry,
    expendable,
    holder_name,
    illegal,
    pinned_by,
)
from kvstate.keys import ID_BYTES, Extra, Extras, Identity, extra_bytes
from kvstate.siblings import Crowds
from kvstate.telling import Telling
from kvstate.uncopied import Uncopied
from kvstate.values import ID, ID_HIGH, instance, whole

log = logging.getLogger("kvstate")


class Index(Telling):
    """The trie, and the order in which host slots are given up.

    `key` (up to 64 bytes) is the key of the digests; random by default, so that nobody outside can
    search for two blocks with one digest. Fix it where runs must repeat, or where several processes
    must give equal blocks equal names.
    """

    def __init__(self, block_tokens: int, *, key: bytes | None = None) -> None:
        super().__init__()
        self.block_tokens = whole("block_tokens", block_tokens, 1, ID_HIGH)
        self.block_bytes = self.block_tokens * ID_BYTES
        if key is not None:
            whole("the length of key", len(instance("key", key, bytes)), 1, blake2b.MAX_KEY_SIZE)
        self.slots: dict[int, Node] = {}
        """Whose canonical copy a host slot has."""
        self.clock = 0
        self._key = secrets.token_bytes(32) if key is None else key
        self._roots: dict[bytes, Root] = {}
        self.crowds = Crowds(self.block_bytes)
        self._count = self._serial = 0
        self._queue: list[Entry] = []
        self.losses: Counter[Loss] = Counter()
        """Blocks that cannot be found any more, by reason."""
        self.mourners: tuple[list[Lost], ...] = ()
        """Lists that each of them is added to, for checks that read and empty them."""
        self.uncopied: Uncopied | None = None
        """Blocks that are to have a copy on the host and have none, if all are to have one."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Node]:
        return self.walk()

    def walk(self) -> Iterator[Node]:
        """Every block, a parent before its children. Change nothing meanwhile."""
        for root in self._roots.values():
            yield from descendants(root.children)

    # Looking: nothing changes, not even the ages.

    def keys(self, data: bytes, extras: Extras | None = None, first: int = 0) -> list[bytes]:
        """The keys of the whole blocks of `data`, whose first block has the ordinal `first`."""
        size = self.block_bytes
        whole = range(0, len(data) - size + 1, size)
        if not extras:
            return [data[at : at + size] for at in whole]
        found = (extras.get(first + at // size) for at in whole)
        tails = [b"" if extra is None else extra_bytes(extra) for extra in found]
        return [data[at : at + size] + tail for at, tail in zip(whole, tails, strict=True)]

    def match(
        self, identity: Identity, data: bytes, extras: Extras | None = None,
        most_blocks: int | None = None,
    ) -> list[Node]:  # fmt: skip
        """The longest chain of blocks that equal those of `data`, which is `token_bytes` of a
        prompt; at most `most_blocks`. Cost: one dict lookup for each block found.

        Hold the last of them before anything else happens, or look again (law 7).
        """
        found: list[Node] = []
        root = self._roots.get(identity.code)
        if root is None:
            return found
        children, size = root.children, self.block_bytes
        blocks = len(data) // size
        if most_blocks is not None:
            blocks = min(blocks, most_blocks)
        for at in range(0, blocks * size, size):
            key = data[at : at + size]
            if extras and (extra := extras.get(at // size)) is not None:
                key += extra_bytes(extra)
            node = children.get(key)
            if node is None:
                break
            found.append(node)
            children = node.children
        return found

    def child(self, place: Place, key: bytes) -> Node | None:
        """The block with this key (of `keys`) at that place."""
        return self._children(place, "child").get(key)

    def partial(
        self, place: Place, rest: bytes, extra: Extra | None = None
    ) -> tuple[Node, int] | None:
        """The child of `place` that shares the most leading tokens with `rest`, and how many; of
        equals, the one inserted first; None if none shares a token.

        Only children with exactly the extra keys `extra` can share anything. Cost: O(tokens),
        however many children there are; the first time that there are many, all of them once.
        """
        tail = b"" if extra is None else extra_bytes(extra)
        rest = rest[: min(len(rest) // ID_BYTES, self.block_tokens) * ID_BYTES]
        home = place if isinstance(place, Node) else self._roots.get(place.code)
        if not self._children(place, "partial"):
            return None
        assert home is not None
        return self.crowds.nearest(home, rest, tail)

    def tokens(self, node: Node) -> list[int]:
        """The token ids of a block."""
        ids: list[int] = np.frombuffer(node.key, ID, self.block_tokens).tolist()
        return ids

    def extra(self, node: Node) -> tuple[bytes, ...]:
        """The extra keys of a block, none for most."""
        at, fields = self.block_bytes, []
        while at < len(node.key):
            start = at + 9
            at = start + int.from_bytes(node.key[at + 1 : start], "little")
            fields.append(node.key[start:at])
        return tuple(fields)

    def digest(self, node: Node) -> bytes:
        """The name of a block for the outside: 16 bytes, a keyed hash of its identity and of the
        keys of all blocks up to it (vllm-project/vllm#12603: of all, and all of each).

        Computed when first asked for, with those of the blocks before it.
        """
        root, missing = self._alive(node, "digest"), []
        step: Node | None = node
        while step is not None and step.name is None:
            missing.append(step)
            step = step.parent
        if root.name is None:
            root.name = self._hash(b"root", b"%d." % self.block_tokens + root.identity.code)
        name = (step.name if step is not None else None) or root.name
        for step in reversed(missing):
            name = step.name = self._hash(b"block", name + step.key)
        return name

    def _hash(self, person: bytes, content: bytes) -> bytes:
        return blake2b(content, digest_size=DIGEST_BYTES, key=self._key, person=person).digest()

    # Changing what is known.

    def insert(
        self, place: Place, key: bytes, owner: object | None = None, slot: int | None = None
    ) -> Node:
        """The block with this key (of `keys`) at that place: the one that is there, untouched, or
        a new one with these bytes. Ask `node.owner is owner`, `node.slot == slot`.

        The bytes are written, or any reader is ordered after them (law 4). A new block is as old
        as its parent: `touch` it once its sequence has inserted all it has. Raises
        IllegalTransition for a new block without bytes, a slot in use, or a place that was cut.
        """
        node = self._children(place, "insert").get(key)
        if node is not None:
            return node
        self._check_new([key], owner, slot)
        (node,) = self._grow(place, [key], owner, slot)
        return node

    def append(self, place: Place, keys: list[bytes], owner: object) -> list[Node]:
        """Insert a chain of new blocks of one owner, the first of which is not there."""
        assert keys[0] not in self._children(place, "append")
        return self._grow(place, keys, owner, None)

    def extend(self, place: Place, keys: Iterable[bytes], owner: object) -> list[Node]:
        """Insert a chain of blocks of one owner: the leading ones may be there, the rest is new.
        All or none."""
        keys = list(keys)
        self._check_new(keys, owner, None)
        chain: list[Node] = []
        children = self._children(place, "extend")
        for key in keys:
            node = children.get(key)
            if node is None:
                return chain + self._grow(place, keys[len(chain) :], owner, None)
            chain.append(node)
            place, children = node, node.children
        return chain

    def _grow(
        self, place: Place, keys: list[bytes], owner: object | None, slot: int | None
    ) -> list[Node]:
        """A chain of new blocks at a place that has no block with the first of these keys."""
        parent: Node | None = None
        if isinstance(place, Node):
            parent, root, used = place, self._alive(place, "insert"), place.used
            siblings = place.children
        else:
            root, used = self._root(place), self._tick()
            siblings = root.children
        chain: list[Node] = []
        for serial, key in enumerate(keys, self._serial):
            parent = siblings[key] = Node(root, parent, key, used, serial, owner, slot)
            siblings = parent.children
            chain.append(parent)
        self._serial += len(chain)
        self._count += len(chain)
        if self.crowds.at:
            self.crowds.join(chain[0].parent or root, chain[0])
        if slot is not None:
            self._fill(chain[0], slot)
        elif self.uncopied is not None:
            for node in chain if root.identity.weights_epoch == self.epoch else ():
                self.uncopied.commit(node)
        for node in chain if self._ears else ():
            self._tell(node)
        return chain

    def _check_new(self, keys: list[bytes], owner: object | None, slot: int | None) -> None:
        if owner is None and slot is None:
            raise illegal("a new block", "insert", "CUT", "its bytes are nowhere")
        shortest = min(map(len, keys), default=self.block_bytes)
        if shortest < self.block_bytes:
            reason = f"a key of {shortest} bytes; a block has {self.block_bytes} and extra keys"
            raise illegal("a new block", "insert", "CUT", reason)
        if slot is not None:
            self._check_slot("a new block", "insert", "CUT", slot)

    def touch(self, nodes: Iterable[Node]) -> None:
        """Make blocks, and all blocks before them, the most recently used. Cost: a chain costs its
        length, whether all of it is named or only its end."""
        nodes = tuple(nodes)
        for node in nodes:
            self._alive(node, "touch")
        now = self._tick()
        for node in nodes:
            step: Node | None = node
            while step is not None and step.used != now:
                step.used = now
                step = step.parent

    def give_owner(self, node: Node, owner: object) -> None:
        """A block that had no page on the GPU has one: `owner`'s."""
        self._alive(node, "give_owner")
        if node.owner is not None:
            raise illegal(node, "give_owner", node.state_name, f"{node.owner} owns it")
        if owner is None:
            raise illegal(node, "give_owner", node.state_name, "nobody is no owner")
        node.owner = owner
        self._tell(node)
        self._consider(node)
        self.await_copy(node)

    def give_slot(self, node: Node, slot: int, *, landed: bool = True) -> None:
        """A block that had no host copy has one, in this slot; its bytes may still be on the way,
        then `land` it."""
        self._alive(node, "give_slot")
        if node.slot is not None:
            raise illegal(node, "give_slot", node.state_name, f"it has slot {node.slot}")
        self._check_slot(node, "give_slot", node.state_name, slot)
        node.slot, node.landed = slot, landed
        self._fill(node, slot)
        self._tell(node)

    def land(self, node: Node) -> None:
        """The bytes of a block are in its slot."""
        node.landed = True
        self._tell(node)

    def lose_owner(
        self, node: Node, owner: object, heir: object | None = None, *, why: Loss | None = None
    ) -> list[Cut]:
        """The owner's page is no longer canonical: `heir`'s is, or none is, and then `why`.

        Returns the blocks below it that were cut because its bytes are now nowhere: leaves first,
        with the owners and slots that they had. Raises IllegalTransition, with nothing changed, if
        somebody else owns it, or if it would be cut while pinned: copy it out first, or have its
        holders let go.
        """
        self._alive(node, "lose_owner")
        if node.owner is None or node.owner is not owner:
            reason = f"{owner} does not own it, {node.owner} does"
            raise illegal(node, "lose_owner", node.state_name, reason)
        if heir is not None:
            node.owner = heir
            self.await_copy(node)
            return []
        assert why is not None, "a loss has a reason"
        if node.slot is None:
            return self._cut(node, "lose_owner", why)
        node.owner = None
        self._tell(node, why)
        return []

    def lose_slot(self, node: Node, *, why: Loss) -> list[Cut]:
        """The host copy is given up; the caller frees its slot.

        Returns what was cut with it, and raises, as `lose_owner` does. Cost: O(1), and the blocks
        that are cut.
        """
        self._alive(node, "lose_slot")
        if node.slot is None:
            raise illegal(node, "lose_slot", node.state_name, "it has none")
        if node.owner is None:
            return self._cut(node, "lose_slot", why)
        self._empty_slot(node)
        self._tell(node, why)
        if node.parent is not None:
            self._consider(node.parent)
        self.await_copy(node)
        return []

    def await_copy(self, node: Node) -> None:
        """A block that only the GPU has waits for a copy on the host, if all are to have one."""
        if self.uncopied is None or node.root is None or node.slot is not None:
            return
        if node.root.identity.weights_epoch == self.epoch:
            self.uncopied.add(node)

    def retire(self) -> None:
        """A new epoch of the weights begins, and nothing that is there is found any more: listeners
        are to forget everything, and hear nothing of those blocks again. They stay until whoever
        has them leaves. O(blocks)."""
        for node in self.walk():
            assert node.root is not None
            if node.root.identity.weights_epoch == self.epoch:
                self._note(node, Loss.CLEARED)
                node.uncopied = False
        self.epoch += 1
        if self.uncopied is not None:
            self.uncopied = Uncopied()
        self._forget_told(Loss.CLEARED)

    # Holding.

    def hold(self, node: Node, holder: Holder) -> None:
        """Keep a block, and all blocks before it, from being cut or chosen as victims. Hold the
        last block of a match. Raises IllegalTransition if this holder has it already.

        Cost: O(1) if it was pinned, else as many blocks above it as were not.
        """
        self._alive(node, "hold")
        if holder in node.holders:
            raise illegal(node, "hold", node.state_name, f"{holder_name(holder)} holds it already")
        if isinstance(node.holders, frozenset):
            node.holders = set()
        node.holders.add(holder)
        step: Node | None = node
        while step is not None:
            step.pins += 1
            if step.pins > 1:
                break
            step = step.parent

    def release(self, node: Node, holder: Holder) -> None:
        """End a hold. Raises IllegalTransition if this holder does not have it."""
        if holder not in node.holders:
            raise illegal(
                node, "release", node.state_name, f"{holder_name(holder)} does not hold it"
            )
        assert isinstance(node.holders, set)
        node.holders.remove(holder)
        self._unpin(node)

    def _unpin(self, node: Node | None) -> None:
        while node is not None:
            node.pins -= 1
            if node.pins:
                break
            self._consider(node)
            node = node.parent

    # Giving up host slots.

    def victims(self, count: int) -> list[Node]:
        """Up to `count` blocks that may lose their host slots, in this order: the least recently
        used first, of equals the deepest, then the earliest inserted. A block comes only after its
        children on the host; never a pinned one; never the last bytes of a block whose child has
        bytes.

        Nothing changes: `lose_slot` each that is really given up, in this order. Cost: O(log n)
        a block, amortised.
        """
        chosen: list[Node] = []
        taken, cut = Counter[Node](), Counter[Node]()
        while self._queue and len(chosen) < count:
            used, _, _, node = heapq.heappop(self._queue)
            if used != node.used and node.slot is not None:
                heapq.heappush(self._queue, entry(node))  # touched since; keys only grow
            elif not expendable(node, taken[node], cut[node]):
                node.queued = False
            else:
                chosen.append(node)
                if node.parent is not None:
                    taken[node.parent] += 1
                    cut[node.parent] += node.owner is None
                    self._consider(node.parent, taken[node.parent], cut[node.parent])
        for node in chosen:
            heapq.heappush(self._queue, entry(node))
        return chosen

    def _consider(self, node: Node, taken: int = 0, cut: int = 0) -> None:
        """Queue a block that has become expendable. What stops being so is dropped when it comes
        up, and what was touched is put back then: an entry may be early and is never late."""
        if node.queued or not expendable(node, taken, cut):
            return
        if len(self._queue) > 2 * len(self.slots) + 64:
            self._drop_dead_entries()
        node.queued = True
        heapq.heappush(self._queue, entry(node))

    def _drop_dead_entries(self) -> None:
        for *_, node in self._queue:
            node.queued = node.slot is not None
        self._queue = [entry(node) for *_, node in self._queue if node.queued]
        heapq.heapify(self._queue)

    # Keeping the books.

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _alive(self, node: Node, event: str) -> Root:
        if node.root is None:
            raise illegal(node, event, node.state_name, "it left the index; look it up again")
        return node.root

    def _children(self, place: Place, event: str) -> dict[bytes, Node]:
        if isinstance(place, Node):
            self._alive(place, event)
            return place.children
        root = self._roots.get(place.code)
        return {} if root is None else root.children

    def _root(self, identity: Identity) -> Root:
        root = self._roots.get(identity.code)
        if root is None:
            root = self._roots[identity.code] = Root(identity)
        return root

    def _check_slot(self, subject: object, event: str, state: str, slot: int) -> None:
        if slot in self.slots:
            raise illegal(subject, event, state, f"slot {slot} has {self.slots[slot]}")

    def _fill(self, node: Node, slot: int) -> None:
        self.slots[slot] = node
        if node.parent is not None:
            node.parent.host_children += 1
        self._consider(node)

    def _cut(self, node: Node, event: str, why: Loss) -> list[Cut]:
        """Take out a block that loses its last bytes and all below it; returns those below. What
        its owner has below it goes for the same reason."""
        root, parent = self._alive(node, event), node.parent
        if node.pins:
            reason = f"its last bytes, and {pinned_by(node)}"
            raise illegal(node, event, node.state_name, reason)
        below = [*descendants(node.children)][::-1]
        cut = [Cut(one, one.owner, one.slot) for one in below]
        owner = node.owner
        for one in (*below, node):
            with_it = one is node or (owner is not None and one.owner is owner)
            reason = why if with_it else Loss.CUT
            self._hide(one, reason)
            if root.identity.weights_epoch == self.epoch:
                self._note(one, reason)
            self._forget(one)
        home = root if parent is None else parent
        del home.children[node.key]
        if self.crowds.at:
            self.crowds.leave(home, node)
        if parent is not None:
            self._consider(parent)
        elif not root.children:
            del self._roots[root.identity.code]
        return cut

    def _note(self, node: Node, why: Loss) -> None:
        """A block that could be found cannot be found any more."""
        self.losses[why] += 1
        if self.mourners:
            assert node.root is not None
            path, step = list[bytes](), cast("Node | None", node)
            while step is not None:
                path.append(step.key)
                step = step.parent
            code = node.root.identity.code
            for mourner in self.mourners:
                mourner.append(Lost(node.serial, code, tuple(path[::-1]), why))

    def _empty_slot(self, node: Node) -> None:
        if node.slot is not None:
            del self.slots[node.slot]
            node.slot = None
            if node.parent is not None:
                node.parent.host_children -= 1

    def _forget(self, node: Node) -> None:
        """Nothing is known of a block any more, and nothing can be asked of it."""
        self._empty_slot(node)
        self._count -= 1
        node.owner = node.parent = node.root = None
        node.children = {}
        self.crowds.at.pop(node, None)
