"""Misuse, generated: every parameter of everything public is tried with every value of a catalogue.

The parameters come from the signatures, so that a new one is tried too: it fails until `KINDS` says
what it takes. A call with one odd value, and plain ones for all else, must do what it does with the
plain value that equals it, or raise an error of ours; then the books are as they were: the view,
the columns, the numbers to come, and what was asked of the device. Managers are in several states,
with copies and a step on the way, and one is recorded.

`python -m tests.test_misuse` prints the numbers, and what was wrong.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import pytest
from attrs import define, field, frozen

import kvstate
from kvstate import Batch, Config, GpuTier, HostTier, LayerSpec, Manager, Sequence, TensorView
from kvstate.errors import CapacityError, KvStateError
from kvstate.events import EventBatch, Numbered
from kvstate.gpu import HostDevice, NullDevice, open_device
from kvstate.index import Index
from kvstate.keys import Identity
from kvstate.publisher import Publisher
from tests.catalogue import FRAME, STATES, VALUES, Value, World

MADE: Final = ("Batch", "Sequence", "Step", "Stats", "TensorView")
"""Made by a manager and by nobody else; their methods are tried."""


# What each parameter takes.

_WHOLE: Final = "whole"
_ANY: Final = "whole large"
KINDS: Final[dict[str, tuple[Any, str]]] = {
    # Of any call about a sequence, a batch or a step.
    "seq": (lambda w: w.seq, "seq gone"), "parent": (lambda w: w.seq, "seq"),
    "batch": (lambda w: w.batch, "batch"), "step": (lambda w: w.step, "step"),
    "stream": (lambda w: None, "none stream"), "after": (lambda w: None, "none event"),
    "seqs": (lambda w: [w.seq], "seqs empty gone"),
    "Manager.create.prompt_tokens": (lambda w: [1, 2, 3], "none ids whole negative empty"),
    "Manager.create.max_tokens": (lambda w: 8, "none whole"),
    "Manager.create.commit": (lambda w: True, "flag"),
    "Manager.create.reserve": (lambda w: False, "flag"),
    "salt": (lambda w: b"t", "bytes"),
    "adapter": (lambda w: 1, "none bytes text whole large negative uint64"),
    "extra_keys": (lambda w: {0: b"x"}, "none extras"),
    "Manager.probe_reuse.prompt_tokens": (lambda w: [1, 2, 3], "ids whole negative empty"),
    "Manager.step.tokens": (lambda w: 1, "whole row"),
    "Manager.settle.accepted": (lambda w: [1], "none row"),
    "Manager.commit.tokens": (lambda w: [7], "ids whole negative empty"),
    "Manager.commit_each.tokens": (lambda w: [7], "ids whole negative"),
    "Manager.admits.capacity_tokens": (lambda w: 4, _ANY),
    "Manager.fits.max_tokens": (lambda w: 4, _ANY),
    "Manager.fits.shared_tokens": (lambda w: 4, _WHOLE),
    "Manager.largest_max_tokens.sequences": (lambda w: 2, _ANY),
    "Manager.fork.max_tokens": (lambda w: None, "none whole"),
    "length_tokens": (lambda w: 1, _WHOLE), "capacity_tokens": (lambda w: 12, _WHOLE),
    "Manager.tensors.layer": (lambda w: 0, _WHOLE),
    "Manager.tensors.tokens": (lambda w: 1, "none whole"),
    "Manager.tensors_all.tokens": (lambda w: None, "none whole"),
    "Manager.reads.stays": (lambda w: [(w.active, w.active.stay)], "empty batch"),
    "Manager.trim.keep_frames": (lambda w: 0, _ANY),
    "Manager.poll.deliver": (lambda w: [], "none empty"),
    "rank": (lambda w: 0, "none whole large"), "most_events": (lambda w: 4, "none whole large"),
    "Sequence.fork.max_tokens": (lambda w: None, "none whole"),
    "Sequence.commit.tokens": (lambda w: [7], "ids whole negative empty"),
    "Batch.add.seq": (lambda w: w.created, "seq gone"),
    "Batch.remove.seq": (lambda w: w.active, "seq"),
    "Batch.counts.tokens": (lambda w: 1, "whole row"),
    "format": (lambda w: "maps", ""), "hashes": (lambda w: "bytes", ""),
    "most_pending_blocks": (lambda w: 4, "whole large"),
    "ts": (lambda w: 1.0, "none number whole negative large uint64 huge"),
    "Publisher.encode.numbered": (lambda w: Numbered(0, EventBatch(0.0, [])), ""),
    "TensorView.__array__.dtype": (lambda w: None, ""),
    "TensorView.__array__.copy": (lambda w: None, ""),
    "TensorView.__dlpack__.stream": (lambda w: None, "any"),
    "TensorView.__dlpack__.max_version": (lambda w: None, "none"),
    "TensorView.__dlpack__.dl_device": (lambda w: None, "none"),
    "TensorView.__dlpack__.copy": (lambda w: None, "none flag"),
    # What is made without a manager.
    "LayerSpec.kv_heads": (lambda w: 1, _ANY), "LayerSpec.head_dim": (lambda w: 8, _ANY),
    "LayerSpec.dtype": (lambda w: "int8", ""), "LayerSpec.count": (lambda w: 1, _ANY),
    "GpuTier.budget_bytes": (lambda w: 1 << 20, _ANY),
    "GpuTier.frame_bytes": (lambda w: FRAME, _ANY),
    "GpuTier.map_ahead_frames": (lambda w: 0, _WHOLE),
    "GpuTier.reclaim_frames": (lambda w: 1, _WHOLE),
    "GpuTier.protected_share": (lambda w: 0.1, "share whole"),
    "GpuTier.copy_share": (lambda w: 0.1, "share whole"),
    "GpuTier.arena_bytes": (lambda w: None, "none whole large"),
    "HostTier.size_bytes": (lambda w: 1 << 20, _ANY),
    "HostTier.pace_bytes": (lambda w: 1 << 20, f"none {_ANY}"),
    "Config.layers": (lambda w: w.kv.config.layers, "layers"),
    "Config.gpu": (lambda w: w.kv.config.gpu, "gpu"),
    "Config.host": (lambda w: w.kv.config.host, "none host"),
    "Config.tokens_per_block": (lambda w: 4, _WHOLE), "Config.max_tokens": (lambda w: 16, _WHOLE),
    "Config.max_sequences": (lambda w: 4, _WHOLE),
    "Config.max_utilization_for_resume": (lambda w: 1.0, "share whole"),
    "Config.write_through": (lambda w: "off", ""), "Config.spans": (lambda w: "off", ""),
    "Config.partial_blocks": (lambda w: True, "flag"), "Config.adopt": (lambda w: True, "flag"),
    "Config.digest_key": (lambda w: None, "none bytes"),
    "Config.retain": (lambda w: False, "flag"), "Config.scrub": (lambda w: False, "flag"),
    "open_device.kind": (lambda w: "null", ""), "streams": (lambda w: "eager", ""),
    "seed": (lambda w: 0, _ANY),
    "open_device.limit_s": (lambda w: 60.0, "number share whole large uint64 huge"),
    "Index.block_tokens": (lambda w: 4, _WHOLE),
    "Index.key": (lambda w: None, "none bytes"),
    "Identity.weights_epoch": (lambda w: 0, _ANY),
    "Manager.config": (lambda w: w.kv.config, "config"),
    "Manager.device": (lambda w: NullDevice(), "device"),
    "Manager.debug": (lambda w: False, "flag"), "Manager.order": (lambda w: False, "flag"),
    "Manager.record": (lambda w: None, "none function"),
    "Manager.on_violation": (lambda w: "raise", ""),
    "check.kv": (lambda w: w.kv, "manager"),
}  # fmt: skip
"""The plain value, and as what a value may be taken; by parameter, or by call and parameter."""

INSIDE: Final = (
    "Publisher.stored", "Publisher.removed", "Publisher.cleared", "Sequence.enter",
    "Sequence.set_capacity", "Batch.place",
)  # fmt: skip
"""Called by the index and by plans alone."""
REFUSED: Final = (
    "TensorView.__array__", "Manager.tensors", "Manager.tensors_all", "Publisher.encode",
)  # fmt: skip
"""Whatever they are given: numpy must not wrap a view, there is no memory behind these, and no
value here is a batch of events."""


@frozen
class Subject:
    """Something public that takes arguments."""

    name: str
    parameters: tuple[str, ...]
    of: Callable[[World], Callable[..., Any]]
    """What to call."""
    owned: bool = True
    """It is a manager's, whose state may matter."""

    def kind(self, parameter: str) -> tuple[Any, frozenset[str]]:
        """The plain value, and as what a value may be taken."""
        found = KINDS.get(f"{self.name}.{parameter}") or KINDS[parameter]
        return found[0], frozenset(found[1].split())


def _subject(name: str, function: Any, of: Callable[[World], Any], *, owned: bool) -> Subject:
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return Subject(name, tuple(names), of, owned)


def _methods(kind: type, of: Callable[[World], Any], *dunders: str) -> Iterator[Subject]:
    """The public methods of a class, and those of its special ones that callers have a say in."""
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_") or name in dunders:
            yield _subject(
                f"{kind.__name__}.{name}", function, partial(_bound, of, name), owned=True,
            )  # fmt: skip


def _bound(of: Callable[[World], Any], name: str, world: World) -> Any:
    return getattr(of(world), name)


def _itself(kind: Any, world: World) -> Any:
    return kind


def _subjects() -> Iterator[Subject]:
    yield from _methods(Manager, lambda w: w.kv)
    yield from _methods(Sequence, lambda w: w.seq)
    yield from _methods(Batch, lambda w: w.batch)
    yield from _methods(Publisher, lambda w: w.publisher)
    yield from _methods(TensorView, lambda w: w.view, "__array__", "__dlpack__")
    public = [getattr(kvstate, name) for name in kvstate.__all__]
    kinds = [
        one for one in public if not (isinstance(one, type) and issubclass(one, BaseException))
    ]
    for kind in (*kinds, open_device, NullDevice, HostDevice, Index, Identity):
        if kind.__name__ not in MADE:
            yield _subject(kind.__name__, kind, partial(_itself, kind), owned=False)


SUBJECTS: Final = [one for one in _subjects() if one.parameters and one.name not in INSIDE]
_KNOWN: Final = {
    name for one in SUBJECTS for part in one.parameters for name in (part, f"{one.name}.{part}")
}


@define
class Tally:
    """What came of the calls."""

    counts: Counter[str] = field(factory=Counter)
    wrong: dict[str, list[str]] = field(factory=dict)
    """What must not be: `raw` errors, books that `changed`, what was `taken` for something that it
    is not, what was done `unlike` with an equal value, and what was written down `unreadable`."""

    def note(self, kind: str, text: str) -> None:
        """One more call that must not be."""
        self.counts[kind] += 1
        self.wrong.setdefault(kind, []).append(text)


class Trial:
    """Calls with one odd value each, on worlds that are renewed when they have changed."""

    def __init__(self, subject: Subject, state: str, tally: Tally) -> None:
        self.subject, self.state, self.tally = subject, state, tally
        self._here: World | None = None
        self._there: World | None = None
        self._twins: dict[tuple[str, str], Any] = {}

    def worlds(self) -> tuple[World, World]:
        """One that the call is about, and another one."""
        if self._here is None:
            on = HostDevice if self.subject.name.startswith("TensorView") else NullDevice
            self._here = World(self.state, on())
        if self._there is None:
            self._there = World("ACTIVE")
        return self._here, self._there

    def renew(self, *, both: bool = True) -> None:
        """Let go of the first, or of both."""
        for world in (self._here, self._there if both else None):
            if world is not None:
                world.close()
                for line in world.unreadable():
                    self.tally.note("unreadable", line)
        self._here, self._there = None, None if both else self._there

    def run(self, parameter: str, value: Value) -> None:
        """Call with this value, and compare."""
        tally, text = self.tally, f"{self.subject.name}({parameter}={value.name}) on {self.state}"
        tally.counts["tried"] += 1
        done, came, changed = self._call(parameter, value)
        tally.counts[done] += done != "raw"
        if done == "raw":
            tally.note("raw", f"{text}: {came}")
        if changed:
            tally.note("changed", f"{text}: {came}")
        tags = self.subject.kind(parameter)[1]
        if done == "worked" and not (tags & (value.tags | {"any"})):
            tally.note("taken", text)
        if value.twin is not None and tags & value.tags:
            wanted = self._twin(parameter, VALUES[value.twin])
            if came != wanted:
                tally.note("unlike", f"{text}: {str(came)[:200]}, not {str(wanted)[:200]}")

    def _twin(self, parameter: str, value: Value) -> Any:
        key = parameter, value.name
        if key not in self._twins:
            self._twins[key] = self._call(parameter, value)[1]
        return self._twins[key]

    def _call(self, parameter: str, value: Value) -> tuple[str, Any, bool]:
        """Whether it worked, and what came of it; whether a refusal has changed anything."""
        here, there = self.worlds()
        given = {name: self.subject.kind(name)[0](here) for name in self.subject.parameters}
        devices = [one for one in given.values() if isinstance(one, NullDevice)]
        given[parameter] = value.make(here, there)
        both = "another" in value.name
        looked = (here, there) if both else (here,)
        before, asked = [one.books() for one in looked], [one.asked() for one in looked]
        try:
            result = self.subject.of(here)(**given)
        except KvStateError as error:
            same = before == [one.books() for one in looked]
            same = same and not any(one.calls for one in devices)
            if not isinstance(error, CapacityError):
                same = same and asked == [one.asked() for one in looked]
            if not same:
                self.renew(both=both)
            return "named", type(error).__name__, not same
        except Exception as error:
            self.renew(both=both)
            return "raw", repr(error)[:120], False
        finally:
            for device in devices:
                device.close()
        came = _told(result), here.said()
        if isinstance(result, Manager | NullDevice | HostDevice):
            result.close()
        self.renew(both=both)
        return "worked", came, False


def _told(result: Any) -> Any:
    """What a call has returned, so that two can be compared."""
    if isinstance(result, Batch):
        return [seq.uid for seq in result]
    if isinstance(result, list) and result and isinstance(result[0], Numbered):
        return [(one.number, one.batch.ts, len(one.batch.events)) for one in result]
    if isinstance(result, bool | int | str | list | Config | GpuTier | HostTier | LayerSpec):
        return result
    return type(result)


def tried(subjects: list[Subject]) -> Tally:
    """Every parameter of these with every value: on an active sequence, and on another one."""
    tally = Tally()
    for number, subject in enumerate(subjects):
        trials = {state: Trial(subject, state, tally) for state in STATES}
        for parameter in subject.parameters:
            for at, value in enumerate(VALUES.values()):
                other = STATES[1 + (number + at) % (len(STATES) - 1)]
                for state in ("ACTIVE", other) if subject.owned else ("ACTIVE",):
                    trials[state].run(parameter, value)
        for trial in trials.values():
            trial.renew()
    return tally


def test_every_parameter_is_known() -> None:
    """A parameter that is new says what it takes; one that is gone is forgotten."""
    for subject in SUBJECTS:
        for parameter in subject.parameters:
            subject.kind(parameter)
    assert set(KINDS) <= _KNOWN


def _plain(make: Callable[[World], Any], here: World, _: World) -> Any:
    return make(here)


def test_plain_calls_work() -> None:
    """Otherwise their refusals would say nothing."""
    for subject in SUBJECTS:
        first = subject.parameters[0]
        make = subject.kind(first)[0]
        plain = Value("plain", partial(_plain, make), frozenset())
        trials = [Trial(subject, state, Tally()) for state in STATES]
        worked = {trial._call(first, plain)[0] for trial in trials}
        assert "worked" in worked or subject.name in REFUSED, subject.name
        for trial in trials:
            trial.renew()


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda one: one.name)
def test_an_odd_value_is_as_good_as_a_plain_one_or_refused_by_name(subject: Subject) -> None:
    tally = tried([subject])
    assert tally.wrong == {}
    calls = (2 if subject.owned else 1) * len(subject.parameters) * len(VALUES)
    assert tally.counts["tried"] == calls
    assert tally.counts["named"] + tally.counts["worked"] == calls
    if "any" not in {tag for part in subject.parameters for tag in subject.kind(part)[1]}:
        assert tally.counts["named"] >= calls // 2
        assert (tally.counts["worked"] > 0) == (subject.name not in REFUSED)


def test_there_is_enough_to_try() -> None:
    assert len(SUBJECTS) >= 46
    assert sum(len(one.parameters) for one in SUBJECTS) >= 111
    assert len(VALUES) >= 130
    assert sum(value.twin is not None for value in VALUES.values()) >= 25


def _before(name: str, value: Any, *_: Any, **__: Any) -> Any:
    return value


def _cut(name: str, value: Any, *_: Any, **__: Any) -> Any:
    return np.atleast_1d(np.asarray(value, np.int32)).ravel()


def _blind(device: NullDevice, stream: object) -> None:
    return None


HOLES: Final[list[tuple[str, Callable[..., Any], str, str]]] = [
    ("kvstate.manager.whole", _before, "Manager.trim", "taken"),
    ("kvstate.manager.whole", _before, "Manager.dummy", "changed"),
    ("kvstate.manager.flag", _before, "Manager", "taken"),
    ("kvstate.admission.whole", _before, "Manager.admits", "unlike"),
    ("kvstate.admission.flag", _before, "Manager.create", "taken"),
    ("kvstate.rewinding.whole", _before, "Sequence.rewind", "raw"),
    ("kvstate.values.ids", _cut, "Manager.commit", "raw"),
    ("kvstate.values.counts", _cut, "Manager.settle", "taken"),
    ("kvstate.values.in_order", _before, "Manager.batch", "raw"),
    ("kvstate.publisher.number", _before, "Publisher.drain", "taken"),
    ("kvstate.keys.whole", _before, "Manager.probe_reuse", "taken"),
    ("kvstate.index.whole", _before, "Index", "raw"),
    ("kvstate.tensors.in_order", _before, "Manager.reads", "raw"),
    ("kvstate.tensors.flag", _before, "TensorView.__dlpack__", "taken"),
    ("kvstate.gpu.null.NullDevice.check_stream", _blind, "Manager.fork", "changed"),
]
"""The door as it was, in one place each, a call that goes through there, and what is seen of it."""


@pytest.mark.filterwarnings("ignore")  # numpy's, of values that nobody should have given it
@pytest.mark.parametrize(("place", "hole", "name", "kind"), HOLES)
def test_a_hole_in_the_door_is_seen(
    monkeypatch: pytest.MonkeyPatch, place: str, hole: Callable[..., Any], name: str, kind: str
) -> None:
    monkeypatch.setattr(place, hole)
    (subject,) = (one for one in SUBJECTS if one.name == name)
    trial = Trial(subject, "ACTIVE", Tally())
    for parameter, value in product(subject.parameters, VALUES.values()):
        trial.run(parameter, value)
        if trial.tally.counts[kind]:
            break
    trial.renew()
    assert trial.tally.counts[kind] == 1, trial.tally.wrong.keys()


def _report() -> int:
    """Print the numbers, and everything that was wrong."""
    logging.disable()
    tally = tried(SUBJECTS)
    parameters = sum(len(one.parameters) for one in SUBJECTS)
    print(f"{len(SUBJECTS)} calls, {parameters} parameters, {len(VALUES)} values")
    for kind in ("tried", "named", "worked", "raw", "changed", "taken", "unlike", "unreadable"):
        print(f"{kind:10} {tally.counts[kind]:6}")
    if "-v" in sys.argv:
        for kind, found in tally.wrong.items():
            print(f"\n{kind}", *found, sep="\n  ")
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(_report())
