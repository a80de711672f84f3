"""Measure how fast failure traces are simulated, and schedules are replayed under noise.

    python -m benchmarks.simulate [--study large largest seeds replays] [--days 30] [--seeds 1000]
                                  [--json FILE]

There are four studies, each with all policies and everything planned on the spot: a 16,384-GPU job
at Llama 3's failure rate for 30 days, once with one GPU per worker (1,024 pipelines x 16 stages)
and once with tensor-parallel groups of 8 (128 x 16); 131,072 GPUs for 90 days (1,024 x 16 groups of
8); 1,000 days of a 24-GPU job with a failure per hour, each with its own seed; and 10,000 replays
of a schedule under noise. Peak memory is that of the process so far.
"""

import argparse
import json
import resource
import time
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.jobs import uniform_job
from slipstream.planner.job.file import Job
from slipstream.planner.plan import plan_job
from slipstream.planner.simulation.availability_trace import group_gpus
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.failure_models import FAILURE_MODELS, make_single_gpu_model
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy_runs import compare_policies, simulate_traces
from slipstream.planner.simulation.synthetic_trace import draw_trace
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.schedules.schedule import Worker
from slipstream.schedules.timing import Noise, replay_with_noise

ALL = list(POLICIES.values())
STUDIES = ("large", "largest", "seeds", "replays")


def job(pipelines: int, stages: int, microbatches: int) -> Job:
    return uniform_job(pipelines, stages, microbatches, op=0.1, optimizer=0.1, transfer=0)


def large(gpus: int, gpus_per_worker: int, days: float) -> dict[str, object]:
    pipelines = gpus // gpus_per_worker // 16
    began, used = time.perf_counter(), time.process_time()
    trace = group_gpus(draw_trace(FAILURE_MODELS["llama-3"], gpus, days), gpus_per_worker)
    drawn = time.perf_counter() - began
    ends = [time.process_time()]
    result = compare_policies(
        ALL,
        Throughputs(job(pipelines, 16, 32)),
        costs_for(405e9, 16),
        trace,
        lambda _done, _total: ends.append(time.process_time()),
    )
    return {
        "study": f"{days:g} days of {pipelines} x 16 workers, {trace.machine_losses} lost",
        "drawing s": drawn,
        "seconds": time.perf_counter() - began,
        "cpu s": time.process_time() - used,
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "cpu s by policy": {
            name: end - begin
            for name, (begin, end) in zip(result.runs, pairwise(ends), strict=True)
        },
        "throughput over fault-free": {
            name: run.throughput / result.best_rate for name, run in result.runs.items()
        },
    }


def many(seeds: int) -> dict[str, object]:
    began, used = time.perf_counter(), time.process_time()
    traces = [draw_trace(make_single_gpu_model(24), 24, 1, seed) for seed in range(seeds)]
    drawn = time.perf_counter() - began
    throughputs = Throughputs(job(6, 4, 12))
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("seeds")
        found = simulate_traces(
            ALL,
            throughputs,
            costs_for(),
            traces,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    return {
        "study": f"{seeds} seeds of a day of 6 x 4 workers, "
        f"{sum(trace.machine_losses for trace in traces)} lost",
        "drawing s": drawn,
        "seconds": time.perf_counter() - began,
        "cpu s": time.process_time() - used,
        "throughput over fault-free": {
            name: float(values.mean()) / throughputs.fault_free_rate
            for name, values in found.items()
        },
    }


def jitter(replays: int) -> dict[str, object]:
    schedule = plan_job(job(6, 4, 12), [Worker(1, 2)], method="greedy", time_limit=2).schedule
    ops = sum(1 for _ in schedule.all_ops())
    began, used = time.perf_counter(), time.process_time()
    periods = replay_with_noise(schedule, Noise(spread=0.05), replays=replays)
    return {
        "study": f"{replays} replays of {ops} ops, 4 iterations each",
        "drawing s": 0.0,
        "seconds": time.perf_counter() - began,
        "cpu s": time.process_time() - used,
        "mean period over planned": float(periods.mean()) / schedule.seconds(schedule.period_ticks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=STUDIES)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    studies = []
    if "large" in options.study:
        studies += [large(16_384, 8, options.days), large(16_384, 1, options.days)]
    if "largest" in options.study:
        studies.append(large(131_072, 8, 3 * options.days))
    if "seeds" in options.study:
        studies.append(many(options.seeds))
    if "replays" in options.study:
        studies.append(jitter(options.replays))
    grid = Table("study", "drawing s", "seconds in all", "of a core")
    for study in studies:
        grid.add_row(
            str(study["study"]), *(f"{study[key]:.2f}" for key in ("drawing s", "seconds", "cpu s"))
        )
    Console().print(grid)
    for study in studies:
        by_policy = study.get("cpu s by policy")
        if isinstance(by_policy, dict):
            print(
                f"{study['study']}, {study['peak MB']:.0f} MB; of a core:",
                ", ".join(f"{name} {seconds:.1f}" for name, seconds in by_policy.items()),
            )
    if options.json:
        options.json.write_text(json.dumps(studies, indent=1) + "\n")


if __name__ == "__main__":
    main()
