"""Describe the events of a run, the lines of `events.jsonl` (docs/formats.md).

Each kind of event has a struct, and each event is one JSON object. The name of a kind in the file
is the class name in lower case with underscores (`OrderGiven`: `order_given`); only `RunFinished`
is named `finished`. Who emits an event sets the fields of its kind;
`runtime.coordinator.records.run_log` sets the fields that all kinds have. Importing this module
needs no torch.
"""

import re
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from slipstream.schedules.schedule import Worker

FORMAT: Final = "slipstream.events"
VERSION = 1
LOSSES = "losses.jsonl"
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SCHEDULES = "schedules"
"""Folder of the schedules that events name, in the run's folder."""
Phase = Literal["whole", "at once", "settled"]
"""Kind of a schedule, by who takes part and whether layers have moved.

"whole": all workers take part. "at once": some do not, and the others hold what they held before.
"settled": layers have moved since the last change of members.
"""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def _event_name(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_event_name):
    """Base of all kinds of events, with the fields that the event log sets."""

    time: float = 0.0
    """Wall clock, in seconds since 1970, which never decreases within one start of the run."""
    seconds: Seconds = 0.0
    """Seconds since this start of the run."""
    iteration: Count = 0
    """First iteration that was not yet committed when the event occurred."""


class Started(Event, frozen=True, kw_only=True):
    """Event: the run starts, or resumes. This is the first line of each start."""

    format: Literal["slipstream.events"] = FORMAT
    version: int = VERSION
    job: str
    workers: Count
    """Number of workers of the grid, including those that are down."""
    iterations: Count
    """Number of iterations of the whole run, including those before this start."""
    samples: Count
    """Number of samples in an iteration, over all pipelines."""
    fault_free_period: Seconds | None
    """Planned period with all workers, in seconds; None if it was not planned."""


class Failed(Event, frozen=True, kw_only=True):
    """Event: a member has died or is given up."""

    worker: Worker
    reason: str


class NodeLost(Event, frozen=True, kw_only=True):
    """Event: a failure domain of several workers is lost, after the last `Failed` event."""

    node: Count
    """Number of the failure domain: a node of `[topology]`, or else a machine.

    Machines are numbered in the order of their nodes, of which one may have several.
    """
    workers: tuple[Worker, ...]
    """All workers of the failure domain."""


class OrderGiven(Event, frozen=True, kw_only=True):
    """Event: the members are ordered to train by a schedule until the next order."""

    order: Count
    schedule: Digest
    """Digest of the schedule, which the run's folder holds as `schedules/DIGEST.json`."""
    live: Count
    """Number of workers that take part."""
    planned_period: Seconds
    phase: Phase


class PlanAsked(Event, frozen=True, kw_only=True):
    """Event: the coordinator begins to search for a schedule."""

    down: tuple[Worker, ...]
    """Workers that do not take part in the schedule."""
    phase: Phase


class PlanAnswered(Event, frozen=True, kw_only=True):
    """Event: the search for a schedule has ended, with a schedule or without one."""

    down: tuple[Worker, ...]
    phase: Phase
    took: Seconds
    error: str | None = None
    """Reason why there is no schedule; None if there is one."""


class SettlingChosen(Event, frozen=True, kw_only=True):
    """Event: the coordinator has decided whether to move layers for a faster schedule."""

    settles: bool
    moves_bytes: Count
    move_seconds: Seconds
    present_period: Seconds
    settled_period: Seconds
    pays_after: Count | None
    """Number of iterations until the gain exceeds the cost of the move; None: never."""
    time_to_failure: Seconds | None
    """Expected seconds until the next failure, observed or given; None if unknown."""


class FetchBegun(Event, frozen=True, kw_only=True):
    """Event: workers begin to copy layers that they lack, while training continues."""

    fetch: Count
    purpose: Literal["join", "settle"]
    layers: Count
    """Number of copies of layers that are fetched, over all workers."""
    workers: tuple[Worker, ...]
    """Workers that fetch layers."""


class FetchProgressed(Event, frozen=True, kw_only=True):
    """Event: one more worker has received all that it had to get in `fetch`."""

    fetch: Count
    share: Share
    """Share of the fetch's copies of layers whose workers have received all of theirs."""


class FetchAbandoned(Event, frozen=True, kw_only=True):
    """Event: a fetch ends, and the layers that it has copied are not used."""

    fetch: Count
    reason: str


class HandedOver(Event, frozen=True, kw_only=True):
    """Event: all members have stopped, so that the next order can change what they hold."""

    fetch: Count
    """Number of the fetch; 0 if the layers move while all members wait."""
    order: Count


class Joined(Event, frozen=True, kw_only=True):
    """Event: a worker becomes a member."""

    worker: Worker


class Resumed(Event, frozen=True, kw_only=True):
    """Event: all members have begun their first op after failures, joins or moves of layers."""

    pause: Seconds
    """Seconds from the first failure, or the last member's stop, until all members compute."""
    live: Count


class Slowed(Event, frozen=True, kw_only=True):
    """Event: a worker was found to take longer than its peers for the same ops."""

    worker: Worker
    factor: Annotated[float, msgspec.Meta(gt=0)]
    """Duration of this worker's ops, as a multiple of the usual duration."""


class Recovered(Event, frozen=True, kw_only=True):
    """Event: a slow worker was found to be as fast as its peers again."""

    worker: Worker


class LeftOut(Event, frozen=True, kw_only=True):
    """Event: a live worker takes no part from now on, because it is too slow."""

    worker: Worker
    reason: str


class WentBack(Event, frozen=True, kw_only=True):
    """Event: committed iterations are undone, back to the checkpoint of `iteration`."""

    lost: Count
    """Number of committed iterations that are run again."""
    reason: str


class CoordinatorRestarted(Event, frozen=True, kw_only=True):
    """Event: a new coordinator has taken over the workers of a lost coordinator."""

    live: Count
    """Number of workers that the new coordinator found."""


class CheckpointWritten(Event, frozen=True, kw_only=True):
    """Event: a checkpoint is complete."""

    checkpoint: Count
    """Number of iterations done at the checkpoint, as in the name of its folder."""
    took: Seconds


class Noted(Event, frozen=True, kw_only=True):
    """Event, in words: something happened of which no other event tells, such as a problem."""

    text: str


class RunFinished(Event, frozen=True, kw_only=True, tag="finished"):
    """Event: the run ends. A run that was killed has no such line."""

    error: str | None = None
    """Reason why the run ends before its last iteration; None if it is complete."""


AnyEvent = (
    Started
    | Failed
    | NodeLost
    | OrderGiven
    | PlanAsked
    | PlanAnswered
    | SettlingChosen
    | FetchBegun
    | FetchProgressed
    | FetchAbandoned
    | HandedOver
    | Joined
    | Resumed
    | Slowed
    | Recovered
    | LeftOut
    | WentBack
    | CoordinatorRestarted
    | CheckpointWritten
    | Noted
    | RunFinished
)


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `losses.jsonl`: a committed iteration."""

    iteration: Count
    loss: float | None
    """Mean loss over all micro-batches. None if not finite (no step was made), or if unknown."""
    period: Seconds | None = None
    """Seconds of the longest busy window of any worker; None if unknown."""
    time: float | None = None
    """Time of the commit in seconds since 1970; None in files of earlier versions."""
    cost_error: float | None = None
    """Root mean square of measured / expected - 1 over ops; None without known costs.

    Expected is the median of a worker's ops of a kind, times the relative cost of the op's sample.
    """


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `metrics.jsonl`: values of a committed iteration, None where not known."""

    iteration: Count
    loss: float | None
    validation_loss: float | None
    """Loss on validation data after the step of this iteration; None without an evaluation."""
    gradient_norm: float | None
    """Norm of all gradients before clipping."""
    learning_rate: float
    tokens_per_second: float | None
    """Tokens of an iteration per second since the last commit, else since the first order."""
    mfu: float | None
    """Model FLOPs utilization: operations as a share of the live workers' peak."""
    live: Count | None
    phase: Phase | None
    recoveries: Count
    """Number of completed changes of members or layers so far, over all starts."""
    time: float
    """Time of the commit in seconds since 1970; 0 if it is not known."""


encode = msgspec.json.Encoder().encode
Observer = Callable[[Event], None]
"""Function that is called with each event, on the coordinator's thread."""
IterationObserver = Callable[[Metrics], None]
"""Function that is called with each committed iteration's metrics, on the same thread."""

decode_event: Callable[[bytes], AnyEvent] = msgspec.json.Decoder(AnyEvent).decode
decode_metrics: Callable[[bytes], Metrics] = msgspec.json.Decoder(Metrics).decode
decode_iteration: Callable[[bytes], Iteration] = msgspec.json.Decoder(Iteration).decode
