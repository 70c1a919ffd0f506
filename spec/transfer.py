"""Transfers and steps: the two ends, issue and done, of whatever runs on the device.

Each has exactly one terminal. A second one, or one that arrives after the bytes' life ended, finds
no object in ISSUED and changes nothing (reports B19, B31, B34); an end that never comes is made to
come by a quiesce.
"""

from typing import Final

from kvstate.spec.expr import flag
from kvstate.spec.table import Row, State, Table

outward: Final = flag("outward", "copies the sequence's own pages to the host")
inward: Final = flag("inward", "copies the sequence's own pages to the GPU")
keeps: Final = flag("keeps", "copies canonical pages to the host, for whoever wants them later")
onboards: Final = flag(
    "onboards", "copies pages to the GPU that somebody else has written, from wherever they are"
)
current: Final = flag("current", "the sequence's bytes still live the life it was issued in")

ISSUED: Final = State(0, "ISSUED", "the device may run it at any moment", initial=True)
DONE: Final = State(1, "DONE", "its bytes have arrived", terminal=True)
FAILED: Final = State(2, "FAILED", "its destination must not be read", terminal=True)

TRANSFER: Final = Table(
    "transfer",
    "a copy between tiers, or a wait for the caller's event",
    owner="the manager, until its terminal",
    variables=(outward, inward, keeps, onboards, current),
    states=(ISSUED, DONE, FAILED),
    rows=(
        Row("done", ISSUED, DONE, "the device reports it done", holds=("-transfer", "-fence")),
        Row("fail", ISSUED, FAILED, "the device reports it failed", holds=("-transfer", "-fence")),
    ),
)  # fmt: skip

STEP_ISSUED: Final = State(0, "ISSUED", "its kernels may be running", initial=True)
STEP_LANDED: Final = State(1, "LANDED", "a quiesce saw the device idle; not settled yet")
STEP_SETTLED: Final = State(2, "SETTLED", "its caller said what was accepted", terminal=True)

STEP: Final = Table(
    "step",
    "one step of a batch, from the issue of its positions to what was accepted",
    owner="the manager, until it is settled",
    states=(STEP_ISSUED, STEP_LANDED, STEP_SETTLED),
    rows=(
        Row("land", STEP_ISSUED, STEP_LANDED, "a quiesce waited for all issued work",
            holds=("-steps",)),
        Row("settle", STEP_ISSUED, STEP_SETTLED, "done; fences that waited for it go on",
            holds=("-steps",)),
        Row("settle", STEP_LANDED, STEP_SETTLED, "done; a quiesce had let the fences go on"),
    ),
)  # fmt: skip
