"""Inject failures on purpose, for tests and rehearsals.

A worker kills or stops itself, or raises, at a given place, or takes longer for its ops from an iteration on.

The places of an iteration, in this order: the ops of the program by their number; `A` and `O`, before the first op of
that kind; `stepped`, after the last op; `evaluating`, before the forwards of an evaluation; `reported`, after the
coordinator has acknowledged the iteration and before anything of the next one is passed on (an op of the next one may
have run). When a worker takes an order that starts in that iteration: `ordered`, before it connects to the other
members; `met`, before layers move; `moved`, after. While layers move during training: `asked` at a sender, before the
step of an iteration whose state it is to send; `loaded` at the target, when it has received a layer; `followed` at the
target, when it has received all, in place of an iteration with the order's number.
"""

import os
import signal
from collections.abc import Callable, Iterable
from random import Random
from typing import Literal

import msgspec
import torch

from slipstream.schedules.schedule import Worker

Action = Literal["kill", "stop", "raise", "cut", "exit", "memory", "flip parameters", "flip state", "flip copy"]
Place = int | Literal["A", "O", "stepped", "evaluating", "reported", "ordered", "met", "moved", "asked", "loaded",
                      "followed"]


class Injection(msgspec.Struct, frozen=True):
    """Deliberate failure of a worker in an iteration, before an op (`place` is the op's number in the worker's program)
    or at a named point (`place` is the name).

    It happens once in a run, even if the worker returns.
    """

    worker: Worker
    iteration: int
    place: Place = 0
    action: Action = "kill"
    """Kind of failure: SIGKILL, SIGSTOP, an exception, broken connections, a process that exits, a device out of
    memory, or a flipped bit in a worker's parameters, its optimizer's state, or its copy of another worker's state."""
    rank: int = 0
    """Rank of the process that fails, if the worker has several processes."""


class Slowdown(msgspec.Struct, frozen=True):
    """Slowdown of a worker's compute ops from an iteration on, until the next slowdown of that worker."""

    worker: Worker
    iteration: int
    factor: float
    """Factor by which the worker's ops take longer than usual, at least 1; 1 ends a slowdown."""


def find_slowdown_factor(slowdowns: Iterable[Slowdown], iteration: int) -> float:
    """Return the factor by which a worker's ops take longer in an iteration: that of the last slowdown begun by then,
    or 1."""
    begun = [slowdown for slowdown in slowdowns if slowdown.iteration <= iteration]
    return max(begun, key=lambda slowdown: slowdown.iteration).factor if begun else 1.0


class InjectedError(RuntimeError):
    """Error that a worker raises for an injection whose action is an exception."""


class Injector:
    """Failures to inject into one worker that have not happened yet.

    Parameters
    ----------
    injections
        Failures of this worker, each with its index among all failures of the run.
    announce
        Function that reports a failure to the coordinator; called just before it, with its index. It must return only
        when the report is certain to arrive.
    """

    def __init__(self, injections: Iterable[tuple[int, Injection]], announce: Callable[[int], None]) -> None:
        self._announce = announce
        self._mine: dict[tuple[int, Place], tuple[int, Action]] = {}
        self.replace_injections(injections)
        self.cut: Callable[[], None] = lambda: None
        """Function that breaks the worker's connections; to be set by their owner."""
        self.flip: Callable[[str, Random], object] = lambda *_: None
        """Function that flips a random bit of the worker's state of the named kind; to be set by its owner."""

    def replace_injections(self, injections: Iterable[tuple[int, Injection]]) -> None:
        """Replace all pending failures of this worker, because a new node 0 may have others to inject."""
        self._mine = {(entry.iteration, entry.place): (index, entry.action) for index, entry in injections}

    def fail_if_due(self, iteration: int, place: Place) -> None:
        """Fail in the way that an injection asks for, if one is due at this place of an iteration: an op, by its number
        in the program, or a point that has a name (`Place`).

        Raises InjectedError and torch.OutOfMemoryError; other failures kill, stop or end this process, break its
        connections, or flip a bit.
        """
        if not self._mine:
            return
        due = self._mine.pop((iteration, place), None)
        if due is None:
            return
        index, action = due
        self._announce(index)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "exit":
            os._exit(3)
        elif action == "cut":
            self.cut()
        elif action.startswith("flip "):
            self.flip(action.removeprefix("flip "), Random(index))
        elif action == "memory":
            raise torch.OutOfMemoryError("injected")
        else:
            raise InjectedError(f"injected in iteration {iteration} at {place}")
