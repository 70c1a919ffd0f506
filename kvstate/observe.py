"""Observation: laws after every call, the order of what is issued, and a record of every call.

All are put around a manager's public methods when they are asked for, so that a manager without
them pays nothing. None of them changes what a call comes to, but for a law that does not hold: that
is raised. One that fails itself, a sink that cannot write, say, is let go of.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Signature, signature
from threading import get_ident
from typing import Any, Final, TypeVar

import numpy as np

from kvstate.blocks import CPU, GPU, Lost
from kvstate.errors import (
    ArgumentError,
    CapacityError,
    IllegalTransition,
    KvStateError,
    LawViolation,
    TraceError,
)
from kvstate.events import FORMATS, Hash, Numbered, decode, encode, hash_text
from kvstate.guard import known
from kvstate.manager import Manager, OnViolation
from kvstate.order import Agent, Operation
from kvstate.order_device import Ordered
from kvstate.order_memory import Pieces
from kvstate.publisher import Publisher
from kvstate.recorder import Recorder
from kvstate.refusal import refusal
from kvstate.replica import Replica
from kvstate.sequence import Column, Sequence, Step
from kvstate.spec.facts import Failure, GivenUp, Ledger, View
from kvstate.spec.host import MIRROR, STALE, STALE_HELD
from kvstate.spec.laws import laws
from kvstate.spec.manager import OPEN, POISONED
from kvstate.tensors import tensors_held
from kvstate.view import view

log = logging.getLogger("kvstate")
T = TypeVar("T")

PUBLIC: Final = (
    "create", "fork", "dummy", "resume", "resize", "rewind", "step", "settle", "commit",
    "commit_each", "stop_committing", "suspend", "drop", "close_sequence", "poll", "wait",
    "tensors_all", "clear_reuse", "trim",
)  # fmt: skip
"""The methods of a manager that are looked at and recorded: those that change something, and the
one that gives out memory for a whole stay."""
_LANDED: Final = frozenset((STALE.code, STALE_HELD.code, MIRROR.code))
NOTHING: Final = Ledger({}, frozenset(), {}, frozenset(), {}, frozenset())
_SNAPSHOTS: Final = 5
"""One of this number of batches is followed by a snapshot."""
_LOOKED_AT: Final = (OPEN.code, POISONED.code)
LEAVING: Final = ("suspend", "drop", "close_sequence", "rewind")
"""Those with which a sequence may leave its GPU memory."""


def check_laws(kv: Manager, asked: Counter[str] | None = None) -> View:
    """Raise LawViolation if an always law does not hold now; what was seen. O(everything)."""
    seen = view(kv)
    _check("always", asked, seen)
    return seen


def check_rest(kv: Manager, asked: Counter[str] | None = None) -> None:
    """End every step and sequence, forget what could be reused, and give all memory back; then
    raise LawViolation if anything is left. The manager can be used again."""
    for step in list(kv.flight.steps.values()):
        kv.settle(step)
    for seq in list(kv.sequences.values()):
        kv.close_sequence(seq)
    kv.clear_reuse()
    kv.trim()
    _check("rest", asked, view(kv))


def check_end(kv: Manager, asked: Counter[str] | None = None) -> None:
    """Raise LawViolation if a closed manager did not give everything back, or its device still
    holds something, or routers believe that there is something. A poisoned one leaves it to its
    device."""
    left = NOTHING if kv.actor.fault is not None else kv.left
    _check("end", asked, left, kv.device.ledger(), kv.replayed() if kv.replayed else ())


class LawKeeper:
    """Checks the laws around every public call of one manager (`debug=True`)."""

    def __init__(self, kv: Manager, asked: Counter[str] | None) -> None:
        self.kv, self.asked = kv, asked
        self.seen: View | None = check_laws(kv, asked)
        """What was there after the last call; None if that was cut short."""
        self._losses: list[Lost] = []
        kv.reuse.index.mourners += (self._losses,)
        self._call, self._failed = kv.flight.call, kv.counters["failed_copies"]

    def after(self, name: str, args: Mapping[str, Any], error: BaseException | None) -> None:
        """The call has returned or raised: every law that speaks of that must hold."""
        (before, self.seen), kv = (self.seen, None), self.kv
        call, self._call = self._call, kv.flight.call
        if kv.actor.fault is not None or kv.closed:
            return
        self.seen = check_laws(kv, self.asked)
        lost = self._given_up()
        if before is None:
            return
        if name == "poll" and error is None and not lost.failed:
            _check("poll", self.asked, before, self.seen)
        _check("loss", self.asked, before, self.seen, lost)
        _check("call", self.asked, before, self.seen)
        if isinstance(error, KvStateError):
            ended = [end for end in kv.flight.ended if end.call > call]
            failed = Failure(
                touched=frozenset(end.uid for end in ended),
                lost=not all(end.ok for end in ended),
                illegal=isinstance(error, IllegalTransition | ArgumentError),
            )
            _check("change", self.asked, before, self.seen, failed)
        if isinstance(error, CapacityError):
            refused = refusal(kv.config, kv.geometry, kv.device, name, args, error)
            _check("refusal", self.asked, self.seen, refused)

    def _given_up(self) -> GivenUp:
        """What the call gave up."""
        failed, self._failed = self._failed, self.kv.counters["failed_copies"]
        why = {lost.serial: lost.why.value for lost in self._losses}
        self._losses.clear()
        return GivenUp(why, failed=self._failed > failed)


class OrderKeeper:
    """Tells the order of one manager's device about calls and steps (`order=True`)."""

    def __init__(self, kv: Manager, device: Ordered) -> None:
        self.kv, self.device, self.order = kv, device, device.order
        self.order.alarm = kv.actor.poison
        self._seqs: tuple[Sequence, ...] = ()
        self._version = -1
        self._streams: list[tuple[Agent, Column, Column]] = []
        """(agent, rows, base of each row) of the batch that was stepped last."""

    def before(self, name: str, subject: object) -> None:
        """A call is about to begin. Whoever settles a step says that it is done."""
        named = isinstance(subject, Sequence | Step)
        self.order.begin(f"{name}({subject})" if named else name)
        if isinstance(subject, Step):
            self.order.settled(subject.number)

    def after(self, result: object) -> str | None:
        """It has returned or raised; what was found that its caller is to be told."""
        try:
            if isinstance(result, Step):
                self._step(result)
        except LawViolation:
            pass  # it is remembered, as any other that came up in the call
        self.order.end()
        found, self.order.fresh = self.order.fresh, None
        return found

    def _step(self, step: Step) -> None:
        """A step reads all tokens of its sequences and writes the new ones."""
        if step.seqs is not self._seqs or self._version != self.kv.columns.version:
            self._look_up(step)
        size = self.kv.geometry.row_bytes
        for agent, places, bases in self._streams:
            ends = bases + step.ends[places] * size
            starts = ends - step.counts[places] * size
            reads, writes = Pieces(bases, ends), Pieces(starts, ends)
            self.order.step(step.number, Operation(agent, str(step), reads, writes))

    def _look_up(self, step: Step) -> None:
        by_stream: dict[Agent, list[Sequence]] = {}
        for seq in step.seqs:
            by_stream.setdefault(self.device.agent(seq.stream), []).append(seq)
        self._streams = [
            (
                agent,
                np.array([step.place(seq) for seq in seqs], np.int64),
                np.array([seq.base for seq in seqs], np.int64),
            )
            for agent, seqs in by_stream.items()
        ]
        self._seqs, self._version = step.seqs, self.kv.columns.version


class Listening:
    """Listens to one manager's events, as a router would, and says what it gets wrong (law 22).

    Every other batch is read as an array. A router that begins at a snapshot must know the same.
    """

    def __init__(self, kv: Manager) -> None:
        self.kv, self.publisher, self.replica = kv, Publisher(kv.reuse.index), Replica()

    def __call__(self) -> list[str]:
        """Take over what has happened; the differences to the index. O(blocks)."""
        try:
            found = self._read(self.publisher.drain())
            if not found and self.replica.number % _SNAPSHOTS == 1:
                self.replica = Replica()
                found = self._read(self.publisher.snapshot())
        except TraceError as error:
            return [str(error)]
        return found

    def _read(self, batches: Iterable[Numbered]) -> list[str]:
        for batch in batches:
            format_ = FORMATS[batch.number % len(FORMATS)]
            self.replica.apply(decode(*encode(batch, format_)))
        known = {name: block.tiers for name, block in self.replica.blocks.items()}
        there = self._there()
        return [
            f"block {hash_text(name)} is in {known.get(name)}, but should be in {there.get(name)}"
            for name in known.keys() | there.keys()
            if known.get(name) != there.get(name)
        ]

    def _there(self) -> dict[Hash, frozenset[str]]:
        """Which tiers have the bytes of each block of the present weights that can be had from its
        first one on; none when the manager is closed."""
        found, states = dict[Hash, frozenset[str]](), self.kv.host.cells.states
        index, epoch = self.kv.reuse.index, self.kv.reuse.epoch
        present = (
            n
            for n in index
            if not self.kv.closed and n.root and n.root.identity.weights_epoch == epoch
        )
        for node in present:
            tiers = {GPU} if node.owner is not None else set[str]()
            if node.slot is not None and states[node.slot] in _LANDED:
                tiers.add(CPU)
            if tiers and (node.parent is None or index.digest(node.parent) in found):
                found[index.digest(node)] = frozenset(tiers)
        return found


def observe(
    kv: Manager,
    *,
    debug: bool = False,
    record: Callable[[bytes], object] | None = None,
    asked: Counter[str] | None = None,
    on_violation: OnViolation = "raise",
) -> None:
    """Put law checks and a recorder around the public methods of a manager.

    With `debug`, freed memory is overwritten too, so that a stale read does not look right, and
    tensors that outlive their memory are warned of. `asked` counts how often each law was checked.
    The order of what is issued is checked if the manager's device is `ordered`.
    """
    if debug:
        kv.flight.ignored = None
        kv.replayed = Listening(kv)
    device: object = kv.device
    watch = Watch(
        kv,
        OrderKeeper(kv, device) if isinstance(device, Ordered) else None,
        Recorder(kv, record) if record else None,
        LawKeeper(kv, asked) if debug else None,
        on_violation,
    )
    for name in PUBLIC:
        method = getattr(kv, name)
        if debug and name in LEAVING:
            method = _warning(method)
        setattr(kv, name, _observed(method, name, watch))


class Watch:
    """Those that look at the public calls of one manager. One that fails changes no call: it is
    said once in the log, and that one looks no more."""

    def __init__(
        self, kv: Manager, order: OrderKeeper | None, recorder: Recorder | None,
        laws: LawKeeper | None, on_violation: OnViolation,
    ) -> None:  # fmt: skip
        self.kv, self.on_violation = kv, on_violation
        self.order, self.recorder, self.laws = order, recorder, laws
        kv.watches.append(self)
        self.lost: list[str] = []
        """What has failed, in words."""

    def before(self, event: str, subject: object) -> None:
        """A call is about to begin."""
        if self.order is not None:
            self._ask("order", self.order.before, event, subject)

    @known
    def after(
        self, event: str, args: tuple[Any, ...], named: dict[str, Any], names: Signature,
        result: Any, error: KvStateError | None,
    ) -> None:  # fmt: skip
        """It has returned or raised. Raises LawViolation. Who looks makes no calls meanwhile."""
        life = self.kv.life
        life.enter_call()
        try:
            found = self._ask("order", self.order.after, result) if self.order else None
            looking = self.recorder is not None or self.laws is not None
            given = _given(names, args, named) if looking else {}
            if self.recorder is not None:
                told = LawViolation([found]) if found else error
                self._ask("recorder", self.recorder.after, event, given, result, told)
            if self.laws is not None:
                self._check(self.laws, event, given, error)
            if found:
                raise LawViolation([found])
        except BaseException as cut:
            if not isinstance(cut, KvStateError):
                self.cut_short()
            raise
        finally:
            life.end()

    def _check(
        self, laws: LawKeeper, event: str, given: Mapping[str, Any], error: KvStateError | None
    ) -> None:
        """The laws after a call, and what is done when one does not hold."""
        try:
            self._ask("laws", laws.after, event, given, error)
        except LawViolation as broken:
            if self.on_violation == "raise":
                self.kv.actor.poison(str(broken))
                raise
            if self.on_violation == "log":
                log.error("%s: %s", event, broken)
            else:
                self.on_violation(broken)

    def cut_short(self) -> None:
        """A call has ended by no error of ours: what it has done is not known here."""
        if self.laws is not None:
            self.laws.seen = None

    def _ask(self, who: str, look: Callable[..., T], *args: Any) -> T | None:
        try:
            return look(*args)
        except LawViolation:
            raise
        except Exception as crash:
            setattr(self, who, None)
            self.lost.append(f"{who}: {crash!r}")
            log.exception("%s: nothing is looked at or written down there any more", who)
            return None


def _given(names: Signature, args: tuple[Any, ...], named: dict[str, Any]) -> Mapping[str, Any]:
    bound = names.bind(*args, **named)
    bound.apply_defaults()
    return bound.arguments


def _warning(leave: Callable[..., None]) -> Callable[..., None]:
    """Warn of tensors that are still held when their sequence has left the memory under them."""

    @wraps(leave)
    def call(seq: Sequence, *args: Any, **named: Any) -> None:
        known = isinstance(seq, Sequence)
        stay, held = (seq.stay, tensors_held(seq)) if known else (None, 0)
        leave(seq, *args, **named)
        if held and seq.stay != stay:
            log.warning("%s: %d tensors outlive its memory, and are stale", seq, held)

    return call


def _observed(method: Callable[..., Any], name: str, watch: Watch) -> Callable[..., Any]:
    names, life = signature(method), watch.kv.life

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        if life.state not in _LOOKED_AT or get_ident() != life.thread:
            return method(*args, **named)  # is refused: there is nothing to see
        watch.before(name, args[0] if args else next(iter(named.values()), None))
        try:
            result = method(*args, **named)
        except KvStateError as error:
            # No variable may keep it: error, traceback and frame would keep each other.
            watch.after(name, args, named, names, None, error)
            raise
        except BaseException:
            watch.cut_short()
            raise
        watch.after(name, args, named, names, result, None)
        return result

    return call


def _check(kind: str, asked: Counter[str] | None, *facts: Any) -> None:
    """Raise LawViolation with everything that the laws of this kind find wrong."""
    violations = []
    for law in laws(kind):
        violations += law.violations(*facts)
        if asked is not None:
            asked[law.name] += 1
    if violations:
        raise LawViolation(violations)
