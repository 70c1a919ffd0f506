"""The devices that are held to one contract, and the few words that the tests of it speak.

Tests know a device by its factory and by the ByteDevice protocol alone, so that a device which
joins the list below is held to all of them without a change to any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Final

import numpy as np
import pytest
from attrs import frozen

from kvstate import pattern
from kvstate.device import (
    SEGMENT,
    ByteDevice,
    Check,
    Completion,
    CopyRun,
    Direction,
    Event,
    MapRun,
    Segments,
    Stream,
    UnmapRun,
)
from kvstate.errors import DeviceError
from kvstate.gpu import open_device
from kvstate.gpu.host import HostDevice
from kvstate.gpu.kernels import TILE_BYTES
from kvstate.gpu.null import NullDevice
from kvstate.gpu.streams import MODES
from kvstate.spec.facts import Ledger
from tests.device.fake_driver import installed, open_fake

ROW_BYTES: Final = 256
CUDA_FRAME: Final = 2 << 20
"""The least that the driver maps."""


@frozen
class Factory:
    """A kind of device: how to open one, and what it can do."""

    name: str
    open: Callable[[], ByteDevice]
    frame_bytes: int
    moves_bytes: bool = True
    """Whether there is memory behind its addresses."""


HOST: Final = tuple(
    Factory(f"host-{mode}", partial(HostDevice, streams=mode), 2 * 4096) for mode in MODES
)
NULL: Final = tuple(
    Factory(f"null-{mode}", partial(NullDevice, streams=mode), 2 * 4096, moves_bytes=False)
    for mode in MODES
)
CUDA: Final = tuple(
    Factory(f"cuda-{mode}", partial(open_device, "cuda", streams=mode), 2 * CUDA_FRAME)
    for mode in MODES
)
FAKE: Final = tuple(
    Factory(f"fake-{mode}", partial(open_fake, streams=mode), 2 * TILE_BYTES)
    for mode in ("eager", "adversarial")
)
"""The card's device on a driver without a card."""
CARDS: Final = (*CUDA, *FAKE)
DRIVERS: Final = [
    pytest.param(nullcontext, id="card", marks=pytest.mark.gpu),
    pytest.param(installed, id="fake"),
]
"""Where `cuda` is opened: on the card's driver, or meanwhile on that without one."""
WITH_BYTES: Final = [
    *(pytest.param(factory, id=factory.name) for factory in (*HOST, *FAKE)),
    *(pytest.param(factory, id=factory.name, marks=pytest.mark.gpu) for factory in CUDA),
]
EVERY: Final = [*WITH_BYTES, *(pytest.param(factory, id=factory.name) for factory in NULL)]


@frozen
class Rig:
    """An open device, with the steps that most tests begin with."""

    factory: Factory
    device: ByteDevice

    @property
    def frame_bytes(self) -> int:
        return self.factory.frame_bytes

    def reserve(self, count_frames: int) -> int:
        return self.device.reserve(count_frames * self.frame_bytes, self.frame_bytes)

    def create(self, count: int) -> list[int]:
        return self.device.create(count, self.frame_bytes)

    def map(self, frames: list[int], *, read_only: bool = False) -> int:
        """Map the frames one after the other at fresh addresses."""
        address = self.reserve(len(frames))
        self.device.map([MapRun(address, frames, read_only)])
        return address

    def mapped(self, count_frames: int) -> int:
        """Fresh memory."""
        return self.map(self.create(count_frames))

    def quiesce(self) -> list[Completion]:
        """Wait for everything, on all streams that the device has made."""
        made = getattr(self.device, "made_streams", None)
        return self.device.quiesce(made or self.device.streams.streams)  # type: ignore[attr-defined]

    def unmap(self, address: int, count_frames: int) -> None:
        self.quiesce()
        self.device.unmap([UnmapRun(address, count_frames)])

    def is_mapped(self, address: int) -> bool:
        """Whether a frame is mapped there, by the ledger and, where there are bytes, by them."""
        mapped = address in self.device.ledger().mappings
        if self.factory.moves_bytes:
            assert mapped == self.can_peek(address) == self.can_peek(address + self.frame_bytes - 1)
        return mapped

    def can_peek(self, address: int, size_bytes: int = 1) -> bool:
        try:
            return len(self.device.peek(address, size_bytes)) == size_bytes
        except DeviceError:
            return False

    def copy(
        self,
        direction: Direction,
        runs: list[CopyRun],
        after: tuple[Event, ...] = (),
        before: tuple[Stream, ...] = (),
    ) -> bool:
        """Copy and wait; whether it ended well."""
        token = self.device.copy(direction, runs, after, before)
        (end,) = self.quiesce()
        assert end.token == token
        return end.ok

    def issue(self, count: int) -> list[int]:
        """Issue copies in both directions that depend on nothing; their tokens."""
        address, host = self.mapped(1), self.device.host_reserve(4096)
        found = []
        for at in range(count):
            ends = (address + 16 * at, host + 16 * at)
            if at % 2:
                found.append(self.device.copy(Direction.OUT, [CopyRun(*ends[::-1], 16)]))
            else:
                found.append(self.device.copy(Direction.IN, [CopyRun(*ends, 16)]))
        return found

    def write(self, segments: Segments) -> None:
        """Write rows and wait."""
        stream = self.device.stream()
        self.device.write(stream, segments)
        self.device.synchronize(stream)

    def verify(self, segments: Segments) -> Check:
        """Verify rows and wait."""
        stream = self.device.stream()
        check = self.device.verify(stream, segments)
        self.device.synchronize(stream)
        assert check.done
        return check

    def give_back(self) -> None:
        """Give everything back one by one; a device that lost count cannot."""
        device = self.device
        if device.ledger().empty:
            return
        device.cancel_failures()
        device.script(None)
        self.quiesce()
        held = device.ledger()
        device.unmap([UnmapRun(address, 1) for address in held.mappings])
        device.release(sorted(held.frames))
        for address in held.reservations:
            device.unreserve(address)
        for address in held.host:
            device.host_unreserve(address)
        assert device.ledger().empty


@contextmanager
def opened(factory: Factory) -> Iterator[Rig]:
    """A device for one test, that holds nothing when the test is over."""
    rig = Rig(factory, factory.open())
    try:
        rig.device.set_rows(ROW_BYTES)
        yield rig
        rig.give_back()
    finally:
        rig.device.close()
    assert rig.device.ledger().empty


@contextmanager
def refused(rig: Rig, call: str | None = None) -> Iterator[None]:
    """What is called inside raises `DeviceError` naming the call, and changes nothing."""
    before = rig.device.ledger()
    with pytest.raises(DeviceError) as raised:
        yield
    assert call in (None, raised.value.call)
    after: Ledger = rig.device.ledger()
    assert after == before


def segments(*parts: tuple[int, int, int, int]) -> Segments:
    """Token rows: (address, first position, count, key of the writer) of each segment."""
    return np.array([(*part, -1) for part in parts], dtype=SEGMENT)


def relative(row: int, *parts: tuple[int, int, int, int]) -> Segments:
    """The same, with addresses relative to what the device's table has for a row."""
    return np.array([(*part, row) for part in parts], dtype=SEGMENT)


def written(position: int, count: int, key: int) -> bytes:
    """The bytes that the writer leaves there."""
    return pattern.rows(key, position, count, ROW_BYTES).tobytes()


def tokens(ends: list[Completion]) -> list[int]:
    """The tokens of completions, in their order."""
    return [end.token for end in ends]
