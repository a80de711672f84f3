"""State the arrays of annealing: a chain, its states, what a step overwrites, and its parameters.

Indices: op (unit * kinds + kind, as in `planner.model.arrays`), unit (a micro-batch at a stage), worker (the row of a
live worker), place (in a worker's order), group (a reduce group), slice, pipeline. Times are in ticks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiling import Ints
from .starts import Arcs

BUCKETS = 1024
"""Number of buckets of the queue of ops whose times annealing recomputes; together they span the ticks of the first
plan."""
TIMED = 2
"""Value of `Instance.interleaved` if reductions that take time may lie between compute ops; groups share none then."""


class Instance(NamedTuple):
    """Arrays of a problem that annealing never changes. A group is the workers that hold the same layers."""

    kinds: int
    """Number of ops of a unit."""
    unit: Ints
    """Unit of the op, [op]."""
    slice: Ints
    """Slice of the unit, [unit]."""
    predecessors: Arcs
    """Arcs to the ops for which each op waits, except for the op before it on its worker."""
    successors: Arcs
    """Arcs to the ops that wait for each op, except for the op after it on its worker."""
    group: Ints
    """Reduce group of the worker (those that hold the same layers), [worker]."""
    linked: Ints
    """Groups with which this group shares gradient reductions, itself included, [group, number]; padded with -1."""
    interleaved: int
    """1 if reductions may lie between compute ops, since they take no time, and 2 (TIMED) although they take time; 0 if
    they follow all of these."""
    sharers: Ints
    """Groups that take part in the reduction, [reduction, number]; for this and the next three fields see
    `Reductions`."""
    ticks: Ints
    """Duration of the reduction, [reduction]."""
    awaiting: Ints
    """Reductions that wait for W of the slice, [slice, number]."""
    between: Ints
    """Reductions in which the group takes part, [group, number]."""
    tail: Ints
    """Ticks from the tick `State.end` of the worker's group to the end of the worker's busy window, [worker]."""
    pipeline: Ints
    """Pipeline of the worker, [worker]."""
    members: Ints
    """Workers of the pipeline, [pipeline, number]; padded with -1."""
    capacity: Ints
    """Memory of the worker for activations, [worker]; -1 if it is unlimited."""
    holds: Ints
    """Memory by which the op raises or lowers what its worker holds, [op]: at its start for F, at its end for I and
    W."""
    movable: Ints
    """Units that more than one worker may run, as an array of unit numbers."""
    hosts: Ints
    """Workers that may run the slice, [slice, number]; padded with -1."""
    cost: Ints
    """Ticks of an op by its kind and slice on each worker, [kind, slice, worker]."""


class State(NamedTuple):
    """Solution that annealing changes: the worker of each unit, the order of the ops, and the ticks at which groups
    (workers that hold the same layers) have ended compute and reductions."""

    worker: Ints
    """Worker that runs the unit, [unit]."""
    duration: Ints
    """Ticks of the op on its worker, [op]."""
    sequence: Ints
    """Ops of the worker in the order in which it runs them, [worker, place]."""
    size: Ints
    """Number of ops of the worker, [worker]."""
    place: Ints
    """Index of the op in its worker's order, [op]."""
    end: Ints
    """Tick at which the group's compute ops and the reductions that it shares with other groups have ended, [group]."""
    deadline: Ints
    """Tick by which the group's workers must have done their compute ops, [group]: as late as the ends of all groups
    allow."""
    begin: Ints
    """Beginning of the reduction, [reduction]; if interleaved, the first end of the groups that share it. If TIMED, it
    is chosen freely, and the end of a group follows from it."""
    turn: Ints
    """Reductions in the order in which they run; if TIMED, marks of reductions that are still to be placed."""


class Timing(NamedTuple):
    """Times of all ops and lengths of the busy windows in a state of annealing, in ticks."""

    late: Ints
    """Latest tick at which the op may start so that all compute ops meet their group's deadline, [op]."""
    longest: Ints
    """Length of the longest busy window among the pipeline's workers, [pipeline]."""
    excess: Ints
    """Sum of the ticks by which busy windows of the pipeline's workers exceed the goal, [pipeline]."""


class Sorting(NamedTuple):
    """Working arrays and results of sorting all ops so that each comes after those for which it waits."""

    waiting: Ints
    """Number of predecessors that are not sorted yet, [op]."""
    stack: Ints
    """Stack of ops that wait for no unsorted op."""
    order: Ints
    """All ops, each after those for which it waits."""
    early: Ints
    """Earliest tick at which the op can start if no worker begins before its `release`, [op]."""
    release: Ints
    """Tick before which the worker starts no op, [worker]."""


class Queue(NamedTuple):
    """Queue of ops whose latest start must be recomputed, in buckets by that time; the latest come first.

    An op is thus recomputed before the ops for which it waits, which start earlier, so that few are recomputed twice.
    """

    bucket: Ints
    """First op of each bucket; -1 if it is empty."""
    next: Ints
    """Queued op that follows this one in its bucket, [op]; -1 at the end."""
    queued: Ints
    """1 while the op is in the queue, [op]."""
    counters: Ints
    """Counters [WAITING, TOP, BASE, SPAN] of the queue. They are: the number of queued ops, the highest bucket that may
    hold some, the first tick of the buckets, and the number of ticks that they divide."""


WAITING, TOP, BASE, SPAN = range(4)


class Log(NamedTuple):
    """Values of `Timing` that the present step of annealing has overwritten, so that it can be undone."""

    op: Ints
    """Ops whose latest start the step changed, in the order of the changes."""
    late: Ints
    """Latest starts, before the step, of the ops in `op`."""
    pipeline: Ints
    """Pipelines with a busy window that the step may have changed."""
    longest: Ints
    """Longest busy windows, before the step, of the pipelines in `pipeline`."""
    excess: Ints
    """Values of `Timing.excess`, before the step, of the pipelines in `pipeline`."""
    marked: Ints
    """1 if the pipeline is in `Log.pipeline`, [pipeline]."""
    counters: Ints
    """Lengths of the log by the index CHANGED or TOUCHED: entries in use of `op` and `late`, and of the other three
    arrays."""


CHANGED, TOUCHED = range(2)


class Path(NamedTuple):
    """Ops of a critical path at which exchanging neighbouring ops of a worker may shorten the path. After a change is
    accepted, the path is traced anew."""

    op: Ints
    """Ops of the critical path that only the next op of their worker keeps from starting later."""
    size: Ints
    """Number of ops in `op`, [1]; -1 if the path must be followed again."""


class Chain(NamedTuple):
    """Run of annealing with its own random numbers: its present and best states and its working arrays."""

    instance: Instance
    state: State
    best: State
    """Best state so far."""
    record: Ints
    """Period and cost of the best state, by the index PERIOD (in ticks) or COST (in thousandths of a tick)."""
    timing: Timing
    """Times of the ops of `state`."""
    trial: Timing
    """Times of the ops of another state, such as `best` while it is measured."""
    sorting: Sorting
    heads: Ints
    """Earliest tick at which the op can start if no busy window exceeds the longest of its pipeline, [op]."""
    queue: Queue
    log: Log
    path: Path
    run: Ints
    """Working array for the ops of a worker that an exchange puts in other places."""
    places: Ints
    """Indices in a worker's order to which the ops of a unit move, or from which they moved, [kind]."""
    statistics: Ints
    """Numbers of steps that were tried, accepted, or gave a better best state, [operator, TRIED | ACCEPTED |
    BETTER]."""
    random: NDArray[np.uint64]
    """State of the random numbers, [1]."""


PERIOD, COST = range(2)
TRIED, ACCEPTED, BETTER = range(3)


class Cycle(NamedTuple):
    """Parameters of one cooling cycle of annealing: its temperatures, the period at which it aims, and how it chooses
    its steps."""

    steps: int
    hot: float
    """Temperature at the first step, in ticks."""
    cold: float
    """Temperature at the last step, in ticks."""
    pull: float
    """Weight, in the cost, of the mean excess of a pipeline's busy windows over the goal; its longest window's has
    weight 1."""
    goal: int
    """Period in ticks at which the cycle ends; only busy windows longer than that cost anything."""
    scale: float
    """Mean ticks of an op."""
    trade: float
    """Share of the steps that trade units, if units may change workers."""
    move: float
    """Share of the steps in which a unit moves to another worker; in all others, ops of a worker change places."""
    shifts: int
    """Number n such that one of n steps shifts a group's deadline; 0: no step does."""
    low: int
    """Tick before which no op may start that a step puts in another place."""
    high: int
    """Tick from which on no op may start that a step puts in another place."""
    largest_run: int
    longest_jump: int
    margin: float
    steps_per_path: int
    ops_per_step: int
    """Value of `AnnealingParams.ops_per_step`; `AnnealingParams` also explains the four fields above."""


class Move(NamedTuple):
    """Step that changes an annealing state: an exchange of ops of a worker, a trade of two units, or the move of a
    unit."""

    kind: int
    unit: int
    """Unit that changes its worker, in a trade or a move."""
    other: int
    """In a trade, the unit with which `unit` trades; in a move, the worker that `unit` leaves."""
    worker: int
    """In an exchange, the worker whose ops at places [begin, middle) and [middle, end) change places."""
    begin: int
    middle: int
    end: int


NONE, EXCHANGE, TRADE, MOVE, SHIFT = range(5)
