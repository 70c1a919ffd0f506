"""The door for values: exact in every width, up to the ends of every range, and short in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from kvstate import ArgumentError
from kvstate.values import ID_HIGH, ID_LOW, LARGEST, counts, flag, ids, number, one_of, whole


def test_numbers_are_exact_in_every_width() -> None:
    for width in (8, 16, 32, 64):
        for kind in ("int", "uint"):
            bounds = np.iinfo(f"{kind}{width}")
            for value in (bounds.min, bounds.max):
                one = np.dtype(f"{kind}{width}").type(value)
                assert counted(one) == counted(value)
                assert identified(np.array([one])) == identified([value])
                assert rowed(np.array([one])) == rowed([value])


def counted(value: Any) -> object:
    try:
        return whole("n", value)
    except ArgumentError as error:
        return type(error)


def identified(value: Any) -> object:
    try:
        return ids("n", value).tolist()
    except ArgumentError as error:
        return type(error)


def rowed(value: Any) -> object:
    try:
        return counts("n", value, 1, LARGEST).tolist()
    except ArgumentError as error:
        return type(error)


def test_the_ends_belong_to_it() -> None:
    assert [whole("n", n, 2, 4) for n in (2, 3, 4)] == [2, 3, 4]
    assert ids("n", [ID_LOW, ID_HIGH]).tolist() == [ID_LOW, ID_HIGH]
    assert counts("n", [0, 4], 2, 4).tolist() == [0, 4]
    assert counts("n", [0, 4], 2, np.array([0, 4])).tolist() == [0, 4]
    assert [number("n", n, 0, 1) for n in (0, 0.5, 1)] == [0.0, 0.5, 1.0]


BEYOND: Final[list[tuple[Callable[[], object], str]]] = [
    (lambda: whole("n", 1, 2, 4), "n is 1, an int: a whole number from 2 to 4 is wanted"),
    (lambda: whole("n", 5, 2, 4), "n is 5"),
    (lambda: counts("n", [5], 1, 4), r"n\[0\] is 5, an int: a whole number from 0 to 4"),
    (lambda: counts("n", [1, 5], 2, np.array([1, 4])), r"n\[1\] is 5, an int: .* from 0 to 4"),
    (lambda: counts("n", [1], 2, 4), r"n has the shape \(1,\): one number for each of 2 is wanted"),
    (lambda: counts("n", 5, 2, 4, one=True), "n is 5, an int: a whole number from 0 to 4"),
    (lambda: number("n", 0, 0, 1, above=True), "n is 0, an int: a number above 0 to 1 is wanted"),
    (lambda: number("n", 1, 0, 1, below=True), "n is 1, an int: a number from 0 to below 1"),
    (lambda: number("n", float("inf")), "n is inf, a float: a number from"),
    (lambda: one_of("n", "c", ("a", "b")), "n is 'c': one of a, b is wanted"),
    (lambda: flag("n", 1), "n is 1, an int: True or False is wanted"),
]


@pytest.mark.parametrize(("call", "message"), BEYOND)
def test_what_is_beyond_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        call()


class Unshowable:
    shape = ()

    def __repr__(self) -> str:
        raise RuntimeError

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError


LONG: Final[dict[str, Any]] = {
    "unshowable": Unshowable(), "digits": 10**5000, "more digits": [10**5000], "text": "x" * 10**6,
    "rows": [[]] * 10**5,
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_a_message_is_short_whatever_the_value(name: str) -> None:
    value = LONG[name]
    for call in (whole, ids, flag, number):
        with pytest.raises(ArgumentError) as caught:
            call("n", value)
        assert len(str(caught.value)) < 300


def test_what_is_as_it_must_be_is_not_copied() -> None:
    row, numbers = np.arange(4, dtype=np.int32), np.arange(4)
    assert ids("n", row) is row
    assert counts("n", numbers, 4, LARGEST) is numbers
