"""The rules: how to draw the next call.

One rule for each event of the sequence table that a caller can fire, and one for each call that no
sequence owns. A rule asks the table which sequences have a row for its event and draws among them;
now and then it draws among the others, and then the call must be refused and change nothing.
Drawing arguments freely makes nearly every call illegal and finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Final

from attrs import evolve
from msgspec.structs import replace

from kvstate import trace
from kvstate.campaign.legal import may
from kvstate.campaign.model import Story
from kvstate.campaign.player import STREAMS, Played, Player
from kvstate.config import Config, Geometry, GpuTier, HostTier, LayerSpec

_MAPPING: Final = ("create", "map", "unmap", "quiesce", "frame", "mapping", "access", "unmapping")
FAILURES: Final = {
    trace.Resume: (*["complete"] * 3, "copy", "issue", "wait", "finish", *_MAPPING),
    trace.Suspend: ("complete", "complete", "copy", "record", "event", "wait", "quiesce", "finish"),
    trace.Step: ("complete", "copy", *_MAPPING),
    trace.Resize: ("fill", *_MAPPING),
    trace.Fork: ("complete", "copy", "wait", "finish", *_MAPPING),
    trace.Rewind: ("complete", "copy", "wait", "finish", *_MAPPING),
    trace.Clear: ("unmap", "unmapping", "quiesce"),
    trace.Trim: ("unmap", "unmapping", "release", "freeing", "quiesce"),
    trace.Drop: ("copy", "record", "wait", "fill"),
    trace.Close: ("complete", "complete", "copy", "record", "event", "wait", "fill"),
    trace.Poll: ("complete", "copy", "fill", "finish"),
    trace.Wait: ("complete", "finish"),
    trace.Commit: ("finish", "finish"),
    trace.Settle: ("finish", "finish"),
}
"""Device calls and steps that may be told to fail during a call. A failed fill poisons the
manager."""
HANGING: Final = (trace.Resume, trace.Suspend, trace.Close, trace.Fork, trace.Poll)
"""Calls whose copy may be told never to end."""

LEAVE: Final = (trace.Close, trace.Close, trace.Suspend, trace.Drop)
"""How a sequence leaves its memory."""

Rule = Callable[[Player, Random], trace.AnyCall | None]
Maker = Callable[[Played, Random, int], trace.AnyCall]


def draw_config(random: Random, frame_bytes: int = 4096) -> Config:
    """A small configuration: few frames and slots, blocks smaller and larger than a frame."""
    block = random.choice((1, 1, 2, 2, 3, 4, 8, 16))
    layer = LayerSpec(
        kv_heads=random.choice((1, 2, 3)),
        head_dim=random.choice((8, 24, 64, 128)) * (frame_bytes // 4096),
        dtype=random.choice(("float16", "float32")),
    )
    frames, rows = random.randint(3, 16), random.randint(2, 7)
    gpu = GpuTier(
        frames * frame_bytes, frame_bytes, map_ahead_frames=random.choice((0, 0, 1, 3)),
        reclaim_frames=random.choice((1, 1, 4)),
        protected_share=random.choice((0.0, 0.05, 0.3, 0.5)),
        copy_share=random.choice((1.0, 1.0, 0.5, 0.0)),
    )  # fmt: skip
    config = Config(layers=[layer], gpu=gpu, tokens_per_block=block, max_sequences=rows)
    sizes = Geometry(config)
    longest = max(
        1, random.randint(1, frames) * frame_bytes // sizes.row_bytes + random.randint(-1, 1)
    )
    most = sizes.blocks(longest) * random.choice((1, 2, 3, 2 * rows)) // 2 + 1
    slots = random.randint(most // 2, most) if random.random() < 0.9 else 0
    if random.random() < 0.3:
        extent = (sizes.extent(longest) + sizes.guard_frames) * sizes.frame_bytes
        gpu = evolve(gpu, arena_bytes=extent * random.randint(1, rows))
    write_through = random.choice(("on_free", "on_free", "on_commit", "on_commit", "off"))
    return evolve(
        config,
        gpu=gpu,
        host=HostTier(slots * sizes.block_bytes) if slots else None,
        max_tokens=longest,
        max_utilization_for_resume=random.choice((0.5, 0.8, 0.95, 1.0)),
        write_through=write_through,
        retain=write_through != "off" and random.random() < 0.5,
        partial_blocks=random.random() < 0.5,
        spans=random.choice(("shared", "all", "all", "off")),
        adopt=random.random() < 0.75,
        scrub=random.random() < 0.6,
    )


def draw_weights(random: Random) -> list[float]:
    """How often each rule is drawn in one episode: the usual, with some much more or less often.

    Episodes with moods reach what no average does: a host tier full of small pieces, say.
    """
    return [
        weight * random.choice((1, 1, 1, 2) if name in _ESSENTIAL else (0.2, 1, 1, 1, 3))
        for name, (weight, _) in RULES.items()
    ]


def draw(player: Player, random: Random, weights: list[float]) -> trace.AnyCall:
    """The next call: of a rule that has something to draw, at times with a failure to come."""
    while player.planned:
        planned = player.planned.popleft()
        call = planned(player, random) if callable(planned) else planned
        if call is not None:
            return dressed(player, call, random)
    chance = 0.6 if player.alike() else 0.25
    call = _follow_up(player, random) if random.random() < chance else None
    while call is None:
        call = random.choices(_CHOICES, weights)[0](player, random)
    return dressed(player, call, random)


def _follow_up(player: Player, random: Random) -> trace.AnyCall | None:
    """Another call for the sequence that the last one named, or for one that says the same: faults
    live between neighbours."""
    name, alike = player.last, player.alike()
    if alike and (name not in player.seqs or random.random() < 0.4):
        name = random.choice(alike)
    if name is None or name not in player.seqs:
        return None
    played = player.seqs[name]
    if random.random() < (0.6 if player.rewound else 0.2) and may(played.seq, "step"):
        return _in_a_row(player, _say(player, random, name))
    legal = [event for event in _OF_SEQUENCES if may(played.seq, event)]
    return _OF_SEQUENCES[random.choice(legal)][1](played, random, name) if legal else None


def dressed(player: Player, call: trace.AnyCall, random: Random) -> trace.AnyCall:
    """The call with a seed for the device's schedule, and at times with a failure to come, or with
    memory that others take or give back. A fork's child gets a name."""
    if isinstance(call, trace.Fork):
        call = replace(call, child=player.next_name())
    seed = random.getrandbits(32)
    memory = None if seed % 50 else _memory(player, Random(seed))
    captured = [] if seed % 51 else _captured(player, call, Random(seed))
    return replace(call, seed=seed, fail=_failures(call, random), memory=memory, captured=captured)


def _captured(player: Player, call: trace.AnyCall, random: Random) -> list[int]:
    """Streams that are being captured during a call: often the one that it is about. The default
    one cannot be, and nothing is while a step is launched or waited for."""
    if isinstance(call, trace.Step | trace.Settle):
        return []
    played = player.seqs.get(player.last or 0)
    own = [at for at, one in enumerate(player.streams) if played and one is played.stream and at]
    number = getattr(call, "stream", 0) % STREAMS
    likely = [number] if number else own
    return random.choice((likely, likely, [random.randrange(1, STREAMS)], [*range(1, STREAMS)]))


def _memory(player: Player, random: Random) -> int:
    """How many frames others leave the device: mostly few more than it holds, or all."""
    gpu = player.kv.gpu
    few = gpu.existing + random.randint(0, 2)
    return random.choice((few, few, random.randint(0, gpu.budget_frames), -1, -1))


def _failures(call: trace.AnyCall, random: Random) -> dict[str, int | list[int]]:
    """Mostly none; else one kind of device call, at times two or two in a row, so that an undo
    fails too; seldom a copy that never ends, since nothing much comes after it."""
    kinds, chance = FAILURES.get(type(call), ()), random.random()
    if not kinds or chance > (0.25 if isinstance(call, trace.Resume | trace.Suspend) else 0.1):
        return {}
    if chance < 0.002 and isinstance(call, HANGING):
        return {"hang": 1}
    if chance < 0.008:
        first = random.randint(1, 12)
        return {"any": [first, first + 1]}
    chosen = random.sample(kinds, 2 if chance < 0.03 else 1)
    if "complete" in kinds and random.random() < 0.4:
        chosen = ["complete"]
    if "fill" in chosen and random.random() < 0.8:
        return {}
    return {kind: random.choice((1, 1, 1, 2)) for kind in chosen}


def _for_sequence(event: str, make: Maker) -> Rule:
    """The rule of an event that one sequence gets: nine times in ten where it is legal.

    Mostly a sequence that has something to lose or to name, so that the call means something.
    """

    def rule(player: Player, random: Random) -> trace.AnyCall | None:
        legal = random.random() < 0.9
        pool = [name for name, played in player.seqs.items() if may(played.seq, event) == legal]
        worth = [name for name in pool if _WORTH.get(event, _anything)(player.seqs[name].story)]
        if worth and random.random() < 0.85:
            pool = worth
        if not pool:
            return None
        name = random.choice(pool)
        return make(player.seqs[name], random, name)

    return rule


def _anything(story: Story) -> bool:
    return True


_WORTH: Final[dict[str, Callable[[Story], bool]]] = {
    "suspend": lambda story: story.scheduled > 0,
    "drop": lambda story: story.scheduled > 0,
    "rewind": lambda story: story.settled > 0,
    "commit": lambda story: story.known < story.settled,
}
"""Which sequences an event means something for."""


def _create(player: Player, random: Random) -> trace.AnyCall | None:
    waiting = any(played.story.phase == "CREATED" for played in player.seqs.values())
    if (waiting or not player.kv.columns.free) and random.random() < 0.8:
        return None
    most = player.config.max_tokens
    tokens = max(random.randint(1, most), random.randint(1, most))
    like, prompt = _birth(random), _ids(random, 3)
    if player.texts and random.random() < 0.7:
        story, known = random.choice(player.texts)
        born = story.born if story.born and random.random() < 0.9 else like
        like = born if random.random() < 0.75 else replace(born, extra_keys=like.extra_keys)
        prompt = [*known, *prompt]
    name, blocks = player.next_name(), -(-tokens // player.config.tokens_per_block)
    if random.random() < 0.4:
        player.planned.append(trace.Resume(seq=name, stream=random.randrange(STREAMS)))
    commit, chance = random.random() < 0.8, random.random()
    if chance < 0.97:  # else it may have a key of a block that it never has
        kept = {at: extra for at, extra in like.extra_keys.items() if int(at) < blocks}
        like = replace(like, extra_keys=kept)
    return replace(
        like, seq=name, max_tokens=tokens, prompt=prompt, commit=commit, reserve=chance < 0.15,
        fail={}, error=None,
    )  # fmt: skip


def _birth(random: Random) -> trace.Create:
    """A tenant, an adapter and what else blocks depend on: few of each, so that they meet."""
    return trace.Create(
        seq=0,
        max_tokens=1,
        salt=random.choice(("", "", "", "aa", "bb")),
        adapter=random.choice((None, None, None, None, 1, "1", "hex:31")),
        extra_keys={} if random.random() < 0.6 else {str(random.randrange(3)): ["5a"]},
    )


def _fork(played: Played, random: Random, name: int) -> trace.AnyCall:
    most = played.seq.kv.config.max_tokens
    tokens = _within(random, played.story.settled, most)
    return trace.Fork(seq=name, child=0, max_tokens=tokens, stream=random.randrange(STREAMS))


def _clear(player: Player, random: Random) -> trace.AnyCall:
    return trace.Clear()


def _say(player: Player, random: Random, name: int) -> list[trace.AnyCall]:
    """A sequence computes the next tokens, of its prompt if it has one, and names them all."""
    story, step, room = player.seqs[name].story, player.next_name(), player.seqs[name].seq
    left = len(story.prompt) - story.scheduled
    count = left if left > 0 else random.randint(1, player.config.tokens_per_block)
    count = min(count, room.max_tokens - room.scheduled_tokens)
    calls: list[trace.AnyCall] = [
        trace.Step(step=step, seqs=[name], tokens=[count]), trace.Settle(step=step),
    ]  # fmt: skip
    if may(room, "commit"):
        ids = _next_ids(story, random, story.scheduled + count - story.known)
        calls.append(trace.Commit(seq=name, tokens=ids))
    return calls


def _twins(player: Player, random: Random) -> trace.AnyCall | None:
    """Two sequences that say the same, the second less of it, or what the first has said already:
    what one of them does matters to the other. The calls that bring them there follow one
    another."""
    block, most = player.config.tokens_per_block, player.config.max_tokens
    if len(player.kv.columns.free) < 2 or most < block:
        return None
    names = [player.next_name() for _ in range(2)]
    lengths = [random.randint(block, min(most, 4 * block)) for _ in names]
    length = min(most, max(lengths) + random.randint(0, 2 * block))
    prompt = [random.randrange(2) for _ in range(length)]
    lengths.sort(reverse=True)
    calls: list[trace.AnyCall] = [
        trace.Create(seq=name, max_tokens=most, prompt=prompt) for name in names
    ]
    together = random.random() < 0.5
    if together:
        calls.append(trace.Resume(seq=names[1], stream=random.randrange(STREAMS)))
    for name, length in zip(names, lengths, strict=True):
        step = player.next_name()
        resume = trace.Resume(seq=name, stream=random.randrange(STREAMS))
        if name == names[0] or not together:
            calls.append(resume)
        if name == names[0] or together:
            calls.append(trace.Step(step=step, seqs=[name], tokens=[length]))
            calls.append(trace.Settle(step=step))
            calls.append(trace.Commit(seq=name, tokens=prompt[:length]))
    first = _in_a_row(player, calls)
    if random.random() < 0.25:
        player.planned.extend(_doubles(player, random, names, prompt))
    elif random.random() < 0.4:
        player.planned.extend(_succession(player, random, names, prompt))
    elif not together and random.random() < 0.5:
        if random.random() < 0.5:
            player.planned.append(random.choice(LEAVE)(seq=names[1]))
        player.planned.append(trace.Rewind(seq=names[0], tokens=random.randint(0, block)))
        player.planned.append(lambda player, random: _go_on(player, random, names[0]))
    return first


def _doubles(
    player: Player, random: Random, names: list[int], prompt: list[int]
) -> Iterator[trace.AnyCall | Rule]:
    """Two load at the same time what somebody has left on the host; a third maps what one of them
    has; then memory is wanted."""
    most = player.config.max_tokens
    yield from (trace.Close(seq=name) for name in names)
    yield trace.Poll()
    loading = [player.next_name() for _ in range(3)]
    longer = [*prompt, *_ids(random, 3)]
    yield from (trace.Create(seq=name, max_tokens=most, prompt=longer) for name in loading)
    yield from (trace.Resume(seq=name, stream=random.randrange(STREAMS)) for name in loading[:2])
    yield from (trace.Poll(), trace.Poll())
    yield trace.Resume(seq=loading[2], stream=random.randrange(STREAMS))
    yield trace.Resize(seq=random.choice(loading), tokens=most)
    yield lambda player, random: _go_on(player, random, loading[2])


def _succession(
    player: Player, random: Random, names: list[int], prompt: list[int]
) -> Iterator[trace.AnyCall | Rule]:
    """The first of two leaves, the second goes on and leaves too, and a third begins with what
    they have said: after the second has left, or before."""
    first, second = names
    yield random.choice(LEAVE)(seq=first)
    if random.random() < 0.7:
        yield trace.Poll()
    late = random.random() < 0.6
    if late:
        yield lambda player, random: _go_on(player, random, second)
        yield random.choice(LEAVE)(seq=second)
    third = player.next_name()
    longer = [*prompt, *_ids(random, 3)]
    yield trace.Create(seq=third, max_tokens=player.config.max_tokens, prompt=longer)
    yield trace.Resume(seq=third, stream=random.randrange(STREAMS))
    if not late:
        yield random.choice(LEAVE)(seq=second)
        yield random.choice(LEAVE)(seq=third)


def _orphaned(player: Player, random: Random) -> trace.AnyCall | None:
    """A hit is copied from the host and from one who runs, who has the block before that; then that
    one gives it up, and it may be the last."""
    block = player.config.tokens_per_block
    if len(player.kv.columns.free) < 3 or player.config.max_tokens <= 2 * block:
        return None
    first, second, third, step = [player.next_name() for _ in range(4)]
    text, most = [random.randrange(2) for _ in range(2 * block + 1)], player.config.max_tokens
    streams = [random.randrange(STREAMS) for _ in range(3)]
    return _in_a_row(player, [
        trace.Create(seq=first, max_tokens=most), trace.Create(seq=second, max_tokens=most),
        trace.Resume(seq=first, stream=streams[0]), trace.Resume(seq=second, stream=streams[1]),
        trace.Step(step=step, seqs=[first, second], tokens=[2 * block, block]),
        trace.Settle(step=step), trace.Commit(seq=first, tokens=text[: 2 * block]),
        trace.Commit(seq=second, tokens=text[:block]), trace.Close(seq=first), trace.Poll(),
        trace.Create(seq=third, max_tokens=most, prompt=text),
        trace.Resume(seq=third, stream=streams[2]), trace.Drop(seq=second),
        random.choice(LEAVE)(seq=third),
    ])  # fmt: skip


def _chat(player: Player, random: Random) -> trace.AnyCall | None:
    """A conversation: each turn begins with all that was said and says about a frame more, mostly
    before the last turn closes. At the end the last turn takes everything back."""
    most, sizes = player.config.max_tokens, player.kv.geometry
    turn_tokens = -(-sizes.frame_bytes // sizes.row_bytes)
    if len(player.kv.columns.free) < 2 or most < 2 * turn_tokens:
        return None
    turns = min(3 * sizes.rows, most // turn_tokens)
    turns = random.choice((turns, random.randint(2, turns)))
    text = [random.randrange(2) for _ in range(turns * turn_tokens)]
    names = [player.next_name() for _ in range(turns)]
    begun = [
        trace.Create(seq=name, max_tokens=most, prompt=text[: (at + 1) * turn_tokens])
        for at, name in enumerate(names)
    ]
    for last, call in zip([None, *names], begun, strict=False):
        leaves = [] if last is None else [trace.Close(seq=last)]
        late = random.random() < 0.8
        player.planned += [] if call is begun[0] else [call]
        player.planned += [] if late else leaves
        player.planned.append(trace.Resume(seq=call.seq, stream=random.randrange(STREAMS)))
        player.planned.append(partial(_go_on, name=call.seq))
        player.planned += leaves if late else []
    player.planned.append(trace.Rewind(seq=names[-1], tokens=0))
    return begun[0]


def _go_on(player: Player, random: Random, name: int) -> trace.AnyCall | None:
    """The sequence says more, if it still can."""
    played = player.seqs.get(name)
    can = played is not None and may(played.seq, "step")
    return _in_a_row(player, _say(player, random, name)) if can else None


def _in_a_row(player: Player, calls: list[trace.AnyCall]) -> trace.AnyCall:
    """The first of the calls; the others come next."""
    player.planned.extendleft(reversed(calls[1:]))
    return calls[0]


def _ids(random: Random, most: int) -> list[int]:
    """Token ids of a small vocabulary, so that sequences often say the same."""
    return [random.randrange(2) for _ in range(random.randint(0, most))]


def _next_ids(story: Story, random: Random, count: int) -> list[int]:
    """The ids of a sequence's next tokens: those of its prompt, and then drawn ones."""
    known = story.prompt[story.known : story.known + count]
    ids = known.tolist() if random.random() < 0.95 else []
    return ids + [random.randrange(2) for _ in range(count - len(ids))]


def _dummy(player: Player, random: Random) -> trace.AnyCall:
    tokens, stream = random.randint(1, player.config.max_tokens), random.randrange(STREAMS)
    return trace.Dummy(seq=player.next_name(), tokens=tokens, stream=stream)


def _resize(played: Played, random: Random, name: int) -> trace.AnyCall:
    seq = played.seq
    return trace.Resize(seq=name, tokens=_within(random, seq.written_tokens, seq.max_tokens))


def _rewind(played: Played, random: Random, name: int) -> trace.AnyCall:
    shared = played.seq.shared_tokens
    if shared and random.random() < 0.7:
        return trace.Rewind(seq=name, tokens=random.randrange(shared))
    low = random.choice((0, shared))
    return trace.Rewind(seq=name, tokens=_within(random, low, played.story.settled))


def _commit(played: Played, random: Random, name: int) -> trace.AnyCall:
    most = played.story.settled - played.story.known
    count = max(0, _within(random, 0, most))
    return trace.Commit(seq=name, tokens=_next_ids(played.story, random, count))


def _within(random: Random, low: int, high: int) -> int:
    """Mostly a number from `low` to `high`, often one of the two; at times just outside."""
    chance = random.random()
    if chance < 0.04:
        return random.choice((low - 1, high + 1))
    return random.choice((low, high)) if chance < 0.3 else random.randint(low, high)


def _step(player: Player, random: Random) -> trace.AnyCall | None:
    ready = [name for name, played in player.seqs.items() if may(played.seq, "step")]
    others = [name for name in player.seqs if name not in ready]
    if others and random.random() < 0.05:
        names = [*ready, random.choice(others)]
        return trace.Step(step=player.next_name(), seqs=names, tokens=[0] * len(names))
    if not ready:
        return None
    names = random.sample(ready, random.randint(1, len(ready)))
    rooms = [player.seqs[name].seq for name in names]
    most = [seq.max_tokens - seq.scheduled_tokens for seq in rooms]
    burst = random.choice((1, 2, 8, player.config.max_tokens, player.config.max_tokens))
    tokens = [min(random.randint(0, burst) or random.randint(0, 1), room) for room in most]
    if random.random() < 0.03:
        tokens[0] = most[0] + 1
    return trace.Step(step=player.next_name(), seqs=names, tokens=tokens)


def _commit_each(player: Player, random: Random) -> trace.AnyCall | None:
    ready = [name for name, played in player.seqs.items() if may(played.seq, "commit")]
    room = [n for n in ready if player.seqs[n].story.known < player.seqs[n].story.settled]
    pool = room if random.random() < 0.95 else list(player.seqs)
    if not pool:
        return None
    names = random.sample(pool, random.randint(1, len(pool)))
    ids = [_next_ids(player.seqs[name].story, random, 1)[0] for name in names]
    return trace.CommitEach(seqs=names, tokens=ids)


def _settle(player: Player, random: Random) -> trace.AnyCall | None:
    if not player.steps:
        return None
    names = list(player.steps)
    name = names[0] if random.random() < 0.9 else random.choice(names)
    launch = player.steps[name]
    accepted = None
    if random.random() < 0.3:
        accepted = [random.randint(0, part.count) for part in launch.parts]
    if random.random() < 0.03:
        accepted = [launch.parts[0].count + 1] * len(launch.parts)
    return trace.Settle(step=name, accepted=accepted)


def _poll(player: Player, random: Random) -> trace.AnyCall:
    """Mostly of whatever has ended; else of a few that are named, at times wrongly."""
    known = list(player.kv.flight.transfers)
    if not known or random.random() < 0.7:
        return trace.Poll()
    named = random.sample(known, random.randint(0, min(3, len(known))))
    return trace.Poll(deliver=named if random.random() < 0.9 else [*named, known[-1] + 1])


def _wait(player: Player, random: Random) -> trace.AnyCall | None:
    """For a sequence's copy, mostly for one that is in flight."""
    flying = [name for name, played in player.seqs.items() if played.seq.transfer is not None]
    pool = flying if random.random() < 0.9 else list(player.seqs)
    return trace.Wait(seq=random.choice(pool)) if pool else None


def _tensors_all(player: Player, random: Random) -> trace.AnyCall | None:
    """Views of whole stays, of sequences that have none at times."""
    pool = [
        name for name, one in player.seqs.items()
        if one.story.phase == "ACTIVE" or random.random() < 0.1
    ]  # fmt: skip
    if not pool:
        return None
    name = random.choice(pool)
    most = player.seqs[name].seq.max_tokens
    tokens = None if random.random() < 0.5 else random.randint(0, most + 1)
    return trace.TensorsAll(seq=name, tokens=tokens)


def _trim(player: Player, random: Random) -> trace.AnyCall:
    return trace.Trim(keep=random.choice((0, 0, 1, 4)))


_OF_SEQUENCES: Final[dict[str, tuple[float, Maker]]] = {
    "resume": (7, lambda _, random, name: trace.Resume(seq=name, stream=random.randrange(STREAMS))),
    "fork": (1, _fork),
    "grow": (3, _resize),
    "rewind": (2, _rewind),
    "commit": (8, _commit),
    "stop_committing": (0.3, lambda _, random, name: trace.Stop(seq=name)),
    "suspend": (4, lambda _, random, name: trace.Suspend(seq=name, after=random.random() < 0.3)),
    "drop": (1.2, lambda _, random, name: trace.Drop(seq=name, after=random.random() < 0.3)),
    "close": (1.2, lambda _, random, name: trace.Close(seq=name, after=random.random() < 0.3)),
}  # fmt: skip
"""(weight, how to draw the arguments) for every event that one sequence gets."""

_OTHERS: Final[dict[str, tuple[float, Rule]]] = {
    "create": (3, _create), "dummy": (0.3, _dummy), "step": (15, _step), "settle": (14, _settle),
    "twins": (2.5, _twins), "chat": (1, _chat), "orphaned": (0.4, _orphaned),
    "commit_each": (4, _commit_each), "poll": (3, _poll), "wait": (1, _wait), "trim": (0.7, _trim),
    "clear": (0.2, _clear), "tensors_all": (1, _tensors_all),
}  # fmt: skip

RULES: Final[dict[str, tuple[float, Rule]]] = {
    **{name: (w, _for_sequence(name, make)) for name, (w, make) in _OF_SEQUENCES.items()},
    **_OTHERS,
}
"""(weight, rule) by the name of the event or call. A rule without a choice draws None."""
_ESSENTIAL: Final = ("create", "resume", "step", "settle")
"""Without these nothing else has anything to do."""
_CHOICES: Final = [rule for _, rule in RULES.values()]
