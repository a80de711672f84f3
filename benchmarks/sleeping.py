"""A model whose layers sleep: F, I and W take as long as they are told to, so that many workers fit on few cores."""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.api import ModelConfig, TrainingConfig, derive_seed, seeded, weight_work

_SECONDS = "SLEEPING_SECONDS"
_FROZEN = "SLEEPING_FROZEN_BYTES"
_SLOW = "SLEEPING_SLOW"
_PR_SET_TIMERSLACK = 29
MODEL = {"name": "benchmarks.sleeping:Sleepers", "width": 8, "heads": 1, "context": 4}
TRAINING = {"optimizer": "benchmarks.sleeping:sleeping_optimizer", "batch": 1, "device": "cpu"}


@contextmanager
def sleeping(forward: float, backward_input: float, backward_weight: float, optimizer: float,
             frozen_bytes: int = 0, slow: Path | None = None) -> Iterator[None]:
    """Workers started in here sleep so many seconds in an op. The first stage, which has no I, sleeps in W for both.

    Each layer has so many bytes of parameters that are not trained: they move with it, and cost no computing. A process
    takes longer as long as the folder `slow` has a file of its number, by the factor in it.
    """
    given = {_SECONDS: json.dumps({"F": forward, "I": backward_input, "W": backward_weight, "O": optimizer}),
             _FROZEN: str(frozen_bytes), **({} if slow is None else {_SLOW: str(slow)})}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]


def _seconds() -> Mapping[str, float]:
    given: Mapping[str, float] = json.loads(os.environ[_SECONDS])
    return given


def _factor() -> float:
    """By which this process takes longer just now."""
    folder = os.environ.get(_SLOW)
    try:
        return 1.0 if folder is None else float((Path(folder) / str(os.getpid())).read_text())
    except FileNotFoundError:
        return 1.0


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """What is done in here takes so long."""
    end = time.perf_counter() + seconds * _factor()
    yield
    time.sleep(max(0.0, end - time.perf_counter()))


def _wake_in_time() -> None:
    """Ask Linux not to lengthen this thread's naps, as it does by 50 microseconds and more to save power."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


class _Sleep(torch.autograd.Function):
    """value @ weight, in F, I and W that take their time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: nn.Parameter, seconds: Mapping[str, float]) -> Tensor:
        with _lasting(seconds["F"]):
            ctx.save_for_backward(value)
            ctx.weight, ctx.seconds, ctx.work = weight, seconds, weight_work()
            return value @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        value, = ctx.saved_tensors

        def add_weight_gradient() -> None:
            with _lasting(ctx.seconds["W"]), torch.no_grad():
                added = value.flatten(0, -2).t() @ gradient.flatten(0, -2)
                ctx.weight.grad = added if ctx.weight.grad is None else ctx.weight.grad.add_(added)

        with _lasting(ctx.seconds["I"]):
            result = gradient @ ctx.weight.t()
        if ctx.work is None:
            add_weight_gradient()
        else:
            ctx.work.append(add_weight_gradient)
        return result, None, None


class Sleeper(nn.Module):
    """A layer that takes its time. Features [B, T, C] to features [B, T, C]; the first one takes tokens [B, T]."""

    def __init__(self, width: int, dtype: torch.dtype, *, takes_tokens: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=dtype) / width**0.5)
        self.frozen = nn.Parameter(torch.zeros(int(os.environ[_FROZEN]), dtype=torch.uint8), requires_grad=False)
        self.takes_tokens = takes_tokens
        self.seconds = _seconds()
        _wake_in_time()

    def forward(self, value: Tensor) -> Tensor:
        if self.takes_tokens:
            value = functional.one_hot(value % len(self.weight), len(self.weight)).to(self.weight.dtype)
        result: Tensor = _Sleep.apply(value, self.weight, self.seconds)
        return result


@dataclass(frozen=True, slots=True)
class Sleepers:
    """A `LayeredModel` of `blocks` sleeping layers."""

    config: ModelConfig
    seed: int
    dtype: torch.dtype
    device: torch.device

    @property
    def layers(self) -> int:
        """One a stage."""
        return self.config.blocks

    def build(self, layer: int) -> nn.Module:
        """Make one layer."""
        with seeded(derive_seed("parameters", self.seed, layer)):
            return Sleeper(self.config.width, self.dtype, takes_tokens=layer == 0)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy over as many classes as there are features."""
        return functional.cross_entropy(output.flatten(0, 1), target.flatten() % output.shape[-1])


def sleeping_optimizer(groups: list[dict[str, Any]], config: TrainingConfig) -> torch.optim.Optimizer:
    """SGD that takes its time."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with _lasting(_seconds()["O"]):
                super().step(closure)

    return Slow(groups, lr=config.learning_rate)
