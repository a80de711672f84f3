"""A job's layers in other virtual stages: another placement and division, as the text of a job file."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from typing import Any

import msgspec

from slipstream.planner.job.file import Job, JobError, parse_job, placement_columns
from slipstream.planner.job.layers import LayerSeconds, exact, layer_costs, layer_counts
from slipstream.planner.job.toml import job_text, table_comments

_TIMES = ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce")
_SIZES = ("activation", "weight_stash", "weights", "recomputed")
FOUND = "Placement found by `--placement any`:"
DIGITS = 12
"""Of what is written: as many as are exact, so that nothing is gained by rounding."""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Which layers are a virtual stage, and which worker of a pipeline holds it."""

    order: str | tuple[int, ...]
    """As `[placement] order` of a job file."""
    chunks: int = 1
    """Virtual stages a worker, of one direction."""
    counts: tuple[int, ...]
    """Layers of each virtual stage of a chain."""

    @property
    def table(self) -> dict[str, Any]:
        """The `[placement]` table."""
        order = list(self.order) if isinstance(self.order, tuple) else self.order
        return {**({"chunks": self.chunks} if self.chunks > 1 else {}),
                **({"order": order} if order != "linear" else {}), "layers": list(self.counts)}

    def columns(self, stages: int) -> tuple[int, ...]:
        """The worker column of each virtual stage of a chain. The other chain has them in the other order."""
        return self.order if isinstance(self.order, tuple) else placement_columns(self.order, stages, self.chunks)

    @property
    def chains(self) -> int:
        """Of a bidirectional one, two."""
        return 2 if self.order == "bidirectional" else 1

    @property
    def ends(self) -> list[int]:
        """The layer behind each virtual stage."""
        return list(accumulate(self.counts))

    @property
    def words(self) -> str:
        """For a reader."""
        order = "columns as listed" if isinstance(self.order, tuple) else {"v": "V", "linear": "one stage after another"
                                                                           }.get(self.order, self.order)
        if self.order == "v" and self.chunks > 2:
            order = "zig-zag"
        return order + (f", {self.chunks} virtual stages a worker" if self.chunks > 1 else "")


def arrangement_of(job: Job) -> Arrangement:
    """That of a job. Raises JobError where a stage has no layer."""
    order: str | tuple[int, ...] = "bidirectional" if job.chains > 1 else job.columns
    chunks = job.depth // job.stages
    for name in () if job.chains > 1 else ("linear", "interleaved", "v"):
        if placement_columns(name, job.stages, chunks) == job.columns:
            order = name
            break
    return Arrangement(order=order, chunks=chunks, counts=layer_counts(job))


class MovableLayers:
    """What each layer of a job costs, in whichever virtual stage it is.

    The input of a first stage needs no gradient. Where the job's first stage leaves all of its backward to W, as torch
    does, whichever layers are in the first stage do so, and others have I: as much of their backward as the same layers
    elsewhere, or else as all others.
    """

    def __init__(self, text: str) -> None:
        """`text`: a job file that needs no other. Raises JobError, also where a stage has no layer."""
        self._tables, self._comments = tomllib.loads(text), table_comments(text)
        self.job = job = parse_job(text)
        self.costs = layer_costs(job)
        self.layers = len(self.costs.forward)
        self.input_free = first_without_input(self.costs, layer_counts(job)[0])
        self._inputs = _inputs(self.costs, layer_counts(job)[0]) if self.input_free else self.costs.backward_input
        self._state = self._divided(job.memory.state if job.memory else (), self.costs.weights)
        self._gradients = self._divided(job.network.gradients, self.costs.all_reduce)
        memory = job.memory
        self._room = [] if memory is None else [exact(value) for value in memory.capacity]
        if memory is not None and memory.weights:
            for stage, column in enumerate(job.columns):
                self._room[column] += exact(memory.weights[stage])

    @property
    def given(self) -> Arrangement:
        """The job's own."""
        return arrangement_of(self.job)

    def work(self, layer: int) -> Fraction:
        """Seconds of F, I and W of a layer for one micro-batch: the same wherever it is."""
        costs = self.costs
        return costs.forward[layer] + costs.backward_input[layer] + costs.backward_weight[layer]

    def least_in_ticks(self, tick: Fraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """I and W of each layer as in a stage that is not the first one, in whole ticks, rounded down."""
        both = map(sum, zip(self.costs.backward_input, self.costs.backward_weight, strict=True))
        weights = (all_of - part for all_of, part in zip(both, self._inputs, strict=True))
        return tuple(floor(value / tick) for value in self._inputs), tuple(floor(value / tick) for value in weights)

    def is_arranged(self, job: Job) -> bool:
        """Whether a job is this one, perhaps with another arrangement."""
        with suppress(JobError):
            other = arrangement_of(job)
            return job.stages == self.job.stages and sum(other.counts) == self.layers and \
                job == parse_job(self.text(other))
        return False

    def text(self, arrangement: Arrangement, remark: str = "") -> str:
        """The job file with another arrangement, and with a remark at its top.

        Raises JobError where a worker has no room for its layers.
        """
        edges = [0, *arrangement.ends]
        assert edges[-1] == self.layers and len(arrangement.columns(self.job.stages)) == len(arrangement.counts)
        by_layer = self._by_layer(edges[1])
        tables = dict(self._tables)
        time, placed = dict(tables["time"]), _summed(edges)
        time |= {key: placed(by_layer[key]) for key in _TIMES if key in time or key != "all_reduce"}
        tables["time"] = time
        if self.job.memory is not None:
            memory = dict(tables["memory"])
            memory |= {key: placed(by_layer[key]) for key in _SIZES if key in memory or key in _SIZES[:2]}
            if self._state:
                memory["state"] = placed(self._state)
            memory["capacity"] = self._capacity(arrangement, edges)
            tables["memory"] = memory
        if self._gradients:
            tables["network"] = {**tables["network"], "gradients": placed(self._gradients)}
        tables["placement"] = arrangement.table
        told = {key: [_written(value) for value in values] for key, values in by_layer.items() if len(set(values)) > 1}
        tables.pop("layers", None)
        if told:
            tables["layers"] = told
        above = [line for line in self._comments[""] if not line.startswith(FOUND)]
        return job_text(tables, {**self._comments, "": [*above, *([f"{FOUND} {remark}"] if remark else [])]})

    def _by_layer(self, first: int) -> Mapping[str, Sequence[Fraction]]:
        """The values of each layer where the first stage has so many of them."""
        costs = self.costs
        found: dict[str, Sequence[Fraction]] = {key: getattr(costs, key) for key in (*_TIMES, *_SIZES)}
        if self.input_free:
            both = [one + other for one, other in zip(costs.backward_input, costs.backward_weight, strict=True)]
            inputs = [Fraction(0) if layer < first else self._inputs[layer] for layer in range(self.layers)]
            found |= {"backward_input": inputs,
                      "backward_weight": [all_of - part for all_of, part in zip(both, inputs, strict=True)]}
        return found

    def _capacity(self, arrangement: Arrangement, edges: Sequence[int]) -> list[float]:
        """What is left on a worker of each column beside the weights of its layers."""
        rooms = list(self._room)
        if self.job.memory is not None and self.job.memory.weights:
            columns = arrangement.columns(self.job.stages)
            for (begin, end), column in zip(pairwise(edges), columns, strict=True):
                weights = sum(self.costs.weights[begin:end], start=Fraction(0))
                rooms[column] -= weights
                if arrangement.chains > 1:
                    rooms[self.job.stages - 1 - column] -= weights
        if min(rooms) < 0:
            column = rooms.index(min(rooms))
            raise JobError(f"workers of column {column} have no room for the weights of their layers")
        return [_written(room) for room in rooms]

    def _divided(self, stages: Sequence[float], shares: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """Values of stages over their layers, in proportion to these shares; evenly where these are 0."""
        found: list[Fraction] = []
        for value, count in zip(stages, layer_counts(self.job) if stages else (), strict=False):
            part = shares[len(found):len(found) + count]
            weights = part if any(part) else [Fraction(1)] * count
            found += [exact(value) * one / sum(weights) for one in weights]
        return tuple(found)


def first_without_input(costs: LayerSeconds, first: int) -> bool:
    """Whether the layers of the first stage leave all of their backward to W, where others do not."""
    return not any(costs.backward_input[:first]) and any(costs.backward_weight[:first]) and \
        any(costs.backward_input[first:])


def _inputs(costs: LayerSeconds, first: int) -> tuple[Fraction, ...]:
    """I of each layer in a later stage, where layers 0..first - 1 are known in the first stage only."""
    known = {(forward, one + other): one for forward, one, other in list(zip(
        costs.forward, costs.backward_input, costs.backward_weight, strict=True))[first:]}
    one, other = sum(costs.backward_input[first:]), sum(costs.backward_weight[first:])
    usual = Fraction(one) / (one + other)
    kept = (known.get((costs.forward[layer], costs.backward_weight[layer]), costs.backward_weight[layer] * usual)
            for layer in range(first))
    return (*kept, *costs.backward_input[first:])


def _summed(edges: Sequence[int]) -> Callable[[Sequence[Fraction]], list[float]]:
    """The values of virtual stages: sums over their layers."""
    def placed(values: Sequence[Fraction]) -> list[float]:
        return [_written(sum(values[begin:end], start=Fraction(0))) for begin, end in pairwise(edges)]

    return placed


def _written(value: Fraction) -> float:
    return float(f"{float(value):.{DIGITS}g}")
