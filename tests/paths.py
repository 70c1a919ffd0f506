"""Shortest programs: for every row that a caller can make fire, the fewest calls that do it.

A breadth-first search over public calls on a tiny configuration, one sequence at a time. What is
found depends on the tables and the manager alone, so a new row gets its program, and with it its
tests, without anybody writing one. Rows that take two sequences at a time are found by drawing
calls, and shrinking what fires them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from random import Random

from attrs import define, field, frozen

from kvstate import trace
from kvstate.campaign.fuzz import EPISODE_CALLS
from kvstate.campaign.legal import refusal
from kvstate.campaign.player import Look, Player
from kvstate.campaign.rules import draw, draw_weights
from kvstate.campaign.shrink import Budget, shrink
from kvstate.config import Config, GpuTier, HostTier, LayerSpec
from kvstate.gpu import NullDevice
from kvstate.spec.compiled import row_key
from kvstate.spec.coupling import TABLES
from kvstate.spec.manager import MANAGER
from kvstate.spec.table import Row
from kvstate.view import view

Program = tuple[trace.AnyCall, ...]


def header(frame_bytes: int = 4096, *, retain: bool = False) -> trace.Header:
    """Four tokens a frame, two a block: a block is half a frame."""
    config = Config(
        layers=[LayerSpec(kv_heads=1, head_dim=frame_bytes // 16, dtype="float16")],
        gpu=GpuTier(budget_bytes=4 * frame_bytes, frame_bytes=frame_bytes, map_ahead_frames=1),
        host=HostTier(3 * frame_bytes),
        tokens_per_block=2,
        max_tokens=8,
        max_sequences=2,
        spans="all",
        write_through="on_commit",
        retain=retain,
        scrub=True,
    )
    return trace.Header(kvstate_trace=trace.VERSION, config=config, strict=False)


SEQUENCES = 2
"""How many sequences a program may create, one after the other."""
DEPTH = 8
EPISODES = 400
_TWO: list[trace.AnyCall] = [
    trace.Create(seq=1, max_tokens=8),
    trace.Create(seq=2, max_tokens=8),
    trace.Resume(seq=1),
    trace.Resume(seq=2),
    trace.Step(step=3, seqs=[1, 2], tokens=[4, 2]),
    trace.Settle(step=3),
    trace.Commit(seq=1, tokens=[0, 0, 0, 0]),
    trace.Commit(seq=2, tokens=[0, 0]),
]
_MIXED: list[trace.AnyCall] = [
    *_TWO,
    trace.Close(seq=1),
    trace.Poll(fail={"copy": 1}),
    trace.Create(seq=5, max_tokens=8, prompt=[0, 0, 0, 0, 0]),
    trace.Resume(seq=5),
    trace.Drop(seq=2),
    trace.Drop(seq=5),
]
"""A hit that is copied from another sequence and from the host at once, until both are gone."""
_ALIKE = [1, 1, 0, 0, 1, 0, 0, 0]
_READ: list[trace.AnyCall] = [
    trace.Create(seq=1, max_tokens=8, prompt=[1, 1, 0, 1, 1, 0, 0, 0]),
    trace.Resume(seq=1),
    trace.Step(step=3, seqs=[1], tokens=[6]),
    trace.Settle(step=3),
    trace.Commit(seq=1, tokens=[1, 1, 0, 1, 1, 0]),
    trace.Close(seq=1),
    trace.Trim(keep=0),
    trace.Create(seq=5, max_tokens=8, prompt=_ALIKE),
    trace.Create(seq=6, max_tokens=8, prompt=_ALIKE),
    trace.Resume(seq=5),
    trace.Resume(seq=6),
    trace.Close(seq=5),
    trace.Create(seq=7, max_tokens=8, prompt=[*_ALIKE, 0, 0, 1]),
    trace.Resume(seq=7),
    trace.Suspend(seq=6),
    trace.Drop(seq=7),
    trace.Close(seq=6),
]
"""A block that only the host has is cut from the index while a hit of it is read."""
_LEFT: list[trace.AnyCall] = [
    trace.Create(seq=1, max_tokens=8),
    trace.Resume(seq=1),
    trace.Step(step=2, seqs=[1], tokens=[4]),
    trace.Settle(step=2),
    trace.Commit(seq=1, tokens=[0, 0, 0, 0]),
    trace.Close(seq=1),
]
_TWICE: list[trace.AnyCall] = [
    *_LEFT,
    trace.Poll(),
    trace.Create(seq=3, max_tokens=8, prompt=[0, 0, 0, 0, 0]),
    trace.Create(seq=4, max_tokens=8, prompt=[0, 0, 0, 0, 0]),
    trace.Resume(seq=3),
    trace.Resume(seq=4),
    trace.Poll(),
    trace.Close(seq=4),
    trace.Resize(seq=3, tokens=8),
    trace.Create(seq=5, max_tokens=8),
    trace.Resume(seq=5),
    trace.Resize(seq=5, tokens=8),
]
"""Two copies of what the host has: one becomes a span, which takes the place of the other."""
RARE: tuple[list[trace.AnyCall], ...] = (
    _TWICE,
    [*_TWO, trace.Suspend(seq=2), trace.Poll(), trace.Resume(seq=2), trace.Drop(seq=1)],
    [*_TWO, trace.Close(seq=1), trace.Drop(seq=2)],
    _MIXED,
    [*_MIXED, trace.Poll()],
    _READ,
    [*_READ, trace.Trim(keep=0)],
)
"""Programs whose last call fires what is hardly ever drawn."""
RETAINING: tuple[list[trace.AnyCall], ...] = (
    _LEFT,
    [*_LEFT, trace.Poll()],
    [*_LEFT, trace.Poll(), trace.Trim()],
    [
        *_LEFT,
        trace.Poll(),
        trace.Create(seq=3, max_tokens=8, prompt=[0, 0, 0, 0, 0]),
        trace.Resume(seq=3),
    ],
)
"""The same where parked ranges retain what was committed."""

ROWS: dict[str, tuple[str, Row]] = {
    row_key(table.name, row): (table.name, row)
    for table in TABLES.values()
    for row in table.rows
    if table is not MANAGER
}
"""Those that calls of a program fire. The manager's own are in test_guard.py."""


@frozen
class Node:
    """A program, and what its last two calls fired."""

    program: Program
    fired: frozenset[str] = frozenset()


@define
class Found:
    """What the search has found."""

    rows: dict[str, Program] = field(factory=dict)
    """The shortest program whose last call fires the row."""
    pairs: dict[tuple[str, str], Program] = field(factory=dict)
    """The shortest program whose last two calls fire these rows, the second where the first
    led."""
    states: dict[str, Program] = field(factory=dict)
    """The shortest program that leaves a sequence in the state."""
    retaining: set[str] = field(factory=set)
    """The rows that fire only where parked ranges retain something."""


@cache
def search() -> Found:
    """Search once; later calls get the same answer."""
    found, seen = Found(), set()
    queue = deque([Node(())])
    while queue:
        node = queue.popleft()
        for child, player in _children(node):
            _note(found, node, child, player)
            signature = _signature(player)
            if signature not in seen and len(child.program) < DEPTH:
                seen.add(signature)
                queue.append(child)
            player.abandon()
    _by_drawing(found)
    return found


def _by_drawing(found: Found) -> None:
    """Rows that take two sequences: drawn programs that fire them, shrunk while they do."""
    for program in (*RARE, *RETAINING):
        for key in set(ROWS).difference(found.rows):
            if _fires(key, program, retain=program in RETAINING):
                found.rows[key] = tuple(program)
                found.retaining |= {key} if program in RETAINING else set()
    for seed in range(EPISODES):
        missing = set(ROWS).difference(found.rows)
        if not missing:
            return
        for key, program in _drawn(Random(seed), missing):
            short = shrink(program, Budget(partial(_fires, key)))
            found.rows[key] = tuple(short)


def _drawn(random: Random, missing: set[str]) -> Iterator[tuple[str, list[trace.AnyCall]]]:
    """The missing rows that one episode fires, each with the calls up to there."""
    player, program = play(()), list[trace.AnyCall]()
    weights = draw_weights(random)
    while missing and len(program) < EPISODE_CALLS and player.kv.actor.fault is None:
        program.append(draw(player, random, weights))
        before = Counter(player.coverage.rows)
        player.apply(program[-1])
        for key in missing.intersection(Counter(player.coverage.rows) - before):
            missing.remove(key)
            yield key, list(program)
    player.abandon()


def _fires(key: str, program: Iterable[trace.AnyCall], *, retain: bool = False) -> bool:
    """Whether the last call of the program fires the row."""
    player, before = play((), retain=retain), 0
    for call in program:
        before = player.coverage.rows.get(key, 0)
        player.apply(call)
    fired = player.coverage.rows.get(key, 0) > before
    player.abandon()
    return fired


def _children(node: Node) -> Iterator[tuple[Node, Player]]:
    """The node's program with one more legal call, played."""
    parent = play(node.program)
    legal = [call for call in _choices(node.program) if refusal(parent, call) is None]
    parent.abandon()
    for call in legal:
        player = play(node.program)
        before = Counter(player.coverage.rows)
        done = player.apply(call)
        fired = frozenset(Counter(player.coverage.rows) - before) & ROWS.keys()
        if done.error is None or fired:
            yield Node((*node.program, call), fired), player
        else:
            player.abandon()


def _note(found: Found, node: Node, child: Node, player: Player) -> None:
    for key in child.fired:
        found.rows.setdefault(key, child.program)
    for pair in _pairs(node.fired, child.fired):
        found.pairs.setdefault(pair, child.program)
    for seq in player.kv.sequences.values():
        found.states.setdefault(seq.state_name, child.program)


def play(program: Program, *, retain: bool = False) -> Player:
    """A player that has played the program, still open."""
    player = Player(header(retain=retain), NullDevice(), Look(0))
    for call in program:
        player.apply(call)
    return player


def _pairs(first: frozenset[str], second: frozenset[str]) -> Iterator[tuple[str, str]]:
    for one in first:
        for other in second:
            machine, row = ROWS[one]
            next_machine, next_row = ROWS[other]
            if machine == next_machine and row.target is next_row.source:
                yield one, other


def _choices(program: Program) -> list[trace.AnyCall]:
    """The calls worth trying next."""
    names = [call.seq for call in program if isinstance(call, trace.Create)]
    closed = {call.seq for call in program if isinstance(call, trace.Close)}
    calls: list[trace.AnyCall] = [
        trace.Poll(),
        trace.Trim(),
        trace.Trim(fail={"unmap": 1}),
    ]
    live = [name for name in names if name not in closed]
    if not live and len(names) < SEQUENCES:
        calls.append(trace.Create(seq=len(names) + 1, max_tokens=8))
    settled = {call.step for call in program if isinstance(call, trace.Settle)}
    steps = [call.step for call in program if isinstance(call, trace.Step)]
    calls += [trace.Settle(step=step) for step in steps if step not in settled][:1]
    for name in live:
        calls += _of_sequence(name, len(steps) + 1)
    return calls


def _of_sequence(name: int, step: int) -> list[trace.AnyCall]:
    return [
        trace.Resume(seq=name),
        trace.Resume(seq=name, fail={"complete": 1}),
        trace.Step(step=step, seqs=[name], tokens=[3]),
        trace.Commit(seq=name, tokens=[7, 7]),
        trace.Rewind(seq=name, tokens=1),
        trace.Resize(seq=name, tokens=8),
        trace.Resize(seq=name, tokens=3),
        trace.Stop(seq=name),
        trace.Suspend(seq=name),
        trace.Suspend(seq=name, fail={"complete": 1}),
        trace.Drop(seq=name),
        trace.Drop(seq=name, after=True),
        trace.Close(seq=name),
    ]


def _signature(player: Player) -> object:
    """What two programs must share to be worth searching only once."""
    seen = view(player.kv)
    sequences = [
        (
            s.state,
            s.scheduled,
            s.settled,
            s.known,
            s.capacity,
            s.pages,
            s.committing,
            s.transfer is None,
        )
        for s in seen.sequences
    ]
    ranges = [(r.state, r.frame_states, r.pages, len(r.holders)) for r in seen.ranges]
    steps = [(s.landed, [write[1:] for write in seen.living(s)]) for s in seen.steps]
    waited = {s.transfer for s in seen.sequences}
    transfers = [(t.token in waited, t.outward, t.inward) for t in seen.transfers]
    ended = sorted(one.ok for one in player.device._ended.values())  # type: ignore[attr-defined]
    return repr((sequences, ranges, steps, transfers, seen.host_states, ended, len(player.seqs)))
