"""Replays: a slice of a public serving trace, under pressure, on real memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstate import GpuTier, HostTier, LayerSpec, Manager, TraceError
from kvstate.campaign.engine import Engine, Request
from kvstate.campaign.replay import (
    ReplayReport,
    read_mooncake,
    replay_report,
    scaled,
    serving_config,
    uniform,
)
from kvstate.gpu import HostDevice, open_device

SLICE = Path(__file__).parent / "data" / "mooncake_300.jsonl.gz"
SHAPE = LayerSpec(kv_heads=1, head_dim=8, dtype="float16")


def replay(
    requests: list[Request], gpu: int, host: int, streams: str = "eager", device: str = "host"
) -> ReplayReport:
    frame = 4096
    tiers = GpuTier(gpu * frame, frame), HostTier(host * frame) if host else None
    config = serving_config(SHAPE, *tiers, block=32, batch=16)
    work = [scaled(request, 1.0, config.max_tokens) for request in requests]
    engine = Engine(config, open_device(device, streams=streams, seed=1), 16)
    return replay_report(engine, engine.run(work), len(work), 0, 1.0)


def mooncake(count: int) -> list[Request]:
    requests = [request for request in read_mooncake(SLICE) if request is not None]
    return requests[:count]


def test_the_slice_is_what_it_says() -> None:
    requests = mooncake(300)
    assert len(requests) == 300
    assert requests[0].prompt_tokens == 6758
    assert requests[0].output_tokens == 500
    assert requests[0].blocks == tuple(range(14))


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
    assert scaled(Request(1000, 100), 0.1, 5000) == Request(100, 10, block_tokens=51)
    assert scaled(Request(1000, 100), 0.0001, 5000) == Request(1, 1, block_tokens=1)
    big = scaled(Request(10_000, 10_000), 1.0, 5000)
    assert (big.prompt_tokens, big.total_tokens) == (4999, 5000)
