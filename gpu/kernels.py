"""Kernels that write, verify and overwrite bytes: the byte checks on the device itself.

Compiled by NVRTC through cuda.core when a device is opened, and loaded then, so that nothing is
compiled or loaded while something is raced or timed. A launch is given segments (where, from which
token, how many, by whom); each block of threads takes 32 KiB of one of them. The bytes are those
of `kvstate.pattern`, word for word.

A segment with a row reads its base from the device's own table, which is published in stream order
like an engine's, so that a wrong table shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, Final

import numpy as np

from kvstate.gpu.driver import Driver
from kvstate.gpu.held import Held
from kvstate.pattern import GOLDEN, MIX

TILE_BYTES: Final = 32 << 10
UNIT_BYTES: Final = 16
"""What a thread reads or writes at once: sizes and addresses are multiples of it."""
THREADS: Final = 256

SOURCE: Final = r"""
typedef unsigned int u32;
typedef unsigned long long u64;
struct Segment { u64 address, position, count, key; long long row; u64 flags; };
struct Row { u64 base, length; };

__device__ u32 word(u32 seed, u32 index) {
    u32 w = seed + index * GOLDEN;
    w ^= w >> 15; w *= MIX; w ^= w >> 13;
    return w;
}

// What a block works on: a tile of one segment. False if the device's table does not allow it.
struct Tile { u64 base; u64 offset; u32 bytes; const Segment* segment; bool ok; };

__device__ Tile tile_of(const Segment* segments, const u32* firsts, u32 count, const Row* table,
                        u32 row_bytes, u64 stride, u64 phase) {
    u64 number = blockIdx.x * stride + phase;
    // The last segment whose first tile is not beyond it: 32 candidates at a time, by one warp.
    __shared__ u32 found;
    if (threadIdx.x < 32) {
        u32 low = 0, left = count;
        while (left > 1) {
            u32 step = (left + 31) / 32, at = threadIdx.x * step;
            u32 before = __ballot_sync(~0u, at < left && firsts[low + at] <= number);
            u32 skip = (__popc(before) - 1) * step;
            low += skip;
            left = min(step, left - skip);
        }
        if (threadIdx.x == 0) found = low;
    }
    __syncthreads();
    u32 low = found;
    Tile t;
    t.segment = segments + low;
    t.offset = (number - firsts[low]) * TILE;
    u64 size = t.segment->count * row_bytes;
    t.bytes = (u32)(size - t.offset < TILE ? size - t.offset : TILE);
    t.base = t.segment->address;
    t.ok = true;
    if (t.segment->row >= 0) {
        Row row = table[t.segment->row];
        t.base += row.base;
        t.ok = t.segment->position + t.segment->count <= row.length;
    }
    return t;
}

template <bool VERIFY>
__device__ void work(const Segment* segments, const u32* firsts, u32 count, const Row* table,
                     u32 row_bytes, u64 stride, u64 phase, unsigned char* flags, u32* wrong) {
    Tile t = tile_of(segments, firsts, count, table, row_bytes, stride, phase);
    u32 first_row = (u32)(t.offset / row_bytes), column = (u32)(t.offset % row_bytes);
    u32 low = (u32)t.segment->key, high = (u32)(t.segment->key >> 32);
    u32 bad = 0;
    uint4* memory = (uint4*)(t.base + t.offset);
    #pragma unroll 4
    for (u32 at = threadIdx.x * 16; at < t.bytes; at += THREADS * 16) {
        u32 inside = column + at, row = inside / row_bytes, index = (inside - row * row_bytes) / 4;
        u32 position = (u32)t.segment->position + first_row + row;
        u32 seed = (position ^ low) * MIX + high;
        uint4 want = make_uint4(word(seed, index), word(seed, index + 1),
                                word(seed, index + 2), word(seed, index + 3));
        if (!VERIFY) {
            if (t.ok) memory[at / 16] = want;
        } else {
            uint4 have = t.ok ? memory[at / 16] : make_uint4(~want.x, 0, 0, 0);
            if (have.x != want.x || have.y != want.y || have.z != want.z || have.w != want.w) {
                flags[t.segment->flags + first_row + row] = 1;
                bad++;
            }
        }
    }
    if (VERIFY && bad) atomicAdd(wrong, bad);
}

extern "C" __global__ void __launch_bounds__(THREADS) write_rows(
    const Segment* segments, const u32* firsts, u32 count, const Row* table, u32 row_bytes) {
    work<false>(segments, firsts, count, table, row_bytes, 1, 0, nullptr, nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS) verify_rows(
    const Segment* segments, const u32* firsts, u32 count, const Row* table, u32 row_bytes,
    u64 stride, u64 phase, unsigned char* flags, u32* wrong) {
    work<true>(segments, firsts, count, table, row_bytes, stride, phase, flags, wrong);
}

extern "C" __global__ void publish(Row* table, const u64* entries, u32 count) {
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) {
        table[entries[3 * at]].base = entries[3 * at + 1];
        table[entries[3 * at]].length = entries[3 * at + 2];
    }
}

// Bytes that are neither of two values: each run by a column of blocks.
extern "C" __global__ void __launch_bounds__(THREADS) strays(
    const ulonglong2* runs, u32 one, u32 other, u64* total) {
    ulonglong2 run = runs[blockIdx.y];
    const uint4* memory = (const uint4*)run.x;
    u32 found = 0;
    for (u64 at = blockIdx.x * THREADS + threadIdx.x; at < run.y / 16; at += gridDim.x * THREADS) {
        uint4 have = memory[at];
        u32 words[4] = {have.x, have.y, have.z, have.w};
        for (u32 word : words)
            found += 4 - __popc(__vcmpeq4(word, one) | __vcmpeq4(word, other)) / 8;
    }
    if (found) atomicAdd(total, (u64)found);
}

extern "C" __global__ void spin(u64 cycles) {
    long long start = clock64();
    while (clock64() - start < (long long)cycles) { }
}
"""

SEGMENT_BYTES: Final = 48
NAMES: Final = ("write_rows", "verify_rows", "publish", "strays", "spin")
_u32, _u64, _pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p


class Kernels:
    """The compiled kernels of one device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        major, minor = (driver.attribute(f"COMPUTE_CAPABILITY_{x}") for x in ("MAJOR", "MINOR"))
        code = _compiled(f"sm_{major}{minor}")
        module = Held(driver, "cuModuleLoadData", "cuModuleUnload").make("kernels", code)
        self._functions = {
            name: driver.call(driver.api.cuModuleGetFunction, module, name.encode())
            for name in NAMES
        }

    def write(
        self, stream: int, segments: int, firsts: int, count: int, table: int, row_bytes: int,
        tiles: int,
    ) -> None:  # fmt: skip
        """Launch the writing of every tile."""
        values = segments, firsts, count, table, row_bytes
        self._launch("write_rows", tiles, THREADS, stream, values,
                     (_pointer, _pointer, _u32, _pointer, _u32))  # fmt: skip

    def verify(
        self, stream: int, segments: int, firsts: int, count: int, table: int, row_bytes: int,
        tiles: int, stride: int, phase: int, flags: int, wrong: int,
    ) -> None:  # fmt: skip
        """Launch the comparison of every `stride`-th tile."""
        values = (segments, firsts, count, table, row_bytes, stride, phase, flags, wrong)
        kinds = (_pointer, _pointer, _u32, _pointer, _u32, _u64, _u64, _pointer, _pointer)
        grid = -(-(tiles - phase) // stride)
        self._launch("verify_rows", grid, THREADS, stream, values, kinds)

    def publish(self, stream: int, table: int, entries: int, count: int) -> None:
        """Launch the writing of table entries: (row, base, length) each."""
        grid = -(-count // THREADS)
        self._launch("publish", grid, THREADS, stream, (table, entries, count),
                     (_pointer, _pointer, _u32))  # fmt: skip

    def strays(self, stream: int, runs: int, count: int, values: bytes, total: int) -> None:
        """Launch the counting of bytes that are neither of two values."""
        one, other = (value * 0x01010101 for value in values)
        self._launch("strays", 32, THREADS, stream, (runs, one, other, total),
                     (_pointer, _u32, _u32, _pointer), rows=count)  # fmt: skip

    def spin(self, stream: int, cycles: int) -> None:
        """Launch something that only takes time."""
        self._launch("spin", 1, 1, stream, (cycles,), (_u64,))

    def _launch(
        self, name: str, grid: int, block: int, stream: int, values: Any, kinds: Any, rows: int = 1
    ) -> None:
        function = self._functions[name]
        self.driver.call(
            self.driver.api.cuLaunchKernel, function, grid, rows, 1, block, 1, 1, 0, stream,
            (values, kinds), 0,
        )  # fmt: skip


@cache
def _compiled(arch: str) -> bytes:
    """The kernels for an architecture: 50 ms, once a process."""
    from cuda.core import Program, ProgramOptions

    defines = {"GOLDEN": f"{GOLDEN}u", "MIX": f"{MIX}u", "TILE": str(TILE_BYTES),
               "THREADS": str(THREADS)}  # fmt: skip
    text = "".join(f"#define {name} {value}\n" for name, value in defines.items()) + SOURCE
    options = ProgramOptions(std="c++17", arch=arch)
    return bytes(Program(text, "c++", options).compile("cubin").code)


def tiles_of(counts: np.ndarray[Any, Any], row_bytes: int) -> np.ndarray[Any, Any]:
    """How many tiles each segment has."""
    return -(-counts.astype(np.int64) * row_bytes // TILE_BYTES)
