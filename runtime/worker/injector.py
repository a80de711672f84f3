"""Inject failures on purpose into a worker (`runtime.protocol.failure_injection`)."""

import os
import signal
from collections.abc import Callable, Iterable
from random import Random

import torch

from slipstream.runtime.protocol.failure_injection import Action, Injection, Place


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
        among the ops of the program, or a point that has a name (`Place`).

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
