"""The range: a run of addresses, from its reservation to its next owner.

A freed range waits for its *fence*: the named holders (steps, a copy, the caller's event) that may
still touch it. Then it is parked still mapped, and the next sequence that fits adopts it whole: in
a steady state no driver mapping call is made. Every free goes through FENCED, also with nothing in
flight, so that there is one way out and no special case to forget.

A parked range may *retain* what its last owner committed, readable until the memory is wanted. A
copy from there puts it behind a fence again, so that nobody adopts or unmaps it meanwhile.
"""

from typing import Final

from kvstate.spec.expr import count
from kvstate.spec.table import Row, State, Table

holds: Final = count("holds", "named holders: what the fence still waits for")
mapped: Final = count("mapped", "frames mapped in it, aliases included")

VACANT: Final = State(0, "VACANT", "free addresses; nothing is mapped", initial=True)
RESERVED: Final = State(1, "RESERVED", "belongs to a sequence")
FENCED: Final = State(2, "FENCED", "freed; issued work may still touch it")
PARKED: Final = State(3, "PARKED", "still mapped, ready to be adopted or spilled")

RANGE: Final = Table(
    "range",
    "a run of addresses, from one owner to the next",
    owner="the arena",
    variables=(holds, mapped),
    states=(VACANT, RESERVED, FENCED, PARKED),
    rows=(
        Row("reserve", VACANT, RESERVED, "no parked range fits: fresh addresses"),
        Row("adopt", PARKED, RESERVED, "the mapping is reused whole"),
        Row("free", RESERVED, FENCED, "its sequence suspends, drops or closes",
            holds=("+steps",)),
        Row("land", FENCED, PARKED, "the last holder is done", guard=(holds == 0) & (mapped > 0)),
        Row("land", FENCED, VACANT, "the last holder is done and nothing is mapped",
            guard=(holds == 0) & (mapped == 0)),
        Row("read", PARKED, FENCED, "a copy reads what it retains: the fence waits for that"),
        Row("empty", PARKED, PARKED, "its memory is wanted: what it retains is given up"),
        Row("spill", RESERVED, RESERVED, "its unused tail is unmapped under pressure"),
        Row("spill", PARKED, PARKED, "frames are taken from its end under pressure"),
        Row("vacate", PARKED, VACANT, "its last frame is gone", guard=mapped == 0),
    ),
)  # fmt: skip
