"""Run a worker's iterations of one order: it runs its program, steps, evaluates if that is due, and reports."""

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product

from torch import Tensor

from slipstream.runtime.model.computing.slices import Slices
from slipstream.runtime.model.data.data import Data, Microbatch, is_evaluated, require_form
from slipstream.runtime.model.data.loss_weights import LossWeights
from slipstream.runtime.model.data.token_data import BadSampleError
from slipstream.runtime.model.layers.calling import Batch, on_device
from slipstream.runtime.model.state.clipping import watches_gradients
from slipstream.runtime.model.state.part_state import PartState, pack_parts, unpack_parts
from slipstream.runtime.model.state.steps import Steps
from slipstream.runtime.protocol.to_coordinator import Checksum, Started
from slipstream.runtime.replay.evaluation import Evaluation, EvaluationMode
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import Executor
from slipstream.runtime.worker.context import OrderContext, WorkerContext
from slipstream.runtime.worker.reports import OrderStoppedError, Reports
from slipstream.runtime.worker.slowed_recorder import recorder_for
from slipstream.schedules.schedule import OpKind, Schedule


class Training:
    """Iterations of an order, with the layers that it needs, over the connections that were made for it. It holds no
    reference to the executor, which calls it back: both are freed as soon as the order is over."""

    def __init__(self, part: OrderContext, reports: Reports) -> None:
        context, schedule = part.context, part.schedule
        training = context.config.training
        self._part = part
        self._session = part.session
        self._reports = reports
        self._form = None if context.setup.data is None else context.setup.data.form()
        self.evaluation_mode = EvaluationMode()
        self._holds = weakref.WeakSet[Slices | Exchange]()
        """Objects that hold tensors of micro-batches."""
        self._checksums: Callable[[], tuple[Checksum, ...]] = _none
        """Function that returns the checksums of the state before the iteration's step, if copies are compared."""
        self._writers = context.placement.writers(schedule, part.worker)
        self.steps = Steps(
            context.layer_store.holding, training, layers=context.model.layers,
            share=part.session.sum_over_all if watches_gradients(training) else None,
            staggered=schedule.optimizer == "staggered", stepped=partial(_pass_on, context))

    def run(self) -> None:
        """Run all iterations of the order, or those before it stops. Raises CommunicationError."""
        part, context, setup = self._part, self._part.context, self._part.context.setup
        first, steps = part.order.first_iteration, self.steps
        recorder = recorder_for(setup.slowdowns, context.device, context.group)
        if part.samples.deals:
            recorder.costs = part.samples.times_longer
        exchange = self._exchange(part.schedule, self._stretch(first))
        weights = LossWeights(context.corpus, context.config.training, setup.microbatches)
        slices = Slices(context.layer_store.holding, context.placement.slices(part.schedule, part.worker),
                        context.model, loss_scale=weights, config=context.config)
        self._holds.add(slices)
        if self._session.ordered:
            self._rehearse(slices, first)
        executor = Executor(
            part.schedule, slices=slices, steps=steps, session=self._session, exchange=exchange,
            feed=partial(self._read, context.corpus), recorder=recorder, before_op=self._before_op,
            before_exchange=self._reports.require_acknowledged, before_step=self._before_step, sample_of=part.samples)
        evaluate = self._evaluation(slices, executor, weights)
        context.channel.send(Started(part.worker, part.order.order))
        first_traced = max(first, setup.iterations - setup.traced)
        with contextlib.suppress(OrderStoppedError):
            for iteration in range(first, setup.iterations):
                part.samples.begin(iteration)
                if iteration == first_traced and setup.nodes > 1:
                    # Comparing clocks takes many round trips between nodes, and no recovery should wait for them.
                    self._reports.require_acknowledged()
                    part.activity.begins("compares clocks")
                    recorder.offset_seconds = self._session.clock_offset()
                recorder.begin(iteration, traced=iteration >= first_traced)
                loss = executor.run(iteration)
                context.injector.at(iteration, "stepped")
                evaluation = None
                if is_evaluated(context.config.training, iteration):
                    evaluation = evaluate(iteration)
                    exchange.more(len(self._stretch(iteration + 1)))
                self._reports.report(iteration, loss, steps, recorder, evaluation, self._checksums())
                self._checksums = _none
            self._reports.require_acknowledged()
        part.activity.begins("ends its last iteration")
        self._validate(executor)
        exchange.flush()

    def _rehearse(self, slices: Slices, iteration: int) -> None:
        """Run each kind of op once, before NCCL keeps the device busy. Start the order's first checksums for the same
        reason."""
        part, context = self._part, self._part.context
        for number, runner in slices.runners.items():
            first, end = part.schedule.layers_of(number)
            context.rehearsal.run(runner, context.forms[first], context.forms[end],
                                  partial(self._read, context.corpus), Microbatch(iteration, 0, 0))
        slices.discard()
        context.rehearsal.run_step(context.layer_store.holding.modules.values(), context.config.training)
        self._checksums = context.layer_store.checksums(iteration - 1)

    def let_go(self) -> None:
        """Free the tensors of micro-batches after the thread that runs the program has been abandoned."""
        for holder in self._holds:
            holder.let_go()

    def _stretch(self, first: int) -> range:
        """Return the iterations from `first` up to the next evaluation. Tensors of later ones are not received before
        it."""
        context = self._part.context
        every, end = context.config.training.evaluate_every, context.setup.iterations
        return range(first, end if every is None else min(end, (first // every + 1) * every))

    def _exchange(self, schedule: Schedule, iterations: range) -> Exchange:
        context = self._part.context
        exchange = Exchange(schedule, self._session, context.forms, iterations)
        self._holds.add(exchange)
        return exchange

    def _validate(self, executor: Executor) -> None:
        """Make sure that the last step is right, if no forward of the next iteration has been run to check it."""
        self.steps.validate()
        if self.steps.void:
            executor.gather_again()
            self.steps.void = False

    def _evaluation(self, slices: Slices, executor: Executor, weights: LossWeights) -> Callable[[int], float]:
        """Return the function that evaluates after an iteration. What it needs is built at its first call, so that no
        recovery waits for that."""
        part, context, evaluations = self._part, self._part.context, list[Evaluation]()
        validation = None if context.validation is None else LossWeights(
            context.validation, context.config.training, context.setup.microbatches,
            context.config.training.evaluation_iterations)

        def before_op(iteration: int, place: int, kind: OpKind) -> None:
            reached = self._reports.reached
            part.activity.begins(f"evaluates after iteration {reached}: {kind} {place} of round {iteration}")
            self._session.require()
            context.injector.at(reached, "evaluating")

        def evaluate(iteration: int) -> float:
            self._validate(executor)
            self._reports.reached = iteration
            assert context.validation is not None and validation is not None and part.whole is not None
            if not evaluations:
                evaluations.append(Evaluation(
                    part.whole, session=self._session, slices=slices, steps=self.steps,
                    exchange=self._exchange, feed=partial(self._read, context.validation), before_op=before_op,
                    iterations=context.config.training.evaluation_iterations, mode=self.evaluation_mode))
            slices.weigh(validation)
            try:
                return evaluations[0].run()
            finally:
                slices.weigh(weights)

        return evaluate

    def _before_op(self, iteration: int, place: int, kind: OpKind) -> None:
        """Stop if the order is over, and inject failures that are due. Called before each op."""
        context = self._part.context
        self._part.activity.begins((iteration, place))
        self._session.require()
        context.injector.at(iteration, place)
        if kind in (OpKind.A, OpKind.O):
            context.injector.at(iteration, "A" if kind is OpKind.A else "O")

    def _before_step(self, iteration: int) -> None:
        """Copy the state that a step overwrites, if a checkpoint or another worker needs it, and start its checksums if
        due. The step before must be committed."""
        context, activity, require = self._part.context, self._part.activity, self._session.require
        if saves := context.checkpointer.due(iteration, self._reports.save_before):
            doing = activity.doing
            activity.begins(f"saves the state before iteration {iteration}")
            context.checkpointer.save(iteration, partial(self._whole_states, iteration - 1), require)
            activity.begins(doing)
        if saves or (self._checksums is _none and self._is_compared(iteration)):  # so that saved state is verified, too
            self._checksums = context.layer_store.checksums(iteration - 1)
        context.layer_sender.wait_for_room(require)
        if context.layer_sender.asked:
            context.injector.at(iteration, "asked")
            context.layer_sender.before_step(iteration, context.layer_store)

    def _is_compared(self, iteration: int) -> bool:
        """Return whether copies of the state before an iteration are compared. They are compared at the first iteration
        of an order, before the last step, and at a fixed interval."""
        setup = self._part.context.setup
        return iteration in (self._part.order.first_iteration, setup.iterations - 1) \
            or (setup.verify_every > 0 and iteration % setup.verify_every == 0)

    def _whole_states(self, after: int) -> dict[int, dict[str, Tensor]]:
        """Return the layers that this worker saves, as they are after an iteration. If states are sharded, all members
        send their own parts to the worker that saves."""
        store, me, received = self._part.context.layer_store, self._part.worker, list[PartState]()
        for layers, cut in store.holding.cuts.items():
            for layer, member in product(range(*layers), cut.members) if cut.sharded else ():
                writer = self._writers[layer]
                if me == writer != member:
                    received += unpack_parts(self._session.receive_bytes(layers, member))
                elif me == member != writer:
                    self._session.send_bytes(pack_parts(store.holding.optimizer.own_states(layer)), layers, writer)
        return store.whole_layers([layer for layer, writer in self._writers.items() if writer == me], received, after)

    def _read(self, data: Data, microbatch: Microbatch) -> Batch:
        config, device = self._part.context.config, self._part.context.device
        try:
            batch = data.batch(microbatch, config.training.batch, config.model.context)
        except StopIteration:  # happens at all workers alike
            raise BadSampleError(f"the data have no samples left for iteration {microbatch.iteration}") from None
        if self._form is not None and data is self._part.context.corpus:
            require_form(batch, self._form, microbatch)
        return on_device(batch, device)


def _none() -> tuple[Checksum, ...]:
    return ()


def _pass_on(context: WorkerContext, iteration: int) -> None:
    context.layer_sender.stepped(iteration, context.layer_store)
