"""What only the host device can show: its memory in /proc, and its order of work under a seed.

The first is why a leak here is found by counting lines; the second is why a race found on it can
be run again.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvstate.device import Completion, CopyRun, Direction
from kvstate.errors import ArgumentError
from kvstate.gpu.host import PAGE_BYTES, HostDevice
from tests.device.factories import (
    ROW_BYTES,
    Factory,
    Rig,
    opened,
    segments,
    written,
)

OUT, IN = Direction.OUT, Direction.IN
FRAMES: Final = "memfd:kvstate-frames"
EAGER: Final = Factory("eager", HostDevice, PAGE_BYTES)
LATE: Final = Factory("late", partial(HostDevice, streams="adversarial"), PAGE_BYTES)
BOTH: Final = pytest.mark.parametrize("factory", [EAGER, LATE], ids=lambda one: one.name)


@pytest.fixture
def eager() -> Iterator[Rig]:
    """A host device that does everything at once, in pages."""
    with opened(EAGER) as rig:
        yield rig


@pytest.fixture
def late() -> Iterator[Rig]:
    """A host device that does everything late, in pages."""
    with opened(LATE) as rig:
        yield rig


# Memory, as the system sees it.


def frame_lines() -> list[str]:
    """The mappings of frames in this process, whichever device they are of."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if FRAMES in line]


def mapped_lines(rig: Rig) -> list[str]:
    """Those of them in the reservations of this device."""
    held = rig.device.ledger().reservations.items()
    ranges = [range(address, address + size) for address, size in held]
    return [
        line
        for line in frame_lines()
        if any(int(line.split("-")[0], 16) in inside for inside in ranges)
    ]


def open_files() -> dict[str, str]:
    """What every open file descriptor of this process is."""
    paths = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    return {path.name: str(path.readlink()) for path in paths if path.is_symlink()}


def frame_file(rig: Rig) -> os.stat_result:
    """The file that the frames of the device are ranges of; one has to be mapped."""
    node = int(mapped_lines(rig)[0].split()[4])
    files = [os.fstat(int(number)) for number, name in open_files().items() if FRAMES in name]
    (found,) = [file for file in files if file.st_ino == node]
    return found


def address_space_bytes() -> int:
    """How many bytes of addresses this process has reserved or mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_frames_may_be_as_small_as_a_page(eager: Rig) -> None:
    assert eager.device.granularity_bytes == eager.frame_bytes == 4096
    frames = eager.create(100)
    address = eager.map(frames[::-1])
    for at in range(100):
        eager.device.poke(address + at * 4096, b"%4096d" % at)
    for at in range(100):
        assert eager.device.peek(address + at * 4096, 4096) == b"%4096d" % at


@pytest.mark.parametrize(
    ("order", "lines"), [(range(8), 1), ((4, 5, 6, 7, 0, 1, 2, 3), 2), (range(7, -1, -1), 8)],
    ids=["all in a row", "two halves", "backwards"],
)  # fmt: skip
def test_neighbouring_frames_are_one_mapping(eager: Rig, order: list[int], lines: int) -> None:
    frames = sorted(eager.create(8))
    eager.map([frames[at] for at in order])
    assert len(mapped_lines(eager)) == lines


def test_a_read_only_mapping_is_read_only_to_the_system(eager: Rig) -> None:
    eager.map(eager.create(1), read_only=True)
    assert [line.split()[1] for line in mapped_lines(eager)] == ["r--s"]


def test_unmapping_leaves_no_mapping(eager: Rig) -> None:
    address = eager.mapped(4)
    eager.unmap(address + 4096, 2)
    assert len(mapped_lines(eager)) == 2
    eager.unmap(address, 1)
    eager.unmap(address + 3 * 4096, 1)
    assert not mapped_lines(eager)


def test_released_frames_go_back_to_the_system(eager: Rig) -> None:
    frames = eager.create(64)
    address = eager.map(frames)
    eager.device.poke(address, b"x" * 64 * 4096)
    assert frame_file(eager).st_blocks * 512 == 64 * 4096
    eager.unmap(address + 8 * 4096, 56)
    eager.device.release(frames[8:])
    assert frame_file(eager).st_blocks * 512 == 8 * 4096


def test_released_frames_are_used_again(eager: Rig) -> None:
    frames = eager.create(8)
    eager.map(frames[5:])
    eager.device.release(frames[:5])
    size_bytes = frame_file(eager).st_size
    again = eager.create(3) + eager.create(2)
    assert set(again) == set(frames[:5])
    assert frame_file(eager).st_size == size_bytes
    assert not set(eager.create(1)).intersection(frames)


@BOTH
def test_closing_leaves_no_mapping_no_file_and_no_addresses(factory: Factory) -> None:
    lines, files, size_bytes = frame_lines(), open_files(), address_space_bytes()
    rig = Rig(factory, factory.open())
    rig.issue(5)
    rig.map(rig.create(3), read_only=True)
    rig.device.reserve(1 << 38, 1 << 30)
    assert len(frame_lines()) == len(lines) + 2
    assert address_space_bytes() - size_bytes > 1 << 38
    rig.device.close()
    assert frame_lines() == lines
    assert open_files() == files
    assert address_space_bytes() - size_bytes < 1 << 30


def test_unreserving_gives_all_addresses_back(eager: Rig) -> None:
    size_bytes = address_space_bytes()
    eager.device.unreserve(eager.device.reserve(1 << 38, 3 << 30))
    eager.device.host_unreserve(eager.device.host_reserve(1 << 28))
    assert address_space_bytes() - size_bytes < 1 << 27


def test_a_device_that_could_not_be_opened_goes_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    with pytest.raises(ArgumentError):
        HostDevice(streams="lazy")
    gc.collect()
    assert not seen


# Faults.

Fail = Callable[[Rig, Direction, CopyRun], None]


def accesses(rig: Rig) -> dict[str, tuple[int, Any]]:
    """Ways to touch memory that is not there: the address, and the call."""
    address, host = rig.mapped(1), rig.device.host_reserve(4096)
    gone, alias = rig.reserve(1), rig.map(rig.create(1), read_only=True)
    device, stream = rig.device, rig.device.stream()
    part, over = segments((gone, 0, 1, 1)), segments((alias, 0, 1, 1))
    return {
        "write": (gone, partial(device.write, stream, part)),
        "verify": (gone, partial(device.verify, stream, part)),
        "write read-only": (alias, partial(device.write, stream, over)),
        "copy from": (gone, partial(device.copy, OUT, [CopyRun(host, gone, 64)])),
        "copy to": (gone, partial(device.copy, IN, [CopyRun(gone, host, 64)])),
        "copy to read-only": (alias, partial(device.copy, IN, [CopyRun(alias, host, 64)])),
        "copy past the end": (address, partial(device.copy, OUT, [CopyRun(host, address, 4097)])),
    }


@BOTH
@pytest.mark.parametrize(
    "access",
    ["write", "verify", "write read-only", "copy from", "copy to", "copy to read-only",
     "copy past the end"],
)  # fmt: skip
def test_an_access_to_memory_that_is_not_there_is_a_fault(factory: Factory, access: str) -> None:
    with opened(factory) as rig:
        address, call = accesses(rig)[access]
        call()
        assert not any(end.ok for end in rig.quiesce())
        (fault,) = rig.device.faults
        assert f"{address:#x}" in fault
        assert " bytes " in fault


def fail_by_plan(rig: Rig, direction: Direction, run: CopyRun) -> None:
    rig.device.fail_next("complete")
    assert not rig.copy(direction, [run])


def fail_by_script(rig: Rig, direction: Direction, run: CopyRun) -> None:
    token = rig.device.copy(direction, [run])
    rig.device.script([(token, False)])
    assert rig.device.poll() == [(token, False)]


@BOTH
@pytest.mark.parametrize("direction", [OUT, IN])
@pytest.mark.parametrize("fail", [fail_by_plan, fail_by_script])
def test_a_failed_copy_leaves_other_bytes(
    factory: Factory, direction: Direction, fail: Fail
) -> None:
    with opened(factory) as rig:
        pair = rig.mapped(1), rig.device.host_reserve(4096)
        target, source = pair if direction is IN else pair[::-1]
        rig.device.poke(source, b"right" * 100)
        fail(rig, direction, CopyRun(target, source, 500))
        found = rig.device.peek(target, 500)
        assert not any(found[at : at + 5] == b"right" for at in range(0, 500, 5))
        assert rig.device.peek(source, 500) == b"right" * 100


# The order of work.


def test_eager_work_has_run_when_its_call_returns(eager: Rig) -> None:
    address, host = eager.mapped(1), eager.device.host_reserve(4096)
    stream = eager.device.stream()
    eager.device.write(stream, segments((address, 0, 4, 1)))
    eager.device.copy(OUT, [CopyRun(host, address, 4 * ROW_BYTES)])
    assert eager.device.peek(host, 4 * ROW_BYTES) == written(0, 4, 1)
    assert eager.device.verify(stream, segments((host, 0, 4, 1))).done
    assert not eager.device.ledger().work


def winners(rig: Rig) -> tuple[bytes, ...]:
    """Which of three streams wrote last, place by place: says in which order they ran."""
    address, streams = rig.mapped(1), [rig.device.stream() for _ in range(3)]
    places = range(address, address + 8 * ROW_BYTES, ROW_BYTES)
    for place in places:
        for key, stream in enumerate(streams):
            rig.device.write(stream, segments((place, 0, 1, key)))
    rig.quiesce()
    return tuple(rig.device.peek(place, ROW_BYTES) for place in places)


def test_unordered_work_ends_in_every_order(late: Rig) -> None:
    found = set()
    for seed in range(20):
        late.device.schedule(seed)
        found.add(winners(late)[0])
    assert found == {written(0, 1, key) for key in range(3)}


def test_a_late_copy_reads_what_is_there_when_it_runs(late: Rig) -> None:
    address, host = late.mapped(1), late.device.host_reserve(4096)
    stream, found = late.device.stream(), set()
    for seed in range(20):
        late.device.schedule(seed)
        late.device.poke(address, written(0, 1, 1))
        late.device.copy(OUT, [CopyRun(host, address, ROW_BYTES)])
        late.device.write(stream, segments((address, 0, 1, 2)))
        late.quiesce()
        found.add(late.device.peek(host, ROW_BYTES))
    assert found == {written(0, 1, 1), written(0, 1, 2)}


def test_copies_that_nothing_orders_end_in_any_order(late: Rig) -> None:
    found = set()
    for seed in range(20):
        late.device.schedule(seed)
        first, _ = late.issue(2)
        ends: list[Completion] = []
        for _ in range(1000):
            ends += late.device.poll()
        assert len(ends) == 2
        found.add(ends[0].token == first)
    assert found == {True, False}


def test_streams_and_events_are_kept_under_every_seed(late: Rig) -> None:
    address, host, size = late.mapped(1), late.device.host_reserve(4096), 4 * ROW_BYTES
    first, second = late.device.stream(), late.device.stream()
    for seed in range(200):
        late.device.schedule(seed)
        for key in (1, 2, 3):
            late.device.write(first, segments((address, seed, 4, key)))
        check = late.device.verify(first, segments((address, seed, 4, 3)))
        event = late.device.record(first)
        late.device.copy(OUT, [CopyRun(host, address, size)], (event,), (second,))
        late.device.write(second, segments((address, seed, 4, 4)))
        late.quiesce()
        assert list(check.wrong) == [0]
        assert late.device.peek(host, size) == written(seed, 4, 3)
        assert late.device.peek(address, size) == written(seed, 4, 4)


def test_the_same_seed_gives_the_same_order() -> None:
    orders = []
    for seed in range(8):
        factory = Factory("seeded", partial(HostDevice, streams="adversarial", seed=seed), 4096)
        with opened(factory) as rig, opened(factory) as again:
            orders.append(winners(rig))
            assert winners(again) == orders[-1]
            rig.device.schedule(seed)
            assert winners(rig) == orders[-1]
    assert len(set(orders)) > 4


def test_pending_work_is_in_the_ledger(late: Rig) -> None:
    address, host, stream = late.mapped(1), late.device.host_reserve(4096), late.device.stream()
    seen = set()
    for seed in range(20):
        late.device.schedule(seed)
        late.device.write(stream, segments((address, 0, 2, 1)))
        late.device.copy(OUT, [CopyRun(host, address, 512)], (late.device.record(stream),))
        work = late.device.ledger().work
        if len(work) == 2:
            assert work[0].writes == work[1].reads == ((address, 512),)
            assert (work[1].writes, work[1].waits) == (((host, 512),), (work[0].number,))
        seen.add(len(work))
        late.quiesce()
    assert seen == {0, 1, 2}
