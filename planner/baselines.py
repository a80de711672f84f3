"""What others run: orders to compare with, made by the same list scheduler under their rules."""

from planner.dealing import deal
from planner.dense import Dense
from planner.greedy import Policy, list_order
from planner.problem import Problem
from planner.solution import Solution


def one_f_one_b(problem: Problem) -> Solution:
    """1F1B (PipeDream-flush, Narayanan et al. 2021), orphans dealt round-robin to peers when workers are down.

    Stage v of V holds at most V - v micro-batches between F and B; a backward is never postponed or torn apart.
    """
    grid = problem.grid
    policy = Policy(forward_order="oldest", eager_weights=True,
                    in_flight=tuple(grid.depth - grid.original(stage) for stage in range(len(grid.stages))))
    dense = Dense(problem, deal(problem, "round-robin"))
    order = list_order(dense, policy)
    return dense.solution(order, dense.earliest(order))
