"""Tensors over a sequence's memory, without a copy: what lets an engine use any kernel library.

A sequence's tokens lie one row after the other, so the K or V of one layer is a strided tensor over
them. A view says where, and refuses as soon as that memory is no longer the sequence's. It holds
nothing: a tensor that was made from it does not keep the memory from being given up.

The capsules are numpy's own, over an array that carries the address, with device and type written
in afterwards: numpy's ends of a capsule and of a tensor are C. Rejected: ends written with ctypes.
A consumer may let go of a tensor in the middle of raising an error, and a ctypes callback then
loses the error (SystemError), or runs when the interpreter is gone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from typing import Any, Final, NamedTuple, NoReturn
from weakref import ref

import numpy as np
from attrs import frozen
from numpy.lib import NumpyVersion

from kvstate.config import DTYPE_BYTES, LayerSpec
from kvstate.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConfigError,
    DeadView,
    IllegalTransition,
    NotCopied,
    StaleAddress,
)
from kvstate.handles import Handle
from kvstate.sequence import Columns, Sequence, foreign
from kvstate.spec.sequence import ACTIVE, CLOSED, CLOSING, DROPPED, SUSPENDED
from kvstate.values import described, flag, in_order, whole


class Kind(NamedTuple):
    """An element type: its DLPack code, and a numpy type of its size."""

    code: int
    carrier: str
    plain: bool = False
    """The carrier is the type itself."""


KINDS: Final = {
    "float32": Kind(2, "<f4", plain=True),
    "float16": Kind(2, "<f2", plain=True),
    "int8": Kind(0, "|i1", plain=True),
    "bfloat16": Kind(4, "<i2"),
    "float8_e4m3fn": Kind(10, "|i1"),
    "float8_e5m2": Kind(12, "|i1"),
}
DEVICE_TYPES: Final = {"cpu": 1, "cuda": 2}
"""DLPack's numbers for where memory is."""
ENDS: Final = {
    ACTIVE.code: "left that memory since: it was resumed, or a rewind has moved it",
    SUSPENDED.code: "was suspended",
    DROPPED.code: "was dropped",
    CLOSING.code: "was closed",
    CLOSED.code: "was closed",
}
"""What ended a view of an earlier stay, by the state its sequence is in now."""
_TAKES_VERSION: Final = NumpyVersion(np.__version__) >= "2.1.0"
_VERSIONED: Final = b"dltensor_versioned"
_VERSIONED_HEAD_BYTES: Final = 32
"""What stands before the tensor in a versioned capsule: version, context, deleter, flags."""

_is_valid, _pointer = ctypes.pythonapi.PyCapsule_IsValid, ctypes.pythonapi.PyCapsule_GetPointer
_is_valid.argtypes = _pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_pointer.restype = ctypes.c_void_p


class _Tensor(ctypes.Structure):
    """The beginning of a DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )  # fmt: skip


class _Export:
    """What numpy keeps for as long as a consumer holds a tensor that came through DLPack."""

    __slots__ = ("__array_interface__", "__weakref__", "view")

    def __init__(self, view: TensorView, interface: dict[str, Any]) -> None:
        self.view, self.__array_interface__ = view, interface


_EXPORTS: Final[set[ref[_Export]]] = set()
"""Everything that consumers hold. Entries go by themselves, on whatever thread lets go: in one step
each, and whoever counts them copies the set in one step too. A WeakSet lets an entry go between the
question whether somebody looks and the removal, and then fails in who looks."""


@frozen(eq=False)
class TensorView(Handle):
    """Memory of a sequence as a strided tensor: K or V of one layer, [tokens, kv_heads, head_dim],
    or all layers at once, [tokens, layers, 2, kv_heads, head_dim].

    Made by `Manager.tensors` and `Manager.tensors_all`; torch, CuPy and numpy take it without a
    copy, through DLPack, `__cuda_array_interface__` or (in host memory) `__array_interface__`. It
    is dead, for good, once the stay of its sequence has ended (see `Sequence.stay`); growth and a
    `rewind` in place leave it alive. That of one layer is dead too while the capacity is below its
    tokens; that of all layers is not, and only what is below the capacity may be touched. Every
    export of a dead one raises DeadView. Nobody sees what a consumer does with memory that it has
    already taken: such a tensor is stale, and a read of it may fault.

    **Streams.** A view is ordered as kernels are: use it on the sequence's stream, or after it.
    `resume` makes that stream wait for the copy back, and `suspend` copies out after what the
    stream was given, so there it is right without more; an export synchronises nothing. Work on
    another stream needs an event in front, and one behind it as `after`. A CPU reads host memory at
    once: synchronise the device's stream first if work on it may be pending.
    """

    seq: Sequence
    layer: int | None
    """None for all of them."""
    part: str | None
    """`K` or `V`; None for both."""
    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: str
    memory: tuple[str, int]
    """`("cuda", ordinal)` or `("cpu", 0)`."""
    stay: int
    """The stay of the sequence that it is over."""

    def __str__(self) -> str:
        what = "all layers" if self.layer is None else f"layer {self.layer} {self.part}"
        return f"the view of {what} of {self.seq}"

    __repr__ = __str__

    @property
    def ended(self) -> str | None:
        """What ended the view, in words; None while it is alive."""
        if self.seq.stay != self.stay:
            return f"{self.seq} {ENDS[self.seq.state]}"
        if self.layer is not None and self.shape[0] > self.seq.capacity_tokens:
            return f"{self.seq} was resized to less than its {self.shape[0]} tokens"
        return "its manager was closed" if self.seq.kv.closed else None

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """For numpy. AttributeError if the memory is a GPU's, or numpy has no such type."""
        return self._plain("cpu", "__array_interface__")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, without a stream. AttributeError if the memory is not a GPU's, or the
        interface has no such type (bfloat16, float8)."""
        interface = self._plain("cuda", "__cuda_array_interface__")
        return interface | {"data": (self._address, False)}

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        """Refuse, where numpy would otherwise wrap the view itself as an object."""
        raise ArgumentTypeError(
            f"{self}: numpy cannot take {self.dtype} in {self.memory[0]} memory without a copy; "
            "torch.from_dlpack can"
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and ordinal."""
        return DEVICE_TYPES[self.memory[0]], self.memory[1]

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule over the memory, versioned if the consumer takes that.

        Any `stream` will do, and none is waited for (see above). Raises NotCopied if a copy or
        another device is asked for, and DeadView: both are BufferErrors.
        """
        self._check_alive()
        max_version = _pair("max_version", max_version)
        elsewhere = _pair("dl_device", dl_device) not in (None, self.__dlpack_device__())
        if elsewhere or (copy is not None and flag("copy", copy)):
            raise NotCopied(f"{self} is {self.memory}, and is not copied")
        export = _Export(self, self._interface())
        options: dict[str, Any] = {"max_version": max_version} if _TAKES_VERSION else {}
        capsule: Any = np.asarray(export).__dlpack__(**options)
        self._name(capsule)
        _EXPORTS.add(ref(export, _EXPORTS.discard))
        return capsule

    def _name(self, capsule: object) -> None:
        """Write into the capsule what its memory and its elements really are."""
        if _is_valid(capsule, _VERSIONED):
            at = _pointer(capsule, _VERSIONED) + _VERSIONED_HEAD_BYTES
        else:
            at = _pointer(capsule, b"dltensor")
        tensor = _Tensor.from_address(at)
        tensor.data = self._address
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.code, tensor.bits = KINDS[self.dtype].code, 8 * DTYPE_BYTES[self.dtype]

    @property
    def _address(self) -> int:
        """What DLPack and CUDA's interface want: no address, if there are no elements."""
        return self.address if self.shape[0] else 0

    def _interface(self) -> dict[str, Any]:
        return {
            "version": 3, "shape": self.shape, "strides": self.strides_bytes,
            "typestr": KINDS[self.dtype].carrier, "data": (self.address, False),
        }  # fmt: skip

    def _plain(self, place: str, name: str) -> dict[str, Any]:
        if self.memory[0] != place or not KINDS[self.dtype].plain:
            raise AttributeError(f"{self} has no {name}: it is {self.dtype}, in {self.memory[0]}")
        self._check_alive()
        return self._interface()

    def _check_alive(self) -> None:
        self.seq.kv.life.look("export", sys._getframe(1))
        ended = self.ended
        if ended is not None:
            raise DeadView(str(self), ended)


def _pair(name: str, value: Any) -> tuple[int, int] | None:
    """Two numbers, as DLPack has them."""
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 2:
        raise ArgumentTypeError(f"{name} is {described(value)}: a tuple of two numbers is wanted")
    return whole(f"{name}[0]", value[0]), whole(f"{name}[1]", value[1])


def views(seq: Sequence, layer: int, tokens: int | None) -> tuple[TensorView, TensorView]:
    """K and V of a layer; see `Manager.tensors`."""
    geometry, longest = seq.kv.geometry, seq.kv.config.max_tokens
    layer = whole("layer", layer, 0, geometry.layer_count - 1)
    count = seq.scheduled_tokens if tokens is None else whole("tokens", tokens, 0, longest)
    base = _base(seq, "tensors")
    if count > seq.capacity_tokens:
        most = f"from 0 to {seq.capacity_tokens}, its capacity; resize it first for more"
        raise ArgumentError(f"{seq}: tensors: {count} tokens is not {most}")
    memory, (spec, offset) = _memory(seq), geometry.layer(layer)
    size = DTYPE_BYTES[spec.dtype]
    part_bytes = spec.kv_heads * spec.head_dim * size
    shape = (count, spec.kv_heads, spec.head_dim)
    strides = (geometry.row_bytes, spec.head_dim * size, size)
    k, v = (
        TensorView(seq, layer, part, at, shape, strides, spec.dtype, memory, seq.last_stay)
        for part, at in (("K", base + offset), ("V", base + offset + part_bytes))
    )
    return k, v


def view_of_all(seq: Sequence, tokens: int | None) -> TensorView:
    """All layers, K and V; see `Manager.tensors_all`."""
    geometry, most = seq.kv.geometry, seq.max_tokens
    count = most if tokens is None else whole("tokens", tokens, 0, most)
    base = _base(seq, "tensors_all")
    memory, spec = _memory(seq), _common(geometry.layers)
    heads, dim, size = spec.kv_heads, spec.head_dim, DTYPE_BYTES[spec.dtype]
    part_bytes = heads * dim * size
    shape = (count, geometry.layer_count, 2, heads, dim)
    strides = (geometry.row_bytes, 2 * part_bytes, part_bytes, dim * size, size)
    stay = seq.last_stay
    return TensorView(seq, None, None, base, shape, strides, spec.dtype, memory, stay)


def _base(seq: Sequence, call: str) -> int:
    """Where its memory begins. Raises IllegalTransition if it has none."""
    if seq.base is None:
        reason = "it has no GPU memory; resume it first"
        raise IllegalTransition(str(seq), call, seq.state_name, reason)
    return seq.base


def _memory(seq: Sequence) -> tuple[str, int]:
    """Where the device has its memory. Raises ConfigError if it has none."""
    device = seq.kv.device
    if device.memory is None:
        raise ConfigError(f"the {device.name} device has no memory; open a host or a cuda device")
    return device.memory


def _common(layers: Sequence_[LayerSpec]) -> LayerSpec:
    """The shape and type of all layers, which then lie one behind the other, as K and V do. Raises
    ConfigError, naming the first that differs."""
    first, number = layers[0], 0
    for spec in layers:
        if _said(spec) != _said(first):
            raise ConfigError(
                f"layer {number} is {_said(spec)} and layer 0 is {_said(first)}, kv_heads by "
                "head_dim: they make no tensor together; use tensors, layer by layer"
            )
        number += spec.count
    return first


def _said(spec: LayerSpec) -> str:
    return f"{spec.kv_heads} x {spec.head_dim} {spec.dtype}"


def check_stays(columns: Columns, stays: Iterable[tuple[Sequence, int | None]]) -> None:
    """Raise StaleAddress unless all these sequences are in the stays named; see `Manager.reads`."""
    named = [_stay(columns, f"stays[{at}]", one) for at, one in enumerate(in_order("stays", stays))]
    for seq, stay in named:
        if seq.stay != stay:
            raise StaleAddress(str(seq), stay, seq.stay, ENDS[seq.state])


def _stay(columns: Columns, name: str, value: Any) -> tuple[Sequence, int]:
    """A sequence of this manager, and the number of a stay."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        wanted = "a pair of a sequence and its stay is wanted"
        raise ArgumentTypeError(f"{name} is {described(value)}: {wanted}")
    seq, stay = value
    if type(seq) is not Sequence or seq.columns is not columns:
        raise foreign(seq, Sequence)
    return seq, whole(f"{name}[1]", stay, 1)


def tensors_held(seq: Sequence) -> int:
    """How many tensors over its present memory consumers took through DLPack and still hold.

    O(tensors held of all sequences).
    """
    held = [export() for export in tuple(_EXPORTS)]
    views = [export.view for export in held if export is not None]
    return sum(view.seq is seq and view.stay == seq.stay for view in views)
