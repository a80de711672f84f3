"""Digests of the sources of a user's own code, by which processes notice that they have imported
different code.

The sources are found as Python's import finds them, without importing anything: the modules that
the job file names, and what these import in turn. Libraries are left out, since their versions say
what they are. Code that is imported by a name which is computed at run time is not found.
"""

import ast
import functools
import hashlib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from slipstream.runtime.object_reference import search_working_directory

_OWN_PACKAGE = __name__.partition(".")[0]


def digest_sources(references: Iterable[str]) -> dict[str, str]:
    """Return the digest of each user module that some references (`module:attribute`) need, by the
    module's name."""
    digests: dict[str, str] = {}
    named = {reference.partition(":")[0] for reference in references}
    if named:
        search_working_directory()
    tops = {name.partition(".")[0] for name in named} - {_OWN_PACKAGE}
    pending = sorted(named)
    while pending:
        name = pending.pop()
        for spec in _find_specs(name):
            source = _find_source(spec)
            if spec.name in digests or source is None or not _is_users(spec.name, source, tops):
                continue
            content = source.read_bytes()
            digests[spec.name] = hashlib.sha256(content).hexdigest()[:16]
            pending += _list_imports(spec, content)
    return digests


def _find_specs(name: str) -> Iterator[ModuleSpec]:
    """Yield the specs of a module's parent packages and of the module, as far as they are found."""
    parts, path = name.split("."), None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None and path is None:
            spec = _find_installed(parts[0])
        if spec is None:  # a name in a module, or no module of a file
            return
        yield spec
        path = list(spec.submodule_search_locations or ())


def _find_installed(name: str) -> ModuleSpec | None:
    """Return the spec of a module that is on no path, such as one that is installed as editable."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a spec
        return None


def _find_source(spec: ModuleSpec) -> Path | None:
    """Return the file that a module is loaded from; None for a package without one."""
    source = None if spec.origin is None else Path(spec.origin)
    return source if source is not None and source.is_file() else None


def _is_users(name: str, source: Path, tops: Iterable[str]) -> bool:
    """Return whether a module is the user's own: of a package that the job file names, or outside
    of all libraries."""
    top = name.partition(".")[0]
    return top in tops or (top != _OWN_PACKAGE and not any(
        source.resolve().is_relative_to(folder) for folder in _list_library_folders()))


@functools.cache
def _list_library_folders() -> Sequence[Path]:
    """Return the folders of Python's library and of installed packages."""
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    # Packages may be installed elsewhere, with PYTHONPATH naming the folder.
    folders += [entry for entry in sys.path if any(Path(entry).glob("*.dist-info"))]
    return [Path(folder).resolve() for folder in folders]


def _list_imports(spec: ModuleSpec, content: bytes) -> list[str]:
    """Return the names that a module's source imports, anywhere in it; none for compiled code."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return []
    is_package = spec.submodule_search_locations is not None
    package = spec.name if is_package else spec.name.rpartition(".")[0]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parent = _resolve_parent(node, package)
            names += [f"{parent}.{alias.name}" for alias in node.names]
    return names


def _resolve_parent(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that a `from` statement in `package` imports names
    from."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parts = parts[:len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)
