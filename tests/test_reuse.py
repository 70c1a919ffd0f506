"""What sequences share: found by equal tokens and tenant, kept while somebody has it, held while it
is copied, and gone for good when its last copy is."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from attrs import evolve

from kvstate import Manager, Sequence
from kvstate.device import SEGMENT, ByteDevice
from kvstate.gpu import HostDevice, NullDevice
from kvstate.spec.facts import BlockFact, StepFact, View
from kvstate.spec.laws import laws
from kvstate.spec.page import COMMITTED
from kvstate.spec.sequence import DROPPED
from kvstate.view import view
from tests.conftest import Open

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
"""Four blocks of two tokens."""


def said(kv: Manager, tokens: list[int], **how: object) -> Sequence:
    """A running sequence that has written and named these tokens."""
    seq = kv.create(tokens, 16, **how)  # type: ignore[arg-type]
    seq.resume()
    go_on(kv, seq, tokens)
    return seq


def go_on(kv: Manager, seq: Sequence, tokens: list[int]) -> None:
    """The rest of these tokens, each written with its own id as the writer's key."""
    start = seq.length_tokens
    step = kv.step(kv.batch([seq]), len(tokens) - start)
    device, row = cast("ByteDevice", kv.device), kv.geometry.row_bytes
    if device.memory is not None and seq.base is not None:
        device.set_rows(row)
        rows = [(seq.base + at * row, at, 1, tokens[at], -1) for at in range(start, len(tokens))]
        device.write(None, np.array(rows, SEGMENT))
        device.synchronize(None)
    kv.settle(step)
    if seq.committing:
        seq.commit(tokens[start:])


def wrong(kv: Manager, seq: Sequence, tokens: list[int]) -> int:
    """How many of a sequence's tokens do not have the bytes of these ids."""
    device, row = cast("ByteDevice", kv.device), kv.geometry.row_bytes
    assert seq.base is not None
    rows = [(seq.base + at * row, at, 1, token, -1) for at, token in enumerate(tokens)]
    check = device.verify(None, np.array(rows, SEGMENT))
    device.synchronize(None)
    return sum(check.wrong)


def test_a_closed_sequence_is_found_on_the_host(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, PROMPT).close()
    assert kv.probe_reuse(PROMPT) == 0, "the copy has not ended"
    kv.poll()
    again = kv.create(PROMPT, 16)
    assert (again.matched_tokens, again.length_tokens) == (6, 0)
    again.resume()
    assert (again.matched_tokens, again.length_tokens, again.committed_tokens) == (6, 6, 6)
    kv.poll()
    assert wrong(kv, again, PROMPT[:6]) == 0
    go_on(kv, again, PROMPT)
    assert wrong(kv, again, PROMPT) == 0


def test_a_running_sequence_is_found_where_it_is(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    first = said(kv, PROMPT)
    second = kv.create([*PROMPT, 7], 16)
    second.resume()
    assert second.matched_tokens == 8
    first.close()
    kv.poll()
    assert wrong(kv, second, PROMPT) == 0
    assert kv.probe_reuse([*PROMPT, 7]) == 8, "the second has inherited it"


def test_the_last_known_token_is_always_computed(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, PROMPT)
    assert [kv.probe_reuse(PROMPT[:length]) for length in range(9)] == [0, 0, 0, 2, 2, 4, 4, 6, 6]
    assert kv.probe_reuse([*PROMPT, 1]) == 8


@pytest.mark.parametrize("other", [[9, 1, 4, 1, 5], [3, 1, 4, 4, 5], [3, 1, 1, 4, 5], [3, 4, 1, 1]])
def test_only_equal_tokens_from_the_beginning_are_found(
    open_manager: Open, other: list[int]
) -> None:
    kv = open_manager()
    said(kv, PROMPT)
    same = next(at for at, (a, b) in enumerate(zip(PROMPT, other, strict=False)) if a != b)
    assert kv.probe_reuse(other) == same // 2 * 2


def test_nothing_is_found_across_tenants(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, PROMPT, salt=b"one").close()
    kv.poll()
    for salt in (b"", b"two", b"on", b"one\0"):
        assert kv.probe_reuse(PROMPT, salt=salt) == 0
    assert kv.probe_reuse(PROMPT, salt=b"one") == 6


def test_a_sequence_that_does_not_commit_finds_and_is_not_found(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, PROMPT, commit=False).close()
    kv.poll()
    assert kv.probe_reuse(PROMPT) == 0
    said(kv, PROMPT)
    taker = kv.create(PROMPT, 16, commit=False)
    taker.resume()
    assert taker.matched_tokens == 6


def test_switched_off_nothing_is_kept_and_nothing_found(open_manager: Open) -> None:
    kv = open_manager(write_through="off")
    said(kv, PROMPT).close()
    said(kv, PROMPT)
    kv.poll()
    assert kv.probe_reuse(PROMPT) == 0
    assert kv.stats().done.get("kept_blocks", 0) == 0


def test_a_failed_write_out_leaves_nothing_that_is_found(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = said(kv, PROMPT)
    device.fail_next("complete")
    seq.close()
    kv.poll()
    assert kv.probe_reuse(PROMPT) == 0
    assert kv.host.free == kv.host.capacity


def test_a_close_succeeds_though_nothing_can_be_kept(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    seq = said(kv, PROMPT)
    device.fail_next("copy")
    seq.close()
    assert not kv.sequences
    assert kv.probe_reuse(PROMPT) == 0


def test_a_failed_hit_drops_the_newcomer_who_may_try_again(open_manager: Open) -> None:
    device = HostDevice()
    kv = open_manager(device)
    said(kv, PROMPT).close()
    kv.poll()
    again = kv.create(PROMPT, 16)
    device.fail_next("complete")
    again.resume()
    kv.poll()
    assert (again.state, again.length_tokens, again.matched_tokens) == (DROPPED.code, 0, 0)
    again.resume()
    kv.poll()
    assert (again.length_tokens, wrong(kv, again, PROMPT[:6])) == (6, 0)


def test_a_dropped_sequence_finds_what_it_had_if_somebody_still_has_it(open_manager: Open) -> None:
    kv = open_manager()
    seq, other = said(kv, PROMPT), said(kv, PROMPT[:5])
    seq.drop()
    assert other.committed_tokens == 5
    seq.resume()
    assert seq.matched_tokens == 4
    kv.poll()
    assert wrong(kv, seq, PROMPT[:4]) == 0


def test_a_rewind_takes_blocks_out_of_the_index(open_manager: Open) -> None:
    kv = open_manager()
    seq = said(kv, PROMPT)
    seq.rewind(3)
    assert kv.probe_reuse([*PROMPT, 1]) == 2
    go_on(kv, seq, [3, 1, 4, 4, 4, 4])
    assert kv.probe_reuse([3, 1, 4, 4, 4, 4, 0]) == 6


def test_a_suspended_sequence_leaves_its_own_host_copy(open_manager: Open) -> None:
    kv = open_manager()
    seq = said(kv, PROMPT)
    seq.suspend()
    kv.poll()
    copies = kv.device.calls["copy"]
    seq.close()
    assert kv.device.calls["copy"] == copies, "it is on the host already"
    assert kv.probe_reuse([*PROMPT, 0]) == 8


def test_room_is_made_by_evicting_the_least_recently_used_leaves_first(open_manager: Open) -> None:
    kv = open_manager(slots=8, max_sequences=4)
    for prompt in (PROMPT, [7] * 8):
        said(kv, prompt).close()
        kv.poll()
    assert kv.host.free == 0
    said(kv, [8] * 4).suspend()
    assert kv.probe_reuse([*PROMPT, 0]) == 4, "the last two blocks of the older one are gone"
    assert kv.probe_reuse([*[7] * 8, 0]) == 8


def test_the_canonical_page_is_inherited_by_the_first_in_line(open_manager: Open) -> None:
    kv = open_manager(spans="off")
    first, second, third = said(kv, PROMPT), said(kv, PROMPT), said(kv, PROMPT)
    owners = [{node.owner for node in kv.reuse.index}]
    for seq in (first, second):
        seq.drop()
        owners.append({node.owner for node in kv.reuse.index})
    assert owners == [{first}, {second}, {third}]
    third.drop()
    assert len(kv.reuse.index) == 0


def test_a_probe_changes_nothing(open_manager: Open) -> None:
    kv = open_manager()
    said(kv, PROMPT).close()
    kv.poll()
    ages = [node.used for node in kv.reuse.index]
    before, calls = view(kv), dict(kv.device.calls)
    assert kv.probe_reuse(PROMPT) == 6
    assert (view(kv), dict(kv.device.calls)) == (before, calls)
    assert [node.used for node in kv.reuse.index] == ages


def test_a_rewind_waits_for_who_copies_its_pages(open_manager: Open) -> None:
    device = HostDevice(streams="adversarial", seed=3)
    kv = open_manager(device, spans="off")
    seq = said(kv, PROMPT)
    device.quiesce([None])
    other = kv.create(PROMPT, 16)
    other.resume(device.stream())
    waits = device.calls["finish"]
    seq.rewind(0)
    assert device.calls["finish"] == waits + 1
    assert wrong(kv, other, PROMPT[:6]) == 0


def test_reuse_needs_no_bytes() -> None:
    """The null device: the books alone."""
    from tests.conftest import small

    with Manager(small(), NullDevice(), debug=True) as kv:
        said(kv, PROMPT).close()
        kv.poll()
        again = kv.create(PROMPT, 16)
        again.resume()
        assert again.matched_tokens == 6
        assert kv.stats().done["hit_blocks.host"] == 3


def law(number: int, seen: View) -> str:
    """What the laws of that number say of a view."""
    found = [one for one in laws("always") if one.number == number]
    return "\n".join(line for one in found for line in one.violations(seen))


def test_what_a_parent_leaves_while_a_fork_loads_stays_on_the_host(open_manager: Open) -> None:
    """A fork comes back from the host and its parent leaves: the copies that the host has stay to
    be found, since the fork's load may fail."""
    kv = open_manager(HostDevice(), spans="off", write_through="on_commit")
    parent = said(kv, PROMPT)
    said(kv, [7, 7], commit=False).close()
    kv.poll()
    assert kv.host.stale == 4, "its pages were copied out when the next step began"
    child = parent.fork()
    kv.poll()
    child.suspend()
    kv.poll()
    cast("HostDevice", kv.device).fail_next("complete")
    child.resume()
    parent.close()
    assert kv.host.stale == 4
    kv.poll()
    assert (child.state_name, kv.host.stale, kv.probe_reuse([*PROMPT, 0])) == ("SUSPENDED", 4, 8)
    child.resume()
    kv.poll()
    assert wrong(kv, child, PROMPT) == 0
    child.close()


def test_without_mirrors_nothing_is_copied_out_before_somebody_leaves(open_manager: Open) -> None:
    """Not even when another one's page becomes the canonical one."""
    kv = open_manager(spans="off")
    first, second = said(kv, PROMPT), kv.create(max_tokens=16)
    second.resume()
    go_on(kv, second, PROMPT)
    first.drop()
    kv.poll()
    assert second.pages.states.count(COMMITTED.code) == 4
    said(kv, [7, 7])
    assert kv.host.free == kv.host.capacity
    assert kv.reuse.index.uncopied is None, "no copy would ever take them"


def test_what_is_kept_last_is_given_up_last(open_manager: Open) -> None:
    kv = open_manager(spans="off", slots=8)
    first, second = said(kv, PROMPT), said(kv, [7, *PROMPT[1:]])
    second.close()
    first.close()
    kv.poll()
    said(kv, [6, 6]).close()
    assert kv.probe_reuse([*PROMPT, 0]) == 8
    assert kv.probe_reuse([7, *PROMPT[1:], 0]) == 6


def test_the_one_in_line_steps_out_when_it_leaves(open_manager: Open) -> None:
    kv = open_manager(spans="off", write_through="off")
    assert not kv.reuse.lines
    kv = open_manager(spans="off", slots=0)
    first, second = said(kv, PROMPT), said(kv, PROMPT)
    assert len(kv.reuse.lines) == 4
    second.rewind(4)
    assert len(kv.reuse.lines) == 2
    first.close()
    assert not kv.reuse.lines
    second.close()
    assert view(kv).index_faults == ()


def test_a_line_for_a_block_that_is_gone_is_noticed(open_manager: Open) -> None:
    kv = open_manager(spans="off", slots=0)
    first, second = said(kv, PROMPT), said(kv, PROMPT)
    node, line = next(iter(kv.reuse.lines.items()))
    second.close()
    first.close()
    assert not node.findable
    kv.reuse.lines[node] = line
    assert any("has a line of" in fault for fault in view(kv).index_faults)
    del kv.reuse.lines[node]


def test_each_law_of_sharing_says_what_is_broken(open_manager: Open) -> None:
    """Views of a sound manager, each with one thing made wrong."""
    kv = open_manager(HostDevice(streams="adversarial", seed=1))
    said(kv, PROMPT[:4], salt=b"a").close()
    kv.flight.quiesce()
    first = said(kv, PROMPT, salt=b"b")
    for prompt, salt in ((PROMPT, b"b"), ([*PROMPT[:4], 0], b"a")):
        kv.create(prompt, 16, salt=salt).resume()
    seen = view(kv)
    assert [law(number, seen) for number in (4, 5, 6, 7, 14, 21, 23)] == [""] * 7
    block = next(b for b in seen.blocks if b.owner == first.uid and b.ordinal == 1)
    stale = next(b for b in seen.blocks if b.slot is not None)

    def with_block(old: BlockFact, **changes: object) -> View:
        new = evolve(old, **changes)  # type: ignore[arg-type]
        return evolve(seen, blocks=tuple(new if b is old else b for b in seen.blocks))

    short = tuple(evolve(s, settled=3) if s.uid == first.uid else s for s in seen.sequences)
    writing = ((first.row, 3, 5),)
    step = StepFact(9, False, writing, (first.base or 0,), (first.life,), frozenset())
    vacant = tuple(evolve(s, pages=bytes(len(s.pages))) for s in seen.sequences)
    away = tuple(evolve(s, pages=b"\7" * len(s.pages)) for s in seen.sequences)
    for number, broken, says in (
        (14, evolve(seen, sequences=vacant), "knows block 0, whose page is VACANT"),
        (4, evolve(seen, sequences=short), "of sequence 2, which has 3 tokens"),
        (4, evolve(seen, steps=(step,)), "found while a step writes from 3 to 5"),
        (4, with_block(stale, landed=False), "has STALE_HELD, landed: False"),
        (5, with_block(block, owner=99), "a sequence that is gone"),
        (5, with_block(block, owner=None), "is committed and not in the index"),
        (21, with_block(block, slot=stale.slot), "on the GPU: True, on the host: STALE"),
        (5, evolve(seen, host_pages=bytes(len(seen.host_pages))), "its page 0"),
        (5, evolve(seen, index_faults=("it is upside down",)), "upside down"),
        (6, with_block(block, key=b"else"), "is another in the index"),
        (6, with_block(block, parent=None), "another before it"),
        (6, evolve(seen, blocks=()), "is not in the index"),
        (7, evolve(seen, readers={}), "the books say"),
        (7, evolve(seen, transfers=(), readers={}), "read by None"),
        (21, with_block(block, owner=99), "the one before it is not"),
        (21, evolve(with_block(block, slot=stale.slot), sequences=away), "on the host twice"),
        (21, with_block(stale, slot=None), "on the GPU: False, on the host: no slot"),
        (23, with_block(block, tenant=b"c"), "of tenant b'c'"),
    ):
        assert says in law(number, broken), (number, says)
