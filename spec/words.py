"""The words that rows may use besides states and events: actions, orderings and holders.

A row that names a word that is not here does not build, so a misspelt action cannot silently do
nothing.
"""

from __future__ import annotations

from typing import Final

ACTIONS: Final = {
    "create": "allocate physical frames",
    "unmap": "take frames out of an address range; the frames keep no bytes that anybody may read",
    "alias": "put frames of a span at the beginning of an address range, read-only",
    "remap": "put frames of a span, read-only, where a sequence has its own copies of them",
    "map": "put frames at the end of an address range",
    "copy_out": "copy the written tokens of a run of pages from the GPU to their host slots",
    "copy_in": "copy a run of pages from their host slots to the GPU",
    "scrub": "overwrite memory that nothing issued names any more, where the configuration asks",
    "release": "give physical frames back to the driver",
}
"""What the device does. Carried out in this order: what can be undone first, then copies, and only
then what destroys."""

ORDERINGS: Final = {
    "steps": "every step already launched on the sequence's stream, or the caller's `after` event",
    "stream": "whatever the caller launches on the sequence's stream from now on",
    "quiesce": "all work that was ever issued to the device has ended",
}
"""What a row's action waits for (`after`), or what waits for it (`before`)."""

HOLDERS: Final = {
    "steps": "each step in flight that names the range's sequence",
    "transfer": "the copy that reads or writes the range, from its issue to its end",
    "fence": "the event that the caller passed as `after`, from then until it has passed",
}
"""Who may hold a range. A row adds (`+name`) or releases (`-name`) the holds of one kind."""
