"""Define what all commands have in common: the layout of their help, and a check that no output overwrites an input.

The help shows options in groups, one or two lines for each option, readable at 80 columns.

The group of an option is its `rich_help_panel`. The metavar (SEC, FILE, N) tells the kind of its value. The valid range
is not shown; the error for a value outside of it states it.
"""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from slipstream.cli.shared.overwrite_guard import require_no_overwriting

DEFAULT_GROUP = "Options"
"""Title of the group of options that name no group in the help."""
MAX_NAME_WIDTH = 24
"""Maximum width of option names, in characters. A longer name has a line of its own."""


class Command(TyperCommand):
    """Typer command whose help lists options by group, and which refuses to overwrite its own input. Contexts and
    formatters are typed `Any`, for the reason given in `cli.app`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, what the command does, and its options."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_options(self.get_params(ctx), formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exits 2 if one of its outputs would overwrite what it must not."""
        require_no_overwriting(self.name or "", self.get_params(ctx), ctx.params)
        return super().invoke(ctx)


def write_options(params: list[Any], formatter: Any) -> None:
    """Write a section for each group of options, in the order of the first option of each group.

    Options without a group come last.
    """
    groups: dict[str, dict[str, str]] = {}
    for param in params:
        group = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or DEFAULT_GROUP
        groups.setdefault(group, {})[_format_name(param)] = _explain_option(param)
    others = groups.pop(DEFAULT_GROUP, {})
    for group, options in (groups | {DEFAULT_GROUP: others}).items():
        write_section(group, options, formatter)


def write_section(title: str, rows: Mapping[str, str], formatter: Any) -> None:
    """Write a section of the help to `formatter`: a title, and names with their explanations."""
    with formatter.section(title):
        formatter.write_dl(list(rows.items()), col_max=MAX_NAME_WIDTH)


def _format_name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return ", ".join(sorted(param.opts, key=len)) + (f" {param.metavar}" if param.metavar else "")


def _explain_option(param: Any) -> str:
    default = param.default
    if not param.show_default or default is None or callable(default) or isinstance(default, bool):
        return param.help or ""
    return f"{param.help} [{f'{default:g}' if isinstance(default, float) else default}]"
