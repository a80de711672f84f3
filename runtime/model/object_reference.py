"""A user's own code, named in the job file as `module:attribute`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from runtime.config import ConfigError


def is_reference(name: str) -> bool:
    """Whether a name is written `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def load_reference(key: str, name: str) -> Any:
    """Import what `module:attribute` names, from the working directory or wherever Python finds it.

    It is the user's code, on the user's machine: importing it runs it. `key` names the job file's key in errors.
    Raises ConfigError, in one line, when it cannot be imported or is not callable.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # `slipstream` is a script elsewhere, other than `python -m`
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the user's module raises when it runs
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{key} is {name!r}, which cannot be imported: {reason}") from None
    if not callable(found):
        raise ConfigError(f"{key} is {name!r}, a {type(found).__name__}; expected something to call")
    return found
