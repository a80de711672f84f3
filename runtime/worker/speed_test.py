"""Speed test: what the ops of a slice take on this worker, which takes no part in training meanwhile."""

import torch

from slipstream.runtime.model.computing.slices import SliceRunner
from slipstream.runtime.model.data.data import Microbatch
from slipstream.runtime.model.layers.calling import on_device
from slipstream.runtime.model.passed import Form, Value, gradient_form, made
from slipstream.runtime.protocol.to_worker import MeasureSpeed
from slipstream.runtime.replay.dealt_samples import first_costs
from slipstream.runtime.replay.recorder import OpTime
from slipstream.runtime.worker.context import WorkerContext
from slipstream.runtime.worker.slowed_recorder import recorder_for
from slipstream.schedules.schedule import Op, OpKind

ROUNDS = 8
"""Micro-batches that are run. The first one warms up."""


def measure_slice(number: int, runner: SliceRunner, forms: tuple[Form, Form], context: WorkerContext,
                  request: MeasureSpeed) -> tuple[OpTime, ...]:
    """Run F and the backward of some micro-batches, on activations and gradients of noise.

    `number` is that of the slice, `forms` are those of what goes in and of what comes out.
    """
    training, device = context.config.training, context.device
    batch = on_device(context.corpus.batch(Microbatch(request.iteration, 0, 0), training.batch,
                                           context.config.model.context), device)
    value = batch[0] if runner.first else _noise(forms[0], device)
    target = batch[1] if runner.last else None
    gradient = None if runner.last else _noise(gradient_form(forms[1]), device)
    recorder = recorder_for(context.setup.slowdowns, device, context.group)
    cost = first_costs(context.corpus, training, runner.layers, request.iteration)
    recorder.costs = None if cost is None else lambda op, _: cost[op.kind]
    for microbatch in (Microbatch(request.iteration, 0, one) for one in range(ROUNDS + 1)):
        if microbatch.index <= 1:
            recorder.begin(request.iteration, traced=False)

        def op(kind: OpKind, one: int = microbatch.index) -> Op:
            return Op(kind, number, 0, one, context.worker, 0, 1)

        with recorder.timing(op(OpKind.F)):
            runner.forward(microbatch, value, target, batch, split=request.split)
        if request.split:
            with recorder.timing(op(OpKind.I)):
                runner.backward_input(microbatch, gradient)
            with recorder.timing(op(OpKind.W)):
                runner.backward_weight(microbatch)
        else:
            with recorder.timing(op(OpKind.B)):
                runner.backward(microbatch, gradient)
    recorder.window_seconds()
    return recorder.times()


def _noise(form: Form, device: torch.device) -> Value:
    """A value of a form: random numbers, and zeros where they are no floating point."""
    return made(form, lambda shape, dtype: torch.randn(shape, device=device).to(dtype) if dtype.is_floating_point
                else torch.zeros(shape, dtype=dtype, device=device))
