"""Observation: laws after every call, the order of what is issued, and a record of every call.

All are put around a manager's public methods when they are asked for, so that a manager without
them pays nothing. Calls that a public method makes to other public methods are part of it and are
not observed apart.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any, Final

import msgspec
import numpy as np

from kvstate import trace
from kvstate.blocks import CPU, GPU
from kvstate.errors import (
    CapacityError,
    IllegalTransition,
    KvStateError,
    LawViolation,
    TraceError,
)
from kvstate.events import Replica, decode, encode
from kvstate.keys import Adapter, Extras
from kvstate.manager import Manager
from kvstate.order import Agent, Operation
from kvstate.order_device import Ordered
from kvstate.order_memory import Pieces
from kvstate.refusal import refusal
from kvstate.sequence import Column, Sequence, Step
from kvstate.spec.facts import Failure, Ledger, View
from kvstate.spec.host import MIRROR, STALE, STALE_HELD
from kvstate.spec.laws import laws
from kvstate.tensors import tensors_held
from kvstate.view import view

log = logging.getLogger("kvstate")

PUBLIC: Final = (
    "create", "fork", "dummy", "resume", "resize", "rewind", "step", "settle", "commit",
    "commit_each", "stop_committing", "suspend", "drop", "close_sequence", "poll", "clear_reuse",
    "trim",
)  # fmt: skip
"""The methods of a manager that change something and that an engine calls."""
_LANDED: Final = frozenset((STALE.code, STALE_HELD.code, MIRROR.code))
NOTHING: Final = Ledger({}, frozenset(), {}, frozenset(), {}, frozenset())
LEAVING: Final = ("suspend", "drop", "close_sequence")
"""Those with which a sequence leaves its GPU memory."""


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
    holds something. A poisoned one leaves it to its device."""
    left = NOTHING if kv.actor.fault is not None else kv.left
    _check("end", asked, left, kv.device.ledger())


class LawKeeper:
    """Checks the laws around every public call of one manager (`debug=True`)."""

    def __init__(self, kv: Manager, asked: Counter[str] | None) -> None:
        self.kv, self.asked = kv, asked
        self.seen = check_laws(kv, asked)
        self._call = kv.flight.call

    def after(self, name: str, args: Mapping[str, Any], error: BaseException | None) -> None:
        """The call has returned or raised: every law that speaks of that must hold."""
        before, kv = self.seen, self.kv
        call, self._call = self._call, kv.flight.call
        if kv.actor.fault is not None or kv.closed:
            return
        self.seen = check_laws(kv, self.asked)
        _check("call", self.asked, before, self.seen)
        if isinstance(error, KvStateError):
            ended = [end for end in kv.flight.ended if end.call > call]
            failed = Failure(
                touched=frozenset(end.uid for end in ended),
                lost=not all(end.ok for end in ended),
                illegal=isinstance(error, IllegalTransition),
            )
            _check("change", self.asked, before, self.seen, failed)
        if isinstance(error, CapacityError):
            _check("refusal", self.asked, self.seen, refusal(kv.config, name, args, error))


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

    def after(self, result: object, error: KvStateError | None) -> KvStateError | None:
        """It has returned or raised; what its caller is to be told."""
        try:
            if isinstance(result, Step):
                self._step(result)
        except LawViolation:
            pass  # it is remembered, as any other that came up in the call
        self.order.end()
        found, self.order.fresh = self.order.fresh, None
        return found or error

    def _step(self, step: Step) -> None:
        """A step reads all tokens of its sequences and writes the new ones."""
        if step.seqs is not self._seqs or self._version != self.kv.columns.version:
            self._look_up(step)
        size = self.kv.geometry.row_bytes
        for agent, rows, bases in self._streams:
            starts = step.starts[rows] * size
            ends = bases + starts + step.counts[rows] * size
            reads, writes = Pieces(bases, ends), Pieces(bases + starts, ends)
            self.order.step(step.number, Operation(agent, str(step), reads, writes))

    def _look_up(self, step: Step) -> None:
        by_stream: dict[Agent, list[Sequence]] = {}
        for seq in step.seqs:
            by_stream.setdefault(self.device.agent(seq.stream), []).append(seq)
        self._streams = [
            (
                agent,
                np.array([seq.row for seq in seqs], np.int64),
                np.array([seq.base for seq in seqs], np.int64),
            )
            for agent, seqs in by_stream.items()
        ]
        self._seqs, self._version = step.seqs, self.kv.columns.version


class Listening:
    """Listens to one manager's events, as a router would, and says what it gets wrong (law 22)."""

    def __init__(self, kv: Manager) -> None:
        self.kv, self.publisher, self.replica = kv, kv.events(), Replica()

    def __call__(self) -> list[str]:
        """Take over what has happened; the differences to the index. O(blocks)."""
        try:
            for batch in self.publisher.drain():
                self.replica.apply(decode(*encode(batch)))
        except TraceError as error:
            return [str(error)]
        known = {name: block.tiers for name, block in self.replica.blocks.items()}
        there = self._there()
        return [
            f"block {name.hex()} is in {known.get(name)}, but should be in {there.get(name)}"
            for name in known.keys() | there.keys()
            if known.get(name) != there.get(name)
        ]

    def _there(self) -> dict[bytes, frozenset[str]]:
        """Which tiers have the bytes of each block of the present weights that can be had from its
        first one on."""
        found, states = dict[bytes, frozenset[str]](), self.kv.host.cells.states
        index, epoch = self.kv.reuse.index, self.kv.reuse.epoch
        present = (n for n in index if n.root and n.root.identity.weights_epoch == epoch)
        for node in present:
            tiers = {GPU} if node.owner is not None else set[str]()
            if node.slot is not None and states[node.slot] in _LANDED:
                tiers.add(CPU)
            if tiers and (node.parent is None or index.digest(node.parent) in found):
                found[index.digest(node)] = frozenset(tiers)
        return found


class Recorder:
    """Writes every public call of one manager to a sink, one JSON line each."""

    def __init__(self, kv: Manager, sink: Callable[[bytes], object]) -> None:
        self.kv, self.sink = kv, sink
        self._streams: list[Any] = [None]
        self._makers: dict[str, Callable[[dict[str, Any], Any], trace.Call]] = {
            "create": self._create,
            "dummy": self._dummy,
            "step": self._step,
            "settle": self._settle,
            "commit": self._commit,
            "commit_each": lambda args, _: trace.CommitEach(
                seqs=[seq.uid for seq in args["batch"]],
                tokens=np.atleast_1d(np.asarray(args["tokens"], np.int32)).ravel().tolist(),
            ),
            "poll": lambda args, _: trace.Poll(),
            "clear_reuse": lambda args, _: trace.Clear(),
            "fork": self._fork,
            "trim": lambda args, _: trace.Trim(keep=args["keep_frames"]),
            "resume": lambda args, _: trace.Resume(
                seq=args["seq"].uid, stream=self._stream(args["stream"])
            ),
            "resize": lambda args, _: trace.Resize(
                seq=args["seq"].uid, tokens=args["capacity_tokens"]
            ),
            "rewind": lambda args, _: trace.Rewind(
                seq=args["seq"].uid, tokens=args["length_tokens"]
            ),
            "stop_committing": lambda args, _: trace.Stop(seq=args["seq"].uid),
            "suspend": lambda args, _: trace.Suspend(**_leaving(args)),
            "drop": lambda args, _: trace.Drop(**_leaving(args)),
            "close_sequence": lambda args, _: trace.Close(**_leaving(args)),
        }
        header = trace.Header(kvstate_trace=trace.VERSION, config=kv.config, device=kv.device.name)
        sink(trace.encode(header) + b"\n")

    def after(self, name: str, args: dict[str, Any], result: Any, error: Any) -> None:
        """Write down one call and what it raised. A call that made nothing names 0."""
        polled, quiesced = self.kv.flight.polled, self.kv.flight.quiesced
        call = msgspec.structs.replace(
            self._makers[name](args, result),
            error=None if error is None else type(error).__name__,
            ended=[(token, ok) for token, ok in polled],
            failed=[token for token, ok in quiesced if not ok],
        )
        polled.clear()
        quiesced.clear()
        self.sink(trace.encode(call) + b"\n")

    def _create(self, args: dict[str, Any], seq: Sequence | None) -> trace.Call:
        tokens = seq.max_tokens if seq else args["max_tokens"] or 0
        given = args["prompt_tokens"]
        prompt = [] if given is None else np.atleast_1d(np.asarray(given)).tolist()
        return trace.Create(
            seq=seq.uid if seq else 0, max_tokens=tokens, prompt=prompt, salt=args["salt"].hex(),
            adapter=_adapter(args["adapter"]), extra_keys=_extras(args["extra_keys"]),
            commit=args["commit"], reserve=args["reserve"],
        )  # fmt: skip

    def _fork(self, args: dict[str, Any], seq: Sequence | None) -> trace.Call:
        parent = args["parent"]
        tokens = parent.max_tokens if args["max_tokens"] is None else args["max_tokens"]
        child, stream = seq.uid if seq else 0, self._stream(args["stream"])
        return trace.Fork(seq=parent.uid, child=child, max_tokens=tokens, stream=stream)

    def _dummy(self, args: dict[str, Any], seq: Sequence | None) -> trace.Call:
        stream = self._stream(args["stream"])
        return trace.Dummy(seq=seq.uid if seq else 0, tokens=args["length_tokens"], stream=stream)

    def _step(self, args: dict[str, Any], step: Step | None) -> trace.Call:
        seqs = [seq.uid for seq in args["batch"]]
        tokens = np.asarray(args["tokens"], np.int64)
        each = np.broadcast_to(tokens, len(seqs)) if tokens.ndim == 0 else tokens.ravel()
        number = step.number if step else 0
        return trace.Step(step=number, seqs=seqs, tokens=each.tolist())

    def _settle(self, args: dict[str, Any], _: object) -> trace.Call:
        taken = args["accepted"]
        accepted = None if taken is None else np.atleast_1d(taken).tolist()
        return trace.Settle(step=args["step"].number, accepted=accepted)

    def _commit(self, args: dict[str, Any], _: object) -> trace.Call:
        tokens = np.atleast_1d(np.asarray(args["tokens"], np.int32)).ravel()
        return trace.Commit(seq=args["seq"].uid, tokens=tokens.tolist())

    def _stream(self, stream: Any) -> int:
        """The number of a stream: 0 is the default one, others count up as they are first seen."""
        for number, known in enumerate(self._streams):
            if known is stream:
                return number
        self._streams.append(stream)
        return len(self._streams) - 1


def _adapter(adapter: Adapter) -> int | str | None:
    return f"hex:{adapter.hex()}" if isinstance(adapter, bytes) else adapter


def _extras(extras: Extras | None) -> dict[str, list[str]]:
    found = (extras or {}).items()
    fields = {str(at): one if isinstance(one, tuple) else (one,) for at, one in found}
    return {at: [field.hex() for field in one] for at, one in fields.items()}


def _leaving(args: dict[str, Any]) -> dict[str, Any]:
    return {"seq": args["seq"].uid, "after": args["after"] is not None}


def observe(
    kv: Manager,
    *,
    debug: bool = False,
    record: Callable[[bytes], object] | None = None,
    asked: Counter[str] | None = None,
) -> None:
    """Put law checks and a recorder around the public methods of a manager.

    With `debug`, freed memory is overwritten too, so that a stale read does not look right, and
    tensors that outlive their memory are warned of. `asked` counts how often each law was checked.
    The order of what is issued is checked if the manager's device is `ordered`.
    """
    if debug:
        kv.flight.ignored = None
        kv.replayed = Listening(kv)
    keeper = LawKeeper(kv, asked) if debug else None
    recorder = Recorder(kv, record) if record else None
    device: object = kv.device
    order = OrderKeeper(kv, device) if isinstance(device, Ordered) else None
    depth = [0]
    for name in PUBLIC:
        method = getattr(kv, name)
        if debug and name in LEAVING:
            method = _warning(method)
        setattr(kv, name, _observed(method, name, keeper, recorder, order, depth))


def _warning(leave: Callable[..., None]) -> Callable[..., None]:
    """Warn of tensors that are still held when their sequence has left the memory under them."""

    @wraps(leave)
    def call(seq: Sequence, after: Any = None) -> None:
        held = tensors_held(seq)
        leave(seq, after)
        if held:
            log.warning("%s: %d tensors outlive its memory, and are stale", seq, held)

    return call


def _observed(
    method: Callable[..., Any], name: str, keeper: LawKeeper | None, recorder: Recorder | None,
    order: OrderKeeper | None, depth: list[int],
) -> Callable[..., Any]:  # fmt: skip
    names = signature(method)

    @wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        if depth[0]:
            return method(*args, **named)
        depth[0] += 1
        result, error = None, None
        if order is not None:
            order.before(name, args[0] if args else next(iter(named.values()), None))
        try:
            result = method(*args, **named)
        except KvStateError as raised:
            error = raised
        finally:
            depth[0] -= 1
        if order is not None:
            error = order.after(result, error)
        given = dict[str, Any]()
        if recorder is not None or isinstance(error, CapacityError):
            bound = names.bind(*args, **named)
            bound.apply_defaults()
            given = bound.arguments
        if recorder is not None:
            recorder.after(name, given, result, error)
        if keeper is not None:
            keeper.after(name, given, error)
        if error is not None:
            raise error
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
