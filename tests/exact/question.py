"""Read a job file as a question: which workers may run which layers, for how long, in how much room.

Written from docs/concepts.md, docs/planning.md and docs/formats.md, without the planner. All numbers
are exact fractions of seconds and of the job's unit of memory. A key that is not modelled is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Worker = tuple[int, int]
"""Worker as (pipeline, column)."""
OPS = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
"""Keys of a job file by kind of compute op."""
NOT_MODELLED = {"memory": ("state",), "network": ("latency", "bandwidth", "gradients", "slowdown", "activation")}
"""Keys of each table whose effects the reference does not count."""


class NotCoveredError(ValueError):
    """Error: the reference does not model a key of a job file. The message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Layers [first, end) that one worker runs for one micro-batch without a cut, with their costs."""

    first: int
    end: int
    ticks: Mapping[str, Fraction]
    """Seconds of F, I, W, A and O."""
    activation: Fraction
    stash: Fraction
    weights: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Job, its failures and a scope, as a reader of the documents understands them."""

    name: str
    scope: str
    pipelines: int
    columns: int
    microbatches: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    """Column of each stage that a micro-batch passes, for each direction."""
    stages: tuple[tuple[int, int], ...]
    """Layers of each stage that a micro-batch passes."""
    has_layers: bool
    parts: tuple[Part, ...]
    """Stages, or single layers if the scope allows cuts within a stage."""
    live: tuple[Worker, ...]
    failed: tuple[Worker, ...]
    slow: Mapping[Worker, Fraction]
    transfer: Fraction
    capacity: tuple[Fraction, ...] | None
    """Room for activations by column, None without limits."""
    capacity_of: Mapping[Worker, Fraction]
    backward: str
    optimizer: str
    overlap: bool
    held: tuple[frozenset[int], ...] = field(default=())
    """Numbers of the parts that a worker of each column holds in place."""

    @property
    def depth(self) -> int:
        """Number of stages that a micro-batch passes."""
        return len(self.stages)

    @property
    def kinds(self) -> str:
        """Kinds of compute op of a micro-batch at a part, in order."""
        return "FIW" if self.backward == "split" else "FB"

    def batches(self) -> list[tuple[int, int]]:
        """Return all micro-batches as (pipeline, number)."""
        return [(pipeline, number) for pipeline, count in enumerate(self.microbatches)
                for number in range(count)]

    def hosts(self, batch: tuple[int, int], part: int) -> list[Worker]:
        """Return the live workers that may run a part for a micro-batch."""
        if self.scope in ("roles", "any layers"):
            return list(self.live)
        if self.scope in ("own micro-batches", "any placement"):
            column = self.chains[batch[1] % len(self.chains)][part]
            if (batch[0], column) in self.live:
                return [(batch[0], column)]
        return [worker for worker in self.live if part in self.held[worker[1]]]

    def own_room(self, worker: Worker) -> Fraction:
        """Return a worker's room for activations next to the layers of its own column."""
        assert self.capacity is not None
        return self.capacity_of.get(worker, self.capacity[worker[1]])

    def weights(self, parts: Iterable[int]) -> Fraction:
        """Return the memory that the weights of some parts take."""
        return sum((self.parts[part].weights for part in parts), Fraction(0))


def read_question(job: Mapping[str, Any], failed: Sequence[Worker] = (), *, scope: str,
                  backward: str = "split", optimizer: str = "staggered") -> Question:
    """Read the contents of a job file as a question for a scope.

    Raises NotCoveredError for a key that the reference does not model.
    """
    _refuse_uncovered(job)
    pipelines, columns = job["pipelines"], job["stages"]
    placement, memory = job.get("placement", {}), job.get("memory")
    chains = _columns_of_chains(placement, columns)
    counts = placement.get("layers", [1] * len(chains[0]))
    ends = [sum(counts[:stage + 1]) for stage in range(len(counts))]
    stages = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    cuts = scope not in ("own micro-batches", "whole stages", "any placement")
    parts = _parts(job, stages, cuts=cuts)
    held = tuple(frozenset(number for number, part in enumerate(parts) for chain in chains
                           for stage, owner in enumerate(chain) if owner == column
                           and stages[stage][0] <= part.first and part.end <= stages[stage][1])
                 for column in range(columns))
    return Question(
        name=job.get("name", "tiny"), scope=scope, pipelines=pipelines, columns=columns, chains=chains,
        microbatches=tuple(_spread(job["microbatches"], pipelines)), stages=stages, parts=parts,
        has_layers="layers" in placement, held=held, failed=tuple(sorted(failed)),
        live=tuple((pipeline, column) for pipeline in range(pipelines) for column in range(columns)
                   if (pipeline, column) not in failed),
        slow=_by_worker(job["time"].get("slow", {})), transfer=exact(job["time"].get("transfer", 0)),
        capacity=tuple(map(exact, _spread(memory["capacity"], columns))) if memory else None,
        capacity_of=_by_worker((memory or {}).get("capacity_of", {})), backward=backward,
        optimizer=optimizer, overlap=job.get("network", {}).get("overlap", False))


def exact(value: float) -> Fraction:
    """Return the decimal number that was written for a float."""
    return Fraction(repr(value))


def _refuse_uncovered(job: Mapping[str, Any]) -> None:
    for table, keys in NOT_MODELLED.items():
        for key in keys:
            if key in job.get(table, {}):
                raise NotCoveredError(f"{table}.{key} is not modelled by the exact reference")
    if job.get("training", {}).get("recompute") == "auto":
        raise NotCoveredError("training.recompute is not modelled by the exact reference")


def _spread(value: Any, length: int) -> list[Any]:
    """Return one value for each, of a list or of one value for all."""
    return list(value) if isinstance(value, list) else [value] * length


def _by_worker(values: Mapping[str, float]) -> dict[Worker, Fraction]:
    pairs = {tuple(map(int, name.split("."))): exact(value) for name, value in values.items()}
    return {(pipeline, column): value for (pipeline, column), value in pairs.items()}


def _columns_of_chains(placement: Mapping[str, Any], columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the worker column of each stage, for each direction of micro-batches."""
    order, chunks = placement.get("order", "linear"), placement.get("chunks", 1)
    if isinstance(order, list):
        return (tuple(order),)
    there = range(columns)
    if order == "bidirectional":
        return tuple(there), tuple(reversed(there))
    if order == "linear":
        return (tuple(column for column in there for _ in range(chunks)),)
    back = there if order == "interleaved" else reversed(there)
    turns = (tuple(there), tuple(back))
    return (tuple(column for chunk in range(chunks) for column in turns[chunk % 2]),)


def _parts(job: Mapping[str, Any], stages: Sequence[tuple[int, int]], *, cuts: bool) -> tuple[Part, ...]:
    """Return the stages, or with `cuts` the single layers, with their costs."""
    time, memory = job["time"], job.get("memory", {})
    keys = {**OPS, "A": "all_reduce", "O": "optimizer"}
    of_layers = {key: _divide(job, time.get(key, 0), stages, key) for key in keys.values()}
    sizes = {"activation": 1, "weight_stash": 0, "weights": 0} if memory else {}
    of_layers |= {key: _divide(job, memory.get(key, usual), stages, key) for key, usual in sizes.items()}
    ranges = [(layer, layer + 1) for layer in range(stages[-1][1])] if cuts else stages

    def total(key: str, layers: tuple[int, int]) -> Fraction:
        return sum(of_layers[key][slice(*layers)] if key in of_layers else (), Fraction(0))

    return tuple(Part(first=layers[0], end=layers[1],
                      ticks={kind: total(key, layers) for kind, key in keys.items()},
                      activation=total("activation", layers), stash=total("weight_stash", layers),
                      weights=total("weights", layers)) for layers in ranges)


def _divide(job: Mapping[str, Any], value: Any, stages: Sequence[tuple[int, int]],
            key: str) -> list[Fraction]:
    """Return a value of the stages for each layer, in proportion to the table `[layers]`."""
    shares = _spread(job.get("layers", {}).get(key, 1), stages[-1][1])
    divided: list[Fraction] = []
    for stage, (first, end) in zip(_spread(value, len(stages)), stages, strict=True):
        weights = list(map(exact, shares[first:end]))
        weights = weights if any(weights) else [Fraction(1)] * (end - first)
        divided += [exact(stage) * weight / sum(weights) for weight in weights]
    return divided
