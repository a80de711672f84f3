"""A loop of one's own gets the numbers of one process.

`tests/examples` runs it under torchrun.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import slipstream
from slipstream.runtime.own_loop import ScheduleReplay, find_forms
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.schedules.program import build_program
from tests import patience
from tests.general import floating_layer, layers_moved
from tests.jobs import grid
from tests.runtime.running import schedule_for

WIDTH = 6
ITERATIONS = 3
NUMBERS = count(1)
BUILDING = threading.Lock()
"""Held while a layer is built.

The workers are threads, and the generator is the process's.
"""


def build_layer(layer):
    with BUILDING, torch.random.fork_rng():
        torch.manual_seed(layer)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()).double()


def compute_loss(output, target):
    return nn.functional.mse_loss(output, target)


def make_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def read_microbatch(iteration, pipeline, index):
    generator = torch.Generator().manual_seed(100 * iteration + 10 * pipeline + index)
    values = torch.rand(2, 3, WIDTH, generator=generator, dtype=torch.float64)
    return values[0], values[1]


def train_alone(schedule):
    layers = nn.Sequential(*map(build_layer, range(schedule.grid.layer_count)))
    optimizer, total = make_optimizer([*layers.parameters()]), schedule.grid.total_microbatches
    losses = []
    for iteration in range(ITERATIONS):
        parts = []
        for pipeline, number in enumerate(schedule.grid.microbatches):
            for index in range(number):
                value, target = read_microbatch(iteration, pipeline, index)
                loss = compute_loss(layers(value), target) / total
                loss.backward()
                parts.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(parts))
    return losses, layers.state_dict()


def replayed(schedule):
    """Each worker in a thread."""
    store, _ = host_store()
    number = next(NUMBERS)
    forms = find_forms(build_layer, schedule.grid.layer_count, read_microbatch(0, 0, 0)[0])

    def run(worker):
        program = build_program(schedule, worker)
        ranks = {member: rank for rank, member in enumerate(schedule.members)}
        session = GenerationSession(
            Membership(number, ranks, worker),
            links=GroupCache("gloo"),
            device=torch.device("cpu"),
            store=store,
        )
        session.connect(dict(program.sums), pairs=program.connections, sums=True)
        layers_by_worker = {
            layer: build_layer(layer) for first, end in program.holds for layer in range(first, end)
        }
        with ScheduleReplay(
            program,
            session,
            layers_by_worker,
            forms,
            loss=compute_loss,
            optimizer=make_optimizer,
            data=read_microbatch,
        ) as part:
            return [part.run(iteration) for iteration in range(ITERATIONS)], part.layers

    with ThreadPoolExecutor(len(schedule.members)) as pool:
        return list(pool.map(run, schedule.members, timeout=patience.SECONDS))


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedule_for(grid(3, 3, 4), ["1.1"]),
        lambda: schedule_for(grid(2, 2, 3), backward="fused"),
        lambda: schedule_for(grid(2, 2, 4, more='[placement]\norder = "v"\nchunks = 2')),
        layers_moved,
        floating_layer,
    ],
    ids=["a dead worker", "fused", "virtual stages", "layers moved", "a floating layer"],
)
def test_the_numbers_are_those_of_one_process(make):
    schedule = make()
    expected, state = train_alone(schedule)
    for losses, layers in replayed(schedule):
        assert losses == pytest.approx(expected, rel=0, abs=1e-9)
        for layer, module in layers.items():
            for name, value in module.state_dict().items():
                torch.testing.assert_close(value, state[f"{layer}.{name}"], rtol=0, atol=1e-9)


def test_a_process_too_few_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ValueError,
        match="3 processes were started; the schedule has 4 live workers: torchrun --nproc",
    ):
        slipstream.replay(
            schedule_for(grid(2, 2, 2)),
            layers=build_layer,
            loss=compute_loss,
            optimizer=make_optimizer,
            data=read_microbatch,
        )


def test_a_schedule_that_breaks_rules_is_refused():
    schedule = schedule_for(grid(2, 2, 2))
    programs = ((*schedule.programs[0][1:], schedule.programs[0][0]), *schedule.programs[1:])
    with pytest.raises(
        ValueError,
        match=r"the schedule breaks rules: .*; expected one that passes slipstream\.check",
    ):
        slipstream.replay(
            replace(schedule, programs=programs),
            layers=build_layer,
            loss=compute_loss,
            optimizer=make_optimizer,
            data=read_microbatch,
        )
