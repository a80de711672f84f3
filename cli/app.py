"""Gathers the commands; `slipstream` starts here."""

import typer

from cli import check, demo, lookup, plan, show, table, train

app = typer.Typer(
    name="slipstream",
    help="Plan and replay pipeline-parallel training that keeps its speed when workers die.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan")(plan.plan)
app.command("table")(table.table)
app.command("lookup")(lookup.lookup)
app.command("check")(check.check)
app.command("show")(show.show)
app.command("train")(train.train)
app.command("demo")(demo.demo)


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line and exit 130."""
    app()
