"""Availability traces: which machines of a fleet are alive, over time.

A fleet has numbered *places*. At any time a place holds one machine or none. A trace says which places hold a machine
at the beginning, and what changes when. Times are seconds from the beginning.

A machine may be slow for a while. A machine of several GPUs (a tensor-parallel group, one worker of the job) may lose
some of them: whether it goes on with the others, slower, is for the policy to say (`changes_for`).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from slipstream.planner.job.file import Job
from slipstream.schedules.schedule import Worker

Value = TypeVar("Value", int, float)


class Change(msgspec.Struct, frozen=True):
    """What changes at one instant. All lists are ascending, and no place is both removed and added."""

    seconds: float
    removed: tuple[int, ...] = ()
    """Places that lost their machine."""
    added: tuple[int, ...] = ()
    """Places that got one: a whole one at its usual speed, unless the lists below say otherwise."""
    slowed: tuple[tuple[int, float], ...] = ()
    """Pairs (place, factor): its machine takes so many times as long from now on; 1 is its usual speed."""
    gpus: tuple[tuple[int, int], ...] = ()
    """Pairs (place, count): so many GPUs of its machine are alive from now on, at least one."""
    links: float = 0.0
    """The links are slow: the whole job takes so many times as long from now on; 1: as usual, 0: as before."""

    @property
    def anything(self) -> bool:
        """Whether anything changes."""
        return bool(self.removed or self.added or self.slowed or self.gpus or self.links)


class AvailabilityTrace(msgspec.Struct, frozen=True, kw_only=True):
    """When the machines of a fleet come and go. Changes are in the order of time, at most one an instant."""

    name: str
    places: int
    live: tuple[int, ...]
    """Places with a machine at the beginning, ascending."""
    changes: tuple[Change, ...]
    length_seconds: float
    gpus_per_worker: int = 1
    """GPUs of a whole machine."""
    notes: tuple[str, ...] = ()
    """What was corrected or assumed when the trace was made, one line each."""

    def counts(self) -> Iterator[tuple[float, int]]:
        """Pairs (seconds, machines alive from then on). The first is at 0."""
        alive = len(self.live)
        yield 0.0, alive
        for change in self.changes:
            alive += len(change.added) - len(change.removed)
            yield change.seconds, alive

    @property
    def removals(self) -> int:
        """How many machines are lost in all."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def slowdowns(self) -> int:
        """How many times a machine becomes slow."""
        return sum(factor > 1 for change in self.changes for _, factor in change.slowed)

    @property
    def link_slowdowns(self) -> int:
        """How many times the links become slow."""
        return sum(change.links > 1 for change in self.changes)

    @property
    def partial_losses(self) -> int:
        """How many times a machine loses some of its GPUs and is left with others."""
        return sum(map(len, self._partly_lost()))

    @property
    def mean_live(self) -> float:
        """Machines alive, averaged over time."""
        points = [*self.counts(), (self.length_seconds, 0)]
        area = sum(alive * (after - start) for (start, alive), (after, _) in pairwise(points))
        return area / self.length_seconds

    @property
    def seconds_between_failures(self) -> float:
        """Mean time between instants at which machines or GPUs of them are lost; the length of the trace where there is
        at most one."""
        return self.length_seconds / max(1, sum(bool(change.removed or lost) for change, lost in zip(
            self.changes, self._partly_lost(), strict=True)))

    def _partly_lost(self) -> Iterator[tuple[int, ...]]:
        """By change, the machines that go on with fewer GPUs than before. At 0 nothing is lost: the trace begins so."""
        alive = dict.fromkeys(self.live, self.gpus_per_worker)
        for change in self.changes:
            fresh = set(change.added)
            yield tuple(place for place, count in change.gpus
                        if change.seconds > 0 and place not in fresh and count < alive.get(place, 0))
            for place in change.removed:
                alive.pop(place, None)
            alive |= dict.fromkeys(change.added, self.gpus_per_worker)
            alive |= dict(change.gpus)

    def changes_for(self, alive_gpus: Callable[[int], int]) -> Iterator[Change]:
        """The changes as a policy sees them, without `gpus`: machines that lost GPUs are slower, or down.

        `alive_gpus` gives, by how many GPUs of a machine are alive, with how many of them it goes on; 0: it is down. A
        machine that goes on with n of N takes N / n times as long. One that loses some of these is removed, and added
        by the next change, at the same instant: all of its processes have ended, and those that go on begin anew.
        """
        if not any(change.slowed or change.gpus for change in self.changes):
            yield from self.changes
            return
        states = _MachineStates(self.gpus_per_worker, alive_gpus, self.live)
        for change in self.changes:
            for seen in states.seen(change):
                if seen.anything:
                    yield seen


class _MachineStates:
    """What a policy takes the machines to be: down, or alive and so many times slower."""

    def __init__(self, whole: int, alive_gpus: Callable[[int], int], live: Iterable[int]) -> None:
        self._whole = whole
        self._alive_gpus = alive_gpus
        self._gpus = dict.fromkeys(live, whole)
        self._slow: dict[int, float] = {}
        self._factor = dict.fromkeys(live, 1.0)
        """By place of a machine that is alive for the policy."""
        self._going = dict.fromkeys(live, whole)
        """And with how many of its GPUs."""

    def seen(self, change: Change) -> tuple[Change, Change]:
        """The change for the policy, and what begins anew with fewer GPUs right after it."""
        for place in change.removed:
            self._gpus.pop(place, None)
            self._slow.pop(place, None)
        self._gpus |= dict.fromkeys(change.added, self._whole)
        self._gpus |= {place: count for place, count in change.gpus if place in self._gpus}
        self._slow |= {place: factor for place, factor in change.slowed if place in self._gpus}
        touched = {*change.removed, *change.added, *(place for place, _ in (*change.slowed, *change.gpus))}
        removed, added, slowed, anew = list[int](), list[int](), list[tuple[int, float]](), list[tuple[int, float]]()
        for place in sorted(touched):
            before, going = self._factor.pop(place, None), self._alive_gpus(self._gpus.get(place, 0))
            had, self._going[place] = self._going.get(place, 0), going
            if not going:
                removed += [place] if before is not None else []
                continue
            after = self._factor[place] = self._slow.get(place, 1.0) * self._whole / going
            if before is not None and going < had and change.seconds > 0:
                removed.append(place)
                anew.append((place, after))
                continue
            added += [place] if before is None else []
            slowed += [(place, after)] if after != (before or 1.0) else []
        return Change(change.seconds, tuple(removed), tuple(added), tuple(slowed), links=change.links), \
            Change(change.seconds, added=tuple(place for place, _ in anew), slowed=tuple(anew))


def group_gpus(trace: AvailabilityTrace, gpus: int) -> AvailabilityTrace:
    """A trace of single GPUs as one of workers, each of so many neighbouring places. Raises ValueError for a remainder.

    A worker is lost when its last GPU is, and is there again when the first comes back.
    """
    if gpus < 1 or trace.places % gpus:
        raise ValueError(f"{trace.places} GPUs do not make workers of {gpus}")
    count = [0] * (trace.places // gpus)
    for place in trace.live:
        count[place // gpus] += 1
    live = tuple(worker for worker, alive in enumerate(count) if alive)
    changes = [Change(0.0, gpus=tuple((worker, count[worker]) for worker in live if count[worker] < gpus))]
    for change in trace.changes:
        before = dict[int, int]()
        for places, step in ((change.removed, -1), (change.added, 1)):
            for place in places:
                before.setdefault(place // gpus, count[place // gpus])
                count[place // gpus] += step
        workers = sorted(worker for worker in before if before[worker] != count[worker])
        changes.append(Change(
            change.seconds, tuple(worker for worker in workers if not count[worker]),
            tuple(worker for worker in workers if not before[worker]),
            gpus=tuple((worker, count[worker]) for worker in workers if count[worker]), links=change.links))
    return msgspec.structs.replace(
        trace, places=len(count), live=live, gpus_per_worker=gpus,
        changes=tuple(change for change in changes if change.anything))


def fail_together(trace: AvailabilityTrace, nodes: Sequence[tuple[int, ...]]) -> AvailabilityTrace:
    """The trace where the places of a node are there only while all of them are: a failure of one takes the others.

    `nodes`: the places of each node; each place of the trace once.
    """
    node_of = {place: number for number, places in enumerate(nodes) for place in places}
    missing = [len(places) for places in nodes]
    for place in trace.live:
        missing[node_of[place]] -= 1
    live = tuple(place for place in range(trace.places) if not missing[node_of[place]])
    changes = []
    for change in trace.changes:
        before = {node_of[place]: missing[node_of[place]] for place in (*change.removed, *change.added)}
        for places, step in ((change.removed, 1), (change.added, -1)):
            for place in places:
                missing[node_of[place]] += step
        removed, added = (tuple(sorted(place for number in before for place in nodes[number]
                                       if bool(before[number]) == was and bool(missing[number]) != was))
                          for was in (False, True))
        changes.append(msgspec.structs.replace(change, removed=removed, added=added))
    return msgspec.structs.replace(
        trace, live=live, notes=(*trace.notes, f"{len(nodes)} nodes: all of a node is down while a part of it is"),
        changes=tuple(one for one in changes if one.anything))


def places_of_nodes(job: Job) -> tuple[tuple[int, ...], ...]:
    """The places that the workers of each node of a job take in a trace that is fitted to it, pipeline by pipeline."""
    return tuple(tuple(worker.pipeline * job.stages + worker.column for worker in node) for node in job.nodes)


DIE_AFTER = 60.0
"""Seconds after which workers die in a trace of these deaths alone."""


def died(job: Job, dead: Sequence[Worker], days: float = 1.0, gpus_per_worker: int = 1) -> AvailabilityTrace:
    """A trace in which these workers die after a minute and stay away. Raises ValueError for workers that are not
    there.
    """
    places = []
    for worker in dead:
        if not (worker.pipeline < job.pipelines and worker.column < job.stages):
            raise ValueError(f"{worker}: no such worker; the job has {job.pipelines} pipelines and {job.stages} stages")
        places.append(worker.pipeline * job.stages + worker.column)
    workers = job.pipelines * job.stages
    names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
    return AvailabilityTrace(
        name=f"{names} dead", places=workers, live=tuple(range(workers)), length_seconds=days * 86400,
        gpus_per_worker=gpus_per_worker, changes=(Change(DIE_AFTER, removed=tuple(sorted(places))),))


def fit_to_job(trace: AvailabilityTrace, workers: int, seed: int = 0,
               nodes: Sequence[tuple[int, ...]] = ()) -> AvailabilityTrace:
    """The trace for a job of so many workers, with places 0 to workers - 1.

    A place of the given trace is a worker; with `nodes`, the workers of each node, it is a node, whose workers come and
    go together. A job smaller than the fleet gets places drawn at random. So it sees the fleet's failure rate per
    machine, and the same share of machines alive. For a job larger than the fleet, each place of the trace stands for
    several neighbouring workers or nodes, which fail together. Raises ValueError for a trace without places.
    """
    if trace.places < 1 or workers < 1:
        raise ValueError(f"a trace of {trace.places} places cannot be fitted to {workers} workers")
    units = nodes or tuple((worker,) for worker in range(workers))
    if len(units) == trace.places and not nodes:
        return trace
    if len(units) < trace.places:
        chosen = sorted(random.Random(seed).sample(range(trace.places), len(units)))
        members = {place: units[index] for index, place in enumerate(chosen)}
        note = (f"the job's {len(units)} {'nodes' if nodes else 'workers'} are drawn at random from the trace's "
                f"{trace.places} places")
    else:
        edges = [len(units) * place // trace.places for place in range(trace.places + 1)]
        members = {place: tuple(worker for unit in units[edges[place]:edges[place + 1]] for worker in unit)
                   for place in range(trace.places)}
        note = f"each of the trace's {trace.places} places stands for {workers / trace.places:.3g} workers"

    def renamed(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(index for place in places for index in members.get(place, ())))

    def with_values(pairs: tuple[tuple[int, Value], ...]) -> tuple[tuple[int, Value], ...]:
        return tuple(sorted((index, value) for place, value in pairs for index in members.get(place, ())))

    changes = (Change(change.seconds, renamed(change.removed), renamed(change.added), with_values(change.slowed),
                      with_values(change.gpus), change.links) for change in trace.changes)
    return msgspec.structs.replace(
        trace, places=workers, live=renamed(trace.live), notes=(*trace.notes, note),
        changes=tuple(one for one in changes if one.anything))
