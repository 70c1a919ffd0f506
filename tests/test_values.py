"""Values that were cut, wrapped, parsed, dropped or lost a row: one test for each that was seen.

The manager has 1 KiB a token, four tokens a block and frames of 4 KiB, and looks at every law.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from kvstate import (
    ArgumentError,
    ArgumentTypeError,
    Config,
    GpuTier,
    IllegalTransition,
    KvStateError,
    LayerSpec,
    Manager,
    Sequence,
    trace,
)
from kvstate.campaign.fuzz import play
from kvstate.config import MIB
from kvstate.device import ByteDevice
from kvstate.events import decode, encode
from kvstate.gpu import HostDevice, NullDevice
from kvstate.keys import token_bytes
from kvstate.sequence import Batch
from kvstate.view import view
from tests.conftest import small

SHAPE: Final[dict[str, Any]] = {"frames": 16, "slots": 32, "block": 4, "max_tokens": 16}


Loose = Callable[..., Any]
"""What no type checker looks into."""


def fingerprint(kv: Manager) -> list[Any]:
    """What a refused call leaves as it was."""
    return [view(kv), list(kv.columns.free), list(kv.sequences), kv._created, kv._stepped]


def refused(kv: Manager, message: str, call: Loose, *args: Any, **named: Any) -> Any:
    """The call with these arguments raises ArgumentError with this message, which is returned, and
    has changed nothing."""
    before = fingerprint(kv)
    with pytest.raises(ArgumentError, match=message) as caught:
        call(*args, **named)
    assert fingerprint(kv) == before
    return caught.value


def written(kv: Any, tokens: int = 8, **traits: Any) -> Any:
    seq = kv.create(max_tokens=16, **traits)
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), tokens))
    return seq


# Token ids.


def test_ids_that_wrap_name_nobody_elses_prompt(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    seq = written(kv)
    refused(kv, r"tokens\[0\] is 4294967297, an", seq.commit, [2**32 + 1, 2**33 + 2, 3, 4])
    assert kv.probe_reuse([1, 2, 3, 4, 9]) == 0
    seq.commit([1, 2, 3, 4])
    assert kv.probe_reuse([1, 2, 3, 4, 9]) == 4


WRONG_IDS: Final[dict[str, tuple[Any, str]]] = {
    "a float": ([1.9, True, "3"], r"\[0\] is 1.9, a float"),
    "a bool": ([1, True, "3"], r"\[1\] is True, a bool"),
    "a text": ([1, 2, "3"], r"\[2\] is '3', a str"),
    "not a number": (np.array([1.0, np.nan]), r"\[0\] is 1.0, a float64"),
    "rows": (np.arange(6).reshape(2, 3), r"has the shape \(2, 3\): one row of ids is wanted"),
    "uint32": (np.array([7, 2**32 - 1], np.uint32), r"\[1\] is 4294967295, a uint32"),
    "too large": ([2**31], r"\[0\] is 2147483648, an int"),
    "too small": ([0, -(2**31) - 1], r"\[1\] is -2147483649, an int"),
    "a set": ({1, 2}, "is {1, 2}, a set"),
    "a generator": ((one for one in (1, 2)), "a generator"),
}


@pytest.mark.parametrize("name", WRONG_IDS)
def test_what_is_no_row_of_ids_is_refused_everywhere(open_manager: Loose, name: str) -> None:
    kv = open_manager(**SHAPE)
    seq = written(kv)
    tokens, message = WRONG_IDS[name]
    refused(kv, f"prompt_tokens.*{message}", kv.create, tokens)
    refused(kv, f"prompt_tokens.*{message}", kv.probe_reuse, tokens)
    refused(kv, f"tokens.*{message}", seq.commit, tokens)
    refused(kv, f"tokens.*{message}", kv.commit_each, kv.batch([seq]), tokens)


@pytest.mark.parametrize(
    "tokens",
    [[1, 2, 3, 4], (1, 2, 3, 4), range(1, 5), [[1, 2, 3, 4]], np.array([[1, 2, 3, 4]]),
     np.arange(1, 5, dtype=np.uint64), np.arange(1, 5, dtype=">i2"), array("h", [1, 2, 3, 4]),
     np.arange(1, 5)[::-1][::-1], np.array([1, 2, 3, 4], object)],
)  # fmt: skip
def test_the_same_ids_pass_everywhere(open_manager: Loose, tokens: Any) -> None:
    kv = open_manager(**SHAPE)
    seq = written(kv)
    seq.commit(tokens)
    assert seq.keys == [token_bytes(tokens)] == [np.arange(1, 5, dtype=np.int32).tobytes()]
    assert kv.create([*range(1, 5), 9]).matched_tokens == 4
    assert kv.create(tokens).prompt == token_bytes(tokens)
    assert kv.probe_reuse(np.array([[1, 2, 3, 4, 9]])) == 4
    others = kv.batch([written(kv) for _ in range(4)])
    kv.commit_each(others, tokens)
    assert [one.known_ids for one in others] == [np.int32(id_).tobytes() for id_ in range(1, 5)]
    assert seq.fork().keys == seq.keys


@pytest.mark.torch
def test_ids_and_numbers_of_torch_are_taken_where_a_cpu_reads_them(open_manager: Loose) -> None:
    torch = pytest.importorskip("torch")
    kv = open_manager(**SHAPE)
    seq = written(kv)
    seq.commit(torch.tensor([[1, 2, 3]], dtype=torch.int16))
    kv.commit_each(kv.batch([seq]), torch.tensor([4]))
    assert seq.keys == [token_bytes([1, 2, 3, 4])]
    seq.resize(torch.tensor(12))
    kv.settle(kv.step(kv.batch([seq]), torch.tensor([2])), torch.tensor([1]))
    assert (seq.length_tokens, seq.capacity_tokens) == (9, 12)
    for wrong in (torch.tensor([1.0]), torch.tensor([True]), torch.zeros((2, 2), dtype=torch.int)):
        refused(kv, "tokens", seq.commit, wrong)


# Numbers of a step.


@pytest.mark.parametrize(
    "tokens", [2.7, "3", True, None, 2.0, [2.7], ["3"], [True], np.nan, {2: 2}]
)
def test_a_step_counts_in_whole_numbers(open_manager: Loose, tokens: Any) -> None:
    kv = open_manager(**SHAPE)
    batch = kv.batch([written(kv)])
    assert isinstance(refused(kv, "tokens", kv.step, batch, tokens), ArgumentTypeError)


@pytest.mark.parametrize("accepted", [[1.5], ["1"], [True], [[1]], [1, 1], 1, [-1], [3], [2**63]])
def test_whole_tokens_are_accepted_and_no_more_than_were_issued(
    open_manager: Loose, accepted: Any
) -> None:
    kv = open_manager(**SHAPE)
    step = kv.step(kv.batch([written(kv)]), 2)
    refused(kv, "accepted", kv.settle, step, accepted)
    assert kv.settle(step, np.array([1], np.uint8)) == ()


@pytest.mark.parametrize(
    "tokens", [2**63 - 1, [2**63 - 1], np.array([2**63 - 1]), np.array([2**64 - 1], np.uint64), 17]
)
def test_no_step_is_longer_than_a_sequence_may_be(open_manager: Loose, tokens: Any) -> None:
    kv = open_manager(**SHAPE)
    seq = written(kv)
    refused(kv, "from 0 to 16 is wanted", kv.step, kv.batch([seq]), tokens)
    refused(kv, "step: 17 tokens is not from 0 to 16", kv.step, kv.batch([seq]), 9)
    assert (seq.length_tokens, seq.scheduled_tokens) == (8, 8)


def test_a_step_that_is_refused_copies_nothing_out(open_manager: Loose) -> None:
    """What was committed is copied out by the next call that goes on, and by no other."""
    kv = open_manager(write_through="on_commit", **SHAPE)
    seq = written(kv)
    seq.commit(range(8))
    for tokens in (-1, 99, 9, "1"):
        refused(kv, "tokens", kv.step, kv.batch([seq]), tokens)
    kv.step(kv.batch([seq]), 1)
    assert len(kv.flight.transfers) == 1


# Numbers of numpy's, and what is no number.


def test_numpy_integers_are_as_good_as_ints_and_no_row_is_lost(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    rows = len(kv.columns.free)
    seq = kv.create(max_tokens=np.int64(9))
    seq.resume()
    kv.settle(kv.step(kv.batch([seq]), np.int8(4)))
    child = seq.fork(np.int64(9))
    assert (seq.max_tokens, child.max_tokens, type(child.max_tokens)) == (9, 9, int)
    for wrong in (9.0, "9", True, None, [9]):
        refused(kv, "length_tokens", kv.dummy, wrong)
    for wrong in (9.0, "9", True, [9], 17, 0):
        refused(kv, "max_tokens", kv.create, max_tokens=wrong)
        refused(kv, "max_tokens", seq.fork, wrong)
    assert len(kv.columns.free) == rows - 2
    child.close()
    seq.close()
    assert len(kv.columns.free) == rows


def test_a_wrong_stream_takes_no_row_and_no_number(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    seq = written(kv)
    before = fingerprint(kv)
    for call, first in ((kv.dummy, 4), (kv.fork, seq)):
        with pytest.raises(KvStateError, match="'a stream' is not a stream of this device"):
            call(first, stream="a stream")
        assert fingerprint(kv) == before


def large() -> Any:
    """An 8B model: 128 KiB a token, without memory."""
    layer = LayerSpec(kv_heads=8, head_dim=128, count=32)
    return Manager(Config([layer], GpuTier(8192 * 2 * MIB), max_tokens=32768), NullDevice())


def test_sizes_are_not_worked_out_in_the_width_of_the_caller() -> None:
    with large() as kv:
        seq = kv.create()
        seq.resume()
        seq.resize(np.int32(32768))
        assert seq.capacity_tokens == 32768
        seq.close()


def test_questions_are_answered_right_or_refused() -> None:
    with large() as kv:
        assert [kv.fits(kind(32768)) for kind in (int, np.int32, np.uint16, np.int64)] == [4] * 4
        assert kv.fits(np.int32(32768), np.int16(16)) == kv.fits(32768, 16)
        assert kv.admits(np.int32(65536))
        assert not kv.admits(np.uint32(2**17 + 1))
        assert kv.largest_max_tokens(np.uint8(8)) == 16384
        calls: tuple[tuple[Callable[..., object], str], ...] = (
            (kv.admits, "capacity_tokens"), (kv.fits, "max_tokens"),
            (lambda n: kv.fits(8, n), "shared_tokens"), (kv.largest_max_tokens, "sequences"),
        )  # fmt: skip
        for call, name in calls:
            for wrong in (float("nan"), -5, 2.5, 2.0, "2", True, None, 2**63, [2]):
                refused(kv, f"{name} is", call, wrong)
        refused(kv, "shared_tokens is 9, an int: a whole number from 0 to 8", kv.fits, 8, 9)
        refused(kv, "sequences is 0, an int: .* from 1 to", kv.largest_max_tokens, 0)


def test_a_trim_keeps_no_negative_number_of_frames(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    written(kv).close()
    kv.trim(2)
    for wrong in (-1, 1.5, "1", True, None):
        refused(kv, "keep_frames is", kv.trim, wrong)
    assert kv.stats().frames == {"ABSENT": 14, "POOLED": 2}
    kv.trim(np.int64(1))
    assert kv.stats().frames == {"ABSENT": 15, "POOLED": 1}


# What blocks depend on.

PROMPT: Final = [1, 2, 3, 4, 9]


@pytest.mark.parametrize("block", ["0", b"0", -1, 4, 99, (0,), 1.5, 0.0, True, None])
def test_a_key_of_no_block_is_not_dropped(open_manager: Loose, block: Any) -> None:
    """Else a block of another image is found: JSON makes texts of numbers, for one."""
    kv = open_manager(**SHAPE)
    keys = {block: b"cat"}
    refused(kv, "a block number of extra_keys is", kv.create, PROMPT, 16, extra_keys=keys)
    refused(kv, "a block number of extra_keys is", kv.probe_reuse, PROMPT, extra_keys=keys)


@pytest.mark.parametrize("extra", ["cat", (), ("cat",), [b"cat"], bytearray(b"cat"), None, 1])
def test_an_extra_key_is_bytes(open_manager: Loose, extra: Any) -> None:
    kv = open_manager(**SHAPE)
    keys = {0: extra}
    error = refused(kv, r"extra_keys\[0\] is", kv.create, PROMPT, extra_keys=keys)
    assert isinstance(error, ArgumentTypeError)


def test_extra_keys_reach_to_the_last_block_of_a_sequence(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    seq = kv.create(max_tokens=9, extra_keys={np.int64(0): b"cat", 2: (b"dog", b"")})
    assert seq.extras == {0: b"cat", 2: (b"dog", b"")}
    assert [type(block) for block in seq.extras] == [int, int]
    refused(kv, "from 0 to 2 is wanted", kv.create, max_tokens=9, extra_keys={3: b"cat"})
    refused(kv, "a Mapping is wanted", kv.create, extra_keys=[(0, b"cat")])


@pytest.mark.parametrize(
    "adapter",
    [2**64, 2**70, -(2**63) - 1, "\ud800", "a\udc80b", 1.0, True, ("a",), bytearray(b"a")],
)
def test_an_adapter_that_cannot_be_told_is_refused(open_manager: Loose, adapter: Any) -> None:
    kv = open_manager(**SHAPE)
    refused(kv, "adapter is", kv.create, adapter=adapter)
    refused(kv, "adapter is", kv.probe_reuse, PROMPT, adapter=adapter)


class Lora(StrEnum):
    A = "a"


class Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "adapter",
    [None, 0, -(2**63), 2**64 - 1, np.uint64(2**64 - 1), Number.ONE, "", "a", "é\U0001f600", Lora.A,
     "hex:31", "text:hex:31", "text:", "hex:", b"", b"1", b"\xff"],
)  # fmt: skip
def test_an_adapter_that_is_taken_is_told_in_events_and_traces(adapter: Any) -> None:
    lines: list[bytes] = []
    with Manager(small(**SHAPE), HostDevice(), record=lines.append) as kv:
        publisher = kv.events()
        seq = written(kv, adapter=adapter)
        seq.commit([1, 2, 3, 4])
        batches = publisher.drain()
        assert [decode(*encode(batch)) for batch in batches] == batches
        assert kv.probe_reuse(PROMPT, adapter=adapter) == 4
        seq.close()
    create = trace.decode_call(lines[1], 2)
    assert isinstance(create, trace.Create)
    told = trace.adapter_of(create.adapter)
    assert (told, type(told)) == (seq.identity.adapter, type(seq.identity.adapter))


@pytest.mark.parametrize("salt", ["t", bytearray(b"t"), memoryview(b"t"), None, 1, [b"t"]])
def test_a_salt_is_bytes(open_manager: Loose, salt: Any) -> None:
    kv = open_manager(**SHAPE)
    assert isinstance(refused(kv, "salt is", kv.create, salt=salt), ArgumentTypeError)
    assert isinstance(refused(kv, "salt is", kv.probe_reuse, PROMPT, salt=salt), ArgumentTypeError)


def test_a_salt_of_numpy_loses_no_zero(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    written(kv, salt=np.bytes_(b"a")).commit([1, 2, 3, 4])
    assert kv.probe_reuse(PROMPT, salt=b"a") == 4
    assert kv.probe_reuse(PROMPT, salt=b"a\0") == kv.probe_reuse(PROMPT, salt=b"") == 0


# Flags.


@pytest.mark.parametrize("name", ["commit", "reserve"])
@pytest.mark.parametrize(
    "value", ["no", np.array([1, 1]), 1, 0, None, [], "True", np.array([True])]
)
def test_a_flag_is_true_or_false(open_manager: Loose, name: str, value: Any) -> None:
    kv = open_manager(**SHAPE)
    refused(kv, f"{name} is .*: True or False is wanted", kv.create, **{name: value})
    flags: dict[str, Any] = {name: np.True_}
    kv.create(**flags).resume()


# Events.


@pytest.mark.parametrize(
    ("name", "value"),
    [("most_events", value) for value in (-1, 0, 2.5, "2", True, [1])]
    + [("rank", value) for value in ("x", -1, 1.0, True, 2**63)],
)
def test_events_are_not_published_in_pieces_of_no_number(
    open_manager: Loose, name: str, value: Any
) -> None:
    kv = open_manager(**SHAPE)
    refused(kv, f"{name} is", kv.events, **{name: value})


@pytest.mark.parametrize("ts", ["noon", float("nan"), float("inf"), True, [1.0], b"1"])
def test_a_drain_that_is_refused_takes_no_event(open_manager: Loose, ts: Any) -> None:
    kv = open_manager(**SHAPE)
    publisher = kv.events(np.int64(3), np.int16(1))
    written(kv).commit([1, 2, 3, 4])
    with pytest.raises(ArgumentError, match="ts is"):
        publisher.drain(ts)
    (batch,) = publisher.drain(np.float32(2.5))
    assert (batch.number, batch.batch.ts, batch.batch.data_parallel_rank) == (0, 2.5, 3)
    assert decode(*encode(batch)) == batch


# Objects.


def test_objects_of_the_wrong_kind_are_refused_by_name(open_manager: Loose) -> None:
    kv, other = open_manager(**SHAPE), open_manager(**SHAPE)
    seq, strange = written(kv), written(other)
    batch, step = kv.batch([seq]), kv.step(kv.batch([seq]))
    for wrong in (None, 7, kv, kv.device, batch, step, object(), Sequence, [seq]):
        for call in (kv.suspend, kv.drop, kv.close_sequence, kv.resume, kv.fork, batch.add):
            assert isinstance(refused(kv, "a Sequence of this", call, wrong), ArgumentTypeError)
    refused(kv, "batch is sequence 1, a Sequence: a Batch of this manager", kv.step, seq)
    refused(kv, "a Step of this manager is wanted", kv.settle, batch)
    refused(kv, "the manager that made it", kv.suspend, strange)


def test_a_member_is_in_a_batch_once(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    seq, other = written(kv), written(kv)
    refused(kv, "sequence 1 is in the batch already", kv.batch, [seq, other, seq])
    batch = kv.batch([seq])
    refused(kv, "sequence 1 is in the batch already", batch.add, seq)
    refused(kv, "sequence 2 is not in the batch", batch.remove, other)
    for wrong in ({seq, other}, {seq: 1}, None, seq, "ab", 3):
        assert isinstance(refused(kv, "seqs is", kv.batch, wrong), ArgumentTypeError)
    assert [*batch] == [seq]
    assert [*kv.batch(one for one in (other, seq))] == [other, seq]
    assert [*kv.batch(kv.sequences.values())] == [*kv.batch(kv.batch([seq, other]))] == [seq, other]


def test_the_table_is_asked_before_numbers_are_compared_with_what_is_there(
    open_manager: Loose,
) -> None:
    """IllegalTransition says that there is no row, and nothing else."""
    kv = open_manager(**SHAPE)
    seq = kv.create(max_tokens=8)
    with pytest.raises(IllegalTransition, match="grow is illegal in state CREATED"):
        seq.resize(12)
    refused(kv, "capacity_tokens is 17", seq.resize, 17)
    seq.resume()
    refused(kv, "resize: 12 tokens is not from 0 to 8", seq.resize, 12)


# What was refused is told.


def test_what_was_refused_is_in_the_record(tmp_path: Path) -> None:
    lines: list[bytes] = []
    with Manager(small(**SHAPE), HostDevice(), record=lines.append) as kv:
        seq = written(kv)
        before = len(lines)
        refused(kv, "tokens", seq.commit, [2**32 + 1])
        refused(kv, "sequence", kv.resize, None, 3)
        refused(kv, "extra_keys", kv.create, extra_keys={"0": b"cat"})
        refused(kv, "tokens", kv.step, kv.batch([seq]), 2.7)
        seq.commit([1, 2])
        seq.close()
    told = [json.loads(line) for line in lines[before:]]
    assert [one["call"] for one in told] == ["refused"] * 4 + ["commit", "close"]
    assert told[0]["name"] == "commit"
    assert told[0]["arguments"] == {"seq": "sequence 1", "tokens": "[4294967297]"}
    assert told[2]["arguments"]["extra_keys"] == "{'0': b'cat'}"
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(lines))
    play(*trace.read(path), opened)


def opened(streams: str, seed: int) -> ByteDevice:
    return HostDevice(streams=streams, seed=seed)


def test_a_batch_counts_what_it_is_told(open_manager: Loose) -> None:
    kv = open_manager(**SHAPE)
    batch: Batch = kv.batch([written(kv), written(kv)])
    assert batch.counts(3)[batch.rows].tolist() == [3, 3]
    assert batch.counts(3) is batch.counts(3)
    assert batch.counts(np.int64(3)) is not batch.counts([3, 4])
    given = np.array([3, 4])
    taken = batch.counts(given)
    given[0] = 9
    assert taken[batch.rows].tolist() == [3, 4], "whatever becomes of what was given"
    for wrong in (-1, 17, [1], [1, 17], 1.0):
        refused(kv, "tokens", batch.counts, wrong)
