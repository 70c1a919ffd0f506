"""Every error that kvstate raises, by what its caller should do about it.

A capacity error means: give way and try again. `ArgumentError` and `IllegalTransition` mean: fix
the caller: a value that it passed will not do, or the tables have no row for what it wants in this
state. `DeviceError` means: a device call failed and was undone, the manager is as it was.
`DeviceFault` means: it could not be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KvStateError(Exception):
    """Base of every error of this package."""


class ArgumentError(KvStateError, ValueError):
    """A bug in the caller: an argument is out of range, has a wrong shape, or was made by another
    manager. Names it, its value, and what is wanted. Nothing has changed."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of a type that is not taken there. Nothing has changed."""


class ConfigError(ArgumentError):
    """The configuration cannot work; says which value, and what would do."""


class IllegalTransition(KvStateError):
    """A bug in the caller: the table has no row for this event in this state. Nothing has
    changed."""

    def __init__(self, subject: str, event: str, state: str, reason: str = "") -> None:
        self.subject, self.event, self.state, self.reason = subject, event, state, reason
        super().__init__(f"{subject}: {event} is illegal in state {state}" + _because(reason))


class NestedCall(IllegalTransition):
    """A call from inside a call: from a finaliser, a signal handler or a callback. Nothing of it
    was done. Let through into the call that runs, it cuts that short."""


class CapacityError(KvStateError):
    """Something is full. Nothing has changed; try again after giving way."""


class OutOfFrames(CapacityError):
    """GPU memory is short.

    `needed` frames were to become charged; `free` could be had at once, `reclaimable` are parked or
    in spans, `coming` wait for issued work; for `denied` frames of the budget the device has no
    memory, which others have. `place` is the check that refused: `gate`, `budget`,
    `reserve`, `limit` or `addresses`. Of what is in spans, `protected` frames were not to be had.
    """

    def __init__(
        self, what: str, needed: int, free: int, reclaimable: int, coming: int, place: str,
        uses: Mapping[Any, int] | None = None, protected: int = 0,
        soon: int = 0, denied: int = 0,
    ) -> None:  # fmt: skip
        self.denied = denied
        self.needed, self.free, self.place = needed, free, place
        self.reclaimable, self.coming = reclaimable, coming
        self.protected = protected
        self.uses = uses or {}
        """Ranges whose parked frames the call itself counts on, and up to which frame."""
        self.soon = soon
        """Frames besides these that will be needed soon."""
        super().__init__(
            f"{what} needs {needed} frames: {free} are free, {reclaimable} can be reclaimed, "
            f"{coming} are coming; refused by the {place}"
            + (f"; the device has no memory for {denied} more of the budget" if denied else "")
        )


class HostExhausted(CapacityError):
    """The host tier has no room. The sequence is intact: `drop()` it, or try again later.

    Of the `needed` slots it has `there` already.
    """

    def __init__(
        self, what: str, needed: int, free: int, coming: int, capacity: int, there: int = 0,
        spare: Any = None,
    ) -> None:  # fmt: skip
        self.needed, self.free, self.coming, self.capacity = needed, free, coming, capacity
        self.there, self.spare = there, spare
        super().__init__(
            f"{what} needs {needed} host slots: {free} of {capacity} are free, {coming} are coming"
        )


class OutOfRows(CapacityError):
    """Every one of `max_sequences` rows is in use."""


class DeviceError(KvStateError):
    """A device call failed and did nothing; whatever the manager had done before it was undone."""

    def __init__(self, call: str, detail: str) -> None:
        self.call, self.detail = call, detail
        super().__init__(f"device call {call} failed: {detail}")


class StreamCaptured(DeviceError):
    """The call would launch work on a stream that is being captured into a graph, or wait for it:
    there it would be part of the graph and not run. Nothing has changed; call when the capture has
    ended."""

    def __init__(self, call: str, what: str) -> None:
        super().__init__(call, f"{what} is being captured into a graph; end the capture first")


class DeviceFull(DeviceError):
    """The device has no memory for the frames that were asked for, only for `had` of them. The
    manager takes that for a lack of frames: no call of its raises this."""

    def __init__(self, needed: int, had: int) -> None:
        self.needed, self.had = needed, had
        super().__init__("create", f"it has memory for {had} of {needed} frames")


class DeviceFault(KvStateError):
    """The manager is poisoned: it refuses work, and releases nothing that a copy may still
    read."""


class DeadView(KvStateError, BufferError):
    """The sequence has left the memory that a tensor view is over, for the reason named."""

    def __init__(self, view: str, reason: str) -> None:
        self.view, self.reason = view, reason
        super().__init__(f"{view} is dead: {reason}; take a new one")


class StaleAddress(KvStateError):
    """Something is about to use addresses of a sequence that are not its own any more, such as a
    CUDA graph that was captured over them. `then` is the stay in which they were taken, `now` the
    present one, None if there is none. Nothing has changed."""

    def __init__(self, subject: str, then: int, now: int | None, reason: str) -> None:
        self.subject, self.then, self.now, self.reason = subject, then, now, reason
        super().__init__(
            f"{subject}: addresses of its stay {then} are no good: it {reason}; its stay is "
            f"{now} now. Capture again, over the addresses that it has then"
        )


class NotCopied(ArgumentError, BufferError):
    """A tensor view was asked for a copy, or for itself on another device."""


class TraceError(KvStateError, ValueError):
    """A trace cannot be read; names the line and what is wrong with it."""


class LawViolation(KvStateError, AssertionError):
    """A law does not hold. Carries every violation that was found, with the law's number and
    name."""

    def __init__(self, violations: list[str]) -> None:
        self.violations = violations
        super().__init__("\n".join(violations))


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
