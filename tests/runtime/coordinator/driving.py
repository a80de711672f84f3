"""What tests drive transitions with."""

from slipstream.runtime.coordinator.decisions.questions import Prepared
from slipstream.schedules.codec import encode
from slipstream.schedules.parts import divide


def prepared(schedule):
    """A schedule as it is given in an order."""
    return Prepared(encode(schedule), divide(schedule))
