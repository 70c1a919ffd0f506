"""Progress, law 12: when a capacity error is right, what was promised, and how far an engine comes.

A refusal is judged by sums of our own over the view as it is after the call, and by what the call
had asked for; never by a number in the error, nor by a property of the manager, since a sum that is
wrong there would be wrong here too. What a sequence could begin with from others is not worked out
again: a beginning is taken to need all of its prompt, and nothing of spans to be had where it might
map some. So a wrong refusal may be missed there; one that is right is never blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from kvstate.spec import frame, host, sequence
from kvstate.spec import range as range_
from kvstate.spec.facts import FairRun, RangeFact, Refusal, SequenceFact, View
from kvstate.spec.memory_laws import blocks_of, extent, frames_of, promise, promised, used
from kvstate.spec.span_laws import spare_spans
from kvstate.spec.table import State

_FREE: Final = (frame.ABSENT, frame.POOLED, frame.PARKED, frame.COMING)
"""Frames to be had: at once, from parked memory, or after a quiesce."""
_ROOM: Final = (
    host.FREE, host.DRAINING, host.STALE, host.STALE_HELD, host.FILLING, host.MIRROR,
    host.MIRRORING,
)  # fmt: skip
"""Host slots to be had: at once, for the asking, or when copies have ended."""


def progress(view: View, refused: Refusal) -> Iterator[str]:
    """After a refusal, what is free, reclaimable and coming together is still too little; the gate
    is as wide as configured, no row is free, no address that nobody needs is taken. While nothing
    runs neither the gate nor a promise is in anybody's way, unless others have the memory."""
    judge = _JUDGES.get(refused.place)
    if judge is None:
        yield f"{refused.call} was refused by {refused.place}, where something can always be found"
        return
    alone = not running(view) and refused.call != "dummy" and not _lacking(view, refused)
    if refused.place in ("gate", "reserve") and alone:
        yield f"the {refused.place} refused a {refused.call} although nothing runs"
    yield from judge(view, refused)


def running(view: View) -> int:
    """How many sequences run."""
    return sum(seq.state == sequence.ACTIVE.code for seq in view.sequences)


def protected_frames(view: View) -> int:
    """Frames of the latest spans that are kept while several run."""
    return int(view.protected_share * view.budget_frames)


def _count(view: View, *states: State) -> int:
    """Frames in these states."""
    return sum(sum(view.frame_counts[state.code : state.code + 1]) for state in states)


def _had(view: View, refused: Refusal) -> int:
    """Frames that could be had by whoever was refused. A dummy ran until it was."""
    runs = running(view) + (refused.call == "dummy")
    return (
        _count(view, *_FREE)
        + _regained(view, refused)
        + spare_spans(view, protected_frames(view) if runs > 1 else 0)
    )


def _regained(view: View, refused: Refusal) -> int:
    """Frames that the device had no memory for, and has now: a call that is short asks again."""
    return min(_count(view, frame.DENIED), max(0, refused.room - _count(view, frame.ABSENT)))


def _lacking(view: View, refused: Refusal) -> int:
    """Frames of the budget that others have."""
    return _count(view, frame.DENIED) - _regained(view, refused)


def promises_hold(view: View) -> Iterator[str]:
    """What running sequences may still ask for is free, parked, coming or in spans that can go, or
    is memory that the device lacks for now."""
    left = protected_frames(view) if running(view) > 1 else 0
    wanted = promised(view)
    had = _count(view, *_FREE, frame.DENIED) + spare_spans(view, left) if wanted else 0
    if wanted > had:
        yield f"{wanted} frames were promised, {had} can be had"


def _asked(view: View, refused: Refusal) -> Iterator[tuple[SequenceFact, RangeFact | None, int]]:
    """(sequence, its range, tokens) of what the call named."""
    tokens = refused.tokens or (0,) * len(refused.uids)
    for uid, count in zip(refused.uids, tokens, strict=False):
        seq = view.by_uid.get(uid)
        if seq is not None:
            yield seq, view.range_of.get(seq.range), count


def _growth(view: View, refused: Refusal) -> dict[int, int]:
    """Frames that each sequence of a resize or a step was to get, by uid."""
    found = {}
    for seq, fact, tokens in _asked(view, refused):
        end = tokens if refused.call == "resize" else seq.scheduled + tokens
        if fact is not None and end > seq.capacity:
            found[seq.uid] = max(0, frames_of(view, end) - used(view, fact))
    return found


def _beginning(view: View, refused: Refusal) -> int:
    """Frames that a beginning needs at the most."""
    if refused.call == "dummy":
        return max(1, frames_of(view, refused.tokens[0]))
    tokens = refused.prompt_tokens
    for seq, _, count in _asked(view, refused):
        tokens = seq.settled if refused.call == "fork" else seq.held_tokens or tokens
        tokens = count if refused.call == "rewind" else tokens
    return max(1, frames_of(view, tokens))


def _whole(view: View, refused: Refusal) -> int:
    """Frames that it needs to be finished, if that was promised."""
    seq = next((seq for seq, _, _ in _asked(view, refused)), None)
    if seq is None or not seq.reserves or refused.call == "fork":
        return _beginning(view, refused)
    return frames_of(view, seq.max_tokens)


def _in_spans(view: View, refused: Refusal, left: int) -> int:
    """Frames of spans that stay whoever begins, at the most: all but those that can be given up,
    unless it might map just those."""
    held = _count(view, frame.SPAN)
    bare = refused.call == "dummy" or (not refused.prompt_tokens and refused.call == "resume")
    return held - spare_spans(view, left) if bare else held


def _judge_limit(view: View, refused: Refusal) -> Iterator[str]:
    needed = frames_of(view, refused.tokens[0])
    if needed <= view.budget_frames:
        yield f"a {refused.call} of {needed} frames was refused, of {view.budget_frames} in all"


def _judge_rows(view: View, refused: Refusal) -> Iterator[str]:
    if view.free_rows:
        yield f"a {refused.call} was refused for want of a row, {len(view.free_rows)} are free"


def _judge_gate(view: View, refused: Refusal) -> Iterator[str]:
    left = protected_frames(view) if running(view) > 1 else 0
    charge = _count(view, frame.MAPPED, frame.LIVE_SPAN) + _in_spans(view, refused, left)
    # A dummy is let in with nothing, and grows then.
    needed = 1 if refused.call == "dummy" else _beginning(view, refused)
    usable = view.budget_frames - _lacking(view, refused)
    if charge + needed <= view.max_utilization * usable:
        yield (
            f"the gate refused a {refused.call} of {needed} frames, {charge} of "
            f"{view.budget_frames} are charged"
        )


def _judge_budget(view: View, refused: Refusal) -> Iterator[str]:
    grows = refused.call in ("resize", "step")
    growth = sum(_growth(view, refused).values())
    needed, had = growth if grows else _beginning(view, refused), _had(view, refused)
    if needed <= had:
        yield f"refused {needed} frames with {had} free, parked, coming or in spans"


def _judge_reserve(view: View, refused: Refusal) -> Iterator[str]:
    wanted, had = promised(view), _had(view, refused)
    if refused.call in ("resize", "step"):
        growth = _growth(view, refused)
        own = sum(min(n, promise(view, view.by_uid[uid])) for uid, n in growth.items())
        needed, fits = sum(growth.values()), sum(growth.values()) - own <= had - wanted
    else:
        needed = _whole(view, refused)
        left = protected_frames(view) if running(view) else 0
        free = _count(view, *_FREE, frame.CONDEMNED) + _count(view, frame.SPAN)
        free -= _in_spans(view, refused, left)
        fits = needed <= min(had, free) - wanted
    if fits:
        yield f"refused {needed} of {had} frames, {wanted} of which are promised"


def _judge_addresses(view: View, refused: Refusal) -> Iterator[str]:
    tokens = [seq.max_tokens for seq, _, _ in _asked(view, refused)]
    tokens = [refused.tokens[0]] if refused.call in ("dummy", "fork") else tokens
    needed = extent(view, max(tokens, default=0)) + view.guard_frames
    longest = max((frames for _, frames in view.free_addresses), default=0)
    if refused.roomy:
        yield f"a {refused.call} was refused for addresses, of which there are enough for all"
    if needed <= longest:
        yield f"refused {needed} frames of addresses, {longest} are free in one run"
    for fact in view.ranges:
        if fact.state == range_.PARKED.code and fact.home_of is None:
            yield f"addresses were refused with range {fact.number} in nobody's use"
    if spare_spans(view, 0):
        yield f"addresses were refused with {spare_spans(view, 0)} frames in spans of nobody's use"


def _judge_host(view: View, refused: Refusal) -> Iterator[str]:
    had = sum(view.host_counts[state.code] for state in _ROOM)
    for seq, _, _ in _asked(view, refused):
        needed = blocks_of(view, max(seq.scheduled, seq.held_tokens))
        if needed <= had:
            yield f"refused {needed} host slots with {had} free, draining or nobody's"


_JUDGES: Final[Mapping[str, Callable[[View, Refusal], Iterator[str]]]] = {
    "limit": _judge_limit,
    "rows": _judge_rows,
    "gate": _judge_gate,
    "budget": _judge_budget,
    "reserve": _judge_reserve,
    "addresses": _judge_addresses,
    "host": _judge_host,
}
"""By the check that refused. There is none for `retained`: that can always be found."""


def remaps_are_known(view: View) -> Iterator[str]:
    """The sequences that a reclaim asks for copies of spans are all that have some."""
    for uid in view.copying - view.doubles:
        yield f"sequence {uid} has copies of a span's blocks, and no reclaim would ask it"


def nobody_circles(run: FairRun) -> Iterator[str]:
    """A sequence that is resumed gets to compute, or somebody else does, before it must go."""
    for uid, times in run.resumed.items():
        if times > run.most_resumes:
            yield f"sequence {uid} was resumed {times} times, and nobody has computed a token"


def all_finish(run: FairRun) -> Iterator[str]:
    """An engine that serves the oldest first, and makes room with the youngest, ends with all."""
    for seq in run.left:
        refusals = ", ".join(f"{place} {times}" for place, times in seq.refusals.items())
        yield (
            f"sequence {seq.uid} has {seq.settled} of {seq.max_tokens} tokens after {run.calls} "
            f"calls, of {run.most_calls} that may be needed; refused: {refusals or 'nothing'}"
        )
