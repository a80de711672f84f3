"""Schedule choice: which schedule to ask for, by what workers hold and whether layers may move."""

from collections.abc import Callable, Collection, Mapping

from slipstream.runtime.coordinator.context import CoordinatorContext
from slipstream.runtime.coordinator.planning import Held, NoScheduleError
from slipstream.schedules.schedule import Schedule, Worker

Way = Callable[[], Schedule | None]
"""A question to the schedule service. Raises NoScheduleError and RunError."""


class ScheduleChoice:
    """Asks for the schedules of one run. Each answer may be None: it is being planned, so ask again later.

    All methods raise NoScheduleError where there is none, and RunError where one does not fit.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def at_first(self, live: Collection[Worker]) -> Schedule | None:
        """The schedule for these workers before the first step, when everybody can build every layer."""
        return self._first_of(self._whole_stages(live), self._from_checkpoint(live))

    def at_once(self, live: Collection[Worker]) -> Schedule | None:
        """The schedule by which these workers go on, all of which have paused.

        Where some hold other layers than those of their stages, the others wait for none to move, if that can be.
        """
        schedules, holds = self._context.schedules, self._context.state.holds
        held = self._held(live, holds)
        ways = [self._whole_stages(live)]
        if all(holds.get(worker) for worker in live):
            ways.insert(0 if self._displaced(live) else 1, lambda: schedules.at_once(held))
        return self._first_of(*ways, lambda: schedules.settled(held))

    def with_joining(self, live: Collection[Worker]) -> Schedule | None:
        """The schedule for the members and workers that join, for which layers are fetched."""
        context = self._context
        held = self._held(live, context.held_now())
        return self._by_layers(live, lambda: context.schedules.settled(held))

    def from_checkpoint(self, live: Collection[Worker]) -> Schedule | None:
        """The schedule for which these workers read all layers anew."""
        return self._by_layers(live, self._from_checkpoint(live))

    def settled(self) -> Schedule | None:
        """The best schedule for the members, whatever moves for it."""
        context = self._context
        return context.schedules.settled(self._held(context.state.members, context.held_now()))

    def _by_layers(self, live: Collection[Worker], moved: Way) -> Schedule | None:
        """Layers move where they may; where they are to stay, only if there is no schedule of whole stages."""
        ways = (self._whole_stages(live), moved)
        return self._first_of(*(ways if self._context.settler is None else reversed(ways)))

    def _whole_stages(self, live: Collection[Worker]) -> Way:
        return lambda: self._context.schedules.for_workers(sorted(live))

    def _from_checkpoint(self, live: Collection[Worker]) -> Way:
        return lambda: self._context.schedules.from_checkpoint(sorted(live))

    def _first_of(self, *ways: Way) -> Schedule | None:
        """The answer of the first way that has one."""
        reasons = []
        for way in ways:
            try:
                return way()
            except NoScheduleError as error:
                reasons.append(str(error))
        raise NoScheduleError(", and ".join(filter(None, dict.fromkeys(reasons))))

    def _displaced(self, live: Collection[Worker]) -> bool:
        """Whether some of these workers do not hold the layers of their own stages."""
        state, placement = self._context.state, self._context.placement
        return any(not state.holds[worker] >= placement.held_in_column(state.grid, worker.column) for worker in live)

    def _held(self, live: Collection[Worker], held: Mapping[Worker, frozenset[int]]) -> Held:
        placement = self._context.placement
        return tuple((worker, placement.in_schedules(held.get(worker, frozenset()))) for worker in sorted(live))
