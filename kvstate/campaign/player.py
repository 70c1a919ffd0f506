"""The player: carries calls out on a real manager and device, and checks what comes of them.

It is the one interpreter of traces: fuzzing, shrinking, replaying and the generated tests all play
calls here. After every call the laws hold (the manager runs with `debug=True`), lengths and phases
are what the naive model says, and the bytes of every sequence that is at rest are read back and
compared. A step reads all of its sequences' history on their streams before it writes, so a copy
that is ordered wrongly shows as wrong bytes.
"""

from __future__ import annotations

import traceback
from collections import Counter, deque
from collections.abc import Iterable
from enum import Flag, auto
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from attrs import define, field

from kvstate import trace
from kvstate.blocks import Lost
from kvstate.campaign.kept import Kept
from kvstate.campaign.legal import refusal
from kvstate.campaign.model import Broken, Ids, Library, SegmentRow, Story, packed
from kvstate.campaign.reading import begin, host_rows, publish
from kvstate.device import SEGMENT, ByteDevice, Check, FillRun, Stream
from kvstate.errors import (
    ArgumentError,
    CapacityError,
    DeviceError,
    DeviceFault,
    IllegalTransition,
    KvStateError,
    LawViolation,
    StaleAddress,
    StreamCaptured,
)
from kvstate.keys import Adapter, Identity, extra_bytes
from kvstate.manager import Manager
from kvstate.observe import check_end, check_laws, check_rest, observe
from kvstate.order_device import ordered
from kvstate.pattern import SCRUB_BYTE
from kvstate.plan import Coverage
from kvstate.sequence import Sequence, Step
from kvstate.spec.facts import Ledger
from kvstate.spec.host import FREE
from kvstate.tensors import TensorView

LOST = "device lost"
"""The kind of failure after which the process has no device any more."""
STREAMS = 3
"""Streams of the player: the default one, and two more."""


class Look(Flag):
    """What a player looks at besides faults and what is legal."""

    LAWS = auto()
    BYTES = auto()
    """Of sequences, of host copies and of freed memory, and what the naive model says."""
    ORDER = auto()
    """What is not ordered; without it, that has to show in bytes."""


ALL = Look.LAWS | Look.BYTES | Look.ORDER


class Skip(Exception):
    """The call names a sequence or step that was never made: a program was cut before it."""


@define(eq=False)
class Played:
    """A sequence that the player knows: the handle, and its story."""

    seq: Sequence
    story: Story
    stream: Stream = None


@define(eq=False)
class Launch:
    """A step in flight: for each sequence its tokens, and the check of its history."""

    step: Step
    streams: list[Stream] = field(factory=list)
    parts: list[Part] = field(factory=list)
    number: int = 0
    table: int = 0
    """The part of the device's table that it reads."""
    checks: list[tuple[Check, list[Part]]] = field(factory=list)


@define(eq=False)
class Part:
    """One sequence of a step."""

    played: Played
    life: int
    start: int
    count: int
    void: bool = False

    @property
    def lives(self) -> bool:
        """The step still means something for it."""
        return not self.void and self.life == self.played.story.life


class Player:
    """Plays calls on one manager, and checks what it is told to look at."""

    def __init__(self, header: trace.Header, device: ByteDevice, look: Look = ALL) -> None:
        device = ordered(device) if Look.ORDER in look else device
        self.config, self.device, self.strict = header.config, device, header.strict
        self.kv = Manager(header.config, device)
        self.laws: Counter[str] = Counter()
        """How often each law was asked for."""
        self.look = look
        if look & (Look.LAWS | Look.ORDER):
            observe(self.kv, debug=Look.LAWS in look, asked=self.laws)
        if Look.BYTES in look:
            self.kv.flight.ignored = None  # freed memory is overwritten: a stale read is wrong
        self.coverage = self.kv.flight.coverage = self.kv.life.coverage = Coverage()
        device.set_rows(self.kv.geometry.row_bytes)
        self.streams = [None, *(device.stream() for _ in range(STREAMS - 1))]
        self._audit_stream = device.stream()
        self.seqs: dict[int, Played] = {}
        self.steps: dict[int, Launch] = {}
        self.library = Library(header.config.tokens_per_block)
        self.kept = Kept(self.library)
        self._losses: list[Lost] = []
        self.kv.reuse.index.mourners += (self._losses,)
        self.texts: deque[tuple[Story, list[int]]] = deque(maxlen=12)
        """What sequences have lately said, and their stories."""
        self.stays: dict[Sequence, tuple[int | None, int | None]] = {}
        """Stay and base of every sequence that was ACTIVE after the last call."""
        self.over: deque[tuple[Sequence, int | None]] = deque(maxlen=8)
        """Stays that have ended lately. Each call asks about one of them."""
        self.views: deque[TensorView] = deque(maxlen=8)
        """The latest views of whole stays."""
        self.bytes_verified = 0
        self.refused: Counter[str] = Counter()
        self._names = self.epoch = 0
        self.last: int | None = None
        """The sequence that the last call named."""
        self.rewound = False
        """The last call took tokens back."""
        self.planned: deque[Any] = deque()
        """What a rule wants to come next: calls, and rules."""
        self.head: tuple[bytes, Ids] = b"", packed()
        """Its tenant and the tokens of its first block, before that call."""
        self._lost = False
        """Bytes were lost during the call: what was legal before it may not have been, and
        back."""

    # Playing.

    def play(self, calls: Iterable[trace.AnyCall]) -> None:
        """Play a program to its end. Raises Broken."""
        for call in calls:
            self.apply(call)
        self.finish()

    def apply(self, call: trace.AnyCall) -> trace.AnyCall:
        """Play one call; the call with what came of it. Raises Broken."""
        if isinstance(call, trace.Refused):
            return call
        try:
            return self._apply(call)
        except LawViolation as broken:
            raise _violated(broken) from broken
        finally:
            if self.device.lost:
                raise Broken(LOST, self.device.lost)

    def _apply(self, call: trace.AnyCall) -> trace.AnyCall:
        if isinstance(call, trace.Refused):
            return call
        self._lost, self.last = False, getattr(call, "seq", None)
        self.rewound = isinstance(call, trace.Rewind)
        if self.last in self.seqs:
            self.head = self._head(self.seqs[self.last])
        if call.seed is not None or call.preempt is not None:
            self.device.schedule(call.seed, call.preempt)
        if call.memory is not None:
            self.device.limit(None if call.memory < 0 else call.memory)
        self.device.script(call.ended, call.failed)
        self.device.capture([self.streams[number % STREAMS] for number in call.captured])
        self._tell_failures(call)
        error: KvStateError | None = None
        poisoned, due = self.kv.actor.fault is not None, None
        held = self.device.ledger() if poisoned else None
        try:
            due = refusal(self, call)
            getattr(self, f"_{type(call).__name__.lower()}")(call)
        except Skip:
            return call
        except (Broken, LawViolation):
            raise
        except KvStateError as raised:
            error = raised
        except Exception as crash:
            raise _crash(crash) from crash
        finally:
            self.device.cancel_failures()
            self.device.capture(())
        self._learn()
        if poisoned:
            self._same(f"{call} of a poisoned manager raised", type(error), DeviceFault)
            self._check_kept(held)
        else:
            self._judge(call, error, due)
        self._after(call)
        return msgspec.structs.replace(call, error=type(error).__name__ if error else None)

    def _tell_failures(self, call: trace.AnyCall) -> None:
        for kind, which in call.fail.items():
            for nth in which if isinstance(which, list) else [which]:
                self.device.fail_next(kind, nth)

    def finish(self) -> None:
        """Settle and close everything, end the manager, and look for what is left. Raises
        Broken."""
        for name in list(self.steps):
            self.apply(trace.Settle(step=name))
        for name in list(self.seqs):
            self.apply(trace.Close(seq=name))
        held = self.device.ledger() if self.device.hung else None
        try:
            if self._rests():
                check_rest(self.kv, self.laws)
            self.kv.close()
            self._check_kept(held)
            if self.device.hung:
                self.device.wake()
                self.device.close()
        except Broken:
            raise
        except LawViolation as broken:
            raise _violated(broken) from broken
        except Exception as crash:
            raise _crash(crash) from crash
        self._check_faults()
        try:
            check_end(self.kv, self.laws)
        except LawViolation as broken:
            raise Broken("law 24 (clean end)", str(broken)) from broken

    def _rests(self) -> bool:
        """Whether the manager is asked to come to rest before it ends: about every other time,
        since there is not much left for the end then."""
        able = self.kv.actor.fault is None and not self.device.hung
        return able and Look.LAWS in self.look and self.kv.counters["closes"] % 2 == 1

    def abandon(self) -> None:
        """Give everything back without any check: something is broken already."""
        self.kv.life.poison("it was abandoned")
        self.device.wake()
        self.kv.close()

    def alike(self) -> list[int]:
        """Other sequences of the last one's tenant that begin with the same block."""
        head = self._head(self.seqs[self.last]) if self.last in self.seqs else self.head
        found = [name for name, played in self.seqs.items() if self._head(played) == head]
        return [name for name in found if name != self.last] if head[1] else []

    def _head(self, played: Played) -> tuple[bytes, Ids]:
        return played.story.tenant, played.story.tokens[: self.config.tokens_per_block]

    def next_name(self) -> int:
        """A name that no sequence or step of the program has."""
        self._names += 1
        return self._names

    def known(self, name: int) -> Played:
        """The sequence of that name. Raises Skip if there is none."""
        if name not in self.seqs:
            raise Skip
        return self.seqs[name]

    def launched(self, name: int) -> Launch:
        """The step in flight of that name. Raises Skip if there is none."""
        if name not in self.steps:
            raise Skip
        return self.steps[name]

    # One method a call: the manager first, then what the model learns from it.

    def _create(self, call: trace.Create) -> None:
        salt, adapter, extras = (
            bytes.fromhex(call.salt),
            trace.adapter_of(call.adapter),
            _extras(call),
        )
        seq = self.kv.create(
            call.prompt, call.max_tokens, salt=salt, adapter=adapter, extra_keys=extras,
            commit=call.commit, reserve=call.reserve,
        )  # fmt: skip
        block, tenant = self.config.tokens_per_block, _tenant(salt, adapter)
        story = Story(
            seq.uid, call.max_tokens, tenant, call.commit, prompt=call.prompt, block_tokens=block
        )
        story.born = call
        story.extras = {at: extra_bytes(found) for at, found in extras.items()}
        self.seqs[call.seq] = Played(seq, story)

    def _fork(self, call: trace.Fork) -> None:
        parent, stream = self.known(call.seq), self.streams[call.stream % STREAMS]
        seq = self.kv.fork(parent.seq, call.max_tokens, stream)
        self._learn()
        known, story = seq.committed_tokens, parent.story
        if known > story.known or (known < story.known and known % self.config.tokens_per_block):
            raise Broken("model", f"{seq} knows {known} tokens, its parent {story.known}")
        child = story.fork(seq.uid, call.max_tokens, known)
        self.seqs[call.child] = Played(seq, child, stream)

    def _dummy(self, call: trace.Dummy) -> None:
        stream = self.streams[call.stream % STREAMS]
        seq = self.kv.dummy(call.tokens, stream)
        self._learn()
        story = Story(
            seq.uid, call.tokens, _tenant(), committing=False, undefined=True, phase="ACTIVE"
        )
        story.born = trace.Create(seq=call.seq, max_tokens=call.tokens, commit=False)
        story.write(call.tokens)
        story.settled = call.tokens
        self.seqs[call.seq] = Played(seq, story, stream)

    def _resume(self, call: trace.Resume) -> None:
        played = self.known(call.seq)
        stream = self.streams[call.stream % STREAMS]
        empty = not played.seq.slots
        self.kv.resume(played.seq, stream)
        self._learn()
        fresh = empty or played.story.phase == "DROPPED"
        played.story.phase, played.stream = "ACTIVE", stream
        if fresh:
            played.story.epoch = self.epoch
            self._enter_tenant(played.story)
        if fresh and played.seq.matched_tokens:
            begin(self.kv, self.library, played.seq, played.story, self._audit_stream)

    def _resize(self, call: trace.Resize) -> None:
        self.kv.resize(self.known(call.seq).seq, call.tokens)

    def _rewind(self, call: trace.Rewind) -> None:
        played = self.known(call.seq)
        self.kv.rewind(played.seq, call.tokens)
        played.story.take_back(call.tokens)

    def _step(self, call: trace.Step) -> None:
        members = [self.known(name) for name in call.seqs]
        batch = self.kv.batch(played.seq for played in members)
        step = self.kv.step(batch, call.tokens)
        self._learn()
        taken = {other.table for other in self.steps.values()}
        table = min(set(range(len(taken) + 1)) - taken)
        launch = Launch(step, number=step.number, table=table)
        for played, start, count in zip(members, step.start_tokens, call.tokens, strict=True):
            self._same(f"{played.seq} steps from", int(start), played.story.scheduled)
            launch.parts.append(Part(played, played.story.life, int(start), count))
        self.steps[call.step] = launch
        for stream in self.streams:
            parts = [part for part in launch.parts if part.played.stream is stream]
            if parts:
                self._launch(launch, stream, parts)
        if Look.LAWS in self.look and self.device.ledger().work:
            check_laws(self.kv, self.laws)  # with what has just been launched

    def _launch(self, launch: Launch, stream: Stream, parts: list[Part]) -> None:
        """Read the history of the sequences on their stream, then write their new tokens."""
        launch.streams.append(stream)
        row = self.kv.geometry.row_bytes
        reads: list[SegmentRow] = []
        writes: list[SegmentRow] = []
        owners: list[Part] = []
        entries = publish(self.kv, stream, [part.played.seq for part in parts], launch.table)
        for part, at in zip(parts, entries, strict=True):
            story = part.played.story
            if not story.undefined:
                history = story.rows(0, 0, part.start, row, at)
                reads += history
                owners += [part] * len(history)
            key = story.write(part.count)
            if part.count:
                writes.append((part.start * row, part.start, part.count, key, at))
        if reads:
            check = self.device.verify(stream, np.array(reads, SEGMENT))
            launch.checks.append((check, owners))
        self.device.write(stream, np.array(writes, SEGMENT))

    def _settle(self, call: trace.Settle) -> None:
        launch = self.launched(call.step)
        for stream in launch.streams:
            self.device.synchronize(stream)
        void = self.kv.settle(launch.step, call.accepted)
        self._learn()
        del self.steps[call.step]
        expected = {part.played.seq.uid for part in launch.parts if not part.lives}
        self._same("void for", {seq.uid for seq in void}, expected)
        for check, owners in launch.checks:
            self._read_check(check, [(part.played, part.lives) for part in owners])
        taken = call.accepted or [part.count for part in launch.parts]
        for part, accepted in zip(launch.parts, taken, strict=True):
            if part.lives:
                self._accept(launch, part, accepted)

    def _accept(self, launch: Launch, part: Part, accepted: int) -> None:
        story = part.played.story
        story.settled += accepted
        if accepted < part.count:
            story.take_back(story.settled)
            later = [other for other in self.steps.values() if other.number > launch.number]
            for other in (other for step in later for other in step.parts):
                other.void |= other.played is part.played

    def _commit(self, call: trace.Commit) -> None:
        played = self.known(call.seq)
        self.kv.commit(played.seq, call.tokens)
        self._name(played.story, call.tokens)

    def _name(self, story: Story, tokens: list[int]) -> None:
        story.name(tokens)
        before = len(story.path)
        self.library.enter(story)
        if story.epoch == self.epoch:
            self.kept.commit(story, before)
        self.texts.append((story, list(story.tokens)))

    def _commiteach(self, call: trace.CommitEach) -> None:
        members = [self.known(name) for name in call.seqs]
        self.kv.commit_each(self.kv.batch(played.seq for played in members), call.tokens)
        for played, token in zip(members, call.tokens, strict=True):
            self._name(played.story, [token])

    def _stop(self, call: trace.Stop) -> None:
        played = self.known(call.seq)
        self.kv.stop_committing(played.seq)
        played.story.committing = False

    def _suspend(self, call: trace.Suspend) -> None:
        played = self.known(call.seq)
        self.kv.suspend(played.seq, self._event(played, call.after))
        self._learn()
        played.story.phase = "SUSPENDED"

    def _drop(self, call: trace.Drop) -> None:
        played = self.known(call.seq)
        self.kv.drop(played.seq, self._event(played, call.after))
        played.story.lose("DROPPED")

    def _close(self, call: trace.Close) -> None:
        played = self.known(call.seq)
        self.kv.close_sequence(played.seq, self._event(played, call.after))
        played.story.lose("CLOSED")
        del self.seqs[call.seq]

    def _poll(self, call: trace.Poll) -> None:
        known = list(self.kv.flight.transfers)
        ended = self.kv.poll(call.deliver)
        self._learn()
        if call.deliver is not None:
            self._same("what was delivered", [one.token for one in ended], call.deliver)
            left = [token for token in known if token not in call.deliver]
            self._same("left in flight", list(self.kv.flight.transfers)[: len(left)], left)

    def _wait(self, call: trace.Wait) -> None:
        seq = self.known(call.seq).seq
        others = [token for token, one in self.kv.flight.transfers.items() if one.seq is not seq]
        self.kv.wait(seq)
        self._learn()
        self._same(f"{seq}: its copy", seq.transfer, None)
        gone = [token for token in others if token not in self.kv.flight.transfers]
        self._same("copies of others that were waited for", gone, [])

    def _tensorsall(self, call: trace.TensorsAll) -> None:
        seq, sizes = self.known(call.seq).seq, self.kv.geometry
        if self.device.memory is None:
            return
        view = self.kv.tensors_all(seq, call.tokens)
        tokens = seq.max_tokens if call.tokens is None else call.tokens
        self._same(f"{view}: where it is", view.address, seq.base)
        self._same(f"{view}: from token to token", view.strides_bytes[0], sizes.row_bytes)
        self._same(f"{view}: its size", view.shape[:2], (tokens, sizes.layer_count))
        self.views.append(view)

    def _clear(self, call: trace.Clear) -> None:
        self.epoch += 1
        self.kv.clear_reuse()
        self._learn()

    def _trim(self, call: trace.Trim) -> None:
        self.kv.trim(call.keep)
        self._learn()

    # What the model learns, and what it demands.

    def _event(self, played: Played, wanted: bool) -> Any:
        return self.device.record(played.stream) if wanted else None

    def _learn(self) -> None:
        """Copies that failed during the call: their sequences have lost bytes."""
        stories = {played.seq.uid: played.story for played in self.seqs.values()}
        ended = self.kv.flight.ended
        while ended:
            end = ended.popleft()
            story = stories.get(end.uid)
            if end.ok or story is None:
                continue
            self._lost = True
            if end.outward or end.onboards:
                story.lose("DROPPED")
            else:
                story.take_back(story.settled)
                story.life += 1
                story.phase = "SUSPENDED"

    def _judge(
        self, call: trace.AnyCall, error: KvStateError | None, due: type[KvStateError] | None
    ) -> None:
        """Whether the call may have raised this, or should have raised what was due."""
        if isinstance(error, CapacityError):
            place = str(getattr(error, "place", type(error).__name__))
            self.refused[place] += 1
        told = call.fail or self.device.hung or isinstance(error, StreamCaptured)
        if isinstance(error, DeviceFault | DeviceError) and not told:
            raise Broken("device", f"{call} raised {error!r} though nothing was told to fail")
        if not self._lost:
            self._judge_legality(call, error, due)
        found = type(error).__name__ if error else None
        if self.strict and call.error != found:
            raise Broken("replay", f"{call} raised {error!r}")

    def _judge_legality(
        self, call: trace.AnyCall, error: KvStateError | None, due: type[KvStateError] | None
    ) -> None:
        illegal = isinstance(error, ArgumentError | IllegalTransition)
        if due is None and illegal:
            raise Broken("legal call refused", f"{call} raised {error!r}")
        if due is not None and not isinstance(error, due | DeviceError | DeviceFault):
            kind = "illegal call misnamed" if illegal else "illegal call accepted"
            raise Broken(kind, f"{call} raised {error!r}, not {due.__name__}")

    def _after(self, call: trace.AnyCall) -> None:
        """Everything that must hold after any call."""
        for watch in self.kv.watches:
            if watch.lost:
                raise Broken("look", "; ".join(watch.lost))
        self._check_faults()
        if self.kv.actor.fault is not None or Look.BYTES not in self.look:
            return
        for played in self.seqs.values():
            self._check_story(played)
            self._check_rest(played)
        self._check_stays()
        self._check_scrubbed()
        self._check_kept_blocks()

    def _check_kept(self, held: Ledger | None) -> None:
        """Nothing was released that something in flight might still read; copies may have ended."""
        if held is not None:
            now = self.device.ledger()
            self._same("what a poisoned manager holds", *(
                (one.reservations, one.frames, one.mappings, one.host) for one in (now, held)
            ))  # fmt: skip

    def _check_faults(self) -> None:
        if self.device.faults:
            raise Broken("fault", "; ".join(self.device.faults))

    def _check_story(self, played: Played) -> None:
        """The manager says of a sequence what its caller believes."""
        seq, story = played.seq, played.story
        self._same(f"{seq}: state", seq.state_name, story.phase)
        found = (seq.length_tokens, seq.scheduled_tokens, seq.committed_tokens)
        wanted = (story.settled, story.scheduled, story.known)
        self._same(f"{seq}: settled, scheduled, known", found, wanted)
        self._same(f"{seq}: the ids that it knows", seq.known_ids, story.tokens.tobytes())
        self._same(f"{seq}: whether it commits", seq.committing, story.committing)

    def _check_stays(self) -> None:
        """A stay lasts for as long as its sequence is ACTIVE at one base, and what reads in one
        that has ended is refused."""
        active = [one.seq for one in self.seqs.values() if one.story.phase == "ACTIVE"]
        before, self.stays = self.stays, {seq: (seq.stay, seq.base) for seq in active}
        for seq, (stay, base) in self.stays.items():
            old = before.get(seq, (None, None))
            self._same(f"{seq}: whether its stay goes on", old[0] == stay, old[1] == base)
        self.over += [(seq, old[0]) for seq, old in before.items() if self.stays.get(seq) != old]
        for view in self.views:
            goes_on = self.stays.get(view.seq, (None, None))[0] == view.stay
            self._same(f"{view}: whether it is alive", view.ended is None, goes_on)
        reads = [(seq, stay) for seq, (stay, _) in self.stays.items()]
        self._same(f"whether {reads} are stale", self._are_stale(reads), False)
        self.over.rotate()
        over = list(self.over)[:1]
        self._same(f"whether {over} is stale", self._are_stale(over), bool(over))

    def _are_stale(self, reads: list[tuple[Sequence, int | None]]) -> bool:
        """Whether the manager refuses these reads."""
        try:
            self.kv.reads(reads)
        except StaleAddress:
            return True
        return False

    def _check_rest(self, played: Played) -> None:
        """Read a sequence back if nothing in flight writes it, on the GPU or on the host."""
        seq, story, row = played.seq, played.story, self.kv.geometry.row_bytes
        if seq.transfer is not None or story.undefined or not story.settled:
            return
        if story.phase == "ACTIVE" and not seq.steps:
            assert seq.base is not None
            rows = story.rows(seq.base, 0, story.settled, row)
        elif story.phase == "SUSPENDED":
            rows = host_rows(self.kv, seq, story)
        else:
            return
        segments = np.array(rows, SEGMENT)
        check = self.device.verify(self._audit_stream, segments)
        self.device.synchronize(self._audit_stream)
        self._read_check(check, [(played, True)] * len(segments))

    def _read_check(self, check: Check, owners: list[tuple[Played, bool]]) -> None:
        if not check.done:
            raise Broken("order", "a check that was synchronised with has not run")
        self.bytes_verified += check.size_bytes
        for wrong, first, (played, counts) in zip(check.wrong, check.first, owners, strict=False):
            if wrong and counts:
                raise Broken("bytes", f"{played.seq}: {wrong} tokens are wrong from {first} on")

    def _check_scrubbed(self) -> None:
        """Frames that are mapped for nobody and used host slots that are free hold nothing that
        anybody wrote."""
        frame, host = self.kv.geometry.frame_bytes, self.kv.host
        places = [
            FillRun(
                range_.base + (range_.used + range_.kept_frames) * frame,
                (range_.tail - range_.kept_frames) * frame,
            )
            for range_ in self.kv.arena.ranges.values()
            if range_.tail > range_.kept_frames
        ]
        places += [
            FillRun(host.address + slot * host.block_bytes, host.block_bytes)
            for slot, code in enumerate(host.cells.states)
            if code == FREE.code
        ]
        if self.device.strays(places, _SCRUBBED):
            place = next(run for run in places if self.device.strays([run], _SCRUBBED))
            left = self.device.strays([place], _SCRUBBED)
            raise Broken("scrub", f"{left} bytes at {place.address:#x} were left readable")

    def _check_kept_blocks(self) -> None:
        """What was committed and not given up is found, unless copies are on their way."""
        self.kept.lose(self._losses)
        self._losses.clear()
        if self.kv.flight.transfers or not self.kv.reuse.enabled:
            return
        stories = [played.story for played in self.seqs.values()]
        for line in self.kept.missing(stories, self.epoch, self._would_find):
            raise Broken("forgotten", line)

    def _enter_tenant(self, story: Story) -> None:
        """The index has a name for the tenant of a story."""
        identity = Identity(*_owner(story.born), story.epoch)
        self.kept.roots[identity.code] = story.above([])

    def _would_find(self, story: Story, tokens: Ids) -> int:
        """What a newcomer like the story would have of these tokens, one more behind them."""
        salt, adapter = _owner(story.born)
        extras = _extras(story.born)
        prompt = [*tokens, 0]
        found = self.kv.probe_reuse(prompt, salt=salt, adapter=adapter, extra_keys=extras)
        block = self.config.tokens_per_block
        return found - found % block

    def _same(self, what: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise Broken("model", f"{what} is {found}, but should be {wanted}")


def _tenant(salt: bytes = b"", adapter: Adapter = None) -> bytes:
    return repr((salt, adapter)).encode()


def _owner(call: trace.Create) -> tuple[bytes, Adapter]:
    """Whose a sequence is: its salt and its adapter."""
    return bytes.fromhex(call.salt), trace.adapter_of(call.adapter)


def _extras(call: trace.Create) -> dict[int, tuple[bytes, ...]]:
    fields = call.extra_keys.items()
    return {int(at): tuple(map(bytes.fromhex, found)) for at, found in fields}


def _violated(broken: LawViolation) -> Broken:
    law = broken.violations[0].partition(":")[0]
    return Broken(law, "; ".join(one.removeprefix(f"{law}: ") for one in broken.violations))


def _crash(crash: Exception) -> Broken:
    where = traceback.extract_tb(crash.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.name}"
    return Broken(f"crash {type(crash).__name__} in {place}", str(crash))


_SCRUBBED = bytes([0, SCRUB_BYTE])
