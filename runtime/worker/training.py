"""A worker's iterations of one order: it runs its program, steps, evaluates where that is due, and reports."""

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
    """Carries out iterations, with the layers that the order needs, over the connections that were made for it.

    It does not hold what runs the program, which calls it back: both are freed as soon as the order is over.
    """

    def __init__(self, part: OrderContext, reports: Reports) -> None:
        context, schedule = part.context, part.schedule
        training = context.config.training
        self._part = part
        self._session = part.session
        self._reports = reports
        self._form = None if context.setup.data is None else context.setup.data.form()
        self.evaluation_mode = EvaluationMode()
        self._holds = weakref.WeakSet[Slices | Exchange]()
        """What has tensors of micro-batches."""
        self._checksums: Callable[[], tuple[Checksum, ...]] = _none
        """Of what was held before the step of the iteration, where copies are compared."""
        self._writers = context.placement.writers(schedule, part.worker)
        self.steps = Steps(
            context.layer_store.holding, training, layers=context.model.layers,
            share=part.session.sum_over_all if watches_gradients(training) else None,
            staggered=schedule.optimizer == "staggered", stepped=partial(_pass_on, context))

    def run(self) -> None:
        """All iterations from the order's first one on, or those before it stops. Raises CommunicationError."""
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
                    # Not before: it takes many trips between the nodes, and no recovery should wait for them.
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
        """Run each kind of op once, before NCCL keeps the device busy; sum up what an order begins with for the same
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
        """Free what micro-batches hold, where the thread that runs the program is left behind."""
        for one in self._holds:
            one.let_go()

    def _stretch(self, first: int) -> range:
        """Iterations from one on, up to the next evaluation: tensors of what follows that are not asked for before."""
        context = self._part.context
        every, end = context.config.training.evaluate_every, context.setup.iterations
        return range(first, end if every is None else min(end, (first // every + 1) * every))

    def _exchange(self, schedule: Schedule, iterations: range) -> Exchange:
        context = self._part.context
        exchange = Exchange(schedule, self._session, context.forms, iterations)
        self._holds.add(exchange)
        return exchange

    def _validate(self, executor: Executor) -> None:
        """See to it that the last step is right, where nobody has run a forward of the next iteration, or will."""
        self.steps.validate()
        if self.steps.void:
            executor.gather_again()
            self.steps.void = False

    def _evaluation(self, slices: Slices, executor: Executor, weights: LossWeights) -> Callable[[int], float]:
        """What evaluates after an iteration. It is made when it is first used: no recovery waits for it."""
        part, context, made = self._part, self._part.context, list[Evaluation]()
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
            if not made:
                made.append(Evaluation(
                    part.whole, session=self._session, slices=slices, steps=self.steps,
                    exchange=self._exchange, feed=partial(self._read, context.validation), before_op=before_op,
                    iterations=context.config.training.evaluation_iterations, mode=self.evaluation_mode))
            slices.weigh(validation)
            try:
                return made[0].run()
            finally:
                slices.weigh(weights)

        return evaluate

    def _before_op(self, iteration: int, place: int, kind: OpKind) -> None:
        """Before each op: stop when the order is over."""
        context = self._part.context
        self._part.activity.begins((iteration, place))
        self._session.require()
        context.injector.at(iteration, place)
        if kind in (OpKind.A, OpKind.O):
            context.injector.at(iteration, "A" if kind is OpKind.A else "O")

    def _before_step(self, iteration: int) -> None:
        """Copy the state that a step overwrites, where a checkpoint or another worker needs it, and sum it up where it
        is compared with others' copies. The step before it is committed."""
        context, activity, require = self._part.context, self._part.activity, self._session.require
        if saves := context.checkpointer.due(iteration, self._reports.save_before):
            doing = activity.doing
            activity.begins(f"saves the state before iteration {iteration}")
            context.checkpointer.save(iteration, partial(self._whole_states, iteration - 1), require)
            activity.begins(doing)
        if saves or (self._checksums is _none and self._is_compared(iteration)):  # what is saved was right, then
            self._checksums = context.layer_store.checksums(iteration - 1)
        context.layer_sender.wait_for_room(require)
        if context.layer_sender.asked:
            context.injector.at(iteration, "asked")
            context.layer_sender.before_step(iteration, context.layer_store)

    def _is_compared(self, iteration: int) -> bool:
        """Whether copies of the state before an iteration are compared: where an order begins, before the last step,
        and every so many iterations."""
        setup = self._part.context.setup
        return iteration in (self._part.order.first_iteration, setup.iterations - 1) \
            or (setup.verify_every > 0 and iteration % setup.verify_every == 0)

    def _whole_states(self, after: int) -> dict[int, dict[str, Tensor]]:
        """The layers that this worker saves, as they are after an iteration; where states are sharded, all give their
        own parts to who saves them."""
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
            found = data.batch(microbatch, config.training.batch, config.model.context)
        except StopIteration:  # for all workers alike
            raise BadSampleError(f"the data have no samples left for iteration {microbatch.iteration}") from None
        if self._form is not None and data is self._part.context.corpus:
            require_form(found, self._form, microbatch)
        return on_device(found, device)


def _none() -> tuple[Checksum, ...]:
    return ()


def _pass_on(context: WorkerContext, iteration: int) -> None:
    context.layer_sender.stepped(iteration, context.layer_store)
