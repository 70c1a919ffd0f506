"""Act: the device carries out what the rows of a plan ask for, and takes it back if it cannot
finish.

The only place that changes a device's memory on behalf of a plan, and the only one that undoes.
Mapping comes first because it can be undone; a copy comes last because it cannot. If an undo
fails, nobody knows what is mapped, so the manager is poisoned: it refuses work and releases
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, TypeVar

from kvstate.device import CopyRun, Device, Direction, Event, FillRun, MapRun, UnmapRun
from kvstate.errors import DeviceError, DeviceFault
from kvstate.life import Life
from kvstate.pattern import SCRUB_BYTE
from kvstate.plan import Act, Cells, Frames, Plan
from kvstate.spec.words import ACTIONS
from kvstate.tiers import HostSlots

Undo = list[Callable[[], None]]
T = TypeVar("T")


class Actor:
    """Carries plans out on one device. `fault` says why it is poisoned; None while it is not."""

    def __init__(self, device: Device, host: HostSlots, frame_bytes: int) -> None:
        self.device, self.host, self.frame_bytes = device, host, frame_bytes
        self.life = Life()
        self.quiesce: Callable[[], None] = lambda: None
        """Waits for all issued work and delivers it; whoever delivers puts it here."""
        handlers: dict[str, Callable[[Plan, list[Act], Undo], None]] = {
            "create": self._create,
            "release": self._release,
            "alias": self._map,
            "remap": self._remap,
            "map": self._map,
            "unmap": self._unmap,
            "scrub": self._scrub,
            "copy_out": self._copy_out,
            "copy_in": self._copy_in,
        }
        self._handlers: Final = {action: handlers[action] for action in ACTIONS}

    def run(self, plan: Plan) -> None:
        """Do everything that the plan asks for, or nothing. Raises DeviceError or DeviceFault."""
        self.life.change()
        acts = plan.acts
        if not acts:
            return
        undo: Undo = []
        try:
            if len(acts) == 1:
                self._handlers[acts[0][0].action or ""](plan, acts, undo)
            else:
                self._run_all(plan, undo)
        except DeviceError:
            self._undo(undo)
            raise
        except DeviceFault as fault:
            self.poison(str(fault))
            raise

    def _run_all(self, plan: Plan, undo: Undo) -> None:
        for handler in dict.fromkeys(self._handlers.values()):
            acts = [act for act in plan.acts if self._handlers[act[0].action or ""] == handler]
            if acts:
                handler(plan, acts, undo)

    @property
    def fault(self) -> str | None:
        """Why the manager is poisoned; None while it is not."""
        return self.life.fault

    def poison(self, why: str) -> None:
        """From now on the manager refuses work."""
        self.life.poison(why)

    def _undo(self, undo: Undo) -> None:
        try:
            while undo:
                undo.pop()()
        except (DeviceError, DeviceFault) as error:
            self.poison(f"undo failed: {error}")
            raise DeviceFault(f"undo failed, the manager is poisoned: {error}") from error

    def fence(self, event: Event) -> int:
        """Issue a copy of nothing that ends when the event has passed; its token."""
        return self.ask(lambda: self.device.copy(Direction.OUT, (), after=[event]))

    def ask(self, call: Callable[[], T]) -> T:
        """Make one device call that no plan has. A DeviceFault poisons here too."""
        self.life.change()
        try:
            return call()
        except DeviceFault as fault:
            self.poison(str(fault))
            raise

    def _create(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        """Give the frames that begin to exist their numbers."""
        for _, cells, low, high, _ in acts:
            assert isinstance(cells, Frames)
            made = self.device.create(high - low, self.frame_bytes)
            cells.ids[low:high] = made
            undo.append(partial(self.device.release, made))

    def _release(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        for _, cells, low, high, _ in acts:
            assert isinstance(cells, Frames)
            self.device.release(cells.ids[low:high])

    def _map(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        """Map frames behind those that their ranges have, and frames of spans once more, so that
        nobody can write them there: all in one call."""
        runs: list[MapRun] = []
        frontier: dict[int, int] = {}
        for _, cells, low, high, into in acts:
            if into is None:
                frames = cells.owner.span.ids(high)[low:]
                runs.append(MapRun(self._address(cells, low), frames, read_only=True))
                continue
            assert isinstance(cells, Frames)
            at = frontier.get(id(into), len(into.ids))
            runs.append(MapRun(self._address(into, at), cells.ids[low:high]))
            frontier[id(into)] = at + high - low
        self.device.map(runs)
        mapped = [UnmapRun(run.address, len(run.frames)) for run in runs]
        undo.append(partial(self._unmap_again, mapped))

    def _remap(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        """Unmap frames and map a span's in their place; if that fails, the old ones again."""
        for _, cells, low, high, _ in acts:
            assert isinstance(cells, Frames)
            address, first = self._address(cells, low), cells.owner.first(cells)
            old = MapRun(address, cells.ids[low:high])
            self.device.unmap([UnmapRun(address, high - low)])
            undo.append(partial(self.device.map, [old]))
            new = MapRun(address, plan.span.ids(first + high)[first + low :], read_only=True)
            self.device.map([new])
            if plan.ignored != "scrub":
                self._wipe_at(plan.scratch, old.frames)
            undo.pop()

    def _wipe_at(self, address: int, frames: Sequence[int]) -> None:
        """Overwrite frames that are mapped nowhere. If it fails the old bytes are readable."""
        size = len(frames) * self.frame_bytes
        try:
            self.device.map([MapRun(address, frames)])
            self.device.fill([FillRun(address, size)], SCRUB_BYTE)
            self.device.unmap([UnmapRun(address, len(frames))])
        except DeviceError as error:
            raise DeviceFault(f"scrub failed, the manager is poisoned: {error}") from error

    def _address(self, cells: Cells, ordinal: int) -> int:
        """Where a frame of a range or of a span is mapped."""
        frame: int = cells.owner.first(cells) + ordinal
        return cells.owner.base + frame * self.frame_bytes  # type: ignore[no-any-return]

    def _unmap_again(self, runs: list[UnmapRun]) -> None:
        """Take a mapping back; like every unmap, only on a quiet device."""
        self.quiesce()
        self.device.unmap(runs)

    def _unmap(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        self.device.unmap(
            [UnmapRun(self._address(cells, low), high - low) for _, cells, low, high, _ in acts]
        )

    def _scrub(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        """Overwrite freed frames and slots. If it fails the old bytes are readable: poison."""
        try:
            self.device.fill([self._memory(act) for act in acts], SCRUB_BYTE)
        except DeviceError as error:
            raise DeviceFault(f"scrub failed, the manager is poisoned: {error}") from error

    def _memory(self, act: Act) -> FillRun:
        _, cells, low, high, _ = act
        if isinstance(cells, Frames):
            return FillRun(self._address(cells, low), (high - low) * self.frame_bytes)
        size = self.host.block_bytes
        return FillRun(self.host.address + low * size, (high - low) * size)

    def _copy_out(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        event = plan.event
        if event is None and any("steps" in row.after for row, *_ in acts):
            event = self.device.record(plan.stream)
        after = () if event is None else (event,)
        runs = [CopyRun(host, gpu, size) for gpu, host, size in self._pieces(plan)]
        plan.token = self.device.copy(Direction.OUT, runs, after=after)

    def _copy_in(self, plan: Plan, acts: list[Act], undo: Undo) -> None:
        before = (plan.stream,) if "stream" in acts[0][0].before else ()
        runs = [CopyRun(gpu, source, size) for gpu, source, size in self._pieces(plan)]
        loads = any(self.host.owns(run.source) for run in runs)
        direction = Direction.IN if loads else Direction.WITHIN
        plan.token = self.device.copy(direction, runs, before=before)

    def _pieces(self, plan: Plan) -> Iterator[tuple[int, int, int]]:
        """(GPU address, host address, bytes) for each run of host slots, up to the plan's size."""
        if plan.pieces:
            yield from plan.pieces
            return
        gpu, left, block = plan.base, plan.size_bytes, self.host.block_bytes
        for _, low, high in plan.room:
            size = min((high - low) * block, left)
            if size:
                yield gpu, self.host.address + low * block, size
            gpu += size
            left -= size
