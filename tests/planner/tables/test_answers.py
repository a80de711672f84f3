"""What tables answer to failures of unlike workers.

It is compared with fresh plans and with their own rows.
"""

import pytest

from benchmarks.answers import TOLERANCE, build_small_table, compare_job
from slipstream.planner import PlanOptions, parse_job
from slipstream.planner.bound_verifier import proven_bound
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.pattern import roles_key, settled_key
from slipstream.schedules.tables.relabel import relabel_schedule
from tests.exact.cases import job
from tests.exact.generate import Case, draw_case

STEPS = 20_000
ONCE_LONGER = (4, 17, 53, 57, 59, 72)
"""Drawn jobs whose tables once answered with longer plans than a fresh one.

They have slow workers, or rooms of their own.
"""
SLOW_IN_A_LONG_STAGE = Case(
    "roles",
    job(
        3,
        2,
        2,
        {
            **{key: [1, 2] for key in ("forward", "backward_input", "backward_weight")},
            "slow": {"0.1": 2},
        },
    ),
)


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
    """A row of a pattern is as short as the whole table's answer to it."""
    case = draw_case(seed, "roles")
    table = build(case, 1)
    rows = {row.key: row for row in table.rows()}
    patterns = [key for key in rows if key.startswith("pattern-")]
    assert patterns
    for key in patterns:
        for other_key, asked in (
            (roles_key(key), {"roles_move": True}),
            (settled_key(key), {"settled": True}),
        ):
            found = table.lookup(rows[key].failed, **asked)
            if found is None:
                assert rows[other_key].period is None
                continue
            assert check(found.schedule) == []
            assert rows[other_key].period == found.schedule.seconds(found.schedule.period_ticks)


def test_moved_roles_of_a_pattern_answer_equal_pipelines():
    """The entry of a pattern also answers for pipelines of the same class.

    It has moved workers.
    """
    table = build(SLOW_IN_A_LONG_STAGE, 1)
    entries = [
        row
        for row in table.rows()
        if row.key.startswith(roles_key("pattern-1")) and row.period is not None
    ]
    schedules = [table.checked_schedule(row.key) for row in entries]
    schedules = [schedule for schedule in schedules if schedule.moves]
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
