"""Commands of the documentation, as they stand there, for the folders of a test."""

import re
from collections.abc import Mapping
from pathlib import Path

CLUSTERS, PLANNING = (
    Path(__file__).parents[2] / "docs" / name for name in ("clusters.md", "planning.md")
)


def blocks(heading: str, language: str, page: Path = CLUSTERS) -> list[str]:
    """The blocks of a language below a heading, to the next of its kind."""
    below = page.read_text().partition(f"# {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", below, re.DOTALL)


def replaced(text: str, by: Mapping[str, str]) -> str:
    """With words of it replaced, each of which must be there."""
    for old, new in by.items():
        assert old in text, old
        text = text.replace(old, new)
    return text
