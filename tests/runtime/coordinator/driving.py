"""What tests drive transitions with."""

from slipstream.runtime.coordinator.decisions.schedule_requests import PreparedSchedule
from slipstream.schedules.codec import encode
from slipstream.schedules.worker_programs import divide_schedule


def prepared(schedule):
    """A schedule as it is given in an order."""
    return PreparedSchedule(encode(schedule), divide_schedule(schedule))
