"""The doctor finds what works here, says so when something does not, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from enum import Enum
from importlib import metadata
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import psutil
import pytest
from rich.console import Console

from kvstate import doctor
from kvstate.doctor import Finding, Report
from kvstate.errors import DeviceError
from kvstate.gpu import KINDS, open_device, why_no_cuda
from kvstate.gpu.host import HostDevice

CUDA = () if why_no_cuda() else ("cuda",)
HOST_TRIALS = ("frames_map_twice", "read_only_refuses_writes", "unmapped_copy_is_caught")
ALWAYS = (
    "kernel", "cpus_count", "memory_bytes", "memory_usable_bytes", "max_map_count",
    "memlock_limit_bytes", "open_files_limit", "largest_reservation_bytes", *HOST_TRIALS,
    "map_us", "unmap_us", "graphviz", "torch", "cuda_python", "cuda_driver",
)  # fmt: skip


class Recorded(HostDevice):
    """A host device that can be asked afterwards whether it was closed."""

    made: ClassVar[list[HostDevice]] = []

    def __init__(self) -> None:
        super().__init__()
        self.made.append(self)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[HostDevice]:
    """Every host device that the doctor opens."""
    monkeypatch.setattr(doctor, "HostDevice", Recorded)
    monkeypatch.setattr(Recorded, "made", [])
    return Recorded.made


def assert_nothing_is_left(devices: list[HostDevice]) -> None:
    assert devices
    for device in devices:
        assert device.closed
        assert device.ledger().empty
    assert "kvstate-frames" not in Path("/proc/self/maps").read_text()


def shown(report: Report) -> str:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(doctor.render(report))
    return console.export_text()


def test_every_question_is_answered_once() -> None:
    findings = doctor.examine().findings
    names = [finding.name for finding in findings]
    assert len(names) == len(set(names))
    assert set(ALWAYS) <= set(names)
    for finding in findings:
        assert isinstance(finding.value, int | float | str | bool | None)
        assert finding.meaning.endswith(".")


def test_the_host_device_works_here() -> None:
    report = doctor.examine()
    for name in HOST_TRIALS:
        assert report.find(name).value is True
        assert report.find(name).ok is True
    assert report.devices == (*CUDA, "host", "null")
    assert set(report.devices) <= set(KINDS)
    for kind in report.devices:
        open_device(kind).close()


def test_numbers_are_those_of_this_machine() -> None:
    report = doctor.examine()
    total = psutil.virtual_memory().total
    assert report.find("memory_bytes").value == total
    usable = report.find("memory_usable_bytes").value
    assert isinstance(usable, int)
    assert 0 < usable <= total
    assert report.find("cpus_count").value == len(psutil.Process().cpu_affinity())
    limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    assert report.find("max_map_count").value == limit
    assert report.find("largest_reservation_bytes").value in (0, *doctor.RESERVATIONS_BYTES)
    for name in ("map_us", "unmap_us"):
        value = report.find(name).value
        assert isinstance(value, float)
        assert value > 0


def test_nothing_is_left_behind(devices: list[HostDevice]) -> None:
    process = psutil.Process()
    files, addresses_bytes = process.num_fds(), process.memory_info().vms
    doctor.examine()
    assert_nothing_is_left(devices)
    assert process.num_fds() == files
    assert process.memory_info().vms - addresses_bytes < doctor.TIB


def test_a_report_is_json() -> None:
    plain = doctor.examine().as_dict()
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain
    assert json.loads(json.dumps(plain)) == plain
    assert plain["devices"] == [*CUDA, "host", "null"]
    assert plain["findings"][0].keys() == {"name", "value", "meaning", "ok"}


def test_the_table_shows_every_finding() -> None:
    report = doctor.examine()
    text = shown(report)
    for finding in report.findings:
        assert finding.name in text
    assert f"devices that work here: {', '.join((*CUDA, 'host', 'null'))}" in text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory_bytes", 24 << 30, "24 GiB"),
        ("memory_bytes", 3 << 39, "1.5 TiB"),
        ("memory_bytes", 0, "0 bytes"),
        ("memory_bytes", 1 << 62, "4 EiB"),
        ("max_map_count", 65530, "65,530"),
        ("vmm", False, "no"),
        ("torch", None, "none"),
        ("torch", "2.9[x]", "2.9[x]"),
    ],
)
def test_values_are_shown_for_people(name: str, value: doctor.Value, text: str) -> None:
    assert f" {text} " in shown(Report((Finding(name, value, "So [red]it[/red] is."),), ("null",)))
    assert "[red]it[/red]" in shown(Report((Finding(name, value, "[red]it[/red]"),), ()))


def test_find_refuses_an_unknown_name() -> None:
    with pytest.raises(KeyError, match="moon"):
        doctor.examine().find("moon")


# Where something does not work.


def test_a_failing_question_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr(psutil, "virtual_memory", refuse)
    report = doctor.examine()
    finding = report.find("memory_bytes")
    assert finding.value is None
    assert finding.ok is False
    assert "PermissionError: not for you" in finding.meaning
    assert report.devices == (*CUDA, "host", "null")


@pytest.mark.parametrize("call", ["reserve", "create", "map", "peek"])
def test_a_broken_host_device_is_not_offered_and_leaks_nothing(
    call: str, devices: list[HostDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DeviceError(call, "a filter refuses it")

    monkeypatch.setattr(HostDevice, call, refuse)
    report = doctor.examine()
    assert report.devices == (*CUDA, "null")
    assert_nothing_is_left(devices)
    finding = report.find("frames_map_twice")
    assert finding.ok is False
    assert "a filter refuses it" in finding.meaning
    json.dumps(report.as_dict())


def test_writes_that_go_through_a_read_only_mapping_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ignore(self: HostDevice, runs: Any) -> None:
        honest(self, [run._replace(read_only=False) for run in runs])

    honest = HostDevice.map
    monkeypatch.setattr(HostDevice, "map", ignore)
    report = doctor.examine()
    assert report.find("read_only_refuses_writes").value is False
    assert report.find("frames_map_twice").value is True
    assert report.devices == (*CUDA, "null")


def test_addresses_that_are_short_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(self: HostDevice, size_bytes: int, align_bytes: int) -> int:
        if size_bytes > 4 << 40:
            raise DeviceError("reserve", "no such addresses")
        return honest(self, size_bytes, align_bytes)

    honest = HostDevice.reserve
    monkeypatch.setattr(HostDevice, "reserve", limited)
    finding = doctor.examine().find("largest_reservation_bytes")
    assert (finding.value, finding.ok) == (4 << 40, False)
    assert "arena_bytes" in finding.meaning


def test_a_missing_graphviz_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    finding = doctor.examine().find("graphviz")
    assert (finding.value, finding.ok) == (None, None)
    assert "svg" in finding.meaning


# Control groups.


def limits(folder: Path, membership: str) -> list[int]:
    (folder / "cgroup").write_text(membership)
    return list(doctor._cgroup_limits(folder / "cgroup", folder / "fs"))


def group(folder: Path, path: str, name: str, text: str) -> None:
    place = folder / "fs" / path
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text + "\n")


def test_limits_of_a_group_and_of_those_above_it_are_read(tmp_path: Path) -> None:
    group(tmp_path, "a/b", "memory.max", "max")
    group(tmp_path, "a", "memory.max", "4096")
    group(tmp_path, "", "memory.max", "8192")
    group(tmp_path, "other", "memory.max", "1")
    (tmp_path / "memory.max").write_text("2\n")
    assert limits(tmp_path, "0::/a/b\n") == [4096, 8192]


def test_limits_of_the_older_groups_are_read(tmp_path: Path) -> None:
    group(tmp_path, "memory/x", "memory.limit_in_bytes", "4096")
    group(tmp_path, "cpu/x", "memory.limit_in_bytes", "1")
    assert limits(tmp_path, "5:cpu,cpuacct:/x\n4:memory,hugetlb:/x/gone\n") == [4096]


def test_no_groups_no_limit(tmp_path: Path) -> None:
    assert limits(tmp_path, "0::/\n") == []
    assert list(doctor._cgroup_limits(tmp_path / "missing", tmp_path)) == []


def test_a_lower_limit_is_what_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cgroup_limits", lambda *_: iter([1 << 60, 1 << 30]))
    finding = doctor.examine().find("memory_usable_bytes")
    assert finding.value == 1 << 30
    assert "1 GiB" in finding.meaning


# CUDA.


class Result(Enum):
    """What a driver call answers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_NO_DEVICE = 100


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: object) -> None:
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)


def two_devices() -> SimpleNamespace:
    """A driver with two devices; the second can map no memory."""
    ok = Result.CUDA_SUCCESS
    return SimpleNamespace(
        CUresult=Result,
        CUdevice_attribute=SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm"
        ),
        CUmemAllocationProp=lambda: SimpleNamespace(location=SimpleNamespace()),
        CUmemAllocationType=SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1),
        CUmemLocationType=SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1),
        CUmemAllocationGranularity_flags=SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0),
        cuInit=lambda flags: (ok,),
        cuDriverGetVersion=lambda: (ok, 13020),
        cuDeviceGetCount=lambda: (ok, 2),
        cuDeviceGet=lambda ordinal: (ok, ordinal),
        cuDeviceGetName=lambda size, device: (ok, f"GPU {device}".encode().ljust(size, b"\0")),
        cuDeviceTotalMem=lambda device: (ok, 141 << 30),
        cuDeviceGetAttribute=lambda attribute, device: (ok, int(device == 0)),
        cuMemGetAllocationGranularity=lambda wanted, flag: (ok, (2 << 20) + wanted.location.id),
    )


def test_a_machine_without_cuda_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    use_driver(monkeypatch, None)
    monkeypatch.setattr(metadata, "version", missing)
    report = doctor.examine()
    for name in ("cuda_python", "cuda_driver", "torch"):
        assert (report.find(name).value, report.find(name).ok) == (None, None)
    assert "kvstate[gpu]" in report.find("cuda_python").meaning
    assert "ModuleNotFoundError" in report.find("cuda_driver").meaning
    assert "kvstate[gpu]" in shown(report)
    assert report.devices == ("host", "null")


def test_cuda_python_without_a_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = two_devices()
    driver.cuInit = lambda flags: (Result.CUDA_ERROR_NO_DEVICE,)
    use_driver(monkeypatch, driver)
    finding = doctor.examine().find("cuda_driver")
    assert (finding.value, finding.ok) == (None, None)
    assert "CUDA_ERROR_NO_DEVICE" in finding.meaning


def test_cuda_devices_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    use_driver(monkeypatch, two_devices())
    report = doctor.examine()
    assert report.find("cuda_driver").value == "13.2"
    assert report.find("cuda_devices_count").value == 2
    assert report.find("cuda_0_name").value == "GPU 0"
    assert report.find("cuda_0_memory_bytes").value == 141 << 30
    assert report.find("cuda_0_vmm").value is True
    assert report.find("cuda_0_granularity_bytes").value == 2 << 20
    assert report.find("cuda_1_vmm").ok is False
    with pytest.raises(KeyError):
        report.find("cuda_1_granularity_bytes")


def test_one_broken_device_does_not_hide_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = two_devices()
    driver.cuDeviceTotalMem = lambda device: (
        (Result.CUDA_SUCCESS, 1) if device else (Result.CUDA_ERROR_NO_DEVICE, None)
    )
    use_driver(monkeypatch, driver)
    report = doctor.examine()
    assert report.find("cuda_0").ok is False
    assert "cuDeviceTotalMem" in report.find("cuda_0").meaning
    assert report.find("cuda_1_memory_bytes").value == 1


@pytest.mark.gpu
def test_a_real_device_can_map_memory() -> None:
    report = doctor.examine()
    if report.find("cuda_driver").value is None:
        pytest.skip(report.find("cuda_driver").meaning)
    assert report.find("cuda_0_vmm").value is True
    granularity = report.find("cuda_0_granularity_bytes").value
    assert isinstance(granularity, int)
    assert granularity % 4096 == 0
