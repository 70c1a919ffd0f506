"""A fault at every call, and what an engine may count on after it.

`python -m tests.faults` plays every run; here every scenario is played with every point failing, as
far as time allows, and what single failures mean is said one by one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

import pytest

from kvstate import Manager
from kvstate.campaign.player import Player
from kvstate.device import ByteDevice
from kvstate.errors import DeviceError, DeviceFault, IllegalTransition
from kvstate.gpu import HostDevice, open_device
from kvstate.spec.manager import CLOSED, OPEN, POISONED
from tests.conftest import Open, small
from tests.faults.exhaust import MODES, base_of, plans_of, play
from tests.faults.scenarios import SCENARIOS, Scenario

EVERY: Final = {"once": 2, "twice": 4, "on": 8, "never": 1}
"""Of the runs of each mode, every so many are played here."""
BY_NAME: Final = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)


def host(streams: str) -> ByteDevice:
    return HostDevice(streams=streams, seed=1)


def cuda(streams: str) -> ByteDevice:
    return open_device("cuda", streams=streams, seed=1, limit_s=0.3)


# Every call of every scenario.


@BY_NAME
def test_a_scenario_plays_without_a_failure(scenario: Scenario) -> None:
    for streams in ("eager", "adversarial"):
        base = base_of(scenario, streams, host)
        assert not any(base.errors), base.errors


def test_the_scenarios_make_every_kind_of_call() -> None:
    """All but those of opening and closing a manager, which have a test of their own."""
    calls = set[str]()
    for scenario in SCENARIOS:
        device = HostDevice()
        player = Player(scenario.header(4096, "eager"), device)
        before = dict(device.calls)
        player.play(scenario.program)
        calls |= {kind for kind, count in device.calls.items() if count > before.get(kind, 0)}
    assert calls >= {"create", "release", "map", "unmap", "copy", "fill", "record", "quiesce"}


@BY_NAME
@pytest.mark.parametrize("mode", MODES)
def test_the_kth_call_fails(scenario: Scenario, mode: str) -> None:
    check_runs(scenario, mode, host, EVERY[mode])


@pytest.mark.gpu
@BY_NAME
@pytest.mark.parametrize("mode", MODES)
def test_the_kth_call_fails_on_the_card(scenario: Scenario, mode: str) -> None:
    check_runs(scenario, mode, cuda, EVERY[mode])


def check_runs(
    scenario: Scenario, mode: str, open_one: Callable[[str], ByteDevice], every: int
) -> None:
    logging.getLogger("kvstate").disabled = True  # thousands of failures, each of them meant
    try:
        base = base_of(scenario, "eager", open_one)
        plans = [plan for plan in plans_of(scenario, "eager", base) if plan.mode == mode]
        for plan in plans[::every]:
            problem = play(plan, base, open_one).problem
            assert problem is None, f"{plan}: {problem}"
    finally:
        logging.getLogger("kvstate").disabled = False


# Opening and closing.


@pytest.mark.parametrize("nth", range(1, 6))
def test_a_manager_that_cannot_be_opened_holds_nothing(nth: int) -> None:
    device = HostDevice()
    device.fail_next("any", nth)
    if nth < 4:
        with pytest.raises(DeviceError):
            Manager(small(), device)
        assert device.ledger().empty
        device.cancel_failures()
    else:
        Manager(small(), device).close()
        assert device.points >= 3
    device.close()


def test_whatever_fails_while_it_is_closed_nothing_is_left(open_manager: Open) -> None:
    nth, faults = 0, list[str | None]()
    while not faults or faults[-1] is not None:
        nth += 1
        device = HostDevice()
        kv = open_manager(device)
        for _ in range(2):
            seq = kv.create(max_tokens=8)
            seq.resume()
            kv.settle(kv.step(kv.batch([seq]), 8))
            seq.commit(range(8))
        device.fail_next("any", nth)
        kv.close()
        device.cancel_failures()
        assert device.ledger().empty
        faults.append(kv.life.fault)
    assert len(faults) > 10
    assert all(fault and "told to fail" in fault for fault in faults[:-1]), faults


# The machine of the manager.


def test_a_poisoned_manager_can_be_closed_and_leaves_no_thread(open_manager: Open) -> None:
    before = set(threading.enumerate())
    device = HostDevice(streams="adversarial")
    kv = open_manager(device, write_through="on_commit")
    seq = kv.create(max_tokens=16)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 8))
    seq.commit(range(8))
    device.fail_next("hang")
    kv.poll()
    assert kv.poll() == []
    held = device.ledger()
    with pytest.raises(DeviceFault, match="copies 1 have not ended"):
        kv.clear_reuse()
    assert kv.life.state == POISONED.code
    kv.close()
    kv.close()
    assert kv.life.state == CLOSED.code
    assert device.ledger() == held, "a copy may still read all of it"
    assert set(threading.enumerate()) == before
    device.wake()
    device.close()
    assert device.ledger().empty


def test_what_never_ends_is_fenced_and_everything_else_goes_on(open_manager: Open) -> None:
    device = HostDevice(streams="adversarial")
    kv = open_manager(device, frames=8)
    stuck = kv.create(max_tokens=8)
    stuck.resume()
    kv.settle(kv.step(kv.batch([stuck]), 8))
    device.fail_next("hang")
    stuck.suspend()
    stuck.close()
    for key in range(20):
        seq = kv.create(max_tokens=8)
        seq.resume()
        kv.settle(kv.step(kv.batch([seq]), 8))
        seq.commit([key] * 8)
        seq.rewind(0)
        seq.drop()
        seq.close()
        kv.poll()
    assert kv.stats().frames["COMING"] == 2, "its memory is nobody else's"
    assert kv.life.state == OPEN.code
    device.wake()


def test_the_manager_is_where_its_table_says(open_manager: Open) -> None:
    kv = open_manager()
    assert kv.life.state == OPEN.code
    kv.life.poison("first")
    kv.life.poison("second")
    assert (kv.life.state, kv.life.fault) == (POISONED.code, "first")
    with pytest.raises(DeviceFault, match="the manager is poisoned and refuses work: first"):
        kv.poll()
    kv.close()
    assert kv.life.state == CLOSED.code
    with pytest.raises(IllegalTransition, match="the manager: poll is illegal in state CLOSED"):
        kv.poll()
    kv.life.poison("third")
    assert kv.life.fault == "first"


def test_a_device_that_loses_count_in_an_undo_poisons(open_manager: Open) -> None:
    """The copy cannot be issued, the first of two runs is unmapped again and the second cannot be;
    and the first cannot be mapped again either."""
    device = HostDevice()
    kv = open_manager(device, map_ahead_frames=1)
    seq = kv.create(max_tokens=16)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 6))
    seq.suspend()
    kv.poll()
    kv.trim()
    device.fail_next("copy")
    device.fail_next("unmapping", 2)
    device.fail_next("mapping", 4)
    with pytest.raises(DeviceFault, match="unmapping failed: it was told to fail, and could not"):
        seq.resume()
    assert kv.life.state == POISONED.code
    with pytest.raises(DeviceFault, match="refuses work"):
        kv.poll()


def test_a_fence_that_loses_the_device_poisons(
    open_manager: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_manager()
    seq = kv.create(max_tokens=16)
    seq.resume()
    seq.resize(8)
    event = kv.device.record(None)

    def loses(*arguments: object, **named: object) -> int:
        raise DeviceFault("the device is lost")

    monkeypatch.setattr(kv.device, "copy", loses)
    with pytest.raises(DeviceFault, match="lost"):
        seq.drop(after=event)
    assert kv.life.state == POISONED.code
