"""What a search may choose from: a problem with layers in place, and layouts that cut micro-batches or move layers."""

from collections.abc import Callable, Iterator

from slipstream.planner.bound import Bound
from slipstream.planner.budget import Budget
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.problem import Problem
from slipstream.planner.search.bound import divided
from slipstream.planner.search.incumbent import Incumbent

Layouts = Callable[..., Iterator[Incumbent]]
"""Candidates, the most promising first, without solutions; each is made when it is asked for. Called with a budget,
`seconds` for the exact assignment of layers, and `largest_fine`: see `planner.layout.candidates`. Raises LookupError
where there is none."""


class Proposals:
    """Of one question. Alone, a problem is its only candidate."""

    def __init__(self, first: Problem | None, *, bound: Bound | None = None, layouts: Layouts | None = None,
                 units: int = 0, moving: bool = False) -> None:
        """`first`: with layers in place; None where that has no plan. `bound`: in its ticks, where it must hold for the
        `layouts`, too. `units`: micro-batches at stages. `moving`: whether layers may move."""
        self.first, self.units, self.moving = first, units, moving
        self._bound, self._layouts = bound, layouts

    @property
    def several(self) -> bool:
        """Whether layouts are proposed."""
        return self._layouts is not None

    def start(self, *, shedding: bool) -> Incumbent | None:
        """The problem with layers in place, its pieces and the bound, without solutions."""
        if self.first is None:
            return None
        return divided(self.first, self._bound or strongest_bound(self.first), shedding=shedding)

    def layouts(self, budget: Budget, *, seconds: float, largest_fine: float) -> Iterator[Incumbent]:
        """The others."""
        return self._layouts(budget, seconds=seconds, largest_fine=largest_fine) if self._layouts else iter(())
