"""Gathers the commands; `slipstream` starts here.

A command's module is imported when the command is run, so that planning does not wait for torch.
"""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "new": "Write a job file: from a preset, a trace, or an estimate of a model.",
    "plan": "Plan one schedule for a job and the workers that are down.",
    "table": "Plan a table of schedules: one for every number of failures.",
    "lookup": "Look up the schedule for the workers that are down, and say who plays which role.",
    "check": "Check schedules against every rule, independently of how they were made.",
    "show": "Show a schedule: a row for each worker, time from left to right.",
    "export": "Hand a schedule to another runtime.",
    "profile": "Measure the stages of a job's model on this machine: times, memory, transfers and all-reduces.",
    "train": "Train a job's model, one process a live worker, replaying a schedule.",
    "simulate": "Run a job through a failure trace under several policies: throughput over time, averages and cost.",
    "reproduce": "Make a published figure again: a table, JSON and a picture, with the published points drawn in.",
    "jitter": "Replay a schedule thousands of times with noise in its op times, or with a straggler.",
    "demo": "Plan the published worked example, then train a small GPT with and without one of its workers.",
}
"""Name and one line of help; `cli/NAME.py` holds a function of that name."""


class _Commands(TyperGroup):
    """Knows the commands by name, and loads the one that is asked for.

    Contexts and commands are `Any`, because typer brings its own copy of click or not, depending on its version.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """In the order in which they are met."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """What the list of commands needs: the name and its line of help."""
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command itself, to run it."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, load(args[0]) if found else None, rest


def load(name: str) -> Any:
    """Import a command and build its options."""
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    single.command(name)(getattr(importlib.import_module(f"cli.{name}"), name))
    return typer.main.get_command(single)


app = typer.Typer(
    name="slipstream",
    help="Plan and replay pipeline-parallel training that keeps its speed when workers die.",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options() -> None:
    """Makes the app a group; there are no options before the command."""


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line and exit 130."""
    app()
