"""Handles: what stands for memory, or for a place in a stream, and cannot be in two places.

A copy of a sequence, or one that comes out of a pickle, would be a second owner of the same frames:
each would free them. So none of them can be copied; what to do instead is said.

Rejected: a copy that shares everything with the original. `deepcopy` of a request would then give
two requests that write one sequence, and nobody would notice.
"""

from __future__ import annotations

from typing import ClassVar, NoReturn, SupportsIndex


class Handle:
    """Refuses `copy`, `deepcopy` and `pickle`: TypeError, with what to do instead."""

    __slots__ = ()
    instead: ClassVar[str] = "pass it on as it is"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"a {kind} cannot be copied or pickled: it stands for what one manager and its device "
            f"hold; {self.instead}"
        )
