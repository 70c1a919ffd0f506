"""Whether a manager takes calls, and if it does not any more, why: the object of `spec/manager.py`.

It is asked at the beginning of every public call, and told whenever a device says that nobody knows
what it holds. Whoever carries out device calls tells it, and nobody else.
"""

from __future__ import annotations

import logging
from typing import Final

from kvstate.errors import DeviceFault, IllegalTransition, KvStateError
from kvstate.plan import Coverage, Plan
from kvstate.spec.compiled import MACHINES, ObjectEvent
from kvstate.spec.manager import CLOSED, OPEN, POISONED

log = logging.getLogger("kvstate")

_CALL: Final = MACHINES.object("manager.call")
_POISON: Final = MACHINES.object("manager.poison")
_CLOSE: Final = MACHINES.object("manager.close")


class Life:
    """OPEN, POISONED or CLOSED. `fault` says why it was poisoned; None if it never was."""

    def __init__(self) -> None:
        self.state = OPEN.code
        self.fault: str | None = None
        self.coverage: Coverage | None = None

    def __str__(self) -> str:
        return "the manager"

    def enter(self, code: int) -> None:
        """Change the state."""
        self.state = code

    @property
    def closed(self) -> bool:
        """It was closed."""
        return self.state == CLOSED.code

    def call(self) -> None:
        """A public call begins. Raises DeviceFault if it is poisoned, IllegalTransition if it is
        closed."""
        if self.coverage is not None or _CALL.decide(self) is None:
            self._fire(_CALL)

    def poison(self, why: str) -> None:
        """From now on it refuses work. If it does so already, the first reason stays."""
        if _POISON.decide(self) is not None:
            self._fire(_POISON)
            self.fault = why
            log.error("the manager is poisoned: %s", why)

    def close(self) -> None:
        """It is closed, for good."""
        self._fire(_CLOSE)

    def _fire(self, event: ObjectEvent) -> None:
        chosen = event.decide(self)
        if chosen is None:
            raise self._refusal(event)
        plan = Plan(self.coverage, None)
        plan.move(event, self, chosen)
        plan.settle()

    def _refusal(self, event: ObjectEvent) -> KvStateError:
        if self.state == POISONED.code:
            return DeviceFault(f"the manager is poisoned and refuses work: {self.fault}")
        return IllegalTransition("the manager", event.name, "CLOSED", "open a new one")
