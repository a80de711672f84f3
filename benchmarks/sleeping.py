"""Define a model whose layers sleep, so that many workers fit on few cores.

F, I and W take a given time.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.api import (
    Microbatch,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    derive_seed,
    seeded,
    weight_work,
)
from slipstream.runtime.torch_private import FakeTensor
from slipstream.schedules.dealing import Costs

_SECONDS = "SLEEPING_SECONDS"
_FROZEN = "SLEEPING_FROZEN_BYTES"
_SLOW = "SLEEPING_SLOW"
_PR_SET_TIMERSLACK = 29
MODEL = {"name": "benchmarks.sleeping:Sleepers", "width": 8, "heads": 1, "context": 4}
TRAINING = {"optimizer": "benchmarks.sleeping:sleeping_optimizer", "batch": 1, "device": "cpu"}


@contextmanager
def sleeping(
    forward: float,
    backward_input: float,
    backward_weight: float,
    optimizer: float,
    frozen_bytes: int = 0,
    slow: Path | None = None,
) -> Iterator[None]:
    """Make ops of workers started within the context sleep for the given seconds.

    The first stage, which has no I, sleeps in W for both. Each layer has `frozen_bytes` of
    parameters that are not trained: they move with the layer, and cost no compute. While the folder
    `slow` has a file named by the number of a process, that process takes longer by the factor in
    it.
    """
    given = {
        _SECONDS: json.dumps(
            {"F": forward, "I": backward_input, "W": backward_weight, "O": optimizer}
        ),
        _FROZEN: str(frozen_bytes),
        **({} if slow is None else {_SLOW: str(slow)}),
    }
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
    """Return the factor by which this process currently takes longer."""
    folder = os.environ.get(_SLOW)
    try:
        return 1.0 if folder is None else float((Path(folder) / str(os.getpid())).read_text())
    except FileNotFoundError:
        return 1.0


@contextmanager
def _lasting(seconds: float) -> Iterator[None]:
    """Make the body of the context take a given time."""
    end = time.perf_counter() + seconds * _factor()
    yield
    time.sleep(max(0.0, end - time.perf_counter()))


def _wake_in_time() -> None:
    """Ask Linux not to lengthen the sleeps of this thread.

    It does so by 50 microseconds and more to save power.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)


class _Sleep(torch.autograd.Function):
    """Autograd function value @ weight whose F, I and W take a given time."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: nn.Parameter, seconds: Mapping[str, float]
    ) -> Tensor:
        """Return value @ weight. `seconds` are those of this sample."""
        with _lasting(seconds["F"]):
            ctx.save_for_backward(value)
            ctx.weight, ctx.seconds, ctx.work = weight, seconds, weight_work()
            return value @ weight

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        (value,) = ctx.saved_tensors

        def weight_gradient() -> Tensor:
            with _lasting(ctx.seconds["W"]), torch.no_grad():
                return value.flatten(0, -2).t() @ gradient.flatten(0, -2)

        def add_weight_gradient() -> None:
            added = weight_gradient()
            ctx.weight.grad = added if ctx.weight.grad is None else ctx.weight.grad.add_(added)

        with _lasting(ctx.seconds["I"]):
            result = gradient @ ctx.weight.t()
        if ctx.work is None:
            return result, weight_gradient(), None
        ctx.work.append(add_weight_gradient)
        return result, None, None


class Unequal(NamedTuple):
    """Micro-batch whose F, I and W take longer by the factors `times`, of shape [3]."""

    tokens: Tensor
    targets: Tensor
    times: Tensor


class UnequalData:
    """Samples with known, log-normal op times, whose sigma is `spread` of [training.options]."""

    digest = "unequal"

    def __init__(self, config: RunConfig) -> None:
        self._seed, options = config.training.seed, config.training.options
        self._first = list(accumulate(options["microbatches"], initial=0))
        self._spread = float(options["spread"])

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> Unequal:
        """Return a micro-batch, whose tokens do not matter."""
        number = self._first[microbatch.pipeline] + microbatch.index
        tokens = torch.full((batch, context), number)
        return Unequal(tokens, tokens, torch.from_numpy(self.costs(microbatch.iteration)[number]))

    def costs(self, iteration: int) -> Costs:
        """Return the costs of the samples, of shape [samples, 3]."""
        random = np.random.default_rng(derive_seed("unequal", self._seed, iteration))
        found = random.lognormal(0, self._spread, self._first[-1])
        return np.repeat((found / found.mean())[:, None], 3, axis=1)


class Sleeper(nn.Module):
    """Layer that takes a given time.

    It maps features [B, T, C] to the same shape; the first one takes tokens [B, T].
    """

    def __init__(self, width: int, dtype: torch.dtype, *, takes_tokens: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=dtype) / width**0.5)
        self.frozen = nn.Parameter(
            torch.zeros(int(os.environ[_FROZEN]), dtype=torch.uint8), requires_grad=False
        )
        self.takes_tokens = takes_tokens
        self.seconds = _seconds()
        _wake_in_time()

    def forward(self, value: Tensor, batch: tuple[Tensor, ...] | None = None) -> Tensor:
        if self.takes_tokens:
            value = functional.one_hot(value % len(self.weight), len(self.weight)).to(
                self.weight.dtype
            )
        seconds, times = self.seconds, getattr(batch, "times", None)
        if times is not None and not isinstance(times, FakeTensor):
            seconds = {
                kind: self.seconds[kind] * factor
                for kind, factor in zip("FIW", times.tolist(), strict=True)
            }
        result: Tensor = _Sleep.apply(value, self.weight, seconds)
        return result


@dataclass(frozen=True, slots=True)
class Sleepers:
    """`LayeredModel` of `blocks` sleeping layers."""

    config: ModelConfig
    seed: int
    dtype: torch.dtype
    device: torch.device

    @property
    def layers(self) -> int:
        """Number of layers, one per stage."""
        return self.config.blocks

    def build(self, layer: int) -> nn.Module:
        """Return one layer."""
        with seeded(derive_seed("parameters", self.seed, layer)):
            return Sleeper(self.config.width, self.dtype, takes_tokens=layer == 0)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy over as many classes as there are features."""
        return functional.cross_entropy(output.flatten(0, 1), target.flatten() % output.shape[-1])


def sleeping_optimizer(
    groups: list[dict[str, Any]], config: TrainingConfig
) -> torch.optim.Optimizer:
    """Return an SGD optimizer that takes a given time."""

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with _lasting(_seconds()["O"]):
                super().step(closure)

    return Slow(groups, lr=config.learning_rate)
