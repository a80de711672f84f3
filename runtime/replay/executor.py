"""Executor: runs one worker's program, op by op, in its order. It decides nothing."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from slipstream.runtime.model.computing.slices import SliceRunner, Slices
from slipstream.runtime.model.data.data import Microbatch
from slipstream.runtime.model.layers.calling import Batch
from slipstream.runtime.model.passed import Value
from slipstream.runtime.model.state.holding import Holding
from slipstream.runtime.model.state.steps import Steps
from slipstream.runtime.replay.exchange import Exchange, TensorName
from slipstream.runtime.replay.part_exchange import PartExchange
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.session import Session
from slipstream.schedules.graph import reducing_early
from slipstream.schedules.precedence import consumers, op_key, waits
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule

Feed = Callable[[Microbatch], Batch]
"""Where micro-batches come from: tokens and targets, each [B, T], and what else belongs to one, on the device that
computes."""
BeforeOp = Callable[[int, int, OpKind], None]
"""Called before each op with the iteration and the op's place in the program; raises what shall end the iteration."""


class _Step(NamedTuple):
    """An op of the program with all that its handler needs."""

    op: Op
    run: "Callable[[Executor, _Step], None]"
    runner: SliceRunner | None
    """None for A and O."""
    takes: TensorName | None
    """What it waits for from another op."""
    gives: TensorName | None
    """What another op waits for."""


class Executor:
    """One live worker of a schedule, with the slices that it runs and its optimizer steps.

    A program of forwards alone (`schedules.forwards`) keeps no micro-batch for a backward.

    `sample_of` says which sample a micro-batch's name stands for: data, seeds and weights go by the sample, tensors
    between workers by the name.

    `before_exchange` is called before anything is taken from other ops or given to them, is reduced or stepped. What it
    raises ends the iteration.

    `before_step` is called with an iteration before its step, once all sums of gradients are there: all workers have
    passed on something of the iteration then, so that nobody undoes the step before.
    """

    def __init__(self, schedule: Schedule, *, slices: Slices, steps: Steps, session: Session,
                 exchange: Exchange, feed: Feed, recorder: Recorder, before_op: BeforeOp = lambda *_: None,
                 before_exchange: Callable[[], None] = lambda: None,
                 before_step: Callable[[int], None] = lambda _: None,
                 sample_of: Callable[[Microbatch], Microbatch] = lambda name: name) -> None:
        ops = schedule.ops(session.worker)
        if schedule.overlaps:
            ops = reducing_early(schedule, ops)
        self._program = [_step(schedule, op, slices) for op in ops]
        self._split = schedule.backward == "split"
        self._reduces_beside = _computes_after_reducing(self._program)
        self._trains = any(step.op.kind is not OpKind.F for step in self._program)
        self._slices, self._holding = slices, slices.holding
        self._steps = steps
        self._session = session
        self._parts = PartExchange(session)
        self._exchange = exchange
        self._feed = feed
        self._recorder = recorder
        self._before_op = before_op
        self._before_exchange = before_exchange
        self._before_step = before_step
        self._sample_of = sample_of
        self._iteration = 0
        self._void_rounds = 0
        self._loss = 0.0

    def run(self, iteration: int) -> float:
        """Run one iteration, to a commit point: this worker's part of the mean loss (0 where none of its layers adds to
        it).

        Raises CommunicationError, and whatever `before_op` raises.
        """
        self._iteration, self._loss = iteration, 0.0
        while not self._run_program():
            self._forget_round()
        self._exchange.end_iteration()
        self._session.commit_point()
        self._steps.when_validated(partial(_note_whole, self._holding, self._steps, iteration))
        return self._loss

    def evaluate(self, iteration: int) -> float:
        """Run a program of forwards alone, as `run` does: this worker's part of the mean loss."""
        self._iteration = iteration
        self._run_program()
        self._exchange.end_iteration()
        loss = self._slices.take_loss()
        self._session.commit_point()
        return loss

    def _run_program(self) -> bool:
        """False when the iteration turned out to rest on a wrong guess of the step before
        (`runtime.model.state.steps`)."""
        for place, step in enumerate(self._program):
            kind = step.op.kind
            self._before_op(self._iteration, place, kind)
            if kind is OpKind.F:
                self._steps.poll()
            elif kind is not OpKind.O:
                self._steps.validate()
            elif self._steps.void:
                self._before_exchange()
                self.gather_again()
                return False
            (Executor._pass_empty if self._steps.void else step.run)(self, step)
        return True

    def gather_again(self) -> None:
        """Where the last step was another one than guessed, gather its parameters; all do so at the same place.

        They are whole only after a commit point: the step may have been committed long ago. Raises CommunicationError.
        """
        assert self._steps.validated is not None
        self._gather_all()
        self._session.commit_point()
        self._holding.gathered(self._steps.validated[0])

    def _forget_round(self) -> None:
        self._void_rounds += 1
        self._exchange.more()
        self._exchange.end_iteration()
        self._recorder.begin_again()
        self._slices.discard()
        self._steps.void = False

    def _pass_empty(self, step: _Step) -> None:
        """An op that is void: take and give what it would, compute nothing."""
        self._take(step)
        if step.gives is not None:
            self._before_exchange()
            self._exchange.give_empty(self._round, step.gives)

    def _forward(self, step: _Step) -> None:
        runner, microbatch = self._runner(step), self._microbatch(step.op)
        # Read while the activation is under way.
        batch = self._feed(microbatch) if runner.reads_batch and not runner.first else None
        value = self._take(step)
        with self._recorder.timing(step.op):
            if value is None:
                batch = self._feed(microbatch)
                value = batch[0]
            target = batch[1] if batch is not None and runner.last else None
            output = runner.forward(microbatch, value, target, batch, split=self._split)
        if not self._trains:
            runner.forget(microbatch)
        self._give(step, output)

    def _backward(self, step: _Step) -> None:
        """I or B."""
        runner, microbatch = self._runner(step), self._microbatch(step.op)
        run = runner.backward if step.op.kind is OpKind.B else runner.backward_input
        gradient = self._take(step)
        with self._recorder.timing(step.op):
            result = run(microbatch, gradient)
        self._give(step, result)

    def _backward_weight(self, step: _Step) -> None:
        with self._recorder.timing(step.op):
            self._runner(step).backward_weight(self._microbatch(step.op))

    def _all_reduce(self, step: _Step) -> None:
        self._before_exchange()
        if self._reduces_beside:
            self._session.begin_beside(partial(self._reduce, step))
        else:
            self._reduce(step)

    def _reduce(self, step: _Step) -> None:
        """In the order of the program, whichever thread that is: so nobody waits for another one's in a circle."""
        slice = step.op.slice
        assert slice is not None
        layers = self._slices.layers[slice]
        with self._recorder.timing(step.op):
            whole = self._holding.summed(layers)
            if (cut := self._holding.sharded_cut(layers)) is not None:
                gradients, *whole = whole
                self._parts.reduce(layers, gradients, cut, self._holding.copies(layers))
            self._session.sum_over_sharers(layers, whole)

    def _optimize(self, step: _Step) -> None:
        """What layers share is summed first, and parameters are gathered last: all that hold them are at their O, with
        nothing left to give before."""
        self._before_exchange()
        self._session.wait_beside()
        self._before_step(self._iteration)
        self._loss = self._slices.take_loss()
        with self._recorder.timing(step.op):
            for name in self._holding.shared_gradients:
                self._session.sum_over_sharers(name, self._holding.summed(name))
            self._steps.step(self._iteration, self._loss, self._parts.wait_for_copies)
            # Who knows that there is no step makes none, though others may guess one, and wait for its part.
            self._gather_all()

    def _gather_all(self) -> None:
        """Gather the parameters of all ranges; they are on their way at the same time."""
        self._holding.gathering(self._steps.iteration)
        for finish in [self._parts.gather(*one) for one in self._holding.flat_parameters()]:
            finish()
        self._holding.arrived()

    def _runner(self, step: _Step) -> SliceRunner:
        assert step.runner is not None
        return step.runner

    def _microbatch(self, op: Op) -> Microbatch:
        assert op.pipeline is not None and op.microbatch is not None
        return self._sample_of(Microbatch(self._iteration, op.pipeline, op.microbatch))

    def _take(self, step: _Step) -> Value | None:
        """What the op waits for; None where it waits for nothing."""
        if step.takes is None:
            return None
        self._before_exchange()
        return self._exchange.take(self._round, step.takes)

    def _give(self, step: _Step, value: Value | None) -> None:
        if step.gives is not None:
            assert value is not None
            self._before_exchange()
            self._exchange.give(self._round, step.gives, value)

    @property
    def _round(self) -> int:
        """The iteration, counting those that were void."""
        return self._iteration + self._void_rounds


def _step(schedule: Schedule, op: Op, slices: Slices) -> _Step:
    """An op, with what it takes from and gives to the ops of its micro-batch along the route."""
    if op.slice is None or op.pipeline is None or op.microbatch is None:
        return _Step(op, _HANDLERS[op.kind], None, None, None)
    key, path = op_key(op), schedule.path(op.pipeline, op.microbatch)
    takes = next((TensorName(rule.tensor, *key[1:]) for _, rule in waits(key, path) if rule.tensor), None)
    gives = next((TensorName(rule.tensor, *other[1:]) for other, rule in consumers(key, path)
                  if rule.tensor), None)
    return _Step(op, _HANDLERS[op.kind], slices.runners[op.slice], takes, gives)


def _computes_after_reducing(program: Sequence[_Step]) -> bool:
    """Whether reductions can be hidden: there is something to compute after the first of them."""
    kinds = [step.op.kind for step in program]
    return OpKind.A in kinds and any(kind in COMPUTE_KINDS for kind in kinds[kinds.index(OpKind.A):])


def _note_whole(holding: Holding, steps: Steps, iteration: int) -> None:
    """A step has been validated: what was gathered after it is right if the guess was."""
    if not steps.wrong:
        holding.gathered(iteration)


_HANDLERS: Mapping[OpKind, Callable[[Executor, _Step], None]] = {
    OpKind.F: Executor._forward, OpKind.B: Executor._backward, OpKind.I: Executor._backward,
    OpKind.W: Executor._backward_weight, OpKind.A: Executor._all_reduce, OpKind.O: Executor._optimize}
"""Not bound to an executor, which would then hold itself, and with it tensors and connections of an order that is
over, until Python looks for such circles."""
