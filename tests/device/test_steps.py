"""All or nothing, step by step: whichever step of a call fails, the call has done nothing.

A call is made of steps, and each is a point at which it can be told to fail. Here every call is
made again and again with its first point failing, its second, and so on; and with two in a row, so
that what takes the earlier steps back fails too. What the ledger and the bytes say must not have
changed, or it is a DeviceFault: then nobody knows, and whoever uses the device must stop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest

from kvstate.device import CopyRun, Direction, FillRun, MapRun, UnmapRun
from kvstate.errors import DeviceError, DeviceFault
from kvstate.gpu import open_device
from tests.device.factories import CARDS, CUDA, EVERY, WITH_BYTES, Factory, Rig, segments, written
from tests.device.fake_driver import open_fake
from tests.device.test_host import mapped_lines

IN, OUT = Direction.IN, Direction.OUT
MOST_POINTS: Final = 24
Prepared = tuple[Callable[[], object], Callable[[], object]]
"""A call of several steps, and what must be the same after it has failed."""


def prepare_reserve(rig: Rig) -> Prepared:
    return partial(rig.reserve, 2), lambda: None


def prepare_create(rig: Rig) -> Prepared:
    return partial(rig.create, 3), lambda: None


def prepare_release(rig: Rig) -> Prepared:
    return partial(rig.device.release, rig.create(3)), lambda: None


def prepare_map(rig: Rig) -> Prepared:
    """Three runs, two of which are of frames that do not follow one another."""
    address, frames, size = rig.reserve(8), rig.create(6), rig.frame_bytes
    places = [address, address + 3 * size, address + 6 * size]
    lists = [frames[1::-1], [frames[4], frames[2]], [frames[5]]]
    runs = [
        MapRun(*run, read_only=at == 1) for at, run in enumerate(zip(places, lists, strict=True))
    ]

    def seen() -> object:
        system = mapped_lines(rig) if rig.device.name == "host" else []
        return [rig.is_mapped(place) for place in places], len(system)

    return partial(rig.device.map, runs), seen


def prepare_unmap(rig: Rig) -> Prepared:
    """Two runs of written frames, one of them read-only."""
    frames = rig.create(4)
    first = rig.map(frames[::-1])
    second = rig.map(frames[1:3], read_only=True)
    for at in range(4):
        rig.write(segments((first + at * rig.frame_bytes, 10 * at, 8, at)))
    rig.quiesce()

    def seen() -> object:
        if not rig.factory.moves_bytes:
            return None
        places = [first + at * rig.frame_bytes for at in range(4)]
        return [rig.device.peek(place, 8 * 256) for place in places], writable(rig, second)

    runs = [UnmapRun(first, 4), UnmapRun(second, 2)]
    return partial(rig.device.unmap, runs), seen


def writable(rig: Rig, address: int) -> bool:
    try:
        rig.device.poke(address, b"")
    except DeviceError:
        return False
    return True


def prepare_host_reserve(rig: Rig) -> Prepared:
    return partial(rig.device.host_reserve, 3 << 20), lambda: None


def prepare_host_unreserve(rig: Rig) -> Prepared:
    address = rig.device.host_reserve(3 << 20)
    rig.device.poke(address, b"kept")
    return partial(rig.device.host_unreserve, address), lambda: rig.device.peek(address, 4)


def prepare_record(rig: Rig) -> Prepared:
    return partial(rig.device.record, rig.device.stream()), lambda: None


def prepare_quiesce(rig: Rig) -> Prepared:
    rig.issue(1)
    return rig.device.quiesce, lambda: None


PREPARE: Final[dict[str, Callable[[Rig], Prepared]]] = {
    "reserve": prepare_reserve,
    "create": prepare_create,
    "release": prepare_release,
    "map": prepare_map,
    "unmap": prepare_unmap,
    "host_reserve": prepare_host_reserve,
    "host_unreserve": prepare_host_unreserve,
    "record": prepare_record,
    "quiesce": prepare_quiesce,
}
"""Calls that can be taken back; copies and fills cannot, and have tests of their own."""


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory of a few MiB is registered in several units."""
    from kvstate.gpu import pinned

    monkeypatch.setattr(pinned, "UNIT_BYTES", 1 << 20)


def points_of(rig: Rig, call: Callable[[], object]) -> int:
    before = rig.device.points
    call()
    return rig.device.points - before


@pytest.mark.parametrize("kind", PREPARE)
def test_a_call_that_fails_at_any_point_has_done_nothing(any_rig: Rig, kind: str) -> None:
    call, seen = PREPARE[kind](any_rig)
    before, bytes_before = any_rig.device.ledger(), seen()
    for nth in range(1, MOST_POINTS):
        any_rig.device.fail_next("any", nth)
        try:
            call()
        except DeviceError:
            assert any_rig.device.ledger() == before, nth
            assert seen() == bytes_before, nth
            continue
        break
    any_rig.device.cancel_failures()
    least = {"map": 7, "unmap": 3, "create": 2, "release": 4, "record": 2, "host_reserve": 2}
    assert MOST_POINTS > nth > least.get(kind, 1), "its steps were tried, and then it worked"


DRIVER_ONLY: Final = {"create", "release", "host_reserve", "host_unreserve"}
"""Calls that have several steps to take back on CUDA alone."""


@pytest.mark.parametrize("kind", ["map", "unmap", *sorted(DRIVER_ONLY)])
@pytest.mark.parametrize("factory", WITH_BYTES)
def test_what_cannot_be_taken_back_is_a_fault(factory: Factory, kind: str) -> None:
    """Two points in a row: the second fails again where the device takes its steps back."""
    outcomes = [fail_twice(factory, kind, nth) for nth in range(1, MOST_POINTS)]
    assert outcomes[0] == "nothing was done"
    assert outcomes[-1] == "done"
    assert ("fault" in outcomes) == (kind not in DRIVER_ONLY or factory in CARDS), outcomes


def fail_twice(factory: Factory, kind: str, nth: int) -> str:
    """What comes of a call of which that point fails and the next one too."""
    rig = Rig(factory, factory.open())
    rig.device.set_rows(256)
    call, seen = PREPARE[kind](rig)
    before = rig.device.ledger(), seen()
    for at in (nth, nth + 1):
        rig.device.fail_next("any", at)
    outcome = "done"
    try:
        call()
    except DeviceFault as fault:
        outcome = "fault" if "could not be undone" in str(fault) else str(fault)
    except DeviceError:
        rig.device.cancel_failures()
        same = (rig.device.ledger(), seen()) == before
        outcome = "nothing was done" if same else "something was done"
    rig.device.cancel_failures()
    rig.device.close()
    assert rig.device.ledger().empty
    return outcome


def test_what_could_not_be_taken_back_is_when_it_is_closed(rig: Rig) -> None:
    """A mapping that no ledger has."""
    call, _ = PREPARE["map"](rig)
    rig.device.fail_next("mapping", 2)
    rig.device.fail_next("unmapping")
    with pytest.raises(DeviceFault):
        call()
    assert len(rig.device.owed) == 1  # type: ignore[attr-defined]
    rig.device.close()
    assert not rig.device.owed  # type: ignore[attr-defined]
    assert rig.device.ledger().empty


def test_each_kind_of_step_can_be_told_to_fail(rig: Rig) -> None:
    """Named, and not only as the n-th of any kind."""
    kinds = {
        "frame": "create", "freeing": "release", "mapping": "map", "access": "map",
        "unmapping": "unmap", "register": "host_reserve", "unregister": "host_unreserve",
        "event": "record",
    }  # fmt: skip
    for step, kind in kinds.items():
        call, _ = PREPARE[kind](rig)
        before = rig.device.ledger()
        rig.device.fail_next(step)
        with pytest.raises(DeviceError) as raised:
            call()
        assert raised.value.call == step
        assert rig.device.ledger() == before
        call()


def test_the_second_run_of_a_map_and_the_access_to_it(rig: Rig) -> None:
    for step in ("mapping", "access"):
        rig.give_back()
        call, seen = prepare_map(rig)
        rig.device.fail_next(step, 2)
        with pytest.raises(DeviceError, match=step):
            call()
        assert seen() == ([False, False, False], 0)
        call()
        assert any_mapped(seen())


def any_mapped(seen: Any) -> bool:
    return bool(seen[0] == [True, True, True])


# Copies: nothing was issued, or it ends as failed.


def copies(rig: Rig) -> tuple[Callable[[], int], int]:
    """A copy of three runs with an event before it and two streams behind it; and the address of
    the memory that it fills."""
    device, size = rig.device, 16 * 256
    source, target = rig.mapped(1), rig.device.host_reserve(4 * size)
    rig.write(segments((source, 0, 16, 7)))
    stream, followers = device.stream(), (device.stream(), device.stream())
    runs = [CopyRun(target + at * size, source, size) for at in range(3)]
    return lambda: device.copy(OUT, runs, (device.record(stream),), followers), target


def test_a_copy_that_fails_at_any_point_was_not_issued_or_fails(any_rig: Rig) -> None:
    copy, _ = copies(any_rig)
    refused, failed = 0, 0
    for nth in range(1, MOST_POINTS):
        before = any_rig.device.ledger()
        any_rig.device.fail_next("any", nth)
        try:
            token = copy()
        except DeviceError:
            assert any_rig.device.ledger() == before
            refused += 1
            continue
        any_rig.device.cancel_failures()
        (end,) = any_rig.quiesce()
        assert end.token == token
        if end.ok:
            break
        failed += 1
    assert refused == 4, "recording takes two points, the copy itself and its wait two more"
    assert failed >= 7, "three runs, an event, two waits and its end"


def test_a_copy_that_was_issued_in_part_still_orders_who_waits_for_it(rig: Rig) -> None:
    source, target, stream = rig.device.host_reserve(4096), rig.mapped(1), rig.device.stream()
    for kind in ("event", "wait"):
        rig.device.fail_next(kind)
        rig.device.copy(IN, [CopyRun(target, source, 4096)], (), (stream,))
        rig.device.write(stream, segments((target, 3, 16, 5)))
        (end,) = rig.quiesce()
        assert not end.ok
        assert rig.device.peek(target, 4096) == written(3, 16, 5)


# Fills: what is overwritten is overwritten.


def test_a_fill_that_fails_later_than_at_once_is_a_fault(rig: Rig) -> None:
    places = [rig.mapped(1), rig.device.host_reserve(4096), rig.mapped(1)]
    runs = [FillRun(place, 4096) for place in places]
    for place in places:
        rig.device.poke(place, b"kept")
    rig.device.fail_next("filling")
    with pytest.raises(DeviceError):
        rig.device.fill(runs, 1)
    assert [rig.device.peek(place, 4) for place in places] == [b"kept"] * 3
    rig.device.fail_next("filling", 3)
    with pytest.raises(DeviceFault, match="filling"):
        rig.device.fill(runs, 1)


# Copies that never end.


def waits(factory: Factory) -> Any:
    """A device that does not wait for long."""
    if factory not in CARDS:
        return factory.open()
    opened: Any = partial(open_device, "cuda") if factory in CUDA else open_fake
    return opened(streams=factory.name.partition("-")[2], limit_s=0.3)


@pytest.mark.parametrize("factory", EVERY)
def test_a_copy_that_never_ends_is_not_waited_for(
    factory: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(factory, waits(factory))
    rig.device.set_rows(256)
    device, stream, other = rig.device, rig.device.stream(), rig.device.stream()
    source, target, host = rig.mapped(1), rig.mapped(1), rig.device.host_reserve(8192)
    device.quiesce()
    device.fail_next("hang")
    hung = device.copy(OUT, [CopyRun(host, source, 4096)], (), (stream,))
    behind = device.copy(OUT, [CopyRun(host, source, 16)], [device.record(stream)])
    free = device.copy(IN, [CopyRun(target, host + 4096, 4096)], (), (other,))
    assert device.hung == {hung}
    device.write(stream, segments())
    device.write(other, segments())
    device.synchronize(other)
    assert device.finish([free]) == [(free, True)]
    for wait in (
        device.quiesce, partial(device.synchronize, stream), partial(device.finish, [behind]),
    ):  # fmt: skip
        with pytest.raises(DeviceFault, match=f"copies {hung}, {behind} have not ended"):
            wait()
    assert device.poll() == []
    before = device.ledger()
    with caplog.at_level(logging.ERROR, "kvstate"):
        device.close()
        device.close()
    assert device.ledger() == before, "nothing is given back that may still be read"
    assert f"copies {hung}, {behind} have not ended" in caplog.text
    device.wake()
    device.close()
    assert device.ledger().empty


@pytest.mark.parametrize("factory", WITH_BYTES)
def test_memory_can_be_looked_at_while_the_default_stream_waits_for_ever(factory: Factory) -> None:
    rig = Rig(factory, waits(factory))
    rig.device.set_rows(256)
    device, stream = rig.device, rig.device.stream()
    source, host = rig.mapped(1), rig.device.host_reserve(8192)
    device.poke(source, bytes(range(256)) * 2)
    device.quiesce()
    device.fail_next("hang")
    device.copy(OUT, [CopyRun(host, source, 4096)], (), (None,))
    assert device.peek(source, 512) == bytes(range(256)) * 2
    check = device.verify(stream, segments((source, 0, 2, 1)))
    device.synchronize(stream)
    assert sum(check.wrong) == 2
    device.wake()
    device.close()


@pytest.mark.parametrize("factory", WITH_BYTES)
def test_what_waits_for_a_copy_that_never_ends_does_not_run(factory: Factory) -> None:
    rig = Rig(factory, waits(factory))
    rig.device.set_rows(256)
    device, stream = rig.device, rig.device.stream()
    target, host = rig.mapped(1), rig.device.host_reserve(4096)
    rig.write(segments((target, 0, 16, 1)))
    device.fail_next("hang")
    device.copy(IN, [CopyRun(target, host, 4096)], (), (stream,))
    device.write(stream, segments((target, 0, 16, 2)))
    with pytest.raises(DeviceFault, match="have not ended"):
        device.synchronize(stream)
    assert device.peek(target, 4096) == written(0, 16, 1)
    device.wake()
    device.synchronize(stream)
    assert device.peek(target, 4096) == written(0, 16, 2)
    (end,) = device.quiesce()
    assert end.ok
    device.close()
