"""Work that never ends, on purpose: a stream waits for a number in host memory to be large enough.

So a copy that hangs is a real one: whatever is behind it on its stream, or waits for its event,
hangs with it, and the card goes on with everything else. Rejected: a kernel that spins until then.
It takes room that other kernels want.
"""

from __future__ import annotations

import ctypes

from kvstate.gpu.driver import Driver
from kvstate.gpu.held import Held

_MAPPED = 0x2
_AT_LEAST = 0x0


class Stopper:
    """Streams that wait, and the number that they wait for. It is allocated when it is wanted."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._held = Held(driver, "cuMemHostAlloc", "cuMemFreeHost")
        self._wanted = 1

    def stop(self, stream: int) -> None:
        """Whatever is launched on the stream from now on waits until `go`."""
        api, call = self.driver.api, self.driver.call
        if not self._held:
            self._held.make("number", 4, _MAPPED)
            self._write(0)
        place = call(api.cuMemHostGetDevicePointer, self._held.handle("number"), 0)
        call(api.cuStreamWaitValue32, stream, place, self._wanted, _AT_LEAST)

    def go(self) -> None:
        """Let all of them go on."""
        if self._held:
            self._write(self._wanted)
            self._wanted += 1

    def _write(self, number: int) -> None:
        ctypes.memmove(int(self._held.handle("number")), number.to_bytes(4, "little"), 4)
