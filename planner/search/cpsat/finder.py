"""Finder: CP-SAT looks for a plan from scratch, in a thread, beside annealing."""

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType

import msgspec

from planner.budget import Budget
from planner.model.problem import Problem
from planner.model.solution import Solution

POLL_SECONDS = 0.05


class Finder:
    """Looks for a plan of at most `longest` ticks until the deadline; a context manager, which ends the search."""

    def __init__(self, problem: Problem, longest: int, *, lower_bound: int, budget: Budget) -> None:
        self.problem = problem
        self._enough = threading.Event()
        self.budget = msgspec.structs.replace(budget.beside(), stop=self._enough)
        self._longest, self._lower_bound = longest, lower_bound
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._running = self._pool.submit(self._find)

    def _find(self) -> Solution | None:
        from planner.search.cpsat.model import find  # the solver takes a third of a second to load

        whole = msgspec.structs.replace(self.problem, shedding=False)  # with fewer choices it finds more
        return find(whole, self._longest, lower_bound=self._lower_bound, budget=self.budget)

    def result(self, stop: threading.Event, *, wanted: bool) -> Solution | None:
        """What it has found, at the deadline or before; at once where that is not wanted, or when told to stop."""
        while not self._running.done():
            if stop.is_set() or not wanted:
                self._enough.set()
            wait([self._running], timeout=POLL_SECONDS)
        return self._running.result()

    def __enter__(self) -> "Finder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._enough.set()
        self._pool.shutdown()
