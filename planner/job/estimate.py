"""Job files for models that nobody has measured yet: stage times and memory from shapes and data sheets.

Floating-point operations of a layer are those of Narayanan et al. (SC 2021, arXiv 2104.04473, appendix): 2 a parameter
and token for a matrix product, 4 b s^2 h for attention scores and values. I costs as much for the products and twice as
much for attention; W as much for the products and nothing for attention. Element-wise ops are not counted, so that a
real W is shorter against its F than this one. Activations are those of Korthikanti et al. (2022, arXiv 2205.05198) with
attention recomputed or fused, 34 s b h bytes a layer; of these W needs 32 s b h (Qi et al. 2023, arXiv 2401.10241).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from planner.job.text import rounded

BYTES_HELD = 18
"""A parameter: bf16 weight, float32 gradient, float32 master weight and two moments of AdamW."""
BYTES_UNDO = 12
"""Copies by which a step can be undone: master weight and moments."""
BYTES_STEPPED = 34
"""Moved by an AdamW step for each parameter: gradient, master weight and moments read, all but the first written."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU does by its data sheet: bf16 without sparsity; `network` in bytes per second for each GPU."""

    name: str
    flops: float
    memory_bytes: float
    memory_bandwidth: float
    network: float


MACHINES = {machine.name: machine for machine in (
    Machine(name="a100-40g", flops=312e12, memory_bytes=40e9, memory_bandwidth=1.555e12, network=25e9),
    Machine(name="a100", flops=312e12, memory_bytes=80e9, memory_bandwidth=2.039e12, network=25e9),
    Machine(name="h100", flops=989e12, memory_bytes=80e9, memory_bandwidth=3.35e12, network=50e9),
    Machine(name="h200", flops=989e12, memory_bytes=141e9, memory_bandwidth=4.8e12, network=50e9),
    Machine(name="b200", flops=2250e12, memory_bytes=180e9, memory_bandwidth=8e12, network=50e9),
)}
"""NVIDIA's data sheets; network: one 200 Gb/s (A100) or 400 Gb/s port a GPU."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
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
    """Three matrices in the feed-forward part (SwiGLU), not two."""

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices."""
        attention = 2 * self.hidden**2 * (1 + (self.kv_heads or self.heads) / self.heads)
        return round(attention) + self.hidden * (self.ffn or 4 * self.hidden) * (3 if self.gated else 2)

    @property
    def parameters(self) -> int:
        """Of the whole model, embedding and head apart."""
        return self.layers * self.layer_parameters + 2 * self.vocabulary * self.hidden


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is laid out, and on what. `tensor_parallel` GPUs together are one worker."""

    machine: Machine
    pipelines: int
    stages: int
    microbatches: int
    microbatch_size: int = 1
    tensor_parallel: int = 1
    efficiency: float = 0.5
    """Share of the peak that the matrix products reach."""


def estimate(name: str, shape: Shape, cluster: Cluster) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The tables of a job file, and the remarks that say how they came about.

    Raises ValueError, with one line, where there are more stages than layers or the model does not fit.
    """
    if cluster.stages > shape.layers:
        raise ValueError(f"{cluster.stages} stages for {shape.layers} layers; expected at most one stage a layer")
    if shape.hidden % shape.heads or shape.heads % (shape.kv_heads or shape.heads):
        raise ValueError(f"hidden size {shape.hidden}, {shape.heads} heads, {shape.kv_heads or shape.heads} heads of "
                         "keys and values: expected each to divide the one before")
    tokens = cluster.microbatch_size * shape.sequence
    scores = 4 * cluster.microbatch_size * shape.sequence**2 * shape.hidden
    product = 2 * shape.layer_parameters * tokens
    head = 2 * tokens * shape.hidden * shape.vocabulary
    counts = _cut(shape.layers, cluster.stages, 3 * (product + scores), 3 * head)
    forward, backward_input, backward_weight, activation, stash, static, parameters = ([] for _ in range(7))
    for stage, count in enumerate(counts):
        last = head if stage == cluster.stages - 1 else 0
        ends = (stage == 0) + (stage == cluster.stages - 1)
        weights = count * shape.layer_parameters + ends * shape.vocabulary * shape.hidden
        forward.append(count * (product + scores) + last)
        backward_input.append(count * (product + 2 * scores) + last)
        backward_weight.append(count * product + last)
        logits = 4 * tokens * shape.vocabulary if last else 0
        activation.append((34 * count * tokens * shape.hidden + logits) / cluster.tensor_parallel)
        stash.append(32 * count * tokens * shape.hidden / cluster.tensor_parallel)
        parameters.append(weights / cluster.tensor_parallel)
        static.append((BYTES_HELD + BYTES_UNDO) * weights / cluster.tensor_parallel)
    # The first stage's input needs no gradient: torch leaves its whole backward to W.
    backward_weight[0] += backward_input[0]
    backward_input[0] = 0
    return _tables(name, cluster, counts, forward, backward_input, backward_weight, activation, stash, static,
                   parameters, 2 * tokens * shape.hidden), _remarks(shape, cluster)


def _tables(name: str, cluster: Cluster, counts: Sequence[int], forward: Sequence[float],
            backward_input: Sequence[float], backward_weight: Sequence[float], activation: Sequence[float],
            stash: Sequence[float], static: Sequence[float], parameters: Sequence[float],
            boundary_bytes: float) -> dict[str, Any]:
    machine = cluster.machine
    rate = machine.flops * cluster.efficiency * cluster.tensor_parallel
    room = [machine.memory_bytes - held for held in static]
    for stage, (left, needed) in enumerate(zip(room, activation, strict=True)):
        if left < needed:
            raise ValueError(f"stage {stage} needs {(static[stage] + needed) / 1e9:.0f} GB on each GPU, {machine.name} "
                             f"has {machine.memory_bytes / 1e9:.0f}: use more stages or more tensor parallelism")
    ring = 2 * (cluster.pipelines - 1) / cluster.pipelines * 4 / machine.network
    time = {
        "forward": rounded([flops / rate for flops in forward]),
        "backward_input": rounded([flops / rate for flops in backward_input]),
        "backward_weight": rounded([flops / rate for flops in backward_weight]),
        "optimizer": rounded([count * BYTES_STEPPED / machine.memory_bandwidth for count in parameters]),
        "all_reduce": rounded([count * ring for count in parameters]),
        "transfer": rounded([boundary_bytes / cluster.tensor_parallel / machine.network])[0],
    }
    memory = {"capacity": [math.floor(value / 1e6) for value in room],
              "activation": [math.ceil(value / 1e6) for value in activation],
              "weight_stash": [math.ceil(value / 1e6) for value in stash]}
    return {"name": name, "pipelines": cluster.pipelines, "stages": cluster.stages,
            "microbatches": cluster.microbatches, "time": time, "memory": memory, "placement": {"layers": list(counts)}}


def _remarks(shape: Shape, cluster: Cluster) -> dict[str, list[str]]:
    machine = cluster.machine
    return {
        "": [f"Estimated, not measured: {shape.parameters / 1e9:.3g} billion parameters ({shape.layers} layers of "
             f"width {shape.hidden}), sequences of {shape.sequence},",
             f"micro-batches of {cluster.microbatch_size}, workers of {cluster.tensor_parallel} x {machine.name} at "
             f"{cluster.efficiency:.0%} of {machine.flops / 1e12:.0f} TFLOP/s. `slipstream profile` measures."],
        "time": ["Seconds. Matrix products and attention only; optimizer: AdamW, bound by memory bandwidth;",
                 f"all_reduce: a ring of float32 gradients at {machine.network / 1e9:g} GB/s; transfer: bf16."],
        "memory": [f"MB on each GPU. capacity: what is left beside {BYTES_HELD} bytes a parameter, and {BYTES_UNDO} by "
                   "which a step can be undone.",
                   "activation: 34 bytes a token and unit of width and layer (attention fused); weight_stash: 32."],
        "placement": ["Model layers of each stage; embedding and head come on top."],
    }


def _cut(layers: int, stages: int, layer: float, head: float) -> list[int]:
    """Layers of each stage, so that the busiest stage, the last one with the head, is as light as it can be."""
    last = max(1, min(layers - stages + 1, round((layers * layer + head) / stages / layer - head / layer)))
    if stages == 1:
        return [layers]
    options = []
    for count in {max(1, last - 1), last, min(layers - stages + 1, last + 1)}:
        rest, over = divmod(layers - count, stages - 1)
        # What is left over goes to the middle: the first stage also holds the embedding.
        counts = [rest + (0 < stage <= over) for stage in range(stages - 1)]
        options.append((max(max(counts) * layer, count * layer + head), [*counts, count]))
    return min(options)[1]
