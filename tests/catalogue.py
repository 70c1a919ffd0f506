"""What callers pass, right and wrong: a catalogue of odd values, and managers to try them on.

A value says as what it may be taken, if as anything: numpy's int8 of two as a whole number, and
then just as two is. Values of a manager's own (its sequences, a step of another one's) are made
for it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final
from unittest.mock import Mock
from weakref import proxy

import numpy as np
from attrs import frozen

from kvstate import (
    Config,
    GpuTier,
    HostTier,
    LayerSpec,
    Manager,
    Sequence,
    TensorView,
    TraceError,
    trace,
)
from kvstate.device import ByteDevice
from kvstate.gpu import NullDevice
from kvstate.view import view

FRAME: Final = 4096
STATES: Final = ("ACTIVE", "CREATED", "STEPPED", "SUSPENDED", "DROPPED", "MIRRORS", "RECORDED")
"""Of the sequence that is named by default. With MIRRORS, copies to the host are due; with
RECORDED, every call is written down."""


def configured(*, mirrors: bool = False) -> Config:
    """Four tokens a frame and a block, and room for whatever a call asks for."""
    return Config(
        layers=[LayerSpec(kv_heads=1, head_dim=256, dtype="float16")],
        gpu=GpuTier(64 * FRAME, FRAME),
        host=HostTier(64 * FRAME),
        tokens_per_block=4,
        max_tokens=16,
        max_sequences=12,
        write_through="on_commit" if mirrors else "on_free",
    )


class World:
    """A manager with sequences in every state, and what else a call may be about."""

    def __init__(self, state: str, device: ByteDevice | None = None) -> None:
        self.device: ByteDevice = device or NullDevice()
        self.lines: list[bytes] = []
        record = self.lines.append if state == "RECORDED" else None
        self.kv = kv = Manager(configured(mirrors=state == "MIRRORS"), self.device, record=record)
        self.created = kv.create([1, 2, 3], 8)
        self.suspended, self.dropped = self._written(6), self._written(6)
        self.suspended.suspend()
        self.dropped.drop()
        kv.poll()
        self.closed = self._written(1)
        self.closed.close()
        self.stepped = self._written(4)
        self.settled = kv.step(kv.batch([self.stepped]), 1)
        kv.settle(self.settled)
        self.step = kv.step(kv.batch([self.stepped]), 2)
        self.active = self._written(6)
        self.active.commit([1, 2, 3, 4])
        named = {name.upper(): one for name, one in vars(self).items() if isinstance(one, Sequence)}
        self.seq = named.get(state, self.active)
        self.batch = kv.batch([self.stepped if state == "STEPPED" else self.active])
        self.publisher = kv.events()
        self.view: TensorView | None = None
        if self.device.memory is not None:
            self.view = kv.tensors(self.active, 0)[0]

    def _written(self, tokens: int) -> Sequence:
        seq = self.kv.create(max_tokens=12)
        seq.resume()
        self.kv.settle(self.kv.step(self.kv.batch([seq]), tokens))
        return seq

    def books(self) -> list[Any]:
        """Everything that a refused call must leave as it was."""
        return [view(self.kv), *self.said()]

    def said(self) -> list[Any]:
        """What of it does not depend on where objects are, so that it compares with another's."""
        kv, columns = self.kv, self.kv.columns
        numbers = ("scheduled", "settled", "known", "capacity", "steps", "life", "open_block")
        traits = (
            "uid", "row", "state", "max_tokens", "prompt", "extras", "identity", "commits", "keys",
            "reserves", "matched_tokens",
        )  # fmt: skip
        return [
            [getattr(columns, name).tolist() for name in numbers], list(columns.free),
            [[getattr(seq, name) for name in traits] for seq in kv.sequences.values()],
            [bytes(seq.pages.states) for seq in kv.sequences.values()], list(kv.gpu.counts),
            kv._created, kv._stepped, kv.reuse.index.clock, [seq.uid for seq in self.batch],
            self.batch.mask.tolist(), self.batch.rows.tolist(),
        ]  # fmt: skip

    def unreadable(self) -> list[str]:
        """What was written down and is no trace."""
        found = []
        for line in self.lines[1:]:
            try:
                trace.decode_call(line, 0)
            except TraceError as error:
                found.append(f"{line!r}: {error}")
        return found

    def asked(self) -> dict[str, int]:
        """What was asked of the device."""
        return dict(self.device.calls)

    def close(self) -> None:
        """At other commits it may be beyond that."""
        with suppress(Exception):
            self.kv.close()
        self.device.close()


# The catalogue.


@frozen
class Value:
    """One odd value. `tags` say as what it may be taken; it then does what the value `twin`
    does."""

    name: str
    make: Callable[[World, World], Any]
    tags: frozenset[str]
    twin: str | None = None


VALUES: Final[dict[str, Value]] = {}


def _value(name: str, make: Callable[[World, World], Any], tags: str = "", twin: str = "") -> None:
    """`make` is given this manager's world and another one's."""
    assert name not in VALUES
    VALUES[name] = Value(name, make, frozenset(tags.split()), twin or None)


def _fixed(value: Any, tags: str = "", twin: str = "") -> None:
    name = repr(value)
    if isinstance(value, np.generic):  # which numpy shows in one way or another
        name = f"{type(value).__name__}({value.item()!r})"
    _value(name, lambda here, there: value, tags, twin)


_fixed(None, "none")
_fixed(True, "flag")
_fixed(False, "flag")
_fixed(np.True_, "flag", "True")
_fixed(np.array(False), "flag", "False")
_fixed(2, "whole")
_fixed(0, "whole")
_fixed(-1, "negative")
_fixed(12, "whole")
_fixed(17, "whole")
_fixed(2**31, "large")
_fixed(2**63 - 1, "large")
_fixed(2**63, "uint64")
_fixed(2**70, "huge")
_fixed(-(2**70), "huge")
for _width in (8, 16, 32, 64):
    for _kind in ("int", "uint"):
        _fixed(np.dtype(f"{_kind}{_width}").type(2), "whole", "2")
_fixed(np.array(2), "whole", "2")
_fixed(np.array(2, np.uint8), "whole", "2")
_fixed(np.int16(12), "whole", "12")
_fixed(np.int32(-1), "negative", "-1")
_fixed(2.0, "number")
_fixed(0.5, "number share")
_fixed(np.float32(0.5), "number share", "0.5")
_fixed(np.float64(2.0), "number", "2.0")
_fixed(np.array(0.5), "number share", "0.5")
_fixed(np.longdouble(2))
_fixed(float("nan"))
_fixed(np.float32("nan"))
_fixed(float("inf"))
_fixed(1j)
_fixed(Decimal(2))
_fixed(Fraction(2))
_fixed("2", "text")
_fixed("", "text")
_fixed(np.str_("x"), "text")
_fixed("\udc80")
_fixed(b"2", "bytes")
_fixed(b"", "bytes")
_fixed(np.bytes_(b"2"), "bytes", "b'2'")
_fixed(bytearray(b"2"))
_value("memoryview", lambda here, there: memoryview(b"2"))
_fixed([], "empty")
_fixed((), "empty")
_fixed([2], "ids row")
_fixed((2,), "ids row", "[2]")
_fixed([np.int8(2)], "ids row", "[2]")
_fixed(range(2, 3), "ids row", "[2]")
_fixed(array("q", [2]), "ids row", "[2]")
_fixed(deque([2]), "ids row", "[2]")
_fixed(np.array([2]), "ids row", "[2]")
_fixed(np.array([2], np.uint8), "ids row", "[2]")
_fixed(np.array([2], object), "ids row", "[2]")
_fixed([[2]], "ids", "[2]")
_fixed(np.array([[2]]), "ids", "[2]")
_fixed([2, 3], "ids")
_fixed([-1], "ids")
_fixed([17], "ids")
_fixed([2**31])
_fixed([2**70])
_fixed([2.0])
_fixed([True])
_fixed(["2"])
_fixed([None])
_fixed([2, float("nan")])
_fixed([[2], [3]])
_fixed([[[2]]])
_fixed(np.array([2.0]))
_fixed(np.array([True]))
_fixed(np.array(["2"]))
_fixed(np.array([[2], [3]]))
_fixed(np.array([2**63 + 2], np.uint64))
_fixed(np.ma.array([2], mask=[True]))
_fixed({}, "extras")
_fixed({0: b"x"}, "extras")
_fixed({np.int64(0): b"x"}, "extras", "{0: b'x'}")
_fixed({"0": b"x"})
_fixed({-1: b"x"})
_fixed({99: b"x"})
_fixed({1.5: b"x"})
_fixed({0: "x"})
_fixed({0: ()})
_fixed({1: 2})
_fixed(set())
_fixed({2})
_fixed(frozenset({b"2"}))
_value("a generator", lambda here, there: (one for one in [2]))
_value("an iterator", lambda here, there: iter([2]))
_value("keys", lambda here, there: {2: 3}.keys())
_value("an object", lambda here, there: object())
_value("a function", lambda here, there: lambda *_: None, "function")
_fixed(int)
_fixed(Sequence)
_fixed(NullDevice)
_fixed(...)
_fixed(ValueError("2"))
_value("itself", lambda here, there: here.kv, "manager")
_value("another manager", lambda here, there: there.kv, "manager")
_value("its device", lambda here, there: here.device, "device")
_value("another device", lambda here, there: there.device, "device")
_value("a stream", lambda here, there: here.device.stream(), "stream")
_value("another's stream", lambda here, there: there.device.stream())
_value("an event", lambda here, there: here.device.record(None), "event")
_value("another's event", lambda here, there: there.device.record(None))
_value("a sequence", lambda here, there: here.active, "seq")
_value("a new one", lambda here, there: here.created, "seq")
_value("one that is suspended", lambda here, there: here.suspended, "seq")
_value("one that is closed", lambda here, there: here.closed, "gone")
_value("another's sequence", lambda here, there: there.active)
_value("what only says so", lambda here, there: Mock(spec=Sequence), "function")
_value("a stand-in", lambda here, there: proxy(here.kv))
_value("a batch", lambda here, there: here.kv.batch([here.active]), "batch seqs")
_value("an empty batch", lambda here, there: here.kv.batch([]), "batch seqs")
_value("another's batch", lambda here, there: there.batch)
_value("a step", lambda here, there: here.step, "step")
_value("one that is settled", lambda here, there: here.settled)
_value("another's step", lambda here, there: there.step)
_value("sequences", lambda here, there: [here.active, here.created], "seqs")
_value("a sequence twice", lambda here, there: [here.active, here.active])
_value("sequences, and another's", lambda here, there: [here.active, there.active])
_value("sequences one by one", lambda here, there: iter([here.active, here.created]), "seqs",
       "sequences")  # fmt: skip
_value("sequences without order", lambda here, there: {here.active, here.created})
_value("sequences by name", lambda here, there: here.kv.sequences)
_value("a publisher", lambda here, there: here.publisher, "publisher")
_value("a configuration", lambda here, there: here.kv.config, "config")
_value("a tier", lambda here, there: here.kv.config.gpu, "gpu")
_value("a host tier", lambda here, there: here.kv.config.host, "host")
_value("a layer", lambda here, there: here.kv.config.layers[0])
_value("layers", lambda here, there: here.kv.config.layers, "layers")
