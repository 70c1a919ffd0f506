"""The guard of every public call: who may call now, and what becomes of a call that is cut short.

A call that returns, or raises an error of ours, has done all of it or nothing. Anything else
(KeyboardInterrupt, MemoryError, RecursionError, whatever a signal handler raises) may come between
any two lines. If nothing was changed by then the manager is as it was, else it is poisoned: see
`spec/manager.py`. The guard itself is one comparison of a byte, one of the thread, and two writes
of that byte; the rows are fired one by one only where somebody counts them. Between the look at the
byte and its first write nothing is called, so nobody else can get in between.

A guard has the parameters of the method that it guards and passes them on one by one, so it is made
as source. Rejected: `*args, **named`, which costs three times as much as the rest of it. Locks,
which would let threads take turns within one step of an engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import update_wrapper, wraps
from inspect import Parameter, signature
from threading import get_ident
from typing import Any, Final, Protocol, TypeVar

from kvstate.device import Device, Stream
from kvstate.life import GUARDS, Life
from kvstate.spec.manager import CALLING, OPEN

_OPEN: Final = OPEN.code
_GUARD: Final = f"""
def {{event}}({{given}}):
    life, caller = self.life, get_ident()
    if life.state or caller != life.at_once:
        life.begin({{event!r}}, frame())
    life.state = {CALLING.code}
    try:
        result = method({{passed}})
    except BaseException as error:
        life.cut(error, {{event!r}}, {{subject}})
        raise
    if life.at_once is None:
        life.end()
    else:
        life.state = {OPEN.code}
    return result
"""
SOURCE: Final = "<kvstate guard>"
"""What stands for the file of a guard, in tracebacks."""
C = TypeVar("C", bound=Callable[..., Any])


def guarded(method: C) -> C:
    """A public call of whatever has a `life`: refused while another one runs, by another thread,
    after a fork, when the manager is closed or poisoned; and marked while it runs. Public calls do
    not call each other."""
    event = method.__name__.lstrip("_")
    named = signature(method).parameters.values()
    places = [one.name for one in named if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    words = [one.name for one in named if one.kind is Parameter.KEYWORD_ONLY]
    assert len(places) + len(words) == len(named), f"{event} has parameters that cannot be passed"
    text = _GUARD.format(
        event=event,
        given=", ".join([*places, *(["*"] if words else []), *words]),
        passed=", ".join([*places, *(f"{word}={word}" for word in words)]),
        subject=places[1] if len(places) > 1 else "None",
    )
    scope: dict[str, Any] = {"method": method, "get_ident": get_ident, "frame": _caller}
    exec(compile(text, SOURCE, "exec"), scope)
    call: Any = scope[event]
    call.__defaults__, call.__kwdefaults__ = _defaults(named)
    update_wrapper(call, method)
    guard: C = known(call)
    return guard


def _caller() -> Any:
    """The frame that has called a guard."""
    return sys._getframe(2)


def _defaults(named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = [one for one in named if one.default is not Parameter.empty]
    places = tuple(one.default for one in given if one.kind is Parameter.POSITIONAL_OR_KEYWORD)
    return places, {one.name: one.default for one in given if one.kind is Parameter.KEYWORD_ONLY}


class Ending(Protocol):
    """Whatever has a device to close."""

    @property
    def device(self) -> Device:
        """What is closed in any case, once it has been begun."""

    def _streams_in_use(self) -> Sequence[Stream]:
        """What the device has to wait for besides its own work."""

    def _check_ends(self) -> None:
        """Raises an error if it cannot end now; nothing has changed then."""


E = TypeVar("E", bound=Ending)


def ending(method: Callable[[E], None]) -> Callable[[E], None]:
    """The call that ends a manager: `method` gives back what may be, and the device is closed
    whatever comes of that. It is CLOSED only then, so that a call that was cut short can be made
    again. In the child of a fork nothing is done."""
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
            try:
                self._check_ends()
            except BaseException:
                life.end()
                raise
            life.change()
        try:
            method(self)
        finally:
            self.device.close(self._streams_in_use())
            if not life.closed:
                life.close()

    return known(call)


def known(function: C) -> C:
    """A function in whose frames calls run: it has `life` among its variables, and `event` unless
    that is its own name."""
    GUARDS.add(function.__code__)
    return function
