"""Whether a manager takes calls, and if it does not, why: the object of `spec/manager.py`.

It knows the thread and the process that a manager belongs to. `guard.py` asks it at the beginning
and at the end of every public call; whoever is about to change something tells it; so does whoever
hears from a device that nobody knows what it holds.

A call that was cut short between any two lines, also of the guard, may leave CALLING or CHANGING
behind with nobody inside. So before a call is refused, the stack is looked at: whether one really
runs. Rejected: to remember who runs. Two attributes cannot be written at once either.
"""

from __future__ import annotations

import logging
import os
from threading import current_thread, get_ident
from types import CodeType, FrameType
from typing import Final
from weakref import ref

from kvstate.errors import DeviceFault, IllegalTransition, KvStateError, NestedCall
from kvstate.handles import Handle
from kvstate.plan import Coverage, Plan
from kvstate.spec.compiled import MACHINES, ObjectEvent
from kvstate.spec.manager import CALLING, CHANGING, CLOSED, FORKED, MANAGER, OPEN, POISONED

log = logging.getLogger("kvstate")

_CALL: Final = MACHINES.object("manager.call")
_CHANGE: Final = MACHINES.object("manager.change")
_RETURN: Final = MACHINES.object("manager.return")
_POISON: Final = MACHINES.object("manager.poison")
_FORK: Final = MACHINES.object("manager.fork")
_CLOSE: Final = MACHINES.object("manager.close")
_CALLING: Final = CALLING.code
_CHANGING: Final = CHANGING.code
_RUNNING: Final = (_CALLING, _CHANGING)

GUARDS: Final[set[CodeType]] = set()
"""The code in whose frames calls run. Each has `life` among its variables, and the parameters."""
_LIVES: Final[set[ref[Life]]] = set()
"""Of this process. Entries go by themselves, in one step each: a WeakSet's go in Python, where an
interrupt would be lost."""


class Life:
    """The state of one manager. `fault` says why it was poisoned; None if it never was."""

    def __init__(self) -> None:
        self.state = OPEN.code
        self.at_once: int | None = None
        """The thread whose calls may begin and end without another look while it is OPEN: nobody's,
        if rows are counted, and from the end on."""
        self.fault: str | None = None
        self._coverage: Coverage | None = None
        self.pid = os.getpid()
        self.own()
        _LIVES.add(ref(self, _LIVES.discard))

    def __str__(self) -> str:
        return "the manager"

    def enter(self, code: int) -> None:
        """Change the state."""
        if code not in (OPEN.code, *_RUNNING):
            self.at_once = None
        self.state = code

    def own(self) -> None:
        """It belongs to the calling thread."""
        self.thread, self.thread_name = get_ident(), current_thread().name
        self.at_once = self.thread

    @property
    def coverage(self) -> Coverage | None:
        """Counts the rows that fire, if anybody wants to know."""
        return self._coverage

    @coverage.setter
    def coverage(self, coverage: Coverage | None) -> None:
        self._coverage = coverage
        self.at_once = self.thread if coverage is None else None

    @property
    def closed(self) -> bool:
        """It was closed."""
        return self.state == CLOSED.code

    @property
    def over(self) -> bool:
        """It was closed, or is the copy of a fork: there is nothing to give back."""
        return self.state in (CLOSED.code, FORKED.code)

    # Calls.

    def begin(self, event: str, caller: FrameType | None) -> None:
        """A public call begins, from that frame. Raises DeviceFault if it is poisoned, and
        IllegalTransition if it is not to be called now, or not by this thread."""
        self.look(event, caller)
        if not self.enter_call():
            raise self._refusal(event)

    def enter_call(self) -> bool:
        """Something begins that is like a call, whoever asks for it; false if nothing may."""
        chosen = _CALL.decide(self)
        if chosen is not None:
            self._go(_CALL, chosen.code)
        return chosen is not None

    def look(self, event: str, caller: FrameType | None) -> None:
        """Something is read that the manager's calls change, whatever else has become of it.
        Raises IllegalTransition as `begin` does."""
        self.check_thread(event)
        if self.state == FORKED.code:
            raise self._refusal(event)
        if self.state in _RUNNING:
            self._check_running(event, caller)

    def check_thread(self, event: str) -> None:
        """Raise IllegalTransition, naming both, if another thread is calling."""
        if get_ident() != self.thread:
            owner, caller = self.thread_name, current_thread().name
            reason = f"it belongs to thread {owner!r}, and {caller!r} called"
            raise IllegalTransition("the manager", event, self.state_name, reason)

    def change(self) -> None:
        """The call that runs begins to change something; nothing, if none runs."""
        if self._coverage is not None and self.state in _RUNNING:
            self._fire(_CHANGE)
        elif self.state == _CALLING:
            self.state = _CHANGING

    def end(self) -> None:
        """A public call is over."""
        if self.state in _RUNNING:
            self._go(_RETURN, OPEN.code)

    def cut(self, error: BaseException, event: str, subject: object) -> None:
        """A public call about something has raised. If that is no error of its own and it has begun
        to change something, nobody knows how far it came."""
        own = isinstance(error, KvStateError) and not isinstance(error, NestedCall)
        if self.state == _CHANGING and not own:
            what = _described(event, subject)
            self.poison(f"interrupted: {type(error).__name__} in {what}; close it")
        self.end()

    def poison(self, why: str) -> None:
        """From now on it refuses work. If it does so already, the first reason stays."""
        if _POISON.decide(self) is not None:
            self.fault = why
            self._fire(_POISON)
            log.error("the manager is poisoned: %s", why)

    def fork(self) -> None:
        """This is the child of a fork."""
        if _FORK.decide(self) is not None:
            self._fire(_FORK)

    def close(self) -> None:
        """It is closed, for good."""
        if _CLOSE.decide(self) is None:
            raise self._refusal("close")
        self._fire(_CLOSE)

    # Inside.

    @property
    def state_name(self) -> str:
        """The name of its state."""
        return MANAGER.states[self.state].name

    def _check_running(self, event: str, caller: FrameType | None) -> None:
        """Refuse a call from inside a call. If none runs, the last one was cut short."""
        running = self._running(caller)
        if running is not None:
            reason = (
                f"{running} runs, and this came from inside it: from a finaliser, a signal handler "
                "or a callback; call when it has returned"
            )
            raise NestedCall("the manager", event, self.state_name, reason)
        if self.state == _CHANGING:
            self.poison("interrupted: a call was cut short on its way out; close it")
        self.end()

    def _running(self, frame: FrameType | None) -> str | None:
        """The call that runs, in words. Cost: the depth of the stack."""
        while frame is not None:
            found = frame.f_locals if frame.f_code in GUARDS else {}
            if found.get("life") is self:
                event = found.get("event", frame.f_code.co_name)
                about = (one for name, one in found.items() if name != "self")
                return _described(
                    event, next((one for one in about if isinstance(one, Handle)), None)
                )
            frame = frame.f_back
        return None

    def _go(self, event: ObjectEvent, target: int) -> None:
        """Fire what every call fires: only written, unless somebody counts."""
        if self._coverage is None:
            self.state = target
        else:
            self._fire(event)

    def _fire(self, event: ObjectEvent) -> None:
        plan = Plan(self.coverage, None)
        plan.move(event, self)
        plan.settle()

    def _refusal(self, event: str) -> KvStateError:
        if self.state == POISONED.code:
            return DeviceFault(f"the manager is poisoned and refuses work: {self.fault}")
        reason = "it was closed; open a new one"
        if self.state == FORKED.code:
            reason = (
                f"process {self.pid} made it, and this is its child {os.getpid()}, where nothing "
                "of its memory is; open a new one here, on a device of its own"
            )
        return IllegalTransition("the manager", event, self.state_name, reason)


def _described(event: str, subject: object) -> str:
    """A call in words: its name, and what it is about. Nothing of somebody else's is asked."""
    return f"{event} of {subject}" if isinstance(subject, Handle) else event


def _forked() -> None:
    for one in tuple(_LIVES):
        life = one()
        if life is not None:
            life.fork()


os.register_at_fork(after_in_child=_forked)
