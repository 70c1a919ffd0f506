"""Threads: a manager belongs to the one that made it, and in debug says so to any other.

The manager has no locks: what a call finds must stay so until its end. A call from another thread
is a bug of the caller that shows as wrong bytes, much later and seldom. In debug it is refused
instead, by name, before anything is looked at. What may cross threads is listed in
`docs/embedding.md`. Rejected: a lock around every call. Threads that take turns still interleave
the calls of one step, and a lock would only hide that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import isfunction
from threading import current_thread
from typing import Any

from kvstate.errors import IllegalTransition


class Owner:
    """The thread that something belongs to."""

    def __init__(self) -> None:
        self.thread = current_thread()

    def check(self, subject: object, event: str, state: str) -> None:
        """Raise IllegalTransition, naming both, if another thread is calling."""
        caller = current_thread()
        if caller is not self.thread:
            reason = f"it belongs to thread {self.thread.name!r}, and {caller.name!r} called"
            raise IllegalTransition(str(subject), event, state, reason)


def own(kv: Any) -> None:
    """Let the calling thread be the only one that may call a manager, and what it has made."""
    kv.owner = owner = Owner()
    for name, function in _public(type(kv)).items():
        if isfunction(function):
            setattr(kv, name, _owned(getattr(kv, name), name, owner, kv))


def _public(kind: type) -> dict[str, object]:
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        found |= {name: one for name, one in vars(base).items() if not name.startswith("_")}
    return found


def _owned(method: Callable[..., Any], name: str, owner: Owner, kv: Any) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        owner.check("the manager", name, "CLOSED" if kv.closed else "OPEN")
        return method(*args, **named)

    return call
