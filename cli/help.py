"""Define what all commands share: the layout of their help.

The help shows options in groups (`rich_help_panel`), readable at 80 columns. The metavar (SEC,
FILE, N) tells the kind of an option's value. The valid range is not shown; the error for a value
outside of it states it.
"""

import re
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from slipstream.cli.shared.outputs import require_no_overwriting

DEFAULT_GROUP = "Options"
"""Title, in the help, of the options that belong to no group."""
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
HARD_HYPHEN = "\N{NON-BREAKING HYPHEN}"
"""Stands for options' hyphens while text is broken into lines, so no option is cut."""
EXAMPLES = {
    "new": (
        "slipstream new --preset llama-3-8b --out job.toml",
        "slipstream new --model config.json --gpu h100 --stages 4 --out job.toml",
    ),
    "plan": (
        "slipstream plan job.toml --failed 2.1 --out broken.json",
        "slipstream plan job.toml --failed 2.1 --layers move --steps 2000000",
    ),
    "table": (
        "slipstream table job.toml --max-failures 4 --out table",
        "slipstream table job.toml --max-failures 2 --steps 100000 --out table",
    ),
    "lookup": (
        "slipstream lookup table --failed 2.1 --out broken.json",
        "slipstream lookup table --failed 2.1 --failed 0.3 --settled",
    ),
    "check": ("slipstream check broken.json", "slipstream check --bound broken.json"),
    "show": (
        "slipstream show broken.json --html broken.html",
        "slipstream show --run run --html run.html",
    ),
    "export": (
        "slipstream export plan.json --to torch-csv --out plan.csv",
        "slipstream export run/checkpoints/iteration-100 --to hugging-face --out model",
    ),
    "profile": (
        "slipstream profile --job job.toml --out measured.toml",
        "slipstream profile --json",
    ),
    "train": (
        "slipstream train job.toml --kill 1.1@5 --return 1.1@12 --out run",
        "slipstream train job.toml --resume run --iterations 100 --out run",
    ),
    "simulate": (
        "slipstream simulate job.toml --failed 2.1",
        "slipstream simulate job.toml --days 30 --preset llama-3 --html report.html",
    ),
    "reproduce": (
        "slipstream reproduce failure-cost",
        "slipstream reproduce unlike-layers --no-picture --out tables",
    ),
    "jitter": (
        "slipstream jitter broken.json",
        "slipstream jitter plan.json --lengths lengths.txt",
    ),
    "doctor": ("slipstream doctor", "slipstream doctor --json"),
    "demo": ("slipstream demo", "slipstream demo --short --out out/demo"),
}
"""Two examples of each command, at the end of its help."""
MAX_NAME_WIDTH = 24
"""Largest width of the names' column, in characters; a longer name has its own line."""


class Command(TyperCommand):
    """Typer command whose help has groups of options, and which never overwrites its input."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, what the command does, its options, and two examples."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_options(self.get_params(ctx), formatter)
        with formatter.section("Examples"):
            for example in EXAMPLES.get(self.name or "", ()):
                formatter.write(f"  {example}\n")

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exits 2 if an output may not be written (`require_no_overwriting`)."""
        require_no_overwriting(self.get_params(ctx), ctx.params)
        return super().invoke(ctx)


def write_options(params: list[Any], formatter: Any) -> None:
    """Write a section of the help for each group of options.

    Groups come in the order of their first options; options without a group come last.
    """
    groups: dict[str, dict[str, str]] = {}
    for param in params:
        group = (
            "Arguments"
            if param.param_type_name == "argument"
            else param.rich_help_panel or DEFAULT_GROUP
        )
        groups.setdefault(group, {})[_format_name(param)] = _explain_option(param)
    others = groups.pop(DEFAULT_GROUP, {})
    for group, options in (groups | {DEFAULT_GROUP: others}).items():
        write_section(group, options, formatter)


def write_section(title: str, rows: Mapping[str, str], formatter: Any) -> None:
    """Write a section of the help: a title, and rows of name and explanation."""
    with formatter.section(title):
        formatter.write_dl(
            [
                (name, _OPTION.sub(lambda option: option[0].replace("-", HARD_HYPHEN), text))
                for name, text in rows.items()
            ],
            col_max=MAX_NAME_WIDTH,
        )
    formatter.buffer[:] = [text.replace(HARD_HYPHEN, "-") for text in formatter.buffer]


def _format_name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return ", ".join(sorted(param.opts, key=len)) + (f" {param.metavar}" if param.metavar else "")


def _explain_option(param: Any) -> str:
    default = param.default
    if not param.show_default or default is None or callable(default) or isinstance(default, bool):
        return param.help or ""
    return f"{param.help} [{f'{default:g}' if isinstance(default, float) else default}]"
