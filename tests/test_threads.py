"""Threads: one owns a manager; what crosses to another is right in every interleaving."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvstate import Manager
from kvstate import Sequence as Sequence_
from kvstate.campaign import fuzz
from kvstate.cli import open_named
from kvstate.errors import IllegalTransition
from kvstate.events import encode
from kvstate.gpu import HostDevice
from kvstate.tensors import tensors_held
from tests.conftest import small
from tests.interleave import Job, interleave, interleavings

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def elsewhere(call: Callable[[], object]) -> BaseException | None:
    """What a call raises on a thread of its own."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="scheduler")
    thread.start()
    thread.join()
    return raised[0] if raised else None


# Who may call.

CALLS: dict[str, Callable[[Manager, Any, Any, Any], object]] = {
    "create": lambda kv, *_: kv.create(IDS, 16),
    "fork": lambda kv, seq, *_: seq.fork(),
    "dummy": lambda kv, *_: kv.dummy(4),
    "resume": lambda kv, seq, *_: seq.resume(),
    "resize": lambda kv, seq, *_: seq.resize(16),
    "rewind": lambda kv, seq, *_: seq.rewind(0),
    "batch": lambda kv, seq, *_: kv.batch([seq]),
    "step": lambda kv, seq, batch, _: kv.step(batch),
    "settle": lambda kv, seq, batch, _: kv.settle(next(iter(kv.flight.steps.values()))),
    "commit": lambda kv, seq, *_: seq.commit([7]),
    "commit_each": lambda kv, seq, batch, _: kv.commit_each(batch, [7]),
    "stop_committing": lambda kv, seq, *_: seq.stop_committing(),
    "suspend": lambda kv, seq, *_: seq.suspend(),
    "drop": lambda kv, seq, *_: seq.drop(),
    "close_sequence": lambda kv, seq, *_: seq.close(),
    "poll": lambda kv, *_: kv.poll(),
    "ended": lambda kv, *_: kv.ended(),
    "wait": lambda kv, seq, *_: kv.wait(seq),
    "trim": lambda kv, *_: kv.trim(),
    "clear_reuse": lambda kv, *_: kv.clear_reuse(),
    "probe_reuse": lambda kv, *_: kv.probe_reuse(IDS),
    "admits": lambda kv, *_: kv.admits(4),
    "fits": lambda kv, *_: kv.fits(4),
    "largest_max_tokens": lambda kv, *_: kv.largest_max_tokens(),
    "tensors": lambda kv, seq, *_: kv.tensors(seq, 0),
    "tensors_all": lambda kv, seq, *_: kv.tensors_all(seq),
    "reads": lambda kv, seq, *_: kv.reads([(seq, 1)]),
    "events": lambda kv, *_: kv.events(),
    "stats": lambda kv, *_: kv.stats(),
    "check_laws": lambda kv, *_: kv.check_laws(),
    "close": lambda kv, *_: kv.close(),
}
HANDLES: dict[str, Callable[[Manager, Any, Any, Any], object]] = {
    "add": lambda kv, seq, batch, _: batch.add(seq),
    "remove": lambda kv, seq, batch, _: batch.remove(seq),
    "drain": lambda kv, seq, batch, held: held[0].drain(),
    "snapshot": lambda kv, seq, batch, held: held[0].snapshot(),
    "export": lambda kv, seq, batch, held: np.from_dlpack(held[1]),
}


def running(kv: Manager) -> tuple[Manager, Any, Any, Any]:
    """A manager with a sequence that has a step in flight, its batch, events and a view."""
    events = kv.events()
    seq = kv.create(IDS, 16)
    seq.resume()
    batch = kv.batch([seq])
    kv.settle(kv.step(batch, 6))
    seq.commit(IDS[:4])
    kv.step(batch, 1)
    return kv, seq, batch, (events, kv.tensors(seq, 0)[0])


@pytest.fixture(params=[False, True], ids=["plain", "debug"])
def there(request: pytest.FixtureRequest) -> Iterator[tuple[Manager, Any, Any, Any]]:
    with Manager(small(), HostDevice(), debug=request.param) as kv:
        yield running(kv)


def test_every_public_call_is_tried() -> None:
    public = {name for name in dir(Manager) if not name.startswith("_")}
    assert {name for name in public if callable(getattr(Manager, name))} == CALLS.keys()


@pytest.mark.parametrize("name", [*CALLS, *HANDLES])
def test_a_call_from_another_thread_is_refused_by_name(
    there: tuple[Manager, Any, Any, Any], name: str
) -> None:
    kv, seq, batch, _ = there

    def seen() -> object:
        calls, steps = kv.flight.call, list(kv.flight.steps)
        return kv.stats(), calls, steps, seq.state_name, len(batch), batch.rows.tolist()

    before = seen()
    error = elsewhere(partial((CALLS | HANDLES)[name], *there))
    assert isinstance(error, IllegalTransition), error
    assert error.event == name
    assert "belongs to thread 'MainThread'" in str(error)
    assert "'scheduler' called" in str(error)
    assert seen() == before
    kv.poll()


def test_it_belongs_to_whoever_made_it() -> None:
    made: list[Manager] = []
    assert elsewhere(lambda: made.append(Manager(small(), HostDevice()))) is None
    with pytest.raises(IllegalTransition, match="belongs to thread 'scheduler', and 'MainThread'"):
        made[0].poll()
    made[0].life.own()
    made[0].close()


# The interleavings themselves.


def test_the_interleavings_find_a_lost_update() -> None:
    class Counter:
        value = 0

        def add(self) -> None:
            self.value += 1

    counters: list[Counter] = []

    def make() -> list[Job]:
        counters.append(Counter())
        return [counters[-1].add] * 2

    ends = [(counters[-1].value, run) for run in interleavings(make, (__file__,))]
    assert {value for value, _ in ends} == {1, 2}
    lost = next(run for value, run in ends if value == 1)
    again = interleave(make(), (__file__,), lost.choices)
    assert counters[-1].value == 1
    assert again.choices == lost.choices
    unique = {tuple(run.choices) for _, run in ends}
    assert len(unique) == len(ends)
    without = list(interleavings(make, (__file__,), most_preempted=0))
    assert [run.choices[0] for run in without] == [0, 1]


# What crosses threads.


def test_a_call_in_the_middle_of_another_is_refused_at_every_point() -> None:
    """Another thread calls between any two bytecodes of a step, and changes nothing."""
    made: list[Sequence_] = []

    def step() -> int:
        kv = Manager(small(), HostDevice())
        made[:] = [kv.create(IDS, 16)]
        made[0].resume()
        kv.step(kv.batch(made), 5)
        scheduled, state = made[0].scheduled_tokens, made[0].state_name
        kv.close()
        return scheduled if state == "ACTIVE" else 0

    def suspend() -> None:
        if made:
            made[0].suspend()

    refused = 0
    for run in interleavings(lambda: [step, suspend], ("kvstate/stepping.py",)):
        assert run.results[0] == 5
        refused += isinstance(run.errors.get(1), IllegalTransition)
        made.clear()
    assert refused > 50


def test_tensors_may_be_let_go_of_on_any_thread() -> None:
    """While the manager counts who holds some: the count is of before, or of after."""
    with Manager(small(), HostDevice()) as kv:
        seq = kv.create(IDS, 16)
        seq.resume()
        kv.settle(kv.step(kv.batch([seq]), 4))
        counts = set()

        def make() -> Sequence[Job]:
            held = [np.from_dlpack(kv.tensors(seq, 0)[0])]
            return [partial(tensors_held, seq), held.clear]

        for run in interleavings(make, ("kvstate/tensors.py", "_weakrefset.py"), 2):
            assert run.errors == {}
            counts.add(run.results[0])
            assert tensors_held(seq) == 0
        assert counts == {0, 1}


def test_drained_events_may_be_encoded_on_any_thread() -> None:
    """While the manager goes on: what was drained changes no more. Without a host tier, so that
    each run has the same events."""
    with Manager(small(slots=0), HostDevice()) as kv:
        events, prompts = kv.events(), count()

        def make() -> Sequence[Job]:
            seq = kv.create(max_tokens=8, salt=str(next(prompts)).encode())
            seq.resume()
            kv.settle(kv.step(kv.batch([seq]), 8))
            seq.commit(IDS[:2])
            (batch,) = events.drain()
            before = encode(batch)

            def goes_on() -> None:
                kv.life.own()
                seq.commit(IDS[2:4])
                events.drain()

            return [goes_on, lambda: encode(batch) == before]

        for run in interleavings(make, ("kvstate/events.py", "kvstate/publisher.py")):
            assert (run.errors, run.results[1]) == ({}, True)
            kv.life.own()
            next(iter(kv.sequences.values())).close()
            events.drain()


# Nobody else runs.


@pytest.mark.parametrize("device", ["host", "null", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_campaign_starts_no_thread(device: str) -> None:
    """None is there after any episode that was not there before. Pinned memory is touched by
    threads that have ended when the call returns."""
    before, seen = set(threading.enumerate()), list[set[threading.Thread]]()
    fuzz.run(
        fuzz.episodes(5), partial(open_named, device), fuzz.ANY, lambda now: now.episodes >= 3,
        lambda _: seen.append(set(threading.enumerate())),
    )  # fmt: skip
    assert seen == [before] * 3
