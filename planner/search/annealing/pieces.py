"""Anneals the pieces of a job: always the longest one, in two chains side by side, or the two longest."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slipstream.planner.budget import Budget, Tally
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.solution import Solution
from slipstream.planner.params import DEFAULTS, AnnealingParams
from slipstream.planner.search.annealing.chain import AnnealingChain
from slipstream.planner.search.incumbent import Annealed

CHAINS = 2
"""Annealing chains side by side: the compiled loops leave the interpreter to others meanwhile.

Always as many, so that the plan does not depend on the machine.
"""


TELL_SECONDS, TELL_SHARE = 0.5, 0.1
"""Between two better plans that are told of, and the share of the time that it may take: to join their pieces takes as
long as some rounds."""


def anneal_pieces(problems: Sequence[Problem], solutions: Sequence[Solution], goal: int, budget: Budget,
                  params: AnnealingParams = DEFAULTS.annealing, cycles: int | None = None,
                  tell: Callable[[Annealed], None] = lambda _: None) -> Annealed:
    """Solutions no worse than those given, one a piece, after some cooling cycles of every critical piece.

    Ends at the budget's end (`cycles` None: only then), or at the period `goal`, in ticks, that no plan can beat.
    `tell` gets better ones now and then.
    """
    pieces = _Pieces([_PieceChains(problem, solution, goal, budget.seed, params)
                      for problem, solution in zip(problems, solutions, strict=True)])
    clock = budget.clock
    start, slowest = clock.now(), 0.0
    told, when = pieces.period, start + TELL_SECONDS
    with ThreadPoolExecutor(CHAINS - 1) as others:
        while budget.end(pieces.period, goal, slowest) is None:
            began = clock.now()
            first, *rest = pieces.next_chains(goal)
            if cycles is not None and first.cycles >= cycles:
                break
            clock.count((1 + len(rest)) * first.round_steps)
            running = [others.submit(chain.run) for chain in rest]
            first.run()
            for chain in running:
                chain.result()
            pieces.end_round()
            slowest = max(slowest, clock.now() - began)
            pieces.cool_within(budget.seconds * pieces.rounds / (clock.now() - start))
            if pieces.period < told and clock.now() > when:
                told, began = pieces.period, clock.now()
                tell(pieces.result())
                when = clock.now() + max(TELL_SECONDS, (clock.now() - began) / TELL_SHARE)
    pieces.count(budget.tally)
    return pieces.result()


class _PieceChains:
    """A piece and its annealing chains, the second begun when it is first asked for."""

    def __init__(self, problem: Problem, solution: Solution, goal: int, seed: int,
                 params: AnnealingParams) -> None:
        self.rounds = self.better = 0
        """Rounds of annealing, and which of them found the last better plan."""
        self._problem, self._seed = problem, seed * CHAINS
        self.chains = [AnnealingChain(problem, solution, goal, self._seed, params)]
        self.period = self.best.period

    @property
    def healthy(self) -> bool:
        """Whether it is a whole pipeline by itself."""
        return not self._problem.failed and self._problem.grid.pipelines == 1

    @property
    def best(self) -> AnnealingChain:
        """The chain with the best plan."""
        return min(self.chains, key=lambda chain: chain.period)

    @property
    def cycles(self) -> int:
        """Cooling cycles done."""
        return self.chains[0].cycles

    def chain(self, number: int) -> AnnealingChain:
        """A chain by its number."""
        if number == len(self.chains):
            self.chains.append(self.best.twin(self._seed + number))
        return self.chains[number]

    def keep(self, deadlines: Sequence[int]) -> None:
        """From now on keep these deadlines."""
        for chain in self.chains:
            chain.keep(deadlines)
        self.period = self.best.period

    def end_round(self) -> None:
        """Chains that have done a cycle go on from the best plan of all."""
        self.rounds += 1
        best = self.best
        for chain in self.chains:
            if chain.between_cycles and chain.period > best.period:
                chain.take(best)
        if best.period < self.period:
            self.period, self.better = best.period, self.rounds


def _complete(deadlines: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each with the latest of the others for groups whose deadline is 0 in it: it has none of their workers."""
    latest = [max(ticks) for ticks in zip(*deadlines, strict=True)]
    return [[own or other for own, other in zip(mine, latest, strict=True)] for mine in deadlines]


class _Pieces:
    """The pieces, which must all keep the same deadlines.

    Where all but one are single healthy pipelines, which have time to spare, that one may shift the deadlines until
    another one is annealed, which must be able to rely on them.
    """

    def __init__(self, pieces: list[_PieceChains]) -> None:
        self._pieces = pieces
        self.rounds = 0
        """Of annealing, of any piece."""
        self._annealed: list[_PieceChains] = []
        """In the present round."""
        self._shifting: _PieceChains | None = None
        """The piece that may shift the deadlines."""
        if len(pieces) == 1:
            self._shifting = pieces[0]
            return
        ranked = sorted(pieces, key=lambda piece: (piece.healthy, -piece.period))
        choice = _complete([piece.best.deadlines for piece in ranked])
        periods = []
        for deadlines in choice:
            self._keep(deadlines, pieces)
            periods.append(self.period)
        best = periods.index(min(periods))
        self._keep(choice[best], pieces)
        if all(piece.healthy for piece in ranked[1:]) and best == 0 and ranked[0].period == self.period:
            self._shifting = ranked[0]
            ranked[0].chains[0].loosen()

    @staticmethod
    def _keep(deadlines: Sequence[int], pieces: Sequence[_PieceChains]) -> None:
        for piece in pieces:
            piece.keep(deadlines)

    @property
    def period(self) -> int:
        """Of the whole."""
        return max(piece.period for piece in self._pieces)

    def next_chains(self, goal: int) -> list[AnnealingChain]:
        """What to anneal next: the longest piece, and beside it the next one if that is nearly as long."""
        order = sorted(self._pieces, key=lambda piece: (-piece.period, piece.rounds))
        self._annealed = order[:1]
        if len(order) > 1 and 2 * order[1].period > order[0].period + goal:
            self._annealed = order[:CHAINS]
            return [piece.chain(0) for piece in self._annealed]
        return [order[0].chain(number) for number in range(CHAINS)]

    def end_round(self) -> None:
        """Exchange what the chains of a round have found."""
        self.rounds += 1
        for piece in self._annealed:
            piece.end_round()
        if self._shifting is None or len(self._pieces) == 1:
            return
        deadlines = self._shifting.best.deadlines
        if self._annealed != [self._shifting]:
            self._keep(deadlines, self._pieces)
            self._shifting = None
        else:
            self._keep(deadlines, [piece for piece in self._pieces if piece is not self._shifting])

    def cool_within(self, rounds: float) -> None:
        """Have the present cooling cycles end within so many more rounds, in which pieces take turns as before."""
        for piece in self._annealed:
            for chain in piece.chains:
                chain.cool_within(rounds * piece.rounds / self.rounds)

    def count(self, tally: Tally) -> None:
        """Add what the operators of all chains have done."""
        for piece in self._pieces:
            for chain in piece.chains:
                for name, (tried, _, better) in chain.operators.items():
                    tally.add(f"annealing: {name}", tried, better)

    def result(self) -> Annealed:
        """The best plans found."""
        ranked = sorted(self._pieces, key=lambda piece: -piece.period)
        deadlines = _complete([piece.best.deadlines for piece in ranked])[0]
        last = max(self._pieces, key=lambda piece: (piece.period, piece.rounds))
        stale = 1 - last.better / last.rounds if last.rounds else 0.0
        return Annealed([piece.best.solution() for piece in self._pieces], deadlines,
                        sum(chain.steps for chain in last.chains), stale, last.cycles)
