"""Read the keys of `[model]` and `[training]` that plans, simulations and rehearsals depend on.

The runtime reads and checks all keys of both tables (`runtime.config`). A value that it would
refuse counts as not given here, so that users see the runtime's message.
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
    """Number of samples of a micro-batch; 1 if the job does not say, so that samples are then
    micro-batches."""
    recompute: str | tuple[int | str, ...] = "none"
    """Layers whose activations are recomputed, or "auto"."""
    iterations: Annotated[int, Meta(ge=0)] | None = None
    """Number of iterations; None if the job does not say."""
    context: AtLeastOne | None = None
    """Number of tokens of a sample; None if the job does not say."""


_TYPES = {field.name: field.type for field in msgspec.structs.fields(RunKeys)}
_OF_MODEL = frozenset({"context"})
"""Keys that are in `[model]`; the others are in `[training]`."""


def read_run_keys(model: Mapping[str, Any], training: Mapping[str, Any]) -> RunKeys:
    """Return those keys of a job file's tables `[model]` and `[training]`."""
    keys = {}
    for key, kind in _TYPES.items():
        table = model if key in _OF_MODEL else training
        if key in table:
            with suppress(msgspec.ValidationError):
                keys[key] = msgspec.convert(table[key], kind)
    return RunKeys(**keys)
