"""Run a worker's iterations of one order: the program, steps, evaluations and reports.

An evaluation computes the loss of validation data with the forwards of the schedule that trains.
All members evaluate after the same iterations, before they report them. Nothing of the training is
pending then: each member has stepped permanently, and no tensor of the next iteration has been
requested.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from slipstream.runtime.computing.slices import WorkerSlices
from slipstream.runtime.data.data import (
    Data,
    Microbatch,
    is_evaluated,
    is_fully_masked,
    read_batch,
    require_form,
)
from slipstream.runtime.data.loss_weights import LossWeights
from slipstream.runtime.data.sample_digests import digest_sample
from slipstream.runtime.data.token_data import BadSampleError, DataEndedError
from slipstream.runtime.models.calling import Batch, move_batch
from slipstream.runtime.moving.layer_sender import ROOM_SECONDS
from slipstream.runtime.protocol.form_codec import decode_form
from slipstream.runtime.protocol.to_coordinator import Checksum, Note, SampleDigest, TrainingStarted
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import BeforeOp, Executor
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.seams import Feed
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.state.part_exchange import PartReducer
from slipstream.runtime.state.part_state import PartState, pack_parts, unpack_parts
from slipstream.runtime.state.step_factors import needs_gradient_norm
from slipstream.runtime.state.steps import StepController, StepState
from slipstream.runtime.worker.context import WAITING_PREFIX, OrderContext, WorkerContext
from slipstream.runtime.worker.injected_faults import create_recorder
from slipstream.runtime.worker.iteration_reports import IterationReports, OrderStoppedError
from slipstream.schedules.check import check
from slipstream.schedules.forwards import schedule_forwards
from slipstream.schedules.program import WorkerProgram, build_program
from slipstream.schedules.schedule import OpKind, Schedule, Worker


class EvaluationMode:
    """Switch of modules to evaluation mode, in which dropout is off, and back.

    Any thread may switch back.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    def enter_mode(self, modules: Iterable[nn.Module]) -> None:
        """Put modules into evaluation mode, with their submodules, until `leave_mode`."""
        self._modules = [
            submodule for module in modules for submodule in module.modules() if submodule.training
        ]
        for submodule in self._modules:
            submodule.training = False

    def leave_mode(self) -> None:
        """Put the modules that were changed back into training mode, if they are not yet."""
        modules, self._modules = self._modules, []
        for module in modules:
            module.training = True


class Evaluation:
    """One worker's part in the evaluations of a generation.

    Parameters
    ----------
    exchange
        Function that creates the transfers between workers, for a program and its iterations.
    feed
        Function that returns a micro-batch of validation data.
    before_op
        Function that is called before each op; an error that it raises ends the evaluation.
    iterations
        Number of iterations of validation data in each evaluation; they are numbered from 0.
    mode
        Switch that puts the layers into evaluation mode meanwhile.
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        session: GenerationSession,
        slices: WorkerSlices,
        steps: StepController,
        exchange: Callable[[WorkerProgram, range], Exchange],
        feed: Feed,
        before_op: BeforeOp,
        iterations: int,
        mode: EvaluationMode,
    ) -> None:
        # The training schedule's forwards, in the same order on the same workers: no worker needs
        # other layers or more memory.
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
            program,
            slices=slices,
            steps=steps,
            session=session,
            exchange=self._exchange,
            # Each evaluation reads the same iterations of validation data.
            feed=lambda name: feed(
                Microbatch(name.iteration % iterations, name.pipeline, name.index)
            ),
            recorder=self._recorder,
            before_op=before_op,
        )

    def run(self) -> float:
        """Evaluate with all members; return this worker's part of the mean validation loss.

        Raises CommunicationError, and the errors of `feed` and `before_op`.
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


class TrainingLoop:
    """Loop over the iterations of an order, on one worker."""

    def __init__(self, part: OrderContext, reports: IterationReports) -> None:
        context, program = part.context, part.program
        training = context.config.training
        self._part = part
        self._session = part.session
        self._reports = reports
        data = context.setup.common.data
        self._form = None if data is None else decode_form(data)
        # True if a micro-batch has been read in which no token counts.
        self._has_masked = False
        self.evaluation_mode = EvaluationMode()
        # What holds tensors of micro-batches. Weak, and without the executor, which calls this loop
        # back: all are freed as soon as the order is over.
        self._holders = weakref.WeakSet[WorkerSlices | Exchange]()
        # Returns the checksums before the iteration's step, if copies are compared.
        self._checksums: Callable[[], tuple[Checksum, ...]] = _no_checksums
        # Digests of the samples read in the iteration, if they are compared.
        self._samples: set[SampleDigest] | None = None
        self._writers = context.placement.choose_writers(program)
        self.steps = StepController(
            context.layer_store.holding,
            training,
            layers=context.model.layers,
            share=part.session.start_sum_over_all if needs_gradient_norm(training) else None,
            staggered=program.optimizer == "staggered",
            stepped=partial(_queue_step, context),
        )

    def run(self) -> None:
        """Run iterations until the last, or until all members stop.

        Raises CommunicationError, DataEndedError, BadSampleError, VersionError, and torch's
        OutOfMemoryError.
        """
        part, context, setup = self._part, self._part.context, self._part.context.setup
        common = setup.common
        first, steps = part.order.first_iteration, self.steps
        # Build what runs the program: recorder, transfers, layers and executor.
        recorder = create_recorder(setup.slowdowns, context.device, context.group)
        if part.samples.is_dealing:
            recorder.costs = part.samples.relative_duration
        exchange = self._build_exchange(part.program, self._until_evaluation(first))
        weights = LossWeights(context.corpus, context.config.training, common.microbatches)
        slices = WorkerSlices(
            context.layer_store.holding,
            context.placement.slice_layers(part.program),
            context.model,
            loss_scale=weights,
            config=context.config,
            fused=common.fused_layers,
        )
        self._holders.add(slices)
        if self._session.ordered:
            self._rehearse_ops(slices, first)
        executor = Executor(
            part.program,
            slices=slices,
            steps=steps,
            session=self._session,
            exchange=exchange,
            reducer=PartReducer(self._session, context.layer_store.holding),
            feed=partial(self._read_batch, context.corpus),
            recorder=recorder,
            before_op=self._before_op,
            before_exchange=self._reports.wait_until_acknowledged,
            before_step=self._before_step,
            sample_of=part.samples,
        )
        evaluate = self._build_evaluation(slices, executor, weights)

        # Train until the last iteration, or until all members stop.
        context.channel.send(TrainingStarted(part.worker, part.order.order))
        first_traced = max(first, common.iterations - common.traced)
        with contextlib.suppress(OrderStoppedError):
            for iteration in range(first, common.iterations):
                part.samples.start_dealing(iteration)
                # Trace the last iterations, for a timeline of all workers on one clock.
                if iteration == first_traced and common.nodes > 1:
                    # Comparing clocks takes many round trips between nodes, and no recovery should
                    # wait for them.
                    self._reports.wait_until_acknowledged()
                    part.activity.set_activity("compares clocks")
                    recorder.offset_seconds = self._session.measure_clock_offset()
                # Run the program, whose last ops step.
                recorder.start_iteration(iteration, traced=iteration >= first_traced)
                self._samples = set() if self._are_copies_compared(iteration) else None
                loss = executor.run(iteration)
                context.injector.fail_if_due(iteration, "stepped")
                # Evaluate, if it is time, and report. The coordinator commits what all report.
                evaluation = None
                if is_evaluated(context.config.training, iteration):
                    evaluation = evaluate(iteration)
                    exchange.add_iterations(len(self._until_evaluation(iteration + 1)))
                self._reports.send_report(
                    iteration,
                    loss,
                    steps,
                    recorder,
                    evaluation,
                    self._checksums(),
                    tuple(sorted(self._samples or ())),
                )
                self._checksums = _no_checksums
            self._reports.wait_until_acknowledged()

        # No next iteration checks the last step, or waits for what was sent.
        part.activity.set_activity("ends its last iteration")
        self._validate_last_step(executor)
        exchange.flush()

    def _rehearse_ops(self, slices: WorkerSlices, iteration: int) -> None:
        """Run each kind of op once, discard the results, and start the first checksums."""
        # So kernels are loaded before NCCL keeps the device busy.
        part, context = self._part, self._part.context
        for number, runner in slices.runners.items():
            first, end = part.program.layers_of(number)
            context.rehearsal.run(
                runner,
                context.forms[first],
                context.forms[end],
                partial(self._read_batch, context.corpus),
                Microbatch(iteration, 0, 0),
            )
        slices.discard_iteration()
        context.rehearsal.run_step(
            context.layer_store.holding.modules.values(), context.config.training
        )
        self._checksums = context.layer_store.start_checksums(iteration - 1)

    def free_microbatches(self) -> None:
        """Free the tensors of micro-batches, when the thread that computes is abandoned."""
        for holder in self._holders:
            holder.free_microbatches()

    def _until_evaluation(self, first: int) -> range:
        # Tensors of later iterations are not received before that evaluation.
        context = self._part.context
        every, end = context.config.training.evaluate_every, context.setup.common.iterations
        return range(first, end if every is None else min(end, (first // every + 1) * every))

    def _build_exchange(self, program: WorkerProgram, iterations: range) -> Exchange:
        context = self._part.context
        exchange = Exchange(program, self._session, context.forms, iterations)
        self._holders.add(exchange)
        return exchange

    def _validate_last_step(self, executor: Executor) -> None:
        """Repeat the last step if its step factor was guessed wrong."""
        self.steps.validate()
        if self.steps.state is StepState.VOID:
            executor.regather_parameters()

    def _build_evaluation(
        self, slices: WorkerSlices, executor: Executor, weights: LossWeights
    ) -> Callable[[int], float]:
        """Return a function of an iteration that evaluates, and returns this worker's part."""
        # What evaluations need is built at the first one, so that no recovery waits for that.
        part, context, evaluations = self._part, self._part.context, list[Evaluation]()
        validation = (
            None
            if context.validation is None
            else LossWeights(
                context.validation,
                context.config.training,
                context.setup.common.microbatches,
                context.config.training.evaluation_iterations,
            )
        )

        def before_op(iteration: int, place: int, kind: OpKind) -> None:
            reached = self._reports.reached
            part.activity.set_activity(
                f"evaluates after iteration {reached}: {kind} {place} of round {iteration}"
            )
            self._session.raise_if_ended()
            context.injector.fail_if_due(reached, "evaluating")

        def evaluate(iteration: int) -> float:
            # A step that may yet be repeated would make the loss that of other parameters.
            self._validate_last_step(executor)
            self._reports.reached = iteration
            assert (
                context.validation is not None and validation is not None and part.whole is not None
            )
            if not evaluations:
                evaluations.append(
                    Evaluation(
                        part.whole,
                        session=self._session,
                        slices=slices,
                        steps=self.steps,
                        exchange=self._build_exchange,
                        feed=partial(self._read_batch, context.validation),
                        before_op=before_op,
                        iterations=context.config.training.evaluation_iterations,
                        mode=self.evaluation_mode,
                    )
                )
            # The loss is a mean over validation data while this lasts.
            slices.set_loss_scale(validation)
            try:
                return evaluations[0].run()
            finally:
                slices.set_loss_scale(weights)

        return evaluate

    def _before_op(self, iteration: int, place: int, kind: OpKind) -> None:
        """Inject the failures that are due before an op; raise if the order has ended."""
        context = self._part.context
        self._part.activity.set_activity((iteration, place))
        self._session.raise_if_ended()
        context.injector.fail_if_due(iteration, place)
        if kind in (OpKind.A, OpKind.O):
            context.injector.fail_if_due(iteration, "A" if kind is OpKind.A else "O")

    def _before_step(self, iteration: int) -> None:
        """Save, send or checksum the state that a step overwrites, if that is due."""
        # The step before is committed by now, so this state will never be undone.
        context, activity = self._part.context, self._part.activity
        require = self._session.raise_if_ended
        if saves := context.checkpointer.is_due(iteration, self._reports.save_before):
            doing = activity.doing
            activity.set_activity(f"saves the state before iteration {iteration}")
            context.checkpointer.save(
                iteration, partial(self._gather_whole_states, iteration - 1), require
            )
            activity.set_activity(doing)
        # Saved state is verified, too.
        if saves or (self._checksums is _no_checksums and self._are_copies_compared(iteration)):
            self._checksums = context.layer_store.start_checksums(iteration - 1)
        self._wait_for_receivers()
        if context.layer_sender.has_requests:
            context.injector.fail_if_due(iteration, "asked")
            context.layer_sender.send_state_before_step(iteration, context.layer_store)

    def _wait_for_receivers(self) -> None:
        """Wait until workers that fetch layers have taken what is queued; drop slow ones."""
        context, activity = self._part.context, self._part.activity
        receivers = context.layer_sender.find_full_receivers()
        if not receivers:
            return
        # The coordinator may ask what this worker waits for: it must not be taken for stuck.
        doing = activity.doing
        activity.set_activity(
            f"{WAITING_PREFIX} for {_name_receivers(receivers)} to take layers",
            [worker for worker in receivers if worker is not None],
        )
        dropped = context.layer_sender.wait_for_room(self._session.raise_if_ended)
        activity.set_activity(doing)
        if dropped:
            me, names = self._part.worker, _name_receivers(dropped)
            context.channel.send(
                Note(
                    me,
                    f"worker {me} has waited {ROOM_SECONDS:.0f} s for {names} to take layers, "
                    "and gives up sending",
                )
            )

    def _are_copies_compared(self, iteration: int) -> bool:
        """Return whether peers compare their states before the step of an iteration."""
        # They are at the first iteration of an order, before the last step, and at a fixed
        # interval.
        common = self._part.context.setup.common
        every = common.resilience.verify_every
        return iteration in (self._part.order.first_iteration, common.iterations - 1) or (
            every > 0 and iteration % every == 0
        )

    def _gather_whole_states(self, after: int) -> dict[int, dict[str, Tensor]]:
        """Return the layers that this worker saves, as they are after iteration `after`."""
        # If states are sharded, all members send their own parts to the worker that saves.
        store, me, received = self._part.context.layer_store, self._part.worker, list[PartState]()
        sharded = {layers: cut for layers, cut in store.holding.cuts.items() if cut.sharded}
        for layers, cut in sharded.items():
            for layer, member in product(range(*layers), cut.members):
                writer = self._writers[layer]
                if me == writer != member:
                    received += unpack_parts(self._session.receive_bytes(layers, member))
                elif me == member != writer:
                    self._session.send_bytes(
                        pack_parts(store.holding.optimizer.own_states(layer)), layers, writer
                    )
        return store.gather_whole_layers(
            [layer for layer, writer in self._writers.items() if writer == me], received, after
        )

    def _read_batch(self, data: Data, microbatch: Microbatch) -> Batch:
        context = self._part.context
        # The end of training data ends the run; validation data must not end.
        try:
            batch = read_batch(data, microbatch, context.config)
        except DataEndedError as error:
            if data is context.corpus:
                raise
            raise BadSampleError(f"validation: {error}") from None
        # Other workers expect tensors of this form, and would wait for them in vain.
        if self._form is not None and data is context.corpus:
            require_form(batch, self._form, microbatch)
        if not self._has_masked and is_fully_masked(batch):
            self._has_masked = True
            context.channel.send(
                Note(
                    self._part.worker,
                    f"the data mask all tokens of some micro-batches, first of "
                    f"micro-batch {microbatch.index} of pipeline "
                    f"{microbatch.pipeline} in iteration {microbatch.iteration}: "
                    "they count nothing",
                )
            )
        # Workers that read the same micro-batch must get the same samples: node 0 compares them.
        if self._samples is not None and data is context.corpus:
            self._samples.add(
                SampleDigest(microbatch.pipeline, microbatch.index, digest_sample(batch))
            )
        return move_batch(batch, context.device)


def _no_checksums() -> tuple[Checksum, ...]:
    return ()


def _name_receivers(receivers: Sequence[Worker | None]) -> str:
    return ", ".join(map(_name_receiver, receivers))


def _name_receiver(worker: Worker | None) -> str:
    return "an unnamed worker" if worker is None else f"worker {worker}"


def _queue_step(context: WorkerContext, iteration: int) -> None:
    context.layer_sender.queue_step(iteration, context.layer_store)
