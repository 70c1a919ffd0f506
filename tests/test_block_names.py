"""The names of blocks for the outside: equal where blocks and keys are, and only there."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvstate import Manager
from kvstate.errors import ConfigError
from kvstate.gpu import HostDevice
from tests.conftest import Open, small
from tests.test_reuse import PROMPT, said


def names(kv: Manager, tokens: list[int], **how: Any) -> list[bytes]:
    """What routers call the blocks of a prompt."""
    index = kv.reuse.index
    return [index.digest(node) for node in said(kv, tokens, **how).nodes]


def test_equal_blocks_of_two_managers_have_equal_names(open_manager: Open) -> None:
    one, other = (open_manager(digest_key=b"of the fleet") for _ in range(2))
    said(one, [9, 9]).close()
    how: dict[str, Any] = {"salt": b"s", "adapter": "a", "extra_keys": {1: b"image"}}
    known = names(one, PROMPT, **how)
    assert names(other, PROMPT, **how) == known
    assert len(set(known)) == 4


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another key": ({"digest_key": b"another"}, {}),
    "a random key": ({"digest_key": None}, {}),
    "blocks of another size": ({"block": 4}, {}),
    "another salt": ({}, {"salt": b"s"}),
    "an adapter": ({}, {"adapter": 1}),
    "an image": ({}, {"extra_keys": {0: b"image"}}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_blocks_that_differ_have_other_names(open_manager: Open, name: str) -> None:
    config, how = DIFFERENT[name]
    known = names(open_manager(digest_key=b"key"), PROMPT)
    other = names(open_manager(**{"digest_key": b"key"} | config), PROMPT, **how)
    assert not set(known) & set(other)


def test_other_weights_have_other_names_and_the_same_again_the_same(open_manager: Open) -> None:
    one, other = (open_manager(digest_key=b"key") for _ in range(2))
    known = names(one, PROMPT)
    other.clear_reuse()
    assert not set(known) & set(names(other, PROMPT))
    one.clear_reuse()
    other.clear_reuse()
    other.clear_reuse()
    one.clear_reuse()
    one.clear_reuse()
    assert names(one, [8, 8]) == names(other, [8, 8])


def test_the_names_of_another_process_are_equal(open_manager: Open) -> None:
    """Whatever its hash seed."""
    script = (
        "from kvstate.index import Index; from kvstate.keys import Identity, token_bytes\n"
        "index = Index(2, key=b'key'); me = Identity(b's', 'a')\n"
        "nodes = index.extend(me, index.keys(token_bytes([1, 2, 3, 4]), {1: b'i'}), 'me')\n"
        "print(*(index.digest(node).hex() for node in nodes))\n"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    kv = open_manager(digest_key=b"key")
    mine = names(kv, [1, 2, 3, 4], salt=b"s", adapter="a", extra_keys={1: b"i"})
    assert found[0] == found[1] == [name.hex() for name in mine]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (b"", "digest_key is 0 bytes; 1 to 64 bytes are wanted"),
        (bytes(65), "digest_key is 65 bytes"),
        ("secret", "digest_key is a str"),
        (5, "digest_key is an int"),
    ],
)
def test_a_key_that_is_none_is_refused(key: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        small(digest_key=key)
    assert "secret" not in str(error.value)


def test_a_key_is_not_written_down() -> None:
    config, lines = small(digest_key=b"very secret key"), list[bytes]()
    with Manager(config, HostDevice(), record=lines.append) as kv:
        said(kv, PROMPT).close()
        assert kv.config.digest_key == b"very secret key"
    text = b"".join(lines).decode() + repr(config)
    assert "very secret" not in text
    assert "dmVyeSBzZWNyZXQ" not in text, "nor in base64"
