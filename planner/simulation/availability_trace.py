"""Availability traces: which machines of a fleet are alive, over time.

A fleet has numbered *places*, each of which holds one machine or none. A trace gives the places
that hold a machine at the beginning, and all changes, in seconds from the beginning. A machine is
one worker of the job, possibly of several GPUs. It may be slow for a while, or lose some of its
GPUs: the policy decides whether it continues with the others, slower.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import TypeVar

import msgspec

from slipstream.planner.job.file import Job
from slipstream.schedules.schedule import Worker

Value = TypeVar("Value", int, float)


class Change(msgspec.Struct, frozen=True):
    """All changes of a fleet's machines at one instant.

    Machines are numbered by their places in the fleet; lists are ascending. No place is both in
    `removed` and in `added`.
    """

    seconds: float
    removed: tuple[int, ...] = ()
    """Places that lost their machine: numbered slots of the fleet, each for one machine."""
    added: tuple[int, ...] = ()
    """Places that got a machine, whole and of usual speed unless in `slowed` or `gpus`."""
    slowed: tuple[tuple[int, float], ...] = ()
    """Pairs (place, factor): the machine now takes this many times as long; 1: as usual."""
    gpus: tuple[tuple[int, int], ...] = ()
    """Pairs (place, count): so many of the machine's GPUs, at least one, are alive now."""
    links: float = 0.0
    """Factor by which slow links now lengthen the whole job. 1: as usual, 0: no change."""

    @property
    def has_changes(self) -> bool:
        """True if any machine or the links change."""
        return bool(self.removed or self.added or self.slowed or self.gpus or self.links)


class AvailabilityTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Places of a fleet that have a machine, over time.

    Changes are in order of time; those at one instant take effect one after the other.
    """

    name: str
    places: int
    live: tuple[int, ...]
    """Places with a machine at the beginning, ascending."""
    changes: tuple[Change, ...]
    length_seconds: float
    gpus_per_worker: int = 1
    """Number of GPUs of a whole machine, which is one worker of the job."""
    notes: tuple[str, ...] = ()
    """Corrections and assumptions that were made for the trace, one line each."""

    def iterate_live_counts(self) -> Iterator[tuple[float, int]]:
        """Yield pairs (time in seconds, machines alive from then on), the first at 0."""
        alive = len(self.live)
        yield 0.0, alive
        for change in self.changes:
            alive += len(change.added) - len(change.removed)
            yield change.seconds, alive

    @property
    def machine_losses(self) -> int:
        """Number of times that a machine is lost."""
        return sum(len(change.removed) for change in self.changes)

    @property
    def machine_slowdowns(self) -> int:
        """Number of times that a machine becomes slow, or slow by another factor."""
        return sum(factor > 1 for change in self.changes for _, factor in change.slowed)

    @property
    def link_slowdowns(self) -> int:
        """Number of times that the links become slow, or slow by another factor."""
        return sum(change.links > 1 for change in self.changes)

    @property
    def partial_losses(self) -> int:
        """Number of times that a machine loses some of its GPUs and keeps the rest."""
        return sum(map(len, self._iterate_partial_losses()))

    @property
    def mean_live_machines(self) -> float:
        """Mean number of machines alive, over the time of the trace."""
        points = [*self.iterate_live_counts(), (self.length_seconds, 0)]
        area = sum(alive * (after - start) for (start, alive), (after, _) in pairwise(points))
        return area / self.length_seconds

    @property
    def seconds_between_failures(self) -> float:
        """Mean seconds between instants at which machines or GPUs are lost.

        It is the trace's length, divided by the number of such instants if there are any.
        """
        return self.length_seconds / max(
            1,
            sum(
                bool(change.removed or lost)
                for change, lost in zip(self.changes, self._iterate_partial_losses(), strict=True)
            ),
        )

    def _iterate_partial_losses(self) -> Iterator[tuple[int, ...]]:
        """Yield, for each change, the places whose machines lose some GPUs and keep the rest."""
        alive = dict.fromkeys(self.live, self.gpus_per_worker)
        for change in self.changes:
            new_places = set(change.added)
            yield tuple(
                place
                for place, count in change.gpus
                if change.seconds > 0 and place not in new_places and count < alive.get(place, 0)
            )
            for place in change.removed:
                alive.pop(place, None)
            alive |= dict.fromkeys(change.added, self.gpus_per_worker)
            alive |= dict(change.gpus)

    def iterate_policy_changes(self, alive_gpus: Callable[[int], int]) -> Iterator[Change]:
        """Yield the changes as a policy sees them: losses of GPUs become slowness or deaths.

        The function `alive_gpus` maps how many of a machine's N GPUs are alive to how many of them,
        n, the policy uses. The machine then takes N / n times as long, and is down if n is 0. A
        machine that continues with fewer GPUs than before yields two changes at one instant, a loss
        and an addition: its processes have ended, and new ones start on the GPUs left.
        """
        if not any(change.slowed or change.gpus for change in self.changes):
            yield from self.changes
            return
        states = _MachineStates(self.gpus_per_worker, alive_gpus, self.live)
        for change in self.changes:
            for seen in states.translate_change(change):
                if seen.has_changes:
                    yield seen


class _MachineStates:
    """States of machines as a policy sees them: down, or alive with a slowdown factor."""

    def __init__(self, whole: int, alive_gpus: Callable[[int], int], live: Iterable[int]) -> None:
        self._gpus_per_worker = whole
        self._alive_gpus = alive_gpus
        self._live_gpus = dict.fromkeys(live, whole)
        self._slow: dict[int, float] = {}
        self._factor = dict.fromkeys(live, 1.0)
        """Slowdown factor by place, of the machines that are alive for the policy."""
        self._gpus_in_use = dict.fromkeys(live, whole)
        """Number of GPUs that each machine continues with, by place."""

    def translate_change(self, change: Change) -> tuple[Change, Change]:
        """Return two changes that a policy sees, at one instant, in place of `change`.

        A machine that goes on with fewer GPUs is removed in the first and added in the second; the
        first has everything else.
        """
        for place in change.removed:
            self._live_gpus.pop(place, None)
            self._slow.pop(place, None)
        self._live_gpus |= dict.fromkeys(change.added, self._gpus_per_worker)
        self._live_gpus |= {
            place: count for place, count in change.gpus if place in self._live_gpus
        }
        self._slow |= {place: factor for place, factor in change.slowed if place in self._live_gpus}
        # Compare what the policy saw before with what it sees now, place by place.
        touched = {
            *change.removed,
            *change.added,
            *(place for place, _ in (*change.slowed, *change.gpus)),
        }
        removed = list[int]()
        added = list[int]()
        slowed = list[tuple[int, float]]()
        anew = list[tuple[int, float]]()
        for place in sorted(touched):
            before = self._factor.pop(place, None)
            going = self._alive_gpus(self._live_gpus.get(place, 0))
            had, self._gpus_in_use[place] = self._gpus_in_use.get(place, 0), going
            if not going:
                removed += [place] if before is not None else []
                continue
            after = self._factor[place] = self._slow.get(place, 1.0) * self._gpus_per_worker / going
            # Fewer GPUs end the processes of a machine: to the policy, it dies and joins anew.
            if before is not None and going < had and change.seconds > 0:
                removed.append(place)
                anew.append((place, after))
                continue
            added += [place] if before is None else []
            slowed += [(place, after)] if after != (before or 1.0) else []
        return Change(
            change.seconds, tuple(removed), tuple(added), tuple(slowed), links=change.links
        ), Change(change.seconds, added=tuple(place for place, _ in anew), slowed=tuple(anew))


def group_gpus(trace: AvailabilityTrace, gpus: int) -> AvailabilityTrace:
    """Return the trace of workers that a trace of single GPUs amounts to.

    Each worker has `gpus` GPUs of consecutive numbers. A worker is lost with the last of its GPUs,
    and returns with the first one that returns. Slowness of single GPUs is left out. Raises
    ValueError unless `gpus` is at least 1 and divides the number of places.
    """
    if gpus < 1 or trace.places % gpus:
        raise ValueError(
            f"{trace.places} GPUs cannot be divided into workers of {gpus}; expected a multiple"
        )
    count = [0] * (trace.places // gpus)
    for place in trace.live:
        count[place // gpus] += 1
    live = tuple(worker for worker, alive in enumerate(count) if alive)
    changes = [
        Change(0.0, gpus=tuple((worker, count[worker]) for worker in live if count[worker] < gpus))
    ]
    # Only a worker's first and last GPU change whether it is alive; others change its count.
    for change in trace.changes:
        counts_before = dict[int, int]()
        for places, step in ((change.removed, -1), (change.added, 1)):
            for place in places:
                counts_before.setdefault(place // gpus, count[place // gpus])
                count[place // gpus] += step
        workers = sorted(
            worker for worker in counts_before if counts_before[worker] != count[worker]
        )
        changes.append(
            Change(
                change.seconds,
                removed=tuple(worker for worker in workers if not count[worker]),
                added=tuple(worker for worker in workers if not counts_before[worker]),
                gpus=tuple((worker, count[worker]) for worker in workers if count[worker]),
                links=change.links,
            )
        )
    return msgspec.structs.replace(
        trace,
        places=len(count),
        live=live,
        gpus_per_worker=gpus,
        changes=tuple(change for change in changes if change.has_changes),
    )


def with_node_failures(
    trace: AvailabilityTrace, nodes: Sequence[tuple[int, ...]]
) -> AvailabilityTrace:
    """Return a trace in which a node is down while any machine of it is.

    The argument `nodes` has the places of each node; each place belongs to one.
    """
    node_of = {place: number for number, places in enumerate(nodes) for place in places}
    missing = [len(places) for places in nodes]
    for place in trace.live:
        missing[node_of[place]] -= 1
    live = tuple(place for place in range(trace.places) if not missing[node_of[place]])
    changes = []
    for change in trace.changes:
        before = {
            node_of[place]: missing[node_of[place]] for place in (*change.removed, *change.added)
        }
        for places, step in ((change.removed, 1), (change.added, -1)):
            for place in places:
                missing[node_of[place]] += step
        # A node goes down with its first machine, and returns with its last.
        removed: list[int] = []
        added: list[int] = []
        for number, missing_before in before.items():
            if missing[number] and not missing_before:
                removed += nodes[number]
            elif missing_before and not missing[number]:
                added += nodes[number]
        changes.append(
            msgspec.structs.replace(
                change, removed=tuple(sorted(removed)), added=tuple(sorted(added))
            )
        )
    return msgspec.structs.replace(
        trace,
        live=live,
        notes=(
            *trace.notes,
            f"{len(nodes)} nodes: a whole node is down while any machine of it is",
        ),
        changes=tuple(changed for changed in changes if changed.has_changes),
    )


def find_node_places(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return, for each node of the job, the places of its workers in a trace.

    The place of a worker is its pipeline x stages + its column.
    """
    places = []
    for node in job.nodes:
        places.append(tuple(worker.pipeline * job.stages + worker.column for worker in node))
    return tuple(places)


DEATH_SECONDS = 60.0
"""Seconds after which the workers die in a trace of `build_death_trace`."""


def build_death_trace(
    job: Job, dead: Sequence[Worker], days: float = 1.0, gpus_per_worker: int = 1
) -> AvailabilityTrace:
    """Return a trace of `days` days in which the workers `dead` die for good.

    All die after a minute. Raises ValueError for workers that the job does not have.
    """
    places = []
    for worker in dead:
        if not (worker.pipeline < job.pipelines and worker.column < job.stages):
            raise ValueError(
                f"{worker}: no such worker; the job has {job.pipelines} pipelines and {job.stages} "
                "stages"
            )
        places.append(worker.pipeline * job.stages + worker.column)
    workers = job.pipelines * job.stages
    names = ", ".join(map(str, dead[:8])) + (f" and {len(dead) - 8} more" if len(dead) > 8 else "")
    return AvailabilityTrace(
        name=f"{names} dead",
        places=workers,
        live=tuple(range(workers)),
        length_seconds=days * 86400,
        gpus_per_worker=gpus_per_worker,
        changes=(Change(DEATH_SECONDS, removed=tuple(sorted(places))),),
    )


def fit_to_job(
    trace: AvailabilityTrace, workers: int, seed: int = 0, nodes: Sequence[tuple[int, ...]] = ()
) -> AvailabilityTrace:
    """Return a trace like the given one, with one place per worker of a job.

    Each place of the given trace becomes a worker or, with `nodes` (the places of each node's
    workers), all workers of a node, which leave and return together. A job smaller than the fleet
    gets places drawn at random by `seed`, so that it has the fleet's failure rate per machine. For
    a larger job, each place represents one or several neighbouring workers or nodes, which fail
    together. If the numbers are equal and there are no nodes, the trace itself is returned.
    Raises ValueError for a trace without places, or a job without workers.
    """
    if trace.places < 1 or workers < 1:
        raise ValueError(
            f"a trace of {trace.places} places and {workers} workers; expected at least one of each"
        )
    units = nodes or tuple((worker,) for worker in range(workers))
    if len(units) == trace.places and not nodes:
        return trace
    if len(units) < trace.places:
        chosen = sorted(random.Random(seed).sample(range(trace.places), len(units)))
        members = {place: units[index] for index, place in enumerate(chosen)}
        note = (
            f"the job's {len(units)} {'nodes' if nodes else 'workers'} are drawn at random from "
            f"the trace's {trace.places} places"
        )
    else:
        edges = [len(units) * place // trace.places for place in range(trace.places + 1)]
        members = {}
        for place, (first, end) in enumerate(pairwise(edges)):
            members[place] = tuple(chain.from_iterable(units[first:end]))
        note = (
            f"each of the trace's {trace.places} places represents {workers / trace.places:.3g} "
            "workers"
        )

    # A place of the trace that represents no unit of the job drops out of all changes.
    def renumber(places: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(index for place in places for index in members.get(place, ())))

    def with_values(pairs: tuple[tuple[int, Value], ...]) -> tuple[tuple[int, Value], ...]:
        return tuple(
            sorted((index, value) for place, value in pairs for index in members.get(place, ()))
        )

    changes = (
        Change(
            change.seconds,
            renumber(change.removed),
            renumber(change.added),
            with_values(change.slowed),
            with_values(change.gpus),
            change.links,
        )
        for change in trace.changes
    )
    return msgspec.structs.replace(
        trace,
        places=workers,
        live=renumber(trace.live),
        notes=(*trace.notes, note),
        changes=tuple(changed for changed in changes if changed.has_changes),
    )
