"""Margins: what is mapped beyond the need, a few frames in each step, so that no step maps many.

What is mapped is counted from the ledger of the null device and of the host device: no clock is
asked.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from random import Random
from typing import Any, NamedTuple

import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.campaign.engine import Engine, Outcome, Pace, Request
from kvstate.campaign.replay import drawn, sharing
from kvstate.device import MAPPING_CALLS, MapRun
from kvstate.gpu import NullDevice
from kvstate.sequence import Batch
from kvstate.stepping import Stepping
from tests.conftest import FRAME, Open


def begin(kv: Manager, tokens: int, max_tokens: int = 32) -> Sequence:
    """A running sequence with that many tokens, four of which fill a frame."""
    seq = kv.create(max_tokens=max_tokens)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), tokens))
    return seq


def mapping(kv: Manager) -> dict[str, int]:
    """How often each kind of mapping call was made."""
    return {kind: kv.device.calls.get(kind, 0) for kind in MAPPING_CALLS}


def made(kv: Manager, before: dict[str, int]) -> dict[str, int]:
    """Mapping calls since then."""
    return {kind: n - before[kind] for kind, n in mapping(kv).items() if n > before[kind]}


def tails(kv: Manager) -> list[int]:
    """Frames beyond the use of each sequence that runs, in the order of their addresses."""
    return [range_.tail for range_ in kv.arena.ranges.values() if range_.owner is not None]


# Many steps of many sequences.

MANY, FILL, LAYER = 64, 16, LayerSpec(kv_heads=1, head_dim=64)


class Mapped(NamedTuple):
    """What one step mapped, in frames."""

    all: int
    needed: int
    """Those of them without which it could not have been issued."""


def many(ahead: int) -> Manager:
    """A manager for 64 sequences, without bytes; 16 tokens fill a frame."""
    config = Config(
        layers=[LAYER],
        gpu=GpuTier(10_000 * FRAME, FRAME, ahead),
        host=HostTier(1000 * FRAME),
        max_tokens=2048,
        max_sequences=MANY,
        adopt=False,
    )
    return Manager(config, NullDevice())


def running(kv: Manager, lengths: Sequence_[int]) -> Batch:
    """That many sequences, of those lengths."""
    seqs = [kv.create() for _ in lengths]
    for seq in seqs:
        seq.resume()
    batch = kv.batch(seqs)
    kv.settle(kv.step(batch, lengths))
    return batch


def mapped(batch: Batch) -> list[int]:
    return [seq.range.mapped for seq in batch if seq.range is not None]


def needed(batch: Batch, had: list[int]) -> int:
    """Frames that are used now, and were not mapped when they had so many."""
    ranges = [seq.range for seq in batch if seq.range is not None]
    return sum(max(0, range_.used - was) for range_, was in zip(ranges, had, strict=True))


def stepped(kv: Manager, batch: Batch, tokens: int | Sequence_[int] = 1) -> Mapped:
    """One step, settled."""
    there = len(kv.device.ledger().mappings)
    had = mapped(batch)
    kv.settle(kv.step(batch, tokens))
    return Mapped(len(kv.device.ledger().mappings) - there, needed(batch, had))


def in_phase(offset: int) -> list[int]:
    return [96 + offset] * MANY


def in_turn(offset: int) -> list[int]:
    return [96 + (offset + at) % FILL for at in range(MANY)]


def in_two_crowds(offset: int) -> list[int]:
    return [96 + offset + (at % 2) for at in range(MANY)]


@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize("lengths", [in_phase, in_turn, in_two_crowds])
@pytest.mark.parametrize("offset", [0, 1, 8, 15])
def test_no_step_maps_many_and_none_for_need_however_sequences_lie(
    ahead: int, lengths: Callable[[int], list[int]], offset: int
) -> None:
    """The bound is what 64 sequences fill in a step, which is four frames, and one more."""
    with many(ahead) as kv:
        batch = running(kv, lengths(offset))
        found = [stepped(kv, batch) for _ in range(320)]
        assert max(one.all for one in found) <= MANY // FILL + 1
        assert sum(one.needed for one in found) == 0
        assert sum(one.all for one in found) >= 320 * MANY // FILL - MANY
        assert max(tails(kv)) <= ahead


def test_without_margins_a_crowd_crosses_in_one_step() -> None:
    """What the bound is worth: the same sequences without it."""
    with many(0) as kv:
        batch = running(kv, in_phase(0))
        found = [stepped(kv, batch) for _ in range(FILL)]
        assert max(one.needed for one in found) == MANY


def test_steps_of_uneven_drafts_map_no_more_than_they_fill() -> None:
    """Drafts of one to five tokens, of which some are rejected; margins of two frames."""
    random = Random(0)
    with many(2) as kv:
        batch = running(kv, in_phase(3))
        for _ in range(200):
            tokens = [random.randint(1, 5) for _ in batch]
            there, had = len(kv.device.ledger().mappings), mapped(batch)
            step = kv.step(batch, tokens)
            assert len(kv.device.ledger().mappings) - there <= sum(tokens) // FILL + 1
            assert needed(batch, had) == 0
            kv.settle(step, [random.randint(1, count) for count in tokens])


def test_who_comes_later_gets_its_margin_beside_the_others() -> None:
    """Everybody is begun at another time, with a prompt in chunks, and joins the batch."""
    with many(1) as kv:
        batch, found = kv.batch([]), list[Mapped]()
        for at in range(MANY):
            seq = kv.create()
            seq.resume()
            batch.add(seq)
            for _ in range(3):
                counts = [1] * at + [40]
                one = stepped(kv, batch, counts)
                assert one.needed <= 3, "its own chunk, and nobody else's token"
                assert one.all - one.needed <= sum(counts) // FILL + 2
            found += [stepped(kv, batch) for _ in range(2)]
        assert sum(one.needed for one in found) == 0
        assert max(one.all for one in found) <= MANY // FILL + 1


def test_all_who_are_resumed_at_once_have_a_frame_of_margin() -> None:
    with many(4) as kv:
        batch = running(kv, in_phase(15))
        for seq in batch:
            seq.suspend()
        kv.poll()
        for seq in batch:
            seq.resume()
        assert set(tails(kv)) == {1}
        found = [stepped(kv, batch) for _ in range(4 * FILL)]
        assert max(one.all for one in found) <= MANY // FILL + 1
        assert sum(one.needed for one in found) == 0


def test_a_step_for_which_nothing_is_lacking_looks_at_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, right = list[object](), Stepping._wanted

    def look(kv: Manager, *args: Any) -> list[tuple[Sequence, int]]:
        looked.append(args)
        return right(kv, *args)

    monkeypatch.setattr(Stepping, "_wanted", look)
    with many(2) as kv:
        batch = running(kv, in_phase(0))
        seen = []
        for _ in range(10 * FILL):
            looked.clear()
            one = stepped(kv, batch)
            seen.append((bool(looked), one.all > 0))
        assert seen[-FILL:].count((False, False)) >= 1
        assert (True, False) not in seen[-FILL:]


# Which frames a margin gets, and when it gives way.


def test_those_get_a_frame_first_who_will_need_it_first(open_manager: Open) -> None:
    kv = open_manager(frames=40, max_tokens=32, map_ahead_frames=2)
    batch = kv.batch(begin(kv, 0) for _ in range(4))
    kv.settle(kv.step(batch, [1, 3, 2, 3]))
    assert tails(kv) == [0, 1, 1, 1]
    seen = []
    for _ in range(5):
        kv.settle(kv.step(batch))
        seen.append(tails(kv))
    assert seen == [[1, 2, 1, 1], [1, 1, 2, 1], [2, 2, 1, 1], [1, 2, 2, 2], [2, 2, 2, 2]]


def test_a_margin_ends_where_its_sequence_does(open_manager: Open) -> None:
    kv = open_manager(frames=16, max_tokens=32, map_ahead_frames=8)
    batch = kv.batch([begin(kv, 4, max_tokens=4), begin(kv, 4, max_tokens=10)])
    kv.settle(kv.step(batch, [0, 1]))
    assert tails(kv) == [0, 1]
    before = mapping(kv)
    for _ in range(5):
        kv.settle(kv.step(batch, [0, 1]))
    assert (made(kv, before), tails(kv)) == ({}, [0, 0])


def test_a_newcomer_begins_with_one_frame_of_margin(open_manager: Open) -> None:
    """The rest comes in steps; its prompt is mapped when it is written."""
    kv = open_manager(frames=24, slots=0, max_tokens=32, map_ahead_frames=2, adopt=False)
    prompt = list(range(24))
    first = kv.create(prompt)
    first.resume()
    kv.settle(kv.step(kv.batch([first]), 11))
    first.commit(prompt[:11])
    before, second = mapping(kv), kv.create(prompt)
    second.resume()
    assert second.matched_tokens == 10, "two frames are mapped, a block is copied"
    assert made(kv, before) == {"create": 1, "map": 1}
    assert tails(kv) == [2, 1]
    kv.settle(kv.step(kv.batch([second]), 14))
    assert tails(kv) == [2, 2]


def test_margins_end_when_frames_do(open_manager: Open) -> None:
    """None is unmapped or waited for to make one, and none is in the way of who needs one."""
    kv = open_manager(frames=14, max_tokens=32, map_ahead_frames=8)
    batch = kv.batch(begin(kv, 0) for _ in range(3))
    for step in range(1, 17):
        before, quiesces = mapping(kv), kv.device.calls.get("quiesce", 0)
        kv.settle(kv.step(batch))
        assert made(kv, before) == ({"create": 1, "map": 1} if step <= 11 else {})
        assert kv.device.calls.get("quiesce", 0) == quiesces
    assert (kv.stats().frames, tails(kv)) == ({"MAPPED": 12, "PARKED": 2}, [1, 1, 0])
    before = mapping(kv)
    kv.settle(kv.step(batch, [0, 1, 1]))
    assert made(kv, before) == {"map": 1, "unmap": 1}
    assert (kv.stats().frames, tails(kv)) == ({"MAPPED": 14}, [0, 0, 0])


def test_a_reclaim_takes_margins_last_and_evenly(open_manager: Open) -> None:
    kv = open_manager(
        frames=12, max_tokens=32, max_sequences=16, map_ahead_frames=2, adopt=False
    )  # fmt: skip
    long = [begin(kv, 4), begin(kv, 4)]
    long[0].resize(24)
    long[0].resize(4)
    for _ in range(3):
        begin(kv, 4, max_tokens=4).close()
    seen = []
    for _ in range(10):
        parked = len(kv.arena.oldest_parked())
        seen.append((*tails(kv)[:2], parked))
        seq = kv.create(max_tokens=4)
        seq.resume()
        seq.resize(4)
    assert seen == [
        (5, 2, 3), (4, 2, 3), (3, 2, 3),
        (2, 2, 3), (2, 2, 2), (2, 2, 1),
        (2, 2, 0), (1, 2, 0), (1, 1, 0), (0, 1, 0),
    ], "what is no margin, then what is parked, then margins"  # fmt: skip


def test_a_reclaim_for_a_step_finds_a_frame_more_for_each_of_it(open_manager: Open) -> None:
    """The device is waited for once, and then steps make margins of what was found."""
    kv = open_manager(frames=10, max_tokens=32, map_ahead_frames=2, adopt=False)
    batch = kv.batch([begin(kv, 4), begin(kv, 4)])
    kv.trim()
    begin(kv, 32, max_tokens=32).close()
    assert kv.stats().frames == {"MAPPED": 2, "PARKED": 8}
    before, quiesces = mapping(kv), kv.device.calls["quiesce"]
    for tokens, left in ((9, {"PARKED": 0, "POOLED": 2}), (1, {"PARKED": 1, "POOLED": 1})):
        kv.settle(kv.step(batch, tokens))
        assert {name: kv.stats().frames.get(name, 0) for name in left} == left
    assert (made(kv, before)["unmap"], kv.device.calls["quiesce"] - quiesces) == (1, 1)


def test_no_margin_is_taken_for_another(open_manager: Open) -> None:
    """A reclaim takes from margins what is needed, and nothing for those who need nothing yet."""
    kv = open_manager(frames=8, max_tokens=32, map_ahead_frames=2, adopt=False)
    _, _, seq = (begin(kv, 4) for _ in range(3))
    assert (kv.stats().frames, tails(kv)) == ({"MAPPED": 3, "PARKED": 5}, [2, 2, 1])
    kv.settle(kv.step(kv.batch([seq]), 8))
    assert (kv.stats().frames, tails(kv)) == ({"MAPPED": 5, "PARKED": 3}, [1, 2, 0])


def test_whose_margin_was_taken_gets_another(open_manager: Open) -> None:
    kv = open_manager(frames=8, max_tokens=32, map_ahead_frames=2)
    seq = begin(kv, 4)
    assert tails(kv) == [2]
    kv.trim()
    assert tails(kv) == [0]
    kv.settle(kv.step(kv.batch([seq]), 0))
    assert tails(kv) == [1]


@pytest.mark.parametrize("ahead", [1, 8])
def test_a_batch_that_has_no_margins_yet_gets_them_from_the_next_step_on(ahead: int) -> None:
    """All of them lost them at once; who would be first to need a frame gets it first."""
    with many(ahead) as kv:
        batch = running(kv, in_turn(0))
        for _ in range(40):
            stepped(kv, batch)
        kv.trim()
        found = [stepped(kv, batch) for _ in range(4 * FILL)]
        assert found[0] == Mapped(MANY // FILL + MANY // FILL + 1, 4)
        assert [one.needed for one in found[1:]] == [0] * (4 * FILL - 1)


# A serving run.


class Run(NamedTuple):
    """What a serving run needed."""

    calls: float
    """Mapping calls of a request, from the end of the first wave until the last was let in."""
    frames: int
    """Mapped, and not only for others to read."""
    most: int
    """In one call."""
    alias: float
    """The part of the shared tokens that came by alias."""
    spans_spilled: int
    frames_peak: int
    """Charged."""
    quiesces: int
    """How often the device was waited for."""


class Counting(NullDevice):
    """Remembers how many frames each call has mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.mapped = list[int]()

    def map(self, runs: Sequence_[MapRun]) -> None:
        super().map(runs)
        self.mapped.append(sum(len(run.frames) for run in runs if not run.read_only))


AT_ONCE, PROMPT, OUTPUT, PROMPTS, SHARED = 32, 256, 128, 5, 128


def serve(frames: int, ahead: int, requests: int = 300) -> Run:
    """Requests that begin with one of a few shared prompts, 16 tokens a frame, without bytes."""
    config = Config(
        layers=[LayerSpec(kv_heads=1, head_dim=64)],
        gpu=GpuTier(frames * FRAME, FRAME, ahead),
        host=HostTier(1024 * FRAME),
        max_tokens=PROMPT + 2 * OUTPUT,
        max_sequences=2 * AT_ONCE,
    )
    random = Random(0)
    plain = [Request(PROMPT, drawn(random, OUTPUT)) for _ in range(requests)]
    device = Counting()
    engine = Engine(config, device, AT_ONCE, pace=Pace(2, read_tokens=1, laws_every=None))
    calls: dict[int, int] = {}

    def tell(outcome: Outcome) -> None:
        calls.setdefault(outcome.requests_admitted, engine.mapping_calls())

    outcome = engine.run(sharing(plain, PROMPTS, SHARED, 1.0, 0), tell)
    assert (outcome.requests_finished, outcome.violations) == (requests, [])
    first = min(admitted for admitted in calls if admitted >= AT_ONCE)
    block, hits = config.tokens_per_block, engine.kv.counters["hit_blocks.alias"]
    return Run(
        (calls[requests] - calls[first]) / (requests - first),
        sum(device.mapped),
        max(device.mapped),
        hits * block / outcome.content_tokens,
        outcome.spans_spilled,
        outcome.frames_peak,
        device.calls["quiesce"],
    )


@pytest.mark.parametrize("ahead", [1, 4])
def test_margins_map_no_frame_more(ahead: int) -> None:
    """They only map it earlier, in as few calls, and not many in one."""
    plain, run = serve(1500, 0), serve(1500, ahead)
    assert run.frames <= plain.frames
    assert run.calls <= plain.calls
    assert run.most <= plain.most + 2 * ahead
    assert run.alias >= 0.85
    assert run.spans_spilled == 0


def test_margins_keep_nobody_out_when_memory_is_short() -> None:
    """The budget is less than twice what is in use: it is all allocated soon, and frames go from
    one to another."""
    plain, run = serve(900, 0), serve(900, 8)
    assert (run.alias, run.spans_spilled) == (plain.alias, 0)
    assert run.frames_peak == plain.frames_peak
    assert run.frames <= plain.frames
    assert run.calls <= plain.calls
    assert run.quiesces <= plain.quiesces // 2
