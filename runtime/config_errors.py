"""Turn msgspec's messages about a table of the job file into ones that name keys."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

MAX_LISTED_KEYS = 16
"""Largest number of keys of a table that an error message lists."""
_NO_FLOAT16 = ": float16 needs loss scaling, which is not supported; bf16 needs none"
_KEY_PATTERN = re.compile(r" - at `\$\.(\w+)(?:\[(\d+)\])?")
"""Pattern of msgspec's wrong key and, for a list, the index of the wrong entry."""
_REMOVED_KEYS = {"training.degraded_ranks": "a worker that has lost a rank is down until it is whole again: leave it "
                                            "out"}
"""Keys of the job file that earlier versions had, each with what to do instead."""
_MISSING_KEY_PATTERN = re.compile(r"missing required field `(\w+)`")


def explain_validation_error(name: str, values: Mapping[str, object], kind: type[msgspec.Struct], error: str) -> str:
    """Return one line on why the `values` of the table `name` are no `kind`. The text `error` is
    msgspec's message."""
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    unknown = next((key for key in values if key not in types), None)
    if unknown is not None and (instead := _REMOVED_KEYS.get(f"{name}.{unknown}")):
        return f"{name}.{unknown} was removed; {instead}"
    if unknown is not None:
        near = difflib.get_close_matches(unknown, types, 1)
        hint = f"did you mean {name}.{near[0]}?" if near else "docs/configuration.md lists all keys" \
            if len(types) > MAX_LISTED_KEYS else f"known: {', '.join(types)}"
        return f"unknown key {name}.{unknown}; {hint}"
    place = _KEY_PATTERN.search(error)
    if place is None:  # an error that `__post_init__` raised
        return error.removesuffix(" - at `$`")
    value, table = values[place[1]], _entry_struct(types[place[1]])
    if table is not None and place[2] is not None and isinstance(value, list | tuple):
        entry, inside = value[int(place[2])], f"{name}.{place[1]}[{place[2]}]"
        if isinstance(entry, Mapping):
            missing = _MISSING_KEY_PATTERN.search(error)
            return f"{inside} has no key {missing[1]!r}" if missing else \
                explain_validation_error(inside, entry, table, error.replace(place[0], " - at `$"))
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    why = _NO_FLOAT16 if place[1] == "dtype" and value in ("float16", "fp16", "half") else \
        _suggest_name(types[place[1]], value)
    expected = _describe_expected(types[place[1]]) if table is None else f"a list of tables, [[{name}.{place[1]}]]"
    return f"{name}.{place[1]} is {shown}; expected {expected}{why}"


def _entry_struct(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct type of a list field's entries, by its annotation; None for others."""
    first = next(iter(get_args(kind)), None)
    return first if isinstance(first, type) and issubclass(first, msgspec.Struct) else None


def _suggest_name(kind: Any, value: object) -> str:
    """Return a hint with the name nearest to `value` that the annotation allows, if any."""
    options = [option for option in get_args(kind) if isinstance(option, str)] or \
        re.findall(r"'(\w+)'", " ".join(str(meta.description) for meta in getattr(kind, "__metadata__", ())))
    near = difflib.get_close_matches(value, options, 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _describe_expected(kind: Any) -> str:
    """Return a description of the values that this annotation accepts."""
    for meta in getattr(kind, "__metadata__", ()):
        return str(meta.description)
    if kind is bool:
        return "true or false"
    options = get_args(kind)
    if options and all(isinstance(option, str) for option in options):
        return "one of " + ", ".join(repr(option) for option in options)
    if getattr(kind, "__origin__", None) is tuple:
        return f"a list of {len(options)}, each {_describe_expected(options[0])}"
    return _describe_expected(options[0])
