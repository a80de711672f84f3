"""Samples dealt to names.

A replay judges them that knows nothing of arrays, blocks and swaps.
"""

from itertools import permutations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.plan import plan_job
from slipstream.schedules.dealing import CostError, Dealer
from slipstream.schedules.graph import Collective, programs_of
from slipstream.schedules.precedence import op_key, producers_with_rules
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Worker
from tests.general import general_schedules
from tests.generate import op_graph
from tests.jobs import failures, grid, jobs

pytestmark = pytest.mark.usefixtures("counted_steps")

COLUMN = {OpKind.F: 0, OpKind.I: 1, OpKind.W: 2}


def window(schedule, costs, sample):
    """The longest time from a worker's planned begin to its O's end.

    Each op is as early as what it waits for allows.
    """
    first = np.cumsum([0, *schedule.grid.microbatches])
    programs = programs_of(schedule)
    graph = op_graph(schedule, programs)
    begin = {}
    for worker, ops in programs.items():
        begin[worker] = min(op.start_ticks for op in ops)
    by_key = {op_key(op): op for ops in programs.values() for op in ops if op.kind in COMPUTE_KINDS}
    end = {}

    def length(op):
        if op.kind not in COMPUTE_KINDS:
            return op.end_ticks - op.start_ticks
        sample_costs = costs[sample[first[op.pipeline] + op.microbatch]]
        kinds = (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)
        return sum(
            schedule.times.duration_ticks(kind, op.slice, op.worker) * sample_costs[COLUMN[kind]]
            for kind in kinds
        )

    for node in nx.topological_sort(graph):
        if isinstance(node, Collective):
            ops = [
                op
                for ops in programs.values()
                for op in ops
                if op.kind is OpKind.A and schedule.layers_of(op.slice) == node.layers
            ]
        else:
            ops = [node]
        waits = [end[before] for before in graph.predecessors(node)]
        at = max([begin[op.worker] for op in ops] + waits)
        if isinstance(node, Op) and node.kind in COMPUTE_KINDS:
            _, _, pipeline, microbatch = op_key(node)
            for key, rule in producers_with_rules(
                op_key(node), schedule.route_of(pipeline, microbatch)
            ):
                hop = (
                    schedule.times.transfer
                    if rule.tensor and by_key[key].worker != node.worker
                    else 0
                )
                at = max(at, end[by_key[key]] + hop)
        end[node] = at + max(length(op) for op in ops)
    return max(end[ops[-1]] - begin[worker] for worker, ops in programs.items())


@st.composite
def cases(draw):
    schedule = draw(general_schedules()) if draw(st.booleans()) else _planned(draw)
    costs = (
        np.random.default_rng(draw(st.integers(0, 9)))
        .uniform(0, 3, (schedule.grid.total_microbatches, 3))
        .round(2)
    )
    return schedule, costs


def _planned(draw):
    job = draw(jobs(max_pipelines=3, max_stages=3, max_microbatches=4))
    return plan_job(
        job,
        draw(failures(job)),
        method="greedy",
        time_limit=1,
        backward=draw(st.sampled_from(["split", "fused"])),
        optimizer=draw(st.sampled_from(["staggered", "synchronous"])),
    ).schedule


@given(cases(), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_windows_are_those_of_a_plain_replay(case, seed):
    schedule, costs = case
    samples = schedule.grid.total_microbatches
    dealt = Dealer(schedule).deal(costs, seed=seed, swaps=30)
    assert sorted(dealt.sample) == list(range(samples))
    assert dealt.before_ticks == pytest.approx(window(schedule, costs, range(samples)), abs=1e-6)
    assert dealt.after_ticks == pytest.approx(window(schedule, costs, dealt.sample), abs=1e-6)
    assert dealt.after_ticks <= dealt.before_ticks
    again = Dealer(schedule).deal(costs, seed=seed, swaps=30)
    assert (again.sample == dealt.sample).all() and again.after_ticks == dealt.after_ticks


@given(cases())
@settings(max_examples=15, deadline=None)
def test_equal_samples_take_what_is_planned_and_keep_their_names(case):
    schedule, costs = case
    dealt = Dealer(schedule).deal(np.ones_like(costs), seed=1, swaps=0)
    assert dealt.before_ticks <= schedule.period_ticks
    assert (dealt.sample == np.arange(len(costs))).all()


@pytest.mark.parametrize("failed", [[], [Worker(1, 0)]])
def test_few_samples_end_next_to_the_best_of_all_permutations(failed):
    """Against all 720 permutations."""
    schedule = plan_job(grid(2, 2, 3), failed, method="greedy", time_limit=1).schedule
    costs = np.array([[c, c, c] for c in (0.2, 0.3, 0.5, 1.0, 1.5, 2.5)])
    best = min(window(schedule, costs, sample) for sample in permutations(range(6)))
    assert Dealer(schedule).deal(costs, seed=0, swaps=300).after_ticks == pytest.approx(
        best, rel=0.03
    )


def test_order_counts_beyond_even_totals():
    """No swaps, next to none, and many."""
    schedule = plan_job(
        grid(4, 4, 8, times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1"),
        [Worker(1, 1)],
        method="greedy",
        time_limit=1,
    ).schedule
    costs = np.random.default_rng(0).lognormal(-0.5, 1.0, 32)[:, None] * np.ones(3)
    dealer = Dealer(schedule)
    found = [dealer.deal(costs, seed=0, swaps=swaps).after_ticks for swaps in (0, 1, 100, 3000)]
    assert found == sorted(found, reverse=True) and found[3] < 0.95 * found[1] < 0.95 * found[0]


def test_costs_by_stage_are_those_of_its_slices():
    schedule = plan_job(grid(2, 2, 2), method="greedy", time_limit=1).schedule
    costs = np.ones((4, 2, 3))
    assert (
        Dealer(schedule).deal(costs, seed=0, swaps=0).before_ticks
        <= schedule.period_ticks
        < 2 * 3 * 3
    )
    costs[:, 1] = 3.0
    assert Dealer(schedule).deal(costs, seed=0, swaps=0).before_ticks >= 2 * 3 * 3


def test_iterations_in_a_row_take_what_the_planned_ones_do():
    schedule = plan_job(grid(3, 4, 6), method="greedy", time_limit=1).schedule
    samples = np.arange(18)
    seconds = Dealer(schedule).iteration_seconds([np.ones((18, 3))] * 4, [samples] * 4)
    assert seconds[1:] == pytest.approx([schedule.seconds(schedule.period_ticks)] * 3)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (np.ones((3, 3)), r"shape \[3, 3\]; expected \[4, 3\]"),
        (-np.ones((4, 3)), "the F of sample 0 costs -1 times"),
        (np.full((4, 3), np.nan), "costs nan times"),
        ("text", "are a str"),
        (np.full((4, 3), np.inf), "costs inf times"),
        (np.full((4, 3), 1e9), "expected 0 to 1000"),
    ],
)
def test_what_are_no_costs_is_refused_in_one_line(costs, message):
    schedule = plan_job(grid(2, 2, 2), method="greedy", time_limit=1).schedule
    with pytest.raises(CostError, match=message) as error:
        Dealer(schedule).deal(costs, seed=0, swaps=5)
    assert "\n" not in str(error.value)
