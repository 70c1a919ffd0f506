"""What this machine can do, and what that means for who wants to run kvstate on it.

Everything is tried rather than looked up: addresses are reserved, a frame is mapped twice and read
through both, a read-only mapping is written to. A system may refuse any of it (a container's
filters, an address-space limit), and the version of a kernel does not say so. Whatever was taken
for a trial is given back, also when the trial fails.

A finding is never an exception: a machine on which a question cannot be answered is exactly one
whose owner wants the rest of the answers. So each question is asked by itself, and what it raises
becomes a finding that says so.

Rejected: importing torch to ask for its version. That takes seconds and starts threads; the
installed metadata says the same.
"""

from __future__ import annotations

import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

import psutil
from attrs import asdict, frozen
from rich.markup import escape
from rich.table import Table

from kvstate.config import MAX_ARENA_BYTES, MIB
from kvstate.device import CopyRun, Direction, MapRun, UnmapRun
from kvstate.errors import DeviceError
from kvstate.gpu.host import PAGE_BYTES, HostDevice

TIB: Final = 1 << 40
FRAME_BYTES: Final = 2 * MIB
RESERVATIONS_BYTES: Final = (TIB, 4 * TIB, 16 * TIB, 64 * TIB)
"""The address reservations that are tried, the smallest first."""
TIMED_CALLS: Final = 50
OPEN_FILES: Final = 256
"""Open files that are plenty: one for each host device, some dozens for each CUDA context."""

_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")

Value = int | float | str | bool | None


@frozen
class Finding:
    """One thing that was found out."""

    name: str
    value: Value
    """For machines: a number in the unit that the name ends in, a word, or None: there is none."""
    meaning: str
    """For people: what follows from it, one sentence."""
    ok: bool | None = None
    """Whether it is as kvstate wants it; None where it wants nothing."""


@frozen
class Report:
    """Every finding, and the kinds of device that work here, as `open_device` names them."""

    findings: tuple[Finding, ...]
    devices: tuple[str, ...]

    def find(self, name: str) -> Finding:
        """The finding of that name. Raises KeyError if there is none."""
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(name)

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and dictionaries, for JSON."""
        return {
            "devices": list(self.devices),
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine() -> Report:
    """Ask every question. Never raises; gives back whatever it takes. Cost: well under a
    second."""
    findings = tuple(finding for name, ask in _QUESTIONS for finding in _asked(name, ask))
    good = {finding.name for finding in findings if finding.ok}
    host = ("host",) if good.issuperset(_HOST_NEEDS) else ()
    cuda = ("cuda",) if "cuda_0_vmm" in good and _version("cuda-core") else ()
    return Report(findings, (*cuda, *host, "null"))


def render(report: Report) -> Table:
    """The report as a table for a terminal."""
    table = Table(caption=f"devices that work here: {', '.join(report.devices)}")
    for column in ("", "finding", "value", "what follows"):
        table.add_column(column, overflow="fold")
    for finding in report.findings:
        mark = {True: "[green]ok[/]", False: "[red]no[/]", None: ""}[finding.ok]
        shown = _shown(finding.name, finding.value)
        table.add_row(mark, escape(finding.name), escape(shown), escape(finding.meaning))
    return table


def _asked(name: str, ask: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The answers; a question that raises ends with a finding that says what it raised."""
    try:
        yield from ask()
    except Exception as error:
        yield Finding(name, None, f"This could not be found out: {_reason(error)}.", False)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(name: str, value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name.endswith("_bytes"):
        return _size(value)
    return f"{value:,}" if isinstance(value, int | float) else value


def _size(size_bytes: int) -> str:
    """A size for people: 24 GiB, 1.5 TiB."""
    power = max(size_bytes.bit_length() - 1, 0) // 10
    return f"{size_bytes / 1024**power:.4g} {_UNITS[power]}"


# The system.


def _kernel() -> Iterator[Finding]:
    system, release = platform.system(), platform.release()
    linux = system == "Linux"
    text = "The host device can be tried." if linux else "The host device needs Linux."
    yield Finding("kernel", f"{system} {release}", text, linux)


def _cpus() -> Iterator[Finding]:
    count = len(psutil.Process().cpu_affinity())
    yield Finding("cpus_count", count, f"A campaign can keep {count} workers busy.")


def _memory() -> Iterator[Finding]:
    total = psutil.virtual_memory().total
    usable = _usable_memory(total)
    if usable < total:
        text = f"A control group lets this process use {_size(usable)}, and kills it beyond that."
    else:
        text = "No control group allows less than the machine has."
    yield Finding("memory_bytes", total, "What the machine has.")
    yield Finding("memory_usable_bytes", usable, text)


def _usable_memory(total_bytes: int) -> int:
    return min([total_bytes, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def _cgroup_limits(membership: Path, root: Path) -> Iterator[int]:
    """The memory limits of this process's control groups and of all above them, both versions."""
    if not membership.is_file():
        return
    for line in membership.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(top) and (folder / name).is_file():
                text = (folder / name).read_text(encoding="utf-8").strip()
                yield from (int(word) for word in [text] if word.isdecimal())


def _mappings() -> Iterator[Finding]:
    limit = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="utf-8"))
    used = len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    frames = max(0, limit - used)
    enough = frames * FRAME_BYTES >= psutil.virtual_memory().total
    advice = "" if enough else "; raise vm.max_map_count to map all memory"
    yield Finding(
        "max_map_count", limit,
        f"Each run of frames can be one mapping, so if no two are neighbours about {frames:,} "
        f"frames fit beside the {used:,} mappings of now: {_size(frames * FRAME_BYTES)} in frames "
        f"of 2 MiB, {_size(frames * PAGE_BYTES)} in frames of 4 KiB{advice}.",
        enough,
    )  # fmt: skip


def _locked() -> Iterator[Finding]:
    limit = _limit(resource.RLIMIT_MEMLOCK)
    amount = "Any amount" if limit is None else _size(limit)
    yield Finding(
        "memlock_limit_bytes", limit,
        f"{amount} of memory may be locked (ulimit -l); the host device locks none.",
    )  # fmt: skip


def _files() -> Iterator[Finding]:
    limit = _limit(resource.RLIMIT_NOFILE)
    enough = limit is None or limit >= OPEN_FILES
    advice = "" if enough else f"; raise it to {OPEN_FILES} (ulimit -n)"
    yield Finding(
        "open_files_limit", limit,
        f"A host device takes one open file, a CUDA context some dozens{advice}.",
        enough,
    )  # fmt: skip


def _limit(kind: int) -> int | None:
    """The soft limit; None if there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


# The host device.


def _reservation() -> Iterator[Finding]:
    largest = 0
    with closing(HostDevice()) as device:
        for size_bytes in RESERVATIONS_BYTES:
            if not _reservable(device, size_bytes):
                break
            largest = size_bytes
    enough = largest >= MAX_ARENA_BYTES
    advice = "" if enough else "; set arena_bytes to less, or look at ulimit -v and overcommit"
    yield Finding(
        "largest_reservation_bytes", largest,
        f"The largest run of addresses that was had, of {_size(RESERVATIONS_BYTES[-1])} tried; "
        f"by default an arena takes {_size(MAX_ARENA_BYTES)} at most{advice}.",
        enough,
    )  # fmt: skip


def _reservable(device: HostDevice, size_bytes: int) -> bool:
    try:
        address = device.reserve(size_bytes, FRAME_BYTES)
    except DeviceError:
        return False
    device.unreserve(address)
    return True


def _twice() -> Iterator[Finding]:
    with closing(HostDevice()) as device:
        first, second, _ = _mapped_twice(device, read_only=False)
        device.poke(first, b"through the first")
        forth = device.peek(second, 17) == b"through the first"
        device.poke(second, b"through the other")
        back = device.peek(first, 17) == b"through the other"
    yield _trial(
        "frames_map_twice", forth and back,
        "A frame that is mapped at two addresses shows the same bytes at both.",
        "A frame that is mapped at two addresses shows other bytes there: none can be shared.",
    )  # fmt: skip


def _read_only() -> Iterator[Finding]:
    with closing(HostDevice()) as device:
        writable, guarded, _ = _mapped_twice(device, read_only=True)
        device.poke(writable, b"kept")
        refused = _refused(device, guarded) and device.peek(guarded, 4) == b"kept"
    yield _trial(
        "read_only_refuses_writes", refused,
        "A write through a read-only mapping is refused and changes nothing.",
        "A write through a read-only mapping goes through: a stray one would not be seen.",
    )  # fmt: skip


def _unmapped() -> Iterator[Finding]:
    with closing(HostDevice()) as device:
        mapped, _, nothing = _mapped_twice(device, read_only=False)
        device.copy(Direction.OUT, [CopyRun(nothing, mapped, PAGE_BYTES)])
        device.copy(Direction.OUT, [CopyRun(mapped, nothing, PAGE_BYTES)])
        caught = not any(ended.ok for ended in device.poll()) and len(device.faults) == 2
    yield _trial(
        "unmapped_copy_is_caught", caught,
        "A copy from or to an address where nothing is mapped fails and is reported.",
        "A copy from or to an address where nothing is mapped is reported as done.",
    )  # fmt: skip


def _mapped_twice(device: HostDevice, *, read_only: bool) -> tuple[int, int, int]:
    """One frame at two addresses, and an address after them where nothing is; the second mapping
    may be read-only."""
    base = device.reserve(3 * FRAME_BYTES, FRAME_BYTES)
    frames = device.create(1, FRAME_BYTES)
    second = base + FRAME_BYTES
    device.map([MapRun(base, frames), MapRun(second, frames, read_only)])
    return base, second, second + FRAME_BYTES


def _refused(device: HostDevice, address: int) -> bool:
    try:
        device.poke(address, b"lost")
    except DeviceError:
        return True
    return False


def _trial(name: str, works: bool, works_text: str, fails_text: str) -> Finding:
    return Finding(name, works, works_text if works else fails_text, works)


def _times() -> Iterator[Finding]:
    mapping, unmapping = [], []
    with closing(HostDevice()) as device:
        base = device.reserve(FRAME_BYTES, FRAME_BYTES)
        frames = device.create(1, FRAME_BYTES)
        for _ in range(TIMED_CALLS):
            start = perf_counter_ns()
            device.map([MapRun(base, frames)])
            between = perf_counter_ns()
            device.unmap([UnmapRun(base, 1)])
            mapping.append(between - start)
            unmapping.append(perf_counter_ns() - between)
    text = f"frame on the host device, median of {TIMED_CALLS}; a steady state makes no such call."
    yield Finding("map_us", _median_us(mapping), f"Mapping one untouched {text}")
    yield Finding("unmap_us", _median_us(unmapping), f"Unmapping one untouched {text}")


def _median_us(times_ns: list[int]) -> float:
    return round(median(times_ns) / 1000, 2)


# Programs and packages.


def _graphviz() -> Iterator[Finding]:
    path = shutil.which("dot")
    text = "`kvstate diagram --format svg` works."
    if path is None:
        text = "`kvstate diagram` draws mermaid and dot, but not svg: no `dot` is on the PATH."
    yield Finding("graphviz", path, text)


def _torch() -> Iterator[Finding]:
    version = _version("torch")
    text = "Not installed; nothing but torch tensors over an arena needs it."
    yield Finding("torch", version, "Installed." if version else text)


def _cuda_python() -> Iterator[Finding]:
    version = _version("cuda-python") or _version("cuda-bindings")
    text = "Not installed, so no CUDA driver can be asked; `pip install kvstate[gpu]` brings it."
    yield Finding("cuda_python", version, "Installed." if version else text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# CUDA.


def _cuda() -> Iterator[Finding]:
    """The driver, and each device by its number."""
    try:
        driver = import_module("cuda.bindings.driver")
        _call(driver, "cuInit", 0)
    except Exception as error:
        text = f"No CUDA device can be used here: {_reason(error)}."
        yield Finding("cuda_driver", None, text)
        return
    version = _call(driver, "cuDriverGetVersion")
    count = _call(driver, "cuDeviceGetCount")
    known = f"{version // 1000}.{version % 1000 // 10}"
    yield Finding("cuda_driver", known, f"The driver knows CUDA up to {known}.", True)
    yield Finding("cuda_devices_count", count, "CUDA devices that are visible here.", count > 0)
    for ordinal in range(count):
        yield from _asked(f"cuda_{ordinal}", partial(_cuda_device, driver, ordinal))


def _cuda_device(driver: Any, ordinal: int) -> Iterator[Finding]:
    prefix = f"cuda_{ordinal}"
    device = _call(driver, "cuDeviceGet", ordinal)
    name = _call(driver, "cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    size_bytes = _call(driver, "cuDeviceTotalMem", device)
    attribute = driver.CUdevice_attribute
    wanted = attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    mappable = bool(_call(driver, "cuDeviceGetAttribute", wanted, device))
    text = "It has" if mappable else "An arena needs, and it has not,"
    yield Finding(f"{prefix}_name", name, f"CUDA device {ordinal}.")
    yield Finding(f"{prefix}_memory_bytes", size_bytes, "Its memory in all.")
    yield Finding(f"{prefix}_vmm", mappable, f"{text} virtual memory management.", mappable)
    if mappable:
        unit = _granularity(driver, ordinal)
        text = f"On it frame_bytes must be a multiple of {_size(unit)}."
        yield Finding(f"{prefix}_granularity_bytes", unit, text)


def _granularity(driver: Any, ordinal: int) -> int:
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = ordinal
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call(driver, "cuMemGetAllocationGranularity", wanted, least))


def _call(driver: Any, name: str, *arguments: object) -> Any:
    """What a driver call gives back. Raises DeviceError with the driver's own word if it fails."""
    error, *values = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(name, getattr(error, "name", str(error)))
    return values[0] if values else None


_HOST_NEEDS: Final = ("frames_map_twice", "read_only_refuses_writes", "unmapped_copy_is_caught")
"""What must be so for the host device to be one."""
_QUESTIONS: Final[tuple[tuple[str, Callable[[], Iterator[Finding]]], ...]] = (
    ("kernel", _kernel),
    ("cpus_count", _cpus),
    ("memory_bytes", _memory),
    ("max_map_count", _mappings),
    ("memlock_limit_bytes", _locked),
    ("open_files_limit", _files),
    ("largest_reservation_bytes", _reservation),
    ("frames_map_twice", _twice),
    ("read_only_refuses_writes", _read_only),
    ("unmapped_copy_is_caught", _unmapped),
    ("map_us", _times),
    ("graphviz", _graphviz),
    ("torch", _torch),
    ("cuda_python", _cuda_python),
    ("cuda_driver", _cuda),
)
"""Each question, under the name of its finding if it cannot be answered."""
