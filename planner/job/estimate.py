"""Estimates a job file for a model that has not been measured: stage times and memory from shapes and data sheets.

Floating-point operations of a layer are those of Narayanan et al. (SC 2021, arXiv 2104.04473, appendix): 2 for each
parameter and token in matrix products, 4 b s^2 h for attention scores and values. I costs as much as F in the products
and twice as much in attention; W as much in the products and nothing in attention. Element-wise ops are not counted,
so a measured W is shorter, relative to its F, than the estimate. Activations are those of Korthikanti et al. (2022,
arXiv 2205.05198) with attention recomputed or fused, 34 s b h bytes a layer; W needs 32 s b h of them (Qi et al. 2023,
arXiv 2401.10241).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from slipstream.planner.job.layers import share
from slipstream.planner.job.toml import rounded

BYTES_HELD = 18
"""For each parameter: bf16 weight, float32 gradient, float32 master weight and two moments of AdamW."""
BYTES_UNDO = 12
"""For each parameter: the copies by which a step can be undone, of master weight and moments."""
BYTES_WHOLE = 6
"""Of these, what is not sharded with the optimizer's state: weight and gradient."""
BYTES_STATE = BYTES_HELD + BYTES_UNDO - BYTES_WHOLE
"""What is."""
UNIT_BYTES = 10**6
"""The unit of memory, on each GPU."""
BYTES_STEPPED = 34
"""Moved by an AdamW step for each parameter: gradient, master weight and moments read, all but the first written."""


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU by its data sheet."""

    name: str
    flops: float
    """bf16 operations per second, without sparsity."""
    memory_bytes: float
    memory_bandwidth: float
    """Bytes per second."""
    network: float
    """Bytes per second for each GPU."""


GPUS = {gpu.name: gpu for gpu in (
    GpuSpec(name="a100-40g", flops=312e12, memory_bytes=40e9, memory_bandwidth=1.555e12, network=25e9),
    GpuSpec(name="a100", flops=312e12, memory_bytes=80e9, memory_bandwidth=2.039e12, network=25e9),
    GpuSpec(name="h100", flops=989e12, memory_bytes=80e9, memory_bandwidth=3.35e12, network=50e9),
    GpuSpec(name="h200", flops=989e12, memory_bytes=141e9, memory_bandwidth=4.8e12, network=50e9),
    GpuSpec(name="b200", flops=2250e12, memory_bytes=180e9, memory_bandwidth=8e12, network=50e9),
)}
"""By name, from NVIDIA's data sheets. Network: one port of 200 Gb/s (A100) or 400 Gb/s for each GPU."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as of queries."""
    ffn: int | None = None
    """Width of the feed-forward part; None: 4 x hidden."""
    gated: bool = False
    """Whether the feed-forward part has three matrices (SwiGLU) instead of two."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer."""
        attention = 2 * self.hidden**2 * (1 + (self.kv_heads or self.heads) / self.heads)
        return round(attention) + self.hidden * (self.ffn or 4 * self.hidden) * (3 if self.gated else 2)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, with separate embedding and head."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is distributed, and over which GPUs. `tensor_parallel` GPUs together are one worker."""

    gpu: GpuSpec
    pipelines: int
    stages: int
    microbatches: int
    microbatch_size: int = 1
    tensor_parallel: int = 1
    efficiency: float = 0.5
    """Share of the peak that matrix products reach."""
    shard_optimizer: bool = False
    """Whether the workers of a stage share its optimizer state: each keeps a part, and a copy of another's."""

    @property
    def stepped(self) -> float:
        """Share of a stage's parameters that each of its workers steps."""
        return float(share(self.pipelines)) if self.shard_optimizer else 1.0

    @property
    def held_bytes(self) -> float:
        """For each parameter, all the time; where state is sharded, while all workers of the stage are there."""
        return BYTES_WHOLE + BYTES_STATE * self.stepped


class _Cost(NamedTuple):
    """What some layers need for one micro-batch, on each GPU of a worker."""

    forward: float
    """Floating-point operations; so are the two below."""
    backward_input: float
    backward_weight: float
    activation: float
    """Bytes; so is the stash."""
    stash: float
    recomputed: float
    """As `activation`, where it is computed again: what each layer takes."""
    parameters: float
    held_bytes: float
    """All the time."""


def estimate(name: str, shape: ModelShape, layout: ModelLayout) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The tables of a job file, and the comments that say how they were made.

    Raises ValueError, with one line, where there are more stages than layers or the model does not fit.
    """
    if layout.stages > shape.layers:
        raise ValueError(f"{layout.stages} stages for {shape.layers} layers; expected at most one stage a layer")
    if shape.hidden % shape.heads or shape.heads % (shape.kv_heads or shape.heads):
        raise ValueError(f"hidden size {shape.hidden}, {shape.heads} heads, {shape.kv_heads or shape.heads} heads of "
                         "keys and values: expected each to divide the one before")
    counts = _layer_counts(shape, layout)
    ends = [sum(counts[:index]) for index in range(len(counts) + 1)]
    stages = [_costs(shape, layout, begin, end, whole=begin == 0) for begin, end in pairwise(ends)]
    layers = [_costs(shape, layout, layer, layer + 1, whole=layer < counts[0]) for layer in range(shape.layers)]
    by_layer: dict[str, Sequence[float]] = {**_times(layers, layout), **_sizes(layers)}

    def summed(of_layers: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
        """By stage: the sums over its layers, exactly, so that plans that cut stages need no finer clock."""
        return {key: [float(f"{sum(values[begin:end]):.12g}") for begin, end in pairwise(ends)]
                for key, values in of_layers.items()}

    boundary_bytes = 2 * layout.microbatch_size * shape.sequence * shape.hidden
    transfer = boundary_bytes / layout.tensor_parallel / layout.gpu.network
    tables: dict[str, Any] = {
        "name": name, "pipelines": layout.pipelines, "stages": layout.stages, "microbatches": layout.microbatches,
        "time": {**summed(_times(layers, layout)), "transfer": float(f"{transfer:.2g}")},
        "memory": {"capacity": _capacity(stages, layout.gpu), **summed(_sizes(layers)),
                   **({"state": [math.ceil(BYTES_STATE * cost.parameters / UNIT_BYTES) for cost in stages]}
                      if layout.shard_optimizer else {}), "unit_bytes": UNIT_BYTES * layout.tensor_parallel},
        "placement": {"layers": counts},
        "layers": {key: by_layer[key] for key in by_layer if len(set(by_layer[key])) > 1}}
    training: dict[str, Any] = {}
    if layout.tensor_parallel > 1:
        training["tensor_parallel"] = layout.tensor_parallel
    if layout.shard_optimizer:
        training |= {"dtype": "bf16", "master_weights": True, "shard_optimizer": True}
    if training:
        tables["training"] = training
    return tables, _comments(shape, layout)


def _layer_counts(shape: ModelShape, layout: ModelLayout) -> list[int]:
    """The layers of each stage."""
    tokens = layout.microbatch_size * shape.sequence
    layer = 3 * (2 * shape.layer_parameters * tokens + _attention(shape, layout))
    return _layers_by_stage(shape.layers, layout.stages, layer, 6 * tokens * shape.hidden * shape.vocabulary)


def _attention(shape: ModelShape, layout: ModelLayout) -> int:
    """Floating-point operations of the attention of a layer."""
    return 4 * layout.microbatch_size * shape.sequence**2 * shape.hidden


def _costs(shape: ModelShape, layout: ModelLayout, begin: int, end: int, *, whole: bool) -> _Cost:
    """What layers `begin` to `end` - 1 need; the embedding is with the first layer, the head with the last.

    `whole`: the first stage's input needs no gradient, so torch leaves its whole backward to W.
    """
    tokens, count = layout.microbatch_size * shape.sequence, end - begin
    attention, products = _attention(shape, layout), 2 * shape.layer_parameters * tokens
    first, last = begin == 0, end == shape.layers
    head = 2 * tokens * shape.hidden * shape.vocabulary * last
    backward_input, backward_weight = count * (products + 2 * attention) + head, count * products + head
    parameters = (count * shape.layer_parameters + (first + last) * shape.vocabulary * shape.hidden) \
        / layout.tensor_parallel
    return _Cost(
        forward=count * (products + attention) + head,
        backward_input=0 if whole else backward_input,
        backward_weight=backward_weight + backward_input if whole else backward_weight,
        activation=(34 * count * tokens * shape.hidden + 4 * tokens * shape.vocabulary * last) / layout.tensor_parallel,
        stash=32 * count * tokens * shape.hidden / layout.tensor_parallel,
        recomputed=(2 * count * tokens * shape.hidden + 4 * tokens * shape.vocabulary * last) / layout.tensor_parallel,
        parameters=parameters, held_bytes=layout.held_bytes * parameters)


def _times(costs: Sequence[_Cost], layout: ModelLayout) -> dict[str, list[float]]:
    """Seconds of each op, by stage or by layer."""
    gpu = layout.gpu
    rate = gpu.flops * layout.efficiency * layout.tensor_parallel
    ring = 2 * (layout.pipelines - 1) / layout.pipelines * 4 / gpu.network
    step, gather = layout.stepped * BYTES_STEPPED / gpu.memory_bandwidth, 0.0
    if layout.shard_optimizer:  # reduced to the owner of each part, then copied to its buddy; bf16 weights are gathered
        ring, gather = 4 / gpu.network, 2 * (layout.pipelines - 1) / layout.pipelines / gpu.network
    return {
        "forward": rounded([cost.forward / rate for cost in costs]),
        "backward_input": rounded([cost.backward_input / rate for cost in costs]),
        "backward_weight": rounded([cost.backward_weight / rate for cost in costs]),
        "optimizer": rounded([cost.parameters * (step + gather) for cost in costs]),
        "all_reduce": rounded([cost.parameters * ring for cost in costs]),
    }


def _capacity(costs: Sequence[_Cost], gpu: GpuSpec) -> list[int]:
    """What is left on each GPU beside a stage. Raises ValueError where a stage does not fit."""
    for stage, cost in enumerate(costs):
        if gpu.memory_bytes - cost.held_bytes < cost.activation:
            raise ValueError(f"stage {stage} needs {(cost.held_bytes + cost.activation) / 1e9:.0f} GB on each GPU, "
                             f"{gpu.name} has {gpu.memory_bytes / 1e9:.0f}: use more stages or more tensor parallelism")
    return [math.floor((gpu.memory_bytes - cost.held_bytes) / UNIT_BYTES) for cost in costs]


def _sizes(costs: Sequence[_Cost]) -> dict[str, list[int]]:
    """What is held on each GPU, by stage or by layer."""
    return {"activation": [math.ceil(cost.activation / UNIT_BYTES) for cost in costs],
            "weight_stash": [math.ceil(cost.stash / UNIT_BYTES) for cost in costs],
            "weights": [math.ceil(cost.held_bytes / UNIT_BYTES) for cost in costs],
            "recomputed": [math.ceil(cost.recomputed / UNIT_BYTES) for cost in costs]}


def _comments(shape: ModelShape, layout: ModelLayout) -> dict[str, list[str]]:
    gpu = layout.gpu
    held = [f"MB on each GPU. capacity: what is left beside {BYTES_HELD} bytes per parameter, and {BYTES_UNDO} by "
            "which a step can be undone."]
    if layout.shard_optimizer:
        held = [f"MB on each GPU. capacity: what is left beside {layout.held_bytes:.3g} bytes per parameter: optimizer",
                f"state and its undo copies are sharded over {layout.pipelines} workers. state: all of a stage's, of "
                "which each has more when some are down."]
    comments = {
        "": [f"Estimated, not measured: {shape.parameters / 1e9:.3g} billion parameters ({shape.layers} layers of "
             f"width {shape.hidden}), sequences of {shape.sequence},",
             f"micro-batches of {layout.microbatch_size}, workers of {layout.tensor_parallel} x {gpu.name} at "
             f"{layout.efficiency:.0%} of {gpu.flops / 1e12:.0f} TFLOP/s. `slipstream profile` measures."],
        "time": ["Seconds. Matrix products and attention only; optimizer: AdamW, bound by memory bandwidth;",
                 f"all_reduce: a ring of float32 gradients at {gpu.network / 1e9:g} GB/s; transfer: bf16."],
        "memory": [*held,
                   "activation: 34 bytes a token and unit of width and layer (attention fused); weight_stash: 32.",
                   "recomputed: 2, what is held where [training] recompute = \"auto\" has activations computed again.",
                   f"weights: those {layout.held_bytes:.3g} bytes; unit_bytes: of a worker, which is "
                   f"{layout.tensor_parallel} x {gpu.name}."],
        "placement": ["Decoder layers of each stage; the embedding is with the first of them, the head with the last."],
        "layers": ["How a stage divides over its layers; the embedding is with the first, the head with the last."],
    }
    if layout.tensor_parallel > 1:
        comments["time"] += [f"A worker is {layout.tensor_parallel} ranks, each with its part of activations and "
                             "gradients: transfer and all_reduce are from rank to",
                             "rank, all at the same time. What ranks of a worker send each other is a part of the "
                             f"{layout.efficiency:.0%}."]
        comments["training"] = ["Processes of a worker, one GPU each."]
    return comments


def _layers_by_stage(layers: int, stages: int, layer: float, head: float) -> list[int]:
    """Layers of each stage, for the least work of the busiest stage; the last stage has the head, too."""
    last = max(1, min(layers - stages + 1, round((layers * layer + head) / stages / layer - head / layer)))
    if stages == 1:
        return [layers]
    options = []
    for count in {max(1, last - 1), last, min(layers - stages + 1, last + 1)}:
        rest, over = divmod(layers - count, stages - 1)
        # The remainder goes to the middle: the first stage also holds the embedding.
        counts = [rest + (0 < stage <= over) for stage in range(stages - 1)]
        options.append((max(max(counts) * layer, count * layer + head), [*counts, count]))
    return min(options)[1]
