"""A scripted transport, whose transfers arrive when the seed says so.

Its process groups have the manners of gloo or NCCL.

Gloo: transfers are matched by tag, what was sent may be on its way when its sender dies, and an
error comes to whoever waits for one that is gone. NCCL: calls are matched by their order, nobody
hears of a death, and an abort lets what was under way end as if all were well, with NaN in all that
it should have filled.
"""

from collections import defaultdict, deque
from contextlib import nullcontext

import torch

from slipstream.runtime.replay.gloo import SHUT_REASON
from tests.runtime.exact.fibers import let_others_run, wait_until


class Wires:
    """All groups of a run, and what may arrive next."""

    def __init__(self, rng) -> None:
        self.rng, self.rooms, self.arriving = rng, {}, []
        self.is_cut = lambda prefix: False
        """Whether the members of a group never reach each other.

        The group is that of this prefix in the store.
        """

    def room(self, key, size):
        return self.rooms.setdefault(key, [None] * size)

    def can(self):
        """What may happen next, by the name of the method."""
        return ["arrives"] if self.arriving else []

    def arrives(self) -> None:
        """Something does that is on its way."""
        place = self.rng.randrange(len(self.arriving))
        self.arriving[place], self.arriving[-1] = self.arriving[-1], self.arriving[place]
        self.arriving.pop()()


class Store(dict):
    """That of one coordinator: keys."""

    def set(self, key, value) -> None:
        self[key] = value

    def get(self, key):
        return self[key]

    def compare_set(self, key, expected, desired) -> bytes:
        return self.setdefault(key, desired.encode())

    def add(self, key, amount) -> int:
        self[key] = self.get_number(key) + amount
        return self[key]

    def get_number(self, key) -> int:
        return dict.get(self, key, 0)

    def check(self, keys) -> bool:
        return all(key in self for key in keys)

    def multi_get(self, keys):
        return [self[key] for key in keys]


class Work:
    """A transfer of one member."""

    def __init__(self, group, tensors, peers) -> None:
        self.group, self.tensors, self.peers, self.done = group, tensors, peers, False

    def failed(self) -> bool:
        return self.group.broken or any(member is None or member.broken for member in self.peers())

    def wait(self) -> bool:
        if not self.done:
            wait_until(lambda: self.done or self.failed())
        if not self.done:
            raise RuntimeError("a connection was closed")
        return True

    def is_completed(self) -> bool:
        return self.done


class GlooEnd:
    """One member's end of a group over gloo."""

    def __init__(self, wires, room, rank) -> None:
        self.wires, self.room, self.rank, self.broken = wires, room, rank, False
        self.sent, self.wanted = defaultdict(deque), defaultdict(deque)
        self.sums = []

    def send(self, tensors, target, tag):
        self._require()
        work = Work(
            self,
            [tensors[0].clone()] if self.wires.rng.random() < 0.5 else tensors,
            lambda: [self.room[target]],
        )
        other = self.room[target]
        if work.tensors is not tensors:
            work.done = not other.broken
        if not other.broken:
            other._came(self.rank, tag, work)
        return work

    def recv(self, tensors, source, tag):
        self._require()
        work = Work(self, tensors, lambda: [self.room[source]])
        came = self.sent[source, tag]
        if came:
            self._match(came.popleft(), work)
        else:
            self.wanted[source, tag].append(work)
        return work

    def allreduce(self, tensors):
        self._require()
        work = Work(self, tensors, lambda: self.room)
        self.sums.append(work)
        place, all_of = len(self.sums) - 1, self.room
        if all(work is not None and len(work.sums) > place for work in all_of):
            works = [work.sums[place] for work in all_of]
            total = sum(work.tensors[0].clone() for work in works)
            for finished in works:
                self.wires.arriving.append(lambda work=finished: self._put(work, total))
        return work

    def _came(self, source, tag, work) -> None:
        waits = self.wanted[source, tag]
        if waits:
            self._match(work, waits.popleft())
        else:
            self.sent[source, tag].append(work)

    def _match(self, sent, wanted) -> None:
        def arrive() -> None:
            if wanted.group.broken or (sent.group.broken and self.wires.rng.random() < 0.5):
                return
            with torch.no_grad():
                wanted.tensors[0].copy_(sent.tensors[0])
            sent.done = wanted.done = True

        self.wires.arriving.append(arrive)

    def _put(self, work, total) -> None:
        if not work.failed():
            with torch.no_grad():
                work.tensors[0].copy_(total)
            work.done = True

    def _require(self) -> None:
        let_others_run()
        if self.broken:
            raise RuntimeError(SHUT_REASON)


class ScriptedGloo:
    """As `runtime.replay.gloo.GlooBackend`, of one process."""

    ordered = False

    def __init__(self, wires) -> None:
        self.wires, self.ends, self.aborts = wires, [], 0

    def creating_groups(self, exempt_sockets):
        return nullcontext()

    def create_group(self, meeting):
        if self.wires.is_cut(meeting.prefix):
            let_others_run()
            raise RuntimeError("a connection was refused")
        aborts, room = (
            self.aborts,
            self.wires.room(("gloo", id(meeting.store), meeting.prefix), meeting.size),
        )
        end = room[meeting.rank] = GlooEnd(self.wires, room, meeting.rank)
        self.ends.append(end)
        wait_until(lambda: self.aborts > aborts or all(member is not None for member in room))
        if self.aborts > aborts or any(member.broken for member in room):
            end.broken = True
            raise RuntimeError("a member was not met")
        return end

    def allow_reuse(self, group) -> None:
        pass

    def abort_groups(self, groups) -> None:
        self.cut_connections()

    def cut_connections(self):
        self.aborts += 1
        for end in self.ends:
            end.broken = True
        self.ends = []
        return frozenset()

    def failure_reason(self, group):
        return SHUT_REASON if group.broken else None

    def is_quiescent(self, groups) -> bool:
        return True

    def close_groups(self, groups) -> None:
        pass


class Call(Work):
    """What is under way over NCCL: its `wait` is that of a stream."""

    def __init__(self, group, name, given, filled) -> None:
        super().__init__(group, given, lambda: ())
        self.name, self.filled, self.matched = name, filled, False

    def wait(self) -> bool:
        if not self.done:
            wait_until(lambda: self.done)
        return True


class NcclEnd:
    """One member's end of a communicator: both an `NcclGroup` and the group within."""

    device = torch.device("cpu")

    def __init__(self, wires, key, rank, size) -> None:
        self.wires, self.rank, self.size, self.broken, self.group = wires, rank, size, False, self
        self.room, self.calls, self.first = wires.room(key, size), [], 0
        self.room[rank] = self

    def connect(self) -> None:
        wait_until(lambda: self.broken or all(member is not None for member in self.room))
        if self.broken:
            raise RuntimeError("it was aborted")
        if any(member.broken for member in self.room):  # which nobody hears
            wait_until(lambda: self.broken)
            raise RuntimeError("it was aborted")

    def wait_for_device(self, work) -> None:
        work.wait()

    def watchdog_error(self):
        is_unfinished = any(not call.done for call in self.calls)
        lost = is_unfinished and any(member is not None and member.broken for member in self.room)
        return "a member is gone" if lost else None

    def abort(self) -> None:
        self.broken = True
        for call in self.calls:
            if not call.done:
                self._end(call, None)

    def _end(self, call, results) -> None:
        with torch.no_grad():
            for place, tensor in enumerate(call.filled):
                if results is None:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
                else:
                    tensor.copy_(results[place].view_as(tensor))
        call.done = True

    def _begin(self, name, given, filled):
        let_others_run()
        if self.broken:
            raise RuntimeError("it was aborted")
        call = Call(self, name, given, filled)
        self.calls.append(call)
        self._look()
        return call

    def _look(self) -> None:
        """Match the calls that all have come to."""
        while True:
            turn = []
            for member in self.room:
                has_come = member is not None and member.first < len(member.calls)
                turn.append(member.calls[member.first] if has_come else None)
            if any(call is None for call in turn):
                return
            if any(member.broken for member in self.room):
                return
            results = _carried_out(turn)
            for rank, (call, found) in enumerate(zip(turn, results, strict=True)):
                self.room[rank].first += 1
                self.wires.arriving.append(lambda call=call, found=found: self._arrive(call, found))

    def _arrive(self, call, found) -> None:
        end = call.group
        if call.done:
            return
        place = end.calls.index(call)
        if any(not call.done for call in end.calls[:place]):  # in their order
            self.wires.arriving.append(lambda: self._arrive(call, found))
        elif all(not member.broken for member in self.room) or self.wires.rng.random() < 0.5:
            self._after(call, found)

    def _after(self, call, found) -> None:
        self._end(call, found)
        end = call.group
        while end.calls and end.first and end.calls[0].done:
            end.calls.pop(0)
            end.first -= 1

    def send(self, tensors, target, tag):
        return self._begin("pair", [tensors[0].detach().clone()], [])

    def recv(self, tensors, source, tag):
        return self._begin("pair", None, tensors)

    def allreduce(self, tensors, options=None):
        return self._begin("sum", tensors, tensors)

    def broadcast(self, tensor, root):
        return self._begin(("broadcast", root), [tensor], [tensor])

    def _allgather_base(self, output, input):
        return self._begin("gather", [input.clone()], [output])

    def _reduce_scatter_base(self, output, input, options=None):
        return self._begin("scatter", [input], [output])

    def alltoall_base(self, output, input, takes, gives):
        return self._begin("all to all", (input, takes, gives), [output])


def _carried_out(calls):
    """The results of one call of all members.

    Each has those of the tensors that it fills.
    """
    names = {call.name for call in calls}
    assert len(names) == 1, f"they do not agree on what is next: {names}"
    name = names.pop()
    if name == "pair":
        assert [call.tensors is None for call in calls].count(True) == 1, "one sends, one receives"
        (sent,) = next(call.tensors for call in calls if call.tensors is not None)
        results = []
        for call in calls:
            results.append([sent] if call.filled else [])
        return results
    if name == "all to all":
        parts = [call.tensors[0].clone().split(call.tensors[2]) for call in calls]
        results = []
        for rank in range(len(calls)):
            results.append([torch.cat([mine[rank] for mine in parts])])
        return results
    tensors = [call.tensors[0].detach().clone() for call in calls]
    if name == "sum":
        return [[sum(tensors)]] * len(calls)
    if name == "gather":
        return [[torch.cat([tensor.flatten() for tensor in tensors])]] * len(calls)
    if name == "scatter":
        return [[part] for part in sum(tensors).view(len(calls), -1)]
    return [[tensors[name[1]]]] * len(calls)
