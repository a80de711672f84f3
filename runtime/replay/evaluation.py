"""Evaluation: the loss of validation data, computed by the forwards of the schedule that trains.

All members evaluate after the same iterations, before they report them. Nothing of the training is under way then: each
has stepped for good, and no tensor of the next iteration has been asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from runtime.model.data import Microbatch
from runtime.model.slices import Slices
from runtime.model.steps import Steps
from runtime.replay.communication import Communicator
from runtime.replay.exchange import Exchange
from runtime.replay.executor import BeforeOp, Executor, Feed
from runtime.replay.recorder import Recorder
from schedules.check import check
from schedules.forwards import forwards_of
from schedules.schedule import Schedule


class Evaluation:
    """One worker's part in the evaluations of an order.

    Parameters
    ----------
    exchange
        Makes one for a schedule and its iterations.
    iterations
        Of the validation data, in each evaluation; they are numbered from 0.
    """

    def __init__(self, schedule: Schedule, *, communicator: Communicator, slices: Slices, steps: Steps,
                 exchange: Callable[[Schedule, range], Exchange], feed: Feed, before_op: BeforeOp,
                 iterations: int) -> None:
        forwards = forwards_of(schedule)
        wrong = check(forwards, forwards=True)
        assert not wrong, wrong[0]
        self._iterations = iterations
        self._done = 0
        self._slices = slices
        self._exchange, self._recorder = exchange(forwards, range(0)), Recorder(communicator.device)
        self._executor = Executor(
            forwards, slices=slices, steps=steps, communicator=communicator, exchange=self._exchange,
            feed=lambda one: feed(Microbatch(one.iteration % iterations, one.pipeline, one.index)),
            recorder=self._recorder, before_op=before_op)

    def run(self) -> float:
        """This worker's part of the mean loss. Raises CommunicationError, and whatever `before_op` raises."""
        self._exchange.more(self._iterations)
        total = 0.0
        with torch.no_grad(), _evaluating(self._slices.modules):
            for _ in range(self._iterations):
                self._recorder.begin(self._done, traced=False)
                total += self._executor.evaluate(self._done)
                self._done += 1
        self._exchange.flush()
        return total / self._iterations


@contextmanager
def _evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """No dropout; then each module as it was before."""
    trained = [one for module in modules for one in module.modules() if one.training]
    for one in trained:
        one.training = False
    try:
        yield
    finally:
        for one in trained:
            one.training = True
