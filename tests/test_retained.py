"""Lazy retention: what a sequence leaves in its range can be hit until the memory is wanted."""

from __future__ import annotations

from typing import cast

import pytest
from attrs import evolve

from kvstate import Manager, Sequence
from kvstate.device import ByteDevice
from kvstate.errors import ConfigError
from kvstate.gpu import HostDevice
from kvstate.spec.range import RESERVED
from kvstate.spec.span_laws import retained_are_named
from kvstate.view import view
from tests.conftest import Open, small
from tests.test_reuse import PROMPT, go_on, said, wrong


def left(open_manager: Open, **changes: object) -> Manager:
    """A manager without a host tier in which somebody has said the prompt and left."""
    kv = open_manager(**({"retain": True, "slots": 0, "spans": "off"} | changes))
    said(kv, PROMPT).close()
    kv.poll()
    return kv


def begun(kv: Manager, tokens: list[int]) -> Sequence:
    """A running sequence with these tokens as its prompt."""
    seq = kv.create(tokens, 16)
    seq.resume()
    return seq


def hogging(kv: Manager, tokens: int) -> Sequence:
    """A running sequence with that much capacity."""
    seq = kv.create(max_tokens=tokens)
    seq.resume()
    kv.resize(seq, tokens)
    return seq


def parked(kv: Manager) -> int:
    """Blocks that were copied from parked memory."""
    return kv.counters["hit_blocks.parked"]


def test_what_is_left_is_found_and_copied_on_the_device(open_manager: Open) -> None:
    kv = left(open_manager)
    assert kv.stats().pages["RETAINED"] == 4
    assert kv.probe_reuse([*PROMPT, 0]) == 8
    seq = begun(kv, [*PROMPT, 0])
    kv.poll()
    assert (seq.matched_tokens, parked(kv), wrong(kv, seq, PROMPT)) == (8, 4, 0)
    assert kv.counters["host_bytes_moved"] == 0


def test_without_retention_nothing_is_left(open_manager: Open) -> None:
    assert left(open_manager, retain=False).probe_reuse([*PROMPT, 0]) == 0


def test_it_goes_when_the_memory_is_wanted_and_not_before(open_manager: Open) -> None:
    """Two frames are retained of eight. A newcomer that fits beside them leaves them alone; the one
    that does not adopts the range, or has it unmapped."""
    kv = left(open_manager)
    small_one = begun(kv, [7] * 3)
    assert kv.probe_reuse([*PROMPT, 0]) == 8
    kv.resize(small_one, 16)
    other = kv.create(max_tokens=16)
    other.resume()
    kv.resize(other, 8)
    assert kv.probe_reuse([*PROMPT, 0]) == 8, "two and four frames of eight"
    kv.resize(other, 12)
    assert kv.probe_reuse([*PROMPT, 0]) == 0
    assert "RETAINED" not in kv.stats().pages


def test_adopted_memory_is_nobodys_hit(open_manager: Open) -> None:
    kv = left(open_manager, frames=4)
    hogging(kv, 8)
    seq = begun(kv, [7, 7, 7])
    assert kv.counters["adoptions"] == 1
    assert kv.probe_reuse([*PROMPT, 0]) == 0
    go_on(kv, seq, [7, 7, 7])
    assert wrong(kv, seq, [7, 7, 7]) == 0


def test_the_range_that_is_read_is_not_the_one_that_is_adopted(open_manager: Open) -> None:
    """Two ranges retain the two turns of the budget; a hit on one of them adopts the other."""
    kv = left(open_manager, frames=4)
    said(kv, [7] * 8).close()
    for tokens, others in ((PROMPT, [7] * 8), ([7] * 8, PROMPT)):
        seq = begun(kv, [*tokens, 0])
        kv.poll()
        assert wrong(kv, seq, tokens) == 0
        assert kv.probe_reuse([*others, 0]) == 0
        kv.settle(kv.step(kv.batch([seq]), 0))
        seq.drop()
        said(kv, others).close()


def test_nobody_adopts_what_a_copy_reads(open_manager: Open) -> None:
    """A copy that has not run yet reads what is there when it runs."""
    device = HostDevice(streams="adversarial", seed=4)
    kv = left(open_manager, device=device, frames=6)
    reader = begun(kv, [*PROMPT, 0])
    assert kv.stats().ranges == {"RESERVED": 1, "FENCED": 1}
    hogging(kv, 8)
    assert kv.stats().ranges == {"RESERVED": 2, "FENCED": 1}
    assert kv.probe_reuse([*PROMPT, 0]) == 8
    kv.trim()
    assert wrong(kv, reader, PROMPT) == 0
    assert kv.stats().ranges == {"RESERVED": 2}


def test_who_has_a_copy_is_next(open_manager: Open) -> None:
    kv = left(open_manager, frames=8)
    reader = begun(kv, [*PROMPT, 0])
    kv.poll()
    hogging(kv, 16)
    hogging(kv, 4)
    assert kv.counters["hit_blocks.parked"] == 4
    assert kv.stats().pages.get("RETAINED", 0) == 0
    assert kv.probe_reuse([*PROMPT, 0]) == 8, "the reader's pages are canonical now"
    assert wrong(kv, reader, PROMPT) == 0


def test_both_tiers_have_it(open_manager: Open) -> None:
    """Copied to the host as it is left, so that it outlives the memory."""
    kv = left(open_manager, slots=16, frames=4)
    assert kv.stats().host_slots["MIRROR"] == 4
    hogging(kv, 16)
    assert kv.stats().host_slots["STALE"] == 4
    assert kv.probe_reuse([*PROMPT, 0]) == 8


def test_a_prefix_that_goes_takes_what_is_retained_behind_it(open_manager: Open) -> None:
    kv = open_manager(retain=True, slots=0, spans="off", frames=16)
    first, second = (kv.create(max_tokens=16) for _ in range(2))
    for seq, tokens in ((first, PROMPT[:4]), (second, PROMPT[:4])):
        seq.resume()
        go_on(kv, seq, tokens)
    go_on(kv, first, PROMPT)
    first.close()
    assert kv.probe_reuse([*PROMPT, 0]) == 8, "two blocks of the second, two retained"
    second.drop()
    assert kv.probe_reuse([*PROMPT, 0]) == 0
    assert "RETAINED" not in kv.stats().pages


def test_the_laws_notice(open_manager: Open) -> None:
    """Law 5: what is retained is what the index names, in memory that was left as it is."""
    kv = left(open_manager)
    seen, range_ = view(kv), kv.arena.ranges[1]
    (fact,) = seen.ranges
    assert list(retained_are_named(seen)) == []
    for changes, says in (
        ({"kept_frames": 1}, "retains page 3 beyond frame 1"),
        ({"kept_frames": 9}, "keeps 9 of 2 frames"),
        ({"state": RESERVED.code}, "is in use and keeps 2 frames"),
        ({"pages": bytes(4)}, "differ in what is retained"),
    ):
        broken = evolve(seen, ranges=(evolve(fact, **changes),))
        assert says in "; ".join(retained_are_named(broken)), says
    assert range_.kept_frames == 2


def test_new_weights_forget_what_is_retained(open_manager: Open) -> None:
    kv = left(open_manager)
    kv.clear_reuse()
    assert kv.probe_reuse([*PROMPT, 0]) == 0
    assert "RETAINED" not in kv.stats().pages


@pytest.mark.parametrize("wanted_by", ["adoption", "spill", "new weights"])
def test_what_was_retained_is_scrubbed_when_it_is_given_up(
    open_manager: Open, wanted_by: str
) -> None:
    """Isolation, law 23: until then it may be read by its own tenant alone."""
    kv = left(open_manager, scrub=True, frames=4)
    first, size = kv.arena.ranges[1].base, 2 * kv.geometry.frame_bytes
    device = cast("ByteDevice", kv.device)
    assert len(set(device.peek(first, size))) > 2
    seq = kv.create(max_tokens=16)
    seq.resume()
    kv.resize(seq, 8)
    if wanted_by == "adoption":
        assert begun(kv, [7]).base == first
    elif wanted_by == "new weights":
        kv.clear_reuse()
    else:
        kv.resize(seq, 16)
        first = (seq.base or 0) + size
    assert len(set(device.peek(first, size))) == 1


def test_it_needs_an_index() -> None:
    with pytest.raises(ConfigError, match="retain is on, but with write_through 'off'"):
        small(retain=True, write_through="off")


def test_the_host_can_have_what_only_parked_memory_stands_behind(open_manager: Open) -> None:
    """Two say the same; the first is dropped while its copies are on the way, so nobody but the
    host has them, and the other leaves the block behind them in parked memory."""
    kv = open_manager(retain=True, spans="off", slots=4, write_through="on_commit")
    first, second = begun(kv, PROMPT), begun(kv, PROMPT)
    go_on(kv, first, PROMPT[:4])
    hog = kv.create(max_tokens=8, commit=False)
    hog.resume()
    go_on(kv, hog, [7] * 8)
    first.drop()
    go_on(kv, second, PROMPT[:6])
    second.close()
    kv.poll()
    assert (kv.host.stale, kv.stats().pages["RETAINED"], kv.probe_reuse(PROMPT)) == (3, 1, 6)
    hog.suspend()
    assert (hog.state_name, kv.probe_reuse(PROMPT)) == ("SUSPENDED", 0)
    hog.resume()
    kv.poll()
    assert wrong(kv, hog, [7] * 8) == 0
