"""What a reproduced figure is: series to draw, a table, and what was assumed. Drawn by `cli.plots`."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

Tell = Callable[[int, int], None]
"""Called with (parts done, parts in all)."""
Cell = str | float | int | None


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values over x, or over categories. `low` and `high`: the band over assumptions."""

    name: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    published: bool = False
    """Drawn as points: measured by the authors."""
    yardstick: bool = False


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, with everything that is needed to draw it and to read it without the drawing."""

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
    """The few numbers that the figure is about."""
    assumptions: tuple[str, ...]
    logarithmic_x: bool = False


def band(name: str, by_assumption: Sequence[Sequence[float]], nominal: int, *, yardstick: bool = False) -> Series:
    """A series from one list of values for each assumption: the nominal one, between the least and the largest."""
    columns = list(zip(*by_assumption, strict=True))
    return Series(name=name, values=tuple(by_assumption[nominal]), low=tuple(map(min, columns)),
                  high=tuple(map(max, columns)), yardstick=yardstick)
