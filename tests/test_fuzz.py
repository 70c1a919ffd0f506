"""The campaign: it repeats, it sees what it must see, and it fails when it must."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvstate import Manager, trace
from kvstate.campaign import fuzz
from kvstate.campaign.fuzz import ROWS, STATES, Tally
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.campaign.shrink import renumbered, shrink
from kvstate.campaign.workers import run_workers
from kvstate.cli import open_named
from kvstate.gpu import HostDevice, NullDevice
from kvstate.gpu.streams import MODES
from kvstate.spec.laws import LAWS
from tests.conftest import small

HOST, NULL = partial(open_named, "host"), partial(open_named, "null")


def tally(seed: int, count: int, device: fuzz.OpenDevice = HOST, streams: str = "eager") -> Tally:
    total = Tally()
    for name in islice(fuzz.episodes(seed), count):
        total.add(fuzz.episode(name, device, streams))
    return total


@pytest.mark.parametrize("streams", [*MODES, fuzz.ANY])
def test_the_same_seed_is_the_same_run(streams: str) -> None:
    first, second = tally(7, 3, streams=streams), tally(7, 3, streams=streams)
    assert first == second
    assert first.episodes == 3
    assert first.calls <= 3 * fuzz.EPISODE_CALLS, "some end before their time"
    assert tally(8, 3, streams=streams).device_calls != first.device_calls


@pytest.mark.hunt
@pytest.mark.parametrize(
    ("seed", "device", "streams"), [(2027, HOST, fuzz.ANY), (1, NULL, "eager")]
)
def test_drawn_calls_see_all_but_the_rarest_links(
    seed: int, device: fuzz.OpenDevice, streams: str
) -> None:
    """Every row fired, every state reached, every law asked for, every refusal made."""
    total = Tally()
    for name in fuzz.episodes(seed):
        total.add(fuzz.episode(name, device, streams))
        unseen = [one for one in total.unseen() if not one.startswith("link")]
        if not unseen or total.calls > 150_000:
            break
    assert total.failures == []
    assert unseen == []


def test_what_was_not_seen_is_named() -> None:
    unseen = Tally().unseen()
    assert f"row {ROWS[0]}" in unseen
    assert "state frame.CONDEMNED" in unseen
    assert "state frame.ABSENT" not in unseen, "initial states are there from the start"
    assert "refusal gate" in unseen
    assert f"law {LAWS[0].number} ({LAWS[0].name})" in unseen
    assert "a poisoned manager" in unseen
    initial = sum(
        state.endswith((".VACANT", ".ABSENT", ".FREE", ".CREATED", ".LIVE", ".OPEN"))
        for state in STATES
    )
    tables = len(ROWS) + len(fuzz.LINKS) + len(STATES) - initial - 2
    assert len(unseen) == tables + len(fuzz.REFUSALS) + len(LAWS) + 1


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstate", "fuzz", "--device", "host", "--workers", "2",
               "--seconds", "600", "--save", str(tmp_path)]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as parent:
        found = list[psutil.Process]()
        while len(found) < 3:  # two workers, and what counts their semaphores
            assert parent.poll() is None
            found = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(found, timeout=60)
    assert alive == []


def test_an_interrupt_while_workers_start_is_quiet(tmp_path: Path) -> None:
    """A terminal sends it to all processes, also to one that has not come to its first line."""
    command = [sys.executable, "-m", "kvstate", "fuzz", "--device", "host", "--workers", "2",
               "--seconds", "600", "--no-directed", "--save", str(tmp_path)]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as parent:
        while len(psutil.Process(parent.pid).children()) < 3:
            assert parent.poll() is None
        os.killpg(parent.pid, signal.SIGINT)
        _, err = parent.communicate(timeout=120)
    assert "Traceback" not in err


def test_workers_play_different_episodes_and_add_up() -> None:
    told: list[int] = []
    total = run_workers(
        5, 2, NULL, "eager", lambda now: now.calls >= 400, lambda now: told.append(now.calls)
    )
    assert total.failures == []
    assert total.calls >= 400
    assert told == sorted(told)
    one, other = (list(islice(fuzz.episodes(5, worker), 3)) for worker in (0, 1))
    assert not set(one) & set(other)


def test_an_interrupt_ends_with_what_there_is() -> None:
    def interrupt(now: Tally) -> None:
        if now.episodes == 2:
            raise KeyboardInterrupt

    assert run_workers(5, 1, NULL, "eager", lambda _: False, interrupt).episodes == 2


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager whose drop forgets a host slot."""
    drop = Manager.drop

    def forgets(self: Manager, seq: Any, after: Any = None) -> None:
        drop(self, seq, after)
        self.host.counts[0] += 1

    monkeypatch.setattr(Manager, "drop", forgets)


@pytest.mark.usefixtures("forgetful")
def test_a_failure_is_shrunk_saved_and_fails_again(tmp_path: Path) -> None:
    (failure,) = next(
        done.failures
        for seed in fuzz.episodes(1)
        if (done := fuzz.episode(seed, HOST, "eager")).failures
    )
    assert failure.kind == "law 16 (counters are sums)"
    assert len(failure.program) <= 4 < failure.found_calls
    assert [call.seq for call in failure.program if isinstance(call, trace.Create)] == [1]
    assert not failure.cut_short
    path = fuzz.save(failure, tmp_path)
    assert path.name.startswith("law-16-counters-are-sums-")
    assert fuzz.save(failure, tmp_path) == path, "the same failure is not kept twice"
    with pytest.raises(Broken, match="law 16"):
        fuzz.play(*trace.read(path), HOST)


@pytest.mark.parametrize("wanted", [1, 2, 5])
def test_shrinking_finds_the_shortest_program(wanted: int) -> None:
    program: list[trace.AnyCall] = [trace.Trim(keep=at % 7, seed=at) for at in range(64)]

    def fails(calls: list[trace.AnyCall]) -> bool:
        return sum(isinstance(call, trace.Trim) and call.keep == 3 for call in calls) >= wanted

    assert shrink(program, fails) == [trace.Trim(keep=3)] * wanted


def test_names_of_a_shrunk_program_count_from_one() -> None:
    program: list[trace.AnyCall] = [
        trace.Create(seq=7, max_tokens=8), trace.Fork(seq=7, child=4, max_tokens=8),
        trace.Step(step=9, seqs=[4, 7], tokens=[1, 2]), trace.Fork(seq=4, child=0, max_tokens=8),
        trace.Settle(step=9), trace.Trim(keep=3), trace.Close(seq=5),
    ]  # fmt: skip
    assert renumbered(program) == [
        trace.Create(seq=1, max_tokens=8), trace.Fork(seq=1, child=2, max_tokens=8),
        trace.Step(step=1, seqs=[2, 1], tokens=[1, 2]), trace.Fork(seq=2, child=0, max_tokens=8),
        trace.Settle(step=1), trace.Trim(keep=3), trace.Close(seq=3),
    ]  # fmt: skip


BROKEN: dict[str, tuple[Callable[[Player], object], str]] = {
    "bytes": (lambda p: p.device.poke(p.seqs[1].seq.base or 0, b"?"), "bytes"),
    "a fault": (lambda p: p.device.faults.append("a stray read"), "fault"),
    "a length": (lambda p: p.kv.columns.settled.__setitem__(0, 2), "model|law"),
    "a state": (lambda p: p.seqs[1].seq.enter(2), "law 11"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_player_notices(name: str) -> None:
    """Each check of the player can fail."""
    spoil, kind = BROKEN[name]
    header = trace.Header(kvstate_trace=1, config=small(), strict=False)
    player = Player(header, HostDevice())
    for call in (
        trace.Create(seq=1, max_tokens=8), trace.Create(seq=2, max_tokens=8), trace.Resume(seq=1),
        trace.Step(step=1, seqs=[1], tokens=[3]), trace.Settle(step=1),
    ):  # fmt: skip
        player.apply(call)
    spoil(player)
    with pytest.raises(Broken, match=kind):
        player.apply(trace.Poll())
    player.abandon()


def test_scrubbing_is_checked() -> None:
    header = trace.Header(kvstate_trace=1, config=small(scrub=True), strict=False)
    player = Player(header, HostDevice())
    for call in (trace.Create(seq=1, max_tokens=8), trace.Resume(seq=1),
                 trace.Step(step=1, seqs=[1], tokens=[3]), trace.Settle(step=1)):  # fmt: skip
        player.apply(call)
    base = player.seqs[1].seq.base
    player.apply(trace.Close(seq=1))
    assert base is not None
    player.device.poke(base + 100, b"secret")
    with pytest.raises(Broken, match="scrub: 6 bytes"):
        player.apply(trace.Poll())
    player.abandon()


def test_known_traces_still_hold() -> None:
    """Failures of earlier versions, kept as traces."""
    folder = Path(__file__).parent / "known"
    for path in sorted(folder.glob("*.jsonl")):
        fuzz.play(*trace.read(path), lambda streams, seed: HostDevice(streams=streams, seed=seed))


def test_a_device_that_moves_no_bytes_is_still_checked_by_laws() -> None:
    header = trace.Header(kvstate_trace=1, config=small(), strict=False)
    player = Player(header, NullDevice())
    player.apply(trace.Create(seq=1, max_tokens=8))
    player.kv.gpu.counts[0] -= 1
    with pytest.raises(Broken, match="law 1"):
        player.apply(trace.Poll())
    player.abandon()


class Losing(HostDevice):
    """A device that is lost for good at its fifth step."""

    @property
    def lost(self) -> str | None:
        return "a kernel read nowhere" if self.calls["record"] + self.calls["copy"] > 4 else None


def test_a_lost_device_ends_the_campaign_and_is_not_opened_again() -> None:
    opened: list[str] = []

    def once(streams: str, seed: int) -> HostDevice:
        opened.append(streams)
        return Losing(streams=streams, seed=seed)

    tally = fuzz.episode("a seed", once, "eager")
    (failure,) = tally.failures
    assert (failure.kind, failure.detail) == ("device lost", "a kernel read nowhere")
    assert len(failure.program) == failure.found_calls
    assert opened == ["eager"]
