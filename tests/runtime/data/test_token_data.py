"""Tokens in files: what is read, in which order, and what is refused."""

import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.data.token_data import BadTokenError, TokenData, permute_places

COUNTS = (2, 3)
"""Micro-batches of each pipeline."""
BATCH = 2
CONTEXT = 4


def config_for(path: Path, vocabulary: int = 1000, **training: object) -> RunConfig:
    return parse_run_config(
        {"context": CONTEXT, "vocabulary": vocabulary},
        {"tokens": str(path), "batch": BATCH, **training},
    )


def flat(path: Path, tokens: object, dtype: str = "<u2") -> Path:
    np.asarray(tokens, dtype).tofile(path)
    return path


def megatron(folder: Path, tokens: object, dtype: str, code: int, lengths: list[int]) -> Path:
    """The two files, as Megatron's IndexedDatasetBuilder writes them."""
    path = flat(folder / "data.bin", tokens, dtype)
    size = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *lengths[:-1]]) * size
    path.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), 2)
        + np.asarray(lengths, "<i4").tobytes()
        + np.asarray(pointers, "<i8").tobytes()
        + np.asarray([0, len(lengths)], "<i8").tobytes()
    )
    return path


def microbatches(iterations: range) -> list[Microbatch]:
    return [
        Microbatch(iteration, pipeline, index)
        for iteration in iterations
        for pipeline, count in enumerate(COUNTS)
        for index in range(count)
    ]


def first_tokens(data: TokenData, names: list[Microbatch]) -> list[int]:
    return [row for name in names for row in data.batch(name, BATCH, CONTEXT)[0][:, 0].tolist()]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 64, 1000])
def test_a_permutation_at_any_place(count: int) -> None:
    places = np.arange(count, dtype=np.uint64)
    found = permute_places(places, count, 7)
    assert sorted(found.tolist()) == list(range(count))
    assert permute_places(places[-1:], count, 7).tolist() == [found[-1]]
    if count >= 10:
        other = permute_places(places, count, 8)
        assert (found == places).mean() < 0.3 and (found == other).mean() < 0.3


def test_all_orders_are_as_likely() -> None:
    orders = Counter(
        tuple(permute_places(np.arange(4, dtype=np.uint64), 4, seed).tolist())
        for seed in range(2400)
    )
    assert len(orders) == 24 and max(abs(count - 100) for count in orders.values()) < 50


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_reads_each_sample_once(shuffle: bool, tmp_path: Path) -> None:
    """37 samples, 10 an iteration: epochs end within iterations and within micro-batches."""
    path = flat(tmp_path / "train.bin", np.arange(37 * CONTEXT + 3))
    data = load_data(config_for(path, shuffle=shuffle), COUNTS)
    assert data.samples == 37
    read = first_tokens(data, microbatches(range(15)))
    epochs = [read[start : start + 37] for start in range(0, 148, 37)]
    assert all(sorted(epoch) == list(range(0, 148, CONTEXT)) for epoch in epochs)
    kinds = {tuple(epoch) for epoch in epochs}
    assert len(kinds) == (4 if shuffle else 1)
    # Whoever asks alone, and later, reads the same.
    again = load_data(config_for(path, shuffle=shuffle), COUNTS)
    assert first_tokens(again, [Microbatch(11, 1, 2)]) == read[11 * 10 + 8 : 11 * 10 + 10]
    tokens, targets = again.batch(Microbatch(11, 1, 2), BATCH, CONTEXT)
    assert torch.equal(tokens + 1, targets) and tokens.dtype is torch.int64


def test_the_seed_and_the_file_make_the_data(tmp_path: Path) -> None:
    path = flat(tmp_path / "train.bin", np.arange(400))
    data, other = (load_data(config_for(path, seed=seed), COUNTS) for seed in (0, 1))
    names = microbatches(range(2))
    assert first_tokens(data, names) != first_tokens(other, names) and data.digest == other.digest
    changed = flat(tmp_path / "other.bin", np.arange(400) + 1)
    assert load_data(config_for(changed), COUNTS).digest != data.digest


@pytest.mark.parametrize(("dtype", "code", "name"), [("<u2", 8, "uint16"), ("<i4", 4, "int32")])
def test_megatrons_index_says_the_dtype(dtype: str, code: int, name: str, tmp_path: Path) -> None:
    path = megatron(tmp_path, np.arange(30), dtype, code, [10, 13, 7])
    for config in (
        config_for(path, shuffle=False),
        config_for(path, shuffle=False, token_dtype=name),
    ):
        assert load_data(config, COUNTS).batch(Microbatch(0, 0, 1), BATCH, CONTEXT)[0].tolist() == [
            [8, 9, 10, 11],
            [12, 13, 14, 15],
        ]


@pytest.mark.parametrize(
    ("make", "options", "said"),
    [
        (
            lambda folder: folder / "none.bin",
            {},
            "none.bin', which does not exist; expected a file of tokens",
        ),
        (lambda folder: folder, {}, "which is no file"),
        (
            lambda folder: flat(folder / "a.bin", range(4)),
            {},
            "of 4 tokens; expected at least 5, one more than",
        ),
        (
            lambda folder: flat(folder / "a.bin", range(9), "u1"),
            {},
            "of 9 bytes; expected a multiple of 2, as tokens",
        ),
        (
            lambda folder: flat(folder / "a.bin", [1, 2, 3, 1000, 5, 6]),
            {},
            "token 3 is 1000; expected 0 to 999, as the model's vocabulary is 1000",
        ),
        (
            lambda folder: flat(folder / "a.bin", [1, 2, -3, 4, 5, 6], "<i4"),
            {"token_dtype": "int32"},
            "token 2 is -3;",
        ),
        (
            lambda folder: megatron(folder, range(30), "<u2", 8, [10, 13, 6]),
            {},
            "data.idx: lists 3 sequences of 58 bytes; its .bin has 60 bytes: they do not "
            "belong together",
        ),
        (
            lambda folder: megatron(folder, range(30), "<u2", 6, [30]),
            {},
            "data.idx: version 1, tokens of code 6; expected",
        ),
        (
            lambda folder: megatron(folder, range(30), "<u2", 8, [30]),
            {"token_dtype": "int32"},
            "training.token_dtype is 'int32', and ",
        ),
    ],
    ids=[
        "none",
        "a folder",
        "short",
        "odd",
        "beyond",
        "negative",
        "another index",
        "floats",
        "another dtype",
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(make, options, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_data(config_for(make(tmp_path), **options), COUNTS)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_token_beyond_the_vocabulary_is_found_when_it_is_read(
    monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("slipstream.runtime.data.token_data.BLOCK_TOKENS", 8)
    monkeypatch.setattr("slipstream.runtime.data.token_data.CHECKED_TOKENS", 24)
    tokens = np.arange(100) % 50
    tokens[21] = 1000
    data = load_data(config_for(flat(tmp_path / "a.bin", tokens), shuffle=False), COUNTS)
    with pytest.raises(BadTokenError, match=r"token 21 is 1000; expected 0 to 999"):
        first_tokens(data, microbatches(range(1)))


def test_a_model_of_transformers_says_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 300}')
    model = {"hugging_face": str(tmp_path / "config.json"), "context": CONTEXT}
    for last in (299, 300):
        path = flat(tmp_path / f"{last}.bin", [*range(9), last])
        config = parse_run_config(model, {"tokens": str(path)})
        if last == 299:
            assert load_data(config).samples == 2
            continue
        with pytest.raises(
            ConfigError, match="token 9 is 300; expected 0 to 299, as the model's vocabulary is 300"
        ):
            load_data(config)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"its vocab_size is None; expected a whole number"):
        load_data(config)


@pytest.mark.parametrize(
    ("training", "said"),
    [
        ({"tokens": "a", "text": "b"}, "training.tokens and training.text are both given"),
        ({"tokenizer": "a"}, "training.tokenizer is 'a', and training.text is not given"),
        (
            {"token_dtype": "uint8"},
            "training.token_dtype is 'uint8'; expected one of 'uint16', 'uint32', 'int32'",
        ),
        ({"options": 3}, "training.options is 3; expected a table"),
        (
            {"options": {"a": float("nan")}},
            "training.options has a date, or a number that is not finite",
        ),
    ],
)
def test_keys_that_do_not_go_together(training: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_run_config({}, training)
