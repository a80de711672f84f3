"""Choose round numbers for axes."""

import math


def nice_step(span: float, count: int) -> float:
    """Return the smallest round step that divides `span` into at most `count` parts.

    A round step is 1, 2 or 5 times a power of ten. A span below 1e-12 counts as 1e-12.
    """
    rough = max(span, 1e-12) / count
    power = 10 ** math.floor(math.log10(rough))
    return next(
        float(factor * power) for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)
    )


def label_times(seconds: float, step: float) -> list[tuple[float, str]]:
    """Return pairs (time, label) every `step` seconds, from 0 to before `seconds`.

    Only the first label has the unit (s, ms or us): `0 ms`, `20`, `40`.
    """
    unit, name = next(
        ((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if step * 2 >= unit),
        (1e-6, "us"),
    )
    labels = []
    for index in range(math.ceil(seconds / step)):
        suffix = f" {name}" if not index else ""
        labels.append((index * step, f"{index * step / unit:g}{suffix}"))
    return labels
