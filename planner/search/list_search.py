"""Search many list schedules: a shortlist and a grid of rules, then random steps.

The grid has all combinations of some values of a dispatch rule's fields. Random steps start from
the best rules. A step changes the rule, or which peers run the micro-batches of a dead worker.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, get_args

import msgspec
import numpy as np

from slipstream.planner.budget import (
    LIST_SCHEDULE_STEPS,
    LIST_SCHEDULE_STEPS_PER_OP,
    SCHEDULER_STEPS_PER_OP,
    Budget,
)
from slipstream.planner.model.arrays import ProblemArrays, Solution
from slipstream.planner.model.bounds_passage import compute_whole_fill
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, ListParams
from slipstream.planner.search.interleaved_scheduler import (
    InterleavedRule,
    InterleavedScheduler,
    change_interleaved_rule,
    iterate_interleaved_rules,
)
from slipstream.planner.search.list_scheduler import (
    ASSIGNMENT_RULES,
    BASELINES,
    DispatchRule,
    ForwardOrder,
    ListScheduler,
    PlaceChange,
    ReroutedTurn,
    StuckError,
    assign_hosts,
    scale_forward_ticks,
    scale_in_flight_limits,
)
from slipstream.planner.search.round_scheduler import (
    RoundRule,
    RoundScheduler,
    change_round_rule,
    iterate_round_rules,
)

Rule = DispatchRule | RoundRule | InterleavedRule


class Scheduler(Protocol):
    """Builder of one problem's list schedules, or other orders, given each unit's worker."""

    arrays: ProblemArrays

    def __init__(self, arrays: ProblemArrays) -> None: ...

    def evaluate_rule(self, rule: Any) -> int:
        """Make the schedule of a rule, and return its period in ticks.

        Raises StuckError if its ops wait for memory, or for each other, without end.
        """

    def last_solution(self) -> Solution:
        """Return the schedule that the last call of `evaluate_rule` made."""


# --- Dispatch rules that are worth a try: a shortlist, a grid, and random neighbours of a rule ----


def iterate_shortlist(problem: Problem, params: ListParams) -> Iterator[tuple[int, DispatchRule]]:
    """Iterate over pairs (index in `ASSIGNMENT_RULES`, dispatch rule), the most promising first."""
    # First, rules by which workers wait for their first gradient as long as the bound of
    # `compute_whole_fill` has them idle. All others often come close to the best of the grid.
    if fill := compute_whole_fill(problem):
        wait = tuple(ticks + 1 for ticks in fill.idle)
        for lookahead in (0.0, 1.0, 0.5):
            yield 0, DispatchRule(fill_wait=wait, lookahead=lookahead)
    # Rules for layouts, then for any problem.
    if problem.assigned:
        for order, before, first, after, advance, gradient_advance in params.shortlist_of_layouts:
            yield (
                0,
                DispatchRule(
                    forward_order=order,
                    lookahead=before,
                    fill_wait=scale_forward_ticks(problem, first),
                    forward_lookahead=after,
                    advance=advance,
                    gradient_advance=gradient_advance,
                ),
            )
    for assignment, limits, lookahead, make_room in params.shortlist:
        rule = DispatchRule(ignore_transfers=True)
        if limits is not None:
            slope, extra = limits
            rule = DispatchRule(
                lookahead=lookahead,
                forward_lookahead=float(slope == 2.0 and not extra),
                make_room=make_room and problem.memory is not None and problem.backward == "split",
                in_flight=scale_in_flight_limits(problem, slope, extra),
            )
        if problem.has_unequal_time:
            yield ASSIGNMENT_RULES.index("by-speed"), rule
        yield 0 if problem.assigned else assignment, rule


def iterate_rule_grid(problem: Problem) -> Iterator[DispatchRule]:
    """Iterate over a grid of dispatch rules, the most often best ones first."""
    # Each of them is the best of all for some problem.
    # Without limits on micro-batches in flight, then with limits of all slopes.
    rooms = (False, True) if problem.memory and problem.backward == "split" else (False,)
    orders: tuple[ForwardOrder, ...] = get_args(ForwardOrder)
    turns: tuple[ReroutedTurn, ...] = ("in turn", "first") if problem.failed else ("in turn",)
    for ignore, order, room, rerouted in itertools.product((True, False), orders, rooms, turns):
        yield DispatchRule(
            forward_order=order, ignore_transfers=ignore, make_room=room, rerouted=rerouted
        )
    modes = ((False, 0.0), (False, 1.0), (True, 0.0))
    for slope, extra, lookahead, (ignore, forward_lookahead), room in itertools.product(
        (1.0, 2.0, 1.5, 0.75, 1.25, 0.5, 3.0), (0, 1, 2), (0.0, 0.5, 1.0), modes, rooms
    ):
        yield DispatchRule(
            lookahead=lookahead,
            forward_lookahead=forward_lookahead,
            ignore_transfers=ignore,
            make_room=room,
            in_flight=scale_in_flight_limits(problem, slope, extra),
        )


def change_rule(problem: Problem, rule: Rule, random: random.Random, params: ListParams) -> Rule:
    """Return a copy of a rule with one or two fields changed at random."""
    if isinstance(rule, RoundRule):
        return change_round_rule(rule, len(problem.layers_by_slice), random)
    if isinstance(rule, InterleavedRule):
        return change_interleaved_rule(rule, random)
    rule = _change_field(problem, rule, random, params)
    if random.random() < params.changes_twice:
        rule = _change_field(problem, rule, random, params)
    return rule


def _change_field(
    problem: Problem, rule: DispatchRule, random: random.Random, params: ListParams
) -> DispatchRule:
    changes = params.changes_of_layouts if problem.assigned else params.changes
    # Without re-routed micro-batches these two fields change nothing.
    if not (problem.failed or problem.assigned):
        useful = [change for change in changes if change[0] not in ("load_share", "rerouted")]
        changes = tuple(useful) or changes
    names, weights = zip(*changes, strict=True)
    name = random.choices(names, weights)[0]
    return msgspec.structs.replace(rule, **{name: _draw_value(problem, rule, name, random, params)})


def _draw_value(
    problem: Problem, rule: DispatchRule, name: str, random: random.Random, params: ListParams
) -> object:
    # Tuples are changed a little, numbers drawn anew, Booleans negated.
    if name in ("places", "gradient_places"):
        return _change_place(problem, getattr(rule, name), random, params)
    if name in ("advance", "gradient_advance"):
        return random.randint(params.least_advance, params.most_advance) / params.fractions
    if name in ("lookahead", "forward_lookahead"):
        return random.randint(0, params.fractions) / params.fractions
    if name == "fill_wait":
        return _change_waits(problem, rule, random, params)
    if name == "in_flight":
        return _change_limits(problem, rule, random)
    if name == "load_share":
        return random.choice(params.load_shares)
    if name == "rerouted":
        return random.choice(get_args(ReroutedTurn))
    return not getattr(rule, name)


def _change_limits(problem: Problem, rule: DispatchRule, random: random.Random) -> tuple[int, ...]:
    """Return a rule's in-flight limits, with a random change at consecutive stages."""
    stages = len(problem.grid.stages)
    limits = list(rule.in_flight or scale_in_flight_limits(problem, 2.0, 0))
    first = random.randrange(stages)
    step = random.choice((-2, -1, 1, 2))
    for stage in range(first, random.randrange(first, stages) + 1):
        limits[stage] = max(1, limits[stage] + step)
    return tuple(limits)


def _change_place(
    problem: Problem, places: Sequence[PlaceChange], random: random.Random, params: ListParams
) -> tuple[PlaceChange, ...]:
    """Return a copy of `places` in which a random micro-batch has moved a random distance."""
    # Each micro-batch of any pipeline is as likely; one that has returned to its turn is left out.
    counts = problem.grid.microbatches
    pipeline = random.choices(range(len(counts)), counts)[0]
    microbatch = random.randrange(counts[pipeline])
    moved = {(change.pipeline, change.microbatch): change.places for change in places}
    before = moved.get((pipeline, microbatch), 0.0)
    moved[pipeline, microbatch] = before + random.choice(params.places)
    return tuple(PlaceChange(*batch, number) for batch, number in sorted(moved.items()) if number)


def _change_waits(
    problem: Problem, rule: DispatchRule, random: random.Random, params: ListParams
) -> tuple[int, ...]:
    """Return a rule's `fill_wait`, with a random wait at consecutive slices."""
    # At all slices, or at some.
    waits = list(rule.fill_wait or scale_forward_ticks(problem, rule.forward_lookahead))
    first, end = 0, len(waits)
    if random.random() < 0.5:
        first = random.randrange(end)
        end = random.randrange(first, end) + 1
    waits[first:end] = scale_forward_ticks(
        problem, random.randint(0, params.fractions) / params.fractions
    )[first:end]
    return tuple(waits)


# --- The search -----------------------------------------------------------------------------------


TRIED_RULES = "list schedules: dispatch rules"
"""Name in the tally for rules of the shortlist and the grid."""
TRIED_ROUNDS = "list schedules: rounds"
"""Name in the tally for rules for rounds."""
TRIED_INTERLEAVED = "list schedules: interleaved"
"""Name in the tally for interleaved rules."""
TRIED_STEPS = "list schedules: random steps"
"""Name in the tally for rules changed at random."""
TRIED_ASSIGNMENTS = "list schedules: random assignments"
"""Name in the tally for hosts exchanged at random."""
FIRST_RULES = 3
"""Number of rules of the shortlist that are tried before any others."""
FIRST_ROUNDS = 4
"""Number of rules for rounds that are tried before the rest of the shortlist."""
TIGHTNESS = 1e-4
"""Fraction by which plans without reserved memory, hard to anneal, must be shorter."""
PeriodCallback = Callable[[int], None]
"""Function that receives the period, in ticks, of a better plan."""


class _Attempt(NamedTuple):
    """Rule that was tried, with its scheduler and the period in ticks of its schedule."""

    period: int
    rule: Rule
    scheduler: Scheduler


class _SearchState:
    """State of the search: the best plan, and the rule that random steps start from."""

    def __init__(self, problem: Problem, bound: int, budget: Budget, tell: PeriodCallback) -> None:
        self.problem = problem
        self._budget, self._clock = budget, budget.clock
        self._began = self._clock.now()
        self._deadline = max(budget.deadline, self._began + 1e-9)
        self._bound = bound
        self._tell = tell
        self._slowest = 0.0
        self.current: _Attempt | None = None
        self.others: dict[type[Scheduler], Scheduler] = {}
        """Schedulers in rounds and interleaved ones, for the assignment that was tried last."""
        self.period: int | None = None
        self.solution: Solution | None = None
        self._rank = math.inf

    def try_rule(self, scheduler: Scheduler, rule: Rule, why: str) -> _Attempt | None:
        """Make a rule's schedule, keep the best, tally `why`; return the attempt, None if stuck."""
        began, before = self._clock.now(), self.period
        ops = len(scheduler.arrays.ops.unit)
        self._clock.count_steps(LIST_SCHEDULE_STEPS + LIST_SCHEDULE_STEPS_PER_OP * ops)
        try:
            period = scheduler.evaluate_rule(rule)
        except StuckError:
            self._budget.tally.count_uses(why)
            return None
        self._slowest = max(self._slowest, self._clock.now() - began)
        # A plan in rounds without reserves is hard to anneal, so it must be clearly shorter.
        fills = isinstance(rule, RoundRule) and not rule.reserve
        self._keep_if_better(period, scheduler.last_solution, period * (1 + TIGHTNESS * fills))
        self._budget.tally.count_uses(why, helped=int(self.period != before))
        attempt = _Attempt(period, rule, scheduler)
        if self.current is None or period <= self.current.period:
            self.current = attempt
        return attempt

    def _keep_if_better(
        self, period: int, solution: Callable[[], Solution], rank: float | None = None
    ) -> None:
        """Keep the plan that `solution` builds if its `rank` (None: its period) is lower."""
        rank = period if rank is None else rank
        if rank < self._rank:
            self.solution, self.period, self._rank = solution(), period, rank
            self._tell(period)

    def offer_solution(self, solution: Solution) -> None:
        self._keep_if_better(solution_period(solution), lambda: solution)

    @property
    def share_spent(self) -> float:
        if self.period is None:
            return 0.0
        return (self._clock.now() - self._began) / (self._deadline - self._began)

    @property
    def has_reached_bound(self) -> bool:
        return self.period is not None and self.period <= self._bound

    @property
    def is_over(self) -> bool:
        """True if there is a plan, and it meets the bound or the budget ends."""
        return (
            self.period is not None
            and self._budget.end_reason(self.period, self._bound, self._slowest) is not None
        )

    def make_scheduler(
        self, arrays: ProblemArrays, kind: type[Scheduler] = ListScheduler
    ) -> Scheduler:
        self._clock.count_steps(SCHEDULER_STEPS_PER_OP * len(arrays.ops.unit))
        return kind(arrays)


def search_list_schedules(
    problem: Problem,
    bound: int,
    budget: Budget,
    params: ListParams = DEFAULTS.lists,
    steps: int | None = None,
    tell: PeriodCallback = lambda _: None,
) -> tuple[Solution, int]:
    """Return the best of many list schedules within the budget, and its period in ticks.

    At least one schedule is made. Raises StuckError if all of them get stuck.

    Parameters
    ----------
    problem
        Problem to solve.
    bound
        Period, in ticks, at which the search ends.
    budget
        Limit of the search, and its seed.
    params
        Rules and numbers of the search.
    steps
        Largest number of random changes of rules; None: `params.most_steps`. There are fewer in a
        large problem.
    tell
        Function that is called with the period, in ticks, of each better plan.
    """
    best = _SearchState(problem, bound, budget, tell)
    starts = _try_grid(best, params)
    if best.solution is None:
        raise StuckError
    # In a large problem a schedule takes long: fewer changes are made.
    affordable = max(params.fewest_steps, params.most_ops // problem.operation_count)
    steps = min(params.most_steps if steps is None else steps, affordable)
    _random_steps(best, starts, random.Random(budget.seed), steps, params)
    assert best.solution is not None and best.period is not None
    return best.solution, best.period


def _try_grid(best: _SearchState, params: ListParams) -> Sequence[_Attempt]:
    """Try the shortlist, then the grid, while there is time; return the best attempts."""
    problem = best.problem
    schedulers: list[Scheduler | None] = []
    exchanging, is_over = _can_exchange(problem), False
    attempts: list[_Attempt] = []
    # The rules of the shortlist, then of the grid under every assignment, each by its scheduler. If
    # a layout gives the routes, the search ends after the shortlist, since random steps find more
    # in the same time; if all of it get stuck, it ends with the first that does not.
    first_rules = list(_iterate_first_rules(problem, params))
    for number, (index, rule) in enumerate(itertools.chain(first_rules, _iterate_grid(best))):
        if isinstance(rule, RoundRule):
            attempt = _try_other(best, schedulers, rule, RoundScheduler, TRIED_ROUNDS)
        elif isinstance(rule, InterleavedRule):
            attempt = _try_other(best, schedulers, rule, InterleavedScheduler, TRIED_INTERLEAVED)
        elif scheduler := _get_scheduler(best, schedulers, index):
            attempt = best.try_rule(scheduler, rule, TRIED_RULES)
        else:
            attempt = None
        if attempt:
            attempts.append(attempt)
        can_exchange = exchanging and number + 1 >= len(first_rules)
        if is_over := best.is_over or (can_exchange and best.share_spent > params.grid_share):
            break
    # 1F1B and ReCycle, which small jobs try even when time is over.
    if best.solution is None or (
        not problem.assigned
        and (
            not is_over
            or (not best.has_reached_bound and problem.operation_count <= params.largest_untimed)
        )
    ):
        for baseline in BASELINES.values():
            with suppress(StuckError):
                best.offer_solution(baseline(problem))
    return sorted(attempts, key=lambda attempt: attempt.period)[: params.starts]


def _iterate_first_rules(problem: Problem, params: ListParams) -> Iterator[tuple[int, Rule]]:
    """Iterate over the rules to try first, as pairs (index in `ASSIGNMENT_RULES`, rule)."""
    # The best few of each kind, then the rest, so that a short search has seen all kinds.
    shortlist = iterate_shortlist(problem, params)
    rounds = iterate_round_rules(problem)
    yield from itertools.islice(shortlist, FIRST_RULES)
    yield from ((0, rule) for rule in iterate_interleaved_rules(problem))
    yield from ((0, rule) for rule in itertools.islice(rounds, FIRST_ROUNDS))
    yield from shortlist
    yield from ((0, rule) for rule in rounds)


def _iterate_grid(best: _SearchState) -> Iterator[tuple[int, Rule]]:
    # Each rule with all assignments; of a layout's units, only until one does not get stuck.
    for rule in iterate_rule_grid(best.problem):
        for index in range(len(ASSIGNMENT_RULES)):
            if best.problem.assigned and best.solution is not None:
                return
            yield index, rule


def _try_other(
    best: _SearchState,
    schedulers: list[Scheduler | None],
    rule: Rule,
    kind: type[Scheduler],
    why: str,
) -> _Attempt | None:
    """Try `rule`, of schedulers of class `kind`, with the present hosts; None if stuck."""
    current = best.current.scheduler if best.current else _get_scheduler(best, schedulers, 0)
    assert current is not None
    if kind not in best.others or best.others[kind].arrays is not current.arrays:
        best.others[kind] = best.make_scheduler(current.arrays, kind)
    return best.try_rule(best.others[kind], rule, why)


def _get_scheduler(
    best: _SearchState, schedulers: list[Scheduler | None], index: int
) -> Scheduler | None:
    """Return the scheduler of `ASSIGNMENT_RULES[index]`; None if it assigns nothing new."""
    # Schedulers are made on demand, those of all earlier rules first.
    problem = best.problem
    for rule in ASSIGNMENT_RULES[len(schedulers) : index + 1]:
        # Rules after the first differ only where units are re-routed, or take unequal time.
        if rule == "by-speed":
            differs = problem.has_unequal_time
        else:
            differs = not schedulers or bool(problem.failed and not problem.assigned)
        hosts = assign_hosts(problem, rule) if differs else {}
        earlier = [scheduler.arrays.hosts for scheduler in schedulers if scheduler]
        scheduler = None
        if hosts and hosts not in earlier:
            scheduler = best.make_scheduler(ProblemArrays(problem, hosts))
        schedulers.append(scheduler)
    return schedulers[index]


def _random_steps(
    best: _SearchState,
    starts: Sequence[_Attempt],
    random: random.Random,
    steps: int,
    params: ListParams,
) -> None:
    """Make at most `steps` random changes to the rule or assignment of `best.current`."""
    if best.current is None:  # only the baselines did not get stuck
        return
    exchanging = _can_exchange(best.problem)
    before, stale, stale_starts = best.period, 0, 0
    for _ in range(steps):
        if best.is_over or stale_starts == params.stale_starts:
            return
        # Change the assignment or the rule.
        at = best.current
        if exchanging and random.random() < params.assignment_steps:
            arrays = _exchange_hosts(at.scheduler.arrays, random)
            scheduler = best.make_scheduler(arrays, type(at.scheduler))
            best.try_rule(scheduler, at.rule, TRIED_ASSIGNMENTS)
        else:
            rule = change_rule(best.problem, at.rule, random, params)
            best.try_rule(at.scheduler, rule, TRIED_STEPS)
        # After many changes without effect, start again elsewhere (random restarts): how far the
        # steps come depends more on the first ones than on their number.
        stale = 0 if best.current.period != at.period else stale + 1
        if stale == params.stale_steps:
            stale_starts = 0 if best.period != before else stale_starts + 1
            before, stale = best.period, 0
            best.current = random.choice(starts)


def _can_exchange(problem: Problem) -> bool:
    """Return whether several pipelines have lost workers, so that exchanging hosts pays."""
    return not problem.assigned and len({worker.pipeline for worker in problem.failed}) > 1


def _exchange_hosts(arrays: ProblemArrays, random: random.Random) -> ProblemArrays:
    """Return a copy of the arrays in which re-routed units have exchanged workers at random."""
    slices = arrays.ops.slice
    rerouted: dict[int, list[int]] = {}
    for unit in np.flatnonzero(arrays.ops.worker != arrays.home_rows).tolist():
        rerouted.setdefault(int(slices[unit]), []).append(unit)
    if not rerouted:
        return arrays
    # All workers keep their load. Half of the calls shuffle the workers of a stage, or of each,
    # which finds other pairs of pipelines. The others exchange only neighbours, which finds a
    # better order.
    chosen = list(rerouted.values())
    if random.random() >= 0.5:
        chosen = [random.choice(chosen)]
    neighbours = random.random() < 0.5
    hosts = arrays.ops.worker.copy()
    for units in chosen:  # ordered by pipeline, then micro-batch
        workers = hosts[units].tolist()
        if not neighbours:
            random.shuffle(workers)
        for place in range(len(workers) - 1 if neighbours else 0):
            if random.random() < 0.5:
                workers[place : place + 2] = reversed(workers[place : place + 2])
        hosts[units] = workers
    return arrays.with_assignment(hosts)
