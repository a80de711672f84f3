"""What commands print, where it goes nowhere."""

import io
import subprocess
import sys

import pytest

from slipstream.cli.shared import console
from tests.patience import SECONDS
from tests.runtime.running import command_environment

PROGRAM = """
from slipstream.cli.shared.console import err
print("starts", flush=True)
input()
for number in range(3):
    err.print(f"line {number}")
print("ends")
"""


def test_work_goes_on_where_nobody_reads_stderr_any_more():
    """As that of a run whose mpirun has been killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(),
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "starts\n"
    process.stderr.close()
    answer, _ = process.communicate("\n", timeout=SECONDS)
    assert answer == "ends\n" and process.returncode == 0


WIDE = """
from rich.table import Table
from slipstream.cli.shared.console import out
table = Table("policy", "mostly")
table.add_row("slipstream", "slower even when whole " * 8)
out.print(table)
out.print("a sentence of many words " * 10)
"""


def printed(**environment: str) -> list[str]:
    """Lines that come through a pipe."""
    usual = {name: value for name, value in command_environment().items() if name != "COLUMNS"}
    return subprocess.run(
        [sys.executable, "-c", WIDE],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        env={**usual, **environment},
    ).stdout.splitlines()


def test_in_a_pipe_nothing_is_folded_or_cut():
    *table, sentence = printed()
    assert any("slower even when whole " * 8 in line for line in table)
    assert sentence.strip() == ("a sentence of many words " * 10).strip()


def test_columns_says_how_wide_a_pipe_is():
    assert max(map(len, printed(COLUMNS="60"))) == 60


@pytest.mark.parametrize("kind", [console._StdoutConsole, console._StderrConsole])
def test_in_a_terminal_lines_end_between_words_and_paths_stay_whole(kind):
    written = io.StringIO()
    terminal = kind(file=written, force_terminal=True, width=40, markup=False, highlight=False)
    terminal.print(
        "a line of many words that are longer than a terminal has room for", soft_wrap=True
    )
    assert [line.rstrip() for line in written.getvalue().splitlines()] == [
        "a line of many words that are longer",
        "than a terminal has room for",
    ]
    written.truncate(0)
    terminal.print(f"written to {'x' * 50}", soft_wrap=True)
    assert f"written to {'x' * 50}\n" in written.getvalue()
