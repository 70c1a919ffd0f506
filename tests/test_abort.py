"""Abort anywhere: a sequence may leave in every state, with copies on the way in either direction,
and those may end in every order, well or not, before it leaves and after.

Made from three lists: how a sequence gets somewhere, how it leaves, and the orders of what is on
the way. After every call all laws hold and all bytes are read back; the row of a closed sequence is
used again at once, while copies of its former owner are still on the way. Then what callers and
devices get wrong: each is refused by name, or ignored, and a view of everything is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, Final

import pytest

from kvstate import trace
from kvstate.campaign.player import Player
from kvstate.config import Config
from kvstate.device import Completion
from kvstate.errors import ArgumentError, DeviceError, IllegalTransition, KvStateError
from kvstate.gpu import HostDevice, open_device
from kvstate.manager import Manager
from kvstate.sequence import Sequence
from kvstate.spec.sequence import SEQUENCE
from kvstate.view import view
from tests.conftest import Open
from tests.corpus.case import config, grew, left_on_host, opened, said
from tests.faults.scenarios import Program

IDS: Final = list(range(1, 7))
MORE: Final = [*IDS, 9]
PLAIN: Final = config(frames=12, slots=16)
NO_HOST: Final = config(frames=12, slots=0, spans="off")
MIRRORED: Final = config(frames=12, slots=16, write_through="on_commit")

SETUPS: Final[dict[str, tuple[Config, Program]]] = {
    "CREATED": (PLAIN, (trace.Create(seq=1, max_tokens=16, prompt=MORE),)),
    "ACTIVE": (PLAIN, (*said(1, IDS),)),
    "ACTIVE, a step in flight": (
        PLAIN, (*said(1, IDS), trace.Step(step=2, seqs=[1], tokens=[2])),
    ),
    "ACTIVE, loading what it had": (
        PLAIN, (*said(1, IDS), trace.Suspend(seq=1), trace.Resume(seq=1)),
    ),
    "ACTIVE, loading, a step in flight": (
        PLAIN,
        (*said(1, IDS), trace.Suspend(seq=1), trace.Resume(seq=1),
         trace.Step(step=2, seqs=[1], tokens=[2])),
    ),
    "ACTIVE, loading a hit from the host": (
        PLAIN, (*left_on_host(2, IDS), *opened(1, MORE)),
    ),
    "ACTIVE, copying a hit from another": (NO_HOST, (*said(2, IDS), *opened(1, MORE))),
    "ACTIVE, copied from by another": (NO_HOST, (*said(1, IDS), *opened(2, MORE))),
    "ACTIVE, being mirrored": (MIRRORED, (*said(1, IDS), trace.Poll(ended=[]))),
    "ACTIVE, mirrored and copied from": (
        config(frames=12, slots=16, write_through="on_commit", spans="off"),
        (*said(1, IDS), trace.Poll(ended=[]), *opened(2, MORE)),
    ),
    "SUSPENDED": (PLAIN, (*said(1, IDS), trace.Suspend(seq=1), trace.Trim())),
    "SUSPENDED, on the way out": (PLAIN, (*said(1, IDS), trace.Suspend(seq=1))),
    "SUSPENDED, on the way out, a step in flight": (
        PLAIN,
        (*said(1, IDS), trace.Step(step=2, seqs=[1], tokens=[2]), trace.Suspend(seq=1)),
    ),
    "DROPPED": (PLAIN, (*said(1, IDS), trace.Drop(seq=1))),
    "DROPPED, on the way out": (PLAIN, (*said(1, IDS), trace.Suspend(seq=1), trace.Drop(seq=1))),
    "DROPPED, on the way in": (
        PLAIN, (*said(1, IDS), trace.Suspend(seq=1), trace.Resume(seq=1), trace.Drop(seq=1)),
    ),
    "CLOSING": (
        PLAIN, (*said(1, IDS), trace.Step(step=2, seqs=[1], tokens=[2]), trace.Close(seq=1)),
    ),
}  # fmt: skip
"""How sequence 1 gets into every state, with what on the way."""

LEAVING: Final[dict[str, Program]] = {
    "close": (trace.Close(seq=1),),
    "close after an event": (trace.Close(seq=1, after=True),),
    "drop": (trace.Drop(seq=1), trace.Close(seq=1)),
    "drop after an event": (trace.Drop(seq=1, after=True),),
    "refused room": (
        *opened(8), *grew(8, 16), *opened(9), *grew(9, 16),
        trace.Resume(seq=1), trace.Resize(seq=1, tokens=16), trace.Suspend(seq=1),
        trace.Close(seq=1),
    ),
}  # fmt: skip

Ends = list[tuple[int, bool]]


def orders(tokens: list[int]) -> Iterator[tuple[Ends, Ends]]:
    """What ends before the sequence leaves, and what of the rest after: in every order, and all
    well, all failed, and one of each."""
    for order in permutations(tokens):
        for split in range(len(order) + 1):
            for failing in {(), tuple(order), order[:1], order[1:]}:
                ends = [(token, token not in failing) for token in order]
                yield ends[:split], ends[split:]


def test_every_state_of_a_sequence_is_left() -> None:
    found, on_the_way = set[str](), Counter[str]()
    for wanted, (setup, program) in SETUPS.items():
        player = arrived(setup, program)
        one = player.kv.sequences[min(player.kv.sequences)]
        state = wanted.partition(",")[0]
        assert state in {seq.state_name for seq in player.kv.sequences.values()}, one
        found.add(state)
        for copy in player.kv.flight.transfers.values():
            kinds = ("outward", "inward", "keeps", "onboards")
            on_the_way.update(kind for kind in kinds if getattr(copy, kind))
        player.finish()
    assert found == {state.name for state in SEQUENCE.states if not state.terminal}
    assert set(on_the_way) == {"outward", "inward", "keeps", "onboards"}


@pytest.mark.parametrize("leaving", LEAVING)
@pytest.mark.parametrize("setup", SETUPS)
def test_abort(setup: str, leaving: str) -> None:
    runs = 0
    with_copies = arrived(*SETUPS[setup])
    pending = sorted(with_copies.kv.flight.transfers)
    with_copies.finish()
    for before, after in orders(pending):
        for late_first in (False, True):
            player = arrived(*SETUPS[setup])
            abort(player, LEAVING[leaving], before, after, late_first=late_first)
            runs += 1
    assert runs >= 2


def arrived(setup: Config, program: Program) -> Player:
    """A player in whose device everything waits to be told to end."""
    header = trace.Header(
        kvstate_trace=trace.VERSION, config=setup, streams="adversarial", strict=False
    )
    player = Player(header, HostDevice(streams="adversarial", seed=3))
    for call in program:
        player.apply(call)
    return player


def abort(player: Player, program: Program, before: Ends, after: Ends, *, late_first: bool) -> None:
    """The sequence leaves between the ends of copies; somebody gets its row; all others end."""
    for end in before:
        player.apply(trace.Poll(ended=[end]))
    known = {token for token, _ in before + after}
    for call in program:
        player.apply(call)
    for call in (*opened(5, MORE, stream=1), *grew(5, 1)):
        player.apply(call)
    fresh = [(token, True) for token in player.kv.flight.transfers if token not in known]
    for end in fresh + after if late_first else after + fresh:
        player.apply(trace.Poll(ended=[end]))
    for step in list(player.steps):
        player.apply(trace.Settle(step=step))
    uids = {played.seq.uid for played in player.seqs.values()}
    assert uids == set(player.kv.sequences), "who has left is gone"
    player.finish()


# What a device gets wrong.


class Stutters(HostDevice):
    """A device that reports ends again, and ends of copies that nobody issued."""

    again: tuple[Completion, ...] = ()
    silent = False
    """It reports nothing else."""

    def poll(self) -> list[Completion]:
        return [*([] if self.silent else super().poll()), *self.again]


@pytest.mark.parametrize("ok", [True, False])
def test_ends_that_come_twice_or_of_nothing_change_nothing(open_manager: Open, ok: bool) -> None:
    device = Stutters()
    kv = open_manager(device, write_through="on_commit")
    held, parked, closed = (written(kv, at) for at in range(3))
    held.suspend()
    parked.suspend()
    parked.resume()
    closed.close()
    kv.poll()
    kv.poll()
    young = kv.create(range(9), 16)
    young.resume()
    kv.poll()
    held.resume()
    (pending,) = kv.flight.transfers
    tokens = [token for token in range(pending + 3) if token != pending]
    assert len(tokens) > 6
    device.silent, device.again = True, tuple(Completion(token, ok) for token in tokens)
    before, counted = view(kv), kv.counters["late_completions"]
    kv.poll()
    assert view(kv) == before
    assert kv.counters["late_completions"] == counted + len(tokens)
    device.silent, device.again = False, (Completion(pending, not ok),)
    kv.poll()
    assert kv.counters["late_completions"] == counted + len(tokens) + 1
    assert held.length_tokens == 6
    assert not held.loading


# What callers get wrong.


def written(kv: Manager, key: int = 0) -> Sequence:
    seq = kv.create(max_tokens=16)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), 6))
    seq.commit([key] * 4)
    return seq


USES: Final[dict[str, Callable[[Manager, Sequence], object]]] = {
    "resume": lambda kv, seq: kv.resume(seq),
    "fork": lambda kv, seq: kv.fork(seq),
    "resize": lambda kv, seq: kv.resize(seq, 8),
    "rewind": lambda kv, seq: kv.rewind(seq, 0),
    "step": lambda kv, seq: kv.step(kv.batch([seq])),
    "step with another": lambda kv, seq: kv.step(kv.batch([*kv.sequences.values(), seq])),
    "commit": lambda kv, seq: kv.commit(seq, []),
    "commit_each": lambda kv, seq: kv.commit_each(kv.batch([seq]), [1]),
    "stop_committing": lambda kv, seq: kv.stop_committing(seq),
    "suspend": lambda kv, seq: kv.suspend(seq),
    "drop": lambda kv, seq: kv.drop(seq),
    "close": lambda kv, seq: kv.close_sequence(seq),
    "close after an event": lambda kv, seq: kv.close_sequence(seq, kv.device.record(None)),
    "tensors": lambda kv, seq: kv.tensors(seq, 0),
    "tensors_all": lambda kv, seq: kv.tensors_all(seq),
}


@pytest.mark.parametrize("use", USES)
def test_a_closed_sequence_whose_row_is_used_again_is_refused(open_manager: Open, use: str) -> None:
    kv = open_manager()
    gone = written(kv)
    row = gone.row
    gone.close()
    heir = written(kv, 1)
    assert heir.row == row
    unchanged(kv, lambda: USES[use](kv, gone), IllegalTransition, "CLOSED")
    unchanged(kv, lambda: USES[use](kv, gone), IllegalTransition, "CLOSED")


@pytest.mark.parametrize("use", [*USES, "add", "settle"])
def test_what_another_manager_made_is_refused(open_manager: Open, use: str) -> None:
    """Both have a sequence of the same number in the same row: it is not the number that counts."""
    kv, other = open_manager(), open_manager()
    own, strange = written(kv), written(other)
    batch, step = kv.batch([own]), other.step(other.batch([strange]))
    kv.step(batch)
    uses = USES | {
        "add": lambda kv, seq: batch.add(seq),
        "settle": lambda kv, seq: kv.settle(step),
        "step with another": lambda kv, seq: kv.step(other.batch([seq])),
        "commit_each": lambda kv, seq: kv.commit_each(other.batch([seq]), [1]),
    }
    before = view(other)
    unchanged(kv, lambda: uses[use](kv, strange), ArgumentError, "the manager that made it")
    assert view(other) == before
    assert [*batch] == [own]


def test_a_step_is_settled_once(open_manager: Open) -> None:
    kv = open_manager()
    seq = written(kv)
    step = kv.step(kv.batch([seq]))
    kv.settle(step)
    unchanged(kv, lambda: kv.settle(step), IllegalTransition, "SETTLED")


FOREIGN: Final[dict[str, Callable[[Manager, Sequence, Any, Any], object]]] = {
    "suspend": lambda kv, seq, event, stream: kv.suspend(seq, event),
    "drop": lambda kv, seq, event, stream: kv.drop(seq, event),
    "close": lambda kv, seq, event, stream: kv.close_sequence(seq, event),
    "fork": lambda kv, seq, event, stream: kv.fork(seq, None, stream),
    "resume what is new": lambda kv, seq, event, stream: kv.resume(
        next(one for one in kv.sequences.values() if one.state_name == "CREATED"), stream
    ),
    "resume what was suspended": lambda kv, seq, event, stream: kv.resume(
        next(one for one in kv.sequences.values() if one.state_name == "SUSPENDED"), stream
    ),
    "a dummy": lambda kv, seq, event, stream: kv.dummy(4, stream),
}


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("use", FOREIGN)
def test_what_is_of_another_device_is_refused(device: str, use: str) -> None:
    with (
        Manager(config(frames=12) if device == "host" else big(), open_device(device), debug=True)
        as kv, Manager(kv.config, open_device(device)) as other,
    ):  # fmt: skip
        seq, held = written(kv), written(kv, 1)
        kv.create(max_tokens=4)
        held.suspend()
        kv.poll()
        stream = other.device.stream()  # type: ignore[attr-defined]
        event = other.device.record(stream)
        unchanged(kv, lambda: FOREIGN[use](kv, seq, event, stream), DeviceError, "device")
        seq.close(after=kv.device.record(None))


def big() -> Config:
    """The same for a card: frames of 2 MiB."""
    from tests.faults.scenarios import Scenario

    return Scenario("", config(frames=12), ()).header(2 << 20, "eager").config


def unchanged(
    kv: Manager, call: Callable[[], object], error: type[KvStateError], name: str
) -> None:
    """The call raises that error, which says the name, and everything is as it was."""
    before = view(kv)
    with pytest.raises(error, match=name):
        call()
    assert view(kv) == before
