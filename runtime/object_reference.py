"""Load a user's own code by references, written `module:attribute` in the job file."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.runtime.errors import ConfigError


def is_reference(name: str) -> bool:
    """Return whether a name has the form `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(
        part.isidentifier() for part in (*module.split("."), *attribute.split("."))
    )


def search_working_directory() -> Path:
    """Append the working directory to Python's search path, if it is missing; return it."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.append(str(here))
    return here


def load_reference(key: str, name: str) -> Any:
    """Import and return the object that `name`, as `module:attribute`, refers to.

    Appends the working directory to Python's search path. Importing runs the user's code. Raises
    ConfigError, which names the job file's `key`, if the object cannot be imported or called, or if
    another module of the same name is found first.
    """
    # The working directory is searched last, and only from this call on, so no file in it replaces
    # a module of this program or of a library.
    module, _, attribute = name.partition(":")
    here = search_working_directory()
    subject, before = f"{key} is {name!r}", set(sys.modules)
    # Checked before the import, or a wrong module would run; and after it, for what it imports.
    _require_no_clash(subject, here, [module])
    try:
        target: Any = importlib.import_module(module)
        modules_used = [
            value.__name__ for value in vars(target).values() if isinstance(value, ModuleType)
        ]
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:  # the user's module may raise anything
        _require_no_clash(subject, here, [getattr(error, "name", None) or module])
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{subject}, which cannot be imported: {reason}") from None
    _require_no_clash(subject, here, [*modules_used, *sys.modules.keys() - before])
    if not callable(target):
        raise ConfigError(f"{subject}, a {type(target).__name__}; expected a class or function")
    return target


def _require_no_clash(wrong: str, here: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if Python finds another of the modules `names` than the one in `here`."""
    # Only the first part of a dotted name is looked for on the search path.
    for top in {name.partition(".")[0] for name in names}:
        paths = (here / top / "__init__.py", here / f"{top}.py")
        local = next((path for path in paths if path.is_file()), None)
        if local is None:
            continue
        spec = getattr(sys.modules.get(top), "__spec__", None) or importlib.util.find_spec(top)
        taken = "Python itself" if spec is None or spec.origin is None else spec.origin
        if not Path(taken).exists() or not local.samefile(taken):
            raise ConfigError(
                f"{wrong}, and there are two modules {top!r}: {local}, and {taken}, which Python "
                "finds first; rename the one in the working directory"
            )
