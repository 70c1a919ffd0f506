"""Attention over the manager's memory: stock torch on strided views, against a tensor a layer.

The layers of a token lie together in one range, so the keys of one layer are a strided view. What
that costs decode attention (bf16, 32 query heads on 8 heads of keys and values, 128 wide; one
layer of 32) is measured with sequences of equal length as one batched tensor, and with ragged
lengths in one call a sequence, on both sides. `prefill` writes the keys and values of new tokens
of all layers through the views, and into contiguous tensors.

GPU time, GB/s of the keys and values that are read or written. Both sides compute on the same
values, and the results must agree. Sequences that are created alike have their ranges at a constant
distance, which is what makes the batch one tensor; that is checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import closing
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any, Final

import numpy as np
from attrs import frozen

from kvstate import Config, GpuTier, LayerSpec, Manager, Sequence
from kvstate.config import MIB
from tests.bench.card_common import FRAME, GIB, Card, Figure, Raw, Report, opened, pairs, rate

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES: Final = 2 * KV_HEADS * DIM * 2
"""Keys and values of one token in one layer."""
AIM: Final = 0.95


@frozen
class Span:
    """Memory of the device as torch takes it: so many 16-bit numbers."""

    address: int
    numbers: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        place = (self.address, False)
        return {"shape": (self.numbers,), "typestr": "<i2", "data": place, "version": 3}


@frozen
class Bench:
    """The manager, the raw side, and torch."""

    torch: Any
    kv: Manager
    raw: Raw
    on: str
    """Where torch's tensors are."""
    layers: int

    def views(self, seq: Sequence, layer: int) -> list[Any]:
        """Keys and values of one layer: [tokens, heads, dim] each, of the manager's memory."""
        return [self.torch.from_dlpack(one) for one in self.kv.tensors(seq, layer)]

    def random(self, *shape: int) -> Any:
        """Normal numbers."""
        return self.torch.randn(*shape, device=self.on, dtype=self.torch.bfloat16)

    def flat(self, address: int, numbers: int) -> Any:
        """Memory from an address on, mapped or not, as one row of numbers."""
        torch = self.torch
        if self.on == "cpu":
            memory = (ctypes.c_int16 * numbers).from_address(address)
            return torch.frombuffer(memory, dtype=torch.bfloat16)
        return torch.as_tensor(Span(address, numbers), device=self.on).view(torch.bfloat16)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        """One new token a sequence: q [batch, heads, 1, dim], k and v [batch, tokens, heads,
        dim]."""
        attention = self.torch.nn.functional.scaled_dot_product_attention
        return attention(q, k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True)

    def compare(
        self, name: str, ours: Callable[[], Any], bare: Callable[[], Any], moved: int, calls: int
    ) -> Figure:
        """GPU time of both, on torch's stream."""
        gpu = self.raw.gpu
        pair = pairs(lambda: {"": gpu(ours, 0)}, lambda: {"": gpu(bare, 0)}, warm=2)[""]
        details = {"us": pair.ours * 1e6, "calls": calls}
        return rate(name, pair, moved, clock="GPU", aim=AIM, details=details)

    def created(self, lengths: list[int]) -> list[Sequence]:
        """Sequences of these lengths, with memory."""
        seqs = [self.kv.create(max_tokens=max(lengths)) for _ in lengths]
        for seq in seqs:
            seq.resume()
        self.kv.settle(self.kv.step(self.kv.batch(seqs), np.array(lengths)))
        return seqs


def attention(card: Card) -> Report:
    """Decode attention and prefill writes through views, against one tensor a layer."""
    torch: Any = import_module("torch")
    layers, batch, tokens = card.pick((32, 64, 1536), (4, 2, 64))
    least, most = card.pick((256, 3072), (16, 64))
    new = card.pick(1024, 32)
    config = Config(
        layers=[LayerSpec(KV_HEADS, DIM, "bfloat16", layers)],
        gpu=GpuTier(card.pick(32 * GIB, 64 * MIB), FRAME),
        max_tokens=most,
        max_sequences=2 * batch,
        max_utilization_for_resume=1.0,
    )
    torch.manual_seed(0)
    on = f"cuda:{card.ordinal}" if card.on_gpu else "cpu"
    report = Report("Attention over views of the manager's memory (GPU)")
    with closing(card.raw()) as raw, opened(config, card.open()) as kv, torch.no_grad():
        bench = Bench(torch, kv, raw, on, layers)
        seqs = bench.created([tokens] * batch)
        report.figures.append(_equal(bench, seqs, tokens))
        report.figures += _prefill(bench, seqs[0], new)
        for seq in seqs:
            seq.close()
        lengths = np.random.default_rng(0).integers(least, most, batch, endpoint=True)
        report.figures.append(_ragged(bench, bench.created(lengths.tolist())))
    return report


def _equal(bench: Bench, seqs: list[Sequence], tokens: int) -> Figure:
    """A batch of equal lengths: one tensor over all ranges."""
    layer = bench.layers // 2
    for seq in seqs:
        for view in bench.views(seq, layer):
            view.normal_()
    ours = [_batched(bench, seqs, tokens, bench.views(seqs[0], layer)[at], at) for at in (0, 1)]
    bare = [one.contiguous() for one in ours]
    q = bench.random(len(seqs), HEADS, 1, DIM)
    _agree(bench, bench.attend(q, *ours), bench.attend(q, *bare))
    name = f"decode, {len(seqs)} x {tokens} tokens, one call"
    calls = partial(bench.attend, q, *ours), partial(bench.attend, q, *bare)
    return bench.compare(name, *calls, len(seqs) * tokens * TOKEN_BYTES, 1)


def _batched(bench: Bench, seqs: list[Sequence], tokens: int, first: Any, at: int) -> Any:
    """[sequences, tokens, heads, dim] over ranges at a constant distance, from the first's
    view."""
    bases = [seq.base or 0 for seq in seqs]
    distance = bases[1] - bases[0]
    if any(b - a != distance for a, b in pairwise(bases)) or distance < 0:
        raise AssertionError("sequences that were created alike are not at a constant distance")
    numbers = (distance * (len(seqs) - 1)) // 2 + (tokens - 1) * first.stride(0) + KV_HEADS * DIM
    flat = bench.flat(first.data_ptr(), numbers)
    shape = (len(seqs), tokens, KV_HEADS, DIM)
    batched = bench.torch.as_strided(flat, shape, (distance // 2, *first.stride()))
    last = bench.views(seqs[-1], bench.layers // 2)[at]
    if batched[-1].data_ptr() != last.data_ptr() or not bench.torch.equal(batched[-1], last):
        raise AssertionError("the batched tensor is not the sequences' memory")
    return batched


def _ragged(bench: Bench, seqs: list[Sequence]) -> Figure:
    """A batch of mixed lengths: one call a sequence."""
    ours: list[tuple[Any, ...]] = []
    bare: list[tuple[Any, ...]] = []
    for seq in seqs:
        views = bench.views(seq, bench.layers // 2)
        for view in views:
            view.normal_()
        q = bench.random(1, HEADS, 1, DIM)
        ours.append((q, *(view[None] for view in views)))
        bare.append((q, *(view.contiguous()[None] for view in views)))
        _agree(bench, bench.attend(*ours[-1]), bench.attend(*bare[-1]))

    def each(tensors: list[tuple[Any, ...]]) -> None:
        for one in tensors:
            bench.attend(*one)

    tokens = [seq.length_tokens for seq in seqs]
    name = f"decode, {len(seqs)} x {min(tokens)} to {max(tokens)} tokens, a call each"
    moved = sum(tokens) * TOKEN_BYTES
    return bench.compare(name, partial(each, ours), partial(each, bare), moved, len(seqs))


def _prefill(bench: Bench, seq: Sequence, new: int) -> list[Figure]:
    """Keys and values of new tokens into all layers."""
    fresh = [bench.random(new, KV_HEADS, DIM) for _ in range(2 * bench.layers)]
    ours = [view for at in range(bench.layers) for view in bench.views(seq, at)]
    bare = [bench.torch.empty_like(one) for one in fresh]
    where = bench.torch.arange(new, device=bench.on)

    def index_copy(targets: list[Any]) -> None:
        for target, values in zip(targets, fresh, strict=True):
            target.index_copy_(0, where, values)

    def slice_copy(targets: list[Any]) -> None:
        for target, values in zip(targets, fresh, strict=True):
            target[:new].copy_(values)

    figures = []
    moved = new * TOKEN_BYTES * bench.layers
    for name, write in (("index copy", index_copy), ("copy", slice_copy)):
        for view in ours:
            view.zero_()
        title = f"prefill writes of {new} tokens, {bench.layers} layers, {name}"
        calls = partial(write, ours), partial(write, bare)
        figures.append(bench.compare(title, *calls, moved, len(fresh)))
        for view, values in zip(ours, fresh, strict=True):
            _agree(bench, view[:new], values, exactly=True)
    return figures


def _agree(bench: Bench, ours: Any, bare: Any, *, exactly: bool = False) -> None:
    torch = bench.torch
    same = torch.equal(ours, bare) if exactly else torch.allclose(ours, bare, atol=2e-2, rtol=2e-2)
    if not same:
        raise AssertionError("the views and the contiguous tensors give different results")
