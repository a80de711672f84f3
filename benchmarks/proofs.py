"""Count the small jobs that are planned within 2 % of the proven bound.

    python -m benchmarks.proofs [--jobs 100] [--first 0] [--seed 0] [--hard] [--time-limit 60]
                                [--steps N] [--json FILE] [--compare FILE]

Draws jobs of up to 150 compute ops, with workers down, unequal stages and pipelines, and mostly
little memory, and counts those whose plan is at most 2 % above its bound. `--hard` draws only jobs
for which list schedules alone are further from the bounds that need no search. With `--steps` the
result does not depend on the machine: 400,000 are about a second of an idle core. `--json` stores
periods and bounds, `--compare` prints the change against stored ones.
"""

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.schedules.schedule import Worker

MOST_OPS = 150
FEWEST_OPS = 60
CLOSE = 0.02
"""Maximum gap at which a job counts as proven."""


class Drawn(NamedTuple):
    """Job and the workers that are down."""

    name: str
    job: Job
    failed: list[Worker]


def draw_jobs(seed: int) -> Iterator[Drawn]:
    """Yield jobs without end. Each stage has a live worker, and memory has room for a schedule."""
    draw = random.Random(seed)
    for number in range(10**9):
        while True:
            pipelines, stages = draw.randint(2, 4), draw.randint(2, 4)
            if draw.random() < 0.5:
                counts = [draw.randint(2, 6)] * pipelines
            else:
                counts = [draw.randint(2, 6) for _ in range(pipelines)]
            if FEWEST_OPS <= 3 * stages * sum(counts) <= MOST_OPS:
                break
        times = {
            "forward": (1, 1.5, 2),
            "backward_input": (1, 1.5, 2, 2.5),
            "backward_weight": (1, 1.5, 2, 2.5),
        }
        alike = draw.random() < 0.3
        lines = [
            f"pipelines = {pipelines}",
            f"stages = {stages}",
            f"microbatches = {counts}",
            "[time]",
        ]
        for key, values in times.items():
            if alike:
                given = [draw.choice(values)] * stages
            else:
                given = [draw.choice(values) for _ in range(stages)]
            lines.append(
                f"{key} = {[0, *given[1:]] if key == 'backward_input' and not alike else given}"
            )
        lines += [
            f"transfer = {draw.choice((0, 0.1, 0.5))}",
            "optimizer = 0.5",
            "all_reduce = 0.25",
        ]
        if draw.random() < 0.6:
            room = max(2, round(stages * draw.choice((1, 1.5, 2))))
            lines += [
                "[memory]",
                f"capacity = {room}",
                "activation = 1",
                f"weight_stash = {draw.choice((0.5, 1))}",
            ]
        down = [Worker(draw.randrange(pipelines), stage) for stage in range(stages)]
        failed = sorted(draw.sample(down, draw.randint(1, min(2, stages))))
        name = f"{number}: {pipelines} x {stages}, {counts} micro-batches, {len(failed)} down"
        yield Drawn(name, parse_job("\n".join(lines)), failed)


def is_hard(drawn: Drawn) -> bool:
    """Return whether list schedules are not close to the bound."""
    schedule = plan_only(
        PlanOptions(method="greedy", steps=20_000), drawn.job, drawn.failed
    ).schedule
    return schedule.gap is None or schedule.gap > CLOSE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hard", action="store_true")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    kept = json.loads(given.compare.read_text()) if given.compare else {}
    options = PlanOptions(time_limit=given.time_limit, steps=given.steps)
    results: dict[str, tuple[float, float]] = {}
    drawn_jobs = filter(is_hard, draw_jobs(given.seed)) if given.hard else draw_jobs(given.seed)
    for drawn in itertools.islice(drawn_jobs, given.first, given.first + given.jobs):
        began = time.monotonic()
        plan = plan_only(options, drawn.job, drawn.failed)
        bound = plan.schedule.seconds(plan.schedule.lower_bound_ticks)
        results[drawn.name] = plan.period, bound
        before = (
            f"  (before {kept[drawn.name][0]:g} and {kept[drawn.name][1]:g})"
            if drawn.name in kept
            else ""
        )
        print(
            f"{drawn.name:60} {plan.period:g} bound {bound:g} "
            f"{plan.period / bound - 1:7.2%}{before}  {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if given.json:
            given.json.write_text(json.dumps(results, indent=1) + "\n")
    close = sum(period <= (1 + CLOSE) * bound for period, bound in results.values())
    print(f"{close} of {len(results)} within {CLOSE:.0%}")


if __name__ == "__main__":
    main()
