"""Implement `slipstream check`, which verifies schedules against every rule."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.shared.console import duration, out, print_error, print_json
from slipstream.cli.shared.options import (
    Json,
    ScheduleFiles,
    ScheduleInFile,
    read_schedules,
    refusal_text,
)
from slipstream.cli.shared.summaries import gap_text
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.budget import Budget
from slipstream.planner.stated_question import ContradictionError
from slipstream.schedules.check import Violation
from slipstream.schedules.check import check as violations_of
from slipstream.schedules.schedule import Schedule
from slipstream.schedules.text_excerpt import render_excerpt

MAX_GRIDS = 3
"""Largest number of violations of a schedule that are drawn; others are only listed."""

PROOF_SECONDS = 60.0
"""Time limit of CP-SAT, in seconds, for a bound that only a search can prove."""

Bound = Annotated[
    bool,
    typer.Option(
        "--bound",
        help=(
            f"Also prove the lower bound that a file states, by CP-SAT within {PROOF_SECONDS:g} s "
            "where it found it. One of version 0.1 for layers that move may be more than can be "
            "proven."
        ),
    ),
]


def check(files: ScheduleFiles, bound: Bound = False, json: Json = False) -> None:
    """Check schedules against every rule, independently of how they were made.

    Exits 1 when a rule is broken, and draws the ops around the first three violations of each file.
    A bound in a file is a claim: --bound proves it again, and exits 1 when it cannot, or when the
    file contradicts itself about the job. Exits 2 when a file cannot be read, after all other files
    have been checked.
    """
    answers: list[dict[str, object]] = []
    bounds: list[dict[str, object]] = []
    unreadable: list[dict[str, object]] = []
    checked = 0
    for file, schedule in _read_schedules(files, unreadable):
        checked += 1
        violations = violations_of(schedule)
        # A bound is proven again only where the rules are kept: its proofs assume them.
        proven = None
        if bound and not violations:
            try:
                proven = proven_bound(schedule, Budget.of_seconds(PROOF_SECONDS)).ticks
            except ContradictionError as error:
                violations = [Violation("bound", str(error))]
        answers += [_violation_report(violation, schedule, file) for violation in violations]
        if proven is not None:
            claimed = schedule.lower_bound_ticks
            bounds.append(
                {
                    "file": str(file),
                    "scope": schedule.scope,
                    "claimed": schedule.seconds(claimed),
                    "proven": schedule.seconds(proven),
                    "verified": proven >= claimed,
                }
            )
        if not json:
            _print_report(file, schedule, violations, proven)
    # Unreadable files have been reported by name; they end the command only now.
    if json and (checked or not unreadable):
        report: dict[str, object] = {"violations": answers}
        if bound:
            report["bounds"] = bounds
        if unreadable:
            report["unreadable"] = unreadable
        print_json(report)
    if unreadable:
        raise typer.Exit(2)
    if answers or not all(bound_report["verified"] for bound_report in bounds):
        raise typer.Exit(1)


def _read_schedules(
    files: Sequence[Path], unreadable: list[dict[str, object]]
) -> Iterator[ScheduleInFile]:
    """Yield schedules of files and tables; print unreadable ones, and add them to `unreadable`."""
    for path in files:
        try:
            yield from read_schedules(path)
        except ValueError as error:
            unreadable.append({"file": str(path), "error": refusal_text(path, error)})
            print_error(" ".join(refusal_text(path, error).split()))


def _describe_bound(schedule: Schedule, proven: int | None) -> str:
    """Return a clause on a file's bound, and the ticks `proven` (None: not tried)."""
    # A file may state no bound, one that was not to be proven here, or one that was.
    claimed = duration(schedule.seconds(schedule.lower_bound_ticks))
    if schedule.gap is None:
        return (
            "it claims no lower bound"
            if not proven
            else f"it claims no lower bound; {duration(schedule.seconds(proven))} "
            f"{schedule.scope.description} is proven"
        )
    if proven is None:
        claim = (
            "optimal"
            if schedule.status == "optimal"
            else f"at most {gap_text(schedule.gap)} above the best possible"
        )
        return (
            f"it claims to be {claim} {schedule.scope.description} (bound {claimed}); --bound "
            "verifies that"
        )
    if proven < schedule.lower_bound_ticks:
        return (
            f"its bound, {claimed}, could not be proven; {duration(schedule.seconds(proven))} could"
        )
    return f"its bound, {claimed} {schedule.scope.description}, is proven" + (
        ": it is optimal" if schedule.status == "optimal" else ""
    )


def _violation_report(violation: Violation, schedule: Schedule, file: Path) -> dict[str, object]:
    """Return a violation as an object of the JSON answer, with `start` in seconds."""
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


def _print_report(
    file: Path, schedule: Schedule, violations: list[Violation], proven: int | None
) -> None:
    if not violations:
        out.print(
            f"{file}: valid: {len(schedule.seats)} workers, period "
            f"{duration(schedule.seconds(schedule.period_ticks))}; "
            f"{_describe_bound(schedule, proven)}",
            style="green",
            soft_wrap=True,
        )
        return
    # List all violations, but draw the ops around the first few only: a drawing takes many lines.
    count = f"{len(violations)} violation{'s' if len(violations) > 1 else ''}"
    out.print(f"{file}: {count}", style="bold red", soft_wrap=True)
    drawn = 0
    for violation in violations:
        out.print(f"  {violation}", soft_wrap=True)
        if drawn < MAX_GRIDS and (
            excerpt := render_excerpt(schedule, violation.op, violation.worker)
        ):
            out.print(excerpt, style="dim", no_wrap=True, crop=False, overflow="ignore")
            drawn += 1
