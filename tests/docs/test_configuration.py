"""docs/configuration.md has every key of the training, with its default."""

import json
import re
from pathlib import Path

import msgspec

from slipstream.runtime.config import ParameterGroup, TrainingConfig

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def keys_after(heading: str) -> dict[str, str]:
    """The keys and second cells of the tables below a heading.

    They go up to the next heading of its kind.
    """
    section = PAGE.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \|", section, re.MULTILINE)
    return {key: second for keys, second in rows for key in re.findall(r"`(\w+)`", keys)}


def test_every_key_of_the_training_with_its_default() -> None:
    said = {}
    for key, default in keys_after("## `[training]`").items():
        said[key] = "null" if default == "none" else default.strip("`")
    fields = {
        field.encode_name: getattr(TrainingConfig(), field.name)
        for field in msgspec.structs.fields(TrainingConfig)
    }
    assert said.keys() == fields.keys()
    for key, default in fields.items():
        assert json.loads(said[key]) == json.loads(msgspec.json.encode(default)), key


def test_every_key_of_a_parameter_group() -> None:
    fields = [field.encode_name for field in msgspec.structs.fields(ParameterGroup)]
    assert list(keys_after("## Parameter groups")) == fields
