"""Read the samples that torchtitan's Trainer reads in one process, by iteration.

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
"""Key of what the loader has pickled, in the state that checkpoints hold."""
DATA_OPTIONS = ("assets", "dataset", "dataset_path")
"""Keys of `[training.options]`: folder of the tokenizer, name of a data set, and its path.
`[model.options] arguments` replaces them."""


class Sample(NamedTuple):
    """Micro-batch of tokens, targets and positions, each int64 [batch, context]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """Position of each token in its document."""


class TorchtitanData:
    """Samples of a torchtitan data set (`slipstream.runtime.data.data.IterationData`). Raises
    ConfigError if `[training.options]` lack a required key, or if the data set cannot be read."""

    def __init__(self, config: RunConfig) -> None:
        self._arguments = tuple(config.model.options.get("arguments", ()))
        self._batch, self._context = config.training.batch, config.model.context
        options = config.training.options
        if self._arguments:
            trainer = parse_for_one_process(self._arguments)
            self._assets, self._tokenizer, self._loader = trainer.hf_assets_path, trainer.tokenizer, trainer.dataloader
        else:
            from torchtitan.components.tokenizer import HuggingFaceTokenizer
            from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

            for key in DATA_OPTIONS[:2]:
                if not isinstance(options.get(key), str):
                    raise ConfigError(f"training.data is 'torchtitan', and training.options.{key} is "
                                      f"{options.get(key)!r}; expected "
                                      + ("a folder with tokenizer.json" if key == "assets" else "a name, such as 'c4'"))
            self._assets, self._tokenizer = options["assets"], HuggingFaceTokenizer.Config()
            self._loader = HuggingFaceTextDataLoader.Config(dataset=options["dataset"],
                                                            dataset_path=options.get("dataset_path"))
        self.digest = self._compute_digest()
        self._read_before = NOTHING_READ
        self._open_stream()

    def begin_at(self, iteration: int, samples: int) -> None:
        """Begin an iteration after the first `samples` samples, which earlier runs have read.
        Raises ConfigError unless `samples` is a multiple of the micro-batch size."""
        if samples % self._batch:
            raise ConfigError(f"training.data is 'torchtitan', and {samples} samples were read before; expected a "
                              f"multiple of training.batch, {self._batch}")
        self._read_before = SamplesRead(iteration, samples)
        self._open_stream()

    def _compute_digest(self) -> str:
        """Return a digest of tokenizer and configuration; the data themselves are not read."""
        digest = hashlib.sha256(json.dumps(self._loader.to_dict(), default=str, sort_keys=True).encode())
        for path in sorted(Path(self._assets).glob("tokenizer*")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def _open_stream(self) -> None:
        """Open the stream at the first sample that earlier runs have not read."""
        try:
            tokenizer = self._tokenizer.build(tokenizer_path=self._assets)
            self._data: Any = self._loader.build(
                dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=self._context, local_batch_size=self._batch,
                snapshot_every_n_steps=1)
        except Exception as error:  # tokenizers and data sets may raise anything
            raise ConfigError(f"training.data is 'torchtitan', which cannot be read: {type(error).__name__}: "
                              f"{first_line(error)}") from error
        self._next, self._stream = self._read_before.iteration, iter(self._data)
        self._unread = self._read_before.samples // self._batch
        """Micro-batches of earlier runs that the stream has yet to pass."""
        self._states = OrderedDict[int, Any]()

    def samples(self, iteration: int, count: int) -> Sequence[Sample]:
        """Return the `count` micro-batches of an iteration, wherever the stream is. Raises
        DataEndedError if the stream has fewer."""
        if iteration < self._next:
            self._return_to(iteration)
        while self._next < iteration:
            self._read_iteration(count)
        return self._read_iteration(count)

    def state_dict(self, iteration: int) -> dict[str, Any] | None:
        """Return the stream's position before an iteration, as plain values; None if not known.

        The loader pickles its state. A pickle from a file or from another process is never loaded
        here, so the content is taken out, and pickled again by `load_state_dict`.
        """
        state = self._states.get(iteration)  # kept where the data have ended within the iteration
        if state is None and iteration == self._next and not self._unread:
            state = self._data.state_dict()
        return None if state is None else {
            key: {_PICKLED: pickle.loads(value)} if isinstance(value, bytes) else value  # noqa: S301, it is our own
            for key, value in state.items()}

    def load_state_dict(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Move the stream to a position that `state_dict` has returned, maybe elsewhere."""
        self._move_to(iteration, {
            key: pickle.dumps(value[_PICKLED]) if isinstance(value, dict) and value.keys() == {_PICKLED} else value
            for key, value in state.items()})

    def tokens(self, sample: Sample) -> int:
        """Return the number of tokens of a micro-batch that count in the loss."""
        return int((sample.targets != IGNORED_TARGET).sum())

    def _read_iteration(self, count: int) -> list[Sample]:
        """Store the position in the stream, and return the next iteration's micro-batches."""
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
        """Return the stream to its position before an iteration, or open it again without one."""
        if iteration not in self._states:
            self._open_stream()
            return
        self._move_to(iteration, self._states[iteration])

    def _move_to(self, iteration: int, state: Mapping[str, Any]) -> None:
        """Move the stream to its position before an iteration, by the loader's `state`."""
        self._data.load_state_dict(state)
        self._stream, self._next, self._unread = iter(self._data), iteration, 0


def _next_sample(iteration: int, stream: Iterator[Any]) -> Sample:
    """Read the next micro-batch of the stream. Raises DataEndedError at its end."""
    try:
        inputs, targets = next(stream)
    except StopIteration:
        raise DataEndedError(iteration) from None
    return Sample(inputs["input"], targets, inputs["positions"])
