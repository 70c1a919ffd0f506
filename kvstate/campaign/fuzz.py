"""Fuzzing: episodes of drawn calls on small random configurations, on any number of workers.

An episode is a configuration, a device and some dozens of calls; all of it follows from the
episode's seed, so the seed of a run repeats the run. What must hold always is checked by the
player after every call. What must be seen *sometimes* (every row and link fired, every
state reached, every refusal met and every law asked at least once) is checked here, over the whole
campaign, so that a check that never ran cannot pass. Directed programs show it; see `directed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from time import monotonic
from typing import Final

from attrs import define, field, frozen
from msgspec.structs import replace

from kvstate import trace
from kvstate.campaign.model import Broken
from kvstate.campaign.player import LOST, Player
from kvstate.campaign.progress import finish_fairly
from kvstate.campaign.rules import draw, draw_config, draw_weights
from kvstate.campaign.shrink import CALLS, Budget, Program, renumbered, shrink, shrink_schedule
from kvstate.device import ByteDevice
from kvstate.spec.compiled import row_key
from kvstate.spec.coupling import COUPLING, TABLES
from kvstate.spec.laws import LAWS
from kvstate.spec.manager import CHANGING, FORKED, MANAGER, POISONED

EPISODE_CALLS: Final = 160
ANY: Final = "any"
"""Stands for one of `SEARCHED`, drawn for each episode."""
SEARCHED: Final = ("adversarial", "latest", "pct")
FAIR_SHARE: Final = 0.4
"""How many episodes end with a fair engine."""
CUT_SHARE: Final = 0.5
"""How many of those end before their time, where something has just been refused."""
MOST_PREEMPTS: Final = 3
"""Of an episode with priorities: the faults that were seen need one or two."""
REFUSALS: Final = ("gate", "budget", "reserve", "limit", "addresses", "HostExhausted", "OutOfRows")
_ELSEWHERE: Final = frozenset(
    row_key(MANAGER.name, row)
    for row in MANAGER.rows
    if FORKED in (row.source, row.target) or (row.target is POISONED and row.source is not CHANGING)
)
"""What no program of calls does: to fork, and to poison while nothing changes, which takes an
engine that breaks an order. `tests/test_guard.py` fires each."""
ROWS: Final = tuple(
    key
    for table in TABLES.values()
    for key in (row_key(table.name, row) for row in table.rows)
    if key not in _ELSEWHERE
)
LINKS: Final = tuple(str(link) for link in COUPLING)
STATES: Final = tuple(
    f"{table.name}.{state}"
    for table in TABLES.values()
    for state in table.states
    if state is not FORKED
)

OpenDevice = Callable[[str, int], ByteDevice]
"""From a stream mode and a seed to a fresh device."""


@frozen
class Failure:
    """Something that did not hold, and the shortest program found that shows it."""

    kind: str
    detail: str
    header: trace.Header
    program: Program
    found_calls: int
    """How long the program was before it was shrunk."""
    cut_short: bool = False
    """There was more to try."""


@define
class Tally:
    """What a campaign has done so far. Tallies of workers add up."""

    episodes: int = 0
    calls: int = 0
    bytes_verified: int = 0
    rows: Counter[str] = field(factory=Counter)
    links: Counter[str] = field(factory=Counter)
    refused: Counter[str] = field(factory=Counter)
    laws: Counter[str] = field(factory=Counter)
    device_calls: Counter[str] = field(factory=Counter)
    poisoned: int = 0
    failures: list[Failure] = field(factory=list)
    interrupted: bool = False
    """It was ended before it had enough."""

    def add(self, other: Tally) -> None:
        """Add another one's numbers."""
        self.episodes += other.episodes
        self.calls += other.calls
        self.bytes_verified += other.bytes_verified
        self.poisoned += other.poisoned
        for mine, theirs in (
            (self.rows, other.rows), (self.links, other.links), (self.refused, other.refused),
            (self.laws, other.laws),
            (self.device_calls, other.device_calls),
        ):  # fmt: skip
            mine.update(theirs)
        self.failures += other.failures

    @property
    def states(self) -> set[str]:
        """The states that were reached: the initial ones, and the targets of rows that fired."""
        reached = {f"{table.name}.{table.initial}" for table in TABLES.values()}
        return reached | {f"{key.partition('.')[0]}.{key.rpartition(' ')[2]}" for key in self.rows}

    def unseen(self) -> list[str]:
        """What a campaign must see and has not seen."""
        missing = [f"row {key}" for key in ROWS if not self.rows[key]]
        missing += [f"link {key}" for key in LINKS if not self.links[key]]
        missing += [f"state {key}" for key in STATES if key not in self.states]
        missing += [f"refusal {place}" for place in REFUSALS if not self.refused[place]]
        missing += [f"law {law.number} ({law.name})" for law in LAWS if not self.laws[law.name]]
        return missing if self.poisoned else [*missing, "a poisoned manager"]


def demanded() -> list[str]:
    """What a campaign must see."""
    return Tally().unseen()


def episode(seed: str, open_device: OpenDevice, streams: str, calls: int = EPISODE_CALLS) -> Tally:
    """Play one episode. A failure is shrunk and is part of what comes back."""
    random = Random(seed)
    streams = random.choice(SEARCHED) if streams == ANY else streams
    device_seed = random.getrandbits(32)
    device = open_device(streams, device_seed)
    header = trace.Header(
        kvstate_trace=trace.VERSION,
        config=draw_config(random, device.granularity_bytes),
        device=device.name,
        streams=streams,
        seed=device_seed,
        fair=random.random() < FAIR_SHARE,
        strict=False,
    )
    cut = random.randrange(calls) if header.fair and random.random() < CUT_SHARE else calls
    weights = draw_weights(random)
    preempts = draw_preempts(random, calls) if streams == "pct" else {}
    player = Player(header, device)
    program: Program = []
    tally = Tally(episodes=1)
    try:
        while len(program) < calls and player.kv.actor.fault is None:
            call = draw(player, random, weights)
            call = replace(call, preempt=preempts.get(len(program)))
            program.append(call)
            refused = player.refused.total()
            player.apply(call)
            if len(program) > cut and player.refused.total() > refused:
                break
        end(player, header)
    except Broken as broken:
        player.abandon()
        tally.failures.append(_shrunk(broken, header, program, open_device))
    except BaseException:  # interrupted: no work may wait for ever when the process ends
        player.abandon()
        raise
    tally.calls = len(program)
    _note(tally, player)
    return tally


def end(player: Player, header: trace.Header) -> None:
    """The end of an episode, for which others give their memory back. Raises Broken."""
    player.device.limit(None)
    if header.fair:
        finish_fairly(player)
    player.finish()


def draw_preempts(random: Random, calls: int) -> dict[int, int]:
    """At which calls somebody is preempted, and at which step from there."""
    most = random.randint(0, MOST_PREEMPTS)
    return {random.randrange(calls): random.randint(1, 8) for _ in range(most)}


def play(header: trace.Header, program: Program, open_device: OpenDevice) -> Player:
    """Play a whole program on a fresh device. Raises Broken, with everything given back."""
    player = Player(header, open_device(header.streams, header.seed))
    try:
        for call in program:
            player.apply(call)
        end(player, header)
    except BaseException:
        player.abandon()
        raise
    return player


def played(
    header: trace.Header, program: Program, open_device: OpenDevice, calls: int = CALLS
) -> Tally:
    """Play a whole program on a fresh device. A failure is shrunk, by playing up to that many
    calls, and is part of what comes back."""
    tally = Tally(episodes=1, calls=len(program))
    try:
        _note(tally, play(header, program, open_device))
    except Broken as broken:
        tally.failures.append(_shrunk(broken, header, program, open_device, calls))
    return tally


def episodes(seed: int, worker: int = 0) -> Iterator[str]:
    """The seeds of one worker's episodes, without end."""
    number = 0
    while True:
        yield f"{seed}/{worker}/{number}"
        number += 1


def run(
    seeds: Iterator[str], open_device: OpenDevice, streams: str,
    enough: Callable[[Tally], bool], tell: Callable[[Tally], None],
) -> None:  # fmt: skip
    """Play episodes until `enough` says so; `tell` is given the tally of each.

    One more device stays open meanwhile: on a card the first one of a process costs 0.1 s, and so
    does the last.
    """
    total = Tally()
    with closing(open_device("eager", 0)):
        for seed in seeds:
            if enough(total):
                return
            done = episode(seed, open_device, streams)
            total.add(done)
            tell(done)


def until(seconds: float | None, calls: int | None) -> Callable[[Tally], bool]:
    """Enough after that many seconds from now, or that many calls, or the first failure."""
    deadline = None if seconds is None else monotonic() + seconds

    def enough(tally: Tally) -> bool:
        late = deadline is not None and monotonic() >= deadline
        return late or bool(tally.failures) or (calls is not None and tally.calls >= calls)

    return enough


def save(failure: Failure, folder: Path) -> Path:
    """Write a failure's program as a trace; its path. The same program gets the same name."""
    lines = b"\n".join(trace.encode(call) for call in failure.program)
    name = f"{_slug(failure.kind)}-{_digest(trace.encode(failure.header) + lines)}.jsonl"
    trace.write(folder / name, failure.header, failure.program)
    return folder / name


def _shrunk(
    broken: Broken, header: trace.Header, program: Program, open_device: OpenDevice,
    calls: int = CALLS,
) -> Failure:  # fmt: skip
    """The shortest program that fails alike, on the simplest schedule, which is looked for again
    when there are fewer calls, and what that says. A lost device cannot be opened again by a
    process."""
    kind, detail, found_calls = broken.kind, broken.detail, len(program)

    def fails(header: trace.Header, candidate: Program) -> bool:
        nonlocal detail
        try:
            play(header, candidate, open_device)
        except Broken as again:
            if again.kind == kind:
                detail = again.detail
                return True
        return False

    if kind == LOST or not fails(header, program):
        return Failure(kind, detail, header, program, found_calls)
    header, program = shrink_schedule(header, program, fails)
    budget = Budget(partial(fails, header), calls)
    program = shrink(program, budget)
    header, program = shrink_schedule(header, program, fails)
    numbered = renumbered(program)
    program = numbered if fails(header, numbered) else program
    return Failure(kind, detail, header, program, found_calls, budget.spent)


def _note(tally: Tally, player: Player) -> None:
    tally.rows.update(player.coverage.rows)
    tally.links.update(player.coverage.links)
    tally.refused.update(player.refused)
    tally.laws.update(player.laws)
    tally.device_calls.update(player.device.calls)
    tally.bytes_verified = player.bytes_verified
    tally.poisoned = int(player.kv.actor.fault is not None)


def _slug(text: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=4).hexdigest()
