"""What must be found: the blocks that were committed, until their loss was told with a reason.

The index says what it has; whether it has all that it should have, it cannot say. This is told what
callers committed and what the manager gave up, and asks by the public look-up for all the rest. So
reuse that stops in silence fails a campaign: a backup that is not made again, an heir that has no
bytes, a close that keeps nothing, a look-up that finds nothing.

A block is not asked for while it cannot be had for a while: a copy is on its way, or a sequence
that has it is suspended and no running one has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from attrs import frozen

from kvstate.blocks import Lost
from kvstate.campaign.model import Ids, Library, Story
from kvstate.keys import ID_BYTES


@frozen
class Witness:
    """How a block can be asked for: by the prompt that its sequence had said when it was full."""

    story: Story
    tokens: Ids


Ask = Callable[[Story, Ids], int]
"""How many tokens a newcomer like the story, with this prompt, would have from others."""


class Kept:
    """Committed blocks, by what the library calls them."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.witnesses: dict[int, Witness] = {}
        self.roots: dict[bytes, object] = {}
        """What the library has the blocks of a tenant below, by the name the index has for it."""

    def commit(self, story: Story, before: int) -> None:
        """The story has entered blocks beyond the first `before`."""
        size = self.library.block_tokens
        for at, name in enumerate(story.path[before:], before + 1):
            self.witnesses[name] = Witness(story, story.tokens[: at * size])

    def lose(self, losses: Iterable[Lost]) -> None:
        """The manager says that these cannot be found any more."""
        size = self.library.block_tokens * ID_BYTES
        for lost in losses:
            above = self.roots.get(lost.tenant)
            name: int | None = None
            for key in lost.path:
                name = self.library.find(above, (key[:size], key[size:]))
                above = name
            if name is not None:
                self.witnesses.pop(name, None)

    def missing(self, stories: Iterable[Story], epoch: int, ask: Ask) -> Iterator[str]:
        """What should be found and is not, in words."""
        stories = [story for story in stories if story.epoch == epoch]
        running = {name for story in stories if story.phase == "ACTIVE" for name in story.path}
        away = {name for story in stories for name in story.path} - running
        for name, witness in self._longest():
            path = self.library.path(witness.story, witness.tokens)
            had = next((at for at, one in enumerate(path) if one in away), len(path))
            wanted = had * self.library.block_tokens
            found = ask(witness.story, witness.tokens[:wanted]) if wanted else 0
            if found < wanted:
                yield f"{wanted} tokens were committed and not given up, {found} are found ({name})"

    def _longest(self) -> Iterator[tuple[int, Witness]]:
        """Blocks that have no other behind them."""
        parents = {self.library.parents.get(name) for name in self.witnesses}
        return ((n, one) for n, one in self.witnesses.items() if n not in parents)
