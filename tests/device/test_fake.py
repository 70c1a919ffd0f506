"""The driver without a card is as strict as the card's: what it refuses, and what it counts.

A fake that takes everything would find nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

import kvstate.gpu
from kvstate.errors import DeviceError
from kvstate.gpu.driver import Driver
from tests.device.fake_card import MADE, entered, held
from tests.device.fake_driver import PAGE_BYTES, installed, open_fake

GPU: Final = Path(kvstate.gpu.__file__).parent


@pytest.fixture
def alone() -> Iterator[None]:
    """Devices that other tests have left, since something never ended, are out of sight."""
    others = dict(MADE)
    MADE.clear()
    yield
    MADE.clear()
    MADE.update(others)


@pytest.fixture
def api(alone: None) -> Iterator[Any]:
    """The module, with a context that is current; all is given back afterwards."""
    with installed():
        found = import_module("cuda.bindings.driver")
    _, context = found.cuDevicePrimaryCtxRetain(0)
    found.cuCtxPushCurrent(context)
    yield found
    found.cuCtxPopCurrent()
    found.cuDevicePrimaryCtxRelease(0)
    assert held() == {}


def error_of(answer: tuple[Any, ...]) -> str:
    return str(answer[0].name.removeprefix("CUDA_ERROR_"))


def test_it_has_all_that_is_asked_of_the_bindings(api: Any) -> None:
    text = "".join(file.read_text() for file in GPU.glob("*.py"))
    names = set(re.findall(r"\bapi\.(cu\w+|CU\w+)|\"(cu[A-Z]\w+)\"", text))
    asked = {one or other for one, other in names}
    assert len(asked) > 60
    assert {name for name in asked if not hasattr(api, name)} == set()


def test_what_is_made_is_counted_until_it_is_given_back(api: Any) -> None:
    before = held()
    device = open_fake()
    assert held()["contexts retained"] == 2
    device.close()
    assert held() == before


def test_nothing_is_given_back_twice(api: Any) -> None:
    _, frame = api.cuMemCreate(PAGE_BYTES, None, 0)
    assert error_of(api.cuMemRelease(frame)) == "CUDA_SUCCESS"
    assert error_of(api.cuMemRelease(frame)) == "INVALID_HANDLE"
    _, stream = api.cuStreamCreate(1)
    api.cuStreamDestroy(stream)
    assert error_of(api.cuStreamQuery(stream)) == "INVALID_HANDLE"
    assert error_of(api.cuMemHostUnregister(PAGE_BYTES)) == "HOST_MEMORY_NOT_REGISTERED"


def test_a_place_is_mapped_once_and_only_what_is_reserved(api: Any) -> None:
    _, frame = api.cuMemCreate(PAGE_BYTES, None, 0)
    _, first = api.cuMemAddressReserve(2 * PAGE_BYTES, 0, 0, 0)
    place = (first, PAGE_BYTES, 0, frame, 0)
    assert not api.cuMemMap(*place)[0]
    assert error_of(api.cuMemMap(*place)) == "INVALID_VALUE"
    assert error_of(api.cuMemMap(first + 2 * PAGE_BYTES, *place[1:])) == "INVALID_VALUE"
    assert error_of(api.cuMemUnmap(first, 2 * PAGE_BYTES)) == "INVALID_VALUE"
    assert error_of(api.cuMemAddressFree(first, 2 * PAGE_BYTES)) == "INVALID_VALUE"
    assert error_of(api.cuMemsetD8Async(first, 1, 16, 0)) == "INVALID_VALUE", "no access yet"
    assert not api.cuMemUnmap(first, PAGE_BYTES)[0]
    assert not api.cuMemAddressFree(first, 2 * PAGE_BYTES)[0]
    assert not api.cuMemRelease(frame)[0]


def test_a_call_wants_its_context(api: Any) -> None:
    _, context = api.cuCtxPopCurrent()
    assert error_of(api.cuStreamCreate(1)) == "INVALID_CONTEXT"
    assert error_of(api.cuCtxPopCurrent()) == "INVALID_CONTEXT"
    api.cuCtxPushCurrent(context)


def test_a_capture_is_broken_by_whoever_waits_in_its_mode(api: Any) -> None:
    _, stream = api.cuStreamCreate(1)
    modes = api.CUstreamCaptureMode
    for mode, error in (
        (modes.CU_STREAM_CAPTURE_MODE_RELAXED, "CUDA_SUCCESS"),
        (modes.CU_STREAM_CAPTURE_MODE_GLOBAL, "STREAM_CAPTURE_UNSUPPORTED"),
    ):
        api.cuStreamBeginCapture(stream, modes.CU_STREAM_CAPTURE_MODE_GLOBAL)
        before = api.cuThreadExchangeStreamCaptureMode(mode)[1]
        assert error_of(api.cuStreamSynchronize(0)) == error
        api.cuThreadExchangeStreamCaptureMode(before)
        ended, graph = api.cuStreamEndCapture(stream)
        assert bool(ended) == (error != "CUDA_SUCCESS")
        if graph is not None:
            api.cuGraphDestroy(graph)
    api.cuStreamDestroy(stream)


# What the card's driver is called by.


def test_a_context_is_given_back_as_often_as_it_was_retained(api: Any) -> None:
    with installed():
        driver = Driver(0)
    driver.release()
    for _ in range(2):
        driver.retain()
    assert held()["contexts retained"] == 3
    for _ in range(2):
        driver.release()
        assert held()["contexts retained"] == 1


def test_what_was_entered_is_left_down_to_where_it_began(api: Any) -> None:
    with installed():
        driver = Driver(0).retain()
    before = entered()
    with driver.here():
        depth = driver.depth
        driver.enter()
        driver.enter()
        assert entered()["contexts pushed"] == before["contexts pushed"] + 3
        driver.leave(depth)
        assert entered()["contexts pushed"] == before["contexts pushed"] + 1
    assert entered() == before
    driver.enter()
    driver.release()
    assert entered() == before
    with pytest.raises(DeviceError, match="it was given back"):
        driver.enter()
    assert entered() == before


def test_a_context_that_cannot_be_entered_is_not_left(api: Any) -> None:
    with installed():
        driver = Driver(0).retain()
    driver.retained.append((0, None))
    before = entered()
    with pytest.raises(DeviceError, match="cuCtxPushCurrent"), driver.here():
        pass
    assert entered() == before
    driver.retained.pop()
    driver.release()
