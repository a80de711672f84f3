"""Schedule choice: which schedule to request, depending on the layers that workers hold and on whether layers may move.

Each function returns None while its schedule is being planned; the caller asks again later. All functions raise
NoScheduleError if there is no schedule, PlannerFailedError if another attempt may find one, and RunError if the
schedule does not fit the job.
"""

from collections.abc import Callable, Collection, Mapping

from slipstream.runtime.coordinator.decisions.run_state import TransitionBuilder
from slipstream.runtime.coordinator.decisions.schedule_requests import (
    PlannerFailedError,
    PreparedSchedule,
    ScheduleRequest,
)
from slipstream.schedules.schedule import HeldLayers, NoScheduleError, Worker

ScheduleAttempt = Callable[[], PreparedSchedule | None]
"""Function that returns a schedule, or None while it is being planned; it raises NoScheduleError if there is none."""


def find_initial_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule for these workers before the first step, when each worker can build every layer; None while
    it is being planned."""
    return _try_in_order(_attempt_whole_stages(step, live), _attempt_from_checkpoint(step, live))


def find_immediate_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule with which these workers, all of which have paused, can continue soonest; None while it is
    being planned.

    If some of them lack layers of their stages, a schedule for which no layer moves is preferred to one in which each
    worker holds its stages.
    """
    holds, placement, grid = step.state.held_by_paused, step.rules.placement, step.state.grid
    held = _convert_held_layers(step, live, holds)
    ways = [_attempt_whole_stages(step, live)]
    if all(holds.get(worker) for worker in live):
        displaced = any(not holds[worker] >= placement.layers_in_column(grid, worker.column) for worker in live)
        ways.insert(0 if displaced else 1, lambda: _request_schedule(step, live, held=held))
    return _try_in_order(*ways, lambda: _request_settled(step, held))


def find_joining_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule for these members and joining workers, for which layers are fetched during training; None
    while it is being planned."""
    held = _convert_held_layers(step, live, step.state.find_held_layers(step.rules.placement))
    return _choose_by_layer_policy(step, live, lambda: _request_settled(step, held))


def find_restored_schedule(step: TransitionBuilder, live: Collection[Worker]) -> PreparedSchedule | None:
    """Return the schedule for which these workers read all layers from a checkpoint; None while it is being planned."""
    return _choose_by_layer_policy(step, live, _attempt_from_checkpoint(step, live))


def find_settled_schedule(step: TransitionBuilder) -> PreparedSchedule | None:
    """Return the best schedule for the current members, whatever layers move for it; None while it is being planned."""
    return _request_settled(step, _convert_held_layers(step, step.state.members,
                                                       step.state.find_held_layers(step.rules.placement)))


def _choose_by_layer_policy(step: TransitionBuilder, live: Collection[Worker],
                            moved: ScheduleAttempt) -> PreparedSchedule | None:
    """Return the schedule in which each worker holds the stages of its column, or the one that the function `moved`
    finds; None while it is being planned.

    Runs that move layers to better schedules (`RunRules.settles`) prefer the schedule of `moved`, others the former. If
    the preferred one does not exist, the other is returned.
    """
    ways = (_attempt_whole_stages(step, live), moved)
    return _try_in_order(*(ways if step.rules.settles is None else reversed(ways)))


def _attempt_whole_stages(step: TransitionBuilder, live: Collection[Worker]) -> ScheduleAttempt:
    """Return a function without arguments that returns the schedule for `live` workers in which each holds the stages
    of its column, or None while that schedule is being planned."""
    return lambda: step.rules.first if _is_first_schedule_for(step, live) else _request_schedule(step, live)


def _attempt_from_checkpoint(step: TransitionBuilder, live: Collection[Worker]) -> ScheduleAttempt:
    """Return a function without arguments that requests the schedule for which `live` workers read all layers from a
    checkpoint.

    The function returns None while that schedule is being planned; a later call returns the schedule. The argument
    `step` builds the run's next state: it has the answers so far, and collects the request.
    """
    return lambda: _request_schedule(step, live, from_checkpoint=True)


def _request_settled(step: TransitionBuilder, held: HeldLayers) -> PreparedSchedule | None:
    live = [worker for worker, _ in held]
    return step.rules.first if _is_first_schedule_for(step, live) \
        else _request_schedule(step, live, held=held, settled=True)


def _is_first_schedule_for(step: TransitionBuilder, live: Collection[Worker]) -> bool:
    """Return whether the run's first schedule is for exactly these workers at their present speeds."""
    return step.state.slow.planned_speeds is None and step.rules.first.schedule.seat_of.keys() == set(live)


def _request_schedule(step: TransitionBuilder, live: Collection[Worker], *, held: HeldLayers | None = None,
                      settled: bool = False, from_checkpoint: bool = False) -> PreparedSchedule | None:
    """Return the answer to a request for a schedule for `live` workers; if there is none yet, make the request and
    return None.

    The other arguments are the fields of `ScheduleRequest`. Raises the exception with which the request was answered.
    """
    down = tuple(sorted(set(step.state.grid.workers()).difference(live)))
    question = ScheduleRequest(down, step.state.slow.planned_speeds, held, settled, from_checkpoint)
    answer = step.state.answers.get(question)
    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        step.add_effect(question)
    return answer


def _try_in_order(*ways: ScheduleAttempt) -> PreparedSchedule | None:
    """Call the functions until one does not raise NoScheduleError, and return its result: a schedule, or None while
    that is being planned. If all raise, raise an error with all messages."""
    errors = list[NoScheduleError]()
    for way in ways:
        try:
            return way()
        except NoScheduleError as error:
            errors.append(error)
    kind = PlannerFailedError if any(isinstance(failure, PlannerFailedError) for failure in errors) else NoScheduleError
    raise kind(", and ".join(filter(None, dict.fromkeys(map(str, errors)))))


def _convert_held_layers(step: TransitionBuilder, live: Collection[Worker],
                         held: Mapping[Worker, frozenset[int]]) -> HeldLayers:
    placement = step.rules.placement
    return tuple((worker, placement.schedule_layers(held.get(worker, frozenset()))) for worker in sorted(live))
