"""What the kernels of `kvstate.gpu.kernels` do, in numpy: for a card that runs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np

from kvstate import pattern
from kvstate.gpu.checks import DEVICE_SEGMENT
from kvstate.gpu.kernels import TILE_BYTES
from tests.device import fake_memory as memory


class Rows(NamedTuple):
    """Rows of one segment."""

    address: int
    want: np.ndarray[Any, Any]
    first_tile: int
    flags: int
    there: bool
    """The device's table allows it."""


def _segments(segments: int, firsts: int, count: int, table: int, row_bytes: int) -> Iterator[Rows]:
    tiles = np.frombuffer(memory.read(firsts, 4 * count), np.uint32).tolist()
    found = memory.read(segments, count * DEVICE_SEGMENT.itemsize)
    for tile, one in zip(tiles, np.frombuffer(found, DEVICE_SEGMENT).tolist(), strict=True):
        address, position, tokens, key, row, flags = one
        base, length = _entry(table, row) if row >= 0 else (0, position + tokens)
        want = pattern.rows(key, position, tokens, row_bytes).view(np.uint8)
        yield Rows(base + address, want, tile, flags, position + tokens <= length)


def _entry(table: int, row: int) -> tuple[int, int]:
    base, length = np.frombuffer(memory.read(table + 16 * row, 16), np.uint64).tolist()
    return base, length


def _write(segments: int, firsts: int, count: int, table: int, row_bytes: int) -> None:
    for one in _segments(segments, firsts, count, table, row_bytes):
        if one.there:
            memory.write(one.address, one.want.tobytes())


def _verify(
    segments: int, firsts: int, count: int, table: int, row_bytes: int, stride: int, phase: int,
    flags: int, wrong: int,
) -> None:  # fmt: skip
    for one in _segments(segments, firsts, count, table, row_bytes):
        differ = np.ones(one.want.size, np.bool_)
        if one.there:
            have = np.frombuffer(memory.read(one.address, one.want.size), np.uint8)
            differ = have != one.want.ravel()
        tiles = one.first_tile + np.arange(one.want.size) // TILE_BYTES
        bad = (differ & (tiles % stride == phase)).reshape(one.want.shape).any(axis=1)
        for at in np.flatnonzero(bad).tolist():
            memory.write(flags + one.flags + at, b"\1")
        _add(wrong, int(bad.sum()), 4)


def _publish(table: int, entries: int, count: int) -> None:
    found = np.frombuffer(memory.read(entries, 24 * count), np.uint64).reshape(count, 3)
    for row, entry in zip(found[:, 0].tolist(), found[:, 1:], strict=True):
        memory.write(table + 16 * row, entry.tobytes())


def _strays(runs: int, one: int, other: int, total: int, count: int) -> None:
    for address, size in np.frombuffer(memory.read(runs, 16 * count), np.uint64).reshape(-1, 2):
        held = memory.read(int(address), int(size))
        _add(total, len(held.translate(None, bytes((one & 0xFF, other & 0xFF)))), 8)


def _add(place: int, more: int, size_bytes: int) -> None:
    number = int.from_bytes(memory.read(place, size_bytes), "little") + more
    memory.write(place, number.to_bytes(size_bytes, "little"))


KERNELS: Final[dict[str, Callable[..., None]]] = {
    "write_rows": _write, "verify_rows": _verify, "publish": _publish, "strays": _strays,
}  # fmt: skip
"""By name, on the values that they are launched with; `strays` is told its rows, too."""
