"""Memory that a list scheduler keeps free on each worker, so that it never gets stuck."""

from typing import NamedTuple

from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.problem import Problem


class SetAside(NamedTuple):
    """Room by slice.

    Why nothing gets stuck: of all micro-batches that wait for room, take one whose next op is at the deepest position p
    of its chain, an I before an F. Whatever else its worker holds was begun at positions up to p (before p, if the op
    is an F), and the last of these was begun only while the room that is needed at p was left. So the op fits.
    """

    at_start: tuple[int, ...]
    """Room taken when an F starts. Where the stash is more, the I waits until the worker has run enough of its W."""
    needed: tuple[int, ...]
    """Room that must be free when an F starts: for itself, and to go on at the deeper stages of its worker."""
    chains_in_turn: bool
    """Whether the micro-batches of one chain must all be done before those of the next begin."""


def set_aside(arrays: ProblemArrays) -> SetAside:
    """What keeps a list schedule from getting stuck; where layers are not held by column, what mostly does."""
    return _by_column(arrays.problem) if arrays.problem.routes is None else _by_worker(arrays)


def _by_worker(arrays: ProblemArrays) -> SetAside:
    """Room for the largest of the deeper slices that a worker runs, too, under this assignment.

    So all of them can drain, by the argument above, if no worker's room is too small for that. Else each F waits for
    its own room only.
    """
    problem = arrays.problem
    count = len(problem.layers_of)
    most = tuple(map(problem.hold, range(count)))
    run: list[set[int]] = [set() for _ in arrays.workers]
    for number, row in set(zip(arrays.ops.slice.tolist(), arrays.ops.worker.tolist(), strict=True)):
        run[row].add(number)
    needed = list(most)
    ample = True
    for worker, numbers in zip(arrays.workers, run, strict=True):
        for number in numbers:
            first = problem.layers_of[number][0]
            deeper = max((most[other] for other in numbers if problem.layers_of[other][0] > first), default=0)
            needed[number] = max(needed[number], most[number] + deeper)
        ample = ample and all(needed[number] <= problem.room(worker) for number in numbers)
    if ample:
        return SetAside(most, tuple(needed), chains_in_turn=False)
    return SetAside(tuple(map(problem.activation, range(count))), most, chains_in_turn=False)


def _by_column(problem: Problem) -> SetAside:
    """Where memory allows, room for the stash of every micro-batch in flight and for one more at each deeper stage.

    Then no I ever waits for room. Else the least with which a plan exists (`Problem.least_room`). With that little,
    micro-batches that go opposite ways would block each other, so that chains take turns.
    """
    grid, stages = problem.grid, range(len(problem.grid.stages))
    most = tuple(map(problem.hold, stages))
    ample = tuple(most[stage] + sum(most[other] for other in grid.stages_of(problem.column_of[stage])
                                    if grid.original(other) > grid.original(stage)) for stage in stages)
    memory = problem.memory
    if memory is None or (all(ample[stage] <= memory.capacity[problem.column_of[stage]] for stage in stages)
                          and not _starves(problem)):
        return SetAside(most, ample, chains_in_turn=False)
    return SetAside(tuple(map(problem.activation, stages)), tuple(map(problem.least_room, stages)),
                    chains_in_turn=True)


def _starves(problem: Problem) -> bool:
    """Whether room for the stash of all in flight, where it is more than the activation, keeps too many from starting.

    So it is where activations are computed again: hardly anything is held until I, and then as much as ever.
    """
    grid, memory = problem.grid, problem.memory
    return grid.chains == 1 and memory is not None and any(
        problem.stash(stage) > problem.activation(stage)
        and memory.capacity[problem.column_of[stage]] < (grid.depth - stage) * problem.stash(stage)
        for stage in range(grid.depth))
