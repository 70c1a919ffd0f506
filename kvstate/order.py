"""Order: the first pair of operations that touch the same bytes with nothing between to order them.

Every operation has an *agent* that carries it out: a stream, a copy, the host, or a remote one that
nothing on the device waits for. It comes after what its agent was given before, after what its
agent was told to wait for, and after what the host knew to be done when it issued it. The host
learns that something is done when it is told so (a completion, a quiesce, a synchronised stream, a
settled step) and in no other way: that a stream waits for a copy orders later work of that stream,
and nobody else's. So a missing order is found whenever it is missing, also if the device happened
to be fast enough.

An agent's clock says how far it is ordered behind each other agent. What the host knows to be done
needs no place in a clock, and conflicts with nothing that is issued later: only what is in flight
is kept.

Pure logic; `order_device.py` tells it what a device is asked to do.

Rejected: the order in which devices run copies of one direction. Each of them does that, and none
promises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NoReturn

from kvstate.errors import LawViolation
from kvstate.order_memory import NOTHING, Memory, Pieces, pieces
from kvstate.spec.laws import LAWS

_LAW: Final = next(law for law in LAWS if law.name == "device order")
Names = frozenset[str]
NAMELESS: Final = Names()


class Agent:
    """Whoever carries operations out, each after those that it was given before."""

    __slots__ = ("clock", "done", "last", "launched", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.last = 0
        """The number of its latest operation."""
        self.done = 0
        """Up to which number the host knows them to be done."""
        self.clock: Clock = {}
        """What its next operation comes after."""
        self.launched: Clock = {}
        """What its latest operation comes after."""


Clock = Mapping[Agent, int]
"""Up to which operation of other agents. Replaced, never changed."""


class Operation:
    """Something that an agent does to memory. Its number counts the agent's operations from 1."""

    __slots__ = (
        "_homes", "agent", "clock", "issued", "name", "number", "reads", "reads_names", "writes",
        "writes_names",
    )  # fmt: skip

    def __init__(
        self, agent: Agent, name: str, reads: Pieces = NOTHING, writes: Pieces = NOTHING, *,
        reads_names: Names = NAMELESS, writes_names: Names = NAMELESS, after: Clock | None = None,
    ) -> None:  # fmt: skip
        self.agent, self.name, self.reads, self.writes = agent, name, reads, writes
        self.reads_names, self.writes_names = reads_names, writes_names
        """What has a name and no address: an entry of a table, a staging buffer."""
        self.clock = agent.clock if after is None else later(agent.clock, after)
        self.number = agent.last + 1
        self.issued = ""
        """By which call."""
        self._homes: tuple[Pieces, Pieces] | None = None

    def __str__(self) -> str:
        return f"{self.name} [{self.agent.name}:{self.number}] of {self.issued}"

    @property
    def known(self) -> bool:
        """The host knows that it is done."""
        return self.number <= self.agent.done

    def comes_after(self, other: Operation) -> bool:
        """Something orders it behind an operation that was issued before it."""
        return other.agent is self.agent or other.number <= self.clock.get(other.agent, 0)

    def covers(self, part: Operation) -> bool:
        """It touches all that the other one does, and writes all that it writes."""
        reads = self.reads.within(part.reads.lows, part.reads.highs)
        writes = self.writes.within(part.writes.lows, part.writes.highs)
        return bool(reads.all() and writes.all())

    def behind(self) -> str:
        """What it waits for, in words."""
        own = [f"{self.agent.name}:{self.number - 1}"] if self.number > 1 else []
        waits = own + [f"{agent.name}:{number}" for agent, number in self.clock.items()]
        return " and ".join(waits) or "nothing that the host did not know to be done"

    def homes(self, memory: Memory) -> tuple[Pieces, Pieces]:
        """What it reads and what it writes, at the homes of the frames. Good until an unmap."""
        if self._homes is None:
            self._homes = memory.home(self.reads), memory.home(self.writes)
        return self._homes


def later(clock: Clock, other: Clock) -> Clock:
    """Behind both, as far as the host does not know it to be done."""
    joined = {agent: number for agent, number in clock.items() if number > agent.done}
    for agent, number in other.items():
        if number > max(agent.done, joined.get(agent, 0)):
            joined[agent] = number
    return joined


class Order:
    """What is in flight on one device, and what it is ordered behind."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.host = Agent("host")
        self.streams: list[Agent] = []
        self.flying: list[Operation] = []
        """Issued and not known to be done, in the order of their issue."""
        self.copies: dict[int, Operation] = {}
        """Those whose end was not reported, by token."""
        self.remotes: list[Operation] = []
        """What remote agents are at: no event is behind that, and no quiesce waits for it."""
        self.steps: dict[int, list[Operation]] = {}
        """What belongs to each step that is not settled, the declared part of each stream first."""
        self.violation: str | None = None
        """The first pair that is not ordered, in words: an error would keep the frames that it came
        through. Nothing is looked at after that."""
        self.fresh: str | None = None
        """The same, until a call has raised it."""
        self.alarm: Callable[[str], None] = lambda _: None
        """Is told of it."""
        self.calls = 0
        self.issuer = "the engine, before any call"

    # Whose operations they are.

    def begin(self, call: str) -> None:
        """A public call of the manager begins."""
        self.calls += 1
        self.issuer = f"call {self.calls}, {call}"

    def end(self) -> None:
        """It has returned: what comes now is the engine's own."""
        self.issuer = f"the engine, after call {self.calls}"

    def stream(self, name: str) -> Agent:
        """A new agent whose operations run in the order of their launch."""
        agent = Agent(name)
        self.streams.append(agent)
        return agent

    # What is done to memory.

    def check(self, op: Operation) -> None:
        """Raise LawViolation if something in flight is in its way, or it goes where nothing is."""
        if self.violation is not None:
            return
        op.issued = self.issuer
        gap = self.memory.mapped.missing(op.reads)
        if gap is not None:
            self._report(f"use of an address that is not mapped: {op} reads {self._where(*gap)}")
        gap = self.memory.writable.missing(op.writes)
        if gap is not None:
            self._report(f"write where nothing may be written: {op} writes {self._where(*gap)}")
        for early in (*self.flying, *self.remotes):
            if not op.comes_after(early):
                self._check_pair(early, op)

    def enter(self, op: Operation) -> None:
        """It has been issued."""
        op.agent.last, op.agent.launched = op.number, op.clock
        self.flying.append(op)

    def at_once(self, name: str, reads: Pieces = NOTHING, writes: Pieces = NOTHING,
                writes_names: Names = NAMELESS) -> None:  # fmt: skip
        """The host is about to do something that will be done when it returns."""
        self.check(Operation(self.host, name, reads, writes, writes_names=writes_names))

    def unmap(self, wanted: Pieces) -> None:
        """Raise LawViolation if anything is in flight: even a kernel that only reads near by may
        fault (report S03)."""
        if self.violation is not None:
            return
        op = Operation(self.host, "unmap", writes=wanted)
        op.issued = self.issuer
        for early in (*self.flying, *self.remotes):
            self._check_pair(early, op, "unmap under a ")
        if not self.flying:
            return
        near = self.flying[-1]
        self._report(
            f"unmap beside running work: {op} takes {self._first(wanted)} away, while "
            f"{near} is not known to be done"
        )

    def _check_pair(self, early: Operation, op: Operation, under: str = "") -> None:
        """Raise LawViolation if both touch the same bytes and one of them writes."""
        if early.writes_names or early.reads_names:
            self._check_names(early, op)
        (read, wrote), (reads, writes) = early.homes(self.memory), op.homes(self.memory)
        for kind, user, ours, theirs in (
            ("WAW", "writer", wrote, writes), ("RAW", "writer", wrote, reads),
            ("WAR", "reader", read, writes),
        ):  # fmt: skip
            met = ours.met(theirs)
            if met is not None:
                self._report_pair(under + user if under else kind, early, op, self._where(*met))

    def _check_names(self, early: Operation, op: Operation) -> None:
        for kind, ours, theirs in (
            ("WAW", early.writes_names, op.writes_names),
            ("RAW", early.writes_names, op.reads_names),
            ("WAR", early.reads_names, op.writes_names),
        ):
            if ours & theirs:
                self._report_pair(kind, early, op, min(ours & theirs))

    def _report_pair(self, kind: str, early: Operation, op: Operation, where: str) -> None:
        reads = kind == "RAW"
        did = "reads" if kind in ("WAR", "unmap under a reader") else "writes"
        self._report(
            f"{kind}: {op} {'reads' if reads else 'overwrites'} {where}, which {early} {did}; "
            f"{op.name} waits for {op.behind()}, and {early.name} is not known to be done"
        )

    def _where(self, low: int, high: int) -> str:
        frame = self.memory.frame_at(low)
        place = "on the host" if frame is None else f"in frame {frame}"
        if self.memory.mapped.missing(pieces([(low, high - low)])) is not None:
            place = "where nothing is mapped"
        return f"{high - low} bytes at {low:#x} {place}"

    def _first(self, found: Pieces) -> str:
        return self._where(int(found.lows[0]), int(found.highs[0]))

    def _report(self, finding: str) -> NoReturn:
        line = f"law {_LAW.number} ({_LAW.name}): {finding}"
        self.violation = self.fresh = line
        self.alarm(line)
        raise LawViolation([line])

    # What comes after what.

    def mark(self, agent: Agent) -> Clock:
        """Behind everything that the agent was given, and was told to wait for, so far."""
        return later(agent.clock, {agent: agent.last})

    def everything(self) -> Clock:
        """Behind all that was issued so far."""
        return later({}, {op.agent: op.number for op in (*self.flying, *self.copies.values())})

    def follow(self, agent: Agent, op: Operation) -> None:
        """The agent's next operations come after that one. Nobody else's do."""
        agent.clock = later(agent.clock, later(op.clock, {op.agent: op.number}))

    def copied(self, token: int, op: Operation) -> None:
        """A copy has been issued under that token."""
        op.agent.name = f"copy {token}"
        self.copies[token] = op
        self.enter(op)

    def remote(self, op: Operation) -> None:
        """A remote agent has begun something, at once: whatever streams wait for."""
        self.check(op)
        op.agent.last = op.number
        self.remotes.append(op)

    # What the host is told.

    def answered(self, op: Operation) -> None:
        """A remote agent has said that it is done; if it says so again, nothing is."""
        self.remotes = [one for one in self.remotes if one is not op]
        op.agent.done = op.number

    def learn(self, op: Operation) -> None:
        """An operation is done, and with it all that it came after."""
        self._learn(op.agent, op.number, op.clock)

    def synchronized(self, agent: Agent) -> None:
        """All operations of an agent are done."""
        self._learn(agent, agent.last, agent.launched)

    def ended(self, tokens: Iterable[int]) -> None:
        """The ends of these copies were reported."""
        for token in tokens:
            op = self.copies.pop(token, None)
            if op is not None:
                self.learn(op)

    def quiet(self, agents: Iterable[Agent]) -> None:
        """All copies, and everything issued to these agents, are done."""
        self.ended(tuple(self.copies))
        for agent in agents:
            self.synchronized(agent)

    def free(self, names: Names) -> None:
        """Nothing in flight reads this any more; what else it does is not known to be done."""
        for op in self.flying:
            op.reads_names -= names

    def _learn(self, agent: Agent, number: int, clock: Clock) -> None:
        agent.done = max(agent.done, number)
        for other, reached in clock.items():
            other.done = max(other.done, reached)
        self.flying = [op for op in self.flying if not op.known]

    # Steps.

    def step(self, number: int, op: Operation) -> None:
        """A step was issued that reads and writes this on one stream. Its kernels are yet to
        come."""
        self.check(op)
        self.enter(op)
        self.steps.setdefault(number, []).append(op)

    def launch(self, op: Operation) -> None:
        """The engine has launched an operation on a stream. It is part of the latest step there
        that declared all of it; what writes has to be part of one."""
        self.enter(op)
        for ops in reversed(self.steps.values()):
            declared = next((one for one in ops if one.agent is op.agent), None)
            if declared is not None and declared.covers(op):
                ops.append(op)
                return
        if len(op.writes) and self.violation is None:
            self._report(f"write outside of a step: {op} writes {self._first(op.writes)}")

    def settled(self, number: int) -> None:
        """The engine says that a step is done."""
        for op in self.steps.pop(number, ()):
            self.learn(op)
