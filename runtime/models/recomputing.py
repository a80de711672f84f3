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
"""Parts of a layer that can be recomputed; a GPT's with the norm before it."""
Result = TypeVar("Result")


class RecomputeChoice(NamedTuple):
    """Whole layers to compute again, and parts to compute again in all others."""

    layers: frozenset[int] = frozenset()
    parts: frozenset[str] = frozenset()
    """Parts that are recomputed in all layers that have them, except in `layers`."""


def parse_recompute(config: TrainingConfig, layers: int) -> RecomputeChoice:
    """Return the layers and parts that `[training] recompute` names.

    "auto", which the planner replaces, names none. Raises ConfigError if a layer does not exist.
    """
    choice = config.recompute
    if isinstance(choice, str):
        if choice in PARTS:
            return RecomputeChoice(parts=frozenset([choice]))
        return RecomputeChoice(frozenset(range(layers) if choice == "full" else ()))
    # A list may mix numbers of layers and names of parts.
    numbers = [item for item in choice if isinstance(item, int)]
    wrong = [layer for layer in numbers if layer >= layers]
    if wrong:
        raise ConfigError(
            f"training.recompute names layer {wrong[0]}; the model has layers 0 to {layers - 1}"
        )
    parts = frozenset(item for item in choice if isinstance(item, str))
    return RecomputeChoice(frozenset(numbers), parts)


class _ActiveParts(NamedTuple):
    parts: frozenset[str]
    device: torch.device


_CHOSEN: ContextVar[_ActiveParts | None] = ContextVar("parts that are computed again", default=None)
_SEEN: ContextVar[set[str] | None] = ContextVar("parts that layers have", default=None)


@contextmanager
def recomputing_parts(parts: frozenset[str], device: torch.device) -> Iterator[None]:
    """Make the backward of layers that run within the context compute these parts again.

    `device` is that of the layers. Must be called within `runtime.seeds.restoring_generators`.
    """
    before = _CHOSEN.set(_ActiveParts(parts, device) if parts else None)
    try:
        yield
    finally:
        _CHOSEN.reset(before)


@contextmanager
def collecting_parts() -> Iterator[set[str]]:
    """Yield a set, to which layers that run within the context add their recomputable parts."""
    seen: set[str] = set()
    before = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(before)


def recomputable(name: Part, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call `function`, the part `name` of a layer, and return its result.

    The backward calls `function` again if `[training] recompute` names the part. To be used in a
    layer's forward. `function` must depend on its arguments, parameters and torch's generators
    alone.
    """
    if torch.compiler.is_compiling():  # no part is chosen then
        return function(*args, **kwargs)
    seen, active = _SEEN.get(), _CHOSEN.get()
    # The job file must not name a part that no layer has.
    if seen is not None:
        seen.add(name)
    if active is None or name not in active.parts or not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # The generators' states of now give both calls the same dropout.
    device, states, again = active.device, get_generator_states(active.device), False
    work = weight_work()

    # The second call is the recomputation: it draws the same numbers, and defers like the first.
    def run(*args: Any, **kwargs: Any) -> Result:
        nonlocal again
        if not again:
            again = True
            return function(*args, **kwargs)
        with with_generator_states(states, device), deferring_again(work):
            return function(*args, **kwargs)

    result: Result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
    return result
