"""Devices: what carries a manager's decisions out on memory."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from kvstate.device import ByteDevice
from kvstate.errors import ConfigError, KvStateError
from kvstate.gpu.host import HostDevice
from kvstate.gpu.null import NullDevice
from kvstate.gpu.streams import checked
from kvstate.values import instance, number

KINDS: Final = ("auto", "cuda", "host", "null")


def open_device(
    kind: str = "auto", *, streams: str = "eager", seed: int = 0, limit_s: float = 60.0
) -> ByteDevice:
    """Open a device by name.

    `cuda` is the first CUDA device, `cuda:1` the second; `host` is real memory without a GPU,
    `null` keeps books and moves no bytes; `auto` is CUDA where it works, else the host. `streams`
    says when work runs: `eager` (at once; on CUDA, as the device does), or late and in an odd order
    that the order of streams and events allows: `latest`, `pct` or `adversarial`, see
    `kvstate.gpu.streams` (on CUDA all three mean: delayed by kernels that only take time). On CUDA,
    what has not ended after waiting `limit_s` seconds is taken for never to end; a simulated device
    knows at once. Raises ArgumentError, and ConfigError for a device that is not there.
    """
    name, ordinal = named(kind)
    streams, seed = checked(streams, seed)
    limit_s = number("limit_s", limit_s, 0, above=True)
    if name == "auto":
        name = "host" if why_no_cuda() else "cuda"
    if name == "cuda":
        from kvstate.gpu.cuda import CudaDevice

        return CudaDevice(ordinal, streams=streams, seed=seed, limit_s=limit_s)
    return (HostDevice if name == "host" else NullDevice)(streams=streams, seed=seed)


def named(kind: str) -> tuple[str, int]:
    """A kind and an ordinal from a name such as `cuda:1`. Raises ConfigError if it is none."""
    name, _, ordinal = instance("kind", kind, str).partition(":")
    numbered = name == "cuda" and ordinal.isdecimal() and len(ordinal) < 10
    if name not in KINDS or (ordinal and not numbered):
        raise ConfigError(f"there is no device {kind!r}; choose one of {', '.join(KINDS)}")
    return name, int(ordinal or 0)


def why_no_cuda() -> str | None:
    """Why no CUDA device can be used here, in words; None if one can."""
    try:
        import_module("cuda.core")
        from kvstate.gpu.driver import Driver

        driver = Driver(0).retain()
        usable = driver.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
        driver.release()
    except (ImportError, KvStateError) as error:
        return str(error)
    return None if usable else "CUDA device 0 has no virtual memory management"


__all__ = ["KINDS", "HostDevice", "NullDevice", "open_device", "why_no_cuda"]
