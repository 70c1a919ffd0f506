"""What was committed is found until its last copy is given up: backing up goes on after whatever
was in its way, an heir is a page whose bytes are there, and spans do not take the addresses that
sequences need."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from kvstate import Config, GpuTier, HostTier, LayerSpec, Manager, Sequence
from kvstate.gpu import HostDevice, NullDevice
from kvstate.spec.page import COMMITTED
from tests.conftest import FRAME, ROW, Open
from tests.test_reuse import go_on, said

TEXT = list(range(100, 112))
"""Six blocks of two tokens."""


def found(kv: Manager, tokens: list[int]) -> int:
    return kv.probe_reuse([*tokens, 999])


def polled(kv: Manager) -> None:
    """Long enough for copies to be issued and to end."""
    for _ in range(3):
        kv.poll()


def arrived(kv: Manager) -> None:
    """Let all that was issued run, and its ends be delivered."""
    assert cast("HostDevice", kv.device).streams.drain()
    kv.poll()


# Backing up goes on.


def suspended(kv: Manager, seq: Sequence) -> None:
    seq.suspend()
    kv.poll()
    seq.resume()
    kv.poll()


def failed(kv: Manager, seq: Sequence) -> None:
    cast("HostDevice", kv.device).fail_next("complete")
    go_on(kv, seq, TEXT[:10])
    polled(kv)


def refused(kv: Manager, seq: Sequence) -> None:
    """The device refuses to copy."""
    cast("HostDevice", kv.device).fail_next("copy")
    go_on(kv, seq, TEXT[:10])
    kv.poll()


def evicted(kv: Manager, seq: Sequence) -> None:
    """Another wants all of the host but one slot, so all copies but the first go."""
    other = kv.create(max_tokens=16)
    other.resume()
    kv.settle(kv.step(kv.batch([other]), 14))
    other.suspend()
    kv.poll()
    assert kv.stats().host_slots == {"HELD": 7, "MIRROR": 1}
    other.close()


def full(kv: Manager, seq: Sequence) -> None:
    """The host is full of what suspended sequences need while the next blocks are committed."""
    other = kv.create(max_tokens=16)
    other.resume()
    kv.settle(kv.step(kv.batch([other]), 8))
    other.suspend()
    kv.poll()
    assert kv.stats().host_slots == {"HELD": 4, "MIRROR": 4}
    third = kv.create(max_tokens=16)
    third.resume()
    kv.settle(kv.step(kv.batch([third]), 8))
    third.suspend()
    kv.poll()
    assert kv.stats().host_slots == {"HELD": 8}
    go_on(kv, seq, TEXT[:10])
    polled(kv)
    other.close()
    third.close()


MESSES: list[Callable[[Manager, Sequence], None]] = [suspended, failed, refused, evicted, full]


@pytest.mark.parametrize("mess", MESSES, ids=lambda mess: mess.__name__)
def test_backing_up_goes_on(open_manager: Open, mess: Callable[[Manager, Sequence], None]) -> None:
    kv = open_manager(frames=16, slots=8, write_through="on_commit", spans="off")
    seq = said(kv, TEXT[:8])
    polled(kv)
    assert kv.stats().host_slots == {"FREE": 4, "MIRROR": 4}
    mess(kv, seq)
    go_on(kv, seq, TEXT)
    polled(kv)
    seq.drop()
    assert found(kv, TEXT) == 12


def test_a_copy_of_a_shared_prompt_that_fails_is_made_again(open_manager: Open) -> None:
    """The owner left while it was on the way, and another has the page."""
    kv = open_manager(HostDevice(streams="latest"), write_through="on_commit", spans="off")
    first, second = said(kv, TEXT[:4]), kv.create(max_tokens=16)
    second.resume()
    cast("HostDevice", kv.device).fail_next("complete")
    go_on(kv, second, TEXT[:4])
    assert kv.stats().host_slots == {"FREE": 14, "MIRRORING": 2}
    first.close()
    arrived(kv)
    assert kv.stats().done["failed_copies"] == 1
    go_on(kv, second, TEXT[:8])
    for _ in range(2):
        kv.poll()
        arrived(kv)
    second.drop()
    assert found(kv, TEXT[:8]) == 8


def test_what_comes_back_from_the_host_stays_there_too(open_manager: Open) -> None:
    """With on_commit; so suspending it once more copies only what is new."""
    kv = open_manager(write_through="on_commit", spans="off")
    seq = said(kv, TEXT[:8])
    suspended(kv, seq)
    assert kv.stats().host_slots == {"FREE": 12, "MIRROR": 4}
    moved = kv.stats().done["host_bytes_moved"]
    go_on(kv, seq, TEXT[:10])
    seq.suspend()
    assert kv.stats().done["host_bytes_moved"] - moved == 2 * ROW


def test_two_that_do_not_both_fit_do_not_take_turns(open_manager: Open) -> None:
    """A block whose copy was pushed out waits for a free slot: what others have is not pushed out
    for it."""
    kv = open_manager(frames=16, slots=6, write_through="on_commit", spans="off")
    first = said(kv, TEXT[:8])
    polled(kv)
    said(kv, [7] * 8)
    polled(kv)
    assert kv.stats().host_slots == {"MIRROR": 6}
    kept = kv.stats().done["kept_blocks"]
    assert kept == 8
    for _ in range(20):
        kv.poll()
    assert kv.stats().done["kept_blocks"] == kept
    first.close()


def test_nothing_is_looked_at_while_nothing_can_be_copied(open_manager: Open) -> None:
    """A host tier that is full of what is held costs a step nothing."""
    kv = open_manager(frames=16, slots=4, write_through="on_commit", spans="off")
    other = kv.create(max_tokens=16)
    other.resume()
    kv.settle(kv.step(kv.batch([other]), 8))
    other.suspend()
    kv.poll()
    said(kv, TEXT[:8])
    kv.poll()
    waiting = kv.reuse.index.uncopied
    assert waiting is not None
    assert len(waiting) == 4
    looks = []
    pop = waiting.pop
    waiting.pop = lambda: looks.append(0) or pop()  # type: ignore[method-assign,func-returns-value]
    for _ in range(5):
        kv.poll()
    assert not looks
    other.close()
    kv.poll()
    assert looks


def test_what_cannot_be_read_keeps_nothing_else_waiting(open_manager: Open) -> None:
    """Blocks of a suspended sequence come first in the queue; the free slots are not for them."""
    kv = open_manager(frames=16, slots=5, write_through="on_commit", spans="off")
    away, other = kv.create(max_tokens=16), kv.create(max_tokens=16)
    for seq in (away, other):
        seq.resume()
    kv.settle(kv.step(kv.batch([away, other]), 6))
    away.commit(TEXT[:6])
    other.commit([5] * 6)
    cast("HostDevice", kv.device).fail_next("complete")
    kv.poll()
    away.suspend()
    kept = kv.stats().done["kept_blocks"]
    kv.poll()
    assert kv.stats().done["kept_blocks"] == kept + 2


# An heir is a page whose bytes are there.


@pytest.mark.parametrize("mode", ["on_free", "on_commit"])
@pytest.mark.parametrize("leave", ["close", "drop", "fail"])
def test_a_page_that_is_still_loading_is_no_heir(open_manager: Open, mode: str, leave: str) -> None:
    device = HostDevice(streams="latest")
    kv = open_manager(device, write_through=mode, spans="off", frames=16)
    owner = said(kv, TEXT[:8])
    taker = kv.create([*TEXT[:8], 7], 16)
    if leave == "fail":
        device.fail_next("complete")
    taker.resume()
    assert taker.matched_tokens == 8
    owner.close()
    if leave != "fail":
        getattr(taker, leave)()
    for _ in range(3):
        kv.trim()
    assert found(kv, TEXT[:8]) == 8


def test_without_room_on_the_host_a_loading_page_is_better_than_none(open_manager: Open) -> None:
    device = HostDevice(streams="latest")
    kv = open_manager(device, slots=0, spans="off", frames=16)
    owner = said(kv, TEXT[:8])
    taker = kv.create([*TEXT[:8], 7], 16)
    taker.resume()
    owner.close()
    assert found(kv, TEXT[:8]) == 0, "its bytes are not there yet"
    for _ in range(2):
        kv.trim()
    assert found(kv, TEXT[:8]) == 8


@pytest.mark.parametrize("ended", [False, True], ids=["on its way", "on the host"])
@pytest.mark.parametrize("leave", ["close", "drop"])
@pytest.mark.parametrize("where", ["suspended", "coming back"])
def test_what_the_host_has_of_a_sequence_that_leaves_is_found(
    open_manager: Open, where: str, leave: str, ended: bool
) -> None:
    """Also if the copy that writes it, or reads it, has not ended."""
    kv = open_manager(HostDevice(streams="latest"), spans="off", frames=16)
    seq = said(kv, TEXT[:8])
    seq.suspend()
    if ended or where == "coming back":
        kv.trim()
    if where == "coming back":
        seq.resume()
    getattr(seq, leave)()
    for _ in range(2):
        kv.trim()
    assert found(kv, TEXT[:8]) == 8
    assert kv.stats().host_slots == {"FREE": 12, "STALE": 4}


def test_a_copy_that_fails_leaves_nothing_of_a_sequence_that_left(open_manager: Open) -> None:
    device = HostDevice(streams="latest")
    kv = open_manager(device, spans="off", frames=16)
    seq = said(kv, TEXT[:8])
    device.fail_next("complete")
    seq.suspend()
    seq.close()
    kv.trim()
    assert found(kv, TEXT[:8]) == 0
    assert kv.stats().host_slots == {"FREE": 16}


def test_a_page_on_the_gpu_is_found_though_a_suspended_sequence_was_first(
    open_manager: Open,
) -> None:
    """Committed while the other is suspended, or brought back before it."""
    kv = open_manager(spans="off", frames=16)
    first = said(kv, TEXT[:8])
    first.suspend()
    kv.poll()
    assert found(kv, TEXT[:8]) == 0
    second = said(kv, TEXT[:8])
    assert second.pages.states.count(COMMITTED.code) == 4
    assert found(kv, TEXT[:8]) == 8
    second.suspend()
    kv.poll()
    assert found(kv, TEXT[:8]) == 0
    first.resume()
    kv.poll()
    assert found(kv, TEXT[:8]) == 8


# Addresses.


def chatty(rows: int, max_tokens: int) -> Config:
    """Blocks of a frame, whole prompts are kept, the arena as it is by default."""
    return Config(
        layers=[LayerSpec(kv_heads=1, head_dim=256, dtype="float16")],
        gpu=GpuTier(4096 * FRAME, FRAME),
        host=HostTier(64 * FRAME),
        tokens_per_block=4,
        max_tokens=max_tokens,
        max_sequences=rows,
        spans="all",
        write_through="on_commit",
    )


@pytest.mark.parametrize("prompt", [9, 17, 33, 61, 64])
def test_the_only_sequence_that_runs_can_be_rewound(open_manager: Open, prompt: int) -> None:
    """Into memory that a span has, with one row and the arena as it is by default."""
    kv = Manager(chatty(1, 64), HostDevice(), debug=True)
    tokens = list(range(prompt))
    with kv:
        for _ in range(3):
            seq = kv.create(tokens, 64)
            seq.resume()
            kv.poll()
            go_on(kv, seq, tokens)
            seq.close()
            kv.poll()
        seq = kv.create(tokens, 64)
        seq.resume()
        kv.poll()
        assert seq.matched_tokens == prompt - 1
        seq.rewind(0)
        assert seq.length_tokens == 0


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_chat_of_many_turns_never_runs_out_of_addresses(rows: int) -> None:
    """Each turn begins before the last one closes; all that was said is found every time."""
    with Manager(chatty(rows, 256), NullDevice(), debug=True) as kv:
        said_so_far: list[int] = []
        last: Sequence | None = None
        for turn in range(62):
            said_so_far += [turn] * 4
            seq = kv.create([*said_so_far, 7], len(said_so_far) + 8)
            seq.resume()
            kv.poll()
            assert seq.matched_tokens >= 4 * (turn // 2 * 2) or turn < 2
            go_on(kv, seq, said_so_far)
            if last is not None:
                last.close()
            last = seq


@pytest.mark.hunt
def test_a_chain_of_a_thousand_turns() -> None:
    with Manager(chatty(600, 8192), NullDevice()) as kv:
        said_so_far: list[int] = []
        last: Sequence | None = None
        for turn in range(1100):
            said_so_far += [turn] * 4
            seq = kv.create([*said_so_far, 7], len(said_so_far) + 8)
            seq.resume()
            kv.poll()
            go_on(kv, seq, said_so_far)
            if last is not None:
                last.close()
            last = seq
        assert len(kv.spans.registered) > 1000
        assert last is not None
        last.rewind(2)
        assert last.length_tokens == 2
