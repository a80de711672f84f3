"""Speed test: what the ops of a slice take on this worker, which takes no part in training meanwhile."""

import torch

from runtime.model.data import Microbatch
from runtime.model.slices import SliceRunner, TensorForm
from runtime.protocol.to_worker import MeasureSpeed
from runtime.replay.recorder import OpTime
from runtime.worker.generation import WorkerContext
from runtime.worker.slowed_recorder import recorder_for
from schedules.schedule import Op, OpKind

ROUNDS = 8
"""Micro-batches that are run. The first one warms up."""


def measure_slice(number: int, runner: SliceRunner, forms: tuple[TensorForm, TensorForm], context: WorkerContext,
                  request: MeasureSpeed) -> tuple[OpTime, ...]:
    """Run F and the backward of some micro-batches, on activations and gradients of noise.

    `number` is that of the slice, `forms` are those of what goes in and of what comes out.
    """
    training, device = context.config.training, context.device
    tokens, targets = context.corpus.batch(Microbatch(request.iteration, 0, 0), training.batch,
                                           context.config.model.context)
    value = tokens.to(device) if runner.first else _noise(forms[0], device)
    target = targets.to(device) if runner.last else None
    gradient = None if runner.last else _noise(forms[1], device)
    recorder = recorder_for(context.setup.slowdowns, device)
    for microbatch in (Microbatch(request.iteration, 0, one) for one in range(ROUNDS + 1)):
        if microbatch.index <= 1:
            recorder.begin(request.iteration, traced=False)

        def op(kind: OpKind, one: int = microbatch.index) -> Op:
            return Op(kind, number, 0, one, context.worker, 0, 1)

        with recorder.timing(op(OpKind.F)):
            runner.forward(microbatch, value, target, split=request.split)
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


def _noise(form: TensorForm, device: torch.device) -> torch.Tensor:
    return torch.randn(form.shape, device=device).to(form.dtype)
