"""What failures cost if machines are back in hours, or after days.

Clusters have four sizes. Failures are drawn as Llama 3's authors report them, with repairs of at
most 4 hours, and as InfiniteHBD-Trace has them: 400 servers that were away for 133 hours after a
fault in the mean, a third of them for less than 4.
"""

import statistics

from msgspec.structs import replace

from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.job.estimate import estimate_job
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.presets import ESTIMATED
from slipstream.planner.job.toml import job_text
from slipstream.planner.simulation.availability_trace import group_gpus
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.failure_models import FAILURE_MODELS
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Scenario
from slipstream.planner.simulation.policy_runs import simulate_policy
from slipstream.planner.simulation.synthetic_trace import draw_trace
from slipstream.planner.simulation.throughput import Throughputs

DAYS = 90.0
SIZES = (
    ("llama-3-8b", 2, 1, 8e9, 10),
    ("llama-3-8b", 8, 2, 8e9, 10),
    ("llama-3-70b", 4, 8, 70e9, 10),
    ("llama-3-70b", 32, 8, 70e9, 3),
)
"""(preset, pipelines, GPUs of a worker, parameters, traces) of each cluster."""
MODELS = {"hours": "llama-3", "days": "infinite-hbd"}
"""Failure models by how long repairs take."""
KINDS = ("slipstream", "recycle", "torchft", "checkpoint-restart")


def cluster_job(name: str, pipelines: int, gpus: int) -> Job:
    """Return a preset's job with other numbers of pipelines and GPUs per worker."""
    shape, layout = ESTIMATED[name]
    layout = replace(layout, pipelines=pipelines, tensor_parallel=gpus)
    return parse_job(job_text(*estimate_job(name, shape.by_layer(), layout)), name)


def reproduce(progress: CountCallback) -> Figure:
    """Simulate all clusters under both failure models; return the hours each policy loses."""
    rows: list[tuple[Cell, ...]] = []
    hours_lost: dict[tuple[str, str], list[float]] = {
        (kind, repairs): [] for kind in KINDS for repairs in MODELS
    }
    findings: dict[str, float] = {}
    gpus_of = []
    for done, (preset, pipelines, gpus, parameters, traces) in enumerate(SIZES, 1):
        job = cluster_job(preset, pipelines, gpus)
        throughputs, costs = Throughputs(job), costs_for(parameters, job.stages)
        gpus_of.append(throughputs.workers * gpus)
        for repairs, model in MODELS.items():
            drawn = [
                group_gpus(draw_trace(FAILURE_MODELS[model], gpus_of[-1], DAYS, seed), gpus)
                for seed in range(traces)
            ]
            losses = statistics.fmean(
                trace.machine_losses + trace.partial_losses for trace in drawn
            )
            down = statistics.fmean(trace.places - trace.mean_live_machines for trace in drawn)
            row: list[Cell] = [gpus_of[-1], repairs, traces, round(losses, 1), round(down, 2)]
            samples: dict[str, float] = {}
            for kind in KINDS:
                runs = [
                    simulate_policy(
                        POLICIES[kind](
                            Scenario(throughputs, costs, trace.seconds_between_failures)
                        ),
                        trace,
                    )
                    for trace in drawn
                ]
                kept = statistics.fmean(run.throughput / run.fault_free_rate for run in runs)
                hours_lost[kind, repairs].append(24 * DAYS * (1 - kept))
                row.append(round(hours_lost[kind, repairs][-1], 2))
                samples[kind] = round(statistics.fmean(run.throughput for run in runs), 2)
            rows.append((*row, *samples.values()))
            findings[
                f"slipstream / torchft, samples per second, repairs of {repairs}, {gpus_of[-1]} "
                "GPUs"
            ] = samples["slipstream"] / samples["torchft"]
        progress(done, len(SIZES))
    series = []
    for (kind, repairs), hours in hours_lost.items():
        series.append(Series(name=f"{kind}, repairs of {repairs}", values=tuple(hours)))
    return Figure(
        name="repairs",
        title=f"Hours of {24 * DAYS:.0f} that failures take, by how long repairs take",
        kind="lines",
        x_label="GPUs",
        y_label="hours lost",
        x=tuple(map(float, gpus_of)),
        logarithmic_x=True,
        series=tuple(series),
        header=(
            "GPUs",
            "repairs",
            "traces",
            "failures",
            "workers down",
            *(f"{kind}, {what}" for what in ("hours lost", "samples/s") for kind in KINDS),
        ),
        rows=tuple(rows),
        findings=findings,
        assumptions=(
            "Llama 3 8B and 70B on H100s, estimated stage times; hours of each system's own speed "
            "with all workers alive, means over drawn traces of 90 days; with 8 GPUs each is a "
            "machine of its own",
        ),
    )
