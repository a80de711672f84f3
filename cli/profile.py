"""Implement `slipstream profile`: measure a model's stages here, write the job file."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from slipstream.cli.shared.console import delay_interrupts, duration, err, out, print_json, refuse
from slipstream.cli.shared.options import (
    ANSWER,
    Force,
    Json,
    read_job_or_refuse,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.outputs import JOB
from slipstream.planner.job.file import Job, placement_table, topology_table
from slipstream.planner.job.network import network_table
from slipstream.planner.job.toml import job_text, round_times
from slipstream.schedules.dealing import CoefficientFit, fit_coefficients

if TYPE_CHECKING:
    from slipstream.runtime.tools.profile import Profile
    from slipstream.runtime.tools.stage_bench import StageProfile

DEFAULT_JOB = Path(__file__).parent / "jobs" / "small-gpt.toml"
MEASURED = "What is measured"
"""Title, in the help, of the options on what is measured."""
KIB = 1024
MAX_WAITING_SHARE = 0.1
"""Share of the time that processes may wait for the processor without a warning."""


def profile(
    job: Annotated[
        Path,
        typer.Option(
            "--job",
            rich_help_panel=MEASURED,
            metavar="JOB",
            help=(
                "A job file: its grid, [placement], [model] and [training]; its times and memory "
                "are measured anew; [time] slow stays. Default: a small GPT on 3 x 3 workers."
            ),
        ),
    ] = DEFAULT_JOB,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            rich_help_panel=ANSWER,
            metavar=JOB,
            help=("Write the measured job file here, instead of printing it."),
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(
            "--rounds",
            rich_help_panel=MEASURED,
            metavar="N",
            min=1,
            max=1000,
            help=("How often each op is measured; the median counts."),
        ),
    ] = 7,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel",
            rich_help_panel=MEASURED,
            metavar="N",
            min=1,
            max=64,
            help=(
                "Processes of each worker, one device each: [training] tensor_parallel. Default: "
                "as the job says."
            ),
        ),
    ] = None,
    force: Force = False,  # noqa: ARG001  # read by the overwrite guard
    json: Json = False,
) -> None:
    """Measure the stages of a job's model on this machine: times, memory, transfers and
    all-reduces.

    Writes a complete job file, to be planned and trained. Transfers, all-reduces and links
    ([network] latency, bandwidth, and slowdown: how much all-reduces slow down concurrent compute)
    are measured within this machine. A worker of several processes is measured as one: an op takes
    until all of them are done.
    """
    require_writable(out_file)
    with delay_interrupts():
        import torch

        from slipstream.runtime.config import ConfigError, parse_run_config
        from slipstream.runtime.data.data import load_data
        from slipstream.runtime.models.layered_model import build_model, parameter_dtype
        from slipstream.runtime.placement import split_layers
        from slipstream.runtime.processes.fork_server import ForkServer
        from slipstream.runtime.ranks.worker_group import simulating_rank
        from slipstream.runtime.tools.profile import ProfileError
        from slipstream.runtime.tools.profile import profile_stages as measure

    # What is measured: the job's stages, and each of its layers.
    wanted = read_job_or_refuse(job)
    if tensor_parallel is not None:
        wanted = wanted.with_ranks(tensor_parallel)
    try:
        config = parse_run_config(wanted.model, wanted.training)
        with simulating_rank(config.training.tensor_parallel):
            layers = build_model(
                config.model, 0, parameter_dtype(config.training), torch.device("meta")
            ).layers
        ranges = (
            _ranges(wanted.layers[: wanted.depth], layers)
            if wanted.layers
            else split_layers(layers, wanted.depth)
        )
        load_data(config, wanted.microbatches)  # refuses bad data here, with its own message
        with err.status("measuring"), ForkServer() as fork_server:
            every_layer = [(layer, layer + 1) for layer in range(layers)]
            measured, by_layer = (
                measure(
                    config,
                    parts,
                    copies=wanted.pipelines * wanted.chains,
                    rounds=rounds,
                    fork_server=fork_server,
                    workers=wanted.pipelines * wanted.stages,
                    microbatches=sum(wanted.microbatches),
                    by_lengths=parts is not ranges and config.training.document_end is not None,
                )
                for parts in (ranges, every_layer)
            )
    except (ConfigError, ProfileError) as error:
        refuse(f"{job}: {error}")
    # Other programs on the machine make all times longer.
    waiting = max(measured.waiting, by_layer.waiting)
    if waiting > MAX_WAITING_SHARE:
        err.print(
            f"the machine was busy: measuring waited {waiting:.0%} of the time, and the times are "
            "too long by as much",
            style="yellow",
        )
    # The job file: stages for plans in place, layers for plans that move them.
    tables = job_tables(wanted, measured)
    tables["placement"] = {
        **tables.get("placement", {}),
        "layers": [end - begin for begin, end in ranges],
    }
    tables["layers"] = build_layer_table(by_layer, ranges[0][1])
    if config.training.document_end is not None:
        tables["training"]["length_costs"] = fit_length_costs(by_layer)
    text = job_text(tables, table_comments(wanted, measured))
    if out_file is not None:
        write_or_refuse(out_file, text.encode())
    if json:
        print_json({"job": tables})
    elif out_file is None:
        out.print(text, soft_wrap=True, end="")
    else:
        if config.training.document_end is not None:
            out.print(
                "layers' times fitted by tokens and squares of documents' lengths to "
                f"{tables['training']['length_costs']['error']:.1%}",
                soft_wrap=True,
            )
        out.print(
            f"{len(ranges)} stages measured; longest forward "
            f"{duration(max(tables['time']['forward']))}; written to {out_file}",
            soft_wrap=True,
        )


def job_tables(job: Job, measured: "Profile") -> dict[str, Any]:
    """Return the tables of a job file like `job`, with what was measured.

    Times are in seconds, and memory in KiB. What is not measured is as in `job`.
    """
    stages = measured.stages
    longest = max(
        max(stage.forward, stage.backward_input, stage.backward_weight) for stage in stages
    )

    def seconds(name: str) -> list[float]:
        return round_times([getattr(stage, name) for stage in stages], longest)

    # A worker holds all of its stages, of every chain; the stages that were measured are those of
    # one.
    static = [0] * job.stages
    for index, column in enumerate(job.columns):
        stage = index % job.depth
        static[column] += stages[stage].static_bytes + _in_flight_bytes(job, measured, stage)
    # What the weights leave of a device, after what CUDA and libraries take.
    room = measured.device_bytes // measured.sharing - measured.outside_bytes
    tables: dict[str, Any] = {
        "name": job.name,
        "pipelines": job.pipelines,
        "stages": job.stages,
        "microbatches": _simplify(job.microbatches),
        "time": {
            name: seconds(name)
            for name in ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce")
        },
        "memory": {
            "capacity": [max(0, (room - size) // KIB) for size in static],
            **_memory_sizes(stages),
            **_sharded_state(stages),
            "unit_bytes": KIB * measured.ranks,
        },
        "model": dict(job.model),
        "training": dict(job.training),
    }
    (tables["time"]["transfer"],) = round_times([measured.transfer], longest)
    # What is not measured stays as the given job has it.
    if job.time.slow:  # factors of the layout's workers, which are not measured here
        tables["time"]["slow"] = {str(worker): factor for worker, factor in job.time.slow}
    if laid_out := placement_table(job):
        tables["placement"] = laid_out
    if links := network_table(
        job.network, measured.network.latency, measured.network.bandwidth, measured.network.slowdown
    ):
        tables["network"] = links
    if shared := topology_table(job.nodes, job.pipelines, job.stages):
        tables["topology"] = shared
    return tables


def _in_flight_bytes(job: Job, measured: "Profile", stage: int) -> int:
    """Return the bytes of gradients that a stage keeps because they are still being sent."""
    if measured.device == "cuda" and measured.transport == "gloo":
        return 0  # they wait in host memory
    return min(job.depth - stage, max(job.microbatches)) * measured.stages[stage].sent_bytes


def build_layer_table(measured: "Profile", first: int) -> dict[str, Any]:
    """Return the `[layers]` table of the job file, from a profile whose stages are layers.

    The job's first stage has the first `first` layers. As it sends no gradient back, all of their
    backward counts as W.
    """
    without_input = [
        msgspec.structs.replace(
            layer, backward_input=0.0, backward_weight=layer.backward_weight + layer.backward_input
        )
        for layer in measured.stages[:first]
    ]
    layers = [*without_input, *measured.stages[first:]]
    table: dict[str, Any] = {}
    for name in ("forward", "backward_input", "backward_weight", "optimizer", "all_reduce"):
        table[name] = round_times([getattr(layer, name) for layer in layers])
    return table | _memory_sizes(layers)


def fit_length_costs(measured: "Profile") -> dict[str, Any]:
    """Return `[training.length_costs]`, costs by documents' lengths, from a profile of layers.

    Each op has three coefficients for each layer, all 0 if it was not measured; `error` is that of
    the fit, relative to the times.
    """
    # A cost is a sum of three terms (`CoefficientFit`), fitted for each op of each layer.
    table: dict[str, Any] = {}
    errors = []
    for column, name in enumerate(("forward", "backward_input", "backward_weight"), 2):
        table[name] = []
        for layer in measured.stages:
            rows = [row for row in layer.by_lengths if row[column] > 0]
            result = CoefficientFit((0.0, 0.0, 0.0), 0.0)
            if rows:
                values = list(zip(*rows, strict=True))
                result = fit_coefficients(values[0], values[1], values[column])
            table[name].append([float(f"{value:.4g}") for value in result.coefficients])
            errors.append((sum(row[column] for row in rows), result.error))
    # Ops that take no time to speak of are measured badly, and do not matter.
    weight = sum(value for value, _ in errors) or 1.0
    return {
        **table,
        "error": float(
            f"{math.sqrt(sum(value * error**2 for value, error in errors) / weight):.3g}"
        ),
    }


def _memory_sizes(stages: "Sequence[StageProfile]") -> dict[str, list[int]]:
    """Return keys of the job file's [memory] or [layers], in KiB by stage or layer."""
    recomputed_sizes = [
        stage.recomputed_bytes for stage in stages if stage.recomputed_bytes is not None
    ]
    sizes = {
        "activation": _in_kib(stage.activation_bytes for stage in stages),
        "weight_stash": _in_kib(stage.stash_bytes for stage in stages),
        "weights": _in_kib(stage.static_bytes for stage in stages),
    }
    if recomputed_sizes:
        sizes["recomputed"] = _in_kib(recomputed_sizes)
    return sizes


def _in_kib(sizes: Iterable[int]) -> list[int]:
    """Return sizes in bytes as KiB, rounded up."""
    return [-(-size // KIB) for size in sizes]


def _sharded_state(stages: "Sequence[StageProfile]") -> dict[str, list[int]]:
    """Return the [memory] key `state`, in KiB by stage, if optimizer state is sharded."""
    whole = [stage.state_bytes for stage in stages if stage.state_bytes is not None]
    return {"state": _in_kib(whole)} if whole else {}


def table_comments(job: Job, measured: "Profile") -> dict[str, list[str]]:
    """Return the comment lines above each table of the job file; "" is its top."""
    static = ", ".join(f"{stage.static_bytes / 2**20:.1f}" for stage in measured.stages)
    undo = ", ".join(f"{stage.undo_bytes / 2**20:.1f}" for stage in measured.stages)
    place = "a GPU of this machine"
    if measured.device != "cuda":
        place = "this machine, shared equally by all workers"
    elif measured.sharing != 1:
        place += f", shared by {measured.sharing} processes"
    copies = (
        f"{job.pipelines} pipelines"
        if job.chains == 1
        else f"{job.pipelines * job.chains} copies of a stage"
    )
    processes = measured.workers * measured.ranks
    texts = {
        "": [
            f"Measured by `slipstream profile` on {measured.device}, {processes} processes at a "
            "time."
        ],
        "time": [
            "Seconds, one value per stage: medians, for one micro-batch.",
            f"transfer: one activation; all_reduce: {measured.reduce_group} of {copies}; both over "
            f"{measured.transport}, within this machine.",
            "Between machines, put in what your network takes.",
        ],
        "memory": [
            f"KiB. capacity: what {place}, has beyond what is held always, and gradients on their "
            "way.",
            *(
                [
                    f"CUDA, communicators and libraries take {measured.outside_bytes / 2**20:.0f} "
                    "MiB of it as well."
                ]
                if measured.outside_bytes
                else []
            ),
            f"Held always, in MiB a stage: {static};",
            f"of it the copies by which a step can be undone: {undo}.",
        ],
        "layers": ["Each layer measured by itself: how a stage divides over its layers."],
    }
    # What is different with sharded optimizer state, and with workers of several ranks.
    if any(stage.state_bytes is not None for stage in measured.stages):
        texts["memory"] += [
            f"Optimizer state is sharded over {copies}; state: all of a stage's, of which each "
            "worker has more when some are down."
        ]
    if measured.ranks > 1:
        texts[""][0] += f" Each is a rank of a worker of {measured.ranks}."
        texts["time"] += [
            "An op takes until all ranks of its worker are done; tensors go from rank r to rank "
            "r, all at the same time."
        ]
        texts["memory"] += [
            f"All of this is what a rank has; unit_bytes: of a worker, which is {measured.ranks}."
        ]
    return texts


def _ranges(counts: Sequence[int], layers: int) -> list[tuple[int, int]]:
    """Return the range of each stage's layers, (start, stop), from the job file's numbers."""
    # Raises ConfigError unless these are numbers above 0 that fit the model's `layers`.
    from slipstream.runtime.config import ConfigError
    from slipstream.runtime.placement import with_end_layers

    counts = with_end_layers(counts, layers)
    ends = [sum(counts[:index]) for index in range(len(counts) + 1)]
    if ends[-1] != layers or not all(counts):
        raise ConfigError(
            f"placement.layers is {list(counts)}; expected numbers above 0 whose sum is {layers}, "
            "the layers of the model"
        )
    return list(pairwise(ends))


def _simplify(microbatches: Sequence[int]) -> int | list[int]:
    return microbatches[0] if len(set(microbatches)) == 1 else list(microbatches)
