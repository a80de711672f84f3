"""Memory that a list scheduler keeps free on each worker, so that it never gets stuck."""

from typing import NamedTuple

from planner.model.problem import Problem


class SetAside(NamedTuple):
    """Room by stage.

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


def set_aside(problem: Problem) -> SetAside:
    """Where memory allows, room for the stash of every micro-batch in flight and for one more at each deeper stage.

    Then no I ever waits for room. Else the least with which a plan exists (`Problem.least_room`). With that little,
    micro-batches that go opposite ways would block each other, so that chains take turns.
    """
    grid, stages = problem.grid, range(len(problem.grid.stages))
    most = tuple(map(problem.hold, stages))
    ample = tuple(most[stage] + sum(most[other] for other in grid.stages_of(problem.column_of[stage])
                                    if grid.original(other) > grid.original(stage)) for stage in stages)
    memory = problem.memory
    if memory is None or all(ample[stage] <= memory.capacity[problem.column_of[stage]] for stage in stages):
        return SetAside(most, ample, chains_in_turn=False)
    return SetAside(tuple(map(problem.activation, stages)), tuple(map(problem.least_room, stages)),
                    chains_in_turn=True)
