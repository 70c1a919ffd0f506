"""Replays: a slice of a public serving trace, under pressure, on real memory."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvstate import GpuTier, HostTier, LayerSpec, Manager, TraceError
from kvstate.campaign.engine import DEFAULT_PACE, OWN_IDS, Engine, Pace, Request
from kvstate.campaign.model import Story
from kvstate.campaign.replay import (
    ReplayReport,
    first_requests,
    is_cut,
    read_mooncake,
    replay_report,
    scaled,
    serving_config,
    sharing,
    uniform,
)
from kvstate.gpu import HostDevice, open_device
from kvstate.observe import check_laws

SLICE = Path(__file__).parent / "data" / "mooncake_300.jsonl.gz"
SHAPE = LayerSpec(kv_heads=1, head_dim=8, dtype="float16")


def replay(
    requests: list[Request], gpu: int, host: int, streams: str = "eager", device: str = "host",
    batch: int = 16, pace: Pace = DEFAULT_PACE,
) -> ReplayReport:  # fmt: skip
    engine = engine_of(gpu, host, streams, device, batch, pace)
    work = [scaled(request, 1.0, engine.kv.config.max_tokens) for request in requests]
    return replay_report(engine, engine.run(work), len(work), 0, 1.0)


def engine_of(
    gpu: int, host: int, streams: str = "eager", device: str = "host", batch: int = 16,
    pace: Pace = DEFAULT_PACE,
) -> Engine:  # fmt: skip
    """An engine with frames of 128 tokens."""
    frame = 4096
    tiers = GpuTier(gpu * frame, frame), HostTier(host * frame) if host else None
    config = serving_config(SHAPE, *tiers, block=32, batch=batch)
    return Engine(config, open_device(device, streams=streams, seed=1), batch, pace=pace)


def mooncake(count: int) -> list[Request]:
    return first_requests(read_mooncake(SLICE), count)[0]


def test_the_slice_is_what_it_says() -> None:
    requests = mooncake(300)
    assert len(requests) == 300
    assert requests[0].prompt_tokens == 6758
    assert requests[0].output_tokens == 500
    assert requests[0].content == tuple((name, 512) for name in range(14))


@pytest.mark.hunt
@pytest.mark.parametrize("streams", ["eager", "adversarial"])
def test_a_serving_trace_under_pressure(streams: str) -> None:
    """All finish, nothing is mismatched, though memory is short on both tiers."""
    report = replay(mooncake(60), gpu=1100, host=120, streams=streams)
    assert report.requests_finished == 60
    assert (report.mismatches, report.violations) == (0, [])
    assert report.suspends > 10
    assert report.resumes > 10
    assert report.drops > 2
    assert report.adoptions > 10
    assert report.frames_peak <= 1100
    assert report.bytes_verified > 30_000_000


def test_equal_requests_need_no_mapping_calls_after_the_first_tenth() -> None:
    report = replay(uniform(150, 200, 40), gpu=200, host=0)
    assert report.requests_finished == 150
    assert report.driver_calls_steady == 0
    assert report.mismatches == 0


@pytest.mark.hunt
def test_the_null_device_runs_the_same_loop() -> None:
    real, null = (replay(mooncake(30), 1100, 120, device=kind) for kind in ("host", "null"))
    assert (null.steps, null.suspends, null.drops) == (real.steps, real.suspends, real.drops)
    assert null.bytes_verified == 0 < real.bytes_verified


def test_wrong_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay can fail: a copy that is one byte off is a mismatch."""
    move = HostDevice.move

    def off(self: HostDevice, runs: list[tuple[int, int, int]]) -> bool:
        done = move(self, runs)  # type: ignore[arg-type]
        if runs and self.missing(runs[0][0], 100_000, write=True) is None:
            self.poke(runs[0][0] + 70_000, b"\x00\x01\x02")
        return done

    monkeypatch.setattr(HostDevice, "move", off)
    assert replay(mooncake(30), gpu=1100, host=600).mismatches > 0


def test_broken_laws_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    suspend = Manager.suspend

    def leaky(self: Manager, seq: object, after: object = None) -> None:
        suspend(self, seq, after)  # type: ignore[arg-type]
        self.host.counts[1] += 1

    monkeypatch.setattr(Manager, "suspend", leaky)
    assert "law 16" in replay(mooncake(30), gpu=1100, host=600).violations[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input_length": 5}', "line 2: .*missing required field `output_length`"),
        ('{"input_length": "5", "output_length": 1}', "line 2: Expected `int`, got `str`"),
        ('{"input_length": 0, "output_length": 1}', "line 2: a request of 0 prompt"),
        ('{"input_length": -1, "output_length": 1}', "line 2: Expected `int` >= 0"),
        ("not json", "line 2: .*malformed"),
    ],
)
def test_malformed_lines_are_named_and_skipped_only_if_asked(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "trace.jsonl"
    good = '{"input_length": 5, "output_length": 1, "timestamp": 3, "extra": true}'
    path.write_text(f"{good}\n{line}\n\n{good}\n")
    with pytest.raises(TraceError, match=message):
        list(read_mooncake(path))
    assert list(read_mooncake(path, skip=True)) == [Request(5, 1), None, Request(5, 1)]


def test_scaling_keeps_a_request_within_what_is_allowed() -> None:
    content, small = ((7, 512), (8, 100)), ((7, 51), (8, 10))
    assert scaled(Request(1000, 100, content), 0.1, 5000) == Request(100, 10, small)
    assert scaled(Request(1000, 100, content), 0.0001, 5000) == Request(1, 1, ((7, 1), (8, 1)))
    big = scaled(Request(10_000, 10_000), 1.0, 5000)
    assert (big.prompt_tokens, big.total_tokens) == (4999, 5000)


def test_the_first_requests_of_a_trace_are_taken_whatever_is_skipped() -> None:
    one, other = Request(1, 1), Request(2, 2)
    assert first_requests([None, one, None, other, None, one], 2) == ([one, other], 2)
    assert (
        first_requests([None, one, None], 5)
        == first_requests([None, one, None], None)
        == ([one], 2)
    )


# What prompts say.


def test_equal_content_is_equal_ids_up_to_the_prompt_and_nothing_else_is() -> None:
    """Content is of any length, and of the same name it begins alike."""
    request = Request(100, 20, content=((3, 41), (4, 41), (5, 41)))
    ids, others = (request.token_ids(number) for number in (1, 2))
    assert len(ids) == 120
    assert ids[:100] == others[:100]
    assert not {*ids[100:]} & {*others[100:]}
    assert [*request.token_ids(1)] == [*ids], "a request says the same again"
    longer = Request(100, 20, content=((3, 50), (4, 41))).token_ids(1)
    assert longer[:41] == ids[:41]
    assert longer[41] != ids[41]
    assert longer[50:91] == ids[41:82], "wherever it stands"
    assert min(longer[91:]) >= OWN_IDS > max(longer[:91])


def test_ids_fit_however_large_the_names() -> None:
    request = Request(9, 1, content=((2**64 - 1, 4), (-5, 4)))
    assert 0 <= min(request.token_ids(10**9)) <= max(request.token_ids(10**9)) < 2**31


def test_a_share_of_the_requests_begins_with_one_of_the_shared_prompts() -> None:
    requests = sharing(uniform(3000, 2000, 5), 15, 512, 0.9, seed=1)
    assert {(one.prompt_tokens, one.output_tokens) for one in requests} == {(2000, 5)}
    pieces = [piece for one in requests for piece in one.content]
    shared, own = ([p for p in pieces if (p[0] < 15) is inside] for inside in (True, False))
    assert 0.88 < len(shared) / len(requests) < 0.92
    assert len(set(shared)) == 15, "a shared prompt has one length"
    assert min(shared.count(piece) for piece in set(shared)) > 100, "all are as likely"
    assert len({name for name, _ in own}) == len(own) == 3000 - len(shared)
    lengths = [tokens for _, tokens in {*shared, *own}]
    assert 256 <= min(lengths) < 300
    assert 724 < max(lengths) <= 768
    assert 490 < sum(lengths) / len(lengths) < 534


def test_what_is_shared_is_drawn_from_the_seed() -> None:
    def drawn(count: int, seed: int) -> list[Request]:
        return sharing(uniform(count, 100, 5), 4, 30, 0.5, seed)

    assert drawn(50, 7) == drawn(50, 7) == drawn(80, 7)[:50]
    assert drawn(50, 7) != drawn(50, 8)


@pytest.mark.parametrize(
    ("prompts", "mean_tokens", "share", "message"),
    [
        (0, 512, 0.5, "0 prompts of 512 tokens"),
        (3, 0, 0.5, "3 prompts of 0 tokens"),
        (3, 512, -0.1, "a share of -0.1 is not from 0 to 1"),
        (3, 512, 90.0, "a share of 90.0 is not from 0 to 1"),
        (3, 512, float("nan"), "a share of nan"),
    ],
)
def test_shares_that_mean_nothing_are_refused(
    prompts: int, mean_tokens: int, share: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sharing(uniform(5, 100, 5), prompts, mean_tokens, share, 0)


def test_hits_are_the_whole_blocks_of_what_is_shared() -> None:
    """One at a time, everybody but the first of each prompt has all of it: whole blocks, and the
    first tokens of the next; the last token of a prompt that is cut is computed."""
    requests = sharing(uniform(40, 60, 5), 3, 64, 0.8, seed=2)
    seen = [{one.content[0] for one in requests[:at]} for at in range(len(requests))]
    again = [one.content[0] for one, known in zip(requests, seen, strict=True)
             if one.content[0] in known]  # fmt: skip
    wanted = sum(min(tokens, 59) // 32 * 32 for _, tokens in again)
    report = replay(requests, gpu=200, host=400, batch=1)
    assert report.hits == {"alias": 0, "live": 0, "parked": 0, "span": 0, "host": wanted}
    tokens = sum(min(tokens, 59) for _, tokens in again)
    assert report.hit_rate == round(tokens / (40 * 60), 4) > 0.3
    assert (report.mismatches, report.violations) == (0, [])


def test_shared_prompts_under_pressure() -> None:
    work = [Request(700, 20 + 15 * (number % 5)) for number in range(60)]
    requests = sharing(work, 5, 300, 0.9, seed=3)
    report = replay(requests, gpu=70, host=90, streams="adversarial")
    assert report.requests_finished == 60
    assert (report.mismatches, report.violations) == (0, [])
    assert min(report.hits[source] for source in ("alias", "live", "host")) > 0
    assert report.hits["alias"] == report.alias_maps * 128
    assert report.promotions > 0
    assert report.remaps + report.spans_spilled > 0
    assert report.bytes_verified > 3_000_000


def test_hits_say_how_they_came() -> None:
    """One after the other: the second maps three frames of the first and outlives it. The third
    wants one and a half of them: the half is copied from the span that the first has left, and of
    the next block what begins alike."""
    requests = [
        Request(390, 5, ((1, 384),)), Request(390, 60, ((1, 384),)), Request(390, 5, ((1, 200),)),
    ]  # fmt: skip
    report = replay(requests, gpu=40, host=40, batch=2, pace=Pace(most_admitted=1))
    assert report.hits == {"alias": 384 + 128, "live": 0, "parked": 0, "span": 64, "host": 0}
    assert report.alias_maps == 4
    assert (report.promotions, report.spans_spilled) == (0, 0)
    assert report.hit_rate == round((576 + 8) / (3 * 390), 4)
    assert (report.mismatches, report.violations) == (0, [])


def test_one_that_comes_back_from_the_host_is_found_on_the_gpu_again() -> None:
    requests = [Request(100, 5, ((1, 96),))] * 3
    one = replay(requests, gpu=40, host=40, batch=1)
    assert one.hits == {"alias": 0, "live": 0, "parked": 0, "span": 0, "host": 2 * 96}
    assert one.promotions == 2 * 3
    few = replay(requests, gpu=40, host=40, batch=3, pace=Pace(most_admitted=1))
    assert few.hits == {"alias": 0, "live": 2 * 96, "parked": 0, "span": 0, "host": 0}
    assert few.promotions == 0


# Its pace, and an early end.


def test_a_step_reads_all_history_if_that_is_asked_for() -> None:
    """Four steps after the prompt read what is there; the end reads everything once more."""
    work = [Request(100, 4)]
    rows = 100 + 101 + 102 + 103 + 104
    everything = replay(work, gpu=20, host=0, pace=Pace(read_tokens=None))
    assert everything.bytes_verified == rows * SHAPE.token_bytes
    some = replay(work, gpu=20, host=0, pace=Pace(read_tokens=None, most_bytes=800))
    assert some.bytes_verified == (25 + 3 * 21 + 104) * SHAPE.token_bytes


def test_the_laws_are_checked_as_often_as_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Manager] = []
    monkeypatch.setattr("kvstate.campaign.engine.check_laws", asked.append)
    for every, times in ((None, 1), (2, 1 + 3)):
        asked.clear()
        replay(uniform(1, 10, 5), gpu=20, host=0, pace=Pace(laws_every=every))
        assert len(asked) == times


def test_no_more_are_let_in_at_a_time_than_is_said() -> None:
    seen = []
    engine = engine_of(100, 0, pace=Pace(most_admitted=2))
    engine.run(uniform(7, 50, 20), lambda now: seen.append(now.requests_admitted))
    assert seen[:5] == [2, 4, 6, 7, 7]
    assert engine.outcome.requests_finished == 7


@pytest.mark.parametrize("streams", ["eager", "adversarial"])
def test_a_replay_that_is_stopped_reads_everybody_back_and_leaves_nothing(streams: str) -> None:
    engine = engine_of(60, 30, streams)
    outcome = engine.run(uniform(50, 300, 200), stop=lambda: engine.outcome.steps == 260)
    assert outcome.steps == 260
    assert 0 < outcome.requests_finished < outcome.requests_admitted < 50
    assert engine.kv.counters["suspends"] > 0
    assert (outcome.mismatches, outcome.violations) == (0, [])
    assert engine.device.ledger().empty


def test_content_is_what_others_may_begin_with_too() -> None:
    assert Request(100, 20, ((3, 41), (4, 41))).content_tokens == 82
    assert Request(100, 20, ((3, 141),)).content_tokens == 100
    assert Request(100, 20).content_tokens == 0


# The engine's own books.


def test_neighbouring_blocks_of_one_writer_are_read_back_as_one() -> None:
    story = Story(1, 100, b"", committing=True, prompt=range(50), block_tokens=8)
    story.begin([(8, 5), (8, 5), (8, 6), (8, 6), (8, 5)])
    assert story.written == [(16, 5), (16, 6), (8, 5)]
    assert story.writers(8, 24) == ((8, 5), (8, 6))
    assert [*story.tokens] == [*range(40)]
    assert all(a[:2] != b[:2] for a, b in pairwise(story.rows(0, 0, 40, 32)))


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_it_was_after_the_laws(
    monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    found = []

    def looking(kv: Manager) -> None:
        found.append(gc.isenabled())
        check_laws(kv)

    monkeypatch.setattr("kvstate.campaign.engine.check_laws", looking)
    try:
        if not collects:
            gc.disable()
        replay(uniform(2, 40, 5), gpu=20, host=0, device="null")
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    assert set(found) == {False}


def test_a_prefix_is_copied_if_mapping_is_off() -> None:
    shape, tiers = LayerSpec(1, 8, "float16", 1), (GpuTier(80 * 4096, 4096), HostTier(80 * 4096))
    requests = [Request(300, 40, ((1, 256),))] * 4
    for alias in (True, False):
        config = serving_config(shape, *tiers, block=32, batch=2, alias=alias)
        device = HostDevice()
        kv = Engine(config, device, 2, pace=Pace(most_admitted=1))
        outcome = kv.run(requests)
        assert (outcome.mismatches, outcome.violations) == (0, [])
        done = kv.kv.counters
        assert (done["hit_blocks.alias"] > 0) == alias
        assert done["hit_blocks.alias"] + done["hit_blocks.live"] + done["hit_blocks.host"] > 0


@pytest.mark.parametrize("other", [1, 1 << 30, (1 << 30) + 1, 1 << 62])
def test_content_of_another_name_is_other_content(other: int) -> None:
    """However large the names are, and whatever they have in common."""
    one, same, differs = (
        np.array(Request(8, 1, ((name, 8),)).token_ids(5))[:8] for name in (0, 0, other)
    )
    assert (one == same).all()
    assert not (one[: len(differs)] == differs).all()
    assert differs.max() < OWN_IDS


def test_what_is_longer_than_a_sequence_is_cut_and_counted() -> None:
    fits, long = Request(8, 2), Request(80, 20)
    assert [is_cut(one, 1.0, 50) for one in (fits, long)] == [False, True]
    assert is_cut(fits, 10.0, 50)
    assert scaled(long, 1.0, 50).total_tokens == 50
