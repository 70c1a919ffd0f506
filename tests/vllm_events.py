"""The events of other engines, version by version: which fields they have, and in which shape.

Made from what their definitions say (names and order of fields, what may be left out, arrays or
maps), so that what is written here is read by classes that are not ours, and the reverse:

* vLLM, `vllm/distributed/kv_events.py`: arrays from 0.9 to 0.23, to which fields were added behind
  the others (vllm-project/vllm#16750, #19737, #27577, #33304, #37688, #40984); maps since 0.24
  (#42892). Batches are arrays in all of them.
* SGLang, `python/sglang/srt/disaggregation/kv_events.py`: arrays of vLLM's first fields, in 0.5.18
  with a map of its own behind them; maps since sgl-project/sglang#37482.
"""

from __future__ import annotations

from typing import Any, Final

from attrs import field, frozen
from msgspec import Struct, defstruct, msgpack

from kvstate.events import Format, Hashes

Field = tuple[str, Any] | tuple[str, Any, Any]
"""Name and type; and the default, if it may be left out."""
NUMBER: Final = int
EITHER: Final = int | bytes
TEXT: Final = str | None


@frozen
class Version:
    """The events of one engine, from one version on."""

    name: str
    format: Format
    hash: Any
    stored_fields: tuple[Field, ...] = ()
    """Behind `block_size`."""
    removed_fields: tuple[Field, ...] = ()
    """Behind `block_hashes`."""
    rank: str | None = "data_parallel_rank"
    stored: Any = field(init=False)
    removed: Any = field(init=False)
    cleared: Any = field(init=False)
    batch: Any = field(init=False)

    @stored.default
    def _stored(self) -> type[Struct]:
        first: tuple[Field, ...] = (
            ("block_hashes", list.__class_getitem__(self.hash)),
            ("parent_block_hash", self.hash | None),
            ("token_ids", list[int]),
            ("block_size", int),
        )
        return self._event("BlockStored", (*first, *self.stored_fields))

    @removed.default
    def _removed(self) -> type[Struct]:
        hashes = ("block_hashes", list.__class_getitem__(self.hash))
        return self._event("BlockRemoved", (hashes, *self.removed_fields))

    @cleared.default
    def _cleared(self) -> type[Struct]:
        return self._event("AllBlocksCleared", ())

    @batch.default
    def _batch(self) -> type[Struct]:
        events = self.stored | self.removed | self.cleared
        fields: list[Field] = [("ts", float), ("events", list.__class_getitem__(events))]
        if self.rank is not None:
            fields.append((self.rank, int | None, None))
        return defstruct("EventBatch", fields, array_like=True, omit_defaults=True)

    def _event(self, name: str, fields: tuple[Field, ...]) -> type[Struct]:
        arrays = self.format == "arrays"
        return defstruct(name, fields, tag=True, array_like=arrays, omit_defaults=True)

    @property
    def hashes(self) -> Hashes:
        """What it takes for names of blocks."""
        return "ints" if self.hash is NUMBER else "bytes"

    def read(self, payload: bytes) -> Any:
        """A batch as it reads it. Raises msgspec.DecodeError."""
        return msgpack.decode(payload, type=self.batch)


_LORA: Final = ("lora_id", int | None)
_MEDIUM: Final = ("medium", TEXT)
_LATER: Final = (
    ("extra_keys", list[tuple[Any, ...] | None] | None, None),
    ("group_idx", int | None, None),
    ("kv_cache_spec_kind", TEXT, None),
    ("kv_cache_spec_sliding_window", int | None, None),
)
_NOW: Final = (_LORA, _MEDIUM, ("lora_name", TEXT), *_LATER)
_REMOVED: Final = (_MEDIUM, ("group_idx", int | None, None))
_MAYBE: Final = ("medium", TEXT, None)

VERSIONS: Final = (
    Version("vLLM 0.9", "arrays", NUMBER, (_LORA,), (), None),
    Version("vLLM 0.11", "arrays", EITHER, (_LORA, _MEDIUM), (_MEDIUM,)),
    Version("vLLM 0.15", "arrays", EITHER, (_LORA, _MEDIUM, ("lora_name", TEXT)), (_MEDIUM,)),
    Version("vLLM 0.23", "arrays", EITHER, _NOW, _REMOVED),
    Version("vLLM 0.24", "maps", EITHER, _NOW, _REMOVED),
    Version("SGLang 0.5.17", "arrays", NUMBER, (_LORA, _MAYBE), (_MAYBE,), "attn_dp_rank"),
    Version(
        "SGLang 0.5.18, with a salt", "arrays", NUMBER,
        (_LORA, _MEDIUM, ("metadata", dict[str, Any])), (_MAYBE,), "attn_dp_rank",
    ),
    Version(
        "SGLang with maps", "maps", NUMBER,
        (_LORA, _MAYBE, ("cache_salt", TEXT, None), ("session_id", TEXT, None)), (_MAYBE,),
        "attn_dp_rank",
    ),
)  # fmt: skip
