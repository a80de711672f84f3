"""Speed test: what the ops of a stage take on this worker, which takes no part in training meanwhile."""

import torch

from runtime.config import RunConfig
from runtime.model.data import Data, Microbatch
from runtime.model.stage import Boundary, StageModule
from runtime.replay.recorder import OpTime, Recorder
from schedules.schedule import Op, OpKind, Worker

ROUNDS = 8
"""Micro-batches that are run. The first one warms up."""


def measure_stage(stage: StageModule, boundary: Boundary, corpus: Data, config: RunConfig, recorder: Recorder,
                  iteration: int, *, split: bool) -> tuple[OpTime, ...]:
    """Run F and the backward of some micro-batches on activations and gradients of noise. The stage is spent then."""
    device = next(iter(stage.parameters().values())).device
    tokens, targets = corpus.batch(Microbatch(iteration, 0, 0), config.training.batch, config.model.context)
    value = tokens.to(device) if stage.first else _noise(boundary.input_shape, boundary.input_dtype, device)
    target = targets.to(device) if stage.last else None
    gradient = None if stage.last else _noise(boundary.output_shape, boundary.output_dtype, device)
    for number in range(ROUNDS + 1):
        if number <= 1:
            recorder.begin(iteration, traced=False)
        microbatch = Microbatch(iteration, 0, number)
        with recorder.timing(_op(OpKind.F, stage, number)):
            stage.forward(microbatch, value, target, split=split)
        if split:
            with recorder.timing(_op(OpKind.I, stage, number)):
                stage.backward_input(microbatch, gradient)
            with recorder.timing(_op(OpKind.W, stage, number)):
                stage.backward_weight(microbatch)
        else:
            with recorder.timing(_op(OpKind.B, stage, number)):
                stage.backward(microbatch, gradient)
    stage.discard()
    recorder.window_seconds()
    return recorder.times()


def _op(kind: OpKind, stage: StageModule, number: int) -> Op:
    return Op(kind, stage.index, 0, number, Worker(0, 0), 0, 1)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)
