"""Provide published times of the layers of models, and jobs of these models.

The authors of AdaPtis (arXiv 2509.23722; since renamed OctoPipe, SC 2026) publish the times with
their simulator, github.com/guojihu-hana/SimPipe, profiles/NAME.json, in milliseconds for sequences
of 4,096 tokens. The shapes are those of its simpipe/models/hf_configs, or else of the models' own
config.json. Gemma and DeepSeek have no published times: theirs are estimated. Parameters and memory
of all models follow the formulas of `planner.job.model_shape`.

Kinds of layers: M Mamba, - feed-forward, * attention, # experts, T a whole transformer layer, E
embedding, L head and loss.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec

from slipstream.planner.job import model_shape
from slipstream.planner.job.estimate import BYTES_HELD, GPUS, ModelLayout, op_seconds
from slipstream.planner.job.model_shape import LayerShape
from slipstream.planner.job.toml import job_text

TOKENS = 4096
MEGABYTE = 1e6
NEGLIGIBLE_SHARE = 0.1
"""A published W of at most this share of F's time counts as no W.

Then I computes the weight gradients, and nothing is held for W.
"""
CONVOLUTION_WIDTH = 4
"""Width of the convolution of Mamba layers."""
CHUNK_TOKENS = 128
"""Number of tokens in a chunk of a Mamba layer."""
ESTIMATED_ON = ModelLayout(gpu=GPUS["h100"], pipelines=1, stages=1, microbatches=1, efficiency=0.5)
"""GPU and parallelism for which `with_estimated_times` estimates times."""


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True):
    """Model with published or estimated times of its layers, for which pipelines are compared."""

    name: str
    pattern: str
    """Kind of each layer between embedding and head, one letter for each."""
    milliseconds: Mapping[str, tuple[float, float, float]]
    """Times of F, I and W of a micro-batch, one sequence, by kind of layer."""
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int
    gated: bool = False
    """True if the feed-forward part of a layer has three matrices instead of two."""
    mamba: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Shape of Mamba layers: heads, width of a head, groups, and width of the state."""
    experts: tuple[int, int, int] = (0, 0, 0)
    """Shape of layers with experts: their number, how many a token passes, and their width."""
    workers: int
    """Number of workers of a pipeline in the comparison."""

    @property
    def kinds(self) -> str:
        """Kind of each layer as a letter, from the embedding to the head."""
        return f"E{self.pattern}L"

    def shape_of_layer(self, kind: str) -> LayerShape:
        """Return parameters, work and memory of a layer of this kind, a letter of `kinds`."""
        hidden, norm = self.hidden, model_shape.norm_shape(self.hidden)
        if kind == "E":
            return model_shape.embedding_shape(hidden, self.vocabulary)
        if kind == "L":
            return model_shape.head_and_loss_shape(hidden, self.vocabulary)
        if kind == "T":
            return self.shape_of_layer("*") + self.shape_of_layer("-")
        if kind == "*":
            tokens = model_shape.attended_tokens(TOKENS, None)
            return norm + model_shape.attention_shape(
                hidden, self.heads, self.kv_heads, self.head_dim, tokens
            )
        if kind == "-":
            return norm + model_shape.feed_forward_shape(hidden, self.ffn, gated=self.gated)
        if kind == "#":
            number, chosen, width = self.experts
            return norm + model_shape.experts_shape(
                hidden, width, number=number, chosen=chosen, gated=True
            )
        # The only kind left is M.
        heads, width, groups, state = self.mamba
        return norm + model_shape.mamba_2_shape(
            hidden,
            heads=heads,
            head_width=width,
            groups=groups,
            state=state,
            kernel=CONVOLUTION_WIDTH,
            chunk=CHUNK_TOKENS,
        )

    def values_by_layer(self, key: str) -> list[float]:
        """Return each layer's value of `key`, one of `KEYS`, in seconds or megabytes."""
        column = {"forward": 0, "backward_input": 1, "backward_weight": 2}
        values = {}
        for kind in dict.fromkeys(self.kinds):
            shape, milliseconds = self.shape_of_layer(kind), self.milliseconds[kind]
            if key in column:
                values[kind] = round(milliseconds[column[key]] / 1000, 7)
            elif key == "weights":
                values[kind] = round(BYTES_HELD * shape.parameters / MEGABYTE, 1)
            else:
                # Without a W there is nothing to keep after I.
                stash = shape.stash if milliseconds[2] > NEGLIGIBLE_SHARE * milliseconds[0] else 0
                bytes_per_token = shape.activation if key == "activation" else stash
                values[kind] = round(TOKENS * bytes_per_token / MEGABYTE, 1)
        return [values[kind] for kind in self.kinds]


KEYS = ("forward", "backward_input", "backward_weight", "activation", "weight_stash", "weights")


def make_job(
    model: MeasuredModel,
    counts: Sequence[int],
    microbatches: int,
    pipelines: int,
    worker_memory: float | None,
) -> str:
    """Return the text of a job file whose stages have `counts` layers.

    Embedding and head count as layers. The argument `worker_memory` is that of a worker for weights
    and activations, in megabytes; None: unlimited.
    """
    edges = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    layers = {key: model.values_by_layer(key) for key in KEYS}
    stages: dict[str, list[float]] = {}
    for key, values in layers.items():
        stages[key] = [round(sum(values[first:end]), 7) for first, end in pairwise(edges)]
    memory: dict[str, object] = {}
    if worker_memory is not None:
        # A job file states the memory of each stage without its weights.
        capacity = [max(0.0, round(worker_memory - weights, 1)) for weights in stages["weights"]]
        sizes = {key: stages[key] for key in KEYS[3:]}
        memory["memory"] = {"capacity": capacity, **sizes, "unit_bytes": MEGABYTE}
    timed = KEYS if worker_memory is not None else KEYS[:3]
    time = {key: stages[key] for key in KEYS[:3]}
    layer_values = {key: layers[key] for key in timed}
    return job_text(
        {
            "name": model.name,
            "pipelines": pipelines,
            "stages": len(counts),
            "microbatches": microbatches,
            "time": time,
            **memory,
            "placement": {"layers": list(counts)},
            "layers": layer_values,
        },
        {},
    )


def with_estimated_times(model: MeasuredModel) -> MeasuredModel:
    """Return the model with times of its layers as estimated by `planner.job.estimate`."""
    times = {}
    for kind in dict.fromkeys(model.kinds):
        forward, backward_input, backward_weight = op_seconds(
            model.shape_of_layer(kind), ESTIMATED_ON, TOKENS
        )
        times[kind] = 1000 * forward, 1000 * backward_input, 1000 * backward_weight
    return msgspec.structs.replace(model, milliseconds=times)


_H_8 = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
_JAMBA = "M-M#M-M#*-M#M-M#M-M#M-M#*-M#M-M#M-M#M-M#*-M#M-M#M-M#M-M#*-M#M-M#"
MODELS = (
    MeasuredModel(
        name="nemotron-h-4b",
        pattern=_H_8,
        hidden=3072,
        vocabulary=131072,
        heads=32,
        ffn=12288,
        mamba=(112, 64, 8, 128),
        workers=4,
        milliseconds={
            "E": (2.7758, 0.4314, 0.0001),
            "M": (1.0861, 2.2206, 0.3506),
            "-": (0.6692, 0.3644, 0.3805),
            "*": (0.5142, 0.6219, 0.1776),
            "L": (9.6437, 5.2577, 0.0001),
        },
    ),
    MeasuredModel(
        name="nemotron-h-8b",
        pattern=_H_8,
        hidden=4096,
        vocabulary=131072,
        heads=32,
        ffn=21504,
        mamba=(128, 64, 8, 128),
        workers=4,
        milliseconds={
            "E": (2.3148, 1.6364, 0.0001),
            "M": (1.1057, 2.1519, 0.5065),
            "-": (0.9658, 0.899, 0.868),
            "*": (0.9945, 0.9133, 0.1971),
            "L": (9.5306, 7.3188, 0.0001),
        },
    ),
    MeasuredModel(
        name="nemotron-nano-v2-9b",
        pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        hidden=4480,
        vocabulary=131072,
        heads=40,
        ffn=15680,
        mamba=(128, 80, 8, 128),
        workers=4,
        milliseconds={
            "E": (0.7589, 2.8654, 0.0),
            "M": (2.6768, 4.2984, 1.7599),
            "-": (1.8477, 1.909, 1.6866),
            "*": (1.9254, 2.4534, 0.6547),
            "L": (14.2155, 15.7056, 0.0595),
        },
    ),
    MeasuredModel(
        name="nemotron-h-47b",
        pattern="M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-"
        "M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-M-",
        hidden=8192,
        vocabulary=131072,
        heads=64,
        ffn=30720,
        mamba=(256, 64, 8, 256),
        workers=8,
        milliseconds={
            "E": (1.354, 0.241, 0.0001),
            "M": (3.7309, 5.6767, 1.6209),
            "-": (2.4261, 3.5201, 3.1294),
            "*": (1.122, 0.6758, 0.0001),
            "L": (10.3533, 12.1012, 2.936),
        },
    ),
    MeasuredModel(
        name="nemotron-h-56b",
        pattern="M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
        hidden=8192,
        vocabulary=131072,
        heads=64,
        ffn=32768,
        mamba=(256, 64, 8, 256),
        workers=8,
        milliseconds={
            "E": (3.4572, 2.4782, 0.0001),
            "M": (3.1306, 5.8418, 2.5154),
            "-": (3.2098, 3.8218, 2.4083),
            "*": (1.058, 0.0001, 0.0001),
            "L": (10.7663, 14.1758, 5.1839),
        },
    ),
    MeasuredModel(
        name="jamba-20b",
        pattern=_JAMBA,
        hidden=4096,
        vocabulary=65536,
        heads=32,
        ffn=14336,
        gated=True,
        mamba=(128, 64, 8, 128),
        experts=(16, 2, 4224),
        workers=4,
        milliseconds={
            "E": (0.723, 0.0001, 0.0001),
            "M": (0.9865, 2.507, 0.5332),
            "-": (0.8201, 0.0001, 0.8268),
            "#": (3.966, 2.6074, 1.399),
            "*": (0.9809, 0.0001, 0.312),
            "L": (5.6781, 5.7856, 0.0001),
        },
    ),
    MeasuredModel(
        name="jamba-52b",
        pattern=_JAMBA,
        hidden=4096,
        vocabulary=65536,
        heads=32,
        ffn=14336,
        gated=True,
        mamba=(128, 64, 8, 128),
        experts=(16, 2, 14336),
        workers=8,
        milliseconds={
            "E": (1.3201, 0.0001, 0.0001),
            "M": (1.1771, 2.4357, 0.5816),
            "-": (0.6695, 0.0357, 0.7392),
            "#": (3.9558, 4.009, 4.4898),
            "*": (0.8621, 0.2942, 0.2957),
            "L": (7.0671, 7.3794, 0.1531),
        },
    ),
    MeasuredModel(
        name="jamba-100b",
        pattern="M-M#M-M#*-M#M-M#" * 9,
        hidden=8192,
        vocabulary=65536,
        heads=64,
        ffn=24576,
        gated=True,
        mamba=(256, 64, 8, 128),
        experts=(16, 2, 3456),
        workers=8,
        milliseconds={
            "E": (1.4677, 0.0001, 0.0001),
            "M": (2.8726, 6.6339, 2.1395),
            "-": (3.3547, 1.7323, 2.8975),
            "#": (2.8529, 0.6675, 2.3108),
            "*": (1.7739, 2.7526, 0.5657),
            "L": (6.2646, 13.9087, 5.3801),
        },
    ),
    MeasuredModel(
        name="llama-3-8b",
        pattern="T" * 32,
        hidden=4096,
        vocabulary=128256,
        heads=32,
        ffn=14336,
        gated=True,
        workers=4,
        milliseconds={
            "E": (3.5448, 2.1146, 0.0001),
            "T": (1.7372, 1.9665, 1.0829),
            "L": (10.3899, 7.4635, 0.0395),
        },
    ),
    MeasuredModel(
        name="llama-3-80b",
        pattern="T" * 92,
        hidden=8192,
        vocabulary=128256,
        heads=64,
        ffn=28672,
        gated=True,
        workers=8,
        milliseconds={
            "E": (2.5917, 0.0001, 0.0001),
            "T": (5.6739, 7.0726, 4.5125),
            "L": (10.6048, 16.6842, 6.1427),
        },
    ),
    with_estimated_times(
        MeasuredModel(
            name="gemma-2b",
            pattern="T" * 18,
            hidden=2048,
            vocabulary=256_000,
            heads=8,
            kv_heads=1,
            head_dim=256,
            ffn=16_384,
            gated=True,
            workers=4,
            milliseconds={},
        )
    ),
    with_estimated_times(
        MeasuredModel(
            name="gemma-7b",
            pattern="T" * 28,
            hidden=3072,
            vocabulary=256_000,
            heads=16,
            kv_heads=16,
            head_dim=256,
            ffn=24_576,
            gated=True,
            workers=4,
            milliseconds={},
        )
    ),
    with_estimated_times(
        MeasuredModel(
            name="gemma-2-27b",
            pattern="T" * 46,
            hidden=4608,
            vocabulary=256_000,
            heads=32,
            kv_heads=16,
            ffn=36_864,
            gated=True,
            workers=8,
            milliseconds={},
        )
    ),
    with_estimated_times(
        MeasuredModel(
            name="deepseek-moe-16b",
            pattern="*-" + "*#" * 27,
            hidden=2048,
            vocabulary=102_400,
            heads=16,
            kv_heads=16,
            ffn=10_944,
            gated=True,
            experts=(66, 8, 1408),
            workers=4,
            milliseconds={},
        )
    ),
)
