"""Digests of samples, by which processes notice that they read different ones, and the check that
reads repeat."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.model.data.data import CHECKED_MICROBATCHES, Data, is_users_own
from slipstream.runtime.model.microbatch import Microbatch

FIRST_SAMPLES = "samples of iteration"
"""Beginning of the name that the digest of the first samples has in a run's identity; the iteration
follows."""


def digest_sample(tensors: Sequence[Tensor]) -> str:
    """Return a digest of a micro-batch: of the dtypes, shapes and bytes of its tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}\0{tuple(plain.shape)}\0".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digest_first_samples(data: Data, config: RunConfig, microbatches: Sequence[int],
                         iteration: int) -> dict[str, str]:
    """Return the digest of the first `CHECKED_MICROBATCHES` micro-batches of an iteration, pipeline
    by pipeline, by its name in the run's identity."""
    digest = hashlib.blake2b(digest_size=8)
    for name in islice(_list_names(iteration, microbatches), CHECKED_MICROBATCHES):
        sample = data.batch(name, config.training.batch, config.model.context)
        digest.update(digest_sample(sample).encode())
    return {f"{FIRST_SAMPLES} {iteration}": digest.hexdigest()}


def require_repeatable(data: Data, config: RunConfig, microbatches: Sequence[int],
                       iteration: int) -> None:
    """Raise ConfigError if the user's own data give other samples when an iteration is read again.

    Compares the first and the last of its first `CHECKED_MICROBATCHES` micro-batches. Other kinds
    of data repeat.
    """
    if not is_users_own(config.training):
        return
    batch, context = config.training.batch, config.model.context
    names = list(islice(_list_names(iteration, microbatches), CHECKED_MICROBATCHES))
    checked = dict.fromkeys((names[0], names[-1]))
    first_read = [digest_sample(data.batch(name, batch, context)) for name in checked]
    forget = getattr(data, "forget", None)
    if forget is not None:
        forget()
    for name, digest in zip(checked, first_read, strict=True):
        if digest_sample(data.batch(name, batch, context)) != digest:
            raise ConfigError(
                f"training.data is {config.training.data!r}: micro-batch {name.index} of pipeline "
                f"{name.pipeline} in iteration {iteration} is another one when it is read again; expected "
                "the same one at every read: draw random numbers from a generator that is seeded by its "
                "name")


def _list_names(iteration: int, microbatches: Sequence[int]) -> Iterator[Microbatch]:
    return (Microbatch(iteration, pipeline, index) for pipeline, count in enumerate(microbatches)
            for index in range(count))
