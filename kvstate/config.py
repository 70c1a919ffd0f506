"""What a manager is told before it starts, and the sizes that follow from it.

Everything that can be wrong with a configuration is said here, at once and with numbers, so that
no later code asks again. Sizes that do not fit are never rounded silently: the padding and the
unused rest are reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from math import gcd, lcm
from typing import Final

from attrs import field, frozen

from kvstate.errors import ConfigError

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


@frozen
class LayerSpec:
    """The KV shape of `count` equal attention layers."""

    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    count: int = 1

    @property
    def token_bytes(self) -> int:
        """K and V of one token in these layers."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype] * self.count


@frozen
class GpuTier:
    """GPU memory: `budget_bytes` of it, in frames of `frame_bytes`.

    `map_ahead_frames` is the margin beyond its need that every sequence of a batch gets when one of
    them must be mapped further: with n frames, a batch of any size is mapped once in the steps that
    fill n frames. A newcomer's begins where its prompt ends. It is mapped while frames are to
    spare, costs nobody admission, and is taken back before a charge fails. With 0 nothing but the
    need is mapped. `arena_bytes` is the size of
    the address reservation; by default what twice `max_sequences` and one more of full length take.
    Spans keep addresses too: a prefix is copied and not mapped if each row, and one that must move,
    could not have a range of full length beside it.
    `reclaim_frames` is the least that one reclaim unmaps: parked memory holds nothing that anybody
    reads, and under steady pressure every reclaim is a quiesce. `protected_share` of the budget is
    kept for the prefixes that were shared last, while more than one sequence runs. While at least
    `copy_share` of it would be free or parked after that, a prefix is copied instead of mapped,
    unless a parked range has it mapped already: a copy into mapped memory takes less time than
    mappings (docs/gpu.md), and memory is plenty. 1 means never.
    """

    budget_bytes: int
    frame_bytes: int = 2 * MIB
    map_ahead_frames: int = 0
    reclaim_frames: int = 16
    protected_share: float = 0.05
    copy_share: float = 1.0
    arena_bytes: int | None = None


@frozen
class HostTier:
    """Host memory: for suspended sequences, and for what others may want later."""

    size_bytes: int


def _as_tuple(layers: Iterable[LayerSpec]) -> tuple[LayerSpec, ...]:
    return tuple(layers)


@frozen
class Config:
    """Everything a `Manager` is told. Raises ConfigError if it cannot work."""

    layers: tuple[LayerSpec, ...] = field(converter=_as_tuple)
    gpu: GpuTier
    host: HostTier | None = None
    tokens_per_block: int = 32
    max_tokens: int = 32_768
    """The longest sequence that may be created."""
    max_sequences: int = 256
    """Rows: sequences that exist at one time."""
    max_utilization_for_resume: float = 0.95
    """A resume may fill the budget up to here while other sequences run; the rest is for
    growth."""
    write_through: str = "on_free"
    """When committed pages are copied to the host for others with the same prefix: `on_free` (when
    their sequence closes), `on_commit` (soon after they are, so that leaving copies nothing), or
    `off` (never; then nothing is found either)."""
    spans: str = "shared"
    """Whether sequences map the memory of others with the same prefix, and what stays on the GPU
    for that when its owner closes: what others have mapped (`shared`), its whole prompt (`all`), or
    `off`."""
    partial_blocks: bool = True
    """Whether the first tokens of a block are copied from one that begins alike."""
    adopt: bool = True
    """Freed ranges are handed whole, still mapped, to the next sequence that fits."""
    retain: bool = False
    """Whether what a sequence committed stays readable in the memory that it leaves, until that is
    wanted: a hit is then copied on the GPU (lazy retention)."""
    scrub: bool = False
    """Freed memory is overwritten before anybody else gets it."""
    digest_key: bytes | None = field(default=None, repr=False)
    """The key, of 1 to 64 bytes, of the digests that name blocks to routers: managers with the same
    one give equal blocks equal names (see docs/events.md). Random by default. Keep it secret: with
    it, two prompts with one digest can be looked for."""

    def __attrs_post_init__(self) -> None:
        for layer in self.layers:
            if layer.dtype not in DTYPE_BYTES:
                raise ConfigError(f"dtype {layer.dtype!r} is unknown; use {sorted(DTYPE_BYTES)}")
            _positive(layer, "kv_heads", "head_dim", "count")
        if not self.layers:
            raise ConfigError("layers is empty: there is nothing to keep keys and values of")
        _positive(self, "tokens_per_block", "max_tokens", "max_sequences")
        _positive(self.gpu, "budget_bytes", "frame_bytes", "reclaim_frames")
        if self.gpu.map_ahead_frames < 0:
            raise ConfigError(f"map_ahead_frames is {self.gpu.map_ahead_frames}; it may not be < 0")
        if not 0 < self.max_utilization_for_resume <= 1:
            raise ConfigError(
                f"max_utilization_for_resume is {self.max_utilization_for_resume}: not in (0, 1]"
            )
        self._check_modes()
        if not 0 <= self.gpu.protected_share < 1:
            raise ConfigError(
                f"protected_share is {self.gpu.protected_share}: not from 0 to below 1"
            )
        if not 0 <= self.gpu.copy_share <= 1:
            raise ConfigError(f"copy_share is {self.gpu.copy_share}: not from 0 to 1")
        Geometry(self)

    def _check_modes(self) -> None:
        for name, known in (("write_through", WRITE_THROUGH), ("spans", SPANS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}"
                )
        self._check_digest_key(self.digest_key)
        if self.retain and self.write_through == "off":
            raise ConfigError(
                "retain is on, but with write_through 'off' nothing is found; use 'on_free'"
            )

    def _check_digest_key(self, key: object) -> None:
        """The message does not say what it is: it is a secret."""
        if key is None or (isinstance(key, bytes) and 1 <= len(key) <= MAX_KEY_BYTES):
            return
        found = f"{len(key)} bytes" if isinstance(key, bytes) else f"a {type(key).__name__}"
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


def _positive(thing: object, *names: str) -> None:
    for name in names:
        value = getattr(thing, name)
        if not isinstance(value, int) or value <= 0:
            raise ConfigError(f"{type(thing).__name__}.{name} is {value!r}; it must be at least 1")
