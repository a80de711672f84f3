"""Large clusters are laid out group by group."""

from slipstream.planner.layout.candidates import form_groups, generate_layouts
from slipstream.planner.model.bounds_layouts import work_bound
from tests.planner.layout.layouts import assert_valid, loads, problem


def test_like_groups_are_alike_and_others_are_left_alone():
    problem_ = problem(40, 4, 16, 4, failed=["3.1", "17.1"], transfer=1)
    groups = list(form_groups(problem_))
    assert sorted(pipeline for group in groups for pipeline in group) == list(range(40))
    weak = [group for group in groups if len(group) > 1]
    assert [group[0] for group in weak] == [3, 17]
    assert len(set(map(len, weak))) == 1
    layout = next(generate_layouts(problem_))
    assert_valid(problem_, layout)
    assert max(loads(problem_, layout).values()) <= 1.04 * work_bound(problem_)
    apart = {pipeline: index for index, group in enumerate(groups) for pipeline in group}
    for batch, route in layout.routes.items():
        assert {apart[stop.worker.pipeline] for stop in route} == {apart[batch.pipeline]}
    routes = [[] for _ in weak]
    for batch, route in layout.routes.items():
        for group, of_group in zip(weak, routes, strict=True):
            if batch.pipeline in group:
                of_group.append(
                    [
                        (stop.layers, group.index(stop.worker.pipeline), stop.worker.column)
                        for stop in route
                    ]
                )
    assert sorted(routes[0]) == sorted(routes[1])


def test_a_pipeline_without_any_worker_has_helpers():
    problem_ = problem(12, 2, 4, 2, failed=["5.0", "5.1"])
    layout = next(generate_layouts(problem_))
    assert_valid(problem_, layout)
    assert max(loads(problem_, layout).values()) <= 1.1 * work_bound(problem_)


def test_who_lost_more_has_more_helpers():
    problem_ = problem(16, 4, 8, 4, failed=["15.1"], slow={"10.0": 2500})
    slow, dead = (group for group in form_groups(problem_) if len(group) > 1)
    assert (slow[0], dead[0]) == (10, 15)
    assert len(slow) < len(dead)
    assert min(
        max(loads(problem_, layout).values()) for layout in generate_layouts(problem_)
    ) <= 1.04 * work_bound(problem_)
