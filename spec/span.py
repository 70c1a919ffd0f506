"""The span: the frames of a canonical prefix, mapped into the ranges of whoever has that prefix.

While its owner runs, the frames lie in the owner's range, and the owner pays. When the owner leaves
they pass to the registry, which pays from then on; the owner's range stays as the span's *home*:
parked, never adopted, so that there is always one address at which all of it can be read. Whoever
aliases a span holds it by the number of its range, from the first mapping to the last: it can only
be given up when no range of a sequence maps it.

A span begins where the aliases of its owner's range end. So turn after turn of one conversation is
a chain of spans, each home mapping those before it.

Giving it up takes two steps: its bytes may be overwritten before its frames can be unmapped, and if
unmapping fails nobody must find it.

Rejected: one span a frame. It needs no prefixes, but a 4,096-token prompt is then hundreds of
objects to hold and to release.
"""

from typing import Final

from kvstate.spec.expr import count
from kvstate.spec.table import Row, State, Table

aliases: Final = count("aliases", "ranges that alias it")
users: Final = count("users", "those of them that sequences have")

LIVE: Final = State(0, "LIVE", "its owner runs and pays", initial=True, place="gpu")
REGISTERED: Final = State(1, "REGISTERED", "its owner left; the registry pays", place="gpu")
DEAD: Final = State(2, "DEAD", "nobody can map it any more", terminal=True)
EMPTY: Final = State(3, "EMPTY", "its bytes are given up; its frames are still mapped", place="gpu")

SPAN: Final = Table(
    "span",
    "the frames of a canonical prefix, for whoever has that prefix too",
    owner="the registry",
    variables=(aliases, users),
    states=(LIVE, REGISTERED, DEAD, EMPTY),
    rows=(
        Row("share", LIVE, LIVE, "another sequence maps its frames"),
        Row("share", REGISTERED, REGISTERED, "another sequence maps its frames"),
        Row("pass", LIVE, REGISTERED, "its owner leaves its range"),
        Row("end", LIVE, DEAD, "its owner writes into it again", guard=aliases == 0),
        Row("empty", REGISTERED, EMPTY, "its frames are wanted, and no sequence maps them",
            guard=users == 0),
        Row("spill", EMPTY, DEAD, "its frames are unmapped everywhere", guard=users == 0),
    ),
)  # fmt: skip
