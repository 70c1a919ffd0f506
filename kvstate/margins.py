"""Margins: memory that is mapped before it is needed, a few frames in each step.

A step must never map many frames: each takes its time in the driver, whether others are mapped in
the same call or not, and everybody waits. But all sequences of a batch may cross a frame in the
same step. So each has frames mapped ahead, and in every step those get one that will run out first,
as many as the tokens of the step fill, and one more. That is enough, however the sequences lie to
one another: over the steps in which one fills a frame there is a frame for each, and none is needed
by anybody before whoever needs one earlier has got it. A margin of one frame does it; a longer one
lasts when steps are uneven, or while there are no frames to spare.

Rejected: all margins of a batch in one call, as soon as one sequence must be mapped. It makes fewer
calls, and takes no less time: 256 sequences with 8 frames are a stall of 0.1 s.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvstate.config import Geometry
from kvstate.sequence import Column, Sequence


def pace(geometry: Geometry, counts: Column) -> int:
    """How many frames a step of so many tokens may map ahead: one more than they fill. A sequence
    that fills one or more by itself, as a newcomer does, counts for two."""
    size_bytes = np.minimum(counts * geometry.row_bytes, geometry.frame_bytes)
    newcomers = np.count_nonzero(size_bytes == geometry.frame_bytes)
    return int(size_bytes.sum()) // geometry.frame_bytes + int(newcomers) + 1


def lacking(left: Column, needy: npt.NDArray[np.bool_], most: int) -> Column:
    """Where those are in a batch who lack some of their margin, and need nothing now; so many at
    the most, and those with the least left. `left` is how far they have come beyond what is ample,
    with a minus."""
    places = np.flatnonzero((left < 0) & ~needy)
    return places[np.argsort(left[places], kind="stable")[:most]]


def soonest(
    geometry: Geometry, ahead: int, wanted: Sequence_[tuple[Sequence, int]],
    ends: Sequence_[int], frames: int,
) -> dict[Sequence, int]:  # fmt: skip
    """Who gets so many frames in a step after which they have `ends` tokens, up to `ahead` beyond
    what each then uses: one after the other, the first that will have used up all that it has by
    then; of equals the first."""
    waiting, found = list[tuple[int, int, int]](), dict[Sequence, int]()
    for at, ((seq, needed), end) in enumerate(zip(wanted, ends, strict=True)):
        assert seq.range is not None
        mapped = max(needed, seq.range.mapped)
        goal = min(geometry.frames(end) + ahead, geometry.frames(seq.max_tokens))
        if mapped < goal:
            left_bytes = mapped * geometry.frame_bytes - end * geometry.row_bytes
            waiting.append((left_bytes, at, goal - mapped))
    heapify(waiting)
    for _ in range(frames):
        if not waiting:
            break
        left_bytes, at, short = heappop(waiting)
        seq = wanted[at][0]
        found[seq] = found.get(seq, 0) + 1
        if short > 1:
            heappush(waiting, (left_bytes + geometry.frame_bytes, at, short - 1))
    return found
