"""The copies of a CUDA device: what waits, what is on its stream, and what has ended.

There is one stream for each way that copies go, and hardly ever does one of them wait for an event:
a wait in a stream holds up all that is behind it, and where streams share a queue of the hardware,
others too. A copy that must wait is kept here until its events have passed, and so is one that must
keep a pace; the next call that asks about copies puts it on its stream, the oldest first.

Rejected: a stream for each copy that waits. The hardware has few queues.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from attrs import define

from kvstate.device import Completion, CopyRun, Direction
from kvstate.errors import DeviceError

if TYPE_CHECKING:
    from kvstate.gpu.cuda import CudaDevice, CudaEvent

log = logging.getLogger("kvstate")

BATCH_FROM: Final = 8
"""From this many runs on, a copy is one batched call, if they are small."""
BATCH_BYTES: Final = 256 << 10
"""What a copy takes longer for than its own call does: from here on, calls hide behind copies."""


@define(eq=False)
class Pending:
    """A copy whose end was not reported."""

    token: int
    direction: Direction
    runs: Sequence[CopyRun]
    waits: list[CudaEvent]
    """What must have passed before it begins; what is known to have passed is taken out."""
    paced: bool
    leads: bool
    """Streams are to wait for it."""
    left: deque[list[CopyRun]]
    """What is still to be put on its stream, a driver call each."""
    begun: bool = False
    ok: bool = True
    spoils: bool = False
    hangs: bool = False
    done: CudaEvent | None = None
    """Passes when it has ended; None before all of it is on its stream, or if it is no more than a
    wait."""


class Traffic:
    """The copies of one CUDA device."""

    def __init__(self, device: CudaDevice, streams: Mapping[Direction, int]) -> None:
        self.device, self.driver, self.api = device, device.driver, device.driver.api
        self.streams = streams
        self.pace_bytes: int | None = None
        """Bytes of copies to the host that may be in flight at a time; None: any number."""
        self.pending: dict[int, Pending] = {}
        """Every copy whose end was not reported, by token: the oldest first."""
        self._waiting: list[Pending] = []
        """Those that are not, or not all, on their streams."""
        self._lanes: dict[Direction, deque[Pending]] = {way: deque() for way in Direction}
        """Those that are, in the order of their streams."""
        self._over: dict[int, Pending] = {}
        """Those that have ended."""
        self._pieces: deque[tuple[CudaEvent, int]] = deque()
        """The end and the bytes of each piece in flight of copies that keep the pace."""
        self._issued = 0

    def issue(
        self, direction: Direction, runs: Sequence[CopyRun], waits: list[CudaEvent],
        followers: Sequence[int],
    ) -> int:  # fmt: skip
        """Take a copy in, and put it on its stream if it need not wait; its token. One that streams
        are to wait for must be there when this returns: its stream waits for its events."""
        stream = self.streams[direction]
        for event in waits if followers else ():
            self.driver.call(self.api.cuStreamWaitEvent, stream, event.handle, 0)
        waits = [] if followers else waits
        paced = self.pace_bytes is not None and direction is Direction.OUT and not followers
        calls = self._calls(runs, self.pace_bytes // 2 if self.pace_bytes and paced else None)
        self._issued += 1
        one = Pending(self._issued, direction, runs, waits, paced, bool(followers), calls)
        self._tell_failure(one, len(followers))
        self.device.busy.add(stream)
        self.device.copies.add(one.token)
        self.pending[one.token] = one
        self._waiting.append(one)
        self._pump()
        self._lead(one, followers)
        return one.token

    def _tell_failure(self, one: Pending, followers: int) -> None:
        """Pass the points of a copy that is issued; it makes fewer calls if one of them fails."""
        calls = len(one.left)
        kinds = ("issue",) * calls + ("event",) + ("wait",) * followers + ("complete",)
        failed = next((at for at, kind in enumerate(kinds) if self.device.fails(kind)), None)
        if failed is not None:
            one.ok, one.spoils = False, failed == len(kinds) - 1
            while len(one.left) > failed:
                one.left.pop()
        if self.device.hangs():
            self.device.hung.add(one.token)
            one.hangs = True

    def _lead(self, one: Pending, followers: Sequence[int]) -> None:
        """Let streams wait for a copy that is on its own."""
        try:
            if one.done is not None:
                for follower in followers:
                    self.driver.call(self.api.cuStreamWaitEvent, follower, one.done.handle, 0)
        except DeviceError as error:
            self._fail(one, error)

    def look(self) -> list[int]:
        """Find out which copies have ended: of each stream, up to the first that has not. Those
        that were not reported, the oldest first."""
        self._pump()
        for lane in self._lanes.values():
            while lane and lane[0].done is not None and self._has_passed(lane[0], lane[0].done):
                self._over[lane[0].token] = lane[0]
                lane.popleft()
        return sorted(self._over)

    def are_over(self, tokens: Iterable[int]) -> bool:
        """Whether these copies have ended."""
        self.look()
        return all(token in self._over for token in tokens)

    def report(self, token: int, ok: bool | None = None) -> Completion:
        """The end of a copy that has ended, as it was or as it is said to be; it is forgotten."""
        one = self._over[token]
        del self.pending[token], self._over[token]
        self.device.copies.discard(token)
        return Completion(token, one.ok if ok is None else ok)

    def late(self) -> list[int]:
        """Those that have not ended."""
        return [token for token in self.pending if token not in self._over]

    def forget(self) -> None:
        """The device is closed."""
        for copies in (self.pending, self._over):
            copies.clear()
        for lane in self._lanes.values():
            lane.clear()
        self._waiting.clear()
        self._pieces.clear()

    # Waiting.

    def _pump(self) -> None:
        """Put on their streams, the oldest first, copies whose events have passed, those to the
        host while the pace allows."""
        late: dict[int, int] = {}
        for one in tuple(self._waiting):
            if self._may_begin(one, late) and self._issue(one):
                self._waiting.remove(one)

    def _may_begin(self, one: Pending, late: dict[int, int]) -> bool:
        """All its events have passed. `late` has an event of each stream that has not, by number:
        then no later one of that stream has, and it is not asked."""
        while one.waits:
            event = one.waits[0]
            behind = event.stream in late and event.number >= late[event.stream]
            if behind or not self._has_passed(one, event):
                late[event.stream] = min(event.number, late.get(event.stream, event.number))
                return False
            del one.waits[0]
        return True

    def _has_passed(self, one: Pending, event: CudaEvent) -> bool:
        """Whether an event has passed. If the driver cannot tell, the copy fails, and the event has
        passed when its stream has nothing left; if it cannot tell that either, nobody knows."""
        try:
            return self.driver.ready(event.handle)
        except DeviceError as error:
            if one.ok:
                log.error("copy %d fails: %s", one.token, error)
            one.ok = False
        with suppress(DeviceError):
            return self.driver.idle(event.stream)
        return False

    def _may_go_on(self, one: Pending) -> bool:
        """The pace allows the next call of a copy. One may always be in flight."""
        if not one.paced or self.pace_bytes is None:
            return True
        while self._pieces and self._has_passed(one, self._pieces[0][0]):
            self._pieces.popleft()
        flying = sum(size for _, size in self._pieces)
        return not flying or flying + _size(one.left[0]) <= self.pace_bytes

    # Issuing.

    def _issue(self, one: Pending) -> bool:
        """Put what is left of a copy on its stream, if its pace allows; whether that was all. What
        fails half-way has begun and cannot be taken back: it ends as failed."""
        stream = self.streams[one.direction]
        try:
            self._begin(one, stream)
            while one.left:
                if not self._may_go_on(one):
                    return False
                self._call(stream, one.direction, one.left[0])
                size = _size(one.left.popleft())
                if one.paced:
                    self._pieces.append((self.device.passing(stream), size))
            if one.spoils:
                self._spoil(stream, one.runs)
            if one.runs or one.hangs or one.leads:
                one.done = self.device.passing(stream)
        except DeviceError as error:
            self._fail(one, error)
        if one.done is None:
            self._over[one.token] = one
        else:
            self._lanes[one.direction].append(one)
        return True

    def _fail(self, one: Pending, error: DeviceError) -> None:
        """Nothing else would wait for what has begun: wait here."""
        log.warning("copy %d was issued in part and fails: %s", one.token, error)
        one.ok = False
        self.device.wait(partial(self.driver.idle, self.streams[one.direction]))

    def _begin(self, one: Pending, stream: int) -> None:
        """The first look at a copy whose time has come: what it names must be there."""
        if one.begun:
            return
        one.begun = True
        for target, source, size in one.runs:
            reason = self.device.missing(target, size, write=True) or self.device.missing(
                source, size, write=False
            )
            if reason is not None:
                self.device.faults.append(f"{size} bytes from {source:#x} to {target:#x}: {reason}")
                one.ok, one.spoils = False, False
                one.left.clear()
                break
        if one.runs:
            self.device.delay(stream)
        if one.hangs:
            self.device.stopper.stop(stream)

    def _calls(self, runs: Sequence[CopyRun], most_bytes: int | None) -> deque[list[CopyRun]]:
        """The runs of a copy, by the driver calls that they take, of at most that many bytes each.
        The first of large ones shall run while the others are issued; small ones go together."""
        pieces = list(self.device.pinned.pieces(runs, most_bytes))
        small = len(pieces) >= BATCH_FROM and _size(pieces) < BATCH_BYTES * len(pieces)
        if not small or not hasattr(self.api, "cuMemcpyBatchAsync"):
            return deque([run] for run in pieces)
        found, filled = deque([list[CopyRun]()]), 0
        for run in pieces:
            if most_bytes is not None and filled and filled + run.size_bytes > most_bytes:
                found.append([])
                filled = 0
            found[-1].append(run)
            filled += run.size_bytes
        return found

    def _call(self, stream: int, direction: Direction, runs: list[CopyRun]) -> None:
        """One call of the driver, for a run or for many small ones."""
        api, call = self.api, self.driver.call
        if len(runs) == 1:
            (target, source, size), function = runs[0], api.cuMemcpyDtoHAsync
            if direction is not Direction.OUT:
                here = self.device.in_host(source, size)
                function = api.cuMemcpyHtoDAsync if here else api.cuMemcpyDtoDAsync
            call(function, target, source, size, stream)
            return
        attributes = api.CUmemcpyAttributes()
        attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        call(
            api.cuMemcpyBatchAsync,
            [api.CUdeviceptr(run.target) for run in runs],
            [api.CUdeviceptr(run.source) for run in runs],
            [run.size_bytes for run in runs],
            len(runs), [attributes], [0], 1, stream,
        )  # fmt: skip

    def _spoil(self, stream: int, runs: Sequence[CopyRun]) -> None:
        """What a failed copy leaves on the device: anything at all."""
        for target, _, size in runs:
            if not self.device.in_host(target, size):
                self.driver.call(self.api.cuMemsetD8Async, target, 0xBD, size, stream)


def _size(runs: Iterable[CopyRun]) -> int:
    return sum(run.size_bytes for run in runs)
