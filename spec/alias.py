"""The alias: one frame of addresses at the beginning of a range, behind which is a span's frame.

It is a place and not an allocation, so nobody is charged for it: who pays for the frame says the
frame. It is mapped read-only, and the driver enforces that. A range keeps its aliases when it is
parked; only a sequence with that very prefix can adopt it then.
"""

from typing import Final

from kvstate.spec.table import Row, State, Table

VACANT: Final = State(0, "VACANT", "nothing is mapped", initial=True)
ALIASED: Final = State(1, "ALIASED", "a frame of a span is mapped, read-only", place="gpu")

ALIAS: Final = Table(
    "alias",
    "an address that a span's frame is behind",
    runs=True,
    owner="the range",
    states=(VACANT, ALIASED),
    rows=(
        Row("share", VACANT, ALIASED, "a sequence begins with what the span has",
            action="alias", failure="what this call mapped is unmapped again"),
        Row("remap", VACANT, ALIASED, "a sequence gives its own copies up for the span's frames"),
        Row("unshare", ALIASED, VACANT, "nobody uses the range, and the span is given up",
            action="unmap", after=("quiesce",), failure="everything stays as it was"),
    ),
)  # fmt: skip
