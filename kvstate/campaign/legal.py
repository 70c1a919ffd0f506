"""Which calls are legal now, and what those that are not must raise.

An illegal call must change nothing and raise, of these, the first that is so: ArgumentError, if a
number can be right in no state of what it is about; StreamCaptured, if its stream is being
captured; IllegalTransition, if the table has no row; and ArgumentError again, if a number is wrong
now, by the story of the numbers.

Worked out before a call is made, and afresh in every program that plays it, so that a program that
has lost calls is still judged rightly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstate import trace
from kvstate.errors import ArgumentError, IllegalTransition, KvStateError, StreamCaptured
from kvstate.sequence import Arrived, Sequence
from kvstate.spec.compiled import MACHINES

if TYPE_CHECKING:
    from kvstate.campaign.player import Launch, Played, Player

WAITS: Final = ("resume", "suspend", "fork", "rewind", "commit", "settle")
"""Events whose call waits for a copy that is in the way."""


def may(seq: Sequence, event: str) -> bool:
    """Whether the table has an enabled row for the event, after the wait that its call makes."""
    arrived = Arrived(seq.state, seq.steps, seq.committing, seq.life)
    subject = arrived if event in WAITS else seq
    return MACHINES.object(f"sequence.{event}").decide(subject) is not None


def refusal(player: Player, call: trace.AnyCall) -> type[KvStateError] | None:
    """What the call must raise; None if it may be made. Raises Skip if what it names was never
    made."""
    members = [player.known(name) for name in _names(call)]
    if isinstance(call, trace.TensorsAll) and player.device.memory is None:
        return None
    if not _can_be(player, call):
        return ArgumentError
    if _on_captured(player, call):
        return StreamCaptured
    if isinstance(call, trace.TensorsAll):
        return IllegalTransition if player.known(call.seq).seq.base is None else None
    if isinstance(call, trace.Settle):
        return None if _in_order(player.launched(call.step)) else IllegalTransition
    if not all(may(one.seq, call.event) for one in members):
        return IllegalTransition
    fit = all(_fits(one, call, at) for at, one in enumerate(members))
    return None if fit else ArgumentError


def _on_captured(player: Player, call: trace.AnyCall) -> bool:
    """The call is to launch on a stream that is being captured, or to wait for it."""
    streams = player.streams
    captured = [streams[number % len(streams)] for number in call.captured]
    match call:
        case trace.Resume() | trace.Fork() | trace.Dummy():
            return streams[call.stream % len(streams)] in captured
        case trace.Suspend() | trace.Drop() | trace.Close():
            played = player.known(call.seq)
            return not call.after and played.seq.base is not None and played.stream in captured
        case _:
            return False


def _names(call: trace.AnyCall) -> list[int]:
    """The sequences that the call is about, and that are there already."""
    match call:
        case trace.Step() | trace.CommitEach():
            return call.seqs
        case trace.Create() | trace.Dummy() | trace.Settle():
            return []
        case trace.Poll() | trace.Wait() | trace.Clear() | trace.Trim() | trace.Refused():
            return []
        case trace.TensorsAll():
            return []
        case _:
            return [call.seq]


def _can_be(player: Player, call: trace.AnyCall) -> bool:
    """No number of the call is wrong whatever the sequences are at."""
    most = player.config.max_tokens
    match call:
        case trace.Create():
            blocks = range(-(-call.max_tokens // player.config.tokens_per_block))
            return 0 < call.max_tokens <= most and all(int(at) in blocks for at in call.extra_keys)
        case trace.Fork():
            return 0 < call.max_tokens <= most
        case trace.Dummy():
            return 0 < call.tokens <= most
        case trace.Resize() | trace.Rewind():
            return 0 <= call.tokens <= most
        case trace.TensorsAll():
            return (call.tokens or 0) <= player.known(call.seq).seq.max_tokens
        case trace.Step():
            return _once(call) and all(0 <= count <= most for count in call.tokens)
        case trace.CommitEach():
            return _once(call)
        case trace.Settle():
            return _no_more(player.launched(call.step), call.accepted)
        case trace.Poll():
            named = call.deliver or []
            known = player.kv.flight.transfers.keys()
            return len({*named}) == len(named) and known >= {*named}
        case _:
            return True


def _once(call: trace.Step | trace.CommitEach) -> bool:
    """Each sequence is named once, and has one number."""
    return len({*call.seqs}) == len(call.seqs) == len(call.tokens)


def _no_more(launch: Launch, accepted: list[int] | None) -> bool:
    """No more is accepted than issued."""
    if accepted is None:
        return True
    counts = [part.count for part in launch.parts]
    pairs = zip(accepted, counts, strict=False)
    return len(accepted) == len(counts) and all(0 <= taken <= count for taken, count in pairs)


def _in_order(launch: Launch) -> bool:
    """Every earlier step of its living sequences is settled."""
    live = [part for part in launch.parts if part.lives and part.count]
    return all(part.start == part.played.story.settled for part in live)


def _fits(played: Played, call: trace.AnyCall, at: int) -> bool:
    """The numbers of the call fit this sequence, the `at`-th that it names, as it is now."""
    seq, story = played.seq, played.story
    match call:
        case trace.Step():
            return call.tokens[at] <= seq.max_tokens - seq.scheduled_tokens
        case trace.CommitEach():
            return story.known < story.settled
        case trace.Resize():
            return seq.written_tokens <= call.tokens <= seq.max_tokens
        case trace.Fork():
            return max(1, story.settled) <= call.max_tokens
        case trace.Rewind():
            return call.tokens <= story.settled
        case trace.Commit():
            return len(call.tokens) <= story.settled - story.known
        case _:
            return True
