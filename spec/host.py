"""The host slot: who pays for room for one page in host memory.

A slot that a copy names is never free: COMING is written by one, HELD_READ is read by one,
DRAINING was abandoned by its owner while one of these was in flight and is free when that copy
ends, however it ends. Only a page's suspended sequence needs the bytes of a HELD slot, so never
a HELD one may be evicted: when the tier is full of them, suspending fails and the sequence stays as
it was (report B119). What may be evicted is STALE, pages that outlived their owners and which a
newcomer with the same prefix may use; and MIRROR, copies of pages that the GPU has too.
"""

from typing import Final

from kvstate.spec.table import Row, State, Table, rows

FREE: Final = State(0, "FREE", "room for one page", initial=True)
COMING: Final = State(
    1, "COMING", "the destination of a copy from the GPU", payer="suspended", place="host"
)
HELD: Final = State(2, "HELD", "the only copy of a suspended page", payer="suspended", place="host")
HELD_READ: Final = State(
    3, "HELD_READ", "held, and a copy to the GPU reads it", payer="suspended", place="host",
)  # fmt: skip
DRAINING: Final = State(
    4, "DRAINING", "its owner left while a copy names it", payer="drain", place="host"
)

_SCRUB_FAILS = "the manager is poisoned: old bytes would be readable"

FILLING: Final = State(
    5, "FILLING", "the destination of a page that outlives its owner", payer="index", place="host"
)
STALE: Final = State(
    6, "STALE", "the canonical copy of a page that is nobody's: to be had for the asking",
    payer="index", place="host",
)  # fmt: skip
STALE_HELD: Final = State(
    7, "STALE_HELD", "stale, and copies to the GPU read it", payer="index", place="host"
)

MIRRORING: Final = State(
    8, "MIRRORING", "the destination of a page that stays on the GPU", payer="index", place="host"
)
MIRROR: Final = State(
    9, "MIRROR", "a copy of a page that the GPU has too", payer="index", place="host"
)

HOST: Final = Table(
    "host",
    "who pays for room for one page in host memory",
    runs=True,
    owner="the host tier",
    states=(
        FREE, COMING, HELD, HELD_READ, DRAINING, FILLING, STALE, STALE_HELD, MIRRORING, MIRROR,
    ),
    rows=(
        Row("reserve", FREE, COMING, "a suspend takes its room before it touches anything"),
        Row("arrive", COMING, HELD, "the bytes are here"),
        Row("arrive", FILLING, STALE, "the bytes are here, for whoever has the same prefix"),
        Row("arrive", MIRRORING, MIRROR, "the bytes are here, and on the GPU"),
        Row("arrive", DRAINING, FREE, "nobody wants them any more",
            action="scrub", failure=_SCRUB_FAILS),
        *rows("lose", (COMING, FREE), (DRAINING, FREE), (FILLING, FREE), (MIRRORING, FREE),
              why="the copy from the GPU failed",
              action="scrub", failure=_SCRUB_FAILS),
        Row("read", HELD, HELD_READ, "its sequence resumes: a copy to the GPU reads it"),
        *rows("loaded", (HELD_READ, FREE), (DRAINING, FREE), why="the copy to the GPU is done",
              action="scrub", failure=_SCRUB_FAILS),
        Row("keep", HELD_READ, HELD, "the copy to the GPU failed; this is still the only copy"),
        Row("keep", DRAINING, FREE, "the copy failed and nobody wants the bytes any more",
            action="scrub", failure=_SCRUB_FAILS),
        Row("abandon", HELD, FREE, "its sequence drops or closes",
            action="scrub", failure=_SCRUB_FAILS),
        *rows("abandon", (COMING, DRAINING), (HELD_READ, DRAINING),
              why="its sequence drops or closes while a copy names the slot"),
        # Pages that outlive their owners.
        Row("stash", FREE, FILLING, "a close keeps what was committed"),
        Row("bequeath", HELD, STALE, "its owner leaves, and leaves its copy"),
        Row("bequeath", COMING, FILLING, "its owner leaves while the copy is on its way"),
        Row("bequeath", HELD_READ, STALE_HELD, "its owner leaves while it was being copied back"),
        *rows("serve", (STALE, STALE_HELD), (STALE_HELD, STALE_HELD),
              why="a newcomer with the same prefix copies it to the GPU"),
        Row("served", STALE_HELD, STALE, "the last copy that reads it has ended"),
        Row("served", DRAINING, FREE, "the last copy that reads it has ended, and nobody wants it",
            action="scrub", failure=_SCRUB_FAILS),
        Row("evict", STALE, FREE, "room is wanted, or the prefix before it is gone",
            action="scrub", failure=_SCRUB_FAILS),
        Row("evict", MIRROR, FREE, "room is wanted, and the GPU has the page",
            action="scrub", failure=_SCRUB_FAILS),
        *rows("evict", (FILLING, DRAINING), (STALE_HELD, DRAINING), (MIRRORING, DRAINING),
              why="it is not wanted any more while a copy names the slot"),
        # Pages that the GPU has too.
        Row("mirror", FREE, MIRRORING, "a committed page is copied out before it has to be",
            action="copy_out",
            failure="nothing was issued, it has no copy; if the copy itself fails: lose"),
        *rows("orphan", (MIRRORING, FILLING), (MIRROR, STALE),
              why="the page on the GPU is gone: this is the canonical one"),
        *rows("regain", (STALE, MIRROR), (FILLING, MIRRORING),
              why="a newcomer's page is canonical now"),
        Row("stay", HELD_READ, MIRROR, "the copy to the GPU is done, and the host keeps its own"),
        Row("take", MIRROR, HELD, "its sequence is suspended: it need not be copied"),
    ),
)  # fmt: skip
