"""hypothesis over the same rules as `kvstate fuzz`: stateful machines whose classes are made from
the rules.

One hypothesis rule for each of ours, with one integer that seeds whatever it draws. A failure is
shrunk by our own delta debugging over the recorded calls and is added to the error as a program;
hypothesis' shrinker is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from kvstate import trace
from kvstate.campaign.fuzz import play
from kvstate.campaign.model import Broken
from kvstate.campaign.player import Player
from kvstate.campaign.report import program_text
from kvstate.campaign.rules import RULES, draw_config, dressed
from kvstate.campaign.shrink import Budget, shrink
from kvstate.device import ByteDevice
from kvstate.gpu import open_device
from kvstate.manager import Manager

SEEDS = st.integers(0, 2**32 - 1)
SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Machine(RuleBasedStateMachine):
    """Plays drawn calls. Subclasses made below say on which device, and carry the rules."""

    device, streams = "host", "eager"

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        device = self.open(self.streams, seed)
        config = draw_config(Random(seed), device.granularity_bytes)
        self.header = trace.Header(
            kvstate_trace=trace.VERSION, config=config, device=self.device, streams=self.streams,
            strict=False,
        )  # fmt: skip
        self.program: list[trace.AnyCall] = []
        self.player = Player(self.header, device)

    def open(self, streams: str, seed: int) -> ByteDevice:
        return open_device(self.device, streams=streams, seed=seed)

    def play(self, name: str, seed: int) -> None:
        random = Random(seed)
        call = RULES[name][1](self.player, random)
        if call is not None and self.player.kv.actor.fault is None:
            self.program.append(dressed(self.player, call, random))
            self.guarded(lambda: self.player.apply(self.program[-1]))

    def guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Broken as broken:
            self.player.abandon()
            program = self.shrunk(broken.kind)
            lines = [trace.encode(record).decode() for record in (self.header, *program)]
            broken.add_note("shortest program:\n" + program_text(program))
            broken.add_note("as a trace:\n" + "\n".join(lines))
            raise

    def shrunk(self, kind: str) -> list[trace.AnyCall]:
        def fails(program: list[trace.AnyCall]) -> bool:
            try:
                play(self.header, program, self.open)
            except Broken as again:
                return again.kind == kind
            return False

        return shrink(self.program, Budget(fails, 10_000))

    def teardown(self) -> None:
        if hasattr(self, "player") and not self.player.kv.closed:
            self.guarded(self.player.finish)


def machine(device: str, streams: str) -> type[Machine]:
    """The class for one device and stream mode: one hypothesis rule for each of ours."""

    def hypothesis_rule(name: str) -> Any:
        def fire(self: Machine, seed: int) -> None:
            self.play(name, seed)

        fire.__name__ = name
        return rule(seed=SEEDS)(fire)

    members = {name: hypothesis_rule(name) for name in RULES}
    title = f"{device}_{streams}"
    return type(title, (Machine,), members | {"device": device, "streams": streams})


@pytest.mark.parametrize("streams", ["eager", "adversarial"])
@pytest.mark.parametrize("device", ["host", "null", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_machine(device: str, streams: str) -> None:
    run_state_machine_as_test(machine(device, streams), settings=SETTINGS)


def test_a_broken_manager_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine can fail: a manager that forgets a drop's host slots is found at once."""
    leave = Manager.drop

    def forgets(self: Manager, seq: Any, after: Any = None) -> None:
        leave(self, seq, after)
        self.host.counts[0] += 1

    monkeypatch.setattr(Manager, "drop", forgets)
    with pytest.raises(Broken, match="law 16") as caught:
        run_state_machine_as_test(machine("host", "eager"), settings=SETTINGS)
    program = caught.value.__notes__[0].splitlines()[1:]
    assert program[-1].startswith("drop(")
    assert len(program) <= 6
    text = caught.value.__notes__[1].splitlines()[1:]
    assert isinstance(trace.decode_call(text[-1].encode(), 1), trace.Drop)
