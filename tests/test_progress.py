"""Progress: a fair engine finishes everybody from wherever a campaign has come, and says who is
not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from attrs import evolve

from kvstate import trace
from kvstate.campaign import fuzz, progress
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.campaign.progress import Fair, finish_fairly, most_calls
from kvstate.campaign.shrink import Program
from kvstate.cli import open_named
from kvstate.flight import Flight
from kvstate.gpu import HostDevice
from kvstate.gpu.streams import MODES
from kvstate.sequence import Transfer
from kvstate.spans import Spans
from kvstate.spec.facts import FairRun, Unfinished
from kvstate.spec.laws import laws
from tests.conftest import small

HOST = partial(open_named, "host")
KNOWN = Path(__file__).parent / "known" / "a-span-too-long-for-one-alone.jsonl"


def played(calls: Program, streams: str = "eager", **changes: object) -> Player:
    """A player that has played these calls."""
    header = trace.Header(kvstate_trace=1, config=small(**changes), streams=streams, strict=False)  # type: ignore[arg-type]
    player = Player(header, HostDevice(streams=streams))
    for call in calls:
        player.apply(call)
    return player


def grown(seq: int, tokens: int, *, settled: bool = True) -> Iterator[trace.AnyCall]:
    """A sequence that runs and has written so many tokens; or a step of it is in flight."""
    yield trace.Create(seq=seq, max_tokens=16)
    yield trace.Resume(seq=seq)
    yield trace.Step(step=seq, seqs=[seq], tokens=[tokens])
    if settled:
        yield trace.Settle(step=seq)


EVERY_STATE: Program = [
    trace.Create(seq=1, max_tokens=16, prompt=[1, 2, 3], reserve=True),
    *grown(2, 5), trace.Suspend(seq=2),
    *grown(3, 5), trace.Drop(seq=3),
    *grown(4, 5), trace.Fork(seq=4, child=5, max_tokens=9),
    trace.Dummy(seq=6, tokens=3),
    *grown(7, 4, settled=False),
    *grown(8, 5), trace.Suspend(seq=8), trace.Resume(seq=8, fail={"complete": 1}),
]  # fmt: skip


@pytest.mark.parametrize("streams", MODES)
@pytest.mark.parametrize("slots", [0, 3, 64])
def test_everybody_is_finished_from_every_state(streams: str, slots: int) -> None:
    """With eight frames for up to 4 each, and host room for all, for little, or none. With work as
    late as can be no poll ever brings anything."""
    player = played(EVERY_STATE, streams, slots=slots)
    states = {one.seq.state_name for one in player.seqs.values()}
    assert states >= {"CREATED", "DROPPED", "ACTIVE"}
    assert ("SUSPENDED" in states) == (slots > 0)
    engine = Fair(player)
    run = engine.run()
    assert run.left == ()
    assert player.seqs == {}
    assert player.refused["budget"], "memory was short"
    assert run.calls <= run.most_calls == most_calls(8, 1)
    assert player.kv.counters["closes"] == 8
    player.finish()


def test_a_poisoned_manager_is_left_alone() -> None:
    player = played([*grown(1, 4), trace.Close(seq=1, fail={"fill": 1})])
    assert player.kv.actor.fault
    finish_fairly(player)
    assert not player.laws["starvation"]
    player.finish()


RUN = FairRun(10, 50, (), {}, 3)


def test_the_laws_of_a_fair_run() -> None:
    def found(run: FairRun) -> list[str]:
        return [line for law in laws("fair") for line in law.violations(run)]

    assert found(RUN) == found(evolve(RUN, resumed={4: 3})) == []
    (circling,) = found(evolve(RUN, resumed={4: 4}))
    assert circling.startswith("law 12 (livelock): sequence 4 was resumed 4 times")
    (starved,) = found(evolve(RUN, left=(Unfinished(4, 7, 16, {"gate": 2, "budget": 1}),)))
    assert starved == (
        "law 12 (starvation): sequence 4 has 7 of 16 tokens after 10 calls, of 50 that may be "
        "needed; refused: gate 2, budget 1"
    )


def test_who_can_never_be_finished_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone that maps part of a span, which leaves it too little: without the check of that,
    as it was."""
    fuzz.play(*trace.read(KNOWN), HOST)
    monkeypatch.setattr(Spans, "_leaves_room", lambda *_: True)
    with pytest.raises(Broken, match=r"law 12 \(livelock\): sequence 2 was resumed 4 ") as caught:
        fuzz.play(*trace.read(KNOWN), HOST)
    assert re.search(r"sequence 2 has (0|24) of 32 tokens .* refused: budget", caught.value.detail)
    assert "sequence 1" not in caught.value.detail, "that one was finished"


def test_who_comes_and_goes_without_a_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes back from the host is taken for failed: it is suspended again, intact."""
    complete = Flight._complete

    def fails(self: Flight, transfer: Transfer, ok: bool) -> None:
        complete(self, transfer, ok and not transfer.inward)

    monkeypatch.setattr(Flight, "_complete", fails)
    player = played([*grown(1, 5), trace.Suspend(seq=1)])
    with pytest.raises(Broken, match=r"law 12 \(livelock\): sequence 1 was resumed 4 times"):
        finish_fairly(player)
    player.abandon()


def test_an_engine_without_end_stops_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who loses what it has computed, again and again, changes something in each turn."""
    settle = Fair._settle

    def loses(self: Fair, running: list[int]) -> None:
        settle(self, running)
        self._do(trace.Drop(seq=running[0]))

    monkeypatch.setattr(Fair, "_settle", loses)
    player = played(list(grown(1, 5)))
    with pytest.raises(Broken, match=r"has 0 of 16 tokens after \d+ calls, of 72 that"):
        finish_fairly(player)
    player.abandon()


def test_who_is_not_left_room_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace that the fuzz has found, and the rule that it led to."""
    path = Path(__file__).parent / "known" / "a-span-too-long-for-one-alone.jsonl"
    header, program = trace.read(path)
    fuzz.play(header, program, HOST)
    monkeypatch.setattr(Spans, "_leaves_room", lambda *_: True)
    with pytest.raises(Broken, match="law 12"):
        fuzz.play(header, program, HOST)


def test_a_failure_at_the_end_is_shrunk_and_fails_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "most_calls", lambda *_: 0)
    tallies = (fuzz.episode(seed, HOST, "eager") for seed in fuzz.episodes(1))
    (failure,) = next(tally.failures for tally in tallies if tally.failures)
    assert failure.kind in ("law 12 (livelock)", "law 12 (starvation)")
    assert failure.header.fair
    assert len(failure.program) < failure.found_calls / 4
    with pytest.raises(Broken, match=re.escape(failure.kind)):
        fuzz.play(failure.header, failure.program, HOST)


@pytest.mark.hunt
def test_campaigns_end_fairly_at_the_end_and_under_pressure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some episodes end where something was refused, and then all are finished, within bounds."""
    runs: list[tuple[int, FairRun]] = []
    run = Fair.run

    def noting(self: Fair) -> FairRun:
        sequences = len(self.player.seqs)
        runs.append((sequences, run(self)))
        return runs[-1][1]

    monkeypatch.setattr(Fair, "run", noting)
    done = [fuzz.episode(seed, HOST, fuzz.ANY) for seed in islice(fuzz.episodes(4), 40)]
    assert [tally.failures for tally in done] == [[]] * 40
    fair = [tally for tally in done if tally.laws["starvation"]]
    assert len(fair) == len(runs) > 8
    short = [tally for tally in fair if tally.calls < fuzz.EPISODE_CALLS]
    assert short
    assert all(tally.refused for tally in short)
    assert max(sequences for sequences, _ in runs) >= 4
    assert all(one.calls <= one.most_calls for _, one in runs)
    assert progress.PARTS == 2
