"""Chooses the directed programs: `python -m tests.directed` writes `directed.jsonl`.

They are taken from whatever is known to get somewhere: the shortest program of each row and of each
pair of rows, the cases of the corpus, the scenarios of the faults, failures of old, and those that
were chosen before, some of which the fuzz has drawn. Of these the one is taken that shows most new
for its calls, until nothing is left to be shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from msgspec.structs import replace

from kvstate import trace
from kvstate.campaign import directed
from kvstate.campaign.fuzz import Tally, demanded, played
from kvstate.campaign.shrink import Program
from kvstate.device import ByteDevice
from kvstate.gpu import HostDevice
from tests.corpus.case import See
from tests.corpus.cases import CASES
from tests.faults.scenarios import SCENARIOS
from tests.paths import header, search

HERE = Path(__file__).parent
OVERHEAD_CALLS = 3
"""What a program more costs, in calls: a device that is opened and closed."""


@frozen
class Shown:
    """A program, and what is seen when it is played."""

    header: trace.Header
    program: Program
    seen: frozenset[str]


def opened(streams: str, seed: int) -> ByteDevice:
    return HostDevice(streams=streams, seed=seed)


def seen(tally: Tally) -> frozenset[str]:
    """What a campaign must see that this one has seen."""
    return frozenset(demanded()) - frozenset(tally.unseen())


def chosen() -> list[Shown]:
    """The programs, those first that show most. Raises ValueError if they do not show all."""
    known, found = list(_known()), list[Shown]()
    left = set(demanded())
    while left:
        best = max(known, key=lambda one: len(one.seen & left) / _cost(one))
        if not best.seen & left:
            raise ValueError(f"no known program shows {sorted(left)}")
        found.append(best)
        left -= best.seen
    return found


def _cost(one: Shown) -> int:
    return len(one.program) + OVERHEAD_CALLS


def _known() -> Iterator[Shown]:
    """Every known program that holds, with a fair end and without, played eagerly."""
    for head, program in dict.fromkeys(_hashable(*one) for one in _sources()):
        calls = list(map(trace.decode_call, program, range(len(program))))
        for fair in (False, True):
            each = replace(head, streams="eager", seed=0, strict=False, fair=fair)
            tally = played(each, calls, opened)
            if not tally.failures:
                yield Shown(each, calls, seen(tally))


def _hashable(head: trace.Header, program: Program) -> tuple[trace.Header, tuple[bytes, ...]]:
    return head, tuple(map(trace.encode, program))


def _sources() -> Iterator[tuple[trace.Header, Program]]:
    yield from directed.programs()
    found = search()
    for key, calls in found.rows.items():
        yield header(retain=key in found.retaining), list(calls)
    for calls in found.pairs.values():
        yield header(), list(calls)
    for path in sorted((HERE / "known").glob("*.jsonl")):
        yield trace.read(path)
    for case in CASES:
        if case.config is not None:
            head = trace.Header(kvstate_trace=trace.VERSION, config=case.config)
            yield head, [call for call in case.program if not isinstance(call, See)]
    for scenario in SCENARIOS:
        yield scenario.header(4096, "eager"), list(scenario.program)


def main() -> None:
    """Choose, and write."""
    logging.disable()
    found = chosen()
    traces = [
        b"\n".join([trace.encode(one.header), *map(trace.encode, one.program)]) for one in found
    ]
    path = Path(directed.__file__).parent / directed.FILE
    path.write_bytes(b"\n\n".join(traces) + b"\n")
    calls = sum(len(one.program) for one in found)
    print(f"wrote {len(found)} programs of {calls} calls to {path}")


if __name__ == "__main__":
    main()
