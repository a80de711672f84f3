"""Failures on purpose, for tests and rehearsals.

A failure happens at a place of an iteration. The places are, in this order:

    a number     before the op of this number in the worker's program
    A, O         before the first op of this kind
    stepped      after the last op
    evaluating   before the forwards of an evaluation
    reported     after the coordinator has acknowledged the iteration, and before any result of the
                 next one is passed on (an op of the next one may have run)

When a worker takes an order that starts in the iteration:

    ordered      before it connects to the other members
    met          when all are connected, before layers move
    moved        after layers have moved

While layers move during training:

    asked        at a sender, before the step of an iteration whose state it is to send
    loaded       at the target, when it has received a layer
    followed     at the target, when it has received all; `iteration` is here the order's number
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from slipstream.schedules.schedule import Worker

Action = Literal[
    "kill", "stop", "raise", "cut", "exit", "memory", "flip parameters", "flip state", "flip copy"
]
Place = (
    int
    | Literal[
        "A",
        "O",
        "stepped",
        "evaluating",
        "reported",
        "ordered",
        "met",
        "moved",
        "asked",
        "loaded",
        "followed",
    ]
)


class Injection(msgspec.Struct, frozen=True):
    """Deliberate failure of a worker in an iteration, once in a run."""

    worker: Worker
    iteration: int
    place: Place = 0
    """Place of the failure within the iteration: number of the next op, or a name."""
    action: Action = "kill"
    """Kind of failure.

    `kill` and `stop` are SIGKILL and SIGSTOP, `raise` is an exception, `cut` breaks connections,
    `exit` ends the process, and `memory` is a device out of memory. The others flip a bit in
    parameters, in optimizer state, or in a copy of another worker's state.
    """
    rank: int = 0
    """Rank of the process that fails, if the worker has several processes."""


class Slowdown(msgspec.Struct, frozen=True):
    """Slowdown of a worker's compute ops from an iteration on, until its next slowdown."""

    worker: Worker
    iteration: int
    factor: float
    """Factor, at least 1, by which ops take longer; 1 ends an earlier slowdown."""


def find_slowdown_factor(slowdowns: Iterable[Slowdown], iteration: int) -> float:
    """Return the factor of the last slowdown begun by `iteration`; 1 if none has begun."""
    earlier = [slowdown for slowdown in slowdowns if slowdown.iteration <= iteration]
    return max(earlier, key=lambda slowdown: slowdown.iteration).factor if earlier else 1.0
