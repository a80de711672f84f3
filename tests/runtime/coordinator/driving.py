"""What tests drive transitions with."""

from slipstream.runtime.coordinator.decisions.effects import PreparedSchedule, prepare_schedule
from slipstream.schedules.shares import divide_schedule


def prepared(schedule) -> PreparedSchedule:
    """A schedule as it is given in an order."""
    return prepare_schedule(schedule, divide_schedule(schedule))
