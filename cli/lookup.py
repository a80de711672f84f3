"""Implement `slipstream lookup`, which finds a table's schedule for down workers."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from slipstream.cli.shared.console import (
    complete_from,
    duration,
    err,
    exit_negative,
    out,
    print_json,
    refuse,
)
from slipstream.cli.shared.options import (
    Failed,
    FailedNode,
    Force,
    Json,
    OutFile,
    encode_or_refuse,
    failed_workers,
    load_table_or_refuse,
    parse_workers,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.planning import compile_planner, find_recomputation
from slipstream.cli.shared.summaries import role_change_lines
from slipstream.planner.job.file import Job, JobError, parse_job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import normalised
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.planner.recompute import with_bound_of_choices
from slipstream.planner.report import layers_received
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.file import TableError
from slipstream.schedules.tables.pattern import dead_column, settled_key
from slipstream.schedules.tables.table import Table, library_names

PLAN_SECONDS = 10.0
"""Time limit, in seconds, of planning for failures that the table does not cover."""

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        autocompletion=complete_from(*library_names()),
        help=(
            "The table's folder, or the name of one that comes with Slipstream: "
            f"{', '.join(library_names())}."
        ),
    ),
]
Normalise = Annotated[
    bool,
    typer.Option(
        "--normalise",
        help=(
            "Let live workers take over roles of other stages, whose layers they load first, "
            "where that shortens the period."
        ),
    ),
]
Settled = Annotated[
    bool,
    typer.Option(
        "--settled",
        help=(
            "The answer to come to, for which layers move, instead of the one that runs at once."
        ),
    ),
]
AT_ONCE = "at once"
"""Kind of answer in which all layers stay in place."""
ROLES_MOVED = "roles moved"
"""Kind of answer in which live workers take over roles of dead ones."""
SETTLED = "settled"
"""Kind of answer in which layers move to even out the load."""


class _Answer(msgspec.Struct, frozen=True):
    """Schedule that answers a look-up, its entry, and the seconds that it took."""

    # Key of the schedule's entry in the table; None: the schedule was planned on the spot.
    key: str | None
    schedule: Schedule
    seconds: float

    @property
    def kind(self) -> str:
        """Kind of this answer: `AT_ONCE`, `ROLES_MOVED` or `SETTLED`."""
        if self.key is not None and self.key.startswith(settled_key("")):
            return SETTLED
        if self.schedule.moves:
            return ROLES_MOVED
        return SETTLED if layers_received(self.schedule) else AT_ONCE


def lookup(
    folder: Folder,
    failed: Failed = None,
    failed_node: FailedNode = None,
    normalise: Normalise = False,
    settled: Settled = False,
    out_file: OutFile = None,
    force: Force = False,  # noqa: ARG001  # read by the overwrite guard
    json: Json = False,
) -> None:
    """Look up the schedule for the workers that are down, and say who plays which role.

    The answer that runs at once leaves all layers in place. Failures that the table does not cover
    are planned on the spot, with list schedulers.
    """
    down = parse_workers("--failed", failed or [])
    require_writable(out_file)
    # Find the answer in the table, or plan it, if the table does not cover these failures.
    if normalise and settled:
        refuse("--normalise moves whole roles, --settled any layers: take one")
    table = load_table_or_refuse(folder)
    try:
        if failed_node:
            down = failed_workers(_read_job(table), failed, failed_node)
        answer = _look_up_entry(table, down, normalise=normalise, settled=settled) or _plan_answer(
            table, down, normalise=normalise, settled=settled
        )
    except TableError as error:
        refuse(error)
    except ValueError as error:
        refuse(f"--failed: {error}")
    violations = check(answer.schedule)
    if violations:
        raise AssertionError(f"lookup gave a schedule that breaks a rule: {violations[0]}")
    if out_file is not None:
        write_or_refuse(out_file, encode_or_refuse(answer.schedule))
    if json:
        print_json(_build_answer(answer))
        return
    _print_answer(answer, table)
    if out_file is not None:
        err.print(f"written to {out_file}", soft_wrap=True)


def _look_up_entry(
    table: Table, down: tuple[Worker, ...], *, normalise: bool, settled: bool
) -> _Answer | None:
    """Return the table's answer for the workers `down`; None if it has no entry."""
    look_up = partial(
        table.lookup, down, settled=settled, roles_move=normalise, nodes=_read_job(table).nodes
    )
    result = look_up()  # the first use of an entry checks it: the second is timed
    if result is None:
        return None
    start_time = time.perf_counter()
    result = look_up()
    seconds = time.perf_counter() - start_time
    assert result is not None
    return _Answer(result.key, result.schedule, seconds)


def _plan_answer(
    table: Table, down: tuple[Worker, ...], *, normalise: bool, settled: bool
) -> _Answer:
    # What the table covers, to explain why it has no answer.
    names = ", ".join(map(str, down)) or "no worker"
    limit = table.index.max_failures
    coverage = f"up to {limit} failure{'s' * (limit != 1)}" + (
        " and their patterns" if table.index.exact else ""
    )
    if any(row.nodes for row in table.rows()):
        coverage += " and one or two nodes"
    coverage += (
        " that leave every stage a live worker"
        if dead_column(down, table.basis.grid) is not None
        else ""
    )
    # Say why it takes longer than a lookup.
    if not (normalise or settled) and table.lookup(down, roles_move=True) is not None:
        err.print(
            f"{names} down: in the table only with roles moved (--normalise); planning on the "
            "spot with layers in place",
            style="yellow",
            soft_wrap=True,
        )
    else:
        kept = (
            "" if normalise or settled else " with layers in place (with layers moved: --settled)"
        )
        err.print(
            f"{names} down: not in the table, which covers {coverage}; planning on the spot{kept}",
            style="yellow",
            soft_wrap=True,
        )
    # Plan with the table's own options, so that the answer could be one of its entries.
    start_time = time.monotonic()
    basis, job = table.basis, _read_job(table)
    options = PlanOptions(
        backward=basis.backward,
        optimizer=basis.optimizer,
        method="greedy",
        seed=basis.seed,
        time_limit=PLAN_SECONDS,
        layers="move" if settled else "fixed",
        slices=settled,
    )
    try:
        compile_planner()
        # As for the table's entries.
        recomputation = find_recomputation(table.folder / "job.toml", job, options)
        given, job = job, job if recomputation is None else recomputation.job
        plan = normalised(job, down, options) if normalise else plan_only(options, job, down)
        schedule = (
            plan.schedule
            if recomputation is None
            else with_bound_of_choices(plan.schedule, given, options, down)
        )
    except JobError as error:
        refuse(error)
    except NoPlanError as error:
        exit_negative(error)
    return _Answer(None, schedule, time.monotonic() - start_time)


def _read_job(table: Table) -> Job:
    """Return the job that the table was planned for. Exits 2 if its job file is invalid."""
    try:
        return parse_job(table.job_text().decode(), f"{table.folder / 'job.toml'}")
    except (JobError, UnicodeDecodeError) as error:
        refuse(error)


def _build_answer(answer: _Answer) -> dict[str, object]:
    schedule = answer.schedule
    return {
        "period": schedule.seconds(schedule.period_ticks),
        "key": answer.key,
        "answer": answer.kind,
        "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        "lookup_seconds": round(answer.seconds, 6),
        "gap": schedule.gap,
        "status": schedule.status,
        "layers_moved": sum(map(len, layers_received(schedule).values())),
    }


def _print_answer(answer: _Answer, table: Table) -> None:
    schedule = answer.schedule
    how = f"{answer.kind}, " + (
        f"entry {answer.key}" if answer.key is not None else "planned on the spot"
    )
    whole = next((row.period for row in table.rows() if row.failures == 0), None)
    period = schedule.seconds(schedule.period_ticks)
    share = f", throughput {whole / period:.1%} of fault-free" if whole else ""
    out.print(
        f"period {duration(period)}{share}; {how}, in {duration(answer.seconds)}", soft_wrap=True
    )
    moved = sum(map(len, layers_received(schedule).values()))
    for line in [
        *(role_change_lines(schedule) or ["every live worker keeps its role"]),
        *([f"layers to move: {moved}"] if moved else []),
    ]:
        out.print(line, soft_wrap=True)
