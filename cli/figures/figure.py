"""Define a reproduced figure as data, which `cli.drawing.figure_plot` draws."""

from typing import Literal

import msgspec

Cell = str | float | int | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Named series of a figure: one value for each of its x values or categories."""

    name: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    """Least value under any of the assumptions; empty if only one assumption was made."""
    high: tuple[float | None, ...] = ()
    """Largest value under any of the assumptions; empty if only one was made."""
    published: bool = False
    """True for values that a system's authors published, drawn as points."""
    is_reference: bool = msgspec.field(default=False, name="yardstick")
    """True if this is a line to compare with, and no system that exists."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """Data of one figure, to draw it or to read it without the drawing."""

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
    """Numbers that summarize the figure, by name."""
    assumptions: tuple[str, ...]
    logarithmic_x: bool = False
