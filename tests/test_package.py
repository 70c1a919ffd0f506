"""The package: what a wheel brings into a site-packages, and that it works far from the
checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which a wheel of this checkout is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *options, "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)],
        check=True,
    )
    return folder / "site"


def run(site: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the checkout is out of sight and the installed wheel comes first."""
    return subprocess.run(
        [sys.executable, *args], cwd=site.parent, env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_only_kvstate_appears(site: Path) -> None:
    names = {path.name for path in site.iterdir()}
    assert names == {"kvstate", "kvstate-0.1.0.dist-info", "bin"}
    assert (site / "kvstate" / "py.typed").is_file()
    assert (site / "kvstate" / "spec" / "page.py").is_file()
    assert not (site / "kvstate" / "spec").is_symlink()


def test_it_runs_without_the_checkout(site: Path) -> None:
    place = run(site, "-c", "import kvstate, kvstate.spec.page; print(kvstate.__file__)")
    assert Path(place.stdout.strip()).is_relative_to(site), place.stderr
    done = run(site, "-m", "kvstate", "fuzz", "--calls", "300", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["violations"]) == (0, 0)


@pytest.mark.parametrize("name", ["spec", "gpu"])
def test_nothing_called_spec_or_gpu_can_be_imported(site: Path, name: str) -> None:
    done = run(site, "-c", f"import {name}")
    assert "ModuleNotFoundError" in done.stderr


def test_the_core_needs_no_gpu_and_no_torch(site: Path) -> None:
    """Whatever the core imports, it is neither cuda-python nor torch."""
    done = run(site, "-c", "import sys, kvstate.cli; print([n for n in sys.modules if n in "
               "('cuda', 'torch')])")  # fmt: skip
    assert done.stdout.strip() == "[]", done.stderr
