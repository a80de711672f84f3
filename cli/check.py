"""`slipstream check`: verifies schedules against every rule."""

from pathlib import Path

import typer

from cli.shared.console import duration, out, print_json
from cli.shared.inputs import read_schedule_or_refuse
from cli.shared.options import Json, ScheduleFiles
from schedules.check import Violation
from schedules.check import check as violations_of
from schedules.schedule import Schedule
from schedules.text_excerpt import render_excerpt

MAX_GRIDS = 3
"""Violations of a file that are drawn; the others are only named."""



def check(files: ScheduleFiles, json: Json = False) -> None:
    """Check schedules against every rule, independently of how they were made.

    Exits 1 when a rule is broken, and draws the ops around the one that breaks it.
    """
    answers: list[dict[str, object]] = []
    for file in files:
        schedule = read_schedule_or_refuse(file)
        violations = violations_of(schedule)
        answers += [_violation_report(violation, schedule, file) for violation in violations]
        if not json:
            _print(file, schedule, violations)
    if json:
        print_json({"violations": answers})
    if answers:
        raise typer.Exit(1)


def _violation_report(violation: Violation, schedule: Schedule, file: Path) -> dict[str, object]:
    """A violation as an object of the JSON answer; `start` in seconds."""
    op = violation.op
    slice = op.slice if op is not None else None
    worker = op.worker if op is not None else violation.worker
    return {
        "file": str(file),
        "rule": violation.rule,
        "message": violation.message,
        "op": str(op.kind) if op is not None else None,
        "worker": str(worker) if worker is not None else None,
        "stage": slice if slice is not None and slice < len(schedule.grid.stages) else None,
        "layers": schedule.layers_of(slice) if slice is not None else None,
        "pipeline": op.pipeline if op is not None else None,
        "microbatch": op.microbatch if op is not None else None,
        "start": schedule.seconds(op.start_ticks) if op is not None else None,
    }


def _print(file: Path, schedule: Schedule, violations: list[Violation]) -> None:
    if not violations:
        out.print(f"{file}: valid: {len(schedule.seats)} workers, period "
                  f"{duration(schedule.seconds(schedule.period_ticks))}, {schedule.status}",
                  style="green", markup=False, highlight=False, soft_wrap=True)
        return
    count = f"{len(violations)} violation{'s' if len(violations) > 1 else ''}"
    out.print(f"{file}: {count}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    drawn = 0
    for violation in violations:
        out.print(f"  {violation}", markup=False, highlight=False, soft_wrap=True)
        if drawn < MAX_GRIDS and (excerpt := render_excerpt(schedule, violation.op, violation.worker)):
            out.print(excerpt, style="dim", markup=False, highlight=False, no_wrap=True, crop=False, overflow="ignore")
            drawn += 1
