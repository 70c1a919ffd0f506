"""Directed programs: between them they fire every row and link, are refused at every place, reach
every state, are asked by every law, and poison a manager.

A campaign plays them first, which takes about a second, so that all of this is seen on any machine;
what is not seen then is a defect, and what is drawn afterwards is exploration. The programs are
`directed.jsonl`: `python -m tests.directed` chooses the fewest and shortest that it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from attrs import evolve
from msgspec.structs import replace

from kvstate import trace
from kvstate.campaign.fuzz import OpenDevice, Tally, played
from kvstate.campaign.shrink import Program
from kvstate.config import Config

FILE = "directed.jsonl"


@cache
def programs() -> tuple[tuple[trace.Header, Program], ...]:
    """Every program, in the order in which they are played; each is a trace, with an empty line
    behind it."""
    text = files(__package__).joinpath(FILE).read_bytes()
    return tuple(trace.decode(part.splitlines()) for part in text.strip().split(b"\n\n"))


def count_calls() -> int:
    """The calls of all."""
    return sum(len(program) for _, program in programs())


def tallies(open_device: OpenDevice, granularity_bytes: int) -> Iterator[Tally]:
    """Play each on a device whose frames are multiples of that. A failure is shrunk, as one that
    was drawn is."""
    for header, program in programs():
        config = scaled(header.config, granularity_bytes)
        yield played(replace(header, config=config), program, open_device)


def scaled(config: Config, granularity_bytes: int) -> Config:
    """The same tokens a frame, and the same frames, where frames are multiples of that."""
    factor = -(-granularity_bytes // config.gpu.frame_bytes)
    gpu, host = config.gpu, config.host
    return evolve(
        config,
        layers=[evolve(one, head_dim=one.head_dim * factor) for one in config.layers],
        gpu=evolve(
            gpu,
            budget_bytes=gpu.budget_bytes * factor,
            frame_bytes=gpu.frame_bytes * factor,
            arena_bytes=gpu.arena_bytes and gpu.arena_bytes * factor,
        ),
        host=host and evolve(host, size_bytes=host.size_bytes * factor),
    )
