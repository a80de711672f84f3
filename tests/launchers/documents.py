"""Commands of docs/clusters.md, as they stand there, for the folders of a test."""

import re
from collections.abc import Mapping
from pathlib import Path

CLUSTERS = Path(__file__).parents[2] / "docs" / "clusters.md"


def blocks(heading: str, language: str) -> list[str]:
    """The blocks of a language below a heading."""
    below = CLUSTERS.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", below, re.DOTALL)


def replaced(text: str, by: Mapping[str, str]) -> str:
    """With words of it replaced, each of which must be there."""
    for old, new in by.items():
        assert old in text, old
        text = text.replace(old, new)
    return text
