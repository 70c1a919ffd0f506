"""Planted faults of the guard: patches as in planted.py.

No call that returns shows them. Each is found by calls of one name that are cut short, or
disturbed, line by line, in one scenario (`tests/interrupts.py`).
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from tests.faults.planted import Fault


@frozen
class CutFault(Fault):
    """A fault, and what shows it."""

    call: str = ""
    """Whose lines are played."""
    wrong: str = "broken books"
    """As which kind it is found."""
    what: str = "KeyboardInterrupt"
    """What happens at the lines."""
    device: str = "null"
    scenario: str = "growth of a batch"
    within: str = ""
    """Of which files the lines are."""


CUT_FAULTS: Final = (
    CutFault(
        "a plan is carried out by a call that says it changes nothing",
        "kvstate/act.py",
        "        self.life.change()\n        acts = plan.acts\n",
        "        acts = plan.acts\n",
        call="resize",
    ),
    CutFault(
        "states are settled by a call that says it changes nothing",
        "kvstate/flight.py",
        "        self.actor.life.change()\n        plan.settle()\n",
        "        plan.settle()\n",
        call="settle",
    ),
    CutFault(
        "a row is taken by a call that says it changes nothing",
        "kvstate/admission.py",
        'close a sequence first"))\n        self.life.change()\n',
        'close a sequence first"))\n',
        call="create",
    ),
    CutFault(
        "the end of memory is taken for an error of ours",
        "kvstate/life.py",
        "isinstance(error, KvStateError) and not",
        "isinstance(error, Exception) and not",
        call="resize",
        what="MemoryError",
    ),
    CutFault(
        "a call from inside a call is let in",
        "kvstate/life.py",
        "        if running is not None:\n            reason",
        "        if running is not None and not event:\n            reason",
        call="resize",
        what="finaliser",
    ),
    CutFault(
        "the device is closed only if all went well",
        "kvstate/guard.py",
        "        finally:\n            self.device.close(self._streams_in_use())\n",
        "            self.device.close(self._streams_in_use())\n        finally:\n",
        call="end",
        wrong="left open",
    ),
    CutFault(
        "a device that was interrupted while it was closed counts as closed",
        "gpu/simulated.py",
        "        done, captured = self.streams.drain(), [",
        "        self.closed = True\n        done, captured = self.streams.drain(), [",
        call="end",
        wrong="process keeps",
        device="host",
    ),
    CutFault(
        "a manager that could not be opened keeps what it had reserved",
        "kvstate/core.py",
        "                give(address)\n",
        "                pass\n",
        call="open",
        wrong="device",
    ),
    CutFault(
        "what a card's driver has made is noted a line too late",
        "gpu/held.py",
        "        self.update(zip((name,), map(function, *([one] for one in args)), strict=True))\n"
        "        error, handle = self[name]\n",
        "        answer = function(*args)\n"
        "        self[name] = answer\n"
        "        error, handle = answer\n",
        call="open",
        wrong="process keeps",
        device="fake",
        within="gpu/held",
    ),
    CutFault(
        "a card's context is left only once",
        "gpu/driver.py",
        "            finally:\n"
        "                driver.leave(depth)\n"
        "        finally:\n"
        "            driver.leave(depth)\n",
        "            finally:\n"
        "                driver.leave(depth)\n"
        "        finally:\n"
        "            pass\n",
        call="resume",
        wrong="context",
        device="fake",
        within="gpu/driver",
    ),
    CutFault(
        "a card's context is given back a line before that is noted",
        "gpu/driver.py",
        "strike(self.retained, map(self.api.cuDevicePrimaryCtxRelease, (self.device,)))",
        "self.api.cuDevicePrimaryCtxRelease(self.device)\n            self.retained.pop()",
        call="end",
        wrong="close raises",
        device="fake",
        within="gpu/driver",
    ),
)
