"""An exception at every line: what a Ctrl-C, or the end of memory, may leave of a manager.

A scenario is played once to count the lines of the package that each of its calls runs. Then it is
played once for each of them, and at that line something happens that no code expects: an exception
is raised there, or somebody's finaliser calls the manager. Afterwards there are two answers.
*Intact*: the call has happened as a whole or not at all, every law holds, and the rest of the
scenario goes on as if nothing had been. *Poisoned*: every call is refused by name. Either way
`close()` works, the device is closed, and the process has nothing of it left: no mapping, no file.
What is current on the thread is as it was, whatever the answer.

`PYTHONPATH=. python -m tests.interrupts [--device host] [--what KeyboardInterrupt] [--every 1]`

With `--device cuda --within gpu/` the lines are those of the card's device, its opening among them;
what the process has of the driver is counted where it is made and taken back. With `--device fake`
it is the same device on a driver without a card (`tests/device/fake_driver.py`).

Rejected: signals alone. They come between any two bytecodes, but a run never repeats; a few hundred
of those are in `tests/signals.py`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Final

from attrs import define, field, frozen

import kvstate
from kvstate import IllegalTransition, KvStateError, NestedCall
from kvstate.errors import DeviceFault, LawViolation
from kvstate.guard import SOURCE
from kvstate.observe import check_laws
from kvstate.view import view
from tests.device.fake_card import entered
from tests.faults.scenarios import Scenario
from tests.runs import PLAYED, Run, calls_of, left, opened_device

PACKAGE: Final = str(Path(kvstate.__file__).parent) + os.sep
NOT_WATCHED: Final = PACKAGE + "campaign"
ERRORS: Final[dict[str, type[BaseException]]] = {
    one.__name__: one for one in (KeyboardInterrupt, MemoryError, RecursionError)
}
FINALISER: Final = "finaliser"
WRONG: Final = (
    "swallowed", "device", "broken books", "halfway", "half poisoned", "close raises", "left open",
    "process keeps", "context",
)  # fmt: skip


class AtLine:
    """Does something at the n-th line of the package that runs inside, once."""

    within = ""
    """What the files are called in which lines count."""

    def __init__(self, nth: int, action: Callable[[], object]) -> None:
        self.nth, self.action = nth, action
        self.lines = 0
        self.place = ""
        """Where it happened."""

    def __enter__(self) -> AtLine:
        gc.disable()  # what a finaliser of an earlier run raises would be lost
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        gc.enable()

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        ours = name.startswith(PACKAGE) or name == SOURCE
        watched = ours and not name.startswith(NOT_WATCHED) and self.within in name
        return self._line if watched else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.nth:
                code = frame.f_code
                file = code.co_filename.removeprefix(PACKAGE)
                self.place = f"{file}:{frame.f_lineno} {code.co_name}"
                self.action()
        return self._line


def nothing() -> None:
    """For counting lines."""


@frozen
class Base:
    """What a scenario is when nothing happens."""

    lines: list[int]
    """How many lines each call runs."""
    after: list[tuple[object, ...]]
    """How everything stands after each call but the last."""


@define
class Tally:
    """Many runs."""

    lines: int = 0
    outcomes: Counter[str] = field(factory=Counter)
    wrong: Counter[str] = field(factory=Counter)
    """What was not clean, by kind: a run may be of several."""
    problems: list[str] = field(factory=list)

    def merge(self, other: Tally) -> None:
        self.lines += other.lines
        self.outcomes += other.outcomes
        self.wrong += other.wrong
        self.problems += other.problems


def base_of(scenario: Scenario, kind: str) -> Base:
    """Play it without anything."""
    run = Run(scenario, kind)
    base = Base([], [])
    for name, call in run.calls:
        with AtLine(0, nothing) as counted:
            call(run)
        base.lines.append(counted.lines)
        if name != "end":
            run.wrote()
            base.after.append(run.fingerprint())
    return base


class Unclean(Exception):
    """What must not be: a kind, and what was seen."""


def play(
    scenario: Scenario, kind: str, base: Base, at: int, nth: int, error: type[BaseException]
) -> tuple[str, str]:
    """One run: the error is raised at that line of that call. What came of it, and where that was;
    what must not have come of it is said behind a colon."""
    before, run = left(kind), Run(scenario, kind)
    name, call = run.calls[at]
    _calls(run, 0, at)
    seen = None if run.opened is None else view(run.kv)
    place = AtLine(nth, partial(_raise, error))
    try:
        with place:
            call(run)
    except BaseException as raised:
        came = "raised" if isinstance(raised, error) else f"{raised!r:.200} instead"
    else:
        came = "returned"
    stays = entered() - before
    try:
        outcome = _judge(run, at, name, came, seen, base) if place.place else "nothing raised"
    except Unclean as unclean:
        outcome = f"{unclean}"
    outcome += f" context: {dict(stays)}" if stays else ""
    outcome += "".join(f" {wrong}" for wrong in _end(run, before))
    return outcome, f"{scenario.name}, {kind}: call {at} {name}, {place.place}"


def _raise(error: type[BaseException]) -> None:
    raise error("for the test")


def disturb(scenario: Scenario, kind: str, base: Base, at: int, nth: int) -> tuple[str, str]:
    """One run: at that line of that call somebody's finaliser closes a sequence. It is refused by
    name, and the call comes to what it does without; or no call runs yet, or any more, and it
    may."""
    before, run, raised = left(kind), Run(scenario, kind), list[BaseException]()
    name, call = run.calls[at]
    _calls(run, 0, at)

    def finalise() -> None:
        try:
            for seq in tuple(run.kv.sequences.values())[:1]:
                seq.close()
            raised.extend([] if run.kv.sequences else [KeyError("nobody is there")])
        except BaseException as error:
            raised.append(error)

    place = AtLine(nth, finalise)
    try:
        with place:
            call(run)
    except KvStateError as error:
        came = str(error)
    except Exception as crash:
        came = f"crash: {crash!r}"
    else:
        came = "returned"
    try:
        outcome = _undisturbed(run, at, came, raised, base) if place.place else "nothing happened"
    except Unclean as unclean:
        outcome = str(unclean)
    outcome += "".join(f" {wrong}" for wrong in _end(run, before))
    return outcome, f"{scenario.name}, {kind}: call {at} {name}, {place.place}"


def _undisturbed(run: Run, at: int, came: str, raised: list[BaseException], base: Base) -> str:
    error, last = raised[0] if raised else None, len(run.calls) - 1
    if came.startswith("crash"):
        raise Unclean(f"broken books: {came:.200}")
    if isinstance(error, KeyError):
        return "nobody to close"
    if isinstance(error, NestedCall):
        if came != "returned":
            raise Unclean(f"broken books: the call raised {came:.200}")
        if at < last:
            run.wrote()
            if run.fingerprint() != base.after[at]:
                raise Unclean("halfway: the call comes to something else")
            _calls(run, at + 1, last, base)
        return "refused"
    if error is not None and not isinstance(error, IllegalTransition):
        raise Unclean(f"broken books: the finaliser raises {error!r:.200}")
    if not run.kv.closed:
        _check(run)
    return "outside"


def _calls(run: Run, first: int, end: int, base: Base | None = None) -> None:
    """Play calls; each must leave what it leaves when nothing has happened."""
    for at in range(first, end):
        name, call = run.calls[at]
        try:
            call(run)
        except Exception as error:
            if base is None:
                raise
            raise Unclean(f"broken books: {name} raises {error!r:.200} later on") from error
        run.wrote()
        if base is not None and run.fingerprint() != base.after[at]:
            raise Unclean(f"broken books: {name} comes to something else later on")


def _judge(run: Run, at: int, name: str, came: str, seen: object, base: Base) -> str:
    """What the manager is after it."""
    if came != "raised":
        raise Unclean(f"swallowed: {came}")
    if name == "end":
        return "closing"
    if run.opened is None:
        return _opened_again(run, base)
    if _refuses(run):
        return "poisoned"
    _check(run)
    run.wrote()
    last = len(run.calls) - 1
    if view(run.kv) == seen:
        _calls(run, at, last, base)
        return "intact"
    if run.fingerprint() == base.after[at]:
        _calls(run, at + 1, last, base)
        return "intact, and done"
    raise Unclean("halfway: neither as before the call nor as after it, whatever the laws say")


def _opened_again(run: Run, base: Base) -> str:
    """The constructor has failed: its device is as it was, and has another manager."""
    if is_closed(run.device) or not run.device.ledger().empty:
        raise Unclean("device: it is not as it was")
    _calls(run, 0, len(run.calls) - 1, base)
    return "intact"


def _refuses(run: Run) -> bool:
    """The manager is poisoned, and says so to every call."""
    try:
        run.kv.probe_reuse(())
    except DeviceFault:
        pass
    except Exception as error:
        raise Unclean(f"broken books: the next call raises {error!r:.200}") from error
    else:
        return False
    for call in (run.kv.poll, lambda: run.kv.create(max_tokens=4), run.kv.trim):
        try:
            call()
        except DeviceFault:
            continue
        raise Unclean("half poisoned: some calls are refused, others are not")
    return True


def _check(run: Run) -> None:
    try:
        check_laws(run.kv)
    except LawViolation as broken:
        raise Unclean(f"broken books: {broken.violations[0]}") from broken
    except Exception as crash:
        raise Unclean(f"broken books: the laws cannot be asked: {crash!r:.200}") from crash


def _end(run: Run, before: Counter[str]) -> list[str]:
    """Close it; what is wrong with that."""
    wrong = [] if run.opened is None else _closed(run.kv.close)
    if run.opened is not None and not is_closed(run.device):
        wrong.append("left open: the device is not closed")
    wrong += _closed(run.device.close)
    kept = left(run.kind) - before
    return [*wrong, f"process keeps: {dict(kept)}"] if kept else wrong


def _closed(close: Callable[[], object]) -> list[str]:
    try:
        close()
    except BaseException as error:
        return [f"close raises: {error!r:.200}"]
    return []


def is_closed(device: Any) -> bool:
    return bool(device.closed)


@contextmanager
def quiet() -> Iterator[list[str]]:
    """No word in the log; what could not be raised is collected, warnings as errors among it."""
    found: list[str] = []
    hook = sys.unraisablehook
    logging.disable()
    sys.unraisablehook = lambda hurt: found.append(f"{hurt.exc_value!r} in {hurt.object!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            yield found
    finally:
        sys.unraisablehook = hook
        logging.disable(logging.NOTSET)


def play_all(
    scenario: Scenario, kind: str, what: str, every: int = 1, part: int = 0, only: str = ""
) -> Tally:
    """An error of that name, or a finaliser, at every `every`-th line of a scenario, from the
    `part`-th on; only of calls of that name, if one is given."""
    tally, first = Tally(), what not in ERRORS
    with quiet() as unraisable:
        base = base_of(scenario, kind)
        lines = list(enumerate(base.lines))[first:]  # nobody has anything before it is opened
        calls = [name for name, _ in calls_of(scenario)]
        lines = [(at, count) for at, count in lines if only in ("", calls[at])]
        points = [(at, n) for at, count in lines for n in range(1, count + 1)]
        for at, nth in points[part::every]:
            if what in ERRORS:
                outcome, place = play(scenario, kind, base, at, nth, ERRORS[what])
            else:
                outcome, place = disturb(scenario, kind, base, at, nth)
            tally.lines += 1
            tally.outcomes["not clean" if ":" in outcome else outcome] += 1
            for wrong in WRONG:
                tally.wrong[wrong] += f"{wrong}:" in outcome
            if ":" in outcome:
                tally.problems.append(f"{outcome} | {place}")
        gc.collect()
        tally.problems += unraisable
    return tally


def play_opening(kind: str, what: str, every: int = 1) -> Tally:
    """An error of that name at every `every`-th line of opening a device: nothing is left of it."""
    tally = Tally()
    with quiet():
        with AtLine(0, nothing) as counted:
            opened_device(kind).close()
        for nth in range(1, counted.lines + 1, every):
            before, place = left(kind), AtLine(nth, partial(_raise, ERRORS[what]))
            try:
                with place:
                    device = opened_device(kind)
            except ERRORS[what]:
                device = None
            if device is not None:
                device.close()
            gc.collect()
            kept = left(kind) - before
            tally.lines += 1
            tally.outcomes["not clean" if kept else "opening"] += 1
            if kept:
                tally.wrong["process keeps"] += 1
                tally.problems.append(f"process keeps: {dict(kept)} | opening, {place.place}")
    return tally


def _job(what: str, every: int, parts: int, only: str, job: tuple[int, str, int]) -> Tally:
    number, kind, part = job
    return play_all(PLAYED[number], kind, what, every * parts, part * every, only)


def _limit(within: str) -> None:
    """Only lines of these files count."""
    AtLine.within = within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("host", "null", "cuda", "fake"), action="append")
    parser.add_argument("--within", default="", help="part of the names of files")
    parser.add_argument("--what", choices=(*ERRORS, FINALISER), default="KeyboardInterrupt")
    parser.add_argument(
        "--scenario", default="", help="part of its name; all of them, if not given"
    )
    parser.add_argument("--call", default="", help="its name; all of them, if not given")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    _limit(asked.within)
    started, total, parts = monotonic(), Tally(), 8 if asked.workers > 1 else 1
    kinds = asked.device or ["host", "null"]
    chosen = [at for at, one in enumerate(PLAYED) if asked.scenario in one.name]
    jobs = list(product(chosen, kinds, range(parts)))
    job = partial(_job, asked.what, asked.every, parts, asked.call)
    for kind in kinds if asked.what in ERRORS and not asked.call else ():
        total.merge(play_opening(kind, asked.what, asked.every))
    if asked.workers == 1:
        for tally in map(job, jobs):
            total.merge(tally)
    else:
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(asked.workers, _limit, (asked.within,)) as pool:
            for tally in pool.imap_unordered(job, jobs):
                total.merge(tally)
    print(f"{', '.join(kinds)}: {len(chosen)} scenarios, {total.lines} runs of {asked.what}, "
          f"{monotonic() - started:.0f} s")  # fmt: skip
    print(f"  {dict(total.outcomes)}")
    print(f"  of what is not clean: {dict(total.wrong)}")
    print(*total.problems[:20], sep="\n")
    return 1 if total.problems else 0


if __name__ == "__main__":
    sys.exit(main())
