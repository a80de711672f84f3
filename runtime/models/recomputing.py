"""Compute the activations of layers, or of parts of them, again before their backward.

Chen et al., arXiv 1604.06174; for parts alone ("selective"): Korthikanti et al., arXiv 2205.05198.
A part has the same dropout both times, because its random numbers are drawn from the same generator
states.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch.utils.checkpoint import checkpoint

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.models.split_backward import deferring_again, weight_work
from slipstream.runtime.seeds import get_generator_states, with_generator_states

Part = Literal["attention", "mlp"]
PARTS: tuple[Part, ...] = get_args(Part)
"""Parts of a layer that can be recomputed, each with the norm before it."""
Result = TypeVar("Result")


class RecomputeChoice(NamedTuple):
    """Layers, and parts of all other layers, whose activations are computed again."""

    layers: frozenset[int] = frozenset()
    parts: frozenset[str] = frozenset()
    """Parts that are recomputed in all layers that have them, except in `layers`."""


def parse_recompute(config: TrainingConfig, layers: int) -> RecomputeChoice:
    """Return the layers and parts that `[training] recompute` names. Raises ConfigError if a layer
    does not exist."""
    named = config.recompute
    if isinstance(named, str):
        if named in PARTS:
            return RecomputeChoice(parts=frozenset([named]))
        return RecomputeChoice(frozenset(range(layers) if named == "full" else ()))
    numbers = [item for item in named if isinstance(item, int)]
    wrong = [layer for layer in numbers if layer >= layers]
    if wrong:
        raise ConfigError(f"training.recompute names layer {wrong[0]}; the model has layers 0 to {layers - 1}")
    return RecomputeChoice(frozenset(numbers), frozenset(item for item in named if isinstance(item, str)))


class _ActiveParts(NamedTuple):
    parts: frozenset[str]
    device: torch.device


_CHOSEN: ContextVar[_ActiveParts | None] = ContextVar("parts that are computed again", default=None)
_SEEN: ContextVar[set[str] | None] = ContextVar("parts that layers have", default=None)


@contextmanager
def recomputing_parts(parts: frozenset[str], device: torch.device) -> Iterator[None]:
    """Let layers that run within the context compute these parts again in the backward. Must be
    called within `runtime.seeds.restoring_generators`."""
    before = _CHOSEN.set(_ActiveParts(parts, device) if parts else None)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


@contextmanager
def collecting_parts() -> Iterator[set[str]]:
    """Yield a set that collects the recomputable parts of layers that run within the context."""
    seen: set[str] = set()
    before = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(before)


def recomputable(name: Part, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call `function`, the part `name` of a layer, and return its result.

    The backward computes the activations within it again if `[training] recompute` names the part.
    To be called in a layer's forward. The result of `function` must depend on its arguments, on
    parameters and on torch's generators alone.
    """
    if torch.compiler.is_compiling():  # no part is chosen then
        return function(*args, **kwargs)
    seen, chosen = _SEEN.get(), _CHOSEN.get()
    if seen is not None:
        seen.add(name)
    if chosen is None or name not in chosen.parts or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    device, states, again = chosen.device, get_generator_states(chosen.device), False
    work = weight_work()

    def run(*args: Any, **kwargs: Any) -> Result:
        nonlocal again
        if not again:
            again = True
            return function(*args, **kwargs)
        with with_generator_states(states, device), deferring_again(work):
            return function(*args, **kwargs)

    result: Result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    return result
