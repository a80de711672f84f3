"""Stages without a live worker, pipelines with few, and layers that nobody holds."""

import msgspec
import pytest

from slipstream.planner.layout.candidates import generate_layouts
from slipstream.planner.model.problem import AllowedLayouts, LiveWorker
from slipstream.schedules.schedule import VirtualStage, Worker
from tests.planner.layout.layouts import assert_valid, loads, problem

STAGE_1_LOST = ["0.1", "1.1"]


def test_layers_that_nobody_holds_are_missed():
    for layers in ("fixed", "move"):
        with pytest.raises(LookupError, match="no live worker holds layer 2"):
            list(generate_layouts(problem(2, 4, 8, 2, failed=STAGE_1_LOST, layers=layers)))


def test_layers_that_nobody_holds_are_loaded_from_a_checkpoint():
    problem_ = problem(2, 4, 8, 2, failed=STAGE_1_LOST, from_checkpoint=True)
    found = list(generate_layouts(problem_))
    assert found
    for layout in found:
        assert_valid(problem_, layout, once="anywhere" not in layout.kind)


def test_a_moved_holder_keeps_a_lost_stage_alive():
    """The plan goes on from a layer's moved holder.

    Worker 0.2 held stage 1, too.
    """
    problem_ = problem(2, 4, 8, 2, failed=STAGE_1_LOST)
    problem_ = msgspec.structs.replace(
        problem_, workers={**problem_.workers, Worker(0, 2): LiveWorker(holds=((2, 6),))}
    )
    for layers in ("fixed", "move"):
        asked = msgspec.structs.replace(problem_, question=AllowedLayouts(layers=layers))
        for layout in generate_layouts(asked):
            assert_valid(asked, layout)


def test_pipelines_too_weak_to_hold_all_layers_join():
    """Two pipelines of two workers each hold all layers together.

    A worker has room for half as much again as its own stage.
    """
    problem_ = problem(3, 4, 8, 4, failed=["0.0", "0.1", "1.2", "1.3"], room=4 * 8 * 3 // 2 + 16)
    found = list(generate_layouts(problem_))
    assert found
    for layout in found:
        assert_valid(problem_, layout, once="anywhere" not in layout.kind)
    assert (
        min(max(loads(problem_, layout).values()) for layout in found) < 1.15 * 8 * 3 * 160 * 3 / 8
    )


def test_virtual_stages():
    """Two workers a pipeline with two stages each, one after the other in turns."""
    problem_ = problem(3, 2, 6, 4)
    stages = tuple(
        VirtualStage(column=first // 2 % 2, layers=(first, first + 2)) for first in range(0, 8, 2)
    )
    placed = msgspec.structs.replace(problem_.grid, stages=stages)
    holds = {
        Worker(pipeline, column): ((2 * column, 2 * column + 2), (2 * column + 4, 2 * column + 6))
        for pipeline in range(3)
        for column in range(2)
        if (pipeline, column) != (1, 0)
    }
    for layers in ("fixed", "move"):
        there = msgspec.structs.replace(
            problem_,
            grid=placed,
            question=AllowedLayouts(layers=layers),
            workers={worker: LiveWorker(holds=layers) for worker, layers in holds.items()},
        )
        found = list(generate_layouts(there))
        assert found
        for layout in found:
            assert_valid(there, layout, once=False)


def test_live_holders_share_where_no_line_has_room_for_all_layers():
    problem_ = problem(2, 4, 4, 4, failed=["0.0", "0.1", "1.2", "1.3"], room=4 * 8 + 16)
    for layout in (found := list(generate_layouts(problem_))):
        assert_valid(problem_, layout, once="anywhere" not in layout.kind)
    assert found


def test_no_room_for_all_layers():
    with pytest.raises(LookupError, match="room for all layers"):
        list(
            generate_layouts(
                problem(1, 4, 4, 4, failed=["0.0", "0.1"], room=4 * 8 + 8, from_checkpoint=True)
            )
        )
