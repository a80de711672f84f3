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
from slipstream.runtime.data.token_data import BadSampleError, DataEndedError, DocumentData, PackedBatch, TokenData
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
"""Micro-batches that are read before a run, to check them."""
RECENT_ITERATIONS = 8
"""Iterations by which data go back without a saved state, as after a discarded one."""
LIBRARY_BYTES = 4 * 2**20
"""Bytes of the standard library's sources that are the text of a job without data."""
_KEY = re.compile(r"training\.(text|tokens|data)\b")
"""Pattern of a key for training data in an error, to name validation data instead."""
_NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


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
        Both are int64 [batch, context] on the CPU."""
        generator = torch.Generator().manual_seed(derive_seed("data", self.seed, *microbatch))
        starts = torch.randint(self.text.numel() - context, (batch, 1), generator=generator)
        window = self.text[starts + torch.arange(context + 1)].long()
        return window[:, :-1], window[:, 1:]


class Data(Protocol):
    """Interface of training data that return the same micro-batch for a name, anywhere."""

    @property
    def digest(self) -> str:
        """Text that differs if the data do; it must be equal on all workers."""

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:
        """Return a micro-batch of `batch` samples of `context` tokens, on the CPU.

        It has the input of layer 0, the target of the loss, and further tensors that layers read.
        All micro-batches have the same shapes. Return a named tuple to let layers read tensors by
        name. If the data also have a method `begin_at(iteration, samples)`, it is called before
        anything is read in a run that resumes from a checkpoint of another grid: `samples` samples
        were read before that iteration.
        """


class IterationData(Protocol):
    """Interface of training data that every worker reads in order, by iterations."""

    @property
    def digest(self) -> str:
        """Text that differs if the data do, as in `Data`."""

    def samples(self, iteration: int, count: int) -> Sequence[tuple[Tensor, ...]]:
        """Return the `count` micro-batches of an iteration, pipeline by pipeline, as in `Data`.

        Iterations are requested in order, some of them repeatedly; after a failure or from a
        checkpoint, requests start at any iteration. If the data also have a method
        `tokens(sample)`, it returns the number of tokens that count in the sample's loss. It may
        have methods `costs(iteration)` and `lengths(iteration)` as well (`has_costs`,
        `has_lengths`).

        If the data have methods `state_dict(iteration)` and `load_state_dict(iteration, state)`,
        checkpoints hold their state, and a worker that starts late reads from there on and not from
        the beginning. `state_dict` returns the state before an iteration as a dict of plain values
        of JSON, or None if it is not known any more; it is called for iterations that were just
        read, and for the next one.
        """


FindState = Callable[[int], tuple[int, dict[str, Any]] | None]
"""Function that returns the latest saved state of data up to an iteration, and that one's."""


class _IterationAdapter:
    """Adapter from `IterationData` to `Data`. It stores the samples of two iterations, because an
    iteration may be read again."""

    def __init__(self, data: Any, microbatches: Sequence[int]) -> None:
        self._data, self.digest = data, data.digest
        self._first = list(accumulate(microbatches, initial=0))
        self._kept: dict[int, Sequence[tuple[Tensor, ...]]] = {}
        self._begun = self._next = 0
        """Iteration from which data have been read in order, and the one after the last read."""
        self.find_state: FindState = lambda _: None
        """Function that finds a saved state of the data."""
        self._has_state = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
        """False also once the data have failed to give their state."""
        self._lock = threading.Lock()
        if hasattr(data, "tokens"):
            self.tokens = lambda iteration: [data.tokens(sample) for sample in self._read_samples(iteration)]
        for by_iteration in ("costs", "lengths"):
            if hasattr(data, by_iteration):
                setattr(self, by_iteration, partial(self._read_alone, getattr(data, by_iteration)))

    def forget(self) -> None:
        """Forget the stored samples, so that the data are asked for them again."""
        with self._lock:
            self._kept = {}

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:  # noqa: ARG002
        """Return a micro-batch as `Data.batch` does; the data know `batch` and `context`."""
        return self._read_samples(microbatch.iteration)[self._first[microbatch.pipeline] + microbatch.index]

    def move_to(self, iteration: int) -> None:
        """Read the data up to an iteration, from the last saved state on."""
        self._read_samples(iteration)

    def get_state(self, iteration: int) -> dict[str, Any] | None:
        """Return the state of the data before an iteration. None if not known, or not plain. The
        data are asked only where this process has read them in order up to that iteration."""
        if not self._has_state or not self._has_read(iteration):
            return None
        try:
            with self._lock:
                state = self._data.state_dict(iteration)
        except Exception:  # the user's code may raise anything; without a state, data are read from their beginning
            traceback.print_exc()
            self._has_state = False
            return None
        return state if _is_plain(state) else None

    def _has_read(self, iteration: int) -> bool:
        """Return whether an iteration is the next one or was just read."""
        return max(self._begun, self._next - RECENT_ITERATIONS) <= iteration <= self._next

    def _load_state_before(self, iteration: int) -> None:
        """Load the last saved state before an iteration, unless reading on is shorter."""
        found = self.find_state(iteration) if self._has_state else None
        if found is not None and not found[0] <= self._next <= iteration:
            self._data.load_state_dict(*found)
            self._begun = found[0]

    def _read_alone(self, read: Callable[[int], Any], iteration: int) -> Any:
        """Return what `read` returns for an iteration, while no other thread reads the data."""
        with self._lock, ending_data(iteration):
            return read(iteration)

    def _read_samples(self, iteration: int) -> Sequence[tuple[Tensor, ...]]:
        """Return all samples of an iteration. Raises BadSampleError for a wrong number."""
        with self._lock:
            if iteration not in self._kept:
                if not self._has_read(iteration):
                    self._load_state_before(iteration)
                with ending_data(iteration):
                    read = self._data.samples(iteration, self._first[-1])
                if len(read) != self._first[-1]:
                    raise BadSampleError(f"the data give {len(read)} samples for iteration {iteration}; expected "
                                         f"{self._first[-1]}, one for each micro-batch of all pipelines")
                self._next = iteration + 1
                self._kept = {kept: samples for kept, samples in self._kept.items() if abs(kept - iteration) == 1}
                self._kept[iteration] = [copy_sample(sample) for sample in read]
            return self._kept[iteration]


@contextmanager
def ending_data(iteration: int) -> Iterator[None]:
    """Turn a StopIteration of data that are read within the context into a DataEndedError."""
    try:
        yield
    except StopIteration:
        raise DataEndedError(iteration) from None


def read_batch(data: Data, microbatch: Microbatch, config: RunConfig) -> tuple[Tensor, ...]:
    """Read a micro-batch. Raises DataEndedError if the data have no samples left."""
    with ending_data(microbatch.iteration):
        return data.batch(microbatch, config.training.batch, config.model.context)


def move_data_to(data: Data, iteration: int) -> None:
    """Read data that are read in order up to an iteration, which may take long. Other data stay.
    What cannot be read is reported when training reads it."""
    if isinstance(data, _IterationAdapter):
        with suppress(Exception):
            data.move_to(iteration)


def get_data_state(data: Data, iteration: int) -> dict[str, Any] | None:
    """Return the state of data that are read in order. None for others, or if not known."""
    return data.get_state(iteration) if isinstance(data, _IterationAdapter) else None


def use_saved_states(data: Data, find_state: FindState) -> None:
    """Let data that are read in order continue from saved states, which `find_state` finds."""
    if isinstance(data, _IterationAdapter):
        data.find_state = find_state


def _is_plain(state: object) -> bool:
    """Return whether a state is a dict that JSON gives back as it is."""
    try:
        return isinstance(state, dict) and bool(msgspec.json.decode(msgspec.json.encode(state)) == state)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return False


class _CopiedData:
    """User's own `Data`, copied, since a call may overwrite what the one before returned."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self.digest = data.digest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, ...]:
        """Return a copy of the micro-batch that the data return."""
        copied: tuple[Tensor, ...] = copy_sample(self._data.batch(microbatch, batch, context))
        return copied


def copy_sample(sample: Any) -> Any:
    """Return a copy of a tuple of tensors, of the same class. Anything else is returned as it is,
    to be refused."""
    if not isinstance(sample, tuple):
        return sample
    copies = [item.clone() if isinstance(item, Tensor) else item for item in sample]
    return getattr(sample, "_make", tuple)(copies)


def is_users_own(training: TrainingConfig) -> bool:
    """Return whether the training data come from the user's own code."""
    return training.data is not None and training.data != "torchtitan"


def has_costs(data: Data) -> bool:
    """Return whether the data have a method `costs(iteration)`, by which they are dealt.

    It returns the times of F, I and W of each sample as multiples of the mean over samples. See
    `schedules.dealing`.
    """
    return callable(getattr(data, "costs", None))


def has_lengths(data: Data) -> bool:
    """Return whether the data have `lengths(iteration)`, of each sample's documents in tokens."""
    return callable(getattr(data, "lengths", None))


def load_data(config: RunConfig, microbatches: Sequence[int] = (1,), read: SamplesRead = NOTHING_READ) -> Data:
    """Load the data that a configuration names.

    `microbatches` has the number of micro-batches of each pipeline in an iteration. The count of
    samples continues from `read`, the samples that runs on other grids have read. Raises
    ConfigError if the text cannot be read or is shorter than a sequence, if the user's function
    cannot be imported, or if the data cannot continue the count.
    """
    if config.training.data is not None:
        return _load_user_data(config, config.training.data, microbatches, read)
    if config.training.tokens is not None or config.training.tokenizer is not None:
        return _load_tokens(config, microbatches, read)
    path = config.training.text
    text = _library_text() if path is None else _map_text(Path(path))
    needed = config.model.context + 1
    if text.size < needed:
        source = "not given, and the standard library's sources are" if path is None else f"{path!r},"
        raise ConfigError(f"training.text is {source} of {text.size} bytes; expected at least {needed}, "
                          "one more than model.context")
    return ByteText(torch.from_numpy(text), config.training.seed)


def _load_user_data(config: RunConfig, name: str, microbatches: Sequence[int], read: SamplesRead) -> Data:
    """Load the data that `[training] data` names: "torchtitan", or a user's own function."""
    # Raises ConfigError unless they implement `Data` or `IterationData`.
    make: Callable[[RunConfig], Any]
    if name == "torchtitan":
        from slipstream.runtime.data.torchtitan_data import TorchtitanData

        make = TorchtitanData
    else:
        make = load_reference("training.data", name)
    try:
        data: Any = make(config)
        digest: object = data.digest
        if read != NOTHING_READ:
            if not callable(getattr(data, "begin_at", None)):
                raise ConfigError(f"training.data is {name!r}: the checkpoint's {read.iteration} iterations have read "
                                  f"{read.samples} samples, this job would have read another number, and the "
                                  "data have no method begin_at(iteration, samples) to count on; resume with the "
                                  "same micro-batches")
            data.begin_at(*read)
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(f"training.data is {name!r}, which fails: {type(error).__name__}: {first_line(error)}"
                          ) from error
    if not isinstance(digest, str):
        raise ConfigError(f"training.data is {name!r}: its digest is a {type(digest).__name__}; expected a str")
    return _IterationAdapter(data, microbatches) if hasattr(data, "samples") else _CopiedData(data)


def load_validation_data(config: RunConfig, microbatches: Sequence[int] = (1,)) -> Data | None:
    """Load the data for evaluations; None if the configuration has none. `microbatches` is as in
    `load_data`, and ConfigError is raised as there."""
    training = config.training
    if training.evaluate_every is None:
        return None
    asked = replace(training, text=training.validation_text, tokens=training.validation_tokens,
                    data=training.validation_data, tokenizer=training.tokenizer if training.validation_text else None,
                    shuffle=False)
    try:
        return load_data(replace(config, training=asked), microbatches)
    except ConfigError as error:
        raise ConfigError(_KEY.sub(r"training.validation_\1", str(error))) from None


def is_evaluated(training: TrainingConfig, iteration: int) -> bool:
    """Return whether the model is evaluated after this iteration's step."""
    return training.evaluate_every is not None and (iteration + 1) % training.evaluate_every == 0


def _load_tokens(config: RunConfig, microbatches: Sequence[int], read: SamplesRead) -> TokenData:
    """Load a file of tokens, or a text and its tokenizer. Raises ConfigError."""
    training, vocabulary = config.training, vocabulary_size(config.model)
    if training.tokens is not None:
        source = f"training.tokens is {training.tokens!r}"
        tokens = map_tokens(Path(training.tokens), training.token_dtype)
    else:
        assert training.text is not None and training.tokenizer is not None
        source = f"training.text is {training.text!r}"
        tokens = tokenize_file(Path(training.text), Path(training.tokenizer), vocabulary)
    options: dict[str, Any] = {"vocabulary": vocabulary, "context": config.model.context, "microbatches": microbatches,
                               "seed": training.seed, "shuffle": training.shuffle, "read": read}
    if training.document_end is None:
        return TokenData(source, tokens, **options)
    return DocumentData(source, tokens, **options, document_end=training.document_end, batch=training.batch)


def batch_form(config: RunConfig) -> TupleForm:
    """Return the shapes and dtypes of a micro-batch's tensors. Raises ConfigError unless the data
    return a tuple of tensors."""
    training, context = config.training, config.model.context
    if training.data is None:
        tokens = TensorForm((training.batch, context), torch.int64)
        return TupleForm((tokens,) * 2) if training.document_end is None \
            else TupleForm((tokens,) * 3, PackedBatch._fields)
    given = read_batch(load_data(config), Microbatch(0, 0, 0), config)
    if not isinstance(given, tuple) or len(given) < 2 or not all(isinstance(element, Tensor) for element in given):
        kinds = f" of {[type(element).__name__ for element in given]}" if isinstance(given, tuple | list) else ""
        raise ConfigError(f"training.data is {training.data!r}: its batch is a {type(given).__name__}{kinds}; expected "
                          "a tuple of tensors: the input of layer 0, the target of the loss, then other inputs that "
                          "layers read")
    form = form_of(given)
    assert isinstance(form, TupleForm)
    return form


def is_fully_masked(batch: tuple[Tensor, ...]) -> bool:
    """Return whether all targets of a micro-batch are `IGNORED_TARGET`."""
    target = batch[1] if len(batch) > 1 else None
    return isinstance(target, Tensor) and target.dtype == torch.int64 and target.numel() > 0 \
        and bool((target == IGNORED_TARGET).all())


def require_form(given: object, form: Form, name: Microbatch) -> None:
    """Raise BadSampleError if the micro-batch of this name has another form. Receives are posted
    for tensors of that form."""
    actual = form_of(given) if isinstance(given, tuple) and all(isinstance(item, Tensor) for item in given) else None
    if actual != form:
        raise BadSampleError(
            f"the data give {_describe(actual)} for micro-batch {name.index} of pipeline {name.pipeline} in iteration "
            f"{name.iteration}, and {_describe(form)} for the first; expected the same shapes for all: pad them, and "
            "tell loss and layers where they end")


def _describe(form: Form | None) -> str:
    shapes = [] if not isinstance(form, TupleForm) else [
        f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}" for tensor in form.tensors]
    return f"({', '.join(shapes)})" if shapes else "a value that is not a tuple of tensors"


def _map_text(path: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Map a user's text file as bytes (uint8). Raises ConfigError if it cannot be read."""
    # The mapping is copy-on-write, since torch requires writable memory; workers of a machine share
    # the pages.
    if not path.is_file():
        reason = "which is not a file" if path.exists() else "which does not exist"
        raise ConfigError(f"training.text is {str(path)!r}, {reason}; expected the path of a text file")
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(path, np.uint8, mode="c")
    except OSError as error:
        raise ConfigError(f"training.text is {str(path)!r}, which cannot be read: {error.strerror}") from None


def _library_text() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the first `LIBRARY_BYTES` bytes of the standard library's sources."""
    text = bytearray()
    root = Path(sysconfig.get_path("stdlib"))
    for path in _walk_sources(root) if root.is_dir() else ():  # some Python installations have no sources
        text += path.read_bytes()
        if len(text) >= LIBRARY_BYTES:
            break
    return np.frombuffer(text[:LIBRARY_BYTES], np.uint8)


def _walk_sources(root: Path) -> Iterator[Path]:
    """Yield the Python sources below a folder: its files, then its subfolders, by name."""
    folders = []
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            folders.append(Path(entry.path))
        elif entry.name.endswith(".py") and entry.is_file():
            yield Path(entry.path)
    for folder in folders:
        if folder.name not in _NOT_LIBRARY:
            yield from _walk_sources(folder)
