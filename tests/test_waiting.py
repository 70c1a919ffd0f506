"""Waiting: a call waits for the copies that are in its way and for no others, ends can be named,
and so managers whose devices differ in speed come to the same.

Devices run their work as late as they may (`latest`) unless it is said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import numpy as np
import pytest
from attrs import evolve
from msgspec.structs import replace

from kvstate import Manager, Sequence, trace
from kvstate.campaign.player import Look, Player
from kvstate.campaign.rules import draw, draw_config, draw_weights
from kvstate.device import Completion
from kvstate.errors import ArgumentError, DeviceFault, IllegalTransition, KvStateError
from kvstate.gpu import HostDevice, NullDevice
from kvstate.spec.facts import View
from kvstate.view import view
from tests.conftest import Open, small
from tests.device.factories import segments

LATE: Final = "latest"
PROMPT: Final = list(range(9))


def late(open_manager: Open, **changes: object) -> Manager:
    options = {"frames": 16, "slots": 32} | changes
    return open_manager(HostDevice(streams=LATE), **options)


def written(kv: Manager, tokens: int, prompt: list[int] | None = None) -> Sequence:
    """A sequence with tokens that are settled."""
    seq = kv.create(prompt, 16)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), tokens))
    return seq


def loading(kv: Manager) -> Sequence:
    """A sequence with eight tokens, on their way back to the GPU."""
    seq = written(kv, 8)
    seq.suspend()
    kv.wait(seq)
    seq.resume()
    assert seq.loading
    return seq


WAITING: Final[dict[str, Callable[[Manager, Sequence], object]]] = {
    "rewind": lambda kv, seq: seq.rewind(4),
    "fork": lambda kv, seq: seq.fork(),
    "commit": lambda kv, seq: seq.commit([1, 2]),
    "commit_each": lambda kv, seq: kv.commit_each(kv.batch([seq]), [1]),
    "settle": lambda kv, seq: kv.settle(kv.step(kv.batch([seq]), 1)),
    "suspend": lambda kv, seq: seq.suspend(),
    "wait": lambda kv, seq: kv.wait(seq),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_call_waits_for_its_own_load_and_for_no_other(open_manager: Open, name: str) -> None:
    kv = late(open_manager)
    first, other = loading(kv), loading(kv)
    WAITING[name](kv, first)
    assert not first.loading
    assert other.loading
    assert "quiesces" not in kv.stats().done


@pytest.mark.parametrize("name", [name for name in WAITING if name not in ("settle", "wait")])
def test_what_is_illegal_anyway_waits_for_nothing(open_manager: Open, name: str) -> None:
    kv = late(open_manager)
    seq = loading(kv)
    wrong: dict[str, Callable[[], object]] = {
        "rewind": lambda: seq.rewind(9),
        "fork": lambda: seq.fork(7),
        "commit": lambda: seq.commit(range(9)),
        "commit_each": lambda: kv.commit_each(kv.batch([seq, kv.create()]), [1, 1]),
        "suspend": lambda: kv.create().suspend(),
    }
    with pytest.raises((ArgumentError, IllegalTransition)):
        wrong[name]()
    assert seq.loading


def test_resume_waits_for_its_own_copy_out_alone(open_manager: Open) -> None:
    kv = late(open_manager)
    first, other = written(kv, 8), written(kv, 8)
    other.suspend()
    first.suspend()
    first.resume()
    assert other.writing
    assert "quiesces" not in kv.stats().done


def test_a_load_that_fails_while_it_is_waited_for(open_manager: Open) -> None:
    kv = late(open_manager)
    seq = written(kv, 8)
    seq.suspend()
    kv.wait(seq)
    kv.device.fail_next("complete")  # type: ignore[attr-defined]
    seq.resume()
    with pytest.raises(IllegalTransition, match="sequence 1: rewind is illegal in state SUSPENDED"):
        seq.rewind(0)
    assert seq.state_name == "SUSPENDED"


def test_a_copy_behind_a_late_event_holds_no_other_back(open_manager: Open) -> None:
    """Neither a suspend that waits for its caller, nor a fence."""
    kv = late(open_manager)
    device, streams = kv.device, [kv.device.stream() for _ in range(2)]  # type: ignore[attr-defined]
    first, gone, second = written(kv, 8), written(kv, 8), written(kv, 8)
    device.write(streams[0], segments())  # type: ignore[attr-defined]
    first.suspend(after=device.record(streams[0]))
    gone.close(after=device.record(streams[0]))
    second.suspend()
    assert kv.wait(second) == [Completion(3, True)]
    assert device.streams.pending  # type: ignore[attr-defined]


# Ends that are named.


def test_named_ends_are_delivered_in_that_order_and_no_others(open_manager: Open) -> None:
    kv = late(open_manager)
    seqs = [written(kv, 4) for _ in range(3)]
    for seq in seqs:
        seq.suspend()
    assert kv.ended() == []
    assert kv.poll(deliver=[]) == []
    assert kv.poll(deliver=[3, 1]) == [Completion(3, True), Completion(1, True)]
    assert [seq.writing for seq in seqs] == [False, True, False]
    kv.device.streams.drain()  # type: ignore[attr-defined]
    assert kv.ended() == [2]
    assert kv.ended() == [2]
    assert kv.poll() == [Completion(2, True)]


@pytest.mark.parametrize("deliver", [[2], [1, 1], [0], [-1], [True], ["1"], 2, {1}])
def test_what_is_not_in_flight_cannot_be_named(open_manager: Open, deliver: object) -> None:
    kv = late(open_manager)
    written(kv, 4).suspend()
    before = view(kv)
    with pytest.raises(ArgumentError, match="deliver"):
        kv.poll(deliver=deliver)  # type: ignore[arg-type]
    assert view(kv) == before


def test_a_copy_that_never_ends_is_named_when_it_is_waited_for(open_manager: Open) -> None:
    kv = late(open_manager)
    seq = written(kv, 4)
    kv.device.fail_next("hang")  # type: ignore[attr-defined]
    seq.suspend()
    with pytest.raises(DeviceFault, match="copies 1 have not ended"):
        kv.wait(seq)
    kv.device.wake()  # type: ignore[attr-defined]


def test_a_record_of_waits_plays_again() -> None:
    lines = list[bytes]()
    with Manager(small(16, 32), HostDevice(streams=LATE), record=lines.append) as kv:
        seqs = [written(kv, 4) for _ in range(3)]
        for seq in seqs:
            seq.suspend()
        kv.poll(deliver=np.array([2, 1]))
        kv.wait(seqs[2])
        with pytest.raises(ArgumentError):
            kv.poll(deliver=[9])
    calls = [trace.decode_call(line, 0) for line in lines[1:]]
    told = [call for call in calls if isinstance(call, trace.Poll | trace.Wait | trace.Refused)]
    assert [type(call).__name__ for call in told] == ["Poll", "Wait", "Refused"]
    assert told[0] == trace.Poll(deliver=[2, 1], ended=[])
    header = trace.Header(kvstate_trace=trace.VERSION, config=small(16, 32))
    Player(header, HostDevice(streams="adversarial")).play(calls)


# Managers in step.


class Ranks:
    """Two managers that are asked for the same, on devices whose copies end at different times."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        header = trace.Header(
            kvstate_trace=trace.VERSION, config=draw_config(self.random), strict=False
        )
        self.players = [
            Player(header, NullDevice(streams="adversarial", seed=at), Look.LAWS) for at in range(2)
        ]
        self.weights = draw_weights(self.random)
        self.delivered = 0

    def go_on(self, *, agree: bool) -> bool:
        """The next call on both, and a poll; whether they still are alike."""
        call = replace(
            draw(self.players[0], self.random, self.weights), fail={}, memory=None, captured=[]
        )
        if not isinstance(call, trace.Poll):
            self._apply(call)
        self._apply(trace.Poll(deliver=self._common()) if agree else trace.Poll())
        return seen(self.players[0].kv) == seen(self.players[1].kv)

    def _apply(self, call: trace.AnyCall) -> None:
        for player in self.players:
            player.apply(replace(call, seed=self.random.getrandbits(32)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for player in self.players:
            player.kv.close()

    def _common(self) -> list[int]:
        """What has ended on both."""
        ended = [player.kv.ended() for player in self.players]
        common = [token for token in ended[0] if token in ended[1]]
        self.delivered += len(common)
        return common


def seen(kv: Manager) -> View:
    """The books. Which work still runs is the device's affair."""
    return evolve(view(kv), ledger=evolve(kv.device.ledger(), work=()))


def test_managers_that_agree_on_the_ends_come_to_the_same() -> None:
    delivered = 0
    for seed in range(12):
        with Ranks(seed) as ranks:
            assert all(ranks.go_on(agree=True) for _ in range(100)), seed
            delivered += ranks.delivered
    assert delivered > 50


def test_managers_that_do_not_agree_go_apart() -> None:
    with Ranks(3) as ranks:
        assert not all(ranks.go_on(agree=False) for _ in range(100))


def test_an_error_of_a_wait_names_the_sequence(open_manager: Open) -> None:
    kv = late(open_manager)
    with pytest.raises(KvStateError, match="sequence is None"):
        kv.wait(None)  # type: ignore[arg-type]
