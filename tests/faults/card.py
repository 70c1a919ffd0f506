"""Planted faults that only a card shows, or shows differently: patches as in planted.py.

The host device knows no contexts, runs no kernels, and its events are never used twice. Each is
found by the fuzz on the card, or by the named test where one call is enough to show it; most of
those also show it on a driver without a card.
"""

from __future__ import annotations

from attrs import frozen

from tests.faults.planted import Fault

CUDA_TESTS = "tests/device/test_cuda.py"
TRAFFIC_TESTS = "tests/device/test_traffic.py"


@frozen
class CardFault(Fault):
    """A fault with the test that finds it; without one, the fuzz has to."""

    test: str = ""
    kinds: tuple[str, ...] = ()
    """How the fuzz may call it."""
    anywhere: bool = False
    """The test finds it without a card, too."""


CARD_FAULTS = (
    CardFault(
        "copy out without the event",
        "gpu/traffic.py",
        "        while one.waits:\n            event =",
        "        one.waits.clear()\n        while one.waits:\n            event =",
        "S05",
        kinds=("bytes",),
    ),
    CardFault(
        "copy out without the event, under a spinning kernel",
        "gpu/traffic.py",
        "        while one.waits:\n            event =",
        "        one.waits.clear()\n        while one.waits:\n            event =",
        "S05",
        test=f"{CUDA_TESTS}::test_a_copy_out_waits_for_its_event_under_a_spinning_kernel",
        anywhere=True,
    ),
    CardFault(
        "step not ordered after the load on the card",
        "gpu/traffic.py",
        "                for follower in followers:\n",
        "                for follower in ():\n",
        "B148",
        test=f"{CUDA_TESTS}::test_a_step_waits_for_a_load_under_a_spinning_kernel",
        anywhere=True,
    ),
    CardFault(
        "wrong device current",
        "gpu/driver.py",
        "(self.api.cuCtxPushCurrent, (self.context,))",
        "(self.api.cuCtxPushCurrent, (self.api.cuCtxGetCurrent()[1],))",
        "S21, B160",
        test=f"{CUDA_TESTS}::test_every_call_selects_its_context",
        anywhere=True,
    ),
    CardFault(
        "stale base value in the device's table",
        "gpu/checks.py",
        "        self.device.kernels.publish(stream,",
        "        if not set(rows) <= set(self.bases):\n"
        "            self.device.kernels.publish(stream,",
        "B65",
        kinds=("bytes", "device lost"),
    ),
    CardFault(
        "read-only mapping forgotten",
        "gpu/cuda.py",
        "access = [self._access[read_only]]",
        "access = [self._access[False]]",
        test=f"{CUDA_TESTS}::test_the_driver_refuses_a_copy_into_a_read_only_mapping",
    ),
    CardFault(
        "event reused while somebody holds it",
        "gpu/cuda.py",
        "        self._recorded += 1\n",
        "        self.idle_events[name] = None\n        self._recorded += 1\n",
        test=f"{CUDA_TESTS}::test_an_event_that_is_held_is_not_recorded_again",
        anywhere=True,
    ),
    CardFault(
        "unmap without quiesce, seen before the driver faults",
        "kvstate/manager.py",
        "            self.flight.quiesce()\n"
        "            self.ladder.spill(self.gpu.budget_frames)\n"
        "            self.ladder.spill_spans(",
        "            self.ladder.spill(self.gpu.budget_frames)\n"
        "            self.ladder.spill_spans(",
        "S03",
        kinds=("law 17 (device order)",),
    ),
    CardFault(
        "a failed access leaves its mappings",
        "gpu/cuda.py",
        '            undo.append(partial(self._do, "unmapping", api.cuMemUnmap, place, size))\n',
        "",
        test=f"{CUDA_TESTS}::test_a_mapping_that_fails_half_way_is_undone",
        anywhere=True,
    ),
    CardFault(
        "frames of a failed create are kept",
        "gpu/cuda.py",
        "                undo.append(partial(self._free, name))\n",
        "",
        "B121",
        test=f"{CUDA_TESTS}::test_more_frames_than_there_is_memory_are_none",
        anywhere=True,
    ),
    CardFault(
        "descriptions overwritten while a kernel reads them",
        "gpu/checks.py",
        "            if scratch.size_bytes >= size_bytes and self.passed(scratch):\n",
        "            if scratch.size_bytes >= size_bytes:\n",
        kinds=("law 17 (device order)", "bytes", "device lost"),
    ),
    CardFault(
        "memory is written by a copy that nothing waits for",
        "gpu/cuda.py",
        "        call(self.api.cuMemcpyHtoDAsync, address, at, len(data), self.own)\n"
        "        call(self.api.cuStreamSynchronize, self.own)\n",
        "        call(self.api.cuMemcpyHtoD, address, at, len(data))\n",
        test=f"{CUDA_TESTS}::test_a_poke_is_done_when_it_returns",
    ),
    CardFault(
        "copies go across registered units",
        "gpu/traffic.py",
        "list(self.device.pinned.pieces(runs, most_bytes))",
        "list(runs)",
        test=f"{CUDA_TESTS}::test_a_copy_may_cross_registered_units",
        anywhere=True,
    ),
    CardFault(
        "copies on the device queue behind loads",
        "kvstate/act.py",
        "direction = Direction.IN if loads else Direction.WITHIN",
        "direction = Direction.IN",
        test=f"{TRAFFIC_TESTS}::test_a_fork_does_not_wait_behind_loads",
        anywhere=True,
    ),
    CardFault(
        "a copy waits for its event on its stream",
        "gpu/traffic.py",
        "        for event in waits if followers else ():\n",
        "        followers, waits = followers or [0], waits\n        for event in waits:\n",
        test=f"{TRAFFIC_TESTS}::test_a_late_event_holds_back_its_copy_alone",
    ),
    CardFault(
        "each copy in flight is asked",
        "gpu/traffic.py",
        "            while lane and lane[0].done is not None and",
        "            for one in lane:\n                self.driver.ready(one.done.handle)\n"
        "            while lane and lane[0].done is not None and",
        test=f"{TRAFFIC_TESTS}::test_a_poll_asks_for_the_oldest_of_each_stream",
        anywhere=True,
    ),
    CardFault(
        "nobody asks whether a stream is being captured",
        "gpu/cuda.py",
        "        if self.driver.capturing(handle):\n",
        "        if False:\n",
        test=f"{TRAFFIC_TESTS}::test_a_stream_that_is_captured_is_refused_and_stays_so",
        anywhere=True,
    ),
)  # fmt: skip
