"""The fake card: what was made on it, which thread may ask, and what its streams still have to do.

Whatever is made is noted until it is given back. Work of a stream runs in its order, at once, if
nothing that it waits for is missing.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

from attrs import define, field

from kvstate.gpu.books import address_of
from tests.device import fake_memory as memory
from tests.device.fake_kernels import KERNELS
from tests.device.fake_names import CUresult, CUstreamCaptureMode, CUstreamCaptureStatus

PATIENCE: Final = 100_000
"""Looks at a stream that somebody waits for, before that is a test which hangs."""
NONE, ACTIVE, BROKEN = CUstreamCaptureStatus
GLOBAL, _, RELAXED = CUstreamCaptureMode


class Refused(Exception):
    """A call answers with an error, by the end of its name."""


@define(eq=False)
class Mark:
    """A point in a stream."""

    passed: bool = False
    captured: bool = False


@define(eq=False)
class Line:
    """A stream: work in the order of its launch, each with what it waits for."""

    work: deque[tuple[Callable[[], bool], Callable[[], object]]] = field(factory=deque)
    capture: CUstreamCaptureStatus = NONE


class Here(threading.local):
    """What the driver knows of a thread."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.mode = GLOBAL


class Handles:
    """Addresses that stand for things. What is alive begins with a pointer, as with the driver's
    own; what is gone does not."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1 << 20)
        self._first = address_of(self._memory)
        self._free = deque(range(self._first + 16, self._first + (1 << 20), 16))

    def new(self) -> int:
        handle = self._free.popleft()
        ctypes.c_uint64.from_address(handle).value = self._first
        return handle

    def close(self, handle: int) -> None:
        ctypes.c_uint64.from_address(handle).value = 0
        self._free.append(handle)


_LOCK: Final = threading.RLock()
HERE: Final = Here()
_HANDLES: Final = Handles()
CONTEXT: Final = _HANDLES.new()
FUNCTIONS: Final = {_HANDLES.new(): name for name in (*KERNELS, "spin")}
_DEFAULTS: Final = {0: Line(), 1: Line(), 2: Line()}
ADDRESSES: Final = ("addresses", "mapped", "memory", "host memory", "registered")
"""What is known by where it is; all else has a handle."""
MADE: Final = defaultdict[str, dict[int, Any]](dict)
"""Whatever was made and not given back, by kind and handle."""


def held() -> Counter[str]:
    """What the driver has of this process."""
    return entered() + Counter({kind: len(made) for kind, made in MADE.items()})


def entered() -> Counter[str]:
    """What is not as a thread finds it: contexts that are current, and the mode of captures."""
    modes = int(HERE.mode != GLOBAL)
    return +Counter({"contexts pushed": len(HERE.contexts), "capture modes": modes})


def answers(
    count: int = 0, *, anywhere: bool = False, waits: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A call that answers with an error and `count` values. It wants the context to be current, if
    not `anywhere`; one that `waits` or makes memory is forbidden while somebody captures."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> tuple[Any, ...]:
            with _LOCK:
                try:
                    _check_thread(anywhere, waits)
                    answer = function(*args)
                except Refused as refused:
                    return CUresult[f"CUDA_ERROR_{refused}"], *([None] * count)
                except memory.NotThere:
                    return CUresult.CUDA_ERROR_INVALID_VALUE, *([None] * count)
            values = answer if count > 1 else [answer] * count
            return CUresult.CUDA_SUCCESS, *values

        return call

    return decorate


def _check_thread(anywhere: bool, waits: bool) -> None:
    if not anywhere:
        check(HERE.contexts[-1:] == [CONTEXT], "INVALID_CONTEXT")
    captured = [line for line in lines() if line.capture] if waits else []
    if captured and HERE.mode != RELAXED:
        for line in captured:
            line.capture = BROKEN
        raise Refused("STREAM_CAPTURE_UNSUPPORTED")


def check(good: bool, error: str = "INVALID_VALUE") -> None:
    if not good:
        raise Refused(error)


def make(kind: str, thing: object, handle: int | None = None) -> int:
    handle = _HANDLES.new() if handle is None else handle
    MADE[kind][handle] = thing
    return handle


def take(kind: str, handle: int, error: str = "INVALID_HANDLE") -> Any:
    """It is gone."""
    thing = find(kind, handle, error)
    del MADE[kind][int(handle)]
    if kind not in ADDRESSES:
        _HANDLES.close(int(handle))
    return thing


def find(kind: str, handle: int, error: str = "INVALID_HANDLE") -> Any:
    check(int(handle) in MADE[kind], error)
    return MADE[kind][int(handle)]


# Streams.


def lines() -> list[Line]:
    return [*_DEFAULTS.values(), *MADE["streams"].values()]


def line_of(stream: int) -> Line:
    default = _DEFAULTS.get(int(stream))
    return find("streams", stream) if default is None else default


def launch(
    stream: int, run: Callable[[], object], ready: Callable[[], bool] = lambda: True
) -> None:
    """Put work on a stream; if that is being captured, it becomes part of the graph instead."""
    line = line_of(stream)
    if not line.capture:
        line.work.append((ready, run))
        go_on()


def go_on() -> None:
    """Let every stream get as far as it can."""
    moved = True
    while moved:
        moved = False
        for line in lines():
            while line.work and line.work[0][0]():
                moved = True
                line.work.popleft()[1]()


def wait(over: Callable[[], bool]) -> None:
    for _ in range(PATIENCE):
        go_on()
        if over():
            return
    raise RuntimeError("what is waited for never ends")
