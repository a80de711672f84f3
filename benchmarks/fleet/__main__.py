"""Define the command of the benchmark: see `--help`."""

import json as jsonlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from benchmarks.fleet.cases import CASES, Report, read_report, run_case
from benchmarks.fleet.page import HEAD, benchmark_page, shown, summary, table_rows
from benchmarks.fleet.text import COLUMNS, benchmark_markdown
from slipstream.cli.shared.console import err, out, print_json, refuse, suggest
from slipstream.cli.shared.options import (
    ANSWER,
    Json,
    may_exist,
    require_choice,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.planning import compile_planner
from slipstream.planner.simulation import (
    ENTRY_POINT_GROUP,
    POLICIES,
    EntryError,
    EntryTable,
    Policy,
    load_installed_policy,
    read_entry,
)

RUN = "What is run"
"""Group of options in the help."""
TAKING_PART = "Who takes part"
"""Group of options in the help."""

Names = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        rich_help_panel=RUN,
        metavar="NAME",
        help=(f"Only this case; may be repeated. Known: {', '.join(CASES)}."),
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        rich_help_panel=TAKING_PART,
        metavar="NAME",
        help=(f"Only this policy; may be repeated. Known: {', '.join(POLICIES)}."),
    ),
]
Entries = Annotated[
    list[str] | None,
    typer.Option(
        "--entry",
        rich_help_panel=TAKING_PART,
        metavar="FILE|NAME",
        help=(
            "Another system: a table (JSON), or the name of an installed entry point of the group "
            f"{ENTRY_POINT_GROUP}; may be repeated."
        ),
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        "--seeds",
        rich_help_panel=RUN,
        metavar="N",
        min=1,
        max=1000,
        help=("Draw so many traces of each case."),
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        rich_help_panel=RUN,
        metavar="N",
        min=1,
        max=256,
        help=("Simulate so many seeds at a time."),
    ),
]
Folder = Annotated[
    Path,
    typer.Option(
        "--out",
        rich_help_panel=ANSWER,
        metavar="DIR",
        help=("Where benchmark.json, .html and .md go; they are written anew after each case."),
    ),
]
Add = Annotated[
    bool,
    typer.Option(
        "--add", rich_help_panel=ANSWER, help=("Keep the other cases that DIR/benchmark.json has.")
    ),
]


def benchmark(
    case: Names = None,
    policy: Policies = None,
    entry: Entries = None,
    seeds: Seeds = 5,
    processes: Processes = 2,
    folder: Folder = Path("benchmark"),
    add: Add = False,
    json: Json = False,
) -> None:
    """Simulate all policies, and systems of others, on a versioned set of cases.

    A case has a job, failures and fixed seeds. Writes one page, its tables in Markdown, and one
    JSON file. They include the source of each policy, and how far it is from its published figures.
    Ctrl-C keeps the cases that were finished.
    """
    names = _known(case, CASES, "--case")
    chosen = _known(policy, POLICIES, "--policy") if policy else []
    entries = [_entry(name) for name in entry or ()]
    _require_names(entries)
    for name in ("benchmark.json", "benchmark.html", "benchmark.md"):
        require_writable(folder / name)
    report = _earlier(folder / "benchmark.json") if add else Report()
    compile_planner()
    finished = 0
    try:
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        ) as bar:
            task = bar.add_task("published figures", total=None)
            for name in names:
                began = os.times()
                result = run_case(
                    CASES[name],
                    seeds=seeds,
                    processes=processes,
                    names=chosen,
                    entries=entries,
                    progress=lambda text, name=name: bar.update(  # type: ignore[misc]
                        task, description=f"{name}: {text}"
                    ),
                )
                report = report.with_case(result, sum(os.times()[:4]) - sum(began[:4]))
                _write(report, folder)
                finished += 1
    except EntryError as error:
        refuse(f"--entry {error}")
    except KeyboardInterrupt:
        err.print(
            "interrupted; " + ("some cases are missing" if finished else "nothing was written"),
            style="yellow",
        )
        raise typer.Exit(130) from None
    if json:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report)
    err.print(f"written to {folder}", soft_wrap=True)


def _write(report: Report, folder: Path) -> None:
    text = jsonlib.dumps(msgspec.to_builtins(report), indent=1)
    write_or_refuse(folder / "benchmark.html", benchmark_page(report))
    write_or_refuse(folder / "benchmark.md", benchmark_markdown(report).encode())
    write_or_refuse(folder / "benchmark.json", f"{text}\n".encode())


def _earlier(path: Path) -> Report:
    """Return the report of this set's version in the file, or an empty one."""
    if not may_exist(path):
        return Report()
    try:
        return read_report(path)
    except EntryError as error:
        refuse(f"--add: {error}")


def _known(given: list[str] | None, names: Collection[str], option: str) -> list[str]:
    for name in given or ():
        require_choice(option, name, names)
    return [name for name in names if not given or name in given]


def _entry(name: str) -> EntryTable | type[Policy]:
    try:
        if Path(name).suffix == ".json":
            return read_entry(Path(name))
        kind = load_installed_policy(name)
    except EntryError as error:
        refuse(f"--entry {error}")
    if kind is None:
        refuse(
            f"--entry {name}: neither a .json file nor an installed entry point of the group "
            f"{ENTRY_POINT_GROUP}"
        )
    return kind


def _require_names(entries: list[EntryTable | type[Policy]]) -> None:
    """Exit if two systems share a name, or a table has an unknown case."""
    taken = set(POLICIES)
    for entry in entries:
        if entry.name in taken:
            refuse(f"--entry {entry.name}: another system has this name; expected one of its own")
        taken.add(entry.name)
        for name in entry.cases if isinstance(entry, EntryTable) else ():
            if name not in CASES:
                refuse(
                    f"--entry {entry.name}: cases.{name}: expected one of "
                    f"{', '.join(CASES)}{suggest(name, CASES)}"
                )


def _print(report: Report) -> None:
    for result in report.cases:
        out.print(f"{result.case.name}: {result.case.title}", style="bold", soft_wrap=True)
        grid = Grid(*(HEAD[column] for column in COLUMNS), box=None, header_style="bold")
        for is_reference, cells in table_rows(result):
            grid.add_row(
                *(cells[column] for column in COLUMNS), style="dim" if is_reference else None
            )
        out.print(grid)
        err.print(
            f"note: {result.case.name}: {result.seeds} seeds, "
            f"{report.cpu_seconds[result.case.name]:.0f} s of processors",
            style="dim",
            soft_wrap=True,
        )
    out.print(summary(report.cases), soft_wrap=True)
    for figure in report.published:
        policy, what, there, here, off = figure.cells
        out.print(
            f"{policy}, {what}: published {there}, simulated {here}, {off}",
            style="dim",
            soft_wrap=True,
        )
    for other in report.returned:
        out.print(
            f"{other.case}: {other.policy} lacks {shown(other.missing)} of the time; slipstream "
            f"brings back {shown(other.back)}; of its own fault-free throughput it keeps "
            f"{shown(other.kept)} more",
            soft_wrap=True,
        )


if __name__ == "__main__":
    typer.run(benchmark)
