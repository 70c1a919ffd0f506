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
PRIVATE: Final = State(
    9, "PRIVATE", "full and read-only; another page is canonical", readable=True, place="gpu"
)
LOADING_PRIVATE: Final = State(
    10, "LOADING_PRIVATE", "a copy from the host fills it; PRIVATE when done", place="gpu"
)
HOST_HELD_PRIVATE: Final = State(
    11, "HOST_HELD_PRIVATE", "of a suspended sequence, on the host; PRIVATE on resume",
    place="host",
)  # fmt: skip
LOADING_STALE: Final = State(
    12, "LOADING_STALE", "a copy to the host fills it; STALE when done, and not to be found before",
    place="host",
)  # fmt: skip
STALE: Final = State(13, "STALE", "canonical, only on the host, nobody's", place="host")

ALIASED: Final = State(
    14, "ALIASED", "full and read-only; the memory is a span's", readable=True, place="gpu"
)
PINNED: Final = State(15, "PINNED", "canonical, in a span that outlived its owner", place="gpu")
RETAINED: Final = State(
    16, "RETAINED", "canonical, in parked memory; readable until that is wanted",
    readable=True, place="gpu",
)  # fmt: skip

PAGE: Final = Table(
    "page",
    "what may be done with the bytes of one block in one layer group",
    runs=True,
    owner="a sequence while it lives; then the range or span whose memory it is; the index on the "
    "host",
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
        PRIVATE,
        LOADING_PRIVATE,
        HOST_HELD_PRIVATE,
        LOADING_STALE,
        STALE,
        ALIASED,
        PINNED,
        RETAINED,
    ),
    rows=(
        # A running sequence.
        Row("open", VACANT, ACTIVE, "its memory is mapped and charged: the sequence may write"),
        Row("open", DROPPED, ACTIVE, "a dropped sequence gets memory again, and may write"),
        Row("clear", ACTIVE, VACANT, "capacity that was never written is given back"),
        Row("clear", DROPPED, VACANT, "a dropped sequence resumes and is filled again"),
        *rows(
            "commit",
            (ACTIVE, COMMITTED),
            (HOST_HELD_ACTIVE, HOST_HELD_COMMITTED),
            why="the block is full and its tokens are known: nobody may write it any more",
        ),
        *rows(
            "yield",
            (ACTIVE, PRIVATE),
            (HOST_HELD_ACTIVE, HOST_HELD_PRIVATE),
            why="the block is full, and the index names the page of somebody who was first",
        ),
        Row("yield", HOST_HELD_COMMITTED, HOST_HELD_PRIVATE, "the canonical page is a span's now"),
        *rows(
            "promote",
            (PRIVATE, COMMITTED),
            (LOADING_PRIVATE, LOADING_COMMITTED),
            (HOST_HELD_PRIVATE, HOST_HELD_COMMITTED),
            why="the canonical page is gone, and this one has the same tokens",
        ),
        *rows(
            "reopen",
            (COMMITTED, ACTIVE),
            (PRIVATE, ACTIVE),
            why="a rewind goes back into the block; the index does not name it any more",
        ),
        # To the host and back.
        *rows(
            "hold",
            (ACTIVE, HOST_HELD_ACTIVE),
            (COMMITTED, HOST_HELD_COMMITTED),
            (PRIVATE, HOST_HELD_PRIVATE),
            (ALIASED, HOST_HELD_PRIVATE),
            why="its sequence is suspended: the bytes leave, the role stays",
            action="copy_out",
            after=("steps",),
            failure="nothing was issued, the sequence is intact; if the copy itself fails: drop",
        ),
        *rows(
            "load",
            (HOST_HELD_ACTIVE, LOADING_ACTIVE),
            (HOST_HELD_COMMITTED, LOADING_COMMITTED),
            (HOST_HELD_PRIVATE, LOADING_PRIVATE),
            why="its sequence resumes: the bytes come back and are unreadable until they are here",
            action="copy_in",
            before=("stream",),
            failure="nothing was issued, the sequence stays suspended; if the copy fails: fail",
        ),
        *rows(
            "arrive",
            (LOADING_ACTIVE, ACTIVE),
            (LOADING_COMMITTED, COMMITTED),
            (LOADING_PRIVATE, PRIVATE),
            (LOADING_STALE, STALE),
            why="the copy is done: the page has its role and its bytes",
        ),
        *rows(
            "fail",
            (LOADING_ACTIVE, HOST_HELD_ACTIVE),
            (LOADING_COMMITTED, HOST_HELD_COMMITTED),
            (LOADING_PRIVATE, HOST_HELD_PRIVATE),
            why="the copy failed: nobody may read the destination, the host copy is still good",
        ),
        # What outlives its owner on the host, and comes to somebody else.
        Row(
            "stash",
            VACANT,
            LOADING_STALE,
            "its owner closes: what it committed is kept",
            action="copy_out",
            after=("steps",),
            failure="nothing was issued, it is not kept; if the copy itself fails: evict",
        ),
        *rows(
            "prime",
            (VACANT, LOADING_ACTIVE),
            (DROPPED, LOADING_ACTIVE),
            why="its first tokens are copied from a block that begins alike, or from a parent's",
            action="copy_in",
            before=("stream",),
            failure="nothing was issued; if the copy fails, the newcomer is dropped",
        ),
        Row("bequeath", VACANT, STALE, "the page on the GPU is gone, the host copy is there"),
        Row("orphan", VACANT, LOADING_STALE, "the page on the GPU is gone, its copy is on the way"),
        *rows(
            "regain",
            (STALE, VACANT),
            (LOADING_STALE, VACANT),
            why="a newcomer's page on the GPU is canonical now",
        ),
        *rows(
            "evict",
            (LOADING_STALE, VACANT),
            (STALE, VACANT),
            why="its room is wanted, or its bytes never came: the last copy is gone",
        ),
        *rows(
            "onboard",
            (VACANT, LOADING_PRIVATE),
            (DROPPED, LOADING_PRIVATE),
            why="a hit: a newcomer with the same prefix gets its bytes from wherever they are",
            action="copy_in",
            before=("stream",),
            failure="nothing was issued; if the copy fails, the newcomer is dropped",
        ),
        # What somebody else has on the GPU, mapped once more.
        *rows(
            "alias",
            (VACANT, ALIASED),
            (DROPPED, ALIASED),
            why="a hit: a newcomer with the same prefix maps the frames of a span",
        ),
        Row("remap", PRIVATE, ALIASED, "a span has the canonical page; the copy is given up"),
        Row("pin", VACANT, PINNED, "its owner leaves it to whoever has the same prefix"),
        Row("unpin", PINNED, VACANT, "its span is given up"),
        # Giving up bytes, with the owner alive.
        *rows(
            "drop",
            (ACTIVE, DROPPED),
            (COMMITTED, DROPPED),
            (LOADING_ACTIVE, DROPPED),
            (LOADING_COMMITTED, DROPPED),
            (HOST_HELD_ACTIVE, DROPPED),
            (HOST_HELD_COMMITTED, DROPPED),
            (PRIVATE, DROPPED),
            (LOADING_PRIVATE, DROPPED),
            (HOST_HELD_PRIVATE, DROPPED),
            (ALIASED, DROPPED),
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
            (PRIVATE, PARKED),
            (LOADING_PRIVATE, PARKED),
            (ALIASED, PARKED),
            why="the range is freed: mapped memory that nobody may read, until it is adopted",
        ),
        Row("retain", COMMITTED, RETAINED, "the range is freed, and whoever has a hit may read it"),
        Row("release", RETAINED, PARKED, "its memory is wanted, or nobody can find it any more"),
        Row("adopt", PARKED, VACANT, "the next sequence takes the range over"),
        Row("spill", PARKED, VACANT, "the memory is unmapped under pressure"),
        *rows(
            "forget",
            (HOST_HELD_ACTIVE, VACANT),
            (HOST_HELD_COMMITTED, VACANT),
            (HOST_HELD_PRIVATE, VACANT),
            (DROPPED, VACANT),
            why="its sequence closes while the page has no memory on the GPU",
        ),
    ),
)
