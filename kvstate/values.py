"""The door: every value that a caller passes comes in here, once, before anything is looked at.

What comes out is plain: a Python int, float, bool or str, or a numpy array of int64 or int32, equal
to what was given in every bit. Whatever is not exactly that is refused by name: the argument, the
value, its type and what is wanted. Numpy's integers and arrays of no dimension are as good as
Python's, of any width, and no arithmetic is done in theirs. A bool is no number, a float is no
whole one, and a text is neither.

What has no order (a set, a dict) is no row, and neither is what can be read only once: after a
refusal its caller could not pass it again, and a record could not tell it.

Rejected: `int(value)` and `np.asarray(value, dtype)`, which cut, wrap and parse without a word; a
check of what can be told from the type alone (`np.asarray([1, True])` has no bool in it any more).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from reprlib import Repr
from sys import float_info
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstate.errors import ArgumentError, ArgumentTypeError

T = TypeVar("T")
Wide = npt.NDArray[np.int64]

LARGEST: Final = (1 << 63) - 1
"""Of every number that has no smaller limit: what int64, events and traces can carry."""
FINITE: Final = float_info.max
ID: Final = np.dtype("<i4")
ID_LOW: Final = -(1 << 31)
ID_HIGH: Final = (1 << 31) - 1
_TEXTS: Final = (str, bytes, bytearray, memoryview)
_UNORDERED: Final = (set, frozenset, Mapping)
_INTS: Final = list[int]
NOBODYS: Final = (MemoryError, RecursionError)
"""No value's fault: the call is cut short."""

_short: Final = Repr()
_short.maxstring = _short.maxother = _short.maxlong = 60


def plain(value: T) -> T:
    """What numpy has of no dimension, as what it is in Python; everything else as it is."""
    found: Any = value
    try:
        if issubclass(type(value), np.generic):
            found = found.item()
        elif getattr(value, "shape", None) == ():
            found = _numpy(value).item()
    except NOBODYS:
        raise
    except Exception:  # an object of somebody else's, whose own code says no
        return value
    return found  # type: ignore[no-any-return]


def whole(name: str, value: Any, low: int = 0, high: int = LARGEST) -> int:
    """A whole number from `low` to `high`."""
    number: int = value if type(value) is int else plain(value)
    if type(number) is not int:
        if not issubclass(type(number), int) or type(number) is bool:
            raise ArgumentTypeError(_no_whole(name, value, low, high))
        number = int.__index__(number)
    if not low <= number <= high:
        raise ArgumentError(_no_whole(name, value, low, high))
    return number


def number(
    name: str, value: Any, low: float = -FINITE, high: float = FINITE, *,
    above: bool = False, below: bool = False,
) -> float:  # fmt: skip
    """A finite number from `low` to `high`: `above` it, or `below` that, where an end does not
    belong to it."""
    found = plain(value)
    ends = f"{'above' if above else 'from'} {low:g} {'to below' if below else 'to'} {high:g}"
    message = f"{name} is {described(value)}: a number {ends} is wanted"
    if not issubclass(type(found), int | float) or type(found) is bool:
        raise ArgumentTypeError(message)
    fits = (low < found if above else low <= found) and (found < high if below else found <= high)
    if not fits:
        raise ArgumentError(message)
    return float(found)


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that only counts as one of them."""
    found = value if type(value) is bool else plain(value)
    if type(found) is not bool:
        raise ArgumentTypeError(f"{name} is {described(value)}: True or False is wanted")
    return found


def one_of(name: str, value: object, choices: Sequence[str]) -> str:
    """One of these texts."""
    found, wanted = plain(value), f"one of {', '.join(choices)} is wanted"
    if not issubclass(type(found), str):
        raise ArgumentTypeError(f"{name} is {described(value)}: {wanted}")
    if found not in choices:
        raise ArgumentError(f"{name} is {shown(value)}: {wanted}")
    return choices[choices.index(found)]


def instance(name: str, value: object, kind: type[T], wanted: str = "") -> T:
    """An object of that kind; not one that only says so."""
    if not issubclass(type(value), kind):
        wanted = wanted or f"{article(kind.__name__)} is wanted"
        raise ArgumentTypeError(f"{name} is {described(value)}: {wanted}")
    return value  # type: ignore[return-value]


def able(name: str, value: object, calls: Sequence[str]) -> None:
    """An object that has these calls, and is no class of such objects."""
    missing = [call for call in calls if not callable(getattr(value, call, None))]
    if missing or isinstance(value, type):
        wanted = f"an object with {', '.join(calls)} is wanted"
        raise ArgumentTypeError(f"{name} is {described(value)}: {wanted}")


def in_order(name: str, values: Any) -> Iterator[Any]:
    """The values one after the other: of anything that has them in an order."""
    wanted = "values in an order are wanted"
    if issubclass(type(values), (*_UNORDERED, *_TEXTS)):
        raise ArgumentTypeError(f"{name} is {described(values)}: {wanted}")
    try:
        return iter(values)
    except TypeError as error:
        raise ArgumentTypeError(f"{name} is {described(values)}: {wanted}") from error


def ids(name: str, value: object) -> npt.NDArray[np.int32]:
    """Token ids: a row of whole numbers that int32 holds, [n] or [1, n], or one of them.

    Taken as a list, a tuple, a range, or any array in memory that a CPU reads; what is int32
    already is not copied. Ids are opaque: negative ones pass. Cost: a few passes in numpy.
    """
    if type(value) is np.ndarray and value.dtype == ID and value.ndim == 1:
        return value
    found = _integers(name, value, ID_LOW, ID_HIGH)
    if found.ndim == 2 and len(found) == 1:
        name, found = name if isinstance(value, np.ndarray) else f"{name}[0]", found[0]
    if found.ndim > 1:
        raise ArgumentError(f"{name} has the shape {found.shape}: one row of ids is wanted")
    narrow = found.astype(ID)
    wrong = np.flatnonzero(narrow != found)
    if len(wrong):
        raise _misplaced(name, value, found, int(wrong[0]), ID_LOW, ID_HIGH)
    return np.atleast_1d(narrow)


def counts(name: str, value: object, size: int, high: int | Wide, *, one: bool = False) -> Wide:
    """A row of `size` whole numbers from 0 to `high`, or to that of the same place; or `one` for
    all of them, as an array of no dimension. What is int64 already is not copied. Cost: a few
    passes in numpy."""
    found = _integers(name, value, 0, LARGEST if isinstance(high, np.ndarray) else high)
    if found.shape != (size,) and not (one and not found.ndim):
        wanted = f"one number{' for all, or one' if one else ''} for each of {size} is wanted"
        raise ArgumentError(f"{name} has the shape {found.shape}: {wanted}")
    wide = found.astype(np.int64, copy=False)  # what is too large for that comes out negative
    most = high.view(np.uint64) if isinstance(high, np.ndarray) else np.uint64(high)
    wrong = wide.view(np.uint64) > most
    if np.count_nonzero(wrong):
        at = int(wrong.argmax())
        limit = int(high[at]) if isinstance(high, np.ndarray) else high
        raise _misplaced(name, value, found, at, 0, limit)
    return wide


def shown(value: object) -> str:
    """A value for a message: short, on one line, whatever it is."""
    try:
        return " ".join(_short.repr(plain(value)).split())
    except NOBODYS:
        raise
    except Exception:  # of somebody else's code, or an int of thousands of digits
        return "what cannot be shown"


def article(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[:1] in 'aeioAEIO' else 'a'} {noun}"


def described(value: object) -> str:
    """A value for a message, and its type."""
    return shown(value) if value is None else f"{shown(value)}, {article(type(value).__name__)}"


def _no_whole(name: str, value: object, low: int, high: int) -> str:
    return f"{name} is {described(value)}: a whole number from {low} to {high} is wanted"


def _misplaced(
    name: str, given: object, found: npt.NDArray[Any], at: int, low: int, high: int
) -> ArgumentError:
    one = found.flat[at] if isinstance(given, np.ndarray) else found.flat[at].item()
    place = f"{name}[{at}]" if found.ndim else name
    return ArgumentError(_no_whole(place, one, low, high))


def _integers(
    name: str, value: Any, low: int, high: int, *, inner: bool = False
) -> npt.NDArray[Any]:
    """Whole numbers as an array of integers: in their own width, not yet looked at, or in int64 and
    in range."""
    kind = type(value)
    if kind is list or kind is tuple:
        return _items(name, value, low, high, inner=inner)
    if issubclass(kind, int | np.integer):
        return np.array(whole(name, value, low, high), np.int64)
    if issubclass(kind, Sequence) and not issubclass(kind, (array, *_TEXTS)):
        return _items(name, value, low, high, inner=inner)
    found = _array(name, value)
    if found.dtype.kind in "iu":
        return found
    if not found.size:
        return found.astype(np.int64)
    if found.dtype.kind == "O" and found.ndim == 1:
        return _items(name, found.tolist(), low, high, inner=True)
    place = name + "[0]" * found.ndim
    raise ArgumentTypeError(_no_whole(place, found.flat[0], low, high))


def _items(
    name: str, value: Sequence[Any], low: int, high: int, *, inner: bool
) -> npt.NDArray[Any]:
    """One by one, but for what has nothing but plain ints in it, which one call finds out."""
    try:
        items = value if isinstance(value, list | tuple) else list(value)
        return np.array(msgspec.convert(items, _INTS), np.int64)
    except (msgspec.ValidationError, OverflowError):
        pass
    except NOBODYS:
        raise
    except Exception as error:  # a sequence of somebody else's, whose own code says no
        raise ArgumentTypeError(f"{name} is {described(value)}: {error}") from error
    if len(items) == 1 and not inner and _is_row(items[0]):
        return _integers(f"{name}[0]", items[0], low, high, inner=True)[np.newaxis]
    numbers = [whole(f"{name}[{at}]", one, low, high) for at, one in enumerate(items)]
    return np.array(numbers, np.int64)


def _is_row(value: object) -> bool:
    if issubclass(type(value), Sequence):
        return not issubclass(type(value), _TEXTS)
    try:
        return _numpy(value).ndim > 0
    except NOBODYS:
        raise
    except Exception:  # not what numpy knows
        return False


def _array(name: str, value: Any) -> npt.NDArray[Any]:
    try:
        return _numpy(value)
    except NOBODYS:
        raise
    except Exception as error:  # numpy's, or of somebody else's code
        raise ArgumentTypeError(f"{name} is {described(value)}: {error}") from error


def _numpy(value: Any) -> npt.NDArray[Any]:
    """The array that something is, or says it is. Raises whatever its own code raises."""
    if issubclass(type(value), np.ma.MaskedArray):
        raise TypeError("a masked array has values that are not there")
    says = ("__array__", "__array_interface__", "__array_struct__")
    if type(value) is array or any(hasattr(value, name) for name in says):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    raise TypeError("a row of whole numbers is wanted: a list, a tuple, a range or an array")
