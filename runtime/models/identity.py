"""Build the identity of a run in this process: configuration, user code, data, libraries.

Digests of the user's sources reveal that processes have imported different code. The sources are
found as Python's import finds them, without importing anything: the modules that the job file
names, and what these import in turn. Of libraries only the versions are compared. Code imported by
a name that is computed is not found.
"""

import ast
import functools
import hashlib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.models.hugging_face.configuration import read_config
from slipstream.runtime.object_reference import is_reference, search_working_directory
from slipstream.runtime.run_identity import DIGEST_PREFIX, MAX_VALUE_CHARACTERS, RunIdentity, Values

_OWN_PACKAGE = __name__.partition(".")[0]


def digest_sources(references: Iterable[str]) -> dict[str, str]:
    """Return a digest of each user module that `references` need, by the module's name.

    References are `module:attribute`. User modules that these modules import are included, modules
    without a source file are not. Appends the working directory to Python's search path.
    """
    digests: dict[str, str] = {}
    modules = {reference.partition(":")[0] for reference in references}
    if modules:
        search_working_directory()
    tops = {name.partition(".")[0] for name in modules} - {_OWN_PACKAGE}
    pending = sorted(modules)
    # What a module imports is pending, too, unless it has been found before.
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
    parts, path = name.split("."), None
    # Import runs the packages around a module, too, so their sources count.
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), path)
        if spec is None and path is None:
            spec = _find_installed(parts[0])
        if spec is None:  # a name in a module, or no module of a file
            return
        yield spec
        path = list(spec.submodule_search_locations or ())


def _find_installed(name: str) -> ModuleSpec | None:
    """Return the spec of a module outside sys.path, as in editable installs; or None."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module without a spec
        return None


def _find_source(spec: ModuleSpec) -> Path | None:
    source = None if spec.origin is None else Path(spec.origin)
    return source if source is not None and source.is_file() else None


def _is_users(name: str, source: Path, tops: Iterable[str]) -> bool:
    """Return whether a module lies in a package of `tops`, or in no library."""
    # `tops` are packages that the job file names: the user's, wherever they are.
    top = name.partition(".")[0]
    return top in tops or (
        top != _OWN_PACKAGE
        and not any(source.resolve().is_relative_to(folder) for folder in _list_library_folders())
    )


@functools.cache
def _list_library_folders() -> Sequence[Path]:
    paths = sysconfig.get_paths()
    folders = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    # Packages may be installed elsewhere, with PYTHONPATH naming the folder.
    folders += [entry for entry in sys.path if any(Path(entry).glob("*.dist-info"))]
    return [Path(folder).resolve() for folder in folders]


def _list_imports(spec: ModuleSpec, content: bytes) -> list[str]:
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
            # The name may be a module, or something in one; both are tried.
            names += [f"{parent}.{alias.name}" for alias in node.names]
    return names


def _resolve_parent(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that a `from` statement imports names from."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    # One dot is the package itself; each further dot is one package up.
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, node.module] if node.module else parts)


_NOT_IN_NUMBERS = frozenset({"recompute", "peak_flops"})
"""Keys of [training] that change no number: activations are the same, if computed again."""
_COMPARED_BY_CONTENT = frozenset(
    {"text", "tokens", "tokenizer", "validation_text", "validation_tokens"}
)
"""Keys of [training] that name files, whose contents are compared by digest instead."""
_DISTRIBUTIONS = {"slipstream": "slipstream-train", "torch": "torch", "numpy": "numpy"}
"""Name by which pip knows each library."""


def build_run_identity(
    config: RunConfig,
    *,
    data: Values,
    microbatches: Sequence[int],
    columns: Sequence[Sequence[int]],
) -> RunIdentity:
    """Return the identity of a run, from its configuration, data and grid.

    `data` has digests by name, `microbatches` the number of micro-batches of each pipeline, and
    `columns` the layers that the workers of each column hold. Raises ConfigError if the config.json
    of `[model] hugging_face` cannot be read.
    """
    model: dict[str, Any] = msgspec.to_builtins(config.model)
    training: dict[str, Any] = msgspec.to_builtins(config.training)
    # The content of config.json counts, not where it is.
    if config.model.hugging_face is not None:
        model["hugging_face"] = read_config(config.model)
    # Nodes may differ in what changes no number, and in paths.
    for key in _NOT_IN_NUMBERS | _COMPARED_BY_CONTENT:
        training.pop(key, None)
    return RunIdentity(
        model=_encode_values(model),
        training=_encode_values(training),
        code=digest_sources(_list_references(config)),
        data=data,
        grid=_encode_values({"microbatches": microbatches, "columns": columns}),
        libraries=_read_versions(config),
    )


def _encode_values(table: Mapping[str, Any], prefix: str = "") -> Values:
    values: Values = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values |= _encode_values(value, f"{prefix}{key}.")
        else:
            text = msgspec.json.encode(value, order="sorted").decode()
            # A long value is compared by digest, so that messages stay small.
            if len(text) > MAX_VALUE_CHARACTERS:
                text = DIGEST_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]
            values[f"{prefix}{key}"] = text
    return values


def _list_references(config: RunConfig) -> list[str]:
    training = config.training
    names = (
        config.model.name,
        training.optimizer,
        training.learning_rate_schedule,
        training.data,
        training.validation_data,
    )
    return [name for name in names if name is not None and is_reference(name)]


def _read_versions(config: RunConfig) -> Values:
    """Return the versions of the libraries that compute; builds of one version count as equal."""
    distributions = dict(_DISTRIBUTIONS)
    if config.model.hugging_face is not None:
        distributions["transformers"] = "transformers"
    if config.model.torchtitan is not None or config.training.data == "torchtitan":
        distributions["torchtitan"] = "torchtitan"
    versions = {}
    for name, distribution in distributions.items():
        try:
            versions[name] = version(distribution).partition("+")[0]
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions
