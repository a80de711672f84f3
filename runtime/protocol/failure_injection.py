"""Failures on purpose: a worker that kills or stops itself, or raises, at a given place; or that takes longer for its
ops, from an iteration on. For tests and rehearsals.

Places are met in this order in every iteration: the ops of the program by their number, `A` and `O` before the first
op of that kind, `stepped` after the last op, `evaluating` before the forwards of an evaluation, `reported` once the
coordinator has acknowledged, before anything of the next iteration is passed on: an op of that may have run. When a
worker takes an order that starts in that iteration: `ordered` before it meets the others, `met` before layers move,
`moved` after. Where layers move while all train: `asked` at a sender, before the step of an iteration whose state it is
to give; `loaded` at the target, when it has a layer of it; `followed` at the target, when it has all, with the order's
number.
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
    """One failure; it happens once in a run, also when its worker comes back."""

    worker: Worker
    iteration: int
    place: Place = 0
    action: Action = "kill"
    """SIGKILL, SIGSTOP, an exception, connections that break, a process that just ends, a device without room, or a
    bit that flips, in a worker's parameters, its optimizer's state, or its copy of another one's."""
    rank: int = 0
    """Which of the worker's processes fails, where it is several."""


class Slowdown(msgspec.Struct, frozen=True):
    """A worker takes longer for its compute ops from an iteration on, until the next slowdown of it."""

    worker: Worker
    iteration: int
    factor: float
    """At least 1, which is as long as usual."""


def factor_at(slowdowns: Iterable[Slowdown], iteration: int) -> float:
    """By how much a worker with these slowdowns takes longer in an iteration."""
    begun = [one for one in slowdowns if one.iteration <= iteration]
    return max(begun, key=lambda one: one.iteration).factor if begun else 1.0


class InjectedError(RuntimeError):
    """The exception that an injection raises."""


class Injector:
    """A worker's own failures to come.

    Parameters
    ----------
    injections
        Each with its index among all failures of the run.
    announce
        Called with an index just before that failure: it must return once the message is sure to arrive.
    """

    def __init__(self, injections: Iterable[tuple[int, Injection]], announce: Callable[[int], None]) -> None:
        self._announce = announce
        self._mine: dict[tuple[int, Place], tuple[int, Action]] = {}
        self.replace(injections)
        self.cut: Callable[[], None] = lambda: None
        """Breaks the worker's connections."""
        self.flip: Callable[[str, Random], object] = lambda *_: None
        """Flips a bit of what it keeps of something, as drawn."""

    def replace(self, injections: Iterable[tuple[int, Injection]]) -> None:
        """From now on, these are to come: another node 0 may know of others."""
        self._mine = {(one.iteration, one.place): (index, one.action) for index, one in injections}

    def at(self, iteration: int, place: Place) -> None:
        """Fail if it is time to. Raises InjectedError and torch.OutOfMemoryError."""
        if not self._mine:
            return
        found = self._mine.pop((iteration, place), None)
        if found is None:
            return
        index, action = found
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
