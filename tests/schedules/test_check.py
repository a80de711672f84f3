"""One broken schedule a rule, written by hand, and what the checker says about it."""

import pytest
from msgspec.structs import replace

from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.from_job import build_problem
from slipstream.schedules.check import MAX_VIOLATIONS, check
from slipstream.schedules.forwards import schedule_forwards
from slipstream.schedules.schedule import Memory, Seat, Worker
from tests.generate import BROKEN, HEALTHY, SHED, by_hand, list_schedule
from tests.jobs import grid
from tests.lines_run import lines_run


def rules(schedule):
    return {violation.rule for violation in check(schedule)}


def edited(lines, worker, old, new):
    assert lines[worker].count(old) == 1
    return by_hand({**lines, worker: lines[worker].replace(old, new)})


def test_valid():
    assert check(by_hand(HEALTHY)) == []
    assert check(by_hand(BROKEN)) == []
    assert check(by_hand(HEALTHY, optimizer="synchronous", period_ticks=9)) == []


@pytest.mark.parametrize(
    ("rule", "lines", "worker", "old", "new"),
    [
        ("each-once", HEALTHY, "0.0", "W1@6 ", ""),
        ("each-once", HEALTHY, "0.0", "W1@6", "W0@6"),
        ("each-once", HEALTHY, "0.0", "W1@6", "W2@6"),
        ("each-once", HEALTHY, "0.0", "W1@6", "B1@6"),
        ("each-once", HEALTHY, "0.0", "W1@6", "W1.1@6"),
        ("closing", HEALTHY, "0.0", "A@7 ", ""),
        ("closing", HEALTHY, "0.0", "A@7", "As1@7"),
        ("closing", HEALTHY, "0.0", " O@8", ""),
        ("closing", HEALTHY, "0.0", "O@8", "O@8 O@9"),
        ("closing", HEALTHY, "0.0", "A@7 O@8", "O@7 A@8"),
        ("one-at-a-time", HEALTHY, "0.0", "W0@4", "W0@5"),
        ("one-at-a-time", HEALTHY, "0.0", "F0@0 F1@1", "F1@1 F0@0"),
        ("one-at-a-time", HEALTHY, "0.0", "F0@0", "F0@-1"),
        ("forward-order", HEALTHY, "0.1", "F0@1", "F0@0"),
        ("backward-order", HEALTHY, "0.0", "I0@3", "I0@2"),
        ("backward-order", BROKEN, "0.1", "F1@5 F1.1@6 I1@7", "I1@5 F1.1@6 F1@7"),
        ("weight-order", HEALTHY, "0.0", "I0@3 W0@4", "W0@3 I0@4"),
        ("all-reduce", HEALTHY, "0.0", "A@7 O@8", "A@8 O@9"),
        ("all-reduce", HEALTHY, "0.0", "W1@6", "W1@7"),
    ],
)
def test_rule(rule, lines, worker, old, new):
    assert rules(edited(lines, worker, old, new)) >= {rule}


def test_host():
    stolen = {
        **BROKEN,
        "0.0": BROKEN["0.0"].replace(" W1@10", ""),
        "1.0": "F0@0 F1@1 I0@5 W0@6 I1@9 W0.1@10 W1@11 A@12 O@13",
    }
    (violation,) = [violation for violation in check(by_hand(stolen)) if violation.rule == "host"]
    assert violation.op.worker == Worker(1, 0)
    assert "its F ran on 0.0" in violation.message


def test_any_holder_may_run_a_microbatch():
    schedule = by_hand(SHED)
    assert check(schedule) == []
    assert (schedule.shed, schedule.rerouted) == (1, 0)
    assert (by_hand(BROKEN).shed, by_hand(BROKEN).rerouted) == (0, 2)


def test_host_is_one_worker():
    """Pipeline 2's worker is down; its F runs on 0.0 and its backward on 1.0."""
    lines = {"0.0": "F0@0 I0@1 W0@2 F2.0@3 A@6 O@7", "1.0": "F0@0 I0@1 W0@2 I2.0@4 W2.0@5 A@6 O@7"}
    schedule = by_hand(lines, columns=(0,), microbatches=1)
    schedule = replace(
        schedule,
        grid=replace(schedule.grid, pipelines=3, microbatches=(1, 1, 1)),
        failed=(Worker(2, 0),),
    )
    violations = check(schedule)
    assert {violation.rule for violation in violations} == {"host"}
    assert all("its F ran on 0.0" in violation.message for violation in violations)


def test_host_holds_the_stage():
    lines = {
        **HEALTHY,
        "0.0": "F0@0 F1@1 I0@3 W0@4 I1@5 W1@6 W1s1@7 A@8 O@9",
        "0.1": "F0@1 I0@2 F1@3 I1@4 W0@5 A@7 O@8",
    }
    violations = check(by_hand(lines))
    assert "worker 0.0 holds layer 0, not all of layer 1" in violations[0].message


def test_live_workers_and_roles():
    schedule = by_hand(HEALTHY)
    assert rules(replace(schedule, failed=(Worker(0, 1),))) == {"live-workers"}
    assert rules(replace(schedule, seats=schedule.seats[1:])) == {"live-workers"}
    assert rules(replace(schedule, seats=(*schedule.seats, schedule.seats[-1]))) == {
        "live-workers",
        "roles",
    }
    seats = (Seat(Worker(0, 0), Worker(5, 0), 0), *schedule.seats[1:])
    assert rules(replace(schedule, seats=seats)) == {"roles"}
    nobody = replace(schedule, seats=schedule.seats[::2], failed=(Worker(0, 1), Worker(1, 1)))
    (violation,) = check(nobody)
    assert (violation.rule, violation.message) == (
        "holders",
        "no live worker holds layer 1 (stage 1): the parameters are lost",
    )


def test_a_moved_worker_plays_its_new_role():
    # Worker 1.0 is down and 1.1 has taken over its role, so that pipeline 0 runs both last stages.
    schedule = by_hand(BROKEN)
    seats = list(schedule.seats)
    seat = schedule.seat_of[Worker(1, 0)]
    seats[seats.index(seat)] = Seat(Worker(1, 1), Worker(1, 0), seat.program)
    moved = replace(schedule, seats=tuple(seats), failed=(Worker(1, 0),))
    assert check(moved) == []
    assert moved.moves == (Seat(Worker(1, 1), Worker(1, 0), 2),)


def test_transfer():
    schedule = by_hand(HEALTHY)
    slower = replace(schedule, times=replace(schedule.times, transfer=1))
    assert rules(slower) == {"forward-order", "backward-order"}
    assert "takes 1 ticks (0.5 s) to arrive" in check(slower)[0].message


def test_memory():
    schedule = by_hand(HEALTHY)
    roomy = Memory(unit=0.25, capacity=(4, 3), activation=(2, 2), weight_stash=(1, 1))
    assert check(replace(schedule, memory=roomy)) == []
    (violation,) = check(replace(schedule, memory=replace(roomy, capacity=(4, 2))))
    assert violation.rule == "memory"
    assert violation.worker == Worker(0, 1)
    assert violation.message == "worker 0.1 holds 0.75 at 3 ticks (1.5 s); its capacity is 0.5"


def test_synchronous_optimizer():
    later = {
        **HEALTHY,
        "0.1": "F0@1 I0@2 F1@3 I1@4 W0@5 W1@7 A@8 O@9",
        "1.1": "F0@1 I0@2 F1@3 I1@4 W0@5 W1@6 A@8 O@9",
    }
    assert check(by_hand(later)) == []
    violations = check(by_hand(later, optimizer="synchronous", period_ticks=10))
    assert not violations  # O on 0.0 starts at 8, when the last W ends
    latest = {
        **later,
        "0.1": "F0@1 I0@2 F1@3 I1@4 W0@5 W1@8 A@9 O@10",
        "1.1": later["1.1"].replace("A@8 O@9", "A@9 O@10"),
    }
    assert rules(by_hand(latest, optimizer="synchronous", period_ticks=11)) == {"optimizer"}


def test_period_and_bound():
    schedule = by_hand(HEALTHY)
    assert schedule.period_ticks == 9
    for period in (8, 10):
        (violation,) = check(replace(schedule, period_ticks=period))
        assert violation.rule == "period"
        assert "is busy from 0 ticks (0 s) to 9 ticks (4.5 s)" in violation.message
    assert check(replace(schedule, lower_bound_ticks=9, status="optimal")) == []
    for bound, status in ((10, "feasible"), (10, "optimal"), (8, "optimal"), (9, "feasible")):
        assert rules(replace(schedule, lower_bound_ticks=bound, status=status)) == {"bound"}


def test_a_schedule_without_ops_has_a_period_of_zero():
    idle = by_hand(dict.fromkeys(HEALTHY, "A@0 O@1"), microbatches=0)
    assert check(idle) == []
    assert {violation.rule for violation in check(idle, forwards=True)} == {"only-forwards"}
    for optimizer in ("staggered", "synchronous"):
        empty = replace(schedule_forwards(idle), optimizer=optimizer)
        assert check(empty, forwards=True) == []
        (violation,) = check(replace(empty, period_ticks=3, status="feasible"), forwards=True)
        assert violation.rule == "period"
        assert violation.message == "the period is given as 3 ticks (1.5 s), but no worker has ops"


def test_deadlock_of_ops():
    """A worker runs its ops in order, even if they take no time.

    They may all start at once then.
    """
    lines = {
        "0.0": "I0@0 F0@0 W0@0 A@0 O@0",
        "0.1": "F0@0 I0@0 W0@0 A@0 O@0",
        "1.0": "F0@0 I0@0 W0@0 A@0 O@0",
        "1.1": "F0@0 I0@0 W0@0 A@0 O@0",
    }
    schedule = by_hand(lines, microbatches=1, time=0, lower_bound_ticks=0, status="optimal")
    (violation,) = check(schedule)
    assert violation.rule == "deadlock"
    assert (
        "F(micro-batch 0.0, stage 0) on 0.0 waits for I(micro-batch 0.0, stage 0) on 0.0"
        in violation.message
    )


def test_deadlock_of_all_reduces():
    """Two pipelines that share no micro-batch wait for each other in their all-reduces."""
    lines = {
        "0.0": "F0s0@0 F0s1@0 I0s1@0 W0s1@0 I0s0@0 W0s0@0 As0@0 As1@0 O@0",
        "1.0": "F0s0@0 F0s1@0 I0s1@0 W0s1@0 I0s0@0 W0s0@0 As1@0 As0@0 O@0",
    }
    schedule = by_hand(
        lines, columns=(0, 0), microbatches=1, time=0, lower_bound_ticks=0, status="optimal"
    )
    (violation,) = check(schedule)
    assert violation.rule == "deadlock"
    assert "A(layer 1) on all its workers" in violation.message


def test_deadlock_of_all_reduces_that_take_time_on_one_worker():
    """A circle of reductions that take time is found on one worker.

    Copies of a stage may take unequally long to reduce; the circle is there all the same.
    """
    lines = {f"{pipeline}.0": "As0@0 As3@0 O@0" for pipeline in range(2)}
    lines |= {f"{pipeline}.1": "As1@0 As2@0 O@5" for pipeline in range(2)}
    schedule = by_hand(
        lines,
        columns=(0, 1, 1, 0),
        microbatches=0,
        time=0,
        lower_bound_ticks=5,
        status="optimal",
        period_ticks=5,
    )
    schedule = replace(
        schedule,
        grid=replace(schedule.grid, chains=2),
        times=replace(schedule.times, all_reduce=(0, 0, 5, 0)),
    )
    (violation,) = check(schedule)
    assert violation.rule == "deadlock"
    assert "A(layer 1) on all its workers" in violation.message


def test_violations_are_bounded():
    schedule = by_hand(HEALTHY)
    claims = replace(schedule, grid=replace(schedule.grid, microbatches=(65536, 65536)))
    assert len(check(claims)) == MAX_VIOLATIONS


@pytest.mark.parametrize(
    ("few", "many"), [((4, 4, 8), (8, 4, 8)), ((4, 4, 8), (4, 8, 8)), ((4, 4, 8), (4, 4, 16))]
)
def test_linear_time(few, many):
    """Three failures: everything shares micro-batches with everything.

    Twice the ops are hardly twice the work.
    """

    def work(size):
        problem = build_problem(grid(*size), [Worker(1, 2), Worker(3, 3), Worker(2, 1)])
        schedule = build_schedule(problem, list_schedule(problem), method="greedy")
        found = []
        lines = lines_run(lambda: found.extend(check(schedule)))
        assert found == []
        return lines

    assert 1.5 * work(few) < work(many) < 2.2 * work(few)
