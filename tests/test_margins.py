"""Margins: what is mapped beyond the need, so that a running batch seldom makes a mapping call.

That a serving run needs so few is counted on the null device: no clock is asked.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.campaign.engine import Engine, Outcome, Pace, Request
from kvstate.campaign.replay import drawn, sharing
from kvstate.device import MAPPING_CALLS
from kvstate.gpu import NullDevice
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


def test_who_must_be_mapped_brings_the_whole_batch_to_the_same_margin(open_manager: Open) -> None:
    kv = open_manager(frames=40, max_tokens=32, map_ahead_frames=3)
    batch = kv.batch(begin(kv, tokens) for tokens in (4, 5, 6, 7))
    before, steps = mapping(kv), 0
    while mapping(kv) == before:
        kv.settle(kv.step(batch))
        steps += 1
    assert steps == 13, "there was room for twelve more tokens at least"
    assert made(kv, before) == {"create": 1, "map": 1}
    assert tails(kv) == [3, 3, 3, 3]


def test_a_margin_is_no_reason_to_map(open_manager: Open) -> None:
    kv = open_manager(frames=16, max_tokens=32, map_ahead_frames=3)
    begin(kv, 32).close()
    kv.trim(keep_frames=8)
    seq = begin(kv, 4)
    assert kv.stats().frames == {"ABSENT": 8, "POOLED": 4, "MAPPED": 1, "PARKED": 3}
    before = mapping(kv)
    kv.settle(kv.step(kv.batch([seq]), 4))
    assert (made(kv, before), tails(kv)) == ({}, [2])


def test_a_newcomer_is_mapped_once_for_all_of_its_prompt(open_manager: Open) -> None:
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
    kv.settle(kv.step(kv.batch([second]), 14))
    assert made(kv, before) == {"create": 1, "map": 1}
    assert tails(kv)[1] == 2


def test_if_frames_are_too_few_all_get_the_same(open_manager: Open) -> None:
    kv = open_manager(frames=14, max_tokens=32, map_ahead_frames=8)
    batch = kv.batch([begin(kv, 4), begin(kv, 0), begin(kv, 0), begin(kv, 0, max_tokens=4)])
    assert tails(kv) == [7, 0, 0, 0]
    kv.settle(kv.step(batch, [0, 1, 1, 1]))
    assert tails(kv) == [7, 1, 1, 0], "whoever has more keeps it, and the last has no more room"
    assert kv.stats().frames == {"MAPPED": 4, "PARKED": 9, "POOLED": 1}


def test_a_reclaim_takes_margins_last_and_evenly(open_manager: Open) -> None:
    kv = open_manager(
        frames=12, max_tokens=32, max_sequences=16, map_ahead_frames=2, adopt=False
    )  # fmt: skip
    long = [begin(kv, 4), begin(kv, 4)]
    long[0].resize(20)
    long[0].resize(4)
    for _ in range(3):
        begin(kv, 4, max_tokens=4).close()
    seen = []
    for _ in range(10):
        parked = len(kv.arena.oldest_parked())
        seen.append((*tails(kv)[:2], parked))
        begin(kv, 4, max_tokens=4)
    assert seen == [
        (5, 2, 3), (4, 2, 3), (3, 2, 3),
        (2, 2, 3), (2, 2, 2), (2, 2, 1),
        (2, 2, 0), (1, 2, 0), (1, 1, 0), (0, 1, 0),
    ], "what is no margin, then what is parked, then margins"  # fmt: skip


def test_a_reclaim_for_a_batch_takes_a_frame_more_for_everyone(open_manager: Open) -> None:
    kv = open_manager(frames=10, max_tokens=32, map_ahead_frames=2, adopt=False)
    batch = kv.batch([begin(kv, 4), begin(kv, 4)])
    begin(kv, 16, max_tokens=16).close()
    assert kv.stats().frames == {"MAPPED": 2, "PARKED": 8}
    before = mapping(kv)
    kv.settle(kv.step(batch, 12))
    assert made(kv, before) == {"map": 1, "unmap": 1}
    assert tails(kv) == [1, 1]


class Run(NamedTuple):
    """What a serving run needed."""

    calls: float
    """Mapping calls of a request, from the end of the first wave until the last was let in."""
    alias: float
    """The part of the shared tokens that came by alias."""
    spans_spilled: int
    frames_peak: int
    """Charged."""


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
    engine = Engine(config, NullDevice(), AT_ONCE, pace=Pace(2, read_tokens=1, laws_every=None))
    calls: dict[int, int] = {}

    def tell(outcome: Outcome) -> None:
        calls.setdefault(outcome.requests_admitted, engine.mapping_calls())

    outcome = engine.run(sharing(plain, PROMPTS, SHARED, 1.0, 0), tell)
    assert (outcome.requests_finished, outcome.violations) == (requests, [])
    first = min(admitted for admitted in calls if admitted >= AT_ONCE)
    block, hits = config.tokens_per_block, engine.kv.counters["hit_blocks.alias"]
    return Run(
        (calls[requests] - calls[first]) / (requests - first),
        hits * block / outcome.content_tokens,
        outcome.spans_spilled,
        outcome.frames_peak,
    )


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_steady_state_needs_at_most_one_mapping_call_a_request(ahead: int) -> None:
    run = serve(1500, ahead)
    assert run.calls <= 1
    assert run.alias >= 0.85
    assert run.spans_spilled == 0


def test_without_margins_nearly_every_step_maps() -> None:
    assert serve(1500, 0).calls > 3


def test_margins_keep_nobody_out_when_memory_is_short() -> None:
    """The budget is less than twice what is in use: it is all allocated soon, and frames go from
    one to another."""
    plain, ahead = serve(900, 0), serve(900, 8)
    assert ahead.calls <= 1 < plain.calls
    assert ahead._replace(calls=plain.calls) == plain
