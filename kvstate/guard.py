"""The guard of every public call: who may call now, and what becomes of a call that is cut short.

A call that returns, or raises an error of ours, has done all of it or nothing. Anything else
(KeyboardInterrupt, MemoryError, RecursionError, whatever a signal handler raises) may come between
any two lines. If nothing was changed by then the manager is as it was, else it is poisoned: see
`spec/manager.py`. The guard itself is one comparison of a byte, one of the thread, and three writes
of that byte; the rows are fired one by one only where somebody counts them.

Rejected: locks, which would let threads take turns within one step of the engine. And a context
manager inside every call, which costs several times as much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from kvstate.device import Device
from kvstate.errors import KvStateError
from kvstate.life import GUARDS, Life, described
from kvstate.spec.manager import CALLING, CHANGING, OPEN

_OPEN: Final = OPEN.code
_CALLING: Final = CALLING.code
_CHANGING: Final = CHANGING.code


class Guarded(Protocol):
    """Whatever has calls that are guarded."""

    life: Life


S = TypeVar("S", bound=Guarded)
P = ParamSpec("P")
T = TypeVar("T")


def guarded(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A public call, refused while another one runs, by another thread, after a fork, when the
    manager is closed or poisoned; and marked while it runs. Public calls do not call each other."""
    event = method.__name__.lstrip("_")

    @wraps(method)
    def call(self: S, /, *args: P.args, **named: P.kwargs) -> T:
        life = self.life
        if life.state or get_ident() != life.at_once:
            life.begin(event, sys._getframe(1))
        life.state = _CALLING
        try:
            result = method(self, *args, **named)
        except KvStateError:
            life.end()
            raise
        except BaseException as error:
            life.cut(error, described(event, *args, *named.values()))
            raise
        if life.state > _CHANGING or life.at_once is None:
            life.end()
        else:
            life.state = _OPEN
        return result

    return known(call)


class Ending(Guarded, Protocol):
    """Whatever has a device to close."""

    @property
    def device(self) -> Device:
        """What is closed in any case."""


E = TypeVar("E", bound=Ending)


def ending(method: Callable[[E], None]) -> Callable[[E], None]:
    """The call that ends a manager: `method` gives everything back, unless the manager is poisoned,
    and the device is closed whatever comes of that. It is CLOSED only then, so that a call that was
    cut short can be made again. In the child of a fork nothing is done."""
    event = method.__name__

    @wraps(method)
    def call(self: E) -> None:
        life: Life | None = getattr(self, "life", None)
        if life is None or life.closed:
            return
        if life.over:
            life.close()
            return
        caller = sys._getframe(1)
        life.look(event, caller)
        if life.state == _OPEN:
            life.begin(event, caller)
            life.change()
        try:
            if life.state == _CHANGING:
                method(self)
        finally:
            self.device.close()
            life.close()

    return known(call)


def known(function: T) -> T:
    """A function in whose frames calls run: it has `life` and `event` among its variables."""
    code: Any = function
    GUARDS.add(code.__code__)
    return function
