"""Events as bytes: arrays and maps, ours and those of other engines' versions, in both
directions."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstate import KvStateError
from kvstate.blocks import Loss
from kvstate.errors import ArgumentError, TraceError
from kvstate.events import (
    FORMATS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Format,
    Numbered,
    decode,
    encode,
    int_hash,
)
from kvstate.index import Index
from kvstate.keys import Identity
from kvstate.publisher import Publisher
from tests.conftest import Open
from tests.test_events import D1, OWNER, extend, index_with
from tests.test_reuse import said
from tests.vllm_events import NUMBER, VERSIONS, Version

BY_NAME = {version.name: version for version in VERSIONS}


def wire(numbered: Numbered, format_: Format) -> Any:
    return msgspec.msgpack.decode(encode(numbered, format_)[1])


# The bytes, literally.


def everything() -> tuple[Numbered, bytes]:
    """A batch with each kind of event, of one block, and its digest."""
    index = index_with()
    publisher = Publisher(index, rank=1)
    (node,) = extend(index, 1, 2, identity=Identity(b"secret", "adapter"))
    index.give_slot(node, 4)
    digest = index.digest(node)
    index.lose_owner(node, OWNER, why=Loss.CLOSED)
    index.retire()
    return publisher.drain(ts=12.5)[0], digest


def test_arrays_have_the_places_of_vllm_s_fields() -> None:
    numbered, digest = everything()
    number, payload = encode(numbered, "arrays")
    assert number == bytes(8)
    assert msgspec.msgpack.decode(payload) == [
        12.5,
        [
            ["BlockStored", [digest], None, [1, 2], 2, None, "GPU", "adapter"],
            ["BlockStored", [digest], None, [1, 2], 2, None, "CPU", "adapter"],
            ["BlockRemoved", [digest], "GPU"],
            ["AllBlocksCleared"],
        ],
        1,
    ]
    assert b"secret" not in payload, "who reads events must not learn salts"


def test_maps_have_their_names_and_the_reasons() -> None:
    numbered, digest = everything()
    number, payload = encode(numbered)
    assert number == bytes(8)
    block = {
        "type": "BlockStored", "block_hashes": [digest], "parent_block_hash": None,
        "token_ids": [1, 2], "block_size": 2, "lora_id": None, "lora_name": "adapter",
    }  # fmt: skip
    assert msgspec.msgpack.decode(payload) == [
        12.5,
        [
            block | {"medium": "GPU"},
            block | {"medium": "CPU"},
            {
                "type": "BlockRemoved",
                "block_hashes": [digest],
                "medium": "GPU",
                "reason": "closed",
            },
            {"type": "AllBlocksCleared", "reason": "cleared"},
        ],
        1,
    ]
    assert b"secret" not in payload, "who reads events must not learn salts"


def test_what_says_nothing_is_left_out_in_the_middle_of_nothing() -> None:
    """Later fields that are None are not there, but where a place has to be kept."""
    told = BlockStored([D1], None, [1], 1, group_idx=2)
    batch = Numbered(0, EventBatch(0.0, [told, BlockRemoved([D1], group_idx=2)]))
    assert wire(batch, "arrays")[1] == [
        ["BlockStored", [D1], None, [1], 1, None, "GPU", None, None, 2],
        ["BlockRemoved", [D1], "GPU", 2],
    ]
    first, second = wire(batch, "maps")[1]
    assert first.keys() >= {"lora_id", "medium", "lora_name", "group_idx"}
    assert "extra_keys" not in first
    assert "reason" not in second


@pytest.mark.parametrize("digest", [bytes(range(16)), b"\xff" * 16, b"\x80" + bytes(7)])
def test_a_number_is_the_last_bytes_of_a_digest(digest: bytes) -> None:
    number = int_hash(digest)
    assert number == int.from_bytes(digest, "big") & ((1 << 64) - 1)
    assert number == int(digest.hex()[-16:], 16)


def test_a_publisher_names_blocks_by_number() -> None:
    index = index_with((1, 2, 3, 4))
    told, numbers = Publisher(index), Publisher(index, hashes="ints")
    (first,), (second,) = (one.drain() for one in (told, numbers))
    wanted = [
        msgspec.structs.replace(
            event,
            block_hashes=[int_hash(name) for name in event.block_hashes],  # type: ignore[arg-type]
            parent_block_hash=None,
        )
        for event in first.batch.events
        if isinstance(event, BlockStored)
    ]
    assert second.batch.events == wanted
    for format_ in FORMATS:
        assert decode(*encode(second, format_)) == second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "map"}, "format is 'map': one of maps, arrays is wanted"),
        ({"format": None}, "format is None"),
        ({"hashes": "int"}, "hashes is 'int': one of bytes, ints is wanted"),
        ({"most_pending_blocks": 0}, "most_pending_blocks is 0, an int: a whole number from 1"),
    ],
)
def test_options_that_do_not_exist_are_refused(
    open_manager: Open, options: Any, message: str
) -> None:
    kv = open_manager()
    with pytest.raises(ArgumentError, match=message):
        kv.events(**options)
    with pytest.raises(ArgumentError, match="format is 'json'"):
        encode(Numbered(0, EventBatch(0.0, [])), "json")  # type: ignore[arg-type]


def test_the_publisher_writes_the_format_that_was_asked_for(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, [1, 2])
    shapes = [list, dict]
    for format_, shape in zip(("arrays", "maps"), shapes, strict=True):
        events = kv.events(format=format_)  # type: ignore[arg-type]
        (batch,) = events.drain()
        assert events.encode(batch) == encode(batch, events.format)
        assert isinstance(msgspec.msgpack.decode(events.encode(batch)[1])[1][0], shape)


# What is read.


def read(*events: object, number: bytes = bytes(8), batch: object = None) -> Numbered:
    found = [0.0, list(events)] if batch is None else batch
    return decode(number, msgspec.msgpack.encode(found))


@pytest.mark.parametrize(
    "event",
    [
        ["BlockRemoved", [D1, 7]],
        ["BlockRemoved", [D1, 7], None],
        ["BlockRemoved", [D1, 7], "GPU", None, "what a newer version says", {}],
        {"type": "BlockRemoved", "block_hashes": [D1, 7]},
        {"type": "BlockRemoved", "block_hashes": [D1, 7], "medium": None},
        {"new": [1], "block_hashes": [D1, 7], "type": "BlockRemoved", "group_idx": None},
    ],
)
def test_fewer_and_more_fields_are_read(event: object) -> None:
    assert read(event).batch.events == [BlockRemoved([D1, 7], "GPU")]


@pytest.mark.parametrize(
    "batch", [[1, []], [1.0, [], None], [1, [], None, "more"], {"ts": 1, "events": [], "more": 1}]
)
def test_fewer_and_more_fields_of_a_batch_are_read(batch: object) -> None:
    assert read(batch=batch).batch == EventBatch(1.0, [])


def test_tiers_of_others_are_read() -> None:
    (event,) = read(["BlockRemoved", [-5], "CPU_PINNED"]).batch.events
    assert event == BlockRemoved([-5], "CPU_PINNED")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "batch 5: "),
        ([0.0, [["Unheard", []]]], "batch 5: .*Unheard"),
        ([0.0, [{"type": "Unheard"}]], "batch 5: .*Unheard"),
        ([0.0, [["BlockRemoved", ["x", 5], "GPU"]]], r"got `str` - at `\$.events\[0\].block_hash"),
        ([0.0, [["BlockRemoved", [True], "GPU"]]], "got `bool`"),
        ([0.0, [["BlockRemoved", [1.0], "GPU"]]], "got `float`"),
        ([0.0, [["BlockRemoved", [b"x"], 5]]], "medium"),
        ([0.0, [["BlockRemoved"]]], "block_hashes"),
        ([0.0, [["BlockStored", [b"x"], None, [1], 0]]], "block_size"),
        ([0.0, [["BlockStored", [b"x"], None, [[1, 2]], 1]]], "token_ids"),
        ([0.0, [{"block_hashes": [b"x"]}]], "type"),
        ([0.0, [{1: 2}]], "type"),
        ([0.0, [[]]], "array"),
        ([0.0, [[["BlockRemoved"], []]]], "array"),
        ([0.0, [5]], "int"),
        ([0.0, 5], "events"),
        ([0.0], "events"),
        ([], "ts"),
        (5, "int"),
        (None, "null"),
        (b"\x91" * 100_000, "recursion"),
        (b"\xa2\xff\xff", "UTF-8"),
        (b"\xdd\xff\xff\xff\xff", "truncated"),
    ],
)
def test_what_is_no_batch_is_refused(payload: object, message: str) -> None:
    data = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
    with pytest.raises(TraceError, match=message):
        decode(bytes(7) + b"\5", data)


@pytest.mark.parametrize("number", [b"", b"\0", bytes(9)])
def test_a_number_of_another_length_is_refused(number: bytes) -> None:
    with pytest.raises(TraceError, match=f"has {len(number)} bytes, not 8"):
        read(number=number)


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary()
ANYTHING = st.recursive(
    LEAVES | st.text() | st.sampled_from(["BlockStored", "BlockRemoved", "type", "block_hashes"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(ANYTHING)
def test_whatever_comes_is_read_or_refused_by_name(payload: object) -> None:
    for batch in (payload, [0.0, payload], [0.0, [payload]], [0.0, [["BlockStored", payload]]]):
        with suppress(TraceError):
            read(batch=batch)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_whatever_bytes_come_are_read_or_refused_by_name(payload: bytes) -> None:
    with suppress(TraceError):
        decode(bytes(8), payload)


# Their classes read ours.

DIGESTS = st.binary(min_size=16, max_size=16)
NUMBERS = st.integers(0, 2**64 - 1)
IDS = st.integers(-(2**31), 2**31 - 1)
EXTRAS = st.none() | st.lists(st.none() | st.tuples(st.binary(max_size=9)), max_size=3)


def ours(hashes: Any) -> Any:
    """Batches with whatever a publisher can say."""
    names, tier = st.lists(hashes, min_size=1, max_size=3), st.sampled_from(["GPU", "CPU"])
    ids, lora = st.lists(IDS, max_size=6), st.none() | st.integers(-(2**63), 2**63 - 1)
    stored = st.builds(
        BlockStored, names, st.none() | hashes, ids, st.integers(1, 64), lora, tier,
        st.none() | st.text(max_size=5), EXTRAS,
    )  # fmt: skip
    removed = st.builds(BlockRemoved, names, tier, st.none(), st.sampled_from(Loss))
    count = st.none() | st.integers(1, 99)
    cleared = st.builds(AllBlocksCleared, st.none() | st.text(max_size=5), count)
    times = st.floats(allow_nan=False)
    batch = st.builds(
        EventBatch, times, st.lists(stored | removed | cleared, max_size=4),
        st.none() | st.integers(0, 9),
    )  # fmt: skip
    return st.builds(Numbered, st.integers(0, 2**64 - 1), batch)


def without_ours(event: Any) -> Any:
    """An event as arrays tell it."""
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, reason=None)
    return AllBlocksCleared() if isinstance(event, AllBlocksCleared) else event


@settings(max_examples=200, deadline=None)
@given(ours(DIGESTS | NUMBERS))
def test_what_is_written_is_read(numbered: Numbered) -> None:
    assert decode(*encode(numbered)) == numbered
    number, batch = decode(*encode(numbered, "arrays"))
    assert (number, batch.ts) == (numbered.number, numbered.batch.ts)
    assert batch.events == [without_ours(event) for event in numbered.batch.events]


def same(theirs: Any, event: Any) -> bool:
    """Their event says what ours does, in the fields that both have. A list of extra keys in
    which nothing stands, and none, are one."""
    names = set(theirs.__struct_fields__) & set(event.__struct_fields__)
    return type(theirs).__name__ == type(event).__name__ and all(
        getattr(theirs, name) == getattr(event, name) for name in names
    )


@pytest.mark.parametrize("name", [one for one in BY_NAME if "salt" not in one])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_their_classes_read_what_is_written(name: str, data: st.DataObject) -> None:
    version = BY_NAME[name]
    numbered = data.draw(ours(NUMBERS if version.hashes == "ints" else DIGESTS | NUMBERS))
    found = version.read(encode(numbered, version.format)[1])
    assert found.ts == numbered.batch.ts
    if version.rank is not None:
        assert getattr(found, version.rank) == numbered.batch.data_parallel_rank
    pairs = zip(found.events, numbered.batch.events, strict=True)
    assert all(same(theirs, event) for theirs, event in pairs)


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)
def test_their_classes_refuse_the_other_shape(version: Version) -> None:
    """So the format must be the right one, and these classes can tell."""
    other: Format = "maps" if version.format == "arrays" else "arrays"
    batch = Numbered(0, EventBatch(0.0, [BlockRemoved([7], "GPU")]))
    assert version.read(encode(batch, version.format)[1]).events[0].block_hashes == [7]
    with pytest.raises(msgspec.ValidationError, match="Expected"):
        version.read(encode(batch, other)[1])


# Ours read what theirs write.

VALUES: dict[str, Any] = {
    "lora_id": st.none() | st.integers(0, 2**63 - 1),
    "medium": st.none() | st.sampled_from(["GPU", "CPU", "CPU_PINNED", "DISK"]),
    "lora_name": st.none() | st.text(max_size=5),
    "extra_keys": st.none()
    | st.lists(st.none() | st.tuples(st.text(max_size=4), st.integers(0, 9)), max_size=3),
    "group_idx": st.none() | st.integers(0, 3),
    "kv_cache_spec_kind": st.none() | st.just("full_attention"),
    "kv_cache_spec_sliding_window": st.none() | st.integers(1, 4096),
    "metadata": st.fixed_dictionaries({"cache_salt": st.text(max_size=4)}),
    "cache_salt": st.none() | st.text(max_size=4),
    "session_id": st.none() | st.text(max_size=4),
}


def theirs(version: Version) -> Any:
    """Batches as a version writes them: numbers with or without a sign, bytes of any length."""
    numbers = st.integers(-(2**63), 2**64 - 1)
    hashes = numbers if version.hash is NUMBER else numbers | st.binary(min_size=1, max_size=32)
    names = st.lists(hashes, max_size=3)
    more = [{one[0]: VALUES[one[0]] for one in fields}
            for fields in (version.stored_fields, version.removed_fields)]  # fmt: skip
    stored = st.builds(
        version.stored, block_hashes=names, parent_block_hash=st.none() | hashes,
        token_ids=st.lists(IDS, max_size=6), block_size=st.integers(1, 64), **more[0],
    )  # fmt: skip
    removed = st.builds(version.removed, block_hashes=names, **more[1])
    rank = {} if version.rank is None else {version.rank: st.none() | st.integers(0, 7)}
    events = st.lists(stored | removed | st.builds(version.cleared), max_size=4)
    return st.builds(version.batch, ts=st.floats(allow_nan=False), events=events, **rank)


def as_read(one: Any) -> Any:
    """What we make of one of their events: what they do not say is as if it were not there, and a
    block without a tier is on the GPU."""
    told = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}.get(type(one).__name__)
    if told is None:
        return AllBlocksCleared()
    names = set(told.__struct_fields__) & set(one.__struct_fields__)
    values = {name: getattr(one, name) for name in names}
    return told(**values | {"medium": values.get("medium") or "GPU"})


@pytest.mark.parametrize("name", BY_NAME)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_their_classes_write_is_read(name: str, data: st.DataObject) -> None:
    version = BY_NAME[name]
    written = data.draw(theirs(version))
    number, batch = decode(bytes(7) + b"\3", msgspec.msgpack.encode(written))
    assert (number, batch.ts) == (3, written.ts)
    assert batch.events == [as_read(event) for event in written.events]
    if version.rank is not None:
        assert batch.data_parallel_rank == getattr(written, version.rank)


def test_arrays_and_maps_of_one_stream_may_be_mixed() -> None:
    """While engines are changed one by one, a router reads both."""
    events = read(["BlockRemoved", [1]], {"type": "BlockRemoved", "block_hashes": [2]}).batch.events
    assert events == [BlockRemoved([1]), BlockRemoved([2])]


# Whatever `create` takes can be told.

ADAPTERS = (
    st.none()
    | st.text(st.characters(codec=None), max_size=4)
    | st.binary(max_size=4)
    | st.integers()
    | st.sampled_from([2**63, 2**64 - 1, 2**64, 2**70, -(2**63), -(2**63) - 1, "\ud800", "\0"])
)
KEYS = st.dictionaries(
    st.integers(0, 2), st.binary(max_size=5) | st.tuples(st.binary(), st.binary()), max_size=2
)


@settings(max_examples=100, deadline=None)
@given(ADAPTERS, KEYS, st.binary(max_size=4))
@example(2**64 - 1, {}, b"")
@example(2**64, {}, b"")
@example(-(2**63) - 1, {}, b"")
@example("a\ud800", {0: (b"x", b"")}, b"")
def test_what_is_accepted_can_be_told(adapter: Any, extras: Any, salt: bytes) -> None:
    try:
        identity = Identity(salt, adapter)
    except KvStateError:
        return
    index = Index(2, key=b"test")
    publisher = Publisher(index)
    nodes = index.extend(identity, index.keys(bytes(4 * 6), extras), OWNER)
    (batch,) = publisher.drain()
    for format_ in FORMATS:
        assert decode(*encode(batch, format_)) == batch
    assert [index.extra(node) for node in nodes] == [
        one if isinstance(one, tuple) else () if one is None else (one,)
        for one in map(extras.get, range(3))
    ]


@pytest.mark.parametrize("adapter", [2**64, -(2**63) - 1, 2**70, "a\ud800"])
def test_an_adapter_that_cannot_be_told_is_refused(open_manager: Open, adapter: Any) -> None:
    """The batch would be lost, with all that others have done (report B173)."""
    kv = open_manager()
    events = kv.events()
    with pytest.raises(KvStateError, match="adapter"):
        kv.create([1, 2], 16, adapter=adapter)
    assert not kv.sequences
    said(kv, [1, 2], adapter=2**64 - 1)
    (batch,) = events.drain()
    for format_ in FORMATS:
        assert decode(*encode(batch, format_)) == batch
