"""Plan for commands: check their options, show progress, exit if planning fails."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast

import msgspec
import typer

from slipstream.cli.shared.console import err, exit_negative, refuse
from slipstream.cli.shared.options import require_choice
from slipstream.planner.budget import Clock, ProgressCallback
from slipstream.planner.compiled import ensure_compiled
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import normalised
from slipstream.planner.options import Layers, PlanOptions
from slipstream.planner.params import DEFAULTS, ParamsError, SearchParams, read_params
from slipstream.planner.placement import MEAN_DOWN_SHARE, FoundPlacement, find_placement
from slipstream.planner.plan import Plan, plan_with
from slipstream.planner.recompute import Recomputation, choose_recomputation, chooses_recomputation
from slipstream.planner.reference import FaultFree, reference_key
from slipstream.planner.search.engine import METHODS, Method
from slipstream.planner.tables.process_pool import ExecutorError, open_executor
from slipstream.schedules.files import read_at_most, write_atomically
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Worker

_MAX_BYTES = 4096
_REFERENCE_DECODER = msgspec.json.Decoder(FaultFree)


def build_plan_options(
    *,
    backward: str | None,
    optimizer: str | None,
    method: str,
    time_limit: float,
    seed: int,
    steps: int | None = None,
    layers: str = "fixed",
    slices: bool = True,
    from_checkpoint: bool = False,
    params: Path | None = None,
) -> PlanOptions:
    """Return the planner's options from those of the command line.

    Exits 2 if `backward`, `optimizer` or `method` is unknown, or `params` invalid. Raises
    ValueError for unknown `layers`, and for numbers out of range.

    Parameters
    ----------
    backward, optimizer, method, time_limit, seed, steps, layers, slices, from_checkpoint
        Fields of `PlanOptions`.
    params
        File of the search's parameters; None: the usual ones.
    """
    require_choice("--backward", backward, ("split", "fused"))
    require_choice("--optimizer", optimizer, ("staggered", "synchronous"))
    require_choice("--method", method, METHODS)
    return PlanOptions(
        backward=cast(BackwardMode | None, backward),
        optimizer=cast(OptimizerMode | None, optimizer),
        method=cast(Method, method),
        time_limit=time_limit,
        steps=steps,
        seed=seed,
        layers=cast(Layers, layers),
        slices=slices,
        from_checkpoint=from_checkpoint,
        params=read_search_params(params),
    )


def read_search_params(path: Path | None) -> SearchParams:
    """Return the search's parameters, by default or from a file. Exits 2 if it is invalid."""
    try:
        return DEFAULTS if path is None else read_params(path)
    except ParamsError as error:
        refuse(error)


def make_plan(
    job: Job,
    failed: tuple[Worker, ...],
    options: PlanOptions,
    *,
    normalise: bool = False,
    ctrl_c: str = "ends the search, with the best found by then",
    clock: Clock | None = None,
) -> Plan:
    """Plan a schedule for the job without the failed workers, with progress on stderr.

    The fault-free period is stored in the user's cache and, without counted steps, also taken from
    there. Ctrl-C ends the search with the best plan by then. Exits 2 if the job does not have a
    failed worker, or cannot be planned by the options, and 1 if no plan is found.

    Parameters
    ----------
    normalise
        Whether live workers may take over roles of dead ones.
    ctrl_c
        What Ctrl-C does, a clause in the progress line.
    clock
        Clock that the search's limit is counted by; None: a new one, by the options.
    """
    try:
        # What counted steps find depends on the job, the options and the seed alone.
        reference = _read_reference(options, job) if options.steps is None else None
        with show_planning(ctrl_c) as progress:
            plan = (
                normalised(
                    job, failed, options, reference=reference, progress=progress, clock=clock
                )
                if normalise or options.layers == "move"
                else plan_with(
                    options, job, failed, fault_free=reference, progress=progress, clock=clock
                )
            )
    except JobError as error:
        refuse(error)
    except NoPlanError as error:
        exit_negative(error)
    # Kept for the next command: it says what a failure costs.
    if plan.fault_free is not None:
        _store_reference(options, job, plan.fault_free)
    return plan


@contextmanager
def open_executor_or_refuse(name: str | None) -> Iterator[Executor | None]:
    """Yield the executor of --executor; None: local processes. Exits 2 if it is unavailable."""
    with ExitStack() as stack:
        try:
            executor = stack.enter_context(open_executor(name))
        except ExecutorError as error:
            refuse(f"--executor: {error}")
        yield executor


def find_pipeline(
    path: Path,
    text: str,
    options: PlanOptions,
    failures: int = 0,
    down: float = MEAN_DOWN_SHARE,
    clock: Clock | None = None,
) -> FoundPlacement:
    """Return the best placement and division found for a job, with progress on stderr.

    Candidates are compared by their mean throughput with 0 to `failures` workers down. Exits 2 for
    an invalid job, such as a stage without layers, or too short a limit, 1 if nothing fits into
    memory, and 130 after Ctrl-C.

    Parameters
    ----------
    path
        The job's name in messages.
    text
        The job file's text.
    down
        Share of the time that each worker is down, from which the weights of the mean follow.
    clock
        Clock that the search's limit is counted by; None: a new one, by the options.
    """
    try:
        with show_planning("ends it, and nothing is written") as progress:
            return find_placement(
                text, options, failures=failures, down=down, progress=progress, clock=clock
            )
    except KeyboardInterrupt:
        err.print("interrupted; nothing was written", style="yellow")
        raise typer.Exit(130) from None
    except JobError as error:
        refuse(f"{path}: {error}")
    except NoPlanError as error:
        exit_negative(error)


def compile_planner() -> None:
    """Compile the planner's inner loops, with a line on stderr, unless they are compiled."""
    ensure_compiled(lambda line: err.print(line, style="dim"))


def find_recomputation(path: Path, job: Job, options: PlanOptions) -> Recomputation | None:
    """Return what the planner chooses to recompute; None if the job leaves no choice.

    Exits 2 if the job lacks values that the choice depends on, or the limit is too short, with a
    message that names the job by `path`, and 1 if no choice fits.
    """
    if not chooses_recomputation(job):
        return None
    compile_planner()
    try:
        return choose_recomputation(job, options)
    except JobError as error:
        refuse(f"{path}: {error}")
    except NoPlanError as error:
        exit_negative(error)


@contextmanager
def show_planning(ctrl_c: str) -> Iterator[ProgressCallback]:
    """Yield a function that shows a message on stderr, with the seconds that have passed.

    `ctrl_c` is a clause on what Ctrl-C does.
    """
    start_time = time.monotonic()
    with err.status("planning") as status:

        def report(message: str) -> None:
            status.update(f"planning: {message} (Ctrl-C {ctrl_c})")
            err.print(
                f"{time.monotonic() - start_time:7.2f} s  {message}", style="dim", soft_wrap=True
            )

        yield report


def _read_reference(options: PlanOptions, job: Job) -> FaultFree | None:
    """Return the fault-free period that earlier commands have stored for this job, if any."""
    # What a failure costs is told by comparison with it, and planning it anew takes time.
    with suppress(NoPlanError, OSError, ValueError, msgspec.MsgspecError):
        return _REFERENCE_DECODER.decode(
            read_at_most(_reference_file(options, job), _MAX_BYTES, ValueError)
        )
    return None


def _store_reference(options: PlanOptions, job: Job, found: FaultFree) -> None:
    """Store a job's fault-free period and bound, where they are better than the stored ones."""
    with suppress(NoPlanError, OSError):
        better = found.merged_with(_read_reference(options, job))
        write_atomically(_reference_file(options, job), msgspec.json.encode(better))


def _reference_file(options: PlanOptions, job: Job) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "slipstream" / "fault-free" / f"{reference_key(options, job)}.json"
