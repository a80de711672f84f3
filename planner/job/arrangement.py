"""Write a job file anew with other virtual stages: another placement and division."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, pairwise
from math import floor
from operator import add, sub
from typing import Any

import msgspec

from slipstream.planner.job.file import (
    Job,
    JobError,
    parse_job,
    parse_job_tables,
    placement_columns,
)
from slipstream.planner.job.layers import ExactLayerCosts, exact_decimal, layer_costs, layer_counts
from slipstream.planner.job.toml import job_text, table_comments
from slipstream.schedules.schedule import Worker

_TIMES = ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce")
"""Keys of `[time]` that have one value per stage."""
_SIZES = ("activation", "weight_stash", "weights", "recomputed")
"""Keys of `[memory]` whose value for a stage is the sum over its layers."""
FOUND_REMARK = "Placement found by `--placement any`:"
"""First words of the planner's remark at the top of a job file."""
DIGITS = 12
"""Number of significant digits in a rewritten job file: rounding thus shortens no period."""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Choice of a model's virtual stages: the layers and the column of each."""

    order: str | tuple[int, ...]
    """Columns of the virtual stages, as in `[placement] order`: a name or a list."""
    chunks: int = 1
    """Number of virtual stages that each worker runs for micro-batches of one direction."""
    counts: tuple[int, ...]
    """Number of layers of each virtual stage, in the order in which a micro-batch passes."""

    @property
    def placement_table(self) -> dict[str, Any]:
        """Contents of the `[placement]` table of a job file for this arrangement."""
        table: dict[str, Any] = {}
        if self.chunks > 1:
            table["chunks"] = self.chunks
        if self.order != "linear":
            table["order"] = list(self.order) if isinstance(self.order, tuple) else self.order
        table["layers"] = list(self.counts)
        return table

    def stage_columns(self, stages: int) -> tuple[int, ...]:
        """Return the column of each virtual stage, for pipelines of `stages` columns.

        In a bidirectional pipeline, these are the stages of the first direction. Micro-batches of
        the other direction pass the columns in reverse order.
        """
        if isinstance(self.order, tuple):
            return self.order
        return placement_columns(self.order, stages, self.chunks)

    @property
    def chains(self) -> int:
        """Number of directions of micro-batches: 2 if the pipeline is bidirectional, else 1."""
        return 2 if self.order == "bidirectional" else 1

    @property
    def layer_ends(self) -> list[int]:
        """Number of the layer after the last one, for each virtual stage."""
        return list(accumulate(self.counts))

    @property
    def description(self) -> str:
        """Text for messages: the order of columns, and the virtual stages per worker."""
        if isinstance(self.order, tuple):
            text = "columns as listed"
        elif self.order == "v":
            text = "zig-zag" if self.chunks > 2 else "V"
        else:
            text = "one stage after another" if self.order == "linear" else self.order
        if self.chunks > 1:
            text += f", {self.chunks} virtual stages a worker"
        return text


def arrangement_of(job: Job) -> Arrangement:
    """Return the arrangement of a job's layers, by the name of its order if any."""
    order: str | tuple[int, ...] = "bidirectional" if job.chains > 1 else job.columns
    chunks = job.depth // job.stages
    # A named order is shorter in a file than its list of columns.
    names = () if job.chains > 1 else ("linear", "interleaved", "v")
    for name in names:
        if placement_columns(name, job.stages, chunks) == job.columns:
            order = name
            break
    return Arrangement(order=order, chunks=chunks, counts=layer_counts(job))


class MovableLayers:
    """Costs of each layer of a job's model, whichever virtual stage the layer is in.

    The input of the first stage needs no gradient. If the job's first stage leaves all of its
    backward to W, as torch does, so do any other layers in a first stage; elsewhere, all layers
    have I. The time of I is then unknown for the layers of the job's first stage. It is taken from
    equal layers elsewhere, or else follows from the average share of I in the backward of the
    others.
    """

    def __init__(self, text: str) -> None:
        """Read the text of a job file that extends no other.

        Raises JobError if the text is no valid job file, or a stage has no layer.
        """
        self._tables, self._comments = parse_job_tables(text), table_comments(text)
        self.job = job = parse_job(text)
        self.costs = layer_costs(job)
        self.layers = len(self.costs.forward)
        self.input_free = is_first_stage_input_free(self.costs, layer_counts(job)[0])
        self._inputs = self.costs.backward_input
        if self.input_free:
            self._inputs = _input_gradient_costs(self.costs, layer_counts(job)[0])
        self._gradients = self._divide_over_layers(job.network.gradients, self.costs.all_reduce)
        self._state: tuple[Fraction, ...] = ()
        # The whole memory of a worker, by column, and of workers that have their own.
        self._memory: list[Fraction] = []
        self._own_memory: dict[Worker, Fraction] = {}
        if job.memory is not None:
            self._state = self._divide_over_layers(job.memory.state, self.costs.weights)
            weights = [Fraction(0)] * job.stages
            for column, amount in zip(job.columns, job.memory.weights, strict=False):
                weights[column] += exact_decimal(amount)
            self._memory = list(map(add, map(exact_decimal, job.memory.capacity), weights))
            for worker, room in job.memory.capacity_of:
                self._own_memory[worker] = exact_decimal(room) + weights[worker.column]

    @property
    def own_arrangement(self) -> Arrangement:
        """Arrangement that the job file itself gives."""
        return arrangement_of(self.job)

    def layer_work(self, layer: int) -> Fraction:
        """Return the seconds of F, I and W together of a layer for one micro-batch.

        The sum does not depend on the layer's stage.
        """
        costs = self.costs
        return costs.forward[layer] + costs.backward_input[layer] + costs.backward_weight[layer]

    def backward_floor_ticks(self, tick: Fraction) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ticks of I of each layer, and the ticks of W, rounded down.

        The ticks are for layers outside the first stage. `tick` is the length of a tick in seconds.
        """
        backward = map(sum, zip(self.costs.backward_input, self.costs.backward_weight, strict=True))
        input_ticks = tuple(floor(seconds / tick) for seconds in self._inputs)
        weight_ticks = tuple(
            floor((seconds - input_seconds) / tick)
            for seconds, input_seconds in zip(backward, self._inputs, strict=True)
        )
        return input_ticks, weight_ticks

    def is_rearrangement(self, job: Job) -> bool:
        """Return whether `job` differs from `self.job` at most in placement and division."""
        with suppress(JobError):
            other = arrangement_of(job)
            return (
                job.stages == self.job.stages
                and sum(other.counts) == self.layers
                and job == parse_job(self.arranged_job_text(other))
            )
        return False

    def arranged_job_text(self, arrangement: Arrangement, remark: str = "") -> str:
        """Return the text of the job file with another arrangement.

        A remark from an earlier search is removed; `remark`, if given, is put at the top instead.
        Raises JobError if a worker has no room for the weights of its layers.
        """
        edges = [0, *arrangement.layer_ends]
        columns = arrangement.stage_columns(self.job.stages)
        assert edges[-1] == self.layers and len(columns) == len(arrangement.counts)
        by_layer, by_stage = self._costs_by_layer(edges[1]), _stage_sum_function(edges)
        tables = dict(self._tables)
        # Times of the new stages. Without times of all-reduces, `[network]` has their sizes.
        time = dict(tables["time"])
        for key in _TIMES:
            if key in time or key != "all_reduce":
                time[key] = by_stage(by_layer[key])
        tables["time"] = time
        # Memory of the new stages, and what their weights leave of each worker's.
        if self.job.memory is not None:
            memory = dict(tables["memory"])
            for key in _SIZES:
                if key in memory or key in ("activation", "weight_stash"):
                    memory[key] = by_stage(by_layer[key])
            if self._state:
                memory["state"] = by_stage(self._state)
            tables["memory"] = memory | self._capacities(arrangement, edges)
        if self._gradients:
            tables["network"] = {**tables["network"], "gradients": by_stage(self._gradients)}
        tables["placement"] = arrangement.placement_table
        # Layers that differ keep their own values, so that the job can be rearranged again.
        layers = {
            key: list(map(_rounded_float, values))
            for key, values in by_layer.items()
            if len(set(values)) > 1
        }
        tables.pop("layers", None)
        if layers:
            tables["layers"] = layers
        # The remark replaces one of an earlier search.
        top_lines = [line for line in self._comments[""] if not line.startswith(FOUND_REMARK)]
        if remark:
            top_lines.append(f"{FOUND_REMARK} {remark}")
        return job_text(tables, {**self._comments, "": top_lines})

    def _costs_by_layer(self, first: int) -> Mapping[str, Sequence[Fraction]]:
        """Return layers' times and memory, by key, if the first stage has `first` layers."""
        costs = self.costs
        costs_by_key: dict[str, Sequence[Fraction]] = {
            key: getattr(costs, key) for key in (*_TIMES, *_SIZES)
        }
        if self.input_free:
            # The backward of a layer as a whole does not depend on the stage; its parts do.
            backward = map(sum, zip(costs.backward_input, costs.backward_weight, strict=True))
            inputs = [*[Fraction(0)] * first, *self._inputs[first:]]
            costs_by_key["backward_input"] = inputs
            costs_by_key["backward_weight"] = [
                whole - part for whole, part in zip(backward, inputs, strict=True)
            ]
        return costs_by_key

    def _capacities(self, arrangement: Arrangement, edges: Sequence[int]) -> dict[str, Any]:
        """Return `capacity` and `capacity_of` of `[memory]`; raise JobError if weights do not fit.

        These are what the weights of the new stages leave of each worker's memory.
        """
        weights = [Fraction(0)] * self.job.stages
        if self.job.memory is not None and self.job.memory.weights:
            columns = arrangement.stage_columns(self.job.stages)
            for (begin, end), column in zip(pairwise(edges), columns, strict=True):
                amount = sum(self.costs.weights[begin:end], start=Fraction(0))
                weights[column] += amount
                # Both directions have each stage, in mirrored columns.
                if arrangement.chains > 1:
                    weights[self.job.stages - 1 - column] += amount
        rooms = list(map(sub, self._memory, weights))
        # The usual memory of a column counts only if some worker there has no other.
        owners = Counter(worker.column for worker in self._own_memory)
        for column, room in enumerate(rooms):
            if owners[column] == self.job.pipelines:
                rooms[column] = max(Fraction(0), room)
        if min(rooms) < 0:
            column = rooms.index(min(rooms))
            raise JobError(
                f"workers of column {column} have no room for the weights of their layers"
            )
        capacities: dict[str, Any] = {"capacity": list(map(_rounded_float, rooms))}
        own_rooms: dict[str, float] = {}
        for worker, memory in self._own_memory.items():
            room = memory - weights[worker.column]
            if room < 0:
                raise JobError(f"worker {worker} has no room for the weights of its layers")
            own_rooms[str(worker)] = _rounded_float(room)
        if own_rooms:
            capacities["capacity_of"] = own_rooms
        return capacities

    def _divide_over_layers(
        self, stages: Sequence[float], shares: Sequence[Fraction]
    ) -> tuple[Fraction, ...]:
        """Divide each stage's value over its layers in proportion to their `shares`, or evenly."""
        values: list[Fraction] = []
        if not stages:
            return ()
        for value, count in zip(stages, layer_counts(self.job), strict=False):
            part = shares[len(values) : len(values) + count]
            weights = part if any(part) else [Fraction(1)] * count
            values += [exact_decimal(value) * weight / sum(weights) for weight in weights]
        return tuple(values)


def is_first_stage_input_free(costs: ExactLayerCosts, first: int) -> bool:
    """Return whether the first `first` layers have W but no I, and others have I.

    The first `first` layers are the first stage, which then leaves all of its backward to W.
    """
    return (
        not any(costs.backward_input[:first])
        and any(costs.backward_weight[:first])
        and any(costs.backward_input[first:])
    )


def _input_gradient_costs(costs: ExactLayerCosts, first: int) -> tuple[Fraction, ...]:
    """Return each layer's seconds of I outside a first stage; some are estimated."""
    # Layers of equal forward and backward are taken for equal.
    times = list(zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True))
    input_by_times = {
        (forward, input_part + weight_part): input_part
        for forward, input_part, weight_part in times[first:]
    }
    input_sum, weight_sum = sum(costs.backward_input[first:]), sum(costs.backward_weight[first:])
    average_share = Fraction(input_sum) / (input_sum + weight_sum)
    estimates = [
        input_by_times.get((forward, backward), backward * average_share)
        for forward, _, backward in times[:first]
    ]
    return (*estimates, *costs.backward_input[first:])


def _stage_sum_function(edges: Sequence[int]) -> Callable[[Sequence[Fraction]], list[float]]:
    """Return a function that sums values of layers over the virtual stages between `edges`."""

    def sum_by_stage(values: Sequence[Fraction]) -> list[float]:
        return [
            _rounded_float(sum(values[begin:end], start=Fraction(0)))
            for begin, end in pairwise(edges)
        ]

    return sum_by_stage


def _rounded_float(value: Fraction) -> float:
    return float(f"{float(value):.{DIGITS}g}")
