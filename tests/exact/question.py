"""Read a job file as a question about the shortest period.

Written from docs/concepts.md, docs/planning.md and docs/formats.md, without the planner. Times and
memory are whole numbers, of ticks and units of which all are multiples: nothing is rounded.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

Worker = tuple[int, int]
"""Worker as (pipeline, column)."""
Batch = tuple[int, int]
"""Micro-batch as (pipeline, number)."""
LayerRange = tuple[int, int]
"""Layers from the first to before the end."""
TIMES = {
    "F": "forward",
    "I": "backward_input",
    "W": "backward_weight",
    "A": "all_reduce",
    "O": "optimizer",
}
"""Keys of `[time]` by kind of op."""
SIZES = {"activation": 1, "weight_stash": 0, "weights": 0}
"""Keys of `[memory]`, with their defaults."""
NOT_MODELLED = {
    "memory": ("state",),
    "training": ("recompute",),
    "network": ("latency", "bandwidth", "gradients", "slowdown", "activation"),
}
"""Keys that are refused, by table."""
WHOLE_STAGES = ("own micro-batches", "whole stages")
"""Scopes in which each slice is a stage.

In others it is any layers, also of several stages.
"""
LARGEST = 2**61
"""Largest sum of times or sizes for which the solver has enough bits."""


class NotCoveredError(ValueError):
    """Error: the reference does not model a job file. The message names the key or reason."""


class Part(NamedTuple):
    """Layers that a worker runs without a cut, with their costs by key."""

    layers: LayerRange
    costs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Job, its failures and a scope, as a reader of the documents understands them."""

    scope: str
    backward: str
    optimizer: str
    overlap: bool
    tick: Fraction
    """Seconds of a tick."""
    unit: Fraction
    """Unit of memory, in that of the job file."""
    pipelines: int
    columns: int
    microbatches: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    """Column of each stage that a micro-batch passes, for each direction."""
    stages: tuple[LayerRange, ...]
    """Layers of each stage that a micro-batch passes."""
    layers: tuple[Part, ...]
    """All layers, each as a part of its own."""
    live: tuple[Worker, ...]
    failed: tuple[Worker, ...]
    slow: Mapping[Worker, Fraction]
    transfer: int
    memory: tuple[int, ...] | None = None
    """Memory of a worker of each column, for weights and activations together."""
    memory_of: Mapping[Worker, int]
    """Memory of those workers that have another amount than their column."""

    @property
    def kinds(self) -> str:
        """Kinds of compute op of a micro-batch at a part, in order."""
        return "FIW" if self.backward == "split" else "FB"

    @property
    def batches(self) -> list[Batch]:
        """All micro-batches."""
        counts = enumerate(self.microbatches)
        return [(pipeline, number) for pipeline, count in counts for number in range(count)]

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Stages, or single layers if the scope allows cuts within a stage."""
        if self.scope not in WHOLE_STAGES:
            return self.layers
        return tuple(join(self.layers[first:end]) for first, end in self.stages)

    @cached_property
    def holdings(self) -> tuple[set[int], ...]:
        """Numbers of the parts that a worker of each column holds in place."""
        holdings: tuple[set[int], ...] = tuple(set() for _ in range(self.columns))
        for chain in self.chains:
            for (first, end), column in zip(self.stages, chain, strict=True):
                for number, part in enumerate(self.parts):
                    if first <= part.layers[0] < end:
                        holdings[column].add(number)
        return holdings

    def hosts(self, batch: Batch, part: int) -> list[Worker]:
        """Return the live workers that may run a part for a micro-batch."""
        holders = [worker for worker in self.live if part in self.holdings[worker[1]]]
        if self.scope == "any layers":
            return list(self.live)
        if self.scope == "roles":
            # Layers that no live worker holds are lost: only a checkpoint still has them.
            return list(self.live) if holders else []
        if self.scope == "own micro-batches":
            worker = (batch[0], self.chains[batch[1] % len(self.chains)][part])
            return [worker] if worker in self.live else holders
        return holders

    def ticks(self, kind: str, part: int, worker: Worker | None = None) -> int:
        """Return the ticks of an op. F, I, W and B take longer on slow workers."""
        if kind == "B":
            return self.ticks("I", part, worker) + self.ticks("W", part, worker)
        factor = 1 if worker is None else self.slow.get(worker, 1)
        return int(self.parts[part].costs[TIMES[kind]] * factor)

    def weights(self, column: int) -> int:
        """Return the memory that the weights of a column's layers take."""
        return sum(self.parts[part].costs["weights"] for part in self.holdings[column])

    def memory_for(self, worker: Worker, column: int) -> int:
        """Return a worker's memory if it plays a role of a column."""
        assert self.memory is not None
        return self.memory_of.get(worker, self.memory[column])

    @property
    def horizon(self) -> int:
        """Ticks in which all ops and transfers can follow one another.

        A time at which nothing happens anywhere can be cut out of a schedule, so none needs more.
        """
        parts = range(len(self.parts))
        route = 2 * len(parts) * self.transfer
        for kind in self.kinds:
            for part in parts:
                route += max(self.ticks(kind, part, worker) for worker in self.live)
        closing = sum(self.ticks(kind, part) for kind in "AO" for part in parts)
        return route * len(self.batches) + closing * (len(self.live) + 1)


def join(layers: Sequence[Part]) -> Part:
    """Return adjacent layers as one part."""
    costs = dict(layers[0].costs)
    for layer in layers[1:]:
        costs = {key: cost + layer.costs[key] for key, cost in costs.items()}
    return Part((layers[0].layers[0], layers[-1].layers[1]), costs)


def exact(value: float) -> Fraction:
    """Return the decimal number that was written for a float."""
    return Fraction(repr(value))


# --- Reading -------------------------------------------------------------------------


def read_question(
    job: Mapping[str, Any],
    failed: Sequence[Worker] = (),
    *,
    scope: str,
    backward: str = "split",
    optimizer: str = "staggered",
) -> Question:
    """Read the contents of a job file as a question.

    Raises NotCoveredError for a key that is not modelled, or for numbers of too many digits.
    """
    for table, keys in NOT_MODELLED.items():
        for key in keys:
            if key in job.get(table, {}):
                raise NotCoveredError(f"{table}.{key} is not modelled by the exact reference")
    pipelines, columns, memory = job["pipelines"], job["stages"], job.get("memory", {})
    chains = _read_chains(job.get("placement", {}), columns)
    counts = job.get("placement", {}).get("layers", [1] * len(chains[0]))
    stages = tuple(pairwise(accumulate(counts, initial=0)))
    layers = _read_layers(job, stages)
    slow = _by_worker(job["time"].get("slow", {}))
    transfer = exact(job["time"].get("transfer", 0))
    capacity = list(map(exact, _spread(memory.get("capacity", 0), columns)))
    capacity_of = _by_worker(memory.get("capacity_of", {}))

    # Times become multiples of a tick, slow ones too, and sizes multiples of a unit.
    times = [layer.costs[key] for layer in layers for key in TIMES.values()]
    slow_times = [time * factor for time in times for factor in slow.values()]
    sizes = [layer.costs[key] for layer in layers for key in SIZES]
    sizes += [*capacity, *capacity_of.values()]
    tick = _divisor([transfer, *times, *slow_times])
    unit = _divisor(sizes)
    units = dict.fromkeys(TIMES.values(), tick) | dict.fromkeys(SIZES, unit)
    question = Question(
        scope=scope,
        backward=backward,
        optimizer=optimizer,
        overlap=job.get("network", {}).get("overlap", False),
        tick=tick,
        unit=unit,
        pipelines=pipelines,
        columns=columns,
        microbatches=tuple(_spread(job["microbatches"], pipelines)),
        chains=chains,
        stages=stages,
        layers=tuple(_in_units(layer, units) for layer in layers),
        live=tuple(sorted({*product(range(pipelines), range(columns))} - {*failed})),
        failed=tuple(sorted(failed)),
        slow=slow,
        transfer=int(transfer / tick),
        memory_of={},
    )
    if max(question.horizon, sum(sizes) / unit * len(question.batches)) > LARGEST:
        raise NotCoveredError("the numbers have too many digits for the solver")
    if not memory:
        return question

    # A capacity is the room beside the layers of a worker's own column.
    weights = list(map(question.weights, range(columns)))
    return replace(
        question,
        memory=tuple(int(room / unit) + weights[column] for column, room in enumerate(capacity)),
        memory_of={
            worker: int(room / unit) + weights[worker[1]] for worker, room in capacity_of.items()
        },
    )


def _spread(value: Any, length: int) -> list[Any]:
    """Return a list as it is, and one value as often as it holds."""
    return list(value) if isinstance(value, list) else [value] * length


def _by_worker(values: Mapping[str, float]) -> dict[Worker, Fraction]:
    numbers: dict[Worker, Fraction] = {}
    for name, value in values.items():
        pipeline, column = name.split(".")
        numbers[int(pipeline), int(column)] = exact(value)
    return numbers


def _read_chains(placement: Mapping[str, Any], columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the worker column of each stage, for each direction of micro-batches."""
    order, chunks = placement.get("order", "linear"), placement.get("chunks", 1)
    there, back = tuple(range(columns)), tuple(reversed(range(columns)))
    if isinstance(order, list):
        return (tuple(order),)
    if order == "bidirectional":
        return there, back
    if order == "linear":
        return (tuple(column for column in there for _ in range(chunks)),)
    turns = (there, there if order == "interleaved" else back)
    return (tuple(column for chunk in range(chunks) for column in turns[chunk % 2]),)


def _read_layers(job: Mapping[str, Any], stages: Sequence[LayerRange]) -> list[Part]:
    """Return all layers with the costs of their stages, divided by `[layers]`."""
    given = {key: job["time"].get(key, 0) for key in TIMES.values()}
    given |= {key: job.get("memory", {}).get(key, usual) for key, usual in SIZES.items()}
    layers = [Part((layer, layer + 1), {}) for layer in range(stages[-1][1])]
    for key, value in given.items():
        shares = list(map(exact, _spread(job.get("layers", {}).get(key, 1), len(layers))))
        for cost, (first, end) in zip(_spread(value, len(stages)), stages, strict=True):
            total = sum(shares[first:end])
            for layer in range(first, end):
                share = shares[layer] / total if total else Fraction(1, end - first)
                layers[layer].costs[key] = exact(cost) * share
    return layers


def _in_units(layer: Part, units: Mapping[str, Fraction]) -> Part:
    costs = {key: int(cost / units[key]) for key, cost in layer.costs.items()}
    return Part(layer.layers, costs)


def _divisor(values: Iterable[Fraction]) -> Fraction:
    """Return the greatest common divisor, or 1 if all values are 0."""
    fractions = list(values)
    common = math.lcm(*(value.denominator for value in fractions))
    return Fraction(math.gcd(*(int(value * common) for value in fractions)), common) or Fraction(1)
