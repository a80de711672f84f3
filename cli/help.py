"""What all commands have in common: their help, and that they write over nothing that they read.

The help has options in groups, a line or two each, readable at 80 columns.

A group is the `rich_help_panel` of an option. The kind of a value is told by its name in capitals (SEC, FILE, N), and
its range by the line that refuses a wrong one.
"""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from slipstream.cli.shared.overwriting import require_no_overwriting

OTHERS = "Options"
"""The group of options without one."""
LEFT = 24
"""Characters for names of options; what is longer has a line of its own."""


class Command(TyperCommand):
    """A command of the program. Contexts and formatters are `Any`: see `cli.app`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage, what the command does, then its options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_options(self.get_params(ctx), formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, unless it would write over one of its own inputs."""
        require_no_overwriting(self.get_params(ctx), ctx.params)
        return super().invoke(ctx)


def write_options(params: list[Any], formatter: Any) -> None:
    """A section for each group of options, in the order of their first."""
    groups: dict[str, dict[str, str]] = {}
    for param in params:
        group = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or OTHERS
        groups.setdefault(group, {})[_name(param)] = _explained(param)
    others = groups.pop(OTHERS, {})
    for group, options in (groups | {OTHERS: others}).items():
        write_section(group, options, formatter)


def write_section(title: str, rows: Mapping[str, str], formatter: Any) -> None:
    """A title and names with what they mean."""
    with formatter.section(title):
        formatter.write_dl(list(rows.items()), col_max=LEFT)


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return ", ".join(sorted(param.opts, key=len)) + (f" {param.metavar}" if param.metavar else "")


def _explained(param: Any) -> str:
    default = param.default
    if not param.show_default or default is None or callable(default) or isinstance(default, bool):
        return param.help or ""
    return f"{param.help} [{f'{default:g}' if isinstance(default, float) else default}]"
