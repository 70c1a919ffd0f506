"""The bytes that a simulated step writes: a function of who wrote them and where.

Every token row is filled from a 64-bit key (sequence, life, tenant, layer group) and its position,
so a row that belongs to another sequence, position or life, or that is shifted by one word, does
not compare equal. One multiplication a word keeps the check at memory speed on a GPU.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

GOLDEN: Final = 0x9E3779B1
MIX: Final = 0x85EBCA6B
SCRUB_BYTE: Final = 0xDB
"""What freed memory is overwritten with."""

Words = npt.NDArray[np.uint32]


def key(sequence: int, life: int, tenant: bytes = b"", group: int = 0) -> int:
    """The 64-bit key of a writer."""
    text = b"%d/%d/%d/" % (sequence, life, group) + tenant
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def rows(writer: int, position: int, count: int, row_bytes: int) -> Words:
    """The expected bytes of `count` tokens from `position`: uint32[count, row_bytes / 4]."""
    low, high = np.uint32(writer & 0xFFFFFFFF), np.uint32(writer >> 32)
    positions = np.arange(position, position + count, dtype=np.uint32)
    seeds = (positions ^ low) * np.uint32(MIX) + high
    words = seeds[:, None] + np.arange(row_bytes // 4, dtype=np.uint32) * np.uint32(GOLDEN)
    words ^= words >> np.uint32(15)
    words *= np.uint32(MIX)
    words ^= words >> np.uint32(13)
    return words
