"""What sequences share by mapping the same frames: free of charge, read-only, and no copy at all.

That there is no copy is shown by the bytes: whatever a copy could have come from is spoilt, and a
third mapping of the very frames shows and is seen.
"""

from __future__ import annotations

from itertools import permutations

import pytest
from attrs import evolve

from kvstate import Manager, Sequence
from kvstate.device import ByteDevice, MapRun
from kvstate.errors import DeviceError, OutOfFrames
from kvstate.gpu import HostDevice, open_device
from kvstate.spec.facts import View
from kvstate.spec.laws import laws
from kvstate.view import view
from tests.conftest import FRAME, ROW, Open, small
from tests.test_reuse import PROMPT, go_on, said, wrong

LONG = [*PROMPT, 5, 3, 5, 8, 9, 7, 9, 3]
"""Eight blocks, four frames."""
CUDA_SCALE = 512
"""Frames on CUDA are so much larger."""


def more(kv: Manager, tokens: list[int]) -> Sequence:
    """A running sequence that begins with these tokens and has written none."""
    seq = kv.create(tokens)
    seq.resume()
    return seq


def law(number: int, seen: View) -> list[str]:
    """What one law finds."""
    return [line for one in laws("always") if one.number == number for line in one.check(seen)]


def test_a_prefix_of_a_running_sequence_is_mapped_and_costs_nothing(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    first = said(kv, LONG)
    second = more(kv, LONG)
    assert second.matched_tokens == 14
    assert kv.stats().frames["LIVE_SPAN"] == 3
    assert kv.stats().frame_charges == {"sequence": 5}, "four of the first, one of the second"
    assert wrong(kv, second, LONG[:14]) == 0
    go_on(kv, second, LONG)
    assert wrong(kv, second, LONG) == wrong(kv, first, LONG) == 0


def test_what_is_beyond_the_last_whole_frame_is_copied(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    said(kv, LONG)
    second = more(kv, [*LONG[:7], 0])
    done = kv.stats().done
    assert second.matched_tokens == 6
    assert (done["hit_blocks.alias"], done["hit_blocks.live"]) == (2, 1)
    kv.poll()
    assert wrong(kv, second, LONG[:6]) == 0


def test_the_span_passes_to_the_registry_and_is_mapped_from_there(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    first = said(kv, LONG)
    second = more(kv, LONG)
    for seq in (first, second):
        seq.close()
    assert kv.stats().frame_charges["registry"] == 3
    assert kv.probe_reuse(LONG) == 12, "its last block was nobody else's, and there is no host"
    third = more(kv, LONG)
    assert (third.matched_tokens, third.transfer) == (12, None)
    assert wrong(kv, third, LONG[:12]) == 0


def test_a_range_with_aliases_is_adopted_by_the_same_prefix_only(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=16)
    said(kv, LONG)
    more(kv, LONG).close()
    kv.poll()
    calls = kv.device.calls["map"]
    same = more(kv, LONG)
    assert kv.device.calls["map"] == calls, "mapped as it was"
    other = more(kv, [*LONG[:4], 1, 1, 1])
    assert other.range is not None
    assert other.range is not same.range
    assert len(other.range.aliases.states) == 1
    assert kv.stats().done["adoptions"] == 1


def test_all_of_a_prompt_is_kept_if_that_is_asked_for(open_manager: Open) -> None:
    kv = open_manager(slots=0, spans="all")
    said(kv, LONG).close()
    assert kv.stats().frame_charges["registry"] == 4
    assert more(kv, [*LONG, 1]).matched_tokens == 16


def test_nothing_is_mapped_if_that_is_off(open_manager: Open) -> None:
    kv = open_manager(spans="off")
    first = said(kv, LONG)
    more(kv, LONG)
    first.close()
    assert "LIVE_SPAN" not in kv.stats().frames
    assert "registry" not in kv.stats().frame_charges


def test_nobody_maps_what_another_tenant_has(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    said(kv, LONG, salt=b"one")
    other = kv.create(LONG, 16, salt=b"two")
    other.resume()
    assert (other.matched_tokens, other.shared_tokens) == (0, 0)


# Every order of leaving, and turns of one conversation.


@pytest.mark.parametrize("order", list(permutations(range(4))), ids=str)
def test_spans_that_nest_are_released_in_every_order(
    open_manager: Open, order: tuple[int, ...]
) -> None:
    kv = open_manager(slots=0, frames=24, max_tokens=24)
    turns = [LONG[:8], LONG[:12], LONG, [*LONG[:8], 1, 1, 1, 1, 1]]
    seqs = []
    for tokens in turns:
        seq = more(kv, [*tokens, 0])
        go_on(kv, seq, tokens)
        seqs.append(seq)
    assert [seq.shared_tokens for seq in seqs] == [8, 12, 12, 8]
    for at in order:
        others = [seq for seq in seqs if seq.state_name == "ACTIVE"]
        assert all(wrong(kv, seq, turns[seqs.index(seq)]) == 0 for seq in others)
        seqs[at].close()
    kv.trim()
    assert "registry" not in kv.stats().frame_charges


def test_turn_after_turn_maps_all_that_was_said_before(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=16, max_tokens=32, spans="all")
    said_so_far = list(LONG[:4])
    for turn in range(5):
        seq = more(kv, [*said_so_far, turn])
        assert seq.shared_tokens == (len(said_so_far) if turn else 0)
        said_so_far = [*said_so_far, turn, turn, turn, turn]
        go_on(kv, seq, said_so_far)
        assert wrong(kv, seq, said_so_far) == 0
        seq.close()
        seq = more(kv, [*said_so_far, 0])
        go_on(kv, seq, said_so_far)
        seq.close()
    assert kv.stats().frame_charges["registry"] == 6


# No copy, by the bytes.


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> ByteDevice:
    return open_device(request.param)


def scaled(device: ByteDevice) -> Manager:
    """The small configuration, with frames as large as the device wants."""
    if device.name == "host":
        return Manager(small(), device, debug=True)
    from attrs import evolve

    from kvstate import GpuTier, HostTier, LayerSpec

    config = small()
    layer = LayerSpec(kv_heads=CUDA_SCALE, head_dim=256, dtype="float16")
    frame = FRAME * CUDA_SCALE
    gpu = GpuTier(8 * frame, frame, reclaim_frames=1)
    host = HostTier(16 * 2 * ROW * CUDA_SCALE)
    return Manager(evolve(config, layers=[layer], gpu=gpu, host=host), device, debug=True)


def test_an_alias_needs_no_copy_that_could_be_read(device: ByteDevice) -> None:
    """Host memory is all spoilt, and a third mapping of the frames sees and is seen."""
    with scaled(device) as kv:
        first = said(kv, LONG)
        second = more(kv, LONG)
        first.close()
        kv.flight.quiesce()
        row, frame = kv.geometry.row_bytes, kv.geometry.frame_bytes
        assert second.base is not None
        before = device.peek(second.base, 12 * row)
        for slot in range(kv.host.capacity):
            device.poke(kv.host.address + slot * kv.host.block_bytes, bytes(16))
        assert device.peek(second.base, 12 * row) == before
        assert second.range is not None
        assert second.range.span is not None
        ids = second.range.span.ids(3)
        window = device.reserve(3 * frame, frame)
        device.map([MapRun(window, ids)])
        assert device.peek(window, 12 * row) == before
        device.poke(window + 16, b"seen through all")
        home = second.range.span.home.base
        for base in (home, second.base):
            assert device.peek(base + 16, 16) == b"seen through all"
        with pytest.raises(DeviceError, match="read-only"):
            device.poke(second.base, b"refused")
        device.quiesce()
        from kvstate.device import UnmapRun

        device.unmap([UnmapRun(window, 3)])
        device.unreserve(window)


# What a rewind may not touch, and what pressure takes.


def test_whoever_is_alone_rewinds_in_place(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    first = said(kv, LONG)
    second = more(kv, LONG)
    kv.poll()
    second.close()
    base = first.base
    first.rewind(3)
    assert first.base == base
    assert "LIVE_SPAN" not in kv.stats().frames
    assert wrong(kv, first, LONG[:3]) == 0


def test_a_suspended_alias_comes_back_with_memory_of_its_own(open_manager: Open) -> None:
    kv = open_manager()
    first = said(kv, LONG)
    second = more(kv, LONG)
    go_on(kv, second, LONG)
    second.suspend()
    first.close()
    second.resume()
    kv.poll()
    assert second.shared_tokens == 0
    assert wrong(kv, second, LONG) == 0


def test_the_owner_may_be_suspended_under_its_aliases(open_manager: Open) -> None:
    kv = open_manager()
    first = said(kv, LONG)
    second = more(kv, LONG)
    first.suspend()
    assert wrong(kv, second, LONG[:12]) == 0
    first.resume()
    kv.poll()
    assert wrong(kv, first, LONG) == wrong(kv, second, LONG[:12]) == 0


def test_pressure_takes_the_span_that_was_used_longest_ago(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=12, spans="all", protected_share=0.0)
    prompts = [[at] * 8 for at in range(3)]
    for prompt in prompts:
        said(kv, prompt).close()
    more(kv, [*prompts[0], 1]).close()
    quiesces = kv.stats().done.get("quiesces", 0)
    hungry = more(kv, [9])
    hungry.resize(16)
    another = more(kv, [8])
    another.resize(16)
    assert [kv.probe_reuse([*prompt, 1]) for prompt in prompts] == [8, 0, 8]
    assert kv.stats().done["spilled_spans"] == 1
    assert kv.stats().done["quiesces"] == quiesces + 1


def test_the_protected_share_is_not_spilled_and_the_gate_knows(open_manager: Open) -> None:
    kv = open_manager(slots=0, frames=8, spans="all", protected_share=0.3)
    said(kv, PROMPT).close()
    assert kv.stats().frame_charges["registry"] == 2
    assert kv.largest_max_tokens() == 16
    one = more(kv, [9])
    one.resize(16)
    two = more(kv, [8])
    assert not kv.admits(12)
    assert kv.admits(8)
    with pytest.raises(OutOfFrames):
        two.resize(16)
    assert kv.probe_reuse([*PROMPT, 1]) == 8
    two.close()
    one.close()
    alone = kv.create([7], 16)
    alone.resume()
    alone.resize(16)


def test_a_span_that_died_is_not_mapped(open_manager: Open) -> None:
    kv = open_manager(frames=5, slots=16, spans="all", protected_share=0.0)
    said(kv, PROMPT).close()
    late = kv.create([*PROMPT, 1], 16)
    assert late.matched_tokens == 8
    hungry = more(kv, [9])
    hungry.resize(16)
    hungry.close()
    late.resume()
    assert (late.matched_tokens, late.shared_tokens) == (8, 0), "from the host"
    kv.poll()
    assert wrong(kv, late, PROMPT) == 0


# The laws of it are seen to fail.


def test_the_laws_notice(open_manager: Open) -> None:
    kv = open_manager(slots=0)
    said(kv, LONG).close()
    first = said(kv, LONG)
    second = more(kv, LONG)
    assert second.range is not None
    span = second.range.span
    assert span is not None
    assert not any(law(number, view(kv)) for number in (1, 2, 5, 14, 19, 20, 23))
    assert law(14, evolve(view(kv), align_bytes=2 * FRAME)) == [
        "range 2 maps 3 frames, no multiple of 2"
    ]
    del span.holders[second.range.number]
    assert law(2, view(kv))
    span.holders[second.range.number] = second.range
    span.nodes[0].owner = second
    assert law(5, view(kv))
    span.nodes[0].owner = first
    second.range.aliases.states.pop()
    assert law(19, view(kv))
    assert law(20, view(kv))
    second.range.aliases.states.append(1)
    second.identity = kv.create([1], 4, salt=b"x").identity
    assert law(23, view(kv))
    second.identity = first.identity


# Copies that a span makes needless.


def doubled(open_manager: Open, **changes: object) -> tuple[Manager, list[Sequence]]:
    """Two sequences that loaded the same prefix at the same time, and a third that maps one's."""
    kv = open_manager(**{"frames": 10, "slots": 8} | changes)
    said(kv, LONG).close()
    kv.poll()
    seqs = [kv.create([*LONG[:14], at, at]) for at in range(2)]
    for seq in seqs:
        seq.resume()
    kv.poll()
    kv.trim()
    seqs.append(more(kv, LONG))
    assert kv.stats().frame_charges == {"sequence": 9}
    return kv, seqs


def test_copies_of_a_span_give_way_first(open_manager: Open) -> None:
    kv, seqs = doubled(open_manager)
    quiesces = kv.stats().done.get("quiesces", 0)
    hungry = more(kv, [9])
    hungry.resize(16)
    assert kv.stats().done["remaps"] == 3
    assert kv.stats().done["quiesces"] == quiesces + 1
    assert [seq.shared_tokens for seq in seqs] == [12, 12, 12]
    assert all(wrong(kv, seq, LONG[:14]) == 0 for seq in seqs)
    assert not kv.reuse.doubles or kv.spans.duplicate(next(iter(kv.reuse.doubles))) is None


def test_one_that_no_reclaim_would_ask_is_noticed(open_manager: Open) -> None:
    kv, seqs = doubled(open_manager)
    (remaps,) = (law for law in laws("always") if law.name == "remaps")
    assert not list(remaps.violations(view(kv)))
    doubles = set(kv.reuse.doubles)
    kv.reuse.doubles.clear()
    assert view(kv).copying == {seqs[0].uid}, "the others have the span"
    assert list(remaps.violations(view(kv)))
    kv.reuse.doubles |= doubles


def test_a_rewind_within_its_own_tokens_leaves_it_to_be_asked(open_manager: Open) -> None:
    kv, seqs = doubled(open_manager)
    for seq in seqs[:2]:
        go_on(kv, seq, [*LONG[:14], 8, 8])
    seqs[0].rewind(15)
    assert not view(kv).copying - view(kv).doubles
    more(kv, [9]).resize(16)
    assert kv.stats().done["remaps"] == 3


def test_nothing_is_remapped_while_nothing_is_short(open_manager: Open) -> None:
    kv, _ = doubled(open_manager, frames=14)
    more(kv, [9]).resize(16)
    assert "remaps" not in kv.stats().done


def test_a_remap_that_fails_leaves_the_copy(open_manager: Open) -> None:
    device = HostDevice()
    kv, seqs = doubled(open_manager, device=device)
    hungry = more(kv, [9])
    device.fail_next("map")
    with pytest.raises(DeviceError):
        hungry.resize(16)
    assert sorted(seq.shared_tokens for seq in seqs) == [0, 12, 12]
    assert all(wrong(kv, seq, LONG[:14]) == 0 for seq in seqs)
    hungry.resize(16)


def test_a_page_that_somebody_computed_is_not_replaced(open_manager: Open) -> None:
    """The same tokens, but not the same bytes: two computed them at once."""
    kv = open_manager(frames=11, slots=0)
    seqs = [kv.create(max_tokens=16) for _ in range(2)]
    for seq in seqs:
        seq.resume()
        go_on(kv, seq, LONG)
    third = more(kv, LONG)
    assert third.shared_tokens == 12
    hungry = more(kv, [9])
    with pytest.raises(OutOfFrames):
        hungry.resize(16)
    assert sorted(seq.shared_tokens for seq in seqs) == [0, 12]


def test_a_span_is_in_use_while_one_behind_it_is(open_manager: Open) -> None:
    """Who maps the second of a chain maps the first too, from its home."""
    kv = open_manager(slots=0, frames=24, max_tokens=24, spans="all")
    first = said(kv, LONG[:8])
    second = more(kv, [*LONG, 0])
    go_on(kv, second, LONG)
    third = more(kv, [*LONG, 1])
    second.close()
    assert third.range is not None
    assert first.shared_tokens == 8
    third.close()
    assert first.shared_tokens == 0
    first.rewind(3)
    assert wrong(kv, first, LONG[:3]) == 0
    assert kv.probe_reuse([*LONG, 1]) == 2


def test_one_alone_can_be_finished_whatever_it_maps(open_manager: Open) -> None:
    """Who maps the beginning of a span keeps all of it. Here that and the rest do not fit."""
    kv = open_manager(slots=0, frames=4, spans="all")
    said(kv, LONG).close()
    assert kv.stats().frames["SPAN"] == 4
    prompt = [*LONG[:12], *[0] * 4]
    second = more(kv, prompt[:13])
    go_on(kv, second, prompt)
    assert wrong(kv, second, prompt) == 0


def test_one_that_is_refused_alone_can_make_room_itself(open_manager: Open) -> None:
    """It mapped part of a span while others ran, which is longer since its owner has closed."""
    kv = open_manager(slots=0, frames=5, spans="all")
    first = said(kv, LONG)
    prompt = [*LONG[:8], *[0] * 8]
    second = more(kv, prompt[:9])
    assert second.shared_tokens == 8
    first.close()
    with pytest.raises(OutOfFrames):
        kv.step(kv.batch([second]), 8)
    second.drop()
    second.resume()
    go_on(kv, second, prompt)
    assert wrong(kv, second, prompt) == 0
