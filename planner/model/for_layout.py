"""What a layout is made for: a job and its failures in the plain integers of `planner.layout`."""

from collections.abc import Mapping, Sequence

from planner.job.file import Job
from planner.job.layers import layer_costs
from planner.job.shared_state import with_shared_state
from planner.layout.problem import LayersMode, LayoutProblem
from planner.layout.types import Held
from planner.model.from_job import grid_of
from planner.model.holdings import live_workers
from planner.model.problem import NoPlanError
from planner.model.ticks import memory_in_units, tick_of, times_in_ticks
from schedules.schedule import BackwardMode, Worker


def layout_problem(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode = "split",
                   layers: LayersMode = "fixed", from_checkpoint: bool = False,
                   sliced: bool = True, holds: Mapping[Worker, Held] | None = None) -> LayoutProblem:
    """The same ticks and memory units as in the problem of a layout (`problem_of_layout`).

    `holds`: what live workers hold now, of those that do not hold the layers of their own stages.
    Raises JobError where a stage has no layer, NoPlanError where no worker is left.
    """
    job = with_shared_state(job, failed)
    grid, costs = grid_of(job), layer_costs(job)
    single = tuple((layer, layer + 1) for layer in range(len(costs.forward)))
    tick, stages = tick_of(job, costs), len(grid.stages)
    times, memory = times_in_ticks(job, grid, tick, costs, single), memory_in_units(job, costs, single)
    live = [worker for worker in grid.workers() if worker not in set(failed)]
    if not live:
        raise NoPlanError("all workers are down")
    return LayoutProblem(
        forward=times.forward[stages:], backward_input=times.backward_input[stages:],
        backward_weight=times.backward_weight[stages:], transfer=times.transfer,
        optimizer=tuple(round(value / tick) for value in costs.optimizer), all_reduce=times.all_reduce[stages:],
        activation=memory.activation[stages:] if memory else (),
        weight_stash=memory.weight_stash[stages:] if memory and backward == "split" else (0,) * len(single),
        weights=memory.weights if memory else (), workers=live_workers(grid, times, memory, {
            worker: (holds or {}).get(worker, grid.held_by_column[worker.column]) for worker in live}),
        microbatches=grid.microbatches, layers=layers,
        from_checkpoint=from_checkpoint, sliced=sliced,
        paths=tuple(tuple((grid.layers_of(stage), grid.stages[stage].column) for stage in grid.path(chain))
                    for chain in range(grid.chains)))
