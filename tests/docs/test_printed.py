"""Documents hold what commands printed: `benchmarks.printed` says where they do not."""

from pathlib import Path

import pytest

from benchmarks.printed import DOCUMENTS, renewed, unprinted

ROOT = Path(__file__).parents[2]

DOCUMENT = """A

<!-- printed: reproduction/a.md -->
| 1.0 |
<!-- end -->

B
<!-- printed: reproduction/b.md -->
| 2.0 |
<!-- end -->
"""


def test_a_block_that_differs_becomes_what_was_printed(tmp_path):
    (tmp_path / "reproduction").mkdir()
    (tmp_path / "reproduction" / "a.md").write_text(
        "# Title\n\n| 1.5 |\n\n- x: 3\n\nAssumed:\n\n- y\n"
    )
    text, differing, missing = renewed(DOCUMENT, tmp_path)
    assert differing == ["reproduction/a.md"] and missing == ["reproduction/b.md"]
    assert text == DOCUMENT.replace("| 1.0 |", "| 1.5 |\n\n- x: 3")
    assert renewed(text, tmp_path)[1] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_state_no_figure_that_no_command_printed(name):
    assert list(unprinted((ROOT / name).read_text())) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1.0 and 100 %, or 1.1", [(7, "1.1")]),
        ("`1.1`, arXiv 2405.14009, 6.7B, 0.2.0, Python 3.11, Apache-2.0", []),
        ("7 %", [(7, "7")]),
        ("<!-- from: a paper -->\n7 %\n<!-- end -->", []),
        ("16 micro-batches", []),
        ("## Next\n1.0", [(8, "1.0")]),
    ],
)
def test_figures_without_a_block_in_their_section_are_found(text, found):
    document = DOCUMENT.split("\nB\n")[0] + f"\n{text}\n"
    assert list(unprinted(document)) == found
