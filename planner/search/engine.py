"""The search: orders the ops of candidates, improves the promising ones, and proves the best one as far as possible.

A candidate is a problem in which the layers of each worker and the slices of each micro-batch are decided. First, a few
list schedules of each candidate show which ones deserve more time. The best few layouts get many more list schedules.
Then the best few candidates are annealed in turns, fewer each time, until one has the rest of the time (successive
halving); a small one is also given to CP-SAT after a little annealing. A job with one candidate is treated alike.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import msgspec

from slipstream.planner.budget import LAYOUT_STEPS, Budget, SearchEnd
from slipstream.planner.loops import plain
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import decompose, undivided
from slipstream.planner.model.problem import NoPlanError, Problem
from slipstream.planner.params import DEFAULTS, SearchParams
from slipstream.planner.search.improvement import anneal, evidence, improve, list_schedules, provable
from slipstream.planner.search.incumbent import Incumbent, Proposals, Solved, divided, ordered, with_solved
from slipstream.planner.search.list_scheduler import BASELINES, StuckError

Method = Literal["cp-sat", "greedy", "1f1b", "recycle"]
METHODS: tuple[Method, ...] = get_args(Method)
LITTLE = 0.1
"""Share of the time: list schedules that end with less than this left have used up their time."""


def solve(given: Problem | Proposals, method: Method, budget: Budget, params: SearchParams = DEFAULTS) -> Incumbent:
    """Return the best candidate that the method finds within the budget, for one problem or for all proposals.

    Raises NoPlanError if no proposal has room for the micro-batches in flight.
    """
    proposals = given if isinstance(given, Proposals) else Proposals(first=given)
    if method in BASELINES:
        assert proposals.first is not None, "what others run is defined for layers in place"
        return _baseline(proposals.first, method, params)
    return _Engine(proposals, budget, params, greedy=method == "greedy").best()


def _baseline(problem: Problem, method: Method, params: SearchParams) -> Incumbent:
    divide = not problem.failed or problem.operations > params.blocks.largest_baseline
    pieces = decompose(problem, params.pieces) if divide else (undivided(problem),)
    return ordered(problem, pieces, BASELINES[method], strongest_bound(problem), method)


class _Engine:
    """One search over candidates."""

    def __init__(self, proposals: Proposals, budget: Budget, params: SearchParams, *, greedy: bool) -> None:
        self._proposals, self._budget, self._greedy = proposals, budget, greedy
        self._params, self._layouts, self._several = params, params.layouts, proposals.layouts is not None
        self._found: list[Incumbent] = []
        self._began = budget.clock.now()

    def best(self) -> Incumbent:
        """Run the search and return the best candidate. Raises NoPlanError if there is none."""
        budget, several, proposals = self._budget, self._several, self._proposals
        first = None if proposals.first is None else divided(
            proposals.first, proposals.bound, shedding=not self._greedy, params=self._params.pieces)
        blocks = self._params.blocks
        if first is not None:
            finish_seconds = min(blocks.finish_share * budget.seconds, blocks.finish_seconds * first.operations)
            budget = budget.until(budget.deadline - finish_seconds)
        share = self._layouts.share if several else self._params.lists.share
        lists = budget if self._greedy else budget.share(share)
        if first is not None:
            first_share = self._layouts.first_share_move if proposals.moving else self._layouts.first_share_fixed
            self._add(first, lists.share(first_share if several else 1.0))
        if several:
            self._add_layouts(lists)
        if not self._found:
            raise NoPlanError("no layout of the layers over the live workers has room for the micro-batches in flight")
        if not self._greedy and not plain():
            if several:
                self._improve_small(budget.share(self._layouts.small_share))
            self._restart(budget)
            self._anneal(budget)
        best = self._best
        if budget.solved is not None:
            budget.solved.extend(map(Solved, (piece.problem for piece in best.pieces), best.solutions, best.periods))
        fixed = min((known.seconds for known in self._found if not known.moved), default=None)
        return msgspec.structs.replace(
            best, evidence=evidence(best, budget.clock, budget.clock.now() - self._began),
            fixed_period=fixed if best.moved else None, end=self._end(best, budget),
            ran=", ".join(budget.tally.techniques))

    def _end(self, best: Incumbent, budget: Budget) -> SearchEnd:
        """Return the reason why the search ended.

        List schedules without annealing end early if random steps find nothing better for long. Annealing continues
        while any candidate may improve.
        """
        needs = LITTLE * (budget.deadline - self._began) if self._greedy else 0.0
        goes_on = not self._greedy and self._promising()
        return budget.end(best.period, best.bound.ticks, needs) or (budget.clock.end if goes_on else SearchEnd.STALE)

    @property
    def _best(self) -> Incumbent:
        return min(self._found, key=lambda known: known.rank)

    # --- Propose, and order each ---

    def _add(self, known: Incumbent, budget: Budget) -> None:
        """Make a few list schedules of a candidate and keep it, unless all get stuck for lack of memory."""
        with contextlib.suppress(StuckError):
            steps = 0 if self._several and not self._greedy else self._params.lists.most_steps
            candidate = list_schedules(known, budget, self._params.lists, steps)
            self._found.append(with_solved(candidate, budget.solved or ()))

    def _add_layouts(self, budget: Budget) -> None:
        proposals, params = self._proposals, self._layouts
        assert proposals.layouts is not None
        candidates = proposals.layouts(params.fine_rate * budget.seconds)
        remaining = self._layouts_within(budget.seconds)
        # If layers may move, examine the first layout even without time: it is usually the best.
        least = remaining - 1 if proposals.moving else remaining
        while remaining and not self._over(budget) and (not self._found or remaining > least or budget.seconds > 0):
            try:
                candidate = next(candidates, None)
            except LookupError as error:
                if not self._found:
                    raise NoPlanError(str(error)) from None
                return
            if candidate is None:
                return
            budget.clock.count(LAYOUT_STEPS * proposals.units)
            self._add(candidate, budget.share(min(1.0, params.first / remaining)))
            remaining -= 1

    def _layouts_within(self, seconds: float) -> int:
        """Return the number of layouts to examine in this time: always the same if annealing follows."""
        params = self._layouts
        if not self._greedy:
            return params.most
        return max(params.fewest, min(params.most, int(seconds / (params.seconds * self._proposals.units))))

    # --- Improve the promising ---

    def _improve_small(self, budget: Budget) -> None:
        """Improve small candidates with layers in place, each as if it were the only one, if CP-SAT may prove them.

        A search with layers in place has only such a candidate, and a search over more layouts must not return a worse
        plan.
        """
        for known in self._promising():
            small = not known.moved and provable(known, self._params.cp_sat)
            if small and strongest_bound(known.problem).ticks * known.problem.tick_seconds < self._best.seconds:
                self._replace(known, improve(known, budget, self._params))

    def _restart(self, budget: Budget) -> None:
        """Take random steps from the best list schedules of the most promising layouts, then of fewer.

        Large layouts use two threads: most of the time is spent in compiled loops, which release the GIL.
        """
        params = self._layouts
        largest = max((known.problem.operations for known in self._promising() if known.moved), default=0)
        rounds = params.large_restarts if largest > params.largest_annealed else params.restarts
        for number, (count, part) in enumerate(rounds):
            ranked = [known for known in self._promising() if known.moved][:count]
            if not ranked:
                return
            within = msgspec.structs.replace(budget.share(part), seed=budget.seed + number)
            first_half, second_half = (ranked[::2], ranked[1::2]) if largest > params.largest_alone else (ranked, [])
            second_budget = within.beside()
            with ThreadPoolExecutor(1) as thread:
                running = thread.submit(self._restart_each, second_half, second_budget)
                self._restart_each(first_half, within)
                running.result()
            within.join(second_budget)

    def _restart_each(self, some: Sequence[Incumbent], budget: Budget) -> None:
        for known, share in self._in_turn(some, budget):
            if budget.seconds > 0:
                self._replace(known, list_schedules(known, share, self._params.lists, self._layouts.restart_steps))

    def _anneal(self, budget: Budget) -> None:
        """Anneal the most promising candidates in turns, fewer each time, then improve the best one."""
        for count, share in self._layouts.halvings:
            ranked = self._promising()[:count]
            if len(ranked) < 2:
                break
            for known, turn in self._in_turn(ranked, budget.share(share)):
                better = anneal(known, turn, self._params.annealing)
                self._replace(known, msgspec.structs.replace(better, gained=max(0.0, known.seconds - better.seconds)))
        final = self._promising()[:1]
        if final and not self._over(budget):
            self._replace(final[0], improve(final[0], budget, self._params))

    def _in_turn(self, some: Sequence[Incumbent], budget: Budget) -> Iterator[tuple[Incumbent, Budget]]:
        """Yield each candidate with an equal share of the time, until some candidate reaches its bound."""
        for number, known in enumerate(some):
            if self._over(budget):
                return
            yield known, budget.share(1 / (len(some) - number))

    def _promising(self) -> list[Incumbent]:
        """Return the candidates that may still improve, the best expected period first."""
        return sorted((known for known in self._found if known.open),
                      key=lambda known: known.expected(self._layouts.again))

    def _over(self, budget: Budget) -> bool:
        """Return whether some candidate has reached its bound, or the search was stopped."""
        return budget.stopped or any(not known.open for known in self._found)

    def _replace(self, known: Incumbent, better: Incumbent) -> None:
        if better.period > known.period:
            better = msgspec.structs.replace(known, gained=better.gained)
        self._found[self._found.index(known)] = better
