"""What tables answer to failures of unlike workers, beside fresh plans and beside their own rows."""

import msgspec
import pytest

from benchmarks.answers import TOLERANCE, build_small_table, compare_job
from slipstream.planner import PlanOptions, parse_job
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.normalise import candidate_vacancies, window_bounds_of
from slipstream.planner.plan import plan_only
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.pattern import roles_key, settled_key
from slipstream.schedules.tables.relabel import relabel_schedule
from tests.exact.cases import job
from tests.exact.generate import Case, draw_case

STEPS = 20_000
ONCE_LONGER = (4, 17, 53, 57, 59, 72)
"""Drawn jobs whose tables once answered with longer plans than a fresh one: slow workers, or own rooms."""
SLOW_IN_A_LONG_STAGE = Case("roles", job(
    3, 2, 2, {**{key: [1, 2] for key in ("forward", "backward_input", "backward_weight")}, "slow": {"0.1": 2}}))


def build(case, failures):
    asked = PlanOptions(steps=STEPS, backward=case.backward, optimizer=case.optimizer)
    return build_small_table(case, parse_job(case.text), asked, failures)


@pytest.mark.parametrize("seed", ONCE_LONGER)
def test_a_table_answers_as_well_as_a_fresh_plan(seed):
    found = list(compare_job(seed, STEPS))
    assert {comparison.kind for comparison in found} >= {"roles moved", "settled"}
    for comparison in found:
        assert comparison.excess <= TOLERANCE, comparison


def test_a_layout_whose_list_schedules_get_stuck_keeps_the_plan_that_it_has():
    """The build once ended with StuckError, since CP-SAT had found the plan of a layout."""
    assert all(comparison.excess <= TOLERANCE for comparison in compare_job(127, STEPS))


@pytest.mark.parametrize("seed", [57, 59])
def test_no_row_is_dominated_by_another_that_answers_the_same_failures(seed):
    """A row of a pattern is as short as what the whole table answers to it."""
    case = draw_case(seed, "roles")
    table = build(case, 1)
    rows = {row.key: row for row in table.rows()}
    patterns = [key for key in rows if key.startswith("pattern-")]
    assert patterns
    for key in patterns:
        for own, asked in ((roles_key(key), {"roles_move": True}), (settled_key(key), {"settled": True})):
            found = table.lookup(rows[key].failed, **asked)
            if found is None:
                assert rows[own].period is None
                continue
            assert check(found.schedule) == []
            assert rows[own].period == found.schedule.seconds(found.schedule.period_ticks)


def test_moved_roles_of_a_pattern_answer_equal_pipelines():
    """The entry of a pattern has moved workers; it is also for the other pipelines of their class."""
    table = build(SLOW_IN_A_LONG_STAGE, 1)
    entries = [row for row in table.rows() if row.key.startswith(roles_key("pattern-1")) and row.period is not None]
    schedules = [schedule for schedule in (table.checked_schedule(row.key) for row in entries) if schedule.moves]
    assert schedules
    for schedule in schedules:
        assert proven_bound(schedule).ticks >= schedule.lower_bound_ticks
        (failed,) = schedule.failed
        assert failed.pipeline == 1
        assert relabel_schedule(schedule, [failed]) == schedule
        other = relabel_schedule(schedule, [Worker(2, failed.column)])
        assert check(other) == [] and other.period_ticks == schedule.period_ticks and other.moves
        with pytest.raises(ValueError, match="interchangeable"):
            relabel_schedule(schedule, [Worker(0, failed.column)])


ALIKE = Case("roles", job(
    2, 5, 8,
    {"forward": [4, 2, 3, 4, 3], "backward_input": [0, 2, 3, 4, 3],
     "backward_weight": [4, 2, 3, 4, 3], "optimizer": 0.5, "all_reduce": 3, "transfer": 0.5},
    network={"overlap": True},
    placement={"layers": [4, 2, 3, 4, 3]},
    memory={"capacity": 15, "activation": [4, 2, 3, 4, 3],
            "weight_stash": [3.2, 1.6, 2.4, 3.2, 2.4], "weights": [0.8, 0.4, 0.6, 0.8, 0.6]}))
"""Alike workers, of which each pattern of failures leads to a plan of another length."""


def test_layers_moved_after_failures_of_alike_workers_are_planned_for_more_than_one_vacancy():
    """Two failures were answered with 138 s, where a fresh plan of others had 128.25."""
    alike, asked = parse_job(ALIKE.text), PlanOptions(steps=STEPS)
    settled = build_small_table(ALIKE, alike, asked, 2).lookup([Worker(0, 0), Worker(0, 1)], settled=True)
    assert settled is not None
    assert check(settled.schedule) == []
    first = candidate_vacancies(alike, window_bounds_of(alike, asked), 2)[0]
    moving = msgspec.structs.replace(asked, layers="move")
    fresh = [plan_only(moving, alike, failed).period for failed in (first, (Worker(0, 1), Worker(1, 2)))]
    assert settled.schedule.seconds(settled.schedule.period_ticks) <= min(fresh) * (1 + TOLERANCE)
