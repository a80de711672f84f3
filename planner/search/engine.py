"""Search for the best plan: order candidates' ops, improve, and try proofs.

A candidate is a problem in which the layers of each worker and the slices of each micro-batch are
decided. First, a few list schedules of each candidate show which ones deserve more time. The best
few layouts that move layers get many more list schedules. Then the best few candidates are annealed
in turns, fewer each time, until one has the rest of the time (successive halving); CP-SAT also
improves a small candidate after a little annealing. A job with one candidate is treated in the same
way.
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
"""Least fraction of the time that is left if list schedules ended by themselves.

With less time left, the limit is given as the reason why the search ended.
"""


def find_best_candidate(
    question: Problem | CandidateSource,
    method: Method,
    budget: Budget,
    params: SearchParams = DEFAULTS,
) -> Incumbent:
    """Search by `method` for the best plan of a problem, or of a source's candidates.

    Return the candidate that has this plan. Its subproblems are added to `budget.solved` unless
    that is None. Baseline methods need a problem in place, and use no budget. Raises NoPlanError if
    no plan is found that keeps workers within their memory, or if no layout has a holder for every
    layer.
    """
    if isinstance(question, CandidateSource):
        proposals = question
    else:
        proposals = CandidateSource(first=question)
    if method in BASELINES:
        assert proposals.first is not None, "baseline methods are defined only for layers in place"
        return _make_baseline(proposals.first, method, params)
    return _Engine(proposals, budget, params, greedy=method == "greedy").run()


def _make_baseline(problem: Problem, method: Method, params: SearchParams) -> Incumbent:
    # As these methods re-route among all pipelines, a job with failures is divided only if it would
    # take too long otherwise.
    divide = not problem.failed or problem.operation_count > params.blocks.largest_baseline
    pieces = decompose(problem, params.pieces) if divide else (make_whole_piece(problem),)
    try:
        return order_pieces(problem, pieces, BASELINES[method], strongest_bound(problem), method)
    except StuckError:
        raise NoPlanError(
            f"{method} gets stuck because workers lack memory; expected more [memory] capacity, or "
            "--method cp-sat"
        ) from None


class _Engine:
    def __init__(
        self, proposals: CandidateSource, budget: Budget, params: SearchParams, *, greedy: bool
    ) -> None:
        self._proposals, self._budget, self._greedy = proposals, budget, greedy
        self._params, self._layouts, self._several = (
            params,
            params.layouts,
            proposals.layouts is not None,
        )
        self._candidates: list[Incumbent] = []
        self._refusal = ""
        self._began = budget.clock.now()

    def run(self) -> Incumbent:
        """Run the search and return the best candidate; raise NoPlanError if there is none."""
        budget, several, proposals = self._budget, self._several, self._proposals
        first = None
        if proposals.first is not None:
            first = divide_problem(
                proposals.first,
                proposals.bound,
                shedding=not self._greedy,
                params=self._params.pieces,
            )
        # Keep the time that it takes to build the schedule, and the share of list schedules.
        blocks = self._params.blocks
        if first is not None:
            finish_seconds = min(
                blocks.finish_share * budget.seconds_left,
                blocks.finish_seconds * first.operation_count,
            )
            budget = budget.with_deadline(budget.deadline - finish_seconds)
        share = self._layouts.share if several else self._params.lists.share
        lists = budget
        # If no other search would follow, list schedules have all the time.
        if not self._greedy and not self._is_for_lists_alone(first, budget):
            lists = budget.with_share(share)
        # List schedules of the problem in place, then of layouts.
        if first is not None:
            first_share = 1.0
            if several and proposals.moving:
                first_share = self._layouts.first_share_move
            elif several:
                first_share = self._layouts.first_share_fixed
            self._add_candidate(first, lists.with_share(first_share))
        if several:
            self._add_layouts(lists)
        # CP-SAT where list schedules found nothing, or for another layout of a small job.
        if not self._candidates:
            self._add_first_plan(first, budget)
        elif several and not self._greedy and not self._is_over(budget):
            self._add_small_layout(budget, self._layouts.small_share)
        # Improve the most promising.
        if not self._greedy and not is_plain_python():
            if several:
                self._improve_small(budget.with_share(self._layouts.small_share))
            self._restart_promising(budget)
            self._anneal_promising(budget)
        # Keep solved subproblems for other searches, and say how the search went.
        best = self._best_candidate
        if budget.solved is not None:
            budget.solved.extend(
                map(
                    SolvedPiece,
                    (piece.problem for piece in best.pieces),
                    best.solutions,
                    best.periods,
                )
            )
        in_place = [candidate for candidate in self._candidates if not candidate.moved]
        fixed = min((candidate.period_seconds for candidate in in_place), default=None)
        return msgspec.structs.replace(
            best,
            evidence=describe_gap(best, budget.clock, budget.clock.now() - self._began),
            fixed_period=fixed if best.moved else None,
            end=self._find_search_end(best, budget),
            ran=", ".join(budget.tally.techniques),
        )

    def _is_for_lists_alone(self, first: Incumbent | None, budget: Budget) -> bool:
        """Return whether list schedules would leave too little time to anneal or prove."""
        if first is None or self._several or find_provable_pieces(first, self._params.cp_sat):
            return False
        seconds = (1 - self._params.lists.share) * budget.seconds_left
        return seconds < self._params.annealing.begin_seconds * first.operation_count

    def _find_search_end(self, best: Incumbent, budget: Budget) -> SearchEnd:
        # If neither bound nor limit ended the search, it had nothing left to try.
        needs = MIN_SHARE_LEFT * (budget.deadline - self._began) if self._greedy else 0.0
        goes_on = not self._greedy and self._rank_promising()
        return budget.end_reason(best.period, best.bound.ticks, needs) or (
            budget.clock.limit_reason if goes_on else SearchEnd.STALE
        )

    @property
    def _best_candidate(self) -> Incumbent:
        return min(self._candidates, key=lambda candidate: candidate.rank)

    # --- Propose, and order each ---

    def _add_candidate(self, candidate: Incumbent, budget: Budget) -> None:
        """Add a candidate with a few list schedules, unless all get stuck for memory."""
        # Of several candidates, only promising ones get random changes of rules, later.
        with contextlib.suppress(StuckError):
            steps = 0 if self._several and not self._greedy else self._params.lists.most_steps
            improved = improve_by_list_schedules(candidate, budget, self._params.lists, steps)
            self._candidates.append(with_solved_pieces(improved, budget.solved or ()))

    def _add_small_layout(self, budget: Budget, share: float = 1.0) -> bool:
        """Add CP-SAT's layout of a small job if shorter; return whether none can exist."""
        # The solver takes a third of a second to load.
        from slipstream.planner.search import layer_model

        layered, bound = self._proposals.layered, self._proposals.layered_bound
        if (
            layered is None
            or bound is None
            or not layer_model.is_small(layered, self._params.cp_sat)
        ):
            return False
        # Only a layout that is shorter than the best plan is of use.
        longest = None
        if self._candidates:
            longest = (
                math.ceil(self._best_candidate.period_seconds / layered.tick_seconds - 1e-6) - 1
            )
        solution, impossible = layer_model.search_layouts(
            layered, bound.ticks, longest, budget.with_share(share), self._params.cp_sat
        )
        budget.tally.count_uses("CP-SAT: layers", helped=int(solution is not None))
        if solution is not None:
            problem = solution.arrays.problem
            holds = {worker: state.holds for worker, state in problem.workers.items()}
            candidate = Incumbent(
                problem=problem,
                pieces=(make_whole_piece(problem),),
                bound=bound,
                moved=layered.moved_memory(holds),
            )
            self._candidates.append(
                candidate.with_solutions([solution], [solution_period(solution)])
            )
        return impossible

    def _add_first_plan(self, first: Incumbent | None, budget: Budget) -> None:
        """Add a plan of a small job by CP-SAT; raise NoPlanError if none is found."""
        from slipstream.planner.search import cpsat

        # In place first, then with another layout.
        budget = budget.with_seconds(max(budget.seconds_left, FIRST_PLAN_SECONDS))
        impossible = False
        if (
            first is not None
            and first.problem.host_operation_count <= self._params.cp_sat.largest_proof
        ):
            solution, impossible = cpsat.find_solution(
                first.problem, budget.with_share(0.5), self._params.cp_sat
            )
            budget.tally.count_uses("CP-SAT: first plan", helped=int(solution is not None))
            if solution is not None:
                whole = msgspec.structs.replace(first, pieces=(make_whole_piece(first.problem),))
                self._candidates.append(
                    whole.with_solutions([solution], [solution_period(solution)])
                )
        if not self._candidates and self._several:
            impossible = self._add_small_layout(budget)
        if self._candidates:
            return
        # Say whether a plan is impossible, or was not found.
        where = "" if self._proposals.moving else " with layers in place"
        if impossible:
            raise NoPlanError(
                f"no schedule{where} keeps all workers within their memory, as CP-SAT has proven; "
                f"expected more [memory] capacity{where and ', or --layers move'}"
            )
        raise NoPlanError(
            self._refusal
            or f"no schedule was found{where} that keeps all workers within their memory; "
            f"expected more [memory] capacity{where and ', or --layers move'}"
        )

    def _add_layouts(self, budget: Budget) -> None:
        # The more time, the shorter the slices may be.
        proposals, params = self._proposals, self._layouts
        assert proposals.layouts is not None
        candidates = proposals.layouts(params.fine_rate * budget.seconds_left)
        remaining = self._max_layouts(budget.seconds_left)
        # If layers may move, examine the first layout even without time: it is usually the best.
        least = remaining - 1 if proposals.moving else remaining
        while (
            remaining
            and not self._is_over(budget)
            and (not self._candidates or remaining > least or budget.seconds_left > 0)
        ):
            # No layout at all: the message is kept, in case nothing else has a plan either.
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
        """Return how many layouts to examine; `seconds` limit them only without annealing."""
        params = self._layouts
        if not self._greedy:
            return params.most
        return max(
            params.fewest, min(params.most, int(seconds / (params.seconds * self._proposals.units)))
        )

    # --- Improve the promising ---

    def _improve_small(self, budget: Budget) -> None:
        """Improve promising candidates in place that are small enough for CP-SAT."""
        # So a search that may move layers returns no worse plan than one that may not, whose only
        # candidate is such a one.
        for candidate in self._rank_promising():
            if candidate.moved or not find_provable_pieces(candidate, self._params.cp_sat):
                continue
            bound = strongest_bound(candidate.problem).ticks * candidate.problem.tick_seconds
            if bound < self._best_candidate.period_seconds:
                improved = improve_candidate(candidate, budget, self._params)
                self._replace_candidate(candidate, improved)

    def _restart_promising(self, budget: Budget) -> None:
        """Run random restarts on the best layouts with moved layers, fewer each round."""
        params = self._layouts
        largest = max(
            (
                candidate.problem.operation_count
                for candidate in self._rank_promising()
                if candidate.moved
            ),
            default=0,
        )
        rounds = params.large_restarts if largest > params.largest_annealed else params.restarts
        for number, (count, part) in enumerate(rounds):
            ranked = [candidate for candidate in self._rank_promising() if candidate.moved][:count]
            if not ranked:
                return
            # Large ones in two threads, every second one in the other.
            within = msgspec.structs.replace(budget.with_share(part), seed=budget.seed + number)
            first_half, second_half = ranked, list[Incumbent]()
            if largest > params.largest_alone:
                first_half, second_half = ranked[::2], ranked[1::2]
            second_budget = within.fork()
            # Both clocks run at once; the later one counts.
            with ThreadPoolExecutor(1) as thread:
                running = thread.submit(self._restart_each, second_half, second_budget)
                self._restart_each(first_half, within)
                running.result()
            within.join(second_budget)

    def _restart_each(self, candidates: Sequence[Incumbent], budget: Budget) -> None:
        for candidate, share in self._split_budget(candidates, budget):
            if budget.seconds_left <= 0:
                continue
            with contextlib.suppress(StuckError):  # its plan may be one that CP-SAT has found
                improved = improve_by_list_schedules(
                    candidate, share, self._params.lists, self._layouts.restart_steps
                )
                self._replace_candidate(candidate, improved)

    def _anneal_promising(self, budget: Budget) -> None:
        """Anneal the most promising candidates, fewer in each round, and at last only the best."""
        # A round of one candidate would be the last step, which has the rest of the time.
        for count, share in self._layouts.halvings:
            ranked = self._rank_promising()[:count]
            if len(ranked) < 2:
                break
            for candidate, turn in self._split_budget(ranked, budget.with_share(share)):
                better = improve_by_annealing(candidate, turn, self._params.annealing)
                gained = max(0.0, candidate.period_seconds - better.period_seconds)
                better = msgspec.structs.replace(better, gained=gained)
                self._replace_candidate(candidate, better)
        final = self._rank_promising()[:1]
        if final and not self._is_over(budget):
            self._replace_candidate(final[0], improve_candidate(final[0], budget, self._params))

    def _split_budget(
        self, candidates: Sequence[Incumbent], budget: Budget
    ) -> Iterator[tuple[Incumbent, Budget]]:
        """Yield each candidate with an equal share of the time, until one attains its bound."""
        for number, candidate in enumerate(candidates):
            if self._is_over(budget):
                return
            yield candidate, budget.with_share(1 / (len(candidates) - number))

    def _rank_promising(self) -> list[Incumbent]:
        """Return the candidates above their bound, shortest expected period first."""
        return sorted(
            (candidate for candidate in self._candidates if candidate.can_improve),
            key=lambda candidate: candidate.expected_rank(self._layouts.again),
        )

    def _is_over(self, budget: Budget) -> bool:
        return budget.is_stopped or any(not candidate.can_improve for candidate in self._candidates)

    def _replace_candidate(self, candidate: Incumbent, better: Incumbent) -> None:
        # A longer plan, as from other list schedules, is dropped, but its gain is recorded.
        if better.period > candidate.period:
            better = msgspec.structs.replace(candidate, gained=better.gained)
        self._candidates[self._candidates.index(candidate)] = better
