"""The command line: stable keys, exit codes, and nothing but one object on standard output with
--json."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import kvstate
from kvstate import Manager, trace
from kvstate.campaign import directed
from kvstate.campaign import fuzz as fuzzing
from kvstate.campaign.engine import Outcome
from kvstate.campaign.fuzz import ROWS, Tally
from kvstate.campaign.replay import ReplayReport
from kvstate.campaign.report import FuzzReport
from kvstate.cli import BROKEN, HELD, INTERRUPTED, MISUSE, app, main
from kvstate.errors import ArgumentError
from kvstate.gpu import NullDevice
from kvstate.spec.coupling import TABLES
from tests.conftest import small
from tests.test_replay import SLICE


def run(*args: object, code: int = HELD) -> Any:
    """Run a command; what it printed on standard output, decoded if it is JSON."""
    done = CliRunner().invoke(app, [str(arg) for arg in args])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout) if "--json" in args else done.stdout


HOST = ("--device", "host")
FUZZ_KEYS = {
    "seed", "seconds", "calls", "calls_per_second", "rows_fired", "rows_total", "states_reached",
    "states_total", "laws", "bytes_verified", "mismatches", "violations",
}  # fmt: skip
REPLAY_KEYS = {
    "requests_total", "requests_finished", "tokens", "steps", "suspends", "resumes", "drops",
    "adoptions", "driver_calls", "driver_calls_steady", "frames_peak", "host_bytes_moved",
    "bytes_verified", "mismatches", "violations",
}  # fmt: skip


def fuzz(tmp_path: Path, *args: object, code: int = HELD) -> Any:
    common = ("--calls", 500, "--save", tmp_path / "failures", "--no-directed")
    return run("fuzz", *common, *args, code=code)


def test_fuzz_reports_documented_keys_and_repeats(tmp_path: Path) -> None:
    one, other = (fuzz(tmp_path, *HOST, "--seed", 3, "--json") for _ in range(2))
    assert one.keys() >= FUZZ_KEYS
    msgspec.convert(one, FuzzReport, strict=True)
    changing = {"seconds", "calls_per_second"}
    assert {k: v for k, v in one.items() if k not in changing} == {
        k: v for k, v in other.items() if k not in changing
    }
    assert one["calls"] >= 500
    assert one["device"] == "host"
    assert one["rows_total"] == len(ROWS)


def test_known_failures_are_played_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They poison managers and leave copies that never end: that is what they are for."""
    fuzz(tmp_path, *HOST, "--known", Path(__file__).parent / "known")
    assert [record.message for record in caplog.records] == []


def test_fuzz_without_a_seed_explores_anew(tmp_path: Path) -> None:
    seeds = {fuzz(tmp_path, "--json", "--device", "null")["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_campaign_that_has_not_seen_everything_says_so_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directed, "programs", tuple)
    report = run("fuzz", "--calls", 80, "--save", tmp_path, "--json", code=BROKEN)
    assert report["violations"] == 0
    assert any(line.startswith("row ") for line in report["unseen"])
    assert "never seen" in run("fuzz", "--calls", 80, "--save", tmp_path, code=BROKEN)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seconds", -5, "-5.0 is no time to play"), ("--seconds", "nan", "nan is no time"),
        ("--calls", 0, "greater than or equal to 1"), ("--seed", -1, "greater than or equal to 0"),
        ("--known", "/nonexistent", "'/nonexistent' does not exist"),
    ],
)  # fmt: skip
def test_a_campaign_that_would_do_nothing_is_misuse(option: str, value: object, said: str) -> None:
    done = CliRunner().invoke(app, ["fuzz", option, str(value)])
    assert done.exit_code == MISUSE
    assert said in done.stderr
    assert "seed" not in done.stderr.splitlines()[0]


@pytest.mark.parametrize("directed_too", [True, False])
def test_an_interrupted_campaign_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directed_too: bool
) -> None:
    played = 0

    def interrupts(tally: Tally) -> str:
        nonlocal played
        played += 1
        if played == 3:
            raise KeyboardInterrupt
        return ""

    monkeypatch.setattr("kvstate.cli._fuzz_line", interrupts)
    options = () if directed_too else ("--no-directed",)
    report = run("fuzz", *HOST, "--save", tmp_path, *options, "--json", code=INTERRUPTED)
    assert (report["interrupted"], report["episodes"], report["unseen"]) == (True, 3, [])
    assert report["calls"] > 0


def test_an_interrupt_elsewhere_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupts() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstate.cli.examine", interrupts)
    done = CliRunner().invoke(app, ["doctor"])
    assert (done.exit_code, done.output) == (INTERRUPTED, "")


def test_the_version_and_quiet() -> None:
    assert run("--version") == f"kvstate {kvstate.__version__}\n"
    loud, still = (CliRunner().invoke(app, [*first, "fuzz", "--calls", "1"]) for first in
                   ([], ["--quiet"]))  # fmt: skip
    assert loud.stderr.startswith("seed ")
    assert still.stderr == ""


def test_what_is_no_terminal_is_not_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directed, "programs", tuple)
    common = ("fuzz", *HOST, "--calls", 80, "--seed", 5, "--save", tmp_path)
    longest = max(run(*common, "--json", code=BROKEN)["unseen"], key=len)
    assert len(longest) > 60
    assert longest in run(*common, code=BROKEN)


def forget_slots(broken: pytest.MonkeyPatch) -> None:
    """A drop forgets a host slot from now on."""
    drop = Manager.drop

    def forgets(self: Manager, seq: Any, after: Any = None) -> None:
        drop(self, seq, after)
        self.host.counts[0] += 1

    broken.setattr(Manager, "drop", forgets)


def test_a_failure_is_shown_saved_tried_first_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        forget_slots(broken)
        report = fuzz(tmp_path, "--seed", 1, "--json", code=BROKEN)
        (failure,) = report["failures"]
        assert failure["replay"] == f"kvstate replay {failure['trace']}"
        again = fuzz(tmp_path, "--seed", 2, "--json", code=BROKEN)
        assert again["calls"] == 0, "what failed before is tried before anything is drawn"
        assert again["failures"][0]["trace"] == failure["trace"]
        run("replay", failure["trace"], code=1)
    run("replay", failure["trace"])
    assert fuzz(tmp_path, "--seed", 2, "--json")["violations"] == 0


def test_what_was_shrunk_too_little_is_shrunk_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing._shrunk, "__defaults__", (30,))
    with monkeypatch.context() as broken:
        forget_slots(broken)
        (long,) = fuzz(tmp_path, "--seed", 1, "--json", code=BROKEN)["failures"]
        assert long["cut_short"]
        short = run("shrink", long["trace"], "--save", tmp_path, "--json")
        assert not short["cut_short"]
        assert short["kind"] == long["kind"]
        assert short["calls"] < long["calls"]
        said = CliRunner().invoke(app, ["shrink", long["trace"], "--calls", "9", "--save",
                                        str(tmp_path)])  # fmt: skip
        assert f"kvstate shrink {tmp_path}" in said.stderr
    done = CliRunner().invoke(app, ["shrink", short["trace"]])
    assert done.exit_code == MISUSE
    assert "does not fail: there is nothing to shrink" in done.stderr


def test_replay_of_a_serving_trace(tmp_path: Path) -> None:
    sizes = (*HOST, "--requests", 20, "--gpu", 1100, "--host", 120, "--batch", 8)
    report = run("replay", SLICE, *sizes, "--json")
    assert report.keys() >= REPLAY_KEYS
    msgspec.convert(report, ReplayReport, strict=True)
    assert report["requests_finished"] == report["requests_total"] == 20
    assert "20 of 20 finished" in run("replay", SLICE, *sizes)


def recorded(path: Path) -> Path:
    """A trace of calls."""
    with path.open("wb") as file, Manager(small(), NullDevice(), record=file.write) as kv:
        kv.create(max_tokens=8).resume()
    return path


def test_a_trace_of_calls_says_in_one_object_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recorded(tmp_path / "calls.jsonl")
    report = run("replay", path, *HOST, "--json")
    assert (report["held"], report["calls"], report["kind"]) == (True, 2, None)
    resume = Manager.resume

    def forgets(self: Manager, seq: Any, stream: Any = None) -> None:
        resume(self, seq, stream)
        self.gpu.counts[0] += 1

    monkeypatch.setattr(Manager, "resume", forgets)
    report = run("replay", path, *HOST, "--json", code=BROKEN)
    assert (report["held"], report["kind"]) == (False, "law 1 (conservation)")


@pytest.mark.parametrize(
    "options",
    [("--requests", "1"), ("--host", "5"), ("--no-reuse",), ("--streams", "latest")],
    ids=" ".join,
)
def test_a_trace_of_calls_refuses_what_says_nothing_about_it(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = CliRunner().invoke(app, ["replay", str(recorded(tmp_path / "c.jsonl")), *options])
    assert done.exit_code == MISUSE
    assert f"{options[0].replace('no-', '')}: a trace of calls is played" in done.stderr


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv"])
def test_a_replay_of_nothing_is_misuse(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("\n" if name == "empty.jsonl" else "")
    done = CliRunner().invoke(app, ["replay", str(tmp_path / name), *HOST])
    assert done.exit_code == MISUSE
    assert "has no requests: there is nothing to replay" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--uniform", "200,8", "--scale", "inf"), "--scale"),
        (("--uniform", "200,8", "--scale", "nan"), "--scale"),
        (("--uniform", "200,8", "--requests", "1000000000000"), "--requests"),
        (("--uniform", "200,8", "--shared", "1000000000,512,0.9"), "at most 1,000,000 prompts"),
        (("--uniform", "1000000000000,8"), "at most 100,000,000 can"),
    ],
)
def test_a_replay_without_end_is_misuse(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["replay", *HOST, *options])
    assert done.exit_code == MISUSE
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.jsonl.gz", b"{}"), ("a.jsonl", b"[" * 100_000), ("a.jsonl", b"\xff{}")],
)
def test_a_file_that_cannot_be_read_is_one_line_and_misuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    name: str, data: bytes,
) -> None:  # fmt: skip
    (tmp_path / name).write_bytes(data)
    monkeypatch.setattr("sys.argv", ["kvstate", "replay", str(tmp_path / name), *HOST])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == MISUSE
    said = capsys.readouterr().err
    assert f"{tmp_path / name}: line 1: " in said.replace("\n", "")
    assert "Traceback" not in said


def test_an_interrupted_replay_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0

    def interrupts(outcome: Outcome, total: int) -> str:
        nonlocal told
        told += 1
        if told == 40:
            signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr("kvstate.cli._replay_line", interrupts)
    before = signal.getsignal(signal.SIGINT)
    sizes = ("replay", *HOST, "--uniform", "64,16", "--requests", 60, "--batch", 4)
    report = run(*sizes, "--json", code=INTERRUPTED)
    assert report["interrupted"]
    assert 0 < report["requests_finished"] < report["requests_total"] == 60
    assert (report["mismatches"], report["violations"]) == (0, [])
    assert signal.getsignal(signal.SIGINT) is before


def test_replay_of_requests_that_share_prompts_repeats() -> None:
    sizes = ("replay", "--device", "null", "--uniform", "200,8", "--requests", 60, "--json")
    shared = (*sizes, "--shared", "4,128,0.75", "--batch", 4)
    one, same, other = (run(*shared, "--seed", seed) for seed in (5, 5, 6))
    assert one["requests_finished"] == 60
    assert one["hits"] == same["hits"] != other["hits"]
    assert 0.2 < one["hit_rate"] < 0.75
    assert run(*sizes)["hit_rate"] == 0


def test_what_cannot_be_shared_is_refused_by_its_numbers() -> None:
    for given, message in (
        ("15,512", "'15,512'"),
        ("15,512,0.9,1", "'15,512,0.9,1'"),
        ("a,512,0.9", "'a'"),
        ("0,512,0.9", "0 prompts of 512 tokens"),
        ("15,512,1.5", "a share of 1.5"),
    ):
        done = CliRunner().invoke(app, ["replay", "--uniform", "64,8", "--shared", given])
        assert done.exit_code == MISUSE
        assert message in " ".join(done.stderr.replace("│", "").split())


def test_replay_of_equal_requests_and_of_a_recorded_trace(tmp_path: Path) -> None:
    report = run("replay", *HOST, "--uniform", "64,8", "--requests", 12, "--json")
    assert report["requests_finished"] == 12
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file, Manager(small(), NullDevice(), record=file.write) as kv:
        seq = kv.create(max_tokens=8)
        seq.resume()
        kv.settle(kv.step(kv.batch([seq]), 3))
        seq.suspend()
        seq.close()
    run("replay", path)
    assert trace.is_trace(path)


@pytest.mark.parametrize(
    "args",
    [
        ("replay",),
        ("replay", SLICE, "--uniform", "1,1"),
        ("replay", SLICE, "--shared", "3,64,0.5"),
        ("replay", "--shared", "3,64,0.5"),
        ("replay", "--uniform", "x"),
        ("replay", "--uniform", "0,5"),
        ("replay", "--uniform", "64,8", "--seed", "-1"),
        ("replay", "nowhere.jsonl"),
        ("fuzz", "--device", "abacus"),
        ("fuzz", "--workers", "0"),
        ("diagram", "pagee"),
        ("nonsense",),
    ],
)
def test_misuse_exits_2(args: tuple[object, ...]) -> None:
    run(*args, code=MISUSE)


def test_errors_of_ours_exit_2_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    monkeypatch.setattr("sys.argv", ["kvstate", "replay", str(path)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == MISUSE
    assert "TraceError" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("page", "--write", "DIR"), ("--write", "DIR", "--check", "DIR"),
        ("--check", "DIR", "--format", "dot"), ("--write", "DIR", "-o", "FILE"),
        ("--format", "svg"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_does_not_go_together_draws_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    given = [option.replace("DIR", str(tmp_path / "new")) for option in options]
    run("diagram", *given, code=MISUSE)
    assert list(tmp_path.iterdir()) == []


def test_drawings_go_into_files(tmp_path: Path) -> None:
    one, all_of_them = tmp_path / "new" / "page.dot", tmp_path / "all"
    run("diagram", "page", "--format", "dot", "-o", one)
    assert one.read_text().startswith("digraph")
    written = run("diagram", "-o", all_of_them, "--json")["written"]
    assert written == [str(all_of_them / f"{name}.mmd") for name in TABLES]
    assert (all_of_them / "page.mmd").read_text().startswith("stateDiagram-v2")


def test_pages_are_written_over_nothing_else(tmp_path: Path) -> None:
    own, linked = tmp_path / "README.md", tmp_path / "elsewhere.md"
    own.write_text("# written by hand\n")
    done = CliRunner().invoke(app, ["diagram", "--write", str(tmp_path)])
    assert isinstance(done.exception, ArgumentError)
    assert f"{own} is in the way of a page" in str(done.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    own.unlink()
    run("diagram", "--write", tmp_path)
    (tmp_path / "page.md").rename(linked)
    (tmp_path / "page.md").symlink_to(linked)
    done = CliRunner().invoke(app, ["diagram", "--write", str(tmp_path)])
    assert isinstance(done.exception, ArgumentError)
    assert (tmp_path / "page.md").is_symlink()


def test_diagram(tmp_path: Path) -> None:
    assert run("diagram", "range").startswith("stateDiagram-v2")
    assert run("diagram", "page", "--format", "dot").startswith("digraph")
    assert set(run("diagram", "--json")) == set(TABLES)
    assert len(run("diagram", "--write", tmp_path, "--json")["written"]) == len(TABLES) + 2
    assert run("diagram", "--check", tmp_path, "--json") == {"stale": []}
    (tmp_path / "page.md").write_text("other")
    stale = run("diagram", "--check", tmp_path, "--json", code=BROKEN)
    assert stale == {"stale": [str(tmp_path / "page.md")]}


def test_doctor() -> None:
    report = run("doctor", "--json")
    assert "host" in report["devices"]
    assert {"name", "value", "meaning", "ok"} == set(report["findings"][0])
    assert "what follows" in run("doctor")
