"""Bounds of small jobs whose reductions overlap compute.

The model they are compared with shares nothing with the planner's.

Every layer of every micro-batch is an op of its own, and may be run by any worker of its stage, or
where layers may move, by any worker, which then holds the layer. CP-SAT tries all schedules.
"""

from fractions import Fraction
from itertools import accumulate, pairwise, product
from math import ceil, floor

import pytest
from ortools.sat.python import cp_model

from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.file import Job
from slipstream.planner.normalise import normalised
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Scope, Worker
from tests.jobs import grid

OVERLAP = "[network]\noverlap = true\n"
JOBS = {
    "one stage": grid(
        2,
        1,
        1,
        times="forward = 3\nbackward_input = 3\nbackward_weight = 3\nall_reduce = 6",
        more=f"optimizer = 1\n[placement]\nlayers = [3]\n{OVERLAP}",
    ),
    "two stages": grid(
        2,
        2,
        2,
        times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nall_reduce = 4",
        more=f"optimizer = 1\n[placement]\nlayers = [2, 2]\n{OVERLAP}",
    ),
    "unequal": grid(
        2,
        2,
        [1, 2],
        times="forward = [2, 4]\nbackward_input = [2, 2]\nbackward_weight = [4, 2]\n"
        "all_reduce = [6, 2]\ntransfer = 1",
        more=f"optimizer = [1, 2]\n[placement]\nlayers = [2, 1]\n{OVERLAP}",
    ),
    "latency": grid(
        2,
        1,
        1,
        times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nall_reduce = 6",
        more=f"optimizer = 1\n[placement]\nlayers = [2]\n{OVERLAP}latency = 1\n",
    ),
    "no layers": grid(
        2,
        2,
        2,
        times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nall_reduce = [1, 5]",
        more=f"optimizer = 1\n{OVERLAP}",
    ),
}
"""All times are whole seconds, also of single layers."""


def is_possible(job: Job, failed: list[Worker], period: int, *, moving: bool = False) -> bool:
    """Return whether a schedule has a period of at most so many seconds.

    `moving`: any workers may hold any layers.
    """
    ends = [*accumulate(job.layers or (1,) * job.depth, initial=0)]
    stages = [range(first, end) for first, end in pairwise(ends)]
    # Without a latency, one reduction takes as long as its parts: these may be as small as can be.
    choices = []
    for layers in stages:
        single = [[layer] for layer in layers]
        choices.append(_partitions(layers) if job.network.latency else [single])
    return any(
        _is_possible(job, failed, period, ranges, moving=moving) for ranges in product(*choices)
    )


def _partitions(layers: range) -> list[list[range]]:
    """All ways to reduce the layers of a stage range by range."""
    if not layers:
        return [[]]
    return [
        [layers[:size], *rest]
        for size in range(1, len(layers) + 1)
        for rest in _partitions(layers[size:])
    ]


def _is_possible(
    job: Job, failed: list[Worker], period: int, ranges: tuple[list[range], ...], *, moving: bool
) -> bool:
    clock, model = job.time, cp_model.CpModel()
    counts = job.layers or (1,) * job.depth
    stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
    horizon = job.stages * period
    workers = [
        Worker(pipeline, column)
        for column in range(job.stages)
        for pipeline in range(job.pipelines)
    ]
    live = [worker for worker in workers if worker not in failed]
    busy, hosts = {worker: [] for worker in live}, {}
    start = {}
    for unit in product(range(job.pipelines), range(max(job.microbatches)), range(len(stage_of))):
        pipeline, microbatch, layer = unit
        if microbatch >= job.microbatches[pipeline]:
            continue
        stage = stage_of[layer]
        hosts[unit] = {
            worker: model.new_bool_var("") for worker in live if moving or worker.column == stage
        }
        model.add_exactly_one(hosts[unit].values())
        for kind, seconds in (
            ("F", clock.forward),
            ("I", clock.backward_input),
            ("W", clock.backward_weight),
        ):
            ticks = Fraction(seconds[stage]) / counts[stage]
            assert ticks.denominator == 1
            begin = start[kind, *unit] = model.new_int_var(0, horizon, ""), int(ticks)
            for worker, here in hosts[unit].items():
                busy[worker].append((here, begin[0], int(ticks)))

    def after(later: tuple, earlier: tuple, *, sent: bool) -> None:
        begin, (first, ticks) = start[later][0], start[earlier]
        model.add(begin >= first + ticks)
        if sent and clock.transfer:
            later_hosts, other = hosts[later[1:]], hosts[earlier[1:]]
            for worker, here in later_hosts.items():  # unless both are on one worker
                model.add(begin >= first + ticks + int(clock.transfer)).only_enforce_if(
                    here, *([other[worker].negated()] if worker in other else [])
                )

    for pipeline, microbatch, layer in hosts:
        unit = pipeline, microbatch, layer
        after(("I", *unit), ("F", *unit), sent=False)
        after(("W", *unit), ("I", *unit), sent=False)
        if layer:
            after(("F", *unit), ("F", pipeline, microbatch, layer - 1), sent=True)
            after(("I", pipeline, microbatch, layer - 1), ("I", *unit), sent=True)
    layer_held = {}
    for worker in live:
        for layer, stage in enumerate(stage_of):
            is_own = worker.column == stage
            layer_held[worker, layer] = model.new_bool_var("") if moving else is_own
    for unit, here in hosts.items() if moving else ():
        for worker, runs in here.items():
            model.add_implication(runs, layer_held[worker, unit[2]])
    reductions: list[tuple] = []
    for stage, parts in enumerate(ranges):
        least = Fraction(2 * (job.pipelines - 1) * job.network.latency)
        for part in parts:
            seconds = (
                least + (Fraction(clock.all_reduce[stage]) - least) * len(part) / counts[stage]
            )
            assert seconds.denominator == 1
            begin = model.new_int_var(0, horizon, "")
            reductions.append((begin, int(seconds), part[0]))
            for (kind, *unit), (first, ticks) in start.items():
                if kind == "W" and unit[2] in part:
                    model.add(begin >= first + ticks)
    for worker in live:
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(
                begin, seconds, layer_held[worker, layer], ""
            )
            for begin, seconds, layer in reductions
        )
        model.add_no_overlap(
            model.new_optional_fixed_size_interval_var(begin, ticks, here, "")
            for here, begin, ticks in busy[worker]
        )
        window = model.new_int_var(0, horizon, "")
        costs = {
            layer: Fraction(clock.optimizer[stage]) / counts[stage]
            for layer, stage in enumerate(stage_of)
        }
        assert not moving or all(cost.denominator == 1 for cost in costs.values())
        if moving:
            step = sum(int(cost) * layer_held[worker, layer] for layer, cost in costs.items())
        else:
            step = int(clock.optimizer[worker.column])
        for here, begin, ticks in busy[worker]:
            model.add(window <= begin).only_enforce_if(here)
            model.add(begin + ticks + step - window <= period).only_enforce_if(here)
        for begin, seconds, layer in reductions:
            model.add(begin + seconds + step - window <= period).only_enforce_if(
                layer_held[worker, layer]
            )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    return solver.solve(model) == cp_model.OPTIMAL


@pytest.mark.parametrize("failed", [[], [Worker(0, 0)]], ids=["alive", "one dead"])
@pytest.mark.parametrize("name", JOBS)
def test_no_schedule_is_shorter_than_the_bound(name, failed):
    job = JOBS[name]
    schedule = plan_only(PlanOptions(steps=20_000), job, failed).schedule
    bound = ceil(schedule.seconds(schedule.lower_bound_ticks) * (1 - 1e-9))
    assert not is_possible(job, failed, bound - 1)
    assert is_possible(job, failed, floor(schedule.seconds(schedule.period_ticks) * (1 + 1e-9)))


MOVED = {
    "one stage": grid(
        2,
        1,
        1,
        times="forward = 3\nbackward_input = 3\nbackward_weight = 3\nall_reduce = 6",
        more=f"optimizer = 3\n[placement]\nlayers = [3]\n{OVERLAP}",
    ),
    "two stages": grid(
        2,
        2,
        1,
        times="forward = 2\nbackward_input = 2\nbackward_weight = 2\nall_reduce = 4",
        more=f"optimizer = 2\n[placement]\nlayers = [2, 2]\n{OVERLAP}",
    ),
    "unequal": grid(
        2,
        2,
        1,
        times="forward = [1, 2]\nbackward_input = [1, 2]\nbackward_weight = [2, 1]\n"
        "all_reduce = [3, 2]\ntransfer = 1",
        more=f"optimizer = 1\n[placement]\nlayers = [1, 1]\n{OVERLAP}",
    ),
}


@pytest.mark.parametrize("failed", [[], [Worker(0, 0)]], ids=["alive", "one dead"])
@pytest.mark.parametrize("name", MOVED)
def test_no_schedule_is_shorter_than_the_bound_where_layers_move(name, failed):
    job = MOVED[name]
    schedule = plan_only(PlanOptions(steps=20_000, layers="move"), job, failed).schedule
    assert schedule.scope is Scope.LAYERS
    ticks = proven_bound(schedule).ticks
    assert ticks >= schedule.lower_bound_ticks  # which may be rounded down to ticks of whole stages
    bound = ceil(schedule.seconds(ticks) * (1 - 1e-9))
    assert not is_possible(job, failed, bound - 1, moving=True)
    assert is_possible(
        job, failed, floor(schedule.seconds(schedule.period_ticks) * (1 + 1e-9)), moving=True
    )


def test_what_remains_of_reductions_is_proven_where_layers_move():
    # One worker is left: 18 s of compute, 2 s of the last layer's reduction, 3 s of steps.
    schedule = plan_only(
        PlanOptions(steps=20_000, layers="move"), MOVED["one stage"], [Worker(0, 0)]
    ).schedule
    assert schedule.status == "optimal" and schedule.seconds(schedule.period_ticks) == 18 + 2 + 3


@pytest.mark.parametrize("name", ["two stages", "no layers"])
@pytest.mark.parametrize("failed", [[Worker(0, 0)], [Worker(0, 1)]], ids=str)
def test_roles_move_with_reductions_beside_compute(name, failed):
    """Never longer than where failures fell, and the bound holds whichever worker is down."""
    job, options = JOBS[name], PlanOptions(steps=50_000)
    in_place, schedule = (
        plan_only(options, job, failed).schedule,
        normalised(job, failed, options).schedule,
    )
    assert schedule.has_overlap and check(schedule) == [] and list(schedule.failed) == failed
    assert schedule.seconds(schedule.period_ticks) <= in_place.seconds(in_place.period_ticks) * (
        1 + 1e-9
    )
    bound = ceil(schedule.seconds(schedule.lower_bound_ticks) * (1 - 1e-9))
    assert not any(is_possible(job, [Worker(0, column)], bound - 1) for column in range(job.stages))
