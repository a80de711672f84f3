"""Digest samples, so that processes notice if they read different ones."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.data.data import (
    CHECKED_MICROBATCHES,
    Data,
    is_users_own,
    read_batch,
    require_form,
)
from slipstream.runtime.models.calling import Batch
from slipstream.runtime.replay.layer_values import Form
from slipstream.runtime.replay.microbatch import Microbatch

FIRST_SAMPLES = "samples of iteration"
"""Name of the first samples' digest in a run's identity, without the iteration that follows."""


def digest_sample(tensors: Sequence[Tensor]) -> str:
    """Return a digest of a micro-batch: of its tensors' dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}\0{tuple(plain.shape)}\0".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class FirstSamples(NamedTuple):
    """First micro-batch of a run, and one digest of the first few micro-batches."""

    first: Batch
    """First micro-batch of pipeline 0."""
    digests: dict[str, str]
    """Digest of the first few micro-batches, by its name in the run's identity."""


def check_first_samples(
    data: Data, config: RunConfig, microbatches: Sequence[int], iteration: int, form: Form
) -> FirstSamples:
    """Return an iteration's first micro-batch, and a digest of its first few.

    The few are up to `CHECKED_MICROBATCHES`, pipeline by pipeline; pipeline p has microbatches[p].
    Raises BadSampleError if data from the user's code or a library have another form than `form`,
    and ConfigError if the user's own data differ when the first and the last of these are read
    again. Raises DataEndedError if the data have no samples for the iteration. Other errors of the
    data are passed on.
    """
    names = list(islice(_list_names(iteration, microbatches), CHECKED_MICROBATCHES))
    first: Batch = ()
    digests: list[str] = []
    for name in names:
        sample = read_batch(data, name, config)
        if config.training.data is not None:
            require_form(sample, form, name)
        # Shapes of the run's own data follow from the configuration; other code must prove them.
        first = first or sample
        digests.append(digest_sample(sample))
    if is_users_own(config.training):
        _require_repeatable(data, config, {names[0]: digests[0], names[-1]: digests[-1]})
    return FirstSamples(first, {f"{FIRST_SAMPLES} {iteration}": _join_digests(digests)})


def _require_repeatable(
    data: Data, config: RunConfig, first_read: Mapping[Microbatch, str]
) -> None:
    # Otherwise the second read would return what was stored by the first.
    forget = getattr(data, "forget", None)
    if forget is not None:
        forget()
    for name, digest in first_read.items():
        if digest_sample(read_batch(data, name, config)) != digest:
            raise ConfigError(
                f"training.data is {config.training.data!r}: micro-batch {name.index} of pipeline "
                f"{name.pipeline} in iteration {name.iteration} is another one when it is read "
                "again; expected the same one at every read: draw random numbers from a generator "
                "that is seeded by its name"
            )


def _join_digests(digests: Iterable[str]) -> str:
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()


def _list_names(iteration: int, microbatches: Sequence[int]) -> Iterator[Microbatch]:
    return (
        Microbatch(iteration, pipeline, index)
        for pipeline, count in enumerate(microbatches)
        for index in range(count)
    )
