"""Part of a block is found among many siblings as it would be one by one, and as fast as among
few."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from unittest.mock import patch

import pytest

from kvstate import siblings
from kvstate.blocks import Loss, Node, Place
from kvstate.index import Index
from kvstate.index_check import check
from kvstate.keys import Extra, Identity, extra_bytes, token_bytes
from kvstate.siblings import Branch, Siblings
from tests.work import bytecodes

ME = Identity()
OWNER = object()
Known = dict[tuple[tuple[int, ...], Extra | None], Node]


def naive(known: Known, rest: tuple[int, ...], extra: Extra | None) -> tuple[Node, int] | None:
    """The answer, one by one; a dictionary is in the order of insertion."""
    best: tuple[Node, int] | None = None
    for (tokens, other), node in known.items():
        pairs = zip(tokens, rest, strict=False)
        shared = next((at for at, (one, two) in enumerate(pairs) if one != two), len(rest))
        if other == extra and shared > (best[1] if best else 0):
            best = node, shared
    return best


def key(tokens: tuple[int, ...], extra: Extra | None) -> bytes:
    return token_bytes(tokens) + (b"" if extra is None else extra_bytes(extra))


def drawn(random: Random) -> tuple[str, int, tuple[int, ...], Extra | None]:
    """What to do, at which of two places, with which of few blocks."""
    call = random.choice(("insert", "insert", "cut", "ask"))
    tokens = tuple(random.choice(some) for some in ((0, 0, 0, 1), (0, 1), (0, 1, 2), (0, 1)))
    return call, random.choice((0, 1, 1)), tokens, random.choice((None, None, b"x"))


@pytest.mark.parametrize("few", [0, 2, 8])
@pytest.mark.parametrize("seed", range(10))
def test_the_answer_is_the_naive_one_whatever_comes_and_goes(few: int, seed: int) -> None:
    random = Random(seed)
    with patch.object(siblings, "FEW", few):
        index = Index(4)
        (above,) = index.extend(ME, [token_bytes((9, 9, 9, 9))], OWNER)
        places: list[Place] = [Identity(b"other"), above]
        found: list[Known] = [{}, {}]
        for call, place, tokens, extra in (drawn(random) for _ in range(200)):
            known = found[place]
            if call == "insert" and (tokens, extra) not in known:
                known[tokens, extra] = index.insert(places[place], key(tokens, extra), OWNER)
            elif call == "cut" and known:
                node = known.pop(random.choice([*known]))
                index.lose_owner(node, OWNER, why=Loss.CLOSED)
            rest = tokens[: random.randint(1, 4)]
            answer = index.partial(places[place], token_bytes(rest), extra)
            assert answer == naive(known, rest, extra)
            assert not check(index)
            assert all(len(branch.below) > 1 for branch in inner(index))


def inner(index: Index) -> Iterator[Branch]:
    """The branches below the topmost ones."""
    tops = [top for one in index.crowds.at.values() for top in one.tops.values()]
    waiting = [below for top in tops for below in top.below.values()]
    while waiting:
        if isinstance(one := waiting.pop(), Branch):
            waiting += one.below.values()
            yield one


def crowd(count: int) -> tuple[Index, list[Node]]:
    """Siblings that share one token with what is looked for; none shares two."""
    index = Index(8)
    data = [token_bytes((1, at, *(2,) * 6)) for at in range(100, 100 + count)]
    nodes = [index.insert(ME, one, OWNER) for one in data]
    index.partial(ME, token_bytes((1, 2)))
    return index, nodes


def sharing(index: Index, nodes: list[Node]) -> None:
    assert index.partial(ME, token_bytes((1, 2, 3))) == (nodes[0], 1)


def alone(index: Index, nodes: list[Node]) -> None:
    assert index.partial(ME, token_bytes((7,))) is None


def whole(index: Index, nodes: list[Node]) -> None:
    assert index.partial(ME, nodes[-1].key) == (nodes[-1], 8)


def coming(index: Index, nodes: list[Node]) -> None:
    index.insert(ME, token_bytes((1, 7, *(2,) * 6)), OWNER)


def leaving(index: Index, nodes: list[Node]) -> None:
    index.lose_owner(nodes[0], OWNER, why=Loss.CLOSED)
    assert index.partial(ME, token_bytes((1, 2))) == (nodes[1], 1)


@pytest.mark.parametrize("call", [sharing, alone, whole, coming, leaving])
def test_no_call_costs_more_among_many(call: Callable[[Index, list[Node]], None]) -> None:
    few, many = (bytecodes(partial(call, *crowd(count))) for count in (50, 3200))
    assert many <= few * 1.1


def test_who_has_left_costs_its_part_once() -> None:
    index, nodes = crowd(500)
    for node in nodes[:400]:
        index.lose_owner(node, OWNER, why=Loss.CLOSED)
    first, second = (bytecodes(partial(index.partial, ME, token_bytes((1,)))) for _ in range(2))
    among_few, _ = crowd(50)
    wanted = bytecodes(partial(among_few.partial, ME, token_bytes((1,))))
    assert first > 100 * 10
    assert second == wanted
    assert index.partial(ME, token_bytes((1,))) == (nodes[400], 1)


def test_nothing_is_kept_for_few_for_none_that_asked_and_for_what_has_left() -> None:
    index, nodes = crowd(siblings.FEW)
    assert not index.crowds.at
    more = [index.insert(ME, token_bytes((3, at, *(2,) * 6)), OWNER) for at in range(9)]
    assert not index.crowds.at
    index.partial(ME, token_bytes((3,)))
    assert len(index.crowds.at) == 1
    children = [index.insert(nodes[0], one.key, OWNER) for one in (*nodes, *more)]
    index.partial(nodes[0], token_bytes((3,)))
    assert len(index.crowds.at) == 2
    index.lose_owner(nodes[0], OWNER, why=Loss.CLOSED)
    assert len(index.crowds.at) == 1
    assert not any(node.findable for node in children)
    for node in (*nodes[1:], *more):
        index.lose_owner(node, OWNER, why=Loss.CLOSED)
    assert not index.crowds.at


def test_siblings_that_leave_and_come_again_leave_no_entries_behind() -> None:
    index, nodes = crowd(20)
    (top,) = next(iter(index.crowds.at.values())).tops.values()
    (below,) = top.below.values()
    assert isinstance(below, Branch)
    last = nodes[-1]
    for _ in range(500):
        index.lose_owner(last, OWNER, why=Loss.CLOSED)
        last = index.insert(ME, last.key, OWNER)
    assert len(below.queue) <= 2 * 20 + 20


def test_siblings_may_share_ever_more() -> None:
    """A loop, and no recursion: blocks may be long."""
    size = 3000
    index = Index(size)
    blocks = [(*(1,) * at, *(2,) * (size - at)) for at in range(1, size, 2)]
    nodes = [index.insert(ME, token_bytes(one), OWNER) for one in blocks]
    assert index.partial(ME, token_bytes((1,))) == (nodes[0], 1)
    assert index.partial(ME, token_bytes(blocks[-1][:-1])) == (nodes[-1], size - 1)
    for node in nodes[:-9]:
        index.lose_owner(node, OWNER, why=Loss.CLOSED)
    assert index.partial(ME, token_bytes((1,))) == (nodes[-9], 1)
    assert not check(index)


def test_a_sibling_that_is_not_noted_is_seen_by_the_check() -> None:
    with patch.object(Siblings, "add"):
        index, _ = crowd(30)
    assert check(index)
