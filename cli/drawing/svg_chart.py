"""Draw SVG charts for pages that work offline: lines over time, stacked bars, tornado charts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from slipstream.cli.drawing.axis import nice_step

WIDTH = 960
"""Width of a chart, in pixels."""
HEIGHT = 300
"""Height of a chart of lines, in pixels."""
NARROW_WIDTH = 470
"""Width of a chart for a narrow screen, such as a telephone's."""
LEFT = 62
"""Margin for the labels of the y axis, in pixels."""
RIGHT = 14
TOP = 12
BOTTOM = 40
"""Margin for the labels of the x axis, in pixels."""
BAR = 26
LABEL_WIDTH = 44
"""Width of a value next to a bar, in pixels."""


class StepLine(NamedTuple):
    """Line of a chart: one value for each interval between edges of the x axis."""

    name: str
    colour: str
    values: Sequence[float]
    dashed: bool = False
    thick: bool = False
    hidden: bool = False


def draw_steps(
    edges: Sequence[float], lines: Sequence[StepLine], *, x: str, y: str, top: float | None = None
) -> str:
    """Return an SVG chart of lines that are constant between consecutive `edges`.

    Parameters
    ----------
    x, y
        Names of the axes.
    top
        The y axis ends at a round number at or above it; None: the largest value.
    """
    if top is None:
        top = max((max(line.values) for line in lines), default=1.0)
    high = nice_top(top)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    begin, end = edges[0], edges[-1]

    def to_x(edge: float) -> float:
        return LEFT + (edge - begin) / (end - begin) * width

    def to_y(value: float) -> float:
        return TOP + height - value / high * height

    parts = [_open_svg(HEIGHT), *_draw_grid(begin, end, high, to_x, to_y), _draw_axis_names(x, y)]
    # A line has two points for each value, at both edges of its interval.
    for line in lines:
        points = []
        for index, value in enumerate(line.values):
            points += [f"{to_x(edge):.1f},{to_y(value):.1f}" for edge in edges[index : index + 2]]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        hidden = ' style="display: none"' if line.hidden else ""
        stroke = 2.6 if line.thick else 1.4
        parts.append(
            f'<polyline class="line"{hidden} data-name="{escape(line.name)}" fill="none" '
            f'stroke="{line.colour}" stroke-width="{stroke}"{dash} points="{" ".join(points)}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    return "\n".join([*parts, "</svg>"])


def draw_bars(
    rows: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    *,
    total: float,
    x: str,
    unit: str,
) -> str:
    """Return a chart, as HTML, with a stacked bar for each row, and its sum.

    The chart is two SVGs, for wide and for narrow screens, so that text has the same size on both.
    The page's style shows one of them.

    Parameters
    ----------
    rows
        Values by the name of the row, then by the name of the part.
    colours
        Colours by the name of the part.
    total
        Value that fills the width.
    x
        Name of the axis.
    unit
        What follows the values in tooltips.
    """
    page = ""
    for name, whole in (("wide", WIDTH), ("narrow", NARROW_WIDTH)):
        bars = _draw_bars(rows, colours, total=total, x=x, unit=unit, whole=whole)
        page += f'<div class="{name}">{bars}</div>'
    return page


def _draw_bars(
    rows: Mapping[str, Mapping[str, float]],
    colours: Mapping[str, str],
    *,
    total: float,
    x: str,
    unit: str,
    whole: int,
) -> str:
    """Return one of the two SVGs of `draw_bars`, `whole` SVG units wide."""
    height = TOP + len(rows) * (BAR + 8) + BOTTOM
    left = 150 if whole == WIDTH else 126
    width = whole - left - RIGHT - LABEL_WIDTH
    step = nice_step(total, 6 if whole == WIDTH else 4)
    marks = [index * step for index in range(int(total / step) + 1)]
    grid = [_draw_mark(left + mark / total * width, height, f"{mark:g}") for mark in marks]
    parts = [_open_svg(height, whole), *grid]
    for number, (name, values) in enumerate(rows.items()):
        y, at = TOP + number * (BAR + 8), float(left)
        parts.append(
            f'<text x="{left - 8}" y="{y + BAR / 2 + 4}" text-anchor="end">{escape(name)}</text>'
        )
        # Parts follow each other; one too thin to be seen is left out.
        for part, value in values.items():
            wide = max(0.0, value) / total * width
            if wide > 0.05:
                parts.append(
                    f'<rect x="{at:.2f}" y="{y}" width="{wide:.2f}" height="{BAR}" '
                    f'fill="{colours[part]}">'
                    f"<title>{escape(name)}: {escape(part)} {value:.4g} {unit}</title></rect>"
                )
                at += wide
        parts.append(
            f'<text x="{at + 6:.1f}" y="{y + BAR / 2 + 4}" '
            f'font-size="11">{sum(values.values()):.4g}</text>'
        )
    parts.append(
        f'<text x="{left + width / 2}" y="{height - 6}" text-anchor="middle">{escape(x)}</text>'
    )
    return "\n".join([*parts, "</svg>"])


def draw_tornado(
    rows: Sequence[tuple[str, float, float]], *, usual: float, colours: tuple[str, str], x: str
) -> str:
    """Return an SVG tornado chart: how far two settings move a result from `usual`.

    A row is a name, the result at the first setting, and that at the second; `colours` are those of
    the settings. Results are shares, drawn as percentages on an axis named `x`.
    """
    left, height = 330, TOP + len(rows) * (BAR + 8) + BOTTOM
    # The axis spans all results, in round steps.
    values = [usual, *(value for _, *pair in rows for value in pair)]
    step = nice_step(max(max(values) - min(values), 0.001), 6)
    low, high = math.floor(min(values) / step) * step, math.ceil(max(values) / step) * step
    width = WIDTH - left - RIGHT - 2 * LABEL_WIDTH

    def to_x(value: float) -> float:
        return left + LABEL_WIDTH + (value - low) / (high - low or 1.0) * width

    marks = [low + index * step for index in range(round((high - low) / step) + 1)]
    parts = [
        _open_svg(height),
        *(_draw_mark(to_x(mark), height, f"{100 * mark:.4g} %") for mark in marks),
    ]
    # A row is two half bars, each from the usual value to one setting's.
    for number, (name, *pair) in enumerate(rows):
        y = TOP + number * (BAR + 8)
        parts.append(
            f'<text x="{left - 8}" y="{y + BAR / 2 + 4}" text-anchor="end">{escape(name)}</text>'
        )
        for half, (value, colour) in enumerate(zip(pair, colours, strict=True)):
            begin, end = sorted((to_x(usual), to_x(value)))
            label_x, anchor = (end + 5, "start") if value >= usual else (begin - 5, "end")
            parts.append(
                f'<rect x="{begin:.2f}" y="{y + half * BAR / 2}" '
                f'width="{max(end - begin, 0.8):.2f}" '
                f'height="{BAR / 2 - 1}" fill="{colour}"><title>{escape(name)}: '
                f"{value:.2%}</title></rect>"
                f'<text x="{label_x:.1f}" y="{y + half * BAR / 2 + 10}" text-anchor="{anchor}" '
                f'font-size="10">{value:.1%}</text>'
            )
    # The line of the usual value covers the bars' ends.
    usual_x = to_x(usual)
    parts.append(
        f'<line class="axis" x1="{usual_x:.1f}" x2="{usual_x:.1f}" y1="{TOP - 4}" '
        f'y2="{height - BOTTOM}"/>'
        f'<text x="{left + LABEL_WIDTH + width / 2}" y="{height - 6}" '
        f'text-anchor="middle">{escape(x)}</text>'
    )
    return "\n".join([*parts, "</svg>"])


def nice_top(value: float) -> float:
    """Return an axis' end: a round number at or above `value`; 1 for 0."""
    step = nice_step(value or 1.0, 5)
    return math.ceil((value or 1.0) / step - 1e-9) * step


def _open_svg(height: float, width: int = WIDTH) -> str:
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'


def _draw_grid(
    begin: float,
    end: float,
    high: float,
    place: Callable[[float], float],
    level: Callable[[float], float],
) -> list[str]:
    parts = []
    step = nice_step(high, 5)
    for index in range(round(high / step) + 1):
        y = level(index * step)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{index * step:g}</text>'
        )
    step = nice_step(end - begin, 8)
    marks = [index * step for index in range(math.ceil(begin / step), math.floor(end / step) + 1)]
    return [*parts, *(_draw_mark(place(mark), HEIGHT, f"{mark:g}") for mark in marks)]


def _draw_mark(at: float, height: float, label: str) -> str:
    """Return SVG of a vertical grid line at x coordinate `at`, with a label."""
    return (
        f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        f'<text x="{at:.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">{label}</text>'
    )


def _draw_axis_names(x: str, y: str) -> str:
    middle = TOP + (HEIGHT - TOP - BOTTOM) / 2
    return (
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x)}</text>'
        f'<text transform="rotate(-90)" x="{-middle}" y="14" '
        f'text-anchor="middle">{escape(y)}</text>'
    )
