"""Spoiling: healthy views, and each fact of each of them made wrong in every way that its type
allows, one at a time.

A fact that no always law notices when it is wrong is one that nothing compares with anything: a
law that could not fail, or a fact that nobody needs. `python -m tests.spoiling` prints how much of
what is spoiled is noticed, field by field; `test_spoiled.py` says how much must be.

Views come from programs that are kept for other reasons and from drawn calls with copies in flight.
Of the thousands that they go through, those are kept in which something is as it was seldom before.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Final

from attrs import define, evolve, field, fields, frozen, has

from kvstate import trace
from kvstate.campaign import fuzz
from kvstate.campaign.player import Look, Player
from kvstate.campaign.rules import draw, draw_config, draw_weights
from kvstate.gpu import HostDevice
from kvstate.spec.coupling import TABLES
from kvstate.spec.facts import View
from kvstate.spec.flight_laws import device_order
from kvstate.spec.laws import laws
from kvstate.spec.page import COMMITTED
from kvstate.view import view
from tests.faults.scenarios import SCENARIOS

HERE: Final = Path(__file__).parent
EPISODES: Final = 40
SEEN_OFTEN: Final = 1
"""So many views with the same thing in them are enough."""
MOST_PLACES: Final = 3
"""Of several facts that are alike, so many are spoiled in one view."""

MACHINES: Final = {
    "SequenceFact.state": "sequence", "RangeFact.state": "range", "SpanFact.state": "span",
    "SequenceFact.pages": "page", "RangeFact.pages": "page", "SpanFact.pages": "page",
    "RangeFact.frame_states": "frame", "SpanFact.frame_states": "frame",
    "RangeFact.aliases": "alias", "View.pool_states": "frame", "View.host_states": "host",
    "View.host_pages": "page", "SequenceFact.row_state": "sequence",
    "View.denied_states": "frame",
}  # fmt: skip
"""Fields whose numbers, or bytes, are states."""

Spoil = tuple[str, Any]
"""How a value was spoiled, in words, and what it is then."""


@frozen
class Spoiled:
    """A view with one fact made wrong."""

    name: str
    """Class and field."""
    way: str
    view: View
    """As it is then."""


@define
class Share:
    """How often one thing was spoiled, and with what effect."""

    tried: int = 0
    noticed: int = 0
    raised: int = 0
    """A law raised instead of reporting."""

    def add(self, other: Share) -> None:
        self.tried += other.tried
        self.noticed += other.noticed
        self.raised += other.raised


@define
class Measure:
    """What came of spoiling."""

    views: int = 0
    ways: defaultdict[tuple[str, str], Share] = field(factory=lambda: defaultdict(Share))
    """By field and way."""
    errors: Counter[str] = field(factory=Counter)

    @property
    def total(self) -> Share:
        """Everything together."""
        total = Share()
        for share in self.ways.values():
            total.add(share)
        return total

    def of_fields(self) -> dict[str, Share]:
        """All ways of a field together."""
        found = defaultdict[str, Share](Share)
        for (name, _), share in self.ways.items():
            found[name].add(share)
        return found


# Healthy views.


@cache
def healthy() -> tuple[View, ...]:
    """Views of sound managers, in which between them everything is the case that can be."""
    seen, kept = Counter[object](), []
    for one in _all_views():
        here = set(_features(one))
        if any(seen[feature] < SEEN_OFTEN for feature in here):
            kept.append(one)
            seen.update(here)
    return tuple(kept)


def _all_views() -> Iterator[View]:
    for scenario in SCENARIOS:
        for streams in ("adversarial", "latest"):
            yield from _played(scenario.header(4096, streams), scenario.program)
    for folder in ("links", "known"):
        for path in sorted((HERE / folder).glob("*.jsonl")):
            header, calls = trace.read(path)
            yield from _played(header, calls)
    for number in range(EPISODES):
        yield from _drawn(number)


def _played(header: trace.Header, calls: Iterable[trace.AnyCall]) -> Iterator[View]:
    player = Player(header, HostDevice(streams=header.streams, seed=header.seed), Look(0))
    for call in calls:
        player.apply(call)
        if player.kv.actor.fault is None:
            yield view(player.kv)
    player.abandon()


def _drawn(number: int) -> Iterator[View]:
    """The views of a drawn episode, in which work is mostly pending."""
    random = Random(f"spoiled {number}")
    streams = ("latest", "adversarial")[number % 2]
    header = trace.Header(kvstate_trace=trace.VERSION, config=draw_config(random), strict=False)
    player = Player(header, HostDevice(streams=streams, seed=number), Look(0))
    weights = draw_weights(random)
    for _ in range(fuzz.EPISODE_CALLS):
        player.apply(draw(player, random, weights))
        if player.kv.actor.fault is not None:
            break
        yield view(player.kv)
    player.abandon()


def _features(seen: View) -> Iterator[object]:
    """What is worth a view in which it is so."""
    for seq in seen.sequences:
        yield "sequence", seq.state, len(seq.slots) > 1, seq.transfer is None, seq.steps > 0
        yield from (("page", seq.state, code) for code in set(seq.pages))
    for one in seen.ranges:
        kinds = tuple(sorted({kind for kind, _ in one.holders}))
        yield "range", one.state, kinds, one.span is None, one.home_of is None, one.kept_frames > 0
        yield from (("frame", one.state, code) for code in set(one.frame_states))
    for span in seen.spans:
        yield "span", span.state, len(span.holders) > 1
    for copy in seen.transfers:
        moves = copy.outward, copy.inward, copy.keeps, copy.onboards
        yield "transfer", moves, len(copy.slots) > 1, len(copy.sources) > 1
    for block in seen.blocks:
        where = block.owner is None, block.span is None, block.range is None, block.slot is None
        kinds = tuple(sorted({kind for kind, _ in block.holders}))
        yield "block", where, block.landed, kinds, min(2, len(block.line)), block.ordinal > 0
        yield "waits", block.waits, block.slot is None, block.epoch < seen.epoch
    yield from (("host", code) for code in set(seen.host_states))
    yield "steps", min(2, len(seen.steps)), min(2, sum(step.landed for step in seen.steps))
    for work in seen.ledger.work:
        yield "work", work.name.split()[0], len(work.reads) > 1, len(work.waits) > 1
    yield "ordered", _ordered(seen)
    known = any(COMMITTED.code in seq.pages for seq in seen.sequences)
    yield "reuses", seen.reuses, known, bool(seen.free_rows), bool(seen.pool_ids)


def _ordered(seen: View) -> bool:
    """It matters that the first piece of work is not the last, and the last not the first."""
    work = seen.ledger.work
    swapped = evolve(seen.ledger, work=(work[-1], *work[1:-1], work[0]) if work[1:] else ())
    return any(True for _ in device_order(evolve(seen, ledger=swapped)))


# What is wrong with them.


def spoils(seen: View, most_places: int = MOST_PLACES) -> Iterator[Spoiled]:
    """Each fact of a view made wrong, in every way that fits its type."""
    for name, way, spoiled in _of_fact(seen, Random(len(seen.sequences)), most_places):
        yield Spoiled(name, way, spoiled)


def _of_fact(fact: Any, random: Random, most: int) -> Iterator[tuple[str, str, Any]]:
    """(field, way, the fact then) of a fact and of all facts in it."""
    kind = type(fact)
    hints = {one.name: str(one.type) for one in fields(kind)}
    for attribute in fields(kind):
        value, name = getattr(fact, attribute.name), f"{kind.__name__}.{attribute.name}"
        for way, other in _of_value(value, name, hints[attribute.name]):
            if other != value:
                yield name, way, evolve(fact, **{attribute.name: other})
        inner = value if isinstance(value, tuple) else (value,)
        places = [at for at, one in enumerate(inner) if has(type(one))]
        for at in sorted(random.sample(places, min(most, len(places)))):
            for name, way, other in _of_fact(inner[at], random, most):
                new = (*inner[:at], other, *inner[at + 1 :]) if inner is value else other
                yield name, way, evolve(fact, **{attribute.name: new})


def _of_value(value: Any, name: str, hint: str) -> Iterator[Spoil]:
    """A value made wrong. What its type is says the value, and whether None will do the hint."""
    if name in MACHINES:
        yield from _of_states(value, MACHINES[name])
    elif isinstance(value, tuple):
        yield from _of_tuple(value, hint)
    elif isinstance(value, frozenset):
        yield from _of_set(value, hint)
    elif isinstance(value, Mapping):
        yield from _of_mapping(value)
    elif isinstance(value, bytes):
        yield from (("a byte more", value + b"\1"), ("a byte less", value[:-1]))
        yield "another byte", value[:-1] + bytes([value[-1] ^ 1]) if value else value
    else:
        yield from _of_one(value, optional="None" in hint)


def _of_one(value: Any, *, optional: bool) -> Iterator[Spoil]:
    if value is None:
        yield "becomes 0", 0
    elif isinstance(value, str):
        yield "another name", value + "?"
    elif isinstance(value, bool):
        yield f"becomes {not value}", not value
    elif isinstance(value, float):
        yield from (("becomes 0", 0.0), ("becomes 1", 1.0))
    elif isinstance(value, int):
        yield from (("+1", value + 1), ("-1", value - 1))
        if optional:
            yield "becomes None", None


def _of_states(value: int | bytes, machine: str) -> Iterator[Spoil]:
    """Each state becomes each other one, the first and the last that is in it."""
    names = [state.name for state in TABLES[machine].states]
    if isinstance(value, int):
        yield from ((f"becomes {one}", code) for code, one in enumerate(names) if code != value)
        return
    places = {code: place for code in set(value) for place in {value.index(code)}}
    places |= {~code: value.rindex(code) for code in set(value)}
    for at in sorted(set(places.values())):
        for code, one in enumerate(names):
            if code != value[at]:
                was = names[value[at]]
                yield f"{was} becomes {one}", value[:at] + bytes([code]) + value[at + 1 :]
    yield from (("one less", value[:-1]), ("one more", value + value[-1:] if value else b"\0"))
    for at in range(len(value) - 1):
        if value[at] != value[at + 1]:
            both = bytes([value[at + 1], value[at]])
            yield "two swapped", value[:at] + both + value[at + 2 :]
            break


def _of_tuple(value: tuple[Any, ...], hint: str) -> Iterator[Spoil]:
    if not value:
        if (other := _example(hint)) is not None:
            yield "one more", (other,)
        return
    last = value[-1]
    yield "one less", value[:-1]
    yield "the first less", value[1:]
    yield "one twice", (*value, last)
    if value[0] != last:
        yield "two swapped", (last, *value[1:-1], value[0])
    if isinstance(last, int | str | bytes) or last is None:
        for way, other in (*_of_value(last, "", "int | None" if "None" in hint else hint),):
            yield f"one {way}", (*value[:-1], other)
        yield "one more", (*value, _unlike(last))
    elif isinstance(last, tuple):
        for at, number in enumerate(last):
            for step in (1, -1) if isinstance(number, int) else ():
                other = (*last[:at], number + step, *last[at + 1 :])
                yield f"number {at} of one {step:+}", (*value[:-1], other)


def _of_set(value: frozenset[Any], hint: str) -> Iterator[Spoil]:
    some = min(value, default=None)
    if some is not None:
        yield "one less", value - {some}
        yield "another one", value - {some} | {_unlike(some)}
    other = _example(hint) if some is None else _unlike(some)
    yield "one more", value | {other}


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[Spoil]:
    yield "one more", {**value, 7: frozenset({7}) if _sets(value) else 7}
    if value:
        key = min(value)
        rest = {other: value[other] for other in value if other != key}
        yield "one less", rest
        yield "another key", {**rest, _unlike(key): value[key]}
        for way, other in _of_value(value[key], "", "frozenset[int]"):
            yield f"a value: {way}", {**rest, key: other}


def _sets(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(one, frozenset) for one in value.values())


def _unlike(value: Any) -> Any:
    """One that is not there."""
    if isinstance(value, tuple):
        return (*value[:-1], value[-1] + 987)
    extra: Any = {"str": "?", "bytes": b"\1"}.get(type(value).__name__, 987)
    return 987 if value is None else value + extra


def _example(hint: str) -> Any:
    """Something that an empty collection of that type could have."""
    if "tuple[str, int]" in hint:
        return "transfer", 987
    if "tuple[int, int]" in hint:
        return 987, 1
    return {"str": "spoiled", "int": 987}.get(hint.partition("[")[2].partition(",")[0].rstrip("]"))


# What laws say of it.


def measure(views: Iterable[View], check: Callable[[View], bool] | None = None) -> Measure:
    """Ask the laws about everything that is spoiled."""
    found = Measure()
    for seen in views:
        found.views += 1
        for one in spoils(seen):
            share = found.ways[one.name, one.way]
            share.tried += 1
            try:
                share.noticed += (check or noticed)(one.view)
            except Exception as error:
                share.raised += 1
                found.errors[f"{one.name} {one.way}: {error!r}"] += 1
    return found


def noticed(seen: View) -> bool:
    """Some always law says that something is wrong."""
    return any(True for law in laws("always") for _ in law.check(seen))


def main() -> None:
    views = healthy()
    assert not any(map(noticed, views))
    found = measure(views)
    total = found.total
    print(f"{found.views} views, {total.tried} spoiled facts, {total.noticed} of them noticed")
    print("| fact | spoiled | noticed | a law raised | never noticed |")
    print("|---|---|---|---|---|")
    for name, share in found.of_fields().items():
        missed = [way for (one, way), s in found.ways.items() if one == name and not s.noticed]
        shown = ", ".join(missed[:6]) + (f" and {len(missed) - 6} more" if missed[6:] else "")
        print(
            f"| {name} | {share.tried} | {share.noticed / share.tried:.0%} | {share.raised} "
            f"| {shown} |"
        )
    for text, times in found.errors.most_common(20):
        print(times, text, file=sys.stderr)


if __name__ == "__main__":
    main()
