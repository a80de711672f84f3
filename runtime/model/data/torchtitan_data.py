"""torchtitan's tokenizers and data sets: what its Trainer reads in one process, by the number of the iteration.

A data set is a stream. Every worker reads it from its beginning, micro-batch after micro-batch, and keeps where it was
after each iteration of the last few, so that one that is done again reads what it has read.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.model.data.token_data import BadSampleError
from slipstream.runtime.model.layers.cross_entropy import IGNORED
from slipstream.runtime.model.layers.torchtitan.specification import parsed
from slipstream.runtime.model.microbatch import FROM_THE_START, SamplesRead

KEPT = 8
"""Iterations that can be gone back without reading from the beginning."""
OPTIONS = ("assets", "dataset", "dataset_path")
"""Keys of `[training.options]`: the folder of the tokenizer, the name of a data set of torchtitan, where it lies. Where
`[model.options] arguments` are given they say all of it."""


class Sample(NamedTuple):
    """A micro-batch, each int64 [batch, context]."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    """Of tokens in their documents."""


class TorchtitanData:
    """See `slipstream.runtime.model.data.data.IterationData`. Raises ConfigError."""

    def __init__(self, config: RunConfig) -> None:
        self._arguments = tuple(config.model.options.get("arguments", ()))
        self._batch, self._context = config.training.batch, config.model.context
        options = config.training.options
        if self._arguments:
            trainer = parsed(self._arguments)
            self._assets, self._tokenizer, self._loader = trainer.hf_assets_path, trainer.tokenizer, trainer.dataloader
        else:
            from torchtitan.components.tokenizer import HuggingFaceTokenizer
            from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

            for key in OPTIONS[:2]:
                if not isinstance(options.get(key), str):
                    raise ConfigError(f"training.data is 'torchtitan', and training.options.{key} is "
                                      f"{options.get(key)!r}; expected "
                                      + ("a folder with tokenizer.json" if key == "assets" else "a name, such as 'c4'"))
            self._assets, self._tokenizer = options["assets"], HuggingFaceTokenizer.Config()
            self._loader = HuggingFaceTextDataLoader.Config(dataset=options["dataset"],
                                                            dataset_path=options.get("dataset_path"))
        self.digest = self._digest()
        self._read_before = FROM_THE_START
        self._open()

    def begin_at(self, iteration: int, samples: int) -> None:
        """See `slipstream.runtime.model.data.data.Data`."""
        if samples % self._batch:
            raise ConfigError(f"training.data is 'torchtitan', and {samples} samples were read before; expected a "
                              f"multiple of training.batch, {self._batch}")
        self._read_before = SamplesRead(iteration, samples)
        self._open()

    def _digest(self) -> str:
        """Of the tokenizer and of what says which data are read: the data themselves are as many as there are."""
        found = hashlib.sha256(json.dumps(self._loader.to_dict(), default=str, sort_keys=True).encode())
        for path in sorted(Path(self._assets).glob("tokenizer*")):
            found.update(path.read_bytes())
        return found.hexdigest()

    def _open(self) -> None:
        """Begin with the first sample that was not read before."""
        try:
            tokenizer = self._tokenizer.build(tokenizer_path=self._assets)
            self._data: Any = self._loader.build(
                dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=self._context, local_batch_size=self._batch,
                snapshot_every_n_steps=1)
        except Exception as error:  # whatever tokenizers and data sets raise
            raise ConfigError(f"training.data is 'torchtitan', which cannot be read: {type(error).__name__}: "
                              f"{first_line(error)}") from error
        self._next, self._stream = self._read_before.iteration, iter(self._data)
        for _ in range(self._read_before.samples // self._batch):
            _sample(self._next, self._stream)
        self._states = OrderedDict[int, Any]()

    def samples(self, iteration: int, count: int) -> Sequence[Sample]:
        """The micro-batches of an iteration: the next `count` of the stream. Raises ConfigError where it has ended."""
        if iteration < self._next:
            self._go_back(iteration)
        while self._next < iteration:
            self._read(count)
        return self._read(count)

    def tokens(self, sample: Sample) -> int:
        """How many of a micro-batch count."""
        return int((sample.targets != IGNORED).sum())

    def _read(self, count: int) -> list[Sample]:
        self._states[self._next] = self._data.state_dict()
        while len(self._states) > KEPT:
            self._states.popitem(last=False)
        found = [_sample(self._next, self._stream) for _ in range(count)]
        self._next += 1
        return found

    def _go_back(self, iteration: int) -> None:
        if iteration not in self._states:
            self._open()
            return
        self._data.load_state_dict(self._states[iteration])
        self._stream, self._next = iter(self._data), iteration


def _sample(iteration: int, stream: Iterator[Any]) -> Sample:
    try:
        inputs, targets = next(stream)
    except StopIteration:
        raise BadSampleError(f"training.data is 'torchtitan', which has no samples left for iteration {iteration}"
                          ) from None
    return Sample(inputs["input"], targets, inputs["positions"])
