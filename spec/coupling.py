"""How the machines move each other.

One call changes many things: suspending a sequence moves its pages, frees its range, which fences
its frames, and takes host slots. Who moves whom is said here, in the order in which it happens,
and nowhere else; the manager only works out *which* pages, frames and slots are meant (the `over`
names) and fires these links. Events that no link fires are fired by a call itself, by the search
for frames and host slots (create, condemn, spare, release, spill, vacate, empty, remap, evict), or
by the index when somebody else's page becomes canonical (promote, yield, regain, mirror).

A link whose `when` is false, or whose run is empty, fires nothing.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from kvstate.spec.alias import ALIAS
from kvstate.spec.expr import Expr, variables
from kvstate.spec.frame import FRAME
from kvstate.spec.host import HOST
from kvstate.spec.manager import MANAGER
from kvstate.spec.page import PAGE
from kvstate.spec.range import RANGE
from kvstate.spec.sequence import SEQUENCE
from kvstate.spec.span import SPAN
from kvstate.spec.table import Table, TableError
from kvstate.spec.transfer import (
    STEP,
    TRANSFER,
    current,
    inward,
    keeps,
    onboards,
    outward,
)

TABLES: Final = {
    table.name: table
    for table in (PAGE, FRAME, HOST, ALIAS, SEQUENCE, RANGE, SPAN, TRANSFER, STEP, MANAGER)
}
"""Every machine by name. The first four own runs of bytes, the others are single objects."""

OVER: Final = {
    "reserved": "the fresh range that the sequence gets",
    "adopted": "the parked range that the sequence gets",
    "parked_pages": "the pages of an adopted or spilled range that are given up",
    "in_place": "frames of the range that are mapped already and become charged",
    "fresh": "frames from the pool that become charged",
    "ahead": "frames from the pool beyond what is needed now",
    "excess": "charged frames beyond what is needed",
    "opened": "pages that become writable",
    "emptied": "writable pages without tokens that are given back",
    "dropped": "the dropped pages of the sequence",
    "held": "the pages that are on the host",
    "slots": "the host slots of the sequence",
    "room": "free host slots that the sequence takes",
    "written": "pages that hold tokens, with steps in flight counted",
    "resident": "pages with memory on the GPU",
    "filled": "pages whose tokens are now all known, and which the index now names",
    "yielded": "pages whose tokens are now all known, and of which the index names another",
    "heirs": "pages of others that become canonical because the sequence's are not any more",
    "hits": "pages whose bytes the index has, on the host or in the range of another",
    "served": "the host slots of those that are on the host",
    "sharing": "the span whose frames the sequence maps",
    "enlisted": "frames of the span's owner that nobody else has mapped so far",
    "duplicates": "frames of a sequence that hold copies of what a span has",
    "shared": "addresses at the beginning of a range that a span's frames are behind",
    "aliased": "pages whose memory is the span's",
    "passing": "the span that the sequence leaves to others",
    "passed": "the frames of it",
    "wiped": "frames whose bytes are given up",
    "retained": "pages that can be read after their owner has left",
    "retaining": "frames that have some of them",
    "pinned": "the span's own records of the pages in them",
    "delisted": "frames of the span of a sequence that stays",
    "ending": "the span of the sequence, that nobody aliases any more",
    "primed": "pages that begin with tokens of somebody else's",
    "stale": "records of pages on the host that outlive their owner",
    "orphaned": "host slots of pages of the sequence that nobody has any more",
    "outlived": "records of those of them that are filled",
    "awaited": "records of those of them that a copy fills",
    "mirrored": "free host slots for pages that stay on the GPU",
    "taken": "host slots that have pages of the sequence already",
    "kept_room": "free host slots for pages that outlive their owner",
    "backed": "host slots of the sequence whose pages are canonical on the GPU now",
    "kept": "host slots of the sequence that outlive it",
    "inherited": "records of pages whose host copy outlives their owner",
    "released": "host slots that no other copy reads",
    "rewound": "committed pages that the rewind goes into",
    "range": "the range of the sequence",
    "frames": "every frame mapped in the range",
    "left": "pages of memory that its owner left while keeping its own records",
    "tail": "the frames taken from the end of the range",
    "loading": "the pages that the copy fills",
    "sequence": "the sequence whose bytes the transfer moves",
    "members": "the sequences of the step whose bytes still live the same life",
    "leavers": "closing sequences that no other step names",
}
"""What a link may be fired over. The manager works the runs out; the meaning is fixed here."""


@frozen
class Link:
    """When `cause` happens, `fires` happens over the named run, if `when` holds for the causing
    object."""

    cause: str
    fires: str
    over: str
    why: str
    when: Expr | None = None

    def __str__(self) -> str:
        when = "" if self.when is None else f" when {self.when}"
        return f"{self.cause} -> {self.fires} over {self.over}{when}"


_GROW = (
    ("frame.adopt", "in_place", "mapped already: it only becomes charged"),
    ("frame.map", "fresh", "the frontier moves"),
    ("frame.map_ahead", "ahead", "the margin, from what the pool can spare"),
    ("page.open", "opened", "mapped and charged pages may be written"),
)
_LEFT_BEHIND = (
    ("host.orphan", "orphaned", "the host has the only copy"),
    ("page.bequeath", "outlived", "the host has the only copy"),
)
_ORPHAN = (*_LEFT_BEHIND, ("page.orphan", "awaited", "the host will have the only copy"))
_BEQUEATH = (
    ("host.bequeath", "kept", "it is on the host already, or on its way"),
    ("page.bequeath", "inherited", "it is on the host already"),
)
_FREE = (
    ("frame.fence", "frames", "issued work may still touch the memory"),
    ("page.park", "left", "the memory stays mapped and belongs to the range"),
    ("span.pass", "passing", "others map it, or will"),
)

COUPLING: Final = (
    Link("sequence.resume", "range.adopt", "adopted", "a parked range that fits is taken whole"),
    Link("sequence.resume", "range.reserve", "reserved", "else fresh addresses"),
    Link("sequence.resume", "page.clear", "dropped", "what was dropped is computed again"),
    *(Link("sequence.resume", *rest) for rest in _GROW),
    Link("sequence.resume", "host.read", "slots", "the copy back reads them"),
    Link("sequence.resume", "page.load", "held", "the bytes come back"),
    Link("sequence.resume", "host.serve", "served", "the copy of the hits reads them"),
    Link("sequence.resume", "page.onboard", "hits", "what somebody else computed"),
    Link("sequence.resume", "page.prime", "primed", "tokens that are no whole block"),
    Link("sequence.resume", "span.share", "sharing", "what somebody else has on the GPU"),
    Link("sequence.resume", "alias.share", "shared", "the same frames once more, read-only"),
    Link("sequence.resume", "page.alias", "aliased", "they are there at once"),
    Link("span.share", "frame.enlist", "enlisted", "their owner still pays"),
    Link("sequence.move", "range.adopt", "adopted", "another range, as in a resume"),
    Link("sequence.move", "range.reserve", "reserved", "another range, as in a resume"),
    *(Link("sequence.move", *rest) for rest in _GROW),
    Link("sequence.move", "page.onboard", "hits", "a copy of its own"),
    Link("sequence.move", "page.prime", "primed", "a copy of its own"),
    Link("sequence.move", "span.share", "sharing", "what it still shares in whole"),
    Link("sequence.move", "alias.share", "shared", "the same frames once more, read-only"),
    Link("sequence.move", "page.alias", "aliased", "they are there at once"),
    *(Link("sequence.grow", *rest) for rest in _GROW),
    Link("sequence.remap", "span.share", "sharing", "it has the same prefix"),
    Link("sequence.remap", "frame.remap", "duplicates", "the span's frames take their place"),
    Link("sequence.remap", "alias.remap", "shared", "at the same addresses"),
    Link("sequence.remap", "page.remap", "aliased", "their memory is the span's"),
    Link("sequence.shrink", "page.clear", "emptied", "no room, no page"),
    Link("sequence.shrink", "frame.park", "excess", "the mapping stays, the charge ends"),
    Link("sequence.rewind", "page.reopen", "rewound", "they will be written again"),
    Link("sequence.rewind", "page.promote", "heirs", "theirs are canonical now"),
    *(Link("sequence.rewind", *rest) for rest in _ORPHAN),
    Link("sequence.move", "page.promote", "heirs", "theirs are canonical now"),
    *(Link("sequence.move", *rest) for rest in _ORPHAN),
    Link("sequence.move", "page.park", "resident", "what it leaves is not its own any more"),
    Link("sequence.move", "range.free", "range", "the copy reads it; others may map it"),
    *(Link("sequence.drop", *rest) for rest in _ORPHAN),
    *(Link("sequence.close", *rest) for rest in _ORPHAN),
    *(Link("span.empty", *rest) for rest in _LEFT_BEHIND),  # after a quiesce: no copy fills any
    *(Link("range.empty", *rest) for rest in _ORPHAN),
    Link("sequence.rewind", "span.end", "ending", "it is written again"),
    Link("span.end", "frame.delist", "delisted", "it is written again"),
    Link("sequence.commit", "page.commit", "filled", "all their tokens are known"),
    Link("sequence.commit", "page.yield", "yielded", "somebody else was first"),
    Link("sequence.suspend", "host.reserve", "room", "room first: it is what can be missing"),
    Link("sequence.suspend", "host.take", "taken", "what is there need not be copied"),
    Link("sequence.suspend", "page.clear", "emptied", "capacity without tokens is not copied"),
    Link("sequence.suspend", "page.hold", "written", "the bytes go to the host"),
    Link("sequence.suspend", "range.free", "range", "the copy reads it; then it is parked"),
    Link("sequence.drop", "page.clear", "emptied", "capacity without tokens has nothing to lose"),
    Link("sequence.drop", "page.drop", "written", "the bytes are given up"),
    Link("sequence.drop", "page.drop", "held", "the bytes are given up"),
    Link("sequence.drop", "page.promote", "heirs", "theirs are canonical now"),
    *(Link("sequence.drop", *rest) for rest in _BEQUEATH),
    Link("sequence.drop", "host.abandon", "slots", "nobody will read them"),
    Link("sequence.drop", "range.free", "range", "the memory is parked"),
    Link("sequence.close", "page.promote", "heirs", "theirs are canonical now"),
    Link("sequence.close", "host.mirror", "mirrored", "the host has what it leaves on the GPU too"),
    Link("sequence.close", "host.stash", "kept_room", "room for what is kept"),
    Link("sequence.close", "page.stash", "stale", "what it committed is kept on the host"),
    *(Link("sequence.close", *rest) for rest in _BEQUEATH),
    Link("sequence.close", "page.park", "resident", "the memory outlives its owner"),
    Link("sequence.close", "page.retain", "retained", "others may want it before the memory is"),
    Link("sequence.close", "page.forget", "held", "they have no memory on the GPU"),
    Link("sequence.close", "page.forget", "dropped", "they have no memory at all"),
    Link("sequence.close", "host.abandon", "slots", "nobody will read them"),
    Link("sequence.close", "range.free", "range", "the memory is parked"),
    Link("sequence.lose", "page.drop", "held", "their bytes never arrived"),
    Link("sequence.lose", "host.abandon", "taken", "they are of no use without the rest"),
    Link("sequence.lose", "page.promote", "heirs", "theirs are canonical now"),
    Link("sequence.unload", "page.fail", "loading", "the host copy is still good"),
    Link("sequence.unload", "page.clear", "emptied", "what was opened for new tokens"),
    Link("sequence.unload", "range.free", "range", "the memory is parked"),
    Link("sequence.miss", "page.drop", "loading", "their bytes never arrived"),
    Link("sequence.miss", "page.clear", "emptied", "what was opened for new tokens"),
    Link("sequence.miss", "page.promote", "heirs", "theirs are canonical now"),
    Link("sequence.miss", "range.free", "range", "the memory is parked"),
    *(Link("range.free", *rest) for rest in _FREE),
    Link("span.pass", "frame.pass", "passed", "the registry pays"),
    Link("span.pass", "page.pin", "pinned", "they stay canonical"),
    Link("span.spill", "alias.unshare", "shared", "nobody maps it any more"),
    Link("span.spill", "page.spill", "parked_pages", "no memory, no page"),
    Link("span.empty", "page.unpin", "pinned", "their bytes are given up"),
    Link("span.empty", "frame.wipe", "wiped", "their bytes are nobody's"),
    Link("span.spill", "frame.unmap", "passed", "the frames go back to the pool"),
    Link("range.land", "frame.land", "frames", "nothing can touch the memory any more"),
    Link("range.land", "frame.keep", "retaining", "nothing writes there any more"),
    Link("range.read", "frame.fence", "frames", "a copy reads it"),
    Link("range.empty", "page.release", "retained", "nobody finds them any more"),
    Link("range.empty", "frame.wipe", "wiped", "their bytes are nobody's"),
    Link("range.adopt", "page.adopt", "parked_pages", "the next owner keeps its own records"),
    Link("range.spill", "frame.unmap", "tail", "the frames go back to the pool"),
    Link("range.spill", "alias.unshare", "shared", "its addresses are wanted"),
    Link("range.spill", "page.spill", "parked_pages", "no memory, no page"),
    Link("transfer.done", "host.arrive", "slots", "the only copy is here", when=outward),
    Link("transfer.done", "host.loaded", "slots", "the GPU has the bytes", when=inward),
    Link("transfer.done", "host.stay", "backed", "the GPU has the bytes too", when=inward),
    Link("transfer.done", "host.arrive", "slots", "the only copy is here", when=keeps),
    Link("transfer.done", "page.arrive", "stale", "they may be found", when=keeps),
    Link("transfer.done", "host.served", "released", "the GPU has the bytes", when=onboards),
    Link("transfer.done", "page.arrive", "loading", "they may be read",
         when=(inward | onboards) & current),
    Link("transfer.fail", "host.lose", "slots", "no bytes came", when=outward | keeps),
    Link("transfer.fail", "page.evict", "stale", "no bytes came", when=keeps),
    Link("transfer.fail", "page.promote", "heirs", "they have the same tokens", when=keeps),
    Link("transfer.fail", "host.served", "released", "they are as they were", when=onboards),
    Link("transfer.fail", "sequence.miss", "sequence", "it must be computed",
         when=onboards & current),
    Link("transfer.fail", "host.keep", "slots", "still the only copy", when=inward),
    Link("transfer.fail", "sequence.lose", "sequence", "its bytes are gone",
         when=outward & current),
    Link("transfer.fail", "sequence.unload", "sequence", "it must be copied again",
         when=inward & current),
    Link("step.settle", "sequence.settle", "members", "their accepted tokens are there"),
    Link("step.settle", "sequence.leave", "leavers", "nothing names their row any more"),
)  # fmt: skip


def check_coupling(links: tuple[Link, ...] = COUPLING) -> None:
    """Raise TableError if a link names an event, a run or a variable that does not exist."""
    for link in links:
        cause, _ = _event(link, link.cause)
        _event(link, link.fires)
        if link.over not in OVER:
            raise TableError(f"{link}: {link.over} is not a known run")
        known = {var.name for var in cause.variables}
        if link.when is not None and not variables(link.when) <= known:
            raise TableError(f"{link}: {cause.name} has only the variables {sorted(known)}")


def _event(link: Link, name: str) -> tuple[Table, str]:
    machine, _, event = name.partition(".")
    if machine not in TABLES or event not in TABLES[machine].events:
        raise TableError(f"{link}: there is no event {name}")
    return TABLES[machine], event


check_coupling()
