"""What only a CUDA device can show: contexts, threads, the driver's own free memory, and what the
hardware itself refuses.

What would lose the context of this process (an illegal address) runs in a process of its own.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import numpy as np
import pytest
from attrs import evolve

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.device import CopyRun, Direction, FillRun, MapRun, UnmapRun
from kvstate.errors import ConfigError, DeviceError, DeviceFull, OutOfFrames
from kvstate.gpu import open_device
from kvstate.gpu.driver import Driver
from tests.device.factories import CUDA, CUDA_FRAME, DRIVERS, Rig, opened, relative, segments
from tests.interleave import Job, interleavings

OUT, IN = Direction.OUT, Direction.IN
ROOT: Final = Path(__file__).parent.parent.parent
SPIN_CYCLES: Final = 50_000_000
"""Of a kernel that runs for some 25 ms."""


@pytest.fixture(params=DRIVERS)
def drivers(request: pytest.FixtureRequest) -> Iterator[None]:
    """A card's driver, or that without one."""
    with request.param():
        yield


needs_a_card = pytest.mark.parametrize("drivers", DRIVERS[:1], indirect=True)


@pytest.fixture
def cuda(drivers: None) -> Iterator[Rig]:
    """A CUDA device as it is."""
    with opened(CUDA[0]) as rig:
        yield rig


@pytest.fixture
def driver(drivers: None) -> Iterator[Driver]:
    """The driver, and a hold on the context, so that it outlives the devices of a test."""
    one = Driver(0).retain()
    yield one
    one.release()


def inside(rig: Rig) -> Any:
    """The device with what its protocol does not show."""
    return rig.device


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own; it must end by itself."""
    return subprocess.run(
        [sys.executable, "-c", dedent(program)], cwd=ROOT, capture_output=True, text=True,
        timeout=120, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


# What is held: our ledger against the driver.


def use_everything(rig: Rig) -> None:
    address, stream = rig.mapped(4), rig.device.stream()
    host = rig.device.host_reserve(3 << 20)
    rig.device.write(stream, segments((address, 0, 64, 1)))
    rig.device.copy(OUT, [CopyRun(host, address, 4096)], after=[rig.device.record(stream)])
    rig.device.synchronize(stream)
    rig.quiesce()


def test_closing_gives_the_driver_all_its_memory_back(driver: Driver) -> None:
    free = []
    for _ in range(4):
        with opened(CUDA[0]) as rig:
            use_everything(rig)
        free.append(driver.free_bytes())
    assert len(set(free[1:])) == 1, free


@pytest.mark.parametrize("give_back", [False, True])
def test_a_device_that_is_closed_in_the_middle_leaves_nothing(
    driver: Driver, give_back: bool
) -> None:
    def once() -> int:
        rig = Rig(CUDA[0], CUDA[0].open())
        rig.device.set_rows(256)
        use_everything(rig)
        if give_back:
            rig.give_back()
        rig.device.close()
        rig.device.close()
        return driver.free_bytes()

    once()
    assert once() == once()


def test_frames_are_what_the_driver_says_is_gone(cuda: Rig, driver: Driver) -> None:
    before = driver.free_bytes()
    frames = cuda.create(8)
    assert before - driver.free_bytes() == 8 * cuda.frame_bytes
    cuda.device.release(frames)
    assert driver.free_bytes() == before


def test_more_frames_than_there_is_memory_are_none(cuda: Rig, driver: Driver) -> None:
    before, size = driver.free_bytes(), 16 << 30
    with pytest.raises(DeviceFull, match=f"of {before // size + 1} frames"):
        cuda.device.create(before // size + 1, size)
    assert driver.free_bytes() == before
    assert cuda.device.ledger().frames == frozenset()


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_mapping_that_fails_half_way_is_undone(
    cuda: Rig, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    address, frames = cuda.reserve(4), cuda.create(4)
    runs = [MapRun(address, frames[:2]), MapRun(address + 2 * cuda.frame_bytes, frames[2:])]
    fails_at(cuda, monkeypatch, name, nth)
    with pytest.raises(DeviceError, match=name):
        cuda.device.map(runs)
    monkeypatch.undo()
    assert not cuda.device.ledger().mappings
    cuda.device.map(runs)
    assert cuda.can_peek(address + 4 * cuda.frame_bytes - 1)


def fails_at(rig: Rig, monkeypatch: pytest.MonkeyPatch, name: str, nth: int) -> None:
    """Let one driver call answer with an error, without being made."""
    device, count = inside(rig), iter(range(1, 100))
    real = getattr(device.api, name)

    def call(*args: object) -> Any:
        if next(count) == nth:
            return (device.api.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        return real(*args)

    call.__name__ = name
    monkeypatch.setattr(device.api, name, call)


# Contexts and threads.


def another_context(device: Any) -> None:
    """What a library in the same thread may do between two calls."""
    device.api.cuCtxSetCurrent(device.api.CUcontext(0))


def calls_of(rig: Rig) -> dict[str, Callable[[], object]]:
    """One call of each kind, on memory that is there."""
    device, address, spare = rig.device, rig.mapped(1), rig.create(2)
    free, host, stream = rig.reserve(1), device.host_reserve(4096), device.stream()
    device.write(stream, segments((address, 0, 4, 1)))
    device.synchronize(stream)
    row = [CopyRun(host, address, 256)]
    return {
        "create": lambda: device.create(1, rig.frame_bytes),
        "map": lambda: device.map([MapRun(free, spare[:1])]),
        "record": lambda: device.record(stream),
        "copy": lambda: device.copy(OUT, row),
        "poll": device.poll,
        "quiesce": device.quiesce,
        "unmap": lambda: device.unmap([UnmapRun(free, 1)]),
        "release": lambda: device.release(spare),
        "reserve": lambda: device.unreserve(device.reserve(rig.frame_bytes, rig.frame_bytes)),
        "host_reserve": lambda: device.host_unreserve(device.host_reserve(4096)),
        "fill": lambda: device.fill([FillRun(address, 64)], 1),
        "peek": lambda: device.peek(address, 64),
        "poke": lambda: device.poke(address, b"x"),
        "stream": device.stream,
        "synchronize": lambda: device.synchronize(stream),
        "publish": lambda: device.publish(stream, [0], [address], [4]),
        "write": lambda: device.write(stream, relative(0, (0, 0, 4, 1))),
        "verify": lambda: device.verify(stream, segments((address, 0, 4, 1))).wrong,
        "strays": lambda: device.strays([FillRun(address, 64)], b"ab"),
    }


def test_every_call_selects_its_context(cuda: Rig) -> None:
    for name, call in calls_of(cuda).items():
        another_context(cuda.device)
        try:
            call()
        except DeviceError as error:
            pytest.fail(f"{name} with another context current: {error}")
    another_context(cuda.device)


def test_a_thread_that_never_saw_a_context_can_use_the_device(cuda: Rig) -> None:
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for call in calls_of(cuda).values():
                call()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not problems


@pytest.mark.usefixtures("drivers")
def test_a_finaliser_on_another_thread_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [open_device("cuda")]
    driver: Any = held[0].driver  # type: ignore[attr-defined]
    told: list[str] = []

    def drop_the_last_reference() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            driver.lost = "a finaliser has called the driver"
            held.clear()
            gc.collect()
        told.extend(str(one.message) for one in caught)
        driver.lost = None

    thread = threading.Thread(target=drop_the_last_reference)
    thread.start()
    thread.join()
    assert len(told) == 1
    assert "was not closed" in told[0]


def test_two_devices_of_one_card_do_not_know_each_other(cuda: Rig) -> None:
    with opened(CUDA[0]) as other:
        address = other.mapped(1)
        with pytest.raises(DeviceError, match="no memory of this device"):
            cuda.device.peek(address, 16)
        with pytest.raises(DeviceError, match="of another device"):
            cuda.device.record(other.device.stream())
        stream = other.device.stream()
        with pytest.raises(DeviceError, match="of another device"):
            cuda.device.copy(OUT, [], after=[other.device.record(stream)])


@pytest.mark.gpu
def test_two_cards_in_one_process_do_not_disturb_each_other() -> None:
    """Every call of the one with the other's context current, and the bytes of each."""
    if Driver(0).device_count < 2:
        pytest.skip("there is one GPU")
    with (
        opened(CUDA[0]) as first,
        opened(evolve(CUDA[0], open=partial(open_device, "cuda:1"))) as second,
    ):
        rigs = (first, second)
        calls = [calls_of(rig) for rig in rigs]
        for name in calls[0]:
            for at in range(2):
                with inside(rigs[1 - at]).driver.here():
                    calls[at][name]()
        places = [rig.mapped(1) for rig in rigs]
        for key, (rig, place) in enumerate(zip(rigs, places, strict=True)):
            rig.write(segments((place, 0, 16, key)))
        for key, (rig, place) in enumerate(zip(rigs, places, strict=True)):
            assert list(rig.verify(segments((place, 0, 16, key))).wrong) == [0]
        assert [rig.device.memory for rig in rigs] == [("cuda", 0), ("cuda", 1)]


# Order, with a kernel in the way that runs for milliseconds.


def spin(rig: Rig, stream: Any) -> None:
    with inside(rig).driver.here():
        inside(rig).kernels.spin(stream.handle, SPIN_CYCLES)


def test_a_copy_out_waits_for_its_event_under_a_spinning_kernel(cuda: Rig) -> None:
    address, stream = cuda.mapped(1), cuda.device.stream()
    host = cuda.device.host_reserve(4096)
    cuda.write(segments((address, 0, 16, 1)))
    spin(cuda, stream)
    cuda.device.write(stream, segments((address, 0, 16, 2)))
    cuda.device.copy(OUT, [CopyRun(host, address, 4096)], after=[cuda.device.record(stream)])
    assert cuda.device.poll() == [], "the kernel was over too early to show anything"
    cuda.quiesce()
    assert list(cuda.verify(segments((host, 0, 16, 2))).wrong) == [0]


def test_a_step_waits_for_a_load_under_a_spinning_kernel(cuda: Rig) -> None:
    address, first, stream = cuda.mapped(1), cuda.device.stream(), cuda.device.stream()
    host = cuda.device.host_reserve(4096)
    cuda.write(segments((address, 0, 16, 1), (host, 0, 16, 2)))
    spin(cuda, first)
    after = [cuda.device.record(first)]
    cuda.device.copy(IN, [CopyRun(address, host, 4096)], after=after, before=[stream])
    check = cuda.device.verify(stream, segments((address, 0, 16, 2)))
    assert not check.done
    cuda.quiesce()
    assert list(check.wrong) == [0]


def test_an_event_that_is_held_is_not_recorded_again(cuda: Rig) -> None:
    """Its handle may go to somebody else only when nobody can ask for it any more."""
    stream, idle = cuda.device.stream(), cuda.device.stream()
    spin(cuda, stream)
    held = cuda.device.record(stream)
    for _ in range(64):
        cuda.device.record(idle)
    token = cuda.device.copy(OUT, [], after=[held])
    assert cuda.device.poll() == []
    assert [end.token for end in cuda.quiesce()] == [token]


def test_a_poke_is_done_when_it_returns(cuda: Rig) -> None:
    size = (
        64 << 10
    )  # the most that the driver takes into a buffer of its own; half of these come late
    address, host = cuda.mapped(1), cuda.device.host_reserve(size)
    driver, stream = inside(cuda).driver, cuda.device.stream().handle
    for at in range(40):
        cuda.device.poke(address, bytes([at]) * size)
        with driver.here():
            driver.call(driver.api.cuMemcpyDtoHAsync, host, address, size, stream)
        cuda.quiesce()
        assert cuda.device.peek(host, size) == bytes([at]) * size


def test_a_quiesce_waits_for_streams_of_others(cuda: Rig) -> None:
    address, stream = cuda.mapped(1), cuda.device.stream()
    spin(cuda, stream)
    cuda.device.write(stream, segments((address, 0, 16, 2)))
    cuda.quiesce()
    assert list(cuda.verify(segments((address, 0, 16, 2))).wrong) == [0]


def test_unmapping_under_a_kernel_is_seen_by_our_own_check(cuda: Rig) -> None:
    address, other, stream = cuda.mapped(1), cuda.mapped(1), cuda.device.stream()
    cuda.quiesce()
    spin(cuda, stream)
    cuda.device.write(stream, segments((address, 0, 16, 2)))
    started = time.monotonic()
    cuda.device.unmap([UnmapRun(other, 1)])
    assert time.monotonic() - started < 1, "the driver does not wait"
    assert "1 frames are unmapped with work issued since the quiesce" in cuda.device.faults[0]


# Copies.


@pytest.mark.parametrize("count", [1, 7, 8, 300])
def test_scattered_runs_arrive_in_both_directions(cuda: Rig, count: int) -> None:
    size = 1024
    address, back = cuda.mapped(1), cuda.mapped(1)
    host = cuda.device.host_reserve(count * 2 * size)
    cuda.write(segments((address, 0, 4 * count, 5)))
    places = np.random.default_rng(count).permutation(2 * count)[:count].tolist()
    runs = [CopyRun(host + at * size, address + n * size, size) for n, at in enumerate(places)]
    assert cuda.copy(OUT, runs)
    runs = [CopyRun(back + n * size, host + at * size, size) for n, at in enumerate(places)]
    assert cuda.copy(IN, runs)
    assert cuda.device.peek(back, count * size) == cuda.device.peek(address, count * size)


def test_a_copy_may_cross_registered_units(cuda: Rig) -> None:
    inside(cuda).pinned.unit_bytes = 1 << 20
    address, host = cuda.mapped(1), cuda.device.host_reserve(4 << 20)
    rows = (3 << 20) // 256
    cuda.write(segments((address, 0, rows, 5)))
    assert cuda.copy(OUT, [CopyRun(host + 4096, address, 3 << 20)])
    assert list(cuda.verify(segments((host + 4096, 0, rows, 5))).wrong) == [0]


# Byte checks.


@pytest.mark.parametrize("row_bytes", [16, 48, 1024 + 16, 80 << 10, (128 << 10) + 48])
def test_kernels_write_what_the_pattern_says_for_any_row(cuda: Rig, row_bytes: int) -> None:
    from kvstate import pattern

    cuda.device.set_rows(row_bytes)
    address, count = cuda.mapped(1), min(200, cuda.frame_bytes // row_bytes)
    key = (7 << 32) + 9
    cuda.write(segments((address, 3, count, key)))
    found = cuda.device.peek(address, count * row_bytes)
    assert found == pattern.rows(key, 3, count, row_bytes).tobytes()
    assert list(cuda.verify(segments((address, 3, count, key))).wrong) == [0]
    cuda.device.poke(address + count * row_bytes - 1, bytes([found[-1] ^ 1]))
    check = cuda.verify(segments((address, 3, count, key)))
    assert (list(check.wrong), list(check.first)) == ([1], [3 + count - 1])


def test_rows_that_no_kernel_can_check_are_refused(cuda: Rig) -> None:
    with pytest.raises(ConfigError, match="token rows of 40 bytes"):
        cuda.device.set_rows(40)


# What the hardware refuses.


@needs_a_card
def test_the_driver_refuses_a_copy_into_a_read_only_mapping(cuda: Rig) -> None:
    address = cuda.map(cuda.create(1), read_only=True)
    device, data = inside(cuda), np.zeros(64, np.uint8)
    with device.driver.here():
        error = device.api.cuMemcpyHtoD(address, data.ctypes.data, 64)[0]
    assert error == device.api.CUresult.CUDA_ERROR_INVALID_VALUE


LOSES: Final = """
    from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
    from kvstate.device import MapRun, SEGMENT
    from kvstate.errors import DeviceFault
    from kvstate.gpu import open_device
    import numpy as np

    device = open_device("cuda")
    frame = 2 << 20
    config = Config(layers=[LayerSpec(1, frame // 16, "float16")], gpu=GpuTier(8 * frame),
                    host=HostTier(8 * frame), tokens_per_block=2, max_tokens=8)
    kv = Manager(config, device)
    seq = kv.create(max_tokens=8)
    kv.resume(seq)
    kv.step(kv.batch([seq]), 8)
    device.set_rows(256)
    address = {address}
    device.missing = lambda *args, **named: None  # our own check shall not save it
    device.write(None, np.array([(address, 0, 16, 1, -1)], SEGMENT))
    try:
        for _ in range(3):
            kv.suspend(seq)
            kv.resume(seq)
            kv.trim()
    except DeviceFault as fault:
        print("FAULT", fault)
    print("POISONED", kv.actor.fault)
    try:
        kv.create(max_tokens=8)
    except DeviceFault as fault:
        print("REFUSED", fault)
    kv.close()
    print("CLOSED")
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "address",
    [
        "device.reserve(frame, frame)",
        "device.reserve(frame, frame); "
        "device.map([MapRun(address, device.create(1, frame), read_only=True)])",
    ],
    ids=["unmapped", "read-only"],
)
def test_an_illegal_address_poisons_the_manager_and_nothing_hangs(address: str) -> None:
    done = in_a_process(LOSES.format(address=address))
    words = {line.partition(" ")[0]: line for line in done.stdout.splitlines()}
    assert set(words) == {"FAULT", "POISONED", "REFUSED", "CLOSED"}, done.stdout + done.stderr
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in words["FAULT"]
    assert "returned" in words["FAULT"], "the call that told it is named"
    assert words["POISONED"].partition(" ")[2] in words["REFUSED"]
    assert done.returncode == 0, done.stderr


@needs_a_card
def test_an_interrupted_campaign_leaves_the_card_clean(driver: Driver, tmp_path: Path) -> None:
    before = driver.free_bytes()
    child = subprocess.Popen(
        [sys.executable, "-m", "kvstate", "fuzz", "--device", "cuda", "--seconds", "60",
         "--no-directed", "--json", "--save", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert child.stderr is not None
    assert child.stderr.readline().startswith("seed"), "from here on it plays"
    begun = time.monotonic()
    while driver.free_bytes() >= before:
        assert time.monotonic() < begun + 60, "it has not begun"
        time.sleep(0.1)
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert '"violations":0' in out
    assert driver.free_bytes() == before


# Streams of others.


@needs_a_card
@pytest.mark.torch
def test_streams_and_events_of_torch_are_taken(cuda: Rig) -> None:
    torch = pytest.importorskip("torch")
    address, stream = cuda.mapped(1), torch.cuda.Stream()
    host = cuda.device.host_reserve(4096)
    cuda.device.write(stream, segments((address, 0, 16, 2)))
    event = torch.cuda.Event()
    event.record(stream)
    cuda.device.copy(OUT, [CopyRun(host, address, 4096)], after=[event], before=[stream])
    check = cuda.device.verify(stream, segments((host, 0, 16, 2)))
    cuda.device.synchronize(stream)
    assert list(check.wrong) == [0]
    cuda.quiesce()


# A manager.


@needs_a_card
def test_a_manager_of_an_8b_shape_moves_a_sequence_out_and_in(driver: Driver) -> None:
    """Rows of 128 KiB, frames of 2 MiB: 16 tokens a frame."""
    config = Config(
        layers=[LayerSpec(kv_heads=8, head_dim=128, count=32)],
        gpu=GpuTier(256 * CUDA_FRAME), host=HostTier(300 * CUDA_FRAME), max_tokens=4096,
        max_sequences=4, max_utilization_for_resume=1.0,
    )  # fmt: skip
    device = open_device("cuda")
    with Manager(config, device, debug=True) as kv:
        device.set_rows(kv.geometry.row_bytes)
        seq = kv.create(max_tokens=4096)
        kv.resume(seq)
        kv.settle(kv.step(kv.batch([seq]), 4000))
        assert seq.base is not None
        device.write(None, segments((seq.base, 0, 4000, 77)))
        kv.suspend(seq)
        kv.resume(seq)
        assert seq.base is not None
        check = device.verify(None, segments((seq.base, 0, 4000, 77)))
        assert list(check.wrong) == [0]
        assert check.size_bytes == 4000 * (128 << 10)
    assert device.ledger().empty


def test_events_may_be_let_go_of_on_any_thread(cuda: Rig) -> None:
    """While the device takes one from the pool: none is lost, and none is handed out twice."""
    device, held, before = inside(cuda), list[Any](), set[int]()

    def make() -> list[Job]:
        device.idle_events.clear()  # so that every run begins alike
        before.update(int(handle) for handle in device._events.handles)
        held[:] = [device.record(None)]
        return [partial(device.record, None), held.clear]

    for run in interleavings(make, ("gpu/cuda.py",), 2):
        assert run.errors == {}
        event = run.results.pop(0)
        handles = [
            int(handle)
            for handle in (event.handle, *map(device._events.handle, device.idle_events))
        ]
        assert len(set(handles)) == len(handles)
        assert before.union(handles) == {int(handle) for handle in device._events.handles}
        del event


def _grow_for_ever(seq: Sequence, tokens: int) -> None:
    while True:
        seq.resize(seq.capacity_tokens + tokens)


@pytest.mark.gpu
def test_a_card_that_others_fill_is_short_of_frames() -> None:
    """The driver itself is out of memory: no DeviceError comes of it, and giving way helps."""
    frame, tokens = 128 << 20, 512
    config = Config(
        layers=[LayerSpec(kv_heads=8, head_dim=128, count=32)], gpu=GpuTier(64 * frame, frame),
        tokens_per_block=32, max_tokens=64 * tokens, max_sequences=4, write_through="off",
    )  # fmt: skip
    with (
        closing(open_device("cuda")) as others,
        Manager(config, open_device("cuda"), debug=True) as kv,
    ):
        first, second = (kv.create(max_tokens=64 * tokens) for _ in range(2))
        for seq in (first, second):
            seq.resume()
        taken = others.create(others.room(frame) - 8, frame)
        with pytest.raises(OutOfFrames, match="the device has no memory for"):
            _grow_for_ever(first, tokens)
        assert 0 < first.capacity_tokens <= 9 * tokens
        assert not kv.admits(16 * tokens)
        first.drop()
        second.resize(tokens)
        others.release(taken)
        kv.poll()
        assert kv.admits(16 * tokens)
        second.resize(16 * tokens)
