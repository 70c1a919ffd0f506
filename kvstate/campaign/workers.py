"""Workers: the same episodes in several processes.

Each worker plays its own episodes and sends their tallies; the parent adds them up and tells all
to stop when it has enough, when one has failed, or on Ctrl-C. Episodes of worker `w` depend on the
seed and on `w` alone.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from queue import Empty
from typing import Any

from kvstate.campaign.fuzz import OpenDevice, Tally, episodes, run

Tell = Callable[[Tally], None]
Enough = Callable[[Tally], bool]


def run_workers(
    seed: int, workers: int, open_device: OpenDevice, streams: str, enough: Enough, tell: Tell,
    first: Iterable[Tally] = (),
) -> Tally:  # fmt: skip
    """Play until the sum of all workers is enough; `tell` is given the sum after each episode.

    What comes `first` is played here, all of it unless something fails. An interrupt ends it early,
    with what there is.
    """
    total = Tally()

    def add(done: Tally) -> None:
        total.add(done)
        tell(total)

    try:
        with quiet():
            for done in first:
                add(done)
                if total.failures:
                    return total
            if workers == 1:
                run(episodes(seed), open_device, streams, lambda _: enough(total), add)
            else:
                _run_many(seed, workers, open_device, streams, lambda: enough(total), add)
    except KeyboardInterrupt:
        total.interrupted = True
    return total


@contextmanager
def quiet() -> Iterator[None]:
    """No log while campaigns play: what is told to fail is no news."""
    log = logging.getLogger("kvstate")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def _run_many(
    seed: int, workers: int, open_device: OpenDevice, streams: str,
    enough: Callable[[], bool], add: Tell,
) -> None:  # fmt: skip
    context = multiprocessing.get_context("spawn")
    stop, done = context.Event(), context.Queue()
    processes = [
        context.Process(
            target=_work, args=(seed, worker, open_device, streams, stop, done), daemon=True
        )
        for worker in range(workers)
    ]
    try:
        with _interrupts_held():
            for process in processes:
                process.start()
        while not enough():
            _receive(done, add, processes)
    finally:
        stop.set()
        started = [process for process in processes if process.pid is not None]
        while any(process.is_alive() for process in started):
            _receive(done, add, started)
        for process in started:
            process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C is for all processes of a terminal. Those that are started here are deaf to it from
    their first line on, since they inherit what this thread does not hear; another thread may hear
    it all the same. This process minds it afterwards."""
    heard = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _receive(done: Any, add: Tell, processes: Sequence[BaseProcess]) -> None:
    try:
        add(done.get(timeout=0.2))
    except Empty:
        crashed = [process.exitcode for process in processes if process.exitcode]
        if crashed:
            raise RuntimeError(f"a worker ended with exit code {crashed[0]}") from None


def _work(
    seed: int, worker: int, open_device: OpenDevice, streams: str, stop: Event, done: Any
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with quiet():
        run(episodes(seed, worker), open_device, streams, partial(_stopped, stop), done.put)


def _stopped(stop: Event, _: Tally) -> bool:
    """Told to stop, or nobody is there any more who could: the parent was killed."""
    parent = multiprocessing.parent_process()
    return stop.is_set() or (parent is not None and not parent.is_alive())
