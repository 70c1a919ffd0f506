"""A model of eight layers whose keys and values live in a manager's memory, bit for bit against one
that keeps them in plain tensors.

    PYTHONPATH=. python tests/bench/card_model.py [--tokens 100000] [--graph] [--device cuda]

Random weights, no downloads: bf16, RMSNorm, attention with fewer heads of keys than of queries, an
MLP. Requests share prompts, are forked, drafted ahead and rejected in part, stepped again before
the last step is settled, suspended and resumed while others run, rewound, dropped and closed, on
four streams. Every token is computed in the same shapes wherever it is computed, so the rows of
keys and values and the logits must be the same bits as the reference's, which computes all of a
request by itself, also what the manager has given it from others. With `--graph` a step of one
token is a captured CUDA graph over `tensors_all`, captured again when a member's stay has changed.

Exit codes: 0 all is equal, 1 something differs. `--device host --tiny` rehearses it.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from random import Random
from typing import Annotated, Any, Final

import typer
from attrs import define, field

from kvstate import CapacityError, Config, GpuTier, HostTier, LayerSpec, Manager, Sequence, Step
from kvstate.gpu import open_device
from tests.bench.card_decoder import ROWS, VOCABULARY, Model, Rows, Shape, torch

STREAMS: Final = 4
PROMPTS: Final = 6


@define(eq=False)
class Request:
    """A sequence, what it says, and what the reference has computed of that."""

    seq: Sequence
    text: list[int]
    stream: int
    rows: Any
    """[longest, layers, 2, kv_heads, dim] of the reference."""
    known: int = 0
    """Tokens that the reference has computed."""
    logits: dict[int, Any] = field(factory=dict)
    """Of the reference, by position."""
    view: Any = None
    stay: int | None = None


@define
class Launched:
    """A step in flight: for each member where it begins, how many tokens, and their logits."""

    step: Step
    parts: list[tuple[Request, int, int, list[Any]]]


class Engine:
    """Serves drawn requests, and compares."""

    disturbances: tuple[int, ...] = (0, 1, 2)
    """How many there are between two steps."""

    def __init__(self, kv: Manager, device: Any, model: Model, random: Random) -> None:
        self.kv, self.device, self.model, self.random = kv, device, model, random
        self.on_gpu = model.on == "cuda"
        self.streams = [torch.cuda.Stream() if self.on_gpu else None for _ in range(STREAMS)]
        self.rows = [Rows(model) for _ in range(STREAMS)]
        self.reference = Rows(model)
        self.prompts = [
            [random.randrange(VOCABULARY) for _ in range(model.shape.shared)]
            for _ in range(PROMPTS)
        ]
        self.begun = [torch.zeros_like(self.reference.history[0]) for _ in range(PROMPTS)]
        """What the reference has computed of each prompt."""
        for at in range(model.shape.shared):
            ids = self._column([prompt[at] for prompt in self.prompts])
            self.reference.of(self.begun, ids, self._column([at] * PROMPTS))
        self.live: list[Request] = []
        self.graphs: dict[int, tuple[Any, ...]] = {}
        self.done = Counter[str]()
        self.different = Counter[str]()

    # What is asked for.

    def admit(self) -> None:
        """One more request, if there is room."""
        shape, random = self.model.shape, self.random
        number, length = random.randrange(PROMPTS), random.randint(1, shape.shared)
        text = self.prompts[number][:length] + [
            random.randrange(VOCABULARY) for _ in range(random.randint(1, 24))
        ]
        seq = self.kv.create(text, min(shape.longest, len(text) + random.randint(16, 200)))
        rows = self.begun[number].clone()
        self._begin(Request(seq, text, random.randrange(STREAMS), rows, length))

    def _begin(self, one: Request) -> None:
        try:
            one.seq.resume(self.streams[one.stream])
        except CapacityError:
            self.done["refused"] += 1
            one.seq.close()
            return
        self.done["tokens from others"] += one.seq.matched_tokens
        self.live.append(one)

    def disturb(self) -> None:
        """One of the things that requests do besides being stepped."""
        ready = [one for one in self.live if not one.seq.steps]
        if not ready:
            return
        one, what = self.random.choice(ready), self.random.random()
        try:
            if one.seq.state_name == "SUSPENDED":
                one.seq.resume(self.streams[one.stream])
                self.done["resumes"] += 1
            elif what < 0.3:
                one.seq.suspend()
                self.done["suspends"] += 1
            elif what < 0.55:
                self._fork(one)
            elif what < 0.75:
                self._rewind(one, self.random.randint(1, one.seq.length_tokens or 1))
            elif what < 0.85:
                self._close(one)
        except CapacityError:
            self.done["refused"] += 1

    def _fork(self, one: Request) -> None:
        if not one.seq.length_tokens:
            return
        stream = self.random.randrange(STREAMS)
        self._settled_everywhere()
        child = one.seq.fork(one.seq.max_tokens, self.streams[stream])
        text = one.text[: child.length_tokens]
        self.live.append(Request(child, text, stream, one.rows.clone(), min(one.known, len(text))))
        self.done["forks"] += 1

    def _settled_everywhere(self) -> None:
        """A fork's copy reads what its parent's stream has written."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def _rewind(self, one: Request, tokens: int) -> None:
        tokens = min(tokens, one.seq.length_tokens)
        one.seq.rewind(tokens)
        del one.text[tokens:]
        one.known = min(one.known, tokens)
        self.done["rewinds"] += 1

    def _close(self, one: Request) -> None:
        self.compare(one)
        one.seq.close()
        self.live.remove(one)
        self.done["closes"] += 1

    # Steps.

    def launch(self) -> Launched | None:
        """Issue a step of some that can be stepped, and compute it on their streams."""
        members, places = list[Request](), Counter[int]()
        for one in self._some():
            room = one.seq.max_tokens - one.seq.scheduled_tokens
            ready = one.seq.state_name == "ACTIVE" and room > 0
            if ready and places[one.stream] < ROWS:
                members.append(one)
                places[one.stream] += 1
        counts = [self._count(one) for one in members]
        if not members:
            return None
        try:
            step = self.kv.step(self.kv.batch([one.seq for one in members]), counts)
        except CapacityError:
            self.done["refused"] += 1
            self._give_way()
            return None
        starts = step.start_tokens.tolist()
        parts = [
            (one, start, count, list[Any]())
            for one, start, count in zip(members, starts, counts, strict=True)
        ]
        for number in range(STREAMS):
            self._compute([part for part in parts if part[0].stream == number], number)
        return Launched(step, parts)

    def _some(self) -> list[Request]:
        """Who may be in a step."""
        return self.random.sample(self.live, -(-len(self.live) * 7 // 10))

    def _count(self, one: Request) -> int:
        """The rest of a prompt by chunks; else one token, or a few drafts."""
        at, room = one.seq.scheduled_tokens, one.seq.max_tokens - one.seq.scheduled_tokens
        count = min(len(one.text) - at, 8) if at < len(one.text) else self.random.choice((1, 1, 4))
        count = max(1, min(count, room))
        while len(one.text) < at + count:
            one.text.append(self.random.randrange(VOCABULARY))
        return count

    def _give_way(self) -> None:
        running = [one for one in self.live if one.seq.state_name == "ACTIVE" and not one.seq.steps]
        for one in running[:2]:
            try:
                one.seq.suspend()
                self.done["suspends"] += 1
            except CapacityError:
                self._close(one)

    def _compute(self, parts: list[tuple[Request, int, int, list[Any]]], number: int) -> None:
        """The tokens of a step that are on one stream, one after the other."""
        stream = self.streams[number]
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            for at in range(max((count for _, _, count, _ in parts), default=0)):
                there = [part for part in parts if at < part[2]]
                for part, found in zip(there, self._tokens(there, at, number), strict=True):
                    part[3].append(found)

    def _tokens(
        self, parts: list[tuple[Request, int, int, list[Any]]], at: int, number: int
    ) -> Any:
        views = [self._view(one) for one, *_ in parts]
        ids = self._column([one.text[start + at] for one, start, *_ in parts])
        places = self._column([start + at for _, start, *_ in parts])
        self.done["tokens"] += len(parts)
        return self._run(views, ids, places, number).clone()[: len(parts)]

    def _run(self, views: list[Any], ids: Any, places: Any, number: int) -> Any:
        return self.rows[number].of(views, ids, places)

    def _view(self, one: Request) -> Any:
        """All that the sequence has memory for, as one tensor; exported once a stay."""
        if one.stay != one.seq.stay:
            one.view, one.stay = torch.from_dlpack(self.kv.tensors_all(one.seq)), one.seq.stay
            self.done["exports"] += 1
        return one.view[: one.seq.capacity_tokens]

    def _column(self, numbers: list[int]) -> Any:
        return torch.tensor(numbers + [0] * (ROWS - len(numbers)), device=self.model.on)

    def settle(self, launched: Launched) -> None:
        """A step is done: some drafts are rejected, the rest is named and compared."""
        for stream in self.streams:
            if stream is not None:
                stream.synchronize()
        accepted = [
            self.random.randint(1, count)
            if count == 4 and start + count == len(one.text)
            else count
            for one, start, count, _ in launched.parts
        ]
        void, written = self.kv.settle(launched.step, accepted), list[tuple[Request, int, Any]]()
        for (one, start, count, logits), taken in zip(launched.parts, accepted, strict=True):
            if one.seq in void:
                continue
            if taken < count:
                del one.text[start + taken :]
                self.done["rejected"] += count - taken
            one.seq.commit(one.text[one.seq.committed_tokens : one.seq.length_tokens])
            written += [(one, start + at, logits[at]) for at in range(taken)]
        self._follow([part[0] for part in launched.parts if part[0].seq not in void])
        for one, at, found in written:
            if at in one.logits:
                self._same("logits", found, one.logits.pop(at))

    # The reference.

    def _follow(self, requests: list[Request]) -> None:
        """Let the reference compute what requests have settled, a token of each at a time."""
        while late := [one for one in requests if one.known < one.seq.length_tokens][:ROWS]:
            ids = self._column([one.text[one.known] for one in late])
            places = self._column([one.known for one in late])
            rows = [one.rows for one in late]
            found = self.reference.of(rows, ids, places).clone()
            for one, logits in zip(late, found, strict=False):
                one.logits[one.known] = logits
                one.known += 1

    def compare(self, one: Request) -> None:
        """All rows of a request that is at rest."""
        if one.seq.state_name != "ACTIVE" or one.seq.steps:
            return
        self.kv.wait(one.seq)
        stream = self.streams[one.stream]
        if stream is not None:
            stream.synchronize()
        if one.seq.state_name == "ACTIVE":
            length = one.seq.length_tokens
            self._follow([one])
            self._same("rows", self._view(one)[:length], one.rows[:length])

    def _same(self, what: str, ours: Any, wanted: Any) -> None:
        found = ours.view(torch.int16) != wanted.view(torch.int16)
        self.done[f"{what} compared"] += ours.shape[0] if what == "rows" else 1
        wrong = int(found.flatten(1).any(1).sum()) if what == "rows" else int(found.any())
        self.different[what] += wrong


class GraphEngine(Engine):
    """Steps of one token are captured graphs. They last while nobody comes or goes."""

    disturbances = (0,) * 12 + (1,)

    def _some(self) -> list[Request]:
        return self.live

    def _count(self, one: Request) -> int:
        at = one.seq.scheduled_tokens
        if at >= len(one.text):
            one.text.append(self.random.randrange(VOCABULARY))
        return 1

    def _run(self, views: list[Any], ids: Any, places: Any, number: int) -> Any:
        key = tuple((view.data_ptr(), view.shape[0]) for view in views)
        if number not in self.graphs or self.graphs[number][0] != key:
            self.graphs[number] = (key, *self._captured(views, number))
            self.done["captures"] += 1
        _, graph, pairs = self.graphs[number]
        rows = self.rows[number]
        self.kv.reads(pairs)
        rows.ids.copy_(ids)
        rows.places.copy_(places)
        graph.replay()
        self.done["replays"] += 1
        return rows.out

    def _captured(self, views: list[Any], number: int) -> tuple[Any, ...]:
        """All of a step: reads and writes at the addresses that its sequences have now."""
        stays = {one.view.data_ptr(): (one.seq, one.stay) for one in self.live if one.stay}
        rows, graph = self.rows[number], torch.cuda.CUDAGraph()
        rows.graph = None  # kernel by kernel, into this graph
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.streams[number]):
            rows.over(views)
        return graph, [stays[view.data_ptr()] for view in views]


def serve(engine: Engine, tokens: int) -> None:
    """Until so many tokens were computed: two steps in flight, and disturbances between."""
    flying, said = list[Launched](), 0
    while engine.done["tokens"] < tokens:
        if len(engine.live) < 40 and engine.random.random() < 0.5 * max(engine.disturbances) / 2:
            engine.admit()
        if engine.done["tokens"] // 5000 > said:
            said = engine.done["tokens"] // 5000
            typer.echo(f"{said * 5000:,} tokens", err=True)
        launched = engine.launch()
        flying += [launched] if launched else []
        while len(flying) > (1 if launched else 0):
            engine.settle(flying.pop(0))
        engine.kv.poll()
        for _ in range(engine.random.choice(engine.disturbances)):
            engine.disturb()
        for one in [one for one in engine.live if not one.seq.steps]:
            if one.seq.state_name == "DROPPED" or one.seq.length_tokens >= one.seq.max_tokens:
                engine._close(one)
    while flying:
        engine.settle(flying.pop(0))
    for one in list(engine.live):
        engine._close(one)


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 100_000,
    device: Annotated[str, typer.Option(help="cuda or host")] = "cuda",
    graph: Annotated[bool, typer.Option(help="captured decode steps")] = False,
    tiny: Annotated[bool, typer.Option(help="small sizes: to rehearse")] = False,
    check: Annotated[bool, typer.Option(help="laws and order after every call")] = False,
    seed: int = 1,
) -> None:
    """Serve, compare, and say what was the same."""
    torch.set_grad_enabled(False)
    shape = Shape(2, 32, 4, 2, 16, 96, 48) if tiny else Shape()
    spec = LayerSpec(shape.kv_heads, shape.dim, "bfloat16", shape.layers)
    frame = 4096 if tiny else 2 << 20
    config = Config(
        [spec], GpuTier((60 if tiny else 220) * frame, frame, map_ahead_frames=1),
        HostTier((80 if tiny else 300) * frame), tokens_per_block=16, max_tokens=shape.longest,
        max_sequences=64, spans="all",
    )  # fmt: skip
    model, opened = Model(shape, "cuda" if device == "cuda" else "cpu"), open_device(device)
    with Manager(config, opened, debug=check, order=check) as kv:
        engine = (GraphEngine if graph else Engine)(kv, opened, model, Random(seed))
        serve(engine, tokens)
        stats = kv.stats().done
        names = ("adoptions", "aliased_frames", "moves", "spilled_spans", "quiesces", "waits")
        engine.done.update({name: stats.get(name, 0) for name in names})
        engine.graphs.clear()
    for name, count in sorted(engine.done.items()):
        typer.echo(f"{name:24} {count:12,}")
    for what in ("rows", "logits"):
        typer.echo(f"{what + ' different':24} {engine.different[what]:12,}")
    raise typer.Exit(1 if engine.different.total() else 0)


if __name__ == "__main__":
    typer.run(main)
