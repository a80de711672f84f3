"""Who works, and who holds which layers."""

from collections import Counter
from collections.abc import Iterator

from slipstream.schedules.layers import joined_ranges, layers_text
from slipstream.schedules.rules.case import Case, Violation
from slipstream.schedules.schedule import LayerRange, Worker


def live_workers(case: Case) -> Iterator[Violation]:
    """Every worker of the grid is either failed or has exactly one seat."""
    grid, seats = case.schedule.grid, Counter(seat.worker for seat in case.schedule.seats)
    failed = set(case.schedule.failed)
    for worker in sorted(set(seats) - set(grid.workers())):
        yield Violation("live-workers", f"worker {worker} is not in the grid of {grid.pipelines} pipelines x "
                        f"{grid.columns} columns", worker=worker)
    for worker in grid.workers():
        if worker in failed and seats[worker]:
            yield Violation("live-workers", f"worker {worker} has failed but has a program", worker=worker)
        elif worker not in failed and seats[worker] != 1:
            yield Violation("live-workers", f"live worker {worker} has {seats[worker]} programs; expected 1",
                            worker=worker)


def roles(case: Case) -> Iterator[Violation]:
    """Roles are distinct and in the grid."""
    grid, played = case.schedule.grid, set[Worker]()
    for seat in case.schedule.seats:
        role = seat.role
        if not (0 <= role.pipeline < grid.pipelines and 0 <= role.column < grid.columns):
            yield Violation("roles", f"worker {seat.worker} plays role {role}, which is not in the grid",
                            worker=seat.worker)
        elif role in played:
            yield Violation("roles", f"worker {seat.worker} plays role {role}, which another worker plays already",
                            worker=seat.worker)
        played.add(role)


def holders(case: Case) -> Iterator[Violation]:
    """Every layer is held by a live worker."""
    schedule = case.schedule
    columns = range(schedule.grid.columns)
    held = joined_ranges({layers for seat in schedule.seats if seat.holds is not None or seat.role.column in columns
                          for layers in schedule.holds_of(seat)})
    reached = 0
    for first, end in (*held, (schedule.grid.layer_count, schedule.grid.layer_count)):
        if first > reached:
            yield Violation("holders", f"no live worker holds {_layers(case, (reached, first))}: no parameters of them "
                            "are left")
        reached = end


def _layers(case: Case, layers: LayerRange) -> str:
    """Layers for a message, with the stages that they make up."""
    grid = case.schedule.grid
    stages = [str(stage) for stage, (first, end) in enumerate(grid.layers_by_stage[:grid.depth])
              if layers[0] <= first and end <= layers[1]]
    named = f" (stage{'s' if len(stages) > 1 else ''} {', '.join(stages)})" if stages else ""
    return layers_text(layers) + named
