"""Failures on purpose, for tests and rehearsals.

A worker kills or stops itself, or raises, at a given place, or takes longer for its ops from an
iteration on.

The places of an iteration, in this order: the ops of the program by their number; `A` and `O`,
before the first op of that kind; `stepped`, after the last op; `evaluating`, before the forwards of
an evaluation; `reported`, after the coordinator has acknowledged the iteration and before anything
of the next one is passed on (an op of the next one may have run). When a worker takes an order that
starts in that iteration: `ordered`, before it connects to the other members; `met`, before layers
move; `moved`, after. While layers move during training: `asked` at a sender, before the step of an
iteration whose state it is to send; `loaded` at the target, when it has received a layer;
`followed` at the target, when it has received all, in place of an iteration with the order's
number.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from slipstream.schedules.schedule import Worker

Action = Literal["kill", "stop", "raise", "cut", "exit", "memory", "flip parameters", "flip state", "flip copy"]
Place = int | Literal["A", "O", "stepped", "evaluating", "reported", "ordered", "met", "moved", "asked", "loaded",
                      "followed"]


class Injection(msgspec.Struct, frozen=True):
    """Deliberate failure of a worker in an iteration, once in a run. `place` is the number of an op
    in the worker's program, before which it fails, or the name of a point."""

    worker: Worker
    iteration: int
    place: Place = 0
    action: Action = "kill"
    """Kind of failure. It is SIGKILL, SIGSTOP, an exception, broken connections, an exit, a device
    out of memory, or a flipped bit in parameters, optimizer state, or a copy of another worker's
    state."""
    rank: int = 0
    """Rank of the process that fails, if the worker has several processes."""


class Slowdown(msgspec.Struct, frozen=True):
    """Slowdown of a worker's compute ops from an iteration on, until its next slowdown."""

    worker: Worker
    iteration: int
    factor: float
    """Factor by which ops take longer than usual, at least 1, which ends a slowdown."""


def find_slowdown_factor(slowdowns: Iterable[Slowdown], iteration: int) -> float:
    """Return the factor of the last slowdown begun by an iteration, or 1."""
    begun = [slowdown for slowdown in slowdowns if slowdown.iteration <= iteration]
    return max(begun, key=lambda slowdown: slowdown.iteration).factor if begun else 1.0
