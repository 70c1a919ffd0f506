"""The blocks of the prefix index: a trie of nodes, and what is told of them.

Nodes say where the bytes of a block are and who keeps them from leaving; only the index changes
them (see `kvstate.index`, where the rules are).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import islice
from typing import Final, Literal, NamedTuple, Protocol

from kvstate.errors import IllegalTransition
from kvstate.keys import Identity

Medium = Literal["GPU", "CPU"]
GPU: Final = "GPU"
CPU: Final = "CPU"
Holder = tuple[str, int]
"""Who holds a block: a kind and a number."""

DIGEST_BYTES: Final = 16
NOBODY: Final[frozenset[Holder]] = frozenset()


class Loss(StrEnum):
    """Why a tier has the bytes of a block no more, or why they cannot be found any more."""

    EVICTED = "evicted"
    """Room was wanted on the host."""
    CUT = "cut"
    """The block before it went."""
    CLEARED = "cleared"
    """What can be reused was cleared: the weights are others."""
    CLOSED = "closed"
    """Its sequence was closed, or the manager."""
    DROPPED = "dropped"
    """Its sequence was dropped."""
    UNARRIVED = "unarrived"
    """Its sequence left before the copy that should have brought it had arrived."""
    REWOUND = "rewound"
    """Its sequence took its tokens back."""
    FAILED = "failed"
    """The copy that was to keep it failed."""
    SPILLED = "spilled"
    """The GPU memory of a span, or of a parked range, was wanted."""
    SUSPENDED = "suspended"
    """The host copy is a suspended sequence's own from now on."""
    REPLACED = "replaced"
    """The host copy is of other bytes than the page that is canonical now."""


class Root:
    """The blocks of one identity that nothing precedes, by key."""

    __slots__ = ("children", "identity", "name")

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.children: dict[bytes, Node] = {}
        self.name: bytes | None = None


class Node:
    """One block of a prefix. Read it; only the index changes it."""

    __slots__ = (
        "children", "edition", "holders", "host_children", "key", "landed", "name", "ordinal",
        "owner", "parent", "pins", "queued", "root", "serial", "slot", "told", "uncopied", "used",
    )  # fmt: skip

    def __init__(
        self, root: Root, parent: Node | None, key: bytes, used: int, serial: int,
        owner: object | None, slot: int | None,
    ) -> None:  # fmt: skip
        self.root: Root | None = root
        """None once it was cut."""
        self.parent = parent
        """The block before it; None for the first."""
        self.key = key
        """The bytes of its token ids, and of its extra keys if it has any."""
        self.ordinal: int = 0 if parent is None else parent.ordinal + 1
        """Blocks before it."""
        self.children: dict[bytes, Node] = {}
        self.owner = owner
        """Whose page is canonical on the GPU."""
        self.slot = slot
        """The host slot of its canonical host copy."""
        self.edition = 0
        """Whose bytes the canonical ones are; several may have written the same tokens."""
        self.landed = True
        """The bytes are in that slot, not only on the way."""
        self.told: tuple[Medium, ...] = ()
        """The tiers that listeners know of."""
        self.holders: set[Holder] | frozenset[Holder] = NOBODY
        self.used = used
        """When it was last used, in ticks of the index. Never more than its parent's."""
        self.serial = serial
        """Blocks that were inserted before it; settles ties of age."""
        self.pins = 0
        """Its holders and its pinned children: not 0 while it must stay."""
        self.host_children = 0
        """Children that have a host slot."""
        self.uncopied = False
        """It waits for a copy on the host."""
        self.queued = False
        """The queue of victims has its one entry for this node."""
        self.name: bytes | None = None
        """Its digest, once somebody asked."""

    def __str__(self) -> str:
        return f"block {self.ordinal} of the index"

    __repr__ = __str__

    @property
    def findable(self) -> bool:
        """Its bytes are somewhere; else it has left the index for good."""
        return self.root is not None

    @property
    def state_name(self) -> str:
        """Where its bytes are, in words."""
        return "+".join(self.media) or "CUT"

    @property
    def media(self) -> tuple[Medium, ...]:
        """The tiers that have its bytes."""
        on_gpu: tuple[Medium, ...] = () if self.owner is None else (GPU,)
        return on_gpu if self.slot is None else (*on_gpu, CPU)


Place = Node | Identity
"""Where a block goes: behind another, or first of an identity."""


class Cut(NamedTuple):
    """A block that left because one above it did, and where its bytes were."""

    node: Node
    owner: object | None
    slot: int | None


class Lost(NamedTuple):
    """A block that cannot be found any more."""

    serial: int
    tenant: bytes
    path: tuple[bytes, ...]
    """The keys of the blocks up to it."""
    why: Loss


class Listener(Protocol):
    """Hears what the index changes: removals just before, the rest just after.

    A block is told while the one before it is: so there is no hole in what a listener knows either.
    The index does not keep a listener alive, and one that raises hears nothing more.
    """

    def stored(self, node: Node, medium: Medium) -> None:
        """A tier has the block's bytes now."""

    def removed(self, node: Node, medium: Medium, why: Loss) -> None:
        """A tier will no longer have them. Children are told before their parent."""

    def cleared(self, why: Loss) -> None:
        """No block can be found any more: the index was cleared, or is closed."""


Entry = tuple[int, int, int, Node]
"""Age, depth (the deepest first), serial number, and whose it is."""


def descendants(children: Mapping[bytes, Node]) -> Iterator[Node]:
    """All blocks from here down, a parent before its children. A loop: prefixes are long."""
    waiting = list(children.values())[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children.values())


def expendable(node: Node, taken: int = 0, cut: int = 0) -> bool:
    """A block may lose its host slot, were `taken` children's slots gone and `cut` children."""
    return (
        node.slot is not None
        and not node.pins
        and node.host_children == taken
        and (node.owner is not None or len(node.children) == cut)
    )


def entry(node: Node) -> Entry:
    """What the queue of victims has for a block."""
    return node.used, -node.ordinal, node.serial, node


def holder_name(holder: Holder) -> str:
    """A holder in words."""
    return " ".join(map(str, holder))


def pinned_by(node: Node) -> str:
    """Some of the holders that pin a block, by name."""
    some = (h for one in (node, *descendants(node.children)) for h in sorted(one.holders))
    return ", ".join(holder_name(holder) for holder in islice(some, 3)) + " holds it"


def illegal(subject: object, event: str, state: str, reason: str) -> IllegalTransition:
    """The error for what may not be done to a block."""
    return IllegalTransition(str(subject), event, state, reason)
