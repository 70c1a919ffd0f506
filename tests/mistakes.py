"""Mistakes of the manager that are planted while a test runs, and what the laws say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from attrs import field, frozen

from kvstate import Manager
from kvstate.errors import LawViolation
from kvstate.gpu import HostDevice
from kvstate.observe import observe
from kvstate.spec.laws import LAWS
from tests.conftest import small

Patch = pytest.MonkeyPatch


@frozen
class Mistake:
    """A mistake, the calls that show it, and what is said of it then."""

    name: str
    plant: Callable[[Patch], None]
    play: Callable[[Manager], object]
    law: str
    says: str
    config: dict[str, Any] = field(factory=dict)
    streams: str = "eager"

    def show(self, patch: Patch) -> None:
        """Play it without the mistake, where all is well, and with it."""
        with opened(self.config, self.streams) as kv:
            self.play(kv)
        self.plant(patch)
        with opened(self.config, self.streams) as kv:
            with pytest.raises(LawViolation) as caught:
                self.play(kv)
            assert found(caught.value, self.law, self.says), caught.value


def nothing(*args: object, **named: object) -> None:
    """Instead of what should be done."""


def forgets(owner: type[object], name: str) -> Callable[[Patch], None]:
    """A method that does nothing."""
    return lambda patch: patch.setattr(owner, name, nothing)


def around(
    owner: type[object] | ModuleType, name: str, wrong: Callable[..., object]
) -> Callable[[Patch], None]:
    """A method that does something else: `wrong` is given what it was, and its arguments."""
    right = getattr(owner, name)

    def call(*args: object, **named: object) -> object:
        return wrong(right, *args, **named)

    return lambda patch: patch.setattr(owner, name, call)


@contextmanager
def opened(config: dict[str, Any], streams: str = "eager") -> Iterator[Manager]:
    """A manager whose books will be wrong: its device gives everything back. Without the order
    check, which sees what is issued wrongly before any law does."""
    kv = Manager(small(**config), HostDevice(streams=streams, seed=1))
    observe(kv, debug=True)
    try:
        yield kv
    finally:
        kv.life.poison("its books are wrong")
        kv.close()


def found(error: LawViolation, law: str, says: str) -> bool:
    """Whether that law says that."""
    (number,) = {one.number for one in LAWS if one.name == law}
    return any(
        line.startswith(f"law {number} ({law}): ") and says in line for line in error.violations
    )
