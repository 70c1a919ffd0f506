"""The prefix index: exact bytes, no holes, named holds, victims; against a model that is a dict."""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attrs import define, evolve, field, frozen
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstate.blocks import Holder, Loss, Node, Place
from kvstate.errors import ArgumentError, ArgumentTypeError, IllegalTransition
from kvstate.events import Numbered, decode, encode
from kvstate.index import Index
from kvstate.index_check import check
from kvstate.keys import Extra, Identity, extra_bytes, token_bytes
from kvstate.publisher import Publisher
from kvstate.replica import Replica

ME = Identity()
BLOCK = 2
A, B, C = "owner A", "owner B", "owner C"


def ids(*tokens: int) -> bytes:
    return token_bytes(tokens)


def index_of(*chains: tuple[int, ...], owner: object = A, identity: Identity = ME) -> Index:
    """An index with blocks of two tokens that has these prefixes on the GPU."""
    index = Index(BLOCK, key=b"test")
    for chain in chains:
        index.extend(identity, index.keys(ids(*chain)), owner)
    return index


def ordinals(nodes: list[Node]) -> list[int]:
    return [node.ordinal for node in nodes]


# Tokens.


class TorchLike:
    """What numpy can ask for an array, and nothing else."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.values, dtype)


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 2**31 - 1],
        (1, 2, 2**31 - 1),
        np.array([1, 2, 2**31 - 1], np.int32),
        np.array([1, 2, 2**31 - 1], np.int64),
        np.array([1, 2, 2**31 - 1], np.uint32),
        np.array([1, 2, 2**31 - 1], np.uint64),
        np.array([1, 2, 2**31 - 1], ">i4"),
        np.array([1, 0, 2, 0, 2**31 - 1], np.int32)[::2],
        np.array([1, 2, 2**31 - 1], object),
        TorchLike([1, 2, 2**31 - 1]),
        [np.int64(1), 2, np.uint32(2**31 - 1)],
    ],
)
def test_token_bytes_are_int32_whatever_they_came_as(tokens: Any) -> None:
    assert token_bytes(tokens) == bytes.fromhex("01000000 02000000 ffffff7f")


@pytest.mark.parametrize(
    "tokens",
    [7, np.int64(7), np.array(7, np.uint8), [7], range(7, 8), [[7]], np.array([[7]]), [range(7, 8)],
     array("q", [7]), deque([7]), [TorchLike([7])]],
)  # fmt: skip
def test_one_token(tokens: Any) -> None:
    assert token_bytes(tokens) == bytes.fromhex("07000000")


def test_no_tokens_and_negative_ones() -> None:
    assert token_bytes([]) == token_bytes(np.zeros(0, np.int32)) == token_bytes([[]]) == b""
    assert token_bytes([-1]) == b"\xff\xff\xff\xff"
    assert token_bytes([-(2**31)]) == bytes.fromhex("00000080")


REFUSED: dict[str, tuple[Any, str]] = {
    "too large": ([1, 2**31, 2**40], r"tokens\[1\] is 2147483648"),
    "too small": (np.array([0, -(2**31) - 1]), r"tokens\[1\] is -2147483649"),
    "unsigned": (np.array([5, 2**32 + 5], np.uint64), r"tokens\[1\] is 4294967301, a uint64"),
    "largest": (np.array([2**64 - 1], np.uint64), r"tokens\[0\] is 18446744073709551615"),
    "beyond 64 bits": ([1, 2, 2**70], r"tokens\[2\] is 1180591620717411303424"),
    "mixed signs": ([1, 2**63, -1], r"tokens\[1\] is 9223372036854775808"),
    "a float": ([1, 2.0], r"tokens\[1\] is 2.0, a float"),
    "floats": (np.array([1.0]), r"tokens\[0\] is 1.0, a float64"),
    "not a number": ([float("nan")], r"tokens\[0\] is nan"),
    "truth": (np.array([True]), r"tokens\[0\] is True, a bool"),
    "truth among numbers": ([1, True], r"tokens\[1\] is True, a bool"),
    "text": (["1"], r"tokens\[0\] is '1', a str"),
    "a whole text": ("12", "tokens is '12', a str: a row of whole numbers is wanted"),
    "bytes": (b"12", "tokens is b'12', a bytes"),
    "nothing": ([1, None], r"tokens\[1\] is None"),
    "two rows": ([[1, 2], [3, 4]], r"tokens\[0\] is \[1, 2\], a list"),
    "two rows of an array": (np.zeros((2, 2), np.int32), r"shape \(2, 2\): one row of ids"),
    "no row": (np.zeros((0, 2), np.int32), r"shape \(0, 2\)"),
    "ragged": ([[1], [2, 3]], r"tokens\[0\] is \[1\], a list"),
    "rows of rows": ([[[1]]], r"tokens\[0\]\[0\] is \[1\], a list"),
    "without an order": ({1, 2}, "tokens is {1, 2}, a set"),
    "by name": ({0: 1}, "tokens is {0: 1}, a dict"),
    "read once": (iter([1]), "a list_iterator"),
    "values that are not there": (np.ma.array([1, 2], mask=[False, True]), "not there"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_token_is_refused_by_name_and_place(name: str) -> None:
    tokens, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        token_bytes(tokens)


# Identity and keys: equal only if every byte and every type is.

IDENTITIES = [
    Identity(),
    Identity(salt=b"1"),
    Identity(adapter=1),
    Identity(adapter="1"),
    Identity(adapter=b"1"),
    Identity(adapter=0),
    Identity(adapter=""),
    Identity(adapter=b""),
    Identity(adapter="None"),
    Identity(weights_epoch=1),
    Identity(salt=b"1", adapter="1", weights_epoch=1),
    Identity(salt=b"ab", adapter=b"c"),
    Identity(salt=b"a", adapter=b"bc"),
    Identity(salt=Identity().code),
    Identity(adapter=-1),
    Identity(adapter="\x80"),
    Identity(adapter=-(2**63)),
    Identity(adapter=2**64 - 1),
]


def test_identities_differ_in_every_field_and_type() -> None:
    """vllm-project/vllm#44701: an adapter's name was as good as a salt."""
    assert len(set(IDENTITIES)) == len(IDENTITIES)
    assert len({one.code for one in IDENTITIES}) == len(IDENTITIES)
    index = Index(BLOCK)
    for one in IDENTITIES:
        assert index.match(one, ids(1, 2)) == []
        index.insert(one, ids(1, 2), A)
    assert len({index.match(one, ids(1, 2))[0] for one in IDENTITIES}) == len(IDENTITIES)
    assert len({index.digest(node) for node in index}) == len(IDENTITIES)
    assert check(index) == []


def test_equal_identities_are_one() -> None:
    assert Identity(b"s", "a", 3) == Identity(b"s", "a", 3)
    assert len({Identity(b"s", 5), Identity(b"s", 5)}) == 1
    assert "code" not in repr(Identity(b"s"))


@pytest.mark.parametrize(
    "fields",
    [{"salt": "text"}, {"salt": bytearray(b"s")}, {"adapter": True}, {"adapter": 1.0},
     {"adapter": "\udc80"}, {"adapter": 2**64}, {"adapter": -(2**63) - 1},
     {"adapter": ("a",)}, {"weights_epoch": True}, {"weights_epoch": 1.0}, {"weights_epoch": None}],
)  # fmt: skip
def test_fields_of_another_type_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(fields))} is"):
        Identity(**fields)


def test_a_root_is_there_as_long_as_a_block() -> None:
    index = index_of((1, 2))
    index.match(Identity(b"other"), ids(1, 2))
    assert list(index._roots) == [ME.code]
    index.lose_owner(index.match(ME, ids(1, 2))[0], A, why=Loss.CLOSED)
    assert (list(index._roots), len(index), check(index)) == ([], 0, [])


COLLIDING = [
    (-1, -2),
    (-2, -1),
    (-1, -1),
    (-2, -2),
    (0, 0),
    (0, -1),
    (2**31 - 1, 0),
    (1, 0),
    (0, 1),
]


def test_blocks_that_collide_under_hash_tricks_are_apart() -> None:
    """hash(-1) == hash(-2), and tuples of them; a key is the bytes."""
    assert hash((-1, -2)) == hash((-2, -2))
    index = index_of(*COLLIDING)
    found = [index.match(ME, ids(*block)) for block in COLLIDING]
    assert [index.tokens(node) for (node,) in found] == [list(block) for block in COLLIDING]


def test_tokens_that_look_alike_across_a_border() -> None:
    """The same tokens in other blocks, and the same bytes in other tokens."""
    index = index_of((1, 2, 3, 4), (256, 0))
    assert index.match(ME, ids(2, 3, 4)) == []
    assert index.match(ME, ids(1, 2, 4, 3, 3, 4)) == index.match(ME, ids(1, 2))
    assert index.match(ME, ids(3, 4)) == []
    assert index.match(ME, ids(0, 256)) == []
    assert index.match(ME, ids(1, 0)) == []


def test_a_zero_is_not_a_missing_token() -> None:
    index = index_of((1, 0))
    assert index.match(ME, ids(1)) == []
    assert len(index.match(ME, ids(1, 0))) == 1
    assert len(index.match(ME, ids(1, 0, 0))) == 1
    assert index.partial(ME, ids(1)) == (index.match(ME, ids(1, 0))[0], 1)


EXTRAS: list[dict[int, Extra]] = [
    {},
    {0: b""},
    {0: (b"", b"")},
    {0: b"ab"},
    {0: (b"a", b"b")},
    {0: (b"ab", b"")},
    {0: (b"", b"ab")},
    {0: extra_bytes(b"ab")},
    {0: ids(1, 2)},
    {1: b"ab"},
]


def test_extra_keys_differ_from_none_and_by_how_they_are_cut() -> None:
    index = Index(BLOCK)
    data = ids(1, 2, 1, 2)
    chains = [index.extend(ME, index.keys(data, extras), A) for extras in EXTRAS]
    assert len({chain[-1] for chain in chains}) == len(EXTRAS)
    for extras, chain in zip(EXTRAS, chains, strict=True):
        assert index.match(ME, data, extras) == chain
    assert len({index.digest(chain[-1]) for chain in chains}) == len(EXTRAS)
    assert [index.extra(chain[0]) for chain in chains][:5] == [
        (), (b"",), (b"", b""), (b"ab",), (b"a", b"b"),
    ]  # fmt: skip


def test_extra_keys_count_for_every_later_block() -> None:
    """vllm-project/vllm#12603: the extra keys of the parent were missing from the child."""
    index = Index(BLOCK)
    one = index.extend(ME, index.keys(ids(1, 2, 3, 4), {0: b"cat"}), A)
    assert index.match(ME, ids(1, 2, 3, 4), {0: b"dog"}) == []
    other = index.extend(ME, index.keys(ids(1, 2, 3, 4), {0: b"dog"}), A)
    assert one[1].key == other[1].key
    assert index.digest(one[1]) != index.digest(other[1])


def test_one_field_is_a_tuple_of_one_and_what_lies_beyond_is_ignored() -> None:
    index = Index(BLOCK)
    assert index.keys(ids(1, 2), {0: b"a"}) == index.keys(ids(1, 2), {0: (b"a",), 9: b"z"})
    assert index.keys(ids(3, 4), {5: b"a"}, first=5) == [ids(3, 4) + extra_bytes(b"a")]
    assert index.keys(ids(1, 2, 3)) == [ids(1, 2)]


@pytest.mark.parametrize("extra", [(), "text", ("text",), 5, bytearray(b"a"), [b"a"], (b"a", None)])
def test_extra_keys_are_bytes(extra: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="extra keys"):
        extra_bytes(extra)


def test_a_match_is_cut_at_the_most_and_changes_nothing() -> None:
    index = index_of((1, 2, 3, 4, 5, 6))
    ages = [node.used for node in index]
    data = ids(1, 2, 3, 4, 5, 6, 7, 8)
    assert [len(index.match(ME, data, most_blocks=n)) for n in (-1, 0, 1, 2, 9)] == [0, 0, 1, 2, 3]
    assert ordinals(index.match(ME, data)) == [0, 1, 2]
    assert [node.used for node in index] == ages


# The nearest incomplete block.


def test_partial_finds_the_longest_and_of_equals_the_earliest() -> None:
    index = Index(4)
    for block in [(1, 9, 9, 9), (1, 2, 9, 9), (1, 2, 3, 9), (1, 2, 3, 8)]:
        index.insert(ME, ids(*block), A)

    def found(*rest: int, place: Place = ME) -> tuple[list[int], int] | None:
        best = index.partial(place, ids(*rest))
        return best and (index.tokens(best[0]), best[1])

    assert found(1, 2, 3) == ([1, 2, 3, 9], 3)
    assert found(1, 2, 3, 8) == ([1, 2, 3, 8], 4)
    assert found(1, 2, 3, 7, 5, 5) == ([1, 2, 3, 9], 3)
    assert found(1, 2, 0, 9) == ([1, 2, 9, 9], 2)
    assert found(1) == ([1, 9, 9, 9], 1)
    assert found(2, 2, 3, 9) is None
    assert found() is None
    parent = index.match(ME, ids(1, 2, 3, 9))[0]
    assert found(1, place=parent) is None
    assert found(1, place=Identity(b"other")) is None
    index.insert(parent, ids(5, 6, 7, 8), A)
    assert found(5, 6, place=parent) == ([5, 6, 7, 8], 2)


def test_partial_shares_only_between_equal_extra_keys() -> None:
    index = Index(BLOCK)
    (node,) = index.extend(ME, index.keys(ids(1, 2), {0: b"cat"}), A)
    assert index.partial(ME, ids(1)) is None
    assert index.partial(ME, ids(1), b"dog") is None
    assert index.partial(ME, ids(1), b"cat") == (node, 1)


# Who has the bytes.


def test_inserting_again_finds_what_is_there() -> None:
    index = Index(BLOCK)
    node = index.insert(ME, ids(1, 2), A)
    assert index.insert(ME, ids(1, 2), B, slot=3) is node
    assert (node.owner, node.slot, len(index)) == (A, None, 1)
    chain = index.extend(ME, [ids(1, 2), ids(3, 4)], B)
    assert [one.owner for one in chain] == [A, B]
    assert index.extend(ME, [], B) == []
    assert index.extend(Identity(b"new"), [], B) == []
    assert check(index) == []


def refused(event: str, reason: str, call: Callable[[], object], index: Index) -> None:
    """The call raises, and nothing has changed."""
    before = state_of(index)
    with pytest.raises(IllegalTransition, match=reason) as caught:
        call()
    assert caught.value.event == event
    assert (state_of(index), check(index)) == (before, [])


def state_of(index: Index) -> list[tuple[Any, ...]]:
    return [
        (node, node.owner, node.slot, frozenset(node.holders), node.used, node.pins, node.parent)
        for node in index
    ]


def test_what_is_illegal_is_refused_and_changes_nothing() -> None:
    index = index_of((1, 2, 3, 4))
    first, second = index.match(ME, ids(1, 2, 3, 4))
    index.give_slot(first, 7)
    index.hold(second, ("sequence", 1))
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("insert", "bytes are nowhere", lambda: index.insert(second, ids(5, 6))),
        ("insert", "a key of 4 bytes", lambda: index.insert(second, ids(5), A)),
        ("insert", "a key of 0 bytes", lambda: index.extend(second, [ids(5, 6), b""], A)),
        ("insert", "slot 7 has block 0", lambda: index.insert(second, ids(5, 6), slot=7)),
        ("insert", "bytes are nowhere", lambda: index.extend(second, [ids(5, 6)], None)),
        ("give_owner", "owner A owns it", lambda: index.give_owner(first, B)),
        ("give_owner", "owner A owns it", lambda: index.give_owner(first, A)),
        ("give_slot", "it has slot 7", lambda: index.give_slot(first, 8)),
        ("give_slot", "slot 7 has block 0", lambda: index.give_slot(second, 7)),
        (
            "lose_owner",
            "owner B does not own it",
            lambda: index.lose_owner(first, B, why=Loss.CLOSED),
        ),
        ("lose_owner", "sequence 1 holds it", lambda: index.lose_owner(second, A, why=Loss.CLOSED)),
        ("lose_slot", "it has none", lambda: index.lose_slot(second, why=Loss.EVICTED)),
        ("hold", "sequence 1 holds it already", lambda: index.hold(second, ("sequence", 1))),
        ("release", "does not hold it", lambda: index.release(second, ("copy", 1))),
        ("release", "does not hold it", lambda: index.release(first, ("sequence", 1))),
    ]
    for event, reason, call in calls:
        refused(event, reason, call, index)
    index.lose_owner(first, A, why=Loss.CLOSED)
    refused("give_owner", "no owner", lambda: index.give_owner(first, None), index)
    refused("lose_owner", "None does", lambda: index.lose_owner(first, A, why=Loss.CLOSED), index)
    refused(
        "lose_owner", "None does", lambda: index.lose_owner(first, None, why=Loss.CLOSED), index
    )
    refused(
        "lose_slot", "sequence 1 holds it", lambda: index.lose_slot(first, why=Loss.EVICTED), index
    )
    index.release(second, ("sequence", 1))
    refused("release", "does not hold it", lambda: index.release(second, ("sequence", 1)), index)


def test_a_block_that_left_can_be_asked_for_nothing() -> None:
    """vllm-project/vllm#4764: what still names it must not find another's bytes."""
    index = index_of((1, 2, 3, 4))
    first, second = index.match(ME, ids(1, 2, 3, 4))
    index.hold(second, ("copy", 1))
    index.release(second, ("copy", 1))
    assert [cut.node for cut in index.lose_owner(first, A, why=Loss.CLOSED)] == [second]
    again = index.insert(ME, ids(1, 2), B)
    assert again is not first
    for node in (first, second):
        assert (node.findable, node.state_name, node.parent, node.owner) == (
            False, "CUT", None, None,
        )  # fmt: skip
        for event, call in (
            ("insert", lambda n=node: index.insert(n, ids(5, 6), A)),
            ("extend", lambda n=node: index.extend(n, [ids(5, 6)], A)),
            ("partial", lambda n=node: index.partial(n, ids(5))),
            ("touch", lambda n=node: index.touch([again, n])),
            ("give_owner", lambda n=node: index.give_owner(n, A)),
            ("give_slot", lambda n=node: index.give_slot(n, 1)),
            ("lose_owner", lambda n=node: index.lose_owner(n, A, why=Loss.CLOSED)),
            ("lose_slot", lambda n=node: index.lose_slot(n, why=Loss.EVICTED)),
            ("hold", lambda n=node: index.hold(n, ("copy", 1))),
            ("release", lambda n=node: index.release(n, ("copy", 1))),
            ("digest", lambda n=node: index.digest(n)),
        ):
            refused(event, "left the index|does not hold it", call, index)


def test_the_last_bytes_take_what_is_below_with_them() -> None:
    index = index_of((1, 2, 3, 4, 5, 6), (1, 2, 7, 8))
    first, second, third = index.match(ME, ids(1, 2, 3, 4, 5, 6))
    (_, other) = index.match(ME, ids(1, 2, 7, 8))
    index.give_slot(third, 30)
    index.give_slot(first, 10)
    assert index.lose_owner(first, A, why=Loss.CLOSED) == []
    assert index.lose_slot(third, why=Loss.EVICTED) == []
    index.give_slot(third, 31)
    cut = index.lose_slot(first, why=Loss.EVICTED)
    assert {(gone.node, gone.owner, gone.slot) for gone in cut} == {
        (second, A, None), (third, A, 31), (other, A, None),
    }  # fmt: skip
    order = [gone.node for gone in cut]
    assert order.index(third) < order.index(second)
    assert (len(index), dict(index.slots), check(index)) == (0, {}, [])


def test_an_heir_takes_over_without_a_gap() -> None:
    index = index_of((1, 2, 3, 4))
    first, second = index.match(ME, ids(1, 2, 3, 4))
    index.hold(second, ("sequence", 2))
    assert index.lose_owner(first, A, heir=B) == []
    assert (first.owner, index.match(ME, ids(1, 2, 3, 4))) == (B, [first, second])
    assert index.lose_owner(first, B, heir=B) == []


def test_a_hold_is_on_the_whole_prefix() -> None:
    """sgl-project/sglang#36350: a holder skipped one block, and another holder lost it."""
    index = index_of((1, 2, 3, 4, 5, 6), (1, 2, 7, 8))
    first, second, third = index.match(ME, ids(1, 2, 3, 4, 5, 6))
    index.hold(third, ("sequence", 1))
    index.hold(third, ("sequence", 2))
    index.hold(second, ("sequence", 1))
    assert [node.pins for node in (first, second, third)] == [1, 2, 2]
    refused("lose_owner", "holds it", lambda: index.lose_owner(first, A, why=Loss.CLOSED), index)
    index.release(third, ("sequence", 1))
    index.release(second, ("sequence", 1))
    refused("lose_owner", "sequence 2", lambda: index.lose_owner(first, A, why=Loss.CLOSED), index)
    index.release(third, ("sequence", 2))
    assert [node.pins for node in (first, second, third)] == [0, 0, 0]
    assert len(index.lose_owner(first, A, why=Loss.CLOSED)) == 3


def test_digests_are_keyed_and_name_the_whole_prefix() -> None:
    one, other = index_of((1, 2, 1, 2)), index_of((1, 2, 1, 2))
    digests = [one.digest(node) for node in one]
    assert [len(digest) for digest in digests] == [16, 16]
    assert len(set(digests)) == 2
    assert [other.digest(node) for node in [*other][::-1]] == digests[::-1]
    unkeyed = Index(BLOCK)
    assert unkeyed.digest(unkeyed.insert(ME, ids(1, 2), A)) != digests[0]
    wide = Index(1, key=b"test")
    assert wide.digest(wide.extend(ME, [ids(1), ids(2)], A)[1]) not in digests


@pytest.mark.parametrize("key", [b"", b"k" * 65])
def test_a_digest_key_has_a_size(key: bytes) -> None:
    with pytest.raises(ArgumentError, match=f"the length of key is {len(key)}"):
        Index(BLOCK, key=key)


def test_a_block_has_a_token() -> None:
    with pytest.raises(ArgumentError, match="block_tokens is 0"):
        Index(0)


# Victims.


def stale(*chains: tuple[int, ...]) -> Index:
    """Chains on the host only; slots are numbered in the order of insertion."""
    index = Index(BLOCK, key=b"test")
    for chain in chains:
        place: Place = ME
        for key in index.keys(ids(*chain)):
            place = index.insert(place, key, slot=len(index))
    return index


def slots(nodes: list[Node]) -> list[int | None]:
    return [node.slot for node in nodes]


def test_victims_are_leaves_and_the_oldest_first() -> None:
    index = stale((1, 2, 3, 4), (5, 6), (7, 8))
    assert slots(index.victims(9)) == [1, 0, 2, 3]
    assert slots(index.victims(2)) == [1, 0]
    index.touch(index.match(ME, ids(1, 2)))
    assert slots(index.victims(9)) == [1, 2, 3, 0]
    index.touch(index.match(ME, ids(1, 2, 3, 4)))
    assert slots(index.victims(9)) == [2, 3, 1, 0]
    index.touch(index.match(ME, ids(5, 6)))
    assert slots(index.victims(9)) == [3, 1, 0, 2]
    assert (index.victims(0), check(index)) == ([], [])


def test_naming_the_end_of_a_chain_touches_all_of_it() -> None:
    index = stale((1, 2, 3, 4), (5, 6))
    index.touch(index.match(ME, ids(1, 2, 3, 4))[-1:])
    assert slots(index.victims(9)) == [2, 1, 0]
    assert check(index) == []


def test_what_is_pinned_is_no_victim_and_neither_is_what_is_above_it() -> None:
    index = stale((1, 2, 3, 4), (1, 2, 5, 6), (7, 8))
    node = index.match(ME, ids(1, 2, 3, 4))[-1]
    index.hold(node, ("copy", 1))
    assert slots(index.victims(9)) == [2, 3]
    index.release(node, ("copy", 1))
    assert slots(index.victims(9)) == [1, 2, 0, 3]


def test_a_child_on_the_gpu_keeps_a_parent_that_only_the_host_has() -> None:
    """sgl-project/sglang#23537: whether a block is a leaf of the host was judged by the GPU."""
    index = stale((1, 2, 3, 4))
    first, second = index.match(ME, ids(1, 2, 3, 4))
    index.give_owner(second, A)
    assert index.victims(9) == [second]
    index.lose_slot(second, why=Loss.EVICTED)
    assert index.victims(9) == []
    index.give_owner(first, B)
    assert index.victims(9) == [first], "a mirror: its bytes are on the GPU too"
    index.give_slot(second, 5)
    assert index.victims(9) == [second, first]
    index.lose_owner(second, A, why=Loss.CLOSED)
    index.lose_owner(first, B, why=Loss.CLOSED)
    assert index.victims(9) == [second, first]
    assert check(index) == []


def test_a_parent_becomes_a_victim_when_a_mirror_below_it_goes() -> None:
    index = index_of((1, 2, 3, 4))
    first, second = index.match(ME, ids(1, 2, 3, 4))
    index.give_slot(second, 2)
    index.give_slot(first, 1)
    index.lose_slot(second, why=Loss.EVICTED)
    assert check(index) == []
    assert index.victims(9) == [first]


def test_asking_for_victims_does_not_grow_the_queue() -> None:
    index = stale((1, 2, 3, 4, 5, 6), (7, 8))
    for _ in range(100):
        assert slots(index.victims(3)) == [2, 1, 0]
        index.touch(index.match(ME, ids(7, 8)))
    assert len(index._queue) <= len(index)
    assert check(index) == []


def test_blocks_that_come_and_go_do_not_fill_the_queue() -> None:
    index = Index(BLOCK)
    for at in range(1000):
        node = index.insert(ME, ids(at, at), slot=1)
        index.lose_slot(node, why=Loss.EVICTED)
    assert len(index._queue) < 200
    assert (index.victims(5), check(index)) == ([], [])


SPOILT: dict[str, tuple[Callable[[Index, Node, Node], object], str]] = {
    "a hole": (lambda i, a, b: setattr(a, "owner", None), "hole"),
    "an age": (lambda i, a, b: setattr(b, "used", a.used + 1), "its parent at"),
    "the clock": (lambda i, a, b: setattr(i, "clock", 0), "after 0"),
    "a pin": (lambda i, a, b: setattr(a, "pins", 1), "counts 1 pins and has 0"),
    "a child": (lambda i, a, b: setattr(a, "host_children", 3), "counts 3 children"),
    "a parent": (lambda i, a, b: setattr(b, "parent", None), "not what its parent says"),
    "a key": (lambda i, a, b: setattr(b, "key", b"?"), "not what its parent says"),
    "a root's child": (lambda i, a, b: setattr(a, "ordinal", 1), "not what its root says"),
    "an empty root": (lambda i, a, b: i._root(Identity(b"new")), "without blocks"),
    "a root": (lambda i, a, b: i._roots.update({b"?": i._roots.popitem()[1]}), "another identity"),
    "a slot": (lambda i, a, b: i.slots.clear(), "1 blocks have slots, 0 slots have blocks"),
    "a count": (lambda i, a, b: setattr(i, "_count", 5), "5 blocks are counted, 2 are there"),
    "the queue": (lambda i, a, b: i._queue.clear(), "queue of victims"),
    "an entry": (lambda i, a, b: i._queue.append(i._queue[0]), "queue of victims"),
    "a late entry": (lambda i, a, b: i._queue.append((9, *i._queue.pop()[1:])), "queue of victims"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_the_check_notices(name: str) -> None:
    """Each of its questions can be answered wrong."""
    index = index_of((1, 2, 3, 4))
    first, second = index.match(ME, ids(1, 2, 3, 4))
    index.give_slot(second, 1)
    assert check(index) == []
    spoil, message = SPOILT[name]
    spoil(index, first, second)
    assert any(message in line for line in check(index)), check(index)


# The model: a dict of tuples, and every question answered by looking through it.

Path = tuple[bytes, ...]
"""The code of an identity, then the keys of the blocks down to this one."""


@define
class Known:
    """What the model knows of a block."""

    owner: object | None
    slot: int | None
    used: int
    serial: int
    holders: set[Holder] = field(factory=set)


@frozen
class Refused:
    """What the model says of a call that must be refused."""


@define
class Model:
    """The index, naively."""

    blocks: dict[Path, Known] = field(factory=dict)
    clock: int = 0
    serial: int = 0

    def children(self, path: Path) -> list[Path]:
        return [one for one in self.blocks if one[:-1] == path]

    def under(self, path: Path) -> list[Path]:
        """The block and all below it."""
        return [one for one in self.blocks if one[: len(path)] == path]

    def pinned(self, path: Path) -> bool:
        return any(self.blocks[one].holders for one in self.under(path))

    def insert(self, path: Path, owner: object | None, slot: int | None) -> None:
        if path in self.blocks:
            return
        if len(path) == 2:
            self.clock += 1
        used = self.clock if len(path) == 2 else self.blocks[path[:-1]].used
        self.blocks[path] = Known(owner, slot, used, self.serial)
        self.serial += 1

    def touch(self, path: Path) -> None:
        self.clock += 1
        for length in range(2, len(path) + 1):
            self.blocks[path[:length]].used = self.clock

    def lose(self, path: Path, tier: str) -> set[tuple[Path, object, int | None]] | Refused:
        """What is cut below, or that it is refused."""
        other = {"owner": "slot", "slot": "owner"}[tier]
        if getattr(self.blocks[path], other) is not None:
            setattr(self.blocks[path], tier, None)
            return set()
        if self.pinned(path):
            return Refused()
        below = [one for one in self.under(path) if one != path]
        cut = {(one, self.blocks[one].owner, self.blocks[one].slot) for one in below}
        for one in (*below, path):
            del self.blocks[one]
        return cut

    def victims(self, count: int) -> list[Path]:
        """One after the other, on a copy, each the first of all that may go."""
        left = Model({path: evolve(known) for path, known in self.blocks.items()})
        chosen: list[Path] = []
        while len(chosen) < count and (free := [p for p in left.blocks if left.may_go(p)]):
            path = min(free, key=lambda p: (left.blocks[p].used, -len(p), left.blocks[p].serial))
            assert left.lose(path, "slot") == set()
            chosen.append(path)
        return chosen

    def may_go(self, path: Path) -> bool:
        known, children = self.blocks[path], self.children(path)
        return (
            known.slot is not None
            and not self.pinned(path)
            and all(self.blocks[child].slot is None for child in children)
            and (known.owner is not None or not children)
        )


def path_of(node: Node) -> Path:
    assert node.root is not None
    keys: list[bytes] = []
    step: Node | None = node
    while step is not None:
        keys.append(step.key)
        step = step.parent
    return (node.root.identity.code, *keys[::-1])


class Pair:
    """An index, its model and a replica, through the same calls."""

    def __init__(self) -> None:
        self.index = Index(BLOCK, key=b"test")
        self.publisher = Publisher(self.index, most_events=3)
        self.model, self.replica = Model(), Replica()
        self.nodes: dict[Path, Node] = {}

    def insert(
        self, identity: Identity, path: Path, owner: object | None, slot: int | None
    ) -> None:
        place: Place = identity if len(path) == 2 else self.nodes[path[:-1]]
        node = self.index.insert(place, path[-1], owner, slot)
        assert node is self.nodes.setdefault(path, node)
        self.model.insert(path, owner, slot)

    def lose(self, path: Path, tier: str) -> None:
        node = self.nodes[path]
        names = {one: name for name, one in self.nodes.items()}
        wanted = self.model.lose(path, tier)
        if isinstance(wanted, Refused):
            refused(f"lose_{tier}", "holds it", lambda: self._lose(node, tier), self.index)
            return
        cut = self._lose(node, tier)
        assert {(names[one.node], one.owner, one.slot) for one in cut} == wanted
        assert len(cut) == len(wanted)
        for upper, lower in pairwise(names[one.node] for one in cut):
            assert upper != lower[: len(upper)], "a child is cut before its parent"
        self.nodes = {name: one for name, one in self.nodes.items() if name in self.model.blocks}

    def _lose(self, node: Node, tier: str) -> list[Any]:
        if tier == "slot":
            return self.index.lose_slot(node, why=Loss.EVICTED)
        return self.index.lose_owner(node, node.owner, why=Loss.CLOSED)

    def compare(self) -> None:
        """Everything that can be asked has the same answer, and the events tell the same."""
        index, model = self.index, self.model
        assert check(index) == []
        assert {path_of(node): node for node in index} == self.nodes
        assert self.nodes.keys() == model.blocks.keys()
        for path, known in model.blocks.items():
            node = self.nodes[path]
            assert (node.owner, node.slot, set(node.holders), node.used, node.serial) == (
                known.owner, known.slot, known.holders, known.used, known.serial,
            )  # fmt: skip
            assert bool(node.pins) == model.pinned(path)
        self.follow()

    def compare_victims(self, count: int) -> list[Path]:
        """Apart from the rest: asking queues parents, and would hide that they were forgotten."""
        wanted = self.model.victims(count)
        assert [path_of(node) for node in self.index.victims(count)] == wanted
        assert check(self.index) == []
        return wanted

    def follow(self) -> None:
        for numbered in self.publisher.drain():
            self.replica.apply(decode(*encode(numbered)))
        assert self.replica.blocks == Replica.of(self.index).blocks
        tiers = {self.index.digest(node): frozenset(node.media) for node in self.index}
        assert {digest: block.tiers for digest, block in self.replica.blocks.items()} == tiers


# Every state of a small trie, and every call in each.

ONE, TWO, THREE = ids(1, 1), ids(2, 2), ids(3, 3)
SHAPE: list[Path] = [
    (ME.code, ONE), (ME.code, ONE, TWO), (ME.code, ONE, THREE), (ME.code, ONE, TWO, ONE),
]  # fmt: skip
Call = tuple[str, int]
CALLS: list[Call] = [
    (what, at)
    for what in ("insert owner", "insert slot", "give", "lose owner", "lose slot", "hold", "touch")
    for at in range(len(SHAPE))
]


def play(pair: Pair, call: Call) -> bool:
    """One call, on both; False where the caller's state has no such call."""
    what, at = call
    path, model = SHAPE[at], pair.model
    known = model.blocks.get(path)
    if what.startswith("insert"):
        if known is not None or (len(path) > 2 and path[:-1] not in model.blocks):
            return False
        pair.insert(ME, path, *((A, None) if what == "insert owner" else (None, at)))
    elif known is None:
        return False
    elif what == "give":
        give(pair, path, at)
    elif what == "hold":
        toggle_hold(pair, path, ("copy", at))
    elif what == "touch":
        pair.index.touch([pair.nodes[path]])
        model.touch(path)
    elif (known.owner if what == "lose owner" else known.slot) is None:
        return False
    else:
        pair.lose(path, what.removeprefix("lose "))
    return True


def give(pair: Pair, path: Path, at: int) -> None:
    """The tier that it lacks; of two, the refusal."""
    node, known = pair.nodes[path], pair.model.blocks[path]
    if known.owner is None:
        pair.index.give_owner(node, B)
        known.owner = B
    elif known.slot is None:
        pair.index.give_slot(node, at)
        known.slot = at
    else:
        refused("give_slot", "it has slot", lambda: pair.index.give_slot(node, 99), pair.index)


def toggle_hold(pair: Pair, path: Path, holder: Holder) -> None:
    node, holders = pair.nodes[path], pair.model.blocks[path].holders
    if holder in holders:
        pair.index.release(node, holder)
        holders.remove(holder)
    else:
        pair.index.hold(node, holder)
        holders.add(holder)


def shape_of(model: Model) -> tuple[Any, ...]:
    """A state up to ages and to who the owner is."""
    known = [model.blocks.get(path) for path in SHAPE]
    return tuple(
        one and (one.owner is not None, one.slot is not None, bool(one.holders)) for one in known
    )


@pytest.mark.hunt
def test_every_call_in_every_state_of_a_small_trie() -> None:
    """Breadth first: each state is reached by its shortest program, which is played again for each
    call that is tried in it."""
    seen = {shape_of(Model()): list[Call]()}
    waiting = list(seen)
    while waiting:
        program = seen[waiting.pop(0)]
        for call in CALLS:
            pair = Pair()
            for done in program:
                play(pair, done)
            if not play(pair, call):
                continue
            pair.compare()
            pair.compare_victims(len(SHAPE))
            if (shape := shape_of(pair.model)) not in seen:
                seen[shape] = [*program, call]
                waiting.append(shape)
    # 6 states of a block that is there. Below it: a leaf, or a block with an only leaf.
    assert len(seen) == 1 + 6 * (1 + 6) * (1 + 6 * (1 + 6))


# Anything, at random.

TOKENS = st.integers(0, 1)
DATA = st.lists(TOKENS, max_size=9)
EXTRA_KEYS = st.dictionaries(
    st.integers(0, 3), st.sampled_from([b"", b"x", (b"x", b"")]), max_size=1
)
WHO = st.sampled_from([Identity(), Identity(b"s"), Identity(adapter=1), Identity(adapter="1")])


class Machine(RuleBasedStateMachine):
    """All operations, with few tokens and few identities, so that prefixes meet."""

    @initialize()
    def begin(self) -> None:
        self.pair = Pair()
        self.free = list(range(40))
        self.held: list[tuple[Path, Holder]] = []

    def pick(self, data: st.DataObject, among: Iterator[Path] | list[Path]) -> Path:
        return data.draw(st.sampled_from(sorted(among)))

    def found(self) -> bool:
        return hasattr(self, "pair") and bool(self.pair.nodes)

    def freed(self, before: dict[int, Node]) -> None:
        self.free += sorted(set(before) - set(self.pair.index.slots))

    @rule(
        who=WHO,
        tokens=DATA,
        extras=EXTRA_KEYS,
        on_host=st.booleans(),
        owner=st.sampled_from([A, B]),
    )
    def insert(
        self, who: Identity, tokens: list[int], extras: dict[int, Extra], on_host: bool, owner: str
    ) -> None:
        path: Path = (who.code,)
        for key in self.pair.index.keys(token_bytes(tokens), extras):
            path = (*path, key)
            new = path not in self.pair.nodes
            slot = self.free.pop() if on_host and new and self.free else None
            self.pair.insert(who, path, None if slot is not None else owner, slot)

    @rule(who=WHO, tokens=DATA, extras=EXTRA_KEYS, owner=st.sampled_from([A, B]))
    def extend(
        self, who: Identity, tokens: list[int], extras: dict[int, Extra], owner: str
    ) -> None:
        pair = self.pair
        keys = pair.index.keys(token_bytes(tokens), extras)
        chain = pair.index.extend(who, keys, owner)
        for end, node in enumerate(chain, 1):
            path = (who.code, *keys[:end])
            pair.model.insert(path, owner, None)
            assert pair.nodes.setdefault(path, node) is node

    @rule(who=WHO, tokens=DATA, extras=EXTRA_KEYS, most=st.none() | st.integers(0, 4))
    def match(
        self, who: Identity, tokens: list[int], extras: dict[int, Extra], most: int | None
    ) -> None:
        keys = [
            token_bytes(tokens[at : at + 2])
            + (extra_bytes(extras[at // 2]) if at // 2 in extras else b"")
            for at in range(0, len(tokens) - 1, 2)
        ][:most]
        paths = [(who.code, *keys[:end]) for end in range(1, len(keys) + 1)]
        wanted = [self.pair.nodes[path] for path in paths if path in self.pair.model.blocks]
        data = token_bytes(tokens)
        assert self.pair.index.match(who, data, extras, most) == wanted

    @rule(who=WHO, rest=DATA, data=st.data(), extra=st.sampled_from([None, b"x"]))
    def partial(
        self, who: Identity, rest: list[int], data: st.DataObject, extra: Extra | None
    ) -> None:
        own = [path for path in self.pair.nodes if path[0] == who.code]
        above: Path = data.draw(st.sampled_from([(who.code,), *sorted(own)]))
        place: Place = self.pair.nodes[above] if len(above) > 1 else who
        tail = b"" if extra is None else extra_bytes(extra)
        best: tuple[int, int, Path] | None = None
        for path in self.pair.model.children(above):
            tokens = np.frombuffer(path[-1][:8], np.int32).tolist()
            shared = next((n for n in range(min(2, len(rest))) if tokens[n] != rest[n]),
                          min(2, len(rest)))  # fmt: skip
            if path[-1][8:] == tail and shared:
                known = (-shared, self.pair.model.blocks[path].serial, path)
                best = min(best or known, known)
        wanted = best and (self.pair.nodes[best[2]], -best[0])
        assert self.pair.index.partial(place, token_bytes(rest), extra) == wanted

    @precondition(found)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        path = self.pick(data, self.pair.nodes)  # type: ignore[arg-type]
        chain = [self.pair.nodes[path[:end]] for end in range(2, len(path) + 1)]
        self.pair.index.touch(chain if data.draw(st.booleans()) else chain[-1:])
        self.pair.model.touch(path)

    @precondition(found)
    @rule(data=st.data(), to_gpu=st.booleans())
    def give(self, data: st.DataObject, to_gpu: bool) -> None:
        path = self.pick(data, self.pair.nodes)  # type: ignore[arg-type]
        node, known = self.pair.nodes[path], self.pair.model.blocks[path]
        if to_gpu and known.owner is None:
            self.pair.index.give_owner(node, C)
            known.owner = C
        elif not to_gpu and known.slot is None and self.free:
            known.slot = self.free.pop()
            self.pair.index.give_slot(node, known.slot)

    @precondition(found)
    @rule(data=st.data())
    def inherit(self, data: st.DataObject) -> None:
        path = self.pick(data, self.pair.nodes)  # type: ignore[arg-type]
        known = self.pair.model.blocks[path]
        if known.owner is not None:
            assert self.pair.index.lose_owner(self.pair.nodes[path], known.owner, heir=C) == []
            known.owner = C

    @precondition(found)
    @rule(data=st.data(), tier=st.sampled_from(["owner", "slot"]))
    def lose(self, data: st.DataObject, tier: str) -> None:
        path = self.pick(data, self.pair.nodes)  # type: ignore[arg-type]
        if getattr(self.pair.model.blocks[path], tier) is not None:
            before = dict(self.pair.index.slots)
            self.pair.lose(path, tier)
            self.freed(before)

    @precondition(found)
    @rule(data=st.data(), number=st.integers(0, 2))
    def hold(self, data: st.DataObject, number: int) -> None:
        path = self.pick(data, self.pair.nodes)  # type: ignore[arg-type]
        toggle_hold(self.pair, path, ("sequence", number))

    @rule(count=st.integers(0, 5) | st.just(99))
    def look_for_victims(self, count: int) -> None:
        self.pair.compare_victims(count)

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        wanted = self.pair.compare_victims(count)
        before = dict(self.pair.index.slots)
        for path in wanted:
            self.pair.lose(path, "slot")
        self.freed(before)

    @invariant()
    def same(self) -> None:
        if hasattr(self, "pair"):
            self.pair.compare()
            assert sorted([*self.free, *self.pair.index.slots]) == list(range(40))


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_the_same_calls_give_the_same_events() -> None:
    """Nothing depends on a clock, on hash() or on chance, once the key is given."""

    def run() -> list[Numbered]:
        pair = Pair()
        for call in CALLS:
            play(pair, call)
        return pair.publisher.drain()

    first, second = (json.dumps([repr(one) for one in run()]) for _ in range(2))
    assert first == second
