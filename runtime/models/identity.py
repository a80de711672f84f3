"""Build the identity of a run in this process: from configuration, user code, data, grid and libraries."""

import hashlib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.models.hugging_face.configuration import read_config
from slipstream.runtime.models.source_digests import digest_sources
from slipstream.runtime.object_reference import is_reference
from slipstream.runtime.run_identity import DIGEST_PREFIX, MAX_VALUE_CHARACTERS, RunIdentity, Values

_NOT_IN_NUMBERS = frozenset({"recompute", "peak_flops"})
"""Keys of [training] that change no number: activations are the same, stored or computed again."""
_COMPARED_BY_CONTENT = frozenset({
    "text", "tokens", "tokenizer", "validation_text", "validation_tokens"})
"""Keys of [training] that are paths. The digests of the data say what is there."""
_DISTRIBUTIONS = {"slipstream": "slipstream-train", "torch": "torch", "numpy": "numpy"}
"""Name of the distribution that has each library."""


def build_run_identity(config: RunConfig, *, data: Values, microbatches: Sequence[int],
                       columns: Sequence[Sequence[int]]) -> RunIdentity:
    """Return the identity of a run in this process, from its configuration, data and grid.

    The argument `data` has digests by name, `microbatches` the number of micro-batches of each
    pipeline, and `columns` the model's layers in each column.
    """
    model: dict[str, Any] = msgspec.to_builtins(config.model)
    training: dict[str, Any] = msgspec.to_builtins(config.training)
    if config.model.hugging_face is not None:
        model["hugging_face"] = read_config(config.model)
    for key in _NOT_IN_NUMBERS | _COMPARED_BY_CONTENT:
        training.pop(key, None)
    return RunIdentity(
        model=_encode_values(model), training=_encode_values(training),
        code=digest_sources(_list_references(config)), data=data,
        grid=_encode_values({"microbatches": microbatches, "columns": columns}),
        libraries=_read_versions(config))


def _encode_values(table: Mapping[str, Any], prefix: str = "") -> Values:
    """Return the values of a table, in JSON, by key; those of a table in it have the keys
    `TABLE.KEY`."""
    values: Values = {}
    for key, value in table.items():
        if isinstance(value, dict):
            values |= _encode_values(value, f"{prefix}{key}.")
        else:
            text = msgspec.json.encode(value, order="sorted").decode()
            values[f"{prefix}{key}"] = text if len(text) <= MAX_VALUE_CHARACTERS else \
                DIGEST_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]
    return values


def _list_references(config: RunConfig) -> list[str]:
    """Return the references to the user's own code in a configuration."""
    training = config.training
    names = (config.model.name, training.optimizer, training.learning_rate_schedule, training.data,
             training.validation_data)
    return [name for name in names if name is not None and is_reference(name)]


def _read_versions(config: RunConfig) -> Values:
    """Return the versions of the installed libraries that compute numbers in a run. Builds of one
    version, as for CPUs and for GPUs, count as equal."""
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
