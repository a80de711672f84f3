"""Draw pictures of reproduced figures with matplotlib (the extra `plots`)."""

import io
import textwrap
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.ticker import ScalarFormatter

from slipstream.cli.figures.figure import Figure, Series

COLOURS = (
    "#0b6e4f",
    "#e69f00",
    "#0072b2",
    "#cc79a7",
    "#555555",
    "#aaaaaa",
    "#d55e00",
    "#7a5195",
    "#56b4e9",
)
MARKERS = "osD^vP"
MAX_HORIZONTAL_NAMES = 8
"""Largest number of groups of bars whose names are horizontal; more names would overlap."""


def draw_figure(figure: Figure) -> bytes:
    """Return the picture of a figure as PNG. Changes `matplotlib.rcParams`.

    The figure has at most as many published series as there are `MARKERS`, and as many others as
    there are `COLOURS`. Bars show published series only if there are as many others.
    """
    mpl.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    picture = Picture(figsize=(9.5, 5.6), dpi=130, layout="constrained")
    axes = picture.subplots()
    if figure.kind == "bars":
        _plot_bars(axes, figure)
    else:
        _plot_lines(axes, figure)
    axes.set_title(figure.title, loc="left", fontweight="bold")
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e5e8eb")
    axes.set_axisbelow(True)
    picture.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def _floats(values: tuple[float | None, ...]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    return np.array(values, dtype=float)  # None becomes not-a-number


def _plot_lines(axes: Axes, figure: Figure) -> None:
    x = np.array(figure.x, dtype=float)
    colours = iter(COLOURS)
    markers = iter(MARKERS)
    for number, line in enumerate(figure.series):
        if line.published:
            axes.plot(
                x,
                _floats(line.values),
                linestyle="none",
                marker=next(markers),
                color="black",
                fillstyle="none",
                label=line.name,
            )
            continue
        colour = next(colours)
        # The first is seen where others lie on it.
        axes.plot(
            x,
            _floats(line.values),
            linestyle="--" if line.is_reference else "-",
            color=colour,
            label=line.name,
            linewidth=1.5 if number else 4,
        )
        if line.low:
            axes.fill_between(
                x, _floats(line.low), _floats(line.high), color=colour, alpha=0.13, linewidth=0
            )
    if figure.logarithmic_x:
        axes.set_xscale("log", base=2)
        axes.set_xticks(x)
        axes.xaxis.set_major_formatter(ScalarFormatter())


def _plot_bars(axes: Axes, figure: Figure) -> None:
    # Drawn series stand side by side around the place of their group.
    places = np.arange(len(figure.x))
    drawn = [series for series in figure.series if not series.published]
    points = [series for series in figure.series if series.published]
    width = 0.8 / len(drawn)
    for number, series in enumerate(drawn):
        at = places + (number - (len(drawn) - 1) / 2) * width
        values = _floats(series.values)
        axes.bar(
            at,
            values,
            width * 0.92,
            color=COLOURS[number],
            label=series.name,
            yerr=_y_errors(series),
            capsize=2,
            error_kw={"linewidth": 0.9},
        )
        # Published values lie on the bar that they belong to.
        if number < len(points) and len(points) == len(drawn):
            axes.plot(
                at,
                _floats(points[number].values),
                linestyle="none",
                marker=MARKERS[number],
                color="black",
                markerfacecolor="white",
                label=points[number].name,
                zorder=5,
            )
    slanted: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(
        places,
        [textwrap.fill(str(label), 18) for label in figure.x],
        fontsize=8,
        **(slanted if len(figure.x) > MAX_HORIZONTAL_NAMES else {}),
    )


def _y_errors(series: Series) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]] | None":
    if not series.low:
        return None
    values = _floats(series.values)
    return np.array([values - _floats(series.low), _floats(series.high) - values])
