"""From a job with its failures to the problem of its whole stages, in ticks."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from planner.job.file import Job
from planner.job.shared_state import with_shared_state
from planner.model.problem import NoPlanError, Problem
from planner.model.ticks import memory_in_units, tick_of, times_in_ticks
from schedules.schedule import BackwardMode, Grid, OptimizerMode, VirtualStage, Worker


def build_problem(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode = "split",
                  optimizer: OptimizerMode = "staggered", sharing: bool | None = None,
                  sliced: bool = False) -> Problem:
    """Translate a job to ticks.

    `sharing` is on unless given where it can gain something: where workers are down or slow, or pipelines have
    different numbers of micro-batches. With it, `sliced` has the bound hold for micro-batches that are cut, too.
    Raises NoPlanError when a stage has no live worker or a worker cannot hold a single micro-batch.
    """
    job = with_shared_state(job, failed)
    grid = grid_of(job)
    tick = tick_of(job)
    if sharing is None:
        sharing = bool(failed or job.time.slow or len(set(job.microbatches)) > 1)
    problem = Problem(name=job.name, tick_seconds=float(tick), grid=grid, times=times_in_ticks(job, grid, tick),
                      memory=memory_in_units(job), failed=frozenset(failed), backward=backward, optimizer=optimizer,
                      sharing=sharing, parts=_parts(job) if sharing and sliced else ())
    _require_feasible(problem)
    return problem


def grid_of(job: Job) -> Grid:
    """The job's shape."""
    return Grid(pipelines=job.pipelines, columns=job.stages, microbatches=job.microbatches, stages=_stages(job),
                chains=job.chains)


def _parts(job: Job) -> tuple[int, ...]:
    """Layers of each stage; 0 where their ops or what they hold are not equal."""
    if job.layers is None:
        return ()
    given = job.layer_values
    values = [] if given is None else [of_layer for of_layer in (
        given.forward, given.backward_input, given.backward_weight, given.activation, given.weight_stash) if of_layer]
    ends = list(accumulate(job.layers[:len(job.layers) // job.chains], initial=0))
    parts = [end - begin if all(len(set(of_layer[begin:end])) <= 1 for of_layer in values) else 0
             for begin, end in pairwise(ends)]
    return tuple(parts) * job.chains


def _stages(job: Job) -> tuple[VirtualStage, ...]:
    if job.layers is None:
        return tuple(VirtualStage(column=column) for column in job.columns)
    depth = len(job.layers) // job.chains
    ends = [sum(job.layers[index // depth * depth:index + 1]) for index in range(len(job.layers))]
    return tuple(VirtualStage(column=column, layers=(end - count, end))
                 for column, count, end in zip(job.columns, job.layers, ends, strict=True))


def _require_feasible(problem: Problem) -> None:
    for column, live in enumerate(problem.live_by_column):
        if not live:
            raise NoPlanError(f"stage {column} has no live worker: all of its {problem.grid.pipelines} workers are "
                              "down, so nobody holds its parameters; `slipstream plan --layers move --from-checkpoint` "
                              "takes them from a checkpoint")
    memory = problem.memory
    if memory is None:
        return
    for column, capacity in enumerate(memory.capacity):
        chains = max(problem.grid.microbatches)  # those after so many are visited by no micro-batch
        need = max((problem.least_room(stage) for stage in problem.grid.stages_of(column)
                    if stage // problem.grid.depth < chains), default=0)
        if need > capacity:
            raise NoPlanError(f"a worker of stage {column} has room for {capacity * memory.unit:g}, but one "
                              f"micro-batch needs {need * memory.unit:g} there: no schedule can run it")
