"""Real signals in an ordinary loop of calls, and what they leave.

`PYTHONPATH=. python -m tests.signals RUNS SEED`: each run opens a manager, serves some requests,
and is hit by one signal whose handler raises KeyboardInterrupt, after a drawn time. When that is
depends on the machine; what may come of it does not. Prints the outcomes as JSON.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import warnings
from collections import Counter
from random import Random
from threading import Timer
from typing import Any, Final

from kvstate import DeviceFault, Manager, OutOfFrames
from kvstate.gpu import HostDevice
from kvstate.observe import check_laws
from tests.conftest import small
from tests.runs import left

LATEST_S: Final = 0.02
"""When the signal comes at the latest: about as long as a run takes."""


def serve(kv: Manager) -> None:
    """What an engine does: requests come, are stepped, give way to others, and go."""
    for turn in range(6):
        seqs = [kv.create(range(turn, turn + 6), 16) for _ in range(3)]
        for seq in seqs:
            if kv.admits(8):
                seq.resume()
        batch = kv.batch(seq for seq in seqs if seq.base is not None)
        for _ in range(6):
            try:
                step = kv.step(batch)
            except OutOfFrames:
                break
            kv.settle(step)
            kv.commit_each(batch, [turn] * len(batch))
        first = next(iter(batch))
        batch.remove(first)
        first.suspend()
        kv.poll()
        first.resume()
        kv.poll()
        first.rewind(1)
        first.fork().close()
        for seq in seqs:
            seq.close()
        kv.trim()


def run(random: Random, armed: list[bool], with_thread: bool) -> str:
    """One run. What came of it: `intact`, `poisoned` or `not hit`; what must not be has a colon."""
    before, device = left(), HostDevice()
    kv, delay_s = Manager(small(frames=12), device), random.uniform(0, LATEST_S)
    timer = Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
    came = "not hit"
    try:
        armed[:] = [True]
        if with_thread:
            timer.start()
        else:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
        serve(kv)
        armed.clear()
    except KeyboardInterrupt:
        came = "hit"
    armed.clear()
    signal.setitimer(signal.ITIMER_REAL, 0)
    timer.cancel()
    if timer.ident is not None:
        timer.join()
    outcome = came if came == "not hit" else _judge(kv)
    try:
        kv.close()
    except BaseException as error:
        outcome += f" close raises: {error!r:.200}"
    if not device.closed:
        outcome += " left open: the device"
    device.close()
    kept = left() - before
    return outcome + (f" process keeps: {dict(kept)}" if kept else "")


def _judge(kv: Manager) -> str:
    try:
        kv.poll()
        check_laws(kv)
        for step in tuple(kv.flight.steps.values()):
            kv.settle(step)
        for seq in tuple(kv.sequences.values()):
            seq.close()
        serve(kv)
        check_laws(kv)
    except DeviceFault as fault:
        return "poisoned" if "interrupted" in str(fault) else f"broken books: {fault}"
    except BaseException as error:
        return f"broken books: {error!r:.300}"
    return "intact"


def main(runs: int, seed: int) -> dict[str, Any]:
    """So many runs."""
    armed: list[bool] = []

    def handler(*_: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    for one in (signal.SIGALRM, signal.SIGINT):
        signal.signal(one, handler)
    logging.disable()
    warnings.simplefilter("error")
    random, outcomes, wrong = Random(seed), Counter[str](), list[str]()

    def unraisable(hurt: Any) -> None:
        if isinstance(hurt.exc_value, KeyboardInterrupt):
            outcomes["in a finaliser, where it is lost"] += 1
        else:
            wrong.append(f"lost: {hurt.exc_value!r} in {hurt.object!r}")

    sys.unraisablehook = unraisable
    thread = Timer(0, bytearray, (1 << 20,))  # what the first thread of all takes stays
    thread.start()
    thread.join()
    for at in range(runs):
        outcome = run(random, armed, with_thread=at % 2 > 0)
        outcomes["not clean" if ":" in outcome else outcome] += 1
        wrong += [outcome] if ":" in outcome else []
    gc.collect()
    return {"outcomes": dict(outcomes), "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
