"""The true optimum of tiny jobs over all layouts, by enumeration.

It shares no code with the planner.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

Op = tuple[str, int, int]
"""(F or B, layer, micro-batch)."""


def optimal_period_of_any_layout(
    backward: Sequence[int],
    forward: Sequence[int],
    steps: Sequence[int],
    *,
    workers: int,
    microbatches: int,
    transfer: int,
) -> int:
    """The least period of fused plans with a staggered optimizer.

    It is over who runs which layer of which micro-batch and every order of ops. Workers hold the
    layers that they run; reductions take no time. Slices of one layer each are the most general:
    longer ones are two of them in a row.
    """
    layers, total = len(forward), range(microbatches)
    cost = {
        (kind, layer, batch): times[layer]
        for kind, times in (("F", forward), ("B", backward))
        for layer in range(layers)
        for batch in total
    }
    units = [(layer, batch) for batch in total for layer in range(layers)]
    best = sum(cost.values()) + sum(steps)  # one worker runs all
    for choice in itertools.product(range(workers), repeat=len(units)):
        host = dict(zip(units, choice, strict=True))
        holdings = {worker: set() for worker in choice}
        for (layer, _), runner in host.items():
            holdings[runner].add(layer)
        closing = {}
        for worker, of in holdings.items():
            closing[worker] = sum(steps[layer] for layer in of)
        loads = dict(closing)
        for unit in units:
            loads[host[unit]] += cost["F", *unit] + cost["B", *unit]
        least = max(loads.values())
        if len(holdings) == 1 or least >= best:
            continue
        orders = []
        for worker in holdings:
            orders.append(_orders([unit for unit in units if host[unit] == worker]))
        for sequences in itertools.product(*orders):
            while least < best and _possible(
                sequences, list(holdings), host, holdings, closing, cost, transfer, best - 1, layers
            ):
                best -= 1
    return best


def _orders(units: Sequence[tuple[int, int]]) -> list[list[Op]]:
    """Every order of one worker's ops with F of a unit before its B."""
    found = []
    for labelled in set(itertools.permutations([unit for unit in units for _ in "FB"])):
        seen: set[tuple[int, int]] = set()
        ops = []
        for unit in labelled:
            ops.append(("B" if unit in seen else "F", *unit))
            seen.add(unit)
        found.append(ops)
    return found


def _possible(sequences, workers, host, holdings, closing, cost, transfer, period, layers) -> bool:
    """Return whether start times exist, by longest paths.

    The constraints are `start[b] >= start[a] + weight`; no circle of them may grow.
    """
    edges = []
    of_layer = defaultdict(list)
    for op in cost:
        kind, layer, batch = op
        of_layer[layer].append(op)
        before = None
        if kind == "F" and layer:
            before = ("F", layer - 1, batch)
        elif kind == "B":
            before = ("F" if layer == layers - 1 else "B", min(layer + 1, layers - 1), batch)
        if before is not None:
            hop = transfer * (host[before[1], batch] != host[layer, batch])
            edges.append((before, op, cost[before] + hop))
    for worker, sequence in zip(workers, sequences, strict=True):
        edges += [(a, b, cost[a]) for a, b in itertools.pairwise(sequence)]
        edges += [
            (op, sequence[0], cost[op] + closing[worker] - period)
            for layer in holdings[worker]
            for op in of_layer[layer]
        ]
    start = dict.fromkeys(cost, 0)
    for _ in range(len(start) + 1):
        changed = False
        for a, b, weight in edges:
            if start[a] + weight > start[b]:
                start[b], changed = start[a] + weight, True
        if not changed:
            return True
    return False
