"""Search for the best plan: order candidates' ops, improve, and try proofs.

A candidate is a problem in which the layers of each worker and the slices of each micro-batch are
decided. First, a few list schedules of each candidate show which ones deserve more time. The best
few layouts get many more list schedules. Then the best few candidates are annealed in turns, fewer
each time, until one has the rest of the time (successive halving); a small one is also given to
CP-SAT after a little annealing. A job with one candidate is treated alike.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import msgspec

from slipstream.planner.budget import LAYOUT_STEPS, Budget, SearchEnd
from slipstream.planner.loops import is_plain_python
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import decompose, make_whole_piece
from slipstream.planner.model.problem import NoPlanError, Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, SearchParams
from slipstream.planner.search.improvement import (
    describe_gap,
    find_provable_pieces,
    improve_by_annealing,
    improve_by_list_schedules,
    improve_candidate,
)
from slipstream.planner.search.incumbent import (
    CandidateSource,
    Incumbent,
    SolvedPiece,
    divide_problem,
    order_pieces,
    with_solved_pieces,
)
from slipstream.planner.search.list_scheduler import BASELINES, StuckError

Method = Literal["cp-sat", "greedy", "1f1b", "recycle"]
METHODS: tuple[Method, ...] = get_args(Method)
FIRST_PLAN_SECONDS = 2.0
"""Least seconds to look for a first plan with CP-SAT if list schedules find none."""
MIN_SHARE_LEFT = 0.1
"""Share of the time; with less left after list schedules, the limit ended them."""


def find_best_candidate(given: Problem | CandidateSource, method: Method, budget: Budget,
                        params: SearchParams = DEFAULTS) -> Incumbent:
    """Search by `method` for the best plan of a problem, or over a source's candidates.

    Return the candidate with it. Raises NoPlanError if no candidate has room for the micro-batches
    in flight.
    """
    proposals = given if isinstance(given, CandidateSource) else CandidateSource(first=given)
    if method in BASELINES:
        assert proposals.first is not None, "baseline methods are defined only for layers in place"
        return _make_baseline(proposals.first, method, params)
    return _Engine(proposals, budget, params, greedy=method == "greedy").run()


def _make_baseline(problem: Problem, method: Method, params: SearchParams) -> Incumbent:
    divide = not problem.failed or problem.operation_count > params.blocks.largest_baseline
    pieces = decompose(problem, params.pieces) if divide else (make_whole_piece(problem),)
    try:
        return order_pieces(problem, pieces, BASELINES[method], strongest_bound(problem), method)
    except StuckError:
        raise NoPlanError(f"{method} gets stuck because workers lack memory; expected more [memory] capacity, or "
                          "--method cp-sat") from None


class _Engine:
    """Search over candidates by list schedules, annealing and CP-SAT."""

    def __init__(self, proposals: CandidateSource, budget: Budget, params: SearchParams, *, greedy: bool) -> None:
        self._proposals, self._budget, self._greedy = proposals, budget, greedy
        self._params, self._layouts, self._several = params, params.layouts, proposals.layouts is not None
        self._candidates: list[Incumbent] = []
        self._refusal = ""
        self._began = budget.clock.now()

    def run(self) -> Incumbent:
        """Run the search and return the best candidate. Raises NoPlanError if there is none."""
        budget, several, proposals = self._budget, self._several, self._proposals
        first = None if proposals.first is None else divide_problem(
            proposals.first, proposals.bound, shedding=not self._greedy, params=self._params.pieces)
        blocks = self._params.blocks
        if first is not None:
            finish_seconds = min(blocks.finish_share * budget.seconds_left,
                                 blocks.finish_seconds * first.operation_count)
            budget = budget.with_deadline(budget.deadline - finish_seconds)
        share = self._layouts.share if several else self._params.lists.share
        lists = budget if self._greedy or self._is_for_lists_alone(first, budget) else budget.with_share(share)
        if first is not None:
            first_share = self._layouts.first_share_move if proposals.moving else self._layouts.first_share_fixed
            self._add_candidate(first, lists.with_share(first_share if several else 1.0))
        if several:
            self._add_layouts(lists)
        if not self._candidates:
            self._add_first_plan(first, budget)
        elif several and not self._greedy and not self._is_over(budget):
            self._add_small_layout(budget, self._layouts.small_share)
        if not self._greedy and not is_plain_python():
            if several:
                self._improve_small(budget.with_share(self._layouts.small_share))
            self._restart_promising(budget)
            self._anneal_promising(budget)
        best = self._best_candidate
        if budget.solved is not None:
            budget.solved.extend(map(SolvedPiece, (piece.problem for piece in best.pieces), best.solutions,
                                     best.periods))
        fixed = min((known.period_seconds for known in self._candidates if not known.moved), default=None)
        return msgspec.structs.replace(
            best, evidence=describe_gap(best, budget.clock, budget.clock.now() - self._began),
            fixed_period=fixed if best.moved else None, end=self._find_search_end(best, budget),
            ran=", ".join(budget.tally.techniques))

    def _is_for_lists_alone(self, first: Incumbent | None, budget: Budget) -> bool:
        """Return whether neither annealing nor CP-SAT could begin after the share of list
        schedules."""
        if first is None or self._several or find_provable_pieces(first, self._params.cp_sat):
            return False
        seconds = (1 - self._params.lists.share) * budget.seconds_left
        return seconds < self._params.annealing.begin_seconds * first.operation_count

    def _find_search_end(self, best: Incumbent, budget: Budget) -> SearchEnd:
        """Return the reason why the search has ended with the candidate `best`."""
        needs = MIN_SHARE_LEFT * (budget.deadline - self._began) if self._greedy else 0.0
        goes_on = not self._greedy and self._rank_promising()
        return budget.end_reason(best.period, best.bound.ticks, needs) \
            or (budget.clock.limit_reason if goes_on else SearchEnd.STALE)

    @property
    def _best_candidate(self) -> Incumbent:
        return min(self._candidates, key=lambda known: known.rank)

    # --- Propose, and order each ---

    def _add_candidate(self, known: Incumbent, budget: Budget) -> None:
        """Keep a candidate with a few list schedules, unless all get stuck for memory."""
        with contextlib.suppress(StuckError):
            steps = 0 if self._several and not self._greedy else self._params.lists.most_steps
            candidate = improve_by_list_schedules(known, budget, self._params.lists, steps)
            self._candidates.append(with_solved_pieces(candidate, budget.solved or ()))

    def _add_small_layout(self, budget: Budget, share: float = 1.0) -> bool:
        """Add CP-SAT's layout if it is the shortest; return True if none can exist."""
        from slipstream.planner.search import layer_model  # the solver takes a third of a second to load

        layered, bound = self._proposals.layered, self._proposals.layered_bound
        if layered is None or bound is None or not layer_model.is_small(layered, self._params.cp_sat):
            return False
        longest = None
        if self._candidates:
            longest = math.ceil(self._best_candidate.period_seconds / layered.tick_seconds - 1e-6) - 1
        solution, impossible = layer_model.search_layouts(layered, bound.ticks, longest, budget.with_share(share),
                                                          self._params.cp_sat)
        budget.tally.count_uses("CP-SAT: layers", helped=int(solution is not None))
        if solution is not None:
            problem = solution.arrays.problem
            holds = {worker: state.holds for worker, state in problem.workers.items()}
            candidate = Incumbent(problem=problem, pieces=(make_whole_piece(problem),), bound=bound,
                                  moved=layered.moved_memory(holds))
            self._candidates.append(candidate.with_solutions([solution], [solution_period(solution)]))
        return impossible

    def _add_first_plan(self, first: Incumbent | None, budget: Budget) -> None:
        """Add a plan by CP-SAT for a small job without a list schedule."""
        from slipstream.planner.search import cpsat

        budget = budget.with_seconds(max(budget.seconds_left, FIRST_PLAN_SECONDS))
        impossible = False
        if first is not None and first.problem.host_operation_count <= self._params.cp_sat.largest_proof:
            solution, impossible = cpsat.find_solution(first.problem, budget.with_share(0.5), self._params.cp_sat)
            budget.tally.count_uses("CP-SAT: first plan", helped=int(solution is not None))
            if solution is not None:
                whole = msgspec.structs.replace(first, pieces=(make_whole_piece(first.problem),))
                self._candidates.append(whole.with_solutions([solution], [solution_period(solution)]))
        if not self._candidates and self._several:
            impossible = self._add_small_layout(budget)
        if self._candidates:
            return
        where = "" if self._proposals.moving else " with layers in place"
        if impossible:
            raise NoPlanError(f"no schedule{where} keeps all workers within their memory, as CP-SAT has proven; "
                              f"expected more [memory] capacity{where and ', or --layers move'}")
        raise NoPlanError(self._refusal or f"no schedule was found{where} that keeps all workers within their memory; "
                          f"expected more [memory] capacity{where and ', or --layers move'}")

    def _add_layouts(self, budget: Budget) -> None:
        proposals, params = self._proposals, self._layouts
        assert proposals.layouts is not None
        candidates = proposals.layouts(params.fine_rate * budget.seconds_left)
        remaining = self._max_layouts(budget.seconds_left)
        # If layers may move, examine the first layout even without time: it is usually the best.
        least = remaining - 1 if proposals.moving else remaining
        while remaining and not self._is_over(budget) \
                and (not self._candidates or remaining > least or budget.seconds_left > 0):
            try:
                candidate = next(candidates, None)
            except LookupError as error:
                self._refusal = str(error)
                return
            if candidate is None:
                return
            budget.clock.count_steps(LAYOUT_STEPS * proposals.units)
            self._add_candidate(candidate, budget.with_share(min(1.0, params.first / remaining)))
            remaining -= 1

    def _max_layouts(self, seconds: float) -> int:
        """Return the number of layouts to examine; it depends on `seconds` without annealing."""
        params = self._layouts
        if not self._greedy:
            return params.most
        return max(params.fewest, min(params.most, int(seconds / (params.seconds * self._proposals.units))))

    # --- Improve the promising ---

    def _improve_small(self, budget: Budget) -> None:
        """Improve candidates in place that CP-SAT may prove, each with the whole budget.

        A search that may move layers thus returns no worse plan than one that may not, whose only
        candidate is such a one.
        """
        for known in self._rank_promising():
            small = not known.moved and find_provable_pieces(known, self._params.cp_sat)
            if small and strongest_bound(known.problem).ticks * known.problem.tick_seconds \
                    < self._best_candidate.period_seconds:
                self._replace_candidate(known, improve_candidate(known, budget, self._params))

    def _restart_promising(self, budget: Budget) -> None:
        """Change the rules of the most promising layouts at random, in rounds of fewer."""
        params = self._layouts
        largest = max((known.problem.operation_count for known in self._rank_promising() if known.moved), default=0)
        rounds = params.large_restarts if largest > params.largest_annealed else params.restarts
        for number, (count, part) in enumerate(rounds):
            ranked = [known for known in self._rank_promising() if known.moved][:count]
            if not ranked:
                return
            within = msgspec.structs.replace(budget.with_share(part), seed=budget.seed + number)
            first_half, second_half = (ranked[::2], ranked[1::2]) if largest > params.largest_alone else (ranked, [])
            second_budget = within.fork()
            with ThreadPoolExecutor(1) as thread:
                running = thread.submit(self._restart_each, second_half, second_budget)
                self._restart_each(first_half, within)
                running.result()
            within.join(second_budget)

    def _restart_each(self, some: Sequence[Incumbent], budget: Budget) -> None:
        for known, share in self._split_budget(some, budget):
            if budget.seconds_left <= 0:
                continue
            with contextlib.suppress(StuckError):  # its plan may be one that CP-SAT has found
                self._replace_candidate(known, improve_by_list_schedules(known, share, self._params.lists,
                                                                         self._layouts.restart_steps))

    def _anneal_promising(self, budget: Budget) -> None:
        """Anneal the most promising candidates, fewer each round; then improve the best."""
        for count, share in self._layouts.halvings:
            ranked = self._rank_promising()[:count]
            if len(ranked) < 2:
                break
            for known, turn in self._split_budget(ranked, budget.with_share(share)):
                better = improve_by_annealing(known, turn, self._params.annealing)
                self._replace_candidate(known,
                                        msgspec.structs.replace(better, gained=max(0.0, known.period_seconds
                                                                                   - better.period_seconds)))
        final = self._rank_promising()[:1]
        if final and not self._is_over(budget):
            self._replace_candidate(final[0], improve_candidate(final[0], budget, self._params))

    def _split_budget(self, some: Sequence[Incumbent], budget: Budget) -> Iterator[tuple[Incumbent, Budget]]:
        """Yield each candidate with an equal share of the time, until one reaches its bound."""
        for number, known in enumerate(some):
            if self._is_over(budget):
                return
            yield known, budget.with_share(1 / (len(some) - number))

    def _rank_promising(self) -> list[Incumbent]:
        """Return the candidates above their bound, shortest expected period first."""
        return sorted((known for known in self._candidates if known.can_improve),
                      key=lambda known: known.expected_rank(self._layouts.again))

    def _is_over(self, budget: Budget) -> bool:
        """Return whether a candidate has reached its bound, or `budget` was stopped."""
        return budget.is_stopped or any(not known.can_improve for known in self._candidates)

    def _replace_candidate(self, known: Incumbent, better: Incumbent) -> None:
        if better.period > known.period:
            better = msgspec.structs.replace(known, gained=better.gained)
        self._candidates[self._candidates.index(known)] = better
