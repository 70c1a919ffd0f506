"""Documents that can be checked are: examples run, pictures are the tables', links lead
somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstate.campaign.replay import ReplayReport
from kvstate.campaign.report import FuzzReport
from kvstate.cli import app
from kvstate.diagram import mermaid
from kvstate.spec.page import PAGE

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = "README.md", "docs/embedding.md", "docs/events.md", "docs/graphs.md"
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
COUNTER = re.compile(r"""counters\["([\w.]+)"\]""")
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    path = ROOT / name
    examples = CODE.findall(path.read_text())
    assert examples
    for text in examples:
        exec(compile(text, str(path), "exec"), {})


def test_the_picture_in_the_readme_is_the_table() -> None:
    assert f"```mermaid\n{mermaid(PAGE)}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        assert (path.parent / target).exists(), f"{path}: {target}"


@pytest.mark.parametrize(
    ("page", "report"), [("fuzzing.md", FuzzReport), ("replay.md", ReplayReport)]
)
def test_every_key_of_a_report_is_documented(page: str, report: type) -> None:
    text = (ROOT / "docs" / page).read_text()
    known = {"device", "streams", "workers", "seconds"}
    missing = [name for name in report.__annotations__ if f"`{name}`" not in text]
    assert set(missing) <= known


def test_every_counter_is_explained() -> None:
    code = "".join(path.read_text() for path in (ROOT / "kvstate").glob("*.py"))
    names = set(COUNTER.findall(code))
    names |= {f"hit_blocks.{place}" for place in ("host", "live", "span")}
    page = (ROOT / "docs" / "statistics.md").read_text()
    stats = (ROOT / "kvstate" / "stats.py").read_text()
    assert names >= {"forks", "hit_blocks.alias", "remaps"}
    assert not [name for name in names if f"`{name}`" not in page or name not in stats]


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    names = [
        command.name or command.callback.__name__
        for command in app.registered_commands
        if command.callback
    ]
    assert all(f"`kvstate {name}" in text for name in names), names
