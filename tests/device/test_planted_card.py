"""Planted faults of the card: each is found on it, by the fuzz or by the test that it names.

Each patched copy of the sources runs in a process of its own, since some of them lose the context.
`python tests/device/test_planted_card.py` prints the table for the documents.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest
from attrs import frozen

from tests.faults.card import CARD_FAULTS, CardFault
from tests.test_planted import ROOT, patched

SECONDS = 40


@frozen
class Finding:
    """What found a fault, and how long it took with everything."""

    by: str
    seconds: float


def find(fault: CardFault, folder: Path) -> Finding | None:
    """Look for the fault in a patched copy; None if nothing found it."""
    patched(fault, folder)
    started = monotonic()
    by = _tested(fault, folder, "-k", "not fake") if fault.test else _fuzzed(fault, folder)
    return Finding(by, monotonic() - started) if by else None


def _fuzzed(fault: CardFault, folder: Path) -> str | None:
    done = _run(
        folder, "-m", "kvstate", "fuzz", "--device", "cuda", "--seed", "1",
        "--seconds", str(SECONDS), "--save", str(folder / "failures"), "--json",
    )  # fmt: skip
    failures = json.loads(done.stdout)["failures"]
    kinds = [failure["kind"] for failure in failures if failure["kind"] in fault.kinds]
    return f"fuzz: {kinds[0]}" if kinds else None


def _tested(fault: CardFault, folder: Path, *options: str) -> str | None:
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    done = _run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, fault.test)
    assert "skipped" not in done.stdout, done.stdout
    failed = done.returncode == 1 and "failed" in done.stdout
    return fault.test.partition("::")[2] if failed else None


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(folder), *(path for path in sys.path if path and path != str(ROOT))]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, check=False,
        env=outer | {"PYTHONPATH": os.pathsep.join(paths)}, timeout=SECONDS + 80,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fault", CARD_FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_found_on_the_card(fault: CardFault, tmp_path: Path) -> None:
    assert find(fault, tmp_path) is not None


@pytest.mark.parametrize(
    "fault", [fault for fault in CARD_FAULTS if fault.anywhere], ids=lambda fault: fault.name
)
def test_planted_fault_is_found_without_a_card(fault: CardFault, tmp_path: Path) -> None:
    patched(fault, tmp_path)
    assert _tested(fault, tmp_path, "-k", "fake") is not None


@pytest.mark.parametrize("fault", CARD_FAULTS, ids=lambda fault: fault.name)
def test_patch_fits_and_its_detector_exists(fault: CardFault, tmp_path: Path) -> None:
    patched(fault, tmp_path)
    assert bool(fault.test) != bool(fault.kinds)
    if fault.test:
        file, _, name = fault.test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def _report() -> None:
    print("| planted fault | reports | found by | seconds |\n|---|---|---|---|")

    def one(fault: CardFault) -> Finding | None:
        with TemporaryDirectory() as folder:
            return find(fault, Path(folder))

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, CARD_FAULTS))
    for fault, found in zip(CARD_FAULTS, results, strict=True):
        by, seconds = (found.by, f"{found.seconds:.1f}") if found else ("**not found**", "")
        print(f"| {fault.name} | {fault.report} | {by} | {seconds} |")


if __name__ == "__main__":
    _report()
