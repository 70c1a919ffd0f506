"""The recorder: every public call of a manager as one line of a trace, to a sink.

What was refused is written too, as far as it can be: a call whose arguments no trace can hold (a
float where an id belongs, a sequence of another manager) becomes a record of what it was given, in
words. Numbers are never made to fit; a trace that says what nobody said is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from reprlib import Repr
from typing import Any, Final

import msgspec
import numpy as np

from kvstate import trace
from kvstate.errors import DeviceError, KvStateError
from kvstate.keys import Adapter, Extras
from kvstate.manager import Manager
from kvstate.sequence import Batch, Sequence, Step

_OPAQUE: Final = ("stream", "event")
"""Of what a trace only says that it was there."""
_SHORT: Final = Repr()
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 64
_SHORT.maxstring = _SHORT.maxother = 200


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
                tokens=_for_each(args["tokens"], args["batch"]),
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

    def after(
        self, name: str, args: dict[str, Any], result: Any, error: KvStateError | None
    ) -> None:
        """Write down one call and what it raised. A call that made nothing names 0."""
        polled, quiesced = self.kv.flight.polled, self.kv.flight.quiesced
        call = self._made(name, args, result) if error is None else self._refused(name, args, error)
        call = msgspec.structs.replace(
            call,
            error=None if error is None else type(error).__name__,
            ended=[(token, ok) for token, ok in polled],
            failed=[token for token, ok in quiesced if not ok],
        )
        polled.clear()
        quiesced.clear()
        self.sink(trace.encode(call) + b"\n")

    def _made(self, name: str, args: dict[str, Any], result: Any) -> trace.Call:
        return self._makers[name](args, result)

    def _refused(self, name: str, args: dict[str, Any], error: KvStateError) -> trace.Call:
        """A call that raised: as any other if it can be made again from the trace, else as what it
        was given, in words."""
        ours = all(
            value.columns is self.kv.columns
            for value in args.values()
            if isinstance(value, Sequence | Batch | Step)
        )
        if ours and not (isinstance(error, DeviceError) and error.call in _OPAQUE):
            with suppress(Exception):
                call = self._made(name, args, None)
                return trace.decode_call(trace.encode(call), 0)
        said = {key: _SHORT.repr(value) for key, value in args.items()}
        return trace.Refused(name=name, arguments=said)

    def _create(self, args: dict[str, Any], seq: Sequence | None) -> trace.Call:
        tokens = seq.max_tokens if seq else args["max_tokens"] or 0
        given = args["prompt_tokens"]
        prompt = [] if given is None else _numbers(given)
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
        tokens = args["tokens"]
        each = [tokens] * len(seqs) if isinstance(tokens, int) else _for_each(tokens, seqs)
        return trace.Step(step=step.number if step else 0, seqs=seqs, tokens=each)

    def _settle(self, args: dict[str, Any], _: object) -> trace.Call:
        taken = args["accepted"]
        accepted = None if taken is None else _numbers(taken)
        return trace.Settle(step=args["step"].number, accepted=accepted)

    def _commit(self, args: dict[str, Any], _: object) -> trace.Call:
        return trace.Commit(seq=args["seq"].uid, tokens=_numbers(args["tokens"]))

    def _stream(self, stream: Any) -> int:
        """The number of a stream: 0 is the default one, others count up as they are first seen."""
        for number, known in enumerate(self._streams):
            if known is stream:
                return number
        self._streams.append(stream)
        return len(self._streams) - 1


def _numbers(given: Any) -> list[Any]:
    """As they were given, one after the other: what is no number that fits is not made one."""
    found: list[Any] = np.atleast_1d(np.asarray(given)).ravel().tolist()
    return found


def _for_each(given: Any, members: Collection[Any]) -> list[Any]:
    """One number for each. Raises ValueError if that is not what was given."""
    found: list[Any] = np.broadcast_to(given, len(members)).tolist()
    return found


def _adapter(adapter: Adapter) -> int | str | None:
    return f"hex:{adapter.hex()}" if isinstance(adapter, bytes) else adapter


def _extras(extras: Extras | None) -> dict[str, list[str]]:
    found = (extras or {}).items()
    fields = {str(at): one if isinstance(one, tuple) else (one,) for at, one in found}
    return {at: [field.hex() for field in one] for at, one in fields.items()}


def _leaving(args: dict[str, Any]) -> dict[str, Any]:
    return {"seq": args["seq"].uid, "after": args["after"] is not None}
