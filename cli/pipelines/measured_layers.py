"""Times of the layers of models, as published, and jobs of them.

The times are those that the authors of AdaPtis (arXiv 2509.23722; since renamed OctoPipe, SC 2026) publish with their
simulator, github.com/guojihu-hana/SimPipe, profiles/NAME.json, in milliseconds for sequences of 4,096 tokens; the
shapes are those of its simpipe/models/hf_configs, and where it has none, of the models' own config.json. Gemma and
DeepSeek have no published times: theirs are estimated.

Kinds of layers: M Mamba, - feed-forward, * attention, # experts, T a whole transformer layer, E embedding, L head and
loss.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from slipstream.planner.job.estimate import GPUS
from slipstream.planner.job.toml import job_text

TOKENS = 4096
MEGABYTE = 1e6
FLOPS = 0.5 * GPUS["h100"].flops
"""A second, of what is estimated."""
BYTES_HELD = 18
"""For each parameter, as SimPipe counts: weight, float32 gradient and master weight, two moments."""
STASHED = 32 / 34
"""Of a layer's activation, what W needs (Qi et al. 2023, arXiv 2401.10241)."""


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    name: str
    pattern: str
    """The kind of each layer between E and L."""
    milliseconds: Mapping[str, tuple[float, float, float]]
    """By kind: F, I and W of a micro-batch of one sequence."""
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int
    gated: bool = False
    """Whether a feed-forward part has three matrices."""
    mamba: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Heads, their width, groups, and the width of the state."""
    experts: tuple[int, int, int] = (0, 0, 0)
    """How many, how many a token passes, and their width."""
    workers: int
    """Of a pipeline, in the comparison."""

    @property
    def kinds(self) -> str:
        """Of all layers."""
        return f"E{self.pattern}L"

    def parameters(self, kind: str) -> int:
        """Of a layer."""
        hidden, (heads, width, groups, state), (experts, _, expert) = self.hidden, self.mamba, self.experts
        attention = 2 * hidden * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = (3 if self.gated else 2) * hidden * self.ffn
        return {"E": hidden * self.vocabulary, "L": hidden * self.vocabulary, "*": attention, "-": feed_forward,
                "T": attention + feed_forward, "#": 3 * hidden * expert * experts,
                "M": hidden * (3 * heads * width + 2 * groups * state + heads)}[kind]

    def activation(self, kind: str) -> int:
        """Bytes that a token holds of a layer from F to I: inputs of norms, matrices, and what is between them."""
        hidden, (heads, width, groups, state), (_, passed, expert) = self.hidden, self.mamba, self.experts
        inner = heads * width
        attention = 4 * hidden + 4 * self.head_dim * (self.heads + self.kv_heads)
        feed_forward = 4 * hidden + (6 if self.gated else 4) * self.ffn
        return {"E": 0, "L": 4 * hidden + 4 * self.vocabulary, "*": attention, "-": feed_forward,
                "T": attention + feed_forward, "#": 4 * hidden + passed * (2 * hidden + 6 * expert),
                "M": 4 * hidden + 2 * (2 * inner + 2 * groups * state + heads) + 2 * (inner + 2 * groups * state)
                + 4 * inner}[kind]

    def by_layer(self, key: str) -> list[float]:
        """Of each layer: seconds, or megabytes."""
        column = {"forward": 0, "backward_input": 1, "backward_weight": 2}
        if key in column:
            return [round(self.milliseconds[kind][column[key]] / 1000, 7) for kind in self.kinds]
        if key == "weights":
            return [round(BYTES_HELD * self.parameters(kind) / MEGABYTE, 1) for kind in self.kinds]
        held = [TOKENS * self.activation(kind) / MEGABYTE for kind in self.kinds]
        if key == "weight_stash":  # of E and L, W takes no time: what it computes is in I
            held = [0.0 if kind in "EL" else STASHED * one for kind, one in zip(self.kinds, held, strict=True)]
        return [round(one, 1) for one in held]


KEYS = ("forward", "backward_input", "backward_weight", "activation", "weight_stash", "weights")


def job_of(model: MeasuredModel, counts: Sequence[int], microbatches: int, pipelines: int, room: float | None) -> str:
    """A job file with stages of so many layers, E and L included. `room`: megabytes for weights and activations."""
    edges = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    layers = {key: model.by_layer(key) for key in KEYS}
    stages = {key: [round(sum(values[first:end]), 7) for first, end in pairwise(edges)]
              for key, values in layers.items()}
    memory = {} if room is None else {"memory": {
        "capacity": [max(0.0, round(room - weights, 1)) for weights in stages["weights"]],
        **{key: stages[key] for key in KEYS[3:]}, "unit_bytes": MEGABYTE}}
    return job_text({"name": model.name, "pipelines": pipelines, "stages": len(counts), "microbatches": microbatches,
                     "time": {key: stages[key] for key in KEYS[:3]}, **memory, "placement": {"layers": list(counts)},
                     "layers": layers if room is not None else {key: layers[key] for key in KEYS[:3]}}, {})


def estimated(model: MeasuredModel) -> MeasuredModel:
    """The model with times of its layers by what they compute, as `planner.job.estimate` counts it, forward: products
    of matrices and attention; the gradients cost as much each, and attention twice as much in I and nothing in W."""
    times = {}
    for kind in dict.fromkeys(model.kinds):
        parameters = model.parameters(kind)
        if kind == "#":
            experts, passed, _ = model.experts
            parameters = parameters * passed // experts
        products = 0 if kind == "E" else 2 * parameters * TOKENS
        attention = 4 * TOKENS**2 * model.heads * model.head_dim if kind in "*T" else 0
        times[kind] = (1000 * (products + attention) / FLOPS, 1000 * (products + 2 * attention) / FLOPS,
                       1000 * products / FLOPS)
    return msgspec.structs.replace(model, milliseconds=times)


_H_8 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_JAMBA = "M-M#M-M#*-M#M-M#M-M#M-M#*-M#M-M#M-M#M-M#*-M#M-M#M-M#M-M#*-M#M-M#"
MODELS = (
    MeasuredModel(
        name="nemotron-h-4b", pattern=_H_8, hidden=3072, vocabulary=131072, heads=32, ffn=12288,
        mamba=(112, 64, 8, 128), workers=4, milliseconds={
            "E": (2.7758, 0.4314, 0.0001), "M": (1.0861, 2.2206, 0.3506), "-": (0.6692, 0.3644, 0.3805),
            "*": (0.5142, 0.6219, 0.1776), "L": (9.6437, 5.2577, 0.0001)}),
    MeasuredModel(
        name="nemotron-h-8b", pattern=_H_8, hidden=4096, vocabulary=131072, heads=32, ffn=21504,
        mamba=(128, 64, 8, 128), workers=4, milliseconds={
            "E": (2.3148, 1.6364, 0.0001), "M": (1.1057, 2.1519, 0.5065), "-": (0.9658, 0.899, 0.868),
            "*": (0.9945, 0.9133, 0.1971), "L": (9.5306, 7.3188, 0.0001)}),
    MeasuredModel(
        name="nemotron-nano-v2-9b", pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", hidden=4480,
        vocabulary=131072, heads=40, ffn=15680, mamba=(128, 80, 8, 128), workers=4, milliseconds={
            "E": (0.7589, 2.8654, 0.0), "M": (2.6768, 4.2984, 1.7599), "-": (1.8477, 1.909, 1.6866),
            "*": (1.9254, 2.4534, 0.6547), "L": (14.2155, 15.7056, 0.0595)}),
    MeasuredModel(
        name="nemotron-h-47b", pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
        "M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-", hidden=8192, vocabulary=131072, heads=64,
        ffn=30720, mamba=(256, 64, 8, 256), workers=8, milliseconds={
            "E": (1.354, 0.241, 0.0001), "M": (3.7309, 5.6767, 1.6209), "-": (2.4261, 3.5201, 3.1294),
            "*": (1.122, 0.6758, 0.0001), "L": (10.3533, 12.1012, 2.936)}),
    MeasuredModel(
        name="nemotron-h-56b", pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", hidden=8192, vocabulary=131072,
        heads=64, ffn=32768, mamba=(256, 64, 8, 256), workers=8, milliseconds={
            "E": (3.4572, 2.4782, 0.0001), "M": (3.1306, 5.8418, 2.5154), "-": (3.2098, 3.8218, 2.4083),
            "*": (1.058, 0.0001, 0.0001), "L": (10.7663, 14.1758, 5.1839)}),
    MeasuredModel(
        name="jamba-20b", pattern=_JAMBA, hidden=4096, vocabulary=65536, heads=32, ffn=14336, gated=True,
        mamba=(128, 64, 8, 128), experts=(16, 2, 4224), workers=4, milliseconds={
            "E": (0.723, 0.0001, 0.0001), "M": (0.9865, 2.507, 0.5332), "-": (0.8201, 0.0001, 0.8268),
            "#": (3.966, 2.6074, 1.399), "*": (0.9809, 0.0001, 0.312), "L": (5.6781, 5.7856, 0.0001)}),
    MeasuredModel(
        name="jamba-52b", pattern=_JAMBA, hidden=4096, vocabulary=65536, heads=32, ffn=14336, gated=True,
        mamba=(128, 64, 8, 128), experts=(16, 2, 14336), workers=8, milliseconds={
            "E": (1.3201, 0.0001, 0.0001), "M": (1.1771, 2.4357, 0.5816), "-": (0.6695, 0.0357, 0.7392),
            "#": (3.9558, 4.009, 4.4898), "*": (0.8621, 0.2942, 0.2957), "L": (7.0671, 7.3794, 0.1531)}),
    MeasuredModel(
        name="jamba-100b", pattern="M-M#M-M#*-M#M-M#" * 9, hidden=8192, vocabulary=65536, heads=64, ffn=24576,
        gated=True, mamba=(256, 64, 8, 128), experts=(16, 2, 3456), workers=8, milliseconds={
            "E": (1.4677, 0.0001, 0.0001), "M": (2.8726, 6.6339, 2.1395), "-": (3.3547, 1.7323, 2.8975),
            "#": (2.8529, 0.6675, 2.3108), "*": (1.7739, 2.7526, 0.5657), "L": (6.2646, 13.9087, 5.3801)}),
    MeasuredModel(
        name="llama-3-8b", pattern="T" * 32, hidden=4096, vocabulary=128256, heads=32, ffn=14336, gated=True, workers=4,
        milliseconds={"E": (3.5448, 2.1146, 0.0001), "T": (1.7372, 1.9665, 1.0829), "L": (10.3899, 7.4635, 0.0395)}),
    MeasuredModel(
        name="llama-3-80b", pattern="T" * 92, hidden=8192, vocabulary=128256, heads=64, ffn=28672, gated=True,
        workers=8, milliseconds={
            "E": (2.5917, 0.0001, 0.0001), "T": (5.6739, 7.0726, 4.5125), "L": (10.6048, 16.6842, 6.1427)}),
    estimated(MeasuredModel(
        name="gemma-2b", pattern="T" * 18, hidden=2048, vocabulary=256_000, heads=8, kv_heads=1, head_dim=256,
        ffn=16_384, gated=True, workers=4, milliseconds={})),
    estimated(MeasuredModel(
        name="gemma-7b", pattern="T" * 28, hidden=3072, vocabulary=256_000, heads=16, kv_heads=16, head_dim=256,
        ffn=24_576, gated=True, workers=4, milliseconds={})),
    estimated(MeasuredModel(
        name="gemma-2-27b", pattern="T" * 46, hidden=4608, vocabulary=256_000, heads=32, kv_heads=16, ffn=36_864,
        gated=True, workers=8, milliseconds={})),
    estimated(MeasuredModel(
        name="deepseek-moe-16b", pattern="*-" + "*#" * 27, hidden=2048, vocabulary=102_400, heads=16, kv_heads=16,
        ffn=10_944, gated=True, experts=(66, 8, 1408), workers=4, milliseconds={})),
)
