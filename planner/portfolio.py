"""The best of several ways to answer a failure: whole micro-batches at each stage, and layouts that cut or move.

Layers in place: the problem as it is, in which live holders share micro-batches, and layouts that cut some of these
within a stage (`planner.layout.fixed`). With layers that may move, all candidates of `planner.layout` besides. A few
list schedules of each say which are worth more time: the best few have many more, and are annealed in turns, until one
has all of the time left.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import msgspec

from planner.job.file import Job
from planner.job.layers import LayerCosts, exact, layer_costs
from planner.layout.bounds import period_bound
from planner.layout.candidates import candidates
from planner.layout.problem import LayoutProblem
from planner.layout.types import Layout
from planner.model.bounds import exact_bound
from planner.model.for_layout import layout_problem
from planner.model.from_job import problem_of_layout
from planner.model.layout_bound import LayoutBound, can_bound
from planner.model.problem import NoPlanError, Problem
from planner.model.ticks import tick_of
from planner.options import PlanOptions
from planner.search.budget import Budget
from planner.search.compiled import ready
from planner.search.incumbent import Incumbent
from planner.search.list_scheduler import StuckError
from planner.search.list_search import MOST_STEPS
from planner.search.solve import Solved, improve, in_time, solve, solved_by
from planner.search.steps.anneal import anneal
from planner.search.steps.bound import divided
from planner.search.steps.list_schedules import list_schedules, on_one_clock
from schedules.layers import layers_in
from schedules.schedule import Worker

LIST_SHARE, FIRST_SHARE = 0.4, {"fixed": 0.25, "move": 0.1}
"""Share of the time for a few list schedules of all candidates; share of that for the problem as it is."""
WALKS, LARGE_WALKS, LARGEST_ANNEALED = ((7, 0.25), (3, 0.35)), ((7, 0.4), (3, 0.5)), 15_000
"""How many of the most promising layouts have random steps from their best list schedules then, and the share of the
time left for these, in turns; where one has more than so many compute ops, of which annealing could change but a few in
the time; and these."""
WALK_STEPS = 10_000
"""Such random steps for a layout, at most."""
LARGEST_WALKED_ALONE = 5_000
"""Compute ops up to which half of the time of a list schedule or more is spent in the interpreter."""
HEATS = ((7, 0.25), (2, 0.3))
"""How many of the most promising go on, and the share of the time left that they have together; then one has the rest.
"""
PROMISE = 3.0
"""How often a candidate is expected to gain again what annealing gained in its last turn."""
MOST_LAYOUTS, FIRST = 17, 2.0
"""Layouts that are looked at, and how many times its equal share of the time the first one has: many a later one cannot
be the best."""
FEWEST_LAYOUTS, LAYOUT_SECONDS = 4, 6e-5
"""By list schedulers alone, at least so many, and others as far as there are so many seconds for each micro-batch at a
stage."""
ASSIGNMENT_SECONDS, ASSIGNMENT_SHARE = 2.0, 0.2
"""For the exact assignment of layers: at most, and of the time for list schedules."""
BEYOND = 1.003
"""Up to how many times the period of the best candidate a bound of another one is sought."""
FINE_RATE = 10_000.0
"""For each second of list schedules, micro-batches times parts of stages up to which short slices are tried."""
BOUND_SHARE = 0.3
"""Share of the time for a few list schedules of a layout, in which a bound of its own is sought first."""
LARGEST_BOUNDED = 20_000
"""Compute ops of the pieces of a layout up to which a bound of its own is sought."""


class Answer(msgspec.Struct, frozen=True):
    """The best of the candidates."""

    problem: Problem
    solved: Solved
    evidence: Callable[[], str]
    """What is likely to leave a gap. Few ask, and where layers move it takes as long as some list schedules."""
    fixed_period: float | None = None
    """Seconds: the best period found with layers in place, where they move in this answer."""


def best_answer(options: PlanOptions, job: Job, failed: Sequence[Worker], problem: Problem | None,
                budget: Budget) -> Answer:
    """The best that is found within the budget.

    `problem` is that of the options, None where it has no plan; it is solved alone where nothing else can be better.
    Raises NoPlanError.
    """
    alone = options.method not in ("cp-sat", "greedy") or not (options.layers == "move" or _can_gain(options, problem))
    if problem is not None and alone:
        solved = solve(problem, options.method, budget)
        if options.layers == "move":  # a baseline, whose own bound is for layers in place
            solved = msgspec.structs.replace(solved, lower_bound_ticks=min(
                solved.lower_bound_ticks, any_layers_bound(options, job, failed)))
        return Answer(problem, solved, lambda: solved.evidence)
    ready(budget.progress.line)
    given = layout_problem(job, failed, backward=options.backward or "split", layers=options.layers,
                           sliced=options.slices, from_checkpoint=options.from_checkpoint, holds=dict(options.holds))
    return _Portfolio(options, job, failed, given, budget).best(problem)


def any_layers_bound(options: PlanOptions, job: Job, failed: Sequence[Worker]) -> int:
    """A bound for all holdings of layers, in ticks of the problem of whole stages."""
    given = layout_problem(job, failed, backward=options.backward or "split", layers="move",
                           sliced=options.slices, from_checkpoint=options.from_checkpoint)
    costs = layer_costs(job)
    tick = tick_of(job, costs)
    scale = tick_of(job) / tick
    rounding = _rounding(job, costs, tick, scale)
    return math.floor(rounding.sure(Fraction(period_bound(given))) / scale)


def _can_gain(options: PlanOptions, problem: Problem | None) -> bool:
    """Whether slices can shorten the plan of the problem as it is."""
    return options.slices and problem is not None and problem.sliced and problem.grid.chains == 1


class _Rounding(NamedTuple):
    """What rounding to ticks may have taken or added, where times are finer than a tick."""

    share: Fraction
    """Of an op."""
    ticks: int
    """Of all that a bound counts beside the ops: at most once, each all-reduce, optimizer step and, there and back,
    transfer of a stage or of its layers."""

    def sure(self, bound: Fraction) -> int:
        """What of a bound holds for all candidates, however their times were rounded."""
        return max(0, math.ceil(bound * (1 - self.share)) - self.ticks)


def _rounding(job: Job, costs: LayerCosts, tick: Fraction, scale: Fraction) -> _Rounding:
    """`tick` is that of layers, in seconds; `scale`: how many of these are one of stages."""
    ops = [value / tick for value in (*costs.forward, *costs.backward_input, *costs.backward_weight) if value]
    others = [value / tick for value in (*costs.optimizer, *costs.all_reduce, exact(job.time.transfer))]
    if scale.denominator == 1 and all(value.denominator == 1 for value in (*ops, *others)):
        return _Rounding(Fraction(0), 0)
    stages = len(job.columns)
    return _Rounding(min(Fraction(1), 1 / min(ops)), 2 * (len(costs.forward) + math.ceil(scale) * stages)
                     + 2 * math.ceil(scale) * stages)


def _moved(given: LayoutProblem, layout: Layout) -> int:
    """Memory of the layers that workers hold in a layout and did not hold before; without weights, their number."""
    weights = given.weights if any(given.weights) else (1,) * given.layer_count
    return sum(weights[layer] for worker, ranges in layout.holds.items() if ranges != given.holds[worker]
               for layer in layers_in(ranges).difference(given.layers_held(worker)))


class _Entry(msgspec.Struct, frozen=True, eq=False):
    """A candidate with its best solution so far."""

    known: Incumbent
    moved: int
    """Memory of the layers that workers receive; where the job gives no weights, their number."""
    least: int = 0
    """No order of its routes has a shorter period, in ticks: `planner.model.layout_bound`."""
    gained: float = 0.0
    """Seconds, by annealing in its last turn."""

    @property
    def seconds(self) -> float:
        """Its period."""
        return self.known.period * self.known.problem.tick_seconds

    @property
    def open(self) -> bool:
        """Whether a better order of its routes may exist. Its bound is known to a thousandth."""
        return self.known.open and self.known.period > 1.001 * self.least

    @property
    def promise(self) -> tuple[float, int, int]:
        """As `rank`, of the period that is expected of more annealing: no less than its own bound."""
        least = min(self.seconds, self.least * self.known.problem.tick_seconds)
        return max(least, self.seconds - PROMISE * self.gained), *self.rank[1:]

    @property
    def operations(self) -> int:
        """Compute ops of the whole job, those of like pipelines too."""
        return self.known.problem.operations

    @property
    def rank(self) -> tuple[float, int, int]:
        """The less the better: of equal periods, the one for which less is moved, and then that with fewer ops."""
        return self.seconds, self.moved, self.operations


class _Portfolio:
    """The candidates of one job and its failures."""

    def __init__(self, options: PlanOptions, job: Job, failed: Sequence[Worker], given: LayoutProblem,
                 budget: Budget) -> None:
        self._options, self._job, self._failed, self._given = options, job, failed, given
        self._budget = budget
        costs = layer_costs(job)
        tick = tick_of(job, costs)
        self._scale = tick_of(job) / tick
        """Ticks of a layout's problem in one of the problem as it is."""
        self._rounding = _rounding(job, costs, tick, self._scale)
        self._least, self._counts = self._rounding.sure(Fraction(period_bound(given))), \
            "the work of all layers that workers share"
        self._entries: list[_Entry] = []

    def best(self, problem: Problem | None) -> Answer:
        """The best of all. Raises NoPlanError where there is none."""
        budget, began = self._budget, time.monotonic()
        first = None
        if problem is not None:
            if self._options.layers == "fixed":
                ticks, counts = exact_bound(problem)
                if (least := self._rounding.sure(ticks * self._scale)) > self._least:
                    self._least, self._counts = least, counts
            first = divided(problem, self._rounding.sure(self._least / self._scale) if self._rounding.ticks else
                            math.floor(self._least / self._scale), self._counts,
                            shedding=self._options.method != "greedy")
            budget = in_time(first, budget)
        lists = budget if self._options.method == "greedy" else budget.share(LIST_SHARE)
        if first is not None:
            self._add(first, lists.share(FIRST_SHARE[self._options.layers]), moved=0)
        self._add_layouts(lists)
        if not self._entries:
            raise NoPlanError("no layout of the layers over the live workers has room for the micro-batches in flight")
        if self._options.method != "greedy":
            self._walk(budget)
            self._improve(budget)
        best = self._best
        fixed = min((entry.seconds for entry in self._entries if not entry.moved), default=None)
        solved = solved_by(best.known, time.monotonic() - began)
        return Answer(best.known.problem, solved, partial(self._evidence, best.known, solved),
                      fixed if best.moved else None)

    def _evidence(self, known: Incumbent, solved: Solved) -> str:
        """With what the choice of who runs what alone makes of a gap."""
        least = self._least_of(known)
        if least <= known.bound:
            return solved.evidence
        why = f"with who runs what as it is here, no order is shorter than {least * known.problem.tick_seconds:g} s"
        return f"{solved.evidence}; {why}"

    def _add(self, known: Incumbent, budget: Budget, *, moved: int) -> None:
        """A few list schedules of a candidate.

        It is dropped where they get stuck for lack of memory, or cannot be the best.
        """
        bounded = self._options.method != "greedy"
        least = self._least_of(known, budget.share(BOUND_SHARE).deadline) if bounded else 0
        if moved and self._entries and least * known.problem.tick_seconds > self._best.seconds:
            return
        enough = msgspec.structs.replace(known, bound=max(known.bound, least))
        with contextlib.suppress(StuckError):
            steps = 0 if bounded else MOST_STEPS  # more later
            found = msgspec.structs.replace(list_schedules(enough, budget, steps), bound=known.bound)
            self._entries.append(_Entry(found, moved, least))

    @property
    def _best(self) -> _Entry:
        return min(self._entries, key=lambda entry: entry.rank)

    def _least_of(self, known: Incumbent, deadline: float = math.inf) -> int:
        """A bound for the layout of a candidate, to a thousandth if there is time; 0 where none is sought.

        Only as far as it matters: to its own period, or a little beyond that of the best candidate.
        """
        if known.operations > LARGEST_BOUNDED or not can_bound(known.problem):
            return 0
        hosts = [solution.hosts for solution in known.solutions]
        high = 2 * known.bound
        if known.solutions:
            high = known.period
        elif self._entries:
            high = max(known.bound, math.ceil(BEYOND * self._best.seconds / known.problem.tick_seconds))
        return LayoutBound([piece.problem for piece in known.pieces], hosts).period(known.bound, high, deadline)

    def _add_layouts(self, budget: Budget) -> None:
        options = self._options
        made = candidates(self._given, seconds=max(0.0, min(ASSIGNMENT_SECONDS, ASSIGNMENT_SHARE * budget.seconds)),
                          seed=budget.seed, largest_fine=FINE_RATE * budget.seconds)
        left = self._layouts_within(budget.seconds)
        # With no time at all, still the first one where layers may move: most often it is the best.
        least = left - 1 if options.layers == "move" else left
        while left and not self._done and not budget.stopped and (
                not self._entries or left > least or budget.seconds > 0):
            try:
                layout = next(made, None)
            except LookupError as error:
                if not self._entries:
                    raise NoPlanError(str(error) if options.from_checkpoint else
                                      f"{error}; `slipstream plan --layers move --from-checkpoint` takes it from a "
                                      "checkpoint") from None
                return
            if layout is None:
                return
            problem = problem_of_layout(self._job, self._failed, layout, backward=options.backward or "split",
                                        optimizer=options.optimizer or "staggered", least=self._least)
            self._add(divided(problem, self._least, self._counts), budget.share(min(1.0, FIRST / left)),
                      moved=_moved(self._given, layout))
            left -= 1

    def _walk(self, budget: Budget) -> None:
        """Random steps from the best list schedules of the most promising layouts, then of fewer.

        Large ones in two threads: most of the time is spent in compiled loops, which leave the interpreter to others.
        """
        largest = max((entry.operations for entry in self._promising() if entry.moved), default=0)
        for number, (count, part) in enumerate(LARGE_WALKS if largest > LARGEST_ANNEALED else WALKS):
            ranked = [entry for entry in self._promising() if entry.moved][:count]
            within = msgspec.structs.replace(budget.share(part), seed=budget.seed + number)
            own, beside = (ranked[::2], ranked[1::2]) if largest > LARGEST_WALKED_ALONE else (ranked, [])
            with ThreadPoolExecutor(1) as other:
                second = other.submit(self._walk_each, beside, within)
                self._walk_each(own, within)
                second.result()

    def _walk_each(self, entries: Sequence[_Entry], budget: Budget) -> None:
        for entry, share in self._in_turn(entries, budget):
            if budget.seconds > 0:
                self._replace(entry, list_schedules(entry.known, share, WALK_STEPS), annealed=False)

    def _in_turn(self, entries: Sequence[_Entry], budget: Budget) -> Iterator[tuple[_Entry, Budget]]:
        """Each with an equal share of the time, until some candidate is as good as any can be."""
        for number, entry in enumerate(entries):
            if self._done or budget.stopped:
                return
            yield entry, budget.share(1 / (len(entries) - number))

    def _promising(self) -> list[_Entry]:
        """What may be the best after more work, what is expected to be the best first."""
        return sorted(filter(self._may_win, self._entries), key=lambda entry: entry.promise)

    def _layouts_within(self, seconds: float) -> int:
        """How many layouts are looked at: where annealing follows, which makes up for short lists, always as many."""
        if self._options.method != "greedy":
            return MOST_LAYOUTS
        units = self._given.total_microbatches * len(self._given.paths[0])
        return max(FEWEST_LAYOUTS, min(MOST_LAYOUTS, int(seconds / (LAYOUT_SECONDS * units))))

    @property
    def _done(self) -> bool:
        """Whether some candidate is as good as any can be."""
        return any(not entry.known.open for entry in self._entries)

    def _improve(self, budget: Budget) -> None:
        """Anneal the most promising few in turns, fewer each time, then one."""
        for count, share in HEATS:
            ranked = self._promising()[:count]
            if len(ranked) < 2:
                break
            end = budget.share(share)
            for entry, turn in self._in_turn(ranked, end):
                known = on_one_clock(entry.known) if count == HEATS[-1][0] else entry.known
                self._replace(entry, anneal(known, turn))
        last = self._promising()[:1]
        if last and not self._done and not budget.stopped:
            self._replace(last[0], improve(on_one_clock(last[0].known), budget))

    def _may_win(self, entry: _Entry) -> bool:
        """Whether more time may make a candidate the best of all."""
        return entry.open and entry.least * entry.known.problem.tick_seconds < self._best.seconds

    def _replace(self, entry: _Entry, known: Incumbent, *, annealed: bool = True) -> None:
        better = known if known.period <= entry.known.period else entry.known
        if self._options.layers == "move":  # CP-SAT proves for layers in place only
            better = better.with_bound(entry.known.bound, entry.known.bound_counts)
        gained = entry.seconds - better.period * better.problem.tick_seconds if annealed else 0.0
        self._entries[self._entries.index(entry)] = _Entry(better, entry.moved, entry.least, gained)
