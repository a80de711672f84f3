"""Estimate a job file for a model that was not measured.

`model_shape` gives the work and memory of a layer per token. In matrix products, I and W cost as
much as F each. In attention and scans, I costs twice as much as F, and W nothing. A product takes
at least as long as reading its weights or, in W, adding to their gradients, which limits experts
that have few tokens each. Element-wise ops are not counted except for the loss, so a measured W is
shorter, relative to its F, than the estimate.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from slipstream.planner.job.layers import held_state_share
from slipstream.planner.job.model_shape import VALUE_BYTES, LayerShape, ModelLayers
from slipstream.planner.job.toml import round_times

BYTES_HELD = 18
"""Bytes that are held per parameter without undo copies.

They are a bf16 weight, a float32 gradient, a float32 master weight and two moments of AdamW.
"""
BYTES_UNDO = 12
"""Bytes per parameter of the undo copies: of the master weight and the moments."""
BYTES_WHOLE = 6
"""Bytes per parameter that every holder keeps even if optimizer state is sharded.

They are a bf16 weight and a float32 gradient.
"""
BYTES_STATE = BYTES_HELD + BYTES_UNDO - BYTES_WHOLE
"""Bytes per parameter that are divided over holders if optimizer state is sharded.

They are the master weight, the moments and their undo copies.
"""
UNIT_BYTES = 10**6
"""Bytes on each GPU of a worker in an estimated job's unit of memory."""
BYTES_READ = 2
"""Bytes read per parameter of a product in F or I: a bf16 weight."""
BYTES_ADDED = 8
"""Bytes read and written per parameter of a product in W: a float32 gradient."""
BYTES_STEPPED = 34
"""Bytes of memory traffic per parameter of an AdamW step.

The step reads gradient, master weight and moments, and writes these and the bf16 weight.
"""
BYTES_MOMENT = 4
"""Bytes per parameter of AdamW's second moment, which Muon lacks.

Muon saves these bytes twice: in the optimizer state and in the undo copy.
"""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Speed, memory and network bandwidth of a GPU, from its data sheet."""

    name: str
    flops: float
    """Floating-point operations per second in bf16, without sparsity."""
    memory_bytes: float
    memory_bandwidth: float
    """Bandwidth of the GPU's memory, in bytes per second."""
    network: float
    """Bandwidth of the network, in bytes per second for each GPU."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        GpuSpec(
            name="a100-40g",
            flops=312e12,
            memory_bytes=40e9,
            memory_bandwidth=1.555e12,
            network=25e9,
        ),
        GpuSpec(
            name="a100", flops=312e12, memory_bytes=80e9, memory_bandwidth=2.039e12, network=25e9
        ),
        GpuSpec(
            name="h100", flops=989e12, memory_bytes=80e9, memory_bandwidth=3.35e12, network=50e9
        ),
        GpuSpec(
            name="h200", flops=989e12, memory_bytes=141e9, memory_bandwidth=4.8e12, network=50e9
        ),
        GpuSpec(
            name="b200", flops=2250e12, memory_bytes=180e9, memory_bandwidth=8e12, network=50e9
        ),
    )
}
"""GPUs by name, with values from NVIDIA's data sheets.

There is one network port per GPU, of 200 Gb/s (A100) or 400 Gb/s.
"""


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is distributed: over which GPUs, of which each worker has `tensor_parallel`."""

    gpu: GpuSpec
    pipelines: int
    stages: int
    microbatches: int
    microbatch_size: int = 1
    tensor_parallel: int = 1
    efficiency: float = 0.5
    """Share of the GPU's peak rate that matrix products are assumed to reach."""
    shard_optimizer: bool = False
    """True if the workers of a stage share its optimizer state.

    Each worker keeps a part, and a copy of another part.
    """
    muon: bool = False
    """True if Muon steps the layers' matrices, which must be whole. AdamW steps the rest."""

    @property
    def stepped_share(self) -> float:
        """Share of a stage's parameters that each of its workers steps."""
        return float(held_state_share(self.pipelines)) if self.shard_optimizer else 1.0

    @property
    def held_bytes_per_parameter(self) -> float:
        """Bytes that a worker holds permanently per parameter.

        If state is sharded, this is the number for a stage whose workers are all alive.
        """
        return BYTES_WHOLE + BYTES_STATE * self.stepped_share


class _Cost(NamedTuple):
    """Estimated cost of one or several layers on each GPU of a worker."""

    forward: float
    """Seconds of F; `backward_input` and `backward_weight` are in seconds, too."""
    backward_input: float
    backward_weight: float
    activation: float
    """Bytes of activations; `stash` is in bytes, too."""
    stash: float
    recomputed: float
    """Bytes of activations if only each layer's input is kept and the rest is recomputed."""
    parameters: float
    held_bytes: float
    """Bytes of parameters, gradients, optimizer state and undo copies."""
    by_muon: float
    """Number of parameters that Muon steps."""
    orthogonal: float
    """Seconds of the matrix products by which Muon orthogonalizes updates."""


def estimate_job(
    name: str, model: ModelLayers, layout: ModelLayout
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the tables of a job file for a distributed model, and its comments.

    `layout` says how the model is distributed. Values are estimated from the GPU's data sheet. The
    comments are lines of text, by the name of their table, that say how. Raises ValueError with a
    message of one line if there are more stages than layers, the model does not fit, or Muon would
    not have whole matrices.
    """
    if layout.muon and (layout.shard_optimizer or layout.tensor_parallel > 1):
        raise ValueError(
            "Muon needs whole matrices; expected no shared optimizer state, and one GPU a worker"
        )
    if layout.stages > len(model.layers):
        raise ValueError(
            f"{layout.stages} stages for {len(model.layers)} layers; expected at most one stage "
            "per layer"
        )
    tokens = layout.microbatch_size * model.sequence
    # Layers are divided over stages by their work; the first stage's I is part of its W.
    work = [sum(op_seconds(layer, layout, tokens)) for layer in model.layers]
    counts = divide_layers(work, layout.stages)
    ends = [sum(counts[:index]) for index in range(len(counts) + 1)]
    layers = [
        _layer_cost(layer, layout, tokens, whole=index < counts[0])
        for index, layer in enumerate(model.layers)
    ]
    stages = [
        _Cost(*map(sum, zip(*layers[begin:end], strict=True))) for begin, end in pairwise(ends)
    ]
    by_layer: dict[str, Sequence[float]] = {**_op_times(layers, layout), **_memory_sizes(layers)}

    def sum_by_stage(of_layers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """Return the sums of layers' values over each stage, by key such as `forward`."""
        # With more than 12 digits, rounding errors would require finer ticks in plans that cut
        # stages.
        sums: dict[str, list[float]] = {}
        for key, values in of_layers.items():
            sums[key] = [float(f"{sum(values[begin:end]):.12g}") for begin, end in pairwise(ends)]
        return sums

    # All ranks of a worker send their part at the same time.
    boundary_bytes = VALUE_BYTES * tokens * model.hidden
    transfer = boundary_bytes / layout.tensor_parallel / layout.gpu.network
    state: dict[str, list[int]] = {}
    if layout.shard_optimizer:
        state["state"] = [math.ceil(BYTES_STATE * cost.parameters / UNIT_BYTES) for cost in stages]
    unlike = {key: values for key, values in by_layer.items() if len(set(values)) > 1}
    tables: dict[str, Any] = {
        "name": name,
        "pipelines": layout.pipelines,
        "stages": layout.stages,
        "microbatches": layout.microbatches,
        "time": {**sum_by_stage(_op_times(layers, layout)), "transfer": float(f"{transfer:.2g}")},
        "memory": {
            "capacity": _capacity_by_stage(stages, layout.gpu),
            **sum_by_stage(_memory_sizes(layers)),
            **state,
            "unit_bytes": UNIT_BYTES * layout.tensor_parallel,
        },
        "network": {"overlap": True},
        "placement": {"layers": counts},
        "layers": unlike,
    }
    # What the runtime must do for the estimate to be true.
    training: dict[str, Any] = {}
    if layout.tensor_parallel > 1:
        training["tensor_parallel"] = layout.tensor_parallel
    if layout.shard_optimizer:
        training |= {"dtype": "bf16", "master_weights": True, "shard_optimizer": True}
    if layout.muon:
        training |= {"optimizer": "muon", "dtype": "bf16", "master_weights": True}
    if training:
        tables["training"] = training
    return tables, _table_comments(model, layout)


def op_seconds(layer: LayerShape, layout: ModelLayout, tokens: int) -> tuple[float, float, float]:
    """Return the seconds of F, I and W of a layer for `tokens` tokens.

    The layer is not the model's first: its input needs a gradient.
    """
    gpus, bandwidth = layout.tensor_parallel, layout.gpu.memory_bandwidth * layout.tensor_parallel
    # A roofline: a product is limited by arithmetic, or by the memory traffic of its weights.
    rate = layout.gpu.flops * layout.efficiency * gpus
    products, mixing = 2 * layer.used * tokens, layer.mixing * tokens
    loss, reading = layer.loss_bytes * tokens / bandwidth, BYTES_READ * layer.matrices / bandwidth
    return (
        max((products + mixing) / rate, reading) + loss,
        max((products + 2 * mixing) / rate, reading) + loss,
        max(products / rate, BYTES_ADDED * layer.matrices / bandwidth),
    )


def _layer_cost(layer: LayerShape, layout: ModelLayout, tokens: int, *, whole: bool) -> _Cost:
    """Return a layer's cost; if `whole`, the layer leaves all of its backward to W."""
    forward, backward_input, backward_weight = op_seconds(layer, layout, tokens)
    # A worker's ranks share a layer evenly, in memory as in work.
    activation, stash, recomputed = (
        amount * tokens / layout.tensor_parallel
        for amount in (*layer.worst_case_bytes(layout.tensor_parallel), layer.recomputed)
    )
    parameters = layer.parameters / layout.tensor_parallel
    by_muon = float(layer.by_muon * layout.muon)
    # Muon has one moment less than AdamW, in the state and in the undo copy.
    return _Cost(
        forward=forward,
        backward_input=0 if whole else backward_input,
        backward_weight=backward_weight + backward_input if whole else backward_weight,
        activation=activation,
        stash=stash,
        recomputed=recomputed,
        parameters=parameters,
        held_bytes=layout.held_bytes_per_parameter * parameters - 2 * BYTES_MOMENT * by_muon,
        by_muon=by_muon,
        orthogonal=layer.orthogonal * layout.muon / (layout.gpu.flops * layout.efficiency),
    )


def _op_times(costs: Sequence[_Cost], layout: ModelLayout) -> dict[str, list[float]]:
    """Return the rounded seconds of each op for each of `costs`, by key of `[time]`."""
    gpu = layout.gpu
    # A ring all-reduce of float32 gradients (Patarasuk and Yuan, 2009).
    ring = 2 * (layout.pipelines - 1) / layout.pipelines * 4 / gpu.network
    step, gather = layout.stepped_share * BYTES_STEPPED / gpu.memory_bandwidth, 0.0
    # reduce to the owner of each part, copy to its buddy, gather bf16 weights
    if layout.shard_optimizer:
        ring, gather = 4 / gpu.network, 2 * (layout.pipelines - 1) / layout.pipelines / gpu.network
    steps = []
    for cost in costs:
        saved_by_muon = 2 * BYTES_MOMENT * cost.by_muon / gpu.memory_bandwidth
        steps.append(cost.parameters * (step + gather) + cost.orthogonal - saved_by_muon)
    seconds = {
        "forward": [cost.forward for cost in costs],
        "backward_input": [cost.backward_input for cost in costs],
        "backward_weight": [cost.backward_weight for cost in costs],
        "optimizer": steps,
        "all_reduce": [cost.parameters * ring for cost in costs],
    }
    return {key: round_times(values) for key, values in seconds.items()}


def _capacity_by_stage(costs: Sequence[_Cost], gpu: GpuSpec) -> list[int]:
    """Return stages' memory for activations in `UNIT_BYTES`. Raises ValueError if too small."""
    for stage, cost in enumerate(costs):
        if gpu.memory_bytes - cost.held_bytes < cost.activation:
            raise ValueError(
                f"stage {stage} needs {(cost.held_bytes + cost.activation) / 1e9:.0f} GB on each "
                f"GPU, {gpu.name} has {gpu.memory_bytes / 1e9:.0f}: use more stages or more tensor "
                "parallelism"
            )
    return [math.floor((gpu.memory_bytes - cost.held_bytes) / UNIT_BYTES) for cost in costs]


def _memory_sizes(costs: Sequence[_Cost]) -> dict[str, list[int]]:
    """Return memory in `UNIT_BYTES` for each of `costs`, by key of `[memory]`."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for cost in costs:
        sizes["activation"].append(math.ceil(cost.activation / UNIT_BYTES))
        sizes["weight_stash"].append(math.ceil(cost.stash / UNIT_BYTES))
        sizes["weights"].append(math.ceil(cost.held_bytes / UNIT_BYTES))
        sizes["recomputed"].append(math.ceil(cost.recomputed / UNIT_BYTES))
    return dict(sizes)


def _table_comments(model: ModelLayers, layout: ModelLayout) -> dict[str, list[str]]:
    """Return lines of comments for an estimated job file, by their table's name."""
    gpu = layout.gpu
    memory = [
        f"MB on each GPU. capacity: what remains after {BYTES_HELD} bytes per parameter, and "
        f"{BYTES_UNDO} by which a step can be undone."
    ]
    if layout.shard_optimizer:
        memory = [
            f"MB on each GPU. capacity: what remains after {layout.held_bytes_per_parameter:.3g} "
            "bytes per parameter: optimizer",
            f"state and its undo copies are sharded over {layout.pipelines} workers. state: all of "
            "a stage's, of which each has more when some are down.",
        ]
    if layout.muon:
        memory[0] += f" Of what Muon steps, {2 * BYTES_MOMENT} less."
    size = f"{model.parameter_count / 1e9:.3g} billion parameters"
    # A model of equal layers is described by its width; one of unlike layers by their kinds.
    if model.ends_merged:
        what = [
            f"Estimated, not measured: {size} ({len(model.layers)} layers of "
            f"width {model.hidden}), sequences of {model.sequence},"
        ]
        times = [
            "Seconds. Matrix products and attention only; optimizer: AdamW, bound by memory "
            "bandwidth;"
        ]
        memory += [
            "activation: 34 bytes a token and unit of width and layer (attention fused); "
            "weight_stash: 32.",
            'recomputed: 2, what is held where [training] recompute = "auto" has activations '
            "computed again.",
        ]
        placement = (
            "Decoder layers of each stage; the embedding is with the first of them, the head with "
            "the last."
        )
        by_layer = (
            "How a stage divides over its layers; the embedding is with the first, the head with "
            "the last."
        )
    else:
        what = [
            f"Estimated, not measured: {size}, {model.used_parameters / 1e9:.3g} billion in "
            "products for a token. Layers:",
            *textwrap.wrap(f"{model.describe_kinds()},", 118),
            f"of width {model.hidden}, sequences of {model.sequence},",
        ]
        times = [
            "Seconds. Matrix products, attention, scans and the loss; optimizer: AdamW, bound by "
            "memory bandwidth;"
        ]
        memory += [
            "activation: what the backward reads (attention and scans fused); weight_stash: inputs "
            "of products and gradients of outputs.",
            'recomputed: inputs of layers, held where [training] recompute = "auto" has '
            "activations computed again.",
        ]
        placement = (
            "Layers of each stage; the embedding is the first of them, the head with the loss the "
            "last."
        )
        by_layer = "How a stage divides over its layers, embedding and head included."
    comments = {
        "": [
            *what,
            f"micro-batches of {layout.microbatch_size}, workers of {layout.tensor_parallel} x "
            f"{gpu.name} at {layout.efficiency:.0%} of {gpu.flops / 1e12:.0f} TFLOP/s. `slipstream "
            "profile` measures.",
        ],
        "time": [
            *times,
            f"all_reduce: a ring of float32 gradients at {gpu.network / 1e9:g} GB/s; transfer: "
            "bf16.",
        ],
        "memory": [
            *memory,
            f"weights: those {layout.held_bytes_per_parameter:.3g} bytes; unit_bytes: of a worker, "
            f"which is {layout.tensor_parallel} x {gpu.name}.",
        ],
        "network": [
            "Gradient reductions run while the worker computes, as in other trainers. With false, "
            "they occupy it."
        ],
        "placement": [placement],
        "layers": [by_layer],
    }
    if layout.muon:
        comments["time"].append(
            "optimizer of matrices of layers: Muon, whose products are counted, too."
        )
    if layout.tensor_parallel > 1:
        comments["time"] += [
            f"A worker is {layout.tensor_parallel} ranks, each with its part of activations and "
            "gradients: transfer and all_reduce are from rank to",
            "rank, all at the same time. What ranks of a worker send each other is a part of the "
            f"{layout.efficiency:.0%}.",
        ]
        comments["training"] = ["Processes of a worker, one GPU each."]
    return comments


def divide_layers(work: Sequence[float], stages: int) -> list[int]:
    """Return each stage's number of layers such that the busiest has the least work.

    Each stage gets at least one layer, and `work` has the work of each layer, in order. Of the
    divisions for which this holds, one with the least sum of squares of stages' work is chosen, so
    that stages other than the busiest are even, too.
    """
    inner = work[1:-1]
    if inner and max(inner) <= min(inner) == work[0]:
        return _divide_equal_layers(len(work), stages, work[0], work[-1] - work[0])
    ends = np.concatenate([[0.0], np.cumsum(work)])
    # [row, column]: work of layers column to row - 1
    load = np.tril(ends[:, None] - ends[None, :]).astype(float)
    load[np.triu_indices(len(ends))] = np.inf
    # Dynamic programming: the least longest stage of the first layers, for one stage more each
    # time.
    longest = load[:, 0]
    for _ in range(stages - 1):
        longest = np.maximum(load, longest[None, :]).min(axis=1)
    # The same again for the sum of squares, of stages that are not longer than that.
    allowed = np.where(load <= longest[-1] * (1 + 1e-9), load**2, np.inf)
    squares, choices = allowed[:, 0], []
    for _ in range(stages - 1):
        options = allowed + squares[None, :]
        choices.append(options.argmin(axis=1))
        squares = options.min(axis=1)
    begins = [len(work)]
    for choice in reversed(choices):
        begins.append(int(choice[begins[-1]]))
    return [end - begin for begin, end in pairwise(reversed([*begins, 0]))]


def _divide_equal_layers(layers: int, stages: int, layer: float, head: float) -> list[int]:
    """Return stages' numbers of equal layers; the last stage has work `head` more."""
    # The last stage gets fewer layers, in exchange for the head; its neighbours are tried, too.
    last = max(
        1, min(layers - stages + 1, round((layers * layer + head) / stages / layer - head / layer))
    )
    if stages == 1:
        return [layers]
    options = []
    for count in {max(1, last - 1), last, min(layers - stages + 1, last + 1)}:
        rest, over = divmod(layers - count, stages - 1)
        # The remainder goes to the middle: the first stage also holds the embedding.
        counts = [rest + (0 < stage <= over) for stage in range(stages - 1)]
        options.append((max(max(counts) * layer, count * layer + head), [*counts, count]))
    return min(options)[1]
