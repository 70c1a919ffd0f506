"""A small decoder, one token of each row of a launch at a time, always in the same shapes.

So a token's keys, values and logits are the same bits wherever and beside whatever it is computed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from attrs import define

torch: Any = import_module("torch")
ROWS: Final = 16
"""Of one launch."""
VOCABULARY: Final = 512


@define
class Shape:
    """Sizes of the model."""

    layers: int = 8
    width: int = 512
    heads: int = 16
    kv_heads: int = 8
    dim: int = 64
    longest: int = 768
    shared: int = 256
    """Tokens of a prompt that requests have in common."""


class Model:
    """The weights, and one token of each row of a launch."""

    def __init__(self, shape: Shape, on: str) -> None:
        make = torch.Generator(device=on).manual_seed(5)
        self.shape, self.on = shape, on

        def weights(*size: int) -> Any:
            drawn = torch.randn(*size, generator=make, device=on, dtype=torch.float32)
            return (drawn / size[0] ** 0.5).to(torch.bfloat16)

        wide, kv = shape.heads * shape.dim, 2 * shape.kv_heads * shape.dim
        self.embedding = weights(VOCABULARY, shape.width) * VOCABULARY**0.5
        self.places = weights(shape.longest, shape.width) * shape.longest**0.5
        self.parts = [
            (weights(shape.width, wide + kv), weights(wide, shape.width),
             weights(shape.width, 4 * shape.width), weights(4 * shape.width, shape.width))
            for _ in range(shape.layers)
        ]  # fmt: skip
        self.out = weights(shape.width, VOCABULARY)
        self.range = torch.arange(shape.longest, device=on)

    def token(self, history: Any, ids: Any, at: Any) -> Any:
        """Compute the token of each row, `at` its position, behind the row's history, which gets
        its keys and values; the logits."""
        s, rows = self.shape, torch.arange(ROWS, device=self.on)
        there = (self.range <= at[:, None])[:, None, None]
        x = self.embedding[ids] + self.places[at]
        for layer, (inward, outward, up, down) in enumerate(self.parts):
            both = _normal(x) @ inward
            q, kv = both.split([s.heads * s.dim, 2 * s.kv_heads * s.dim], dim=1)
            history[rows, at, layer] = kv.view(ROWS, 2, s.kv_heads, s.dim)
            k, v = (history[:, :, layer, part].transpose(1, 2) for part in (0, 1))
            q = q.view(ROWS, s.kv_heads, s.heads // s.kv_heads, s.dim)
            scores = (q @ k.transpose(2, 3)).float() * s.dim**-0.5
            seen = torch.softmax(scores.masked_fill(~there, -torch.inf), dim=-1)
            x = x + (seen.to(torch.bfloat16) @ v).reshape(ROWS, -1) @ outward
            x = x + torch.relu(_normal(x) @ up) @ down
        return _normal(x) @ self.out


class Rows:
    """What one launch works on: histories, ids and places of its rows. On a card its kernels are
    one graph, which has no address of a sequence: launching them one by one takes too long."""

    def __init__(self, model: Model) -> None:
        s, self.model = model.shape, model
        size = (ROWS, s.longest, s.layers, 2, s.kv_heads, s.dim)
        self.history = torch.zeros(size, device=model.on, dtype=torch.bfloat16)
        self.ids, self.places = (
            torch.zeros(ROWS, device=model.on, dtype=torch.int64) for _ in "ip"
        )
        self.graph: Any = None
        if model.on == "cuda":
            self.compute()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.compute()
            self.graph = graph

    def compute(self) -> None:
        """The token of each row, kernel by kernel, or as a graph."""
        if self.graph is None:
            self.out = self.model.token(self.history, self.ids, self.places)
        else:
            self.graph.replay()

    def over(self, views: list[Any]) -> Any:
        """The same of rows whose history is in other memory: it is read there, and the token's keys
        and values are written there; the logits."""
        for row, view in enumerate(views):
            self.history[row, : len(view)] = view
        self.compute()
        for row, view in enumerate(views):
            place = self.places[row : row + 1]
            view.index_copy_(0, place, self.history[row].index_select(0, place))
        return self.out

    def of(self, views: list[Any], ids: Any, places: Any) -> Any:
        """The tokens with these ids at these places."""
        self.ids.copy_(ids)
        self.places.copy_(places)
        return self.over(views)


def _normal(x: Any) -> Any:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + 1e-6)).to(torch.bfloat16)
