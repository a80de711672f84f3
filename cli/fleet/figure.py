"""A reproduced figure as data: series to draw, a table, and the assumptions. `cli.drawing.figure_plot` draws it."""

from typing import Literal

import msgspec

Cell = str | float | int | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values over x, or over categories."""

    name: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    """The least value under any of the assumptions; empty where only one was made."""
    high: tuple[float | None, ...] = ()
    """The largest value under any of the assumptions."""
    published: bool = False
    """Whether the values are the authors' measurements; drawn as points."""
    is_reference: bool = msgspec.field(default=False, name="yardstick")
    """Whether this is only a line to compare with, and not a system that exists."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, with all that is needed to draw it, and to read it without the drawing."""

    name: str
    title: str
    kind: Literal["lines", "bars"]
    x_label: str
    y_label: str
    x: tuple[float, ...] | tuple[str, ...]
    series: tuple[Series, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    findings: dict[str, float]
    """The few numbers that the figure is about, by name."""
    assumptions: tuple[str, ...]
    logarithmic_x: bool = False
