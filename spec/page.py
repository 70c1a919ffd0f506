"""The page: what may be done with the KV bytes of one block.

A row here depends on the page's state alone, so that a whole run of pages changes state in one
byte translation. Conditions (is a step in flight, is the host full) live on the machines that own
runs of pages.

In-flight is said at a copy's *destination*: a page that a copy fills is LOADING and unreadable,
while a page that a copy reads keeps its state and its memory is held by name. The role (ACTIVE or
COMMITTED) survives the trip to the host and back, so it is part of the state and not a note beside
it.

Rejected: one LOADING state with the role remembered elsewhere. It made "what does this page
become" a lookup in a second place, which could disagree.
"""

from typing import Final

from kvstate.spec.table import Row, State, Table, rows

VACANT: Final = State(0, "VACANT", "nothing there", initial=True)
ACTIVE: Final = State(
    1, "ACTIVE", "written by its one sequence; readable below the filled length",
    readable=True, writable=True, place="gpu",
)  # fmt: skip
COMMITTED: Final = State(
    2, "COMMITTED", "full and read-only; may be shared", readable=True, place="gpu"
)
LOADING_ACTIVE: Final = State(
    3, "LOADING_ACTIVE", "a copy from the host fills it; ACTIVE when that is done", place="gpu"
)
LOADING_COMMITTED: Final = State(
    4, "LOADING_COMMITTED", "a copy from the host fills it; COMMITTED when done", place="gpu"
)
PARKED: Final = State(
    5, "PARKED", "its owner is gone, the memory is still mapped; unreadable", place="gpu"
)
HOST_HELD_ACTIVE: Final = State(
    6, "HOST_HELD_ACTIVE", "of a suspended sequence, on the host; ACTIVE on resume", place="host"
)
HOST_HELD_COMMITTED: Final = State(
    7, "HOST_HELD_COMMITTED", "of a suspended sequence, on the host; COMMITTED on resume",
    place="host",
)  # fmt: skip
DROPPED: Final = State(8, "DROPPED", "its bytes are gone, its owner lives")

PAGE: Final = Table(
    "page",
    "what may be done with the bytes of one block in one layer group",
    runs=True,
    owner="a sequence while it lives; then the range whose memory it is",
    states=(
        VACANT,
        ACTIVE,
        COMMITTED,
        LOADING_ACTIVE,
        LOADING_COMMITTED,
        PARKED,
        HOST_HELD_ACTIVE,
        HOST_HELD_COMMITTED,
        DROPPED,
    ),
    rows=(
        # A running sequence.
        Row("open", VACANT, ACTIVE, "its memory is mapped and charged: the sequence may write"),
        Row("clear", ACTIVE, VACANT, "capacity that was never written is given back"),
        Row("clear", DROPPED, VACANT, "a dropped sequence resumes and is filled again"),
        *rows(
            "commit",
            (ACTIVE, COMMITTED),
            (HOST_HELD_ACTIVE, HOST_HELD_COMMITTED),
            why="the block is full and its tokens are known: nobody may write it any more",
        ),
        Row("reopen", COMMITTED, ACTIVE, "a rewind goes back into a block that nobody shares"),
        # To the host and back.
        *rows(
            "hold",
            (ACTIVE, HOST_HELD_ACTIVE),
            (COMMITTED, HOST_HELD_COMMITTED),
            why="its sequence is suspended: the bytes leave, the role stays",
            action="copy_out",
            after=("steps",),
            failure="nothing was issued, the sequence is intact; if the copy itself fails: drop",
        ),
        *rows(
            "load",
            (HOST_HELD_ACTIVE, LOADING_ACTIVE),
            (HOST_HELD_COMMITTED, LOADING_COMMITTED),
            why="its sequence resumes: the bytes come back and are unreadable until they are here",
            action="copy_in",
            before=("stream",),
            failure="nothing was issued, the sequence stays suspended; if the copy fails: fail",
        ),
        *rows(
            "arrive",
            (LOADING_ACTIVE, ACTIVE),
            (LOADING_COMMITTED, COMMITTED),
            why="the copy is done: the page has its role and its bytes again",
        ),
        *rows(
            "fail",
            (LOADING_ACTIVE, HOST_HELD_ACTIVE),
            (LOADING_COMMITTED, HOST_HELD_COMMITTED),
            why="the copy failed: nobody may read the destination, the host copy is still good",
        ),
        # Giving up bytes, with the owner alive.
        *rows(
            "drop",
            (ACTIVE, DROPPED),
            (COMMITTED, DROPPED),
            (LOADING_ACTIVE, DROPPED),
            (LOADING_COMMITTED, DROPPED),
            (HOST_HELD_ACTIVE, DROPPED),
            (HOST_HELD_COMMITTED, DROPPED),
            why="the bytes are given up; the sequence can compute them again",
        ),
        # Memory whose owner is gone.
        *rows(
            "park",
            (VACANT, PARKED),
            (ACTIVE, PARKED),
            (COMMITTED, PARKED),
            (LOADING_ACTIVE, PARKED),
            (LOADING_COMMITTED, PARKED),
            why="the range is freed: mapped memory that nobody may read, until it is adopted",
        ),
        Row("adopt", PARKED, VACANT, "the next sequence takes the range over"),
        Row("spill", PARKED, VACANT, "the memory is unmapped under pressure"),
        *rows(
            "forget",
            (HOST_HELD_ACTIVE, VACANT),
            (HOST_HELD_COMMITTED, VACANT),
            (DROPPED, VACANT),
            why="its sequence closes while the page has no memory on the GPU",
        ),
    ),
)
