"""The help of each command.

Options are never cut, and its examples are command lines that it takes.
"""

import shlex

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import COMMANDS, app, load_command
from slipstream.cli.help import EXAMPLES


def test_every_command_has_two_examples():
    assert EXAMPLES.keys() == COMMANDS.keys() and {len(lines) for lines in EXAMPLES.values()} == {2}


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_taken_and_end_the_help(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).stdout
    assert shown.rstrip().endswith("\n".join(f"  {line}" for line in EXAMPLES[name]))
    for line in EXAMPLES[name]:
        program, command, *arguments = shlex.split(line)
        context = load_command(command).make_context(command, arguments)
        assert (program, command) == ("slipstream", name) and context.params


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_is_cut_at_a_hyphen(name):
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).stdout
    assert not [
        line for line in shown.split("\n") if line.endswith("-") and "--" in line.split()[-1]
    ]
