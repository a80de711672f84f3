"""Schedule choice: which schedule to request, depending on the layers that workers hold and on whether layers may move.

Each function returns None while its schedule is being planned; the caller asks again later. All functions raise
NoScheduleError if there is no schedule, PlannerFailedError if another attempt may find one, and RunError if the
schedule does not fit the job.
"""

from collections.abc import Callable, Collection, Mapping

from slipstream.runtime.coordinator.decisions.questions import PlannerFailedError, Question
from slipstream.runtime.coordinator.decisions.run_state import Step
from slipstream.schedules.schedule import HeldLayers, NoScheduleError, Schedule, Worker

Way = Callable[[], Schedule | None]
"""Function that returns a schedule, or None while it is being planned; it raises NoScheduleError if there is none."""


def at_first(step: Step, live: Collection[Worker]) -> Schedule | None:
    """Return the schedule for these workers before the first step, when each worker can build every layer."""
    return _first_of(_whole_stages(step, live), _from_checkpoint(step, live))


def at_once(step: Step, live: Collection[Worker]) -> Schedule | None:
    """Return the schedule with which these workers, all of which have paused, can continue immediately.

    If some of them hold layers other than those of their stages, schedules for which no layer moves are preferred.
    """
    holds, placement, grid = step.state.holds, step.rules.placement, step.state.grid
    held = _held(step, live, holds)
    ways = [_whole_stages(step, live)]
    if all(holds.get(worker) for worker in live):
        displaced = any(not holds[worker] >= placement.held_in_column(grid, worker.column) for worker in live)
        ways.insert(0 if displaced else 1, lambda: _find(step, live, held=held))
    return _first_of(*ways, lambda: _settled(step, held))


def with_joining(step: Step, live: Collection[Worker]) -> Schedule | None:
    """Return the schedule for members and joining workers, for which layers are fetched during training."""
    held = _held(step, live, step.state.held_now(step.rules.placement))
    return _by_layers(step, live, lambda: _settled(step, held))


def from_checkpoint(step: Step, live: Collection[Worker]) -> Schedule | None:
    """Return the schedule for which these workers read all layers from a checkpoint."""
    return _by_layers(step, live, _from_checkpoint(step, live))


def settled(step: Step) -> Schedule | None:
    """Return the best schedule for the current members, whatever layers move for it."""
    return _settled(step, _held(step, step.state.members, step.state.held_now(step.rules.placement)))


def _by_layers(step: Step, live: Collection[Worker], moved: Way) -> Schedule | None:
    """Return a schedule with moved layers if layers may move; otherwise prefer a schedule of whole stages."""
    ways = (_whole_stages(step, live), moved)
    return _first_of(*(ways if step.rules.settles is None else reversed(ways)))


def _whole_stages(step: Step, live: Collection[Worker]) -> Way:
    """Return a function that requests the schedule in which each worker holds the stages of its column."""
    return lambda: step.rules.first if _as_first(step, live) else _find(step, live)


def _from_checkpoint(step: Step, live: Collection[Worker]) -> Way:
    """Return a function that requests the schedule for which all layers are read from a checkpoint."""
    return lambda: _find(step, live, from_checkpoint=True)


def _settled(step: Step, held: HeldLayers) -> Schedule | None:
    live = [worker for worker, _ in held]
    return step.rules.first if _as_first(step, live) else _find(step, live, held=held, settled=True)


def _as_first(step: Step, live: Collection[Worker]) -> bool:
    """Return whether the run's first schedule is for exactly these workers at their present speeds."""
    return step.state.slow.speeds is None and step.rules.first.seat_of.keys() == set(live)


def _find(step: Step, live: Collection[Worker], *, held: HeldLayers | None = None, settled: bool = False,
          from_checkpoint: bool = False) -> Schedule | None:
    """Return the schedule that answers a request; if there is no answer yet, make the request and return None."""
    down = tuple(sorted(set(step.state.grid.workers()).difference(live)))
    question = Question(down, step.state.slow.speeds, held, settled, from_checkpoint)
    answer = step.state.answers.get(question)
    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        step.do(question)
    return answer


def _first_of(*ways: Way) -> Schedule | None:
    """Return the result of the first function that finds a schedule. If none does, raise an error with all messages."""
    errors = list[NoScheduleError]()
    for way in ways:
        try:
            return way()
        except NoScheduleError as error:
            errors.append(error)
    kind = PlannerFailedError if any(isinstance(failure, PlannerFailedError) for failure in errors) else NoScheduleError
    raise kind(", and ".join(filter(None, dict.fromkeys(map(str, errors)))))


def _held(step: Step, live: Collection[Worker], held: Mapping[Worker, frozenset[int]]) -> HeldLayers:
    placement = step.rules.placement
    return tuple((worker, placement.in_schedules(held.get(worker, frozenset()))) for worker in sorted(live))
