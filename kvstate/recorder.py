"""The recorder: every public call of a manager as one line of a trace, to a sink.

What was refused is written too, as far as it can be: a call whose arguments no trace can hold (a
float where an id belongs, a sequence of another manager) becomes a record of what it was given, in
words. Numbers are never made to fit; a trace that says what nobody said is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
from attrs import evolve

from kvstate import trace
from kvstate.errors import ArgumentError, ArgumentTypeError, DeviceError, KvStateError
from kvstate.keys import Extras
from kvstate.manager import Manager
from kvstate.sequence import Sequence, Step
from kvstate.values import LARGEST, counts, ids, shown

_OPAQUE: Final = ("stream", "event")
"""Of what a trace only says that it was there."""


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
                tokens=ids("tokens", args["tokens"]).tolist(),
            ),
            "poll": self._poll,
            "wait": lambda args, _: trace.Wait(seq=args["seq"].uid),
            "tensors_all": lambda args, _: trace.TensorsAll(
                seq=args["seq"].uid, tokens=args["tokens"]
            ),
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
        config = evolve(kv.config, digest_key=None)  # secrets stay out of files
        header = trace.Header(kvstate_trace=trace.VERSION, config=config, device=kv.device.name)
        try:
            sink(trace.encode(header) + b"\n")
        except TypeError as error:
            wanted = "lines are bytes: open a file with 'wb'"
            raise ArgumentTypeError(f"record does not take a line ({error}); {wanted}") from error

    def after(
        self, name: str, args: dict[str, Any], result: Any, error: KvStateError | None
    ) -> None:
        """Write down one call and what it raised. A call that made nothing names 0."""
        polled, quiesced = self.kv.flight.polled, self.kv.flight.quiesced
        call = msgspec.structs.replace(
            self._refused(name, args, error) if error else self._makers[name](args, result),
            error=None if error is None else type(error).__name__,
            ended=[(token, ok) for token, ok in polled],
            failed=[token for token, ok in quiesced if not ok],
            memory=self.kv.flight.memory_frames,
        )
        self.kv.flight.memory_frames = None
        polled.clear()
        quiesced.clear()
        self.sink(trace.encode(call) + b"\n")

    def _refused(self, name: str, args: dict[str, Any], error: KvStateError) -> trace.Call:
        """A call that raised: as any other if it can be made again from the trace. Else, or if only
        its arguments were looked at and will not do, as what it was given, in words."""
        opaque = isinstance(error, DeviceError) and error.call in _OPAQUE
        if not isinstance(error, ArgumentError) and not opaque:
            with suppress(Exception):
                return trace.decode_call(trace.encode(self._makers[name](args, None)), 0)
        return trace.Refused(name=name, arguments={key: shown(one) for key, one in args.items()})

    def _create(self, args: dict[str, Any], seq: Sequence | None) -> trace.Call:
        tokens = seq.max_tokens if seq else args["max_tokens"] or 0
        given = args["prompt_tokens"]
        prompt = [] if given is None else ids("prompt_tokens", given).tolist()
        return trace.Create(
            seq=seq.uid if seq else 0, max_tokens=tokens, prompt=prompt, salt=args["salt"].hex(),
            adapter=trace.adapter_text(args["adapter"]), extra_keys=_extras(args["extra_keys"]),
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
        each = step.count_tokens if step else np.broadcast_to(args["tokens"], len(seqs))
        return trace.Step(step=step.number if step else 0, seqs=seqs, tokens=each.tolist())

    def _settle(self, args: dict[str, Any], _: object) -> trace.Call:
        taken = args["accepted"]
        size = len(args["step"].rows)
        accepted = None if taken is None else counts("accepted", taken, size, LARGEST).tolist()
        return trace.Settle(step=args["step"].number, accepted=accepted)

    def _commit(self, args: dict[str, Any], _: object) -> trace.Call:
        return trace.Commit(seq=args["seq"].uid, tokens=ids("tokens", args["tokens"]).tolist())

    def _poll(self, args: dict[str, Any], _: object) -> trace.Call:
        given = args["deliver"]
        if given is None:
            return trace.Poll()
        return trace.Poll(deliver=ids("deliver", given).tolist())

    def _stream(self, stream: Any) -> int:
        """The number of a stream: 0 is the default one, others count up as they are first seen."""
        for number, known in enumerate(self._streams):
            if known is stream:
                return number
        self._streams.append(stream)
        return len(self._streams) - 1


def _extras(extras: Extras | None) -> dict[str, list[str]]:
    found = (extras or {}).items()
    fields = {str(at): one if isinstance(one, tuple) else (one,) for at, one in found}
    return {at: [field.hex() for field in one] for at, one in fields.items()}


def _leaving(args: dict[str, Any]) -> dict[str, Any]:
    return {"seq": args["seq"].uid, "after": args["after"] is not None}
