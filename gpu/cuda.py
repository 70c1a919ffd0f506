"""The CUDA device: physical frames mapped into reserved addresses by the driver, copies on streams
of their own.

What the manager asks for is asked of the driver, with everything that can be checked checked first
against our own ledger: a driver call that fails half-way is then the exception, and is undone step
by step. Frames are plain `cuMemCreate` allocations; nothing is managed memory.

Nothing in the driver waits for a running kernel before it unmaps under it (measured on an H200:
`cuMemUnmap` returns in 73 us with a one-second kernel still running), so `unmap` notes a fault if
anything was issued since the last quiesce. Any number of devices may be open, each by its ordinal;
there is no module state.
"""

from __future__ import annotations

import ctypes
import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from time import monotonic, sleep
from typing import Any
from weakref import ref

import numpy as np
from attrs import frozen

from kvstate.device import (
    Completion,
    CopyRun,
    Direction,
    Event,
    FillRun,
    MapRun,
    Segments,
    Stream,
    UnmapRun,
)
from kvstate.errors import ConfigError, DeviceError, DeviceFault, DeviceFull, StreamCaptured
from kvstate.gpu import foreign
from kvstate.gpu.books import Books, Undo
from kvstate.gpu.checks import Checker, CudaCheck
from kvstate.gpu.driver import Driver, on_card
from kvstate.gpu.held import Held
from kvstate.gpu.kernels import UNIT_BYTES, Kernels
from kvstate.gpu.pinned import Pinned
from kvstate.gpu.stopper import Stopper
from kvstate.gpu.streams import checked
from kvstate.gpu.traffic import Traffic
from kvstate.handles import Handle
from kvstate.spec.facts import Ledger
from kvstate.values import number, whole

log = logging.getLogger("kvstate")

_NAP_S = 20e-6
"""Between two looks at what is waited for."""
_NO_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
_IN_CAPTURE = "CUDA_ERROR_CAPTURED_EVENT"
_HUNG_S = 0.3
"""How long to wait at the most once a copy was told never to end."""
NON_BLOCKING = 1
NO_TIMING = 2
SPINS = ((0.3, 200_000), (0.15, 4_000_000))
"""Unless streams are eager, how likely work is delayed, and by how many cycles at most: often
by up to 0.1 ms, now and then by up to 2 ms, which Python does not outrun."""


@frozen(eq=False)
class CudaStream(Handle):
    """A stream that this device made."""

    device: CudaDevice
    handle: int


class CudaEvent(Handle):
    """A point in a stream. Its handle goes back to the pool when nobody holds it any more."""

    __slots__ = ("__weakref__", "device", "handle", "number", "stream")

    def __init__(self, device: CudaDevice, handle: Any, stream: int, number: int) -> None:
        self.device, self.handle, self.stream, self.number = device, handle, stream, number


class CudaDevice(Books):
    """One CUDA device, by its ordinal."""

    name = "cuda"

    def __init__(
        self, ordinal: int = 0, *, streams: str = "eager", seed: int = 0, limit_s: float = 60.0
    ) -> None:
        """Open the device. With any `streams` but `eager` work is delayed now and then by a kernel
        that only spins, so that what is not ordered runs in another order. What has not ended after
        `limit_s` seconds of waiting is taken for never to end.
        """
        super().__init__()
        self.closed = True
        ordinal = whole("ordinal", ordinal)
        streams, seed = checked(streams, seed)
        self.limit_s = number("limit_s", limit_s, 0, above=True)
        self.driver = Driver(ordinal)
        try:
            self.driver.retain()
            self._open(streams, seed)
            self.closed = False
        except BaseException:
            self.closed = True
            if self.driver.retained:
                self._free_all()
            self.driver.release()
            raise

    @on_card
    def _free_all(self) -> list[str]:
        """Give back all that was made; what the driver said to what it did not take."""
        return [why for held in reversed(self.driver.held) for why in held.free_all()]

    @on_card
    def _open(self, streams: str, seed: int) -> None:
        """All that is made when a device is opened."""
        driver, ordinal = self.driver, self.driver.ordinal
        if not driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise ConfigError(f"CUDA device {ordinal} has no virtual memory management")
        self.api = driver.api
        self._property, self._access = self._memory_kind(ordinal)
        self.random = Random(seed)
        self.adversarial = streams != "eager"
        self.idle_events: dict[int, object] = {}
        """The pool: events that nobody holds, by their names in `_events`."""
        self._leases: dict[int, object] = {}
        """What puts each event back into the pool."""
        self._events = Held(driver, "cuEventCreate", "cuEventDestroy")
        self._streams = Held(driver, "cuStreamCreate", "cuStreamDestroy")
        self._frames = Held(driver, "cuMemCreate", "cuMemRelease")
        self._places: set[int] = set()
        """Where a frame is mapped, or is about to be."""
        self._regions = Held(driver, "cuMemAddressReserve", "cuMemAddressFree")
        """The driver's reservations, by their number and their bytes."""
        self._made = 0
        self._gates: dict[int, CudaEvent] = {}
        """Streams that only wait for events of other libraries, and the last point of each."""
        self.busy: set[int] = set()
        """Streams on which something may have been issued since they were last waited for; at the
        end, all that must be."""
        self._recorded = 0
        """Events so far: their numbers."""
        self._capturing: list[int] = []
        self._script: list[Completion] | None = None
        self._failed: frozenset[int] = frozenset()
        self._at_rest = False
        """It is being closed, and nothing runs any more."""
        self.pinned = Pinned(driver, self)
        self.stopper = Stopper(driver)
        self.own = self._new_stream()
        self.kernels = Kernels(driver)
        self.traffic = Traffic(self, {way: self._new_stream() for way in Direction})
        self.checker = Checker(self)

    @property
    def memory(self) -> tuple[str, int]:
        """Memory of this GPU."""
        return "cuda", self.driver.ordinal

    def _memory_kind(self, ordinal: int) -> tuple[Any, Any]:
        """Plain memory of the device, and the access that a mapping of it gives."""
        api = self.api
        kind = api.CUmemAllocationProp()
        kind.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = ordinal
        flags = api.CUmemAccess_flags
        access = {}
        for read_only in (False, True):
            one = access[read_only] = api.CUmemAccessDesc()
            one.location.type, one.location.id = kind.location.type, ordinal
            one.flags = (
                flags.CU_MEM_ACCESS_FLAGS_PROT_READ
                if read_only
                else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            )
        least = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes = int(
            self.driver.call(api.cuMemGetAllocationGranularity, kind, least)
        )
        return kind, access

    @property
    def lost(self) -> str | None:
        """The error that lost the context, and the call that returned it."""
        return self.driver.lost

    # Addresses and frames.

    @on_card
    def reserve(self, size_bytes: int, align_bytes: int) -> int:
        """Reserve addresses; more than asked for, if the alignment is none that the driver
        takes."""
        self.enter("reserve")
        power = align_bytes & (align_bytes - 1) == 0
        unit = self.granularity_bytes
        size = -(-(size_bytes + (0 if power else align_bytes)) // unit) * unit
        wanted = align_bytes if power else 0
        self._made += 1
        first = int(self._regions.make((self._made, size), size, wanted, 0, 0))
        address = -(-first // align_bytes) * align_bytes
        self.reservations[address] = size_bytes
        return address

    @on_card
    def unreserve(self, address: int) -> None:
        """Give the addresses back."""
        self.enter("unreserve")
        self.check_unreserve(address)
        name = next(name for name in self._regions if self._lies_in(name, address))
        self._regions.free(name, name[-1])
        del self.reservations[address]

    def _lies_in(self, region: Any, address: int) -> bool:
        """An address is one of those that the driver has reserved as this region."""
        return 0 <= address - int(self._regions.handle(region)) < int(region[-1])

    @on_card
    def create(self, count: int, frame_bytes: int) -> list[int]:
        """Allocate frames; if one fails, those before it are released again. Of a card that is
        full the driver says so, which is a lack of frames: DeviceFull."""
        self.enter("create")
        self.check_create(count, frame_bytes)
        names = list(range(self._made, self._made + count))
        self._made += count
        with self.whole() as undo:
            for name in names:
                try:
                    self._create_one(name, frame_bytes)
                except DeviceError as error:
                    if _NO_MEMORY not in error.detail:
                        raise
                    raise DeviceFull(count, len(undo)) from error
                undo.append(partial(self._free, name))
        self.frame_bytes = frame_bytes
        self.frames.update(names)
        return names

    @on_card
    def room(self, frame_bytes: int) -> int:
        """What the driver says is free, which is not all in pieces of that size."""
        error, free, _ = self.api.cuMemGetInfo()
        return min(self.left, 0 if error else free // frame_bytes)

    @on_card
    def release(self, frames: Sequence[int]) -> None:
        """Free frames."""
        self.enter("release")
        self.check_release(frames)
        with self.whole() as undo:
            for frame in frames:
                self._free(frame)
                undo.append(partial(self._create_again, frame))
        self.frames.difference_update(frames)

    def _create_one(self, name: int, frame_bytes: int) -> None:
        self.step("frame")
        self._frames.make(name, frame_bytes, self._property, 0)

    def _free(self, frame: int) -> None:
        self.step("freeing")
        self._frames.free(frame)

    def _create_again(self, frame: int) -> None:
        """A frame of the same number, with other bytes."""
        self._create_one(frame, self.frame_bytes)

    @on_card
    def map(self, runs: Sequence[MapRun]) -> None:
        """Map every frame, then allow access a run at a time; if anything fails, unmap again."""
        self.enter("map")
        places = self.check_map(runs)
        self._places.update(places)
        try:
            with self.whole() as undo:
                self._map_all(runs, places, undo)
        except DeviceError:
            self._places.difference_update(places)
            raise
        self.note_map(runs, places)

    def _map_all(self, runs: Sequence[MapRun], places: dict[int, int], undo: Undo) -> None:
        api, size = self.api, self.frame_bytes
        for place, frame in places.items():
            self._do("mapping", api.cuMemMap, place, size, 0, self._frames.handle(frame), 0)
            undo.append(partial(self._do, "unmapping", api.cuMemUnmap, place, size))
        for address, frames, read_only in runs:
            if frames:
                access = [self._access[read_only]]
                self._do("access", api.cuMemSetAccess, address, len(frames) * size, access, 1)

    @on_card
    def unmap(self, runs: Sequence[UnmapRun]) -> None:
        """Unmap each run with one call. Notes a fault if the device was not quiet."""
        self.enter("unmap")
        places = self.check_unmap(runs)
        if self.busy:
            self.faults.append(
                f"{len(places)} frames are unmapped with work issued since the quiesce"
            )
        with self.whole() as undo:
            for address, count in runs:
                size = count * self.frame_bytes
                if count:
                    self._do("unmapping", self.api.cuMemUnmap, address, size)
                for place in range(address, address + size, self.frame_bytes):
                    undo.append(partial(self._map_again, self.mapped_at(place)))
        self.note_unmap(runs, places)
        self._places.difference_update(places)

    def _map_again(self, run: MapRun) -> None:
        self._map_all([run], {run.address: run.frames[0]}, [])

    @on_card
    def host_reserve(self, size_bytes: int) -> int:
        """Pinned memory."""
        self.enter("host_reserve")
        address = self.pinned.reserve(size_bytes)
        self.host_memory[address] = size_bytes
        return address

    @on_card
    def host_unreserve(self, address: int) -> None:
        """Give pinned memory back."""
        self.enter("host_unreserve")
        size_bytes = self.check_host(address)
        self.pinned.unreserve(address, size_bytes)
        del self.host_memory[address]

    # Copies and their ends.

    @on_card
    def copy(
        self,
        direction: Direction,
        runs: Sequence[CopyRun],
        after: Sequence[Event] = (),
        before: Sequence[Stream] = (),
    ) -> int:
        """Issue a copy on the stream of its direction, once its events have passed. One that
        streams are to wait for must be there when this returns: its events are waited for on its
        stream."""
        followers = [self._live("copy", stream) for stream in before]
        for event in after:
            self.check_event(event)
        self.enter("copy")
        waits = [point for event in after if (point := self._point(event)) is not None]
        return self.traffic.issue(direction, tuple(runs), waits, followers)

    def _point(self, event: Event) -> CudaEvent | None:
        """What has passed once an event of somebody has, as it is recorded now; None if that is so
        already."""
        self.step("wait")
        if isinstance(event, CudaEvent):
            return event
        handle = self._event_handle(event)
        if self.driver.ready(handle):
            return None
        idle = (gate for gate, last in self._gates.items() if self.driver.ready(last.handle))
        gate = next(idle, None) or self._new_stream()
        self.driver.call(self.api.cuStreamWaitEvent, gate, handle, 0)
        self._gates[gate] = self.passing(gate)
        return self._gates[gate]

    def pace(self, size_bytes: int | None) -> None:
        """See `kvstate.device.Device.pace`."""
        self.traffic.pace_bytes = size_bytes

    @on_card
    def poll(self) -> list[Completion]:
        """Copies that have ended, the oldest first; or those that the script names. Asks for the
        oldest of each stream."""
        if self._script is not None:
            script, self._script = self._script, []
            known = [one for one in script if one.token in self.traffic.pending]
            self.wait(partial(self.traffic.are_over, [one.token for one in known]))
            return [self.traffic.report(*one) for one in known]
        return [self.traffic.report(token) for token in self.traffic.look()]

    @on_card
    def ended(self) -> list[int]:
        """The copies that have ended and were not reported."""
        return self.traffic.look()

    @on_card
    def finish(self, tokens: Sequence[int]) -> list[Completion]:
        """Wait for these copies alone."""
        self.enter("finish")
        self.wait(partial(self.traffic.are_over, tokens))
        return [self._last_end(token) for token in tokens]

    @on_card
    def quiesce(self, streams: Sequence[Stream] = ()) -> list[Completion]:
        """Wait for all copies, and for what is on these streams; completions in issue order."""
        handles = [self._live("quiesce", stream) for stream in streams]
        self.enter("quiesce")
        self._wait_for(handles, copies=True)
        self.busy.difference_update(handles, self.traffic.streams.values())
        return [self._last_end(token) for token in list(self.traffic.pending)]

    def _last_end(self, token: int) -> Completion:
        """How a copy has ended that is waited for, or failed if a replay says so."""
        return self.traffic.report(token, False if token in self._failed else None)

    def script(self, ended: Sequence[tuple[int, bool]] | None, failed: Sequence[int] = ()) -> None:
        """Make the next poll deliver exactly these ends, and those after it none, until None."""
        self._script = None if ended is None else [Completion(*one) for one in ended]
        self._failed = frozenset(failed)

    # Streams and events.

    @on_card
    def stream(self) -> CudaStream:
        """A stream of the caller's."""
        return CudaStream(self, self._new_stream())

    @on_card
    def synchronize(self, stream: Stream) -> None:
        """Wait until everything launched on the stream has run."""
        handle = self._live("synchronize", stream)
        self.wait(partial(self.driver.idle, handle))
        self.busy.discard(handle)

    def wake(self) -> None:
        """Let copies that were told never to end, end after all."""
        self.stopper.go()
        self.hung.clear()

    @on_card
    def capture(self, streams: Sequence[Stream]) -> None:
        """See `ByteDevice`. A capture that something has broken is a fault."""
        call, handles = self.driver.call, [self.handle_of(stream) for stream in streams]
        for handle in [one for one in self._capturing if one not in handles]:
            self._capturing.remove(handle)
            try:
                call(self.api.cuGraphDestroy, call(self.api.cuStreamEndCapture, handle))
            except DeviceError as error:
                self.faults.append(f"the capture of stream {handle:#x} was broken: {error}")
        for handle in [one for one in handles if one not in self._capturing]:
            mode = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
            call(self.api.cuStreamBeginCapture, handle, mode)
            self._capturing.append(handle)

    def _wait_for(self, handles: Iterable[int], *, copies: bool) -> None:
        """Wait for what is on these streams now, and for all copies, those that wait for events
        among them. Raises DeviceFault."""
        marks = [self.passing(handle) for handle in handles]

        def rests() -> bool:
            if copies and not self.traffic.are_over(self.traffic.pending):
                return False
            while marks and self.driver.ready(marks[-1].handle):
                marks.pop()
            return not marks

        self.wait(rests)

    def wait(self, ready: Callable[[], bool]) -> None:
        """Wait, but not for ever: what never ends is a fault, and not a call that never returns."""
        limit_s = min(self.limit_s, _HUNG_S) if self.hung else self.limit_s
        deadline = monotonic() + limit_s
        while not ready():
            if monotonic() > deadline:
                raise DeviceFault(self._stuck(limit_s))
            sleep(_NAP_S)

    def _stuck(self, limit_s: float) -> str:
        names = ", ".join(map(str, self.traffic.late()))
        what = f"copies {names}" if names else "kernels"
        return f"{what} have not ended after {limit_s:g} s, and something waits for them"

    @on_card
    def check_stream(self, stream: Stream) -> None:
        """Raises DeviceError if it is none, or of another device, and StreamCaptured."""
        self._live("stream", stream)

    def _live(self, call: str, stream: Stream) -> int:
        """The handle of a stream that is not being captured."""
        handle = self.handle_of(stream)
        if not isinstance(stream, CudaStream):
            foreign.check_stream(self.driver, handle, self.own)
        if self.driver.capturing(handle):
            raise StreamCaptured(call, f"stream {handle:#x}")
        return handle

    @on_card
    def check_event(self, event: Event) -> None:
        """Raises DeviceError if it is none, or of another device, and StreamCaptured."""
        handle = self._event_handle(event)
        if not isinstance(event, CudaEvent):
            try:
                self.driver.ready(handle)
            except DeviceError as error:
                if _IN_CAPTURE in error.detail:
                    raise StreamCaptured("event", "what it was recorded in") from error
                raise DeviceError("event", f"it cannot be asked for: {error.detail}") from error

    @on_card
    def record(self, stream: Stream) -> CudaEvent:
        """The point behind everything that was launched on the stream so far."""
        handle = self._live("record", stream)
        self.enter("record")
        return self._mark(handle)

    def passing(self, stream: int) -> CudaEvent:
        """Record an event from the pool, for a check: not a step that can be told to fail."""
        event = self._event(stream)
        self.driver.call(self.api.cuEventRecord, event.handle, stream)
        return event

    def _mark(self, stream: int) -> CudaEvent:
        self.step("event")
        return self.passing(stream)

    def _event(self, stream: int) -> CudaEvent:
        try:
            name, _ = self.idle_events.popitem()
        except KeyError:
            name = len(self._events)
            self._events.make(name, NO_TIMING)
        self._recorded += 1
        event = CudaEvent(self, self._events.handle(name), stream, self._recorded)
        # Called in C, on any thread: no interrupt is lost in it, as one would be in a finaliser.
        self._leases[name] = ref(event, partial(self.idle_events.__setitem__, name))
        return event

    def handle_of(self, stream: Stream) -> int:
        """The driver's handle of a stream: ours, a number, or another library's object."""
        if stream is None:
            return 0
        if isinstance(stream, CudaStream):
            if stream.device is not self:
                raise DeviceError("stream", "it is of another device")
            return stream.handle
        return foreign.stream_handle(stream)

    def _event_handle(self, event: Event) -> Any:
        if isinstance(event, CudaEvent):
            if event.device is not self:
                raise DeviceError("event", "it is of another device")
            return event.handle
        return foreign.event_handle(event)

    def _new_stream(self) -> int:
        return int(self._streams.make(len(self._streams), NON_BLOCKING))

    @property
    def made_streams(self) -> list[int]:
        """The handles of all streams that it has made."""
        return [int(handle) for handle in self._streams.handles]

    # Bytes.

    @on_card
    def fill(self, runs: Sequence[FillRun], value: int) -> None:
        """Overwrite memory, on a stream of our own, and wait for that alone."""
        self.enter("fill")
        for address, size in runs:
            self.check_access("fill", address, size, write=True)
        for run in runs[:1]:
            self._fill_run(run, value)
        with self.final():
            for run in runs[1:]:
                self._fill_run(run, value)
            self.wait(partial(self.driver.idle, self.own))

    def _fill_run(self, run: FillRun, value: int) -> None:
        self.step("filling")
        if self.in_host(*run):
            ctypes.memset(run.address, value, run.size_bytes)
        elif run.size_bytes:
            call = self.driver.call
            call(self.api.cuMemsetD8Async, run.address, value, run.size_bytes, self.own)

    @on_card
    def peek(self, address: int, size_bytes: int) -> bytes:
        """Read memory at once."""
        self.check_access("peek", address, size_bytes, write=False)
        if self.in_host(address, size_bytes):
            return ctypes.string_at(address, size_bytes)
        buffer = np.empty(size_bytes, np.uint8)
        self.fetch(buffer.ctypes.data, address, size_bytes)
        return buffer.tobytes()

    def fetch(self, target: int, source: int, size_bytes: int) -> None:
        """Copy from the GPU at once, whatever other streams wait for.

        The driver's own synchronous copy waits for the default stream, which may wait for a copy
        that never ends.
        """
        call = self.driver.call
        call(self.api.cuMemcpyDtoHAsync, target, source, size_bytes, self.own)
        call(self.api.cuStreamSynchronize, self.own)

    @on_card
    def poke(self, address: int, data: bytes) -> None:
        """Write memory at once.

        The driver's own synchronous copy from pageable memory returns before the bytes are there.
        """
        self.check_access("poke", address, len(data), write=True)
        if self.in_host(address, len(data)):
            ctypes.memmove(address, data, len(data))
            return
        call, at = self.driver.call, np.frombuffer(data, np.uint8).ctypes.data
        call(self.api.cuMemcpyHtoDAsync, address, at, len(data), self.own)
        call(self.api.cuStreamSynchronize, self.own)

    @on_card
    def strays(self, runs: Sequence[FillRun], values: bytes) -> int:
        """How many bytes are none of the two values."""
        for address, size in runs:
            self.check_access("strays", address, size, write=False)
        return self.checker.strays(self.own, runs, values)

    def set_rows(self, row_bytes: int) -> None:
        """The size of a token row: a multiple of 16 bytes, for the kernels."""
        if row_bytes < 1 or row_bytes % UNIT_BYTES:
            raise ConfigError(
                f"token rows of {row_bytes} bytes: byte checks on CUDA want a multiple of "
                f"{UNIT_BYTES}"
            )
        self.checker.row_bytes = row_bytes

    @on_card
    def publish(
        self, stream: Stream, rows: Sequence[int], bases: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Launch the update of the device's table."""
        self._launching("publish", stream)
        self.checker.publish(self.handle_of(stream), rows, bases, lengths)

    @on_card
    def write(self, stream: Stream, segments: Segments) -> None:
        """Launch the writing of token rows."""
        self._launching("write", stream)
        self.checker.write(self.handle_of(stream), segments)

    @on_card
    def verify(
        self, stream: Stream, segments: Segments, most_bytes: int | None = None
    ) -> CudaCheck:
        """Launch the comparison of token rows."""
        self._launching("verify", stream)
        return self.checker.verify(self.handle_of(stream), segments, most_bytes)

    def delay(self, stream: int) -> None:
        """Unless streams are eager, let the next work on the stream come late, now and then."""
        for share, cycles in SPINS if self.adversarial else ():
            if self.random.random() < share:
                self.kernels.spin(stream, self.random.randrange(cycles))

    def schedule(self, seed: int | None, preempt: int | None = None) -> None:
        """Decide from here on by this seed what is delayed."""
        if seed is not None:
            self.random.seed(seed)

    def _launching(self, call: str, stream: Stream) -> None:
        handle = self._live(call, stream)
        self.busy.add(handle)
        self.delay(handle)

    # The end.

    def leave(self) -> None:
        """See `Books.leave`."""
        super().leave()
        if hasattr(self, "pinned"):
            self.pinned.leave()

    def ledger(self) -> Ledger:
        """The device's own books. What runs when is not known here."""
        return self.books(())

    def close(self, streams: Sequence[Stream] = ()) -> None:
        """Wait, and give everything back. If the context is lost, there is nothing to give
        back; if something never ends, nothing is given back, since it may still be read."""
        if self.closed or self.forked:
            return
        if self.driver.retained and not self._let_go(streams):
            return
        self.driver.release()
        self.checker.free()
        self.traffic.forget()
        self.forget()

    @on_card
    def _let_go(self, streams: Sequence[Stream]) -> bool:
        """Wait, unless that was done before a close that was cut short, and give everything back;
        whether that could be done."""
        self._at_rest = self._at_rest or self._rests(streams)
        if self._at_rest:
            try:
                self._give_back()
            except (DeviceError, DeviceFault) as error:
                warnings.warn(f"closing {self!r}: {error}", ResourceWarning, stacklevel=4)
        return self._at_rest

    def _rests(self, streams: Sequence[Stream]) -> bool:
        """Wait for the last time; whether that could be done, or must be tried again."""
        self.kept = False
        try:
            self.busy.update(map(self.handle_of, streams))
            own = [stream for stream in self.made_streams if stream not in self._gates]
            # What waits for its events has not begun, and need not. Of a call that was cut short
            # the books may say anything; what was issued is on a stream.
            handles = [self._live("close", stream) for stream in {*own, *self.busy}]
            self._wait_for(handles, copies=False)
        except DeviceError as error:
            self.kept, why = True, str(error)
        except DeviceFault as fault:
            self.kept, why = self.lost is None, str(fault)
        if self.kept:
            log.error("%r keeps all its memory: %s", self, why)
        return not self.kept

    def _give_back(self) -> None:
        """Everything, whatever fails of it. Raises DeviceError then. What has been given back is
        struck out, so that a close that was cut short can go on."""
        self.pay()
        while self._places:
            # Noted before the driver was asked. If one stays mapped, its addresses cannot be freed.
            with suppress(DeviceError):
                place = next(iter(self._places))
                self.driver.call(self.api.cuMemUnmap, place, self.frame_bytes)
            self._places.remove(next(iter(self._places)))
        self.pinned.free()
        failed = self._free_all()
        if failed:
            raise DeviceError("close", "; ".join(failed))

    def __del__(self) -> None:
        if not getattr(self, "closed", True) and self.unclosed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1)

    # Inside.

    def _do(self, kind: str, function: Any, *arguments: Any) -> Any:
        """One step of a call."""
        self.step(kind)
        return self.driver.call(function, *arguments)
