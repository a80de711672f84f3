"""Check the `[model]` and `[training]` tables of a job file, and hold their settings.

A `RunConfig` travels to worker processes as JSON, in `runtime.processes.worker_start.WorkerSpec`.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from slipstream.runtime.config_errors import explain_validation_error
from slipstream.runtime.errors import ConfigError as ConfigError
from slipstream.schedules.schedule import OpKind

DtypeName = Literal["float32", "float64", "bf16"]
BackendName = Literal["auto", "gloo", "nccl"]
DeviceName = Literal["auto", "cpu", "cuda"]
TokenDtype = Literal["uint16", "uint32", "int32"]

Count = Annotated[int, Meta(ge=1, le=2**20, description="a whole number from 1 to 1048576")]
Iterations = Annotated[
    int, Meta(ge=0, le=2**40, description="a whole number from 0 to 1099511627776")
]
PositiveIterations = Annotated[
    int, Meta(ge=1, le=2**40, description="a whole number from 1 to 1099511627776")
]
Positive = Annotated[float, Meta(gt=0, le=1e6, description="a number above 0, at most 1e6")]
NotNegative = Annotated[float, Meta(ge=0, le=1e6, description="a number from 0 to 1e6")]
Fraction = Annotated[float, Meta(ge=0, lt=1, description="a number from 0 to below 1")]
Text = Annotated[
    str, Meta(min_length=1, max_length=4096, description="a text of 1 to 4096 characters")
]

Reference = Annotated[
    str,
    Meta(
        pattern=r"^[\w.]+:[\w.]+$",
        max_length=4096,
        description=("the name of a function, as 'module:function'"),
    ),
]
LearningRateSchedule = Annotated[
    str,
    Meta(
        pattern=r"^(constant|linear|cosine|wsd|[\w.]+:[\w.]+)$",
        max_length=4096,
        description=(
            "one of 'constant', 'linear', 'cosine', 'wsd', or the name of a function, as "
            "'module:function'"
        ),
    ),
]
Source = Annotated[
    str,
    Meta(
        pattern=r"^(torchtitan|[\w.]+:[\w.]+)$",
        max_length=4096,
        description=("the name of a function, as 'module:function', or 'torchtitan'"),
    ),
]
Recompute = Annotated[
    Literal["none", "full", "auto", "attention", "mlp"]
    | tuple[Annotated[int, Meta(ge=0, le=2**20)] | Literal["attention", "mlp"], ...],
    Meta(
        description=(
            "'none', 'full', 'auto', 'attention', 'mlp', or a list of layers' numbers and of these "
            "parts"
        )
    ),
]
Options = Annotated[dict[str, Any], Meta(description="a table")]

_Table = TypeVar("_Table", bound=msgspec.Struct)


def _require_json(name: str, options: Mapping[str, Any]) -> None:
    if msgspec.json.decode(msgspec.json.encode(options)) != options:
        raise ValueError(
            f"{name} has a date, or a number that is not finite; expected texts, numbers, true, "
            "false, lists and tables"
        )


BYTES = 256
"""Number of different bytes, each a token where text is read as bytes."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the model: the job file's `[model]` table."""

    name: Text = "gpt"
    """The model: "gpt", or `module:function` for a model of your own.

    The function is a `runtime.models.layered_model.ModelFactory`.
    """
    blocks: Annotated[int, Meta(ge=1, le=10_000, description="a whole number from 1 to 10000")] = 4
    """Number of transformer blocks; each is one layer of the model."""
    width: Count = 128
    """Number of features of a token between layers; a multiple of `heads`."""
    heads: Count = 4
    """Number of attention heads."""
    context: Count = 128
    """Number of tokens in a sequence."""
    vocabulary: Annotated[
        int, Meta(ge=1, le=2**24, description="a whole number from 1 to 16777216")
    ] = 256
    """Number of different tokens.

    Text that is read as bytes needs at least 256, unless the model is your own.
    """
    mlp: Count = 4
    """Width of the MLP's hidden layer, in multiples of `width`."""
    dropout: Fraction = 0.0
    """Probability with which an activation is dropped."""
    hugging_face: Text | None = None
    """Decoder model of transformers to train instead.

    The path is of a folder with a config.json and weights, or of a config.json alone, for random
    weights. Of the other keys of `[model]` only `context` and `options` may be given; `options`
    replaces keys of that config.
    """
    torchtitan: Text | None = None
    """Model of torchtitan to train instead, such as "llama3/8B".

    Of the other keys of `[model]` only `context` and `options` may be given; `options` may have
    `arguments`, `attention` and `checkpoint`.
    """
    options: Options = {}
    """Table `[model.options]`, with any keys that a model of your own reads."""

    def __hash__(self) -> int:
        return hash(msgspec.json.encode(self))

    def __post_init__(self) -> None:
        _require_json("model.options", self.options)
        if self.width % self.heads:
            raise ValueError(
                f"model.width is {self.width}; expected a multiple of model.heads, {self.heads}"
            )


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An entry of `[[training.parameter_groups]]`: optimizer options for some parameters.

    Options that are not given have the value of `[training]`, or for Muon of `[training.muon]`.
    """

    parameters: Text
    """Pattern for parameter names, which are `LAYER.NAME` as in the run's `parameters/`.

    `*` matches any text, `?` one character, `[0-9]` one of these. A parameter belongs to the first
    group that matches.
    """
    learning_rate: Positive | None = None
    """Highest learning rate of these parameters."""
    weight_decay: NotNegative | None = None
    """Weight decay of matrices and vectors alike."""
    betas: tuple[Fraction, Fraction] | None = None
    epsilon: Positive | None = None
    momentum: Fraction | None = None
    optimizer: Literal["adamw", "muon"] | None = None
    """Optimizer of these parameters in a run with Muon.

    Default: Muon for matrices of all layers except the first and the last, otherwise AdamW.
    """


class MuonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[training.muon]`: options of `torch.optim.Muon`."""

    learning_rate: Positive | None = None
    """Highest learning rate of the parameters that Muon steps; None: that of `[training]`."""
    momentum: Fraction = 0.95
    nesterov: bool = True
    coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Coefficients of the Newton-Schulz polynomial that makes a matrix orthogonal."""
    steps: Annotated[int, Meta(ge=1, lt=100, description="a whole number from 1 to 99")] = 5
    """Number of times that the Newton-Schulz polynomial is applied in an optimizer step."""
    epsilon: Positive = 1e-7
    """Smallest norm by which a matrix is divided before it is made orthogonal."""
    adjust: Literal["original", "match_rms_adamw"] = "original"
    """Rule by which the shape of a matrix scales its learning rate, as in `torch.optim.Muon`."""
    dtype: Literal["bf16", "float32"] = "bf16"
    """Dtype in which a matrix is made orthogonal; torch has only bf16."""


Coefficients = tuple[NotNegative, NotNegative, NotNegative]


class LengthCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[training.length_costs]`: seconds of F, I and W by lengths of documents.

    Each layer has three coefficients: seconds for a sample, for a token, and, because of attention,
    for the square of a document's length.
    """

    forward: tuple[Coefficients, ...]
    backward_input: tuple[Coefficients, ...]
    backward_weight: tuple[Coefficients, ...]
    error: NotNegative = 0.0
    """Relative error of fitted seconds: root mean square of fitted / measured - 1."""

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward_input) == len(self.backward_weight):
            raise ValueError("training.length_costs: its three lists differ in length")

    def coefficients_for(self, kind: OpKind) -> tuple[Coefficients, ...]:
        """Return the three coefficients of each layer for F, I or W."""
        # Lists in TOML are named after the ops.
        return {
            OpKind.F: self.forward,
            OpKind.I: self.backward_input,
            OpKind.W: self.backward_weight,
        }[kind]


class TrainingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the training: the job file's `[training]` table."""

    iterations: Iterations = 20
    """Number of optimizer steps."""
    batch: Count = 4
    """Number of sequences in a micro-batch."""
    optimizer: Text = "adamw"
    """The optimizer: "adamw", "sgd", "muon", or `module:function` for one of your own.

    With "muon", AdamW steps embeddings, heads and vectors. The function is an `OptimizerFactory`
    (`runtime.state.undoable_steps`).
    """
    learning_rate: Positive = 1e-3
    """Step size of the optimizer; with a learning rate schedule, the highest one."""
    learning_rate_schedule: LearningRateSchedule = "constant"
    """Course of the learning rate after warm-up.

    "constant"; "linear" or "cosine", down to `final_learning_rate`; "wsd" (warm-up, stable, decay),
    constant and then falling linearly over the last `decay_iterations`; or `module:function`. The
    function is called with this table and the number of the iteration, and returns the factor for
    `learning_rate`, warm-up included.
    """
    warmup_iterations: Iterations = 0
    """Number of first iterations in which the learning rate rises linearly to its full value."""
    decay_iterations: PositiveIterations | None = None
    """Number of last iterations in which "wsd" falls. Default: a tenth of `schedule_iterations`."""
    final_learning_rate: NotNegative | None = None
    """Learning rate at the end of the schedule, after `schedule_iterations`. Default: 0."""
    schedule_iterations: PositiveIterations | None = None
    """Length of the learning rate schedule in iterations, warm-up included.

    Afterwards the rate keeps its final value. Default: `iterations`. Give it if the run will be
    continued with more iterations later.
    """
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's decay rates of the gradient's first and second moment."""
    epsilon: Positive = 1e-8
    """AdamW's guard against division by zero."""
    amsgrad: bool = False
    """If true, AdamW divides by the largest second moment so far, as in torch."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices; vectors (norms, biases) have none. Decoupled with AdamW."""
    momentum: Fraction = 0.0
    """Momentum factor of SGD."""
    dampening: Fraction = 0.0
    """Dampening of SGD's momentum."""
    nesterov: bool = False
    """If true, SGD uses Nesterov's momentum."""
    maximize: bool = False
    """If true, steps maximize the loss instead of minimizing it."""
    muon: Annotated[MuonConfig, Meta(description="a table of Muon's options")] = MuonConfig()
    """The table `[training.muon]`: options of Muon."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """The entries of `[[training.parameter_groups]]`: options for some parameters."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient over all parameters.

    A larger gradient is scaled down to it. Default: no clipping.
    """
    skip_nonfinite: bool = False
    """If true, an iteration with an infinite or NaN gradient makes no step."""
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1, description="a whole number from 0 to 2^63 - 1")
    ] = 0
    """Seed of every random choice: initial parameters, samples of the text, dropout."""
    dtype: DtypeName = "float32"
    """Dtype of parameters and arithmetic.

    "bf16" is bfloat16 autocast over float32 parameters, unless `master_weights` is true.
    """
    master_weights: bool = False
    """If true, the optimizer steps its own float32 copies of bfloat16 parameters.

    Arithmetic is then bfloat16 without autocast. Needs `dtype` "bf16".
    """
    reduce_dtype: Literal["float32", "bf16"] = "float32"
    """Dtype in which gradients are accumulated and reduced with `master_weights`."""
    shard_optimizer: bool = False
    """If true, the workers that hold a layer share its optimizer state.

    Each worker keeps one part, and a copy of another worker's part.
    """
    backend: BackendName = "auto"
    """Transport of tensors between workers.

    "auto": nccl if every worker process has a GPU of its own, or with `share_devices`, else gloo.
    """
    share_devices: bool = False
    """If true, workers that share a GPU use NCCL, as if on several machines.

    Tensors then pass over the network's loopback. If false, workers that share a GPU use gloo and
    pinned host memory.
    """
    device: DeviceName = "auto"
    """Device of the workers; "auto": GPUs if there are any, else CPUs."""
    text: Text | None = None
    """Path of the text to train on.

    Default: the Python standard library's sources. Without a `tokenizer`, bytes are tokens, and
    each sample begins at a random place.
    """
    tokenizer: Text | None = None
    """Path of a tokenizer.json (of the package tokenizers) that turns `text` into tokens."""
    tokens: Text | None = None
    """Path of a file of tokens to train on instead of `text`.

    The file has flat numbers, as nanoGPT writes them, or is Megatron's .bin with its .idx in the
    same folder.
    """
    token_dtype: TokenDtype | None = None
    """Dtype of the numbers in `tokens`, little-endian.

    Default: the dtype that Megatron's .idx names; without one, "uint16".
    """
    shuffle: bool = True
    """If true, each pass over the samples of tokens has a new random order."""
    document_end: (
        Annotated[int, Meta(ge=0, lt=2**24, description="a token: a whole number from 0")] | None
    ) = None
    """Token that ends each document of `tokens`, or of tokenized `text`.

    With it, tokens attend to earlier tokens of their own document only, positions begin again with
    each document, and the token after an end is not predicted.
    """
    data: Source | None = None
    """Data of your own instead of a text: `module:function`, or "torchtitan".

    The function is called with the `RunConfig`, and returns a `runtime.data.data.Data` or an
    `IterationData`. "torchtitan" is its tokenizer and data set (`runtime.data.torchtitan_data`).
    """
    deal_swaps: Annotated[
        int, Meta(ge=0, le=10**6, description="a whole number from 0 to 1000000")
    ] = 6000
    """Number of swaps of two samples that dealing tries, to shorten an iteration.

    Swaps are tried only if costs of samples are known, and fewer if so many would take longer than
    a second or half of the iteration. 0: samples are not dealt.
    """
    length_costs: (
        Annotated[
            LengthCosts,
            Meta(
                description=(
                    "a table with lists of equal length, one entry a layer, as `slipstream "
                    "profile` writes it"
                )
            ),
        ]
        | None
    ) = None
    """The table `[training.length_costs]`: cost of samples by their documents' lengths."""
    loss_weights: Literal["microbatches", "tokens"] = "microbatches"
    """Weight of each micro-batch's mean loss in the loss of an iteration.

    "microbatches": all weigh the same. "tokens": each weighs as much as the number of tokens over
    which its loss is the mean; the data must provide these numbers.
    """
    recompute: Recompute = "none"
    """Layers whose activations are recomputed before their backward instead of stored.

    "none", "full" (all), or a list of layers' numbers. Recomputing saves memory and costs one more
    forward. "attention" and "mlp", alone or in the list: these parts of all layers that the list
    does not name. "auto": the planner chooses the stages for which recomputing shortens the period
    when memory is tight; without a planner, "auto" is "none".
    """
    compile: bool = False
    """If true, torch.compile compiles the layers, each kind when it is first run.

    A cache on disk shortens compiling in the next run. Possible for the GPT of this package, for
    gpt2, llama, mistral, qwen2 and qwen3 of transformers, and for torchtitan's models without
    experts or masks of documents.
    """
    evaluate_every: PositiveIterations | None = None
    """Iterations from one evaluation on validation data to the next. Default: none."""
    evaluation_iterations: Count = 1
    """Length of an evaluation in iterations; each evaluation reads the same samples."""
    validation_text: Text | None = None
    """Path of a text to evaluate on, read like `text`; with a `tokenizer`, in order."""
    validation_tokens: Text | None = None
    """Path of a file of tokens to evaluate on, read like `tokens`, but in order."""
    validation_data: Reference | None = None
    """Data of your own to evaluate on, given like `data`."""
    options: Options = {}
    """Table `[training.options]`, with any keys that data or optimizers of your own read."""
    peak_flops: (
        Annotated[float, Meta(gt=0, le=1e18, description="a number above 0, at most 1e18")] | None
    ) = None
    """Peak operations per second of a worker's device in this `dtype`, by its data sheet.

    The MFU in `metrics.jsonl` is a share of this peak. Default: a known value for some GPUs with
    "bf16"; without one, no MFU is computed.
    """
    threads: Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")] = 1
    """Number of CPU threads that a worker computes with."""
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="a whole number from 1 to 64")
    ] = 1
    """Number of processes of a worker, which share each layer, one device each."""

    def __hash__(self) -> int:
        return hash(msgspec.json.encode(self))  # a table has no hash of its own

    def __post_init__(self) -> None:
        # The course of the learning rate: are its parts no longer than the whole?
        schedule, end = self.learning_rate_schedule, self.schedule_iterations or self.iterations
        decay = self.decay_iterations or 0
        if self.iterations < 0:
            raise ValueError(
                f"training.iterations is {self.iterations}; expected a whole number from 0"
            )
        if self.warmup_iterations > end:
            raise ValueError(
                f"training.warmup_iterations is {self.warmup_iterations}, and the schedule takes "
                f"{end} iterations; expected at most that, or a larger training.schedule_iterations"
            )
        # A function computes the whole course by itself.
        is_function = ":" in schedule
        if is_function and (self.warmup_iterations or self.final_learning_rate is not None):
            raise ValueError(
                f"training.learning_rate_schedule is {schedule!r}, and warmup_iterations or "
                "final_learning_rate are given; expected neither, as the function has all of it"
            )
        if decay and schedule != "wsd":
            raise ValueError(
                f"training.decay_iterations is {decay}, and learning_rate_schedule {schedule!r}; "
                "expected it with 'wsd' only"
            )
        if decay > end - self.warmup_iterations:
            raise ValueError(
                f"training.decay_iterations is {decay}; expected at most "
                f"{end - self.warmup_iterations}, as warm-up takes {self.warmup_iterations} of "
                f"{end} iterations"
            )
        if self.final_learning_rate is not None and schedule == "constant":
            raise ValueError(
                f"training.final_learning_rate is {self.final_learning_rate}, and "
                "learning_rate_schedule 'constant'; expected another schedule"
            )
        # The arithmetic: settings that only some dtypes and some code can carry out.
        if self.master_weights and self.dtype != "bf16":
            raise ValueError(
                f"training.master_weights is true, and training.dtype {self.dtype!r}; expected "
                "'bf16'"
            )
        if self.reduce_dtype != "float32" and not self.master_weights:
            raise ValueError(
                f"training.reduce_dtype is {self.reduce_dtype!r}, and there are no master_weights; "
                "expected them, or 'float32'"
            )
        if self.compile and self.recompute not in ("none", ()):
            raise ValueError(
                "training.compile is true, and recompute is given; expected one of them: compiled "
                "code decides by itself what it stores, and cannot be recomputed"
            )
        if self.compile and self.tensor_parallel > 1:
            raise ValueError(
                f"training.compile is true, and tensor_parallel {self.tensor_parallel}; expected "
                "one of them, as ranks that compile would keep the others of their worker waiting"
            )
        _require_json("training.options", self.options)
        # The data: one source for training, and another if the model is evaluated.
        if self.tokens is not None and self.text is not None and self.data is None:
            raise ValueError(
                "training.tokens and training.text are both given; expected one of them"
            )
        if self.tokenizer is not None and self.text is None:
            raise ValueError(
                f"training.tokenizer is {self.tokenizer!r}, and training.text is not given; "
                "expected the text that it is for"
            )
        # Documents end where a token says so, which text read as bytes does not have.
        if self.document_end is not None and (
            self.data is not None or not (self.tokens or self.tokenizer)
        ):
            raise ValueError(
                f"training.document_end is {self.document_end}; expected it with training.tokens, "
                "or a training.tokenizer; data of your own give position_ids instead"
            )
        validation = [self.validation_text, self.validation_tokens, self.validation_data]
        if self.evaluate_every is not None and not any(validation):
            raise ValueError(
                f"training.evaluate_every is {self.evaluate_every}, and there is nothing to "
                "evaluate on; expected validation_text, validation_tokens or validation_data"
            )
        if self.evaluate_every is None and any(validation):
            raise ValueError(
                "training.evaluate_every is not given, and validation data are; expected both or "
                "neither"
            )
        if sum(source is not None for source in validation) > 1:
            raise ValueError(
                "training.validation_text, validation_tokens and validation_data: expected one of "
                "them"
            )
        # The optimizer: options that it would ignore.
        muon = self.muon != MuonConfig() or any(group.optimizer for group in self.parameter_groups)
        if muon and self.optimizer != "muon":
            raise ValueError(
                f"training.optimizer is {self.optimizer!r}, and options of Muon are given; "
                "expected 'muon'"
            )
        # Nesterov's momentum is defined for these only, as in torch.
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                "training.nesterov is true; expected a momentum above 0, and no dampening"
            )


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of a run: everything that a worker needs in addition to the schedule."""

    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()

    def to_json(self) -> str:
        """Return this configuration as one line of JSON, for `from_json`."""
        return msgspec.json.encode(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "RunConfig":
        """Read the JSON that `to_json` wrote. Raises ConfigError."""
        try:
            return _RUN_CONFIG.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the run configuration cannot be read: {error}") from None


_RUN_CONFIG = msgspec.json.Decoder(RunConfig)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def parse_run_config(
    model: Mapping[str, object], training: Mapping[str, object], **overrides: object
) -> RunConfig:
    """Check the job file's `[model]` and `[training]` tables, and return them as a `RunConfig`.

    Keyword arguments that are not None replace keys of `[training]`. With `model.hugging_face`, the
    vocabulary is that of its config.json, if this can be read. Raises ConfigError that names the
    key, its value and what was expected.
    """
    # A model of another library has its own config: keys that describe a GPT would be ignored.
    source = next((key for key in ("hugging_face", "torchtitan") if key in model), None)
    if source is not None:
        others = model.keys() - {source, "context", "options"}
        if others:
            raise ConfigError(
                f"model.{min(others)} is given together with model.{source}, whose config defines "
                "the model; use [model.options] to change keys of that config"
            )
        if source == "hugging_face":
            model = _with_vocabulary_size(model)
    # Options of the command line go before the job file.
    replaced = {key: value for key, value in overrides.items() if value is not None}
    config = RunConfig(
        model=_convert_table("model", model, ModelConfig),
        training=_convert_table("training", {**training, **replaced}, TrainingConfig),
    )
    _require_byte_vocabulary(config)
    return config


def _require_byte_vocabulary(config: RunConfig) -> None:
    """Raise ConfigError if text is read as bytes, of which the vocabulary is too small."""
    # A model of the user's own may count its tokens in another way.
    model, training = config.model, config.training
    is_own = ":" in model.name and model.hugging_face is None and model.torchtitan is None
    if (
        model.vocabulary < BYTES
        and not is_own
        and not (training.data or training.tokens or training.tokenizer)
    ):
        raise ConfigError(
            f"model.vocabulary is {model.vocabulary}, and text is read as bytes; expected a whole "
            f"number from {BYTES}, or training.tokens, training.tokenizer or training.data"
        )


def _with_vocabulary_size(model: Mapping[str, Any]) -> Mapping[str, object]:
    # If the model's config cannot be read, the table is returned unchanged; building the model then
    # raises the error.
    # `_require_byte_vocabulary` checks the size, which only the model's own config has.
    path = Path(str(model["hugging_face"]))
    with suppress(OSError, msgspec.DecodeError):
        config = _OBJECT.decode((path / "config.json" if path.is_dir() else path).read_bytes())
        options = model.get("options")
        size = {**config, **(options if isinstance(options, dict) else {})}.get("vocab_size")
        if size is not None:
            return {**model, "vocabulary": size}
    return model


def _convert_table(name: str, values: Mapping[str, object], kind: type[_Table]) -> _Table:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(explain_validation_error(name, values, kind, str(error))) from None


def may_have_extra_tensors(training: TrainingConfig) -> bool:
    """Return whether the data may consist of more than tokens and targets."""
    return (
        training.document_end is not None
        or training.data is not None
        or training.validation_data is not None
    )
