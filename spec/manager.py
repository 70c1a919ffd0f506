"""The manager itself: whether it takes calls.

A device call that fails and does nothing leaves it OPEN. It is *poisoned* when nobody knows any
more what the device holds (a step was done and could not be taken back), when freed bytes could not
be overwritten and might be read, when the device is lost, or when something has not ended within
the device's limit of time. Then it refuses work and releases nothing, since what is in flight may
still read it; it can only be closed.

Rejected: a way back to OPEN. It would have to find out what the device holds, and that is what
nobody knows.
"""

from typing import Final

from kvstate.spec.table import Row, State, Table

OPEN: Final = State(0, "OPEN", "it takes calls", initial=True)
POISONED: Final = State(1, "POISONED", "it refuses calls by name and releases nothing")
CLOSED: Final = State(2, "CLOSED", "everything is given back, but for what may still be read",
                      terminal=True)  # fmt: skip

MANAGER: Final = Table(
    "manager",
    "whether the manager takes calls",
    owner="the manager",
    states=(OPEN, POISONED, CLOSED),
    rows=(
        Row("call", OPEN, OPEN, "a public call begins"),
        Row("poison", OPEN, POISONED, "a device fault: nobody knows what is held, or what will be"),
        Row("close", OPEN, CLOSED, "everything is given back, in order"),
        Row("close", POISONED, CLOSED, "the device gives back what nothing in flight can read"),
    ),
)  # fmt: skip
