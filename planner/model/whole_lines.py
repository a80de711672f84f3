"""Lines of workers that run the same whole micro-batches and nothing else: how long they take to fill.

What a worker runs before its first I are whole forwards (`planner.model.bounds.whole_fill`). Where micro-batches that
are cut come to a line, it has shorter ones, and is not counted here.
"""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from slipstream.planner.layout.types import MicroBatch
from slipstream.planner.model.bounds import Fill, can_fill
from slipstream.planner.model.problem import Leg, Problem
from slipstream.schedules.schedule import Worker

Route = tuple[Leg, ...]


class WholeLine(NamedTuple):
    """Workers, from the first on."""

    fills: tuple[Fill, ...]
    busy: tuple[int, ...]
    """Ticks of their ops and of their optimizer steps."""

    def excludes(self, period: int) -> bool:
        """Whether no order has so short a period, of no less than they are busy, with a staggered optimizer."""
        return not can_fill(self.fills, [period - ticks for ticks in self.busy])


def whole_lines(piece: Problem, routes: Mapping[MicroBatch, Route]) -> list[WholeLine]:
    """The lines of a piece, different ones once."""
    counts = Counter(routes.values())
    passing: Counter[Worker] = Counter()
    for route, count in counts.items():
        for leg in route:
            passing[leg.worker] += count
    return list({_line(piece, route, count) for route, count in counts.items()
                 if all(passing[leg.worker] == count for leg in route)})


def _line(piece: Problem, route: Route, count: int) -> WholeLine:
    fills, busy = [], []
    for leg, after in zip(route, [*route[1:], None], strict=True):
        forward, gradient, *weight = (piece.cost(kind, leg.slice, leg.worker) for kind in piece.kinds)
        activation = piece.activation(leg.slice)
        most = min(count, piece.room(leg.worker) // activation) if activation else count
        back = 0 if after is None else piece.cost(piece.gradient_kind, after.slice, after.worker) \
            + 2 * piece.hop(leg.worker, after.worker)
        fills.append(Fill(forward, most, back))
        step = piece.step(leg.worker)
        busy.append(count * (forward + gradient + sum(weight)) + step)
    return WholeLine(tuple(fills), tuple(busy))
