"""The manager itself: whether it takes calls, and whether one runs.

A manager has no locks and runs one call at a time. A call from inside a call (from a finaliser, a
signal handler, a listener, the sink of a record) finds books that are half changed; there is no row
for it. A call that ends by something that is no error of ours (Ctrl-C, the end of memory) leaves
the manager as it was if it had changed nothing yet. If it had begun to, the manager is *poisoned*.

A device call that fails and does nothing leaves it OPEN. It is poisoned when nobody knows any
more what the device holds (a step was done and could not be taken back), when freed bytes could not
be overwritten and might be read, when the device is lost, or when something has not ended within
the device's limit of time. Then it refuses work and releases nothing, since what is in flight may
still read it; it can only be closed.

Rejected: a way back to OPEN from POISONED. It would have to find out what the device holds, and
that is what nobody knows. Also rejected: to take an interrupted call back step by step. The next
interrupt would come in the middle of that.
"""

from typing import Final

from kvstate.spec.table import Row, State, Table, rows

OPEN: Final = State(0, "OPEN", "it takes calls", initial=True)
CALLING: Final = State(1, "CALLING", "a call runs, and has changed nothing so far")
CHANGING: Final = State(2, "CHANGING", "a call runs, and has begun to change something")
POISONED: Final = State(3, "POISONED", "it refuses calls by name and releases nothing")
FORKED: Final = State(4, "FORKED", "it is a copy in the child of a fork: nothing of it is here")
CLOSED: Final = State(5, "CLOSED", "everything is given back, but for what may still be read",
                      terminal=True)  # fmt: skip

MANAGER: Final = Table(
    "manager",
    "whether the manager takes calls",
    owner="the manager",
    states=(OPEN, CALLING, CHANGING, POISONED, FORKED, CLOSED),
    rows=(
        Row("call", OPEN, CALLING, "a public call begins"),
        *rows("change", (CALLING, CHANGING), (CHANGING, CHANGING),
              why="the call begins to change something"),
        *rows("return", (CALLING, OPEN), (CHANGING, OPEN),
              why="the call has returned, or raised an error of ours and left things as they were"),
        *rows("poison", (OPEN, POISONED), (CALLING, POISONED), (CHANGING, POISONED),
              why="a device fault, or a call that was cut short: nobody knows what is held"),
        *rows("fork", (OPEN, FORKED), (CALLING, FORKED), (CHANGING, FORKED), (POISONED, FORKED),
              why="the process was forked, and this is the child: the memory is the parent's"),
        Row("close", CHANGING, CLOSED, "everything is given back, in order"),
        Row("close", POISONED, CLOSED, "the device gives back what nothing in flight can read"),
        Row("close", FORKED, CLOSED, "there is nothing to give back"),
    ),
)  # fmt: skip
