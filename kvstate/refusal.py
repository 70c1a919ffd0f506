"""What a refused call had asked for, as the laws are told it.

A refusal is judged by what the caller wanted and by what there is, and by nothing that the manager
has worked out in between (see `kvstate.spec.progress_laws`): so this reads arguments, and of the
error only which check refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstate.config import Config, Geometry
from kvstate.device import Device
from kvstate.errors import CapacityError, HostExhausted, OutOfFrames
from kvstate.keys import ID_BYTES
from kvstate.spec.facts import Refusal

_TOKENS = {
    "create": "max_tokens", "fork": "max_tokens", "dummy": "length_tokens",
    "resize": "capacity_tokens", "rewind": "length_tokens", "step": "tokens",
}  # fmt: skip
"""Which argument of a call says how many tokens."""
_SUBJECT = {"fork": "parent", "step": "batch"}
"""Which argument says of what; `seq`, where there is one, of all others."""


def refusal(
    config: Config, sizes: Geometry, device: Device, call: str, args: Mapping[str, Any],
    error: CapacityError,
) -> Refusal:  # fmt: skip
    """A call that was refused, with its arguments."""
    subject = args.get(_SUBJECT.get(call, "seq"))
    seqs = () if subject is None else tuple(subject) if call == "step" else (subject,)
    named = args.get(_TOKENS.get(call, ""))
    if named is None and call in ("create", "fork"):
        named = seqs[0].max_tokens if seqs else config.max_tokens
    counts = () if named is None else np.broadcast_to(named, max(1, len(seqs))).tolist()
    prompt = seqs[0].prompt if call == "resume" else b""
    shared = device.memory is not None and device.memory[0] == "cuda"
    most = max(0, len(prompt) // ID_BYTES - 1)
    return Refusal(
        call=call,
        place=_place(error),
        uids=tuple(seq.uid for seq in seqs),
        tokens=tuple(counts),
        prompt_tokens=min(most, seqs[0].max_tokens) if seqs else 0,
        room=0 if shared else device.room(sizes.frame_bytes),
        roomy=sizes.arena_bytes >= (2 * sizes.rows + 1) * sizes.longest_frames * sizes.frame_bytes,
    )


def _place(error: CapacityError) -> str:
    if isinstance(error, OutOfFrames):
        return error.place
    return "host" if isinstance(error, HostExhausted) else "rows"
