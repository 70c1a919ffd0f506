"""What a call that is refused leaves behind: nothing. No change, no copy that was delivered on the
way, no cycle that keeps a step's tensors alive, and no other outcome because somebody looked."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from types import FrameType
from typing import Any, Final, cast

import numpy as np
import pytest

from kvstate import Manager, Sequence, trace
from kvstate.campaign.fuzz import play
from kvstate.errors import (
    ArgumentError,
    DeviceError,
    DeviceFault,
    HostExhausted,
    IllegalTransition,
    KvStateError,
    LawViolation,
    OutOfFrames,
    OutOfRows,
)
from kvstate.gpu import HostDevice
from kvstate.view import view
from tests.conftest import Open, small
from tests.test_guard import IDS, written

# Errors that are caught keep nothing alive.


class Kept:
    """Stands for the tensors of a step: whoever holds its frame holds it."""


def _full(kv: Manager) -> Sequence:
    """All frames are somebody's."""
    written(kv, 16)
    return written(kv, 16)


CAPACITY: Final[dict[str, tuple[type[KvStateError], Callable[[Manager, Any], Any]]]] = {
    "step": (OutOfFrames, lambda kv, seq: kv.step(kv.batch([seq]))),
    "resize": (OutOfFrames, lambda kv, seq: seq.resize(8)),
    "resume": (OutOfFrames, lambda kv, seq: kv.create(max_tokens=16, reserve=True).resume()),
    "dummy": (OutOfFrames, lambda kv, seq: kv.dummy(8)),
    "fork": (OutOfFrames, lambda kv, seq: next(iter(kv.sequences.values())).fork()),
    "create": (OutOfRows, lambda kv, seq: [kv.create() for _ in range(9)]),
    "suspend": (HostExhausted, lambda kv, seq: next(iter(kv.sequences.values())).suspend()),
    "illegal": (IllegalTransition, lambda kv, seq: seq.resume()),
    "argument": (ArgumentError, lambda kv, seq: kv.create(["x"])),
    "device": (DeviceError, lambda kv, seq: kv.resume(kv.create(), "no stream")),
}


@pytest.mark.parametrize("how", ["plain", "debug", "order", "record"])
@pytest.mark.parametrize("name", CAPACITY)
def test_a_caught_error_keeps_nothing_alive(name: str, how: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {}, "debug": {"debug": True}, "order": {"order": True},
        "record": {"record": lambda line: None},
    }  # fmt: skip
    config = small(frames=9, slots=2)
    with Manager(config, HostDevice(), **kinds[how]) as kv:
        _full(kv)
        seq = kv.create(max_tokens=8)
        seq.resume()
        kv.resize(seq, 4)
        kv.settle(kv.step(kv.batch([seq]), 4))
        gone = _caught(kv, seq, *CAPACITY[name])
        assert gone() is None, "it is in a cycle with the error"


def _caught(
    kv: Manager, seq: Sequence, kind: type[KvStateError], call: Callable[[Manager, Any], Any]
) -> weakref.ref[Kept]:
    gc.collect()
    gc.disable()
    try:
        kept = Kept()
        with suppress(kind):
            call(kv, seq)
            raise AssertionError(f"{kind.__name__} was not raised")
        return weakref.ref(kept)
    finally:
        gc.enable()


def test_a_failed_device_call_keeps_nothing_alive() -> None:
    device = HostDevice()
    with Manager(small(), device) as kv:
        seq = written(kv)
        device.fail_next("access")
        gone = _caught(kv, seq, DeviceError, lambda kv, seq: seq.resize(16))
        assert gone() is None


def test_a_fault_keeps_nothing_alive() -> None:
    device = HostDevice()
    with Manager(small(scrub=True), device) as kv:
        seq = written(kv)
        device.fail_next("filling")
        assert _caught(kv, seq, DeviceFault, lambda kv, seq: seq.drop())() is None
        assert _caught(kv, seq, DeviceFault, lambda kv, seq: kv.poll())() is None


def test_a_violation_keeps_nothing_alive() -> None:
    with Manager(small(), HostDevice(), debug=True) as kv:
        seq = written(kv)
        kv.gpu.counts[0] += 1
        gone = _caught(kv, seq, LawViolation, lambda kv, seq: kv.poll())
        kv.gpu.counts[0] -= 1
        assert gone() is None


# Those that look change no call.


def test_a_sink_that_fails_changes_no_result(caplog: pytest.LogCaptureFixture) -> None:
    lines = list[bytes]()

    def sink(line: bytes) -> None:
        if len(lines) == 4:
            raise OSError("No space left on device")
        lines.append(line)

    caplog.set_level(logging.ERROR, "kvstate")
    with Manager(small(), HostDevice(), record=sink) as kv:
        seq = kv.create()
        seq.resume()
        batch = kv.batch([seq])
        for _ in range(3):
            kv.settle(kv.step(batch))
        assert seq.length_tokens == 3
    assert len(lines) == 4
    assert len(caplog.records) == 1
    assert kv.watches[0].lost == ["recorder: OSError('No space left on device')"]


@pytest.mark.parametrize("who", ["laws", "order"])
def test_a_look_that_fails_changes_no_result(
    who: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Manager(small(), HostDevice(), debug=True) as kv:
        seq = kv.create()

        def crash(*_: object) -> None:
            raise KeyError("a bug of the look")

        monkeypatch.setattr(getattr(kv.watches[0], who), "after", crash)
        seq.resume()
        with pytest.raises(IllegalTransition):
            seq.resume()
        assert seq.state_name == "ACTIVE"
        assert kv.watches[0].lost == [f"{who}: KeyError('a bug of the look')"]
    assert len(caplog.records) == 1


def test_a_look_that_is_cut_short_does_not_judge_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the call did is not known to it; that is no violation of the call after it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Manager(small(), HostDevice(), debug=True) as kv:
        seq = kv.create()
        laws = kv.watches[0].laws
        assert laws is not None
        with monkeypatch.context() as patched:
            patched.setattr(laws, "after", interrupt)
            with pytest.raises(KeyboardInterrupt):
                seq.resume()
        assert seq.state_name == "ACTIVE"
        with pytest.raises(IllegalTransition):
            seq.resume()
        kv.settle(kv.step(kv.batch([seq])))
        assert laws.seen is not None


def test_a_law_that_does_not_hold_is_raised_as_ever() -> None:
    with Manager(small(), HostDevice(), debug=True) as kv:
        seq = written(kv)
        kv.gpu.counts[0] += 1
        with pytest.raises(LawViolation, match="law 1 "):
            seq.close()
        kv.gpu.counts[0] -= 1


def test_a_listener_that_fails_changes_no_result(
    open_manager: Open, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_manager()

    class Broken:
        def stored(self, *_: object) -> None:
            raise OSError("the router is gone")

        removed = cleared = stored

    seq, router = written(kv), kv.events()
    broken = Broken()
    kv.reuse.index.listen(broken)
    seq.commit(IDS)
    kv.clear_reuse()
    assert seq.committed_tokens == 6
    assert len(caplog.records) == 1
    assert sum(len(batch.events) for _, batch in router.drain()) == 2


WRONG: Final[dict[str, Callable[[Manager, Any], Any]]] = {
    "create salt": lambda kv, seq: kv.create([1, 2], salt=cast("Any", "text")),
    "create tokens": lambda kv, seq: kv.create(np.array([1.5, 2.5])),
    "create extras": lambda kv, seq: kv.create([1, 2], extra_keys=cast("Any", {0: 5})),
    "resume stream": lambda kv, seq: kv.create().resume("no stream"),
    "suspend event": lambda kv, seq: seq.suspend("no event"),
    "settle accepted": lambda kv, seq: kv.settle(kv.step(kv.batch([seq])), ["many"]),
    "another's": lambda kv, seq: kv.stop_committing(_other()),
    "resize": lambda kv, seq: seq.resize(-1),
    "step": lambda kv, seq: kv.step(kv.batch([seq]), [1, 2, 3]),
}
_OTHERS: Final[list[Manager]] = []


def _other() -> Sequence:
    """The first of another manager, which has the number of our own first."""
    if not _OTHERS:
        _OTHERS.append(Manager(small(), HostDevice()))
        _OTHERS[0].create()
    return _OTHERS[0].sequences[1]


@pytest.fixture(scope="module", autouse=True)
def _close_others() -> Iterator[None]:
    yield
    for kv in _OTHERS:
        kv.close()


@pytest.mark.parametrize("name", WRONG)
def test_the_recorder_changes_no_outcome_and_writes_what_was_refused(
    name: str, tmp_path: Any
) -> None:
    came, lines = [], list[bytes]()
    for record in (None, lines.append):
        with Manager(small(), HostDevice(), record=record) as kv:
            seq = written(kv)
            with pytest.raises((KvStateError, ValueError, TypeError)) as refused:
                WRONG[name](kv, seq)
            came.append((type(refused.value), str(refused.value)))
            assert not kv.watches or kv.watches[0].lost == []
    assert came[0][0] is came[1][0]
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(lines))
    header, calls = trace.read(path)
    if issubclass(came[0][0], KvStateError):
        told = calls[-1]
        assert told.error == came[0][0].__name__
        if isinstance(told, trace.Refused):
            assert told.name == name.split()[0].replace("another's", "stop_committing")
    play(header, calls, lambda streams, seed: HostDevice(streams=streams, seed=seed))


# What is refused is refused before anything is waited for.


def unchanged(kv: Manager, call: Callable[[], object], kind: type[KvStateError]) -> str:
    """The call is refused, and nothing at all has happened; why."""
    before, calls, ended = view(kv), dict(kv.device.calls), len(kv.flight.ended)
    with pytest.raises(kind) as refused:
        call()
    assert view(kv) == before
    assert dict(kv.device.calls) == calls
    assert len(kv.flight.ended) == ended
    return str(refused.value)


def test_a_later_step_is_refused_before_a_load_is_delivered(open_manager: Open) -> None:
    kv = open_manager(HostDevice(streams="latest"), frames=16)
    seq, other = written(kv), written(kv)
    seq.suspend()
    seq.resume()  # waits for the copy out, and then issues one back
    assert seq.loading
    batch = kv.batch([seq, other])
    first, later = kv.step(batch), kv.step(batch)
    assert "settle the earlier step first" in unchanged(
        kv, lambda: kv.settle(later), IllegalTransition
    )
    why = unchanged(kv, lambda: kv.settle(first, [1, 2]), ArgumentError)
    assert "accepted[1] is 2" in why
    kv.settle(first)
    kv.settle(later)
    assert (seq.length_tokens, seq.loading) == (8, False)


LEAVE: Final[dict[str, Callable[[Sequence, Any], None]]] = {
    "suspend": Sequence.suspend, "drop": Sequence.drop, "close": Sequence.close,
}  # fmt: skip


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("state", ["CREATED", "ACTIVE", "loading", "SUSPENDED", "DROPPED"])
@pytest.mark.parametrize("leave", LEAVE)
def test_what_is_no_event_is_refused_first(leave: str, state: str, wrapped: bool) -> None:
    inner = HostDevice(streams="latest")
    kv = Manager(small(), inner, order=wrapped)
    with closing(HostDevice()) as other, kv:
        seq = kv.create(max_tokens=16) if state == "CREATED" else written(kv)
        if state in ("SUSPENDED", "loading"):
            seq.suspend()
        if state == "loading":
            seq.resume()
        if state == "DROPPED":
            seq.drop()
        for event in (object(), 7, True, kv, "event", other.record(None)):
            unchanged(kv, partial(LEAVE[leave], seq, event), DeviceError)
        seq.close(kv.device.record(None))


@pytest.mark.parametrize("name", ["fork", "dummy", "resume"])
def test_what_is_no_stream_is_refused_first(name: str, open_manager: Open) -> None:
    kv = open_manager()
    seq, fresh = written(kv), kv.create()
    calls: dict[str, Callable[[], object]] = {
        "fork": lambda: seq.fork(stream="no stream"),
        "dummy": lambda: kv.dummy(4, "no stream"),
        "resume": lambda: fresh.resume("no stream"),
    }
    unchanged(kv, calls[name], DeviceError)
    assert kv.create().uid == fresh.uid + 1, "none was made and given up again"


def test_a_step_that_is_refused_has_copied_nothing_out(open_manager: Open) -> None:
    kv = open_manager(write_through="on_commit")
    seq = written(kv)
    seq.commit(IDS)
    batch = kv.batch([seq])
    unchanged(kv, lambda: kv.step(batch, [1, 2]), ArgumentError)
    unchanged(kv, lambda: kv.step(batch, 11), ArgumentError)
    idle = kv.create()
    unchanged(kv, lambda: kv.step(kv.batch([seq, idle])), IllegalTransition)
    kv.settle(kv.step(batch))
    assert kv.device.calls["copy"] == 1


def test_counts_that_were_cut_short_are_not_used(
    open_manager: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of the batch are of one call, whatever comes in between."""
    kv = open_manager()
    seq = written(kv)
    batch = kv.batch([seq])
    kv.settle(kv.step(batch, 1))

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_name == "counts" and event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == nth:
                raise KeyboardInterrupt
        return interrupt

    for nth in range(1, 12):
        lines = list[int]()
        sys.settrace(interrupt)
        try:
            kv.step(batch, 0)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        for step in tuple(kv.flight.steps.values()):
            kv.settle(step)
        length = seq.length_tokens
        if nth % 2:
            kv.settle(kv.step(batch, 1))
            assert seq.length_tokens == length + 1
