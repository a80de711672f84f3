"""What to train and how: the job file's `[model]` and `[training]` tables, checked once and then plain data.

A `RunConfig` travels to worker processes as JSON (`to_json`, `from_json`).
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from slipstream.runtime.config_errors import explain
from slipstream.schedules.schedule import OpKind

DtypeName = Literal["float32", "float64", "bf16"]
BackendName = Literal["auto", "gloo", "nccl"]
DeviceName = Literal["auto", "cpu", "cuda"]
TokenDtype = Literal["uint16", "uint32", "int32"]

Count = Annotated[int, Meta(ge=1, le=2**20, description="a whole number from 1 to 1048576")]
Iterations = Annotated[int, Meta(ge=0, le=2**40, description="a whole number from 0 to 1099511627776")]
Some = Annotated[int, Meta(ge=1, le=2**40, description="a whole number from 1 to 1099511627776")]
Positive = Annotated[float, Meta(gt=0, le=1e6, description="a number above 0, at most 1e6")]
NotNegative = Annotated[float, Meta(ge=0, le=1e6, description="a number from 0 to 1e6")]
Fraction = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]
Text = Annotated[str, Meta(min_length=1, max_length=4096, description="a text of 1 to 4096 characters")]

Reference = Annotated[str, Meta(pattern=r"^[\w.]+:[\w.]+$", max_length=4096, description=(
    "the name of a function, as 'module:function'"))]
LearningRateSchedule = Annotated[str, Meta(
    pattern=r"^(constant|linear|cosine|wsd|[\w.]+:[\w.]+)$", max_length=4096, description=(
        "one of 'constant', 'linear', 'cosine', 'wsd', or the name of a function, as 'module:function'"))]
Source = Annotated[str, Meta(pattern=r"^(torchtitan|[\w.]+:[\w.]+)$", max_length=4096, description=(
    "the name of a function, as 'module:function', or 'torchtitan'"))]
Recompute = Annotated[
    Literal["none", "full", "auto", "attention", "mlp"] |
    tuple[Annotated[int, Meta(ge=0, le=2**20)] | Literal["attention", "mlp"], ...], Meta(
        description="'none', 'full', 'auto', 'attention', 'mlp', or a list of layers' numbers and of these parts")]
Options = Annotated[dict[str, Any], Meta(description="a table")]

_Table = TypeVar("_Table", bound=msgspec.Struct)


def _require_json(name: str, options: Mapping[str, Any]) -> None:
    if msgspec.json.decode(msgspec.json.encode(options)) != options:
        raise ValueError(f"{name} has a date, or a number that is not finite; expected texts, numbers, true, false, "
                         "lists and tables")


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is one line."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job file's `[model]` table."""

    name: Text = "gpt"
    """"gpt", or `module:function` for a model of the user's own (`runtime.model.layers.layered_model.Factory`)."""
    blocks: Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")] = 4
    """Transformer blocks, each one layer of the model."""
    width: Count = 128
    """Features a token has between layers; a multiple of `heads`."""
    heads: Count = 4
    """Attention heads."""
    context: Count = 128
    """Tokens in a sequence."""
    vocabulary: Annotated[int, Meta(ge=256, le=2**24, description="a whole number from 256 to 16777216")] = 256
    """Different tokens. Text is read as bytes: 256 is what it takes."""
    mlp: Count = 4
    """Width of the MLP's hidden layer, in multiples of `width`."""
    dropout: Fraction = 0.0
    """Probability with which an activation is dropped."""
    hugging_face: Text | None = None
    """A decoder model of transformers instead: a folder with its config.json and its weights, or a config.json alone,
    for random weights. Of the other keys only `context` and `options` count; the latter replace keys of its config."""
    torchtitan: Text | None = None
    """A model of torchtitan instead, such as "llama3/8B". Of the other keys only `context` and `options` count."""
    options: Options = {}
    """The free table `[model.options]`: whatever a model of the user's own wants to be told."""

    def __hash__(self) -> int:
        return hash(msgspec.json.encode(self))

    def __post_init__(self) -> None:
        _require_json("model.options", self.options)
        if self.width % self.heads:
            raise ValueError(f"model.width is {self.width}; expected a multiple of model.heads, {self.heads}")


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of `[[training.parameter_groups]]`: options of the optimizer for some parameters.

    What is not given is as `[training]` says.
    """

    parameters: Text
    """Pattern of names, `LAYER.NAME` as in the run's `parameters/`: `*` is any text, `?` a character, `[0-9]` one of
    these. A parameter belongs to the first group that matches."""
    learning_rate: Positive | None = None
    """The schedule scales it like that of the other parameters."""
    weight_decay: NotNegative | None = None
    """Of matrices and vectors alike."""
    betas: tuple[Fraction, Fraction] | None = None
    epsilon: Positive | None = None
    momentum: Fraction | None = None
    optimizer: Literal["adamw", "muon"] | None = None
    """Of a run with Muon, what steps them. Default: Muon for matrices of all layers but the first and the last."""


class MuonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[training.muon]`: options of Muon, for what it steps; they mean what `torch.optim.Muon` means by them."""

    learning_rate: Positive | None = None
    """Default: as `[training]` says for all."""
    momentum: Fraction = 0.95
    nesterov: bool = True
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Of the polynomial by which a matrix becomes orthogonal."""
    steps: Annotated[int, Meta(ge=1, lt=100, description="a whole number from 1 to 99")] = 5
    """How often it is applied."""
    epsilon: Positive = 1e-7
    """The least norm that a matrix is divided by."""
    adjust: Literal["original", "match_rms_adamw"] = "original"
    """How a matrix's shape scales its learning rate."""
    dtype: Literal["bf16", "float32"] = "bf16"
    """In which a matrix becomes orthogonal; torch has bf16 only."""


Coefficients = tuple[NotNegative, NotNegative, NotNegative]


class LengthCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[training.length_costs]`: what micro-batches take by the lengths of their documents, layer by layer.

    Seconds: of themselves, by a token, and by the square of a document's length, which is what attention does.
    """

    forward: tuple[Coefficients, ...]
    backward_input: tuple[Coefficients, ...]
    backward_weight: tuple[Coefficients, ...]
    error: NotNegative = 0.0
    """Of the fit: the root of the mean square of (fitted / measured - 1)."""

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward_input) == len(self.backward_weight):
            raise ValueError("training.length_costs: its three lists differ in length")

    def of(self, kind: OpKind) -> tuple[Coefficients, ...]:
        """What F, I or W takes, by layer."""
        return {OpKind.F: self.forward, OpKind.I: self.backward_input, OpKind.W: self.backward_weight}[kind]


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job file's `[training]` table."""

    iterations: Iterations = 20
    """Optimizer steps."""
    batch: Count = 4
    """Sequences in a micro-batch."""
    optimizer: Text = "adamw"
    """Which optimizer: "adamw", "sgd", "muon" (with AdamW for embeddings, heads and vectors), or `module:function` for
    one of the user's own (`runtime.model.state.undoable_steps`)."""
    learning_rate: Positive = 1e-3
    """Step size; where there is a schedule, the highest."""
    learning_rate_schedule: LearningRateSchedule = "constant"
    """How the learning rate goes on after warm-up: "constant"; "linear" or "cosine", down to `final_learning_rate`;
    "wsd" (warm-up, stable, decay): constant, then linear over the last `decay_iterations`. Or `module:function`, called
    with this table and the iteration's number, gives what `learning_rate` is multiplied by; with warm-up and all."""
    warmup_iterations: Iterations = 0
    """The learning rate rises linearly over so many iterations, and has its full value in the last of them."""
    decay_iterations: Some | None = None
    """Of the schedule "wsd". Default: a tenth of `schedule_iterations`."""
    final_learning_rate: NotNegative | None = None
    """What the schedule comes to after `schedule_iterations`. Default: 0."""
    schedule_iterations: Some | None = None
    """How long the schedule takes, with warm-up; it stays at its end afterwards. Default: `iterations`. To be given
    where a run is to be continued with more iterations later."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the gradient's first and second moment."""
    epsilon: Positive = 1e-8
    """AdamW's guard against division by zero."""
    amsgrad: bool = False
    """AdamW divides by the largest second moment so far (torch's option of this name)."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices; vectors (norms, biases) have none. Decoupled with AdamW."""
    momentum: Fraction = 0.0
    """SGD's momentum."""
    dampening: Fraction = 0.0
    """Of SGD's momentum."""
    nesterov: bool = False
    """SGD with Nesterov's momentum."""
    maximize: bool = False
    """Steps go up the gradient: the loss is to grow."""
    muon: Annotated[MuonConfig, Meta(description="a table of Muon's options")] = MuonConfig()
    """`[training.muon]`: options of Muon."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """`[[training.parameter_groups]]`: options for some parameters, by patterns of their names."""
    clip_norm: Positive | None = None
    """Gradients are scaled down to this norm over all parameters when theirs is larger."""
    skip_nonfinite: bool = False
    """An iteration with a gradient that is infinite or no number makes no step, where else it would ruin parameters."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1, description="a whole number from 0 to 2^63 - 1")] = 0
    """Every random choice derives from it: initial parameters, the text's cuts, dropout."""
    dtype: DtypeName = "float32"
    """Of parameters and arithmetic; "bf16" is bfloat16 autocast over float32 parameters."""
    master_weights: bool = False
    """With "bf16": parameters are bfloat16, too, without autocast, and the optimizer steps float32 ones of its own."""
    reduce_dtype: Literal["float32", "bf16"] = "float32"
    """In which gradients are added up and reduced, with `master_weights`."""
    shard_optimizer: bool = False
    """Whether the workers that hold a layer share its optimizer state: each keeps a part, and a copy of another's."""
    backend: BackendName = "auto"
    """What carries tensors between workers; "auto": nccl where every worker has a GPU of its own, else gloo."""
    share_devices: bool = False
    """Whether workers that have to share a GPU communicate over NCCL, too: each then takes the others for workers of
    other machines, and tensors pass over the network's loopback. Without it they go over gloo and pinned memory."""
    device: DeviceName = "auto"
    """Where workers compute; "auto": on GPUs where there are any."""
    text: Text | None = None
    """Path of the text to train on; by default the Python standard library's own sources. Without a `tokenizer`, bytes
    are tokens, and each sample begins anywhere."""
    tokenizer: Text | None = None
    """Path of a tokenizer.json (of the package tokenizers), by which `text` becomes tokens."""
    tokens: Text | None = None
    """Path of a file of tokens, instead of `text`: flat numbers, as nanoGPT writes them, or Megatron's .bin with its
    .idx beside it."""
    token_dtype: TokenDtype | None = None
    """Of the numbers in `tokens`, little-endian. Default: what an .idx says, else "uint16"."""
    shuffle: bool = True
    """Whether each epoch reads the samples of `tokens`, or of tokenized `text`, in an order of its own."""
    document_end: Annotated[int, Meta(ge=0, lt=2**24, description="a token: a whole number from 0")] | None = None
    """The token that ends each document of `tokens`, or of tokenized `text`: tokens then see those before them in their
    document only, positions begin anew with each, and what follows its end is not predicted."""
    data: Source | None = None
    """Data of the user's own instead of a text: `module:function`, called with the RunConfig and giving a
    `runtime.model.data.data.Data`, or `IterationData`. "torchtitan": its tokenizer and data set
    (`runtime.model.data.torchtitan_data`)."""
    deal_swaps: Annotated[int, Meta(ge=0, le=10**6, description="a whole number from 0 to 1000000")] = 6000
    """Where data tell what samples cost: how many swaps of two samples are tried, in each iteration, to make it
    shorter; fewer where that would take longer than half of it. 0: each sample keeps its name."""
    length_costs: Annotated[LengthCosts, Meta(description=(
        "a table with lists of equal length, one entry a layer, as `slipstream profile` writes it"))] | None = None
    """`[training.length_costs]`: what samples cost by the lengths of their documents, where data tell these."""
    loss_weights: Literal["microbatches", "tokens"] = "microbatches"
    """How micro-batches' mean losses make up an iteration's: all alike, or by the tokens that each is a mean of, which
    data then tell."""
    recompute: Recompute = "none"
    """Layers whose activations are not kept but computed again before their backward: "none", "full" (all), or a list
    of layers' numbers. It takes less memory, and another forward. "attention", "mlp", also in the list: these parts of
    all other layers. "auto": the layers of the stages for which the planner finds that it shortens the period, where
    memory is tight; without a planner as "none"."""
    compile: bool = False
    """Whether layers are compiled by torch.compile, when each kind of them is first run; its cache on disk makes that
    shorter the next time. Of the GPT that comes with the package, and gpt2 of transformers."""
    evaluate_every: Some | None = None
    """After every so many iterations, the loss of validation data is computed, with the parameters as they then are."""
    evaluation_iterations: Count = 1
    """How many samples an evaluation reads: so many times those of an iteration, the same ones each time."""
    validation_text: Text | None = None
    """Path of a text to evaluate on, read as `text` is, but in order."""
    validation_tokens: Text | None = None
    """Path of a file of tokens to evaluate on, read as `tokens` is, but in order."""
    validation_data: Reference | None = None
    """Data of the user's own to evaluate on, as `data`."""
    options: Options = {}
    """`[training.options]`: a table for data and optimizers of the user's own, of whatever keys they want."""
    peak_flops: Annotated[float, Meta(gt=0, le=1e18, description="a number above 0, at most 1e18")] | None = None
    """Operations per second that a worker's device does at its best in this `dtype`, by its data sheet: what MFU is a
    share of. Default: known for some GPUs with "bf16", else there is no MFU."""
    threads: Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")] = 1
    """CPU threads a worker computes with."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 1
    """How many processes a worker is, each with a device of its own and its shard of each layer."""

    def __hash__(self) -> int:
        return hash(msgspec.json.encode(self))  # a table has no hash of its own

    def __post_init__(self) -> None:
        schedule, end = self.learning_rate_schedule, self.schedule_iterations or self.iterations
        decay = self.decay_iterations or 0
        if self.iterations < 0:
            raise ValueError(f"training.iterations is {self.iterations}; expected a whole number from 0")
        if self.warmup_iterations > end:
            raise ValueError(f"training.warmup_iterations is {self.warmup_iterations}, and the schedule takes {end} "
                             "iterations; expected no more, or a training.schedule_iterations of its own")
        own = ":" in schedule
        if own and (self.warmup_iterations or self.final_learning_rate is not None):
            raise ValueError(f"training.learning_rate_schedule is {schedule!r}, and warmup_iterations or "
                             "final_learning_rate are given; expected the function to have all of it")
        if decay and schedule != "wsd":
            raise ValueError(f"training.decay_iterations is {decay}, and learning_rate_schedule {schedule!r}; expected "
                             "it with 'wsd' only")
        if decay > end - self.warmup_iterations:
            raise ValueError(f"training.decay_iterations is {decay}; expected at most {end - self.warmup_iterations}, "
                             f"as warm-up takes {self.warmup_iterations} of {end} iterations")
        if self.final_learning_rate is not None and schedule == "constant":
            raise ValueError(f"training.final_learning_rate is {self.final_learning_rate}, and learning_rate_schedule "
                             "'constant'; expected another schedule")
        if self.master_weights and self.dtype != "bf16":
            raise ValueError(f"training.master_weights is true, and training.dtype {self.dtype!r}; expected 'bf16'")
        if self.reduce_dtype != "float32" and not self.master_weights:
            raise ValueError(f"training.reduce_dtype is {self.reduce_dtype!r}, and there are no master_weights; "
                             "expected them, or 'float32'")
        if self.compile and self.recompute not in ("none", ()):
            raise ValueError("training.compile is true, and recompute is given; expected one of them: compiled code "
                             "chooses by itself what it keeps, and is no part of a forward that is run again")
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(f"training.compile is true, and tensor_parallel {self.tensor_parallel}; expected one of "
                             "them, as ranks that compile would keep the others of their worker waiting")
        _require_json("training.options", self.options)
        if self.tokens is not None and self.text is not None and self.data is None:
            raise ValueError("training.tokens and training.text are both given; expected one of them")
        if self.tokenizer is not None and self.text is None:
            raise ValueError(f"training.tokenizer is {self.tokenizer!r}, and training.text is not given; expected the "
                             "text that it is for")
        if self.document_end is not None and (self.data is not None or not (self.tokens or self.tokenizer)):
            raise ValueError(f"training.document_end is {self.document_end}; expected it with training.tokens, or a "
                             "training.tokenizer; own data give position_ids")
        validation = [self.validation_text, self.validation_tokens, self.validation_data]
        if self.evaluate_every is not None and not any(validation):
            raise ValueError(f"training.evaluate_every is {self.evaluate_every}, and there is nothing to evaluate on; "
                             "expected validation_text, validation_tokens or validation_data")
        if self.evaluate_every is None and any(validation):
            raise ValueError("training.evaluate_every is not given, and validation data are; expected both or neither")
        if sum(one is not None for one in validation) > 1:
            raise ValueError("training.validation_text, validation_tokens and validation_data: expected one of them")
        muon = self.muon != MuonConfig() or any(group.optimizer for group in self.parameter_groups)
        if muon and self.optimizer != "muon":
            raise ValueError(f"training.optimizer is {self.optimizer!r}, and options of Muon are given; expected "
                             "'muon'")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError("training.nesterov is true; expected a momentum above 0, and no dampening")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that a worker must know besides the schedule."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()

    def to_json(self) -> str:
        """One line of JSON; `from_json` reads it back to an equal value."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "RunConfig":
        """Read what `to_json` wrote. Raises ConfigError."""
        try:
            return _RUN_CONFIG.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"no readable run configuration: {error}") from None


_RUN_CONFIG = msgspec.json.Decoder(RunConfig)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def parse_run_config(model: Mapping[str, object], training: Mapping[str, object], **overrides: object) -> RunConfig:
    """Check the job file's `[model]` and `[training]` tables.

    `overrides` replace keys of `[training]`, as command line options do; those that are None are ignored. Raises
    ConfigError naming the key, its value and what was expected.
    """
    named = next((key for key in ("hugging_face", "torchtitan") if key in model), None)
    if named is not None:
        others = model.keys() - {named, "context", "options"}
        if others:
            raise ConfigError(f"model.{min(others)} is given beside model.{named}, whose config says what the model "
                              "is; [model.options] can change keys of that")
        if named == "hugging_face":
            model = _with_vocabulary(model)
    given = {key: value for key, value in overrides.items() if value is not None}
    return RunConfig(model=_table("model", model, ModelConfig),
                     training=_table("training", {**training, **given}, TrainingConfig))


def _with_vocabulary(model: Mapping[str, Any]) -> Mapping[str, object]:
    """What data must know of a model of transformers. One that cannot be read is refused when it is made."""
    path = Path(str(model["hugging_face"]))
    with suppress(OSError, msgspec.DecodeError):
        found = _OBJECT.decode((path / "config.json" if path.is_dir() else path).read_bytes())
        options = model.get("options")
        size = {**found, **(options if isinstance(options, dict) else {})}.get("vocab_size")
        if size is not None:
            return {**model, "vocabulary": size}
    return model


def _table(name: str, values: Mapping[str, object], kind: type[_Table]) -> _Table:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(name, values, kind, str(error))) from None
