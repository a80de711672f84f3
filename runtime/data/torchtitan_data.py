"""Read, by iteration, the samples that torchtitan's Trainer reads in one process.

A data set is a stream. Every worker reads it in order, micro-batch after micro-batch, and stores
the position in the stream before each of the last few iterations, so that a discarded iteration
reads the same samples when it is run again. Checkpoints hold the position, too.
"""

import hashlib
import json
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.data.data import RECENT_ITERATIONS
from slipstream.runtime.data.token_data import DataEndedError
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.cross_entropy import IGNORED_TARGET
from slipstream.runtime.models.torchtitan.specification import parse_for_one_process
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead

_PICKLED = "pickled"
"""Key in saved states that marks what torchtitan's loader has pickled."""
DATA_OPTIONS = ("assets", "dataset", "dataset_path")
"""Keys of `[training.options]`: the tokenizer's folder, a data set's name, and its path."""
# `[model.options] arguments` replaces them.


_REQUIRED_OPTIONS = {"assets": "a folder with tokenizer.json", "dataset": "a name, such as 'c4'"}


class Sample(NamedTuple):
    """Micro-batch of tokens, targets and positions, each int64 [batch, context]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """Position of each token in its document."""


class TorchtitanData:
    """Samples of a torchtitan data set (`slipstream.runtime.data.data.IterationData`).

    Raises ConfigError if `[training.options]` lack a key, or if the data set cannot be read.
    """

    def __init__(self, config: RunConfig) -> None:
        self._arguments = tuple(config.model.options.get("arguments", ()))
        self._batch, self._context = config.training.batch, config.model.context
        options = config.training.options
        # Data as the user's command line of torchtitan describes them, or by our own options.
        if self._arguments:
            trainer = parse_for_one_process(self._arguments)
            self._assets = trainer.hf_assets_path
            self._tokenizer, self._loader = trainer.tokenizer, trainer.dataloader
        else:
            from torchtitan.components.tokenizer import HuggingFaceTokenizer
            from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

            for key, expected in _REQUIRED_OPTIONS.items():
                if not isinstance(options.get(key), str):
                    raise ConfigError(
                        f"training.data is 'torchtitan', and training.options.{key} is "
                        f"{options.get(key)!r}; expected {expected}"
                    )
            self._assets, self._tokenizer = options["assets"], HuggingFaceTokenizer.Config()
            self._loader = HuggingFaceTextDataLoader.Config(
                dataset=options["dataset"], dataset_path=options.get("dataset_path")
            )
        self.digest = self._compute_digest()
        self._read_before = NOTHING_READ
        self._open_stream()

    def begin_at(self, iteration: int, samples: int) -> None:
        """Begin at an iteration, before which earlier runs have read `samples` samples.

        Raises ConfigError unless `samples` is a multiple of the micro-batch size, or if the data
        set cannot be read.
        """
        if samples % self._batch:
            raise ConfigError(
                f"training.data is 'torchtitan', and {samples} samples were read before; expected "
                f"a multiple of training.batch, {self._batch}"
            )
        self._read_before = SamplesRead(iteration, samples)
        self._open_stream()

    def _compute_digest(self) -> str:
        digest = hashlib.sha256(
            json.dumps(self._loader.to_dict(), default=str, sort_keys=True).encode()
        )
        # The data set counts by its configuration, the tokenizer by the content of its files.
        for path in sorted(Path(self._assets).glob("tokenizer*")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _open_stream(self) -> None:
        try:
            tokenizer = self._tokenizer.build(tokenizer_path=self._assets)
            self._data: Any = self._loader.build(
                dp_world_size=1,
                dp_rank=0,
                tokenizer=tokenizer,
                seq_len=self._context,
                local_batch_size=self._batch,
                snapshot_every_n_steps=1,
            )
        except Exception as error:  # tokenizers and data sets may raise anything
            raise ConfigError(
                f"training.data is 'torchtitan', which cannot be read: {type(error).__name__}: "
                f"{first_line(error)}"
            ) from error
        self._next, self._stream = self._read_before.iteration, iter(self._data)
        self._unread = self._read_before.samples // self._batch
        """Number of earlier runs' micro-batches that the stream still has to pass."""
        self._states = OrderedDict[int, Any]()

    def samples(self, iteration: int, count: int) -> Sequence[Sample]:
        """Return the `count` micro-batches of an iteration, moving in the stream if necessary.

        Raises DataEndedError if the stream has fewer, and ConfigError if it cannot be reopened.
        """
        if iteration < self._next:
            self._return_to(iteration)
        # A stream cannot skip: what lies before the iteration is read and dropped.
        while self._next < iteration:
            self._read_iteration(count)
        return self._read_iteration(count)

    def state_dict(self, iteration: int) -> dict[str, Any] | None:
        """Return the stream's position before an iteration, as plain values; None if unknown."""
        state = self._states.get(iteration)  # kept where the data have ended within the iteration
        if state is None and iteration == self._next and not self._unread:
            state = self._data.state_dict()
        if state is None:
            return None
        # The loader pickles its state. A pickle from a file or from another process is never loaded
        # here, so the content is taken out, and pickled again by `load_state_dict`.
        plain = dict(state)
        for key, value in state.items():
            if isinstance(value, bytes):
                plain[key] = {_PICKLED: pickle.loads(value)}  # noqa: S301, it is our own
        return plain

    def load_state_dict(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Move the stream to `state`, its position before `iteration`.

        `state_dict` has returned `state` for this iteration, in this or another process.
        """
        loader_state = dict(state)
        for key, value in state.items():
            if isinstance(value, dict) and value.keys() == {_PICKLED}:
                loader_state[key] = pickle.dumps(value[_PICKLED])
        self._move_to(iteration, loader_state)

    def tokens(self, sample: Sample) -> int:
        """Return the number of tokens of a micro-batch that count in the loss."""
        return int((sample.targets != IGNORED_TARGET).sum())

    def _read_iteration(self, count: int) -> list[Sample]:
        """Store the position in the stream; return the next iteration's `count` micro-batches."""
        # What earlier runs have read is passed first.
        while self._unread:
            _next_sample(self._next, self._stream)
            self._unread -= 1
        self._states[self._next] = self._data.state_dict()
        while len(self._states) > RECENT_ITERATIONS:
            self._states.popitem(last=False)
        samples = [_next_sample(self._next, self._stream) for _ in range(count)]
        self._next += 1
        return samples

    def _return_to(self, iteration: int) -> None:
        # Too far back for the stored positions: begin again.
        if iteration not in self._states:
            self._open_stream()
            return
        self._move_to(iteration, self._states[iteration])

    def _move_to(self, iteration: int, state: Mapping[str, Any]) -> None:
        self._data.load_state_dict(state)
        self._stream, self._next, self._unread = iter(self._data), iteration, 0


def _next_sample(iteration: int, stream: Iterator[Any]) -> Sample:
    try:
        inputs, targets = next(stream)
    except StopIteration:
        raise DataEndedError(iteration) from None
    return Sample(inputs["input"], targets, inputs["positions"])
