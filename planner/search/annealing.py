"""Shorten plans by simulated annealing, with the loops and arrays of `planner.kernel`."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import Any

import msgspec
import numpy as np

from slipstream.planner.budget import Budget, Tally
from slipstream.planner.kernel import (
    BASE,
    BETTER,
    BUCKETS,
    EXCHANGE,
    FOREVER,
    MOVE,
    PERIOD,
    SHIFT,
    SPAN,
    TIMED,
    TRADE,
    Chain,
    Cycle,
    Instance,
    Log,
    Path,
    Queue,
    Sorting,
    State,
    Timing,
    anneal,
    measure_best,
    set_deadlines_from_ends,
    set_earliest_deadlines,
    set_ends_from_deadlines,
    time_state,
)
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, pad_rows, to_ints
from slipstream.planner.model.memory import activation_capacity, memory_changes
from slipstream.planner.model.start_times import (
    NEVER,
    compute_group_ends,
    delayed_group_ends,
    ends_of_reductions,
    get_deadlines,
    solution_period,
)
from slipstream.planner.params import DEFAULTS, AnnealingParams
from slipstream.planner.search.incumbent import Incumbent

# --- From a problem and a plan to the kernel's arrays ---------------------------------------------


def make_chain(
    arrays: ProblemArrays, order: Ints, seed: int, params: AnnealingParams = DEFAULTS.annealing
) -> Chain:
    """Return an annealing chain of `planner.kernel` that starts from the order of a plan.

    The arrays have the worker of each unit; `order` lists the numbers of all ops. The random
    numbers of the chain start from `seed`, and no other chain draws them.
    """
    # All working arrays are allocated here, once: the compiled loop allocates nothing.
    ops, pipelines = len(arrays.ops.duration), arrays.problem.grid.pipelines
    state = _make_state(arrays, order, params.spare_units)
    return Chain(
        instance=_make_instance(arrays),
        state=state,
        best=State(*(array.copy() for array in state)),
        record=_zeros(2),
        timing=Timing(_zeros(ops), _zeros(pipelines), _zeros(pipelines)),
        trial=Timing(_zeros(ops), _zeros(pipelines), _zeros(pipelines)),
        sorting=Sorting(*(_zeros(size) for size in (ops, ops, ops, ops, len(arrays.workers)))),
        heads=_zeros(ops),
        queue=Queue(
            bucket=np.full(BUCKETS, -1, dtype=np.int64),
            next=_zeros(ops),
            queued=_zeros(ops),
            counters=_zeros(4),
        ),
        log=Log(
            op=_zeros(4 * ops),
            late=_zeros(4 * ops),
            pipeline=_zeros(pipelines),
            longest=_zeros(pipelines),
            excess=_zeros(pipelines),
            marked=_zeros(pipelines),
            counters=_zeros(2),
        ),
        path=Path(_zeros(ops), to_ints([-1])),
        run=_zeros(max(params.largest_run, params.longest_jump)),
        places=_zeros(arrays.ops.kinds),
        statistics=np.zeros((SHIFT + 1, BETTER + 1), dtype=np.int64),
        random=_make_random_state(seed),
    )


def twin_chain(chain: Chain, seed: int) -> Chain:
    """Return a copy of an annealing chain, with states and random numbers of its own.

    Its statistics are 0.
    """
    copies = {
        field: _copy_arrays(value)
        for field, value in zip(Chain._fields[1:], chain[1:], strict=True)
    }
    # The instance never changes, so both chains share it.
    copies["statistics"][:] = 0
    return chain._replace(**copies)._replace(random=_make_random_state(seed))


def _copy_arrays(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else type(value)(*map(_copy_arrays, value))


def _make_instance(arrays: ProblemArrays) -> Instance:
    # Units that may change their worker, and the room of each worker (-1: no limit).
    problem, workers = arrays.problem, arrays.workers
    movable = [
        number
        for number, unit in enumerate(arrays.units)
        if len(problem.allowed_hosts(unit.slice, unit.pipeline)) > 1
    ]
    room = [-1] * len(workers)
    if problem.memory:
        room = [activation_capacity(problem, worker) for worker in workers]
    changes = [memory_changes(problem, number) for number in range(len(problem.layers_by_slice))]
    return Instance(
        kinds=arrays.ops.kinds,
        unit=arrays.ops.unit,
        slice=arrays.ops.slice,
        predecessors=arrays.ops.predecessors,
        successors=arrays.ops.successors,
        group=arrays.group,
        linked=pad_rows(problem.groups.linked),
        interleaved=TIMED if problem.reduces_in_bubbles else int(problem.can_reduce_early),
        sharers=arrays.reductions.sharers,
        ticks=arrays.reductions.ticks,
        awaiting=arrays.reductions.awaiting,
        between=arrays.reductions.between,
        tail=_tail_ticks(arrays),
        pipeline=to_ints([worker.pipeline for worker in workers]),
        members=_rows_by_pipeline(arrays),
        capacity=to_ints(room),
        holds=to_ints(changes)[arrays.ops.slice].ravel(),
        movable=to_ints(movable),
        hosts=_host_rows_by_slice(arrays),
        cost=_op_ticks(arrays),
    )


def _make_state(arrays: ProblemArrays, order: Ints, spare_units: int) -> State:
    # The ops of each worker in order; rows have space for units that move there later.
    ops = arrays.ops
    rows: list[list[int]] = [[] for _ in arrays.workers]
    place = _zeros(len(ops.duration))
    for op in order.tolist():
        row = rows[ops.worker[ops.unit[op]]]
        place[op] = len(row)
        row.append(op)
    sequence = np.zeros((len(rows), max(map(len, rows)) + spare_units * ops.kinds), dtype=np.int64)
    for worker, row in enumerate(rows):
        sequence[worker, : len(row)] = row
    return State(
        worker=ops.worker.copy(),
        duration=ops.duration.copy(),
        sequence=sequence,
        size=to_ints([len(row) for row in rows]),
        place=place,
        end=_zeros(len(arrays.problem.groups.linked)),
        deadline=_zeros(len(arrays.problem.groups.linked)),
        begin=_zeros(len(arrays.reductions.sharers)),
        turn=_zeros(len(arrays.reductions.sharers)),
    )


def _tail_ticks(arrays: ProblemArrays) -> Ints:
    """Return, by worker, the ticks from its group's end to its busy window's."""
    # With a synchronous optimizer, and reductions not timed one by one, all windows end with the
    # iteration: no step starts before the last compute op.
    problem = arrays.problem
    if problem.optimizer == "staggered" or problem.times_each_reduction:
        return arrays.ticks_after_group
    last = np.full(len(problem.groups.linked), problem.max_optimizer_ticks)
    np.maximum.at(last, arrays.group, arrays.ticks_after_group)
    return last[arrays.group]


def _rows_by_pipeline(arrays: ProblemArrays) -> Ints:
    """Return the rows of each pipeline's workers, [pipeline, number], padded with -1."""
    members: list[list[int]] = [[] for _ in range(arrays.problem.grid.pipelines)]
    for row, worker in enumerate(arrays.workers):
        members[worker.pipeline].append(row)
    return pad_rows(members)


def _host_rows_by_slice(arrays: ProblemArrays) -> Ints:
    """Return the rows in `arrays` of each slice's hosts, [slice, number], padded with -1."""
    rows = []
    for hosts in arrays.problem.hosts_by_slice:
        rows.append([arrays.row_of[worker] for worker in hosts])
    return pad_rows(rows)


def _op_ticks(arrays: ProblemArrays) -> Ints:
    """Return the ticks of ops, [kind, slice, worker]; 0 if the worker cannot run it."""
    problem = arrays.problem
    cost = np.zeros(
        (len(problem.op_kinds), len(problem.layers_by_slice), len(arrays.workers)), dtype=np.int64
    )
    for number, holders in enumerate(problem.holders_by_slice):
        for worker in holders:
            cost[:, number, arrays.row_of[worker]] = [
                problem.op_ticks(kind, number, worker) for kind in problem.op_kinds
            ]
    return cost


def _zeros(size: int) -> Ints:
    return np.zeros(size, dtype=np.int64)


def _make_random_state(seed: int) -> Any:
    """Return a random generator's first state, which must not be 0."""
    # Neighbouring seeds give states that are far apart: the factor is 2^64 / golden ratio.
    return np.array(
        [(seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64 or 1], dtype=np.uint64
    )


# --- An annealing chain: improves a plan of one piece, in rounds short enough to be stopped between


OPERATOR_NAMES = {
    EXCHANGE: "exchange runs of ops",
    TRADE: "trade units",
    MOVE: "move a unit",
    SHIFT: "shift a deadline",
}
"""Names in the tally of the kinds of annealing steps."""


class AnnealingChain:
    """Run of annealing that shortens one plan of a subproblem, in rounds of steps.

    The proven bound, in ticks, is `goal`. The result depends on the seed and the number of steps,
    not on the clock. Each group has a deadline, a tick by which all of its compute ops must end.
    With a staggered optimizer, annealing shifts deadlines until `fix_deadlines` is called.
    """

    def __init__(
        self, solution: Solution, goal: int, seed: int, params: AnnealingParams = DEFAULTS.annealing
    ) -> None:
        self._arrays, self._params = solution.arrays, params
        self._problem = problem = self._arrays.problem
        self._chain = make_chain(self._arrays, solution.order, seed, params)
        ops, pipelines = len(self._arrays.ops.duration), problem.grid.pipelines
        self._scale = float(np.mean(self._arrays.ops.duration)) or 1.0
        self._goal = goal
        self.round_steps = count_round_steps(ops, pipelines, params)
        """Number of annealing steps of a round, between two looks at the clock."""
        self._cycle_steps, self._step = count_first_cycle_steps(ops, pipelines, params), 0
        self.steps = self.cycles = 0
        """Number of annealing steps done, and in `cycles` that of completed cooling cycles."""
        self._shifts = 0
        self._set_deadlines(solution)
        _copy_state(self._chain.state, self._chain.best)
        self._begin_cycle()
        # The ticks of the first plan, of which a cooling cycle may change only a part.
        counters = self._chain.queue.counters
        counters[BASE], counters[SPAN] = self._chain.trial.late.min(), max(1, self.period)
        self.allow_shifts()

    def _set_deadlines(self, solution: Solution) -> None:
        chain = self._chain
        # Reductions between compute ops: those that take time, those that take none, those of a
        # synchronous optimizer.
        if self._problem.anneals_reductions:
            self._set_reductions(chain.state, get_deadlines(solution))
            return
        if self._problem.can_reduce_early:
            ends = compute_group_ends(solution)
            chain.state.end[:] = np.where(ends > NEVER, ends, ends.max())
            set_deadlines_from_ends(chain.instance, chain.state)
            return
        if self._problem.reduces_in_bubbles:
            self._set_common_end(solution)
            return
        # Reductions after compute: as early as the order allows, or all at one end, tick 0.
        if self._problem.optimizer == "staggered":
            set_earliest_deadlines(chain.instance, chain.state, chain.sorting)
            return
        chain.state.end[:] = -chain.instance.tail.max()
        chain.state.end[chain.instance.group] = -chain.instance.tail
        chain.state.deadline[:] = chain.state.end
        if self._problem.groups.has_shared_reductions:
            chain.state.deadline[:] = delayed_group_ends(self._arrays, compute_group_ends(solution))

    def _set_common_end(self, solution: Solution) -> None:
        """Let all windows end at tick 0, as in a plan; set begins of reductions."""
        # With a synchronous optimizer, all windows end together.
        # The end of the plan, on its own clock; it becomes tick 0.
        instance, state = self._chain.instance, self._chain.state
        begins, ends = get_deadlines(solution), compute_group_ends(solution)
        step = self._problem.max_optimizer_ticks
        finished = ends_of_reductions(self._arrays, begins)
        last = max(
            (finished[self._arrays.group] + self._arrays.ticks_after_group).max(), ends.max() + step
        )
        # Reductions in bubbles begin as in the plan; from the last one on, those behind compute as
        # late as the step allows.
        free = np.full(len(ends), 0)
        free[self._arrays.group] = -self._arrays.ticks_after_group
        for number in np.argsort(begins, kind="stable")[::-1].tolist():
            group = instance.sharers[number, 0]
            if begins[number] >= ends[group]:
                free[group] -= instance.ticks[number]
                state.begin[number] = free[group]
            else:
                state.begin[number] = begins[number] - last
        state.end[:] = ends_of_reductions(self._arrays, state.begin)
        state.deadline[:] = np.minimum(state.end, -step)
        instance.tail[:] = -state.end[self._arrays.group]

    def _set_reductions(self, state: State, begins: Sequence[int] | Ints) -> None:
        """Let reductions begin at ticks `begins` (0, NEVER: as before); set ends and deadlines."""
        begins = np.asarray(begins)
        state.begin[:] = np.where((begins != 0) & (begins > NEVER), begins, state.begin)
        state.end[:] = ends_of_reductions(self._arrays, state.begin)
        set_deadlines_from_ends(self._chain.instance, state)

    def _begin_cycle(self) -> None:
        self._cycle = self._make_cycle()
        measure_best(self._chain, self._cycle)

    @property
    def period(self) -> int:
        """Period of the best plan so far, in ticks."""
        return int(self._chain.record[PERIOD])

    @property
    def operator_counts(self) -> dict[str, tuple[int, int, int]]:
        """Numbers of steps tried, accepted, and that shortened the best plan, by kind of step."""
        return {
            name: tuple(self._chain.statistics[kind].tolist())
            for kind, name in OPERATOR_NAMES.items()
        }

    @property
    def best_deadlines(self) -> list[int]:
        """Deadlines of the best plan, by group; 0 for groups not in the subproblem.

        If annealing chooses when reductions begin, these begins, by reduction, are the deadlines.
        """
        if self._problem.anneals_reductions:
            taking_part = np.isin(self._arrays.reductions.sharers[:, 0], self._arrays.group)
            begins: list[int] = (taking_part * self._chain.best.begin).tolist()
            return begins
        here = np.zeros_like(self._chain.best.deadline)
        here[self._arrays.group] = 1
        deadlines: list[int] = (here * self._chain.best.deadline).tolist()
        return deadlines

    @property
    def is_between_cycles(self) -> bool:
        """True if the next cooling cycle has not made a step yet."""
        return self._step == 0

    def fix_deadlines(self, deadlines: Sequence[int]) -> None:
        """Set all deadlines, in the form of `best_deadlines`, and shift them no longer.

        A synchronous optimizer has only one deadline for all groups, which is left as it is.
        """
        # With a synchronous optimizer there is but one, which never shifts.
        if self._problem.optimizer == "staggered":
            self._shifts = 0
            for state in (self._chain.state, self._chain.best):
                if self._problem.anneals_reductions:
                    self._set_reductions(state, deadlines)
                elif self._problem.can_reduce_early:
                    state.end[:] = np.where(deadlines, deadlines, state.end)
                    set_deadlines_from_ends(self._chain.instance, state)
                else:
                    state.deadline[:] = deadlines
                    set_ends_from_deadlines(self._chain.instance, state)
            measure_best(self._chain, self._cycle)  # updates the period to aim at
            self._begin_cycle()

    def allow_shifts(self) -> None:
        """Let annealing steps shift the deadlines again, unless the optimizer is synchronous."""
        # A shift times all ops anew, so that there are fewer in large subproblems.
        often = max(
            self._params.steps_per_shift * self._problem.grid.pipelines,
            len(self._arrays.ops.duration) // self._params.ops_per_shift,
        )
        self._shifts = often if self._problem.optimizer == "staggered" else 0
        self._begin_cycle()

    def make_twin(self, seed: int) -> "AnnealingChain":
        """Return a new chain that begins with this one's best plan, with another seed."""
        copied = copy(self)
        copied._chain = twin_chain(self._chain, seed)
        copied._cycle_steps = count_first_cycle_steps(
            len(self._arrays.ops.duration), self._problem.grid.pipelines, self._params
        )
        copied._step = copied.steps = copied.cycles = 0
        copied.continue_from(self)
        return copied

    def continue_from(self, other: "AnnealingChain") -> None:
        """Replace this chain's plan by the best plan of another chain, with its deadlines."""
        for state in (self._chain.state, self._chain.best):
            _copy_state(other._chain.best, state)
        self._chain.record[:] = other._chain.record
        self._shifts = other._shifts
        self._begin_cycle()

    def _target_period(self) -> int:
        return choose_target_period(self.period, self._goal, self._params.aim)

    def _make_cycle(self) -> Cycle:
        # Parameters relate to the mean duration of an op, and to the length of the plan.
        params = self._params
        cooling = params.cycles[self.cycles % len(params.cycles)]
        base, span = (int(self._chain.queue.counters[which]) for which in (BASE, SPAN))
        return Cycle(
            steps=self._cycle_steps,
            hot=cooling.hot * self._scale,
            cold=cooling.cold * self._scale,
            pull=cooling.pull,
            goal=self._target_period(),
            scale=self._scale,
            trade=params.trade,
            move=params.move,
            shifts=self._shifts,
            largest_run=params.largest_run,
            longest_jump=params.longest_jump,
            margin=params.margin,
            steps_per_path=params.steps_per_path,
            ops_per_step=params.ops_per_step,
            low=int(base + cooling.begin * span) if cooling.begin > 0 else -FOREVER,
            high=int(base + cooling.end * span) if cooling.end < 1 else FOREVER,
        )

    def shorten_cycle(self, rounds: float) -> None:
        """Let the cooling cycle end within `rounds` more calls of `run`.

        It still has at least `AnnealingParams.fewest_steps` in all.
        """
        # A cycle that is stopped while hot has found little.
        end = max(self._params.fewest_steps, self._step + int(rounds * self.round_steps))
        if end < self._cycle.steps:
            self._cycle = self._cycle._replace(steps=end)

    def run(self) -> None:
        """Run one round: `round_steps` annealing steps, or fewer as in `run_steps`."""
        self.run_steps(self.round_steps)

    def run_steps(self, steps: int) -> None:
        """Run `steps` annealing steps; fewer if the cycle ends or the bound is reached before."""
        end = min(self._step + steps, self._cycle.steps)
        while self._step < end and self.period > self._goal:
            reached = anneal(self._chain, self._cycle, self._step, end)
            self.steps += reached - self._step
            self._step = reached
            if reached < end:  # the cycle has reached its target
                self._cycle = self._cycle._replace(goal=self._target_period())
                measure_best(self._chain, self._cycle)
        if end == self._cycle.steps:  # continue from the best plan with the next cooling
            self.cycles, self._step = self.cycles + 1, 0
            if self.cycles % len(self._params.cycles) == 0:
                self._cycle_steps *= 2
            _copy_state(self._chain.best, self._chain.state)
            self._begin_cycle()

    def best_solution(self) -> Solution:
        """Return the best plan so far, with each op as late as the deadlines allow."""
        # With a synchronous optimizer, ticks are counted from the end: shift them to begin at 0.
        chain, arrays = self._chain, self._arrays
        time_state(chain.instance, chain.best, chain.sorting, chain.trial, self._goal)
        begin = chain.trial.late.min() if self._problem.optimizer == "synchronous" else 0
        return arrays.with_assignment(chain.best.worker.copy()).make_solution(
            chain.sorting.order, chain.trial.late - begin
        )


def _copy_state(source: State, target: State) -> None:
    for values, array in zip(source, target, strict=True):
        array[:] = values


# --- Cooling cycles -------------------------------------------------------------------------------


def choose_target_period(period: int, goal: int, share: float) -> int:
    """Return the period, in ticks, at which a cooling cycle aims.

    The best period so far is `period`, and `goal` is the proven bound, which often no plan attains.
    The result lies between them, at the fraction `share` of the way to the bound.
    """
    # A cycle that aims at the bound shortens windows that do not matter at the cost of longer ones
    # that do: from a list schedule of 4,136 ticks, whose layout allows 4,118, one that aimed at a
    # bound of 4,030 reduced the total excess of all windows from 606 to 472, and ended at 4,152.
    return max(goal, int(period - share * (period - goal)))


def count_first_cycle_steps(ops: int, pipelines: int, params: AnnealingParams) -> int:
    """Return the number of steps of each of the first cooling cycles of a subproblem.

    Whenever all of `AnnealingParams.cycles` are completed, the number doubles.
    """
    # A step is assumed to recompute the times of one pipeline's ops.
    return max(
        params.fewest_steps, min(params.steps_per_op * ops, params.ops_per_cycle * pipelines // ops)
    )


def count_round_steps(ops: int, pipelines: int, params: AnnealingParams) -> int:
    """Return the number of steps between two looks at the clock, for a subproblem."""
    # Here, too, a step is assumed to recompute the times of one pipeline's ops.
    return max(1, min(params.steps_per_round, params.ops_per_round * pipelines // ops))


# --- All pieces of a job: always the longest one, in two chains side by side, or the two longest --


# Joining the subproblems for a report takes as long as some rounds.
REPORT_SECONDS = 0.5
"""Minimum seconds between two reports of a better candidate."""
REPORT_SHARE = 0.1
"""Maximum share of the time that these reports take."""


def anneal_pieces(
    candidate: Incumbent,
    budget: Budget,
    params: AnnealingParams = DEFAULTS.annealing,
    cycles: int | None = None,
    tell: Callable[[Incumbent], None] = lambda _: None,
) -> Incumbent:
    """Anneal the subproblems that determine a candidate's period; return their best plans.

    The candidate that has these, joined, may be longer than one that `tell` received before. The
    search ends when the longest subproblem's period attains the proven bound, when the budget is
    spent, or after `cycles` cooling cycles.

    Parameters
    ----------
    candidate
        Candidate with a solution of each subproblem.
    budget
        Limit of the search, and its seed.
    params
        Parameters of annealing.
    cycles
        Number of cooling cycles of the longest subproblem; None: no limit.
    tell
        Function that is called with a better candidate from time to time.
    """
    goal, clock = candidate.bound.ticks, budget.clock
    pieces = _JointAnnealing(
        candidate,
        params.chains,
        [_PieceChains(solution, goal, budget.seed, params) for solution in candidate.solutions],
    )
    start, slowest = clock.now(), 0.0
    reported_period, next_report = pieces.period, start + REPORT_SECONDS
    with ThreadPoolExecutor(params.chains) as others:
        while budget.end_reason(pieces.period, goal, slowest) is None:
            # One round: this thread runs a chain, others the rest.
            began = clock.now()
            first, *rest = pieces.choose_chains(goal)
            if cycles is not None and first.cycles >= cycles:
                break
            clock.count_steps((1 + len(rest)) * first.round_steps)
            running = [others.submit(chain.run) for chain in rest]
            first.run()
            for chain in running:
                chain.result()
            pieces.end_round()
            # Fit the cooling to the time that is left, by the rounds so far, and report what was
            # gained.
            slowest = max(slowest, clock.now() - began)
            pieces.shorten_cycles(budget.seconds_left * pieces.rounds / (clock.now() - start))
            if pieces.period < reported_period and clock.now() > next_report:
                reported_period, began = pieces.period, clock.now()
                tell(pieces.make_candidate())
                next_report = clock.now() + max(
                    REPORT_SECONDS, (clock.now() - began) / REPORT_SHARE
                )
    pieces.add_to_tally(budget.tally)
    return pieces.make_candidate()


class _PieceChains:
    """Subproblem with its annealing chains, of which further ones are created on demand."""

    def __init__(self, solution: Solution, goal: int, seed: int, params: AnnealingParams) -> None:
        self.rounds = self.last_better_round = 0
        """Number of rounds of this subproblem, and that at its last improvement."""
        self._problem, self._seed = solution.arrays.problem, seed * params.chains
        self.chains = [AnnealingChain(solution, goal, self._seed, params)]
        self.period = self.best_chain.period

    @property
    def is_single_pipeline(self) -> bool:
        return self._problem.grid.pipelines == 1

    @property
    def best_chain(self) -> AnnealingChain:
        return min(self.chains, key=lambda chain: chain.period)

    @property
    def cycles(self) -> int:
        return self.chains[0].cycles

    def get_chain(self, number: int) -> AnnealingChain:
        """Return the chain of this number, made from the best one if it is new."""
        if number == len(self.chains):
            self.chains.append(self.best_chain.make_twin(self._seed + number))
        return self.chains[number]

    def fix_deadlines(self, deadlines: Sequence[int]) -> None:
        for chain in self.chains:
            chain.fix_deadlines(deadlines)
        self.period = self.best_chain.period

    def end_round(self) -> None:
        """Finish a round: a chain whose cooling cycle has ended continues from the best plan."""
        # A chain in the middle of a cycle goes on with its own plan.
        self.rounds += 1
        best = self.best_chain
        for chain in self.chains:
            if chain.is_between_cycles and chain.period > best.period:
                chain.continue_from(best)
        if best.period < self.period:
            self.period, self.last_better_round = best.period, self.rounds


def _fill_missing_deadlines(deadlines: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return deadlines by subproblem and group; the group's latest replaces a missing one, 0."""
    latest = [max(ticks) for ticks in zip(*deadlines, strict=True)]
    filled = []
    for of_piece in deadlines:
        filled.append([tick or other for tick, other in zip(of_piece, latest, strict=True)])
    return filled


class _JointAnnealing:
    """Annealing of a candidate's subproblems, all with the same deadlines of groups."""

    def __init__(self, candidate: Incumbent, chains: int, pieces: list[_PieceChains]) -> None:
        self._candidate, self._chains, self._pieces = candidate, chains, pieces
        self.rounds = 0
        self._annealed: list[_PieceChains] = []
        self._shifting: _PieceChains | None = None
        """Subproblem that may shift the common deadlines; None if none may."""
        if len(pieces) == 1:
            self._shifting = pieces[0]
            return
        # Try the deadlines of each subproblem for all, and keep the best.
        ranked = sorted(pieces, key=lambda piece: (piece.is_single_pipeline, -piece.period))
        choice = _fill_missing_deadlines([piece.best_chain.best_deadlines for piece in ranked])
        periods = []
        for deadlines in choice:
            self._fix_deadlines(deadlines, pieces)
            periods.append(self.period)
        # If all but the first are single pipelines, it may shift the deadlines, until another one
        # is annealed, which must be able to rely on them.
        best = periods.index(min(periods))
        self._fix_deadlines(choice[best], pieces)
        if (
            all(piece.is_single_pipeline for piece in ranked[1:])
            and best == 0
            and ranked[0].period == self.period
        ):
            self._shifting = ranked[0]
            ranked[0].chains[0].allow_shifts()

    @staticmethod
    def _fix_deadlines(deadlines: Sequence[int], pieces: Sequence[_PieceChains]) -> None:
        for piece in pieces:
            piece.fix_deadlines(deadlines)

    @property
    def period(self) -> int:
        return max(piece.period for piece in self._pieces)

    def choose_chains(self, goal: int) -> list[AnnealingChain]:
        """Return the chains to run next: of the longest subproblem, or of several long ones.

        Several are long if the second one is nearer to the longest than to the bound, `goal`.
        """
        # If the second one is longer than the middle between longest and goal, both must be
        # shortened; else all threads work on the longest.
        order = sorted(self._pieces, key=lambda piece: (-piece.period, piece.rounds))
        self._annealed = order[:1]
        if len(order) > 1 and 2 * order[1].period > order[0].period + goal:
            self._annealed = order[: self._chains]
            return [piece.get_chain(0) for piece in self._annealed]
        return [order[0].get_chain(number) for number in range(self._chains)]

    def end_round(self) -> None:
        """Finish a round; give all other subproblems the best deadlines of one that shifts them."""
        # Once another subproblem is annealed, it relies on them: they stay as they are.
        self.rounds += 1
        for piece in self._annealed:
            piece.end_round()
        if self._shifting is None or len(self._pieces) == 1:
            return
        deadlines = self._shifting.best_chain.best_deadlines
        if self._annealed != [self._shifting]:
            self._fix_deadlines(deadlines, self._pieces)
            self._shifting = None
        else:
            self._fix_deadlines(
                deadlines, [piece for piece in self._pieces if piece is not self._shifting]
            )

    def shorten_cycles(self, rounds: float) -> None:
        """Let the present cooling cycles end before `rounds` more rounds of all subproblems."""
        # Each is expected to have the same share of the rounds as so far.
        for piece in self._annealed:
            for chain in piece.chains:
                chain.shorten_cycle(rounds * piece.rounds / self.rounds)

    def add_to_tally(self, tally: Tally) -> None:
        for piece in self._pieces:
            for chain in piece.chains:
                for name, (attempts, _, better) in chain.operator_counts.items():
                    tally.count_uses(f"annealing: {name}", attempts, better)

    def make_candidate(self) -> Incumbent:
        """Return the candidate with the best plan of each subproblem, all on the same clock."""
        # For groups that the longest subproblem lacks, the latest deadline of any other is taken.
        ranked = sorted(self._pieces, key=lambda piece: -piece.period)
        chosen = _fill_missing_deadlines([piece.best_chain.best_deadlines for piece in ranked])[0]
        last = max(self._pieces, key=lambda piece: (piece.period, piece.rounds))
        solutions = [piece.best_chain.best_solution() for piece in self._pieces]
        return msgspec.structs.replace(
            self._candidate.with_solutions(
                solutions, list(map(solution_period, solutions)), chosen
            ),
            cycles=last.cycles,
            orders=sum(chain.steps for chain in last.chains),
            stale=1 - last.last_better_round / last.rounds if last.rounds else 0.0,
        )
