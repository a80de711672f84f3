"""A user's own code, named in the job file as `module:attribute`."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.runtime.config import ConfigError


def is_reference(name: str) -> bool:
    """Whether a name is written `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))


def search_here() -> Path:
    """Have modules also be found in the working directory, and last there."""
    here = Path.cwd()
    if str(here) not in sys.path:
        sys.path.append(str(here))
    return here


def load_reference(key: str, name: str) -> Any:
    """Import what `module:attribute` names, from wherever Python finds it or from the working directory.

    It is the user's code, on the user's machine: importing it runs it. The working directory is searched last, and only
    from here on: nothing in it replaces a module of this program or of a library. `key` names the job file's key in
    errors. Raises ConfigError, in one line, when it cannot be imported, when a module of the same name is found
    elsewhere first, or when it is not callable.
    """
    module, _, attribute = name.partition(":")
    here = search_here()
    wrong, before = f"{key} is {name!r}", set(sys.modules)
    _refuse_clash(wrong, here, [module])
    try:
        found: Any = importlib.import_module(module)
        used = [one.__name__ for one in vars(found).values() if isinstance(one, ModuleType)]
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the user's module raises when it runs
        _refuse_clash(wrong, here, [getattr(error, "name", None) or module])
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{wrong}, which cannot be imported: {reason}") from None
    _refuse_clash(wrong, here, [*used, *sys.modules.keys() - before])
    if not callable(found):
        raise ConfigError(f"{wrong}, a {type(found).__name__}; expected something to call")
    return found


def _refuse_clash(wrong: str, here: Path, names: Iterable[str]) -> None:
    """Raises ConfigError where one of the modules is in the working directory, and another one was found first."""
    for top in {name.partition(".")[0] for name in names}:
        local = next((path for path in (here / top / "__init__.py", here / f"{top}.py") if path.is_file()), None)
        if local is None:
            continue
        spec = getattr(sys.modules.get(top), "__spec__", None) or importlib.util.find_spec(top)
        taken = "Python itself" if spec is None or spec.origin is None else spec.origin
        if not Path(taken).exists() or not local.samefile(taken):
            raise ConfigError(f"{wrong}, and there are two modules {top!r}: {local}, and {taken}, which Python finds "
                              "first; rename the one in the working directory")
