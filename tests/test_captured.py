"""Streams that are being captured into CUDA graphs: what is launched there does not run, and an
event there never passes. So a call that would launch there, or wait for it, is refused by name
before anything has changed, and all other calls go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from kvstate import Manager, Sequence, StreamCaptured, trace
from kvstate.campaign.player import Player
from kvstate.device import Stream
from kvstate.gpu import HostDevice
from kvstate.view import view
from tests.conftest import Open, small

FIRST: Final = list(range(12))


@contextmanager
def capturing(kv: Manager, *streams: Stream) -> Iterator[None]:
    """Streams are being captured meanwhile."""
    device: Any = kv.device
    device.capture(streams)
    yield
    device.capture(())


def stream_of(kv: Manager) -> Stream:
    device: Any = kv.device
    return device.stream()


def begun(kv: Manager, stream: Stream, tokens: int = 8) -> Sequence:
    """A sequence on a stream, with settled tokens that are committed."""
    seq = kv.create(FIRST, 16)
    seq.resume(stream)
    kv.settle(kv.step(kv.batch([seq]), tokens - seq.length_tokens))
    seq.commit(FIRST[seq.committed_tokens : tokens])
    return seq


REFUSED: Final[dict[str, Callable[[Manager, Sequence, Sequence, Stream], object]]] = {
    "resume": lambda kv, seq, waiting, stream: waiting.resume(stream),
    "fork": lambda kv, seq, waiting, stream: seq.fork(stream=stream),
    "dummy": lambda kv, seq, waiting, stream: kv.dummy(4, stream),
    "suspend": lambda kv, seq, waiting, stream: seq.suspend(),
    "drop": lambda kv, seq, waiting, stream: seq.drop(),
    "close": lambda kv, seq, waiting, stream: seq.close(),
    "clear_reuse": lambda kv, seq, waiting, stream: kv.clear_reuse(),
}


@pytest.mark.parametrize("streams", ["eager", "latest"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_would_launch_there_or_wait_is_refused(
    open_manager: Open, name: str, streams: str
) -> None:
    kv = open_manager(HostDevice(streams=streams), spans="off")
    stream = stream_of(kv)
    seq, waiting = begun(kv, stream), kv.create([9, 9, 9], 16)
    before = view(kv)
    with (
        capturing(kv, stream),
        pytest.raises(StreamCaptured, match=r"stream \d+ is being captured into a graph; end"),
    ):
        REFUSED[name](kv, seq, waiting, stream)
    if name != "clear_reuse":
        assert view(kv) == before
    REFUSED[name](kv, seq, waiting, stream)


def test_a_rewind_that_moves_is_refused_and_another_is_not(open_manager: Open) -> None:
    kv = open_manager(frames=16, slots=0, spans="all")
    stream = stream_of(kv)
    first, second = begun(kv, stream), begun(kv, stream, 9)
    assert second.shared_tokens == 8
    with capturing(kv, stream):
        second.rewind(8)
        before = view(kv)
        with pytest.raises(StreamCaptured):
            second.rewind(3)
        assert view(kv) == before
    second.rewind(3)
    assert (first.length_tokens, second.length_tokens) == (8, 3)


def test_a_call_that_names_when_goes_on(open_manager: Open) -> None:
    """Its caller's event is all that a sequence waits for then."""
    kv = open_manager()
    device: Any = kv.device
    stream = stream_of(kv)
    seqs = [begun(kv, stream) for _ in range(3)]
    events = [device.record(stream) for _ in seqs]
    with capturing(kv, stream):
        seqs[0].suspend(after=events[0])
        seqs[1].drop(after=events[1])
        seqs[2].close(after=events[2])
        kv.poll()
    assert [seq.state_name for seq in seqs] == ["SUSPENDED", "DROPPED", "CLOSED"]


def test_sequences_on_other_streams_go_on(open_manager: Open) -> None:
    kv = open_manager(HostDevice(streams="latest"), frames=16, slots=32)
    stream = stream_of(kv)
    seq, other = begun(kv, stream), begun(kv, None)
    with capturing(kv, stream):
        kv.settle(kv.step(kv.batch([seq, other]), 2))
        other.suspend()
        kv.wait(other)
        other.resume()
        other.fork().close()
        other.close()
        kv.poll()
    assert seq.length_tokens == 10


def test_memory_is_not_taken_from_under_what_cannot_be_waited_for(open_manager: Open) -> None:
    """A reclaim needs a quiesce, and the end of what is on a captured stream cannot be had."""
    kv = open_manager(frames=4, slots=0, adopt=False)
    stream = stream_of(kv)
    begun(kv, stream, 4)
    begun(kv, None, 12).close()
    other = kv.create([7, 7], 16)
    other.resume()
    before = view(kv)
    with capturing(kv, stream), pytest.raises(StreamCaptured, match="quiesce"):
        other.resize(12)
    assert view(kv) == before
    other.resize(12)
    assert other.capacity_tokens == 12


def test_a_manager_does_not_end_meanwhile() -> None:
    device = HostDevice()
    kv = Manager(small(), device)
    stream = device.stream()
    seq = begun(kv, stream)
    with capturing(kv, stream):
        with pytest.raises(StreamCaptured):
            kv.close()
        assert not kv.closed
        assert seq.state_name == "ACTIVE"
    kv.close()
    assert device.closed


def test_a_poisoned_manager_keeps_its_memory_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice()
    kv = Manager(small(), device)
    stream = device.stream()
    begun(kv, stream)
    kv.life.poison("a test")
    with capturing(kv, stream):
        kv.close()
        assert device.kept
        assert not device.closed
    assert "stream 1 captured" in caplog.text
    device.close()
    assert device.closed


def test_programs_say_what_is_captured() -> None:
    header = trace.Header(kvstate_trace=trace.VERSION, config=small(), strict=False)
    player = Player(header, HostDevice())
    calls: list[trace.AnyCall] = [
        trace.Create(seq=1, max_tokens=8),
        trace.Resume(seq=1, stream=1, captured=[2]),
        trace.Suspend(seq=1, captured=[1]),
        trace.Suspend(seq=1),
        trace.Resume(seq=1, stream=2, captured=[1, 2]),
    ]
    assert [player.apply(call).error for call in calls] == [
        None, None, "StreamCaptured", None, "StreamCaptured",
    ]  # fmt: skip
    player.finish()
