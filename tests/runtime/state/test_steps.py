"""Clipping by the global norm, and skipping what is not finite.

Stages step before they know of each other.
"""

import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.launch import run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.parts import Version
from slipstream.runtime.state.step_factors import NORM_EPSILON, clip_factor
from slipstream.runtime.state.steps import UNCLIPPED_TO_GUESS, StepController, StepState
from slipstream.runtime.tools.reference import reference_run
from tests.jobs import grid
from tests.runtime.forked import own_fork_server
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

SAME = {"text": str(Path(__file__).parents[3] / "LICENSE"), "seed": 51}
"""Options for the same gradients whichever Python this is.

The text that is read where none is given is that of its library.
"""
RARELY = 1.7
"""A norm that one iteration of the tiny model exceeds."""
OFTEN = 1.25
"""A norm that every other iteration of the tiny model exceeds."""
FIRST = 1.18
"""A norm that the first iteration of the tiny model exceeds."""


class Wires:
    """Sums of workers in one process; they arrive when the test lets them."""

    def __init__(self) -> None:
        self.given: list[list[float]] = []
        self.open = False

    def share(self, values: Sequence[float]) -> "Wires":
        self.given.append(list(values))
        return self

    def has_arrived(self) -> bool:
        return self.open

    def wait_for_sums(self) -> Sequence[float]:
        assert self.open
        return [sum(column) for column in zip(*self.given[-2:], strict=True)]


class Pair:
    """Two workers of one layer each, stepping once by given gradients."""

    def __init__(self, config: TrainingConfig, *, staggered: bool = True) -> None:
        self.wires = Wires()
        self.layers = [nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(2)]
        self.workers = [
            StepController(
                HeldLayers({index: layer}, config),
                config,
                layers=2,
                share=self.wires.share,
                staggered=staggered,
            )
            for index, layer in enumerate(self.layers)
        ]
        self.validated: list[int] = []
        for layer in self.layers:
            nn.init.zeros_(layer.weight)

    def step(self, iteration: int, gradients: Sequence[float]) -> None:
        for index, (steps, layer, gradient) in enumerate(
            zip(self.workers, self.layers, gradients, strict=True)
        ):
            layer.weight.grad.fill_(gradient)
            steps.step(iteration, loss=index + 1.0)
            steps.when_validated(lambda index=index: self.validated.append(index))

    def validate(self) -> None:
        self.wires.open = True
        for steps in self.workers:
            steps.validate_if_arrived()

    @property
    def weights(self) -> list[float]:
        return [layer.weight.item() for layer in self.layers]


CLIP = 5.1
CLIPPED = TrainingConfig(
    optimizer="sgd", learning_rate=1.0, weight_decay=0.0, clip_norm=CLIP, skip_nonfinite=True
)


@pytest.mark.parametrize(
    ("gradients", "factor"),
    [((3.0, 4.0), 1.0), ((4.5, 4.5), CLIP / (math.sqrt(40.5) + NORM_EPSILON))],
)
def test_a_guess_is_validated(gradients, factor) -> None:
    """Alone, neither worker's gradient is too large."""
    pair = Pair(CLIPPED)
    pair.step(0, gradients)
    assert pair.weights == [-gradient for gradient in gradients], "stepped at once"
    assert not pair.validated, "but not for good"
    pair.validate()
    assert pair.weights == [-gradient * factor for gradient in gradients] and pair.validated == [
        0,
        1,
    ]
    assert [steps.state is StepState.VOID for steps in pair.workers] == [factor != 1.0] * 2
    assert all(not layer.weight.grad.any() for layer in pair.layers)
    assert [list(steps.losses) for steps in pair.workers] == [[(0, 3.0)]] * 2, (
        "each knows the loss of both"
    )


@pytest.mark.parametrize(
    ("gradient", "weight"), [(10.0, -10 * (CLIP / (10 + NORM_EPSILON))), (math.nan, 0.0)]
)
def test_who_knows_that_the_guess_is_wrong_waits(gradient, weight) -> None:
    pair = Pair(CLIPPED)
    pair.wires.given.append([0.0, 0.0, 0.0])
    pair.wires.open = True
    pair.step(0, (gradient, 0.0))
    assert [steps.state is StepState.VOID for steps in pair.workers] == [True, False], (
        "the second has guessed, and not heard yet"
    )
    assert pair.weights[0] == weight and pair.validated == [0]
    pair.validate()
    assert pair.workers[1].state is StepState.VOID and pair.weights == [weight, 0.0]


@pytest.mark.parametrize(("own_norm", "others"), [(math.nan, 0.0), (1.0, math.inf)])
def test_a_step_that_is_left_out_is_one_whose_parameters_are_still_to_come(
    own_norm: float, others: float
) -> None:
    # Others may have guessed a step, and give their parts of it: what is held counts as whole only
    # after that.
    pair = Pair(CLIPPED)
    steps, optimizer = pair.workers[0], pair.workers[0]._holding.optimizer
    optimizer.set_version(-1)
    optimizer.mark_gathered(-1)
    pair.wires.given.append([0.0, others, 0.0])
    pair.wires.open = True
    pair.layers[0].weight.grad.fill_(own_norm)
    steps.step(0, loss=0.0)
    steps.validate_if_arrived()
    assert steps.validated == (0, None) and pair.weights[0] == 0.0
    assert optimizer.version == Version(0) and optimizer.parameters == Version(0, whole=False)
    steps.return_to(-1, None)
    assert optimizer.version == Version(-1) and not optimizer.parameters.whole


@pytest.mark.parametrize("watched", [False, True])
def test_gradients_stay_until_no_other_worker_reads_them(watched: bool) -> None:
    """Nobody waits for that before the step, but where there may be none."""
    seen = []
    wires, layer = Wires(), nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(layer.weight)
    config = CLIPPED if watched else replace(CLIPPED, clip_norm=None, skip_nonfinite=False)
    steps = StepController(
        HeldLayers({0: layer}, config),
        config,
        layers=1,
        share=wires.share if watched else None,
        staggered=True,
    )
    layer.weight.grad.fill_(3.0)
    steps.step(0, 0.0, lambda: seen.append((layer.weight.item(), layer.weight.grad.item())))
    assert seen == [(0.0 if watched else -3.0, 3.0)]
    wires.open = True
    steps.validate()
    assert layer.weight.item() == -3.0 and layer.weight.grad.item() == 0.0


def test_no_guess_for_a_while_after_a_wrong_one() -> None:
    pair = Pair(CLIPPED)
    guessed = []
    for iteration in range(2 * UNCLIPPED_TO_GUESS):
        pair.wires.open = iteration > 0
        gradient = 4.5 if iteration < 2 else 0.0
        # For the first, that of the second, in case it waits.
        pair.wires.given.append([0.0, gradient**2, 0.0])
        pair.step(iteration, (gradient, gradient))
        guessed.append(len(pair.validated) == 2 * iteration)
        pair.validate()
        assert all((steps.state is StepState.VOID) == (iteration == 0) for steps in pair.workers)
    assert guessed == [
        True,
        *[False] * (UNCLIPPED_TO_GUESS + 1),
        *[True] * (UNCLIPPED_TO_GUESS - 2),
    ]


@pytest.mark.parametrize(
    ("failed", "mode"), [([], "staggered"), (["1.1"], "staggered"), (["1.1"], "synchronous")]
)
@pytest.mark.parametrize("clip_norm", [1e-3, OFTEN, RARELY, 1e3])
def test_clipping_equals_the_reference(
    mode, failed, clip_norm, fork_server: ForkServer, tmp_path
) -> None:
    require_reference(failed, fork_server, tmp_path, mode, clip_norm=clip_norm)


@pytest.mark.parametrize(
    ("iterations", "clip_norm", "failed"), [(20, RARELY, []), (20, OFTEN, ["1.1"]), (1, FIRST, [])]
)
def test_parts_of_a_second_step_are_gathered_again(
    iterations, clip_norm, failed, fork_server, tmp_path
) -> None:
    """Also where no iteration follows, and nobody runs anything before all are right."""
    require_reference(
        failed,
        fork_server,
        tmp_path,
        shard_optimizer=True,
        iterations=iterations,
        clip_norm=clip_norm,
    )


def require_reference(failed, fork_server, out, mode="staggered", **training) -> None:
    job, config = grid(3, 2, 2, more="optimizer = 1"), tiny(**SAME, **training)
    result = run(
        schedule_for(job, failed, optimizer=mode), config, out=out, fork_server=fork_server
    )
    assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))


def test_rarely_is_rarely(monkeypatch) -> None:
    """The test above sees guesses that are right, one that is wrong, and guesses again."""
    factors = []

    def spy(*args):
        factors.append(clip_factor(*args))
        return factors[-1]

    monkeypatch.setattr("slipstream.runtime.tools.reference.clip_factor", spy)
    reference_run(tiny(clip_norm=RARELY, **SAME), (2, 2, 2), 20)
    clipped = [iteration for iteration, factor in enumerate(factors) if factor != 1.0]
    assert len(clipped) == 1 and UNCLIPPED_TO_GUESS <= clipped[0] < 20 - 2 * UNCLIPPED_TO_GUESS


SPIKY = textwrap.dedent("""
    import torch
    from slipstream.runtime.models.gpt import GPT

    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value, factor):
            ctx.factor = factor
            return value.view_as(value)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.factor, None

    class SpikyGPT(GPT):
        '''Some micro-batches of some iterations have gradients that are not finite.'''

        def build(self, layer):
            module = super().build(layer)
            if layer == 3:
                inner = module.forward
                def forward(value):
                    draw, unit = torch.rand(()), torch.ones((), dtype=value.dtype)
                    factor = torch.where(draw < 0.04, torch.inf * unit, unit)
                    factor = torch.where(draw < 0.02, torch.nan * unit, factor)
                    return Spike.apply(inner(value), factor)
                module.forward = forward
            return module
    """)


@pytest.mark.parametrize("clip_norm", [None, OFTEN])
def test_what_is_not_finite_is_skipped(clip_norm, tmp_path, monkeypatch) -> None:
    (tmp_path / "spiky_model.py").write_text(SPIKY)
    monkeypatch.chdir(tmp_path)
    # The directory stays on the path, and the module loaded.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "spiky_model", raising=False)
    plain = tiny(skip_nonfinite=True, clip_norm=clip_norm)
    config = replace(plain, model=replace(plain.model, name="spiky_model:SpikyGPT"))
    job = grid(2, 3, 3, more="optimizer = 1")
    with own_fork_server() as fork_server:
        result = run(
            schedule_for(job, ["0.1"]), config, out=tmp_path / "out", fork_server=fork_server
        )
    reference = judge(config, job.microbatches)
    assert_same_numbers(result, reference)
    assert all(parameter.isfinite().all() for parameter in reference.parameters.values())
    assert reference.digest != judge(plain, job.microbatches).digest
