"""Executor: runs one worker's program, op by op, in its order. It decides nothing."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from runtime.model.data import Microbatch
from runtime.model.stage import StageModule
from runtime.model.steps import Steps
from runtime.replay.communication import Communicator
from runtime.replay.exchange import Exchange, TensorKind, TensorName
from runtime.replay.recorder import Recorder
from schedules.schedule import Op, OpKind, Schedule


class Feed(Protocol):
    """Where micro-batches come from."""

    def __call__(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each [B, T], on the device that computes."""


class BeforeOp(Protocol):
    """Called before each op."""

    def __call__(self, iteration: int, place: int, kind: OpKind) -> None:
        """Raises what shall end the iteration before the `place`-th op of the program."""


def _nothing(iteration: int, place: int, kind: OpKind) -> None:
    """Does nothing."""


class Executor:
    """One live worker of a schedule, with the stages it holds and their optimizer steps."""

    def __init__(self, schedule: Schedule, *, stages: Mapping[int, StageModule], steps: Steps,
                 communicator: Communicator, exchange: Exchange, feed: Feed, recorder: Recorder,
                 before_op: BeforeOp = _nothing) -> None:
        self._program = schedule.ops(communicator.worker)
        self._split = schedule.backward == "split"
        self._original = schedule.grid.original
        self._stages = stages
        self._steps = steps
        self._communicator = communicator
        self._exchange = exchange
        self._feed = feed
        self._recorder = recorder
        self._before_op = before_op
        self._iteration = 0
        self._void_rounds = 0

    def run(self, iteration: int) -> float:
        """Run one iteration: this worker's part of the mean loss (0 off the last stage).

        Raises CommunicationError, and whatever `before_op` raises.
        """
        self._iteration = iteration
        while not self._run_program():
            self._forget_round()
        self._exchange.end_iteration()
        return sum(stage.take_loss().item() for stage in self._stages.values() if stage.last)

    def _run_program(self) -> bool:
        """False when the iteration turned out to rest on a wrong guess of the step before (`runtime.model.steps`)."""
        for place, op in enumerate(self._program):
            self._before_op(self._iteration, place, op.kind)
            if op.kind is OpKind.F:
                self._steps.poll()
            elif op.kind is not OpKind.O:
                self._steps.validate()
            elif self._steps.void:
                return False
            (Executor._pass_empty if self._steps.void else _HANDLERS[op.kind])(self, op)
        return True

    def _forget_round(self) -> None:
        self._void_rounds += 1
        self._exchange.one_more()
        self._exchange.end_iteration()
        self._recorder.begin_again()
        for stage in self._stages.values():
            stage.discard()
        self._steps.void = False

    def _pass_empty(self, op: Op) -> None:
        """An op that is void: take and give what it would, compute nothing."""
        if op.kind in (OpKind.F, OpKind.I, OpKind.B):
            stage, forward = self._stage(op), op.kind is OpKind.F
            source, target, step = (stage.first, stage.last, 1) if forward else (stage.last, stage.first, -1)
            kind: TensorKind = "activation" if forward else "gradient"
            if not source:
                self._take(kind, op)
            if not target:
                self._exchange.give_empty(self._round, self._name(kind, op, stage.index + step))

    def _forward(self, op: Op) -> None:
        stage, microbatch = self._stage(op), self._microbatch(op)
        value = None if stage.first else self._take("activation", op)
        with self._recorder.timing(op):
            tokens, target = self._feed(microbatch) if stage.first or stage.last else (None, None)
            value = tokens if value is None else value
            assert value is not None
            output = stage.forward(microbatch, value, target if stage.last else None, split=self._split)
        if output is not None:
            self._give("activation", op, stage.index + 1, output)

    def _backward(self, op: Op) -> None:
        """I or B."""
        stage, microbatch = self._stage(op), self._microbatch(op)
        run = stage.backward if op.kind is OpKind.B else stage.backward_input
        gradient = None if stage.last else self._take("gradient", op)
        with self._recorder.timing(op):
            result = run(microbatch, gradient)
        if result is not None:
            self._give("gradient", op, stage.index - 1, result)

    def _backward_weight(self, op: Op) -> None:
        with self._recorder.timing(op):
            self._stage(op).backward_weight(self._microbatch(op))

    def _all_reduce(self, op: Op) -> None:
        stage = self._stage(op)
        with self._recorder.timing(op):
            self._communicator.sum_over_stage(self._original(stage.index), stage.gradients())

    def _step(self, op: Op) -> None:
        with self._recorder.timing(op):
            self._steps.step(self._iteration)

    def _stage(self, op: Op) -> StageModule:
        assert op.slice is not None
        return self._stages[op.slice]

    def _microbatch(self, op: Op) -> Microbatch:
        assert op.pipeline is not None and op.microbatch is not None
        return Microbatch(self._iteration, op.pipeline, op.microbatch)

    def _take(self, kind: TensorKind, op: Op) -> Tensor:
        assert op.slice is not None
        return self._exchange.take(self._round, self._name(kind, op, op.slice))

    def _give(self, kind: TensorKind, op: Op, stage: int, tensor: Tensor) -> None:
        self._exchange.give(self._round, self._name(kind, op, stage), tensor)

    def _name(self, kind: TensorKind, op: Op, stage: int) -> TensorName:
        assert op.pipeline is not None and op.microbatch is not None
        return TensorName(kind, stage, op.pipeline, op.microbatch)

    @property
    def _round(self) -> int:
        """The iteration, counting those that were void."""
        return self._iteration + self._void_rounds


_HANDLERS: Mapping[OpKind, Callable[[Executor, Op], None]] = {
    OpKind.F: Executor._forward, OpKind.B: Executor._backward, OpKind.I: Executor._backward,
    OpKind.W: Executor._backward_weight, OpKind.A: Executor._all_reduce, OpKind.O: Executor._step}
"""Not bound to an executor, which would then hold itself, and with it tensors and connections of a generation that is
over, until Python looks for such circles."""
