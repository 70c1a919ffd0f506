"""How large a frame should be: what mapping costs, and what the tails of sequences waste.

`map`: mapping of one GiB in runs of 64 MiB, beside the bare driver calls; `create and map` with
frames made first, `map` alone from frames that the pool has. `grow`: what a frame adds to a step
that crosses into it, through a manager, with an empty and with a full pool. `tails`: the memory
that 256 sequences of mixed lengths (lognormal, mean about 1,500 tokens of 128 KiB) pay for beyond
their tokens; that is arithmetic, done by a manager on the null device.

Mapping is paid once a request, and only by one that adopts nothing; a tail is kept from others for
as long as the request lives. So which size is best depends on that time: the words at the end say.
"""

from __future__ import annotations

from contextlib import closing
from typing import Final

import numpy as np

from kvstate import Config, GpuTier, LayerSpec, Manager, Sequence
from kvstate.config import MIB
from kvstate.device import ByteDevice, MapRun, UnmapRun
from kvstate.gpu import NullDevice
from tests.bench.card_common import (
    GIB,
    Card,
    Figure,
    Laps,
    Pair,
    Raw,
    Report,
    micros,
    opened,
    pairs,
    wall,
)

SIZES: Final = tuple(MIB << power for power in range(1, 7))
RUN_BYTES: Final = 64 * MIB
SEQUENCES: Final = 256
MEAN_TOKENS: Final = 1500
LAYER: Final = LayerSpec(kv_heads=8, head_dim=128, count=32)
LIVES_S: Final = (0.1, 1.0, 10.0, 60.0)


def frames(card: Card) -> Report:
    """Mapping, growth and tails over frame sizes."""
    report = Report("Frame sizes (wall)")
    mapping: dict[int, float] = {}
    sizes = card.pick(SIZES, SIZES[::5])
    with closing(card.raw()) as raw:
        with closing(card.open()) as device:
            base, place = device.reserve(GIB, RUN_BYTES), raw.reserve(GIB)
            for size in sizes:
                found = _mapping(card, device, raw, base, place, size)
                mapping[size] = found["create and map"].ours
                report.figures += _mapping_figures(size, found)
        for size in sizes:
            report.figures += _growth(card, raw, size)
    lost = {size: _tails(size) for size in sizes}
    report.figures += [
        Figure(f"{size // MIB} MiB: tails of {SEQUENCES} sequences", bytes_ / GIB, "GiB",
               clock="counted", details={"percent": 100 * part})
        for size, (bytes_, part) in lost.items()
    ]  # fmt: skip
    report.words = _words(mapping, {size: part for size, (_, part) in lost.items()})
    return report


def _mapping(
    card: Card, device: ByteDevice, raw: Raw, base: int, place: int, size: int
) -> dict[str, Pair]:
    """Seconds a GiB of each call."""
    total = card.pick(GIB, 2 * RUN_BYTES)
    run, count = RUN_BYTES // size, total // size
    scale = GIB / total

    def ours() -> dict[str, float]:
        laps = Laps()
        made = laps.time("create", device.create, count, size)
        runs = [MapRun(base + at * size, made[at : at + run]) for at in range(0, count, run)]
        laps.time("map", device.map, runs)
        laps.time("unmap", device.unmap, [UnmapRun(one.address, run) for one in runs])
        laps.time("release", device.release, made)
        return _summed(laps, scale)

    def bare() -> dict[str, float]:
        laps = Laps()
        made = laps.time("create", raw.create, count, size)

        def each(done: bool) -> None:
            for at in range(0, count, run):
                if done:
                    raw.unmap(place + at * size, run * size)
                else:
                    raw.map(place + at * size, made[at : at + run], size)

        laps.time("map", each, False)
        laps.time("unmap", each, True)
        laps.time("release", raw.release, made)
        return _summed(laps, scale)

    device.quiesce()
    return pairs(ours, bare, repeats=5)


def _summed(laps: Laps, scale: float) -> dict[str, float]:
    both = {"create and map": laps["create"] + laps["map"]}
    return {name: seconds * scale for name, seconds in (both | laps).items()}


def _mapping_figures(size: int, found: dict[str, Pair]) -> list[Figure]:
    return [
        micros(f"{size // MIB} MiB: {name}, a GiB", found[name])
        for name in ("create and map", "map", "unmap", "release")
    ]


def _growth(card: Card, raw: Raw, size: int) -> list[Figure]:
    """Microseconds that a frame adds to a step: created and mapped, and mapped from the pool."""
    crossings = card.pick(24, 3)
    fill = size // LAYER.token_bytes
    most = (crossings + 2) * fill
    place = raw.reserve(RUN_BYTES)
    config = Config(
        layers=[LAYER], gpu=GpuTier(2 * (crossings + 2) * size, size), max_tokens=most,
        max_sequences=2, max_utilization_for_resume=1.0,
    )  # fmt: skip
    figures = []
    with opened(config, card.open()) as kv:
        for name in ("create and map", "map from the pool"):
            seq = kv.create()
            if name != "create and map":
                kv.ladder.create(crossings + 2)
            seq.resume()
            pair = pairs(
                lambda seq=seq: {"grow": _cross(kv, seq, fill)},  # type: ignore[misc]
                lambda name=name: {"grow": _bare(raw, place, size, name)},  # type: ignore[misc]
                crossings,
            )["grow"]
            figures.append(micros(f"{size // MIB} MiB: a step over a frame, {name}", pair))
    return figures


def _cross(kv: Manager, seq: Sequence, fill: int) -> float:
    """A step into a new frame, less a step that stays in it; then fill the frame."""
    batch = kv.batch([seq])
    crossing = wall(lambda: kv.settle(kv.step(batch)))
    staying = wall(lambda: kv.settle(kv.step(batch)))
    kv.settle(kv.step(batch, fill - 2))
    return crossing - staying


def _bare(raw: Raw, place: int, size: int, name: str) -> float:
    """The bare calls for one frame."""
    laps = Laps()
    made = laps.time("create and map", raw.create, 1, size)
    laps.time("map from the pool", raw.map, place, made, size)
    raw.unmap(place, size)
    raw.release(made)
    return sum(laps.values()) if name == "create and map" else laps[name]


def _tails(size: int) -> tuple[int, float]:
    """Bytes that sequences of mixed lengths pay for beyond their tokens, and their part of all."""
    found = np.random.default_rng(0).lognormal(np.log(MEAN_TOKENS) - 0.32, 0.8, SEQUENCES)
    lengths = np.clip(found, 32, 8192).astype(int)
    config = Config(
        layers=[LAYER], gpu=GpuTier(SEQUENCES * 2 * GIB, size), max_tokens=8192,
        max_sequences=SEQUENCES, max_utilization_for_resume=1.0,
    )  # fmt: skip
    with opened(config, NullDevice()) as kv:
        seqs = [kv.create(max_tokens=int(length)) for length in lengths]
        for seq in seqs:
            seq.resume()
        kv.settle(kv.step(kv.batch(seqs), lengths))
        charged = kv.gpu.charged * size
    lost = charged - int(lengths.sum()) * LAYER.token_bytes
    return lost, lost / charged


def _words(mapping: dict[int, float], lost: dict[int, float]) -> list[str]:
    """The best size by how long a request lives."""
    request = MEAN_TOKENS * LAYER.token_bytes / GIB
    words = [
        f"A request of {MEAN_TOKENS} tokens takes {request:.2f} GiB. One that adopts nothing pays "
        "for its mapping once; its tail keeps its part of the memory from others while it lives."
    ]
    for life in LIVES_S:
        costs = {size: mapping[size] * request + lost[size] * life for size in mapping}
        best = min(costs, key=costs.__getitem__)
        each = ", ".join(f"{size // MIB}: {1e3 * cost:.1f}" for size, cost in costs.items())
        words.append(
            f"If it lives {life:g} s: {best // MIB} MiB is best (ms a request by MiB: {each})."
        )
    return words
