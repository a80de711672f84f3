"""State the arrays of annealing: chains, states, logs, parameters.

Indices: op (unit * kinds + kind, as in `planner.model.arrays`), unit (a micro-batch at a stage),
worker (the row of a live worker), place (in a worker's order), group, slice, pipeline. Times are in
ticks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .compiling import Ints
from .starts import Arcs

BUCKETS = 1024
"""Number of buckets of the queue of ops whose latest starts must be recomputed.

Together they span the ticks of the first plan.
"""
TIMED = 2
"""Value of `Instance.interleaved` if reductions between compute ops take time.

No two groups then share a reduction.
"""


class Instance(NamedTuple):
    """Arrays of a problem that annealing never changes."""

    kinds: int
    """Number of ops of a unit."""
    unit: Ints
    """Unit of the op, [op]."""
    slice: Ints
    """Slice of the unit, [unit]."""
    predecessors: Arcs
    """Arcs to what each op waits for, except the op before it on its worker."""
    successors: Arcs
    """Arcs to what waits for each op, except the op after it on its worker."""
    group: Ints
    """Group of the worker, [worker]."""
    linked: Ints
    """Groups that share gradient reductions with this one, [group, number].

    The group itself is included; rows are padded with -1.
    """
    interleaved: int
    """1 if reductions may lie between compute ops, and take no time.

    2 (TIMED) if they may although they take time; 0 if they follow all compute ops.
    """
    sharers: Ints
    """Groups that take part in the reduction, [reduction, number].

    This field and the next three are those of `Reductions`.
    """
    ticks: Ints
    """Duration of the reduction, [reduction]."""
    awaiting: Ints
    """Reductions that wait for W of the slice, [slice, number]."""
    between: Ints
    """Reductions in which the group takes part, [group, number]."""
    tail: Ints
    """Ticks from the group's end (`State.end`) to that of the worker's busy window, [worker]."""
    pipeline: Ints
    """Pipeline of the worker, [worker]."""
    members: Ints
    """Workers of the pipeline, [pipeline, number]; padded with -1."""
    capacity: Ints
    """Memory of the worker for activations, [worker]; -1 if it is unlimited."""
    holds: Ints
    """Memory units that the op adds to its worker's use, [op]; or frees, if negative.

    They are added at the start of F, and at the end of I, B and W.
    """
    movable: Ints
    """Numbers of the units that more than one worker may run."""
    hosts: Ints
    """Workers that may run the slice, [slice, number]; padded with -1."""
    cost: Ints
    """Ticks of an op by its kind and slice on each worker, [kind, slice, worker]."""


class State(NamedTuple):
    """Solution that annealing changes: workers, orders, and ends of groups."""

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
    """Tick at which the group's compute ops, and reductions in `begin`, have ended, [group]."""
    deadline: Ints
    """Tick by which the group's workers must have done their compute ops, [group].

    Deadlines are as late as the ends of all groups allow.
    """
    begin: Ints
    """Tick at which the reduction begins, [reduction].

    If `Instance.interleaved` is 1, a reduction begins at the first end of the groups that share it.
    If TIMED, annealing chooses when it begins, and the end of a group follows from that.
    """
    turn: Ints
    """Reductions in the order in which they run.

    If `Instance.interleaved` is TIMED, marks instead, [reduction]: 1 if the reduction is still to
    be placed.
    """


class Timing(NamedTuple):
    """Times of all ops and lengths of the busy windows, in ticks."""

    late: Ints
    """Latest start of the op by which all groups meet their deadlines, [op]."""
    longest: Ints
    """Length of the longest busy window among the pipeline's workers, [pipeline]."""
    excess: Ints
    """Ticks by which windows of the pipeline exceed the goal, added up, [pipeline]."""


class Sorting(NamedTuple):
    """Working arrays and results of sorting all ops topologically."""

    waiting: Ints
    """Number of predecessors that are not sorted yet, [op]."""
    stack: Ints
    """Stack of ops that wait for no unsorted op."""
    order: Ints
    """All ops, each after those for which it waits."""
    early: Ints
    """Earliest start of the op if no worker begins before its `release`, [op]."""
    release: Ints
    """Tick before which the worker starts no op, [worker]."""


class Queue(NamedTuple):
    """Queue of ops whose latest start must be recomputed, the latest first.

    Ops of one interval of time form a list, or bucket. An op is thus recomputed before the ops for
    which it waits, which start earlier, so that few are recomputed twice.
    """

    bucket: Ints
    """First op of each bucket; -1 if it is empty."""
    next: Ints
    """Queued op that follows this one in its bucket, [op]; -1 at the end."""
    queued: Ints
    """1 while the op is in the queue, [op]."""
    counters: Ints
    """Counters [WAITING, TOP, BASE, SPAN] of the queue.

    WAITING is the number of queued ops, TOP the highest bucket that may hold some, BASE the first
    tick of the buckets, and SPAN the number of ticks that they divide.
    """


WAITING, TOP, BASE, SPAN = range(4)


class Log(NamedTuple):
    """Values of `Timing` that the present step has overwritten, to undo it."""

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
    """Number of entries of `op` and `late` (at CHANGED), of the next three (at TOUCHED)."""


CHANGED, TOUCHED = range(2)


class Path(NamedTuple):
    """Ops of a critical path at which an exchange may shorten the path.

    The path is traced anew after a step that is accepted, and every `Cycle.steps_per_path` steps.
    """

    op: Ints
    """Ops that the next op of their worker keeps from starting later."""
    size: Ints
    """Number of ops in `op`, [1]; -1 if the path must be traced anew."""


class Chain(NamedTuple):
    """Run of annealing: its states, random numbers and working arrays."""

    instance: Instance
    state: State
    best: State
    """Best state so far."""
    record: Ints
    """Best state's ticks: its period (at PERIOD), and 1000 times its cost (at COST)."""
    timing: Timing
    """Times of the ops of `state`."""
    trial: Timing
    """Times of the ops of another state, such as `best` while it is measured."""
    sorting: Sorting
    heads: Ints
    """Earliest start of the op at which no window is too long (`set_heads`), [op]."""
    queue: Queue
    log: Log
    path: Path
    run: Ints
    """Working array: the ops of a worker that an exchange puts in other places."""
    places: Ints
    """Places of a moved unit's ops in a worker's order, new or old, [kind]."""
    statistics: Ints
    """Numbers of steps, [kind of step, TRIED | ACCEPTED | BETTER].

    BETTER counts those that made the best plan shorter.
    """
    random: NDArray[np.uint64]
    """State of the random numbers, [1]."""


PERIOD, COST = range(2)
TRIED, ACCEPTED, BETTER = range(3)


class Cycle(NamedTuple):
    """Parameters of one cooling cycle of annealing."""

    steps: int
    hot: float
    """Temperature at the first step, in ticks."""
    cold: float
    """Temperature after the last step, in ticks."""
    pull: float
    """Weight, in the cost, of the mean excess of a pipeline's windows over the goal.

    The excess of its longest window has weight 1.
    """
    goal: int
    """Period, in ticks, at which the cycle ends.

    A window costs only the ticks by which it exceeds the goal.
    """
    scale: float
    """Mean duration of an op, in ticks."""
    trade: float
    """Share of the steps in which two units trade workers, if units may change workers."""
    move: float
    """Share of the steps in which a unit moves to another worker.

    Steps that neither trade nor move units exchange ops of a worker.
    """
    shifts: int
    """Mean number of steps to one that shifts a group's deadline; 0: none does."""
    low: int
    """Least latest start, in ticks, of ops that the cycle's steps may move."""
    high: int
    """Tick before which the latest starts of these ops lie."""
    largest_run: int
    longest_jump: int
    margin: float
    steps_per_path: int
    ops_per_step: int
    """Value of `AnnealingParams.ops_per_step`.

    `AnnealingParams` also explains the four fields above.
    """


class Move(NamedTuple):
    """Change that a step has made to an annealing state: an exchange, trade or move."""

    kind: int
    unit: int
    """Unit that changes its worker, in a trade or a move."""
    other: int
    """Unit with which `unit` trades; in a move, the worker that `unit` leaves."""
    worker: int
    """Worker whose ops change places in an exchange.

    The ops that were at places [begin, middle) now follow those from [middle, end).
    """
    begin: int
    middle: int
    end: int


NONE, EXCHANGE, TRADE, MOVE, SHIFT = range(5)
