"""Compare plans with the orders of torch.distributed.pipelining.

    python -m benchmarks.torch_orders [--settings 40] [--seed 0] [--offset 0] [--steps 400000]
                                      [--json FILE]

Both are timed with the same durations at the same memory. Settings are drawn: 4 to 32 workers, 2 to
8 times as many micro-batches, unlike F, I and W. The generators of torch take turns. Its order is
timed as our plans are, and the memory that it needs is all that our plan may use. `--json` keeps
the results: with the same file, only missing settings are planned. Exits with 1 if a plan is longer
than torch's order.
"""

import argparse
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining import schedules as torchs

from benchmarks.curves import keep_results, load_results
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.toml import job_text
from slipstream.planner.model.arrays import ProblemArrays, Solution, to_ints
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.memory import activation_memory, memory_changes
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.start_times import time_order
from slipstream.planner.published.memory_curves import SAME, Result, measure_job
from slipstream.planner.search.list_scheduler import assign_hosts
from slipstream.schedules.precedence import OpKey, producers_with_rules
from slipstream.schedules.schedule import OpKind

ACTIVATION = 1000
"""Memory units of a micro-batch's activation at a stage."""
CHUNKS = 2
"""Stages on each worker; the V orders of torch allow no other number."""


class Generator(NamedTuple):
    """Generator of torch, with its placement and what it reads from a schedule."""

    schedule: Any
    placement: str
    own_fields: Callable[[int, int], Mapping[str, object]]


def _rounds(workers: int, microbatches: int) -> Mapping[str, object]:
    return {
        "n_local_stages": CHUNKS,
        "number_of_rounds": microbatches // workers,
        "microbatches_per_round": workers,
    }


GENERATORS = {
    "Interleaved1F1B": Generator(torchs.ScheduleInterleaved1F1B, "interleaved", _rounds),
    "InterleavedZeroBubble": Generator(
        torchs.ScheduleInterleavedZeroBubble, "interleaved", _rounds
    ),
    "LoopedBFS": Generator(
        torchs.ScheduleLoopedBFS, "interleaved", lambda *_: {"_stages": range(CHUNKS)}
    ),
    "ZBVZeroBubble": Generator(
        torchs.ScheduleZBVZeroBubble, "v", lambda workers, _: {"num_stages": CHUNKS * workers}
    ),
    "DualPipeV": Generator(torchs.ScheduleDualPipeV, "v", lambda *_: {}),
}


class Setting(NamedTuple):
    """Drawn job, and the generator of torch to compare with. Times are in milliseconds."""

    generator: str
    workers: int
    microbatches: int
    forward: float
    backward_input: float
    backward_weight: float
    transfer: float
    stash: float

    @property
    def name(self) -> str:
        """Name of the setting: generator, workers x micro-batches, F, I and W."""
        times = f"{self.forward:g} {self.backward_input:g} {self.backward_weight:g}"
        return f"{self.generator} {self.workers}x{self.microbatches} {times}"

    @property
    def work(self) -> float:
        """Work of each worker in an iteration."""
        return (
            CHUNKS * self.microbatches * (self.forward + self.backward_input + self.backward_weight)
        )

    def make_job(self, capacity: int) -> Job:
        """Return the job, whose workers have this memory for activations."""
        tables = {
            "pipelines": 1,
            "stages": self.workers,
            "microbatches": self.microbatches,
            "time": {
                "forward": self.forward,
                "backward_input": self.backward_input,
                "backward_weight": self.backward_weight,
                "transfer": self.transfer,
            },
            "memory": {
                "capacity": capacity,
                "activation": ACTIVATION,
                "weight_stash": int(self.stash * ACTIVATION),
            },
            "placement": {"order": GENERATORS[self.generator].placement, "chunks": CHUNKS},
        }
        return parse_job(job_text(tables, {}))


def draw_settings(seed: int) -> Iterator[Setting]:
    """Yield settings without end, each with the next generator."""
    draw = random.Random(seed)
    for generator in itertools.cycle(GENERATORS):
        workers = draw.randint(4, 32)
        forward = round(draw.uniform(5, 20), 3)
        yield Setting(
            generator,
            workers,
            draw.randint(2, 8) * workers,
            forward,
            *(
                round(forward * draw.uniform(low, high), 3)
                for low, high in ((0.7, 1.4), (0.4, 1.2), (0.0, 0.15))
            ),
            round(draw.uniform(0.3, 0.8), 3),
        )


def read_order(setting: Setting) -> list[list[OpKey]]:
    """Return the ops of each worker in the order of torch's generator.

    A full backward is an I and its W, so that the gradient leaves after the I, and an overlapped
    pair is its parts.
    """
    generator = GENERATORS[setting.generator]
    made = SimpleNamespace(
        pp_group_size=setting.workers,
        _n_microbatches=setting.microbatches,
        **generator.own_fields(setting.workers, setting.microbatches),
    )
    orders = []
    for rank in range(setting.workers):
        actions = [
            action
            for action in generator.schedule._calculate_single_rank_operations(made, rank)
            if action
        ]
        parts = itertools.chain.from_iterable(action.sub_actions or (action,) for action in actions)
        orders.append(list(itertools.chain.from_iterable(map(_keys_of_action, parts))))
    return orders


def _keys_of_action(action: Any) -> list[OpKey]:
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "IW"}
    return [
        OpKey(OpKind(kind), action.stage_index, 0, action.microbatch_index)
        for kind in kinds[action.computation_type.name]
    ]


def merge_orders(problem: Problem, orders: Sequence[Sequence[OpKey]]) -> list[OpKey]:
    """Return all workers' ops in one order, in which each follows those it awaits."""
    places, done, merged = [0] * len(orders), set[OpKey](), list[OpKey]()
    while len(merged) < sum(map(len, orders)):
        before = len(merged)
        for worker, order in enumerate(orders):
            while places[worker] < len(order) and _is_ready(problem, order[places[worker]], done):
                merged.append(order[places[worker]])
                done.add(merged[-1])
                places[worker] += 1
        if len(merged) == before:
            raise ValueError(
                f"torch's order: the ops wait for each other after {before} of them; expected an "
                "order"
            )
    return merged


def _is_ready(problem: Problem, key: OpKey, done: set[OpKey]) -> bool:
    path = problem.grid.stages_of_microbatch(key.microbatch)
    return all(producer in done for producer, _ in producers_with_rules(key, path))


def time_torch(setting: Setting) -> tuple[Solution, int, float]:
    """Return torch's order with start times, its fullest worker's memory, and its period."""
    problem = build_problem(setting.make_job(CHUNKS * setting.microbatches * ACTIVATION))
    arrays = ProblemArrays(problem, assign_hosts(problem, "in turn"))
    number = {key: op for op, key in enumerate(arrays.iterate_op_keys())}
    keys, sizes, peak = merge_orders(problem, read_order(setting)), [0] * len(arrays.workers), 0
    order = to_ints([number[key] for key in keys])
    for op in order.tolist():
        unit, kind = divmod(op, arrays.ops.kinds)
        row = arrays.ops.worker[unit]
        sizes[row] += memory_changes(problem, int(arrays.ops.slice[unit]))[kind]
        peak = max(peak, sizes[row])
    period, start = time_order(arrays, order)
    # The problem counts in a common divisor.
    memory = peak * ACTIVATION // activation_memory(problem, 0)
    return arrays.make_solution(order, start), memory, period * problem.tick_seconds


def measure(setting: Setting, steps: int) -> tuple[float, Result]:
    """Return the bubble of torch's order, and a plan with the order's memory."""
    _, memory, period = time_torch(setting)
    return 1 - setting.work / period, measure_job(
        setting.make_job(memory), setting.work, steps=steps
    )


def main() -> None:
    """Plan the drawn settings, and print each bubble beside torch's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", type=int, default=40)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = load_results(options.json)
    table, behind = Table("setting", "ours", "torch's", "bound", "", "processor s"), 0
    for setting in itertools.islice(
        draw_settings(options.seed), options.offset, options.offset + options.settings
    ):
        torch_name = f"{setting.name} torch"
        if setting.name not in results:
            bubble, results[setting.name] = measure(setting, options.steps)
            results[torch_name] = Result(
                bubble=bubble, bound=results[setting.name].bound, seconds=0.0
            )
            keep_results(options.json, results)
        ours, theirs = results[setting.name], results[torch_name].bubble
        longer = ours.bubble > theirs + SAME
        behind += longer
        table.add_row(
            setting.name,
            f"{ours.bubble:.3%}",
            f"{theirs:.3%}",
            f"{ours.bound:.3%}",
            "behind" if longer else "",
            f"{ours.seconds:.1f}",
        )
    Console().print(table, f"{options.settings} settings: {behind} behind", highlight=False)
    raise SystemExit(behind > 0)


if __name__ == "__main__":
    main()
