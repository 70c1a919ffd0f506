"""Calls that cannot finish and copies that fail: what must be left, and what must not."""

from __future__ import annotations

from typing import Final

from kvstate import trace
from kvstate.errors import DeviceError
from kvstate.gpu import HostDevice
from kvstate.manager import Manager
from tests.corpus.case import (
    Case,
    See,
    config,
    counted,
    expect,
    found,
    frames,
    grew,
    matched,
    opened,
    pages,
    planted,
    refused,
    said,
    slots,
    state,
    wrote,
)
from tests.faults.planted import Fault

LOUD: Final = "a tier that cannot be had is refused"
IDS: Final = [1, 2, 3, 4, 5, 6]
SCHEDULES: Final = tuple(range(8))


def _no_host_memory() -> None:
    device = HostDevice()
    device.fail_next("host_reserve")
    try:
        Manager(config(), device).close()
    except DeviceError:
        expect("law 24 (clean end)", "nothing is left", device.ledger().empty, True)
    else:
        expect(LOUD, "a manager without the host tier of its configuration", "open", "refused")
    finally:
        device.close()


def mapped(wanted: int, kind: str) -> See:
    """How many frames the device has mapped."""
    return See("mapped frames", lambda player: len(player.device.ledger().mappings), wanted, kind)


FAILURES: Final = (
    Case(
        name="a suspend that finds the host full leaves the sequence as it is",
        entries=("S04", "B119"),
        law="law 18 (steps in order)",
        fault=planted("suspend changes the sequence before it reserves host room"),
        config=config(slots=2),
        program=(
            *said(1, range(4)),
            trace.Suspend(seq=1),
            trace.Poll(),
            slots(HELD=2),
            *said(2, range(10, 14)),
            trace.Step(step=3, seqs=[2], tokens=[2]),
            trace.Suspend(seq=2, error="HostExhausted"),
            refused("HostExhausted", 1),
            trace.Settle(step=3),
            trace.Drop(seq=2),
            state(2, "DROPPED"),
            trace.Resume(seq=2),
        ),
    ),
    Case(
        name="without a host tier a suspend is refused, and a drop makes room",
        entries=("B107",),
        law="law 11 (leaving releases)",
        fault=Fault(
            "a suspend takes whatever host room there is",
            "kvstate/manager.py",
            "        room = self.host.room(blocks - len(there))\n",
            "        room = self.host.room(min(blocks - len(there), self.host.free))\n",
            "B107",
        ),
        config=config(slots=0, frames=4),
        program=(
            *said(1, range(8)),
            *said(2, range(8, 16)),
            trace.Step(step=3, seqs=[1], tokens=[1], error="OutOfFrames"),
            trace.Suspend(seq=2, error="HostExhausted"),
            state(2, "ACTIVE"),
            trace.Drop(seq=2),
            *grew(1, 8),
        ),
    ),
    Case(
        name="a resume whose memory cannot be mapped has taken nothing",
        entries=("B50",),
        law="law 11 (leaving releases)",
        fault=Fault(
            "addresses are taken before the memory is there",
            "kvstate/admission.py",
            "        fresh = not seq.slots\n        self.actor.run(plan)\n",
            "        fresh = range_.number not in self.arena.ranges\n"
            "        if fresh:\n            self.arena.reserve(range_)\n"
            "        self.actor.run(plan)\n"
            "        if fresh:\n            self.arena.unreserve(range_)\n"
            "        fresh = not seq.slots\n",
            "B50",
        ),
        config=config(),
        program=(
            *said(1, range(8)),
            trace.Suspend(seq=1),
            trace.Poll(),
            trace.Trim(),
            trace.Resume(seq=1, fail={"map": 1}, error="DeviceError"),
            state(1, "SUSPENDED"),
            frames(MAPPED=0, POOLED=2),
            slots(HELD=4),
            trace.Resume(seq=1),
        ),
    ),
    Case(
        name="what was mapped for a copy that is refused is unmapped",
        entries=("B121", "B124"),
        law="law 19 (contiguity)",
        fault=planted("a failed copy issue leaves its mappings"),
        config=config(),
        program=(
            *said(1, range(8)),
            trace.Suspend(seq=1),
            trace.Poll(),
            trace.Trim(),
            trace.Resume(seq=1, fail={"copy": 1}, error="DeviceError"),
            state(1, "SUSPENDED"),
            frames(MAPPED=0, POOLED=2),
            trace.Resume(seq=1),
        ),
    ),
    Case(
        name="a growth that fails takes back what it added and nothing else",
        entries=("B130",),
        law="law 19 (contiguity)",
        fault=Fault(
            "a growth is written down before it is done",
            "kvstate/stepping.py",
            "        self.actor.run(plan)\n        self.flight.settle(plan)\n        for seq,",
            "        self.flight.settle(plan)\n        self.actor.run(plan)\n        for seq,",
            "B130",
        ),
        config=config(),
        program=(
            *said(1, range(8)),
            trace.Resize(seq=1, tokens=16, fail={"map": 1}, error="DeviceError"),
            frames(MAPPED=2, POOLED=2),
            *grew(1, 8),
        ),
    ),
    Case(
        name="a map that failed is not taken for done",
        entries=("B154",),
        law="law 19 (contiguity)",
        fault=Fault(
            "a failed device call is undone and not told",
            "kvstate/act.py",
            "            self._undo(undo)\n            raise\n        except DeviceFault",
            "            self._undo(undo)\n        except DeviceFault",
            "B154",
        ),
        config=config(),
        program=(
            *said(1, range(4)),
            *opened(2),
            trace.Step(step=3, seqs=[1, 2], tokens=[4, 4], fail={"map": 1}, error="DeviceError"),
            frames(MAPPED=1),
            trace.Step(step=3, seqs=[1, 2], tokens=[4, 4]),
            trace.Settle(step=3),
        ),
    ),
    Case(
        name="an unmap that failed is not taken for done",
        entries=("B125",),
        law="law 19 (contiguity)",
        fault=Fault(
            "an unmap that failed is not told",
            "kvstate/reclaim.py",
            "            spare.settle()\n            raise\n",
            "",
            "B125",
        ),
        config=config(frames=4, adopt=False),
        program=(
            *said(1, range(8)),
            trace.Drop(seq=1),
            *opened(2),
            trace.Step(step=3, seqs=[2], tokens=[16], fail={"unmap": 1}, error="DeviceError"),
            frames(PARKED=2, ABSENT=2),
            trace.Step(step=3, seqs=[2], tokens=[16]),
            frames(MAPPED=4),
            trace.Settle(step=3),
        ),
    ),
    Case(
        name="a host tier that cannot be had is refused",
        entries=("S24",),
        law=LOUD,
        fault=Fault(
            "a manager does without the host memory that it was told to have",
            "kvstate/core.py",
            "            self.host.address = self.device.host_reserve(size_bytes)\n",
            "            try:\n"
            "                self.host.address = self.device.host_reserve(size_bytes)\n"
            "            except DeviceError:\n"
            "                self.host.address = 0\n",
            "S24",
        ),
        run=_no_host_memory,
    ),
    Case(
        name="a poisoned manager refuses work and releases nothing",
        entries=("S20",),
        law="model",
        fault=Fault(
            "a poisoned manager goes on",
            "spec/manager.py",
            '        Row("call", OPEN, CALLING, "a public call begins"),\n',
            '        Row("call", OPEN, CALLING, "a public call begins"),\n'
            '        Row("call", POISONED, CALLING, "it goes on"),\n',
            "S20",
        ),
        config=config(),
        program=(
            *said(1, range(8)),
            *said(2, range(8, 16)),
            trace.Suspend(seq=2),
            trace.Drop(seq=1, fail={"fill": 1}, error="DeviceFault"),
            mapped(4, "situation not reached"),
            trace.Poll(error="DeviceFault"),
            trace.Trim(error="DeviceFault"),
            trace.Resume(seq=2, error="DeviceFault"),
            mapped(4, "law 3 (no reuse in flight)"),
        ),
    ),
    Case(
        name="a write-out that failed has kept nothing",
        entries=("B127",),
        law="law 1 (conservation)",
        fault=planted("a failed write-out stays in the index"),
        config=config(),
        program=(
            *said(1, IDS),
            trace.Close(seq=1, fail={"complete": 1}),
            slots(FILLING=3),
            trace.Poll(),
            counted("failed_copies", 1),
            slots(FREE=16),
            found([*IDS, 0], 0),
            *opened(2, [*IDS, 0]),
            matched(2, 0),
        ),
    ),
    Case(
        name="a load that failed leaves nothing behind and can be tried again",
        entries=("B128",),
        law="law 11 (leaving releases)",
        fault=Fault(
            "a load that failed keeps its range",
            "spec/coupling.py",
            '    Link("sequence.unload", "range.free", "range", "the memory is parked"),\n',
            "",
            "B128",
        ),
        config=config(frames=4),
        program=(
            *said(1, range(7)),
            trace.Suspend(seq=1),
            trace.Poll(),
            trace.Resume(seq=1, fail={"complete": 1}),
            trace.Poll(),
            state(1, "SUSPENDED"),
            frames(MAPPED=0, PARKED=2),
            *said(2, range(10, 18)),
            trace.Resume(seq=1),
            *grew(1, 1),
        ),
    ),
    Case(
        name="a copy that failed ends, as one that succeeds",
        entries=("B155",),
        law="law 10 (one terminal)",
        fault=Fault(
            "only success is told to who waits",
            "kvstate/flight.py",
            "        delivered = list(completions)\n",
            "        delivered = [one for one in completions if one.ok]\n",
            "B155",
        ),
        config=config(),
        program=(
            *said(1, range(4)),
            trace.Suspend(seq=1, fail={"complete": 1}),
            slots(COMING=2),
            trace.Poll(),
            counted("failed_copies", 1),
            state(1, "DROPPED"),
            trace.Resume(seq=1),
        ),
    ),
    Case(
        name="a copy that failed is nobody's prefix, whoever inherited it meanwhile",
        entries=("B115",),
        law="law 4 (publish after write)",
        fault=Fault(
            "a hit that failed stays in the index",
            "kvstate/flight.py",
            "            if not ok and not transfer.inward:\n                leaving =",
            "            if not ok and transfer.outward:\n                leaving =",
            "B115",
        ),
        config=config(slots=0, spans="off"),
        program=(
            *said(1, IDS),
            trace.Create(seq=2, max_tokens=16, prompt=[*IDS, 7]),
            trace.Resume(seq=2, fail={"complete": 1}),
            matched(2, 6),
            trace.Close(seq=1),
            pages(2, *["LOADING_COMMITTED"] * 3),
            *opened(3, [*IDS, 7]),
            matched(3, 0),
            trace.Poll(),
            state(2, "DROPPED"),
            found([*IDS, 7], 0),
            *wrote(3, [*IDS, 7]),
            trace.Resume(seq=2),
            matched(2, 6),
        ),
    ),
    Case(
        name="what was read from a copy that fails is not there",
        entries=("B149",),
        law="bytes",
        fault=Fault(
            "a page counts as there once its copy was issued",
            "kvstate/lines.py",
            "    readable = owner.pages.states[node.ordinal] == COMMITTED.code\n",
            "    readable = owner.pages.states[node.ordinal] in (COMMITTED.code, 4)\n",
            "B149",
        ),
        config=config(),
        program=(
            *said(1, IDS),
            trace.Suspend(seq=1),
            trace.Poll(),
            trace.Resume(seq=1, fail={"complete": 1}),
            pages(1, *["LOADING_COMMITTED"] * 3),
            *opened(2, [*IDS, 7]),
            trace.Poll(),
            state(1, "SUSPENDED"),
            matched(2, 0),
            *wrote(2, [*IDS, 7]),
            trace.Resume(seq=1),
        ),
    ),
)
