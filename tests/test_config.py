"""Configurations: what cannot work is refused with numbers, and sizes follow from the rest."""

from __future__ import annotations

from math import lcm
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate import Config, ConfigError, GpuTier, HostTier, LayerSpec
from kvstate.config import Geometry
from tests.conftest import small

LAYER = LayerSpec(kv_heads=8, head_dim=128, count=32)


def config(**changes: Any) -> Config:
    fields: dict[str, Any] = {"layers": [LAYER], "gpu": GpuTier(1 << 34)}
    return Config(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": []}, "layers is empty"),
        ({"layers": [LayerSpec(8, 128, "int3")]}, "dtype 'int3' is unknown; use"),
        ({"layers": [LayerSpec(0, 128)]}, "LayerSpec.kv_heads is 0; it must be at least 1"),
        ({"gpu": GpuTier(1 << 34, 1 << 21, -1)}, "map_ahead_frames is -1"),
        ({"gpu": GpuTier(1 << 20)}, "budget_bytes 1048576 is less than one frame of 2097152"),
        ({"gpu": GpuTier(1 << 34, 5000)}, "frame_bytes is 5000: not a multiple of 4096"),
        ({"host": HostTier(4096)}, "the host tier of 4096 bytes holds no block of 4194304"),
        ({"tokens_per_block": 0}, "Config.tokens_per_block is 0"),
        ({"max_tokens": 1.5}, "Config.max_tokens is 1.5"),
        ({"max_utilization_for_resume": 0.0}, r"0.0: not in \(0, 1\]"),
        ({"gpu": GpuTier(1 << 34, arena_bytes=1 << 22)}, "too small for one sequence of 32768"),
        (
            {"layers": [LayerSpec(1, 8)], "tokens_per_block": 1, "max_tokens": 1 << 28,
             "gpu": GpuTier(1 << 34, arena_bytes=1 << 60)},
            "more than 2147483647 slots",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes)


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
