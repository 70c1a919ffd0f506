"""The k-th fallible call of a scenario, for every k.

A scenario is played once without a failure, counting the points at which each of its calls could
have failed. Then it is played once for each of them, with that point failing; with that and the
next one, which is where what was done is taken back; with that and all that follow in the call;
and for each copy, with an end that never comes. After the failure every check of the fuzz goes on.
A call that raised is made again, as an engine would, and if it works everything after it must be as
if nothing had failed.

What `Outcome` says of a run is judged in `judge`; nothing else is allowed to come of a failure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
from attrs import define, field, frozen

from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.device import ByteDevice
from tests.faults.scenarios import Scenario

Fail = dict[str, int | list[int]]
OpenDevice = Callable[[str], ByteDevice]
MODES: Final = ("once", "twice", "on", "never")
FATAL: Final = ("scrub failed", "filling failed")
"""Why one failure may poison: freed bytes could not be overwritten, and might be read."""
ONWARD: Final = 40
"""From the k-th point on that many fail: all that are left of the call."""


@frozen
class Plan:
    """One run: which call of the program is told to fail, and how."""

    scenario: Scenario
    streams: str
    mode: str
    at: int
    fail: Fail

    def __str__(self) -> str:
        call = self.scenario.program[self.at]
        return f"{self.scenario.name}, {self.streams}: {self.mode}, {self.fail} in {call}"


@frozen
class Base:
    """What a scenario is without a failure."""

    errors: list[str | None]
    """What each call raises."""
    points: list[int]
    """At how many points each call could have failed."""
    copies: list[int]
    """How many copies each call issues."""


@define
class Outcome:
    """What came of a run."""

    raised: str | None = None
    """What the call that was told to fail raised."""
    fault: str | None = None
    """Why the manager was poisoned."""
    problem: str | None = None
    """What must not be."""


@define
class Tally:
    """Many runs."""

    runs: Counter[str] = field(factory=Counter)
    outcomes: Counter[str] = field(factory=Counter)
    problems: list[str] = field(factory=list)
    points: Counter[str] = field(factory=Counter)
    """Where calls can fail, by the mode of streams."""
    copies: int = 0

    def add(self, plan: Plan, outcome: Outcome) -> None:
        self.runs[plan.mode] += 1
        came = "poisoned" if outcome.fault else outcome.raised or "nothing raised"
        self.outcomes[f"{plan.mode}: {came}"] += 1
        if outcome.problem:
            self.problems.append(f"{plan}: {outcome.problem}")

    def merge(self, other: Tally) -> None:
        for name in ("runs", "outcomes", "points"):
            getattr(self, name).update(getattr(other, name))
        self.problems += other.problems
        self.copies += other.copies


def base_of(scenario: Scenario, streams: str, open_device: OpenDevice) -> Base:
    """Play a scenario without a failure."""
    player = _player(scenario, streams, open_device)
    base = Base([], [], [])
    for call in scenario.program:
        points, copies = player.device.points, player.device.calls.get("copy", 0)
        base.errors.append(player.apply(call).error)
        base.points.append(player.device.points - points)
        base.copies.append(player.device.calls.get("copy", 0) - copies)
    player.finish()
    return base


def plans_of(scenario: Scenario, streams: str, base: Base) -> Iterator[Plan]:
    """Every run of a scenario with a failure."""
    for at, count in enumerate(base.points):
        for nth in range(1, count + 1):
            yield Plan(scenario, streams, "once", at, {"any": nth})
            yield Plan(scenario, streams, "twice", at, {"any": [nth, nth + 1]})
            onward = list(range(nth, nth + ONWARD))
            yield Plan(scenario, streams, "on", at, {"any": onward})
    for at, count in enumerate(base.copies):
        for nth in range(1, count + 1):
            yield Plan(scenario, streams, "never", at, {"hang": nth})


def play(plan: Plan, base: Base, open_device: OpenDevice) -> Outcome:
    """One run, with every check."""
    player = _player(plan.scenario, plan.streams, open_device)
    outcome = Outcome()
    try:
        outcome.raised, found = _calls(player, plan)
        player.finish()
    except Broken as broken:
        player.abandon()
        outcome.problem = f"{broken.kind}: {broken}"
        return outcome
    outcome.fault = player.kv.actor.fault
    outcome.problem = _judge(plan, base, outcome, found)
    return outcome


def _calls(player: Player, plan: Plan) -> tuple[str | None, list[str | None]]:
    """What the call raised that was told to fail, and what all calls raised besides that."""
    raised, found = None, []
    for at, call in enumerate(plan.scenario.program):
        if at == plan.at:
            told = msgspec.structs.replace(call, fail=plan.fail)
            raised = player.apply(told).error
            if raised != "DeviceError":
                found.append(raised)
                continue
        found.append(player.apply(call).error)
    return raised, found


def _judge(plan: Plan, base: Base, outcome: Outcome, found: list[str | None]) -> str | None:
    """What must not have come of it."""
    reason = outcome.fault or ""
    if outcome.raised == "DeviceFault" and not reason:
        return "the device does not know what it holds, and the manager goes on"
    if plan.mode == "never":
        return None if not reason or "have not ended" in reason else f"poisoned by {reason}"
    if plan.mode == "once" and reason and not any(word in reason for word in FATAL):
        return f"one failure has poisoned it: {reason}"
    if outcome.raised == "DeviceError" and not reason and found != base.errors:
        return f"after it was tried again, calls raised {found} instead of {base.errors}"
    return None


def _player(scenario: Scenario, streams: str, open_device: OpenDevice) -> Player:
    device = open_device(streams)
    return Player(scenario.header(max(4096, device.granularity_bytes), streams), device)
