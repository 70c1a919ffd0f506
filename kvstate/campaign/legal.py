"""Which calls are legal now: what the table says of the state, and the story of the numbers.

Worked out before a call is made, and afresh in every program that plays it, so that a program that
has lost calls is still judged rightly. A call that is not legal must raise `IllegalTransition` and
change nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstate import trace
from kvstate.sequence import Sequence
from kvstate.spec.compiled import MACHINES
from kvstate.spec.sequence import SEQUENCE

if TYPE_CHECKING:
    from kvstate.campaign.player import Launch, Played, Player

WAITS: Final = ("resume", "suspend")
"""Events whose call waits for a copy that is in the way, so that only the state decides."""


def may(seq: Sequence, event: str) -> bool:
    """Whether the table has an enabled row for the event, after the wait that its call makes."""
    if event in WAITS:
        return bool(SEQUENCE.on(event, SEQUENCE.states[seq.state]))
    return MACHINES.object(f"sequence.{event}").decide(seq) is not None


def is_legal(player: Player, call: trace.AnyCall) -> bool:
    """Whether the call may be made now. Raises Skip if what it names was never made."""
    if isinstance(call, trace.Poll | trace.Clear | trace.Trim | trace.Refused):
        return True
    if isinstance(call, trace.Create):
        return 0 < call.max_tokens <= player.config.max_tokens
    if isinstance(call, trace.Dummy):
        return 0 < call.tokens <= player.config.max_tokens
    if isinstance(call, trace.Step):
        wanted = zip(call.seqs, call.tokens, strict=True)
        return all(_may_step(player.known(name).seq, count) for name, count in wanted)
    if isinstance(call, trace.CommitEach):
        members = [player.known(name) for name in call.seqs]
        ready = all(may(one.seq, "commit") for one in members)
        return ready and all(one.story.known < one.story.settled for one in members)
    if isinstance(call, trace.Settle):
        return _may_settle(player.launched(call.step), call.accepted)
    played = player.known(call.seq)
    return may(played.seq, call.event) and _fits(played, call)


def _may_step(seq: Sequence, count: int) -> bool:
    return may(seq, "step") and 0 <= count <= seq.max_tokens - seq.scheduled_tokens


def _may_settle(launch: Launch, accepted: list[int] | None) -> bool:
    """Every earlier step of its living sequences is settled, and no more is accepted than
    issued."""
    if accepted is not None:
        if len(accepted) != len(launch.parts):
            return False
        counts = [part.count for part in launch.parts]
        if any(not 0 <= taken <= count for taken, count in zip(accepted, counts, strict=True)):
            return False
    live = [part for part in launch.parts if part.lives and part.count]
    return all(part.start == part.played.story.settled for part in live)


def _fits(played: Played, call: trace.AnyCall) -> bool:
    """The numbers of the call fit the sequence."""
    seq, story = played.seq, played.story
    if isinstance(call, trace.Resize):
        return seq.written_tokens <= call.tokens <= seq.max_tokens
    if isinstance(call, trace.Fork):
        return max(1, story.settled) <= call.max_tokens <= seq.kv.config.max_tokens
    if isinstance(call, trace.Rewind):
        return 0 <= call.tokens <= story.settled
    if isinstance(call, trace.Commit):
        return len(call.tokens) <= story.settled - story.known
    return True
