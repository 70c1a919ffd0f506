"""What the bookkeeping itself costs: the null device, medians over repeats; laws off, but where it
says so.

Run by hand: `python tests/bench/bookkeeping.py [--json]`. Not a test: machines differ and are
shared. Beside the figures stands how long a fixed piece of plain Python took in the same run, so
that runs can be compared.

256 sequences at staggered lengths, 32 tokens a block, frames of 2 MiB, 128 KiB a token (an 8B
model): 16 tokens a frame. Settled steps that cross no frame are timed apart from the growth over
one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter_ns

import msgspec
import numpy as np

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.config import MIB
from kvstate.device import Device
from kvstate.gpu import NullDevice
from kvstate.observe import observe
from kvstate.order_device import ordered

SEQUENCES, BLOCK = 256, 32
REPEATS, FEW = 2000, 20


class Report(msgspec.Struct, frozen=True):
    """Microseconds, medians."""

    step_us: float
    """`step` and `settle` of all sequences, without commits."""
    step_us_long: float
    """The same at 100,000 tokens a sequence."""
    step_commit_us: float
    """With the commit of one token of each: eight blocks a step become full. Without an index."""
    decode_step_us: float
    """The same with an index, which then names these blocks."""
    suspend_us: float
    resume_us: float
    close_us: float
    """Of a sequence of 20 blocks."""
    grow_us: float
    """A step of one sequence that crosses a frame."""
    lookup_us: float
    """`probe_reuse` of a prompt of 512 tokens in blocks of 16, all but the last found."""
    create_hit_us: float
    """`create` with such a prompt."""
    order_step_us: float
    """`step_us` with the order check alone (`order=True`)."""
    order_step_us_long: float
    order_decode_step_us: float
    order_suspend_us: float
    order_resume_us: float
    order_close_us: float
    debug_step_us: float
    """`step_us` with every check (`debug=True`), which looks at everything after every call."""
    debug_decode_step_us: float
    reference_us: float
    """A fixed piece of plain Python, for comparing machines."""


def timed(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    started = perf_counter_ns()
    call()
    return (perf_counter_ns() - started) / 1000


def opened(
    max_tokens: int, block: int = BLOCK, *, reuse: bool = True, order: bool = False,
    device: Device | None = None,
) -> Manager:  # fmt: skip
    config = Config(
        layers=[LayerSpec(kv_heads=8, head_dim=128, count=32)],
        gpu=GpuTier(budget_bytes=2_000_000 * 2 * MIB),
        host=HostTier(4096 * 4 * MIB),
        tokens_per_block=block,
        max_tokens=max_tokens,
        max_sequences=SEQUENCES,
        write_through="on_free" if reuse else "off",
    )
    return Manager(config, device or NullDevice(), order=order)


def running(kv: Manager, tokens: int) -> list[Sequence]:
    """All sequences, at staggered lengths, with room for what will be timed."""
    seqs = [kv.create() for _ in range(SEQUENCES)]
    for at, seq in enumerate(seqs):
        seq.resume()
        length = tokens + at % BLOCK
        seq.resize(length + REPEATS + 64)
        kv.settle(kv.step(kv.batch([seq]), length))
    return seqs


def step(
    tokens: int, *, commit: bool = False, reuse: bool = True, order: bool = False,
    debug: bool = False,
) -> float:  # fmt: skip
    """Median of one step and settle of all sequences."""
    device = ordered(NullDevice()) if debug else None
    with opened(tokens + 2 * REPEATS, reuse=reuse, order=order, device=device) as kv:
        seqs = running(kv, tokens)
        batch, ids = kv.batch(seqs), np.arange(SEQUENCES, dtype=np.int32)
        if commit:
            for seq in seqs:
                seq.commit(np.zeros(seq.length_tokens, np.int32))

        if debug:
            observe(kv, debug=True)

        def once() -> None:
            kv.settle(kv.step(batch))
            if commit:
                kv.commit_each(batch, ids)

        took = median(timed(once) for _ in range(FEW if debug else REPEATS))
        close(seqs)
        return took


def close(seqs: list[Sequence]) -> None:
    for seq in seqs:
        seq.close()


def lifecycle(*, order: bool = False) -> dict[str, float]:
    """Medians of suspend, resume and close of a 20-block sequence."""
    times: dict[str, list[float]] = {"suspend_us": [], "resume_us": [], "close_us": []}
    with opened(2048, order=order) as kv:
        for _ in range(REPEATS):
            seq = kv.create(max_tokens=2048)
            seq.resume()
            kv.settle(kv.step(kv.batch([seq]), 20 * BLOCK))
            times["suspend_us"].append(timed(seq.suspend))
            kv.poll()
            times["resume_us"].append(timed(seq.resume))
            kv.poll()
            times["close_us"].append(timed(seq.close))
    return {name: median(values) for name, values in times.items()}


def grow() -> float:
    """Median of what a frame costs a step: a step that crosses one, less a step that does not."""
    crossing: list[float] = []
    plain: list[float] = []
    with opened(40_000) as kv:
        kv.ladder.create(4096)
        seq = kv.create()
        seq.resume()
        batch = kv.batch([seq])
        for at in range(REPEATS * 16):
            took = timed(lambda: kv.settle(kv.step(batch)))
            (plain if at % 16 else crossing).append(took)
        seq.close()
    return median(crossing) - median(plain)


def lookup() -> dict[str, float]:
    """Medians of looking a prompt up, and of a create that does."""
    prompt = np.arange(513, dtype=np.int32)
    created: list[float] = []
    with opened(2048, block=16) as kv:
        first = kv.create(prompt)
        first.resume()
        kv.settle(kv.step(kv.batch([first]), len(prompt)))
        first.commit(prompt)
        assert kv.probe_reuse(prompt) == 512
        found = median(timed(lambda: kv.probe_reuse(prompt)) for _ in range(REPEATS))
        for _ in range(REPEATS):
            created.append(timed(lambda: kv.create(prompt)))
            next(reversed(kv.sequences.values())).close()
        first.close()
    return {"lookup_us": found, "create_hit_us": median(created)}


def reference() -> float:
    """A hundred dictionary entries and as many tuples."""

    def work() -> None:
        entries = {}
        for at in range(100):
            entries[at] = (at, at + 1)

    return median(timed(work) for _ in range(REPEATS))


def main() -> None:
    """Measure and print."""
    gc.freeze()
    report = Report(
        step_us=step(1000),
        step_us_long=step(100_000),
        step_commit_us=step(1000, commit=True, reuse=False),
        decode_step_us=step(1000, commit=True),
        **lifecycle(),
        grow_us=grow(),
        **lookup(),
        order_step_us=step(1000, order=True),
        order_step_us_long=step(100_000, order=True),
        order_decode_step_us=step(1000, commit=True, order=True),
        **{f"order_{name}": took for name, took in lifecycle(order=True).items()},
        debug_step_us=step(1000, debug=True),
        debug_decode_step_us=step(1000, commit=True, debug=True),
        reference_us=reference(),
    )
    if "--json" in sys.argv:
        print(msgspec.json.encode(report).decode())
    else:
        for name, value in msgspec.structs.asdict(report).items():
            print(f"{name:22} {value:8.1f}")


if __name__ == "__main__":
    main()
