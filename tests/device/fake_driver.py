"""A driver without a card: what `kvstate.gpu` asks of `cuda.bindings.driver`, over plain memory.

So that the card's device runs where there is no card, and is interrupted at each of its lines. The
calls have the arguments and the answers of the bindings, refuse what the driver refuses (another
context, another thread's capture, what is mapped or gone already), and all that they make is
counted until it is given back: `held()`. Work of a stream runs in its order, at once, if nothing
that it waits for is missing; a kernel that spins is over after so many looks at it, and late work
is late by no clock.

Not modelled: two things that run at the same time, streams that wait for the default stream, a
driver that blocks. Rejected: a mock that notes calls. It would agree with whatever is asked of it.
"""

# ruff: noqa: N802
from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import pytest

from kvstate.device import ByteDevice
from kvstate.gpu import open_device
from kvstate.gpu.books import address_of
from tests.device import fake_memory as memory
from tests.device import fake_names
from tests.device.fake_card import (
    ACTIVE,
    CONTEXT,
    FUNCTIONS,
    HERE,
    MADE,
    NONE,
    Line,
    Mark,
    answers,
    check,
    find,
    go_on,
    launch,
    line_of,
    make,
    take,
    wait,
)
from tests.device.fake_kernels import KERNELS
from tests.device.fake_names import (
    CUdevice_attribute,
    CUmemAccess_flags,
    CUstreamCaptureMode,
    CUstreamCaptureStatus,
)

PAGE_BYTES: Final = 4096
CARD_BYTES: Final = 64 << 30
SPIN_CYCLES: Final = 100_000
"""Of a kernel that spins, for each look at it."""


# Devices and contexts.


@answers(anywhere=True)
def cuInit(flags: int) -> None: ...


@answers(1, anywhere=True)
def cuDeviceGetCount() -> int:
    return 1


@answers(1, anywhere=True)
def cuDeviceGet(ordinal: int) -> int:
    return ordinal


@answers(1, anywhere=True)
def cuDeviceGetAttribute(attribute: CUdevice_attribute, device: int) -> int:
    return int("VIRTUAL" in attribute.name)


@answers(1, anywhere=True)
def cuDevicePrimaryCtxRetain(device: int) -> int:
    make("contexts retained", None)
    return CONTEXT


@answers(anywhere=True)
def cuDevicePrimaryCtxRelease(device: int) -> None:
    check(bool(MADE["contexts retained"]), "INVALID_CONTEXT")
    take("contexts retained", next(iter(MADE["contexts retained"])))


@answers(anywhere=True)
def cuCtxPushCurrent(context: int) -> None:
    check(bool(MADE["contexts retained"]) and context == CONTEXT, "INVALID_CONTEXT")
    HERE.contexts.append(context)


@answers(1, anywhere=True)
def cuCtxPopCurrent() -> int:
    check(bool(HERE.contexts), "INVALID_CONTEXT")
    return HERE.contexts.pop()


@answers(1, anywhere=True)
def cuCtxGetCurrent() -> int:
    return HERE.contexts[-1] if HERE.contexts else 0


@answers(anywhere=True)
def cuCtxSetCurrent(context: int) -> None:
    HERE.contexts[-1:] = [context] * bool(context)


@answers(1, anywhere=True)
def cuThreadExchangeStreamCaptureMode(mode: CUstreamCaptureMode) -> CUstreamCaptureMode:
    before, HERE.mode = HERE.mode, mode
    return before


# Memory.


@answers(2)
def cuMemGetInfo() -> tuple[int, int]:
    return _free_bytes(), CARD_BYTES


def _free_bytes() -> int:
    used: int = sum(frame.size_bytes for frame in MADE["frames"].values())
    return CARD_BYTES - used - sum(map(len, MADE["memory"].values()))


@answers(1, anywhere=True)
def cuMemGetAllocationGranularity(kind: object, flags: int) -> int:
    return PAGE_BYTES


@answers(1, anywhere=True)
def cuMemCreate(size: int, kind: object, flags: int) -> int:
    check(size > 0 and size % PAGE_BYTES == 0)
    check(size <= _free_bytes(), "OUT_OF_MEMORY")
    return make("frames", memory.Frame(size))


@answers(anywhere=True)
def cuMemRelease(frame: int) -> None:
    take("frames", frame).close()


@answers(1, anywhere=True)
def cuMemAddressReserve(size: int, align: int, wanted: int, flags: int) -> int:
    check(size > 0 and size % PAGE_BYTES == 0 and align & (align - 1) == 0)
    region = memory.Region(size, max(align, PAGE_BYTES))
    return make("addresses", region, region.first)


@answers(anywhere=True)
def cuMemAddressFree(first: int, size: int) -> None:
    check(find("addresses", first, "INVALID_VALUE").size_bytes == size)
    check(not _mapped(first, size))
    take("addresses", first).close()


@answers(anywhere=True)
def cuMemMap(place: int, size: int, offset: int, frame: int, flags: int) -> None:
    found = find("frames", frame)
    check(size == found.size_bytes and not offset and not _mapped(place, size))
    regions = MADE["addresses"].values()
    check(any(0 <= place - one.first <= one.size_bytes - size for one in regions))
    memory.map_frame(place, found)
    make("mapped", size, place)


@answers(anywhere=True)
def cuMemSetAccess(first: int, size: int, access: list[Any], count: int) -> None:
    check(sum(MADE["mapped"][place] for place in _mapped(first, size)) == size)
    write = access[0].flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    memory.allow(first, size, write=write)


@answers(anywhere=True)
def cuMemUnmap(first: int, size: int) -> None:
    places = _mapped(first, size)
    check(sum(MADE["mapped"][place] for place in places) == size)
    memory.unmap(first, size)
    for place in places:
        del MADE["mapped"][place]


def _mapped(first: int, size: int) -> list[int]:
    """Where something is mapped that begins in there."""
    return [place for place in MADE["mapped"] if first <= place < first + size]


def _allocated(kind: str, size: int) -> int:
    pages = mmap.mmap(-1, size)
    return make(kind, pages, address_of(pages))


@answers(1, waits=True)
def cuMemAlloc(size: int) -> int:
    return _allocated("memory", size)


@answers(waits=True)
def cuMemFree(place: int) -> None:
    take("memory", place).close()


@answers(1, waits=True)
def cuMemHostAlloc(size: int, flags: int) -> int:
    return _allocated("host memory", size)


@answers(waits=True)
def cuMemFreeHost(place: int) -> None:
    take("host memory", place).close()


@answers(1)
def cuMemHostGetDevicePointer(place: int, flags: int) -> int:
    find("host memory", place)
    return place


@answers(waits=True)
def cuMemHostRegister(first: int, size: int, flags: int) -> None:
    memory.read(first, 1)
    taken = MADE["registered"].items()
    apart = all(at + held <= first or first + size <= at for at, held in taken)
    check(apart, "HOST_MEMORY_ALREADY_REGISTERED")
    make("registered", size, first)


@answers(waits=True)
def cuMemHostUnregister(first: int) -> None:
    take("registered", first, "HOST_MEMORY_NOT_REGISTERED")


# Streams and events.


@answers(1)
def cuStreamCreate(flags: int) -> int:
    return make("streams", Line())


@answers(anywhere=True)
def cuStreamDestroy(stream: int) -> None:
    take("streams", stream)


@answers(1, anywhere=True)
def cuStreamGetCtx(stream: int) -> int:
    line_of(stream)
    return CONTEXT


@answers(anywhere=True, waits=True)
def cuStreamQuery(stream: int) -> None:
    go_on()
    check(not line_of(stream).capture, "STREAM_CAPTURE_UNSUPPORTED")
    check(not line_of(stream).work, "NOT_READY")


@answers(anywhere=True, waits=True)
def cuStreamSynchronize(stream: int) -> None:
    line = line_of(stream)
    check(not line.capture, "STREAM_CAPTURE_UNSUPPORTED")
    wait(lambda: not line.work)


@answers()
def cuStreamWaitEvent(stream: int, event: int, flags: int) -> None:
    mark: Mark = find("events", event)
    launch(stream, lambda: None, lambda: mark.passed)


@answers()
def cuStreamWaitValue32(stream: int, place: int, value: int, flags: int) -> None:
    launch(stream, lambda: None, lambda: int.from_bytes(memory.read(place, 4), "little") >= value)


@answers(1, anywhere=True)
def cuStreamIsCapturing(stream: int) -> CUstreamCaptureStatus:
    return line_of(stream).capture


@answers()
def cuStreamBeginCapture(stream: int, mode: CUstreamCaptureMode) -> None:
    check(not line_of(stream).capture)
    line_of(stream).capture = ACTIVE


@answers(1)
def cuStreamEndCapture(stream: int) -> int:
    line = line_of(stream)
    whole, line.capture = line.capture == ACTIVE, NONE
    check(whole, "STREAM_CAPTURE_INVALIDATED")
    return make("graphs", None)


@answers(anywhere=True)
def cuGraphDestroy(graph: int) -> None:
    take("graphs", graph)


@answers(1)
def cuEventCreate(flags: int) -> int:
    return make("events", Mark(passed=True))


@answers(anywhere=True)
def cuEventDestroy(event: int) -> None:
    take("events", event)


@answers()
def cuEventRecord(event: int, stream: int) -> None:
    find("events", event)
    mark = MADE["events"][event] = Mark(captured=bool(line_of(stream).capture))
    launch(stream, partial(setattr, mark, "passed", True))


@answers(anywhere=True, waits=True)
def cuEventQuery(event: int) -> None:
    check(not find("events", event).captured, "CAPTURED_EVENT")
    go_on()
    check(find("events", event).passed, "NOT_READY")


@answers(anywhere=True, waits=True)
def cuEventSynchronize(event: int) -> None:
    mark: Mark = find("events", event)
    wait(lambda: mark.passed)


# Work.


def _copy(target: int, source: int, size: int) -> None:
    """Both ends stay in one unit of registered memory, if they are in any."""
    for first, unit in MADE["registered"].items():
        inside = (side - first for side in (target, source) if 0 <= side - first < unit)
        check(all(at + size <= unit for at in inside))
    memory.copy(target, source, size)


@answers()
def cuMemcpyDtoHAsync(target: int, source: int, size: int, stream: int) -> None:
    launch(stream, partial(_copy, target, source, size))


@answers()
def cuMemcpyHtoDAsync(target: int, source: int, size: int, stream: int) -> None:
    launch(stream, partial(_copy, target, source, size))


@answers()
def cuMemcpyDtoDAsync(target: int, source: int, size: int, stream: int) -> None:
    launch(stream, partial(_copy, target, source, size))


@answers()
def cuMemcpyBatchAsync(
    targets: list[int], sources: list[int], sizes: list[int], count: int, attributes: list[Any],
    firsts: list[int], kinds: int, stream: int,
) -> None:  # fmt: skip
    for run in zip(targets, sources, sizes, strict=True):
        launch(stream, partial(_copy, *run))


@answers()
def cuMemsetD8Async(place: int, value: int, size: int, stream: int) -> None:
    launch(stream, partial(memory.write, place, bytes([value]) * size))


@answers(1, waits=True)
def cuModuleLoadData(code: bytes) -> int:
    return make("modules", code)


@answers(anywhere=True)
def cuModuleUnload(module: int) -> None:
    take("modules", module)


@answers(1)
def cuModuleGetFunction(module: int, name: bytes) -> int:
    find("modules", module)
    return next(handle for handle, one in FUNCTIONS.items() if one == name.decode())


@answers()
def cuLaunchKernel(
    function: int, grid: int, rows: int, depth: int, block: int, high: int, deep: int,
    shared_bytes: int, stream: int, parameters: tuple[tuple[int, ...], Any], more: int,
) -> None:  # fmt: skip
    name, values = FUNCTIONS[function], parameters[0]
    if name == "spin":
        looks = iter(range(values[0] // SPIN_CYCLES))
        launch(stream, lambda: None, lambda: next(looks, None) is None)
        return
    values = (*values, rows) if name == "strays" else values
    launch(stream, partial(KERNELS[name], *values))


# The module.


_DRIVER: Final = ModuleType("cuda.bindings.driver")
_DRIVER.__dict__.update(vars(fake_names))
_DRIVER.__dict__.update({name: one for name, one in vars().items() if name.startswith("cu")})


@contextmanager
def installed() -> Iterator[None]:
    """Whoever opens a card meanwhile opens this one."""
    core: Any = ModuleType("cuda.core")
    core.ProgramOptions = SimpleNamespace
    core.Program = lambda *_: SimpleNamespace(compile=lambda _: SimpleNamespace(code=b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings.driver", _DRIVER)
        patch.setitem(sys.modules, "cuda.core", core)
        yield


def open_fake(**named: Any) -> ByteDevice:
    """A card's device on this driver."""
    with installed():
        return open_device("cuda", **named)
