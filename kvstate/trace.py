"""Traces: every public call as one JSON line, written by a manager and read from outside.

A trace is input that nobody has checked: it is decoded into typed records, field by field, and
refused with the number of the line if anything is missing, unknown or of the wrong type. Nothing
in it is ever evaluated.

The first line is the header: format version, configuration, device. Sequences and steps are named
by numbers. What a failed call raised is recorded with it. A fuzz program is a trace whose calls
also say which seed schedules the simulated device and which device call is told to fail, so that
one line is one reproducible thing.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from kvstate.config import Config
from kvstate.errors import ConfigError, TraceError
from kvstate.keys import Adapter
from kvstate.values import ID_HIGH, ID_LOW, plain

VERSION: Final = 1
LINE_BYTES: Final = 16 << 20
"""The longest line that is read."""

Count = Annotated[int, Meta(ge=0)]
Name = Annotated[int, Meta(ge=0)]
Nth = Annotated[int, Meta(ge=1)]
Id = Annotated[int, Meta(ge=ID_LOW, le=ID_HIGH)]


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a trace."""

    kvstate_trace: int
    """The version of the format."""
    config: Config
    device: str = "host"
    streams: str = "eager"
    seed: Count = 0
    """Of the device: what its schedule depends on before a call has a seed, and priorities."""
    fair: bool = False
    """Whether a replay then lets a fair engine finish all sequences, and asks the laws of that."""
    strict: bool = True
    """Whether a replay must raise what the calls name. The programs of a fuzz name nothing."""


class Call(
    Struct, frozen=True, kw_only=True, tag_field="call", tag=str.lower,
    forbid_unknown_fields=True, omit_defaults=True,
):  # fmt: skip
    """One public call. `error` is the name of what it raised."""

    error: str | None = None
    seed: Count | None = None
    """Schedules the simulated device from this call on."""
    preempt: Nth | None = None
    """Whoever takes that step of the simulated device from this call on is put behind others,
    where streams have priorities. Every piece of work is a step, and so is whatever is
    launched."""
    fail: dict[str, Nth | list[Nth]] = {}
    """Which kinds of device calls are told to fail during this call, and which one of each, or
    which several."""

    memory: int | None = None
    """From this call on the device has memory for that many frames in all, those that it holds
    among them; below 0, for as many as there are. A record has it where the device was asked."""

    ended: list[tuple[int, bool]] | None = None
    """The copies whose end a poll delivered during this call, by number, and their success.

    A replay delivers the same; where it is not said, whatever has ended then.
    """

    failed: list[int] = []
    """The copies that a wait of this call found to have failed."""

    captured: list[Name] = []
    """The streams that are being captured into graphs during this call."""

    event: ClassVar[str] = ""
    """The event of the sequence table that it fires."""


class Create(Call, frozen=True, kw_only=True):
    """`Manager.create`; the new sequence gets this name."""

    seq: Name
    max_tokens: int
    prompt: list[Id] = []
    salt: str = ""
    adapter: int | str | None = None
    """Bytes are written as `hex:` and their digits; a text that begins with `hex:` or `text:`
    stands behind `text:`."""
    extra_keys: dict[str, list[str]] = {}
    """The fields of each block that has any, in hexadecimal, by the number of the block."""
    commit: bool = True
    reserve: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for digits and numbers of blocks that are none."""
        for text in (self.salt, *chain.from_iterable(self.extra_keys.values())):
            bytes.fromhex(text)
        adapter_of(self.adapter)
        for at in self.extra_keys:
            int(at)


class Fork(Call, frozen=True, kw_only=True):
    """`Manager.fork` of the sequence `seq`; the new sequence gets the name `child`."""

    seq: Name
    child: Name
    max_tokens: int
    stream: Name = 0
    event = "fork"


class Dummy(Call, frozen=True, kw_only=True):
    """`Manager.dummy`; the new sequence gets this name."""

    seq: Name
    tokens: int
    stream: Name = 0


class Resume(Call, frozen=True, kw_only=True):
    """`Manager.resume`."""

    seq: Name
    stream: Name = 0
    event = "resume"


class Resize(Call, frozen=True, kw_only=True):
    """`Manager.resize`."""

    seq: Name
    tokens: int
    event = "grow"


class Rewind(Call, frozen=True, kw_only=True):
    """`Manager.rewind`."""

    seq: Name
    tokens: int
    event = "rewind"


class Step(Call, frozen=True, kw_only=True):
    """`Manager.step`; the new step gets this name. One count of tokens for each sequence."""

    step: Name
    seqs: list[Name]
    tokens: list[int]
    event = "step"


class Settle(Call, frozen=True, kw_only=True):
    """`Manager.settle`; no `accepted` means all."""

    step: Name
    accepted: list[int] | None = None
    event = "settle"


class Commit(Call, frozen=True, kw_only=True):
    """`Manager.commit`: the ids of the next tokens."""

    seq: Name
    tokens: list[Id]
    event = "commit"


class CommitEach(Call, frozen=True, kw_only=True):
    """`Manager.commit_each`: the id of the next token of each sequence."""

    seqs: list[Name]
    tokens: list[Id]
    event = "commit"


class Stop(Call, frozen=True, kw_only=True):
    """`Manager.stop_committing`."""

    seq: Name
    event = "stop_committing"


class Suspend(Call, frozen=True, kw_only=True):
    """`Manager.suspend`; `after` says that an event was passed."""

    seq: Name
    after: bool = False
    event = "suspend"


class Drop(Call, frozen=True, kw_only=True):
    """`Manager.drop`; `after` says that an event was passed."""

    seq: Name
    after: bool = False
    event = "drop"


class Close(Call, frozen=True, kw_only=True):
    """`Manager.close_sequence`; `after` says that an event was passed."""

    seq: Name
    after: bool = False
    event = "close"


class Clear(Call, frozen=True, kw_only=True):
    """`Manager.clear_reuse`."""


class Poll(Call, frozen=True, kw_only=True):
    """`Manager.poll`; with `deliver`, of the ends of these copies, by number."""

    deliver: list[Nth] | None = None


class Wait(Call, frozen=True, kw_only=True):
    """`Manager.wait`."""

    seq: Name


class TensorsAll(Call, frozen=True, kw_only=True):
    """`Manager.tensors_all`. A replay on a device without memory passes over it."""

    seq: Name
    tokens: Count | None = None


class Trim(Call, frozen=True, kw_only=True):
    """`Manager.trim`."""

    keep: Count = 0


class Refused(Call, frozen=True, kw_only=True):
    """A call of that name that was refused, and cannot be made again from a trace: what it was
    given may be anything, and is only told. A replay passes over it."""

    name: str
    arguments: dict[str, str] = {}


AnyCall = (
    Create | Fork | Dummy | Resume | Resize | Rewind | Step | Settle | Commit | CommitEach | Stop
    | Suspend | Drop | Close | Poll | Wait | TensorsAll | Clear | Trim | Refused
)  # fmt: skip
"""One line of a trace after the header."""


def adapter_text(adapter: Adapter) -> int | str | None:
    """An adapter as `Create` has it."""
    if isinstance(adapter, bytes):
        return f"hex:{adapter.hex()}"
    marked = isinstance(adapter, str) and adapter.startswith(("hex:", "text:"))
    return f"text:{adapter}" if marked else adapter


def adapter_of(text: int | str | None) -> Adapter:
    """The adapter that `Create` has. Raises ValueError for digits that are none."""
    if not isinstance(text, str):
        return text
    return bytes.fromhex(text[4:]) if text.startswith("hex:") else text.removeprefix("text:")


def _plainly(value: Any) -> Any:
    """A number of numpy's as one of Python's."""
    found = plain(value)
    if found is value:
        raise TypeError(f"{value!r} cannot be written")
    return found


_encoder: Final = msgspec.json.Encoder(enc_hook=_plainly)
_header: Final = msgspec.json.Decoder(Header)
_call: Final = msgspec.json.Decoder(AnyCall)


def schema() -> dict[str, Any]:
    """The JSON schema of the two kinds of lines."""
    kinds, components = msgspec.json.schema_components((Header, AnyCall))
    return {"header": kinds[0], "call": kinds[1], "components": components}


def encode(record: Header | Call) -> bytes:
    """One line, without its end."""
    return _encoder.encode(record)


def decode_call(line: bytes, number: int) -> AnyCall:
    """One call. Raises TraceError, naming the line."""
    try:
        return _call.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"line {number}: {error}") from error


def read(path: Path | str) -> tuple[Header, list[AnyCall]]:
    """A whole trace, plain or gzipped. Raises TraceError, naming file and line."""
    with open_lines(Path(path)) as lines:
        return decode(lines)


def decode(lines: Iterable[bytes]) -> tuple[Header, list[AnyCall]]:
    """The lines of a whole trace. Raises TraceError, naming the line."""
    numbered = enumerate(lines, 1)
    header = _read_header(numbered)
    return header, [decode_call(line, number) for number, line in numbered if line.strip()]


def is_trace(path: Path) -> bool:
    """Whether the first line of a file is the header of a kvstate trace, of whatever version."""
    with open_lines(path) as lines:
        return b'"kvstate_trace"' in next(lines, b"")


def write(path: Path, header: Header, calls: Iterable[Call]) -> None:
    """A whole trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [encode(header), *(encode(call) for call in calls)]
    path.write_bytes(b"\n".join(lines) + b"\n")


@contextmanager
def open_lines(path: Path) -> Iterator[Iterator[bytes]]:
    """The lines of a text file, plain or gzipped, as bytes. Each raises TraceError, naming the
    line, if it is longer than `LINE_BYTES` or cannot be read. A TraceError inside names the file,
    too."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        try:
            yield _bounded(file.readline)
        except TraceError as error:
            raise TraceError(f"{path}: {error}") from error


def _bounded(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    for number in count(1):
        try:
            line = readline(LINE_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"line {number}: cannot be read: {error}") from error
        if len(line) > LINE_BYTES:
            raise TraceError(f"line {number}: is longer than {LINE_BYTES:,} bytes")
        if not line:
            return
        yield line


def _read_header(numbered: Iterator[tuple[int, bytes]]) -> Header:
    number, line = next(numbered, (1, b""))
    try:
        header = _header.decode(line)
    except (msgspec.DecodeError, ConfigError, RecursionError) as error:
        raise TraceError(f"line {number}: not the header of a kvstate trace: {error}") from error
    if header.kvstate_trace != VERSION:
        raise TraceError(
            f"line {number}: format version {header.kvstate_trace}; this reads {VERSION}"
        )
    return header
