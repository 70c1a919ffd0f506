"""What a block is found by: the bytes of its token ids, and of everything else that they depend on.

Exact and tagged: equal keys are equal inputs, and no two kinds of input can look alike (law 6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy.typing as npt
from attrs import field, frozen

from kvstate.errors import ArgumentError, ArgumentTypeError
from kvstate.values import ID, LARGEST, described, ids, plain, shown, whole

Extra = bytes | tuple[bytes, ...]
"""What a block depends on besides tokens (an image's digest and place, say): one field or more."""
Extras = Mapping[int, Extra]
"""By the ordinal of the block."""
ID_BYTES: Final = ID.itemsize
LARGEST_ADAPTER: Final = 2 * LARGEST + 1
"""Of adapters that are numbers: events carry them as uint64, or as int64."""


def token_bytes(tokens: npt.ArrayLike, name: str = "tokens") -> bytes:
    """Token ids as little-endian int32 bytes; see `values.ids` for what is taken."""
    return ids(name, tokens).tobytes()


def tagged(tag: bytes, content: bytes) -> bytes:
    """One field: no two kinds, and no two cuts of the same bytes into fields, can be equal."""
    return tag + len(content).to_bytes(8, "little") + content


def extra_bytes(extra: Extra, name: str = "extra keys") -> bytes:
    """The part of a block's key that says its extra fields. One field is a tuple of one.

    Raises ArgumentError for no field, and for a field that is not bytes.
    """
    fields = extra if isinstance(extra, tuple) else (extra,)
    if not fields or not all(type(one) is bytes for one in fields):
        wanted = "bytes are wanted, or a tuple of at least one such field"
        raise ArgumentTypeError(f"{name} is {described(extra)}: {wanted}")
    return b"".join(tagged(b"x", one) for one in fields)


def checked_extras(extra_keys: Any, blocks: int) -> dict[int, Extra]:
    """The extra keys of some of so many blocks, by their numbers.

    Raises ArgumentError for what is no number of one of them (JSON makes texts of numbers), and for
    what `extra_bytes` refuses: with a key that is not looked at, a block would be found for what it
    was not computed from.
    """
    if extra_keys is None:
        return {}
    found: dict[int, Extra] = {}
    if not issubclass(type(extra_keys), Mapping):
        raise ArgumentTypeError(f"extra_keys is {described(extra_keys)}: a Mapping is wanted")
    for key, extra in extra_keys.items():
        block = whole("a block number of extra_keys", key, 0, blocks - 1)
        extra_bytes(extra, f"extra_keys[{block}]")
        found[block] = extra
    return found


Adapter = str | bytes | int | None
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def _salt(salt: Any) -> bytes:
    found = salt if type(salt) is bytes else plain(salt)
    if type(found) is not bytes:
        raise ArgumentTypeError(f"salt is {described(salt)}: bytes are wanted")
    return found


def _adapter(adapter: Any) -> Adapter:
    """As events and traces can carry it. Raises ArgumentError."""
    found = None if adapter is None else plain(adapter)
    if found is None or type(found) is bytes:
        return found
    if issubclass(type(found), str):
        return _text(found)
    if type(found) is bool or not issubclass(type(found), int):
        wanted = "a str, bytes, an int or None is wanted"
        raise ArgumentTypeError(f"adapter is {described(adapter)}: {wanted}")
    return whole("adapter", found, -LARGEST - 1, LARGEST_ADAPTER)


def _text(adapter: str) -> str:
    try:
        adapter.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"adapter is {shown(adapter)}: {error}") from error
    return str.__str__(adapter)


def _epoch(epoch: Any) -> int:
    return whole("weights_epoch", epoch)


@frozen
class Identity:
    """What a whole prefix depends on besides its tokens. Equal only if each field has the same
    type and value: adapters 1, "1" and b"1" are three, and none is a salt
    (vllm-project/vllm#44701).

    Raises ArgumentError for a field of another type, and for an adapter that events and traces
    cannot carry: a number beyond 64 bits, a text that is no Unicode.
    """

    salt: bytes = field(default=b"", eq=False, converter=_salt)
    adapter: Adapter = field(default=None, eq=False, converter=_adapter)
    weights_epoch: int = field(default=0, eq=False, converter=_epoch)
    code: bytes = field(init=False, repr=False)
    """All of it as bytes: each field tagged with its type, and with its length."""

    @code.default
    def _encode(self) -> bytes:
        epoch = tagged(b"e", b"%d" % self.weights_epoch)
        return tagged(b"s", self.salt) + _adapter_bytes(self.adapter) + epoch


def _adapter_bytes(adapter: Adapter) -> bytes:
    match adapter:
        case None:
            return tagged(b"n", b"")
        case bytes():
            return tagged(b"b", adapter)
        case str():
            return tagged(b"t", adapter.encode())
        case int():
            return tagged(b"i", b"%d" % adapter)
