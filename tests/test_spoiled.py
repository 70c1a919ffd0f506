"""Which facts of a view laws notice when they are wrong: all but those that are named here.

Facts that make no claim, and ways to spoil one that lead to another sound view, are named with the
reason. The list is exact: what stands in it and is noticed is as wrong as what is not noticed and
does not stand in it. `tests/spoiling.py` says how views are had and spoiled.
"""

from __future__ import annotations

from functools import cache
from itertools import islice
from typing import Final

import pytest
from attrs import fields

from kvstate.spec import facts
from kvstate.spec.coupling import TABLES
from kvstate.spec.facts import View
from kvstate.spec.laws import laws
from tests.spoiling import Measure, healthy, measure, noticed, spoils

pytestmark = [pytest.mark.xdist_group("spoiled"), pytest.mark.hunt]
A_SET: Final = "facts in no particular order"
TOLD: Final = (
    "what the manager was told; law 12 asks for it where something was refused or promised"
)
PASSED: Final = "another moment: a piece of work that has run is not pending any more"
UNNOTICED: Final = {
    **{(f"View.{name}", "two swapped"): A_SET for name in ("sequences", "ranges", "spans",
       "transfers", "blocks", "free_rows", "pool_ids")},
    **{(f"Work.{name}", "two swapped"): A_SET for name in ("reads", "writes", "waits")},
    ("Work.waits", "one twice"): A_SET,
    ("TransferFact.sources", "two swapped"): A_SET,
    ("Ledger.work", "one less"): PASSED,
    ("Ledger.work", "the first less"): PASSED,
    ("Work.copy", "becomes None"): "then it is work of the engine's own, of which nobody has books",
    ("Work.name", "another name"): "a pure name, for messages",
    ("View.max_utilization", "becomes 0"): TOLD,
    ("View.max_utilization", "becomes 1"): TOLD,
    ("View.span_clock", "+1"): "a clock that has ticked once more",
    ("View.copying", "one less"): "a forecast; it is only there to be compared with those asked",
    ("BlockFact.line", "two swapped"): "who has the canonical page next: any of them may",
    ("SequenceFact.open", "another byte"): "what its caller said; the campaign's model knows it",
    ("SequenceFact.committing", "becomes False"): "what its caller wanted; the model knows it",
    ("SequenceFact.committing", "becomes True"): "what its caller wanted; the model knows it",
}  # fmt: skip
"""(class and field, way): why no always law notices it."""
LEAST: Final = 0.94
"""Of all that is spoiled, this much is noticed in the view in which it is."""


@cache
def measured() -> Measure:
    return measure(healthy())


def test_the_views_are_sound_and_have_everything_in_them() -> None:
    views = healthy()
    assert not any(map(noticed, views))
    seen = {
        "sequence": {seq.state for one in views for seq in one.sequences},
        "range": {fact.state for one in views for fact in one.ranges},
        "span": {span.state for one in views for span in one.spans},
        "frame": {code for one in views for fact in one.ranges for code in fact.frame_states},
        "host": {code for one in views for code in one.host_states},
        "page": {code for one in views for seq in one.sequences for code in seq.pages},
    }
    missing = {
        f"{machine}.{state}"
        for machine, codes in seen.items()
        for state in TABLES[machine].states
        if state.code not in codes
    }
    assert missing == {
        "sequence.CLOSED",
        "range.VACANT",
        "span.DEAD",
        "frame.ABSENT",
        "frame.POOLED",
        "frame.CONDEMNED",
        "frame.SPAN",
        "frame.DENIED",
        "page.PARKED",
        "page.RETAINED",
        "page.PINNED",
        "page.STALE",
        "page.LOADING_STALE",
    }, "what no view has, and what is somewhere else: in the pool, in spans, in ranges, on the host"


def test_every_fact_is_spoiled() -> None:
    classes = [getattr(facts, name) for name in ("View", "Ledger", "Work")]
    classes += [one for name, one in vars(facts).items() if name.endswith("Fact")]
    named = {f"{one.__name__}.{field.name}" for one in classes for field in fields(one)}
    assert named - {name for name, _ in measured().ways} == {"View.ledger"}


def test_no_law_raises_whatever_a_view_says() -> None:
    assert measured().total.raised == 0, measured().errors.most_common(3)
    for seen in healthy()[::9]:
        for one in islice(spoils(seen), 0, None, 97):  # two facts at a time
            for other in islice(spoils(one.view), 0, None, 89):
                for law in laws("always"):
                    list(law.check(other.view))


def test_each_way_to_spoil_a_fact_is_noticed() -> None:
    unnoticed = {way for way, share in measured().ways.items() if not share.noticed}
    assert unnoticed == UNNOTICED.keys()


def test_most_of_what_is_spoiled_is_noticed() -> None:
    total = measured().total
    assert total.tried > 50_000
    assert total.noticed >= LEAST * total.tried


def test_without_its_law_a_fact_is_spoiled_unnoticed() -> None:
    """So the tests above can fail: each of these laws is the only one to see some fact."""
    alone = {
        "addresses": ("View.free_addresses", "one less"),
        "held blocks": ("BlockFact.holders", "one more"),
        "spans follow": ("SpanFact.used", "+1"),
        "ranges follow": ("RangeFact.offers", "one less"),
        "rows": ("SequenceFact.row_life", "+1"),
        "counters are sums": ("View.loads", "+1"),
    }

    def check(seen: View) -> bool:
        left = (law for law in laws("always") if law.name not in alone)
        return any(True for law in left for _ in law.check(seen))

    found = measure(healthy()[::8], check)
    assert all(not found.ways[way].noticed and found.ways[way].tried for way in alone.values())
