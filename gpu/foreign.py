"""Streams and events that other libraries have made: the driver's handle of each, or a refusal.

A handle is a pointer, and the driver follows whatever it is given: of a number that is none the
process dies. So a number is looked at before it is used. A stream's begins with a pointer, and what
is left of a closed one hardly ever does: it is refused, if streams that are known to be open begin
so. Only then the driver is asked whose it is. Rejected: to ask the driver alone, which follows a
closed one into the void (seen on an H200). Events are only taken as objects,
which can be held until they have passed; nobody keeps the event of a number alive.

What an object says of itself is code of others. Whatever that raises is a refusal; an interrupt and
the end of memory go through.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvstate.device import Event, Stream
from kvstate.errors import DeviceError
from kvstate.gpu.driver import Driver
from kvstate.values import NOBODYS, described, shown

SPECIAL: Final = (0, 1, 2)
"""The driver's own names: the default stream, and that of each process or thread."""
_POINTER_BYTES: Final = 8
_ALIGNED: Final = 16
"""Where objects of the allocator begin."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_STREAMS: Final = "None, a stream of this device or of another library, or its handle is wanted"
_EVENTS: Final = "an event of this device, or a recorded one of another library, is wanted"


def stream_handle(stream: Stream) -> int:
    """The driver's handle of a stream: a number, or an object of torch, cuda.core, CuPy or the
    bindings. Raises DeviceError for what is none."""
    with _asking("stream", stream):
        found = _number(stream, "__cuda_stream__", "cuda_stream", "handle", "native_handle", "ptr")
        if found is None and hasattr(stream, "stream_id"):
            found = _of_torch(stream)
    if type(found) is not int or not 0 <= found < 1 << 64:
        raise DeviceError("stream", f"it is {described(stream)}: {_STREAMS}")
    return found


def event_handle(event: Event) -> int:
    """The driver's handle of an event of another library. Raises DeviceError for what is none, and
    for one that was not recorded."""
    found = None
    if not isinstance(event, int):
        with _asking("event", event):
            found = _number(event, "cuda_event", "handle", "ptr", "event_id")
    if type(found) is not int or not 0 <= found < 1 << 64:
        raise DeviceError("event", f"it is {described(event)}: {_EVENTS}")
    if not found or not is_memory(found):
        raise DeviceError("event", f"{described(event)} was not recorded, or is closed")
    return found


def check_stream(driver: Driver, handle: int, like: int) -> None:
    """Raises DeviceError if a handle is no stream of the driver's context; `like` is one."""
    if handle in SPECIAL:
        return
    if not is_memory(handle) or (leads(like) and not leads(handle)):
        raise DeviceError("stream", f"{handle:#x} is no stream: nothing is there, or it is closed")
    error, context = driver.api.cuStreamGetCtx(handle)[:2]
    if error:
        raise DeviceError("stream", f"{handle:#x} is no stream: {getattr(error, 'name', error)}")
    if int(context) != int(driver.context):
        raise DeviceError("stream", f"{handle:#x} is of another context or device")


def leads(address: int) -> bool:
    """Whether the first word there is the address of an object."""
    word = _word(address)
    return word is not None and not word % _ALIGNED and is_memory(word)


def is_memory(address: int) -> bool:
    """Whether something can be read there."""
    return _word(address) is not None


def _word(address: int) -> int | None:
    """What is there, by a call that fails where nothing is; None then."""
    there = ctypes.c_uint64()
    local = (ctypes.c_size_t * 2)(ctypes.addressof(there), _POINTER_BYTES)
    remote = (ctypes.c_size_t * 2)(address, _POINTER_BYTES)
    moved = _libc.process_vm_readv(
        os.getpid(), local, ctypes.c_ulong(1), remote, ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    return there.value if moved == _POINTER_BYTES else None


@contextmanager
def _asking(call: str, thing: object) -> Iterator[None]:
    """Raises DeviceError for whatever is raised meanwhile."""
    try:
        yield
    except NOBODYS:
        raise
    except Exception as error:
        reason = f"it is {described(thing)}, which does not say its handle: {shown(error)}"
        raise DeviceError(call, reason) from error


def _number(thing: Any, *names: str) -> int | None:
    """What something says of itself by the first of these names that it has."""
    if type(thing) is int:
        return thing
    for name in names:
        said = getattr(thing, name, None)
        if said is not None:
            said = said() if callable(said) else said
            return int(said[1] if isinstance(said, tuple) else said)
    try:
        return int(thing) if hasattr(thing, "getPtr") else None  # of the bindings
    except (TypeError, ValueError):
        return None


def _of_torch(stream: Any) -> int:
    """A `torch.Stream`, which knows torch's own number of itself."""
    torch: Any = sys.modules["torch"]
    known = torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index,
        device_type=stream.device_type,
    )  # fmt: skip
    return int(known.cuda_stream)
