"""What the driver has made for us, so that nothing of it is lost when a call is cut short.

An interrupt may come between any two lines, also between the return of the driver and the line that
notes what it has made. So what is made is noted in the very step in which the driver makes it, and
struck out in the one in which it is taken back: both steps run in C, where no interrupt comes in
between. Whoever closes a device then finds all of it, and nothing twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from kvstate.errors import DeviceError

if TYPE_CHECKING:
    from kvstate.gpu.driver import Driver

_HANDLE: Final = itemgetter(1)


def strike(notes: list[Any], taken_back: Iterable[Any]) -> None:
    """Strike out the last note as the driver takes back what it was of."""
    deque(zip(map(notes.pop, (-1,)), taken_back, strict=True), 0)


class Held(dict[Any, tuple[Any, ...]]):
    """Things of one kind, by names of ours: what the driver answered when it was asked for each."""

    def __init__(self, driver: Driver, make: str, free: str) -> None:
        super().__init__()
        self.driver, self._make, self._free = driver, make, free
        driver.held.append(self)

    def make(self, name: object, *args: Any) -> Any:
        """Let the driver make one; its handle. Raises DeviceError, and then there is none."""
        function = self.driver.function(self._make)
        self.update(zip((name,), map(function, *([one] for one in args)), strict=True))
        error, handle = self[name]
        if error:
            del self[name]
            self.driver.fail(self._make, error)
        return handle

    def handle(self, name: object) -> Any:
        """What the driver calls it."""
        return self[name][1]

    @property
    def handles(self) -> list[Any]:
        """Of all that were made."""
        return [answer[1] for answer in self.values() if not answer[0]]

    def free(self, name: object, *more: Any) -> None:
        """Give one back. Raises DeviceError, and then it is still there."""
        function, answer, answers = self.driver.function(self._free), self[name], list[Any]()
        handles = map(_HANDLE, map(self.pop, [name]))
        answers.extend(map(function, handles, *([one] for one in more)))
        if answers[0][0]:
            self[name] = answer
            self.driver.fail(self._free, answers[0][0])

    def free_all(self) -> list[str]:
        """Give everything back; what the driver said to what it did not take. A name that is a pair
        ends with what the driver wants to know besides."""
        failed = []
        for name in tuple(self):
            try:
                if not self[name][0]:
                    self.free(name, *name[1:] if isinstance(name, tuple) else ())
            except DeviceError as error:
                failed.append(error.detail)
            self.pop(name, None)
        return failed
