"""The sequence: what its caller may ask of it, and when.

Every event but the last three is the caller's (`settle` through its step). Bytes have a *life*
that ends when they are lost: a drop, a close, a failed copy. Whatever was issued in an earlier
life and completes late finds another number and changes nothing (reports B31, B34, B35).

One copy at a time moves a sequence's bytes. A call that needs the other direction's copy to have
ended waits for it once, so the guards below are what remains when that wait did not help.
"""

from typing import Final

from kvstate.spec.expr import count, flag
from kvstate.spec.table import Row, State, Table

steps: Final = count("steps", "steps in flight that name the sequence")
writing: Final = flag("writing", "a copy of it to the host is in flight")
loading: Final = flag("loading", "a copy of it to the GPU is in flight")
committing: Final = flag("committing", "full blocks become read-only")
life: Final = count("life", "the number of this life of its bytes")

CREATED: Final = State(0, "CREATED", "admitted, holds no memory", initial=True)
ACTIVE: Final = State(
    1, "ACTIVE", "has a range on the GPU; may be stepped", place="gpu", readable=True, writable=True
)
SUSPENDED: Final = State(2, "SUSPENDED", "its bytes are on the host, or on the way", place="host")
DROPPED: Final = State(3, "DROPPED", "its bytes are gone; it can be resumed and filled again")
CLOSING: Final = State(4, "CLOSING", "closed, but a step in flight still names its row")
CLOSED: Final = State(5, "CLOSED", "gone; its row may be used again", terminal=True)

_ends = (life.set(life + 1),)

SEQUENCE: Final = Table(
    "sequence",
    "what a caller may ask of a sequence",
    owner="the manager, one byte a row",
    variables=(steps, writing, loading, committing, life),
    states=(CREATED, ACTIVE, SUSPENDED, DROPPED, CLOSING, CLOSED),
    rows=(
        Row("resume", CREATED, ACTIVE, "it gets a range: a parked one if one fits"),
        Row("resume", DROPPED, ACTIVE, "it gets a range, and is computed again from the start"),
        Row("resume", SUSPENDED, ACTIVE, "it gets a range and its bytes are copied back",
            guard=~writing),
        Row("fork", ACTIVE, ACTIVE, "another sequence begins with all that it has",
            guard=~loading),
        Row("remap", ACTIVE, ACTIVE, "memory is short, and a span has what it has copies of",
            guard=~loading),
        Row("grow", ACTIVE, ACTIVE, "capacity is mapped and charged"),
        Row("shrink", ACTIVE, ACTIVE, "capacity that holds no tokens is given back"),
        Row("rewind", ACTIVE, ACTIVE, "tokens are taken back; the blocks become writable",
            guard=(steps == 0) & ~loading),
        Row("move", ACTIVE, ACTIVE, "a rewind goes into memory that others map too",
            guard=(steps == 0) & ~loading),
        Row("step", ACTIVE, ACTIVE, "the next tokens of a batch get room and positions"),
        Row("settle", ACTIVE, ACTIVE, "a step is done: its accepted tokens are really there",
            guard=~loading),
        Row("settle", SUSPENDED, SUSPENDED, "the write-out came after the step and has its tokens"),
        Row("commit", ACTIVE, ACTIVE, "the tokens of written positions are named",
            guard=committing & ~loading),
        Row("commit", SUSPENDED, SUSPENDED, "a late step's tokens are named on the host",
            guard=committing),
        Row("stop_committing", CREATED, CREATED, "its blocks stay writable and private",
            guard=committing, effect=(committing.set(0),)),
        Row("stop_committing", ACTIVE, ACTIVE, "blocks from here on stay writable and private",
            guard=committing, effect=(committing.set(0),)),
        Row("stop_committing", SUSPENDED, SUSPENDED, "blocks from here on stay writable",
            guard=committing, effect=(committing.set(0),)),
        Row("stop_committing", DROPPED, DROPPED, "its blocks stay writable and private",
            guard=committing, effect=(committing.set(0),)),
        Row("suspend", ACTIVE, SUSPENDED, "the GPU memory is wanted for another sequence",
            guard=~loading),
        Row("drop", ACTIVE, DROPPED, "its bytes are given up at once", effect=_ends),
        Row("drop", SUSPENDED, DROPPED, "its host room is given up", effect=_ends),
        *(Row("close", state, CLOSED, "nothing in flight names it", guard=steps == 0, effect=_ends)
          for state in (CREATED, ACTIVE, SUSPENDED, DROPPED)),
        *(Row("close", state, CLOSING, "its row must outlive the steps in flight",
              guard=steps > 0, effect=_ends)
          for state in (ACTIVE, SUSPENDED, DROPPED)),
        # Completions.
        Row("leave", CLOSING, CLOSED, "the step being settled is the last that names its row",
            guard=steps == 1),
        Row("lose", SUSPENDED, DROPPED, "the copy to the host failed: the bytes are gone",
            guard=writing, effect=_ends),
        Row("unload", ACTIVE, SUSPENDED, "the copy to the GPU failed; the host has the bytes",
            guard=loading, effect=_ends),
        Row("miss", ACTIVE, DROPPED, "the copy of a hit failed: it must compute what it was given",
            guard=loading, effect=_ends),
    ),
)  # fmt: skip
