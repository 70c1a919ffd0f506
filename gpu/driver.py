"""The CUDA driver, called so that an error has a name.

Every call goes through `Driver.call`. An error that leaves the context usable is a `DeviceError`;
one that is sticky (an illegal address in some kernel, say) is a `DeviceFault`, after which the
driver is not asked anything any more: it would answer every call with the same error, and waiting
for a stream might never end.

The context is current only while a call of ours runs, and meanwhile the thread may do what other
threads must not while some stream is captured: what we call is no part of anybody's graph, and
breaks none (the default would destroy a capture of another thread). What was current before, and
the thread's capture mode, are restored.

An interrupt may come between any two lines. So what a thread has entered is noted as the driver is
asked for it, and is left down to where a call has begun, twice: one interrupt stops only one of
them. What two have left is restored when the device is closed, which also gives the context back as
often as it was retained, and not once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from itertools import starmap
from threading import local
from typing import Any, Final, NoReturn, Self, TypeVar

from kvstate.errors import ConfigError, DeviceError, DeviceFault
from kvstate.gpu.held import Held, strike

STICKY: Final = frozenset({
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE", "CUDA_ERROR_CONTAINED",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_UNKNOWN",
})  # fmt: skip
"""Errors after which the context is lost."""


class _Here(local):
    """What a thread has entered: the driver's answers, (error,) of a context that was made current
    and (error, mode) of a capture mode that was exchanged, the last one at the end."""

    def __init__(self) -> None:
        self.entered: list[tuple[Any, ...]] = []


class Driver:
    """The driver and the primary context of one device, once it is retained."""

    def __init__(self, ordinal: int) -> None:
        try:
            self.api: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ConfigError("CUDA needs cuda-python: pip install 'kvstate[gpu]'") from error
        self.ordinal = ordinal
        self.lost: str | None = None
        """The error that lost the context; None while it is usable."""
        self.held: list[Held] = []
        """All that was made, kind by kind."""
        self.retained: list[tuple[Any, Any]] = []
        """The driver's answers, each with the context."""
        self._here = _Here()
        self.device_count = self._count()
        if not 0 <= ordinal < self.device_count:
            raise ConfigError(f"there is no CUDA device {ordinal}; {self.device_count} are visible")
        self.device = self.call(self.api.cuDeviceGet, ordinal)
        self._relaxed = self.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def _count(self) -> int:
        """How many devices there are. Raises ConfigError where there is no driver at all."""
        try:
            self.call(self.api.cuInit, 0)
            return int(self.call(self.api.cuDeviceGetCount))
        except RecursionError:
            raise
        except (RuntimeError, DeviceError) as error:
            raise ConfigError(f"CUDA cannot be used here: {error}") from error

    def retain(self) -> Self:
        """Hold the context until it is released. Raises DeviceError."""
        retain = self.function("cuDevicePrimaryCtxRetain")
        self.retained.extend(map(retain, (self.device,)))
        if self.retained[-1][0]:
            self.fail("cuDevicePrimaryCtxRetain", self.retained.pop()[0])
        return self

    @property
    def context(self) -> Any:
        """The context that is retained. Raises DeviceError once it was given back."""
        if not self.retained:
            raise DeviceError("context", "it was given back")
        return self.retained[-1][1]

    @property
    def depth(self) -> int:
        """How much this thread has entered and not left."""
        return len(self._here.entered)

    def enter(self) -> None:
        """Make the context current on this thread, and its capture mode relaxed. Of a context that
        is lost nothing is asked."""
        if self.lost is None:
            entered = self._here.entered
            entered.extend(map(self.api.cuCtxPushCurrent, (self.context,)))
            if entered[-1][0]:
                self.fail("cuCtxPushCurrent", entered.pop()[0])
            entered.extend(map(self.api.cuThreadExchangeStreamCaptureMode, (self._relaxed,)))

    def leave(self, depth: int) -> None:
        """Restore what was there at that depth."""
        api, entered = self.api, self._here.entered
        while len(entered) > depth:
            _, *mode = entered[-1]
            if mode:
                strike(entered, map(api.cuThreadExchangeStreamCaptureMode, mode))
            else:
                strike(entered, starmap(api.cuCtxPopCurrent, ((),)))

    @contextmanager
    def here(self) -> Iterator[None]:
        """The context is current meanwhile, as in a call of a device."""
        depth = self.depth
        try:
            try:
                self.enter()
                yield
            finally:
                self.leave(depth)
        finally:
            self.leave(depth)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call the driver; what it gives back. Raises DeviceError, or DeviceFault if it is
        lost."""
        if self.lost is not None:
            raise DeviceFault(self.lost)
        error, *values = function(*args)
        if error:
            self.fail(function.__name__, error)
        return values[0] if values else None

    def function(self, name: str) -> Callable[..., Any]:
        """A call of the driver's, to be called by itself. Raises DeviceFault if it is lost."""
        if self.lost is not None:
            raise DeviceFault(self.lost)
        return getattr(self.api, name)  # type: ignore[no-any-return]

    def ready(self, event: Any) -> bool:
        """Whether an event has passed."""
        return self._over(self.api.cuEventQuery, event)

    def idle(self, stream: Any) -> bool:
        """Whether everything launched on a stream has run."""
        return self._over(self.api.cuStreamQuery, stream)

    def capturing(self, stream: Any) -> bool:
        """Whether a stream is being captured into a graph, or may not be used while another is."""
        if self.lost is not None:
            raise DeviceFault(self.lost)
        error, status = self.api.cuStreamIsCapturing(stream)
        if error == self.api.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True
        if error:
            self.fail("cuStreamIsCapturing", error)
        return bool(status != self.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def _over(self, query: Callable[..., Any], what: Any) -> bool:
        if self.lost is not None:
            raise DeviceFault(self.lost)
        error = query(what)[0]
        if error == self.api.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if error:
            self.fail(query.__name__, error)
        return True

    def attribute(self, name: str) -> int:
        """A device attribute, by the end of its name."""
        wanted = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call(self.api.cuDeviceGetAttribute, wanted, self.device))

    def free_bytes(self) -> int:
        """Free memory of the device, as the driver says."""
        with self.here():
            error, free, _ = self.api.cuMemGetInfo()
        if error:
            self.fail("cuMemGetInfo", error)
        return int(free)

    def release(self) -> None:
        """Give the context back as often as it was retained, and restore this thread."""
        self.leave(0)
        while self.retained and self.lost is None:
            strike(self.retained, map(self.api.cuDevicePrimaryCtxRelease, (self.device,)))

    def fail(self, call: str, error: Any) -> NoReturn:
        """Raise what an error of the driver's means."""
        name = getattr(error, "name", str(error))
        if name in STICKY:
            self.lost = f"{call} returned {name}: the context of CUDA device {self.ordinal} is lost"
            raise DeviceFault(self.lost)
        raise DeviceError(call, name)


C = TypeVar("C", bound=Callable[..., Any])


def on_card(method: C) -> C:
    """A call of a device that asks the driver for something: not in the child of a fork, and with
    its context current meanwhile."""
    name = method.__name__

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        self.present(name)
        driver: Driver = self.driver
        depth = driver.depth
        try:
            try:
                driver.enter()
                return method(self, *args, **named)
            finally:
                driver.leave(depth)
        finally:
            driver.leave(depth)

    return call  # type: ignore[return-value]
