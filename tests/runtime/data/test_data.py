import hashlib
from pathlib import Path

import pytest
import torch

from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data.data import LIBRARY_BYTES, Microbatch, load_data


def config_for(path: Path, context: int = 8, seed: int = 0) -> RunConfig:
    return parse_run_config({"context": context}, {"text": str(path), "seed": seed})


def test_the_standard_library_is_a_text() -> None:
    corpus = load_data(RunConfig())
    assert corpus.text.dtype is torch.uint8 and corpus.text.numel() == LIBRARY_BYTES
    assert corpus.digest == load_data(RunConfig()).digest
    assert b"import" in bytes(corpus.text[:100_000].tolist())


def test_targets_follow_tokens(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    corpus = load_data(config_for(path))
    assert corpus.digest == hashlib.sha256(bytes(range(256))).hexdigest()
    tokens, targets = corpus.batch(Microbatch(0, 0, 0), 3, 8)
    assert tokens.shape == targets.shape == (3, 8) and tokens.dtype is targets.dtype is torch.int64
    assert torch.equal(tokens + 1, targets)
    assert torch.equal(tokens[:, 1:], tokens[:, :-1] + 1)


def test_cuts_depend_on_the_address_alone(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"".join(index.to_bytes(3, "big") for index in range(20_000)))
    corpus, again = load_data(config_for(path)), load_data(config_for(path))
    addresses = [Microbatch(i, p, m) for i in range(3) for p in range(3) for m in range(3)]
    cuts = {address: corpus.batch(address, 2, 8)[0] for address in addresses}
    torch.manual_seed(99)
    for address in reversed(addresses):
        assert torch.equal(again.batch(address, 2, 8)[0], cuts[address])
    assert len({tuple(tokens.flatten().tolist()) for tokens in cuts.values()}) == len(addresses)
    other = load_data(config_for(path, seed=1))
    assert not torch.equal(other.batch(addresses[0], 2, 8)[0], cuts[addresses[0]])


def test_the_shortest_text_has_one_cut(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"ninebytes")
    tokens, targets = load_data(config_for(path)).batch(Microbatch(0, 0, 0), 2, 8)
    assert bytes(tokens[1].tolist()) == b"ninebyte" and bytes(targets[0].tolist()) == b"inebytes"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"eight by", "of 8 bytes; expected at least 9"),
        (b"", "of 0 bytes; expected at least 9"),
        (None, "which does not exist"),
    ],
)
def test_texts_that_cannot_be_used(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_data(config_for(path))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="which is not a file"):
        load_data(config_for(tmp_path))
