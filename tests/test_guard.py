"""The guard: who may call and when, what becomes of a call that is cut short, and what a refusal
has looked at and left behind."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from kvstate import Manager, Sequence
from kvstate.errors import DeviceFault, IllegalTransition, KvStateError, NestedCall
from kvstate.gpu import HostDevice
from kvstate.guard import known
from kvstate.life import Life
from kvstate.plan import Coverage
from kvstate.spec.compiled import row_key
from kvstate.spec.manager import CALLING, CHANGING, CLOSED, MANAGER, OPEN, POISONED
from kvstate.spec.table import Row, State
from kvstate.view import view
from tests.conftest import Open, small

IDS: Final = [3, 1, 4, 1, 5, 9]


def written(kv: Manager, tokens: int = 6, max_tokens: int = 16) -> Sequence:
    """A sequence that has written some tokens."""
    seq = kv.create(max_tokens=max_tokens)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), tokens))
    return seq


# The table.


@known
def inside(life: Life, event: str) -> None:
    """A call while this one runs."""
    life.begin(event, sys._getframe())


EVENTS: Final[dict[str, Callable[[Life], None]]] = {
    "call": lambda life: inside(life, "poll"),
    "change": Life.change,
    "return": Life.end,
    "poison": lambda life: life.poison("for the test"),
    "fork": Life.fork,
    "close": Life.close,
}
WAY: Final[dict[str, tuple[str, ...]]] = {
    "OPEN": (), "CALLING": ("call",), "CHANGING": ("call", "change"), "POISONED": ("poison",),
    "FORKED": ("fork",), "CLOSED": ("poison", "close"),
}  # fmt: skip
"""How it gets into each state."""


def life_in(state: State) -> Life:
    life = Life()
    for event in WAY[state.name]:
        EVENTS[event](life)
    assert life.state == state.code
    return life


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("row", MANAGER.rows, ids=str)
def test_each_row_of_the_manager_fires(row: Row, counted: bool) -> None:
    """Also where it is only written, since nobody counts."""
    life = life_in(row.source)
    life.coverage = coverage = Coverage() if counted else None
    EVENTS[row.event](life)
    assert life.state == row.target.code
    assert coverage is None or coverage.rows == {row_key("manager", row): 1}


@pytest.mark.parametrize(("state", "event"), list(MANAGER.missing()), ids=str)
def test_what_has_no_row_changes_nothing(state: State, event: str) -> None:
    life = life_in(state)
    with suppress(IllegalTransition, DeviceFault):
        EVENTS[event](life)
        assert event not in ("call", "close"), "these are refused, the others mean nothing then"
    assert life.state == state.code


@pytest.mark.parametrize("state", [one for one in MANAGER.states if one is not OPEN], ids=str)
def test_a_call_is_refused_by_name_in_every_state_but_one(state: State) -> None:
    life = life_in(state)
    with pytest.raises((IllegalTransition, DeviceFault)) as refused:
        inside(life, "poll")
    wanted = {
        CALLING: "the manager: poll is illegal in state CALLING: poll runs, and this came from",
        CHANGING: "the manager: poll is illegal in state CHANGING: poll runs, and this came from",
        POISONED: "the manager is poisoned and refuses work: for the test",
        CLOSED: "the manager: poll is illegal in state CLOSED: it was closed; open a new one",
    }
    assert str(refused.value).startswith(
        wanted.get(state, "the manager: poll is illegal in state ")
    )


def test_the_manager_counts_its_rows_when_asked(open_manager: Open) -> None:
    kv = open_manager()
    kv.life.coverage = kv.flight.coverage = coverage = Coverage()
    written(kv)
    rows = {key for key in coverage.rows if key.startswith("manager.")}
    assert rows == {row_key("manager", row) for row in MANAGER.rows
                    if row.event in ("call", "change", "return")}  # fmt: skip


# Calls from inside a call.


class Caller:
    """Calls the manager from wherever it is asked to, and remembers what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call, self.raised = call, list[KvStateError]()

    def __call__(self, *_: object) -> None:
        try:
            self.call()
        except KvStateError as error:
            self.raised.append(error)

    def refused(self, tried: str, runs: str) -> None:
        """Every call was refused, naming both."""
        assert self.raised
        for error in self.raised:
            assert isinstance(error, NestedCall)
            assert error.event == tried
            assert f"{runs} runs, and this came from inside it" in str(error)


@contextmanager
def at_device(device: HostDevice, name: str, call: Callable[[], object]) -> Iterator[None]:
    """Whenever a device call of that name is made, something else happens too."""
    real = getattr(device, name)

    def both(*arguments: Any) -> Any:
        call()
        return real(*arguments)

    setattr(device, name, both)
    yield
    delattr(device, name)


@pytest.mark.parametrize("debug", [False, True])
def test_a_finaliser_is_refused_while_a_call_runs(debug: bool) -> None:
    device = HostDevice()
    with Manager(small(), device, debug=debug) as kv:
        seq, other = written(kv), written(kv)
        caller = Caller(other.close)

        class Request:
            def __del__(self) -> None:
                caller()

        request = [Request()]
        with at_device(device, "map", request.clear):
            seq.resize(16)
        caller.refused("close_sequence", f"resize of {seq}")
        assert (seq.capacity_tokens, other.state_name) == (16, "ACTIVE")
        other.close()


def test_a_signal_handler_is_refused_while_a_call_runs(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = written(kv)
    caller = Caller(kv.poll)
    before = signal.signal(signal.SIGUSR1, caller)
    try:
        with at_device(device, "map", lambda: signal.raise_signal(signal.SIGUSR1)):
            seq.resize(16)
        caller.refused("poll", f"resize of {seq}")
        assert seq.capacity_tokens == 16
        signal.raise_signal(signal.SIGUSR1)
        assert len(caller.raised) == 1, "between calls it may call"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_lets_the_refusal_through_cuts_the_call_short(
    open_manager: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error of ours, and not of the call that runs."""
    device = HostDevice()
    kv = open_manager(device)
    seq = written(kv)
    before = view(kv)
    with monkeypatch.context() as patched:
        patched.setattr(kv.host, "room", lambda _: kv.poll())
        with pytest.raises(NestedCall, match="poll is illegal in state CALLING: suspend of"):
            seq.suspend()
    assert (kv.life.state, view(kv)) == (OPEN.code, before)
    with at_device(device, "map", kv.poll), pytest.raises(NestedCall):
        seq.resize(16)
    with pytest.raises(DeviceFault, match=f"interrupted: NestedCall in resize of {seq}"):
        kv.poll()


@pytest.mark.parametrize("debug", [False, True])
def test_the_sink_of_a_record_is_refused(debug: bool) -> None:
    caller = Caller(lambda: None)
    with Manager(small(), HostDevice(), record=caller, debug=debug) as kv:
        caller.call = kv.poll
        seq = kv.create()
        assert seq.uid == 1
    caller.refused("poll", f"create of {seq}")


def test_a_listener_is_refused(open_manager: Open) -> None:
    kv = open_manager()
    caller = Caller(kv.poll)

    class Listener:
        stored = removed = cleared = caller

    seq = written(kv)
    listener = Listener()
    kv.reuse.index.listen(listener)
    seq.commit(IDS)
    caller.refused("poll", f"commit of {seq}")
    assert seq.committed_tokens == 6


def test_an_argument_that_calls_is_refused_and_what_makes_a_batch_is_not(
    open_manager: Open,
) -> None:
    kv = open_manager()
    seq = written(kv)
    caller = Caller(kv.poll)

    class Tokens:
        def __array__(self, *_: object, **__: object) -> Any:
            caller()
            return np.array(IDS[:2], np.int32)

    seq.commit(Tokens())
    caller.refused("poll", f"commit of {seq}")
    assert len(kv.batch(kv.create() for _ in range(3))) == 3


def test_a_drain_is_refused_while_a_call_runs(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    events, seq = kv.events(), written(kv)
    seq.commit(IDS)
    caller = Caller(events.drain)
    with at_device(device, "map", caller):
        seq.resize(16)
    caller.refused("drain", f"resize of {seq}")
    assert len(events.drain()) == 1


# Calls that are cut short. At every line: tests/test_interrupts.py.


def test_a_call_that_has_changed_nothing_leaves_the_manager_open(
    open_manager: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = open_manager()
    seq, before = written(kv), view(kv)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(kv.host, "room", interrupt)
        with pytest.raises(KeyboardInterrupt):
            seq.suspend()
    assert (kv.life.state, view(kv)) == (OPEN.code, before)
    seq.suspend()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RecursionError, SystemExit])
@pytest.mark.parametrize("debug", [False, True])
def test_a_call_that_has_begun_to_change_something_poisons(
    error: type[BaseException], debug: bool
) -> None:
    class Cut(HostDevice):
        def map(self, runs: Any) -> None:
            super().map(runs)
            if armed:
                raise error

    armed, device = False, Cut()
    kv = Manager(small(), device, debug=debug)
    seq = written(kv)
    armed = True
    with pytest.raises(error):
        seq.resize(16)
    reason = f"interrupted: {error.__name__} in resize of {seq}; close it"
    with pytest.raises(DeviceFault, match=f"poisoned and refuses work: {reason}"):
        kv.stats()
    kv.close()
    assert device.closed
    assert device.ledger().empty


@pytest.mark.parametrize("left", [CALLING, CHANGING])
def test_what_was_cut_short_on_its_way_out_is_found_by_the_next_call(
    left: State, open_manager: Open
) -> None:
    kv = open_manager()
    kv.life.state = left.code
    if left is CALLING:
        assert kv.poll() == []
        return
    with pytest.raises(DeviceFault, match="a call was cut short on its way out"):
        kv.poll()


def test_too_deep_a_stack_leaves_it_whole_or_poisons() -> None:
    """The stack ends somewhere in a call: wherever that is."""
    came = set()
    for room in range(8, 48):
        device = HostDevice()
        kv = Manager(small(), device)
        seq = written(kv)
        state = (seq.capacity_tokens, kv.stats().frames)
        try:
            _deep(room, partial(seq.resize, 16))
        except RecursionError:
            came.add(MANAGER.states[kv.life.state].name)
            if kv.life.state != POISONED.code:
                assert (seq.capacity_tokens, kv.stats().frames) == state
        else:
            assert seq.capacity_tokens == 16
        kv.close()
        assert device.closed
    assert {"OPEN", "POISONED"} <= came


def _deep(room: int, call: Callable[[], None]) -> None:
    """Call with that many frames left on the stack."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + room)
    try:
        call()
    finally:
        sys.setrecursionlimit(limit)


# Closing, and opening.


class Stubborn(HostDevice):
    """A device that is interrupted when it is first closed, and wherever else it is told to be."""

    times = 1

    def close(self, streams: Any = ()) -> None:
        self.times -= 1
        if self.times == 0:
            raise KeyboardInterrupt
        super().close(streams)


def test_close_goes_on_when_it_was_cut_short() -> None:
    device = Stubborn()
    kv = Manager(small(), device)
    written(kv)
    with pytest.raises(KeyboardInterrupt):
        kv.close()
    assert (kv.closed, device.closed) == (False, False)
    kv.close()
    assert (kv.closed, device.closed) == (True, True)


def test_close_reaches_the_device_whatever_the_books_are() -> None:
    device = HostDevice()
    kv = Manager(small(), device)
    seq = written(kv)
    seq.state = 99
    with pytest.raises(IndexError):
        kv.close()
    assert device.closed
    assert kv.closed


@pytest.mark.parametrize("name", ["host_reserve", "reserve"])
def test_a_constructor_that_is_cut_short_leaves_the_device_as_it_was(name: str) -> None:
    device = HostDevice()
    own = device.reserve(1 << 16, 4096)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with at_device(device, name, interrupt), pytest.raises(KeyboardInterrupt):
        Manager(small(), device)
    assert dict(device.ledger().reservations) == {own: 1 << 16}
    with pytest.raises(TypeError), at_device(device, "ledger", lambda: None):
        Manager(small(), device, record=b"no function")  # type: ignore[arg-type]
    with Manager(small(), device) as kv:
        written(kv)
    assert device.closed
