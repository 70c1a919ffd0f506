"""How the cost of public calls grows with what they should not depend on.

Run by hand: `PYTHONPATH=. python tests/bench/growth.py [THING...] [--json]`, on the null device,
checks off. One sequence lives the same life beside n, 4n and 16n of a thing: each call of it is
counted in bytecodes that Python ran, which depends on no clock, and timed, which shows what C code
does beside them (sorting, numpy). The exponent is the slope over all three, log(work) by log(n): 0
does not depend on the thing, 1 follows it.

What may grow, and why:

* `trim` and `clear_reuse`, with what is parked, in spans or in the index: they give all of it up.
* `create`, `probe_reuse`, `resume` and `fork`, with the turns of one conversation: its blocks and
  frames are found and mapped owner by owner, so that more turns of fewer tokens cost a little more.
* A poll or a quiesce, with the ends that it delivers: each of them changes something.
* A call that is short of frames, with what could be given up: it looks for the oldest of that.

Rejected: time alone, which is another one on each machine; calls of functions, which do not see a
loop.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from math import log
from time import perf_counter_ns
from typing import Any, Final

import msgspec
import numpy as np

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.gpu import NullDevice
from tests.work import counting

FACTORS: Final = (1, 4, 16)
BLOCK: Final = 4
KIB: Final = 1024
PROMPT: Final = np.arange(22, dtype=np.int32)
"""Five blocks of four tokens, one token that part of a block has, and one that is computed."""
TALK: Final = np.arange(480 * BLOCK, dtype=np.int32)
"""A conversation, in turns of equal length."""
LIVES: Final = 15
"""Of so many the fastest call counts."""
NOTABLE: Final = 0.15
"""Exponents from here on are marked."""

Work = dict[str, float]
Thing = Callable[[Manager, int], object]


class Report(msgspec.Struct, frozen=True):
    """One call beside one thing: what it cost beside n, 4n and 16n of it, and the exponents."""

    thing: str
    call: str
    counts: tuple[int, ...]
    """How many of the thing there were."""
    bytecodes: tuple[float, ...]
    us: tuple[float, ...]
    exponent_bytecodes: float
    exponent_us: float


class Slow(NullDevice):
    """A device whose first copies end when everything must, and no earlier. It says that there is
    memory, for views of it."""

    memory: Any = ("cpu", 0)
    late = 0
    """How many."""

    def ended(self) -> list[int]:
        """What has ended besides the first copies."""
        return sorted(takewhile(lambda token: token > self.late, reversed(self._ended)))


def opened(rows: int, **options: Any) -> Manager:
    """A manager with 1 KiB a token, blocks of four tokens and frames of one block, and more of
    everything than is wanted."""
    config = Config(
        layers=[LayerSpec(kv_heads=4, head_dim=64)],
        gpu=GpuTier(budget_bytes=1 << 34, frame_bytes=BLOCK * KIB),
        host=HostTier(1 << 28),
        tokens_per_block=BLOCK,
        max_tokens=8192,
        max_sequences=rows,
        **options,
    )
    return Manager(config, Slow())


def write(kv: Manager, seq: Sequence, ids: np.ndarray[Any, Any]) -> None:
    """Compute and commit the next tokens."""
    kv.settle(kv.step(kv.batch([seq]), len(ids)))
    seq.commit(ids)


def turn(kv: Manager, ids: np.ndarray[Any, Any], last: Sequence | None = None) -> Sequence:
    """A sequence with this prompt that computes what nobody has; the turn before it then ends."""
    seq = kv.create(ids, max_tokens=len(ids) + 64)
    seq.resume()
    kv.poll()
    if last is not None:
        last.close()
        kv.poll()
    write(kv, seq, ids[seq.length_tokens :])
    return seq


# The things.


def created(kv: Manager, count: int) -> None:
    """Sequences that wait."""
    for _ in range(count):
        kv.create(max_tokens=32)


def suspended(kv: Manager, count: int) -> None:
    """Sequences on the host."""
    for at in range(count):
        turn(kv, np.full(5, 1000 + at, np.int32)).suspend()
        kv.poll()


def running(kv: Manager, count: int) -> None:
    """Sequences that run and grow as they go."""
    for at in range(count):
        turn(kv, np.full(5, 1000 + at, np.int32))


def reserved(kv: Manager, count: int) -> None:
    """Sequences that run and were promised room."""
    for _ in range(count):
        kv.create(max_tokens=32, reserve=True).resume()


def spans(kv: Manager, count: int) -> None:
    """Registered spans."""
    for at in range(count):
        turn(kv, np.full(9, 1000 + at, np.int32)).close()


def sharers(kv: Manager, count: int) -> None:
    """Sequences that map what the prompt maps too."""
    for _ in range(count):
        turn(kv, PROMPT)


def doubles(kv: Manager, count: int) -> None:
    """Sequences that have copies of what the prompt copies too."""
    for _ in range(count):
        kv.create(PROMPT, max_tokens=64).resume()
    kv.poll()


def siblings(kv: Manager, count: int) -> None:
    """Blocks where the prompt goes its own way. All share one token with it."""
    for at in range(count):
        turn(kv, np.concatenate([PROMPT[:21], np.full(3, 1000 + at, np.int32)])).close()
        kv.poll()


def turns(kv: Manager, count: int) -> Sequence:
    """Turns of one conversation, each mapped by the next; a sequence goes on with the last."""
    each, seq = len(TALK) // count, None
    for at in range(1, count + 1):
        seq = turn(kv, TALK[: at * each], seq)
    assert seq is not None
    return seq


def parked(kv: Manager, count: int) -> None:
    """Ranges of all kinds of extents that wait to be adopted."""
    seqs = [kv.create(max_tokens=32 * (1 + at % 16)) for at in range(count)]
    for seq in seqs:
        seq.resume()
    for seq in seqs:
        seq.close()


def kept(kv: Manager, count: int) -> None:
    """Blocks on the host that are nobody's."""
    for at in range(count):
        turn(kv, np.full(5, 1000 + at, np.int32)).close()
        kv.poll()


def mirrors(kv: Manager, count: int) -> None:
    """Blocks of running sequences that the host has too."""
    running(kv, count)
    kv.poll()
    kv.poll()


def transfers(kv: Manager, count: int) -> None:
    """Copies in flight: of sequences that were just suspended."""
    assert isinstance(kv.device, Slow)
    seqs = [turn(kv, np.full(5, 1000 + at, np.int32)) for at in range(count)]
    for seq in seqs:
        seq.suspend()
    kv.device.late = max(kv.flight.transfers)


def steps(kv: Manager, count: int) -> None:
    """Steps in flight, each of another sequence."""
    seqs = [turn(kv, np.full(5, 1000 + at, np.int32)) for at in range(count)]
    for seq in seqs:
        kv.step(kv.batch([seq]))


def rows(kv: Manager, count: int) -> None:
    """Rows that nothing is in."""


THINGS: Final[dict[str, tuple[Thing, int, dict[str, Any]]]] = {
    "created": (created, 100, {}),
    "suspended": (suspended, 100, {}),
    "running": (running, 100, {}),
    "reserved": (reserved, 100, {}),
    "spans": (spans, 25, {"spans": "all"}),
    "sharers": (sharers, 100, {}),
    "doubles": (doubles, 100, {"spans": "off"}),
    "siblings": (siblings, 100, {}),
    "turns": (turns, 15, {"spans": "all"}),
    "parked": (parked, 100, {}),
    "kept": (kept, 100, {}),
    "mirrors": (mirrors, 100, {"write_through": "on_commit"}),
    "transfers": (transfers, 100, {}),
    "steps": (steps, 100, {}),
    "rows": (rows, 4096, {}),
}
"""How each is made, the least number of them, and what the manager is told for it."""


# The calls.


class Meter:
    """Measures calls by name; the first time in bytecodes, then in microseconds."""

    def __init__(self) -> None:
        self.bytecodes: Work = {}
        self.us: Work = {}
        self.counting = True

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure what is inside."""
        if self.counting:
            with counting() as work:
                yield
            self.bytecodes[name] = work.bytecodes
        else:
            started = perf_counter_ns()
            yield
            took = (perf_counter_ns() - started) / 1000
            self.us[name] = min(self.us.get(name, took), took)


def live(kv: Manager, m: Meter, prompt: np.ndarray[Any, Any]) -> None:
    """One life with every call that the things should not matter to."""
    with m("create"):
        seq = kv.create(prompt, max_tokens=len(prompt) + 64)
    with m("resume"):
        seq.resume()
    kv.poll()
    with m("batch"):
        batch = kv.batch([seq])
    with m("resize"):
        seq.resize(len(prompt) + 20)
    with m("step"):
        step = kv.step(batch, len(prompt) - seq.length_tokens)
    with m("settle"):
        kv.settle(step)
    with m("commit"):
        seq.commit(prompt[seq.committed_tokens :])
    with m("step of one"):
        step = kv.step(batch)
    with m("settle of one"):
        kv.settle(step)
    with m("commit_each"):
        kv.commit_each(batch, np.full(1, 7, np.int32))
    with m("step that grows"):
        step = kv.step(batch, 24)
    with m("settle that rejects"):
        kv.settle(step, np.full(1, 23))
    with m("stop_committing"):
        seq.stop_committing()
    with m("rewind"):
        seq.rewind(len(prompt) + 1)
    with m("fork"):
        child = seq.fork()
    with m("add to a batch"):
        batch.add(child)
    with m("remove from a batch"):
        batch.remove(child)
    with m("poll"):
        kv.poll()
    with m("close of a fork"):
        child.close()
    kv.poll()
    with m("suspend"):
        seq.suspend()
    kv.poll()
    with m("resume of a suspended one"):
        seq.resume()
    kv.poll()
    with m("drop"):
        seq.drop()
    kv.poll()
    with m("resume of a dropped one"):
        seq.resume()
    kv.poll()
    asked(kv, m, prompt)
    with m("tensors"):
        kv.tensors(seq, 0)
    with m("close"):
        seq.close()
    kv.poll()
    with m("dummy"):
        dummy = kv.dummy(40)
    dummy.close()
    kv.poll()


def asked(kv: Manager, m: Meter, prompt: np.ndarray[Any, Any]) -> None:
    """The questions."""
    with m("probe_reuse"):
        kv.probe_reuse(prompt)
    with m("admits"):
        kv.admits(64)
    with m("fits"):
        kv.fits(64)
    with m("largest_max_tokens"):
        kv.largest_max_tokens()
    with m("stats"):
        kv.stats()


def ending(kv: Manager, m: Meter) -> None:
    """The calls after which the things are gone: they are made once, and not timed."""
    for step in [*kv.flight.steps.values()]:
        kv.settle(step)
    for seq in [*kv.sequences.values()]:
        seq.close()
    with m("clear_reuse"):
        kv.clear_reuse()
    with m("trim"):
        kv.trim()


def measured(name: str, count: int, lives: int = LIVES) -> Meter:
    """What the calls cost beside so many of a thing; timed in so many lives."""
    make, _, options = THINGS[name]
    with opened(count if name == "rows" else count + 8, **options) as kv:
        last = make(kv, count)
        prompt = PROMPT
        if isinstance(last, Sequence):
            prompt = np.concatenate([np.frombuffer(last.known_ids, np.int32), PROMPT + 9000])
        else:
            turn(kv, PROMPT + 100).close()
        meter = Meter()
        live(kv, Meter(), prompt)
        live(kv, meter, prompt)
        meter.counting = False
        for _ in range(lives):
            live(kv, meter, prompt)
        meter.counting = True
        ending(kv, meter)
    return meter


def slope(counts: tuple[int, ...], work: tuple[float, ...]) -> float:
    """The slope of log(work) by log(count), from the first to the last."""
    return log(max(work[-1], 1) / max(work[0], 1)) / log(counts[-1] / counts[0])


def reports(name: str) -> list[Report]:
    """Every call beside one thing."""
    counts = tuple(THINGS[name][1] * factor for factor in FACTORS)
    meters = [measured(name, count) for count in counts]
    found = []
    for call in meters[0].bytecodes:
        codes = tuple(meter.bytecodes[call] for meter in meters)
        us = tuple(round(meter.us.get(call, 0), 1) for meter in meters)
        slopes = round(slope(counts, codes), 2), round(slope(counts, us), 2)
        found.append(Report(name, call, counts, codes, us, *slopes))
    return found


def main() -> None:
    """Measure and print."""
    gc.disable()
    names = [name for name in sys.argv[1:] if not name.startswith("-")] or [*THINGS]
    found = []
    for name in names:
        part = reports(name)
        found += part
        if "--json" not in sys.argv:
            show(part)
    if "--json" in sys.argv:
        print(msgspec.json.encode(found).decode())


def show(part: list[Report]) -> None:
    """A table of one thing."""
    one = part[0]
    print(f"\n{one.thing}: {', '.join(map(str, one.counts))}")
    print(f"  {'call':26} {'bytecodes':>24} {'exp':>5}  {'microseconds':>24} {'exp':>5}")
    for each in part:
        codes = " ".join(f"{code:7.0f}" for code in each.bytecodes)
        us = " ".join(f"{us:7.0f}" for us in each.us)
        mark = " *" if max(each.exponent_bytecodes, each.exponent_us) >= NOTABLE else ""
        print(
            f"  {each.call:26} {codes:>24} {each.exponent_bytecodes:5.2f}  {us:>24} "
            f"{each.exponent_us:5.2f}{mark}"
        )


if __name__ == "__main__":
    main()
