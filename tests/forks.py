"""A process that forks while it has a manager: what the child may do, and what the parent has then.

`python -m tests.forks DEVICE`, in a process of its own: that of the tests must not be forked.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from attrs import frozen

from kvstate import IllegalTransition, Manager, Sequence, TensorView
from kvstate.device import SEGMENT, ByteDevice, MapRun
from kvstate.gpu import open_device
from kvstate.observe import check_laws
from kvstate.publisher import Publisher
from tests.conftest import FRAME, small
from tests.corpus.case import scaled

TOKENS: Final = 6


@frozen
class Held:
    """What a process has when it forks."""

    kv: Manager
    device: ByteDevice
    seq: Sequence
    away: Sequence
    events: Publisher
    view: TensorView | None
    """Of its memory, if there is any."""
    keys: Any
    """The same as an array, if it can be one here."""


def written(kv: Manager) -> bytes:
    """What every sequence has."""
    size = TOKENS * kv.geometry.row_bytes
    return (bytes(range(1, 256)) * (size // 255 + 1))[:size]


def held(kv: Manager, device: ByteDevice) -> Held:
    """One sequence that runs and one that is suspended, with these bytes."""
    events, seqs = kv.events(), []
    for _ in range(2):
        seq = kv.create(max_tokens=16)
        seq.resume()
        kv.settle(kv.step(kv.batch([seq]), TOKENS))
        device.poke(seq.base or 0, written(kv))
        seq.commit(range(TOKENS))
        seqs.append(seq)
    seqs[1].suspend()
    kv.poll()
    view = kv.tensors(seqs[0], 0)[0] if device.memory is not None else None
    keys: Any = np.asarray(view) if view is not None and view.memory[0] == "cpu" else None
    return Held(kv, device, seqs[0], seqs[1], events, view, keys)


def check(now: Held) -> None:
    """The parent has what it had, and goes on."""
    data = written(now.kv) if now.device.memory else b""
    check_laws(now.kv)
    assert now.device.peek(now.seq.base or 0, len(data)) == data
    now.away.resume()
    now.device.synchronize(None)
    now.kv.poll()
    assert now.device.peek(now.away.base or 0, len(data)) == data
    now.seq.suspend()
    now.seq.resume()
    now.device.synchronize(None)
    now.kv.poll()
    assert now.device.peek(now.seq.base or 0, len(data)) == data
    check_laws(now.kv)
    assert not now.device.faults
    now.seq.close()
    now.away.close()


def refused(call: Callable[[], object], name: str) -> None:
    """The child may not do this; the error says whose it is."""
    found = None
    try:
        call()
    except IllegalTransition as error:
        found = error
    assert found is not None, f"{name} was not refused"
    assert (found.state, found.event) == ("FORKED", name)
    assert f"process {os.getppid()} " in str(found)
    assert f"its child {os.getpid()}" in str(found)


# What children do.


def leaves(now: Held) -> None:
    """Nothing: it leaves what the parent left open."""


def exits(now: Held) -> None:
    sys.exit(0)


def closes(now: Held) -> None:
    now.kv.close()
    assert now.kv.closed
    now.device.close()


def calls(now: Held) -> None:
    """Everything that it could."""
    kv, seq, away = now.kv, now.seq, now.away
    made: dict[str, Callable[[], object]] = {
        "create": lambda: kv.create(max_tokens=4), "poll": kv.poll, "trim": kv.trim,
        "stats": kv.stats, "events": kv.events, "clear_reuse": kv.clear_reuse,
        "probe_reuse": lambda: kv.probe_reuse([1, 2]), "fits": lambda: kv.fits(4),
        "admits": lambda: kv.admits(4), "largest_max_tokens": kv.largest_max_tokens,
        "dummy": lambda: kv.dummy(4), "batch": lambda: kv.batch([seq]), "fork": seq.fork,
        "tensors": lambda: kv.tensors(seq, 0), "tensors_all": lambda: kv.tensors_all(seq),
        "reads": lambda: kv.reads([(seq, 1)]), "resume": away.resume, "suspend": seq.suspend,
        "drop": seq.drop, "close_sequence": seq.close, "rewind": lambda: seq.rewind(0),
        "resize": lambda: seq.resize(16), "commit": lambda: seq.commit([1]),
        "stop_committing": seq.stop_committing, "drain": now.events.drain,
    }  # fmt: skip
    if now.view is not None:
        made["export"] = now.view.__dlpack__
    for name, call in made.items():
        refused(call, name)


def asks_the_device(now: Held) -> None:
    device, place = now.device, now.seq.base or 0
    rows = np.array([(place, 0, 1, 7, -1)], SEGMENT)
    made: dict[str, Callable[[], object]] = {
        "reserve": lambda: device.reserve(4096, 4096), "create": lambda: device.create(1, 4096),
        "map": lambda: device.map([MapRun(place, [0])]), "release": lambda: device.release([0]),
        "poll": device.poll, "quiesce": device.quiesce, "ledger": device.ledger,
        "peek": lambda: device.peek(place, 16), "poke": lambda: device.poke(place, b"child"),
        "strays": lambda: device.strays([], b"ab"), "record": lambda: device.record(None),
        "write": lambda: device.write(None, rows), "verify": lambda: device.verify(None, rows),
        "publish": lambda: device.publish(None, [0], [place], [1]), "stream": device.stream,
        "synchronize": lambda: device.synchronize(None), "attach": lambda: device.attach(1),
    }  # fmt: skip
    for name, call in made.items():
        refused(call, name)
    maps = Path("/proc/self/maps").read_text()
    assert "kvstate-frames" not in maps, "its frames are mapped in the child"
    files = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not any("kvstate-frames" in os.readlink(file) for file in files if file.exists())


def forgets(now: Held) -> None:
    """All of it, and takes much memory of its own: the addresses may be used again."""
    for one in ("kv", "device", "seq", "away", "events", "view", "keys"):
        object.__setattr__(now, one, None)
    gc.collect()
    own = [np.full(1 << 20, 7, np.uint8) for _ in range(64)]
    gc.collect()
    assert all((one == 7).all() for one in own)


def works(now: Held) -> None:
    """On a device of its own."""
    device = open_device(now.device.name)
    with Manager(small(), device) as kv:
        check(held(kv, device))


def writes(now: Held) -> None:
    """Through an array over the parent's memory."""
    now.keys[...] = 0


def pools(now: Held) -> None:
    """In a process that forks once more."""
    calls(now)
    own = multiprocessing.get_context("fork").Process(target=leaves, args=(now,))
    own.start()
    own.join()
    assert own.exitcode == 0


DEEDS: Final = {
    one.__name__: one
    for one in (leaves, exits, closes, calls, pools, asks_the_device, forgets, works, writes)
}


def deeds_of(kind: str) -> dict[str, Callable[[Held], None]]:
    """Arrays are over host memory only, and CUDA cannot be used in a child of who has used it."""
    left_out = {"host": (), "null": ("writes",), "cuda": ("writes", "works")}[kind]
    return {name: deed for name, deed in DEEDS.items() if name not in left_out}


def main(kind: str) -> None:
    """For each deed, how its child has ended."""
    warnings.simplefilter("error")
    for name, deed in deeds_of(kind).items():
        device = open_device(kind)
        with Manager(scaled(small(), device.granularity_bytes // FRAME), device) as kv:
            now = held(kv, device)
            child = os.fork()
            if not child:
                deed(now)
                return
            status = os.waitpid(child, 0)[1]
            check(now)
        assert device.ledger().empty
        print(name, status, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
