"""Shared, shed, re-cut and floating plans in processes of their own.

Float64 training equals one process to 1e-9.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.layout.candidates import generate_layouts
from slipstream.planner.model.from_job import build_layered_problem, with_layout
from slipstream.planner.model.problem import AllowedLayouts
from slipstream.planner.options import Layers
from slipstream.planner.search.engine import find_best_candidate
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.coordinator.planning.schedule_finder import Scheduler
from slipstream.runtime.launch import run
from slipstream.runtime.processes.process_manager import Return
from slipstream.schedules.schedule import BackwardMode, OpKind, OptimizerMode, Schedule, Worker
from tests.jobs import grid
from tests.runtime.failing import at, dead, returned, train
from tests.runtime.running import assert_same_numbers, judge, schedule_for

LINEAR = grid(2, 4, 4, more="optimizer = 1\n[placement]\nlayers = [2, 2, 2, 2]")
V = grid(3, 2, 4, more="[placement]\norder = 'v'\nchunks = 2\nlayers = [2, 2, 2, 2]")
SLOW = grid(
    4,
    2,
    4,
    times="forward = 4\nbackward_input = 4\nbackward_weight = 4",
    more="slow = {'1.0' = 3}\n[placement]\nlayers = [4, 4]",
)
STEPS = 40_000
"""For each plan: any will do."""


def eight_layers(iterations: int = 6, **training: object) -> RunConfig:
    return parse_run_config(
        {"blocks": 6, "width": 8, "heads": 2, "context": 8, "dropout": 0.1},
        {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": iterations},
        **training,
    )


def layouts(
    job: Job,
    failed: list[Worker],
    layers: Layers = "move",
    backward: BackwardMode = "split",
    optimizer: OptimizerMode = "staggered",
) -> Iterator[Schedule]:
    """A schedule for each way to answer these failures."""
    layered_problem = build_layered_problem(
        job, failed, AllowedLayouts(layers=layers), backward=backward, optimizer=optimizer
    )
    for layout in generate_layouts(layered_problem):
        yield find_best_candidate(
            with_layout(layered_problem, layout), "greedy", Budget.of_steps(STEPS)
        ).make_schedule()


def floats(schedule: Schedule) -> bool:
    """Whether neighbours of a pipeline hold the same layer.

    They are beside those with stages of their own.
    """
    layers = [
        schedule.held_layers(seat.worker)
        for seat in schedule.seats
        if schedule.has_moved_layers(seat)
    ]
    return any(before[-1][1] > after[0][0] > before[0][0] for before, after in pairwise(layers))


def reduces_early(schedule: Schedule) -> bool:
    """Whether somebody reduces gradients between ops that compute."""
    kinds = []
    for program in schedule.programs:
        kinds.append([op.kind for op in program])
    return any(
        OpKind.A in ops and set(ops[ops.index(OpKind.A) :]) - {OpKind.A, OpKind.O} for ops in kinds
    )


def moves(schedule: Schedule) -> bool:
    """Whether somebody holds other layers than those of its stage."""
    return any(map(schedule.has_moved_layers, schedule.seats))


def cut_anew(job: Job, used: dict[tuple[Worker, ...], Schedule] | None = None) -> Scheduler:
    """Schedules that cut the layers anew for each failure, as asked for.

    They are the first that are found.
    """
    schedules = {} if used is None else used

    def scheduler(down: tuple[Worker, ...]) -> Schedule:
        if down not in schedules:
            schedules[down] = first(job, list(down), moves) if down else schedule_for(job)
        return schedules[down]

    return scheduler


def first(job: Job, failed: list[Worker], what: Callable[[Schedule], bool], **modes) -> Schedule:
    return next(schedule for schedule in layouts(job, failed, **modes) if what(schedule))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "failed", "what", "modes"),
    [
        (LINEAR, [Worker(1, 2)], floats, {}),
        (LINEAR, [Worker(1, 2)], floats, {"backward": "fused", "optimizer": "synchronous"}),
        (LINEAR, [Worker(1, 0)], reduces_early, {}),
        (
            LINEAR,
            [Worker(0, 1), Worker(1, 3)],
            lambda schedule: (
                schedule.slices and sum(map(schedule.has_moved_layers, schedule.seats)) >= 4
            ),
            {"backward": "fused"},
        ),
        (
            LINEAR,
            [Worker(1, 2)],
            lambda schedule: sum(map(schedule.has_moved_layers, schedule.seats)) == 7,
            {"optimizer": "synchronous"},
        ),
        (
            V,
            [Worker(0, 1)],
            lambda schedule: (
                schedule.slices and any(map(schedule.has_moved_layers, schedule.seats))
            ),
            {},
        ),
        (
            V,
            [Worker(0, 1)],
            lambda schedule: any(map(schedule.has_moved_layers, schedule.seats)),
            {"backward": "fused"},
        ),
    ],
    ids=[
        "floating",
        "floating-fused-synchronous",
        "reduced early",
        "two down-fused",
        "one cut for all",
        "v",
        "v-fused",
    ],
)
def test_layers_that_have_moved(job, failed, what, modes, fork_server, tmp_path):
    schedule = first(job, failed, what, **modes)
    for config in (eight_layers(), eight_layers(clip_norm=1.6, skip_nonfinite=True)):
        result = run(
            schedule, config, out=tmp_path / str(config.training.clip_norm), fork_server=fork_server
        )
        assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))


@pytest.mark.parametrize("backward", ["split", "fused"])
def test_slices_and_work_that_is_shed(backward, fork_server, tmp_path):
    """Work that is shed is divided over the others, some of it in slices.

    One worker is slow and one is down.
    """
    schedule = first(
        SLOW,
        [Worker(2, 1)],
        lambda schedule: schedule.slices and schedule.shed and schedule.rerouted,
        layers="fixed",
        backward=backward,
    )
    config = eight_layers()
    result = run(schedule, config, out=tmp_path, fork_server=fork_server)
    assert_same_numbers(result, judge(config, SLOW.microbatches, config.training.iterations))


@pytest.mark.slow
@pytest.mark.usefixtures("plans_here")
@pytest.mark.parametrize(
    "kills",
    [
        [("1.2", 1, 3), ("0.0", 3, "A")],
        [("0.1", 1, "O"), ("1.3", 3, "stepped")],
        [("1.0", 1, "reported"), ("0.3", 3, 9)],
    ],
)
def test_from_one_cut_to_another_and_back(kills, fork_server, tmp_path):
    """Each schedule cuts the layers anew, and training goes on.

    Whoever comes back takes its own from those who have them then.
    """
    used = {}
    result = train(
        [at(*kill) for kill in kills],
        fork_server,
        tmp_path,
        job=LINEAR,
        config=eight_layers(iterations=45, clip_norm=1.6),
        scheduler=cut_anew(LINEAR, used),
        returns=tuple(Return(Worker.parse(kill[0]), 6) for kill in kills),
    )
    names = [kill[0] for kill in kills]
    assert dead(result) == names and sorted(returned(result)) == sorted(names)
    assert sum(map(moves, used.values())) >= 2, "nothing has moved"
