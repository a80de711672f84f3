from hypothesis import given, settings
from msgspec.structs import replace

from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import Memory, OpKind, Worker
from tests.generate import BROKEN, HEALTHY, by_hand, schedules


def test_by_hand():
    """On 0.1 an I ends as the next F starts, and the release comes first."""
    memory = Memory(unit=1.0, capacity=(9, 9), activation=(2, 2), weight_stash=(1, 1))
    assert memory_peaks(replace(by_hand(HEALTHY), memory=memory)) == {
        Worker(0, 0): 4,
        Worker(0, 1): 3,
        Worker(1, 0): 4,
        Worker(1, 1): 3,
    }
    assert memory_peaks(by_hand(HEALTHY)) == {}


def test_rerouted_work_counts_on_its_host():
    memory = Memory(unit=1.0, capacity=(9, 9), activation=(2, 3), weight_stash=(1, 2))
    assert memory_peaks(replace(by_hand(BROKEN), memory=memory))[Worker(0, 1)] == 10


def held(schedule, worker, tick):
    """What a worker holds at an instant, op by op."""
    memory, total = schedule.memory, 0
    by_unit = {(op.kind, op.slice, op.pipeline, op.microbatch): op for op in schedule.ops(worker)}
    for (kind, *unit), op in by_unit.items():
        if kind is OpKind.F:
            gradient = by_unit.get((OpKind.I, *unit)) or by_unit[OpKind.B, *unit]
            total += memory.activation[unit[0]] * (op.start_ticks <= tick < gradient.end_ticks)
        elif kind is OpKind.W:
            total += memory.weight_stash[unit[0]] * (
                by_unit[OpKind.I, *unit].end_ticks <= tick < op.end_ticks
            )
    return total


@settings(max_examples=40)
@given(schedules(memory=True, max_pipelines=3, max_stages=3, max_microbatches=4))
def test_equals_the_definition(schedule):
    peaks = memory_peaks(schedule)
    assert peaks.keys() == {seat.worker for seat in schedule.seats}
    for worker, peak in peaks.items():
        instants = {tick for op in schedule.ops(worker) for tick in (op.start_ticks, op.end_ticks)}
        assert peak == max(held(schedule, worker, tick) for tick in instants)


def spans(schedule):
    """When each live worker runs what, asked of workers that are alike and of each."""

    def of(worker):
        return [(op.kind, op.slice, op.start_ticks, op.end_ticks) for op in schedule.ops(worker)]

    return schedule.compute_for_each(of), {seat.worker: of(seat.worker) for seat in schedule.seats}


@given(schedules())
def test_workers_are_alike_whose_ops_are(schedule):
    of_alike, of_each = spans(schedule)
    assert of_alike == of_each


def test_workers_that_hold_other_layers_step_for_another_time():
    """Though they run the same program."""
    schedule = by_hand(HEALTHY)
    first, *others = schedule.seats
    times = replace(schedule.times, optimizer_of_layer=(1, 3))
    of_alike, of_each = spans(
        replace(schedule, times=times, seats=(replace(first, holds=((0, 2),)), *others))
    )
    assert of_alike == of_each
    steps = [of_alike[seat.worker][-1] for seat in schedule.seats if seat.program == first.program]
    assert len(steps) > 1 and steps[0] != steps[-1]
