"""Configurations: what cannot work is refused with numbers, and sizes follow from the rest."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any, Final

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
