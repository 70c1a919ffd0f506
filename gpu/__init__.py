"""Devices: what carries a manager's decisions out on memory."""

from __future__ import annotations

from typing import Final

from kvstate.device import ByteDevice
from kvstate.errors import ConfigError
from kvstate.gpu.host import HostDevice
from kvstate.gpu.null import NullDevice

KINDS: Final = ("auto", "host", "null")


def open_device(kind: str = "auto", *, streams: str = "eager", seed: int = 0) -> ByteDevice:
    """Open a device by name.

    `host` is real memory without a GPU, `null` keeps books and moves no bytes, `auto` is the best
    that works here. `streams` says when simulated work runs: `eager` (at once) or `adversarial`
    (as late and in as odd an order as `seed` and the order of streams and events allow).
    """
    if kind in ("auto", "host"):
        return HostDevice(streams=streams, seed=seed)
    if kind == "null":
        return NullDevice(streams=streams, seed=seed)
    raise ConfigError(f"there is no device {kind!r}; choose one of {', '.join(KINDS)}")


__all__ = ["KINDS", "HostDevice", "NullDevice", "open_device"]
