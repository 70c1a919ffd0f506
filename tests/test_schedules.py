"""Schedules: when work runs, that it repeats, and that a failure is shown on the simplest one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations_with_replacement, islice, permutations
from typing import Any

import pytest
from msgspec.structs import replace

from kvstate import trace
from kvstate.campaign import fuzz
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.campaign.shrink import Program, shrink_schedule
from kvstate.campaign.shrink import _simpler_schedules as simpler
from kvstate.cli import open_named
from kvstate.device import CopyRun, Direction, Event, Stream
from kvstate.gpu import HostDevice
from kvstate.gpu.streams import MODES, Streams
from tests.conftest import small

LATE = [mode for mode in MODES if mode != "eager"]


class Rig:
    """Streams, and what has run on them: a letter for the stream, and a number."""

    def __init__(self, mode: str, seed: int = 0, streams: int = 3) -> None:
        self.streams, self.ran = Streams(mode, seed), list[str]()
        self.names = [self.streams.new(name) for name in "abcdefg"[:streams]]

    def launch(self, *streams: int, waits: Sequence[int] = ()) -> int:
        """One piece of work on each; the number of the last."""
        for at in streams:
            name = f"{self.names[at].name}{self.streams.launched + 1}"
            run = partial(self.ran.append, name)
            number = self.streams.launch(self.names[at], name, run, waits=waits)
        return number


def test_eager_work_has_run_when_it_is_launched() -> None:
    rig = Rig("eager")
    rig.launch(0, 1, 0)
    assert rig.ran == ["a1", "b2", "a3"]


def test_latest_runs_only_what_somebody_waits_for_and_the_newest_first() -> None:
    rig = Rig("latest")
    first = rig.launch(0)
    other = rig.launch(1, 1)
    number = rig.launch(2, 0, waits=(first, other))
    rig.launch(2, 1)
    rig.streams.tick()
    assert rig.ran == []
    rig.streams.finish(number)
    assert rig.ran == ["b2", "b3", "a1", "a5"], "c4, c6 and b7 are not waited for"
    rig.streams.drain()
    assert rig.ran[4:] == ["b7", "c4", "c6"]


def test_priorities_hold_for_the_whole_run() -> None:
    """Whatever is above the caller runs at once; the rest runs when it waits, the highest first."""
    seen = set()
    for seed in range(200):
        rig = Rig("pct", seed)
        rig.launch(0, 1, 2)
        rig.streams.tick()
        at_once = [name[0] for name in rig.ran]
        rig.streams.drain()
        order = [name[0] for name in rig.ran]
        seen.add((len(at_once), tuple(order) if not at_once else ()))
        rig.ran.clear()
        rig.launch(2, 1, 0)
        rig.streams.tick()
        assert {name[0] for name in rig.ran} == set(at_once)
        late = len(rig.ran)
        rig.streams.drain()
        assert [name[0] for name in rig.ran[late:]] == [n for n in order if n not in at_once]
    assert seen == {(1, ()), (2, ()), (3, ())} | {(0, order) for order in permutations("abc")}


def test_who_is_preempted_comes_last() -> None:
    """At a step that is given. The caller too: then all others run before it goes on."""
    changed = set()
    for seed in range(100):
        rig = Rig("pct", seed)
        rig.launch(0, 1, 2)
        if rig.ran:
            continue  # only where the caller is the highest
        rig.streams.order.schedule(None, 2)
        rig.launch(0)
        assert rig.ran == [], "this was the first step"
        rig.launch(0)
        assert sorted(rig.ran) == ["a1", "a4", "a5", "b2", "c3"]
        rig.launch(1)
        assert rig.ran[5:] == ["b6"], "the caller stays behind"
        changed.add(rig.ran[0])
    assert changed == {"a1", "b2", "c3"}


class Logging(HostDevice):
    """Notes when each copy runs: after how many device calls."""

    log: list[tuple[int, int]]

    def _run_copy(self, token: int, runs: Sequence[CopyRun]) -> None:
        self.log.append((token, sum(self.calls.values())))
        super()._run_copy(token, runs)


@pytest.mark.parametrize("streams", MODES)
def test_a_program_replays_on_the_schedule_that_it_was_drawn_on(
    streams: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs: list[list[tuple[int, int]]] = []
    drawn: list[tuple[trace.Header, Program]] = []

    def opened(streams: str, seed: int) -> HostDevice:
        device = Logging(streams=streams, seed=seed)
        device.log = []
        logs.append(device.log)
        return device

    finish = Player.finish

    def end(self: Player) -> None:
        finish(self)
        raise Broken("nothing", "it is over")

    monkeypatch.setattr(Player, "finish", end)
    monkeypatch.setattr(fuzz, "_shrunk", lambda _, header, calls, __: drawn.append((header, calls)))
    preempts = 0
    for name in islice(fuzz.episodes(3), 3):
        fuzz.episode(name, opened, streams)
        header, calls = drawn.pop()
        preempts += sum(call.preempt is not None for call in calls)
        with pytest.raises(Broken, match="it is over"):
            fuzz.play(header, calls, opened)
        assert logs[-1] == logs[-2]
    assert sum(map(len, logs)) > 20
    assert bool(preempts) == (streams == "pct")


@pytest.fixture
def unordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose copies do not wait for the events they should wait for."""
    copy = HostDevice.copy

    def hasty(
        self: HostDevice, direction: Direction, runs: Sequence[CopyRun],
        after: Sequence[Event] = (), before: Sequence[Stream] = (),
    ) -> int:  # fmt: skip
        return copy(self, direction, runs, (), before)

    monkeypatch.setattr(HostDevice, "copy", hasty)


@pytest.mark.usefixtures("unordered")
@pytest.mark.parametrize("streams", LATE)
def test_a_failure_of_order_is_shown_on_the_simplest_schedule(streams: str) -> None:
    opened = partial(open_named, "host")
    found = (fuzz.episode(seed, opened, streams) for seed in fuzz.episodes(1))
    (failure,) = next(tally.failures for tally in found if tally.failures)
    shown, kinds = (failure.header, failure.program), list[str]()
    for schedule in (shown, *simpler(*shown)):
        try:
            fuzz.play(*schedule, opened)
        except Broken as broken:
            kinds.append(broken.kind)
    assert kinds.count(failure.kind) == 1, "the one that is shown, and no simpler one"
    assert kinds[0] == failure.kind
    assert failure.header.streams in LATE, "nothing is wrong if work runs at once"
    assert streams != "latest" or not any(call.seed for call in failure.program)


def header_of(streams: str, seed: int = 9) -> trace.Header:
    return trace.Header(kvstate_trace=1, config=small(), streams=streams, seed=seed, strict=False)


PREEMPTED: Program = [trace.Poll(seed=5), trace.Poll(preempt=2), trace.Poll(preempt=3)]


@pytest.mark.parametrize(("fails_with", "found_with"), [*combinations_with_replacement(MODES, 2)])
def test_simpler_schedules_come_first(fails_with: str, found_with: str) -> None:
    """A failure that shows from some mode on, as it does there."""

    def fails(header: trace.Header, program: Program) -> bool:
        return MODES.index(header.streams) >= MODES.index(fails_with)

    header, program = shrink_schedule(header_of(found_with), PREEMPTED, fails)
    assert header.streams == fails_with
    bare = fails_with != found_with or fails_with == "pct"
    assert program == ([trace.Poll()] * 3 if bare else PREEMPTED)


def test_preemptions_that_are_needed_stay() -> None:
    def fails(header: trace.Header, program: Program) -> bool:
        return header.seed == 9 and any(call.preempt == 3 for call in program)

    header, program = shrink_schedule(header_of("pct"), PREEMPTED, fails)
    assert (header, program) == (header_of("pct"), PREEMPTED)


def test_a_schedule_survives_being_written_down(tmp_path: Any) -> None:
    calls: Program = [replace(call) for call in PREEMPTED]
    trace.write(tmp_path / "one.jsonl", header_of("pct"), calls)
    assert trace.read(tmp_path / "one.jsonl") == (header_of("pct"), calls)
