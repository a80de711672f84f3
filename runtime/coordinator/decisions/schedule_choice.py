"""Schedule choice: which schedule to ask for, by what workers hold and whether layers may move.

Each answer may be None: it is being planned, so ask again later. All functions raise NoScheduleError where there is
none, PlannerFailedError where one might be found by another attempt, and RunError where one does not fit.
"""

from collections.abc import Callable, Collection, Mapping

from slipstream.runtime.coordinator.decisions.questions import PlannerFailedError, Question
from slipstream.runtime.coordinator.decisions.run_state import Step
from slipstream.schedules.schedule import HeldLayers, NoScheduleError, Schedule, Worker

Way = Callable[[], Schedule | None]


def at_first(step: Step, live: Collection[Worker]) -> Schedule | None:
    """The schedule for these workers before the first step, when everybody can build every layer."""
    return _first_of(_whole_stages(step, live), _from_checkpoint(step, live))


def at_once(step: Step, live: Collection[Worker]) -> Schedule | None:
    """The schedule by which these workers go on, all of which have paused.

    Where some hold other layers than those of their stages, the others wait for none to move, if that can be.
    """
    holds, placement, grid = step.state.holds, step.rules.placement, step.state.grid
    held = _held(step, live, holds)
    ways = [_whole_stages(step, live)]
    if all(holds.get(worker) for worker in live):
        displaced = any(not holds[worker] >= placement.held_in_column(grid, worker.column) for worker in live)
        ways.insert(0 if displaced else 1, lambda: _find(step, live, held=held))
    return _first_of(*ways, lambda: _settled(step, held))


def with_joining(step: Step, live: Collection[Worker]) -> Schedule | None:
    """The schedule for the members and workers that join, for which layers are fetched."""
    held = _held(step, live, step.state.held_now(step.rules.placement))
    return _by_layers(step, live, lambda: _settled(step, held))


def from_checkpoint(step: Step, live: Collection[Worker]) -> Schedule | None:
    """The schedule for which these workers read all layers anew."""
    return _by_layers(step, live, _from_checkpoint(step, live))


def settled(step: Step) -> Schedule | None:
    """The best schedule for the members, whatever moves for it."""
    return _settled(step, _held(step, step.state.members, step.state.held_now(step.rules.placement)))


def _by_layers(step: Step, live: Collection[Worker], moved: Way) -> Schedule | None:
    """Layers move where they may; where they are to stay, only if there is no schedule of whole stages."""
    ways = (_whole_stages(step, live), moved)
    return _first_of(*(ways if step.rules.settles is None else reversed(ways)))


def _whole_stages(step: Step, live: Collection[Worker]) -> Way:
    return lambda: step.rules.first if _as_first(step, live) else _find(step, live)


def _from_checkpoint(step: Step, live: Collection[Worker]) -> Way:
    return lambda: _find(step, live, from_checkpoint=True)


def _settled(step: Step, held: HeldLayers) -> Schedule | None:
    live = [worker for worker, _ in held]
    return step.rules.first if _as_first(step, live) else _find(step, live, held=held, settled=True)


def _as_first(step: Step, live: Collection[Worker]) -> bool:
    """Whether the first schedule is for these workers, as they are."""
    return step.state.slow.speeds is None and step.rules.first.seat_of.keys() == set(live)


def _find(step: Step, live: Collection[Worker], *, held: HeldLayers | None = None, settled: bool = False,
          from_checkpoint: bool = False) -> Schedule | None:
    down = tuple(sorted(set(step.state.grid.workers()).difference(live)))
    question = Question(down, step.state.slow.speeds, held, settled, from_checkpoint)
    answer = step.state.answers.get(question)
    if isinstance(answer, Exception):
        raise answer
    if answer is None:
        step.do(question)
    return answer


def _first_of(*ways: Way) -> Schedule | None:
    """The answer of the first way that has one."""
    errors = list[NoScheduleError]()
    for way in ways:
        try:
            return way()
        except NoScheduleError as error:
            errors.append(error)
    kind = PlannerFailedError if any(isinstance(one, PlannerFailedError) for one in errors) else NoScheduleError
    raise kind(", and ".join(filter(None, dict.fromkeys(map(str, errors)))))


def _held(step: Step, live: Collection[Worker], held: Mapping[Worker, frozenset[int]]) -> HeldLayers:
    placement = step.rules.placement
    return tuple((worker, placement.in_schedules(held.get(worker, frozenset()))) for worker in sorted(live))
