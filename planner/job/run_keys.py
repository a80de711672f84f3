"""Read the keys of `[model]` and `[training]` that plans and simulations depend on.

The runtime reads and checks all keys of both tables (`runtime.config`). A value of the wrong type
or range counts as missing here, so that users see the runtime's message.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from msgspec import Meta

AtLeastOne = Annotated[int, Meta(ge=1)]


class RunKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of `[model]` and `[training]` on which times, memory and samples of a plan depend."""

    tensor_parallel: AtLeastOne = 1
    """Number of processes of a worker, one device each."""
    batch: AtLeastOne = 1
    """Number of samples of a micro-batch; 1 if the job does not say."""
    recompute: str | tuple[int | str, ...] = "none"
    """Layers recomputed: "none", "full", "auto", or a list of numbers, "attention" and "mlp"."""
    iterations: Annotated[int, Meta(ge=0)] | None = None
    """Number of iterations; None if the job does not say."""
    context: AtLeastOne | None = None
    """Number of tokens of a sample; None if the job does not say."""


_TYPES = {field.name: field.type for field in msgspec.structs.fields(RunKeys)}
"""Type of each key."""
_OF_MODEL = frozenset({"context"})
"""Keys that are in `[model]`; the others are in `[training]`."""


def read_run_keys(model: Mapping[str, Any], training: Mapping[str, Any]) -> RunKeys:
    """Return the keys of `RunKeys` from a job file's tables `[model]` and `[training]`.

    A key that is missing, or whose value is invalid, has its default.
    """
    keys = {}
    for key, kind in _TYPES.items():
        table = model if key in _OF_MODEL else training
        if key in table:
            with suppress(msgspec.ValidationError):
                keys[key] = msgspec.convert(table[key], kind)
    return RunKeys(**keys)
