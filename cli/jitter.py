"""`slipstream jitter`: the period of a schedule under noise and stragglers."""

from typing import Annotated

import numpy as np
import typer

from cli.shared.console import duration, err, out, print_json, refuse
from cli.shared.inputs import parse_workers, read_schedule_or_refuse
from cli.shared.options import Json, ScheduleFile, Seed
from schedules.schedule import Worker
from schedules.timing import Noise, replay

Spread = Annotated[float, typer.Option("--noise", metavar="SHARE", min=0, max=2, help=(
    "Standard deviation of op times, as a share of them (log-normal)."))]
Slow = Annotated[list[str] | None, typer.Option("--slow", metavar="D.S=FACTOR", help=(
    "A straggler: a worker whose ops take so many times as long; may be repeated."))]
Replays = Annotated[int, typer.Option("--replays", metavar="N", min=1, max=1_000_000, help="How many replays.")]


def jitter(file: ScheduleFile, noise: Spread = 0.05, slow: Slow = None, replays: Replays = 10_000, seed: Seed = 0,
           json: Json = False) -> None:
    """Replay a schedule thousands of times with noise in its op times, or with a straggler.

    Workers keep the planned order and start each op as early as they can; iterations follow each other.
    """
    schedule = read_schedule_or_refuse(file)
    try:
        with err.status("replaying"):
            seconds = replay(schedule, Noise(spread=noise, slow=dict(map(_straggler, slow or ()))), replays=replays,
                             seed=seed)
    except ValueError as error:
        refuse(f"{file}: {error}")
    planned = schedule.seconds(schedule.period_ticks)
    low, middle, high = np.percentile(seconds, (5, 50, 95)).tolist()
    answer = {"planned": planned, "mean": float(seconds.mean()), "p5": low, "p50": middle, "p95": high,
              "replays": replays}
    if json:
        print_json(answer)
        return
    out.print(f"period planned {duration(planned)}; over {replays:,} replays {duration(answer['mean'])} on average, "
              f"{100 * answer['mean'] / planned:.1f} % of it; 5 % below {duration(low)}, 5 % above {duration(high)}",
              soft_wrap=True)


def _straggler(text: str) -> tuple[Worker, float]:
    name, _, factor = text.partition("=")
    try:
        times = float(factor)
    except ValueError:
        refuse(f"--slow: {text!r}: expected D.S=FACTOR, for example 1.2=1.5")
    return parse_workers("--slow", [name])[0], times
