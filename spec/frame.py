"""The frame: who pays for one physical allocation on the GPU.

Charges come from states: what a sequence pays is the number of its frames that are MAPPED, and no
counter is kept beside that. `[base, frontier)` of a range is mapped without holes: first its
MAPPED frames, then a tail of PARKED ones. The tail is how mapping ahead, adoption of a longer
range and given-back capacity are all said: mapped already, charged to nobody's admission, and the
first memory to be unmapped under pressure.

Frames of a span are LIVE_SPAN while their owner runs, who pays; then SPAN, and the registry pays.
Whoever else maps them has aliases, and pays nothing.

The budget is what a caller allows, and others may have the memory all the same: of a device that is
full the frames that it could not give are DENIED, which is a lack of memory like any other.

Rejected: charging the tail to its sequence. At the ceiling that turns a margin into fewer admitted
sequences (report S11).
"""

from typing import Final

from kvstate.spec.table import Row, State, Table

ABSENT: Final = State(0, "ABSENT", "budget that is not allocated", initial=True)
POOLED: Final = State(1, "POOLED", "allocated, mapped nowhere", payer="pool", place="gpu")
MAPPED: Final = State(2, "MAPPED", "backs a sequence's capacity", payer="sequence", place="gpu")
COMING: Final = State(
    3, "COMING", "freed, behind a fence: mapped until its last consumer is done",
    payer="fence", place="gpu",
)  # fmt: skip
PARKED: Final = State(
    4, "PARKED", "still mapped, in nobody's use: adopted at no cost, or spilled",
    payer="parked", place="gpu",
)  # fmt: skip
CONDEMNED: Final = State(
    5, "CONDEMNED", "chosen to be unmapped as soon as the device is quiet",
    payer="reclaim", place="gpu",
)  # fmt: skip

LIVE_SPAN: Final = State(
    6, "LIVE_SPAN", "backs a sequence's capacity, and others map it too",
    payer="sequence", place="gpu",
)  # fmt: skip
SPAN: Final = State(
    7, "SPAN", "of a prefix whose owner left, for others to map", payer="registry", place="gpu"
)
DENIED: Final = State(8, "DENIED", "budget for which the device had no memory when it was asked")

FRAME: Final = Table(
    "frame",
    "who pays for one physical allocation on the GPU",
    runs=True,
    owner="the range that maps it, the span, or the pool of the GPU tier",
    states=(ABSENT, POOLED, MAPPED, COMING, PARKED, CONDEMNED, LIVE_SPAN, SPAN, DENIED),
    rows=(
        Row("create", ABSENT, POOLED, "the pool has too few frames and the budget has room",
            action="create", failure="the frame stays absent and the call fails"),
        Row("deny", ABSENT, DENIED, "the device is full: others have the memory"),
        Row("retry", DENIED, ABSENT, "others may have given it back: it is asked for again"),
        Row("map", POOLED, MAPPED, "a sequence grows over its frontier",
            action="map", failure="frames mapped by this call are unmapped again"),
        Row("map_ahead", POOLED, PARKED, "the margin beyond what a sequence needs now",
            action="map", failure="frames mapped by this call are unmapped again"),
        Row("adopt", PARKED, MAPPED, "a sequence grows into memory that is mapped already"),
        Row("park", MAPPED, PARKED, "capacity is given back in place; the mapping stays",
            action="scrub", failure="the manager is poisoned: old bytes would be readable"),
        Row("fence", MAPPED, COMING, "its range is freed; issued work may still touch it"),
        Row("fence", PARKED, COMING, "the tail goes with its range"),
        Row("land", COMING, PARKED, "the last consumer is done",
            action="scrub", failure="the manager is poisoned: old bytes would be readable"),
        Row("keep", COMING, PARKED, "the last consumer is done; what is there may still be a hit"),
        Row("condemn", PARKED, CONDEMNED, "a call is short of frames and takes this one"),
        Row("unmap", CONDEMNED, POOLED, "the device is quiet: nothing can touch the address",
            action="unmap", after=("quiesce",), failure="it stays mapped: spare"),
        Row("spare", CONDEMNED, PARKED, "it could not be unmapped and is as it was"),
        Row("enlist", MAPPED, LIVE_SPAN, "another sequence maps it too"),
        Row("delist", LIVE_SPAN, MAPPED, "nobody else maps it, and its sequence writes it again"),
        Row("pass", MAPPED, SPAN, "its sequence leaves it to whoever has the same prefix"),
        Row("pass", LIVE_SPAN, SPAN, "its sequence leaves it to those who map it"),
        Row("remap", MAPPED, POOLED, "a span has the same prefix: its frames take this one's place",
            action="remap", after=("quiesce",), failure="the sequence has its own frames again"),
        Row("wipe", SPAN, SPAN, "its span is given up; its bytes are nobody's",
            action="scrub", failure="the manager is poisoned: old bytes would be readable"),
        Row("wipe", PARKED, PARKED, "what was retained there is given up",
            action="scrub", failure="the manager is poisoned: old bytes would be readable"),
        Row("unmap", SPAN, POOLED, "its span is given up, and the device is quiet",
            action="unmap", after=("quiesce",), failure="the span stays"),
        Row("release", POOLED, ABSENT, "memory is given back to the driver",
            action="release", failure="the frame stays pooled"),
    ),
)  # fmt: skip
