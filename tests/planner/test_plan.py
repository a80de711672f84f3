"""Plans of generated jobs: all pass the checker, respect the bounds, and are reproducible."""

import re
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.budget import STEP_SECONDS
from slipstream.planner.job.file import JobError
from slipstream.planner.model.arrays import ProblemArrays, Solution
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.model.start_times import solution_period, time_order
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_job, plan_only, plan_with
from slipstream.planner.search.list_scheduler import (
    ASSIGNMENT_RULES,
    DispatchRule,
    ListScheduler,
    assign_hosts,
)
from slipstream.schedules.check import check
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import OpKind, Worker
from tests.generate import compute_earliest
from tests.jobs import failures, grid, jobs

MODES = st.tuples(
    st.sampled_from(["split", "fused"]), st.sampled_from(["staggered", "synchronous"])
)


@settings(max_examples=150)
@given(
    st.data(),
    jobs(),
    MODES,
    st.sampled_from(["deepest", "oldest"]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(ASSIGNMENT_RULES),
)
def test_list_schedules_keep_every_rule(data, job, modes, order, lookahead, assignment):
    down = data.draw(failures(job))
    problem = build_problem(job, down, backward=modes[0], optimizer=modes[1])
    arrays = ProblemArrays(problem, assign_hosts(problem, assignment))
    limits = data.draw(st.none() | st.tuples(*[st.integers(1, 4)] * len(job.columns)))
    rule = DispatchRule(
        forward_order=order,
        lookahead=lookahead,
        ignore_transfers=data.draw(st.booleans()),
        in_flight=limits,
    )
    bound = strongest_bound(problem)
    sequence = ListScheduler(arrays).order_ops(rule)
    early = compute_earliest(arrays, sequence)
    best, start = time_order(arrays, sequence)
    for starts in (early, start):
        plan = arrays.make_solution(sequence, starts)
        assert check(build_schedule(problem, plan, bound=bound, method="greedy")) == []
        assert (
            bound.ticks
            <= solution_period(plan)
            == solution_period(Solution(arrays, sequence, starts))
        )
    late, soon = (
        solution_period(arrays.make_solution(sequence, starts)) for starts in (start, early)
    )
    assert best == late <= soon


@settings(max_examples=25)
@given(st.data(), jobs(max_pipelines=3, max_stages=3, max_microbatches=3), MODES)
def test_cp_sat_never_returns_worse_than_the_list_scheduler(data, job, modes):
    down = data.draw(failures(job))
    kinds = {"backward": modes[0], "optimizer": modes[1]}
    greedy = plan_job(job, down, method="greedy", **kinds).schedule
    solved = plan_job(job, down, steps=400_000, **kinds).schedule
    assert (
        greedy.lower_bound_ticks
        <= solved.lower_bound_ticks
        <= solved.period_ticks
        <= greedy.period_ticks
    )
    assert check(solved) == []
    assert (solved.status == "optimal") == (solved.period_ticks == solved.lower_bound_ticks)


@settings(max_examples=40)
@given(st.data(), jobs(max_chunks=1))
def test_1f1b_keeps_every_rule(data, job):
    schedule = plan_job(job, data.draw(failures(job)), method="1f1b").schedule
    assert (
        check(schedule) == []
        and schedule.backward == "fused"
        and schedule.optimizer == "synchronous"
    )


def test_1f1b_alternates_one_forward_and_one_backward():
    schedule = plan_job(grid(1, 4, 8), method="1f1b").schedule
    for stage in range(4):
        kinds = "".join(op.kind for op in schedule.ops(Worker(0, stage)) if op.kind in "FB")
        ahead = 4 - stage
        assert kinds == "F" * (ahead - 1) + "FB" * (8 - ahead + 1) + "B" * (ahead - 1)


def test_the_same_seed_gives_the_same_plan():
    job = grid(2, 3, 4, more="[memory]\ncapacity = 3\n")
    plans = [plan_job(job, [Worker(0, 1)], seed=7).schedule for _ in range(2)]
    assert plans[0].status == "optimal" and encode(plans[0]) == encode(plans[1])


def test_rerouted_micro_batches_go_to_live_peers_of_their_stage():
    schedule = plan_job(grid(3, 2, 4), [Worker(1, 1)]).schedule
    hosts = {
        op.worker
        for op in schedule.all_ops()
        if op.kind is OpKind.F and op.slice == 1 and op.pipeline == 1
    }
    assert hosts <= {Worker(0, 1), Worker(2, 1)} and schedule.rerouted == 4


def test_equal_healthy_pipelines_share_programs():
    schedule = plan_job(grid(16, 4, 8)).schedule
    assert len(schedule.programs) == 4 and len(schedule.seats) == 64


def test_a_stage_without_live_workers_has_no_plan():
    with pytest.raises(NoPlanError, match="stage 1 has no live worker"):
        plan_job(grid(2, 3, 2), [Worker(0, 1), Worker(1, 1)])


@pytest.mark.parametrize(
    "memory",
    ["capacity = 1\nactivation = 2", "capacity = [2, 1]\nactivation = 1\nweight_stash = 2"],
)
def test_too_little_memory_for_one_microbatch_has_no_plan(memory):
    with pytest.raises(
        NoPlanError, match=r"stage [01] has room for 1, but one micro-batch needs 2 there"
    ):
        plan_job(grid(2, 2, 2, more=f"[memory]\n{memory}\n"))


def test_unknown_workers_are_refused():
    with pytest.raises(
        JobError, match=r"^failed: the job has no worker 5\.0; expected pipeline 0 to 1"
    ):
        plan_job(grid(2, 2, 2), [Worker(5, 0)])


def test_times_are_exact_decimals():
    # 0.0297 s and 0.0005 s share a tick of 0.1 ms; nothing is lost to binary fractions.
    schedule = plan_job(
        grid(
            1,
            2,
            2,
            times="forward = 0.0297\nbackward_input = 0.0294\nbackward_weight = 0.0199\n"
            "transfer = 0.0005",
        ),
        method="greedy",
    ).schedule
    assert (
        schedule.tick_seconds == 0.0001
        and schedule.times.forward == (297, 297)
        and schedule.times.transfer == 5
    )


def test_layers_whose_times_are_rounded_do_not_undercut_the_bound():
    """The bound of whole stages allows for layers that are rounded down.

    Thirds of a stage are rounded to ticks.
    """
    job = grid(3, 3, 5, more="[placement]\nlayers = [3, 3, 3]\n")
    times = {
        "forward": (0.1000001,) * 3,
        "backward_input": (0.1000003,) * 3,
        "backward_weight": (0.0700001,) * 3,
    }
    job = msgspec.structs.replace(job, time=msgspec.structs.replace(job.time, **times))
    for layers in ("fixed", "move"):
        plan = plan_with(
            PlanOptions(method="greedy", steps=400_000, layers=layers), job, [Worker(1, 1)]
        )
        assert check(plan.schedule) == [] and plan.schedule.gap < 0.5


@pytest.mark.parametrize(
    ("times", "method", "steps"),
    [
        ("all_reduce = 6", "greedy", 120_000),
        ("all_reduce = 6", "cp-sat", 400_000),
        ("slow = {'0.1' = 1.5}", "greedy", 120_000),
    ],
)
def test_progress_tells_of_no_period_that_the_plan_does_not_have(times, method, steps):
    """Pieces are timed on one clock, and their all-reduces may wait for each other."""
    job = grid(
        4,
        4,
        8,
        times=f"forward = 8\nbackward_input = 8\nbackward_weight = 8\noptimizer = 4\n{times}\n",
        more="[placement]\nlayers = [4, 4, 4, 4]\n",
    )
    lines = []
    plan = plan_with(
        PlanOptions(layers="move", method=method, steps=steps),
        job,
        [Worker(1, 2)],
        progress=lines.append,
    )
    periods = [
        float(found[1])
        for line in lines
        if (found := re.match(r"(?:list scheduler|annealing|CP-SAT): period ([\d.]+) s", line))
    ]
    assert plan.period == pytest.approx(min(periods), rel=1e-5)
    assert all(later < before for before, later in pairwise(periods)), (
        "several layouts are planned: only news is told"
    )


def test_progress_names_periods_without_all_reductions():
    # They and their bounds are those of other problems, and may be above or below those of the
    # plan.
    job = grid(
        4,
        2,
        6,
        times="forward = 8\nbackward_input = 8\nbackward_weight = 8\noptimizer = 4\n"
        "all_reduce = 9\n",
        more="[network]\noverlap = true\n",
    )
    lines = []
    plan = plan_with(PlanOptions(steps=20_000), job, [Worker(1, 1)], progress=lines.append)
    progress = [line for line in lines if "period" in line and not line.startswith("reference")]
    assert all(
        line.startswith(
            ("without reductions: ", "with 50% of each reduction: ", "all reductions added: ")
        )
        for line in progress
    )
    bound = plan.schedule.lower_bound_ticks * plan.schedule.tick_seconds
    last = [line for line in progress if line.startswith("all")][-1]
    assert last == f"all reductions added: period {plan.period:g} s, bound {bound:g} s"


@pytest.mark.parametrize(
    ("pipelines", "stages", "dead", "bound"), [(8, 3, 1, 129), (10, 4, 2, 171)]
)
def test_live_workers_hand_on_micro_batches_of_a_stage_that_has_lost_one(
    pipelines, stages, dead, bound
):
    # With as few micro-batches as stages, a worker that runs one more has all of them late.
    #
    # While live workers keep their own, no plan was found that is shorter than 131 and 173.
    job = grid(
        pipelines,
        stages,
        stages,
        times="forward = 10\nbackward_input = 10\nbackward_weight = 10\n"
        "transfer = 1\noptimizer = 5",
        more=f"[memory]\ncapacity = {2 * stages}\nweight_stash = 1\n",
    )
    schedule = plan_job(job, [Worker(0, dead)], steps=4_000_000).schedule
    assert schedule.status == "optimal" and schedule.period_ticks == bound
    assert schedule.shed


def test_a_search_with_layers_that_move_is_never_worse_than_the_quick_one_that_it_begins_with(
    counted_steps,
):
    """A search with moving layers is not worse than its quick beginning.

    Of 20,000 steps, list schedules alone found 21.2 in a fifth, where the search of all found 21.4.
    """
    job = grid(6, 4, 6, more="[placement]\nlayers = [5, 5, 5, 5]\n[memory]\ncapacity = 8\n")
    seconds, share = 20_000 * STEP_SECONDS, DEFAULTS.layouts.quick_share
    quick = plan_only(
        PlanOptions(layers="move", method="greedy", time_limit=share * seconds), job, [Worker(1, 1)]
    )
    whole = plan_only(PlanOptions(layers="move", time_limit=seconds), job, [Worker(1, 1)])
    assert whole.period <= quick.period and check(whole.schedule) == []


def test_no_period_in_place_is_told_beside_a_quick_plan_that_is_in_place(monkeypatch):
    quick = plan_only(PlanOptions(steps=20_000, method="greedy"), grid(2, 2, 4), [])
    ticks = quick.schedule.period_ticks
    schedule = msgspec.structs.replace(quick.schedule, status="feasible", lower_bound_ticks=1)
    quick = msgspec.structs.replace(quick, schedule=schedule)
    # The search that follows finds longer plans: one with moved layers, and one in place.
    longer = msgspec.structs.replace(schedule, period_ticks=ticks + 5)
    later = msgspec.structs.replace(
        quick, schedule=longer, fixed_period=schedule.seconds(ticks + 10)
    )
    plans = iter([quick, later])
    monkeypatch.setattr(
        "slipstream.planner.plan._plan_whole_or_blocks", lambda *_, **__: next(plans)
    )
    plan = plan_only(PlanOptions(layers="move", time_limit=1), grid(2, 2, 4), [])
    assert plan.period == quick.period and plan.fixed_period is None
