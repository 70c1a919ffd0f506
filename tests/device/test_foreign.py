"""Streams, events and contexts of other libraries: taken by their handles or refused at once, and
left as they were."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager
from kvstate.device import CopyRun, Direction, MapRun
from kvstate.errors import DeviceError
from kvstate.gpu import foreign, open_device
from tests.device.factories import CUDA, CUDA_FRAME, DRIVERS, Rig, opened, segments
from tests.device.test_cuda import calls_of, in_a_process

OUT = Direction.OUT
BUFFER: Final = ctypes.create_string_buffer(64)


# What can be known of a thing without a card.


class Told:
    """Says its handle by one name."""

    def __init__(self, name: str, handle: Any) -> None:
        setattr(self, name, handle)


class Pointer:
    """What the bindings make of a handle."""

    def getPtr(self) -> int:  # noqa: N802
        return 0

    def __int__(self) -> int:
        return 77


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0), (2, 2), (1 << 40, 1 << 40), (Told("cuda_stream", 5), 5), (Told("ptr", 6), 6),
        (Told("__cuda_stream__", lambda: (0, 7)), 7), (Told("handle", Pointer()), 77),
        (Pointer(), 77),
    ],
)  # fmt: skip
def test_a_stream_is_taken_by_its_handle(stream: Any, handle: int) -> None:
    assert foreign.stream_handle(stream) == handle


@pytest.mark.parametrize(
    "stream", [-5, 1 << 70, True, 1.0, "0", b"", object(), [0], Told("handle", None)]
)
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(DeviceError, match="stream failed: it is"):
        foreign.stream_handle(stream)


class Hostile:
    """Raises something when it is asked for anything."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise object.__getattribute__(self, "_error")


class Liar:
    """What it says is no handle."""

    def __init__(self, said: object) -> None:
        self._said = said

    def __cuda_stream__(self) -> object:
        return self._said


@pytest.mark.parametrize(
    "stream",
    [
        Hostile(RuntimeError("closed")), Hostile(AssertionError()), Liar(()), Liar((0,)),
        Liar("zero"), Liar((0, object())), Told("handle", lambda: 1 / 0),
    ],
)  # fmt: skip
def test_whatever_others_raise_is_a_refusal(stream: Any) -> None:
    with pytest.raises(DeviceError, match=r"stream failed: it is .*: "):
        foreign.stream_handle(stream)
    with pytest.raises(DeviceError, match=r"event failed: it is .*: "):
        foreign.event_handle(stream)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_what_is_nobodys_goes_through(error: type[BaseException]) -> None:
    for ask in (foreign.stream_handle, foreign.event_handle):
        with pytest.raises(error):
            ask(Hostile(error()))


def test_an_event_is_taken_as_an_object_that_can_be_held() -> None:
    place = ctypes.addressof(BUFFER)
    for name in ("cuda_event", "handle", "ptr", "event_id"):
        assert foreign.event_handle(Told(name, place)) == place
    for event in (place, 0, True, None, "now", object()):
        with pytest.raises(DeviceError, match="is wanted"):
            foreign.event_handle(event)
    for nothing in (0, 0x1234):
        with pytest.raises(DeviceError, match="was not recorded, or is closed"):
            foreign.event_handle(Told("cuda_event", nothing))


def test_a_handle_leads_to_an_object() -> None:
    place, inner = ctypes.addressof(BUFFER), ctypes.create_string_buffer(64)
    inside = -(-ctypes.addressof(inner) // 16) * 16
    for first, there in ((inside, True), (inside + 1, False), (0, False), (0x1230, False)):
        ctypes.c_uint64.from_address(place).value = first
        assert foreign.leads(place) == there
    assert not foreign.leads(0x1234)


def test_an_address_is_looked_at_before_anybody_follows_it() -> None:
    assert foreign.is_memory(ctypes.addressof(BUFFER))
    assert not foreign.is_memory(0x1234)
    assert not foreign.is_memory((1 << 64) - 8)


# On a card.

CONFIG: Final = Config(
    layers=[LayerSpec(kv_heads=8, head_dim=128, dtype="float16")],
    gpu=GpuTier(8 * CUDA_FRAME, CUDA_FRAME), host=HostTier(8 * CUDA_FRAME), max_tokens=1024,
)  # fmt: skip


@pytest.fixture(params=DRIVERS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A CUDA device as it is."""
    with request.param(), opened(CUDA[0]) as rig:
        yield rig


def torch_stream() -> tuple[Any, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    stream = torch.cuda.Stream()

    def record() -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    return stream, record


def generic_stream() -> tuple[Any, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    stream = torch.Stream(device="cuda")

    def record() -> Any:
        return stream.record_event()

    return stream, record


def accelerator_stream() -> tuple[Any, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    stream = torch.accelerator.current_stream()
    return stream, stream.record_event


def core_stream() -> tuple[Any, Callable[[], Any]]:
    core = pytest.importorskip("cuda.core")
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    return stream, stream.record


def cupy_stream() -> tuple[Any, Callable[[], Any]]:
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, stream.record


def number() -> tuple[Any, Callable[[], Any]]:
    stream, record = torch_stream()
    KEPT.append(stream)
    return stream.cuda_stream, record


KEPT: Final[list[Any]] = []
MAKERS: Final = (torch_stream, generic_stream, accelerator_stream, core_stream, cupy_stream, number)


@pytest.mark.gpu
@pytest.mark.parametrize("make", MAKERS)
def test_streams_and_events_of_others_order_copies(make: Any) -> None:
    stream, record = make()
    device = open_device("cuda")
    with Manager(CONFIG, device) as kv:
        device.set_rows(kv.geometry.row_bytes)
        seq = kv.create(max_tokens=512)
        seq.resume(stream)
        step = kv.step(kv.batch([seq]), 256)
        device.write(stream, segments((seq.base or 0, 0, 256, 9)))
        kv.settle(step)
        seq.suspend(after=record())
        seq.resume(stream)
        seq.suspend()
        kv.wait(seq)
        seq.resume(stream)
        check = device.verify(stream, segments((seq.base or 0, 0, 256, 9)))
        device.synchronize(stream)
        assert list(check.wrong) == [0]
        seq.close(after=record())


@pytest.mark.parametrize("stream", [-5, 1 << 70, True, 0x1234, "0"])
def test_what_is_no_stream_is_refused_by_a_resume(cuda: Rig, stream: Any) -> None:
    device = open_device("cuda")
    with Manager(CONFIG, device) as kv:
        seq = kv.create(max_tokens=512)
        with pytest.raises(DeviceError, match="device call stream failed"):
            seq.resume(stream)
        assert seq.state_name == "CREATED"


@pytest.mark.parametrize("cuda", DRIVERS[:1], indirect=True)
def test_an_event_that_was_not_recorded_is_refused(cuda: Rig) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(DeviceError, match="was not recorded"):
        cuda.device.copy(OUT, [], [torch.cuda.Event()])


CLOSED: Final = """
    from kvstate.errors import DeviceError
    from kvstate.gpu import open_device

    device = open_device("cuda")
    api = device.api
    for _ in range(20):
        with device.driver.here():
            stream = int(device.driver.call(api.cuStreamCreate, 1))
            device.check_stream(stream)
            device.driver.call(api.cuStreamDestroy, stream)
        try:
            device.check_stream(stream)
        except DeviceError as error:
            print("refused", error)
    device.close()
"""


@pytest.mark.gpu
def test_a_stream_that_is_closed_is_refused() -> None:
    done = in_a_process(CLOSED)
    assert (done.returncode, done.stdout.count("refused")) == (0, 20), done.stderr[-2000:]


def test_what_was_current_is_current_again(cuda: Rig) -> None:
    device: Any = cuda.device
    api, calls = device.api, calls_of(cuda)
    modes = api.CUstreamCaptureMode
    _, other = api.cuDevicePrimaryCtxRetain(device.driver.device)
    for context in (None, other):
        with_context(api, context)
        for name, call in calls.items() if context is None else ():
            call()
            assert int(api.cuCtxGetCurrent()[1]) == 0, name
        with pytest.raises(DeviceError):
            device.check_stream(-1)
        assert int(api.cuCtxGetCurrent()[1]) == (0 if context is None else int(context))
        mode = modes.CU_STREAM_CAPTURE_MODE_GLOBAL
        assert api.cuThreadExchangeStreamCaptureMode(mode)[1] == mode
    opened_one = open_device("cuda")
    assert int(api.cuCtxGetCurrent()[1]) == int(other)
    opened_one.close()
    assert int(api.cuCtxGetCurrent()[1]) == int(other)


def with_context(api: Any, context: Any) -> None:
    """Make a context current on this thread, or none, whatever was."""
    while int(api.cuCtxGetCurrent()[1]):
        api.cuCtxPopCurrent()
    if context is not None:
        api.cuCtxPushCurrent(context)


@pytest.mark.parametrize("cuda", DRIVERS[:1], indirect=True)
def test_a_capture_of_another_thread_survives(cuda: Rig) -> None:
    """In the mode that forbids most: every thread of the process, whatever it calls."""
    torch = pytest.importorskip("torch")
    began, end, problems = threading.Event(), threading.Event(), list[BaseException]()
    other = torch.zeros(64, device="cuda")
    address, host = cuda.mapped(1), cuda.device.host_reserve(8192)
    stream = cuda.device.stream()

    def capture() -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="global"):
                other.add_(1)
                began.set()
                end.wait(30)
                other.add_(1)
            graph.replay()
            torch.cuda.synchronize()
        except BaseException as error:
            problems.append(error)
        finally:
            began.set()

    thread = threading.Thread(target=capture)
    thread.start()
    began.wait(30)
    try:
        for call in (
            partial(cuda.device.copy, OUT, [CopyRun(host, address, 4096)]),
            cuda.device.poll,
            partial(cuda.device.quiesce, [stream]),
            partial(cuda.device.record, stream),
            lambda: cuda.device.map([MapRun(cuda.reserve(1), cuda.create(1))]),
            lambda: cuda.device.host_unreserve(cuda.device.host_reserve(4096)),
        ):
            call()
        second = open_device("cuda")
        second.close()
    finally:
        end.set()
        thread.join()
    assert problems == []
    assert other.sum().item() == 128
