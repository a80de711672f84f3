"""Evaluation: the loss of validation data, computed by the forwards of the schedule that trains.

All members evaluate after the same iterations, before they report them. Nothing of the training is under way then: each
has stepped for good, and no tensor of the next iteration has been asked for.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from slipstream.runtime.model.computing.slices import Slices
from slipstream.runtime.model.data.data import Microbatch
from slipstream.runtime.model.state.steps import Steps
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import BeforeOp, Executor, Feed
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.session import Session
from slipstream.schedules.check import check
from slipstream.schedules.forwards import forwards_of
from slipstream.schedules.schedule import Schedule


class EvaluationMode:
    """Which modules are in the mode of evaluation: without dropout.

    Another thread ends it where the one that evaluates is stuck and left behind: the modules are used again.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """Evaluate with these from now on."""
        self._modules = [one for module in modules for one in module.modules() if one.training]
        for one in self._modules:
            one.training = False

    def end(self) -> None:
        """Each module as it was before; nothing where that was done."""
        modules, self._modules = self._modules, []
        for one in modules:
            one.training = True


class Evaluation:
    """One worker's part in the evaluations of an order.

    Parameters
    ----------
    exchange
        Makes one for a schedule and its iterations.
    iterations
        Of the validation data, in each evaluation; they are numbered from 0.
    mode
        Of the layers, meanwhile.
    """

    def __init__(self, schedule: Schedule, *, session: Session, slices: Slices, steps: Steps,
                 exchange: Callable[[Schedule, range], Exchange], feed: Feed, before_op: BeforeOp,
                 iterations: int, mode: EvaluationMode) -> None:
        forwards = forwards_of(schedule)
        wrong = check(forwards, forwards=True)
        assert not wrong, wrong[0]
        self._iterations = iterations
        self._done = 0
        self._mode = mode
        self._slices = slices
        self._exchange, self._recorder = exchange(forwards, range(0)), Recorder(session.device)
        self._executor = Executor(
            forwards, slices=slices, steps=steps, session=session, exchange=self._exchange,
            feed=lambda one: feed(Microbatch(one.iteration % iterations, one.pipeline, one.index)),
            recorder=self._recorder, before_op=before_op)

    def run(self) -> float:
        """This worker's part of the mean loss. Raises CommunicationError, and whatever `before_op` raises."""
        self._exchange.more(self._iterations)
        total = 0.0
        self._mode.begin(self._slices.holding.modules.values())
        try:
            with torch.no_grad():
                for _ in range(self._iterations):
                    self._recorder.begin(self._done, traced=False)
                    total += self._executor.evaluate(self._done)
                    self._done += 1
        finally:
            self._mode.end()
        self._exchange.flush()
        return total / self._iterations
