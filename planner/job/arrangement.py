"""Rearrange a job's layers into other virtual stages: another placement and division, as the text
of a job file."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from typing import Any

import msgspec

from slipstream.planner.job.file import Job, JobError, parse_job, parse_job_tables, placement_columns
from slipstream.planner.job.layers import ExactLayerCosts, exact_decimal, layer_costs, layer_counts
from slipstream.planner.job.toml import job_text, table_comments

_TIMES = ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce")
_SIZES = ("activation", "weight_stash", "weights", "recomputed")
FOUND_REMARK = "Placement found by `--placement any`:"
DIGITS = 12
"""Number of significant digits of times and sizes in a rewritten job file: so many that rounding
shortens no period."""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of the virtual stages of a model: which layers form each, and which worker of a
    pipeline runs it."""

    order: str | tuple[int, ...]
    """Columns of the virtual stages, as `[placement] order` gives them in a job file: a name such
    as "v", or a list."""
    chunks: int = 1
    """Number of virtual stages that each worker runs for micro-batches of one direction."""
    counts: tuple[int, ...]
    """Number of layers of each virtual stage, in the order in which a micro-batch passes them."""

    @property
    def placement_table(self) -> dict[str, Any]:
        """Contents of the `[placement]` table of a job file with this placement and division."""
        order = list(self.order) if isinstance(self.order, tuple) else self.order
        return {**({"chunks": self.chunks} if self.chunks > 1 else {}),
                **({"order": order} if order != "linear" else {}), "layers": list(self.counts)}

    def stage_columns(self, stages: int) -> tuple[int, ...]:
        """Return the column of each virtual stage in the order of a micro-batch, for `stages`
        columns.

        In a bidirectional pipeline, micro-batches of the other direction pass the columns in
        reverse order.
        """
        return self.order if isinstance(self.order, tuple) else placement_columns(self.order, stages, self.chunks)

    @property
    def chains(self) -> int:
        """Number of directions in which micro-batches pass the pipeline: 2 if it is bidirectional,
        else 1."""
        return 2 if self.order == "bidirectional" else 1

    @property
    def layer_ends(self) -> list[int]:
        """Number of the layer after the last one of each virtual stage."""
        return list(accumulate(self.counts))

    @property
    def description(self) -> str:
        """Text for messages that names the order of the columns and the number of virtual stages
        per worker."""
        order = "columns as listed" if isinstance(self.order, tuple) else {"v": "V", "linear": "one stage after another"
                                                                           }.get(self.order, self.order)
        if self.order == "v" and self.chunks > 2:
            order = "zig-zag"
        return order + (f", {self.chunks} virtual stages a worker" if self.chunks > 1 else "")


def arrangement_of(job: Job) -> Arrangement:
    """Return the placement and the division of a job's layers. Raises JobError if a stage has no
    layer."""
    order: str | tuple[int, ...] = "bidirectional" if job.chains > 1 else job.columns
    chunks = job.depth // job.stages
    for name in () if job.chains > 1 else ("linear", "interleaved", "v"):
        if placement_columns(name, job.stages, chunks) == job.columns:
            order = name
            break
    return Arrangement(order=order, chunks=chunks, counts=layer_counts(job))


class MovableLayers:
    """Costs of each layer of a job's model in any virtual stage, for making jobs with other
    placements and divisions.

    The input of a first stage needs no gradient. If the job's first stage leaves all of its
    backward to W, as torch does, any layers that are in the first stage do so, and all others have
    I. The I of a layer from the first stage is that of equal layers elsewhere or, if there are
    none, the average share that I has in the others' backward.
    """

    def __init__(self, text: str) -> None:
        """Read a job from `text`, a job file that extends no other. Raises JobError, also if a
        stage has no layer."""
        self._tables, self._comments = parse_job_tables(text), table_comments(text)
        self.job = job = parse_job(text)
        self.costs = layer_costs(job)
        self.layers = len(self.costs.forward)
        self.input_free = is_first_stage_input_free(self.costs, layer_counts(job)[0])
        self._inputs = _input_gradient_costs(self.costs, layer_counts(job)[0]) if self.input_free \
            else self.costs.backward_input
        self._state = self._divide_over_layers(job.memory.state if job.memory else (), self.costs.weights)
        self._gradients = self._divide_over_layers(job.network.gradients, self.costs.all_reduce)
        memory = job.memory
        self._room = [] if memory is None else [exact_decimal(value) for value in memory.capacity]
        if memory is not None and memory.weights:
            for stage, column in enumerate(job.columns):
                self._room[column] += exact_decimal(memory.weights[stage])

    @property
    def own_arrangement(self) -> Arrangement:
        """Placement and division that the job file itself gives."""
        return arrangement_of(self.job)

    def layer_work(self, layer: int) -> Fraction:
        """Return the seconds of F, I and W of a layer for one micro-batch, which do not depend on
        its stage."""
        costs = self.costs
        return costs.forward[layer] + costs.backward_input[layer] + costs.backward_weight[layer]

    def backward_floor_ticks(self, tick: Fraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return two tuples, the ticks of I and those of W that each of the model's layers takes if
        it is not in the first stage, rounded down.

        The argument `tick` is the length of a tick in seconds.
        """
        both = map(sum, zip(self.costs.backward_input, self.costs.backward_weight, strict=True))
        weights = (backward - input_time for backward, input_time in zip(both, self._inputs, strict=True))
        return tuple(floor(value / tick) for value in self._inputs), tuple(floor(value / tick) for value in weights)

    def is_rearrangement(self, job: Job) -> bool:
        """Return whether a job equals this one except for its placement and its division of the
        layers."""
        with suppress(JobError):
            other = arrangement_of(job)
            return job.stages == self.job.stages and sum(other.counts) == self.layers and \
                job == parse_job(self.arranged_job_text(other))
        return False

    def arranged_job_text(self, arrangement: Arrangement, remark: str = "") -> str:
        """Return the text of the job file with another placement and division, and with a remark at
        its top.

        Raises JobError if a worker has no room for its layers.
        """
        edges = [0, *arrangement.layer_ends]
        assert edges[-1] == self.layers and len(arrangement.stage_columns(self.job.stages)) == len(arrangement.counts)
        by_layer = self._costs_by_layer(edges[1])
        tables = dict(self._tables)
        time, by_stage = dict(tables["time"]), _stage_sum_function(edges)
        time |= {key: by_stage(by_layer[key]) for key in _TIMES if key in time or key != "all_reduce"}
        tables["time"] = time
        if self.job.memory is not None:
            memory = dict(tables["memory"])
            memory |= {key: by_stage(by_layer[key]) for key in _SIZES if key in memory or key in _SIZES[:2]}
            if self._state:
                memory["state"] = by_stage(self._state)
            memory["capacity"] = self._capacity_by_column(arrangement, edges)
            tables["memory"] = memory
        if self._gradients:
            tables["network"] = {**tables["network"], "gradients": by_stage(self._gradients)}
        tables["placement"] = arrangement.placement_table
        table = {key: [_rounded_float(value) for value in values] for key, values in by_layer.items()
                 if len(set(values)) > 1}
        tables.pop("layers", None)
        if table:
            tables["layers"] = table
        top_lines = [line for line in self._comments[""] if not line.startswith(FOUND_REMARK)]
        return job_text(tables, {**self._comments, "": [*top_lines, *([f"{FOUND_REMARK} {remark}"] if remark else [])]})

    def _costs_by_layer(self, first: int) -> Mapping[str, Sequence[Fraction]]:
        """Return the times and memory of each layer, by key of the job file, if the first stage has
        the model's first `first` layers."""
        costs = self.costs
        costs_by_key: dict[str, Sequence[Fraction]] = {key: getattr(costs, key) for key in (*_TIMES, *_SIZES)}
        if self.input_free:
            both = [one + other for one, other in zip(costs.backward_input, costs.backward_weight, strict=True)]
            inputs = [Fraction(0) if layer < first else self._inputs[layer] for layer in range(self.layers)]
            costs_by_key |= {"backward_input": inputs,
                             "backward_weight": [whole - part for whole, part in zip(both, inputs, strict=True)]}
        return costs_by_key

    def _capacity_by_column(self, arrangement: Arrangement, edges: Sequence[int]) -> list[float]:
        """Return, by column, the memory for activations that the weights of a worker's layers leave
        in this arrangement.

        The argument `edges` has 0 and, for each stage, the number of the layer after its last.
        """
        rooms = list(self._room)
        if self.job.memory is not None and self.job.memory.weights:
            columns = arrangement.stage_columns(self.job.stages)
            for (begin, end), column in zip(pairwise(edges), columns, strict=True):
                weights = sum(self.costs.weights[begin:end], start=Fraction(0))
                rooms[column] -= weights
                if arrangement.chains > 1:
                    rooms[self.job.stages - 1 - column] -= weights
        if min(rooms) < 0:
            column = rooms.index(min(rooms))
            raise JobError(f"workers of column {column} have no room for the weights of their layers")
        return [_rounded_float(room) for room in rooms]

    def _divide_over_layers(self, stages: Sequence[float], shares: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """Return values of all layers: each stage's value in `stages`, divided over its layers in
        proportion to their `shares`, or evenly if all of these are 0."""
        values: list[Fraction] = []
        for value, count in zip(stages, layer_counts(self.job) if stages else (), strict=False):
            part = shares[len(values):len(values) + count]
            weights = part if any(part) else [Fraction(1)] * count
            values += [exact_decimal(value) * weight / sum(weights) for weight in weights]
        return tuple(values)


def is_first_stage_input_free(costs: ExactLayerCosts, first: int) -> bool:
    """Return whether the model's first `first` layers, those of the first stage, leave all of their
    backward to W, while other layers do not."""
    return not any(costs.backward_input[:first]) and any(costs.backward_weight[:first]) and \
        any(costs.backward_input[first:])


def _input_gradient_costs(costs: ExactLayerCosts, first: int) -> tuple[Fraction, ...]:
    """Return the seconds of I that each layer takes in a stage other than the first; for layers
    below `first` they are estimated."""
    known = {(forward, one + other): one for forward, one, other in list(zip(
        costs.forward, costs.backward_input, costs.backward_weight, strict=True))[first:]}
    one, other = sum(costs.backward_input[first:]), sum(costs.backward_weight[first:])
    usual = Fraction(one) / (one + other)
    kept = (known.get((costs.forward[layer], costs.backward_weight[layer]), costs.backward_weight[layer] * usual)
            for layer in range(first))
    return (*kept, *costs.backward_input[first:])


def _stage_sum_function(edges: Sequence[int]) -> Callable[[Sequence[Fraction]], list[float]]:
    """Return a function that takes a value of each layer and returns their sum over each virtual
    stage.

    The argument `edges` has 0 and, for each stage, the number of the layer after its last.
    """
    def placed(values: Sequence[Fraction]) -> list[float]:
        return [_rounded_float(sum(values[begin:end], start=Fraction(0))) for begin, end in pairwise(edges)]

    return placed


def _rounded_float(value: Fraction) -> float:
    return float(f"{float(value):.{DIGITS}g}")
