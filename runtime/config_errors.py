"""Turn msgspec's messages about a table of the job file into ones that name keys."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

MAX_LISTED_KEYS = 16
"""Largest number of keys of a table that an error message lists."""
MAX_VALUE_CHARACTERS = 80
"""Length to which an error message shortens a value."""
_NO_FLOAT16 = ": float16 needs loss scaling, which is not supported; bf16 needs none"
_KEY_PATTERN = re.compile(r" - at `\$\.(\w+)(?:\[(\d+)\])?")
"""Pattern in msgspec's messages: the wrong key and, in a list, the wrong entry's index."""
_REMOVED_KEYS = {
    "training.degraded_ranks": (
        "a worker that has lost a rank is down until it is whole again: leave it out"
    )
}
"""Keys of the job file that earlier versions had, each with what to do instead."""
_MISSING_KEY_PATTERN = re.compile(r"missing required field `(\w+)`")


def explain_validation_error(
    name: str, values: Mapping[str, object], kind: type[msgspec.Struct], error: str
) -> str:
    """Return one line that says what is wrong in a table of the job file.

    The table `name` has these `values`, the struct `kind` says what it may have, and `error` is
    msgspec's message.
    """
    # An unknown key comes first, as msgspec does not say how it could be meant.
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    unknown = next((key for key in values if key not in types), None)
    if unknown is not None and (instead := _REMOVED_KEYS.get(f"{name}.{unknown}")):
        return f"{name}.{unknown} was removed; {instead}"
    if unknown is not None:
        return f"unknown key {name}.{unknown}; {_suggest_key(name, unknown, list(types))}"
    place = _KEY_PATTERN.search(error)
    if place is None:  # an error that `__post_init__` raised
        return error.removesuffix(" - at `$`")
    key, index = place[1], place[2]
    value, table = values[key], _entry_struct(types[key])

    # An entry of a list of tables is explained as a table.
    if table is not None and index is not None and isinstance(value, list | tuple):
        entry, entry_name = value[int(index)], f"{name}.{key}[{index}]"
        if isinstance(entry, Mapping):
            if missing := _MISSING_KEY_PATTERN.search(error):
                return f"{entry_name} has no key {missing[1]!r}"
            inner_error = error.replace(place[0], " - at `$")
            return explain_validation_error(entry_name, entry, table, inner_error)

    # Otherwise one value is wrong: name it, and what was expected.
    text = repr(value)
    if len(text) > MAX_VALUE_CHARACTERS:
        text = text[: MAX_VALUE_CHARACTERS - 3] + "..."
    expected = f"a list of tables, [[{name}.{key}]]"
    if table is None:
        expected = _describe_expected(types[key])
    hint = _suggest_name(types[key], value)
    if key == "dtype" and value in ("float16", "fp16", "half"):
        hint = _NO_FLOAT16
    return f"{name}.{key} is {text}; expected {expected}{hint}"


def _suggest_key(table: str, unknown: str, keys: Sequence[str]) -> str:
    # A spelling mistake is most likely; a long list of keys would hide the message.
    near = difflib.get_close_matches(unknown, keys, 1)
    if near:
        return f"did you mean {table}.{near[0]}?"
    if len(keys) > MAX_LISTED_KEYS:
        return "docs/configuration.md lists all keys"
    return f"known: {', '.join(keys)}"


def _entry_struct(kind: Any) -> type[msgspec.Struct] | None:
    """Return the struct type of a list field's entries, by its annotation; None for others."""
    first = next(iter(get_args(kind)), None)
    return first if isinstance(first, type) and issubclass(first, msgspec.Struct) else None


def _suggest_name(kind: Any, value: object) -> str:
    """Return a hint with the allowed name most like `value`; empty if none is."""
    if not isinstance(value, str):
        return ""
    options = [option for option in get_args(kind) if isinstance(option, str)]
    if not options:
        # The description of a pattern quotes what it allows.
        texts = [str(meta.description) for meta in getattr(kind, "__metadata__", ())]
        options = re.findall(r"'(\w+)'", " ".join(texts))
    near = difflib.get_close_matches(value, options, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _describe_expected(kind: Any) -> str:
    # A description in the annotation says it best; other types are described by their parts.
    for meta in getattr(kind, "__metadata__", ()):
        return str(meta.description)
    if kind is bool:
        return "true or false"
    options = get_args(kind)
    if options and all(isinstance(option, str) for option in options):
        return "one of " + ", ".join(repr(option) for option in options)
    if getattr(kind, "__origin__", None) is tuple:
        return f"a list of {len(options)}, each {_describe_expected(options[0])}"
    # What is left is an optional value: its first type says what it may be.
    return _describe_expected(options[0])
