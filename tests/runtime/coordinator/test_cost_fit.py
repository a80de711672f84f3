"""Coefficients of costs that follow what is measured."""

import itertools

import numpy as np
import pytest

from slipstream.runtime.config import LengthCosts
from slipstream.runtime.coordinator import cost_fit
from slipstream.runtime.coordinator.cost_fit import CostFit
from slipstream.runtime.protocol.to_coordinator import Ran
from slipstream.runtime.replay.dealt_samples import of_op
from slipstream.runtime.replay.placement import place
from slipstream.runtime.replay.recorder import OpTime
from slipstream.schedules.dealing import sizes_of, sums_of
from slipstream.schedules.schedule import COMPUTE_KINDS
from tests.jobs import grid
from tests.runtime.running import schedule_for

SCHEDULE = schedule_for(grid(2, 3, 8, more="optimizer = 1"))
PLACEMENT = place(SCHEDULE.grid, 6)
FIRST, BLOCK, HEAD = (1e-5, 1e-8, 0.0), (1e-4, 2e-6, 3e-9), (1e-4, 4e-6, 0.0)


def costs(first=FIRST, block=BLOCK, head=HEAD):
    return LengthCosts(**dict.fromkeys(("forward", "backward_input", "backward_weight"),
                                       (first, block, block, block, block, head)))


def reports(true, iteration, random, noise=0.02, slow=1.0):
    """What all workers report whose ops take what `true` says; those of pipeline 0 are `slow`."""
    for seat in SCHEDULE.seats:
        times = []
        ops = SCHEDULE.ops(seat.worker)
        for kind in COMPUTE_KINDS:
            mine = [op for op in ops if op.kind is kind]
            if mine and not any(of_op(true, kind, PLACEMENT.range_of(SCHEDULE.layers_of(mine[0].slice)))):
                continue  # it takes no time
            if mine:
                sizes = sizes_of([random.lognormal(5, 1.2, random.integers(1, 8)).astype(int) + 1 for _ in mine])
                taken = sizes @ of_op(true, kind, PLACEMENT.range_of(SCHEDULE.layers_of(mine[0].slice)))
                taken *= random.lognormal(0, noise, len(mine)) * (slow if seat.worker.pipeline == 0 else 1)
                times.append(OpTime(kind, mine[0].slice, len(mine), 1.0, 0.0, sums_of(sizes, taken)))
        yield Ran(seat.worker, 1, iteration, 0.0, 1.0, tuple(times))


def follow(known, true, iterations=200, **more):
    """The iterations at which coefficients changed."""
    fit, random = CostFit(known=known, current=known, placement=PLACEMENT), np.random.default_rng(1)
    changed = []
    for iteration in range(iterations):
        before, fit = fit, fit.ran(reports(true, iteration, random, **more), SCHEDULE).look(iteration + 1)
        if fit.current is not before.current:
            changed.append(iteration + 1)
    return fit, changed


def relative(known, stage, kind="forward"):
    """What a stage takes for samples of some sizes, relative to the first of them."""
    layers = PLACEMENT.range_of(SCHEDULE.grid.layers_of(stage))
    sizes = sizes_of([[512], [64, 64], [2048], [16] * 8])
    found = sizes @ np.array(getattr(known, kind))[slice(*layers)].sum(axis=0)
    return found / found[0]


@pytest.mark.parametrize("more", [{}, {"slow": 3.0}])
def test_costs_become_those_that_are_measured_however_fast_workers_are(more):
    """Not where two stages tell too little of what one of their layers takes, but of each stage together."""
    wrong = costs(block=(4e-3, 0.0, 0.0), head=(0.0, 1e-7, 0.0))
    fit, changed = follow(wrong, costs(), **more)
    assert changed and changed[0] > cost_fit.EVERY
    for stage in range(3):
        assert relative(fit.current, stage) == pytest.approx(relative(costs(), stage), rel=0.15)
        assert relative(wrong, stage) != pytest.approx(relative(costs(), stage), rel=0.5)
    assert fit.error < fit.error_before


def test_costs_that_are_right_stay_as_they_are():
    assert follow(costs(), costs(), noise=0.3)[1] == []


def test_what_changes_later_is_followed_and_what_was_measured_is_forgotten():
    fit, random = CostFit(known=costs(), current=costs(), placement=PLACEMENT), np.random.default_rng(1)
    for iteration in range(400):
        true = costs() if iteration < 200 else costs(block=(1e-4, 1e-7, 1e-8))
        before, fit = fit, fit.ran(reports(true, iteration, random), SCHEDULE).look(iteration + 1)
        assert fit.current is before.current or iteration >= 200
    assert relative(fit.current, 1) == pytest.approx(relative(costs(block=(1e-4, 1e-7, 1e-8)), 1), rel=0.1, abs=0.03)


def test_it_follows_within_iterations_that_are_far_from_each_other():
    """So that what is dealt does not change all the time."""
    _fit, changed = follow(costs(block=(4e-3, 0.0, 0.0)), costs(), iterations=400)
    assert all(later - earlier >= cost_fit.EVERY for earlier, later in itertools.pairwise(changed))
    assert len(changed) <= 4
