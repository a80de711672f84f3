"""Implement `slipstream reproduce`, which recomputes a figure of the documentation."""

import json as jsonlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from slipstream.cli.figures.failure_cost import reproduce_failure_cost
from slipstream.cli.figures.figure import Figure
from slipstream.cli.figures.memory_curves import reproduce_curves
from slipstream.cli.figures.unlike_layers import reproduce_unlike_layers
from slipstream.cli.shared.console import (
    LogProgress,
    err,
    out,
    print_json,
    refuse,
    watch_interrupts,
)
from slipstream.cli.shared.options import Json, require_choice, require_writable, write_or_refuse
from slipstream.cli.shared.planning import compile_planner
from slipstream.planner.budget import CountCallback
from slipstream.planner.published.unlike_layers import LARGER

FIGURES: Mapping[str, Callable[[CountCallback], Figure]] = {
    "failure-cost": reproduce_failure_cost,
    "failure-cost-exposed": partial(reproduce_failure_cost, exposed=True),
    "curves": reproduce_curves,
    "unlike-layers": reproduce_unlike_layers,
    "unlike-layers-large": partial(
        reproduce_unlike_layers, models=LARGER, name="unlike-layers-large"
    ),
}
Name = Annotated[str, typer.Argument(metavar="NAME", help=f"One of {', '.join(FIGURES)}.")]
OutFolder = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where NAME.json, NAME.md and NAME.png go.")
]
NoPicture = Annotated[
    bool, typer.Option("--no-picture", help="Leave the picture out: it needs matplotlib.")
]


def reproduce(
    name: Name,
    folder: OutFolder = Path("reproduction"),
    no_picture: NoPicture = False,
    json: Json = False,
) -> None:
    """Reproduce a table of the documentation: as table, JSON and picture.

    Computes again the results that a page of the documentation shows, and writes them as NAME.md,
    NAME.json and NAME.png. That takes minutes; a bar, or lines in a log, tell how far it is.
    """
    # Find what is missing before minutes of planning.
    require_choice("figure", name, FIGURES)
    require_writable(folder / f"{name}.json")
    draw = None if no_picture else _import_drawing()
    try:
        compile_planner()
        figure = _compute_figure(name)
    except KeyboardInterrupt:
        err.print("interrupted; nothing was written", style="yellow")
        raise typer.Exit(130) from None
    text = jsonlib.dumps(msgspec.to_builtins(figure), indent=1)
    write_or_refuse(folder / f"{name}.json", f"{text}\n".encode())
    write_or_refuse(folder / f"{name}.md", render_markdown(figure).encode())
    if draw is not None:
        write_or_refuse(folder / f"{name}.png", draw(figure))
    if json:
        print_json(msgspec.to_builtins(figure))
    else:
        _print_figure(figure)
    err.print(f"written to {folder}", soft_wrap=True)


def _import_drawing() -> Callable[[Figure], bytes]:
    try:
        from slipstream.cli.drawing.figure_plot import draw_figure
    except ImportError:
        refuse("the picture needs matplotlib: pip install -e '.[plots]', or --no-picture")
    return draw_figure


def _compute_figure(name: str) -> Figure:
    """Return the figure of this name; show progress on stderr, in a log as lines."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        watch_interrupts() as check_interrupt,
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
    ):
        task, log = bar.add_task(name, total=None), LogProgress(name, "steps")
        log.show_work("planning, for some minutes")  # the first step may take as long

        def report_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            log.show_count(done, total)
            check_interrupt()

        return FIGURES[name](report_progress)


def _format_cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print_figure(figure: Figure) -> None:
    grid = Grid(*figure.header, title=figure.title, box=None, header_style="bold")
    for row in figure.rows:
        grid.add_row(*map(_format_cell, row))
    out.print(grid)
    for name, value in figure.findings.items():
        out.print(f"{name}: {value:.4g}", soft_wrap=True)
    for assumption in figure.assumptions:
        out.print(f"assumed: {assumption}", style="dim", soft_wrap=True)


def render_markdown(figure: Figure) -> str:
    """Return a figure's title, table, findings and assumptions, in Markdown."""
    lines = [
        f"# {figure.title}",
        "",
        "| " + " | ".join(figure.header) + " |",
        "|" + "---|" * len(figure.header),
    ]
    lines += ["| " + " | ".join(map(_format_cell, row)) + " |" for row in figure.rows]
    findings = [f"- {name}: {value:.4g}" for name, value in figure.findings.items()]
    assumptions = [f"- {assumption}" for assumption in figure.assumptions]
    lines += ["", *findings, "", "Assumed:", "", *assumptions]
    return "\n".join(lines) + "\n"
