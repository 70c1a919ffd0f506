"""What a block is found by: the bytes of its token ids, and of everything else that they depend on.

Exact and tagged: equal keys are equal inputs, and no two kinds of input can look alike (law 6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from kvstate.errors import ConfigError

Extra = bytes | tuple[bytes, ...]
"""What a block depends on besides tokens (an image's digest and place, say): one field or more."""
Extras = Mapping[int, Extra]
"""By the ordinal of the block."""
ID: Final = np.dtype("<i4")
ID_BYTES: Final = ID.itemsize


def token_bytes(tokens: npt.ArrayLike) -> bytes:
    """Token ids as little-endian int32 bytes: one dimension of anything that numpy takes, or one
    id.

    Ids are opaque: negative ones pass. Raises ConfigError for what is no integer of 32 bits,
    naming the first such value and its place, and for more than one dimension. An int32 array
    costs one copy.
    """
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tokens are no row of ids: {error}") from error
    if ids.ndim > 1:
        raise ConfigError(f"tokens have the shape {ids.shape}; one row of ids is wanted")
    return ids.tobytes() if ids.dtype == ID else _narrowed(ids.ravel(), tokens)


def _narrowed(ids: npt.NDArray[Any], given: npt.ArrayLike) -> bytes:
    if ids.dtype.kind in "iu":
        narrow = ids.astype(ID)
        wrong = np.flatnonzero(narrow != ids)
        if not len(wrong):
            return narrow.tobytes()
        raise _bad_id(int(wrong[0]), ids[wrong[0]])
    values = given if isinstance(given, list | tuple) else ids.tolist()
    for at, value in enumerate(values):
        if not _is_id(value):
            raise _bad_id(at, value)
    return np.array(values, ID).tobytes()


def _is_id(value: object) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and -(2**31) <= value < 2**31  # type: ignore[operator]


def _bad_id(at: int, value: object) -> ConfigError:
    return ConfigError(f"token {at} is {value!s}, a {type(value).__name__}: not an int32 id")


def tagged(tag: bytes, content: bytes) -> bytes:
    """One field: no two kinds, and no two cuts of the same bytes into fields, can be equal."""
    return tag + len(content).to_bytes(8, "little") + content


def extra_bytes(extra: Extra) -> bytes:
    """The part of a block's key that says its extra fields. One field is a tuple of one.

    Raises ConfigError for no field, and for a field that is not bytes.
    """
    fields = extra if isinstance(extra, tuple) else (extra,)
    if not fields or not all(isinstance(one, bytes) for one in fields):
        raise ConfigError(f"extra keys of a block are bytes, at least one field; not {extra!r}")
    return b"".join(tagged(b"x", one) for one in fields)


Adapter = str | bytes | int | None
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@frozen
class Identity:
    """What a whole prefix depends on besides its tokens. Equal only if each field has the same
    type and value: adapters 1, "1" and b"1" are three, and none is a salt
    (vllm-project/vllm#44701).

    Raises ConfigError for a field of another type.
    """

    salt: bytes = field(default=b"", eq=False)
    adapter: Adapter = field(default=None, eq=False)
    weights_epoch: int = field(default=0, eq=False)
    code: bytes = field(init=False, repr=False)
    """All of it as bytes: each field tagged with its type, and with its length."""

    @code.default
    def _encode(self) -> bytes:
        if not isinstance(self.salt, bytes):
            raise ConfigError(f"salt is {self.salt!r}; bytes are wanted")
        if not isinstance(self.weights_epoch, int) or isinstance(self.weights_epoch, bool):
            raise ConfigError(f"weights_epoch is {self.weights_epoch!r}; an int is wanted")
        epoch = tagged(b"e", b"%d" % self.weights_epoch)
        return tagged(b"s", self.salt) + _adapter_bytes(self.adapter) + epoch


def _adapter_bytes(adapter: Adapter) -> bytes:
    match adapter:
        case None:
            return tagged(b"n", b"")
        case bytes():
            return tagged(b"b", adapter)
        case str() if not _SURROGATE.search(adapter):
            return tagged(b"t", adapter.encode())
        case int() if not isinstance(adapter, bool) and -(2**63) <= adapter < 2**64:
            return tagged(b"i", b"%d" % adapter)
    raise ConfigError(
        f"adapter is {adapter!r}; a str of whole characters, bytes, an int of 64 bits or None is "
        "wanted, since events must carry it"
    )
