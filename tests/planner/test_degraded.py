"""Workers that go on as half their processes hold no more than there is room for."""

import pytest
from msgspec.structs import replace

from slipstream.planner.degraded import degradable, with_degraded
from slipstream.planner.job.file import parse_job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job, plan_with
from slipstream.planner.recompute import recomputing
from slipstream.schedules.check import check
from slipstream.schedules.codec import decode, encode
from slipstream.schedules.memory import memory_peaks, room
from slipstream.schedules.schedule import Room, Scope, Worker
from tests.jobs import grid

SLOW = Worker(1, 0)


def job(capacity, weights, more="", training=""):
    return parse_job(f"pipelines = 3\nstages = 2\nmicrobatches = 4\n[time]\nforward = 1\nbackward_input = 1\n"
                     f"backward_weight = 1\n[memory]\ncapacity = {capacity}\nweights = {weights}\n"
                     f"weight_stash = 0.5\n{more}[training]\ntensor_parallel = 2\n{training}\n")


@pytest.mark.parametrize(("capacity", "weights", "left"), [
    (6, 2, 2 - 2 / 7), (5, 1, 2 - 1 / 7), (4, 1, 1.5 - 1 / 7), (5, 0, 2.5)])
def test_there_is_half_a_device_beside_the_weights_of_both_ranks(capacity, weights, left):
    """And beside copies of the parameters that it steps: of 7 numbers a parameter, one."""
    given = with_degraded(job(capacity, weights), [SLOW], slower=2.0)
    assert given.memory.capacity_of == ((SLOW, pytest.approx(left)),) and given.time.slow == ((SLOW, 2.0),)
    schedule = plan_job(given, [Worker(0, 1)], method="greedy", steps=120_000).schedule
    assert memory_peaks(schedule)[SLOW] * schedule.memory.unit <= left + 1e-9 < capacity
    assert left - schedule.memory.unit < room(schedule, schedule.seat_of[SLOW]) * schedule.memory.unit <= left + 1e-9
    assert decode(encode(schedule)) == schedule
    if left < 2.5:
        less = replace(schedule.memory, capacity_of=(Room(SLOW, 0),))
        assert check(replace(schedule, memory=less))[0].rule == "memory"


def test_layers_that_move_leave_it_with_what_it_has_room_for():
    given = with_degraded(job(9, [4, 4], "[placement]\nlayers = [2, 2]\n"), [SLOW], slower=2.0)
    options = PlanOptions(method="greedy", steps=120_000, layers="move")
    schedule = plan_with(options, given, [Worker(0, 1)]).schedule
    held = sum(end - first for first, end in schedule.holds_of(schedule.seat_of[SLOW]))
    assert 0 <= memory_peaks(schedule)[SLOW] * schedule.memory.unit <= (9 + 4) / 2 - 2 * held


@pytest.mark.parametrize(("capacity", "weights"), [(2, 1), (1.9, 0), (3, 3), (4, 6)])
def test_without_room_for_a_micro_batch_it_is_as_good_as_down(capacity, weights):
    assert degradable(job(capacity, weights)) == set()
    with pytest.raises(NoPlanError, match=r"worker 1\.0 cannot go on as half its ranks: there is no room"):
        with_degraded(job(capacity, weights), [SLOW])


@pytest.mark.parametrize(("masters", "copies"), [("", 1 / 3), ("master_weights = true", 0)])
def test_where_state_is_sharded_it_steps_copies_of_what_it_keeps(masters, copies):
    """Of three holders each has two thirds of the state, 6 of 9: of 8, 1 are parameters and 1 gradients. Master weights
    are such copies already."""
    text = "state = 9\n", "shard_optimizer = true\n" + masters
    given = with_degraded(job(16, 8, *text), [SLOW])
    assert given.memory.capacity_of == ((SLOW, pytest.approx((16 + 8) / 2 - 8 - copies)),)


@pytest.mark.parametrize(("training", "gradients"), [
    ("", 2), ("amsgrad = true", 14 / 9), ("optimizer = 'sgd'", 14 / 3), ("optimizer = 'sgd'\nmomentum = 0.9", 14 / 5),
    ("master_weights = true", 14 * 4 / 30), ("master_weights = true\nreduce_dtype = 'bf16'", 14 * 2 / 28)])
def test_there_is_room_for_the_gradients_of_a_rank_on_their_way(training, gradients):
    """Beside micro-batches only where the worker has another stage, of which it may hold some then."""
    copies = 0 if "master" in training else gradients
    assert degradable(job((max(1, gradients) + copies) * 2 + 14 + 1e-6, 14, training=training)) == {0, 1}
    assert degradable(job((max(1, gradients) + copies) * 2 + 14 - 1e-6, 14, training=training)) == set()
    both = "[placement]\norder = 'v'\nchunks = 2\n"
    given = with_degraded(job(40, 7, both, training), [SLOW])
    assert given.memory.capacity_of == ((SLOW, pytest.approx((40 + 14) / 2 - 14 - gradients - copies)),)


def test_a_layer_that_is_computed_again_has_its_room_on_both_ranks():
    again = "recomputed = 0.1\n", "[placement]\nlayers = [2, 2]\n"
    plain = job(9, 1, "".join(again))
    for given in (with_degraded(recomputing(plain, [0]), [SLOW]), recomputing(with_degraded(plain, [SLOW]), [0])):
        (_, room_left), = given.memory.capacity_of
        assert given.memory.capacity == (pytest.approx(9 - 0.5 - 0.4), 9)
        assert room_left == pytest.approx((9 + 1) / 2 - 1 - 1 / 7 - 0.5 - 0.4)


def test_others_who_are_down_leave_more_state_to_each():
    given = job(12, 8, "state = 9\n")
    with pytest.raises(NoPlanError, match="a worker of stage 0 has room for 0, but one micro-batch needs 1 there"):
        plan_job(replace(given, memory=replace(given.memory, capacity=(3.0, 12.0))), [Worker(0, 0), Worker(1, 0)])
    schedule = plan_job(given, [Worker(0, 0)], method="greedy", steps=120_000).schedule
    assert [room(schedule, schedule.seat_of[Worker(1, column)]) * schedule.memory.unit for column in (0, 1)] == [9, 12]


@pytest.mark.parametrize("method", ["1f1b", "recycle"])
def test_baselines_take_all_workers_to_have_the_same_room(method):
    with pytest.raises(NoPlanError, match=f"{method} takes all workers to have the same room; expected"):
        plan_job(with_degraded(job(6, 2), [SLOW]), method=method)


def test_a_worker_with_a_room_of_its_own_is_planned_as_others_are():
    """Whole stages in place were never planned then: 559 ticks was the bound of this job, whose plans take 970."""
    more = "[placement]\norder = 'interleaved'\nchunks = 2\n" \
           "[memory]\ncapacity = 16\nactivation = 1\nweight_stash = 1\n"
    times = "forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 2\noptimizer = 5\n"
    given = grid(2, 4, 8, times=times, more=f"{more}capacity_of = {{'0.1' = 12}}\n")
    made = plan_job(given, [Worker(1, 2)], steps=120_000).schedule
    assert check(made) == [] and made.scope is Scope.STAGES
    assert made.period_ticks == made.lower_bound_ticks == 970
