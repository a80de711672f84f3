"""Define arguments and options that several commands take, and how a command takes its own as one struct."""

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.shared.console import complete_from

PLANNED, SEARCH, ANSWER = "The schedule", "The search", "The answer"
"""Groups of options in the help of several commands."""
PLACEMENTS = ("given", "any")
"""Values of --placement."""

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (TOML).")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=(
    "A key of the job file, such as training.learning_rate, with another value; may be repeated."))]
ScheduleFile = Annotated[Path, typer.Argument(metavar="FILE", help=(
    "A schedule file, as `slipstream plan --out` writes it."))]
ScheduleFiles = Annotated[list[Path], typer.Argument(metavar="FILE...", help=(
    "Schedule files, entries of a table, or the folder of one."))]
Failed = Annotated[list[str] | None, typer.Option("--failed", rich_help_panel=PLANNED, metavar="D.S", help=(
    "A worker that is down, as PIPELINE.STAGE; may be repeated."))]
FailedNode = Annotated[list[int] | None, typer.Option("--failed-node", rich_help_panel=PLANNED,
                                                        metavar="N", min=0, help=(
    "A node (machine) that is down, with all of its workers by [topology] of the job file, from 0; may be repeated."))]
Backward = Annotated[str | None, typer.Option("--backward", rich_help_panel=PLANNED, metavar="split|fused",
                                              autocompletion=complete_from("split", "fused"), help=(
    "split: gradients of the weights are computed by ops of their own, which fill bubbles; fused: together with the "
    "gradients of the input. Default: split; fused for 1f1b."))]
Optimizer = Annotated[str | None, typer.Option("--optimizer", rich_help_panel=PLANNED, metavar="staggered|synchronous",
                                               autocompletion=complete_from("staggered", "synchronous"), help=(
    "staggered: a stage steps as soon as its own gradients are reduced; synchronous: all stages wait for the last. "
    "Default: staggered; synchronous for 1f1b."))]
ExecutorName = Annotated[str | None, typer.Option("--executor", rich_help_panel=SEARCH,
                                                  metavar="mpi|dask://HOST:PORT", help=(
    "What plans instead of --jobs processes of this machine: processes of MPI, if this command is started by "
    "`mpirun -n N python -m mpi4py.futures`, or the workers of a Dask cluster."))]
MethodName = Annotated[str, typer.Option("--method", rich_help_panel=PLANNED, metavar="cp-sat|greedy|1f1b|recycle",
                                         autocompletion=complete_from("cp-sat", "greedy", "1f1b", "recycle"), help=(
    "cp-sat: list schedules, annealing, and CP-SAT where that is small enough (the answer says what really ran); "
    "greedy: list schedules only; to compare with, 1f1b: "
    "the usual schedule, and recycle: 1F1B order with re-routed work in its bubbles."))]
TimeLimit = Annotated[float, typer.Option("--time-limit", rich_help_panel=SEARCH,
                                          metavar="SEC", min=0.01, max=7 * 86400, help=(
    "Seconds to search at most; plan without --json takes up to a quarter more for comparisons. "
    "How good the plan is then depends on the machine and its load; see --steps."))]
Steps = Annotated[int | None, typer.Option("--steps", rich_help_panel=SEARCH, metavar="N", min=0, max=10**15, help=(
    "Search for so many counted steps in place of seconds: then one seed gives one plan, on any machine, at any load. "
    "A core makes about 400,000 a second. What only some plans may do, as --layers move, never makes one longer: one "
    "without it is searched for with N steps more where it may be shorter."))]
Params = Annotated[Path | None, typer.Option("--params", rich_help_panel=SEARCH, metavar="FILE", help=(
    "A TOML file of what steers the search, in place of the usual values: see planner/params.py."))]
Verbose = Annotated[bool, typer.Option("--verbose", rich_help_panel=ANSWER, help=(
    "Also print how often each technique of the search was tried, and how often it helped."))]
Seed = Annotated[int, typer.Option("--seed", rich_help_panel=SEARCH, metavar="N", min=0, max=2**31 - 1, help=(
    "Seed of every random choice."))]
Placement = Annotated[str, typer.Option("--placement", rich_help_panel=PLANNED, metavar="given|any",
                                        autocompletion=complete_from(*PLACEMENTS), help=(
    "any: also find the virtual stages, the layers of each and the worker that holds it, in place of [placement] of "
    "the job file."))]
ShareDown = Annotated[float, typer.Option("--share-down", rich_help_panel=PLANNED, metavar="SHARE", min=1e-6, max=0.5,
                                          help="With --placement any, where failures count: the share of workers that "
                                          "are down in the mean.")]
OutFile = Annotated[Path | None, typer.Option("--out", rich_help_panel=ANSWER, metavar="FILE", help=(
    "Write the schedule to this file."))]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=ANSWER, help=(
    "Overwrite files that exist, whatever they are."))]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=ANSWER, help="Print one JSON object.")]


def take_request(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with an option for each field of the struct that is its last parameter, in place of this
    parameter."""
    signature = inspect.signature(command)
    *others, request = signature.parameters.values()
    fields = inspect.signature(request.annotation).parameters
    signature = signature.replace(parameters=[*others, *fields.values()])

    @wraps(command)
    def call_with_request(*positional: Any, **named: Any) -> None:
        arguments = signature.bind(*positional, **named).arguments
        options = {name: arguments.pop(name) for name in fields if name in arguments}
        command(**arguments, **{request.name: request.annotation(**options)})

    call_with_request.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it
    return call_with_request
