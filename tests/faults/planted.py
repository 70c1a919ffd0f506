"""Planted faults: patches of the production source, each of them a mistake that somebody has made
or could make.

Each is applied to a copy of the sources by the test, one at a time; there is no flag for any of
them in the product. The fuzz has to find every one. A patch whose text is not in the source
exactly once fails, so that the table cannot go stale without being noticed.
"""

from __future__ import annotations

from attrs import frozen


@frozen
class Fault:
    """`old` becomes `new` in one file."""

    name: str
    file: str
    old: str
    new: str
    report: str = ""
    """The public report that has it, where there is one."""
    calls: int = 25
    """How many the shrunk program may have."""
    seed: int = 1
    """Of a campaign that finds it in time."""


FAULTS = (
    Fault(
        "fence skipped",
        "kvstate/flight.py",
        'range_.holders.add(("steps", step.number))',
        "pass",
        "B11",
    ),
    Fault(
        "transfer does not hold its range",
        "kvstate/flight.py",
        "range_.holders.add((transfer.kind, transfer.token))",
        "pass",
        "B20",
    ),
    Fault(
        "suspend changes the sequence before it reserves host room",
        "kvstate/manager.py",
        "        plan, passage, slots = self._attempt(_SUSPEND,",
        "        self.columns.scheduled[seq.row] = seq.length_tokens\n"
        "        plan, passage, slots = self._attempt(_SUSPEND,",
        "S04, B119",
    ),
    Fault(
        "range released twice",
        "kvstate/flight.py",
        "            self.arena.park(range_)\n",
        "            self.arena.park(range_)\n            self.arena.park(range_)\n",
        "B04",
    ),
    Fault(
        "write-out not ordered after the step",
        "kvstate/act.py",
        "after = () if event is None else (event,)",
        "after = ()",
        "S05",
    ),
    Fault(
        "step not ordered after the load",
        "kvstate/act.py",
        'before = (plan.stream,) if "stream" in acts[0][0].before else ()',
        "before = ()",
        "B148",
    ),
    Fault(
        "unmap without quiesce",
        "kvstate/reclaim.py",
        "        self.flight.quiesce()\n        self.remap(fresh",
        "        self.remap(fresh",
        "S03, B161",
    ),
    Fault(
        "charge forgotten for frames in place",
        "kvstate/runs.py",
        '        found["in_place"] = ((own, charged, min(frames, mapped)),)\n',
        "        pass\n",
        "S12",
    ),
    Fault(
        "wrong target: a committed page comes back from the host writable",
        "spec/page.py",
        "            (COMMITTED, HOST_HELD_COMMITTED),\n            (PRIVATE,",
        "            (COMMITTED, HOST_HELD_ACTIVE),\n            (PRIVATE,",
    ),
    Fault(
        "wrong target: mapping ahead is charged",
        "spec/frame.py",
        'Row("map_ahead", POOLED, PARKED,',
        'Row("map_ahead", POOLED, MAPPED,',
        "S11",
    ),
    Fault(
        "frontier one frame short",
        "kvstate/config.py",
        "        return -(-tokens * self.row_bytes // self.frame_bytes)\n",
        "        return max(1, tokens * self.row_bytes // self.frame_bytes)\n",
        "B112",
    ),
    Fault(
        "host slots leaked on drop",
        "spec/coupling.py",
        '    Link("sequence.drop", "host.abandon", "slots", "nobody will read them"),\n',
        "",
        "B52",
    ),
    Fault(
        "late completion of an earlier life accepted",
        "kvstate/flight.py",
        "seq is not None and transfer.current and seq.transfer is transfer",
        "seq is not None",
        "B31, B34",
    ),
    Fault(
        "the old generation is kept: late steps still count",
        "spec/sequence.py",
        "_ends = (life.set(life + 1),)",
        "_ends = (life.set(life + 0),)",
        "B31, B52",
    ),
    Fault(
        "failed load taken for done",
        "kvstate/flight.py",
        "plan.move(_DONE if ok else _FAIL, transfer)",
        "plan.move(_DONE, transfer)",
        "B127",
    ),
    Fault(
        "copy one row short",
        "kvstate/manager.py",
        "plan.size_bytes = tokens * self.geometry.row_bytes\n"
        "        operands = runs.f",
        "plan.size_bytes = (tokens - 1) * self.geometry.row_bytes\n"
        "        operands = runs.f",
        "B109",
    ),
    Fault(
        "host runs read back in another order",
        "kvstate/act.py",
        "        for _, low, high in plan.room:\n",
        "        for _, low, high in sorted(plan.room, key=lambda run: run[2] - run[1]):\n",
        "B76",
    ),
    Fault(
        "rejected tokens stay counted",
        "kvstate/stepping.py",
        "                self.columns.scheduled[seq.row] = seq.length_tokens\n"
        "                self.columns.version += 1\n",
        "                self.columns.version += 1\n",
        "B113",
    ),
    Fault(
        "later steps live on after a rejection",
        "kvstate/stepping.py",
        "                        later.void(seq)\n",
        "                        pass\n",
    ),
    Fault(
        "adopted range stays on offer",
        "kvstate/admission.py",
        "            self.arena.unpark(range_)\n            self.counters",
        "            self.counters",
        "B01",
    ),
    Fault(
        "a failed copy issue leaves its mappings",
        "kvstate/act.py",
        "        undo.append(partial(self._unmap_again, mapped))\n",
        "",
        "B121",
    ),
    Fault(
        "transfer stays in the books after its end",
        "kvstate/flight.py",
        "transfer = self.transfers.pop(token, None)",
        "transfer = self.transfers.get(token)",
        "B37",
    ),
    Fault(
        "host room search does not see that a slot is taken",
        "kvstate/tiers.py",
        "states.startswith(wanted, self._cursor)",
        "states.startswith(wanted[1:], self._cursor)",
    ),
    Fault(
        "frees are not awaited in the same pass",
        "kvstate/reclaim.py",
        "        self.flight.quiesce()\n        self.remap(fresh",
        "        if gpu.coming:\n            return\n"
        "        self.flight.quiesce()\n        self.remap(fresh",
        "S02, B139",
    ),
    Fault(
        "capacity counts frames that are not charged",
        "kvstate/core.py",
        "self._capacity(seq, seq.range.used)",
        "self._capacity(seq, seq.range.mapped)",
        "S12",
    ),
    Fault(
        "freed host memory is not scrubbed",
        "spec/host.py",
        '        Row("abandon", HELD, FREE, "its sequence drops or closes",\n'
        '            action="scrub", failure=_SCRUB_FAILS),\n',
        '        Row("abandon", HELD, FREE, "its sequence drops or closes"),\n',
    ),
    Fault(
        "a row is used again while a step names it",
        "spec/sequence.py",
        "CLOSING, \"its row must outlive the steps in flight\",",
        "CLOSED, \"its row must outlive the steps in flight\",",
        "B43",
    ),
    Fault(
        "the margin takes frames that a later member needs",
        "kvstate/stepping.py",
        "free = self.gpu.free - fresh\n",
        "free = self.gpu.free\n",
        "S11",
    ),
    Fault(
        "all margins are made in one step",
        "kvstate/margins.py",
        "+ int(newcomers) + 1\n",
        "+ int(newcomers) + 100\n",
    ),
    Fault(
        "lengths from before the quiesce",
        "kvstate/stepping.py",
        '{len(batch)} sequences", batch, counts)\n'
        "            ends = columns.scheduled[batch.entries] + counts\n",
        '{len(batch)} sequences", batch, counts)\n',
        "B65",
    ),
    Fault(
        "a wrong number is told as a wrong state",
        "kvstate/core.py",
        '            raise ArgumentError(f"{seq}: {event}:',
        "            from kvstate.errors import IllegalTransition\n"
        '            raise IllegalTransition(str(seq), event, seq.state_name, f"{event}:',
    ),
    Fault(
        "another tenant's prefix is found",
        "kvstate/admission.py",
        "identity = Identity(salt, adapter, self.reuse.epoch)\n",
        'identity = Identity(b"", adapter, self.reuse.epoch)\n',
        "B71",
    ),
    Fault(
        "a page is found before its copy to the host has ended",
        "kvstate/reuse.py",
        "_SERVED: Final = frozenset((STALE.code, STALE_HELD.code))",
        "_SERVED: Final = frozenset((5, STALE.code, STALE_HELD.code))",
        "B149",
    ),
    Fault(
        "the range of the owner is not held while a hit is copied from it",
        "kvstate/admission.py",
        "        transfer.sources = self._sources(match, copied)\n",
        "        transfer.sources = []\n",
        "B20",
    ),
    Fault(
        "the whole prompt is taken from others",
        "kvstate/admission.py",
        "most = min(max(0, len(prompt) // ID_BYTES - 1), max_tokens)",
        "most = min(len(prompt) // ID_BYTES, max_tokens)",
    ),
    Fault(
        "nobody inherits the canonical page",
        "kvstate/lines.py",
        "        return inherited + late, [node for node in lost if node not in gone]\n",
        "        return [], list(nodes)\n",
        "B13",
    ),
    Fault(
        "a failed write-out stays in the index",
        "kvstate/reuse.py",
        "        inherited, lost = ([], []) if ok else self._failed(transfer)\n",
        "        inherited, lost = list[tuple[Node, Sequence]](), list[Node]()\n",
        "B127",
    ),
    Fault(
        "who has left stays in line",
        "kvstate/reuse.py",
        "        for node in seq.nodes[leaving.low :]:\n            self._step_out(node, seq)\n",
        "",
        "B16",
    ),
    Fault(
        "a range lands on one release before the next hold",
        "kvstate/flight.py",
        "            held = [range_ for hold in plan.holds for range_ in self._hold(*hold)]\n",
        "            held = (range_ for hold in plan.holds for range_ in self._hold(*hold))\n",
        "B167",
    ),
    Fault(
        "an alias is mapped so that it can be written",
        "kvstate/act.py",
        "MapRun(self._address(cells, low), frames, read_only=True)",
        "MapRun(self._address(cells, low), frames)",
        "B116",
    ),
    Fault(
        "an alias does not hold its span",
        "kvstate/spans.py",
        "        span.holders[range_.number] = range_\n",
        "",
        "B07",
    ),
    Fault(
        "the frames of a span are parked with its owner's range",
        "kvstate/spans.py",
        '            "passed": ((cells, 0, own, span.frames),),\n',
        "",
        "B07",
    ),
    Fault(
        "a range with aliases is adopted by whoever comes",
        "kvstate/arena.py",
        "        shelf = self.parked.get(signature)\n",
        "        shelf = next(iter(self.parked.values()), None)\n",
    ),
    Fault(
        "a span is given up under a sequence that maps it",
        "kvstate/arena.py",
        "            self.span.need(-1 if owner is None else 1)\n",
        "            pass\n",
        "B13",
    ),
    Fault(
        "a spilled span stays in the index",
        "kvstate/reclaim.py",
        "        self.reuse.given_up(span)\n",
        "",
        "B64",
    ),
    Fault(
        "what a parked range retained stays in the index when it is given up",
        "kvstate/reclaim.py",
        "        self.reuse.given_up(range_)\n",
        "",
        "B64",
    ),
    Fault(
        "a copy reads parked memory that anybody may adopt",
        "kvstate/flight.py",
        "        if range_.state == PARKED.code and range_.kept_frames:\n",
        "        if not range_:\n",
        "S15",
    ),
    Fault(
        "a sequence that moves does not hold what its copy reads",
        "kvstate/rewinding.py",
        "transfer.sources = plan.pieces, [old]",
        "transfer.sources = plan.pieces, []",
        "B20",
    ),
    Fault(
        "landing overwrites what a range retains",
        "kvstate/flight.py",
        '            "frames": ((frames, kept, len(frames.ids)),),\n',
        '            "frames": ((frames, 0, len(frames.ids)),),\n',
    ),
    Fault(
        "the bytes that a parked range retained are not overwritten",
        "spec/coupling.py",
        '    Link("range.empty", "frame.wipe", "wiped", "their bytes are nobody\'s"),\n',
        "",
    ),
    Fault(
        "a parked range retains what hangs behind a prefix that is gone",
        "kvstate/lines.py",
        "        self._release(below)\n",
        "",
        "B32",
    ),
    Fault(
        "the bytes of a spilled span are not overwritten",
        "spec/coupling.py",
        '    Link("span.empty", "frame.wipe", "wiped", "their bytes are nobody\'s"),\n',
        "",
    ),
    Fault(
        "the protected share is not counted by who looks for frames",
        "kvstate/reclaim.py",
        "for span in self.spans.spillable(all_of_them=all_of_them):",
        "for span in self.spans.spillable()[1:]:",
        "S10",
    ),
    Fault(
        "frames beyond the aliases are mapped at the base",
        "kvstate/arena.py",
        "        return 0 if cells is self.aliases else self.shared\n",
        "        return 0\n",
    ),
    Fault(
        "a host copy is found before it has ended",
        "kvstate/reuse.py",
        "self.index.give_slot(node, slot, landed=token is None)",
        "self.index.give_slot(node, slot)",
        "B127",
    ),
    Fault(
        "an heir's page is taken for what the host has a copy of",
        "kvstate/lines.py",
        "            node.edition = heir.editions[node.ordinal]\n        return changed\n",
        "            node.edition = heir.editions[node.ordinal]\n        return []\n",
    ),
    Fault(
        "what somebody computed is remapped",
        "kvstate/spans.py",
        "sharing if copies and same and sharing",
        "sharing if copies and sharing",
    ),
    Fault(
        "a suspend takes a copy that is still on the way",
        "kvstate/reuse.py",
        "            if states[node.slot] == MIRROR.code\n        }",
        "            if states[node.slot] in (MIRROR.code, MIRRORING.code)\n        }",
        "B127",
    ),
    Fault(
        "a fork copies one token less than its parent has",
        "kvstate/admission.py",
        "            length = match.tail_tokens * self.geometry.row_bytes\n",
        "            length = (match.tail_tokens - 1) * self.geometry.row_bytes\n",
        "B116",
    ),
    Fault(
        "a fork has the winner's bytes",
        "kvstate/admission.py",
        "(aliased or node.owner is seq)",
        "True",
        "B116",
    ),
    Fault(
        "extra keys do not matter to part of a block",
        "kvstate/siblings.py",
        "        if node.key[size:] == tail:\n",
        "        if node.key:\n",
        "B74",
    ),
    Fault(
        "extra keys are left out of what is committed",
        "kvstate/stepping.py",
        "        if seq.extras:\n",
        "        if not seq.keys and not keys:\n",
        "B73",
    ),
    Fault(
        "what is cleared is found by who was there before",
        "kvstate/admission.py",
        "        identity = self.reuse.current(seq.identity)\n"
        "        return self._look_up(identity,",
        "        identity = seq.identity\n        return self._look_up(identity,",
        "B67",
    ),
    Fault(
        "a sequence that could never run is let in",
        "kvstate/admission.py",
        "        if frames > self.gpu.budget_frames:\n",
        "        if frames > 2 * self.gpu.budget_frames:\n",
        "B140",
    ),
    Fault(
        "the protected share is kept from one that runs alone",
        "kvstate/spans.py",
        "        return self.columns.counts[ACTIVE.code] > 1\n",
        "        return True\n",
        "S10",
    ),
    Fault(
        "whatever comes back from the host is taken for failed",
        "kvstate/flight.py",
        "        seq = transfer.seq\n        plan = self.plan()\n",
        "        seq = transfer.seq\n        ok = ok and not transfer.inward\n"
        "        plan = self.plan()\n",
    ),
    Fault(
        "a promise is not counted by who grows",
        "kvstate/core.py",
        "        self._check_promises(what, uses)\n",
        "",
        "B136",
    ),
    Fault(
        "fields of an event in an array change places",
        "kvstate/events.py",
        "for name in always + maybe)]\n",
        "for name in always[::-1] + maybe)]\n",
        "B172",
    ),
    Fault(
        "a snapshot tells of one tier only",
        "kvstate/telling.py",
        "            for medium in node.told:\n                listener.stored(",
        "            for medium in node.told[:1]:\n                listener.stored(",
        "B157",
    ),
    Fault(
        "nothing is released at the end",
        "kvstate/manager.py",
        "        self.ladder.release(0)\n",
        "",
    ),
    Fault(
        "the end is left to the device",
        "kvstate/manager.py",
        "    def _end(self) -> None:\n",
        "    def _end(self) -> None:\n        if not self.closed:\n            return\n",
    ),
    Fault(
        "a hit is not held while it is copied",
        "kvstate/reuse.py",
        '            self.index.hold(last, ("load", transfer.token))\n',
        "            pass\n",
        "B79",
    ),
    Fault(
        "what is copied out is not held",
        "kvstate/reuse.py",
        '                self.index.hold(node, ("write", token))\n',
        "                pass\n",
        "B26",
    ),
    Fault(
        "who is closed is asked for copies of spans",
        "kvstate/reuse.py",
        "        if not leaving.low:\n            self.doubles.discard(seq)\n",
        "",
    ),
    Fault(
        "loads are counted and never taken off",
        "kvstate/flight.py",
        "        self.loads -= transfer.loads\n",
        "",
    ),
    Fault(
        "the gate is too strict",
        "kvstate/admission.py",
        "        limit = self.config.max_utilization_for_resume * self.gpu.usable_frames\n",
        "        limit = 0.8 * self.config.max_utilization_for_resume * self.gpu.usable_frames\n",
    ),
    Fault(
        "addresses that are free are refused",
        "kvstate/arena.py",
        "        first = self.addresses.find(extent_frames + self.geometry.guard_frames)\n",
        "        first = self.addresses.find(extent_frames + 2 * self.geometry.guard_frames)\n",
    ),
    Fault(
        "the last row is refused",
        "kvstate/admission.py",
        "        if not self.columns.free:\n",
        "        if len(self.columns.free) < 2:\n",
    ),
    Fault(
        "an illegal settle lets loads end",
        "kvstate/stepping.py",
        "        self._legal(_SETTLE, step)\n        for seq in self._members(step):\n",
        "        self._legal(_SETTLE, step)\n        if self.flight.loads:\n"
        "            self.flight.poll()\n        for seq in self._members(step):\n",
    ),
    Fault(
        "a parent's host copy is given up before its children's",
        "kvstate/blocks.py",
        "        and node.host_children == taken\n"
        "        and (node.owner is not None or len(node.children) == cut)\n    )\n\n\n"
        "def entry(node: Node) -> Entry:\n"
        '    """What the queue of victims has for a block."""\n'
        "    return node.used, -node.ordinal, node.serial, node\n",
        "        and (node.owner is not None or len(node.children) == cut)\n    )\n\n\n"
        "def entry(node: Node) -> Entry:\n"
        '    """What the queue of victims has for a block."""\n'
        "    return node.used, node.ordinal, node.serial, node\n",
        "B146",
    ),
    Fault(
        "what could not be copied out is forgotten",
        "kvstate/mirrors.py",
        "            waiting.put_back(node)\n",
        "            pass\n",
    ),
    Fault(
        "what has lost its host copy is not copied out again",
        "kvstate/index.py",
        "            self._consider(node.parent)\n        self.await_copy(node)\n",
        "            self._consider(node.parent)\n",
    ),
    Fault(
        "what has come back from the host is not copied out again",
        "kvstate/reuse.py",
        "            if node.owner is seq:\n                self.index.await_copy(node)\n",
        "            pass\n",
    ),
    Fault(
        "what is cleared waits for host copies",
        "kvstate/index.py",
        "            self.uncopied = Uncopied()\n",
        "            pass\n",
    ),
    Fault(
        "a page whose bytes have not arrived is an heir",
        "kvstate/lines.py",
        "        inherited, lost = self._inherited(nodes, READY)\n        late",
        "        inherited, lost = self._inherited(nodes)\n        late",
        "B127",
    ),
    Fault(
        "a suspended sequence keeps what others could have on the GPU",
        "kvstate/reuse.py",
        "        self._taken(seq)\n        self._hand_on(seq)\n",
        "        self._taken(seq)\n",
    ),
    Fault(
        "what a suspended sequence has is not found when another has computed it",
        "kvstate/reuse.py",
        "        self._take_over([pair for",
        "        list([pair for",
    ),
    Fault(
        "who closes keeps nothing",
        "kvstate/manager.py",
        "        if event is not _CLOSE or seq.transfer",
        "        if event is _CLOSE or seq.transfer",
    ),
    Fault(
        "who leaves from the host keeps nothing",
        "kvstate/manager.py",
        "            return look(seq, 0, passage, room=host.capacity)\n",
        "            return look(seq, 0, passage)\n",
    ),
    Fault(
        "a look-up stops after one block",
        "kvstate/index.py",
        "            found.append(node)\n            children = node.children\n",
        "            found.append(node)\n            children = {}\n",
    ),
    Fault(
        "a loss is told with another reason",
        "kvstate/manager.py",
        "        return Loss.CLOSED if event is _CLOSE else Loss.DROPPED\n",
        "        return Loss.DROPPED if event is _CLOSE else Loss.CLOSED\n",
    ),
    Fault(
        "a loss is not counted",
        "kvstate/index.py",
        "                self._note(one, reason)\n",
        "                pass\n",
    ),
    Fault(
        "spans take the addresses that sequences need",
        "kvstate/arena.py",
        "        return wanted <= 0\n",
        "        return True\n",
        calls=40,  # a chat of five turns, six calls each
        seed=4,
    ),
    Fault(
        "listeners are not told of the end",
        "kvstate/telling.py",
        "            self._forget_told(Loss.CLOSED)\n",
        "            pass\n",
    ),
    Fault(
        "a quiesce waits for no stream of a caller",
        "kvstate/flight.py",
        "        return list({id(stream): stream for stream in found}.values())\n",
        "        return []\n",
    ),
    Fault(
        "ends that nobody has named are delivered",
        "kvstate/manager.py",
        "        return self.flight.poll() if tokens is None else self.flight.finish(tokens)\n",
        "        return self.flight.poll()\n",
    ),
    Fault(
        "a wait waits for everything",
        "kvstate/manager.py",
        "self.flight.finish([seq.transfer.token] if seq.transfer is not None else [])",
        "self.flight.quiesce() or []",
    ),
    Fault(
        "nobody asks whether a stream is being captured that a sequence leaves",
        "kvstate/core.py",
        "            self._check_captured(seq.stream)\n",
        "            pass\n",
    ),
    Fault(
        "a fork does not wait for what its parent begins with",
        "kvstate/admission.py",
        "        self.flight.arrive(parent)\n        self._legal(_FORK, parent)\n",
        "        self._legal(_FORK, parent)\n",
    ),
    Fault(
        "a rewind that moves keeps the number of the stay",
        "kvstate/rewinding.py",
        "        self._occupy(seq, start.range, seq.stream)\n",
        "        stay = seq.last_stay\n        self._occupy(seq, start.range, seq.stream)\n"
        "        seq.last_stay = stay\n",
    ),
    Fault(
        "a sequence that comes back goes on with the stay that it had",
        "kvstate/admission.py",
        "        seq.last_stay = self.columns.stays\n",
        "        seq.last_stay = seq.last_stay or self.columns.stays\n",
    ),
    Fault(
        "a read in a stay that has ended is let pass",
        "kvstate/tensors.py",
        "        if seq.stay != stay:\n            raise",
        "        if seq.stay is None:\n            raise",
    ),
    Fault(
        "a view of a whole stay ends where the capacity does",
        "kvstate/tensors.py",
        "        if self.layer is not None and self.shape[0] > self.seq.capacity_tokens:\n",
        "        if self.shape[0] > self.seq.capacity_tokens:\n",
    ),
)  # fmt: skip

SEEN_BY_CASES = (
    Fault(
        "a rewind goes into memory that others map",
        "kvstate/sequence.py",
        "        mapped = span is not None and span.users\n",
        "        mapped = False\n",
        "B116",
    ),
    Fault(
        "a rewind does not wait for who copies its pages",
        "kvstate/rewinding.py",
        "            self.flight.finish(sorted(token for _, token in seq.range.holders))\n",
        "            pass\n",
        "B22",
    ),
    Fault(
        "what a sequence leaves is copied as if it were in one piece",
        "kvstate/manager.py",
        "pages = [seq.range.base + node.ordinal * block_bytes for node in nodes]",
        "pages = [seq.range.base + (nodes[0].ordinal + at) * block_bytes\n"
        "                 for at in range(len(nodes))]",
    ),
    Fault(
        "a span takes blocks that somebody else has",
        "kvstate/spans.py",
        "        canonical = all(node.owner is owner for node in hits[first:blocks])\n",
        "        canonical = True\n",
    ),
    Fault(
        "a span takes pages whose bytes are not there yet",
        "kvstate/spans.py",
        "        return states.count(COMMITTED.code) == len(states)\n",
        "        return True\n",
        "B151",
    ),
)  # fmt: skip
"""Those that a case of the corpus sees at once, and drawn calls too seldom."""
