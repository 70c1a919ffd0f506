"""Drawings and documents of the tables, made from the tables and nothing else.

A diagram that is drawn by hand is out of date one commit later, and nobody notices. Here every
state and every row is drawn and written out once, in the table's own order, so that the same
tables give the same text, byte for byte, and `stale` can compare what is on disk with what the
tables say now. Mermaid is what the pages carry, since it is drawn where they are read; DOT and SVG
are for everything else.

Colour is an outline by `place` and nothing more: the fill and the text are the theme's, so that a
page can be read in light and in dark, and the table under the drawing says the same in words.

Rejected: one edge a row. The sequence has seven rows from ACTIVE to ACTIVE, and seven loops on one
box cannot be read. Edges between the same two states are one edge that lists its events. Mermaid
lays the text of even one loop over its neighbours, so there the events that leave a state as it is
stand inside its box.
"""

from __future__ import annotations

import inspect
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Final

from kvstate.errors import ArgumentError, KvStateError
from kvstate.spec import coupling, laws
from kvstate.spec.coupling import COUPLING, OVER, TABLES, Link
from kvstate.spec.table import Row, State, Table
from kvstate.spec.words import ACTIONS, HOLDERS, ORDERINGS

MARK: Final = "<!-- Generated from spec/ by `kvstate diagram --write docs/machines`. -->"
"""How every generated page begins; a file that begins otherwise is never deleted."""
_START: Final = "[*]"
_OUTLINES: Final = {
    "gpu": ("#d97706", "orange is on the GPU"),
    "host": ("#3b82f6", "blue is on the host"),
}
"""For each place a colour that shows on white and on black, and what it says."""
_LABEL_CHARACTERS: Final = 28


class GraphvizError(KvStateError):
    """Graphviz is missing or failed; says which, and how to get it."""


# Drawings.


def mermaid(table: Table) -> str:
    """The machine as a Mermaid state diagram; events that change no state are in their state's
    box."""
    lines = [
        "stateDiagram-v2",
        *(f"classDef {p} stroke:{_OUTLINES[p][0]},stroke-width:2px" for p in _places(table)),
        *(f"{state}: {state}" for state in table.states),
        f"{_START} --> {table.initial}",
    ]
    for (source, target), rows in _edges(table).items():
        labels = [_mermaid_text(_label(row)) for row in rows]
        if source == target:
            lines += [f"{source}: {label}" for label in labels]
        else:
            lines.append(f"{source} --> {target}: {'<br/>'.join(labels)}")
    lines += [f"{state} --> {_START}" for state in table.states if state.terminal]
    for place in _places(table):
        members = ",".join(state.name for state in table.states if state.place == place)
        lines.append(f"class {members} {place}")
    return "\n    ".join(lines) + "\n"


def dot(table: Table) -> str:
    """The machine as Graphviz DOT: initial with an arrow from a point, terminal with a double
    outline."""
    font = 'fontname="Helvetica", fontsize="11"'
    lines = [
        f"digraph {_quoted(table.name)} {{",
        'bgcolor="transparent"',
        f'node [shape="box", style="rounded,filled", fillcolor="#f6f8fa", color="#8c959f", {font}]',
        f'edge [color="#8c959f", fontcolor="#767676", {font}]',
        f'{_quoted(_START)} [shape="point", width="0.12", fillcolor="#8c959f"]',
        *(_dot_state(state) for state in table.states),
        f"{_quoted(_START)} -> {_quoted(table.initial.name)}",
    ]
    for (source, target), rows in _edges(table).items():
        label = _quoted(*map(_label, rows))
        lines.append(f"{_quoted(source)} -> {_quoted(target)} [label={label}]")
    return "\n    ".join(lines) + "\n}\n"


def svg(table: Table) -> str:
    """The machine as SVG, laid out by Graphviz. Raises GraphvizError if that is missing or
    fails."""
    program = shutil.which("dot")
    if program is None:
        raise GraphvizError(
            "SVG is drawn by Graphviz, and there is no program `dot` on the PATH; install it "
            "(Debian and Ubuntu: `apt-get install graphviz`), or ask for mermaid or dot"
        )
    done = subprocess.run(
        [program, "-Tsvg"], input=dot(table), capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise GraphvizError(f"{program} could not draw {table.name}: {done.stderr.strip()}")
    return done.stdout


FORMATS: Final[dict[str, Callable[[Table], str]]] = {"mermaid": mermaid, "dot": dot, "svg": svg}
"""Every format of a drawing, by its name on the command line."""


def _edges(table: Table) -> dict[tuple[str, str], list[Row]]:
    """The rows between each two states: one edge."""
    merged = defaultdict(list)
    for row in table.rows:
        merged[row.source.name, row.target.name].append(row)
    return dict(merged)


def _label(row: Row) -> str:
    return row.event if row.guard is None else f"{row.event} [{row.guard}]"


def _places(table: Table) -> list[str]:
    """The places of this machine that have a colour."""
    used = {state.place for state in table.states}
    return [place for place in _OUTLINES if place in used]


def _mermaid_text(text: str) -> str:
    for character, entity in (("#", "#35;"), ("<", "#lt;"), (">", "#gt;"), ('"', "#quot;")):
        text = text.replace(character, entity)
    return text


def _dot_state(state: State) -> str:
    parts = [f"tooltip={_quoted(state.doc)}"]
    if state.place in _OUTLINES:
        parts.append(f'color="{_OUTLINES[state.place][0]}", penwidth="2"')
    if state.terminal:
        parts.append('peripheries="2"')
    return f"{_quoted(state.name)} [{', '.join(parts)}]"


def _quoted(*lines: str) -> str:
    """A DOT string of one or more lines."""
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


# Pages.


def page(table: Table) -> str:
    """The Markdown page of one machine."""
    terminal = [state.name for state in table.states if state.terminal]
    ends = f" and ends in {_words(terminal)}" if terminal else ", and comes back there"
    return _document(
        f"# {table.name}",
        f"{_capital(_text(table.doc))}. Its state byte is kept by {_text(table.owner)}."
        + (" Objects come in runs, and one event moves a whole run." if table.runs else ""),
        f"It begins in `{table.initial}`{ends}. [All machines](README.md)",
        _fenced(mermaid(table)),
        _legend(table),
        "## States",
        _states(table),
        *_section("## Variables", _variables(table)),
        "## Rows",
        _rows(table),
        *_section("## What its events cause", _caused(table)),
        "## What fires its events",
        *_fired(table),
        "## Illegal",
        *_illegal(table),
    )


def index() -> str:
    """The overview: every machine, which one moves which, and the words that rows use."""
    return _document(
        "# The machines",
        "Every object that kvstate keeps is in one state of one of these machines, and changes it "
        "only by a row. What must hold whatever the rows do is said by [the laws](laws.md).",
        _grid(("machine", "what it is", "state byte kept by", "states", "rows", "illegal pairs"),
              map(_machine, TABLES.values())),
        "## Which machine moves which",
        inspect.getdoc(coupling) or "",
        "An arrow carries the events that it fires.",
        _fenced(_flowchart()),
        "## Words",
        "Actions are what the device does. In one call they are carried out in this order.",
        _glossary("action", ACTIONS),
        "Orderings are what an action waits for (after), or what waits for it (before).",
        _glossary("ordering", ORDERINGS),
        "Holders keep a range from being reused; a row adds (`+`) or releases (`-`) their holds.",
        _glossary("holder", HOLDERS),
        "Runs are what a link fires its event over.",
        _glossary("over", OVER),
    )  # fmt: skip


def laws_page() -> str:
    """The laws: one row each."""
    return _document(
        "# The laws",
        inspect.getdoc(laws) or "",
        _grid(("number", "name", "kind", "why", "what is checked"), (
            (str(law.number), law.name, law.kind, _text(law.why), _text(law.check.__doc__ or ""))
            for law in laws.LAWS
        )),
    )  # fmt: skip


def pages() -> dict[str, str]:
    """Every generated page by its file name."""
    machines = {f"{name}.md": page(table) for name, table in TABLES.items()}
    return {"README.md": index(), **machines, "laws.md": laws_page()}


def write(folder: Path) -> list[Path]:
    """Write every page into the folder and delete generated pages that are no more; the pages
    written. Raises ArgumentError, with nothing written, where something else has a page's name."""
    for path in map(folder.joinpath, pages()):
        if path.is_symlink() or not (_read(path) or MARK).startswith(MARK):
            reason = "it was not written by this command: choose another folder, or move it away"
            raise ArgumentError(f"{path} is in the way of a page: {reason}")
    folder.mkdir(parents=True, exist_ok=True)
    for path in _surplus(folder):
        path.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in pages()]


def stale(folder: Path) -> list[Path]:
    """The pages in the folder that are not what the tables say now: changed, missing or
    surplus."""
    differ = [folder / name for name, text in pages().items() if _read(folder / name) != text]
    return differ + _surplus(folder)


def _read(path: Path) -> str | None:
    if not path.is_file():
        return None
    return path.read_bytes().decode("utf-8", "replace")


def _surplus(folder: Path) -> list[Path]:
    """Generated pages of machines that are no more. Pages that people wrote are left alone."""
    known = pages()
    others = sorted(path for path in folder.glob("*.md") if path.name not in known)
    return [path for path in others if (_read(path) or "").startswith(MARK)]


# Parts of pages.


def _states(table: Table) -> str:
    header = ("code", "name", "what it means", "place", "payer", "readable", "writable", "end")
    return _grid(header, (
        (
            str(state.code), _code(state.name), _text(state.doc), state.place or "",
            state.payer or "", _yes(state.readable), _yes(state.writable), _end(state),
        )
        for state in table.states
    ))  # fmt: skip


def _end(state: State) -> str:
    return "initial" if state.initial else "terminal" if state.terminal else ""


def _variables(table: Table) -> str:
    return _grid(("variable", "kind", "what it means"), (
        (_code(var.name), "flag" if var.flag else "count", _text(var.doc))
        for var in table.variables
    ))  # fmt: skip


def _rows(table: Table) -> str:
    header = (
        "event", "source", "guard", "target", "effect", "holds", "action", "after", "before",
        "if the action fails", "why",
    )  # fmt: skip
    return _grid(header, (
        (
            _code(row.event), _code(row.source), _code(row.guard), _code(row.target),
            _codes(row.effect), _codes(row.holds), _code(row.action), _codes(row.after),
            _codes(row.before), _text(row.failure), _text(row.why),
        )
        for row in table.rows
    ))  # fmt: skip


def _caused(table: Table) -> str:
    return _grid(("event", "when", "fires", "over", "why"), (
        (_code(_event(link.cause)), _code(link.when), _linked(link.fires), _over(link),
         _text(link.why))
        for link in COUPLING if _machine_of(link.cause) == table.name
    ))  # fmt: skip


def _fired(table: Table) -> list[str]:
    links = [link for link in COUPLING if _machine_of(link.fires) == table.name]
    fired = {_event(link.fires) for link in links}
    others = [event for event in table.events if event not in fired]
    grid = _grid(("event", "cause", "when", "over", "why"), (
        (_code(_event(link.fires)), _linked(link.cause), _code(link.when), _over(link),
         _text(link.why))
        for link in links
    ))  # fmt: skip
    if others:
        rest = f"No link fires {_words(others)}: a call, a completion or the manager itself does."
        return [grid, rest]
    return [grid]


def _illegal(table: Table) -> list[str]:
    missing: dict[str, list[str]] = {}
    for state, event in table.missing():
        missing.setdefault(state.name, []).append(event)
    count = sum(map(len, missing.values()))
    pairs = len(table.states) * len(table.events)
    guarded = any(row.guard is not None for row in table.rows)
    also = " So does an event whose rows all have a guard that is false." if guarded else ""
    grid = _grid(("state", "illegal events"), (
        (_code(state), "every event" if len(events) == len(table.events) else _codes(events))
        for state, events in missing.items()
    ))  # fmt: skip
    return [
        f"{count} of the {pairs} (state, event) pairs have no row. Such an event raises "
        f"`IllegalTransition` and changes nothing.{also}",
        grid,
    ]


def _legend(table: Table) -> str:
    words = ", ".join(_OUTLINES[place][1] for place in _places(table))
    return f"Outlines say where the bytes are: {words}." if words else ""


def _machine(table: Table) -> tuple[str, ...]:
    counts = len(table.states), len(table.rows), len(list(table.missing()))
    return (f"[{table.name}]({table.name}.md)", _text(table.doc), _text(table.owner),
            *map(str, counts))  # fmt: skip


def _flowchart() -> str:
    """Which machine's events fire which events of which other machine."""
    fired: dict[tuple[str, str], list[str]] = {}
    for link in COUPLING:
        ends = _machine_of(link.cause), _machine_of(link.fires)
        fired.setdefault(ends, []).append(_event(link.fires))
    lines = ["flowchart LR", *TABLES]
    for (source, target), events in fired.items():
        label = "<br/>".join(wrap(", ".join(dict.fromkeys(events)), _LABEL_CHARACTERS))
        lines.append(f'{source} -->|"{label}"| {target}')
    return "\n    ".join(lines) + "\n"


def _glossary(kind: str, words: dict[str, str]) -> str:
    return _grid((kind, "what it means"), ((_code(w), _text(doc)) for w, doc in words.items()))


# Markdown.


def _document(*parts: str) -> str:
    return "\n\n".join(part.strip() for part in (MARK, *parts) if part) + "\n"


def _section(title: str, body: str) -> list[str]:
    return [title, body] if body else []


def _fenced(text: str) -> str:
    return f"```mermaid\n{text}```"


def _grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table without the columns that are empty in every row; nothing if there are no rows."""
    cells = list(rows)
    kept = [at for at in range(len(header)) if any(row[at] for row in cells)]
    lines = [header, ["---"] * len(header), *cells] if kept else []
    return "\n".join("| " + " | ".join(line[at] for at in kept) + " |" for line in lines)


def _text(text: str) -> str:
    """Prose that fits in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _code(thing: object) -> str:
    return "" if thing is None else "`" + str(thing).replace("|", "\\|") + "`"


def _codes(things: Iterable[object]) -> str:
    return ", ".join(map(_code, things))


def _words(names: Sequence[str]) -> str:
    """One or more names in a sentence."""
    *most, last = map(_code, names)
    return f"{', '.join(most)} or {last}" if most else last


def _yes(flag: bool) -> str:
    return "yes" if flag else ""


def _over(link: Link) -> str:
    return f"{_code(link.over)}: {_text(OVER[link.over])}"


def _linked(name: str) -> str:
    """`machine.event`, linked to the machine's page."""
    return f"[{_code(name)}]({_machine_of(name)}.md)"


def _machine_of(name: str) -> str:
    return name.partition(".")[0]


def _event(name: str) -> str:
    return name.partition(".")[2]
