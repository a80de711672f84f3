"""Writes job files: tables of plain data, with a comment above each, and times rounded to a common step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 4
"""Digits of the longest time of a job. Finer times are below what is measured, and slow the planner down."""


def job_text(tables: Mapping[str, Any], comments: Mapping[str, Sequence[str]]) -> str:
    """A job file. `comments`: the lines above each table by its name; "" for those at the top of the file."""
    lines = [f"# {line}" for line in comments.get("", ())]
    lines += [f"{key} = {_toml(value)}" for key, value in tables.items() if not isinstance(value, dict)]
    for name, table in tables.items():
        if isinstance(table, dict) and table:
            lines += ["", *(f"# {line}" for line in comments.get(name, ())), f"[{name}]"]
            lines += [f"{_key(key)} = {_toml(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def rounded(seconds: Sequence[float], longest: float | None = None) -> list[float]:
    """Times rounded to a common step, so that ticks stay coarse: `DIGITS` digits of the longest (default: of these)."""
    longest = max(seconds) if longest is None else longest
    if not longest:
        return [0.0] * len(seconds)
    step = 10.0 ** (math.floor(math.log10(longest)) - DIGITS + 1)
    return [float(f"{round(value / step) * step:.12g}") for value in seconds]


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _toml(key)


def _toml(value: Any) -> str:
    """A value of a job file's table, in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(one if one.isprintable() else f"\\U{ord(one):08X}" for one in escaped) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return repr(value)
