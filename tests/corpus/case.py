"""What a case is, and how it is played.

Each case replays what one public report tells, in our own terms, on the real manager. It must pass,
and it must be able to fail: the same case with one planted mistake in the sources must be caught,
and as what the case says. It must also get where the report was: what has to be so on the way is
said in the program itself, between the calls, so that a case that has come to miss its situation
fails instead of passing for nothing.

Rejected: asserting all of that at the end. Most situations are gone by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from attrs import evolve, frozen

from kvstate import trace
from kvstate.campaign.model import Broken
from kvstate.campaign.player import ALL, Look, Player
from kvstate.config import Config, GpuTier, HostTier, LayerSpec
from kvstate.gpu import open_device
from kvstate.plan import STATE_NAMES
from tests.faults.planted import FAULTS, SEEN_BY_CASES, Fault

REACHED: Final = "situation not reached"
"""The kind of failure that no case may name as its own."""
FRAME: Final = 4096
ROW: Final = 1024
"""Bytes of a token in the configurations of the corpus: four tokens a frame."""


@frozen
class See:
    """What is so at this point of a program. If it is not, the case fails with this kind."""

    what: str
    read: Callable[[Player], object]
    wanted: object
    kind: str = REACHED

    def check(self, player: Player) -> None:
        """Raise Broken if it is not so."""
        expect(self.kind, self.what, self.read(player), self.wanted)


Program = tuple[trace.AnyCall | See, ...]


@frozen
class How:
    """How a case is played."""

    streams: str
    look: int = ALL.value
    """What is looked at, as a number of `Look`."""
    device: str = "host"


@frozen(kw_only=True)
class Case:
    """One situation of one report, or of several that are alike.

    Either a program, played call by call with every check of the fuzz; or a function, where the
    report is about something that has no calls.
    """

    name: str
    entries: tuple[str, ...]
    """The reports, by the names that `reports.py` has for them."""
    law: str
    """As what the planted fault is caught."""
    fault: Fault
    program: Program = ()
    config: Config | None = None
    streams: str = "eager"
    seeds: tuple[int, ...] = (0,)
    """Schedules of the device: each of them must pass, one of them catches the fault."""
    run: Callable[[], None] | None = None

    def play(self) -> None:
        """Raise Broken if anything does not hold or is not reached."""
        for seed in self.seeds:
            self.play_once(seed)

    def kinds(self, how: How | None = None) -> list[str]:
        """What fails, schedule by schedule: nothing, if all is well.

        Unless `how` asks for it, the order check is off: what else sees the fault is the question.
        """
        found = []
        for seed in self.seeds:
            try:
                self.play_once(seed, how or How(self.streams, (ALL & ~Look.ORDER).value))
            except Broken as broken:
                found.append(broken.kind)
        return found

    def play_once(self, seed: int, how: How | None = None) -> None:
        """Play it on one schedule. Raises Broken."""
        if self.run is not None:
            self.run()
            return
        assert self.config is not None
        self._play(self.config, seed, how or How(self.streams))

    def _play(self, config: Config, seed: int, how: How) -> None:
        device = open_device(how.device, streams=how.streams, seed=seed)
        config = scaled(config, device.granularity_bytes // FRAME)
        header = trace.Header(kvstate_trace=trace.VERSION, config=config, streams=how.streams)
        player = Player(header, device, Look(how.look))
        try:
            for one in self.program:
                if isinstance(one, See):
                    one.check(player)
                else:
                    player.apply(one)
            player.finish()
        except BaseException:
            player.abandon()
            raise


def scaled(config: Config, times: int) -> Config:
    """The same with tokens that are so many times as large, for a device whose frames are."""
    if times == 1:
        return config
    layers = [evolve(layer, kv_heads=layer.kv_heads * times) for layer in config.layers]
    gpu, host = config.gpu, config.host
    sizes = evolve(gpu, budget_bytes=gpu.budget_bytes * times, frame_bytes=gpu.frame_bytes * times)
    room = None if host is None else HostTier(host.size_bytes * times)
    return evolve(config, layers=layers, gpu=sizes, host=room)


def expect(kind: str, what: str, found: object, wanted: object) -> None:
    """Raise Broken of that kind unless both are the same."""
    if found != wanted:
        raise Broken(kind, f"{what}: {found}, but should be {wanted}")


def planted(name: str) -> Fault:
    """The fault of that name among those that the fuzz has to find."""
    (fault,) = (fault for fault in FAULTS + SEEN_BY_CASES if fault.name == name)
    return fault


def config(
    frames: int = 8, slots: int = 16, block: int = 2, max_tokens: int = 16, ahead: int = 0,
    protected: float = 0.0, **changes: Any,
) -> Config:  # fmt: skip
    """Small: four tokens a frame, of which each reclaim takes only what it needs."""
    rest: dict[str, Any] = {
        "max_sequences": 8, "max_utilization_for_resume": 1.0, "partial_blocks": False,
    } | changes  # fmt: skip
    return Config(
        layers=[LayerSpec(kv_heads=1, head_dim=ROW // 4, dtype="float16")],
        gpu=GpuTier(frames * FRAME, FRAME, ahead, reclaim_frames=1, protected_share=protected),
        host=HostTier(slots * block * ROW) if slots else None,
        tokens_per_block=block,
        max_tokens=max_tokens,
        **rest,
    )


# Pieces of programs.


def opened(seq: int, prompt: Iterable[int] = (), *, max_tokens: int = 16, salt: str = "",
           stream: int = 0) -> list[trace.AnyCall]:  # fmt: skip
    """A sequence that runs and has written nothing of its own."""
    return [
        trace.Create(seq=seq, max_tokens=max_tokens, prompt=list(prompt), salt=salt),
        trace.Resume(seq=seq, stream=stream),
    ]


def wrote(seq: int, ids: Iterable[int]) -> list[trace.AnyCall]:
    """It writes these tokens and commits them."""
    tokens = list(ids)
    return [*grew(seq, len(tokens)), trace.Commit(seq=seq, tokens=tokens)]


def grew(seq: int, tokens: int) -> list[trace.AnyCall]:
    """It writes that many tokens."""
    step = trace.Step(step=seq, seqs=[seq], tokens=[tokens])
    return [step, trace.Settle(step=seq)]


def said(seq: int, ids: Iterable[int], *, max_tokens: int = 16, salt: str = "",
         stream: int = 0) -> list[trace.AnyCall]:  # fmt: skip
    """A sequence that runs and has written and committed these tokens."""
    made = opened(seq, max_tokens=max_tokens, salt=salt, stream=stream)
    return [*made, *wrote(seq, ids)]


def left_on_host(seq: int, ids: Iterable[int], *, salt: str = "") -> list[trace.AnyCall]:
    """A sequence that has said these tokens and is gone: they are on the host, nobody's."""
    return [*said(seq, ids, salt=salt), trace.Close(seq=seq), trace.Poll()]


def in_span(seq: int, ids: Iterable[int]) -> list[trace.AnyCall]:
    """A sequence whose prompt these tokens are, and which is gone: if all of a prompt is kept, they
    are in a span of nobody's."""
    prompt = list(ids)
    return [*opened(seq, prompt), *wrote(seq, prompt), trace.Close(seq=seq)]


def counted(name: str, wanted: int, kind: str = REACHED) -> See:
    """What the manager has counted of something so far."""
    return See(name, lambda player: player.kv.counters[name], wanted, kind)


def matched(seq: int, tokens: int) -> See:
    """The tokens that a sequence has from others."""
    what = f"tokens that sequence {seq} has from others"
    return See(what, lambda player: player.known(seq).seq.matched_tokens, tokens)


def state(seq: int, name: str) -> See:
    """The state of a sequence."""
    return See(f"sequence {seq}", lambda player: player.known(seq).seq.state_name, name)


def length(seq: int, tokens: int) -> See:
    """The settled tokens of a sequence."""
    what = f"length of sequence {seq}"
    return See(what, lambda player: player.known(seq).seq.length_tokens, tokens)


def capacity(seq: int, tokens: int) -> See:
    """The tokens that a sequence has memory for."""
    what = f"capacity of sequence {seq}"
    return See(what, lambda player: player.known(seq).seq.capacity_tokens, tokens)


def pages(seq: int, *names: str) -> See:
    """The states of the first pages of a sequence."""

    def read(player: Player) -> tuple[str, ...]:
        codes = player.known(seq).seq.pages.states[: len(names)]
        return tuple(STATE_NAMES["page"][code] for code in codes)

    return See(f"pages of sequence {seq}", read, names)


def frames(kind: str = REACHED, **wanted: int) -> See:
    """How many frames are in each of these states."""
    return See(
        "frames",
        lambda player: {name: player.kv.stats().frames.get(name, 0) for name in wanted},
        wanted,
        kind,
    )


def slots(kind: str = REACHED, **wanted: int) -> See:
    """How many host slots are in each of these states."""
    return See(
        "host slots",
        lambda player: {name: player.kv.stats().host_slots.get(name, 0) for name in wanted},
        wanted,
        kind,
    )


def found(prompt: Iterable[int], tokens: int, kind: str = REACHED, *, salt: bytes = b"") -> See:
    """How many tokens a newcomer with this prompt would have from others now."""
    ids = list(prompt)
    what = f"tokens that {ids} would find"
    return See(what, lambda player: player.kv.probe_reuse(ids, salt=salt), tokens, kind)


def refused(place: str, times: int) -> See:
    """How often a capacity error of that place was right."""
    return See(f"refusals by {place}", lambda player: player.refused[place], times)
