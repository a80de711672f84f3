"""Build the documentation: pages here, commands from their help, the API from docstrings.

make docs        (any warning is an error)
"""

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from generate import write_commands, write_pictures  # noqa: E402

project = "Slipstream"
author = "the Slipstream authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "Slipstream"
exclude_patterns = ["_build", "README.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
copybutton_prompt_text = "$ "
# Docstrings are plain text with `code`, not links to other objects.
default_role = "literal"
suppress_warnings = ["ref.python"]


PROSE: dict[str, list[str]] = {}


def keep_prose(
    app: Any,
    what: str,
    name: str,
    obj: object,
    options: object,
    lines: list[str],
) -> None:
    """Keep an attribute's text from napoleon, which reads a type before a colon."""
    if what in ("attribute", "data", "property"):
        PROSE[name] = list(lines)


def restore_prose(
    app: Any,
    what: str,
    name: str,
    obj: object,
    options: object,
    lines: list[str],
) -> None:
    """After it."""
    lines[:] = PROSE.pop(name, lines)


def setup(app: Any) -> None:
    """Write the generated pages; Sphinx calls this before it reads any page."""
    app.connect("autodoc-process-docstring", keep_prose, priority=400)
    app.connect("autodoc-process-docstring", restore_prose, priority=600)
    write_commands(HERE / "generated" / "commands.md")
    write_pictures(HERE / "generated")
