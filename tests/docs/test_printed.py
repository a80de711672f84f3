"""Documents hold what commands printed: `benchmarks.printed` says where they do not."""

from benchmarks.printed import renewed

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
    (tmp_path / "reproduction" / "a.md").write_text("# Title\n\n| 1.5 |\n\n- x: 3\n\nAssumed:\n\n- y\n")
    text, differing, missing = renewed(DOCUMENT, tmp_path)
    assert differing == ["reproduction/a.md"] and missing == ["reproduction/b.md"]
    assert text == DOCUMENT.replace("| 1.0 |", "| 1.5 |\n\n- x: 3")
    assert renewed(text, tmp_path)[1] == []
