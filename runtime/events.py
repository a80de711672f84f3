"""Events of a run: what `events.jsonl` holds, one JSON object a line, as docs/formats.md describes it.

One struct a kind; its name in the file is the class's with underscores (`OrderGiven`: `order_given`). Whoever tells of
an event fills in the fields of its kind; `runtime.coordinator.records.run_log` fills in those that all have.
Importing this needs no torch.
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
"""In a run's folder: the files of iterations (two) and events, and the folder of the schedules that events name."""
Phase = Literal["whole", "at once", "settled"]
"""All workers take part, in their own roles; some do not, and layers are where they were; layers have moved."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_tag):
    """What all kinds have. The event log fills it in."""

    time: float = 0.0
    """Wall clock, in seconds since 1970. Within one start of the run it never goes back."""
    seconds: Seconds = 0.0
    """Since this start of the run."""
    iteration: Count = 0
    """The first one that is not committed."""


class Started(Event, frozen=True, kw_only=True):
    """The run starts, or starts again and goes on. The first line of each start."""

    format: Literal["slipstream.events"] = FORMAT
    version: int = VERSION
    job: str
    workers: Count
    """Of the grid, whether they are there or not."""
    iterations: Count
    """All of the run, with those before this start."""
    samples: Count
    """Of an iteration, over all pipelines."""
    fault_free_period: Seconds | None
    """Planned, with all workers; None: nobody has planned it."""


class Failed(Event, frozen=True, kw_only=True):
    """A worker is gone that took part."""

    worker: Worker
    reason: str


class NodeLost(Event, frozen=True, kw_only=True):
    """No worker of a node (a machine) that takes part or could is left; each has an event of its own, before."""

    node: Count
    """By `[topology]`, or as the nodes were started."""
    workers: tuple[Worker, ...]
    """All of it."""


class OrderGiven(Event, frozen=True, kw_only=True):
    """Members are told to train by a schedule, until the next order."""

    order: Count
    schedule: Digest
    """The folder has it as `schedules/DIGEST.json`."""
    live: Count
    """Workers that take part."""
    planned_period: Seconds
    phase: Phase


class PlanAsked(Event, frozen=True, kw_only=True):
    """A schedule is looked up or planned."""

    down: tuple[Worker, ...]
    phase: Phase
    """Of the order that it is for."""


class PlanAnswered(Event, frozen=True, kw_only=True):
    """The schedule is there, or there is none."""

    down: tuple[Worker, ...]
    phase: Phase
    took: Seconds
    error: str | None = None
    """Why there is none."""


class SettlingChosen(Event, frozen=True, kw_only=True):
    """Whether layers are to move, and why."""

    settles: bool
    moves_bytes: Count
    move_seconds: Seconds
    present_period: Seconds
    settled_period: Seconds
    pays_after: Count | None
    """Iterations until the move has paid for itself; None: never."""
    time_to_failure: Seconds | None
    """Until the next failure, as observed or given; None: not known."""


class FetchBegun(Event, frozen=True, kw_only=True):
    """Workers begin to get layers that they lack, while the others train."""

    fetch: Count
    purpose: Literal["join", "settle"]
    layers: Count
    """Copies of layers that are fetched, over all workers."""
    workers: tuple[Worker, ...]
    """Those that fetch."""


class FetchProgressed(Event, frozen=True, kw_only=True):
    """How much of a fetch has come. Told whenever a worker has all of its layers."""

    fetch: Count
    share: Share
    """Of the copies of layers that are fetched: those of workers that have all of theirs."""


class FetchAbandoned(Event, frozen=True, kw_only=True):
    """A fetch ends without a handover. Another may follow."""

    fetch: Count
    reason: str


class HandedOver(Event, frozen=True, kw_only=True):
    """Schedule and holdings change together. The order that does it follows."""

    fetch: Count
    """0: layers move while all wait."""
    order: Count


class Joined(Event, frozen=True, kw_only=True):
    """A worker takes part that did not before."""

    worker: Worker


class Resumed(Event, frozen=True, kw_only=True):
    """After failures, or a join, all members have begun their first op."""

    pause: Seconds
    """From the first failure, or from when all had stopped."""
    live: Count


class Slowed(Event, frozen=True, kw_only=True):
    """A worker takes longer than the others for the same ops."""

    worker: Worker
    factor: Annotated[float, msgspec.Meta(gt=0)]
    """How many times as long."""


class Recovered(Event, frozen=True, kw_only=True):
    """A worker that was slow is as fast as the others again."""

    worker: Worker


class LeftOut(Event, frozen=True, kw_only=True):
    """A worker lives and takes no part."""

    worker: Worker
    reason: str


class WentBack(Event, frozen=True, kw_only=True):
    """Committed iterations are given up: training goes on from a checkpoint. `iteration` is that of the checkpoint."""

    lost: Count
    """Committed iterations that are run again."""
    reason: str


class CoordinatorRestarted(Event, frozen=True, kw_only=True):
    """A new coordinator has found the workers of one that was lost, and goes on with them."""

    live: Count
    """Workers that were found."""


class CheckpointWritten(Event, frozen=True, kw_only=True):
    """A checkpoint is complete."""

    checkpoint: Count
    """Its number of iterations done."""
    took: Seconds


class Noted(Event, frozen=True, kw_only=True):
    """Something else went wrong and was survived."""

    text: str


class Finished(Event, frozen=True, kw_only=True):
    """The run ends here. A run that was killed has no such line."""

    error: str | None = None
    """Why it ends before its last iteration."""


Kind = (Started | Failed | NodeLost | OrderGiven | PlanAsked | PlanAnswered | SettlingChosen | FetchBegun
        | FetchProgressed | FetchAbandoned | HandedOver | Joined | Resumed | Slowed | Recovered | LeftOut | WentBack
        | CoordinatorRestarted | CheckpointWritten | Noted | Finished)


class Iteration(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `losses.jsonl`: a committed iteration."""

    iteration: Count
    loss: float | None
    """None: it was not finite, and no step was made."""
    period: Seconds | None = None
    """The longest busy window of any worker."""
    time: float | None = None
    """When it was committed, by the clock of the events. Runs of earlier versions have neither this nor the period."""
    cost_error: float | None = None
    """How far the costs of samples were from what their ops took: the root of the mean square of (measured / expected
    - 1), where expected is a multiple of the median of each worker's ops of a kind. None: no costs are known."""


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `metrics.jsonl`: what dashboards show of a committed iteration. None: it is not known."""

    iteration: Count
    loss: float | None
    validation_loss: float | None
    """Of the parameters after its step, where they were evaluated then."""
    gradient_norm: float | None
    """Of all gradients, before they are clipped."""
    learning_rate: float
    tokens_per_second: float | None
    """From the commit before to this one, with whatever lay between them."""
    mfu: float | None
    """Model FLOPs utilization: the operations of the model's forward and backward, as a share of what the live
    workers' devices can do at their best in the same time."""
    live: Count | None
    phase: Phase | None
    recoveries: Count
    """Changes of members so far, of all starts of the run."""
    time: float
    """As in `Iteration`."""


encode = msgspec.json.Encoder().encode
Observer = Callable[[Event], None]
"""Called with each event, on the coordinator's thread."""
IterationObserver = Callable[[Metrics], None]
"""Called with what dashboards show of each iteration, on the same thread."""

decode: Callable[[bytes], Kind] = msgspec.json.Decoder(Kind).decode
decode_metrics: Callable[[bytes], Metrics] = msgspec.json.Decoder(Metrics).decode
decode_iteration: Callable[[bytes], Iteration] = msgspec.json.Decoder(Iteration).decode
