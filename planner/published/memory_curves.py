"""Compare the bubble of plans, by memory, with published figures.

They are those of the authors of zero bubble.

Each setting is planned with one stage on each worker (ZB), and with two as a V (ZB-V), at each
memory.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.toml import job_text
from slipstream.planner.plan import plan_job

PUBLISHED = Path(__file__).with_name("published_curves.json")
SAME = 5e-5
"""Difference of bubbles up to which two plans count as equally good.

Published ones have six digits.
"""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times and memory of a job, and the published bubble for each memory."""

    workers: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    transfer: float
    activation: float
    weight_stash: float
    one_stage: tuple[float, ...] = ()
    v: tuple[float, ...] = ()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a file, and the memory for which each is planned.

    Memory is in multiples of that of 1F1B.
    """

    memory: tuple[float, ...]
    settings: tuple[Setting, ...]
    source: str = ""
    times: str = ""
    bubble: str = ""


_SETTINGS = msgspec.json.Decoder(Settings)


class Point(msgspec.Struct, frozen=True):
    """One job to plan, and the bubble to compare its plan with."""

    name: str
    placement: str
    memory: float
    setting: Setting
    published: float | None

    @property
    def work(self) -> float:
        """Work of each worker in an iteration, in microseconds."""
        setting = self.setting
        times = setting.forward + setting.backward_input + setting.backward_weight
        return 2 * times * setting.microbatches

    def make_job(self) -> Job:
        """Return the job of this point, in microseconds."""
        setting = self.setting
        chunks = 2 if self.placement == "V" else 1
        tables = {
            "pipelines": 1, "stages": setting.workers, "microbatches": setting.microbatches,
            "time": {"forward": setting.forward * 2 / chunks, "transfer": setting.transfer,
                     "backward_input": setting.backward_input * 2 / chunks,
                     "backward_weight": setting.backward_weight * 2 / chunks},
            "memory": {"capacity": int(chunks * self.memory * setting.workers * setting.activation),
                       "activation": setting.activation, "weight_stash": setting.weight_stash}}
        if chunks == 2:
            tables["placement"] = {"order": "v", "chunks": chunks}
        return parse_job(job_text(tables, {}))


class Result(msgspec.Struct, frozen=True):
    """Bubble of the plan of a point, its bound, and processor seconds."""

    bubble: float
    bound: float
    seconds: float


def iterate_points(settings: Settings) -> Iterator[Point]:
    """Yield the points of all settings, by setting, placement and memory."""
    for setting, placement in itertools.product(settings.settings, ("ZB", "V")):
        published = setting.v if placement == "V" else setting.one_stage
        for memory, bubble in itertools.zip_longest(settings.memory, published):
            name = f"{placement} {setting.workers}x{setting.microbatches} {memory:g}x"
            yield Point(name, placement, memory, setting, bubble)


def measure(point: Point, *, time_limit: float = 10.0, steps: int | None = None) -> Result:
    """Plan a point, and return its bubble.

    It is the share of the period in which a worker is idle.
    """
    return measure_job(point.make_job(), point.work, time_limit=time_limit, steps=steps)


def measure_job(
    job: Job, work: float, *, time_limit: float = 10.0, steps: int | None = None
) -> Result:
    """Plan a job whose workers each have this work in an iteration.

    The work is in the job's unit of time.
    """
    began = time.process_time()
    plan = plan_job(job, time_limit=time_limit, steps=steps)
    bound = plan.schedule.seconds(plan.schedule.lower_bound_ticks)
    return Result(
        bubble=1 - work / plan.period, bound=1 - work / bound, seconds=time.process_time() - began
    )


def describe(point: Point, result: Result) -> str:
    """Return the word for how a plan compares with the published one."""
    if point.published is None:
        return "proven" if result.bubble <= result.bound + SAME else ""
    if result.bubble > point.published + SAME:
        return "behind"
    if result.bubble < point.published - SAME:
        return "ahead"
    return "proven" if result.bubble <= result.bound + SAME else "equal"


def read_settings(path: Path = PUBLISHED) -> Settings:
    """Read a file of settings, such as the published ones."""
    return _SETTINGS.decode(path.read_bytes())
