"""Divisions of tiny problems against all ways to run them.

Exact assignments are compared with the divisions they start from.
"""

import itertools
import random
from collections import Counter

import networkx as nx
import pytest

from slipstream.planner.layout.candidates import cut_all_pipelines, form_replicas, generate_layouts
from slipstream.planner.layout.division import Divider, build_layout
from slipstream.planner.model.bounds_layouts import work_bound
from slipstream.schedules.schedule import Worker
from tests.lines_run import lines_run
from tests.planner.layout.layouts import assert_valid, loads, problem


def least_load(problem_):
    """The least longest load over every way to give tasks to live workers.

    A task is a pair (layer, micro-batch).
    """
    tasks = [
        layer
        for layer in range(problem_.grid.layer_count)
        for _ in range(problem_.grid.total_microbatches)
    ]
    best = problem_.ample_ticks * 4
    for workers in itertools.product(problem_.live_workers, repeat=len(tasks)):
        load = dict.fromkeys(problem_.live_workers, 0)
        for layer, worker in zip(tasks, workers, strict=True):
            load[worker] += problem_.slice_ticks((layer, layer + 1), worker)
        for layer, worker in set(zip(tasks, workers, strict=True)):
            load[worker] += problem_.costs.closing[layer]
        best = min(best, *([max(load.values())]))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_longest_load_is_within_a_layer_of_the_least_that_any_assignment_has(seed):
    chosen = random.Random(seed)
    times = [chosen.randint(5, 15) for _ in range(4)]
    slow = {"1.0": chosen.choice([1000, 1500, 2000])}
    problem_ = problem(2, 2, 1, 2, failed=["0.1"], slow=slow, times=times)
    least = least_load(problem_)
    found = min(max(loads(problem_, layout).values()) for layout in generate_layouts(problem_))
    assert work_bound(problem_) <= least <= found <= least + 3 * max(times) * slow["1.0"] // 1000


def test_one_dead_worker_of_two_pipelines():
    """Whole layers over 15 workers make 69 tasks a worker.

    Of 2 x 8 workers with 16 micro-batches, 32 x 32 tasks are 68.3 a worker.
    """
    problem_ = problem(2, 8, 16, 4, failed=["0.4"], transfer=1, optimizer=0)
    least, division = Divider(problem_, form_replicas(problem_)).find_division()
    assert least == 69 * 30
    assert sum(division.whole) + division.items == 32


def test_chunks_are_made_for_the_least_load_only():
    # They were made for every load that was tried, in 226,000 lines; simulations divide hundreds of
    # times.
    problem_ = problem(4, 8, 16, 4, failed=["0.4"], transfer=1, optimizer=0)
    assert lines_run(lambda: Divider(problem_, form_replicas(problem_)).find_division()) < 120_000


def test_what_the_workers_of_a_stage_have_no_time_for_runs_on_the_line_that_is_cut_anew():
    """Work that a stage has no time for runs on the pipeline cut anew.

    4 x 4, 8 micro-batches of 4 x 4 layers, 2 of 16 down: 512 tasks over 14 workers are 36.6 a
    worker. With 37, three pipelines run 9 each and a task a worker, the broken one 4 and a layer of
    each stage: all of one more.
    """
    problem_ = problem(4, 4, 8, 4, failed=["3.0", "3.2"], transfer=1, optimizer=0)
    least, division = Divider(problem_, form_replicas(problem_), anywhere=True).find_division()
    assert (
        least == 37 * 30 < Divider(problem_, form_replicas(problem_)).find_division()[0]
        and division.items == 1
    )
    layout = build_layout(problem_, form_replicas(problem_), division, "")
    assert_valid(problem_, layout, once=False)
    assert max(loads(problem_, layout).values()) == least


@pytest.mark.parametrize(
    ("pipelines", "failed", "items", "sets", "load"),
    [
        # 14 of 16 on the replica that is cut anew; half a stage for each of its helpers.
        (6, ["2.3"], 2, [2, 2], 17.0),
        # Three share two: three, two and three of eight layers.
        (
            8,
            ["0.1", "5.2"],
            4,
            [3, 3],
            17.25,
        ),
        (12, ["2.3"], 2, [4, 4], 16.5),  # a quarter of a stage, and no less
    ],
)
def test_micro_batches_spread_apart_have_lines_of_their_own(pipelines, failed, items, sets, load):
    problem_ = problem(pipelines, 8, 16, 8, failed=failed, transfer=1, optimizer=0)
    replicas = form_replicas(problem_)
    least, division = Divider(problem_, replicas, separate=True).find_division()
    assert division.items == items and least <= load * 8 * 30
    layout = build_layout(problem_, replicas, division, "")
    assert_valid(problem_, layout)
    assert max(loads(problem_, layout).values()) <= least
    passed = []
    for route in layout.routes.values():
        passed.append(frozenset(stop.worker.pipeline for stop in route))
    shared = {runners for runners in passed if len(runners) > 1}
    assert not shared & {replica.workers[0].pipeline for replica in replicas if replica.is_recut}
    joined = nx.Graph(pair for runners in shared for pair in itertools.combinations(runners, 2))
    assert sorted(map(len, nx.connected_components(joined))) == sets


def test_a_slow_worker_gets_less():
    problem_ = problem(2, 4, 16, 4, slow={"0.1": 2000}, optimizer=0)
    least, division = Divider(problem_, form_replicas(problem_)).find_division()
    assert least <= 1.03 * work_bound(problem_)
    layout = build_layout(problem_, form_replicas(problem_), division, "")
    tasks = Counter()
    for route in layout.routes.values():
        for (first, end), worker in route:
            tasks[worker] += end - first
    assert (
        max(
            abs(tasks[worker] - 2 * tasks[Worker(0, 1)])
            for worker in problem_.live_workers
            if worker != Worker(0, 1)
        )
        <= 2
    )


def test_candidates_are_no_longer_than_published_systems():
    """Candidates' longest loads do not exceed those of published systems.

    Oobleck runs whole micro-batches on pipelines cut anew, ElasWave has one cut for all.
    """
    problem_ = problem(4, 4, 8, 4, failed=["0.1"], slow={"2.2": 1300}, transfer=1)
    best = min(max(loads(problem_, layout).values()) for layout in generate_layouts(problem_))
    whole = Divider(problem_, form_replicas(problem_), floating=False, spread=False).find_division()
    assert best <= whole[0]
    assert best <= max(loads(problem_, cut_all_pipelines(problem_)).values())
