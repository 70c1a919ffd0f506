"""Traces: whatever a manager records can be read and played again; whatever is not a trace is
refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate import Manager, TraceError, cli, trace
from kvstate.campaign.fuzz import play
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.campaign.rules import draw, draw_config, draw_weights
from kvstate.device import ByteDevice
from kvstate.errors import ArgumentTypeError, KvStateError
from kvstate.gpu import HostDevice
from kvstate.observe import PUBLIC, observe
from tests.conftest import small

HEADER = trace.Header(kvstate_trace=1, config=small())


def opened(streams: str, seed: int) -> ByteDevice:
    return HostDevice(streams=streams, seed=seed)


def record(path: Path, seed: int, calls: int = 60) -> None:
    """Let a campaign drive a manager that records itself."""
    random = Random(seed)
    config, weights = draw_config(random), draw_weights(random)
    header = trace.Header(kvstate_trace=1, config=config, streams="adversarial", strict=False)
    device = HostDevice(streams="adversarial", seed=seed)
    with path.open("wb") as file:
        player = Player(header, device)
        observe(player.kv, record=file.write)
        for _ in range(calls):
            player.apply(draw(player, random, weights))
            if player.kv.actor.fault is not None:
                break
        player.finish()


def test_a_recorded_run_is_played_again_from_a_debugger(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file, Manager(small(), HostDevice(), record=file.write) as kv:
        kv.create(max_tokens=8).resume()
    player = cli.play(str(path))
    assert player.kv._created == 1
    assert player.kv.closed


def test_a_sink_that_takes_no_bytes_is_refused(tmp_path: Path) -> None:
    device = HostDevice()
    with (tmp_path / "run.jsonl").open("w") as text:
        with pytest.raises(ArgumentTypeError, match=r"record does not take a line .*'wb'"):
            Manager(small(), device, record=text.write)  # type: ignore[arg-type]
        Manager(small(), device).close()


@pytest.mark.parametrize("seed", range(12))
def test_a_recorded_run_replays_with_the_same_outcomes(tmp_path: Path, seed: int) -> None:
    """On another schedule, with completions entering where they entered: same calls, same
    errors."""
    path = tmp_path / "run.jsonl"
    record(path, seed)
    header, calls = trace.read(path)
    assert header.strict
    failed_device_calls = [c for c in calls if c.error in ("DeviceError", "DeviceFault")]
    if failed_device_calls:
        calls = calls[: calls.index(failed_device_calls[0])]
    play(header, calls, opened)


def test_a_replay_notices_another_outcome(tmp_path: Path) -> None:
    calls: list[trace.AnyCall] = [trace.Create(seq=1, max_tokens=8)]
    calls.append(trace.Resume(seq=1, error="OutOfFrames"))
    with pytest.raises(Broken, match="replay"):
        play(HEADER, calls, opened)


def test_every_public_call_is_recorded(tmp_path: Path) -> None:
    lines: list[bytes] = []
    device = HostDevice()
    kv = Manager(small(max_sequences=2), device, record=lines.append)
    seq, other = kv.create(max_tokens=8, salt=b"\x01", commit=False), kv.dummy(4)
    other.close()
    for bad in (lambda: kv.resize(seq, 3), lambda: kv.create([7], max_tokens=99)):
        with pytest.raises(KvStateError):
            bad()
    seq.resume(device.stream())
    kv.settle(kv.step(kv.batch([seq]), 5), [4])
    seq.resize(8)
    kv.tensors_all(seq)
    seq.rewind(3)
    seq.stop_committing() if seq.committing else None
    other = kv.create(max_tokens=8)
    other.resume()
    kv.settle(kv.step(kv.batch([other, seq])))
    kv.commit_each(kv.batch([other]), [7])
    other.commit([])
    with pytest.raises(KvStateError):
        other.commit([8])
    other.stop_committing()
    kv.clear_reuse()
    seq.close()
    other.fork(8).close()
    other.suspend(after=device.record(None))
    kv.wait(other)
    kv.poll()
    other.drop()
    kv.trim(2)
    kv.close()
    records = [json.loads(line) for line in lines]
    assert records[0]["kvstate_trace"] == 1
    names = [record["call"] for record in records[1:]]
    assert len(set(names) - {"refused"}) == len(PUBLIC)
    assert names.count("create") == 2
    assert records[1] == {
        "call": "create", "ended": [], "seq": 1, "max_tokens": 8, "salt": "01", "commit": False,
    }  # fmt: skip
    refused = [record for record in records if record.get("error")]
    assert [(r["call"], r["error"]) for r in refused] == [
        ("resize", "IllegalTransition"), ("refused", "ArgumentError"), ("refused", "ArgumentError"),
    ]  # fmt: skip
    created, committed = refused[1:]
    assert (created["name"], created["arguments"]["max_tokens"]) == ("create", "99")
    assert committed["arguments"] == {"seq": "sequence 3", "tokens": "[8]"}
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(lines))
    play(*trace.read(path), opened)


GOOD = trace.encode(trace.Resume(seq=3, stream=1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "line 7: .*truncated"),
        (b"[]", "line 7: Expected `object`"),
        (b'{"call":"resume"}', "line 7: .*missing required field `seq`"),
        (b'{"call":"resume","seq":-1}', r"line 7: Expected `int` >= 0 - at `\$.seq`"),
        (b'{"call":"resume","seq":"1"}', r"line 7: Expected `int`, got `str` - at `\$.seq`"),
        (b'{"call":"resume","seq":1,"x":1}', "line 7: .*unknown field `x`"),
        (b'{"call":"fly","seq":1}', r"line 7: Invalid value 'fly' - at `\$.call`"),
        (b'{"call":"commit","seq":1,"tokens":[4294967296]}', r"at `\$.tokens\[0\]`"),
        (b'{"call":"trim","fail":{"map":0}}', "line 7: Expected `int` >= 1"),
        (GOOD[:-1], "line 7: .*truncated"),
    ],
)
def test_a_line_that_is_no_call_is_refused_by_number(line: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace.decode_call(line, 7)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_do_anything_but_decode_or_be_refused(line: bytes) -> None:
    assert decoded(line) in ("a call", "line 1")


def decoded(line: bytes) -> str:
    """What comes of a line: a call, or the beginning of what refuses it."""
    try:
        return "a call" if isinstance(trace.decode_call(line, 1), trace.Call) else "no call"
    except TraceError as error:
        return str(error).partition(":")[0]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(
    st.sampled_from(["create", "step", "settle", "commit", "poll"]),
    st.sampled_from(["seq", "tokens", "seqs", "step", "fail", "ended"]),
    JUNK,
)
def test_no_value_in_a_field_does_anything_but_fit_or_be_refused(
    call: str, name: str, value: Any
) -> None:
    fields = {"call": call, "seq": 1, "step": 1, "seqs": [1], "tokens": [1], "max_tokens": 4}
    line = json.dumps(fields | {name: value}).encode()
    assert decoded(line) in ("a call", "line 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: not the header"),
        ('{"call":"poll"}', "line 1: not the header"),
        ('{"kvstate_trace":1}', "missing required field `config`"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        trace.read(path)


def test_a_trace_of_another_version_or_of_a_bad_configuration_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    header = json.loads(trace.encode(HEADER))
    path.write_text(json.dumps(header | {"kvstate_trace": 2}))
    with pytest.raises(TraceError, match="format version 2; this reads 1"):
        trace.read(path)
    header["config"]["tokens_per_block"] = 0
    path.write_text(json.dumps(header))
    with pytest.raises(TraceError, match="tokens_per_block is 0"):
        trace.read(path)


def test_files_are_read_plain_and_gzipped(tmp_path: Path) -> None:
    calls = [trace.Create(seq=1, max_tokens=8), trace.Resume(seq=1)]
    plain, zipped = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    trace.write(plain, HEADER, calls)
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert trace.read(plain) == trace.read(zipped) == (HEADER, calls)
    assert trace.is_trace(zipped)


def test_the_schema_names_every_call() -> None:
    names = {kind["properties"]["call"]["enum"][0] for kind in _calls(trace.schema())}
    assert names == {kind.__name__.lower() for kind in trace.Call.__subclasses__()}


def _calls(schema: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = schema["components"].values()
    return [kind for kind in kinds if "call" in kind.get("properties", {})]


def _gzipped(text: bytes) -> bytes:
    return gzip.compress(text)


GOOD_HEADER = trace.encode(HEADER) + b"\n"
UNREADABLE: dict[str, tuple[str, bytes, str]] = {
    "one endless line": ("a.jsonl", b" " * (trace.LINE_BYTES + 9), "line 1: is longer than 16,777"),
    "one endless line, gzipped": (
        "a.jsonl.gz", _gzipped(b" " * (trace.LINE_BYTES + 9)), "line 1: is longer than 16,777,216",
    ),
    "not gzip": ("a.jsonl.gz", b"{}", "line 1: cannot be read: Not a gzipped file"),
    "a gzip that is cut off": (
        "a.jsonl.gz", _gzipped(GOOD_HEADER)[:-9], "cannot be read: Compressed file ended",
    ),
    "a wrong sum": ("a.jsonl.gz", _gzipped(GOOD_HEADER)[:-8] + bytes(8), "line 2: cannot be read"),
    "deep JSON": ("a.jsonl", GOOD_HEADER + b"[" * 100_000, "line 2: "),
    "no digits": ("a.jsonl", GOOD_HEADER + b'{"call":"create","seq":1,"max_tokens":8,"salt":"xy"}',
                  "line 2: non-hexadecimal"),
    "no block": ("a.jsonl", GOOD_HEADER + b'{"call":"create","seq":1,"max_tokens":8,"extra_keys":'
                 b'{"first":["00"]}}', "line 2: invalid literal"),
    "an adapter of no digits": (
        "a.jsonl", GOOD_HEADER + b'{"call":"create","seq":1,"max_tokens":8,"adapter":"hex:q"}',
        "line 2: non-hexadecimal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_file_and_line(tmp_path: Path, what: str) -> None:
    name, data, message = UNREADABLE[what]
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        trace.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
