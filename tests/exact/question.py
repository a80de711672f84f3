"""Read a job file as a question: which workers may run which layers, how long, in how much room.

Written from docs/concepts.md, docs/planning.md and docs/formats.md, without the planner. A key that
is not modelled is refused. Numbers are exact fractions until `in_whole_units` rounds them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

Worker = tuple[int, int]
"""Worker as (pipeline, column)."""
Batch = tuple[int, int]
"""Micro-batch as (pipeline, number)."""
TIMES = {
    "F": "forward",
    "I": "backward_input",
    "W": "backward_weight",
    "A": "all_reduce",
    "O": "optimizer",
}
NOT_MODELLED = {"memory": ("state",), "training": ("recompute",),
                "network": ("latency", "bandwidth", "gradients", "slowdown", "activation")}
UNCUT = ("own micro-batches", "whole stages")
"""Scopes in which each slice is a stage; in others it is any layers, also of several stages."""
FINEST = 10**6
"""Largest number of ticks of the longest op, and of units in the largest amount of memory."""
FINEST_WITHOUT_MEMORY = 10**12
"""Largest number of ticks if memory is not counted; the solver multiplies the two."""


class NotCoveredError(ValueError):
    """Error: the reference does not model a key of a job file. The message names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Layers [first, end) that one worker runs for a micro-batch without a cut."""

    first: int
    end: int
    times: Mapping[str, Fraction]
    """Times of F, I, W, A and O."""
    activation: Fraction
    stash: Fraction
    weights: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Job, its failures and a scope, as a reader of the documents understands them."""

    scope: str
    pipelines: int
    columns: int
    microbatches: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    """Column of each stage that a micro-batch passes, for each direction."""
    stages: tuple[tuple[int, int], ...]
    """Layers of each stage that a micro-batch passes."""
    parts: tuple[Part, ...]
    """Stages, or single layers if the scope allows cuts within a stage."""
    held: tuple[frozenset[int], ...]
    """Numbers of the parts that a worker of each column holds in place."""
    live: tuple[Worker, ...]
    failed: tuple[Worker, ...]
    slow: Mapping[Worker, Fraction]
    transfer: Fraction
    capacity: tuple[Fraction, ...] | None
    capacity_of: Mapping[Worker, Fraction]
    backward: str
    optimizer: str
    overlap: bool
    has_layers: bool
    up: bool = True
    """True if whole numbers are rounded up, and rooms down."""
    tick: Fraction = Fraction(1)
    unit: Fraction = Fraction(1)
    is_exact: bool = True
    """True if nothing was rounded."""

    @property
    def kinds(self) -> str:
        """Kinds of compute op of a micro-batch at a part, in order."""
        return "FIW" if self.backward == "split" else "FB"

    @property
    def batches(self) -> list[Batch]:
        """All micro-batches."""
        return [(pipeline, number) for pipeline, count in enumerate(self.microbatches)
                for number in range(count)]

    def hosts(self, batch: Batch, part: int) -> list[Worker]:
        """Return the live workers that may run a part for a micro-batch."""
        if self.scope == "any layers" or (self.scope == "roles" and not self.has_lost_layers):
            return list(self.live)
        if self.scope == "roles":
            return []
        own = (batch[0], self.chains[batch[1] % len(self.chains)][part]) \
            if self.scope == "own micro-batches" else None
        return [own] if own in self.live else \
            [worker for worker in self.live if part in self.held[worker[1]]]

    @property
    def has_lost_layers(self) -> bool:
        """True if no live worker holds some part: only a checkpoint still has it."""
        return len({part for _, column in self.live for part in self.held[column]}) < len(self.parts)

    def ticks(self, kind: str, part: int, worker: Worker | None = None) -> int:
        """Return the time of an op in whole ticks; F, I, W and B take longer on slow workers."""
        if kind == "B":
            return self.ticks("I", part, worker) + self.ticks("W", part, worker)
        time = self.parts[part].times[kind] * self.slow.get(worker or (-1, -1), 1)
        return math.ceil(time) if self.up else math.floor(time)

    def room(self, worker: Worker, column: int) -> Fraction:
        """Return a worker's room for activations if it holds the layers of a column."""
        assert self.capacity is not None
        if worker not in self.capacity_of:
            return self.capacity[column]
        return self.capacity_of[worker] + self.weights(worker[1]) - self.weights(column)

    def weights(self, column: int) -> Fraction:
        """Return the memory that the weights of a column's layers take."""
        return sum((self.parts[part].weights for part in self.held[column]), Fraction(0))


def read_question(job: Mapping[str, Any], failed: Sequence[Worker] = (), *, scope: str,
                  backward: str = "split", optimizer: str = "staggered") -> Question:
    """Read the contents of a job file as a question. Raises NotCoveredError."""
    for table, keys in NOT_MODELLED.items():
        for key in keys:
            if key in job.get(table, {}):
                raise NotCoveredError(f"{table}.{key} is not modelled by the exact reference")
    columns, time, memory = job["stages"], job["time"], job.get("memory")
    placement = job.get("placement", {})
    chains = _columns_of_chains(placement, columns)
    counts = placement.get("layers", [1] * len(chains[0]))
    ends = [sum(counts[:stage + 1]) for stage in range(len(counts))]
    stages = tuple((end - count, end) for end, count in zip(ends, counts, strict=True))
    is_cut = scope not in UNCUT
    parts = _read_parts(
        job, stages, [(layer, layer + 1) for layer in range(ends[-1])] if is_cut else stages
    )
    layers_of_columns = [[stages[stage] for chain in chains for stage, owner in enumerate(chain)
                          if owner == column] for column in range(columns)]
    workers = [
        (pipeline, column) for pipeline in range(job["pipelines"]) for column in range(columns)
    ]
    return Question(
        scope=scope,
        pipelines=job["pipelines"],
        columns=columns,
        chains=chains,
        stages=stages,
        parts=parts,
        microbatches=tuple(_spread(job["microbatches"], job["pipelines"])),
        held=tuple(
            frozenset(
                number
                for number, part in enumerate(parts)
                for first, end in held
                if first <= part.first and part.end <= end
            )
            for held in layers_of_columns
        ),
        live=tuple(worker for worker in workers if worker not in failed),
        failed=tuple(sorted(failed)),
        slow=_by_worker(time.get("slow", {})),
        transfer=exact(time.get("transfer", 0)),
        capacity=tuple(map(exact, _spread(memory["capacity"], columns))) if memory else None,
        capacity_of=_by_worker((memory or {}).get("capacity_of", {})),
        backward=backward,
        optimizer=optimizer,
        overlap=job.get("network", {}).get("overlap", False),
        has_layers="layers" in placement,
    )


def exact(value: float) -> Fraction:
    """Return the decimal number that was written for a float."""
    return Fraction(repr(value))


def _spread(value: Any, length: int) -> list[Any]:
    """Return one value for each, of a list or of one value for all."""
    return list(value) if isinstance(value, list) else [value] * length


def _by_worker(values: Mapping[str, float]) -> dict[Worker, Fraction]:
    names = {name: name.split(".") for name in values}
    return {
        (int(pipeline), int(column)): exact(values[name])
        for name, (pipeline, column) in names.items()
    }


def _columns_of_chains(placement: Mapping[str, Any], columns: int) -> tuple[tuple[int, ...], ...]:
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


def _read_parts(job: Mapping[str, Any], stages: Sequence[tuple[int, int]],
                ranges: Sequence[tuple[int, int]]) -> tuple[Part, ...]:
    """Return parts of these ranges of layers, with costs divided by `[layers]`."""
    memory, shares = job.get("memory"), job.get("layers", {})
    given = {key: job["time"].get(key, 0) for key in TIMES.values()}
    for key, usual in (("activation", 1), ("weight_stash", 0), ("weights", 0)):
        given[key] = memory.get(key, usual) if memory else 0
    divided: dict[str, list[Fraction]] = {key: [] for key in given}
    for key, value in given.items():
        share = list(map(exact, _spread(shares.get(key, 1), stages[-1][1])))
        for stage, (first, end) in zip(_spread(value, len(stages)), stages, strict=True):
            own = share[first:end] if any(share[first:end]) else [Fraction(1)] * (end - first)
            divided[key] += [exact(stage) * weight / sum(own) for weight in own]

    def total(key: str, layers: tuple[int, int]) -> Fraction:
        return sum(divided[key][slice(*layers)], Fraction(0))

    return tuple(
        Part(
            *layers,
            {kind: total(key, layers) for kind, key in TIMES.items()},
            total("activation", layers),
            total("weight_stash", layers),
            total("weights", layers),
        )
        for layers in ranges
    )


# --- Whole numbers -------------------------------------------------------------------


def in_whole_units(question: Question, *, up: bool) -> Question:
    """Return the question in ticks and units of memory of which all its numbers are multiples.

    Finer numbers are rounded to one side: rounded up, each solution is one of the question; rounded
    down, each bound is. A slice of several layers frees all of its activations at once. So if a
    stash takes more than its activation, layers that run one by one may hold more than their slice,
    and no bound follows. Such stashes, too, are rounded down: to the activation.
    """
    parts, factors = question.parts, {Fraction(1), *question.slow.values()}
    times = [part.times[kind] for part in parts for kind in "AO"] + [question.transfer]
    times += [part.times[kind] * factor for part in parts for kind in "FIW" for factor in factors]
    sizes = [size for part in parts for size in (part.activation, part.stash, part.weights)]
    sizes += [*(question.capacity or ()), *question.capacity_of.values()]
    finest = FINEST_WITHOUT_MEMORY if question.capacity is None else FINEST
    (tick, is_time_whole), (unit, is_size_whole) = _coarsest(times, finest), _coarsest(sizes)
    fused, is_cut = question.backward == "fused", question.scope not in UNCUT
    is_stash_free = fused or not is_cut or all(part.stash <= part.activation for part in parts)
    towards, away = (math.ceil, math.floor) if up else (math.floor, math.ceil)

    def whole_part(part: Part) -> Part:
        stash = (
            Fraction(0)
            if fused
            else part.stash
            if up or is_stash_free
            else min(part.stash, part.activation)
        )
        sizes = (Fraction(towards(size / unit)) for size in (part.activation, stash, part.weights))
        return Part(
            part.first,
            part.end,
            {kind: Fraction(towards(time / tick)) for kind, time in part.times.items()},
            *sizes,
        )

    return replace(
        question,
        up=up,
        tick=tick,
        unit=unit,
        parts=tuple(map(whole_part, parts)),
        is_exact=is_time_whole and is_size_whole and is_stash_free,
        transfer=Fraction(towards(question.transfer / tick)),
        capacity=question.capacity
        and tuple(Fraction(away(room / unit)) for room in question.capacity),
        capacity_of={
            worker: Fraction(away(room / unit)) for worker, room in question.capacity_of.items()
        },
    )


def _coarsest(values: Iterable[Fraction], finest: int = FINEST) -> tuple[Fraction, bool]:
    """Return the greatest common divisor, or a coarser unit, and whether it is exact."""
    positive = [value for value in values if value]
    if not positive:
        return Fraction(1), True
    common = math.lcm(*(value.denominator for value in positive))
    divisor = Fraction(math.gcd(*(int(value * common) for value in positive)), common)
    return max(divisor, max(positive) / finest), divisor >= max(positive) / finest
