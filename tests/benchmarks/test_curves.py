"""Bubble over memory: the published points, and results that an interrupted run continues from."""

import pytest

from benchmarks.curves import keep_results, load_results
from slipstream.planner.published.memory_curves import (
    Setting,
    Settings,
    describe,
    iterate_points,
    measure,
    read_settings,
)


def test_each_published_figure_is_a_point():
    points = list(iterate_points(read_settings()))
    assert len(points) == len({point.name for point in points}) == 306
    assert all(point.published is not None for point in points)
    one_stage, v = points[0], points[17]
    assert (one_stage.placement, v.placement) == ("ZB", "V")
    assert sum(v.make_job().time.forward) == sum(one_stage.make_job().time.forward)
    assert v.make_job().memory.capacity[0] == 2 * one_stage.make_job().memory.capacity[0]


def test_results_are_kept_and_a_plan_is_never_below_its_bound(tmp_path):
    setting = Setting(
        workers=2,
        microbatches=4,
        forward=3,
        backward_input=4,
        backward_weight=2,
        transfer=1,
        activation=2,
        weight_stash=1,
        one_stage=(0.9,),
        v=(0.0,),
    )
    results = {}
    for point in iterate_points(Settings(memory=(1.0, 2.0), settings=(setting,))):
        results[point.name] = measure(point, steps=5000)
        assert 0 <= results[point.name].bound <= results[point.name].bubble + 1e-12 < 1
    keep_results(tmp_path / "results.json", results)
    assert load_results(tmp_path / "results.json") == results
    words = [
        describe(point, results[point.name])
        for point in iterate_points(Settings(memory=(1.0,), settings=(setting,)))
    ]
    assert words[0] == "ahead" and words[1] == "behind"


@pytest.mark.parametrize("name", ["V 16x48 1.5x", "V 16x128 1.5x"])
def test_plans_with_half_more_memory_are_not_behind(name):
    point = next(point for point in iterate_points(read_settings()) if point.name == name)
    assert describe(point, measure(point, steps=400_000)) != "behind"
