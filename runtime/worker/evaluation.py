"""Evaluation: compute the loss of validation data with the forwards of the schedule that trains.

All members evaluate after the same iterations, before they report them. No part of the training is pending then: each
member has stepped permanently, and no tensor of the next iteration has been requested.
"""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from slipstream.runtime.computing.slices import WorkerSlices
from slipstream.runtime.data.data import Microbatch
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import BeforeOp, Executor
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.seams import Feed
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.state.steps import StepController
from slipstream.schedules.check import check
from slipstream.schedules.forwards import schedule_forwards
from slipstream.schedules.program import WorkerProgram, build_program
from slipstream.schedules.schedule import Schedule


class EvaluationMode:
    """Switch of modules to evaluation mode, which turns off dropout, and back.

    If the evaluating thread is stuck and abandoned, another thread calls `leave_mode`, because the modules are used
    again.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def enter_mode(self, modules: Iterable[nn.Module]) -> None:
        """Put modules and their submodules into evaluation mode until `leave_mode`."""
        self._modules = [submodule for module in modules for submodule in module.modules() if submodule.training]
        for submodule in self._modules:
            submodule.training = False

    def leave_mode(self) -> None:
        """Put the modules that `enter_mode` has changed back into training mode; does nothing if that was done
        before."""
        modules, self._modules = self._modules, []
        for module in modules:
            module.training = True


class Evaluation:
    """One worker's part in the evaluations of a generation.

    Parameters
    ----------
    exchange
        Function that creates an `Exchange` for a program and its iterations.
    before_op
        Function that is called before each op; an error that it raises ends the evaluation.
    iterations
        Number of iterations of validation data in each evaluation; they are numbered from 0.
    mode
        Mode that the layers are put into during an evaluation.
    """

    def __init__(self, schedule: Schedule, *, session: GenerationSession, slices: WorkerSlices, steps: StepController,
                 exchange: Callable[[WorkerProgram, range], Exchange], feed: Feed, before_op: BeforeOp,
                 iterations: int, mode: EvaluationMode) -> None:
        forwards = schedule_forwards(schedule)
        violations = check(forwards, forwards=True)
        assert not violations, violations[0]
        program = build_program(forwards, session.worker)
        self._iterations = iterations
        self._done = 0
        self._mode = mode
        self._slices = slices
        self._exchange, self._recorder = exchange(program, range(0)), Recorder(session.device)
        self._executor = Executor(
            program, slices=slices, steps=steps, session=session, exchange=self._exchange,
            feed=lambda one: feed(Microbatch(one.iteration % iterations, one.pipeline, one.index)),
            recorder=self._recorder, before_op=before_op)

    def run(self) -> float:
        """Evaluate together with all members: return this worker's part of the mean loss of the validation data.

        The parts of all workers sum to that loss. Raises CommunicationError, and any error of `before_op`.
        """
        self._exchange.add_iterations(self._iterations)
        total = 0.0
        self._mode.enter_mode(self._slices.holding.modules.values())
        try:
            with torch.no_grad():
                for _ in range(self._iterations):
                    self._recorder.start_iteration(self._done, traced=False)
                    total += self._executor.evaluate(self._done)
                    self._done += 1
        finally:
            self._mode.leave_mode()
        self._exchange.flush()
        return total / self._iterations
