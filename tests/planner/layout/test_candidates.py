"""Every layout of every kind is valid.

Its longest load is near what no layout can undercut.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.layout.candidates import generate_layouts
from slipstream.planner.model.bounds_layouts import min_fill_ticks, period_bound, work_bound
from slipstream.schedules.schedule import Worker
from tests.planner.layout.layouts import assert_valid, loads, problem


@st.composite
def problems(draw, layers):
    pipelines, stages = draw(st.integers(2, 4)), draw(st.integers(2, 5))
    workers = [Worker(pipeline, stage) for pipeline in range(pipelines) for stage in range(stages)]
    failed = draw(st.lists(st.sampled_from(workers), max_size=3, unique=True))
    for stage in range(stages):
        if all(worker in failed for worker in workers if worker.column == stage):
            failed.remove(Worker(0, stage))
    slow = draw(
        st.lists(
            st.sampled_from([worker for worker in workers if worker not in failed]), max_size=2
        )
    )
    per_stage = draw(st.integers(1, 4))
    times = draw(
        st.none()
        | st.lists(st.integers(5, 15), min_size=stages * per_stage, max_size=stages * per_stage)
    )
    room = draw(st.none() | st.integers(2, 8).map(lambda flight: per_stage * (8 + 2 * flight)))
    microbatches = draw(st.lists(st.integers(1, 9), min_size=pipelines, max_size=pipelines))
    slowness = {str(worker): draw(st.integers(1001, 3000)) for worker in slow}
    return problem(
        pipelines,
        stages,
        microbatches,
        per_stage,
        failed=map(str, failed),
        slow=slowness,
        layers=layers,
        times=times,
        room=room,
    )


@pytest.mark.parametrize("layers", ["fixed", "move"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_layouts_are_valid_and_no_load_is_below_the_bound(layers, data):
    given_problem = data.draw(problems(layers))
    found = list(generate_layouts(given_problem))
    assert found
    for layout in found:
        assert_valid(given_problem, layout, once="anywhere" not in layout.kind)
        idle = _idle(given_problem) if layers == "fixed" else 0
        assert max(loads(given_problem, layout).values()) >= max(
            work_bound(given_problem), period_bound(given_problem).ticks - idle
        )


def test_short_slices_are_left_out_where_they_are_too_many_for_the_time():
    """Short slices are left out, as they have four times the ops.

    With half a second for 4 x 32 x 32, other layouts were listed too briefly.
    """
    given_problem = problem(3, 4, [8] * 3, 4, failed=["1.2"])
    kinds = []
    for fine in (3 * 8 * 4 * 4, 3 * 8 * 4 * 4 - 1, 3 * 8 * 4 * 2 - 1):
        layouts = generate_layouts(given_problem, largest_fine=fine)
        kinds.append([layout.kind for layout in layouts])
    quarters, halves, none = kinds
    assert none == [kind for kind in quarters if "short slices" not in kind] != quarters
    assert none == [kind for kind in halves if "short slices" not in kind]
    short = [kind for kind in halves if "short slices" in kind]
    assert short and all("spread separately" in kind or "whole" in kind for kind in short)


def _idle(given_problem):
    """The bound may count idle time, which a load has none of."""
    return max(min_fill_ticks(given_problem, worker) for worker in given_problem.live_workers)
