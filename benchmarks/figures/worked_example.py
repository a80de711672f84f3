"""Recompute the worked example, techniques added one by one.

It has 3 pipelines x 4 stages x 6 micro-batches, and worker 1.2 is dead.
"""

from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner.budget import CountCallback
from slipstream.planner.job.file import Job, StageMemory, StageTimes
from slipstream.planner.options import Method
from slipstream.planner.plan import Plan, plan_job
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Worker

DEAD = (Worker(1, 2),)
PUBLISHED = (30, 39, 32, 30)
"""Published slots: 27 + 3, 36 + 3, 29 + 3, 30."""
NAMES = (
    "1F1B, all alive",
    "re-routing",
    "+ split backward",
    "+ staggered optimizer",
    "all alive, split and staggered",
)
SECONDS = 5.0
"""Time limit for each schedule."""


def example(limited: bool = False) -> Job:
    """Return the job: F = I = W = 1 slot, optimizer 3, transfer 0.

    With `limited`, it has the memory of 1F1B: 4, 3, 2 and 1 activations.
    """
    unit_times = (1.0,) * 4
    times = StageTimes(
        forward=unit_times,
        backward_input=unit_times,
        backward_weight=unit_times,
        optimizer=(3.0,) * 4,
        all_reduce=(0.0,) * 4,
        transfer=0.0,
    )
    memory = (
        StageMemory(capacity=(4.0, 3.0, 2.0, 1.0), activation=unit_times, weight_stash=(0.0,) * 4)
        if limited
        else None
    )
    return Job(
        name="worked-example",
        pipelines=3,
        stages=4,
        microbatches=(6,) * 3,
        time=times,
        memory=memory,
        columns=(0, 1, 2, 3),
    )


def reproduce(progress: CountCallback) -> Figure:
    """Plan the four published schedules, and one with all workers alive.

    The last is unpublished, with the same techniques.
    """
    cases: tuple[tuple[Job, tuple[Worker, ...], Method, BackwardMode, OptimizerMode], ...] = (
        (example(), (), "1f1b", "fused", "synchronous"),
        (example(limited=True), DEAD, "cp-sat", "fused", "synchronous"),
        (example(), DEAD, "cp-sat", "split", "synchronous"),
        (example(), DEAD, "cp-sat", "split", "staggered"),
        (example(), (), "cp-sat", "split", "staggered"),
    )
    plans: list[Plan] = []
    for index, (job, failed, method, backward, optimizer) in enumerate(cases):
        plans.append(
            plan_job(
                job,
                failed,
                method=method,
                backward=backward,
                optimizer=optimizer,
                time_limit=SECONDS,
            )
        )
        progress(index + 1, len(cases))
    periods = [plan.schedule.seconds(plan.schedule.period_ticks) for plan in plans]
    bounds = [plan.schedule.seconds(plan.schedule.lower_bound_ticks) for plan in plans]
    published = (*PUBLISHED, None)
    rows: list[tuple[Cell, ...]] = [
        (name, there, here, bound, plan.schedule.status)
        for name, there, here, bound, plan in zip(
            NAMES, published, periods, bounds, plans, strict=True
        )
    ]
    return Figure(
        name="worked-example",
        title="Worked example: 3 x 4 workers, 6 micro-batches, worker 1.2 dead",
        kind="bars",
        x_label="",
        y_label="period in slots",
        x=NAMES,
        series=(
            Series(name="published", values=tuple(map(_number, published)), published=True),
            Series(name="this planner", values=tuple(periods)),
        ),
        header=("schedule", "published", "this planner", "proven bound", "status"),
        rows=tuple(rows),
        findings={},
        assumptions=(
            "re-routing: fused backward, synchronous optimizer, memory for 4, 3, 2 and 1 "
            "activations; the published 36 + 3 re-routes round-robin, here any peer may take any",
            "from the split backward on, memory is unlimited",
        ),
    )


def _number(value: int | None) -> float | None:
    return None if value is None else float(value)
