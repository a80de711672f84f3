"""Describe events of a run in words, one line each."""

from collections.abc import Sequence
from typing import Literal

from slipstream.cli.shared.console import duration
from slipstream.runtime.events import (
    AnyEvent,
    CheckpointWritten,
    CoordinatorRestarted,
    Failed,
    FetchAbandoned,
    FetchBegun,
    FetchProgressed,
    Finished,
    HandedOver,
    Joined,
    LeftOut,
    NodeLost,
    Noted,
    OrderGiven,
    PlanAnswered,
    PlanAsked,
    Recovered,
    Resumed,
    SettlingChosen,
    Slowed,
    Started,
    WentBack,
)
from slipstream.schedules.schedule import Worker

EventGroup = Literal["failure", "order", "join", "slow", "layers", "checkpoint", "other"]
"""Name of a group of events of a run. Each group has its own kind of mark on the page of a run."""


def event_group(event: AnyEvent) -> EventGroup | None:
    """Return the group of an event, such as `failure` or `layers`, which decides its mark on the page of a run.

    Returns None for events without a mark: those that repeat another event or are one of many.
    """
    match event:
        case Failed() | NodeLost() | WentBack() | CoordinatorRestarted():
            return "failure"
        case OrderGiven():
            return "order"
        case Joined():
            return "join"
        case Slowed() | Recovered() | LeftOut():
            return "slow"
        case SettlingChosen() | FetchBegun() | FetchAbandoned() | HandedOver():
            return "layers"
        case CheckpointWritten():
            return "checkpoint"
        case PlanAsked() | FetchProgressed():
            return None
        case _:
            return "other"


def describe_event(event: AnyEvent) -> str:
    """Return one line that says what happened in an event of a run."""
    match event:
        case Started():
            return "started" if event.iteration == 0 else f"restarted from iteration {event.iteration}"
        case Failed():
            return event.reason
        case NodeLost():
            return f"node {event.node} is lost, with all of its workers: {', '.join(map(str, event.workers))}"
        case OrderGiven():
            return (f"{event.phase}: {event.live} workers train, with a period of {duration(event.planned_period)} "
                    "planned")
        case PlanAsked():
            return f"a schedule {_list_down(event.down)} is asked for"
        case PlanAnswered():
            answer = f"not found: {event.error}" if event.error is not None else f"ready in {duration(event.took)}"
            return f"the schedule {_list_down(event.down)}{'' if event.phase == 'at once' else ', settled'}: {answer}"
        case Joined():
            return f"worker {event.worker} has joined"
        case Resumed():
            return f"training continues with {event.live} workers, after a pause of {duration(event.pause)}"
        case Slowed():
            return f"worker {event.worker} is slow: it takes {event.factor:.3g} times as long"
        case Recovered():
            return f"worker {event.worker} is not slow any more"
        case LeftOut():
            return f"worker {event.worker} is left out: {event.reason}"
        case CoordinatorRestarted():
            return f"a new coordinator has adopted {event.live} workers"
        case CheckpointWritten():
            return f"checkpoint of iteration {event.checkpoint}, written in {duration(event.took)}"
        case Noted():
            return event.text
        case Finished():
            return "ended" if event.error is None else f"ended early: {event.error}"
        case _:
            return _describe_layer_event(event)


def _describe_layer_event(event: SettlingChosen | FetchBegun | FetchProgressed | FetchAbandoned | HandedOver | WentBack
                          ) -> str:
    """Describe in one line an event in which layers move between workers."""
    match event:
        case SettlingChosen():
            pays = "" if event.pays_after is None else f", which pays after {event.pays_after} iterations"
            return (f"layers {'are to move' if event.settles else 'stay'}: {event.moves_bytes / 1e6:.4g} MB in "
                    f"{duration(event.move_seconds)} would make the period {duration(event.settled_period)} instead of "
                    f"{duration(event.present_period)}{pays}")
        case FetchBegun():
            many = len(event.workers) != 1
            return (f"worker{'s' if many else ''} {', '.join(map(str, event.workers))} "
                    f"fetch{'' if many else 'es'} {event.layers} layer{'' if event.layers == 1 else 's'}, to "
                    f"{event.purpose}")
        case FetchProgressed():
            return f"{100 * event.share:.0f} % of the layers have been fetched"
        case FetchAbandoned():
            return f"the fetch of layers is abandoned: {event.reason}"
        case HandedOver():
            return "schedule and layers change together"
        case WentBack():
            return f"back to a checkpoint, {event.lost} iterations are run again: {event.reason}"


def _list_down(down: Sequence[Worker]) -> str:
    return f"without {', '.join(map(str, down))}" if down else "with all workers"
