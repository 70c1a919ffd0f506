"""The laws: what must hold whatever happens.

A row cannot be checked by the row. A law looks at the whole and knows no transition: it compares
the manager's books with one another and with the device's own ledger. Numbers are those of the
design; a number that is missing here belongs to a feature that is not here yet.

An *always* law holds after every call. A *call* law compares before and after a call, a *change*
law before and after one that failed, a *loss* law with what was given up in between. A *poll* law
compares before and after a poll. A *refusal* law says when a capacity error is right. A
*fair* law says how far an engine comes that gives everybody a turn. A *rest* law holds when nothing
is in use and nothing is kept. An *end* law holds after the last close.

What is checked stands in files by topic: `memory_laws`, `span_laws`, `sequence_laws`,
`flight_laws`, `index_laws`, `progress_laws`, and `call_laws` for what compares two moments. A law
only reports: whatever a view says, and however wrong it is, no law raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final

from attrs import frozen

from kvstate.spec import (
    call_laws,
    flight_laws,
    index_laws,
    loss_laws,
    memory_laws,
    progress_laws,
    sequence_laws,
    span_laws,
)
from kvstate.spec.facts import View

KINDS: Final = ("always", "call", "change", "loss", "poll", "refusal", "fair", "rest", "end")


@frozen
class Law:
    """A named predicate: `check` yields one line for each violation."""

    number: int
    name: str
    kind: str
    why: str
    check: Callable[..., Iterable[str]]

    def violations(self, *facts: Any) -> list[str]:
        """What is wrong, each with the law's number and name."""
        return [f"law {self.number} ({self.name}): {line}" for line in self.check(*facts)]


def events_replay(view: View) -> Iterator[str]:
    """A replica that has heard everything knows which tier has which block, and nothing else."""
    yield from (f"the events: {fault}" for fault in view.event_faults)


LAWS: Final = (
    Law(1, "conservation", "always", "every frame and host slot is in exactly one place",
        memory_laws.conservation),
    Law(1, "payers", "always", "who pays for a frame follows from where it is",
        memory_laws.payers),
    Law(2, "named holders", "always", "a hold has a living holder, and is released by it",
        flight_laws.named_holders),
    Law(2, "held blocks", "always", "what a copy reads or keeps stays in the index until its end",
        index_laws.blocks_are_held),
    Law(3, "no reuse in flight", "always", "what issued work names is nobody else's",
        flight_laws.no_reuse_in_flight),
    Law(3, "fences", "always", "memory that a step may write is its sequence's, or waits for it",
        flight_laws.fences_wait_for_steps),
    Law(3, "slots in flight", "always", "a slot says which copies name it, and they name it",
        flight_laws.slots_in_flight),
    Law(4, "publish after write", "always", "what can be found is written",
        index_laws.publish_after_write),
    Law(5, "index coherence", "always", "what the index names still has those bytes",
        index_laws.index_coherence),
    Law(5, "blocks in order", "always", "the index is a tree, in which each block is once",
        index_laws.blocks_follow),
    Law(5, "copies awaited", "always", "what is to have a copy on the host waits for it",
        loss_laws.copies_are_awaited),
    Law(5, "nothing forgotten", "loss", "what was committed is found until it was given up",
        loss_laws.nothing_is_forgotten),
    Law(5, "left to readers", "loss", "what could be read is left to who can, or to the host",
        loss_laws.what_stays_is_readable),
    Law(5, "copies go out", "poll", "no copy waits that could be made",
        loss_laws.copies_go_out),
    Law(6, "whole keys", "always", "a block is found by equal inputs only",
        index_laws.whole_keys),
    Law(7, "a hit stays", "always", "what a copy reads is held until the copy has ended",
        index_laws.hits_stay),
    Law(8, "all or nothing", "change", "a failed call changes no sequence",
        call_laws.all_or_nothing),
    Law(9, "a failed load is unreadable", "always", "pages load while a copy fills them",
        sequence_laws.loading_pages),
    Law(10, "one terminal", "always", "what is in flight here is in flight there",
        flight_laws.one_terminal),
    Law(10, "own copies", "always", "a sequence waits for its own copy, which has its memory",
        sequence_laws.copies_are_known),
    Law(11, "leaving releases", "always", "what a sequence has follows from its state",
        sequence_laws.leaving_releases),
    Law(11, "ranges follow", "always", "what a range is follows from whose it is",
        memory_laws.ranges_follow),
    Law(11, "spans follow", "always", "what a span is follows from whether its home has an owner",
        span_laws.spans_follow),
    Law(12, "progress", "refusal", "nothing is refused that free or reclaimable memory allows",
        progress_laws.progress),
    Law(12, "promises", "always", "what was promised can be had",
        progress_laws.promises_hold),
    Law(12, "remaps", "always", "whoever has copies of what a span has can be asked for them",
        progress_laws.remaps_are_known),
    Law(12, "livelock", "fair", "nobody goes and comes again without a token computed in between",
        progress_laws.nobody_circles),
    Law(12, "starvation", "fair", "whoever was admitted can be finished, whatever state it is in",
        progress_laws.all_finish),
    Law(12, "margins", "call", "no call is long because of what nobody needs yet",
        call_laws.margins_are_spread),
    Law(14, "groups agree", "always",
        "a known prefix is there in every layer group, in common units",
        sequence_laws.groups_agree),
    Law(16, "counters are sums", "always", "a number beside a state agrees with the states",
        memory_laws.counters_are_sums),
    Law(16, "rows", "always", "what a row says of its sequence is what the sequence says",
        memory_laws.rows_agree),
    Law(17, "device order", "always", "what conflicts is ordered by a stream or an event",
        flight_laws.device_order),
    Law(18, "fresh tables", "call", "what a step reads is as of its issue",
        call_laws.fresh_tables),
    Law(18, "steps in order", "always", "steps continue one another, and name what is there",
        sequence_laws.steps_follow),
    Law(19, "contiguity", "always", "a range is mapped without holes, and slots count up",
        memory_laws.contiguity),
    Law(19, "addresses", "always", "every address is free, or of one range",
        memory_laws.addresses),
    Law(19, "lengths", "always", "tokens are known, settled and scheduled in this order, in memory",
        sequence_laws.lengths),
    Law(19, "pages", "always", "what a page is follows from its sequence, copies and the index",
        sequence_laws.pages_follow),
    Law(20, "shared is immutable", "always", "a committed page has no writer",
        sequence_laws.no_writer),
    Law(20, "copies write what loads", "always", "no copy writes what anybody reads",
        flight_laws.copies_write_what_loads),
    Law(21, "tier order", "always", "whoever has a block has the block before it",
        index_laws.tier_order),
    Law(21, "victims", "call", "what is given up for room has nothing behind it",
        call_laws.victims_are_leaves),
    Law(22, "events replay", "always", "replaying the emitted events rebuilds the index",
        events_replay),
    Law(23, "isolation", "always", "nothing is found across tenants",
        index_laws.isolation),
    Law(24, "at rest", "rest", "everything can be given back",
        call_laws.all_at_rest),
    Law(24, "clean end", "end", "after the last close nothing is held",
        call_laws.clean_end),
)  # fmt: skip
"""Every law, by number."""


@cache
def laws(kind: str) -> tuple[Law, ...]:
    """The laws of one kind, of `KINDS`."""
    return tuple(law for law in LAWS if law.kind == kind)
