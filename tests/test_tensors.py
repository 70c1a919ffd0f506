"""Tensor views: that they are where the bytes are, on any device, and end when the memory does.

What a view says is compared with addresses that are worked out here again from the layout alone,
and with what the device itself reads there.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any, Final

import numpy as np
import pytest
from numpy.lib import NumpyVersion

from kvstate import (
    ArgumentError,
    Config,
    ConfigError,
    DeadView,
    GpuTier,
    HostTier,
    IllegalTransition,
    LayerSpec,
    Manager,
    Sequence,
    StaleAddress,
    TensorView,
)
from kvstate.config import DTYPE_BYTES, Geometry
from kvstate.device import ByteDevice
from kvstate.gpu import HostDevice, NullDevice, open_device
from kvstate.pattern import SCRUB_BYTE
from kvstate.tensors import KINDS, tensors_held
from tests.conftest import Open
from tests.test_reuse import said
from tests.test_spans import doubled, more

LAYERS: Final = (
    LayerSpec(2, 8, "float32", count=2),
    LayerSpec(3, 16, "float16"),
    LayerSpec(1, 20, "int8"),
)
STARTS: Final = (0, 128, 256, 448)
"""Where each layer's K begins in a token row of these; V is half a layer later."""
NUMPY: Final = {"float32": np.float32, "float16": np.float16, "int8": np.int8}
CUDA_FRAME: Final = 2 << 20

OpenLayers = Callable[..., Manager]


def config(*layers: LayerSpec, frame: int = 4096, frames: int = 8) -> Config:
    return Config(
        layers=layers or LAYERS,
        gpu=GpuTier(frames * frame, frame, reclaim_frames=1),
        host=HostTier(frames * frame),
        tokens_per_block=2,
        max_tokens=16,
        max_sequences=4,
        max_utilization_for_resume=1.0,
    )


@pytest.fixture
def open_layers() -> Iterator[OpenLayers]:
    """Opens managers over given layers, with laws on, and closes them."""
    opened: list[Manager] = []

    def open_one(*layers: LayerSpec, device: ByteDevice | None = None, **sizes: int) -> Manager:
        opened.append(Manager(config(*layers, **sizes), device or HostDevice(), debug=True))
        return opened[-1]

    yield open_one
    for kv in opened:
        kv.close()
        assert kv.device.ledger().empty


def start(kv: Manager, tokens: int = 5) -> Sequence:
    """An ACTIVE sequence with that many tokens."""
    seq = kv.create()
    seq.resume()
    grow(kv, seq, tokens)
    return seq


def grow(kv: Manager, seq: Sequence, tokens: int) -> None:
    kv.settle(kv.step(kv.batch([seq]), tokens))


def of_layer(layer: int) -> LayerSpec:
    return LAYERS[max(0, layer - 1)]


def element(seq: Sequence, layer: int, part: int, token: int, head: int, dim: int) -> int:
    """The address of one element, from the layout alone."""
    spec, row_bytes = of_layer(layer), seq.kv.geometry.row_bytes
    size = DTYPE_BYTES[spec.dtype]
    inside = ((part * spec.kv_heads + head) * spec.head_dim + dim) * size
    assert seq.base is not None
    return seq.base + token * row_bytes + STARTS[layer] + inside


def peek(seq: Sequence, address: int, dtype: Any) -> Any:
    device: Any = seq.kv.device
    return np.frombuffer(device.peek(address, np.dtype(dtype).itemsize), dtype)[0]


# Where things are.


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("take", [np.asarray, np.from_dlpack])
def test_what_numpy_writes_is_where_the_layout_says(
    open_layers: OpenLayers, layer: int, take: Callable[[Any], Any]
) -> None:
    kv = open_layers()
    seq, spec = start(kv), of_layer(layer)
    dtype = NUMPY[spec.dtype]
    for part, view in enumerate(kv.tensors(seq, layer)):
        array, writable = take(view), np.asarray(view)  # type: Any, Any
        assert (array.dtype, array.shape) == (dtype, (5, spec.kv_heads, spec.head_dim))
        assert (array.strides, array.shape) == (view.strides_bytes, view.shape)
        assert array.ctypes.data == view.address == element(seq, layer, part, 0, 0, 0)
        writable[:] = np.arange(array.size).reshape(array.shape) % 100
        for at in np.ndindex(array.shape):
            assert peek(seq, element(seq, layer, part, *at), dtype) == array[at]


@pytest.mark.parametrize("layer", range(4))
def test_what_the_device_writes_is_seen(open_layers: OpenLayers, layer: int) -> None:
    kv = open_layers()
    seq = start(kv)
    device: Any = kv.device
    dtype: Any = NUMPY[of_layer(layer).dtype]
    arrays: list[Any] = [np.asarray(view) for view in kv.tensors(seq, layer)]
    for part, array in enumerate(arrays):
        array[:] = 0
        for at in np.ndindex(array.shape):
            device.poke(element(seq, layer, part, *at), dtype(sum(at) + part).tobytes())
    for part, array in enumerate(arrays):
        assert all(array[at] == sum(at) + part for at in np.ndindex(array.shape))


def test_layers_fill_the_row_and_no_more(open_layers: OpenLayers) -> None:
    """Every byte before the padding belongs to one element of one layer, and all lie in the
    row."""
    kv = open_layers()
    seq, sizes = start(kv), kv.geometry
    assert (sizes.token_bytes, sizes.row_bytes, sizes.layer_count) == (488, 512, 4)
    taken = np.zeros(sizes.row_bytes, np.int64)
    for layer in range(sizes.layer_count):
        for view in kv.tensors(seq, layer, 1):
            first = view.address - (seq.base or 0)
            last = first + np.asarray(view).nbytes
            assert 0 <= first < last <= sizes.token_bytes
            taken[first:last] += 1
    assert taken[: sizes.token_bytes].tolist() == [1] * sizes.token_bytes
    assert not taken[sizes.token_bytes :].any()


def test_tokens_may_be_anything_up_to_the_capacity(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = start(kv)
    seq.resize(9)
    assert (seq.capacity_tokens, seq.length_tokens) == (16, 5)
    assert [kv.tensors(seq, 0, n)[0].shape for n in (None, 1, 16)] == [
        (5, 2, 8), (1, 2, 8), (16, 2, 8)
    ]  # fmt: skip
    step = kv.step(kv.batch([seq]), 2)
    assert kv.tensors(seq, 0)[1].shape == (7, 2, 8)
    kv.settle(step)


@pytest.mark.parametrize("take", [np.asarray, np.from_dlpack])
def test_no_tokens_is_no_memory(open_layers: OpenLayers, take: Callable[[Any], Any]) -> None:
    """Nothing need be mapped at the base yet."""
    kv = open_layers()
    seq = kv.create()
    seq.resume()
    assert seq.capacity_tokens == 0
    view, _ = kv.tensors(seq, 2)
    assert view.address == element(seq, 2, 0, 0, 0, 0)
    assert take(view).shape == (0, 3, 16)


# All layers at once.


EQUAL: Final = LayerSpec(2, 8, "float16", count=2), LayerSpec(2, 8, "float16")
"""Three layers of one shape, however they are written down."""


def assert_all_of_it(kv: Manager, seq: Sequence, array: Any, first: int) -> None:
    """In the tokens that have memory it is what the views of every layer are, byte for byte."""
    tokens = seq.capacity_tokens
    for layer in range(3):
        for part, view in enumerate(kv.tensors(seq, layer, tokens)):
            one: Any = np.asarray(view)
            assert array[:tokens, layer, part].ctypes.data == one.ctypes.data == view.address
            one[:] = np.arange(one.size).reshape(one.shape) % 500 + first + 7 * layer + part
            assert np.array_equal(array[:tokens, layer, part], one)


@pytest.mark.parametrize("take", [np.asarray, np.from_dlpack])
def test_all_layers_are_what_every_layer_is(
    open_layers: OpenLayers, take: Callable[[Any], Any]
) -> None:
    """One export is right through growth, shrink and rewinds in place."""
    kv = open_layers(*EQUAL)
    seq = start(kv, 1)
    view = kv.tensors_all(seq)
    array = take(view)
    assert (array.dtype, array.shape) == (np.float16, (16, 3, 2, 2, 8))
    assert array.strides == view.strides_bytes == (kv.geometry.row_bytes, 64, 32, 16, 2)
    assert view.address == seq.base
    assert str(view) == "the view of all layers of sequence 1"
    assert_all_of_it(kv, seq, array, 0)
    grow(kv, seq, 12)
    assert_all_of_it(kv, seq, array, 100)
    before = array[:9].tobytes()
    seq.rewind(9)
    seq.resize(9)
    assert view.ended is None
    assert array[:9].tobytes() == before
    seq.resize(16)
    assert_all_of_it(kv, seq, array, 200)
    assert np.array_equal(take(view), array)


def test_the_view_of_all_layers_does_not_sleep(open_layers: OpenLayers) -> None:
    """It may be longer than what has memory, also where none has."""
    kv = open_layers(*EQUAL)
    seq = kv.create(max_tokens=11)
    seq.resume()
    assert seq.capacity_tokens == 0
    shapes: list[Any] = [np.asarray(kv.tensors_all(seq, n)).shape[0] for n in (None, 0, 7, 11)]
    assert shapes == [11, 0, 7, 11]
    assert tensors_held(seq) == 0
    held = np.from_dlpack(kv.tensors_all(seq))
    assert tensors_held(seq) == 1
    del held


def _went_and_came(seq: Sequence) -> None:
    seq.suspend()
    seq.kv.poll()
    seq.resume()


LEAVES: Final[dict[str, Callable[[Sequence], object]]] = {
    "was suspended": Sequence.suspend,
    "was dropped": Sequence.drop,
    "was closed": Sequence.close,
    "left that memory since": _went_and_came,
}


@pytest.mark.parametrize("why", LEAVES)
def test_the_view_of_all_layers_dies_with_the_stay(open_layers: OpenLayers, why: str) -> None:
    kv = open_layers(*EQUAL)
    seq = start(kv)
    view = kv.tensors_all(seq)
    LEAVES[why](seq)
    assert str(view.ended).startswith(f"sequence 1 {why}")
    for export in exports(view):
        with pytest.raises(DeadView, match=f"^the view of all layers of .* is dead: .* {why}"):
            export()


def test_what_has_no_view_of_all_layers(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = kv.create(max_tokens=12)
    with pytest.raises(IllegalTransition, match="tensors_all is illegal in state CREATED: it has"):
        kv.tensors_all(seq)
    seq.resume()
    with pytest.raises(ConfigError, match="layer 2 is 3 x 16 float16 and layer 0 is 2 x 8 float32"):
        kv.tensors_all(seq)
    with pytest.raises(ArgumentError, match=r"tokens is 13, an int: .* from 0 to 12 is wanted"):
        kv.tensors_all(seq, 13)
    blind = open_layers(*EQUAL, device=NullDevice())
    with pytest.raises(ConfigError, match="the null device has no memory; open a host or a cuda"):
        blind.tensors_all(start(blind))


# What is refused.


def test_refusals_say_what_to_do(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = kv.create()
    reason = "^sequence 1: tensors is illegal in state CREATED: it has no GPU memory; resume it"
    with pytest.raises(IllegalTransition, match=reason):
        kv.tensors(seq, 0)
    seq.resume()
    grow(kv, seq, 3)
    reason = "9 tokens is not from 0 to 8, its capacity; resize it first for more"
    with pytest.raises(ArgumentError, match=reason):
        kv.tensors(seq, 0, 9)
    with pytest.raises(ArgumentError, match="tokens is -1, an int"):
        kv.tensors(seq, 0, -1)
    for layer in (4, -1):
        with pytest.raises(ArgumentError, match=f"layer is {layer}, an int: .* from 0 to 3 is"):
            kv.tensors(seq, layer)
    seq.suspend()
    with pytest.raises(IllegalTransition, match="state SUSPENDED: it has no GPU memory"):
        kv.tensors(seq, 0)
    kv.close()
    with pytest.raises(IllegalTransition, match="the manager: tensors is illegal in state CLOSED"):
        kv.tensors(seq, 0)


def test_the_null_device_has_nothing_to_show(open_layers: OpenLayers) -> None:
    kv = open_layers(device=NullDevice())
    with pytest.raises(ConfigError, match="the null device has no memory; open a host or a cuda"):
        kv.tensors(start(kv), 0)


def test_elements_must_be_aligned() -> None:
    odd = (LayerSpec(1, 1, "int8", count=3), LayerSpec(1, 8, "float32"))
    with pytest.raises(
        ConfigError, match=r"the float32 layers begin at byte 6.*multiple of 4; put"
    ):
        config(*odd)
    assert Geometry(config(*odd[::-1])).layer(1) == (odd[0], 64)


@pytest.mark.parametrize("dtype", sorted(set(DTYPE_BYTES) - set(NUMPY)))
def test_numpy_is_told_what_it_cannot_take(open_layers: OpenLayers, dtype: str) -> None:
    kv = open_layers(LayerSpec(1, 64, dtype))
    view, _ = kv.tensors(start(kv), 0)
    assert not hasattr(view, "__array_interface__")
    assert not hasattr(view, "__cuda_array_interface__")
    with pytest.raises(TypeError, match=f"numpy cannot take {dtype} in cpu memory.*torch"):
        np.asarray(view)
    with pytest.raises((RuntimeError, BufferError)):
        np.from_dlpack(view)
    assert tensors_held(view.seq) == 0


def test_what_dlpack_may_ask_for(open_layers: OpenLayers) -> None:
    kv = open_layers()
    view, _ = kv.tensors(start(kv), 0)
    assert not hasattr(view, "__cuda_array_interface__")
    assert view.__dlpack_device__() == (1, 0)
    for asked in ({"copy": True}, {"dl_device": (2, 0)}):  # type: dict[str, Any]
        with pytest.raises(BufferError, match=r"layer 0 K of sequence 1 is .'cpu', 0., and is not"):
            view.__dlpack__(**asked)
    for stream in (None, 0, 1, 2, 12345, object()):
        assert '"dltensor"' in repr(view.__dlpack__(stream=stream, dl_device=(1, 0), copy=False))
    assert '"dltensor"' in repr(view.__dlpack__(max_version=(0, 8)))
    versioned = NumpyVersion(np.__version__) >= "2.1.0"
    assert ('"dltensor_versioned"' in repr(view.__dlpack__(max_version=(1, 0)))) == versioned
    assert np.from_dlpack(view).flags.writeable == versioned


# How long a view lives.


def exports(view: TensorView) -> Iterator[Callable[[], Any]]:
    yield lambda: view.__dlpack__()
    yield lambda: np.from_dlpack(view)
    yield lambda: view.__array_interface__
    yield lambda: np.asarray(view)


def assert_dead(view: TensorView, why: str) -> None:
    assert view.ended == why
    for export in exports(view):
        with pytest.raises(DeadView, match=f"^the view of layer 0 V of .* is dead: {why}; take a"):
            export()


@pytest.mark.parametrize(
    ("call", "why"),
    [("suspend", "was suspended"), ("drop", "was dropped"), ("close", "was closed")],
)
def test_a_view_dies_with_the_stay(open_layers: OpenLayers, call: str, why: str) -> None:
    kv = open_layers()
    seq = start(kv)
    _, view = kv.tensors(seq, 0)
    getattr(seq, call)()
    assert_dead(view, f"sequence 1 {why}")


def test_a_view_of_a_closing_sequence_is_dead(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = start(kv)
    _, view = kv.tensors(seq, 0)
    step = kv.step(kv.batch([seq]))
    seq.close()
    assert seq.state_name == "CLOSING"
    assert_dead(view, "sequence 1 was closed")
    kv.settle(step)
    assert_dead(view, "sequence 1 was closed")


def test_a_view_does_not_come_back_with_its_range(open_layers: OpenLayers) -> None:
    """The same range, the same base, the same life, and yet another stay."""
    kv = open_layers()
    seq = start(kv)
    base, life = seq.base, seq.life
    _, view = kv.tensors(seq, 0)
    seq.suspend()
    kv.poll()
    seq.resume()
    assert (seq.base, seq.life, kv.counters["adoptions"]) == (base, life, 1)
    assert_dead(view, "sequence 1 left that memory since: it was resumed, or a rewind has moved it")
    assert kv.tensors(seq, 0)[1].ended is None


def test_a_view_of_an_adopted_range_is_dead(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = start(kv)
    _, view = kv.tensors(seq, 0)
    seq.drop()
    other = start(kv)
    assert other.base == view.address - 64
    assert_dead(view, "sequence 1 was dropped")
    assert np.asarray(kv.tensors(other, 0)[1]).ctypes.data == view.address


def test_growth_and_rewind_leave_a_view_alive(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = start(kv)
    _, view = kv.tensors(seq, 0)
    np.asarray(view)[:] = 7
    array = np.from_dlpack(view)
    mapped = kv.stats().frame_charges
    grow(kv, seq, 8)
    assert kv.stats().frame_charges != mapped
    seq.rewind(1)
    assert np.array_equal(np.asarray(view), array)
    assert np.asarray(kv.tensors(seq, 0, 5)[1]).ctypes.data == array.ctypes.data


def test_a_view_sleeps_while_its_capacity_is_given_back(open_layers: OpenLayers) -> None:
    """What is beyond the capacity may be reclaimed, and then nothing is there."""
    kv = open_layers()
    seq = start(kv)
    seq.resize(12)
    _, view = kv.tensors(seq, 0, 12)
    seq.resize(5)
    assert_dead(view, "sequence 1 was resized to less than its 12 tokens")
    seq.resize(12)
    assert np.asarray(view).shape == (12, 2, 8)


def test_a_view_of_a_poisoned_manager_dies_with_it(open_layers: OpenLayers) -> None:
    kv = open_layers()
    _, view = kv.tensors(start(kv), 0)
    kv.actor.poison("for the test")
    kv.close()
    assert view.seq.state_name == "ACTIVE"
    assert_dead(view, "its manager was closed")


# Stays.


def stays(*seqs: Sequence) -> list[int | None]:
    return [seq.stay for seq in seqs]


def test_a_stay_is_left_by_what_takes_the_memory_and_by_nothing_else(
    open_layers: OpenLayers,
) -> None:
    """Growth, shrink, commit, steps, a rewind in place, and what copies end, leave it."""
    kv = open_layers()
    seq = kv.create()
    assert stays(seq) == [None]
    seq.resume()
    grow(kv, seq, 6)
    seq.resize(16)
    seq.resize(6)
    seq.commit(range(4))
    seq.rewind(3)
    child = kv.fork(seq)
    kv.poll()
    kv.trim()
    kv.clear_reuse()
    dummy = kv.dummy(4)
    assert stays(seq, child, dummy) == [1, 2, 3]
    for leave in (seq.suspend, child.drop, dummy.close):
        leave()
    assert stays(seq, child, dummy) == [None] * 3
    for one in (seq, child):
        one.resume()
    assert stays(seq, child) == [4, 5]


def test_a_rewind_that_moves_begins_another_stay(open_manager: Open) -> None:
    kv = open_manager(frames=16)
    said(kv, list(range(12)))
    seq = more(kv, [*range(12), 12])
    grow(kv, seq, 1)
    assert (seq.shared_tokens, seq.length_tokens) == (12, 13)
    (_, view), everything = kv.tensors(seq, 0, 1), kv.tensors_all(seq)
    base = seq.base
    seq.rewind(12)
    assert (seq.base, stays(seq), view.ended, everything.ended) == (base, [2], None, None)
    seq.rewind(9)
    assert kv.counters["moves"] == 1
    assert seq.base != base
    assert stays(seq) == [3]
    assert_dead(view, "sequence 2 left that memory since: it was resumed, or a rewind has moved it")
    with pytest.raises(DeadView, match=r"view of all layers of .* is dead: .* a rewind"):
        np.asarray(everything)
    with pytest.raises(StaleAddress, match="or a rewind has moved it; its stay is 3 now"):
        kv.reads([(seq, 2)])
    assert np.asarray(kv.tensors_all(seq)).ctypes.data == seq.base


def test_a_remap_leaves_the_stay(open_manager: Open) -> None:
    """Copies of what a span has are mapped onto it when memory is short: at the same address."""
    kv, seqs = doubled(open_manager)
    places = [(seq.base, seq.stay) for seq in seqs]
    more(kv, [9]).resize(16)
    assert kv.counters["remaps"] == 3
    assert [(seq.base, seq.stay) for seq in seqs] == places


def test_a_load_that_fails_ends_the_stay(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = start(kv)
    seq.suspend()
    kv.poll()
    device: Any = kv.device
    device.fail_next("complete")
    seq.resume()
    assert stays(seq) == [2]
    kv.poll()
    assert stays(seq) == [None]
    assert seq.state_name == "SUSPENDED"


@pytest.mark.parametrize("why", LEAVES)
def test_a_read_in_a_stay_that_has_ended_is_refused(open_layers: OpenLayers, why: str) -> None:
    kv = open_layers()
    seq, other = start(kv), start(kv)
    then = [(seq, 1), (other, 2)]
    kv.reads(then)
    kv.reads(iter(then))
    kv.reads([])
    LEAVES[why](seq)
    now = seq.stay
    with pytest.raises(StaleAddress, match=f"^sequence 1: .* stay 1 are no good: it {why}") as got:
        kv.reads(reversed(then))
    assert (got.value.subject, got.value.then, got.value.now) == ("sequence 1", 1, now)
    assert f"its stay is {now} now" in str(got.value)
    kv.reads([(other, 2)])
    kv.reads([(one, one.stay) for one in (seq, other) if one.stay is not None])


def test_a_read_names_what_it_cannot_take(open_layers: OpenLayers) -> None:
    kv, other = open_layers(), open_layers()
    seq, strange = start(kv), start(other)
    wrongs: list[tuple[Any, str]] = [
        ([seq], r"stays\[0\] is sequence 1, a Sequence: a pair of a sequence and its stay"),
        ([(seq, 1), (seq, None)], r"stays\[1\]\[1\] is None: a whole number"),
        ([(seq, 1, 1)], r"stays\[0\] is \(sequence 1, 1, 1\), a tuple: a pair"),
        ([(strange, 1)], "sequence 1 is used by another manager"),
        ([(1, 1)], "sequence is 1, an int: a Sequence of this manager is wanted"),
        ({seq: 1}, "stays is .*: values in an order are wanted"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(ArgumentError, match=message):
            kv.reads(wrong)


# What consumers hold.


def test_what_consumers_hold_is_counted(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq, other = start(kv), start(kv)
    k, v = kv.tensors(seq, 0)
    arrays = [np.from_dlpack(view) for view in (k, v, k)]
    assert (tensors_held(seq), tensors_held(other)) == (3, 0)
    thread = Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert tensors_held(seq) == 0


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_capsule_that_nobody_takes_frees_itself(
    open_layers: OpenLayers, version: tuple[int, int] | None
) -> None:
    kv = open_layers()
    seq = start(kv)
    capsule = kv.tensors(seq, 0)[0].__dlpack__(max_version=version)
    gc.collect()
    assert tensors_held(seq) == 1
    del capsule
    assert tensors_held(seq) == 0


def test_an_error_that_frees_a_tensor_is_not_lost(open_layers: OpenLayers) -> None:
    """C code lets go of its arguments with its error already set."""
    kv = open_layers()
    seq = start(kv)
    view, _ = kv.tensors(seq, 0)
    take: Any = np.from_dlpack
    with pytest.raises(TypeError, match="exactly one argument"):
        len(take(view), 1)  # type: ignore[call-arg]
    assert tensors_held(seq) == 0


@pytest.mark.parametrize("call", ["suspend", "drop", "close"])
def test_debug_warns_of_tensors_that_outlive_their_memory(
    open_layers: OpenLayers, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_layers()
    seq = start(kv)
    held = [np.from_dlpack(view) for view in kv.tensors(seq, 0)]
    with caplog.at_level(logging.WARNING, "kvstate"):
        getattr(seq, call)()
        assert caplog.messages == ["sequence 1: 2 tensors outlive its memory, and are stale"]
        if call == "suspend":
            seq.resume()
            seq.suspend()
            assert len(caplog.messages) == 1
    assert len(held) == 2


def test_debug_warns_of_tensors_when_a_rewind_moves(
    open_manager: Open, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_manager(frames=16)
    said(kv, list(range(12)))
    seq = more(kv, [*range(12), 12])
    grow(kv, seq, 1)
    held = np.from_dlpack(kv.tensors(seq, 0)[0])
    with caplog.at_level(logging.WARNING, "kvstate"):
        seq.rewind(12)
        assert caplog.messages == []
        seq.rewind(9)
    assert caplog.messages == ["sequence 2: 1 tensors outlive its memory, and are stale"]
    assert len(held) == 13


def test_debug_does_not_warn_of_tensors_that_are_gone(
    open_layers: OpenLayers, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_layers()
    seq = start(kv)
    views = kv.tensors(seq, 0)
    for view in views:
        assert np.from_dlpack(view).shape == view.shape
    with caplog.at_level(logging.WARNING, "kvstate"):
        seq.suspend()
    assert not caplog.messages


def test_a_refused_suspend_warns_of_nothing(
    open_manager: Open, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_manager(slots=0)
    seq = start(kv)
    view, _ = kv.tensors(seq, 0)
    held = np.from_dlpack(view)
    with caplog.at_level(logging.WARNING, "kvstate"), pytest.raises(Exception, match="host slots"):
        seq.suspend()
    assert not caplog.messages
    assert view.ended is None
    del held


def test_a_stale_tensor_looks_wrong_in_debug(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq = start(kv)
    array: Any = np.asarray(kv.tensors(seq, 3)[0])
    array[:] = 5
    seq.drop()
    assert set(array.view(np.uint8).ravel().tolist()) == {SCRUB_BYTE}


def test_what_is_suspended_comes_back_through_a_view(open_layers: OpenLayers) -> None:
    kv = open_layers()
    seq, other = start(kv), kv.create()
    for layer in range(4):
        for view in kv.tensors(seq, layer):
            np.asarray(view)[:] = layer + 1
    old = seq.base
    seq.suspend()
    kv.poll()
    other.resume()
    grow(kv, other, 5)
    seq.resume()
    kv.poll()
    assert seq.base != old
    for layer in range(4):
        for view in kv.tensors(seq, layer):
            assert np.array_equal(np.asarray(view), np.full(view.shape, layer + 1))


def test_tensors_that_are_held_to_the_end_do_no_harm() -> None:
    """The interpreter ends, the manager closed before, with tensors in modules."""
    text = (
        "import sys, numpy as np\n"
        "from tests.test_tensors import *\n"
        "with Manager(config(), HostDevice()) as kv:\n"
        "    view, _ = kv.tensors(start(kv), 0)\n"
        "    sys.modules['held'] = np.from_dlpack(view), view.__dlpack__()\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "closing with 1 sequences open\n")


# torch, on the CPU and on a GPU.


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_place(request: pytest.FixtureRequest, torch: Any, open_layers: OpenLayers) -> Any:
    """Opens a manager over one kind of layer on a device that torch can use; where it is."""

    def open_one(*layers: LayerSpec) -> tuple[Manager, str]:
        if request.param == "host":
            return open_layers(*layers), "cpu"
        if not torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")
        device = open_device("cuda")
        return open_layers(*layers, device=device, frame=CUDA_FRAME), "cuda"

    return open_one


def same_bytes(torch: Any, view: TensorView, tensor: Any) -> bool:
    """Whether the device reads in the view's rows what torch has in a contiguous copy."""
    device: Any = view.seq.kv.device
    tokens, row_bytes = view.shape[0], view.strides_bytes[0]
    size = view.shape[1] * view.strides_bytes[1]
    found = b"".join(device.peek(view.address + at * row_bytes, size) for at in range(tokens))
    copy = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return bool(found == copy)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", sorted(KINDS))
def test_torch_shares_the_memory(torch: Any, torch_place: Any, dtype: str) -> None:
    try:
        torch.from_dlpack(torch.zeros(1, dtype=getattr(torch, dtype)))
    except (BufferError, RuntimeError) as error:
        pytest.skip(f"this torch has no {dtype} in DLPack: {error}")
    kv, place = torch_place(LayerSpec(2, 64, "float32"), LayerSpec(2, 64, dtype))
    seq = start(kv)
    for number, view in enumerate(kv.tensors(seq, 1)):
        tensor = torch.from_dlpack(view)
        assert (tensor.data_ptr(), tensor.device.type) == (view.address, place)
        assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), (5, 2, 64))
        assert [n * DTYPE_BYTES[dtype] for n in tensor.stride()] == list(view.strides_bytes)
        wanted = torch.arange(640, device=place).reshape(5, 2, 64) % 13 + number
        tensor.copy_(wanted.to(tensor.dtype))
        if place == "cuda":
            torch.cuda.synchronize()
        assert same_bytes(torch, view, wanted.to(tensor.dtype))
        assert tensors_held(seq) == 1
        del tensor
        assert tensors_held(seq) == 0


@pytest.mark.torch
def test_attention_through_a_view_is_attention(torch: Any, torch_place: Any) -> None:
    kv, place = torch_place(LayerSpec(2, 64, "bfloat16", count=3))
    seq = start(kv, 12)
    torch.manual_seed(1)
    for view in kv.tensors(seq, 1):
        torch.from_dlpack(view).normal_()
    k, v = (torch.from_dlpack(view).transpose(0, 1) for view in kv.tensors(seq, 1))
    q = torch.randn(2, 1, 64, device=place, dtype=torch.bfloat16)
    attend = torch.nn.functional.scaled_dot_product_attention
    found = attend(q[None], k[None], v[None])
    wanted = attend(q[None], k.contiguous()[None], v.contiguous()[None])
    assert not k.is_contiguous()
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, wanted)


@pytest.mark.torch
def test_torch_takes_all_layers_once(torch: Any, torch_place: Any) -> None:
    """The tensor from before is right when the sequence has grown."""
    kv, _ = torch_place(LayerSpec(2, 64, "bfloat16", count=3))
    seq = start(kv, 1)
    rows = torch.from_dlpack(kv.tensors_all(seq))
    assert (rows.dtype, tuple(rows.shape)) == (torch.bfloat16, (16, 3, 2, 2, 64))
    grow(kv, seq, 15)
    for layer in range(3):
        for part, view in enumerate(kv.tensors(seq, layer)):
            torch.from_dlpack(view).fill_(10 * layer + part)
            assert rows[:, layer, part].data_ptr() == view.address
    wanted = torch.tensor([[10 * layer + part for part in range(2)] for layer in range(3)])
    assert torch.equal(rows.float().amax(dim=(0, 3, 4)).cpu(), wanted.float())
    assert torch.equal(rows.float().amin(dim=(0, 3, 4)).cpu(), wanted.float())


@pytest.mark.torch
def test_torch_takes_no_tokens(torch: Any, torch_place: Any) -> None:
    kv, _ = torch_place(LayerSpec(2, 64))
    seq = kv.create()
    seq.resume()
    assert torch.from_dlpack(kv.tensors(seq, 0)[0]).shape == (0, 2, 64)


@pytest.mark.torch
def test_torch_errors_are_not_lost(torch: Any, torch_place: Any) -> None:
    kv, place = torch_place(LayerSpec(2, 64))
    seq = start(kv)
    view, _ = kv.tensors(seq, 0)
    with pytest.raises(RuntimeError):
        torch.matmul(torch.from_dlpack(view), torch.ones(3, 3, device=place))
    seq.suspend()
    with pytest.raises(DeadView, match="sequence 1 was suspended"):
        torch.from_dlpack(view)


@pytest.mark.gpu
@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_torch_takes_the_cuda_array_interface(
    torch: Any, open_layers: OpenLayers, dtype: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    layer = LayerSpec(2, 64, dtype)
    kv = open_layers(layer, device=open_device("cuda"), frame=CUDA_FRAME)
    for view in kv.tensors(start(kv), 0):
        tensor = torch.as_tensor(view, device="cuda")
        assert tensor.data_ptr() == view.address
        assert [n * DTYPE_BYTES[dtype] for n in tensor.stride()] == list(view.strides_bytes)
        tensor.fill_(3)
        torch.cuda.synchronize()
        assert same_bytes(torch, view, torch.full(view.shape, 3, dtype=tensor.dtype))


@pytest.mark.gpu
def test_a_view_of_gpu_memory(open_layers: OpenLayers) -> None:
    """What a view says of a GPU, which needs no other library."""
    kv = open_layers(LayerSpec(2, 64, "float16"), device=open_device("cuda"), frame=CUDA_FRAME)
    seq = start(kv)
    view, _ = kv.tensors(seq, 0)
    assert kv.device.memory == ("cuda", 0)
    assert view.__dlpack_device__() == (2, 0)
    assert view.__cuda_array_interface__ == {
        "version": 3, "shape": (5, 2, 64), "typestr": "<f2", "data": (seq.base, False),
        "strides": (kv.geometry.row_bytes, 128, 2),
    }  # fmt: skip
    assert not hasattr(view, "__array_interface__")
    with pytest.raises(TypeError, match="numpy cannot take float16 in cuda memory"):
        np.asarray(view)
    with pytest.raises(BufferError):
        view.__dlpack__(dl_device=(1, 0))
    capsule = view.__dlpack__(stream=1, max_version=(1, 0), dl_device=(2, 0))
    assert tensors_held(seq) == 1
    del capsule
    assert tensors_held(seq) == 0
    seq.drop()
    with pytest.raises(DeadView):
        _ = view.__cuda_array_interface__


@pytest.mark.gpu
def test_bfloat16_has_no_cuda_array_interface(open_layers: OpenLayers) -> None:
    kv = open_layers(LayerSpec(2, 64), device=open_device("cuda"), frame=CUDA_FRAME)
    view, _ = kv.tensors(start(kv), 0)
    assert not hasattr(view, "__cuda_array_interface__")
    assert view.__dlpack_device__() == (2, 0)
