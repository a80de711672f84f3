"""Cut data into micro-batches that are the same on every worker and at any time."""

import hashlib
import os
import re
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from slipstream.runtime.config import ConfigError, RunConfig, TrainingConfig
from slipstream.runtime.data.token_data import (
    BadSampleError,
    DataEndedError,
    DocumentData,
    PackedBatch,
    TokenData,
)
from slipstream.runtime.data.tokenized_text import map_tokens, tokenize_file
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.cross_entropy import IGNORED_TARGET
from slipstream.runtime.models.hugging_face.configuration import vocabulary_size
from slipstream.runtime.object_reference import load_reference
from slipstream.runtime.replay.layer_values import Form, TensorForm, TupleForm, form_of
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead
from slipstream.runtime.replay.microbatch import Microbatch as Microbatch
from slipstream.runtime.seeds import derive_seed

CHECKED_MICROBATCHES = 64
"""Number of micro-batches that are read and checked before a run."""
RECENT_ITERATIONS = 8
"""Iterations that data can go back without a saved state, as after a discarded one."""
LIBRARY_BYTES = 4 * 2**20
"""Size of the text of a job without data, from the standard library's sources."""
_KEY = re.compile(r"training\.(text|tokens|data)\b")
"""Pattern that finds a key for training data in an error about validation data."""
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class ByteText:
    """Training data whose tokens are the bytes of a text; `seed` determines the samples."""

    text: Tensor
    """Bytes of the text: uint8 [bytes]."""
    seed: int

    @property
    def digest(self) -> str:
        """SHA-256 of the text, which must be equal on all workers that train together."""
        return hashlib.sha256(self.text.numpy().data).hexdigest()

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Return a micro-batch of `batch` samples of `context` tokens, and the token after each.

        Tokens and following tokens are int64 [batch, context] on the CPU.
        """
        # The micro-batch's name is its seed, so any worker draws the same samples at any time.
        generator = torch.Generator().manual_seed(derive_seed("data", self.seed, *microbatch))
        starts = torch.randint(self.text.numel() - context, (batch, 1), generator=generator)
        window = self.text[starts + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]


class Data(Protocol):
    """Interface of training data that return the same samples for a micro-batch anywhere."""

    @property
    def digest(self) -> str:
        """Text by which data are compared: equal on all workers, different for different data."""

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:
        """Return a micro-batch of `batch` samples of `context` tokens, on the CPU.

        The tuple has the input of layer 0, the target of the loss, and further tensors that layers
        read, by name if it is a named tuple. All micro-batches have the same shapes. If the data
        also have a method `begin_at(iteration, samples)`, it is called before anything is read in a
        run that resumes from a checkpoint of another grid: `samples` samples were read before that
        iteration.
        """


class IterationData(Protocol):
    """Interface of training data that every worker reads in order, iteration by iteration."""

    @property
    def digest(self) -> str:
        """Text by which data are compared: equal on all workers, different for different data."""

    def samples(self, iteration: int, count: int) -> Sequence[tuple[Tensor, ...]]:
        """Return the `count` micro-batches of an iteration, pipeline by pipeline, as in `Data`.

        Iterations are requested in order, some of them repeatedly; after a failure or from a
        checkpoint, requests start at any iteration. Data may have more methods: `tokens(sample)`
        returns the number of tokens that count in the sample's loss; `costs(iteration)` and
        `lengths(iteration)` are described at `has_costs` and `has_lengths`.

        If the data have methods `state_dict(iteration)` and `load_state_dict(iteration, state)`,
        checkpoints hold their state, and a worker that starts late reads from there on and not from
        the beginning. `state_dict` returns the state before an iteration as a dict of plain values
        of JSON, or None if the state is not known any more; it is called for iterations that were
        just read, and for the next one.
        """


FindState = Callable[[int], tuple[int, dict[str, Any]] | None]
"""Function that finds the last state saved up to an iteration: (iteration, content), or None."""


class _IterationAdapter:
    """Adapter that makes `Data` of data that are read in order (`IterationData`)."""

    # It stores the samples of two iterations, because an iteration may be read again.

    def __init__(self, data: Any, microbatches: Sequence[int]) -> None:
        self._data, self.digest = data, data.digest
        self._first = list(accumulate(microbatches, initial=0))
        self._kept: dict[int, Sequence[tuple[Tensor, ...]]] = {}
        self._begun = 0
        """Iteration from which on the data have been read in order."""
        self._next = 0
        """Iteration after the last one that has been read."""
        self.find_state: FindState = lambda _: None
        self._has_state = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        """False if the data cannot give their state, or once they have failed to."""
        self._lock = threading.Lock()
        if hasattr(data, "tokens"):
            self.tokens = lambda iteration: [
                data.tokens(sample) for sample in self._read_samples(iteration)
            ]
        # Optional methods exist here only if the data have them.
        for by_iteration in ("costs", "lengths"):
            if hasattr(data, by_iteration):
                setattr(self, by_iteration, partial(self._read_alone, getattr(data, by_iteration)))

    def forget(self) -> None:
        with self._lock:
            self._kept = {}

    def batch(
        self,
        microbatch: Microbatch,
        batch: int,  # noqa: ARG002
        context: int,  # noqa: ARG002
    ) -> tuple[Tensor, ...]:
        """Return a micro-batch as `Data.batch` does; the data know `batch` and `context`."""
        samples = self._read_samples(microbatch.iteration)
        return samples[self._first[microbatch.pipeline] + microbatch.index]

    def move_to(self, iteration: int) -> None:
        """Read the data through an iteration, from a saved state if that is shorter."""
        self._read_samples(iteration)

    def get_state(self, iteration: int) -> dict[str, Any] | None:
        """Return the data's state before an iteration; None if unknown or not plain JSON."""
        # The data are asked only where this process has read them in order up to that iteration.
        if not self._has_state or not self._has_read(iteration):
            return None
        try:
            with self._lock:
                state = self._data.state_dict(iteration)
        # The user's code may raise anything; without a state, data are read from their beginning.
        except Exception:
            traceback.print_exc()
            self._has_state = False
            return None
        return state if _is_plain(state) else None

    def _has_read(self, iteration: int) -> bool:
        return max(self._begun, self._next - RECENT_ITERATIONS) <= iteration <= self._next

    def _load_state_before(self, iteration: int) -> None:
        """Load the last saved state before an iteration, unless reading on is shorter."""
        saved = self.find_state(iteration) if self._has_state else None
        # Reading on is shorter if the saved state lies before what is read next.
        if saved is not None and not saved[0] <= self._next <= iteration:
            self._data.load_state_dict(*saved)
            self._begun = saved[0]

    def _read_alone(self, read: Callable[[int], Any], iteration: int) -> Any:
        with self._lock, ending_data(iteration):
            return read(iteration)

    def _read_samples(self, iteration: int) -> Sequence[tuple[Tensor, ...]]:
        with self._lock:
            if iteration in self._kept:
                return self._kept[iteration]
            if not self._has_read(iteration):
                self._load_state_before(iteration)
            with ending_data(iteration):
                samples = self._data.samples(iteration, self._first[-1])
            if len(samples) != self._first[-1]:
                raise BadSampleError(
                    f"the data give {len(samples)} samples for iteration {iteration}; expected "
                    f"{self._first[-1]}, one for each micro-batch of all pipelines"
                )
            self._next = iteration + 1
            # A neighboring iteration may be read again; others are dropped.
            for number in list(self._kept):
                if abs(number - iteration) != 1:
                    del self._kept[number]
            # The user's code may return the same memory each time.
            self._kept[iteration] = [copy_sample(sample) for sample in samples]
            return self._kept[iteration]


@contextmanager
def ending_data(iteration: int) -> Iterator[None]:
    """Turn a StopIteration within the context into a DataEndedError for `iteration`."""
    try:
        yield
    except StopIteration:
        raise DataEndedError(iteration) from None


def read_batch(data: Data, microbatch: Microbatch, config: RunConfig) -> tuple[Tensor, ...]:
    """Read a micro-batch of `config`'s size; errors of the data are passed on.

    Raises DataEndedError if the data have no samples left, and BadSampleError if data that are read
    in order give another number of micro-batches than an iteration has.
    """
    with ending_data(microbatch.iteration):
        return data.batch(microbatch, config.training.batch, config.model.context)


def move_data_to(data: Data, iteration: int) -> None:
    """Read through `iteration` if data are read in order, which may take long.

    Errors are ignored, as training meets them when it reads the same data.
    """
    # What cannot be read is reported when training reads it.
    if isinstance(data, _IterationAdapter):
        with suppress(Exception):
            data.move_to(iteration)


def get_data_state(data: Data, iteration: int) -> dict[str, Any] | None:
    """Return the state of data before an iteration; None if unknown, or without state."""
    return data.get_state(iteration) if isinstance(data, _IterationAdapter) else None


def use_saved_states(data: Data, find_state: FindState) -> None:
    """Let data that are read in order continue from states that `find_state` returns."""
    if isinstance(data, _IterationAdapter):
        data.find_state = find_state


def _is_plain(state: object) -> bool:
    """Return whether a state is a dict that JSON gives back unchanged."""
    try:
        return isinstance(state, dict) and bool(
            msgspec.json.decode(msgspec.json.encode(state)) == state
        )
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False


class _CopiedData:
    """User's own `Data`, whose micro-batches are copied."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self.digest = data.digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:
        # The user's code may return the same memory each time.
        copied: tuple[Tensor, ...] = copy_sample(self._data.batch(microbatch, batch, context))
        return copied


def copy_sample(sample: Any) -> Any:
    """Return a copy of a tuple of tensors, of the same class; others unchanged."""
    # What is no tuple is refused elsewhere.
    if not isinstance(sample, tuple):
        return sample
    copies = list(sample)
    for index, item in enumerate(sample):
        if isinstance(item, Tensor):
            copies[index] = item.clone()
    return getattr(sample, "_make", tuple)(copies)


def is_users_own(training: TrainingConfig) -> bool:
    """Return whether the training data come from the user's own code."""
    return training.data is not None and training.data != "torchtitan"


def has_costs(data: Data) -> bool:
    """Return whether the data have a method `costs(iteration)`.

    Costs are the times of F, I and W of each sample, relative to the mean, by which samples are
    dealt (`schedules.dealing`).
    """
    return callable(getattr(data, "costs", None))


def has_lengths(data: Data) -> bool:
    """Return whether the data have a method `lengths(iteration)`.

    Lengths are those of the documents of each sample, in tokens.
    """
    return callable(getattr(data, "lengths", None))


def load_data(
    config: RunConfig, microbatches: Sequence[int] = (1,), read: SamplesRead = NOTHING_READ
) -> Data:
    """Load the data that a configuration names.

    `microbatches` has the number of micro-batches of each pipeline. The count of samples continues
    from `read`, what runs on other grids have read. Raises ConfigError if the data cannot be
    loaded, are shorter than a sequence, or cannot continue the count.
    """
    # The user's own data, then tokens, then the bytes of a text.
    if config.training.data is not None:
        return _load_user_data(config, config.training.data, microbatches, read)
    if config.training.tokens is not None or config.training.tokenizer is not None:
        return _load_tokens(config, microbatches, read)
    path = config.training.text
    text = _library_text() if path is None else _map_text(Path(path))
    needed = config.model.context + 1
    if text.size < needed:
        source = f"{path!r},"
        if path is None:
            source = "not given, and the standard library's sources are"
        raise ConfigError(
            f"training.text is {source} of {text.size} bytes; expected at least {needed}, "
            "one more than model.context"
        )
    return ByteText(torch.from_numpy(text), config.training.seed)


def _load_user_data(
    config: RunConfig, name: str, microbatches: Sequence[int], read: SamplesRead
) -> Data:
    make: Callable[[RunConfig], Any]
    if name == "torchtitan":
        from slipstream.runtime.data.torchtitan_data import TorchtitanData

        make = TorchtitanData
    else:
        make = load_reference("training.data", name)
    try:
        data: Any = make(config)
        digest: object = data.digest
        # A run on another grid continues the count of samples.
        if read != NOTHING_READ:
            if not callable(getattr(data, "begin_at", None)):
                raise ConfigError(
                    f"training.data is {name!r}: the checkpoint's {read.iteration} iterations have "
                    f"read {read.samples} samples, this job would have read another number, and "
                    "the data have no method begin_at(iteration, samples) to count on; resume with "
                    "the same micro-batches"
                )
            data.begin_at(*read)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"training.data is {name!r}, which fails: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(digest, str):
        raise ConfigError(
            f"training.data is {name!r}: its digest is a {type(digest).__name__}; expected a str"
        )
    return _IterationAdapter(data, microbatches) if hasattr(data, "samples") else _CopiedData(data)


def load_validation_data(config: RunConfig, microbatches: Sequence[int] = (1,)) -> Data | None:
    """Load the data for evaluations; None if the configuration has none.

    `microbatches` is as in `load_data`. Raises ConfigError as `load_data` does.
    """
    training = config.training
    if training.evaluate_every is None:
        return None
    # The same settings as in training, for other files, always in the files' order.
    validation = replace(
        training,
        text=training.validation_text,
        tokens=training.validation_tokens,
        data=training.validation_data,
        tokenizer=training.tokenizer if training.validation_text else None,
        shuffle=False,
    )
    try:
        return load_data(replace(config, training=validation), microbatches)
    except ConfigError as error:
        # The error names the key that the user has written.
        raise ConfigError(_KEY.sub(r"training.validation_\1", str(error))) from None


def is_evaluated(training: TrainingConfig, iteration: int) -> bool:
    """Return whether the model is evaluated after this iteration's step."""
    return training.evaluate_every is not None and (iteration + 1) % training.evaluate_every == 0


def _load_tokens(config: RunConfig, microbatches: Sequence[int], read: SamplesRead) -> TokenData:
    training, vocabulary = config.training, vocabulary_size(config.model)
    if training.tokens is not None:
        source = f"training.tokens is {training.tokens!r}"
        tokens = map_tokens(Path(training.tokens), training.token_dtype)
    else:
        assert training.text is not None and training.tokenizer is not None
        source = f"training.text is {training.text!r}"
        tokens = tokenize_file(Path(training.text), Path(training.tokenizer), vocabulary)
    options: dict[str, Any] = {
        "vocabulary": vocabulary,
        "context": config.model.context,
        "microbatches": microbatches,
        "seed": training.seed,
        "shuffle": training.shuffle,
        "read": read,
    }
    # Without ends of documents, each sample is one document.
    if training.document_end is None:
        return TokenData(source, tokens, **options)
    return DocumentData(
        source, tokens, **options, document_end=training.document_end, batch=training.batch
    )


def batch_form(config: RunConfig) -> TupleForm:
    """Return the shapes and dtypes of the tensors of a micro-batch.

    Data of the user or of torchtitan are read for it; their errors are passed on. Raises
    ConfigError as `load_data` does, and unless they return a tuple of at least two tensors;
    DataEndedError if they have no samples.
    """
    training, context = config.training, config.model.context
    if training.data is None:
        tokens = TensorForm((training.batch, context), torch.int64)
        if training.document_end is None:
            return TupleForm((tokens,) * 2)
        return TupleForm((tokens,) * 3, PackedBatch._fields)
    # The form of other data is that of their first micro-batch.
    batch = read_batch(load_data(config), Microbatch(0, 0, 0), config)
    if (
        not isinstance(batch, tuple)
        or len(batch) < 2
        or not all(isinstance(element, Tensor) for element in batch)
    ):
        kinds = ""
        if isinstance(batch, tuple | list):
            kinds = f" of {[type(element).__name__ for element in batch]}"
        raise ConfigError(
            f"training.data is {training.data!r}: its batch is a {type(batch).__name__}{kinds}; "
            "expected a tuple of tensors: the input of layer 0, the target of the loss, then other "
            "inputs that layers read"
        )
    form = form_of(batch)
    assert isinstance(form, TupleForm)
    return form


def is_fully_masked(batch: tuple[Tensor, ...]) -> bool:
    """Return whether a micro-batch has int64 targets, all of them `IGNORED_TARGET`."""
    target = batch[1] if len(batch) > 1 else None
    return (
        isinstance(target, Tensor)
        and target.dtype == torch.int64
        and target.numel() > 0
        and bool((target == IGNORED_TARGET).all())
    )


def require_form(batch: object, form: Form, name: Microbatch) -> None:
    """Raise BadSampleError if the micro-batch `name` has other shapes or dtypes than `form`."""
    # Receives are posted for tensors of that form.
    actual = None
    if isinstance(batch, tuple) and all(isinstance(item, Tensor) for item in batch):
        actual = form_of(batch)
    if actual != form:
        raise BadSampleError(
            f"the data give {_describe(actual)} for micro-batch {name.index} of pipeline "
            f"{name.pipeline} in iteration {name.iteration}, and {_describe(form)} for the first; "
            "expected the same shapes for all: pad them, and tell loss and layers where they end"
        )


def _describe(form: Form | None) -> str:
    if not isinstance(form, TupleForm):
        return "a value that is not a tuple of tensors"
    shapes = [
        f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}" for tensor in form.tensors
    ]
    return f"({', '.join(shapes)})"


def _map_text(path: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    if not path.is_file():
        reason = "which is not a file" if path.exists() else "which does not exist"
        raise ConfigError(
            f"training.text is {str(path)!r}, {reason}; expected the path of a text file"
        )
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        # Copy-on-write, since torch requires writable memory; workers of a machine share the pages.
        return np.memmap(path, np.uint8, mode="c")
    except OSError as error:
        raise ConfigError(
            f"training.text is {str(path)!r}, which cannot be read: {error.strerror}"
        ) from None


def _library_text() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    text = bytearray()
    root = Path(sysconfig.get_path("stdlib"))
    # Some Python installations have no sources.
    for path in _walk_sources(root) if root.is_dir() else ():
        text += path.read_bytes()
        if len(text) >= LIBRARY_BYTES:
            break
    return np.frombuffer(text[:LIBRARY_BYTES], np.uint8)


def _walk_sources(root: Path) -> Iterator[Path]:
    """Yield the Python sources below a folder, sorted: its files, then those of subfolders."""
    folders = []
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            folders.append(Path(entry.path))
        elif entry.name.endswith(".py") and entry.is_file():
            yield Path(entry.path)
    for folder in folders:
        if folder.name not in _NOT_LIBRARY:
            yield from _walk_sources(folder)
