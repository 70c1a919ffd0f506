"""A simple continuous-batching engine over a manager: what a workload needs, and no model.

Requests are admitted through the gate in the order of their arrival; all running ones make one
step together, a chunk of prompt or one new token each. When a step finds no frames, the youngest
is preempted: suspended if the host has room, else dropped and computed again. The oldest is never
a victim while others run, so it finishes, and so does every request after it.

A step writes real bytes and reads back a rotating sample of history, or all of it; everything is
read back after each copy and when a request finishes. How many are let in at a time, and how much
is read, is the engine's pace.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
from attrs import define, field, frozen

from kvstate.campaign.model import Ids, Library, SegmentRow, Story
from kvstate.campaign.reading import begin, host_rows, publish
from kvstate.config import Config
from kvstate.device import MAPPING_CALLS, SEGMENT, ByteDevice, Check
from kvstate.errors import HostExhausted, LawViolation, OutOfFrames
from kvstate.manager import Manager
from kvstate.observe import check_end, check_laws
from kvstate.sequence import Sequence

SAMPLE_TOKENS = 32
"""How much history a step reads back of each sequence, unless its pace says otherwise."""
OWN_IDS = 1 << 30
"""Ids from here on are of one request alone; those of named content are below."""
LAWS_EVERY = 64
"""Steps from one check of the laws to the next, unless its pace says otherwise."""


Piece = tuple[int, int]
"""The name of some content, and how many tokens of it: of equal names one begins like the other."""


@frozen
class Request:
    """What one request asks for, in tokens. Its prompt begins with its content, piece by piece and
    cut to the prompt; the rest of the prompt, and the output, nobody else has."""

    prompt_tokens: int
    output_tokens: int
    content: tuple[Piece, ...] = ()

    def token_ids(self, number: int) -> Ids:
        """The ids of prompt and output: equal where the content is, else of this request alone."""
        ids = OWN_IDS + (number * 7919 + np.arange(self.total_tokens)) % OWN_IDS
        start = 0
        for name, tokens in self.content:
            end = min(start + tokens, self.prompt_tokens)
            first, stride = _mixed(name)
            ids[start:end] = (first + stride * np.arange(end - start)) % OWN_IDS
            start = end
        return array("i", ids.astype(np.int32).tobytes())

    @property
    def total_tokens(self) -> int:
        """Prompt and output."""
        return self.prompt_tokens + self.output_tokens

    @property
    def content_tokens(self) -> int:
        """How much of its prompt is content that others may begin with too."""
        return min(self.prompt_tokens, sum(tokens for _, tokens in self.content))


def _mixed(name: int) -> tuple[int, int]:
    """First id and stride of some content: of two names, however large, hardly ever the same."""
    mixed = int.from_bytes(blake2b(str(name).encode(), digest_size=8).digest(), "little")
    return mixed % OWN_IDS, (mixed >> 34) | 1


@frozen
class Pace:
    """How an engine goes about it, besides the size of its batch and of its chunks."""

    most_admitted: int | None = None
    """Requests that one step lets in at the most; None for as many as the gate does."""
    read_tokens: int | None = SAMPLE_TOKENS
    """How much history a step reads back of each sequence; None for all of it."""
    most_bytes: int | None = None
    """Of what a step reads back, evenly spread pieces of about that much are looked at; None for
    all of it."""
    laws_every: int | None = LAWS_EVERY
    """Steps from one check of the laws to the next; None for only one, at the end."""


DEFAULT_PACE = Pace()


@define(eq=False)
class Running:
    """A request that was admitted."""

    request: Request
    seq: Sequence
    story: Story
    tokens: Ids
    """The ids of its prompt, and what it will say."""
    known_tokens: int
    """Tokens whose ids are known: the prompt, and what was generated before a drop."""
    checked: bool = True
    """Its bytes were read back since they were copied last."""
    alone: bool = False
    """Nothing else ran when it began, so nothing that others do can be in its way."""


@define
class Outcome:
    """What came of a workload."""

    requests_admitted: int = 0
    requests_finished: int = 0
    tokens: int = 0
    """Tokens computed, those computed again included."""
    steps: int = 0
    frames_peak: int = 0
    bytes_verified: int = 0
    mismatches: int = 0
    violations: list[str] = field(factory=list)
    prompt_tokens: int = 0
    """Tokens that were looked up, of requests that began or began again."""
    content_tokens: int = 0
    """Those of them that others may begin with too."""
    hit_tokens: int = 0
    """Those of them that came from others."""
    mapping_calls_at_tenth: int | None = None
    """Mapping calls when a tenth of the requests had finished."""
    mapping_calls_end: int = 0
    """Mapping calls when the last had."""
    spans_spilled: int = 0
    """Spans that had been given up under pressure by then. The manager's end gives up the rest."""


class Engine:
    """Runs requests to their end on one manager and device."""

    def __init__(
        self, config: Config, device: ByteDevice, batch: int, chunk_tokens: int = 2048,
        pace: Pace = DEFAULT_PACE,
    ) -> None:  # fmt: skip
        self.kv, self.pace = Manager(config, device), pace
        self.device, self.batch_limit, self.chunk_tokens = device, batch, chunk_tokens
        self.row_bytes = self.kv.geometry.row_bytes
        device.set_rows(self.row_bytes)
        self.stream = device.stream()
        self.waiting: deque[Request] = deque()
        self.running: list[Running] = []
        self.suspended: deque[Running] = deque()
        self.batch = self.kv.batch([])
        self.outcome = Outcome()
        self.library = Library(config.tokens_per_block)
        self._started = 0
        self._checks: list[Check] = []
        self._cursor = 0

    def run(
        self,
        requests: Iterable[Request],
        tell: Callable[[Outcome], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Outcome:
        """Run all requests to their end; `tell` is given the outcome so far after each step, and
        `stop` is asked after it: then whoever runs is read back and let go of unfinished."""
        self.waiting.extend(requests)
        tenth = max(1, len(self.waiting) // 10)
        with self.kv:
            while self.waiting or self.running or self.suspended:
                self._turn()
                if self.outcome.requests_finished >= tenth:
                    self._note_tenth()
                tell(self.outcome)
                if stop():
                    self._give_up()
            self.outcome.mapping_calls_end = self.mapping_calls()
            self.outcome.spans_spilled = self.kv.counters["spilled_spans"]
            self._read_checks()
            self._laws()
        try:
            check_end(self.kv)
        except LawViolation as broken:
            self.outcome.violations += broken.violations
        return self.outcome

    def mapping_calls(self) -> int:
        """Calls that create, map, unmap or release frames, so far."""
        return sum(self.device.calls.get(kind, 0) for kind in MAPPING_CALLS)

    # One turn: admit, step, settle, let go.

    def _turn(self) -> None:
        self.kv.poll()
        self._after_copies()
        self._admit()
        self._step()
        self._finish()
        self.outcome.frames_peak = max(self.outcome.frames_peak, self.kv.gpu.charged)
        every = self.pace.laws_every
        if every is not None and self.outcome.steps % every == 0:
            self._laws()

    def _admit(self) -> None:
        """Let in whom the gate allows: first those that were suspended, the oldest first."""
        room = self.batch_limit - len(self.running)
        for _ in range(min(room, self.pace.most_admitted or room)):
            if not self._admit_one():
                return

    def _admit_one(self) -> bool:
        if self.suspended:
            if not self._resume(self.suspended[0]):
                return False
            self._enter(self.suspended.popleft())
            return True
        if self.waiting and self.kv.admits(self.waiting[0].prompt_tokens):
            return self._start(self.waiting.popleft())
        return False

    def _start(self, request: Request) -> bool:
        tokens = request.token_ids(self._started)
        prompt, block = tokens[: request.prompt_tokens], self.kv.config.tokens_per_block
        seq = self.kv.create(prompt, request.total_tokens)
        story = Story(
            seq.uid, request.total_tokens, b"", committing=True, prompt=prompt, block_tokens=block
        )
        one = Running(request, seq, story, tokens, request.prompt_tokens)
        if not self._resume(one):
            self.kv.close_sequence(seq)
            self.waiting.appendleft(request)
            return False
        self._enter(one)
        self._started += 1
        self.outcome.requests_admitted += 1
        return True

    def _resume(self, one: Running) -> bool:
        try:
            self.kv.resume(one.seq, self.stream)
        except OutOfFrames:
            if not self.running:
                raise
            return False
        transfer, one.alone = one.seq.transfer, not self.running
        one.checked = transfer is None
        fresh = not one.story.settled
        if fresh:
            self.outcome.prompt_tokens += one.known_tokens
            self.outcome.content_tokens += one.request.content_tokens
        if fresh and one.seq.committed_tokens:
            begin(self.kv, self.library, one.seq, one.story, self.stream)
            self.outcome.hit_tokens += one.seq.matched_tokens
        return True

    def _enter(self, one: Running) -> None:
        self.running.append(one)
        self.batch.add(one.seq)

    def _leave(self, one: Running) -> None:
        self.running.remove(one)
        self.batch.remove(one.seq)

    def _step(self) -> None:
        """One step of everybody, with room made by preempting the youngest."""
        while True:
            counts = [self._count(one) for one in self.running]
            try:
                step = self.kv.step(self.batch, counts)
                break
            except OutOfFrames:
                if self.running[-1].alone:
                    raise
                self._preempt(self.running[-1])
                if not self.running:
                    return  # it begins again alone, and maps only what leaves it room
        self._launch(counts)
        self.device.synchronize(self.stream)
        self.kv.settle(step)
        self._read_checks()
        firsts = [one.story.settled for one in self.running]
        for one, count in zip(self.running, counts, strict=True):
            one.story.settled += count
        said = [
            one.tokens[first : first + count]
            for one, first, count in zip(self.running, firsts, counts, strict=True)
        ]
        chunked = max(counts) > 1
        if not chunked:
            self.kv.commit_each(self.batch, [ids[0] for ids in said])
        for one, ids in zip(self.running, said, strict=True):
            if chunked:
                self.kv.commit(one.seq, ids)
            one.story.name(ids)
            self.library.enter(one.story)
        self.outcome.tokens += sum(counts)
        self.outcome.steps += 1

    def _count(self, one: Running) -> int:
        """A chunk of what is known already, or one new token."""
        known = one.known_tokens - one.story.scheduled
        return min(known, self.chunk_tokens) if known > 0 else 1

    def _launch(self, counts: list[int]) -> None:
        """Read history, or a sample of it, then write the new tokens."""
        reads, writes, row = [], [], self.row_bytes
        self._cursor += SAMPLE_TOKENS
        entries = publish(self.kv, self.stream, [one.seq for one in self.running])
        for one, count, at in zip(self.running, counts, entries, strict=True):
            story = one.story
            start = story.scheduled
            if start:
                reads += story.rows(0, *self._window(start), row, at)
            writes.append((start * row, start, count, story.write(count), at))
        self._verify(reads, self.pace.most_bytes)
        self.device.write(self.stream, np.array(writes, SEGMENT))

    def _window(self, length_tokens: int) -> tuple[int, int]:
        """Which tokens of that much history a step reads back."""
        if self.pace.read_tokens is None:
            return 0, length_tokens
        first = self._cursor % length_tokens
        return first, min(first + self.pace.read_tokens, length_tokens)

    def _preempt(self, one: Running) -> None:
        """Take the memory of the youngest: its bytes go to the host, or are computed again."""
        self._leave(one)
        try:
            self.kv.suspend(one.seq, self.device.record(self.stream))
            one.checked = False
        except HostExhausted:
            one.known_tokens = max(one.known_tokens, one.story.settled)
            self.kv.drop(one.seq, self.device.record(self.stream))
            one.story.lose("DROPPED")
        self.suspended.appendleft(one)

    def _finish(self) -> None:
        """Let go of whoever has all its tokens, after reading all of them back."""
        for one in list(self.running):
            if one.story.settled >= one.request.total_tokens:
                self._verify_resident(one)
                self._leave(one)
                self.kv.close_sequence(one.seq, self.device.record(self.stream))
                self.outcome.requests_finished += 1

    def _give_up(self) -> None:
        """Let go of whoever is left, after reading all of them back."""
        self.waiting.clear()
        self.kv.poll()
        self._after_copies()
        for one in self.running:
            self._verify_resident(one)
        for one in (*self.running, *self.suspended):
            self.kv.close_sequence(one.seq, self.device.record(self.stream))
        self.running.clear()
        self.suspended.clear()

    # Reading back.

    def _after_copies(self) -> None:
        """Read back whatever a copy has brought to the host or to the GPU."""
        for one in (*self.running, *self.suspended):
            if one.checked or one.seq.transfer is not None:
                continue
            if one.seq.range is not None:
                self._verify_resident(one)
            else:
                self._verify_held(one)
            one.checked = True

    def _verify_resident(self, one: Running) -> None:
        assert one.seq.base is not None
        self._verify(one.story.rows(one.seq.base, 0, one.story.settled, self.row_bytes))

    def _verify_held(self, one: Running) -> None:
        self._verify(host_rows(self.kv, one.seq, one.story))
        self.device.synchronize(self.stream)

    def _verify(self, rows: list[SegmentRow], most_bytes: int | None = None) -> None:
        if rows:
            segments = np.array(rows, SEGMENT)
            self._checks.append(self.device.verify(self.stream, segments, most_bytes))

    def _read_checks(self) -> None:
        self.device.synchronize(self.stream)
        for check in self._checks:
            self.outcome.bytes_verified += check.size_bytes
            self.outcome.mismatches += sum(check.wrong)
        self._checks.clear()

    def _laws(self) -> None:
        try:
            with _collector_paused():
                check_laws(self.kv)
        except LawViolation as broken:
            self.outcome.violations += broken.violations

    def _note_tenth(self) -> None:
        if self.outcome.mapping_calls_at_tenth is None:
            self.outcome.mapping_calls_at_tenth = self.mapping_calls()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No search for cycles while the laws are asked. They make a fact of every block, and none is
    in a cycle; searching those and the whole index again and again was a third of a replay."""
    ran = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if ran:
            gc.enable()
