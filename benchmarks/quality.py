"""Measure how close plans are to the proven bound.

    python -m benchmarks.quality [--every N] [--offset N] [--time-limit 10 | --steps N]
        [--suite fault-free|generated|failures|grids|uneven|shared|moved|placements ...]
        [--method cp-sat] [--json FILE] [--compare FILE]

`--every N` takes each N-th instance from `--offset` on. `--json` stores the gaps, `--compare`
prints the change against stored ones. Every plan passes the checker before it is counted. The speed
of the machine matters only through the time limit.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.options import Layers, PlanOptions
from slipstream.planner.plan import plan_with
from slipstream.schedules.schedule import Worker

LIMITS = {1.0: 0.08, 1.5: 0.03, 2.0: 0.01}
"""Target gap by capacity, in activations per stage, for nine in ten instances."""
MOVED_LIMIT = 0.04
"""Target gap over the work of all layers, if these may move."""


class Published(NamedTuple):
    """Profiled setting of Zero Bubble Pipeline Parallelism (Qi et al., ICLR 2024).

    It is in milliseconds and memory units.
    """

    model: str
    stages: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    transfer: float
    activation: int
    stash: int
    zb_1p: float | None
    zb_2p: float


PUBLISHED = (
    Published("1.5B", 8, 24, 18.522, 18.086, 9.337, 0.601, 201216, 73728, 0.1585, 0.0433),
    Published("6.2B", 8, 32, 29.802, 29.428, 19.53, 0.577, 303104, 131072, 0.1045, 0.0022),
    Published("14.6B", 16, 48, 11.347, 11.248, 8.132, 0.377, 378880, 163840, 0.1397, 0.0066),
    Published("28.3B", 32, 96, 10.419, 10.207, 7.715, 0.408, 454656, 196608, 0.1421, 0.0038),
    Published("28.3B", 32, 128, 10.419, 10.207, 7.715, 0.408, 454656, 196608, None, 0.0029),
    Published("28.3B", 32, 256, 10.419, 10.207, 7.715, 0.408, 454656, 196608, None, 0.0018),
    Published("1.5B", 8, 32, 18.513, 18.086, 9.331, 0.626, 201216, 73728, 0.1242, 0.0039),
    Published("14.6B", 16, 64, 11.307, 11.254, 8.101, 0.379, 378880, 163840, 0.1088, 0.0054),
)


class Instance(NamedTuple):
    """Job to plan, with its name, its group, and the target gap or bubble rate."""

    name: str
    group: str
    job: Job
    failed: list[Worker]
    limit: float
    bubble: bool = False
    """True if the bubble rate, (period - work) / period, is judged.

    The zero-bubble papers judge it so.
    """
    layers: Layers = "fixed"


def fault_free() -> Iterator[Instance]:
    """Yield one pipeline at the published settings, with room for p and for 2p activations."""
    for row in PUBLISHED:
        for factor, target in ((1, row.zb_1p), (2, row.zb_2p)):
            times = (
                f"forward = {row.forward}\nbackward_input = {row.backward_input}\n"
                f"backward_weight = {row.backward_weight}\ntransfer = {row.transfer}"
            )
            memory = (
                f"capacity = {factor * row.stages * row.activation}\nactivation = "
                f"{row.activation}\n"
                f"weight_stash = {row.stash}"
            )
            name = f"{row.model} {row.stages}x{row.microbatches} zb_{factor}p"
            job = parse_job(
                f"pipelines = 1\nstages = {row.stages}\nmicrobatches = {row.microbatches}\n"
                f"[time]\n{times}\n[memory]\n{memory}\n"
            )
            if target is None:
                continue
            # Published with four digits.
            yield Instance(name, f"zb_{factor}p", job, [], target + 0.00005, bubble=True)


def generated() -> Iterator[Instance]:
    """Yield one pipeline at random settings of the same kind."""
    draw = random.Random(0)
    for _ in range(40):
        stages = draw.choice((4, 8, 12, 16, 24, 32))
        microbatches, factor = (
            draw.choice((2, 3, 4, 8)) * stages,
            draw.choice((1.0, 1.25, 1.5, 2.0, 3.0)),
        )
        forward = round(draw.uniform(8, 30), 3)
        gradient, weight, transfer = (
            round(forward * draw.uniform(low, high), 3)
            for low, high in ((0.85, 1.15), (0.4, 1.0), (0.0, 0.06))
        )
        activation, stash = draw.randint(20, 50), draw.randint(5, 25)
        job = parse_job(
            f"pipelines = 1\nstages = {stages}\nmicrobatches = {microbatches}\n[time]\n"
            f"forward = {forward}\nbackward_input = {gradient}\nbackward_weight = {weight}\n"
            f"transfer = {transfer}\n[memory]\ncapacity = {int(factor * stages * activation)}\n"
            f"activation = {activation}\nweight_stash = {stash}\n"
        )
        name = (
            f"{stages}x{microbatches} {forward} {gradient} {weight} {transfer} {activation} {stash}"
        )
        yield Instance(name, f"{factor:g}p", job, [], LIMITS[2.0])


def failures() -> Iterator[Instance]:
    """Yield uniform stages with one failure, and with one in each of three different stages."""
    times = "forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5"
    for factor, pipelines, stages, microbatches, count in itertools.product(
        LIMITS, (3, 4, 8, 16, 32), (4, 8, 16), (8, 16, 32), (1, 3)
    ):
        yield _failed(
            f"{pipelines}x{stages}x{microbatches} {factor:g}S {count} down",
            pipelines,
            stages,
            microbatches,
            times,
            factor,
            count,
        )


def grids() -> Iterator[Instance]:
    """Yield random grids with one to four random failures; uniform stages, capacity 2S."""
    draw = random.Random(0)
    times = "forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5"
    for _ in range(60):
        pipelines, stages = draw.choice((3, 4, 6, 8, 12, 16)), draw.choice((4, 5, 8, 12, 16))
        microbatches = draw.choice((1, 2, 4)) * stages
        workers = [
            Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)
        ]
        failed = sorted(draw.sample(workers, draw.randint(1, 4)))
        who = ", ".join(map(str, failed))
        job = _uniform(pipelines, stages, microbatches, times, 2.0)
        failed_of_stage = Counter(worker.column for worker in failed)
        if all(failed_of_stage[stage] < pipelines for stage in range(stages)):
            yield Instance(
                f"{pipelines}x{stages}x{microbatches}: {who}",
                f"{len(failed)} down",
                job,
                failed,
                LIMITS[2.0],
            )


def uneven() -> Iterator[Instance]:
    """Yield grids with heavier embedding and head, and one slow worker.

    Stage 0 has no input gradient, and the capacity is 2S.
    """
    for pipelines, stages, microbatches, count in itertools.product(
        (3, 4, 8, 16), (4, 8, 16), (8, 16, 32), (1, 3)
    ):
        middle = stages - 2
        times = (
            f"forward = [12, {'10, ' * middle}14]\nbackward_input = [0, {'10, ' * middle}13]\n"
            f"backward_weight = [13, {'10, ' * middle}13]\ntransfer = 1\noptimizer = 5\n"
            f"slow = {{'0.1' = 1.2}}"
        )
        name = f"{pipelines}x{stages}x{microbatches} uneven {count} down"
        yield _failed(name, pipelines, stages, microbatches, times, 2.0, count)


def _failed(
    name: str, pipelines: int, stages: int, microbatches: int, times: str, factor: float, count: int
) -> Instance:
    failed = [
        Worker(index % pipelines, (stages // 2 + index * (stages // 4)) % stages)
        for index in range(count)
    ]
    job = _uniform(pipelines, stages, microbatches, times, factor)
    return Instance(name, f"{factor:g}S", job, failed, LIMITS[factor])


def _uniform(pipelines: int, stages: int, microbatches: int, times: str, factor: float) -> Job:
    """Return a job with room for `factor` times as many micro-batches as there are stages."""
    return parse_job(
        f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = "
        f"{microbatches}\n[time]\n{times}\n"
        f"[memory]\ncapacity = {int(factor * stages)}\nactivation = 1\nweight_stash = 1\n"
    )


def shared() -> Iterator[Instance]:
    """Yield slow workers, alone and with failures; layers in place, four per stage; capacity 2S."""
    for pipelines, stages, factor, count in itertools.product(
        (2, 4, 8), (4, 8), (1.2, 1.34, 2.0, 3.0), (0, 1)
    ):
        yield _layered(
            pipelines,
            stages,
            4 * stages,
            4 * stages,
            [Worker(index, stages - 1) for index in range(count)],
            f"{{'{pipelines - 1}.{stages // 2}' = {factor}}}",
        )


def moved() -> Iterator[Instance]:
    """Yield instances whose layers may move.

    They have one, two and four failures, one and two slow workers, and both.
    """
    for pipelines, stages, rounds, layers in itertools.product(
        (2, 3, 4, 6, 8, 16), (4, 8, 16), (2, 4), (4, 8)
    ):
        for count, slow in (
            (1, {}),
            (2, {}),
            (4, {}),
            (0, {0: 1.34}),
            (0, {0: 1.2, 1: 3.0}),
            (1, {1: 2.0}),
        ):
            failed = [
                Worker(index % pipelines, (stages // 2 + 3 * index) % stages)
                for index in range(count)
            ]
            factors = ", ".join(
                f"'{index}.{index + 1}' = {factor}" for index, factor in slow.items()
            )
            yield _layered(
                pipelines,
                stages,
                rounds * stages,
                layers * stages,
                failed,
                f"{{{factors}}}",
                "move",
            )


def _layered(
    pipelines: int,
    stages: int,
    microbatches: int,
    layers: int,
    failed: list[Worker],
    slow: str,
    mode: Layers = "fixed",
) -> Instance:
    """Return a job whose layers have no weights, so that any worker may hold any.

    F = I = W, transfer F / 10, optimizer F / 2, capacity 2S.
    """
    job = parse_job(
        f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
        f"[placement]\nlayers = {[layers // stages] * stages}\n"
        "[time]\nforward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer "
        "= 5\n"
        f"slow = {slow}\n[memory]\ncapacity = {2 * stages}\nactivation = 1\nweight_stash = 1\n"
    )
    name = f"{pipelines}x{stages}x{microbatches} {layers} layers {len(failed)} down slow {slow}"
    return Instance(
        name, mode, job, failed, MOVED_LIMIT if mode == "move" else LIMITS[2.0], layers=mode
    )


def placements() -> Iterator[Instance]:
    """Yield each placement, with failures, room and sizes.

    There are zero to three failures, room for one to two times as many micro-batches as stages, and
    four sizes.
    """
    times = "forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5"
    for order, down, factor, (pipelines, stages, microbatches) in itertools.product(
        ("linear", "interleaved", "v", "bidirectional"),
        range(4),
        LIMITS,
        ((3, 4, 8), (4, 4, 16), (4, 8, 16), (6, 8, 32)),
    ):
        chunks = 2 if order in ("interleaved", "v") else 1
        failed = [Worker(index, (stages // 2 + index) % stages) for index in range(down)]
        chunked = f"chunks = {chunks}\n" if chunks > 1 else ""
        job = parse_job(
            f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
            f"[placement]\norder = '{order}'\n{chunked}[time]\n{times}\n[memory]\n"
            f"capacity = {int(factor * stages * chunks)}\nactivation = 1\nweight_stash = 1\n"
        )
        group = f"{order} {down} down"
        yield Instance(
            f"{group} {pipelines}x{stages}x{microbatches} {factor:g}S",
            group,
            job,
            failed,
            LIMITS[factor],
        )


SUITES = {
    "fault-free": fault_free,
    "generated": generated,
    "failures": failures,
    "grids": grids,
    "uneven": uneven,
    "shared": shared,
    "moved": moved,
    "placements": placements,
}


def measure(
    instance: Instance, method: str, time_limit: float, steps: int | None
) -> tuple[float, float, float, str]:
    """Return gap or bubble rate, its lower bound, seconds, and a gap's possible reason."""
    began = time.monotonic()
    options = PlanOptions(
        method=method,
        time_limit=time_limit,
        steps=steps,  # type: ignore[arg-type]
        layers=instance.layers,
    )
    plan = plan_with(options, instance.job, instance.failed)
    seconds = time.monotonic() - began
    schedule = plan.schedule
    if not instance.bubble:
        return schedule.gap or 0.0, 0.0, seconds, plan.evidence or ""
    times = schedule.times
    work = instance.job.microbatches[0] * (
        times.forward[0] + times.backward_input[0] + times.backward_weight[0]
    )
    return (
        (schedule.period_ticks - work) / schedule.period_ticks,
        (schedule.lower_bound_ticks - work) / schedule.lower_bound_ticks,
        seconds,
        plan.evidence or "",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=SUITES, action="append")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--method", default="cp-sat")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    console = Console()
    kept = json.loads(options.compare.read_text()) if options.compare else {}
    results: dict[str, float] = {}
    for suite in options.suite or SUITES:
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for instance in itertools.islice(SUITES[suite](), options.offset, None, options.every):
            value, bound, seconds, evidence = measure(
                instance, options.method, options.time_limit, options.steps
            )
            results[instance.name] = value
            groups[instance.group].append((value, instance.limit))
            change = f"  {value - kept[instance.name]:+.2%}" if instance.name in kept else ""
            proven = f"  (no plan below {bound:.2%})" if instance.bubble else ""
            verdict = "" if value <= instance.limit else f"  above {instance.limit:.2%}"
            console.print(
                f"{instance.name:34} {value:7.2%}{proven}{verdict}{change}  {seconds:.1f} s",
                highlight=False,
            )
            if value > instance.limit:
                console.print(f"    {evidence}", style="dim", highlight=False)
        console.print(_table(suite, groups))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _table(suite: str, groups: dict[str, list[tuple[float, float]]]) -> Table:
    table = Table(
        "group", "instances", "within limit", "median", "worst", "worst / limit", title=suite
    )
    for name, values in groups.items():
        within = sum(value <= limit for value, limit in values) / len(values)
        worst, limit = max(values)
        table.add_row(
            name,
            str(len(values)),
            f"{within:.0%}",
            f"{statistics.median(v for v, _ in values):.2%}",
            f"{worst:.2%}",
            f"{worst / limit:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
