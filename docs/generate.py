"""Parts of the documentation that are generated: the command reference, and pictures of plans."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slipstream.cli.app import COMMANDS, load_command
from slipstream.cli.drawing.svg_timeline import draw_schedule
from slipstream.planner import Job, parse_job, plan_job
from slipstream.schedules.schedule import Worker

EXAMPLE = (Path(__file__).parents[1] / "cli" / "jobs" / "worked-example.toml").read_text()
ONE_F_ONE_B_MEMORY = "[memory]\ncapacity = [4, 3, 2, 1]\n"
DEAD = Worker(1, 2)


def write_commands(path: Path) -> None:
    """Write the command reference, from the commands themselves."""
    path.parent.mkdir(exist_ok=True)
    lines = [
        "# Commands",
        "",
        "`slipstream COMMAND`; the same is in `slipstream COMMAND --help`.",
        "",
    ]
    for name in COMMANDS:
        lines += [f"## {name}", "", *_described(load_command(name), name)]
    path.write_text("\n".join(lines) + "\n")


def _described(command: Any, name: str) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(one.metavar or (one.name or "").upper() for one in arguments)
    yield from (
        f"```text\nslipstream {name} [OPTIONS] {usage}".rstrip(),
        "```",
        "",
        command.help or "",
        "",
    )
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    if arguments or options:
        yield from ("| | |", "|---|---|")
    for one in arguments:
        yield f"| `{_cell(one.metavar or one.name.upper())}` | {_cell(one.help or '')} |"
    for one in options:
        value = "" if one.is_flag else f" {one.metavar or 'N'}"
        said = isinstance(one.default, int | float | str | Path) and not one.is_flag
        text = one.help or ""
        text += f" Default: `{one.default}`." if said and "Default:" not in text else ""
        yield f"| `{_cell(', '.join(one.opts) + value)}` | {_cell(text)} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write_pictures(folder: Path) -> None:
    """Draw the four schedules of the worked example, which show what each idea gains."""
    folder.mkdir(exist_ok=True)
    small, free = (parse_job(EXAMPLE + memory) for memory in (ONE_F_ONE_B_MEMORY, ""))
    _draw(folder / "whole.svg", small, [], method="1f1b")
    _draw(folder / "rerouted.svg", small, [DEAD], backward="fused", optimizer="synchronous")
    _draw(folder / "split.svg", free, [DEAD], optimizer="synchronous")
    _draw(folder / "staggered.svg", free, [DEAD])


def _draw(path: Path, job: Job, failed: list[Worker], **how: Any) -> None:
    path.write_bytes(draw_schedule(plan_job(job, failed, **how).schedule))
