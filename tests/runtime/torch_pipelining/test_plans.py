"""Plans in torch's own pipeline runtime, each worker a thread, against one process."""

import random
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.plugged import draw_plan
from slipstream.runtime.torch_pipelining import ReroutedStage
from slipstream.schedules.rows import build_rows
from slipstream.schedules.schedule import Worker
from tests.generate import planned
from tests.jobs import grid
from tests.runtime.torch_pipelining.threads import (
    build_stage,
    draw_parameters,
    gradients_alone,
    make_schedule,
    read_microbatch,
    run_step,
    with_workers,
)

TOLERANCE = 1e-12
pytestmark = pytest.mark.usefixtures("one_process")


def require_exact(schedule, build=build_stage, steps=1) -> None:
    """Gradients, norm and loss of a schedule are those of one process."""
    stages = len({cell.stage for row in build_rows(schedule).values() for cell in row})
    alone = gradients_alone(build, stages, schedule.grid.microbatches)

    def run(place):
        modules = {stage: build(stage) for stage in place.routes.stages_of(place.worker)}
        pipeline_schedule = make_schedule(place, modules)
        for _ in range(steps):
            for module in modules.values():
                module.zero_grad()
            losses = run_step(pipeline_schedule)
        norm = pipeline_schedule.grad_norm()
        total = place.commit(sum(loss.item() for loss in losses) / place.routes.microbatches)
        gradients = {}
        for stage, module in modules.items():
            gradients[stage] = [parameter.grad for parameter in module.parameters()]
        return gradients, norm, total

    model = nn.Sequential(*map(build, range(stages)))
    losses = []
    for pipeline, count in enumerate(schedule.grid.microbatches):
        for index in range(count):
            value, target = read_microbatch(pipeline, index)
            losses.append(nn.functional.mse_loss(model(value), target).item())
    whole = (
        torch.cat(
            [gradient.flatten() for stage in alone for gradient in stage if gradient is not None]
        )
        .norm()
        .item()
    )
    for found, norm, total in with_workers(schedule, run).values():
        for stage, gradients in found.items():
            for gradient, other in zip(gradients, alone[stage], strict=True):
                torch.testing.assert_close(gradient, other, rtol=0, atol=TOLERANCE)
        assert norm == pytest.approx(whole, abs=TOLERANCE)
        assert total == pytest.approx(sum(losses) / len(losses), abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_around_dead_workers(seed):
    """Random plans of 3 x 3 workers with up to two dead.

    They are linear, V-shaped, interleaved, split, fused, shed, ragged.
    """
    require_exact(draw_plan(random.Random(seed)), steps=2)


def test_two_directions():
    require_exact(
        planned(grid(2, 2, [4, 2], more="[placement]\norder = 'bidirectional'\n"), [Worker(0, 1)])
    )


class Pair(nn.Module):
    """A stage that passes on two tensors, of which one is of integers.

    It has a parameter that nobody uses.
    """

    def __init__(self, stage, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width).double()
        draw_parameters(self.linear, stage)
        self.unused = nn.Parameter(torch.ones(2).double())
        self.stage = stage

    def forward(self, value, count=None):
        count = torch.ones(value.shape[0], dtype=torch.int64) if count is None else count + 1
        value = torch.tanh(self.linear(value)) * count[:, None]
        return value if self.stage == 2 else (value, count)


class PairModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(map(Pair, range(3)))

    def forward(self, value):
        carried = (value,)
        for stage in self.stages:
            carried = stage(*carried)
            carried = carried if isinstance(carried, tuple) else (carried,)
        return carried[0]


@pytest.mark.parametrize("backward", ["split", "fused"])
def test_stages_pass_several_tensors_and_keep_parameters_without_gradient(backward):
    # A parameter that no worker uses has no gradient afterwards, as in one process: AdamW would
    # decay it.
    schedule = planned(grid(3, 3, [2, 3, 2]), [Worker(1, 1)], backward=backward)
    model = PairModel()
    for pipeline, count in enumerate(schedule.grid.microbatches):
        for value, target in (read_microbatch(pipeline, index) for index in range(count)):
            (
                nn.functional.mse_loss(model(value), target) / schedule.grid.total_microbatches
            ).backward()

    def run(place):
        (stage,) = place.routes.stages_of(place.worker)
        module = Pair(stage)
        run_step(make_schedule(place, {stage: module}))
        return stage, [parameter.grad for parameter in module.parameters()]

    for stage, found in with_workers(schedule, run).values():
        wanted = [parameter.grad for parameter in model.stages[stage].parameters()]
        for gradient, other in zip(found, wanted, strict=True):
            assert (gradient is None) == (other is None)
            torch.testing.assert_close(gradient, other, rtol=0, atol=TOLERANCE)


def test_each_trap_is_refused_in_one_line_that_says_what_to_do():
    schedule = planned(grid(2, 2, [2, 2]), [Worker(1, 1)])

    def run(place):
        (stage,) = place.routes.stages_of(place.worker)
        module = build_stage(stage)
        with pytest.raises(
            ValueError, match=rf"worker {place.worker} holds stages {stage}, not {1 - stage}"
        ):
            ReroutedStage(module, 1 - stage, place)
        pipeline_schedule = make_schedule(place, {stage: module})
        with pytest.raises(
            ValueError, match=r"arg_mbs has 0 values; expected \d, one for each of `samples`"
        ):
            pipeline_schedule.step(arg_mbs=[])
        compiled = torch.compile(build_stage(stage))
        with pytest.raises(
            ValueError, match=r"is compiled.* expected a plan with --backward fused$"
        ):
            ReroutedStage(compiled, stage, place)
        return stage

    assert len(with_workers(schedule, run)) == 3


def test_shards_that_would_lose_gradients_are_refused():
    # FSDP drops what it has gathered after the forward of all parts but the outermost, by default.
    schedule = planned(grid(2, 1, [2, 2]), [Worker(0, 0)])
    mesh = init_device_mesh("cpu", (1,))

    def run(place):
        parts = nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Tanh())
        with pytest.raises(
            ValueError, match=r"stage 0 drops its gathered parameters .*reshard_after_forward=False"
        ):
            ReroutedStage(fully_shard(parts, mesh=mesh), 0, place)
        parts = nn.Sequential(
            fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=False), nn.Tanh()
        )
        with pytest.raises(
            ValueError,
            match="has parts under fully_shard, but is not itself; expected fully_shard of",
        ):
            ReroutedStage(parts, 0, place)
        place.ranks = 0
        with pytest.raises(
            ValueError, match=r"0\.weight of stage 0 is sharded over 1 processes, a worker has 0"
        ):
            ReroutedStage(parts, 0, place)
        place.ranks = 1

    with_workers(schedule, run)


def test_the_forward_that_finds_forms_leaves_buffers_as_they_were():
    """A norm counts the forwards of the iteration, and no others."""

    def run(place):
        (stage,) = place.routes.stages_of(place.worker)
        norm = nn.BatchNorm1d(6).double()
        pipeline_schedule = make_schedule(place, {stage: nn.Sequential(build_stage(stage), norm)})
        run_step(pipeline_schedule)
        return norm.num_batches_tracked.item(), len(pipeline_schedule.samples)

    for counted, samples in with_workers(planned(grid(2, 2, [2, 3]), []), run).values():
        assert counted == samples


def test_samples_are_all_that_a_worker_runs():
    schedule = planned(grid(2, 2, [2, 3]), [Worker(0, 1)])
    found = with_workers(
        schedule,
        lambda place: (
            make_schedule(
                place, {stage: build_stage(stage) for stage in place.routes.stages_of(place.worker)}
            ).samples
        ),
    )
    assert set(found[Worker(1, 1)]) == {(0, 0), (0, 1), *product([1], range(3))}
    assert set(found[Worker(0, 0)]) == {(0, 0), (0, 1)}
