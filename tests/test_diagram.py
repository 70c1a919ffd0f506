"""The drawings and pages say everything that the tables say, and nothing else."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvstate import diagram
from kvstate.errors import KvStateError
from kvstate.spec.coupling import COUPLING, OVER, TABLES
from kvstate.spec.expr import count
from kvstate.spec.laws import LAWS
from kvstate.spec.table import Row, State, Table
from kvstate.spec.words import ACTIONS, HOLDERS, ORDERINGS

DOCS = Path(__file__).parents[1] / "docs" / "machines"
MACHINES = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
Drawn = Counter[tuple[str, str, str]]


def odd_table() -> Table:
    """A table whose texts hold every character that Markdown, Mermaid or DOT gives a meaning."""
    level = count("level", "how | much")
    low = State(0, "LOW", 'says "low" | <b> \\ here', initial=True)
    high = State(1, "HIGH", "up", terminal=True)
    rows = (
        Row("rise", low, high, "a | b <c>", guard=level > 1),
        Row("fall", low, low, "less", guard=level < 1),
    )
    return Table("odd", "a | table", (low, high), rows, (level,), owner="<nobody>")


def labels(table: Table) -> Drawn:
    """Every row as it should be drawn, once."""
    found: Drawn = Counter()
    for row in table.rows:
        guard = "" if row.guard is None else f" [{row.guard}]"
        found[row.source.name, row.target.name, row.event + guard] += 1
    return found


def read_mermaid(text: str) -> tuple[set[str], list[tuple[str, str]], Drawn]:
    """States, edges and rows of a Mermaid state diagram; fails on a line that is none."""
    first, *lines = text.splitlines()
    assert first == "stateDiagram-v2"
    states: set[str] = set()
    edges: list[tuple[str, str]] = []
    drawn: Drawn = Counter()
    for line in map(str.strip, lines):
        if re.fullmatch(r"classDef \w+ stroke:#\w{6},stroke-width:2px|class [\w,]+ \w+", line):
            continue
        if edge := re.fullmatch(r"(\w+|\[\*\]) --> (\w+|\[\*\])(?:: (.+))?", line):
            source, target, text = edge.groups()
            edges.append((source, target))
            drawn.update((source, target, label) for label in plain(text or "").split("<br/>"))
            continue
        inside = re.fullmatch(r"(\w+): (.+)", line)
        assert inside, line
        name, text = inside.groups()
        if name == text:
            states.add(name)
        else:
            drawn[name, name, plain(text)] += 1
    return states, edges, drawn


def plain(text: str) -> str:
    for entity, character in (("#lt;", "<"), ("#gt;", ">"), ("#quot;", '"'), ("#35;", "#")):
        text = text.replace(entity, character)
    return text


STRING = r'"((?:[^"\\]|\\.)*)"'


def read_dot(text: str) -> tuple[set[str], list[tuple[str, str]], Drawn]:
    """States, edges and rows of a DOT graph; fails on a line that is none."""
    first, *lines, last = text.splitlines()
    assert re.fullmatch(rf"digraph {STRING} {{", first)
    assert last == "}"
    attributes = rf"\[\w+={STRING}(?:, \w+={STRING})*\]"
    states: set[str] = set()
    edges: list[tuple[str, str]] = []
    drawn: Drawn = Counter()
    for line in map(str.strip, lines):
        if re.fullmatch(rf"bgcolor={STRING}|(?:node|edge) {attributes}", line):
            continue
        if edge := re.fullmatch(rf"{STRING} -> {STRING}(?: \[label={STRING}\])?", line):
            source, target, label = edge.groups()
            edges.append((source, target))
            drawn.update((source, target, part) for part in (label or "").split("\\n"))
            continue
        node = re.match(rf"{STRING} {attributes}$", line)
        assert node, line
        states.add(node[1])
    return states, edges, drawn


@MACHINES
def test_mermaid_draws_every_state_and_row_once(table: Table) -> None:
    states, edges, drawn = read_mermaid(diagram.mermaid(table))
    assert states == {state.name for state in table.states}
    assert {end for edge in edges for end in edge} <= {*states, "[*]"}
    assert len(edges) == len(set(edges)), "rows between two states are one edge"
    assert all(source != target for source, target in edges), "loops stand inside their box"
    marks = {(source, target) for source, target in edges if "[*]" in (source, target)}
    ends = {(state.name, "[*]") for state in table.states if state.terminal}
    assert marks == {("[*]", table.initial.name), *ends}
    assert Counter({key: n for key, n in drawn.items() if key[2]}) == labels(table)


@MACHINES
def test_dot_draws_every_state_and_row_once(table: Table) -> None:
    text = diagram.dot(table)
    states, edges, drawn = read_dot(text)
    assert states == {"[*]", *(state.name for state in table.states)}
    assert {end for edge in edges for end in edge} <= states
    assert len(edges) == len(set(edges)), "rows between two states are one edge"
    assert ("[*]", table.initial.name) in edges
    assert text.count("peripheries") == sum(state.terminal for state in table.states)
    assert Counter({key: n for key, n in drawn.items() if key[2]}) == labels(table)


@MACHINES
def test_outlines_follow_places(table: Table) -> None:
    text = diagram.mermaid(table)
    for place in ("gpu", "host"):
        members = [state.name for state in table.states if state.place == place]
        assert (f"classDef {place} " in text) == bool(members)
        assert not members or f"class {','.join(members)} {place}\n" in text


def test_texts_cannot_break_a_drawing() -> None:
    table = odd_table()
    _, _, in_mermaid = read_mermaid(diagram.mermaid(table))
    _, _, in_dot = read_dot(diagram.dot(table))
    assert labels(table) <= in_mermaid
    assert labels(table) <= in_dot
    assert '\\"low\\" | <b> \\\\ here' in diagram.dot(table)


def test_svg_without_graphviz_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(diagram.GraphvizError, match="apt-get install graphviz") as caught:
        diagram.svg(TABLES["page"])
    assert isinstance(caught.value, KvStateError)


def test_svg_says_what_graphviz_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "dot"
    program.write_text("#!/bin/sh\nread -r line\necho no fonts here >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(diagram.GraphvizError, match="could not draw page: no fonts here"):
        diagram.svg(TABLES["page"])


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("table", [*TABLES.values(), odd_table()], ids=[*TABLES, "odd"])
def test_svg_shows_every_state_and_event(table: Table) -> None:
    root = ElementTree.fromstring(diagram.svg(table))
    assert root.tag.endswith("}svg")
    shown = {" ".join((element.text or "").split()) for element in root.iter()}
    assert shown >= {state.name for state in table.states}
    assert shown >= {label for _, _, label in labels(table)}


# Pages.


def grids(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a page, each a list of lines of cells."""
    found: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found[-1].append([cell.strip() for cell in cells])
        before = line
    return found


def grid(text: str, *header: str) -> list[dict[str, str]]:
    """The lines of the table that has these columns, by column."""
    for title, _, *lines in grids(text):
        if set(header) <= set(title):
            return [dict(zip(title, line, strict=True)) for line in lines]
    raise AssertionError(f"no table has the columns {header}")


@MACHINES
def test_page_has_every_state(table: Table) -> None:
    lines = grid(diagram.page(table), "code", "name")
    assert len(lines) == len(table.states)
    for state, line in zip(table.states, lines, strict=True):
        assert (line["code"], line["name"]) == (str(state.code), f"`{state}`")
        assert line["what it means"] == state.doc
        assert line.get("place", "") == (state.place or "")
        assert line.get("payer", "") == (state.payer or "")
        assert line.get("readable", "") == ("yes" if state.readable else "")
        assert line.get("writable", "") == ("yes" if state.writable else "")
        end = "initial" if state.initial else "terminal" if state.terminal else ""
        assert line["end"] == end


@MACHINES
def test_page_has_every_row_whole(table: Table) -> None:
    lines = grid(diagram.page(table), "source", "target")
    assert len(lines) == len(table.rows)
    for row, line in zip(table.rows, lines, strict=True):
        assert line["event"] == f"`{row.event}`"
        assert line["source"] == f"`{row.source}`"
        assert line["target"] == f"`{row.target}`"
        assert line["why"] == row.why
        assert line.get("guard", "") == ("" if row.guard is None else f"`{row.guard}`")
        assert line.get("effect", "") == ", ".join(f"`{effect}`" for effect in row.effect)
        assert line.get("holds", "") == ", ".join(f"`{hold}`" for hold in row.holds)
        assert line.get("action", "") == (f"`{row.action}`" if row.action else "")
        assert line.get("after", "") == ", ".join(f"`{word}`" for word in row.after)
        assert line.get("before", "") == ", ".join(f"`{word}`" for word in row.before)
        assert line.get("if the action fails", "") == row.failure


@MACHINES
def test_page_has_every_link_of_its_machine(table: Table) -> None:
    text = diagram.page(table)
    for link in COUPLING:
        cause, fires = link.cause.split("."), link.fires.split(".")
        when = "" if link.when is None else f"`{link.when}`"
        over = f"`{link.over}`: {OVER[link.over]}"
        if cause[0] == table.name:
            there = f"[`{link.fires}`]({fires[0]}.md)"
            assert link_line(text, "fires", cause[1], there, when, over, link.why)
        if fires[0] == table.name:
            there = f"[`{link.cause}`]({cause[0]}.md)"
            assert link_line(text, "cause", fires[1], there, when, over, link.why)


def link_line(text: str, other: str, event: str, there: str, when: str, *rest: str) -> bool:
    wanted = (f"`{event}`", there, when, *rest)
    return any(
        (line["event"], line[other], line.get("when", ""), line["over"], line["why"]) == wanted
        for line in grid(text, "event", other, "over")
    )


@MACHINES
def test_page_names_the_events_that_no_link_fires(table: Table) -> None:
    fired = {link.fires for link in COUPLING}
    others = [event for event in table.events if f"{table.name}.{event}" not in fired]
    said = re.findall(r"No link fires (.+): a call", diagram.page(table))
    assert re.findall(r"`(\w+)`", " ".join(said)) == others


@MACHINES
def test_page_has_exactly_the_missing_pairs(table: Table) -> None:
    said = set()
    for line in grid(diagram.page(table), "state", "illegal events"):
        events = re.findall(r"`(\w+)`", line["illegal events"]) or table.events
        said |= {(line["state"].strip("`"), event) for event in events}
    assert said == {(state.name, event) for state, event in table.missing()}


@MACHINES
def test_page_has_every_variable(table: Table) -> None:
    text = diagram.page(table)
    assert ("## Variables" in text) == bool(table.variables)
    if table.variables:
        lines = grid(text, "variable")
        wanted = [(f"`{var.name}`", var.doc) for var in table.variables]
        assert [(line["variable"], line["what it means"]) for line in lines] == wanted


def test_columns_that_are_empty_for_a_machine_are_left_out() -> None:
    title = grids(diagram.page(TABLES["step"]))[0][0]
    assert title == ["code", "name", "what it means", "end"]
    for name, text in diagram.pages().items():
        for _, _, *lines in grids(text):
            assert all(any(column) for column in zip(*lines, strict=True)), name


def test_texts_cannot_break_a_page() -> None:
    lines = grid(diagram.page(odd_table()), "source", "target")
    assert [line["why"] for line in lines] == ["a \\| b &lt;c>", "less"]
    assert lines[0]["guard"] == "`level > 1`"


def test_index_has_every_machine_and_word() -> None:
    text = diagram.index()
    lines = grid(text, "machine")
    assert [line["machine"] for line in lines] == [f"[{name}]({name}.md)" for name in TABLES]
    for table, line in zip(TABLES.values(), lines, strict=True):
        assert (line["what it is"], line["state byte kept by"]) == (table.doc, table.owner)
        assert line["rows"] == str(len(table.rows))
    for kind, words in (
        ("action", ACTIONS), ("ordering", ORDERINGS), ("holder", HOLDERS), ("over", OVER),
    ):  # fmt: skip
        said = {line[kind].strip("`"): line["what it means"] for line in grid(text, kind)}
        assert said == words


def test_flowchart_shows_every_coupling() -> None:
    chart = diagram.index().split("flowchart LR\n")[1].split("```")[0]
    drawn = set()
    for source, label, target in re.findall(r'(\w+) -->\|"(.+)"\| (\w+)', chart):
        events = re.split(r",(?: |<br/>)", label)
        drawn |= {(source, f"{target}.{event}") for event in events}
    assert drawn == {(link.cause.partition(".")[0], link.fires) for link in COUPLING}


def test_laws_page_has_every_law() -> None:
    lines = grid(diagram.laws_page(), "number", "name")
    assert len(lines) == len(LAWS)
    for law, line in zip(LAWS, lines, strict=True):
        assert (line["number"], line["name"]) == (str(law.number), law.name)
        assert (line["kind"], line["why"]) == (law.kind, law.why)
        assert line["what is checked"] == " ".join((law.check.__doc__ or "").split())


def test_every_page_says_that_it_is_generated_and_links_to_pages_that_are() -> None:
    pages = diagram.pages()
    assert set(pages) == {"README.md", "laws.md", *(f"{name}.md" for name in TABLES)}
    for text in pages.values():
        assert text.startswith(diagram.MARK)
        assert "kvstate diagram --write docs/machines" in diagram.MARK
        assert text.endswith("\n")
        assert set(re.findall(r"\]\((.+?)\)", text)) <= set(pages)


# Freshness.


def test_the_pages_of_this_repository_are_fresh() -> None:
    assert diagram.stale(DOCS) == [], f"run: kvstate diagram --write {DOCS}"


def test_what_is_written_is_fresh(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert {path.name for path in diagram.stale(folder)} == set(diagram.pages())
    written = diagram.write(folder)
    assert sorted(written) == sorted(folder.iterdir())
    assert diagram.stale(folder) == []


def test_stale_names_changed_missing_and_surplus_pages(tmp_path: Path) -> None:
    diagram.write(tmp_path)
    changed, missing = tmp_path / "page.md", tmp_path / "laws.md"
    surplus, foreign = tmp_path / "old.md", tmp_path / "notes.md"
    changed.write_text(changed.read_text() + "\n")
    missing.unlink()
    surplus.write_text(diagram.MARK + "\n\n# old\n")
    foreign.write_text("# somebody wrote this\n")
    assert set(diagram.stale(tmp_path)) == {changed, missing, surplus}
    diagram.write(tmp_path)
    assert diagram.stale(tmp_path) == []
    assert not surplus.exists()
    assert foreign.read_text() == "# somebody wrote this\n"


def test_stale_notices_line_ends_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    diagram.write(tmp_path)
    page, index = tmp_path / "page.md", tmp_path / "README.md"
    page.write_bytes(page.read_bytes().replace(b"\n", b"\r\n"))
    index.write_bytes(b"\xff\xfe")
    assert set(diagram.stale(tmp_path)) == {page, index}
