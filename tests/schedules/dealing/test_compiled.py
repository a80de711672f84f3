"""The install step of dealing."""

import numpy as np

from slipstream.planner.plan import plan_job
from slipstream.schedules.dealing import Dealer
from slipstream.schedules.dealing.compiled import load_kernels
from slipstream.schedules.dealing.kernel import improve_by_swaps, replay_iteration
from tests.jobs import grid


def test_what_it_compiles_is_all_that_dealing_calls():
    """numba compiles a function again for arguments of other types."""
    loops = improve_by_swaps, replay_iteration
    load_kernels()
    compiled = [[*loop.signatures] for loop in loops]
    dealer, costs = Dealer(plan_job(grid(2, 2, 2)).schedule), np.ones((4, 3))
    dealt = dealer.deal(costs, seed=0, swaps=9)
    dealer.iteration_seconds([costs], [dealt.sample])
    assert [[*loop.signatures] for loop in loops] == compiled and all(compiled)
