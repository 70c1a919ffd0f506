"""Processes, copies, owners: what a manager and its device are refused to be, twice over."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvstate import Manager
from kvstate.device import ByteDevice
from kvstate.errors import IllegalTransition
from kvstate.gpu import HostDevice, NullDevice
from kvstate.handles import Handle
from kvstate.order_device import ordered
from tests.conftest import small
from tests.forks import deeds_of
from tests.test_guard import written

ROOT: Final = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", ["host", "null", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_whatever_a_child_does_the_parent_has_all_of_it(kind: str) -> None:
    """See `tests/forks.py`: it reads its bytes back after each child."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.forks", kind], cwd=ROOT, text=True,
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), "the children end without a word"
    ends = dict.fromkeys(deeds_of(kind), 0)
    if "writes" in ends:
        ends["writes"] = signal.SIGSEGV  # there is nothing where the parent has its memory
    assert done.stdout.splitlines() == [f"{deed} {end:d}" for deed, end in ends.items()]


# Copies.


@pytest.fixture
def handles() -> Iterator[dict[str, object]]:
    """One of each kind."""
    inner = HostDevice()
    device = ordered(inner)
    with Manager(small(), device) as kv:
        seq = written(kv)
        batch = kv.batch([seq])
        yield {
            "Manager": kv, "Sequence": seq, "Batch": batch, "Step": kv.step(batch),
            "Publisher": kv.events(), "TensorView": kv.tensors(seq, 0)[0], "HostDevice": inner,
            "Ordered": device, "SimulatedStream": inner.stream(),
            "SimulatedEvent": inner.record(None), "Mark": device.record(None),
            "Remote": device.remote("nic"),  # type: ignore[attr-defined]
        }  # fmt: skip
        kv.settle(next(iter(kv.flight.steps.values())))


NOT_HERE: Final = {
    "Books",
    "SimulatedDevice",
    "NullDevice",
    "CudaDevice",
    "CudaStream",
    "CudaEvent",
}


def test_every_handle_is_tried(handles: dict[str, object]) -> None:
    def kinds(base: type) -> set[str]:
        return {base.__name__}.union(*map(kinds, base.__subclasses__()))

    ours = {name for name in kinds(Handle) if name not in ("Handle", *NOT_HERE)}
    assert {type(one).__name__ for one in handles.values()} == handles.keys()
    assert ours & handles.keys() == handles.keys()


@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda one: one.__name__
)
def test_a_handle_is_not_copied(how: Callable[[Any], Any], handles: dict[str, object]) -> None:
    for name, one in handles.items():
        with pytest.raises(TypeError, match=f"a {name} cannot be copied or pickled: .*; "):
            how(one)
        with pytest.raises(TypeError, match=f"a {name} cannot be"):
            how({"request": [one]} if how is not copy.copy else one)


# Owners.


@pytest.mark.parametrize("kind", [HostDevice, NullDevice])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_device_has_one_manager(kind: type[Any], wrapped: bool) -> None:
    inner = kind()
    device: ByteDevice = ordered(inner) if wrapped else inner
    with Manager(small(), device) as kv:
        seq = written(kv)
        for again in (inner, device, ordered(inner)):
            for debug in (False, True):
                with pytest.raises(IllegalTransition, match="it has a manager, and can have only"):
                    Manager(small(), again, debug=debug)
        assert seq.length_tokens == 6
        kv.settle(kv.step(kv.batch([seq])))
    with pytest.raises(
        IllegalTransition, match=f"the {inner.name} device: attach .* it was closed"
    ):
        Manager(small(), device)
    assert inner.ledger().empty
