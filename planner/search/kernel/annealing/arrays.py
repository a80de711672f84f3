"""The arrays of annealing. All are of 64-bit integers.

Indices: op (unit * kinds + kind, as in `planner.model.arrays`), unit (a micro-batch at a stage), worker (the row of a
live worker), place (in a worker's order), group (a reduce group), slice, pipeline. Times are in ticks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LARGEST_RUN = 6
"""Most ops in a run of neighbours that changes places with another one."""
LONGEST_JUMP = 16
"""Most ops that a single one jumps over."""
BUCKETS = 1024
"""Of the queue, which together span the ticks of the first plan."""
FOREVER = 2**61
"""Ticks beyond those of any plan."""


class TransferArcs(NamedTuple):
    """Precedence arcs, compressed: those of op i have the numbers start[i] to below start[i + 1]."""

    start: Ints
    """[ops + 1]"""
    op: Ints
    """[arc] the op at the other end"""
    transfer: Ints
    """[arc] ticks between the two ops where two workers run them; 0 where no tensor passes"""


class Instance(NamedTuple):
    """What annealing never changes."""

    kinds: int
    """Ops of a unit."""
    unit: Ints
    """[op]"""
    slice: Ints
    """[unit]"""
    predecessors: TransferArcs
    """What each op waits for."""
    successors: TransferArcs
    """What waits for each op."""
    group: Ints
    """[worker] its reduce group"""
    linked: Ints
    """[group, number] those whose gradients are reduced with some of its own, itself included; -1 behind the last"""
    interleaved: int
    """1 where reductions may lie between compute ops, as they take no time; else they come after all of these"""
    sharers: Ints
    """[reduction, number]; for this and what follows see `planner.model.arrays.Reductions`"""
    ticks: Ints
    """[reduction]"""
    awaiting: Ints
    """[slice, number]"""
    between: Ints
    """[group, number]"""
    tail: Ints
    """[worker] ticks from the end of its group to that of its window"""
    pipeline: Ints
    """[worker]"""
    members: Ints
    """[pipeline, number] its workers; -1 behind the last"""
    capacity: Ints
    """[worker] memory; -1: unlimited"""
    holds: Ints
    """[op] memory that its worker holds more, from the op's start (F) or end (I, W) on"""
    movable: Ints
    """units that more than one worker may run"""
    hosts: Ints
    """[slice, number] workers that may run it; -1 behind the last"""
    cost: Ints
    """[kind, slice, worker] ticks of an op"""


class State(NamedTuple):
    """A state of the search: who runs what, in which order, until when."""

    worker: Ints
    """[unit]"""
    duration: Ints
    """[op] on its worker"""
    sequence: Ints
    """[worker, place] ops"""
    size: Ints
    """[worker] ops in its order"""
    place: Ints
    """[op]"""
    end: Ints
    """[group] when the reductions are done that it takes part in"""
    deadline: Ints
    """[group] when its workers must have done their compute ops: as late as all ends allow"""
    begin: Ints
    """[reduction] when it begins; interleaved, the first end of the groups that share it"""
    turn: Ints
    """The reductions in their order; not interleaved."""


class Timing(NamedTuple):
    """The timing of a state."""

    late: Ints
    """[op] latest start before the deadlines"""
    longest: Ints
    """[pipeline] the longest window of its workers"""
    excess: Ints
    """[pipeline] what the windows of its workers exceed the goal by, added up"""


class Sorting(NamedTuple):
    """Room for a topological sort, and its results."""

    waiting: Ints
    """[op] predecessors that are not sorted yet"""
    stack: Ints
    """ops without any"""
    order: Ints
    """all ops, each after what it waits for"""
    early: Ints
    """[op] earliest start, if no worker begins before its release"""
    release: Ints
    """[worker] ticks"""


class Queue(NamedTuple):
    """Ops whose latest start may have changed, in buckets by time: the latest are looked at first.

    What an op waits for starts earlier than the op, so that few ops are looked at twice.
    """

    bucket: Ints
    """its first op; -1 for none"""
    next: Ints
    """[op] the next one in its bucket"""
    queued: Ints
    """[op] 1 while it is in the queue"""
    counters: Ints
    """[WAITING, TOP, BASE, SPAN]: queued ops; the highest bucket that may hold some; the first tick of the buckets, and
    how many they divide"""


WAITING, TOP, BASE, SPAN = range(4)


class Log(NamedTuple):
    """What the present step has changed in the timing, so that it can be undone."""

    op: Ints
    """ops, in the order in which their latest start changed"""
    late: Ints
    """their latest starts before that"""
    pipeline: Ints
    """pipelines whose windows may have changed"""
    longest: Ints
    """[number] their longest window before"""
    excess: Ints
    """[number] their excess before"""
    marked: Ints
    """[pipeline] 1 if it is among them"""
    counters: Ints
    """[CHANGED, TOUCHED]: entries of op, and of pipeline"""


CHANGED, TOUCHED = range(2)


class Path(NamedTuple):
    """A critical path, followed anew when a change is accepted: see `critical.critical_path`."""

    op: Ints
    """ops that wait for nothing but the next op of their worker"""
    size: Ints
    """[1] how many; -1 where the path is to be followed anew"""


class Chain(NamedTuple):
    """One annealing chain: its states and the room to work in."""

    instance: Instance
    state: State
    best: State
    """The best state so far."""
    record: Ints
    """[PERIOD, COST] of the best state: ticks, and thousandths of a tick"""
    timing: Timing
    """That of the state."""
    trial: Timing
    """Room for the timing of another one."""
    sorting: Sorting
    heads: Ints
    """[op] see `heads`"""
    queue: Queue
    log: Log
    path: Path
    run: Ints
    """[LARGEST_RUN] room for the ops of a run"""
    places: Ints
    """[kind] where a unit's ops are put, or were"""
    statistics: Ints
    """[operator, TRIED | ACCEPTED | BETTER] how often"""
    random: NDArray[np.uint64]
    """[1] state of the random numbers"""


PERIOD, COST = range(2)
TRIED, ACCEPTED, BETTER = range(3)


class Cycle(NamedTuple):
    """One cooling cycle; temperatures in ticks."""

    steps: int
    hot: float
    """Temperature in the beginning"""
    cold: float
    """and in the end."""
    pull: float
    """Weight of the mean excess of a pipeline's windows over the goal, beside its longest window."""
    goal: int
    """A period with which the cycle ends; only windows longer than that count."""
    scale: float
    """Mean ticks of an op."""
    trade: float
    """Share of the steps that trade units, where units may change workers,"""
    move: float
    """and that move one; all others exchange runs."""
    shifts: int
    """One in so many steps shifts a deadline; 0: none."""
    low: int
    """Only ops that start at this tick or later"""
    high: int
    """and before this one change their places."""


class Move(NamedTuple):
    """A change of the state, with what undoes it."""

    kind: int
    unit: int
    """That trades or moves."""
    other: int
    """The unit it trades with; the worker it leaves."""
    worker: int
    """Whose runs [begin, middle) and [middle, end) exchange places."""
    begin: int
    middle: int
    end: int


NONE, EXCHANGE, TRADE, MOVE, SHIFT = range(5)
