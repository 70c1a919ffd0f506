"""Progress: a fair engine takes over from a state that a campaign has reached, and must finish.

A refusal may be right, every one of them, and still nobody gets on: law 12 asks each refusal
whether there was room, and cannot see that the same two sequences push each other out for ever, or
that one was let in that nothing can finish. So an engine that does all it can plays on from there:
it settles what is in flight, serves the oldest first, makes room by suspending the youngest, or
dropping it if the host is full, and closes whoever has all its tokens. The only one that runs has
to go too if it is refused: what begins alone maps nothing that it cannot be finished beside. No
device call is told to fail any more.

**The bound.** Of n sequences each computes its tokens in at most p parts. In a turn in which
anybody runs, the oldest of them computes one, since only the youngest make room. One that runs
while an older one waits may have to begin again when that one comes, once; after that it comes when
all older ones run or are done. A copy that was told to fail before may cost each of them a turn
more, and so may a beginning that others have made too long. That is n (2 p + 2) turns, of at most
6 n + 2 calls each: a poll, a settle, and for each sequence a resume, a step, a suspend, a drop, a
commit and a close. An engine that could do nothing at all in a few turns stops before: its calls
would be the same again.

Rejected: to play the beginning of an episode again on another device, and to go on there. The same
states are reached by episodes that end where something was refused, for nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvstate import trace
from kvstate.campaign.legal import may
from kvstate.campaign.model import Broken
from kvstate.campaign.player import STREAMS, Played, Player
from kvstate.spec.facts import FairRun, Unfinished
from kvstate.spec.laws import laws
from kvstate.spec.sequence import ACTIVE

PARTS: Final = 2
"""Steps in which a sequence computes all its tokens."""
IDLE_TURNS: Final = 3
"""Turns without any change after which the engine stops."""
MOST_RESUMES: Final = 3
"""How often one sequence may be resumed before anybody computes a token. More than one is right
where a copy fails, or where room must be made for an older one."""


def finish_fairly(player: Player) -> None:
    """Let a fair engine finish all sequences. Raises Broken if it does not get there.

    Nothing is asked of a poisoned manager, nor of one with a copy that never ends.
    """
    if player.kv.actor.fault is not None or player.device.hung:
        return
    run, violations = Fair(player).run(), list[str]()
    for law in laws("fair"):
        player.laws[law.name] += 1
        violations += law.violations(run)
    if violations:
        raise Broken(violations[0].partition(":")[0], "; ".join(violations))


def most_calls(sequences: int, steps: int = 0) -> int:
    """How many calls a fair engine may need for that many sequences, and steps in flight."""
    turns = sequences * (2 * PARTS + 2) + IDLE_TURNS
    return steps + turns * (6 * sequences + 2)


class Fair:
    """The engine. Its calls go through the player, so that everything is checked as ever."""

    def __init__(self, player: Player) -> None:
        self.player = player
        self.most_calls = most_calls(len(player.seqs), len(player.steps))
        self.calls = self.idle = 0
        self.refused: dict[int, Counter[str]] = {name: Counter() for name in player.seqs}
        self.resumed: Counter[int] = Counter()
        """Resumes since anybody has computed a token."""

    def run(self) -> FairRun:
        """Take turns until all is done, or nothing helps."""
        for name in list(self.player.steps):
            self._do(trace.Settle(step=name))
        while self.player.seqs and self._may_go_on():
            before = self._changes()
            self._turn()
            self.idle = 0 if self._changes() != before else self.idle + 1
        return FairRun(
            calls=self.calls,
            most_calls=self.most_calls,
            left=tuple(self._unfinished(name, one) for name, one in self.player.seqs.items()),
            resumed={self.player.seqs[name].seq.uid: n for name, n in self.resumed.items()},
            most_resumes=MOST_RESUMES,
        )

    def _may_go_on(self) -> bool:
        circling = max(self.resumed.values(), default=0) > MOST_RESUMES
        return self.calls < self.most_calls and self.idle < IDLE_TURNS and not circling

    def _unfinished(self, name: int, one: Played) -> Unfinished:
        story = one.story
        return Unfinished(one.seq.uid, story.settled, story.max_tokens, self.refused[name])

    def _changes(self) -> object:
        """What is another one whenever a turn has done anything."""
        stories = {name: one.story for name, one in self.player.seqs.items()}
        return {name: (one.life, one.phase, one.settled) for name, one in stories.items()}

    def _by_age(self) -> list[int]:
        seqs = self.player.seqs
        return sorted(seqs, key=lambda name: seqs[name].seq.uid)

    def _runs(self, name: int) -> bool:
        return self.player.seqs[name].seq.state == ACTIVE.code

    def _turn(self) -> None:
        self._do(trace.Poll())
        self._close_finished()
        for name in self._by_age():
            if not self._runs(name) and not self._resume(name):
                break
        running = self._step([name for name in self._by_age() if self._runs(name)])
        if running:
            self._settle(running)
            self._close_finished()

    def _resume(self, name: int) -> bool:
        if self._do(trace.Resume(seq=name, stream=name % STREAMS), name):
            return False
        self.resumed[name] += 1
        return True

    def _step(self, running: list[int]) -> list[int]:
        """One step of all that can run beside each other; those."""
        while running:
            tokens = [self._part(name) for name in running]
            step = trace.Step(step=0, seqs=[*running], tokens=tokens)
            if not self._do(step, running[-1]):
                break
            self._preempt(running.pop())
        return running

    def _part(self, name: int) -> int:
        seq = self.player.seqs[name].seq
        return min(-(-seq.max_tokens // PARTS), seq.max_tokens - seq.scheduled_tokens)

    def _preempt(self, name: int) -> None:
        if self._do(trace.Suspend(seq=name), name) and self._runs(name):
            self._do(trace.Drop(seq=name))

    def _settle(self, running: list[int]) -> None:
        stories = [self.player.seqs[name].story for name in running]
        before = [(story.life, story.settled) for story in stories]
        self._do(trace.Settle(step=0))
        if any(
            s.life == was[0] and s.settled > was[1] for s, was in zip(stories, before, strict=True)
        ):
            self.resumed.clear()
        for name in running:
            self._commit(name)

    def _commit(self, name: int) -> None:
        """Name what was computed: the prompt, and then always the same, so that many share it."""
        played = self.player.seqs[name]
        story = played.story
        if may(played.seq, "commit") and story.known < story.settled:
            ids = story.prompt[story.known : story.settled].tolist()
            ids += [0] * (story.settled - story.known - len(ids))
            self._do(trace.Commit(seq=name, tokens=ids))

    def _close_finished(self) -> None:
        for name in self._by_age():
            story = self.player.seqs[name].story
            if self._runs(name) and story.settled == story.max_tokens:
                self._do(trace.Close(seq=name))
                self.resumed.pop(name, None)

    def _do(self, call: trace.AnyCall, name: int | None = None) -> bool:
        """Make a call; whether it was refused to that sequence."""
        before = self.player.refused.copy()
        error = self.player.apply(call).error
        self.calls += 1
        if error is not None and name is not None:
            places = self.player.refused - before
            self.refused[name].update(places or [error])
        return error is not None
