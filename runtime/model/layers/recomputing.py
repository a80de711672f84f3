"""What of the layers is not kept after their forward but computed again before their backward: whole layers, or parts.

Chen et al., arXiv 1604.06174; of parts alone ("selective"): Korthikanti et al., arXiv 2205.05198. A part's dropout is
the same both times, as its random numbers are drawn from the same states of the generators.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.model.seeds import drawing_from, generator_states

Part = Literal["attention", "mlp"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Of a layer, each with the norm before it where the layer has that within the part."""
Result = TypeVar("Result")


class Recomputed(NamedTuple):
    """What is computed again."""

    layers: frozenset[int] = frozenset()
    parts: frozenset[str] = frozenset()
    """Of all other layers that have them."""


def recomputed(config: TrainingConfig, layers: int) -> Recomputed:
    """What `[training] recompute` names. Raises ConfigError where the model has no such layer."""
    named = config.recompute
    if isinstance(named, str):
        if named in PARTS:
            return Recomputed(parts=frozenset([named]))
        return Recomputed(frozenset(range(layers) if named == "full" else ()))
    numbers = [one for one in named if isinstance(one, int)]
    wrong = [layer for layer in numbers if layer >= layers]
    if wrong:
        raise ConfigError(f"training.recompute names layer {wrong[0]}; the model has layers 0 to {layers - 1}")
    return Recomputed(frozenset(numbers), frozenset(one for one in named if isinstance(one, str)))


class _Chosen(NamedTuple):
    parts: frozenset[str]
    device: torch.device


_CHOSEN: ContextVar[_Chosen | None] = ContextVar("parts that are computed again", default=None)
_SEEN: ContextVar[set[str] | None] = ContextVar("parts that layers have", default=None)


@contextmanager
def recomputing(parts: frozenset[str], device: torch.device) -> Iterator[None]:
    """Run layers in here, with the generators (`runtime.model.seeds.seeding`), and these parts are not kept."""
    before = _CHOSEN.set(_Chosen(parts, device) if parts else None)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


@contextmanager
def seen_parts() -> Iterator[set[str]]:
    """Run layers in here; the parts that they have get into the set."""
    seen: set[str] = set()
    before = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(before)


def recomputable(name: Part, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """To be called in a layer's forward: what a part of it gives, of which `[training] recompute` may keep nothing.

    `function` must depend on its arguments, on parameters and on torch's generators alone.
    """
    if torch.compiler.is_compiling():  # nothing is chosen then
        return function(*args, **kwargs)
    seen, chosen = _SEEN.get(), _CHOSEN.get()
    if seen is not None:
        seen.add(name)
    if chosen is None or name not in chosen.parts or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    device, states, again = chosen.device, generator_states(chosen.device), False

    def run(*args: Any, **kwargs: Any) -> Result:
        nonlocal again
        if not again:
            again = True
            return function(*args, **kwargs)
        with drawing_from(states, device):
            return function(*args, **kwargs)

    result: Result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    return result
