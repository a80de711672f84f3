"""Implement `slipstream new`, which writes a job file to start from."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from typer import Option

from slipstream.cli.shared.console import complete_from, duration, err, out, print_json, refuse
from slipstream.cli.shared.options import (
    ANSWER,
    PLACEMENTS,
    SEARCH,
    Force,
    Json,
    Placement,
    Steps,
    require_choice,
    require_writable,
    take_request,
    write_or_refuse,
)
from slipstream.cli.shared.outputs import JOB
from slipstream.cli.shared.plan_summary import placement_lines
from slipstream.cli.shared.planning import find_pipeline
from slipstream.planner.job.estimate import GPUS, GpuSpec, ModelLayout, estimate_job
from slipstream.planner.job.file import MAX_RANKS, Job, JobError, parse_job
from slipstream.planner.job.model_config import FAMILIES, read_model
from slipstream.planner.job.model_shape import ModelLayers, ModelShape
from slipstream.planner.job.presets import ESTIMATED, preset_names, preset_text
from slipstream.planner.job.profiler_trace import (
    ProfilerTraceError,
    job_tables,
    read_ranges,
    stage_times,
)
from slipstream.planner.job.straggler_trace import SUFFIX, read_straggler_trace
from slipstream.planner.job.toml import job_text, round_times
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import FoundPlacement
from slipstream.planner.report import placement_report

T = TypeVar("T")
MAX_COUNT = 2**31
"""Largest number that a question accepts as an answer."""
BEGIN = "Four ways to begin"
"""Title, in the help, of the options that choose how the job is made."""
OF_TRACE = "With --trace"
"""Title, in the help, of the options for a job from a trace."""
EITHER = "With --trace, --model or --layers"
"""Title, in the help, of the options for any job but a preset."""
MODEL = "With --layers: the model"
"""Title, in the help, of the options that describe a model whose layers are alike."""
CLUSTER = "With --model or --layers: sequences and the cluster"
"""Title, in the help, of the options for an estimate of either kind of model."""

_FOR_ALL = {"out_file", "force", "json", "placement", "time_limit", "steps"}
"""Names of the options that apply to every kind of job."""
_FOR_TRACES = {
    "trace",
    "pattern",
    "pipelines",
    "microbatches",
    "transfer",
    "stage_layers",
    "workers_per_node",
    "name",
}
"""Names of the options that apply to a job from a trace."""
_FOR_SHAPES = {"layers", "hidden", "heads", "kv_heads", "ffn", "gated", "vocabulary"}
"""Names of the options that describe a model for which there is no config.json."""


class NewRequest(msgspec.Struct, frozen=True):
    """Options of one `slipstream new`, in the order of its help."""

    preset_name: Annotated[
        str | None,
        Option(
            "--preset",
            rich_help_panel=BEGIN,
            metavar="NAME",
            autocompletion=complete_from(*preset_names()),
            help=(f"Start from one of {', '.join(preset_names())}."),
        ),
    ] = None
    trace: Annotated[
        list[Path] | None,
        Option(
            rich_help_panel=BEGIN,
            metavar="FILE",
            help=(
                "Take stage times from a Chrome trace (.json, .json.gz) with ranges of F, B, I "
                "and W, such as torch's pipelines leave in the PyTorch profiler (PP:2F0) and "
                "Slipstream writes. One per rank: may be repeated. Or a .parquet file of "
                "ByteDance's StragglerAnalysis."
            ),
        ),
    ] = None
    pattern: Annotated[
        str | None,
        Option(
            rich_help_panel=OF_TRACE,
            metavar="REGEX",
            help=(
                "Names of the ranges in a trace of another tool, with groups kind (F, I, W, B), "
                "stage and microbatch."
            ),
        ),
    ] = None
    model: Annotated[
        Path | None,
        Option(
            rich_help_panel=BEGIN,
            metavar="FILE",
            help=(
                "Estimate the model of a config.json, as transformers writes it, or of the folder "
                f"with it. Its layers may be unlike. Known model types: {', '.join(FAMILIES)}."
            ),
        ),
    ] = None
    layers: Annotated[
        int | None,
        Option(
            rich_help_panel=BEGIN,
            metavar="N",
            min=1,
            max=100_000,
            help=("Estimate a transformer with so many layers, all alike."),
        ),
    ] = None
    hidden: Annotated[
        int | None,
        Option(rich_help_panel=MODEL, metavar="N", min=1, max=2**20, help=("Its hidden size.")),
    ] = None
    heads: Annotated[
        int | None,
        Option(rich_help_panel=MODEL, metavar="N", min=1, max=2**20, help=("Its attention heads.")),
    ] = None
    kv_heads: Annotated[
        int | None,
        Option(
            rich_help_panel=MODEL,
            metavar="N",
            min=1,
            max=2**20,
            help=("Its heads of keys and values. Default: as many as attention heads."),
        ),
    ] = None
    ffn: Annotated[
        int | None,
        Option(
            rich_help_panel=MODEL,
            metavar="N",
            min=1,
            max=2**24,
            help=("Width of its feed-forward part. Default: 4 x hidden size."),
        ),
    ] = None
    gated: Annotated[
        bool,
        Option(
            "--gated",
            rich_help_panel=MODEL,
            help=("Three feed-forward matrices (SwiGLU), not two."),
        ),
    ] = False
    sequence: Annotated[
        int | None,
        Option(
            rich_help_panel=CLUSTER, metavar="N", min=1, max=2**24, help=("Tokens in a sequence.")
        ),
    ] = None
    vocabulary: Annotated[
        int | None,
        Option(
            rich_help_panel=MODEL, metavar="N", min=1, max=2**24, help=("Size of its vocabulary.")
        ),
    ] = None
    gpu: Annotated[
        str | None,
        Option(
            rich_help_panel=CLUSTER, metavar="NAME", help=(f"The GPU: one of {', '.join(GPUS)}.")
        ),
    ] = None
    peak_tflops: Annotated[
        float | None,
        Option(
            rich_help_panel=CLUSTER,
            metavar="N",
            min=0.001,
            max=1e6,
            help=("Peak of another GPU, bf16."),
        ),
    ] = None
    efficiency: Annotated[
        float,
        Option(
            rich_help_panel=CLUSTER,
            metavar="N",
            min=0.01,
            max=1.0,
            help=("Share of the peak that matrix products reach."),
        ),
    ] = 0.5
    tensor_parallel: Annotated[
        int,
        Option(
            rich_help_panel=CLUSTER,
            metavar="N",
            min=1,
            max=MAX_RANKS,
            help=("GPUs that are one worker: [training] tensor_parallel."),
        ),
    ] = 1
    shard_optimizer: Annotated[
        bool,
        Option(
            "--shard-optimizer",
            rich_help_panel=CLUSTER,
            help=(
                "The workers of a stage share its optimizer state; also for a preset that is an "
                "estimate."
            ),
        ),
    ] = False
    muon: Annotated[
        bool,
        Option(
            "--muon",
            rich_help_panel=CLUSTER,
            help=(
                "Muon steps the matrices of layers, and AdamW embedding and head: [training] "
                "optimizer."
            ),
        ),
    ] = False
    microbatch_size: Annotated[
        int,
        Option(
            rich_help_panel=CLUSTER,
            metavar="N",
            min=1,
            max=2**20,
            help=("Sequences in a micro-batch."),
        ),
    ] = 1
    pipelines: Annotated[
        int | None,
        Option(
            rich_help_panel=EITHER, metavar="N", min=1, max=2**17, help=("Data-parallel replicas.")
        ),
    ] = None
    stages: Annotated[
        int | None,
        Option(
            rich_help_panel=CLUSTER, metavar="N", min=1, max=2**17, help=("Workers in a pipeline.")
        ),
    ] = None
    microbatches: Annotated[
        int | None,
        Option(
            rich_help_panel=EITHER,
            metavar="N",
            min=1,
            max=2**16,
            help=("Micro-batches of each pipeline in an iteration."),
        ),
    ] = None
    transfer: Annotated[
        float | None,
        Option(
            rich_help_panel=OF_TRACE,
            metavar="SEC",
            min=0.0,
            max=3600.0,
            help=(
                "With --trace: seconds that one activation takes from worker to worker, which "
                "Chrome traces do not tell. Default: what a .parquet file says, else 0."
            ),
        ),
    ] = None
    stage_layers: Annotated[
        int | None,
        Option(
            rich_help_panel=OF_TRACE,
            metavar="N",
            min=1,
            max=10_000,
            help=(
                "Layers of each stage, which take its time evenly: what `plan --layers move` can "
                "divide anew. Traces do not tell them."
            ),
        ),
    ] = None
    workers_per_node: Annotated[
        int | None,
        Option(
            rich_help_panel=EITHER,
            metavar="N",
            min=1,
            max=2**17,
            help=("Workers that share a node (a machine), and so fail together: [topology]."),
        ),
    ] = None
    name: Annotated[
        str | None, Option(rich_help_panel=EITHER, metavar="NAME", help="The job's name.")
    ] = None
    placement: Placement = "given"
    time_limit: Annotated[
        float,
        Option(
            rich_help_panel=SEARCH,
            metavar="SEC",
            min=0.01,
            max=7 * 86400,
            help=("With --placement any: seconds to search at most."),
        ),
    ] = 10.0
    steps: Steps = None
    out_file: Annotated[
        Path,
        Option(
            "--out",
            rich_help_panel=ANSWER,
            metavar=JOB,
            help="The job file to write.",
        ),
    ] = Path("job.toml")
    force: Force = False
    json: Json = False


@take_request
def new(context: typer.Context, request: NewRequest) -> None:
    """Write a job file: from a preset, a trace, or an estimate of a model.

    Asks for what no option says. The estimate counts matrix products, attention and scans, and
    takes bandwidths from data sheets; `slipstream profile` measures instead.
    """
    ways = {
        "preset": request.preset_name is not None,
        "trace": bool(request.trace),
        "config": request.model is not None,
        "model": request.layers is not None or request.hidden is not None,
    }
    if sum(ways.values()) > 1:
        refuse("--preset, --trace, --model and --layers are four ways to begin: take one")
    if request.preset_name is not None:
        _read_preset(request)  # check the preset before the output file
    require_choice("--placement", request.placement, PLACEMENTS)
    require_writable(request.out_file)
    way = next((way for way, is_taken in ways.items() if is_taken), None) or _ask_for(
        "Start from a preset, a trace or a model?",
        "model",
        _parse_one("preset", "trace", "model"),
        "--preset, --trace, --model, or --layers and the others",
    )
    _refuse_unused_options(context, way)
    _refuse_search_limits(context, request)
    # Each way gives the text of a job file.
    readers = {"preset": _read_preset, "trace": _read_traces}
    text = readers.get(way, _estimate_job)(request)
    # The text gets what all ways have in common: machines and the placement.
    workers_per_node = request.workers_per_node
    if (
        way in ("config", "model")
        and workers_per_node is None
        and sys.stdin.isatty()
        and request.pipelines is None
    ):
        workers_per_node = _ask_int("Workers per node (machine)?", 1, "--workers-per-node")
    if workers_per_node is not None:
        text += f"\n[topology]\nworkers_per_node = {workers_per_node}\n"
    placed = None
    if request.placement == "any":
        _parse_or_refuse(text, request.out_file)
        placed = find_pipeline(
            request.out_file, text, PlanOptions(time_limit=request.time_limit, steps=request.steps)
        )
        text = placed.text
    _write_job(text, request.out_file, placed, request.json)


def _refuse_unused_options(context: typer.Context, way: str) -> None:
    """Exit 2 for an option without effect on a job made from a `way`."""
    # `way` is "preset", "trace", "config" or "model".
    for parameter in context.command.params:
        name, source = parameter.name or "", context.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE" or name in _FOR_ALL:
            continue
        of_model = name not in {"preset_name", "trace", "pattern", "transfer", "stage_layers"}
        used = {
            "preset": name in {"preset_name", "shard_optimizer"},
            "trace": name in _FOR_TRACES,
            "config": of_model and name not in _FOR_SHAPES,
            "model": of_model and name != "model",
        }
        if not used[way]:
            refuse(
                f"{parameter.opts[0]}: not used for a job from a {way}; leave it out"
                + (", and edit the file that is written" if way == "preset" else "")
            )


def _refuse_search_limits(context: typer.Context, request: NewRequest) -> None:
    """Exit 2 if a search limit is given although nothing is searched for."""
    for name, option in (("time_limit", "--time-limit"), ("steps", "--steps")):
        source = context.get_parameter_source(name)
        if request.placement != "any" and source is not None and source.name == "COMMANDLINE":
            refuse(f"{option}: only with --placement any, which searches; leave it out")


def _estimate_job(request: NewRequest) -> str:
    """Return the job file's text for a model that options describe; ask for missing values."""
    try:
        model = _read_layers(request)
        layout = ModelLayout(
            gpu=_gpu_spec(request.gpu, request.peak_tflops),
            pipelines=request.pipelines or _ask_int("Pipelines (replicas)?", 4, "--pipelines"),
            stages=request.stages or _ask_int("Stages (workers per pipeline)?", 8, "--stages"),
            microbatches=request.microbatches or _ask_microbatches(),
            microbatch_size=request.microbatch_size,
            efficiency=request.efficiency,
            tensor_parallel=request.tensor_parallel,
            shard_optimizer=request.shard_optimizer,
            muon=request.muon,
        )
        return job_text(*estimate_job(request.name or "my-model", model, layout))
    except ValueError as error:
        refuse(error)


def _read_layers(request: NewRequest) -> ModelLayers:
    """Return the layers of the model that options describe; ask for missing values."""
    if request.model is not None:
        return read_model(
            request.model, request.sequence or _ask_int("Tokens per sequence?", 4096, "--sequence")
        )
    # Without a config.json, all layers are alike, and a few numbers describe them.
    shape = ModelShape(
        layers=request.layers or _ask_int("Layers?", 32, "--layers"),
        hidden=request.hidden or _ask_int("Width (hidden size)?", 4096, "--hidden"),
        heads=request.heads or _ask_int("Heads?", 32, "--heads"),
        sequence=request.sequence or _ask_int("Tokens per sequence?", 4096, "--sequence"),
        vocabulary=request.vocabulary or _ask_int("Vocabulary?", 128_000, "--vocabulary"),
        kv_heads=request.kv_heads,
        ffn=request.ffn,
        gated=request.gated,
    )
    if shape.heads % request.tensor_parallel:
        raise ValueError(
            f"--tensor-parallel {request.tensor_parallel}: expected a divisor of {shape.heads}, "
            "the attention heads, which the GPUs of a worker share"
        )
    return shape.by_layer()


def _parse_or_refuse(text: str, path: Path) -> Job:
    try:
        return parse_job(text, str(path))
    except JobError as error:
        refuse(error)


def _write_job(text: str, path: Path, found: FoundPlacement | None, json: bool) -> None:
    job = _parse_or_refuse(text, path)
    write_or_refuse(path, text.encode())
    if json:
        print_json(
            {"job": text, "out": str(path), **({} if found is None else placement_report(found))}
        )
        return
    for line in placement_lines(found):
        out.print(line, soft_wrap=True, markup=False)
    out.print(
        f"{path}: {job.pipelines} pipelines x {job.stages} stages, longest forward "
        f"{duration(max(job.time.forward))}. Next: slipstream plan {path}",
        soft_wrap=True,
    )


def _read_preset(request: NewRequest) -> str:
    name = (
        request.preset_name
        if request.preset_name is not None
        else _ask_for(f"Which preset ({', '.join(preset_names())})?", "llama-3-8b", str, "--preset")
    )
    if request.shard_optimizer and name in preset_names() and name not in ESTIMATED:
        refuse(
            f"--shard-optimizer: the preset {name} is no estimate; {' and '.join(ESTIMATED)} are"
        )
    require_choice("--preset", name, preset_names())
    return preset_text(name, shard_optimizer=request.shard_optimizer)


def _read_traces(request: NewRequest) -> str:
    files = request.trace or [_ask_for("Which trace file?", None, Path, "--trace")]
    source = ", ".join(map(str, files))
    # A Parquet trace has all workers; other traces have one each.
    if any(file.suffix == SUFFIX for file in files):
        if len(files) > 1 or request.pattern is not None:
            refuse(
                f"{source}: a {SUFFIX} file has all workers and known names; give it alone, "
                "without --pattern"
            )
        for option, count in (
            ("--pipelines", request.pipelines),
            ("--microbatches", request.microbatches),
        ):
            if count is not None:
                refuse(
                    f"{option}: a {SUFFIX} file says how many there are; leave it out, and edit "
                    "the job file"
                )
        return _read_parquet(files[0], request)
    try:
        times, seen, has_whole = stage_times(
            [range_ for file in files for range_ in read_ranges(file, request.pattern)], source
        )
    except ProfilerTraceError as error:
        refuse(error)
    tables = job_tables(
        request.name or files[0].name.split(".")[0],
        times,
        transfer=request.transfer or 0.0,
        pipelines=request.pipelines or _ask_int("Pipelines (replicas)?", 1, "--pipelines"),
        microbatches=request.microbatches or seen or _ask_microbatches(),
    )
    # What a trace does not tell is said in the job file, where the user can put it in.
    remarks = [
        "Seconds, one value per stage: medians over the micro-batches in the trace, without the "
        "first."
    ]
    if has_whole:
        remarks.append(
            "The trace has whole backwards only: half of each is taken for I, half for W."
        )
    if request.transfer is None:
        remarks.append("transfer: put in what one activation takes from worker to worker.")
    return job_text(
        _add_layers(tables, request.stage_layers),
        {"": [f"Stage times from {source}."], "time": remarks},
    )


def _add_layers(tables: dict[str, Any], each: int | None) -> dict[str, Any]:
    """Return a job file's `tables` with `each` layers a stage; unchanged if None."""
    return (
        tables if each is None else {**tables, "placement": {"layers": [each] * tables["stages"]}}
    )


def _read_parquet(file: Path, request: NewRequest) -> str:
    """Return the job file's text for a StragglerAnalysis trace."""
    try:
        trace = read_straggler_trace(file)
    except ProfilerTraceError as error:
        refuse(error)
    # The trace has whole backwards, and says what a stage's ops take, not what its layers take.
    _, pipelines, stages, microbatches, _ = trace.seconds.shape
    forward, backward = trace.stage_seconds().T.tolist()
    values = round_times([*forward, *[seconds / 2 for seconds in backward]])
    halves = values[stages:]
    times = {"forward": values[:stages], "backward_input": halves, "backward_weight": list(halves)}
    tables = job_tables(
        request.name or file.stem,
        times,
        pipelines=pipelines,
        microbatches=microbatches,
        transfer=round_times([trace.transfer])[0] if request.transfer is None else request.transfer,
    )
    (tables["time"]["optimizer"],) = round_times([trace.optimizer]) if trace.optimizer else [0.0]
    remarks = [
        "Seconds, one value per stage: means over micro-batches and the workers that are not slow.",
        "Backwards are whole: half of each is taken for I, half for W.",
        "optimizer: all that comes before the first and after the last of them.",
        f"Iterations took {trace.measured.mean():.4g} s on average.",
    ]
    if slow := trace.slow_factors():
        tables["time"]["slow"] = slow
    return job_text(
        _add_layers(tables, request.stage_layers),
        {"": [f"Measured: StragglerAnalysis, {file}."], "time": remarks},
    )


def _gpu_spec(gpu: str | None, peak_tflops: float | None) -> GpuSpec:
    if gpu is None and peak_tflops is None:
        gpu = _ask_for(f"GPU ({', '.join(GPUS)})?", "h100", str, "--gpu or --peak-tflops")
    if gpu is not None and gpu not in GPUS:
        refuse(f"--gpu {gpu}: expected one of {', '.join(GPUS)}; for others, --peak-tflops")
    # Of another GPU only the peak is given: the rest is as of a usual one.
    spec = GPUS[gpu or "h100"]
    if peak_tflops is None:
        return spec
    return GpuSpec(
        name=f"{peak_tflops:g}-TFLOP/s GPU",
        flops=peak_tflops * 1e12,
        memory_bytes=spec.memory_bytes,
        memory_bandwidth=spec.memory_bandwidth,
        network=spec.network,
    )


def _ask_int(question: str, default: int, option: str) -> int:
    def parse_count(text: str) -> int:
        value = int(text)
        if not 1 <= value <= MAX_COUNT:
            raise ValueError
        return value

    return _ask_for(question, str(default), parse_count, option)


def _ask_microbatches() -> int:
    return _ask_int("Micro-batches per pipeline in an iteration?", 32, "--microbatches")


def _parse_one(*choices: str) -> Callable[[str], str]:
    def parse_choice(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    return parse_choice


def _ask_for(question: str, default: str | None, read: Callable[[str], T], option: str) -> T:
    """Return the user's answer, asking until `read` parses it; exit 2 without one."""
    while True:
        try:
            answer: Any = typer.prompt(question, default=default, err=True)
        except (typer.Abort, EOFError):
            err.print()  # the question has no end of line
            refuse(f"no answer to {question!r}; give it with {option}")
        try:
            return read(str(answer))
        except ValueError:
            err.print(f"  {answer!r} is not an answer to that", style="yellow")
