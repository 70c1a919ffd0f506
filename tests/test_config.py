"""Configurations: what cannot work is refused with numbers, and sizes follow from the rest."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate import (
    ArgumentError,
    ArgumentTypeError,
    Config,
    ConfigError,
    GpuTier,
    HostTier,
    LayerSpec,
    Manager,
    trace,
)
from kvstate.config import Geometry
from kvstate.gpu import NullDevice, open_device
from tests.conftest import small

LAYER = LayerSpec(kv_heads=8, head_dim=128, count=32)


def config(**changes: Any) -> Config:
    fields: dict[str, Any] = {"layers": [LAYER], "gpu": GpuTier(1 << 34)}
    return Config(**(fields | changes))


REFUSED: Final[list[tuple[Callable[[], object], str]]] = [
    (lambda: config(layers=[]), "Config.layers is empty"),
    (lambda: LayerSpec(8, 128, "int3"), "LayerSpec.dtype is 'int3': one of float32, float16"),
    (lambda: LayerSpec(0, 128), "LayerSpec.kv_heads is 0, an int: a whole number from 1 to"),
    (lambda: GpuTier(1 << 34, 1 << 21, -1), "GpuTier.map_ahead_frames is -1"),
    (lambda: config(gpu=GpuTier(1 << 20)), "1048576 is less than one frame of 2097152"),
    (lambda: config(gpu=GpuTier(1 << 34, 5000)), "frame_bytes is 5000: not a multiple of 4096"),
    (lambda: config(host=HostTier(4096)), "tier of 4096 bytes holds no block of 4194304"),
    (lambda: config(tokens_per_block=0), "Config.tokens_per_block is 0"),
    (lambda: config(max_tokens=1.5), "Config.max_tokens is 1.5, a float"),
    (lambda: config(max_utilization_for_resume=0.0), "0.0, a float: a number above 0 to 1 is"),
    (lambda: GpuTier(1 << 34, protected_share=1), "share is 1, an int: a number from 0 to below 1"),
    (
        lambda: config(gpu=GpuTier(1 << 34, arena_bytes=1 << 22)),
        "too small for one sequence of 32768",
    ),
    (
        lambda: config(
            layers=[LayerSpec(1, 8)], tokens_per_block=1, max_tokens=1 << 28,
            gpu=GpuTier(1 << 34, arena_bytes=1 << 60),
        ),
        "more than 2147483647 slots",
    ),
    (lambda: config(host=HostTier(1 << 60)), "a host tier of 274877906944 slots of 4194304 bytes"),
    (
        lambda: config(max_sequences=1 << 20, tokens_per_block=4096),
        "max_sequences 1048576 blocks of 4096 tokens have more than 2147483647",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_work_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_8b_model() -> None:
    """32 layers, 8 KV heads, 128 wide, bfloat16: 128 KiB a token, no padding at blocks of 32."""
    sizes = Geometry(config())
    assert (sizes.token_bytes, sizes.row_bytes, sizes.padding_bytes) == (131072, 131072, 0)
    assert (sizes.frames(16), sizes.frames(17), sizes.tokens(1)) == (1, 2, 16)
    assert sizes.budget_frames == 8192


SHAPES = st.builds(
    LayerSpec, st.integers(1, 9), st.integers(1, 200), st.sampled_from(["int8", "float32"])
)


@given(SHAPES, st.integers(1, 64), st.sampled_from([4096, 12288, 1 << 16, 1 << 21]))
def test_geometry(shape: LayerSpec, block: int, frame: int) -> None:
    sizes = Geometry(
        config(layers=[shape], tokens_per_block=block, max_tokens=500, max_sequences=4,
               gpu=GpuTier(frame * 4, frame))
    )  # fmt: skip
    assert sizes.padding_bytes >= 0
    assert sizes.row_bytes % 16 == 0
    assert sizes.block_bytes % (frame // 16) == 0
    assert sizes.align_bytes == lcm(frame, sizes.block_bytes) <= 16 * sizes.block_bytes
    for tokens in (1, 7, 499, 500):
        frames = sizes.frames(tokens)
        assert (frames - 1) * frame < tokens * sizes.row_bytes <= frames * frame
        assert sizes.tokens(frames) >= tokens
        extent = sizes.extent(tokens)
        unit = sizes.align_bytes // frame
        assert extent % unit == 0
        assert frames <= extent <= max(2 * unit, 1.25 * frames + unit)


def test_similar_sequences_get_equal_extents() -> None:
    """Three significant bits: about four sizes an octave, so parked ranges fit one another."""
    sizes = Geometry(small(max_tokens=8000))
    extents = {sizes.extent(tokens) for tokens in range(4096, 8000)}
    assert len(extents) <= 5


# Every field, every argument.

TINY: Final = LayerSpec(1, 256, "float16")
GPU: Final = GpuTier(1 << 20, 1 << 12)
FIELDS: Final[list[tuple[Callable[..., object], str, Any]]] = [
    (HostTier, "size_bytes", -1), (HostTier, "size_bytes", float("nan")),
    (GpuTier, "map_ahead_frames", 2.5), (GpuTier, "reclaim_frames", "2"),
    (GpuTier, "protected_share", float("nan")), (GpuTier, "copy_share", True),
    (GpuTier, "arena_bytes", 1.5), (GpuTier, "frame_bytes", None),
    (Config, "scrub", "off"), (Config, "retain", []), (Config, "adopt", 1),
    (Config, "partial_blocks", None), (Config, "tokens_per_block", True), (Config, "host", {}),
    (Config, "gpu", None), (Config, "layers", TINY), (Config, "layers", {TINY}),
    (Config, "max_tokens", 2**31), (Config, "max_sequences", 2**21), (Config, "spans", True),
    (Config, "max_utilization_for_resume", float("inf")), (Config, "write_through", "ON_FREE"),
    (LayerSpec, "dtype", ["float16"]), (LayerSpec, "count", 2.0),
]  # fmt: skip
PLAIN: Final[dict[Any, dict[str, Any]]] = {
    HostTier: {"size_bytes": 1 << 20},
    GpuTier: {"budget_bytes": 1 << 20},
    Config: {"layers": [TINY], "gpu": GPU},
    LayerSpec: {"kv_heads": 1, "head_dim": 64},
}


@pytest.mark.parametrize(("kind", "name", "value"), FIELDS)
def test_every_field_says_what_it_takes(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}\.{name}.* is .*wanted"):
        kind(**(PLAIN[kind] | {name: value}))


def test_fields_keep_plain_numbers(tmp_path: Path) -> None:
    """Of numpy's, so that what is worked out from them does not overflow, and a header can be
    written."""
    kinds: dict[str, Any] = {"layer": LayerSpec, "gpu": GpuTier, "all": Config}
    layer = kinds["layer"](np.int8(1), np.uint16(256), "float16", np.int64(1))
    gpu = kinds["gpu"](np.int32(1 << 20), np.int16(1 << 12), copy_share=np.float32(0.5))
    config = kinds["all"]([layer], gpu, tokens_per_block=np.int8(4), retain=np.True_)
    numbers = (layer.kv_heads, layer.head_dim, gpu.budget_bytes, gpu.copy_share)
    assert [type(one) for one in numbers] == [int, int, int, float]
    assert (config.retain, config.tokens_per_block) == (True, 4)
    trace.write(tmp_path / "x.jsonl", trace.Header(kvstate_trace=1, config=config), [])
    assert trace.read(tmp_path / "x.jsonl")[0].config == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"kind": None}, "kind is None: a str is wanted"), ({"kind": b"host"}, "kind is b'host'"),
     ({"streams": ["eager"]}, "streams is"), ({"seed": -1}, "seed is -1"), ({"seed": 1.5}, "seed"),
     ({"limit_s": 0}, "limit_s is 0, an int: a number above 0"), ({"limit_s": "60"}, "limit_s is"),
     ({"limit_s": float("nan")}, "limit_s is nan")],
)  # fmt: skip
def test_a_device_is_opened_with_what_it_takes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        open_device(**({"kind": "null"} | arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"config": None}, "config is None: a Config is wanted"), ({"device": "host"}, "with reserve"),
     ({"device": NullDevice}, "device is <class"), ({"debug": 1}, "debug is 1, an int: True or"),
     ({"debug": 0.01}, "debug is 0.01"), ({"order": "no"}, "order is 'no'"),
     ({"record": "trace.jsonl"}, "record is 'trace.jsonl'")],
)  # fmt: skip
def test_a_manager_takes_its_device_over_or_leaves_it_alone(
    arguments: dict[str, Any], message: str
) -> None:
    device = NullDevice()
    plain: dict[str, Any] = {"config": small(), "device": device}
    with pytest.raises(ArgumentTypeError, match=message):
        Manager(**(plain | arguments))
    assert not device.calls
    device.close()
