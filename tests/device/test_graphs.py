"""CUDA graphs over the memory of a sequence, with torch: captured once a stay, and replayed.

The graph writes one token of all layers where a number on the card says, and reads back the tokens
that other numbers name. All of it are kernels over the one tensor of `Manager.tensors_all`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence, StaleAddress
from kvstate.gpu import open_device
from tests.device.factories import CUDA_FRAME

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
LAYER: Final = LayerSpec(2, 64, "float16", count=4)
"""2 KiB a token, so 1,024 tokens a frame."""
TOKEN: Final = (4, 2, 2, 64)
READ: Final = 8
"""Tokens that one replay reads back."""


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return found


@pytest.fixture
def kv() -> Iterator[Manager]:
    config = Config(
        layers=[LAYER], gpu=GpuTier(8 * CUDA_FRAME, CUDA_FRAME), host=HostTier(8 * CUDA_FRAME),
        max_tokens=3000, max_utilization_for_resume=1.0,
    )  # fmt: skip
    with Manager(config, open_device("cuda"), debug=True) as kv:
        yield kv


def content(number: int) -> Any:
    """What a token has: no two of them the same, exact in float16."""
    return ((np.arange(1024) * 31 + number) % 2039).astype(np.float16).reshape(TOKEN)


class Graph:
    """A captured decode step of one stay."""

    def __init__(self, torch: Any, kv: Manager, seq: Sequence) -> None:
        self.torch, self.reads = torch, [(seq, seq.stay)]
        rows = torch.from_dlpack(kv.tensors_all(seq))
        assert tuple(rows.shape) == (seq.max_tokens, *TOKEN)
        self.at = torch.zeros(1, dtype=torch.int64, device="cuda")
        self.token = torch.zeros((1, *TOKEN), dtype=torch.float16, device="cuda")
        self.which = torch.zeros(READ, dtype=torch.int64, device="cuda")
        self.found = torch.zeros((READ, *TOKEN), dtype=torch.float16, device="cuda")
        self.at.fill_(seq.capacity_tokens - 1)  # where the warm-up may write
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(rows)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step(rows)

    def _step(self, rows: Any) -> None:
        rows.index_copy_(0, self.at, self.token)
        self.found.copy_(rows.index_select(0, self.which))

    def replay(self, at: int, token: Any, which: list[int]) -> Any:
        """Write one token, and read these."""
        self.at.fill_(at)
        self.token.copy_(self.torch.from_numpy(token)[None])
        self.which.copy_(self.torch.tensor(which))
        self.graph.replay()
        self.torch.cuda.synchronize()
        return self.found.cpu().numpy()


def decode(kv: Manager, seq: Sequence, graph: Graph, tokens: int) -> None:
    """Steps of one token, each of which reads the first tokens and the last ones back."""
    for _ in range(tokens):
        step = kv.step(kv.batch([seq]))
        at = int(step.start_tokens[0])
        kv.reads(graph.reads)
        which = [at * part // (READ - 1) for part in range(READ)]
        found = graph.replay(at, content(at), which)
        kv.settle(step)
        assert all(np.array_equal(one, content(n)) for one, n in zip(found, which, strict=True))


def assert_bytes(kv: Manager, seq: Sequence) -> None:
    """What the device itself reads there, is what was written."""
    device: Any = kv.device
    base, row = seq.base, kv.geometry.row_bytes
    assert base is not None
    for number in range(seq.length_tokens):
        assert device.peek(base + number * row, 2048) == content(number).tobytes()


def test_a_graph_is_good_for_a_stay_and_no_longer(torch: Any, kv: Manager) -> None:
    """It writes and reads over frames that were mapped after the capture."""
    seq, other = kv.create(), kv.create(max_tokens=100)
    seq.resume()
    seq.resize(1)
    graph, capacity = Graph(torch, kv, seq), seq.capacity_tokens
    decode(kv, seq, graph, 1100)
    assert seq.capacity_tokens > capacity
    seq.rewind(1000)
    decode(kv, seq, graph, 10)
    assert_bytes(kv, seq)

    seq.suspend()
    with pytest.raises(StaleAddress, match=r"sequence 1: .* stay 1 are .*: it was suspended"):
        kv.reads(graph.reads)
    kv.wait(seq)
    other.resume()  # may take the range
    other.resize(100)
    seq.resume()
    with pytest.raises(StaleAddress, match="left that memory since: it was resumed"):
        kv.reads(graph.reads)
    torch.cuda.synchronize()
    graph = Graph(torch, kv, seq)
    decode(kv, seq, graph, 100)
    assert_bytes(kv, seq)


def test_a_dummy_is_enough_to_warm_up(torch: Any, kv: Manager) -> None:
    """Nothing of a graph over one sequence reaches another one."""
    dummy, seq = kv.dummy(16), kv.create()
    seq.resume()
    seq.resize(16)
    Graph(torch, kv, dummy)
    graph = Graph(torch, kv, seq)
    dummy.close()
    decode(kv, seq, graph, 16)
    assert_bytes(kv, seq)
