"""`slipstream benchmark`: simulates all policies on a versioned set of cases."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from slipstream.cli.drawing.benchmark_page import HEAD, benchmark_page, shown, summary, table_rows
from slipstream.cli.drawing.benchmark_text import COLUMNS, benchmark_markdown
from slipstream.cli.fleet import (
    CASES,
    GROUP,
    POLICIES,
    VERSION,
    CaseResult,
    EntryError,
    Fidelity,
    Policy,
    Returned,
    Table,
    fidelity,
    installed_policy,
    read_entry,
    returned,
    run_case,
)
from slipstream.cli.shared.console import err, near, out, print_json, refuse
from slipstream.cli.shared.inputs import require_writable, write_or_refuse
from slipstream.cli.shared.options import ANSWER, Json
from slipstream.cli.shared.planning import compile_planner

RUN, TAKING_PART = "What is run", "Who takes part"
"""Groups of options in the help."""

Names = Annotated[list[str] | None, typer.Option("--case", rich_help_panel=RUN, metavar="NAME", help=(
    f"Only this case; may be repeated. Known: {', '.join(CASES)}."))]
Policies = Annotated[list[str] | None, typer.Option("--policy", rich_help_panel=TAKING_PART, metavar="NAME", help=(
    f"Only this policy; may be repeated. Known: {', '.join(POLICIES)}."))]
Entries = Annotated[list[str] | None, typer.Option("--entry", rich_help_panel=TAKING_PART, metavar="FILE|NAME", help=(
    f"Another system: a table (JSON), or the name of an installed entry point of the group {GROUP}; may be repeated."))]
Seeds = Annotated[int, typer.Option("--seeds", rich_help_panel=RUN, metavar="N", min=1, max=1000, help=(
    "Draw so many traces of each case."))]
Processes = Annotated[int, typer.Option("--processes", rich_help_panel=RUN, metavar="N", min=1, max=256, help=(
    "Simulate so many seeds at a time."))]
Folder = Annotated[Path, typer.Option("--out", rich_help_panel=ANSWER, metavar="DIR", help=(
    "Where benchmark.json, .html and .md go."))]


def benchmark(case: Names = None, policy: Policies = None, entry: Entries = None, seeds: Seeds = 5,
              processes: Processes = 2, folder: Folder = Path("benchmark"), json: Json = False) -> None:
    """Simulate all policies, and systems of others, on a versioned set of jobs and failures, with fixed seeds.

    Writes one page, its tables in Markdown, and one JSON file. What each policy is taken from, and how far it is from
    its published figures, is part of them.
    """
    names = _known(case, CASES, "--case")
    chosen = _known(policy, POLICIES, "--policy") if policy else []
    entries = [_entry(name) for name in entry or ()]
    _require_names(entries)
    for name in ("benchmark.json", "benchmark.html", "benchmark.md"):
        require_writable(folder / name)
    compile_planner()
    results: list[CaseResult] = []
    try:
        with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err,
                      transient=True, disable=not err.is_terminal) as bar:
            task = bar.add_task("", total=None)
            for name in names:
                results.append(run_case(
                    CASES[name], seeds=seeds, processes=processes, names=chosen, entries=entries,
                    progress=lambda text, name=name: bar.update(task, description=f"{name}: {text}")))  # type: ignore[misc]
            bar.update(task, description="published figures")
            near_published = fidelity(results)
    except EntryError as error:
        refuse(f"--entry {error}")
    except KeyboardInterrupt:
        err.print("interrupted; nothing was written", style="yellow")
        raise typer.Exit(130) from None
    back = returned(results)
    report = _report(results, near_published, back, seeds)
    write_or_refuse(folder / "benchmark.json", f"{jsonlib.dumps(report, indent=1)}\n".encode())
    write_or_refuse(folder / "benchmark.html", benchmark_page(results, near_published, back, seeds))
    write_or_refuse(folder / "benchmark.md", benchmark_markdown(results, near_published, back).encode())
    if json:
        print_json(report)
    else:
        _print(results, near_published, back)
    err.print(f"written to {folder}", soft_wrap=True)


def _known(given: list[str] | None, known: object, option: str) -> list[str]:
    names = list(known)  # type: ignore[call-overload]
    for name in given or ():
        if name not in names:
            refuse(f"{option} {name}: expected one of {', '.join(names)}{near(name, names)}")
    return [name for name in names if not given or name in given]


def _entry(name: str) -> Table | type[Policy]:
    try:
        if Path(name).suffix == ".json":
            return read_entry(Path(name))
        kind = installed_policy(name)
    except EntryError as error:
        refuse(f"--entry {error}")
    if kind is None:
        refuse(f"--entry {name}: neither a .json file nor an installed entry point of the group {GROUP}")
    return kind


def _require_names(entries: list[Table | type[Policy]]) -> None:
    """End the command where two systems have one name, or a table has a case that is not of the set."""
    taken = set(POLICIES)
    for one in entries:
        if one.name in taken:
            refuse(f"--entry {one.name}: another system has this name; expected one of its own")
        taken.add(one.name)
        for name in one.cases if isinstance(one, Table) else ():
            if name not in CASES:
                refuse(f"--entry {one.name}: cases.{name}: expected one of {', '.join(CASES)}{near(name, CASES)}")


def _report(results: list[CaseResult], near_published: list[Fidelity], back: list[Returned], seeds: int) -> \
        dict[str, object]:
    return {
        "set": VERSION, "seeds": seeds, "cases": msgspec.to_builtins(results),
        "summary": {result.case.name: {one.name: {
            "goodput": one.spread(lambda measures: measures.goodput).mean,
            "goodput_deviation": one.spread(lambda measures: measures.goodput).deviation,
            "ettr": one.spread(lambda measures: measures.ettr).mean} for one in result.policies} for result in results},
        "published": [{**msgspec.to_builtins(one), "off": one.off} for one in near_published],
        "returned": msgspec.to_builtins(back)}


def _print(results: list[CaseResult], near_published: list[Fidelity], back: list[Returned]) -> None:
    for result in results:
        out.print(f"{result.case.name}: {result.case.title}", style="bold", soft_wrap=True)
        grid = Grid(*(HEAD[column] for column in COLUMNS), box=None, header_style="bold")
        for is_reference, cells in table_rows(result):
            grid.add_row(*(cells[column] for column in COLUMNS), style="dim" if is_reference else None)
        out.print(grid)
    out.print(summary(results), soft_wrap=True)
    for one in near_published:
        out.print(f"{one.policy}, {one.what}: published {one.published:.4g}, simulated {one.simulated:.4g}, "
                  f"{one.off:+.1%}", style="dim", soft_wrap=True)
    for other in back:
        out.print(f"{other.case}: {other.policy} lacks {shown(other.missing)} of the time; slipstream brings back "
                  f"{shown(other.back)}; of its own fault-free throughput it keeps {shown(other.kept)} more",
                  soft_wrap=True)
