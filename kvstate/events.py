"""The events of a prefix index as routers read them: what they say, and their two shapes as bytes.

Routers that send a request to where its prefix is already cached follow the events of an engine.
They know vLLM's: `BlockStored`, `BlockRemoved` and `AllBlocksCleared`, in batches `[time, events,
rank]`, with the number of a batch in a frame of its own. Up to 0.23 vLLM writes an event as an
array, where a field is known by its place; since 0.24 as a map, where it is known by its name
(vllm-project/vllm#42892, report B172). Either is written here, both are read: with fewer fields,
as older versions write them, and with more. docs/events.md says which reader takes which.

Maps are the default. A field that a reader does not know does it no harm there, so only maps have
our own: `reason` and `lost_changes`. In arrays nothing of ours stands behind vLLM's fields: some
readers refuse a longer array, others would take it for a newer field of vLLM's.

Salts are not told: a reader of events must not learn what keeps tenants apart. They and the weights
epoch are in the digests.

Rejected: one class for each shape, as their readers have them (every field would stand twice, and
could differ); a wall clock (no decision and no test may depend on one).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct

from kvstate.blocks import GPU
from kvstate.errors import TraceError
from kvstate.values import one_of

Hash = bytes | int
"""The name of a block: a digest, or 64 bits of one (see `int_hash`)."""
Format = Literal["maps", "arrays"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
Hashes = Literal["bytes", "ints"]
HASHES: Final[tuple[Hashes, ...]] = get_args(Hashes)
NUMBER_BYTES: Final = 8
INT_BYTES: Final = 8
LOST: Final = "lost"
"""The reason of a clear after which a reader knows less than there is, until a snapshot."""
SNAPSHOT: Final = "snapshot"
"""The reason of a clear after which everything that is there is told."""


class BlockStored(Struct, tag=True):
    """A tier has these blocks of one chain now. `token_ids` are those of all of them, in order."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    """The block before the first of them; None if that is the first of its prefix."""
    token_ids: list[int]
    block_size: Annotated[int, Meta(ge=1)]
    """In tokens."""
    lora_id: int | None = None
    """The adapter, if it is a number."""
    medium: str = GPU
    """Ours are `GPU` and `CPU`. Engines with one tier leave it out."""
    lora_name: str | None = None
    """The adapter, if it is a text; or bytes, in hexadecimal. Digests tell the two apart."""
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """The extra keys of each of them; None if none has any."""
    group_idx: int | None = None
    """Which layers it is about, in engines that tell of several groups."""


class BlockRemoved(Struct, tag=True):
    """A tier does not have these blocks any more."""

    block_hashes: list[Hash]
    medium: str = GPU
    group_idx: int | None = None
    reason: str | None = None
    """Ours are those of `kvstate.blocks.Loss`. Only in maps."""


class AllBlocksCleared(Struct, tag=True):
    """No tier has any block; or a reader is to begin anew (`LOST`, `SNAPSHOT`)."""

    reason: str | None = None
    """`cleared`, `closed`, `lost` or `snapshot`. Only in maps."""
    lost_changes: int | None = None
    """How many changes are not told: a block stored or removed, or all cleared. Only in maps."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct):
    """Events in the order in which they happened. `ts` is whatever time the caller said; its
    number, if none."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Numbered(NamedTuple):
    """A batch and its number: 0, 1, 2 and so on, without gaps."""

    number: int
    batch: EventBatch


class _Fields(NamedTuple):
    """Of one kind of event, those that vLLM has, in its order: first those that are always there,
    also as null, then those that are left out when they say nothing."""

    always: tuple[str, ...]
    maybe: tuple[str, ...]
    ours: tuple[str, ...] = ()
    """Only in maps."""


_FIELDS: Final = {
    "BlockStored": _Fields(BlockStored.__struct_fields__[:7], BlockStored.__struct_fields__[7:]),
    "BlockRemoved": _Fields(("block_hashes", "medium"), ("group_idx",), ("reason",)),
    "AllBlocksCleared": _Fields((), (), ("reason", "lost_changes")),
}


def int_hash(digest: bytes) -> int:
    """A digest as the number that vLLM makes of one: its last 8 bytes, the first of them the
    highest, without a sign. Readers that want numbers make the same of bytes."""
    return int.from_bytes(digest[-INT_BYTES:], "big")


def hash_text(name: Hash) -> str:
    """The name of a block in messages."""
    return str(name) if isinstance(name, int) else name.hex()


def encode(numbered: Numbered, format: Format = "maps") -> tuple[bytes, bytes]:  # noqa: A002
    """The two frames of a batch: its number, 8 bytes big-endian, and the batch as msgpack.

    May be called on any thread. Raises ArgumentError for another format.
    """
    one_of("format", format, FORMATS)
    shape = _as_map if format == "maps" else _as_array
    batch = numbered.batch
    wire = [batch.ts, [shape(event) for event in batch.events], batch.data_parallel_rank]
    return numbered.number.to_bytes(NUMBER_BYTES, "big"), msgspec.msgpack.encode(wire)


def _as_map(event: Event) -> dict[str, Any]:
    tag = type(event).__name__
    always, maybe, ours = _FIELDS[tag]
    found = {"type": tag} | {name: getattr(event, name) for name in always}
    for name in maybe + ours:
        value = getattr(event, name)
        if value is not None:
            found[name] = value
    return found


def _as_array(event: Event) -> list[Any]:
    tag = type(event).__name__
    always, maybe, _ = _FIELDS[tag]
    found = [tag, *(getattr(event, name) for name in always + maybe)]
    while len(found) > 1 + len(always) and found[-1] is None:
        found.pop()
    return found


def decode(number: bytes, batch: bytes) -> Numbered:
    """A batch from its frames, ours or another engine's, in either shape, checked field by field.

    Hashes are bytes or numbers; a medium that is missing is the GPU; what else is missing is None.
    What is not known is passed over: other fields of a map, and what stands behind the last known
    field of an array. Raises TraceError for anything else.
    """
    if len(number) != NUMBER_BYTES:
        raise TraceError(f"the number of a batch has {len(number)} bytes, not {NUMBER_BYTES}")
    found = int.from_bytes(number, "big")
    try:
        named = _named_batch(msgspec.msgpack.decode(batch))
        return Numbered(found, msgspec.convert(named, EventBatch, builtin_types=(bytes,)))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise TraceError(f"batch {found}: {error}") from error


def _named_batch(batch: Any) -> Any:
    """A batch with all its fields by name."""
    if isinstance(batch, list):
        batch = dict(zip(EventBatch.__struct_fields__, batch, strict=False))
    if isinstance(batch, dict) and isinstance(batch.get("events"), list):
        batch["events"] = [_named(event) for event in batch["events"]]
    return batch


def _named(event: Any) -> Any:
    """An event with all its fields by name, and without those that say nothing."""
    if isinstance(event, list) and event and isinstance(event[0], str):
        fields = _FIELDS.get(event[0], _Fields((), ()))
        event = {"type": event[0]} | dict(
            zip(fields.always + fields.maybe, event[1:], strict=False)
        )
        if isinstance(event.get("lora_name"), dict):  # SGLang 0.5.18 has what salts a block there
            del event["lora_name"]
    if isinstance(event, dict) and event.get("medium", GPU) is None:
        del event["medium"]
    return event
