"""Throughputs of schedules: the same as the planner's own, and as worked out by hand."""

from functools import partial
from itertools import pairwise

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.figures import ablation, failures, published, scaling, worked_example
from benchmarks.figures.failures import steady_rates
from slipstream.cli.figures.figure import Series
from slipstream.planner.job.file import parse_job
from slipstream.planner.job.presets import preset_text
from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import BlockParams, SearchParams
from slipstream.planner.periods import Periods
from slipstream.planner.plan import plan_job, plan_only
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.loads import spread_over_stages
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Scenario
from slipstream.planner.simulation.settled import (
    NO_SLOW_WORKERS,
    RebalancedPlan,
    RebalancedPlans,
    SlowWorkerCount,
)
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.planner.tables.build import build_table
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.table import Table
from tests.jobs import grid
from tests.planner.simulation.small import job

OPTIONS = PlanOptions(method="greedy", steps=200_000)
PIECEWISE = SearchParams(blocks=BlockParams(piecewise=10))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_the_normal_form_is_the_planners(count):
    small = job(pipelines=4, stages=3)
    throughputs = Throughputs(small)
    schedule = normal_form(small, count, OPTIONS).schedule
    target = throughputs.normal_form(count)
    assert sum(target) == count
    assert throughputs.planned_rate(target) == pytest.approx(
        24 / schedule.seconds(schedule.period_ticks), rel=0.01
    )


def test_whole_pipelines_share_the_batch():
    throughputs = Throughputs(job())
    assert throughputs.one_f_one_b_rate(3) == pytest.approx(
        18 / plan_job(job(), method="1f1b").fault_free_period
    )
    expected = [0.0, pytest.approx(18 / 58), pytest.approx(18 / 31)]
    assert [throughputs.one_f_one_b_rate(count) for count in (0, 1, 2)] == expected


def test_systems_of_others_are_compared_with_the_same_schedules():
    throughputs = Throughputs(job())
    planned, whole = throughputs.with_planned_pipelines(), (0, 0)
    for count in (0, 1, 2, 3):
        assert planned.whole_pipelines_rate(count) >= throughputs.whole_pipelines_rate(count)
        assert throughputs.whole_pipelines_rate(count) == throughputs.one_f_one_b_rate(count)
    assert (
        planned.whole_pipelines_rate(3)
        == throughputs.in_place_rate(whole)
        > throughputs.one_f_one_b_rate(3)
    )
    assert planned.whole_pipelines_rate(2) < planned.whole_pipelines_rate(3)
    assert planned.recycle_rate((1, 0)) == throughputs.in_place_rate((1, 0))


def test_what_a_policy_has_computed_with_published_schedules_is_not_used_with_others():
    throughputs = Throughputs(job())
    published = throughputs.compute_once(
        "rate of a policy", lambda: throughputs.whole_pipelines_rate(3)
    )
    planned = throughputs.with_planned_pipelines()
    assert (
        planned.compute_once("rate of a policy", lambda: planned.whole_pipelines_rate(3))
        > published
    )


@pytest.mark.parametrize("down", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1)])
def test_at_once_micro_batches_are_cut_where_dropping_a_replica_would_keep_more(down):
    job = parse_job(preset_text("llama-3-8b"))
    throughputs = Throughputs(replace(job, network=replace(job.network, overlap=False)))
    dropped = throughputs.in_place_rate((0, 0, 0, 0)) * 7 / 8
    assert throughputs.in_place_rate(down) > dropped
    assert throughputs.in_place_rate(
        down
    ) >= throughputs.with_planned_pipelines().whole_pipelines_rate(7)


def test_a_stage_without_workers_trains_nothing():
    throughputs = Throughputs(job())
    assert throughputs.planned_rate((3, 0)) == throughputs.recycle_rate((3, 0)) == 0.0
    assert throughputs.normal_form(5) is None and throughputs.normal_form(4) == (2, 2)


def test_failures_are_spread_one_a_stage_then_two():
    assert [spread_over_stages(count, 4) for count in (0, 1, 4, 6)] == [
        (0,) * 4,
        (0, 0, 0, 1),
        (1,) * 4,
        (1, 1, 2, 2),
    ]


def test_a_table_gives_its_periods_and_is_refused_for_another_job(tmp_path):
    text = (
        'name = "small"\npipelines = 3\nstages = 2\nmicrobatches = 6\n[time]\nforward = 1\n'
        "backward_input = 1\n"
        "backward_weight = 1\noptimizer = 1\n"
    )
    build_table(job(), text.encode(), tmp_path, OPTIONS, max_failures=2)
    table = Table.load(tmp_path)
    throughputs = Throughputs(job(), table=table)
    for row in (row for row in table.rows() if row.layers_moved is None):  # the others are settled
        target = throughputs.normal_form(row.failures)
        assert throughputs.planned_rate(target) == pytest.approx(18 / row.period)
    for row in (row for row in table.rows() if row.layers_moved is not None):
        assert throughputs.rebalanced_answer(row.failures)[0] == pytest.approx(18 / row.period)
    found = table.lookup([Worker(2, 1)], settled=True).schedule
    rate = Throughputs(job(), table=table, dead=[Worker(2, 1)]).rebalanced_answer(1)[0]
    assert rate == pytest.approx(18 / found.seconds(found.period_ticks))
    with pytest.raises(ValueError, match="the table is of another job: its grid or times differ"):
        Throughputs(job(microbatches=5), table=table)


@pytest.mark.parametrize("down", [(0, 0), (1, 0)])
def test_a_period_counts_a_pipeline_with_little_memory_that_no_failure_affects(down):
    small = grid(
        40, 2, 4, more="[memory]\ncapacity = 4\nactivation = 1\ncapacity_of = {'30.0' = 1}\n"
    )
    options = PlanOptions(method="greedy", steps=20_000, slices=False)
    schedule = plan_only(options, small, [Worker(0, 0)][: sum(down)]).schedule
    period, is_best = Periods(small, options).planned_period(down)
    assert period >= schedule.seconds(schedule.lower_bound_ticks)
    assert period == pytest.approx(schedule.seconds(schedule.period_ticks), rel=0.1)
    assert not is_best or schedule.status == "optimal"


def test_a_usual_memory_that_no_worker_has_is_not_simulated():
    rooms = ", ".join(f"'{pipeline}.{stage}' = 4" for pipeline in range(2) for stage in range(2))
    text = f"[memory]\ncapacity = {{}}\nactivation = 1\ncapacity_of = {{{{{rooms}}}}}\n"
    never, always = (grid(2, 2, 4, more=text.format(capacity)) for capacity in (0.5, 4))
    assert Throughputs(never).planned_rate((1, 0)) == Throughputs(always).planned_rate((1, 0)) > 0


@pytest.mark.parametrize("down", [(0, 0, 0), (0, 0, 1), (1, 0, 1), (2, 1, 0), (2, 2, 2), (6, 6, 6)])
def test_the_slowest_piece_stands_for_a_large_job(down, monkeypatch):
    whole = Throughputs(job(pipelines=12, stages=3)).planned_rate(down)
    monkeypatch.setattr(
        "slipstream.planner.simulation.throughput.PlanOptions",
        partial(PlanOptions, params=PIECEWISE),
    )
    assert Throughputs(job(pipelines=12, stages=3)).planned_rate(down) == pytest.approx(
        whole, rel=0.06
    )


def round_robin(throughputs, down):
    """Whether ReCycle's rule was tried."""
    return any(key[:2] == ("round robin", down) for key in throughputs._plans)


@pytest.mark.parametrize("down", [(1, 0, 1), (0, 3, 0), (2, 1, 1)])
def test_failures_with_peers_of_their_own_are_planned_one_by_one(down, monkeypatch):
    small = job(pipelines=40, stages=3)
    monkeypatch.setattr(
        "slipstream.planner.simulation.throughput.PlanOptions",
        partial(PlanOptions, params=PIECEWISE),
    )
    whole, apart = Throughputs(small), Throughputs(small)
    assert apart.planned_rate(down) == pytest.approx(whole.planned_rate(down))
    assert not round_robin(apart, down)  # the plan is proven to be best: nothing else is tried
    assert apart.recycle_rate(down) <= apart.planned_rate(down)
    assert apart.recycle_rate(down) >= whole.recycle_rate(down) * (1 - 1e-9)
    assert apart.recycle_rate(down) < apart.one_f_one_b_rate(40) or not round_robin(apart, down)
    assert {sum(key[1]) for key in apart._plans if key[0] == "planned"} == {0, 1, sum(down)}
    assert not [key for key in apart._periods._pieces if len(key[-1]) > 1]


def test_no_failure_makes_a_job_faster(monkeypatch):
    throughputs = Throughputs(job(pipelines=4, stages=3))
    monkeypatch.setattr(
        throughputs._rebalanced_plans,
        "find_best",
        lambda failures, slow=NO_SLOW_WORKERS: RebalancedPlan(20.0 - failures, 1.0),
    )
    monkeypatch.setattr(
        throughputs._periods, "planned_period", lambda down: (22.0 - sum(down), True)
    )
    assert [throughputs.rebalanced_answer(count)[0] for count in (3, 0)] == pytest.approx(
        [24 / 20] * 2
    )
    assert throughputs.rebalanced_answer(1, SlowWorkerCount(1, 2.0))[0] == pytest.approx(24 / 20)
    assert (
        throughputs.in_place_rate((1, 1, 0))
        == throughputs.in_place_rate((0, 0, 0))
        < throughputs.whole_rate
    )
    assert (
        POLICIES["slipstream"](Scenario(throughputs, costs_for(), 3600.0)).fault_free_rate
        == throughputs.whole_rate
    )


@pytest.mark.parametrize("down", [(0, 0), (0, 1), (1, 1), (2, 0)])
def test_pipelines_that_have_no_part_in_failures_change_nothing(down):
    """With two micro-batches, six pipelines do for one failure: twenty have the same period."""
    few, many = Throughputs(job(7, microbatches=2)), Throughputs(job(20, microbatches=2))
    assert many.planned_rate(down) / 40 == pytest.approx(few.planned_rate(down) / 14)
    assert sum(many.normal_form(2)) == 2 and many.planned_rate(
        many.normal_form(2)
    ) >= many.planned_rate((2, 0))


# --- Published figures ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["6.7B", "350M"])
def test_the_published_job_makes_the_published_throughput(model):
    throughputs = Throughputs(published.published_job(model, 8))
    assert throughputs.one_f_one_b_rate(6) == pytest.approx(published.FAULT_FREE[model], rel=1e-4)


def test_the_published_trace():
    trace = published.published_trace()
    assert trace.places == 24 and trace.length_seconds == pytest.approx(159 * 144.0)
    scaled = published.FAULT_SCALED[0] * trace.mean_live_machines / 24
    assert scaled == pytest.approx(published.AVERAGES["6.7B"]["fault-scaled"], rel=0.002)


@pytest.fixture
def quick(monkeypatch):
    """Figures are planned in a twentieth of the steps.

    What is asked of them holds of any plans.
    """
    monkeypatch.setattr(published, "SETTLE_SECONDS", 0.05)


def test_throughput_by_failures_of_the_published_job(quick, monkeypatch):
    monkeypatch.setattr(failures, "MOST", 5)
    found = steady_rates(8)
    assert found["fault-scaled"] == pytest.approx(published.FAULT_SCALED[:6], rel=0.002)
    for ours, recycle, limit in zip(
        found["slipstream"], found["recycle"], found["work-conserving"], strict=True
    ):
        assert recycle * (1 - 1e-9) <= ours <= limit * (1 + 1e-9)
    assert found["recycle"][4] == pytest.approx(published.RECYCLE_6_7B[4], rel=0.15)
    assert failures.assumptions()


def test_each_idea_helps():
    steps = list(ablation.shares(8).values())
    for before, after in pairwise(steps):
        assert all(b >= a * (1 - 1e-9) for a, b in zip(before, after, strict=True))


def test_scaling(quick):
    found = scaling.shares(48, 8)
    assert all(recycle * (1 - 1e-9) <= ours <= limit * (1 + 1e-9) for ours, recycle, limit in found)
    assert found[0][0] >= found[1][0] >= found[2][0]


def test_the_worked_example():
    figure = worked_example.reproduce(lambda done, total: None)
    published_slots, ours = (series.values for series in figure.series)
    assert published_slots == (30, 39, 32, 30, None) and ours[0] == 30 and ours[2:] == (32, 30, 22)
    assert 38 <= ours[1] <= 39


def test_a_series_keeps_its_keys_in_json():
    assert set(msgspec.to_builtins(Series(name="a", values=(1.0,)))) == {
        "name",
        "values",
        "low",
        "high",
        "published",
        "yardstick",
    }


def test_one_failure_more_is_planned_only_where_that_can_be_faster():
    """Any good plan for one failure is shorter than the work for four workers.

    It takes 27 s, and for five workers 21.6 s.
    """
    lines = list[str]()
    plans = RebalancedPlans(job(), lines.append, plan_seconds=0.05)
    assert 21.6 < plans.find_best(1).period < 27.0
    assert lines == ["planning for 1 of 6 workers down, with layers moved"]
    assert plans.find_best(0).period < plans.find_best(1).period and len(lines) == 2
