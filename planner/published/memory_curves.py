"""Compare the bubble of plans, by memory, with figures of the authors of zero bubble.

Each setting is planned with one stage on each worker (ZB), and with two as a V (ZB-V).
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
"""Difference up to which two bubbles count as equal; published ones have six digits."""


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times and memory of a job, with the published bubble for each of `Settings.memory`.

    Times are in microseconds, of one of the two stages of a V; memory is in any unit.
    """

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
    """Jobs with published bubbles, and the memory to plan each with, in multiples of 1F1B's."""

    memory: tuple[float, ...]
    settings: tuple[Setting, ...]
    source: str = ""
    times: str = ""
    bubble: str = ""


_SETTINGS = msgspec.json.Decoder(Settings)


class Point(msgspec.Struct, frozen=True):
    """One job to plan with a given memory, and the published bubble to compare with."""

    name: str
    placement: str
    memory: float
    setting: Setting
    published: float | None

    @property
    def work(self) -> float:
        """Microseconds of work of each worker in an iteration."""
        setting = self.setting
        times = setting.forward + setting.backward_input + setting.backward_weight
        return 2 * times * setting.microbatches

    def make_job(self) -> Job:
        """Return the job of this point, in microseconds."""
        setting = self.setting
        # Published times are of one of the two stages of a V; a single stage takes twice as long.
        chunks = 2 if self.placement == "V" else 1
        tables = {
            "pipelines": 1,
            "stages": setting.workers,
            "microbatches": setting.microbatches,
            "time": {
                "forward": setting.forward * 2 / chunks,
                "transfer": setting.transfer,
                "backward_input": setting.backward_input * 2 / chunks,
                "backward_weight": setting.backward_weight * 2 / chunks,
            },
            "memory": {
                "capacity": int(chunks * self.memory * setting.workers * setting.activation),
                "activation": setting.activation,
                "weight_stash": setting.weight_stash,
            },
        }
        if chunks == 2:
            tables["placement"] = {"order": "v", "chunks": chunks}
        return parse_job(job_text(tables, {}))


class Result(msgspec.Struct, frozen=True):
    """Bubble of a plan, lower bound on any plan's bubble, and processor seconds of planning.

    A bubble is the share of the period in which a worker is idle.
    """

    bubble: float
    bound: float
    seconds: float


def iterate_points(settings: Settings) -> Iterator[Point]:
    """Yield a point for every combination of setting, placement and amount of memory."""
    for setting, placement in itertools.product(settings.settings, ("ZB", "V")):
        published = setting.v if placement == "V" else setting.one_stage
        for memory, bubble in itertools.zip_longest(settings.memory, published):
            name = f"{placement} {setting.workers}x{setting.microbatches} {memory:g}x"
            yield Point(name, placement, memory, setting, bubble)


def measure(point: Point, *, time_limit: float = 10.0, steps: int | None = None) -> Result:
    """Plan the job of a point; return its bubble, the bound, and the planning seconds.

    The search takes at most `time_limit` seconds or, if given, `steps` steps. Raises NoPlanError if
    no schedule is found, JobError if the limit is too short.
    """
    return measure_job(point.make_job(), point.work, time_limit=time_limit, steps=steps)


def measure_job(
    job: Job, work: float, *, time_limit: float = 10.0, steps: int | None = None
) -> Result:
    """Plan a job; return its bubble, the bound, and the planning seconds.

    Each worker has `work`, in the job's unit of time, in an iteration. The search takes at most
    `time_limit` seconds or, if given, `steps` steps. Raises NoPlanError if no schedule is found,
    JobError if the limit is too short.
    """
    began = time.process_time()
    plan = plan_job(job, time_limit=time_limit, steps=steps)
    bound = plan.schedule.seconds(plan.schedule.lower_bound_ticks)
    return Result(
        bubble=1 - work / plan.period, bound=1 - work / bound, seconds=time.process_time() - began
    )


def describe(point: Point, result: Result) -> str:
    """Return a word for how a plan compares with the published bubble.

    The word is "ahead" or "behind"; otherwise "proven" if no plan can be better, else "equal". It
    is empty if no bubble is published and nothing is proven.
    """
    if point.published is None:
        return "proven" if result.bubble <= result.bound + SAME else ""
    if result.bubble > point.published + SAME:
        return "behind"
    if result.bubble < point.published - SAME:
        return "ahead"
    return "proven" if result.bubble <= result.bound + SAME else "equal"


def read_settings(path: Path = PUBLISHED) -> Settings:
    """Read a file of settings, such as the published ones.

    Raises OSError if it cannot be read, msgspec.DecodeError if it has another form.
    """
    return _SETTINGS.decode(path.read_bytes())
