"""Define the command-line application: its commands and how they are loaded.

The module of a command is imported only when that command runs, so that planning does not wait for
torch.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import slipstream
from slipstream.cli.help import Command, write_options, write_section
from slipstream.cli.shared.console import delay_interrupts, print_error, suggest

COMMANDS = {
    "new": "Write a job file: from a preset, a trace, or an estimate of a model.",
    "plan": "Plan one schedule for a job and the workers that are down.",
    "table": "Plan a table of schedules: two for every number of failures.",
    "lookup": "Look up the schedule for the workers that are down, and say who plays which role.",
    "check": "Check schedules against every rule, independently of how they were made.",
    "show": (
        "Show a schedule: a row for each worker, time from left to right; or the course of a run."
    ),
    "export": (
        "Write a schedule, a job's placement, or a checkpoint's model in the format of "
        "another library."
    ),
    "profile": (
        "Measure the stages of a job's model on this machine: times, memory, transfers and "
        "all-reduces."
    ),
    "train": "Train a job's model, one process per live worker, replaying a schedule.",
    "simulate": (
        "Simulate policies over a failure trace: throughput over time, averages and lost time "
        "by cause."
    ),
    "reproduce": "Reproduce a table of the documentation: as table, JSON and picture.",
    "jitter": (
        "Replay a schedule thousands of times with noise in op times, with a straggler, or "
        "with unequal samples."
    ),
    "doctor": (
        "Report what is installed and which backends work, and test planning, checking and "
        "communication."
    ),
    "demo": (
        "Plan the published worked example, then train a small GPT with and without one of "
        "its workers."
    ),
}
"""One line of help for each command, which is the function NAME in `cli/NAME.py`."""


class _Interrupted(Exception):  # noqa: N818
    """Exception that stands for Ctrl-C inside typer, which would end without a message."""


@contextmanager
def _preserve_interrupts() -> Iterator[None]:
    """Convert KeyboardInterrupt to `_Interrupted`, which typer does not catch."""
    try:
        yield
    except KeyboardInterrupt:
        raise _Interrupted from None


class _CommandGroup(TyperGroup):
    """Group of all commands, which imports a command only when it runs."""

    # Contexts and commands are `Any`: some versions of typer bring a click of their own.

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of the commands, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Return a stand-in for a command, with its line of help; None if unknown.

        The command itself, which can run, is loaded by `resolve_command`.
        """
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name]) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return name, loaded command and other arguments.

        Exits 2 for an unknown command, and for a rehearsal of `train` that cannot happen.
        """
        # Explain what typer cannot: a removed command, a typing error, and for `train`, what is
        # impossible on this machine before torch is imported.
        if args[0] == "benchmark":
            ctx.fail(
                "the command benchmark was removed; in a checkout, run python -m benchmarks.fleet"
            )
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no such command {args[0]!r}{suggest(args[0], COMMANDS)}")
        if args[0] == "train":
            from slipstream.cli.shared.launch_options import require_possible_rehearsals

            require_possible_rehearsals(args[1:])
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(args[0]) if command else None, rest

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse the command line; print the help, exiting 2, if a user gave none."""
        if not args and not ctx.resilient_parsing:  # not where a shell completes
            sys.stdout.write(ctx.get_help() + "\n")
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, what the program does, its commands, and its options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_section("Commands", COMMANDS, formatter)
        write_options(self.get_params(ctx), formatter)

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Parse the program's own options, and return click's context."""
        with _preserve_interrupts():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the command line names."""
        with _preserve_interrupts():
            return super().invoke(ctx)

    def main(
        self,
        args: Any = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the program, and exit with its status.

        The status is 2 for an invalid command line, with one line on stderr. Raises
        KeyboardInterrupt after Ctrl-C. Without `standalone_mode`, only click's method runs.
        """
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        try:
            sys.exit(
                super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            )
        except _Interrupted:
            raise KeyboardInterrupt from None
        except Exception as error:
            if not hasattr(error, "format_message"):  # an error of click, from either copy
                raise
            ctx = getattr(error, "ctx", None)
            hint = f" (see {ctx.command_path} --help)" if ctx is not None else ""
            print_error(_format_as_clause(error.format_message()) + hint)
            sys.exit(2)


def _format_as_clause(message: str) -> str:
    """Return click's message as one line, begun in lower case, without full stop."""
    text = " ".join(message.split()).rstrip(".")
    head, separator, options = text.partition(" (Possible options: ")
    if separator:
        text = f"{head}; did you mean {options.removesuffix(')')}?"
    return text[:1].lower() + text[1:]


def load_command(name: str) -> Any:
    """Import the module of a command; return the command with its options.

    Raises KeyboardInterrupt after the import if Ctrl-C was pressed during it.
    """
    single = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    with delay_interrupts():
        module = importlib.import_module(f"slipstream.cli.{name}")
    single.command(name, cls=Command)(getattr(module, name))
    return typer.main.get_command(single)


app = typer.Typer(
    name="slipstream",
    help="Plan and replay pipeline-parallel training that keeps its speed when workers die.",
    cls=_CommandGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"slipstream {slipstream.__version__}\n")
        raise typer.Exit


@app.callback()
def _root_options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help=("Print the version and exit."),
        ),
    ] = False,
) -> None:
    """Define the program's own options."""
    # Only with such a callback does typer make the app a group of commands.
