"""Read TOML tables key by key, with a check of every value; write job files."""

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

# --- Reading: errors name the key, the value and what was expected --------------------------------


MAX_NUMBER = 1e18
MIN_SIMILARITY = 0.8
"""Similarity from which a key is a misspelling of a missing one. No two keys are so similar."""
_T = TypeVar("_T")


class JobError(ValueError):
    """Error of one line for a job that cannot be used."""


class TomlTable:
    """Table of a job file, whose values are taken key by key and checked.

    Each key is taken once; `refuse_unknown_keys` then refuses keys that were never requested.
    Methods that check a value raise JobError if it is not as expected, or missing without default.
    """

    def __init__(self, name: str, values: object) -> None:
        """Wrap a table. `name` is its path in the file, "" for the whole file.

        Raises JobError if `values` is no table.
        """
        if not isinstance(values, dict):
            raise JobError(f"{name} is {shorten_repr(values)}; expected a table")
        self._name = name
        self._left = dict(values)
        self._known: list[str] = []

    def key_path(self, key: str) -> str:
        """Return the full dotted path of a key of this table, for messages."""
        return f"{self._name}.{key}" if self._name else key

    def has_key(self, key: str) -> bool:
        """Return whether the table has this key and no method has taken it yet."""
        return key in self._left

    def has_optional(self, key: str) -> bool:
        """Return whether an optional key is given, and record that the key is known."""
        self._known.append(key)
        return key in self._left

    def peek_value(self, key: str) -> Any:
        """Return a value without checking or taking it; None if it is missing."""
        return self._left.get(key)

    def take_value(self, key: str, default: Any = None) -> Any:
        """Take a key and return its value unchecked; `default` if it is missing."""
        self._known.append(key)
        return self._left.pop(key, default)

    def take_table(self, key: str, *, required: bool = False) -> "TomlTable":
        """Take a key and return its nested table.

        If the key is missing, return an empty table; raise JobError if it is required.
        """
        given = self._take_required(key, None if required else {})
        if given is None:
            raise JobError(f"key {self.key_path(key)!r} is missing; expected a table")
        return TomlTable(self.key_path(key), given)

    def take_number(self, key: str, default: float | None = None) -> float:
        """Take a key and return its value, a number of at least 0.

        If the key is missing, return `default`. Without a default, the key is required.
        """
        return checked_number(self.key_path(key), self._take_required(key, default))

    def take_count(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """Take a key and return its value, an integer from `low` to `high`.

        If the key is missing, return `default`. Without a default, the key is required.
        """
        return checked_count(self.key_path(key), self._take_required(key, default), low, high)

    def take_counts(
        self, key: str, length: int, per: str, *, low: int, high: int
    ) -> tuple[int, ...]:
        """Take a required key and return `length` integers from `low` to `high`.

        The key's value is a list of them, or one integer for all. In messages, `per` names what has
        one value each, such as a stage.
        """
        return _read_list(
            self.key_path(key),
            self._take_required(key, None),
            length,
            per,
            lambda name, value: checked_count(name, value, low, high),
        )

    def take_numbers(
        self, key: str, length: int, per: str, default: float | None = None
    ) -> tuple[float, ...]:
        """Take a key and return `length` numbers of at least 0.

        The key's value is a list of them, or one number for all. If the key is missing, all are
        `default`; without a default, the key is required. In messages, `per` names what has one
        value each, such as a stage.
        """
        return _read_list(
            self.key_path(key), self._take_required(key, default), length, per, checked_number
        )

    def _take_required(self, key: str, default: object) -> object:
        """Take a key and return its value, or `default`; None if both are missing."""
        value = self.take_value(key, default)
        # The caller raises JobError for None; a similar key that nobody took is probably a
        # misspelling.
        if value is None and (
            near := difflib.get_close_matches(key, self._left, 1, MIN_SIMILARITY)
        ):
            raise JobError(
                f"key {self.key_path(key)!r} is missing; is {near[0]!r} a misspelling of it?"
            )
        return value

    def refuse_unknown_keys(self) -> None:
        """Raise JobError, which names similar or all known keys, if a key was not taken."""
        for key in self._left:
            near = difflib.get_close_matches(key, self._known, 1)
            hint = (
                f"did you mean {self.key_path(near[0])!r}?"
                if near
                else f"known: {', '.join(sorted(set(self._known)))}"
            )
            raise JobError(f"unknown key {self.key_path(key)!r}; {hint}")


def checked_number(path: str, value: object, low: float = 0.0) -> float:
    """Return a value as a float.

    Raises JobError, which names `path`, unless the value is finite, at least `low`, and at most
    `MAX_NUMBER`.
    """
    if value is None:
        raise JobError(f"key {path!r} is missing; expected a number of at least {low:g}")
    if (
        # In Python, a bool is an integer, too.
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < low
    ):
        raise JobError(
            f"{path} is {shorten_repr(value)}; expected a finite number of at least {low:g}"
        )
    if value > MAX_NUMBER:
        raise JobError(
            f"{path} is {shorten_repr(value)}; expected a number of at most {MAX_NUMBER:g}"
        )
    return float(value)


def checked_count(path: str, value: object, low: int, high: int) -> int:
    """Return a value that is an integer from `low` to `high`.

    Raises JobError, which names the key `path`, for any other value.
    """
    if value is None:
        raise JobError(f"key {path!r} is missing; expected a whole number, {low} to {high}")
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise JobError(f"{path} is {shorten_repr(value)}; expected a whole number, {low} to {high}")
    return value


def shorten_repr(value: object) -> str:
    """Return a value as shown in a message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _read_list(
    path: str, value: object, length: int, per: str, read: Callable[[str, object], _T]
) -> tuple[_T, ...]:
    """Return `length` values of the key `path`, from a list or one for all."""
    if not isinstance(value, list):
        return (read(path, value),) * length
    if len(value) != length:
        raise JobError(
            f"{path} has {len(value)} value{'s' * (len(value) != 1)}; expected {length}, one per "
            f"{per}, or a single number"
        )
    return tuple(read(f"{path}[{index}]", item) for index, item in enumerate(value))


# --- Writing: tables of plain data, with a comment above each, and times rounded to a common step -


DIGITS = 4
"""Number of significant digits of a job's longest time; more are below measurement accuracy."""


def job_text(tables: Mapping[str, Any], comments: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a job file with these tables and plain keys, by name.

    `comments` has the lines to put above each table, by its name ("" for the top). Empty tables are
    left out.
    """
    # In TOML, plain keys must precede the tables.
    lines = [f"# {line}" for line in comments.get("", ())]
    lines += [
        f"{key} = {_value_text(value)}"
        for key, value in tables.items()
        if not isinstance(value, dict)
    ]
    for name, table in tables.items():
        if isinstance(table, dict) and table:
            lines += ["", *(f"# {line}" for line in comments.get(name, ())), f"[{name}]"]
            lines += [f"{_key_text(key)} = {_value_text(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def table_comments(text: str) -> dict[str, list[str]]:
    """Return the comment lines of a job file, by the name of their table.

    The name is "" for the top. A comment directly above a table's header belongs to that table.
    Comments after a value are left out.
    """
    comments: dict[str, list[str]] = {"": []}
    table, above = "", list[str]()
    for line in map(str.strip, text.splitlines()):
        if line.startswith("#"):
            above.append(line[1:].removeprefix(" "))
            continue
        if header := re.match(r"\[+\s*([A-Za-z0-9_-]+)", line):
            table = header[1]
        comments.setdefault(table, []).extend(above)
        above = []
    comments[table] += above
    return comments


def round_times(seconds: Sequence[float], longest: float | None = None) -> list[float]:
    """Round times to multiples of one step, so that ticks stay coarse.

    With this step, the time `longest` (default: the longest of `seconds`) has `DIGITS` significant
    digits; if it is 0, all times become 0.
    """
    longest = max(seconds) if longest is None else longest
    if not longest:
        return [0.0] * len(seconds)
    step = 10.0 ** (math.floor(math.log10(longest)) - DIGITS + 1)
    return [float(f"{round(value / step) * step:.12g}") for value in seconds]


def _key_text(key: str) -> str:
    """Return a key in TOML, quoted if necessary."""
    return (
        key
        if key.replace("_", "").replace("-", "").isalnum() and key.isascii()
        else _value_text(key)
    )


def _value_text(value: Any) -> str:
    """Return a value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # What is not printable is escaped by number: TOML allows no control characters in a text.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        text = ""
        for char in escaped:
            text += char if char.isprintable() else f"\\U{ord(char):08X}"
        return f'"{text}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_key_text(key)} = {_value_text(item)}" for key, item in value.items())
            + "}"
        )
    return repr(value)
