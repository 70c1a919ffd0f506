"""Fixtures that several files use."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager
from kvstate.device import ByteDevice
from kvstate.gpu import HostDevice, why_no_cuda
from kvstate.gpu.driver import Driver
from kvstate.observe import check_end, check_rest

FRAME = 4096
ROW = 1024
"""Bytes of a token in the configuration below: four tokens a frame."""


def small(
    frames: int = 8, slots: int = 16, block: int = 2, max_tokens: int = 16, **changes: Any
) -> Config:
    """A configuration with four tokens a frame."""
    names = (
        "map_ahead_frames",
        "arena_bytes",
        "reclaim_frames",
        "protected_share",
        "copy_share",
    )
    gpu: dict[str, Any] = {"reclaim_frames": 1}
    gpu |= {name: changes.pop(name) for name in names if name in changes}
    rest: dict[str, Any] = {
        "max_sequences": 8, "max_utilization_for_resume": 1.0, "partial_blocks": False,
    } | changes  # fmt: skip
    return Config(
        layers=[LayerSpec(kv_heads=1, head_dim=256, dtype="float16")],
        gpu=GpuTier(frames * FRAME, FRAME, **gpu),
        host=HostTier(slots * block * ROW) if slots else None,
        tokens_per_block=block,
        max_tokens=max_tokens,
        **rest,
    )


def pytest_configure() -> None:
    """Hear interrupts, and let what tests start hear them: a shell makes what it runs in the
    background deaf."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    """Say what is left out."""
    reason = why_no_cuda()
    return f"tests on a GPU: {f'left out: {reason}' if reason else 'yes'}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where none can be used."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and why_no_cuda():
        config.hook.pytest_deselected(items=wanting)
        items[:] = [item for item in items if item not in set(wanting)]


@pytest.fixture(autouse=True, scope="session")
def _context() -> Iterator[None]:
    """Keep the context of a GPU while tests come and go: its first device costs 0.1 s."""
    driver = None if why_no_cuda() else Driver(0).retain()
    yield
    if driver is not None:
        driver.release()


Open = Callable[..., Manager]


@pytest.fixture
def open_manager() -> Iterator[Open]:
    """Opens managers on host devices, with laws on, and closes them; nothing may be left then, nor
    when everything was given up before."""
    opened: list[Manager] = []

    def open_one(device: ByteDevice | None = None, **changes: Any) -> Manager:
        kv = Manager(small(**changes), device or HostDevice(), debug=True)
        opened.append(kv)
        return kv

    yield open_one
    for kv in opened:
        if not kv.closed and kv.actor.fault is None:
            check_rest(kv)
        kv.close()
        assert not any(watch.lost for watch in kv.watches), "what looks has failed itself"
        check_end(kv)
