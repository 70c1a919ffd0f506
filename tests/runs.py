"""The standard scenarios, played call by call on a manager and nothing else.

No checks between the calls, and no handles: those are looked up in the manager's own books, so that
a result that was lost on its way out of a call is found again. `tests/interrupts.py` cuts calls
short.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstate import Manager, TensorView, trace
from kvstate.gpu import open_device
from kvstate.pattern import rows
from kvstate.sequence import Sequence
from kvstate.spec.sequence import ACTIVE
from tests.corpus.case import config, grew, opened
from tests.device.fake_card import held
from tests.device.fake_driver import open_fake
from tests.faults.scenarios import IDS, SCENARIOS, Scenario

KEY: Final = 77
"""Of the bytes that steps write; their position makes them differ."""


MADE: Final = {
    "cuMemCreate": "cuMemRelease", "cuMemAddressReserve": "cuMemAddressFree",
    "cuMemAlloc": "cuMemFree", "cuMemHostAlloc": "cuMemFreeHost",
    "cuMemHostRegister": "cuMemHostUnregister", "cuModuleLoadData": "cuModuleUnload",
    "cuStreamCreate": "cuStreamDestroy", "cuEventCreate": "cuEventDestroy",
}  # fmt: skip
"""What the driver makes, and what takes it back."""
CARDS: Final = ("cuda", "fake")
HELD: Final = Counter[str]()
"""How many of each the process has, from the first device that was opened here on."""


def counted_driver() -> None:
    """Count what the driver makes and takes back."""
    api: Any = import_module("cuda.bindings.driver")

    def counted(name: str, function: Any, step: int) -> Any:
        @wraps(function)
        def call(*args: Any) -> Any:
            answer = function(*args)
            HELD[name] += 0 if answer[0] else step
            return answer

        return call

    for make, free in MADE.items() if not hasattr(api.cuMemCreate, "__wrapped__") else ():
        setattr(api, make, counted(make, getattr(api, make), 1))
        setattr(api, free, counted(make, getattr(api, free), -1))


def opened_device(kind: str) -> Any:
    """A device; the fake one is the card's on a driver without a card. What the driver of a card
    makes is counted; and a card is waited for in each poll, so that two runs come to the same."""
    if kind == "fake":
        return open_fake()
    if kind != "cuda":
        return open_device(kind)
    counted_driver()
    device: Any = open_device(kind)
    poll, traffic = device.poll, device.traffic

    def waits() -> Any:
        with device.driver.here():
            device.wait(lambda: traffic.are_over(list(traffic.pending)))
        return poll()

    device.poll = waits
    return device


class Run:
    """A scenario on a device, as far as it was played."""

    def __init__(self, scenario: Scenario, kind: str) -> None:
        self.kind, self.device = kind, opened_device(kind)
        header = scenario.header(max(4096, self.device.granularity_bytes), "eager")
        self.config, self.calls = header.config, calls_of(scenario)
        self.opened: Manager | None = None
        self.made = 0

    @property
    def kv(self) -> Manager:
        assert self.opened is not None
        return self.opened

    def open(self) -> None:
        self.opened = Manager(self.config, self.device)

    def seq(self, uid: int) -> Sequence:
        return self.kv.sequences[uid]

    def wrote(self) -> None:
        """The engine's part of the steps in flight: it writes their tokens at once."""
        if self.device.memory is None:
            return
        row = self.kv.geometry.row_bytes
        for step in self.kv.flight.steps.values():
            for seq, start, count in zip(
                step.seqs, step.start_tokens.tolist(), step.count_tokens.tolist(), strict=True
            ):
                if count and seq.base is not None and start >= seq.length_tokens:
                    data = rows(KEY, start, count, row).tobytes()
                    self.device.poke(seq.base + start * row, data)

    def fingerprint(self) -> tuple[object, ...]:
        """What two runs of one scenario have in common, bytes and all."""
        kv = self.kv
        seqs = [
            (s.uid, s.state_name, s.length_tokens, s.scheduled_tokens, s.committed_tokens,
             s.capacity_tokens, s.held_tokens, bytes(s.pages.states), self._bytes(s))
            for s in kv.sequences.values()
        ]  # fmt: skip
        blocks = [(node.ordinal, node.key, node.slot is None) for node in kv.reuse.index]
        flight = sorted(kv.flight.transfers), sorted(kv.flight.steps)
        return seqs, list(kv.gpu.counts), list(kv.host.counts), len(kv.arena.ranges), blocks, flight

    def _bytes(self, seq: Sequence) -> int:
        if self.device.memory is None or seq.state != ACTIVE.code or not seq.length_tokens:
            return 0
        size = seq.length_tokens * self.kv.geometry.row_bytes
        return hash(self.device.peek(seq.base or 0, size))


Call = tuple[str, Callable[[Run], object]]
NAMES: Final = {
    "close": "close_sequence", "clear": "clear_reuse", "stop": "stop_committing",
    "commiteach": "commit_each",
}  # fmt: skip
"""Of calls that a trace calls otherwise."""
PLAYED: Final = (
    *SCENARIOS,
    Scenario(
        "tokens that are named one by one",
        config(frames=8, write_through="on_commit"),
        (
            *opened(1), *opened(2), trace.Step(step=3, seqs=[1, 2], tokens=[4, 4]),
            trace.Settle(step=3, accepted=[4, 3]),
            *(trace.CommitEach(seqs=[1, 2], tokens=[at, at]) for at in range(3)),
            trace.Poll(), trace.Stop(seq=2), *grew(1, 1), trace.Poll(), trace.Close(seq=1),
        ),
    ),
    Scenario(
        "copies that are waited for one by one",
        config(frames=8, write_through="off"),
        (
            *opened(1), *opened(2), *grew(1, 4), *grew(2, 4),
            trace.Suspend(seq=1), trace.Suspend(seq=2), trace.Poll(deliver=[2]), trace.Wait(seq=1),
            trace.Resume(seq=1), trace.Rewind(seq=1, tokens=2), trace.Resume(seq=2),
            trace.Fork(seq=2, child=3, max_tokens=8), trace.Close(seq=2),
        ),
    ),
)  # fmt: skip
"""Between them they make every public call."""


def calls_of(scenario: Scenario) -> list[Call]:
    """The calls of a scenario: to open, those of its program, some that only look, and to close."""
    names: dict[int, int] = {}
    steps: dict[int, int] = {}
    kinds = [type(one).__name__.lower() for one in scenario.program]
    calls = [_call(one, names, steps) for one in scenario.program]
    played = [(NAMES.get(kind, kind), call) for kind, call in zip(kinds, calls, strict=True)]
    return [("open", Run.open), *played, *LOOKS, ("end", lambda run: run.kv.close())]


def _call(call: Any, names: dict[int, int], steps: dict[int, int]) -> Any:
    """The call, by the numbers that the manager gives: they count up."""
    if isinstance(call, trace.Create):
        names[call.seq] = len(names) + 1
        return lambda run: run.kv.create(call.prompt, call.max_tokens, commit=call.commit)
    if isinstance(call, trace.Dummy):
        names[call.seq] = len(names) + 1
        return lambda run: run.kv.dummy(call.tokens)
    if isinstance(call, trace.Fork):
        parent, names[call.child] = names[call.seq], len(names) + 1
        return lambda run: run.seq(parent).fork(call.max_tokens)
    if isinstance(call, trace.Step):
        members = [names[name] for name in call.seqs]
        steps[call.step] = steps.get(0, 0) + 1
        steps[0] = steps[call.step]
        return lambda run: run.kv.step(run.kv.batch([run.seq(one) for one in members]), call.tokens)
    if isinstance(call, trace.Settle):
        number = steps[call.step]
        return lambda run: run.kv.settle(run.kv.flight.steps[number], call.accepted)
    if isinstance(call, trace.CommitEach):
        members = [names[name] for name in call.seqs]
        return lambda run: run.kv.commit_each(
            run.kv.batch([run.seq(one) for one in members]), call.tokens
        )
    uid = names[call.seq] if hasattr(call, "seq") else 0
    if isinstance(call, trace.Suspend | trace.Drop | trace.Close):
        name = type(call).__name__.lower()
        after = call.after

        def leave(run: Run) -> object:
            seq, event = run.seq(uid), run.device.record(None) if after else None
            return getattr(seq, name)(event)

        return leave
    makers: dict[Any, Callable[[Run], object]] = {
        trace.Resume: lambda run: run.seq(uid).resume(),
        trace.Resize: lambda run: run.seq(uid).resize(call.tokens),
        trace.Rewind: lambda run: run.seq(uid).rewind(call.tokens),
        trace.Commit: lambda run: run.seq(uid).commit(call.tokens),
        trace.Stop: lambda run: run.seq(uid).stop_committing(),
        trace.TensorsAll: lambda run: run.kv.tensors_all(run.seq(uid), call.tokens),
        trace.Wait: lambda run: run.kv.wait(run.seq(uid)),
        trace.Poll: lambda run: run.kv.poll(call.deliver),
        trace.Clear: lambda run: run.kv.clear_reuse(),
        trace.Trim: lambda run: run.kv.trim(call.keep),
    }
    return makers[type(call)]


def _drained(run: Run) -> object:
    publisher = run.kv.events()
    drained = publisher.drain()
    publisher.close()
    return drained


def _changed(run: Run) -> object:
    """A batch that changes."""
    batch = run.kv.batch(())
    for seq in tuple(run.kv.sequences.values()):
        batch.add(seq)
    for seq in tuple(batch):
        batch.remove(seq)
    return batch


def _viewed(run: Run) -> object:
    """Views of whoever has memory, if the device has any."""
    running = [seq for seq in tuple(run.kv.sequences.values()) if seq.base is not None]
    views = [run.kv.tensors(seq, 0)[0] for seq in running if run.device.memory is not None]
    return [_taken(view) for view in views]


def _viewed_whole(run: Run) -> object:
    """The same, all layers at once and as long as they may become."""
    running = [seq for seq in tuple(run.kv.sequences.values()) if seq.base is not None]
    views = [run.kv.tensors_all(seq) for seq in running if run.device.memory is not None]
    return [_taken(view) for view in views]


def _taken(view: TensorView) -> object:
    return view.__dlpack__() if view.memory[0] == "cuda" else np.asarray(view)


def _read(run: Run) -> object:
    """What a graph says that was captured just now."""
    running = [seq for seq in tuple(run.kv.sequences.values()) if seq.stay is not None]
    return run.kv.reads([(seq, seq.stay) for seq in running])


LOOKS: Final[tuple[Call, ...]] = (
    ("ended", lambda run: run.kv.ended()),
    ("probe_reuse", lambda run: run.kv.probe_reuse(IDS)),
    ("admits", lambda run: run.kv.admits(4)),
    ("fits", lambda run: run.kv.fits(4)),
    ("largest_max_tokens", lambda run: run.kv.largest_max_tokens(2)),
    ("stats", lambda run: run.kv.stats()),
    ("check_laws", lambda run: run.kv.check_laws()),
    ("tensors", _viewed),
    ("tensors_all", _viewed_whole),
    ("reads", _read),
    ("events", _drained),
    ("batch", _changed),
)
"""Calls that no trace has."""


def left(kind: str = "") -> Counter[str]:
    """What of devices the process has: mappings by kind, files, and what a driver has made. Of a
    card's addresses the driver is asked: threads that touch its host memory have pages that look
    like reservations."""
    found = HELD + held()
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, access, *_, name = (line + " -").split()[:6] if line.count(" ") < 6 else line.split()[:6]
        if "kvstate-frames" in line:
            found["mapped frames"] += 1
        elif access == "---p" and name == "-" and kind not in CARDS:
            found["reservations"] += 1
    for file in Path("/proc/self/fd").iterdir():
        try:
            found["files of frames"] += "kvstate-frames" in str(file.readlink())
        except OSError:
            continue
    return found
