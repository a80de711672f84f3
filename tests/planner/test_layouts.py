"""Layouts become problems, and these become schedules that the checker passes."""

from itertools import pairwise

import msgspec
import pytest

from slipstream.planner.budget import Budget
from slipstream.planner.layout.candidates import generate_layouts, with_finer_slices
from slipstream.planner.model.bounds import exact_bound, lower_bound
from slipstream.planner.model.decompose import decompose
from slipstream.planner.model.from_job import build_layered_problem, build_problem, with_layout
from slipstream.planner.model.memory import activation_capacity
from slipstream.planner.model.problem import AllowedLayouts, Bound, Layout, MicroBatch, RouteSlice
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.planner.search.engine import find_best_candidate
from slipstream.planner.search.improvement import improve_by_annealing, improve_by_list_schedules
from slipstream.planner.search.incumbent import divide_problem
from slipstream.schedules.check import check
from slipstream.schedules.schedule import OpKind, Scope, Worker
from tests.jobs import grid

PER_STAGE = 4


def layered(pipelines, stages, microbatches, *, more="", times=""):
    layers = f"[placement]\nlayers = {[PER_STAGE] * stages}\n"
    return grid(
        pipelines,
        stages,
        microbatches,
        times="forward = 4\nbackward_input = 4\nbackward_weight = 4\n"
        f"transfer = 1\noptimizer = 2\n{times}",
        more=layers + more,
    )


def recut(job, broken: int, dead: int) -> Layout:
    """The broken pipeline cut evenly over its live workers, by hand.

    Its micro-batches stay in it.
    """
    last = PER_STAGE * job.stages
    live = [Worker(broken, column) for column in range(job.stages) if column != dead]
    edges = [round(index * last / len(live)) for index in range(len(live) + 1)]
    stops = [
        RouteSlice((first, end), worker)
        for (first, end), worker in zip(pairwise(edges), live, strict=True)
    ]
    home = {}
    for pipeline in range(job.pipelines):
        home[pipeline] = tuple(
            RouteSlice((column * PER_STAGE, (column + 1) * PER_STAGE), Worker(pipeline, column))
            for column in range(job.stages)
        )
    home[broken] = tuple(stops)
    return Layout(
        kind="by hand",
        holds={stop.worker: (stop.layers,) for route in home.values() for stop in route},
        routes={
            MicroBatch(pipeline, number): home[pipeline]
            for pipeline, count in enumerate(job.microbatches)
            for number in range(count)
        },
    )


@pytest.mark.parametrize("optimizer", ["staggered", "synchronous"])
@pytest.mark.parametrize("all_reduce", [0, 1])
def test_a_recut_pipeline_is_a_piece_of_its_own(optimizer, all_reduce):
    job = layered(4, 4, 8, times=f"all_reduce = {all_reduce}")
    failed = [Worker(1, 2)]
    problem = with_layout(build_layered_problem(job, failed, optimizer=optimizer), recut(job, 1, 2))
    assert sorted(len(piece.copies) for piece in decompose(problem)) == [1, 3]
    solved = find_best_candidate(problem, "cp-sat", Budget.of_steps(120_000))
    schedule = solved.make_schedule()
    assert check(schedule) == []
    assert schedule.rerouted == schedule.shed == 0


def test_layers_that_are_done_early_are_reduced_between_the_ops_of_the_others():
    """A worker reduces early layers between the ops of later ones.

    It has layers of two stages.
    """
    job, failed = layered(2, 4, 8), [Worker(1, 2)]
    layered_problem = build_layered_problem(job, failed)
    problem = with_layout(layered_problem, with_finer_slices(layered_problem, recut(job, 1, 2), 1))
    assert problem.can_reduce_early
    solved = find_best_candidate(problem, "cp-sat", Budget.of_steps(120_000))
    schedule = solved.make_schedule()
    assert check(schedule) == []
    kinds = []
    for seat in schedule.seats:
        kinds.append([op.kind for op in schedule.programs[seat.program]])
    assert any(OpKind.W in ops[ops.index(OpKind.A) :] for ops in kinds)
    costly = with_layout(
        build_layered_problem(layered(2, 4, 8, times="all_reduce = 1"), failed), recut(job, 1, 2)
    )
    assert not costly.can_reduce_early, "what takes time is left to the end"


def test_a_worker_that_holds_nothing_has_a_place_in_the_schedule():
    """It came out with a step far before the iteration."""
    job, failed = layered(2, 4, 4), [Worker(1, 2)]
    layout = recut(job, 1, 2)
    first, second, third = layout.routes[MicroBatch(1, 0)]
    whole = (
        RouteSlice(first.layers, first.worker),
        RouteSlice((second.layers[0], third.layers[1]), second.worker),
    )
    holds = {**layout.holds, second.worker: (whole[1].layers,), third.worker: ()}
    routes = dict(layout.routes)
    for batch in routes:
        if batch.pipeline == 1:
            routes[batch] = whole
    layout = msgspec.structs.replace(layout, holds=holds, routes=routes)
    problem = with_layout(build_layered_problem(job, failed), layout)
    assert problem.can_reduce_early
    solved = find_best_candidate(problem, "greedy", Budget.of_steps(0))
    assert check(solved.make_schedule()) == []


def test_layers_that_move_keep_most_of_the_throughput_of_two_pipelines():
    """One of 16 workers is down.

    Half is left with layers in place; here the broken pipeline is cut anew.
    """
    job, failed = layered(2, 8, 16), [Worker(1, 3)]
    free = find_best_candidate(
        build_problem(job), "greedy", Budget.of_steps(120_000)
    ).make_schedule()
    schedule = plan_only(PlanOptions(layers="move", steps=400_000), job, failed).schedule
    assert check(schedule) == []
    assert free.seconds(free.period_ticks) > 0.85 * schedule.seconds(schedule.period_ticks)
    fixed = plan_only(PlanOptions(steps=120_000), job, failed).schedule
    assert fixed.seconds(fixed.period_ticks) > 1.5 * schedule.seconds(schedule.period_ticks)


def test_a_large_cluster_is_not_refused_for_lack_of_time_where_layers_may_move():
    """1,024 workers with one down and no time to search: 0.7 s of a processor."""
    failed = [Worker(3, 5)]
    schedule = plan_only(
        PlanOptions(layers="move", method="greedy", steps=4_000), layered(64, 16, 32), failed
    ).schedule
    assert check(schedule) == [] and schedule.period_ticks < 1.1 * schedule.lower_bound_ticks


def test_slices_even_out_what_whole_micro_batches_cannot():
    # 64 micro-batches over three live workers of a stage: 22 whole ones on some, or 21 1/3 each
    # with four layers.
    job, failed = layered(4, 2, 16), [Worker(1, 1)]
    whole = plan_only(PlanOptions(steps=400_000, slices=False), job, failed).schedule
    cut = plan_only(PlanOptions(steps=400_000), job, failed).schedule
    assert check(cut) == [] and cut.slices
    assert whole.seconds(whole.period_ticks) >= 22 * 12
    assert (
        cut.seconds(cut.lower_bound_ticks)
        <= cut.seconds(cut.period_ticks)
        < whole.seconds(whole.period_ticks)
    )


def test_less_room_for_activations_beside_more_weights():
    job = layered(2, 4, 4, more="[memory]\ncapacity = 8\nactivation = 1\nweights = 4\n")
    problem = with_layout(build_layered_problem(job, [Worker(1, 2)]), recut(job, 1, 2))
    assert problem.memory is not None
    rooms = {
        worker: activation_capacity(problem, worker) * problem.memory.unit
        for worker in problem.live_workers
    }
    assert rooms[Worker(0, 1)] == pytest.approx(8.0) and rooms[Worker(1, 1)] == pytest.approx(
        8 - 4 * 2 / 4 + 0, abs=1
    )


def test_slices_cost_what_their_layers_do():
    job = layered(2, 4, 4)
    layered_problem = build_layered_problem(job, [Worker(1, 2)])
    problem = with_layout(layered_problem, recut(job, 1, 2))
    assert sum(layered_problem.costs.forward) == sum(problem.times.forward[:4])
    assert problem.op_ticks(OpKind.F, 4, Worker(1, 0)) == sum(
        layered_problem.costs.forward[slice(*problem.layers_by_slice[4])]
    )


def test_a_bound_with_slices_counts_parts_of_ticks():
    # Times are 1 s, and so are ticks; layers take 0.125 s. Rounded to whole ticks, the bound was 59
    # s.
    job = grid(
        6,
        4,
        16,
        times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1\n",
        more="[placement]\nlayers = [8, 8, 8, 8]\n",
    )
    problem = build_problem(job, [Worker(0, 3)], sliced=True)
    assert exact_bound(problem) == (58.75, "work and round trips of the busiest worker of column 3")
    assert lower_bound(problem) == 58
    schedule = plan_only(PlanOptions(method="greedy", steps=400_000), job, [Worker(0, 3)]).schedule
    assert (
        schedule.seconds(schedule.lower_bound_ticks)
        == 58.75
        <= schedule.seconds(schedule.period_ticks)
    )


def test_list_schedulers_alone_look_at_few_layouts_where_there_is_little_time(monkeypatch):
    layouts = []

    def counted(*arguments, **how):
        for layout in generate_layouts(*arguments, **how):
            layouts.append(layout)
            yield layout

    monkeypatch.setattr("slipstream.planner.candidates.generate_layouts", counted)
    counts = []
    for steps in (24_000, 800_000):
        plan_only(
            PlanOptions(method="greedy", layers="move", steps=steps),
            layered(4, 4, 8),
            [Worker(1, 2)],
        )
        counts.append(len(layouts))
        layouts.clear()
    assert counts[0] <= 7 < counts[1], "ten, if each had the same share"


def test_who_has_layers_of_many_stages_runs_fewer_micro_batches():
    """The last worker of a pipeline, with all four stages, runs fewer micro-batches.

    It is done with the first when the others reduce that. Cut as if it could go on meanwhile, every
    layout ends at 281.
    """
    job = grid(
        8,
        4,
        8,
        times="forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\n"
        "optimizer = 5\n",
        more="[memory]\ncapacity = 8\n",
    )
    failed = [Worker(0, stage) for stage in (1, 2, 3)]
    schedule = plan_only(PlanOptions(layers="move", steps=20_000), job, failed).schedule
    assert schedule.period_ticks <= 277


def test_stages_that_are_uneven_are_cut_anew_with_all_workers_alive():
    # The last stage has a head beside its layers: each micro-batch takes it 4.2 s, the others 3 s.
    stages = [1.0, 1.0, 1.0, 1.4]
    head = f"{[1] * 16 + [1.6]}"
    job = grid(
        2,
        4,
        16,
        times=f"forward = {stages}\nbackward_input = {stages}\nbackward_weight = {stages}\n",
        more="[placement]\nlayers = [4, 4, 4, 5]\n[memory]\ncapacity = 8\n"
        f"[layers]\nforward = {head}\nbackward_input = {head}\nbackward_weight = {head}\n",
    )
    moved, fixed = (
        plan_only(PlanOptions(method="greedy", steps=100_000, layers=layers), job, []).schedule
        for layers in ("move", "fixed")
    )
    assert fixed.seconds(fixed.period_ticks) >= 16 * 4.2
    assert moved.seconds(moved.period_ticks) <= 0.95 * fixed.seconds(fixed.period_ticks)


def test_a_layer_too_many_floats_between_the_stages_with_all_workers_alive():
    """One layer of nine floats between four stages.

    Wherever they are cut, one has three layers, and each of its micro-batches takes 9 s.
    """
    times = "".join(
        f"{key} = [3, 2, 2, 2]\n" for key in ("forward", "backward_input", "backward_weight")
    )
    job = grid(2, 4, 16, times=times, more="[placement]\nlayers = [3, 2, 2, 2]\n")
    schedule = plan_only(PlanOptions(layers="move", steps=400_000), job, []).schedule
    assert schedule.seconds(schedule.period_ticks) <= 0.9 * 16 * 9


def test_two_pipelines_that_are_cut_anew_may_shift_their_deadlines():
    # Each is a piece of its own; only healthy pipelines were taken to have time to spare.
    times = (
        "forward = 80\nbackward_input = 80\nbackward_weight = 80\ntransfer = 8\noptimizer = 40\n"
    )
    job = grid(
        2,
        4,
        16,
        times=times,
        more="[memory]\ncapacity = 10\nactivation = 1\nweight_stash = 1\nweights = 4\n"
        "[placement]\nlayers = [4, 4, 4, 4]\n",
    )
    layered_problem = build_layered_problem(
        job, [Worker(0, 0), Worker(1, 2)], AllowedLayouts(layers="move")
    )
    incumbent = improve_by_list_schedules(
        divide_problem(with_layout(layered_problem, next(generate_layouts(layered_problem)))),
        Budget.of_steps(20_000),
    )
    assert [piece.problem.grid.pipelines for piece in incumbent.pieces] == [1, 1]
    assert improve_by_annealing(incumbent, Budget.of_steps(60_000)).period < incumbent.period


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_worker_with_room_for_one_stash_runs_layer_by_layer(microbatches):
    """The last worker has room for all activations, but not for the stashes of all layers.

    Neither layouts nor list schedules reserve more than a plan needs.
    """
    job = grid(
        1,
        2,
        microbatches,
        more="[placement]\nlayers = [2, 2]\n"
        "[memory]\ncapacity = 6\nactivation = 2\nweight_stash = 6\n",
    )
    allowed = AllowedLayouts(layers="move", from_checkpoint=True)
    problem = build_layered_problem(job, [Worker(0, 1)], allowed)
    (layout,) = generate_layouts(problem)
    assert layout.holds == {Worker(0, 0): ((0, 4),)}
    laid_out = with_layout(problem, layout)
    candidate = divide_problem(laid_out, Bound(0, Scope.LAYERS))
    improved = improve_by_list_schedules(candidate, Budget.of_steps(1000))
    assert check(improved.make_schedule()) == []
