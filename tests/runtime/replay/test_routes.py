"""Any schedule that the checker passes trains alike.

It has any holdings and routes, with everything that a step can do.

Workers are threads of this process, over real process groups; `tests.runtime.test_routes` has
processes.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.runtime.computing.slices import WorkerSlices, find_forms
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.data.data import load_data
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import Executor
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import TCPStore
from slipstream.runtime.state.held_layers import HeldLayers, build_holding
from slipstream.runtime.state.part_exchange import PartReducer
from slipstream.runtime.state.part_state import count_elements
from slipstream.runtime.state.parts import build_partitions
from slipstream.runtime.state.step_factors import needs_gradient_norm
from slipstream.runtime.state.steps import StepController
from slipstream.schedules.check import check
from slipstream.schedules.program import build_program
from slipstream.schedules.schedule import Schedule, Worker
from tests import patience
from tests.general import floating_layer, general_schedules, layers_moved
from tests.runtime.running import judge

CPU = torch.device("cpu")
ITERATIONS = 4
NUMBERS = count(1)
SECONDS = patience.SECONDS


class Team:
    """The live workers of a schedule."""

    def __init__(
        self, schedule: Schedule, config: RunConfig, placement: Placement, store: TCPStore
    ) -> None:
        self.schedule, self.config, self.placement, self.store = schedule, config, placement, store
        self.number = next(NUMBERS)
        self.model = build_model(config.model, config.training.seed, torch.float64, CPU)
        self.corpus = load_data(config)
        # Not in the workers' threads: without a GPU, torch's build for GPUs crashed where several
        # did this at once.
        self.forms = find_forms(self.model, config)

    def train(self) -> tuple[list[float], dict[Worker, HeldLayers]]:
        """Losses of all iterations, and what each worker holds then."""
        workers = [seat.worker for seat in self.schedule.seats]
        with ThreadPoolExecutor(len(workers)) as pool:
            done = list(pool.map(self.run, workers, timeout=SECONDS))
        losses, holdings = zip(*done, strict=True)
        totals = [sum(parts) for parts in zip(*losses, strict=True)]
        return totals, dict(zip(workers, holdings, strict=True))

    def run(self, worker: Worker) -> tuple[list[float], HeldLayers]:
        schedule, config, placement = self.schedule, self.config, self.placement
        training, watches = config.training, needs_gradient_norm(config.training)
        ranks = {seat.worker: rank for rank, seat in enumerate(schedule.seats)}
        session = GenerationSession(
            Membership(self.number, ranks, worker),
            links=GroupCache("gloo"),
            device=CPU,
            store=self.store,
        )
        sharing = sharing_of(self.model)
        layers_of_groups = []
        for group in sharing.groups:
            layers_of_groups.append({member.layer for member in group})
        tied = placement.holders_of_groups(schedule, layers_of_groups)
        program = build_program(schedule, worker, tied)
        session.connect(sharing.find_sharers(placement, program), sums=watches)
        holding = build_holding(self.model, placement.held_layers(schedule, worker), training)
        cuts = build_partitions(
            placement.reductions_of(program),
            {},
            lambda layer: count_elements(holding.modules[layer]),
            (),
            sharded=False,
        )
        holding.hold_layers(holding.modules, cuts, worker, [], -1)
        slices = WorkerSlices(
            holding,
            placement.slice_layers(program),
            self.model,
            loss_scale=1 / schedule.grid.total_microbatches,
            config=config,
        )
        steps = StepController(
            holding,
            training,
            layers=self.model.layers,
            share=session.start_sum_over_all if watches else None,
            staggered=schedule.optimizer == "staggered",
        )
        exchange = Exchange(
            program, session, [self.forms[cut] for cut in placement.cuts], range(ITERATIONS)
        )
        recorder = Recorder(CPU)
        executor = Executor(
            program,
            slices=slices,
            steps=steps,
            session=session,
            exchange=exchange,
            feed=lambda name: self.corpus.batch(name, training.batch, config.model.context),
            recorder=recorder,
            reducer=PartReducer(session, holding),
        )
        losses = []
        for iteration in range(ITERATIONS):
            recorder.start_iteration(iteration, traced=False)
            losses.append(executor.run(iteration))
        steps.validate()
        exchange.flush()
        session.wait_for_all()
        session.close()
        return losses, holding


def compare(
    schedule: Schedule,
    clip_norm: float | None,
    skip: bool,
    *,
    rich: bool = False,
    recompute: object = "none",
) -> None:
    """Train by a schedule, and in one process.

    A layer of the schedule is one or more of the model.
    """
    assert check(schedule) == []
    layers = max(3, schedule.grid.layer_count)
    cuts = [*range(schedule.grid.layer_count), layers]
    model = {"blocks": layers - 2, "width": 8, "heads": 1, "context": 4, "dropout": 0.2}
    training = {
        "batch": 1,
        "dtype": "float64",
        "device": "cpu",
        "learning_rate": 0.01,
        "iterations": ITERATIONS,
    }
    if rich:
        model["name"] = "tests.runtime.rich_model:Model"
        training["data"] = "tests.runtime.rich_model:Data"
    config = parse_run_config(
        model, training, clip_norm=clip_norm, skip_nonfinite=skip, recompute=recompute
    )
    store, _ = host_store()
    losses, holdings = Team(schedule, config, Placement(cuts), store).train()
    expected = judge(config, schedule.grid.microbatches, ITERATIONS)
    assert losses == pytest.approx(expected.losses, rel=0, abs=1e-9)
    seen = {}
    for holding in holdings.values():
        for name, parameter in holding.parameters_by_name().items():
            torch.testing.assert_close(
                parameter.detach(), expected.parameters[name], rtol=0, atol=1e-9
            )
            assert torch.equal(parameter, seen.setdefault(name, parameter)), (
                f"peers disagree about {name}"
            )
    assert seen.keys() == expected.parameters.keys()
    del store


@settings(max_examples=30, deadline=None)
@given(
    general_schedules(max_pipelines=3, max_columns=3, max_layers=6).filter(
        lambda schedule: schedule.grid.total_microbatches
    ),
    st.sampled_from([None, 0.5, 1.6, 1e3]),
    st.booleans(),
)
def test_any_schedule_gives_the_numbers_of_one_process(schedule, clip_norm, skip):
    compare(schedule, clip_norm, skip)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    general_schedules(max_pipelines=3, max_columns=3, max_layers=6).filter(
        lambda schedule: schedule.grid.total_microbatches
    ),
    st.sampled_from([None, 0.5]),
    st.sampled_from(["none", "full", [0, 2]]),
)
def test_layers_that_pass_tuples_read_batches_add_losses_and_share_parameters(
    schedule, clip_norm, recompute
):
    compare(schedule, clip_norm, skip=False, rich=True, recompute=recompute)


@pytest.mark.parametrize("clip_norm", [None, 0.5, 1.6])
@pytest.mark.parametrize("make", [layers_moved, floating_layer])
def test_layers_that_moved_or_float(make, clip_norm):
    schedule = make()
    holdings = [schedule.held_layers(seat.worker) for seat in schedule.seats]
    assert any(before[-1][1] > after[0][0] for before, after in pairwise(holdings)), (
        "nobody holds what a neighbour holds"
    )
    compare(schedule, clip_norm, skip=True)
