"""The memory of the fake card: frames that are files, mapped where they are asked for.

The system keeps the access that a mapping gives, and bytes move by a call that fails where nothing
is, so that a stray copy is an error and no signal.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Final

_NOTHING: Final = 0
_FIXED: Final = 0x10
_FAILED: Final = ctypes.c_void_p(-1).value
_size, _int = ctypes.c_size_t, ctypes.c_int
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [_size, _size, _int, _int, _int, ctypes.c_long]
_libc.munmap.argtypes = [_size, _size]
_libc.mprotect.argtypes = [_size, _size, _int]
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = [_int, _size, ctypes.c_ulong, _size, ctypes.c_ulong, _size]


class NotThere(Exception):
    """No memory, or none that allows this."""


class Frame:
    """Physical memory: a file without a name."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.file = os.memfd_create("kvstate-frames", os.MFD_CLOEXEC)
        os.truncate(self.file, size_bytes)

    def close(self) -> None:
        """What is mapped stays."""
        os.close(self.file)


class Region:
    """Reserved addresses."""

    def __init__(self, size_bytes: int, align_bytes: int) -> None:
        self._whole_bytes = size_bytes + align_bytes
        self._begin = _mapped(0, self._whole_bytes, -1)
        self.first = -(-self._begin // align_bytes) * align_bytes
        self.size_bytes = size_bytes

    def close(self) -> None:
        _libc.munmap(self._begin, self._whole_bytes)


def map_frame(address: int, frame: Frame) -> None:
    """Nobody may read or write it there yet."""
    _mapped(address, frame.size_bytes, frame.file)


def unmap(address: int, size_bytes: int) -> None:
    """The addresses stay reserved."""
    _mapped(address, size_bytes, -1)


def allow(address: int, size_bytes: int, *, write: bool) -> None:
    """Let memory be read, or written too."""
    access = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
    _libc.mprotect(address, size_bytes, access)


def _mapped(address: int, size_bytes: int, file: int) -> int:
    kind = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    fixed = _FIXED if address else 0
    found = _libc.mmap(address, size_bytes, _NOTHING, kind | fixed, file, 0)
    if found == _FAILED:
        raise MemoryError(f"{size_bytes} bytes of addresses")
    return int(found)


def copy(target: int, source: int, size_bytes: int) -> None:
    """Raises NotThere."""
    local, remote = (_size * 2)(source, size_bytes), (_size * 2)(target, size_bytes)
    pair = map(ctypes.addressof, (local, remote))
    moved = _libc.process_vm_writev(os.getpid(), next(pair), 1, next(pair), 1, 0)
    if moved != size_bytes:
        raise NotThere(f"{size_bytes} bytes from {source:#x} to {target:#x}")


def read(address: int, size_bytes: int) -> bytes:
    """Raises NotThere."""
    found = ctypes.create_string_buffer(size_bytes)
    copy(ctypes.addressof(found), address, size_bytes)
    return found.raw


def write(address: int, data: bytes) -> None:
    """Raises NotThere."""
    held = ctypes.create_string_buffer(data, len(data))
    copy(address, ctypes.addressof(held), len(data))
