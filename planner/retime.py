"""Shorten a plan without touching hosts or orders: start early ops later, so that every column's window shrinks.

Memory on a worker changes only at the ends of its own ops, so with the order kept, no re-timing can break it.
"""

from collections import defaultdict

import networkx as nx

from planner.problem import Problem
from planner.solution import Solution, place_ops
from schedules.graph import OpKey, op_key, producers
from schedules.schedule import Op, OpKind


def pull_late(problem: Problem, solution: Solution) -> Solution:
    """Start every op as late as the last end in its column allows. Never lengthens a window; keeps each order."""
    programs = place_ops(problem, solution)
    ops: dict[OpKey, Op] = {}
    graph: nx.DiGraph[OpKey] = nx.DiGraph()
    deadline: dict[int, int] = defaultdict(int)
    for program in programs.values():
        keys = [op_key(op) for op in program if op.kind not in (OpKind.A, OpKind.O)]
        ops.update(zip(keys, program, strict=False))
        nx.add_path(graph, keys)
        graph.add_nodes_from(keys)
    for key, op in ops.items():
        column = problem.column_of[key[1]]
        deadline[column] = max(deadline[column], op.end_ticks)
        for producer in producers(key, len(problem.grid.stages)):
            if producer in ops:
                graph.add_edge(producer, key)
    starts: dict[OpKey, int] = {}
    for key in reversed(list(nx.topological_sort(graph))):
        op = ops[key]
        end = deadline[problem.column_of[key[1]]]
        for successor in graph.successors(key):
            hop = 0 if ops[successor].worker == op.worker else problem.times.transfer
            end = min(end, starts[successor] - hop)
        starts[key] = end - (op.end_ticks - op.start_ticks)
    return Solution(hosts=solution.hosts, starts=dict(reversed(starts.items())))
