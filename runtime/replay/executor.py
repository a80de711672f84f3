"""Run one worker's program, instruction by instruction, without making decisions."""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.layer_values import Value
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.replay.seams import (
    Feed,
    OpRecorder,
    Reducer,
    Runner,
    Slices,
    State,
    Steps,
    Transport,
)
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.program import Instruction, TransferKind, ValueName, WorkerProgram
from slipstream.schedules.schedule import Op, OpKind

BeforeOp = Callable[[int, int, OpKind], None]
"""Function called before each op with iteration, op index and kind; errors end the iteration."""


class _ProgramStep(NamedTuple):
    """Instruction of a worker's program, with the function that runs it and its arguments."""

    instruction: Instruction
    handler: "Callable[[Executor, _ProgramStep], None]"
    op: Op | None
    """The op, as the recorder names it; None for a transfer."""
    place: int
    """Number of ops, or of transfers, before this one in the program."""
    runner: Runner | None
    input_name: ValueName | None
    output_name: ValueName | None


class WholeReducer:
    """Reducer for workers that each keep the whole state of their layers."""

    def __init__(self, session: Transport, state: State) -> None:
        self._session, self._state = session, state

    def sum_gradients(self, layers: LayerRange) -> None:
        """Sum the gradients of a range of layers over the workers that hold it."""
        self._session.sum_over_sharers(layers, self._state.gradients_to_sum(layers))

    def wait_until_unread(self) -> None:
        """Return at once: `sum_gradients` returns only when nobody reads the gradients."""

    def gather_parameters(self, iteration: int) -> None:
        """Do nothing: this worker has stepped all of its parameters."""

    def mark_gathered(self, iteration: int) -> None:
        """Do nothing, as no parameters are gathered."""


class Executor:
    """Runner of one live worker's program: its ops, sums of gradients, and optimizer steps.

    If the program has only forwards, no micro-batch is kept for a backward.

    Parameters
    ----------
    reducer
        What sums gradients; None: a `WholeReducer`, as all holders of a layer keep its whole state.
    before_exchange
        Function that is called before each input, transfer, reduction and step. Its errors end the
        iteration.
    before_step
        Function that is called with an iteration before its step, when all A of this worker have
        ended. By then all workers have passed on a result of this iteration, so no worker undoes
        the step of the previous one.
    sample_of
        Function that returns the sample that runs in the place of a micro-batch. Data, seeds and
        weights are the sample's; transfers are named after the micro-batch.
    """

    def __init__(
        self,
        program: WorkerProgram,
        *,
        slices: Slices,
        steps: Steps,
        session: Transport,
        exchange: Exchange,
        feed: Feed,
        recorder: OpRecorder,
        reducer: Reducer | None = None,
        before_op: BeforeOp = lambda *_: None,
        before_exchange: Callable[[], None] = lambda: None,
        before_step: Callable[[int], None] = lambda _: None,
        sample_of: Callable[[Microbatch], Microbatch] = lambda name: name,
    ) -> None:
        self._program = _build_steps(program, slices)
        self._split = program.backward == "split"
        self._reduces_in_background = program.computes_after_reducing
        self._trains = any(op.kind is not OpKind.F for op in program.ops)
        self._slices, self._holding = slices, slices.holding
        self._steps = steps
        self._session = session
        self._reducer = reducer or WholeReducer(session, slices.holding)
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
        """Run one iteration to a commit point; return this worker's summand of the mean loss.

        The summand is 0 if no layer of this worker adds to the loss. An iteration that began on a
        wrongly guessed step is run again. Raises CommunicationError, and any error of `feed` and of
        the functions called before ops, exchanges and steps.
        """
        self._iteration, self._loss = iteration, 0.0
        while not self._run_program():
            self._discard_round()
        self._exchange.end_iteration()
        self._session.reach_commit_point()
        # A gathered parameter counts once the guessed step is known to be right.
        self._steps.when_validated(partial(_mark_gathered, self._reducer, self._steps, iteration))
        return self._loss

    def evaluate(self, iteration: int) -> float:
        """Run one iteration of forwards alone; return this worker's summand of the mean loss.

        Raises the same errors as `run`.
        """
        # A program without O: the loss is taken here, and no step can prove wrong.
        self._iteration = iteration
        self._run_program()
        self._exchange.end_iteration()
        loss = self._slices.take_loss()
        self._session.reach_commit_point()
        return loss

    def _run_program(self) -> bool:
        """Run all ops; return False if a wrongly guessed step makes them run again."""
        for step in self._program:
            if step.op is None:
                step.handler(self, step)
                continue
            kind = step.op.kind
            self._before_op(self._iteration, step.place, kind)
            if kind is OpKind.F:
                # Forwards may run on a guessed step.
                self._steps.validate_if_arrived()
            elif kind is not OpKind.O:
                # Backwards add to gradients, which must be of the right parameters.
                self._steps.validate()
            elif self._steps.is_void:
                # All workers end a void round at their O, when no output is awaited any more.
                self._before_exchange()
                self.regather_parameters()
                return False
            # A void round still passes on values: workers that do not know it yet wait for them.
            (Executor._pass_zeros if self._steps.is_void else step.handler)(self, step)
        return True

    def regather_parameters(self) -> None:
        """Gather parameters from the workers that stepped them, after a step on a wrong guess.

        All members call this together. It ends at a commit point, after which the step is no longer
        void. Raises CommunicationError.
        """
        assert self._steps.validated is not None
        self._reducer.gather_parameters(self._steps.iteration)
        # Only after a commit point are gathered parameters known to be right.
        self._session.reach_commit_point()
        self._reducer.mark_gathered(self._steps.validated[0])
        self._steps.leave_void_state()

    def _discard_round(self) -> None:
        # The second run is numbered like the next iteration, so that transfers of both differ.
        self._void_rounds += 1
        self._exchange.add_iterations()
        self._exchange.end_iteration()
        self._recorder.restart_iteration()
        self._slices.discard_iteration()

    def _pass_zeros(self, step: _ProgramStep) -> None:
        """In a discarded run, take an op's input and store zeros as its output."""
        # The input is taken although it is not used: the transfers' order must be kept.
        self._take_input(step)
        if step.output_name is not None:
            self._exchange.put_zeros(step.output_name)

    def _start_receive(self, step: _ProgramStep) -> None:
        self._before_exchange()
        self._exchange.start_receive(self._round_number, step.place)

    def _start_send(self, step: _ProgramStep) -> None:
        self._before_exchange()
        self._exchange.start_send(self._round_number, step.place)

    def _run_forward(self, step: _ProgramStep) -> None:
        runner, microbatch = self._runner_of(step), self._sample_of_step(step)
        # Read while the activation is in transfer.
        batch = self._feed(microbatch) if runner.reads_batch and not runner.first else None
        value = self._take_input(step)
        with self._record_op(step):
            if value is None:
                # The first slice computes on the data itself.
                batch = self._feed(microbatch)
                value = batch[0]
            target = batch[1] if batch is not None and runner.last else None
            output = runner.forward(microbatch, value, target, batch, split=self._split)
        if not self._trains:
            runner.drop_microbatch(microbatch)  # no backward will free it
        self._put_output(step, output)

    def _run_backward(self, step: _ProgramStep) -> None:
        runner, microbatch = self._runner_of(step), self._sample_of_step(step)
        run = runner.backward if step.instruction.kind is OpKind.B else runner.backward_input
        gradient = self._take_input(step)
        with self._record_op(step):
            result = run(microbatch, gradient)
        self._put_output(step, result)

    def _run_backward_weight(self, step: _ProgramStep) -> None:
        with self._record_op(step):
            self._runner_of(step).backward_weight(self._sample_of_step(step))

    def _run_all_reduce(self, step: _ProgramStep) -> None:
        self._before_exchange()
        # A background thread is worth its cost only if ops follow that it can overlap.
        if self._reduces_in_background:
            self._session.reduce_in_background(partial(self._reduce_gradients, step))
        else:
            self._reduce_gradients(step)

    def _reduce_gradients(self, step: _ProgramStep) -> None:
        # Reductions run in the order of the program, on whichever thread, so workers never wait for
        # each other in a circle.
        slice = step.instruction.slice
        assert slice is not None
        with self._record_op(step):
            self._reducer.sum_gradients(self._slices.layers[slice])

    def _run_optimizer(self, step: _ProgramStep) -> None:
        """Run an O: sum the gradients of shared parameters, step, and gather parameters."""
        # Shared gradients are summed first, and parameters gathered last: all workers that hold
        # them are then at their O, and have passed on all outputs of earlier ops.
        self._before_exchange()
        self._session.wait_for_reductions()
        self._before_step(self._iteration)
        with self._session.waiting_for_device():  # reading the loss does
            self._loss = self._slices.take_loss()
        with self._record_op(step):
            for name in self._holding.shared_gradients:
                self._session.sum_over_sharers(name, self._holding.gradients_to_sum(name))
            with self._session.waiting_for_device():  # reading the squares of gradients does
                self._steps.step(self._iteration, self._loss, self._reducer.wait_until_unread)
            # Gather even if this worker knows that no step is made: others may have guessed one,
            # and wait for its part.
            self._reducer.gather_parameters(self._steps.iteration)

    def _runner_of(self, step: _ProgramStep) -> Runner:
        assert step.runner is not None
        return step.runner

    def _record_op(self, step: _ProgramStep) -> AbstractContextManager[None]:
        assert step.op is not None
        return self._recorder.record_op(step.op)

    def _sample_of_step(self, step: _ProgramStep) -> Microbatch:
        pipeline, microbatch = step.instruction.pipeline, step.instruction.microbatch
        assert pipeline is not None and microbatch is not None
        return self._sample_of(Microbatch(self._iteration, pipeline, microbatch))

    def _take_input(self, step: _ProgramStep) -> Value | None:
        if step.input_name is None:
            return None
        self._before_exchange()
        return self._exchange.take_input(step.input_name)

    def _put_output(self, step: _ProgramStep, value: Value | None) -> None:
        if step.output_name is not None:
            assert value is not None
            self._exchange.put_output(step.output_name, value)

    @property
    def _round_number(self) -> int:
        """Number of the present run: the iteration, plus the number of runs discarded so far."""
        return self._iteration + self._void_rounds


def _build_steps(program: WorkerProgram, slices: Slices) -> list[_ProgramStep]:
    places = Counter[type]()
    steps = []
    for instruction in program.instructions:
        kind, slice = instruction.kind, instruction.slice
        # The recorder needs no planned start and end, the last two.
        op: Op | None = None
        if not isinstance(kind, TransferKind):
            pipeline, microbatch = instruction.pipeline, instruction.microbatch
            op = Op(kind, slice, pipeline, microbatch, program.worker, 0, 0)
        # An A names a slice only for its layers.
        runner = None if slice is None or kind is OpKind.A else slices.runners[slice]
        step = _ProgramStep(
            instruction,
            _HANDLERS[kind],
            op,
            places[type(kind)],
            runner,
            program.input_of(instruction),
            program.output_of(instruction),
        )
        steps.append(step)
        # Ops and transfers are counted apart.
        places[type(kind)] += 1
    return steps


def _mark_gathered(reducer: Reducer, steps: Steps, iteration: int) -> None:
    """Mark gathered parameters as those after `iteration`, unless its step was wrong."""
    if steps.is_final:
        reducer.mark_gathered(iteration)


# Unbound: an executor that refers to itself would keep an ended generation's tensors until Python's
# garbage collector runs.
_HANDLERS: Mapping[OpKind | TransferKind, Callable[[Executor, _ProgramStep], None]] = {
    OpKind.F: Executor._run_forward,
    OpKind.B: Executor._run_backward,
    OpKind.I: Executor._run_backward,
    OpKind.W: Executor._run_backward_weight,
    OpKind.A: Executor._run_all_reduce,
    OpKind.O: Executor._run_optimizer,
    TransferKind.RECV_F: Executor._start_receive,
    TransferKind.RECV_B: Executor._start_receive,
    TransferKind.SEND_F: Executor._start_send,
    TransferKind.SEND_B: Executor._start_send,
}
