"""Text by a tokenizer, as tokens that are made once."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data import tokenized_text
from slipstream.runtime.data.data import Microbatch, load_data

TEXT = "the cat sat on the mat\n" * 40 + "the dog sat on the log\n" * 40


@pytest.fixture
def config(tmp_path: Path, monkeypatch) -> RunConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text").write_text(TEXT)
    return parse_run_config(
        {"context": 8, "vocabulary": 300},
        {
            "text": str(tmp_path / "text"),
            "tokenizer": str(tmp_path / "tokenizer.json"),
            "shuffle": False,
        },
    )


def test_tokens_are_the_tokenizers_and_kept(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    # Characters: the text is read in several pieces.
    monkeypatch.setattr(tokenized_text, "PIECE_CHARACTERS", 100)
    expected = Tokenizer.from_file(config.training.tokenizer).encode(TEXT).ids
    data = load_data(config)
    assert data.batch(Microbatch(2, 0, 0), 1, 8)[0].tolist() == [expected[16:24]]
    (kept,) = (tmp_path / "cache" / "slipstream" / "tokens").iterdir()
    assert kept.stat().st_size == 2 * len(expected)
    monkeypatch.setattr(tokenized_text, "_tokenize_pieces", None)  # it is not tokenized again
    assert load_data(config).digest == data.digest


def test_where_nothing_can_be_kept(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    digest = load_data(config).digest
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_data(config).digest == digest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            "tokenizer.json', which does not exist; expected the path",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "which cannot be read as a tokenizer: ",
        ),
        (lambda folder: (folder / "text").write_bytes(b"a\xff"), "which is not UTF-8 text: "),
        (lambda folder: (folder / "text").unlink(), "text', which cannot be read: No such file"),
        (lambda folder: (folder / "text").write_text(""), "of 0 tokens; expected at least 9"),
    ],
)
def test_what_cannot_be_used_is_refused(
    change, said: str, config: RunConfig, tmp_path: Path
) -> None:
    change(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_data(config)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_model_must_have_the_tokens(config: RunConfig) -> None:
    small = parse_run_config(
        {"context": 8, "vocabulary": 256},
        {"text": config.training.text, "tokenizer": config.training.tokenizer},
    )
    with pytest.raises(
        ConfigError, match=r"of \d+ tokens; expected at most 256, the model's vocabulary"
    ):
        load_data(small)
