"""The host slot: who pays for room for one page in host memory.

A slot that a copy names is never free: COMING is written by one, HELD_READ is read by one,
DRAINING was abandoned by its owner while one of these was in flight and is free when that copy
ends, however it ends. Only a page's suspended sequence needs the bytes of a HELD slot, so nothing
here may be evicted: when the tier is full, suspending fails and the sequence stays as it was
(report B119).
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

HOST: Final = Table(
    "host",
    "who pays for room for one page in host memory",
    runs=True,
    owner="the host tier",
    states=(FREE, COMING, HELD, HELD_READ, DRAINING),
    rows=(
        Row("reserve", FREE, COMING, "a suspend takes its room before it touches anything"),
        Row("arrive", COMING, HELD, "the bytes are here"),
        Row("arrive", DRAINING, FREE, "nobody wants them any more",
            action="scrub", failure=_SCRUB_FAILS),
        *rows("lose", (COMING, FREE), (DRAINING, FREE), why="the copy from the GPU failed",
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
    ),
)  # fmt: skip
