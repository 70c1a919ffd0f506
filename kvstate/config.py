"""What a manager is told before it starts, and the sizes that follow from it.

Everything that can be wrong with a configuration is said here, at once and with numbers, so that
no later code asks again. Sizes that do not fit are never rounded silently: the padding and the
unused rest are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from math import gcd, lcm
from typing import Any, Final

from attrs import Attribute, field, frozen
from attrs.converters import optional as to_optional
from attrs.validators import optional

from kvstate.errors import ArgumentError, ConfigError
from kvstate.values import LARGEST, article, flag, in_order, instance, number, one_of, plain, whole

DTYPE_BYTES: Final = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
MIB: Final = 1 << 20
MAX_ARENA_BYTES: Final = 1 << 44
INT31: Final = (1 << 31) - 1
MAX_KEY_BYTES: Final = blake2b.MAX_KEY_SIZE
WRITE_THROUGH: Final = ("on_free", "on_commit", "off")
SPANS: Final = ("shared", "all", "off")
SIXTEENTH: Final = 16
"""A block is a multiple of this part of a frame, which keeps lcm(frame, block) small."""
MOST_SEQUENCES: Final = 1 << 20
"""Every step goes over all rows."""

Check = Callable[[Any, "Attribute[Any]", Any], None]


def _checked(check: Callable[..., object], *wanted: Any, **ends: bool) -> Check:
    """A validator of a field. It says which class and field, as ConfigError."""

    def validate(thing: Any, attribute: Attribute[Any], value: Any) -> None:
        try:
            check(f"{type(thing).__name__}.{attribute.name}", value, *wanted, **ends)
        except ArgumentError as error:
            raise ConfigError(str(error)) from error

    return validate


# The type checker learns from converters what a field takes.


def _int(value: int) -> int:
    return plain(value)


def _float(value: float) -> float:
    return plain(value)


def _bool(value: bool) -> bool:
    return plain(value)


def _str(value: str) -> str:
    return plain(value)


def _bytes(value: bytes) -> bytes:
    return plain(value)


_COUNT: Final = _checked(whole, 1, INT31)
_COUNT_FROM_0: Final = _checked(whole, 0, INT31)
_BYTES: Final = _checked(whole, 1, LARGEST)
_FLAG: Final = _checked(flag)


@frozen
class LayerSpec:
    """The KV shape of `count` equal attention layers. Raises ConfigError."""

    kv_heads: int = field(converter=_int, validator=_COUNT)
    head_dim: int = field(converter=_int, validator=_COUNT)
    dtype: str = field(
        default="bfloat16", converter=_str, validator=_checked(one_of, tuple(DTYPE_BYTES))
    )
    count: int = field(default=1, converter=_int, validator=_COUNT)

    @property
    def token_bytes(self) -> int:
        """K and V of one token in these layers."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype] * self.count


@frozen
class GpuTier:
    """GPU memory: `budget_bytes` of it, in frames of `frame_bytes`.

    `map_ahead_frames` is the margin beyond its need that every running sequence is to have mapped.
    Each step maps a few frames of it, about one more than its tokens fill, for those sequences
    that will need one first. So with 1 or more no step maps many, however many sequences go over
    their frames in it; a longer margin lasts while steps are uneven or frames are short. It is made
    of free frames, costs nobody admission, and is taken back before a charge fails. With 0 nothing
    but the need is mapped.
    `arena_bytes` is the size of the address reservation; by default what twice `max_sequences` and
    one more of full length take.
    Spans keep addresses too: a prefix is copied and not mapped if each row, and one that must move,
    could not have a range of full length beside it.
    `reclaim_frames` is the least that one reclaim unmaps: parked memory holds nothing that anybody
    reads, and under steady pressure every reclaim is a quiesce. `protected_share` of the budget is
    kept for the prefixes that were shared last, while more than one sequence runs. While at least
    `copy_share` of it would be free or parked after that, a prefix is copied instead of mapped,
    unless a parked range has it mapped already: a copy into mapped memory takes less time than
    mappings (docs/gpu.md), and memory is plenty. 1 means never. Raises ConfigError.
    """

    budget_bytes: int = field(converter=_int, validator=_BYTES)
    frame_bytes: int = field(default=2 * MIB, converter=_int, validator=_BYTES)
    map_ahead_frames: int = field(default=0, converter=_int, validator=_COUNT_FROM_0)
    reclaim_frames: int = field(default=16, converter=_int, validator=_COUNT)
    protected_share: float = field(
        default=0.05, converter=_float, validator=_checked(number, 0, 1, below=True)
    )
    copy_share: float = field(default=1.0, converter=_float, validator=_checked(number, 0, 1))
    arena_bytes: int | None = field(
        default=None, converter=to_optional(_int), validator=optional(_BYTES)
    )


@frozen
class HostTier:
    """Host memory: for suspended sequences, and for what others may want later. Raises
    ConfigError.

    With `pace_bytes`, at most that many bytes of copies to the host are in flight at a time, the
    oldest first; the next begin when a `poll`, or another call that asks about copies, finds that
    some have ended. An engine's own copies to the host wait behind those in flight, and mapping
    memory takes longer meanwhile (docs/gpu.md).
    """

    size_bytes: int = field(converter=_int, validator=_BYTES)
    pace_bytes: int | None = field(
        default=None, converter=to_optional(_int), validator=optional(_BYTES)
    )


def _as_tuple(layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    try:
        return tuple(
            instance(f"Config.layers[{at}]", layer, LayerSpec)
            for at, layer in enumerate(in_order("Config.layers", layers))
        )
    except ArgumentError as error:
        raise ConfigError(str(error)) from error


@frozen
class Config:
    """Everything a `Manager` is told. Raises ConfigError if it cannot work."""

    layers: tuple[LayerSpec, ...] = field(converter=_as_tuple)
    gpu: GpuTier = field(validator=_checked(instance, GpuTier))
    host: HostTier | None = field(default=None, validator=optional(_checked(instance, HostTier)))
    tokens_per_block: int = field(default=32, converter=_int, validator=_COUNT)
    max_tokens: int = field(default=32_768, converter=_int, validator=_COUNT)
    """The longest sequence that may be created."""
    max_sequences: int = field(
        default=256, converter=_int, validator=_checked(whole, 1, MOST_SEQUENCES)
    )
    """Rows: sequences that exist at one time."""
    max_utilization_for_resume: float = field(
        default=0.95, converter=_float, validator=_checked(number, 0, 1, above=True)
    )
    """A resume may fill the budget up to here while other sequences run; the rest is for
    growth."""
    write_through: str = field(
        default="on_free", converter=_str, validator=_checked(one_of, WRITE_THROUGH)
    )
    """When committed pages are copied to the host for others with the same prefix: `on_free` (when
    their sequence closes), `on_commit` (soon after they are, so that leaving copies nothing), or
    `off` (never; then nothing is found either)."""
    spans: str = field(default="shared", converter=_str, validator=_checked(one_of, SPANS))
    """Whether sequences map the memory of others with the same prefix, and what stays on the GPU
    for that when its owner closes: what others have mapped (`shared`), its whole prompt (`all`), or
    `off`."""
    partial_blocks: bool = field(default=True, converter=_bool, validator=_FLAG)
    """Whether the first tokens of a block are copied from one that begins alike."""
    adopt: bool = field(default=True, converter=_bool, validator=_FLAG)
    """Freed ranges are handed whole, still mapped, to the next sequence that fits."""
    retain: bool = field(default=False, converter=_bool, validator=_FLAG)
    """Whether what a sequence committed stays readable in the memory that it leaves, until that is
    wanted: a hit is then copied on the GPU (lazy retention)."""
    scrub: bool = field(default=False, converter=_bool, validator=_FLAG)
    """Freed memory is overwritten before anybody else gets it."""
    digest_key: bytes | None = field(default=None, repr=False, converter=to_optional(_bytes))
    """The key, of 1 to 64 bytes, of the digests that name blocks to routers: managers with the same
    one give equal blocks equal names (see docs/events.md). Random by default. Keep it secret: with
    it, two prompts with one digest can be looked for."""

    def __attrs_post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("Config.layers is empty: there is nothing to keep keys and values of")
        self._check_digest_key(self.digest_key)
        if self.retain and self.write_through == "off":
            raise ConfigError(
                "retain is on, but with write_through 'off' nothing is found; use 'on_free'"
            )
        Geometry(self)

    def _check_digest_key(self, key: object) -> None:
        """The message does not say what it is: it is a secret."""
        if key is None or (type(key) is bytes and 1 <= len(key) <= MAX_KEY_BYTES):
            return
        found = f"{len(key)} bytes" if type(key) is bytes else article(type(key).__name__)
        raise ConfigError(f"digest_key is {found}; 1 to {MAX_KEY_BYTES} bytes are wanted")


class Geometry:
    """The sizes that follow from a configuration. All of them are fixed for a manager's life."""

    def __init__(self, config: Config) -> None:
        gpu, self.tokens_per_block = config.gpu, config.tokens_per_block
        self.layers = config.layers
        self.layer_count = self._check_layers()
        """Layers in all."""
        self.frame_bytes = gpu.frame_bytes
        if gpu.frame_bytes % 4096:
            raise ConfigError(f"frame_bytes is {gpu.frame_bytes}: not a multiple of 4096")
        self.token_bytes = sum(layer.token_bytes for layer in config.layers)
        """K and V of one token, before padding."""
        self.row_bytes = self._padded_row()
        """The distance from one token to the next."""
        self.block_bytes = self.row_bytes * self.tokens_per_block
        self.align_bytes = lcm(self.frame_bytes, self.block_bytes)
        """Range bases are multiples of this, so that slot = base / block_bytes + ordinal."""
        self.budget_frames = gpu.budget_bytes // self.frame_bytes
        if not self.budget_frames:
            raise ConfigError(
                f"budget_bytes {gpu.budget_bytes} is less than one frame of {self.frame_bytes}"
            )
        self.protected_frames = int(gpu.protected_share * self.budget_frames)
        """Frames of the latest spans that are kept while sequences compete."""
        host_bytes = config.host.size_bytes if config.host else 0
        self.host_slots = host_bytes // self.block_bytes
        if config.host and not self.host_slots:
            raise ConfigError(
                f"the host tier of {host_bytes} bytes holds no block of {self.block_bytes}; "
                "leave it out to run without one"
            )
        self._check_limits(config)
        self.rows = config.max_sequences
        self.longest_frames = self.extent(config.max_tokens) + self.guard_frames
        """The addresses of the longest sequence, with those behind it that are never mapped."""
        self.arena_bytes = self._arena(config)

    @property
    def padding_bytes(self) -> int:
        """Bytes of every row that hold nothing."""
        return self.row_bytes - self.token_bytes

    def layer(self, number: int) -> tuple[LayerSpec, int]:
        """A layer by its number, counted over all of them: its shape, and where its K begins in a
        token row, in bytes. V follows K, the next layer follows V. O(specs)."""
        assert 0 <= number < self.layer_count
        offset = 0
        for spec in self.layers:
            if number < spec.count:
                return spec, offset + number * (spec.token_bytes // spec.count)
            number -= spec.count
            offset += spec.token_bytes
        raise AssertionError("the specs have layer_count layers")

    def frames(self, tokens: int) -> int:
        """The frames that back that many tokens from a range's base."""
        return -(-tokens * self.row_bytes // self.frame_bytes)

    def whole_frames(self, tokens: int) -> int:
        """The frames that so many tokens from a range's base fill whole."""
        return tokens * self.row_bytes // self.frame_bytes

    def blocks(self, tokens: int) -> int:
        """The blocks that hold that many tokens."""
        return -(-tokens // self.tokens_per_block)

    def blocks_in(self, frames: int) -> int:
        """The blocks that have at least a part in the first that many frames of a range."""
        return -(-frames * self.frame_bytes // self.block_bytes)

    def tokens(self, frames: int) -> int:
        """The tokens that fit in that many frames from a range's base."""
        return frames * self.frame_bytes // self.row_bytes

    def extent(self, tokens: int) -> int:
        """The frames of address space for a sequence of that many tokens.

        Rounded up to three significant bits, so that ranges of similar sequences can be reused for
        one another; addresses are plentiful, mappings are not.
        """
        unit = self.align_bytes // self.frame_bytes
        units = -(-self.frames(tokens) // unit)
        step = 1 << max(0, units.bit_length() - 3)
        return -(-units // step) * step * unit

    def _check_layers(self) -> int:
        """Every element is at a multiple of its size, as rows are (of 16); how many layers."""
        offset = 0
        for spec in self.layers:
            size = DTYPE_BYTES[spec.dtype]
            if offset % size:
                raise ConfigError(
                    f"the {spec.dtype} layers begin at byte {offset} of a token row: not a "
                    f"multiple of {size}; put layers of larger elements first"
                )
            offset += spec.token_bytes
        return sum(spec.count for spec in self.layers)

    def _check_limits(self, config: Config) -> None:
        """What has an entry for each slot, or for each token of a block in each row, is bounded."""
        if self.host_slots > INT31:
            raise ConfigError(
                f"a host tier of {self.host_slots} slots of {self.block_bytes} bytes has more than "
                f"{INT31}; make tokens_per_block larger or size_bytes smaller"
            )
        open_tokens = config.max_sequences * self.tokens_per_block
        if open_tokens > INT31:
            raise ConfigError(
                f"max_sequences {config.max_sequences} blocks of {self.tokens_per_block} tokens "
                f"have more than {INT31}; make either smaller"
            )

    def _padded_row(self) -> int:
        """The row, padded so that a block is a multiple of a sixteenth of a frame."""
        part = self.frame_bytes // SIXTEENTH
        unit = lcm(16, part // gcd(part, self.tokens_per_block))
        return -(-self.token_bytes // unit) * unit

    def _arena(self, config: Config) -> int:
        longest = self.longest_frames * self.frame_bytes
        wanted = config.gpu.arena_bytes
        ranges = 2 * config.max_sequences + 1
        size = wanted or min(ranges * longest, max(MAX_ARENA_BYTES, longest))
        size -= size % self.align_bytes
        if size < longest:
            raise ConfigError(
                f"arena_bytes {wanted} is too small for one sequence of {config.max_tokens} "
                f"tokens, which takes {longest}"
            )
        if size // self.block_bytes > INT31:
            raise ConfigError(
                f"an arena of {size} bytes has more than {INT31} slots of {self.block_bytes}; "
                "make tokens_per_block larger, or max_tokens, max_sequences or arena_bytes smaller"
            )
        return size

    @property
    def guard_frames(self) -> int:
        """Addresses after every range that are never mapped, so that an overrun faults."""
        return self.align_bytes // self.frame_bytes
