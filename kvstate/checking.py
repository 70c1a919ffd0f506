"""One look at the laws, when a caller wants it: where `debug=True` all the time costs too much."""

from __future__ import annotations

from kvstate.manager import Manager
from kvstate.values import instance


def check(kv: Manager) -> None:
    """Check every law that speaks of what a manager is at one time.

    Raises LawViolation with all that does not hold, and poisons nothing. Laws about what a call has
    changed want `debug=True`. Raises as any call does if the manager is closed or poisoned. Cost:
    O(everything): milliseconds for hundreds of sequences.
    """
    instance("kv", kv, Manager)
    kv.check_laws()
