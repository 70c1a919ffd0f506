"""What waits for what on a card: copies of every way, late events, a pace, and captured streams.

A stream is *stopped* here until a number is written: what is behind it runs not a moment earlier,
however slow the machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence, StreamCaptured
from kvstate.device import ByteDevice, CopyRun, Direction, FillRun, MapRun
from kvstate.errors import DeviceError
from kvstate.gpu import open_device
from tests.device.factories import CUDA, CUDA_FRAME, DRIVERS, Rig, opened, segments

OUT, IN, WITHIN = Direction
MIB = 1 << 20


@pytest.fixture(params=DRIVERS)
def cuda(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A CUDA device as it is. What was stopped goes on at the end."""
    with request.param(), opened(CUDA[0]) as rig:
        yield rig
        rig.device.wake()


def inside(rig: Rig) -> Any:
    """The device with what its protocol does not show."""
    return rig.device


def stopped(rig: Rig) -> Any:
    """A stream that goes no further before the device is woken."""
    stream = rig.device.stream()
    stop(rig, stream.handle)
    return stream


def stop(rig: Rig, handle: int) -> None:
    with inside(rig).driver.here():
        inside(rig).stopper.stop(handle)


def late_event(rig: Rig) -> Any:
    return rig.device.record(stopped(rig))


# Copies wait for nothing but their own.


def test_a_late_event_holds_back_its_copy_alone(cuda: Rig) -> None:
    address, host = cuda.mapped(1), cuda.device.host_reserve(8192)
    late = late_event(cuda)
    waiting = cuda.device.copy(OUT, [CopyRun(host, address, 4096)], [late])
    fence = cuda.device.copy(OUT, [], [late])
    other = cuda.device.copy(OUT, [CopyRun(host + 4096, address, 4096)])
    assert cuda.device.finish([other]) == [(other, True)]
    assert cuda.device.ended() == []
    cuda.device.wake()
    assert cuda.device.finish([fence, waiting]) == [(fence, True), (waiting, True)]


def test_an_early_event_is_not_late_because_a_later_one_of_its_stream_is(cuda: Rig) -> None:
    address, host, stream = cuda.mapped(1), cuda.device.host_reserve(8192), cuda.device.stream()
    early = cuda.device.record(stream)
    stop(cuda, stream.handle)
    late = cuda.device.record(stream)
    waiting = cuda.device.copy(OUT, [CopyRun(host, address, 4096)], [late])
    other = cuda.device.copy(OUT, [CopyRun(host + 4096, address, 4096)], [early])
    assert cuda.device.finish([other]) == [(other, True)]
    assert cuda.device.ledger().copies == {waiting}


def test_copies_on_the_device_do_not_wait_for_loads(cuda: Rig) -> None:
    address, host = cuda.mapped(2), cuda.device.host_reserve(4096)
    half = address + cuda.frame_bytes
    cuda.write(segments((address, 0, 16, 3)))
    cuda.device.fail_next("hang")
    load = cuda.device.copy(IN, [CopyRun(half + 8192, host, 4096)], (), (cuda.device.stream(),))
    within = cuda.device.copy(WITHIN, [CopyRun(half, address, 4096)])
    assert cuda.device.finish([within]) == [(within, True)]
    assert list(cuda.verify(segments((half, 0, 16, 3))).wrong) == [0]
    assert cuda.device.ledger().copies == {load}


def test_what_is_ready_goes_in_order_of_age(cuda: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    address, host = cuda.mapped(1), cuda.device.host_reserve(16 * 256)
    events = [late_event(cuda) for _ in range(3)]
    issued, call = [], inside(cuda).traffic._call

    def watched(stream: int, direction: Direction, runs: list[CopyRun]) -> None:
        issued.append((runs[0].target - host) // 256)
        call(stream, direction, runs)

    monkeypatch.setattr(inside(cuda).traffic, "_call", watched)
    tokens = [
        cuda.device.copy(OUT, [CopyRun(host + 256 * at, address, 256)], [events[-at % 3]])
        for at in range(9)
    ]
    assert issued == []
    cuda.device.wake()
    for event in events:
        with inside(cuda).driver.here():
            while not inside(cuda).driver.ready(event.handle):
                pass
    assert [end.token for end in cuda.device.finish(tokens)] == tokens
    assert issued == list(range(9))


def test_a_pace_is_kept_and_everything_arrives(cuda: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    address, host = cuda.mapped(4), cuda.device.host_reserve(16 * MIB)
    sizes, call = list[int](), inside(cuda).traffic._call

    def watched(stream: int, direction: Direction, runs: list[CopyRun]) -> None:
        sizes.append(sum(run.size_bytes for run in runs))
        call(stream, direction, runs)

    monkeypatch.setattr(inside(cuda).traffic, "_call", watched)
    rows = 4 * cuda.frame_bytes // 256
    cuda.write(segments((address, 0, rows, 9)))
    cuda.device.pace(2 * MIB)
    stop(cuda, inside(cuda).traffic.streams[OUT])
    half = 2 * cuda.frame_bytes
    tokens = [
        cuda.device.copy(OUT, [CopyRun(host + at * half, address + at * half, half)])
        for at in range(2)
    ]
    for _ in range(8):
        assert cuda.device.poll() == []
    assert sum(sizes) == 2 * MIB
    cuda.device.wake()
    assert [end.ok for end in cuda.device.finish(tokens)] == [True, True]
    assert sum(sizes) == 2 * half
    assert list(cuda.verify(segments((host, 0, rows, 9))).wrong) == [0]


@pytest.mark.parametrize("waiting", [False, True])
def test_a_poll_asks_for_the_oldest_of_each_stream(
    cuda: Rig, monkeypatch: pytest.MonkeyPatch, waiting: bool
) -> None:
    address, host = cuda.mapped(1), cuda.device.host_reserve(256 * 256)
    stream, device = stopped(cuda), inside(cuda)
    if not waiting:
        stop(cuda, device.traffic.streams[OUT])
    for at in range(256):
        after = [cuda.device.record(stream)] if waiting else []
        cuda.device.copy(OUT, [CopyRun(host + 256 * at, address, 256)], after)
    asked, ready = list[Any](), device.driver.ready

    def watched(event: Any) -> bool:
        asked.append(event)
        return bool(ready(event))

    monkeypatch.setattr(device.driver, "ready", watched)
    assert cuda.device.poll() == []
    assert len(asked) == 1
    cuda.device.wake()
    assert len(cuda.quiesce()) == 256


def test_an_event_that_cannot_be_asked_for_stops_no_poll(
    cuda: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, host, device = cuda.mapped(1), cuda.device.host_reserve(8192), inside(cuda)
    bad = cuda.device.copy(OUT, [CopyRun(host, address, 4096)])
    fine = cuda.device.copy(IN, [CopyRun(address + 4096, host + 4096, 4096)])
    event, ready = device.traffic.pending[bad].done.handle, device.driver.ready

    def broken(one: Any) -> bool:
        if one is event:
            raise DeviceError("cuEventQuery", "CUDA_ERROR_INVALID_VALUE")
        return bool(ready(one))

    monkeypatch.setattr(device.driver, "ready", broken)
    assert cuda.quiesce() == [(bad, False), (fine, True)]


# Captures.


def test_a_stream_that_is_captured_is_refused_and_stays_so(cuda: Rig) -> None:
    """Every call that is not about that stream goes on, and the capture is not broken by it."""
    stream, other, device = cuda.device.stream(), cuda.device.stream(), cuda.device
    address, host = cuda.mapped(1), device.host_reserve(8192)
    early = device.record(other)
    device.capture([stream])
    for call in (
        lambda: device.check_stream(stream),
        lambda: device.record(stream),
        lambda: device.synchronize(stream),
        lambda: device.quiesce([other, stream]),
        lambda: device.copy(IN, [CopyRun(address, host, 4096)], (), (other, stream)),
    ):
        with pytest.raises(StreamCaptured, match=r"stream 0x\w+ is being captured"):
            call()
    waiting = device.copy(OUT, [CopyRun(host, address, 4096)], [early, device.record(other)])
    assert device.finish([waiting]) == [(waiting, True)]
    assert device.poll() == []
    assert device.quiesce([other]) == []
    place = cuda.reserve(2)
    frames = cuda.create(2)
    device.map([MapRun(place, frames)])
    device.fill([FillRun(place, 4096)], 7)
    device.host_unreserve(device.host_reserve(4096))
    device.capture(())
    assert device.faults == []
    device.check_stream(stream)


def test_a_device_is_not_closed_under_a_capture(cuda: Rig) -> None:
    device = open_device("cuda")
    stream = device.stream()
    device.capture([stream])
    device.close()
    assert device.kept  # type: ignore[attr-defined]
    device.capture(())
    device.close()
    assert device.closed  # type: ignore[attr-defined]


CONFIG: Final = Config(
    layers=[LayerSpec(kv_heads=8, head_dim=128, dtype="float16")],
    gpu=GpuTier(16 * CUDA_FRAME, CUDA_FRAME), host=HostTier(16 * CUDA_FRAME), max_tokens=4096,
)  # fmt: skip
ROWS: Final = 1300


def running(kv: Manager, device: ByteDevice, stream: Any) -> Sequence:
    """A sequence with settled tokens, whose bytes are there."""
    device.set_rows(kv.geometry.row_bytes)
    seq = kv.create(max_tokens=4096)
    seq.resume(stream)
    step = kv.step(kv.batch([seq]), ROWS)
    device.write(stream, segments((seq.base or 0, 0, ROWS, 5)))
    device.synchronize(stream)
    kv.settle(step)
    return seq


def test_a_fork_does_not_wait_behind_loads(cuda: Rig) -> None:
    device = open_device("cuda", limit_s=0.5)
    kv = Manager(CONFIG, device)
    stream = device.stream()
    parent, other = running(kv, device, stream), running(kv, device, stream)
    other.suspend()
    kv.wait(other)
    device.fail_next("hang")
    other.resume(device.stream())
    child = parent.fork(stream=stream)
    assert [end.ok for end in kv.wait(child)] == [True]
    assert other.loading
    device.wake()
    kv.close()


def test_a_suspend_under_a_capture_is_refused_and_loses_nothing(cuda: Rig) -> None:
    """In an engine that captures its decode step."""
    device = open_device("cuda")
    with Manager(CONFIG, device) as kv:
        stream = device.stream()
        seq = running(kv, device, stream)
        device.capture([stream])
        with pytest.raises(StreamCaptured):
            seq.suspend()
        assert seq.state_name == "ACTIVE"
        device.capture(())
        seq.suspend()
        kv.wait(seq)
        seq.resume(stream)
        check = device.verify(stream, segments((seq.base or 0, 0, ROWS, 5)))
        device.synchronize(stream)
        assert list(check.wrong) == [0]
