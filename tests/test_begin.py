"""How sequences begin: forks, blocks of which only the first tokens are a hit, what blocks depend
on besides tokens; and copies that go to the host before anybody leaves."""

from __future__ import annotations

import numpy as np
import pytest

from kvstate import Manager, Sequence
from kvstate.errors import (
    ArgumentError,
    ArgumentTypeError,
    IllegalTransition,
    OutOfFrames,
    OutOfRows,
)
from kvstate.gpu import HostDevice
from kvstate.spec.page import PAGE
from kvstate.view import view
from tests.conftest import Open
from tests.test_reuse import PROMPT, go_on, said, wrong

LONG = [*PROMPT, 5, 3, 5, 8, 9]
"""Six blocks and a token: three frames and a token."""


def pages(seq: Sequence) -> list[str]:
    """The states of a sequence's pages that have any."""
    return [PAGE.states[code].name for code in seq.pages.states if code]


# Forks.


def test_a_fork_has_all_that_its_parent_has(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=16)
    parent = said(kv, LONG)
    children = [parent.fork() for _ in range(3)]
    assert all(child.shared_tokens == 12 for child in children)
    assert kv.stats().frame_charges == {"sequence": 4 + 3}
    kv.poll()
    for child in children:
        assert (child.length_tokens, child.committed_tokens, child.matched_tokens) == (13, 13, 0)
        assert wrong(kv, child, LONG) == 0
    for at, child in enumerate(children):
        go_on(kv, child, [*LONG, at, at])
    parent.close()
    for at, child in enumerate(children):
        assert wrong(kv, child, [*LONG, at, at]) == 0


def test_a_fork_of_tokens_that_nobody_has_named(open_manager: Open) -> None:
    """Nothing is in the index: all of it is copied."""
    kv = open_manager(slots=0, frames=12)
    parent = said(kv, LONG, commit=False)
    child = parent.fork(14)
    kv.poll()
    assert (child.length_tokens, child.committed_tokens, child.shared_tokens) == (13, 0, 0)
    assert wrong(kv, child, LONG) == 0
    parent.rewind(0)
    go_on(kv, parent, [9] * 13)
    assert wrong(kv, child, LONG) == 0


def test_a_fork_of_a_loser_has_its_bytes_and_not_the_winners(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=12, spans="off")
    first, second = kv.create(max_tokens=16), kv.create(max_tokens=16)
    for seq in (first, second):
        seq.resume()
        go_on(kv, seq, PROMPT)
    assert pages(second)[:4] == ["PRIVATE"] * 4
    first.rewind(0)
    go_on(kv, first, [7] * 8)
    child = second.fork()
    kv.poll()
    assert wrong(kv, child, PROMPT) == 0


def test_a_fork_that_does_not_fit_changes_nothing(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=4, max_sequences=2, spans="off")
    parent = said(kv, PROMPT)
    parent.resize(16)
    before = view(kv)
    with pytest.raises(OutOfFrames):
        parent.fork()
    assert view(kv).sequences == before.sequences
    assert view(kv).ranges == before.ranges
    assert set(view(kv).free_rows) == set(before.free_rows)
    other = kv.create(max_tokens=4)
    with pytest.raises(OutOfRows):
        parent.fork()
    with pytest.raises(ArgumentError, match="7 tokens is not from 8 to 16"):
        parent.fork(7)
    with pytest.raises(IllegalTransition, match="fork is illegal in state CREATED"):
        other.fork()


def test_a_fork_whose_copy_fails_is_dropped(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device, slots=0)
    parent = said(kv, LONG)
    device.fail_next("complete")
    child = parent.fork()
    kv.poll()
    assert (child.state_name, child.length_tokens) == ("DROPPED", 0)
    child.resume()
    kv.poll()
    assert child.matched_tokens == 12
    assert wrong(kv, parent, LONG) == 0


# Part of a block.


def test_the_first_tokens_of_a_block_are_copied(open_manager: Open) -> None:
    kv = open_manager(slots=0, block=4, partial_blocks=True)
    said(kv, PROMPT)
    other = kv.create([*PROMPT[:7], 9, 9])
    other.resume()
    kv.poll()
    assert (other.matched_tokens, other.committed_tokens, other.shared_tokens) == (7, 7, 4)
    assert pages(other)[:2] == ["ALIASED", "ACTIVE"]
    assert wrong(kv, other, PROMPT[:7]) == 0
    go_on(kv, other, [*PROMPT[:7], 9, 9])
    assert wrong(kv, other, [*PROMPT[:7], 9, 9]) == 0
    assert kv.probe_reuse([*PROMPT[:7], 9, 9]) == 8, "another block is known now"


def test_part_of_a_block_comes_from_the_host_and_is_held_there(open_manager: Open) -> None:
    device = HostDevice(streams="adversarial", seed=1)
    kv = open_manager(device, slots=4, block=4, partial_blocks=True)
    said(kv, PROMPT).close()
    kv.flight.quiesce()
    other = kv.create([*PROMPT[:6], 9])
    other.resume(device.stream())
    assert kv.stats().host_slots["STALE_HELD"] == 2
    hungry = said(kv, [8] * 16)
    hungry.suspend()
    assert kv.stats().done["quiesces"] == 2, "it waits for the copy that reads them"
    assert other.matched_tokens == 6
    assert wrong(kv, other, PROMPT[:6]) == 0


def test_the_block_that_shares_most_is_taken(open_manager: Open) -> None:
    kv = open_manager(block=4, slots=0, partial_blocks=True, frames=16)
    said(kv, [1, 2, 9, 9])
    said(kv, [1, 2, 3, 9])
    assert kv.probe_reuse([1, 2, 3, 4, 5]) == 3
    assert kv.probe_reuse([1, 2]) == 1, "its last token is computed"


# What blocks depend on.


def test_adapters_and_extra_keys_keep_prefixes_apart(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, PROMPT, adapter=1)
    said(kv, PROMPT, extra_keys={1: b"cat"})
    assert kv.probe_reuse([*PROMPT, 0]) == 2, "the image is in its second block"
    assert kv.probe_reuse([*PROMPT, 0], adapter=1) == 8
    assert kv.probe_reuse([*PROMPT, 0], adapter="1") == 0
    assert kv.probe_reuse([*PROMPT, 0], extra_keys={1: b"cat"}) == 8
    assert kv.probe_reuse([*PROMPT, 0], extra_keys={1: (b"c", b"at")}) == 2
    with pytest.raises(ArgumentTypeError, match=r"extra_keys\[0\] is 'cat', a str: bytes are"):
        kv.create(PROMPT, 16, extra_keys={0: "cat"})  # type: ignore[dict-item]


def test_extra_keys_survive_a_rewind_and_a_drop(open_manager: Open) -> None:
    kv = open_manager()
    seq = said(kv, PROMPT, extra_keys={1: b"cat"})
    seq.rewind(3)
    go_on(kv, seq, PROMPT)
    assert kv.probe_reuse([*PROMPT, 0], extra_keys={1: b"cat"}) == 8
    seq.drop()
    seq.resume()
    go_on(kv, seq, PROMPT)
    assert kv.probe_reuse([*PROMPT, 0], extra_keys={1: b"cat"}) == 8
    assert kv.probe_reuse([*PROMPT, 0]) == 2


def test_clear_reuse_forgets_every_tier(open_manager: Open) -> None:
    """After it nothing that was written before is found: on the host, in spans, or with whoever
    runs."""
    kv = open_manager(frames=16, spans="all")
    said(kv, PROMPT).close()
    kv.poll()
    runs, waits = said(kv, [4] * 8), kv.create([*PROMPT, 1], 16)
    kv.clear_reuse()
    assert kv.probe_reuse([*PROMPT, 0]) == kv.probe_reuse([4] * 9) == 0
    assert "registry" not in kv.stats().frame_charges
    assert kv.stats().host_charges == {}
    waits.resume()
    assert waits.matched_tokens == 0
    go_on(kv, runs, [*([4] * 8), 5, 5])
    runs.close()
    assert kv.stats().host_charges == {}, "what is of the old weights is not kept"
    go_on(kv, waits, PROMPT)
    assert kv.probe_reuse([*PROMPT, 0]) == 8


def test_a_sequence_that_is_dropped_after_a_clear_is_of_the_new_weights(
    open_manager: Open,
) -> None:
    kv = open_manager()
    old, stale = said(kv, PROMPT), said(kv, PROMPT[:4])
    kv.clear_reuse()
    old.drop()
    old.resume()
    assert old.matched_tokens == 0, "the other one has it, of the old weights"
    go_on(kv, old, PROMPT)
    assert kv.probe_reuse([*PROMPT, 0]) == 8
    assert wrong(kv, stale, PROMPT[:4]) == 0


# Copies on the host before anybody leaves.


def mirrored(open_manager: Open, **changes: object) -> tuple[Manager, Sequence]:
    """A running sequence whose committed blocks are on the host too."""
    kv = open_manager(write_through="on_commit", **changes)
    seq = said(kv, PROMPT)
    kv.poll()
    kv.poll()
    return kv, seq


def test_freeing_copies_nothing_that_was_copied_as_it_was_committed(open_manager: Open) -> None:
    kv, seq = mirrored(open_manager)
    assert kv.stats().host_slots["MIRROR"] == 4
    moved = kv.stats().done["host_bytes_moved"]
    seq.close()
    assert kv.stats().done["host_bytes_moved"] == moved
    assert kv.stats().host_slots["STALE"] == 4
    again = kv.create([*PROMPT, 0], 16)
    again.resume()
    kv.poll()
    assert again.matched_tokens == 8
    assert wrong(kv, again, PROMPT) == 0


def test_copies_of_a_step_are_one(open_manager: Open) -> None:
    kv = open_manager(write_through="on_commit", frames=16)
    seqs = [said(kv, [at] * 3) for at in range(4)]
    kv.poll()
    copies = kv.device.calls["copy"]
    kv.settle(kv.step(kv.batch(seqs)))
    kv.commit_each(kv.batch(seqs), [9] * 4)
    kv.poll()
    assert kv.device.calls["copy"] == copies + 1
    assert len(kv.flight.transfers) <= 1


def test_suspend_takes_the_copies_that_are_there(open_manager: Open) -> None:
    kv, seq = mirrored(open_manager)
    go_on(kv, seq, [*PROMPT, 7, 7, 7])
    kv.poll()
    moved = kv.stats().done["host_bytes_moved"]
    seq.suspend()
    assert kv.stats().done["host_bytes_moved"] - moved == kv.geometry.row_bytes
    assert kv.stats().host_slots == {"FREE": 10, "HELD": 5, "COMING": 1}
    seq.resume()
    kv.poll()
    assert wrong(kv, seq, [*PROMPT, 7, 7, 7]) == 0


def test_a_copy_that_fails_leaves_nothing_that_can_be_found(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device, write_through="on_commit")
    seq = said(kv, PROMPT)
    device.fail_next("complete")
    kv.poll()
    assert "MIRROR" not in kv.stats().host_slots
    seq.drop()
    assert kv.probe_reuse([*PROMPT, 0]) == 0


@pytest.mark.parametrize("heir", [True, False], ids=["of heirs", "of strangers"])
def test_blocks_of_one_copy_need_not_be_a_chain(open_manager: Open, heir: bool) -> None:
    """They are of several that have nothing in common, or of one that became another's heir after
    it had gone on. Nothing of a failed copy can be found, in whatever order they came."""
    device = HostDevice()
    kv = open_manager(device, write_through="on_commit", frames=16, spans="off")
    seqs = [kv.create(max_tokens=16) for _ in range(2)]
    for seq in seqs:
        seq.resume()
    if heir:
        go_on(kv, seqs[0], PROMPT[:4])
        go_on(kv, seqs[1], PROMPT[:6])
        go_on(kv, seqs[1], PROMPT)
        seqs.pop(0).drop()
    else:
        go_on(kv, seqs[0], [7] * 3)
        go_on(kv, seqs[1], [8] * 3)
        kv.poll()
        kv.settle(kv.step(kv.batch(seqs)))
        kv.commit_each(kv.batch(seqs), [9, 9])
    device.fail_next("complete")
    kv.step(kv.batch(seqs))
    for seq in seqs:
        seq.close()
    kv.poll()
    kv.poll()
    kept = 0 if heir else 2
    assert len(kv.reuse.index) == kept
    assert kv.stats().host_slots == {"FREE": 16 - kept} | ({"STALE": kept} if kept else {})


def test_a_host_without_room_leaves_a_whole_prefix(open_manager: Open) -> None:
    kv, seq = mirrored(open_manager, slots=3)
    assert kv.stats().host_slots == {"MIRROR": 3}
    seq.drop()
    assert kv.probe_reuse([*PROMPT, 0]) == 6


def test_what_was_copied_is_the_first_to_give_way_and_loses_nothing(open_manager: Open) -> None:
    kv, seq = mirrored(open_manager, slots=4, frames=12)
    other = said(kv, [8] * 5, commit=False)
    other.suspend()
    kv.poll()
    assert wrong(kv, seq, PROMPT) == 0
    assert kv.probe_reuse([*PROMPT, 0]) == 8


def test_a_newcomer_becomes_canonical_where_only_the_host_had_it(open_manager: Open) -> None:
    """Report S07, at both seams."""
    kv = open_manager()
    said(kv, PROMPT).close()
    kv.poll()
    found = kv.create([*PROMPT, 0], 16)
    found.resume()
    kv.poll()
    assert pages(found)[:4] == ["COMMITTED"] * 4
    assert kv.stats().host_slots["MIRROR"] == 4
    found.close()
    kv.poll()
    computed = kv.create(max_tokens=16)
    computed.resume()
    go_on(kv, computed, PROMPT)
    assert pages(computed)[:4] == ["COMMITTED"] * 4
    assert kv.stats().done["promotions"] == 8
    assert np.all(np.array(list(kv.host.cells.states)) == 0), "those were another's bytes"


# Room that is promised, and whether a prefix is mapped or copied.


def test_a_promise_is_kept_whatever_others_ask_for(open_manager: Open) -> None:
    kv = open_manager(frames=8, slots=0)
    promised = kv.create(max_tokens=16, reserve=True)
    promised.resume()
    greedy = kv.create(max_tokens=16)
    greedy.resume()
    greedy.resize(16)
    third = kv.create(max_tokens=16)
    with pytest.raises(OutOfFrames, match="refused by the reserve"):
        third.resume()
    greedy.close()
    third.resume()
    third.resize(16)
    promised.resize(16)
    assert kv.stats().refusals == {"reserve": 1}


def test_two_that_would_wait_for_each_other_are_not_both_let_in(open_manager: Open) -> None:
    kv = open_manager(frames=7, slots=0)
    first, second = (kv.create(max_tokens=16, reserve=True) for _ in range(2))
    first.resume()
    with pytest.raises(OutOfFrames, match="needs 4 frames"):
        second.resume()
    first.resize(16)
    first.close()
    second.resume()
    second.resize(16)


def test_who_begins_alone_is_promised_the_protected_share_too(open_manager: Open) -> None:
    """A span that is left keeps three of eight frames while sequences compete, and none of them
    from the only one."""
    kv = open_manager(frames=8, slots=0, protected_share=0.5, max_tokens=32, spans="all")
    said(kv, LONG[:12]).close()
    kv.poll()
    assert (kv.gpu.in_spans, kv.fits(32), kv.fits(20)) == (3, 1, 1)
    promised = kv.create(max_tokens=32, reserve=True)
    promised.resume()
    other = kv.create([*LONG[:12], 0], 16)
    with pytest.raises(OutOfFrames, match="refused by the reserve"):
        other.resume()
    promised.resize(32)
    assert kv.gpu.in_spans == 0


def test_how_many_of_a_shape_fit(open_manager: Open) -> None:
    kv = open_manager(frames=16, slots=0)
    assert (kv.fits(16), kv.fits(4), kv.fits(16, shared_tokens=12)) == (4, 16, 16)
    said(kv, LONG)
    assert kv.fits(16, shared_tokens=12) == 12
    for at in range(7):
        seq = kv.create([*LONG[:12], at], 16)
        seq.resume()
        seq.resize(16)
    assert kv.fits(16, shared_tokens=12) == 5


def test_a_prefix_is_copied_while_memory_is_plenty(open_manager: Open) -> None:
    kv = open_manager(frames=16, slots=0, copy_share=0.5)
    said(kv, LONG)
    plenty = kv.create([*LONG[:12], 1], 16)
    plenty.resume()
    kv.poll()
    assert (plenty.matched_tokens, plenty.shared_tokens) == (12, 0)
    scarce = kv.create([*LONG[:12], 2], 16)
    scarce.resume()
    assert (scarce.matched_tokens, scarce.shared_tokens) == (12, 12)
    assert wrong(kv, plenty, LONG[:12]) == wrong(kv, scarce, LONG[:12]) == 0


def test_starts_begin_without_bytes_of_their_own(open_manager: Open) -> None:
    kv = open_manager(spans="off")
    said(kv, PROMPT)
    found = kv.create([*PROMPT, 0], 16)
    found.resume()
    kv.poll()
    found.suspend()
    found.resume()
    assert found.loading or found.length_tokens == 8
    assert (kv.stats().done["starts"], kv.stats().done["resumes"]) == (2, 1)
