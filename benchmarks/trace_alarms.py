"""Run the slow-worker detector on measured traces of StragglerAnalysis (arXiv 2505.05713).

    python -m benchmarks.trace_alarms TRACE.parquet [...]

The op times of each iteration go to the detector as workers report them: of forwards and of
backwards, the median over the micro-batches of each worker. A worker that the whole trace shows to
be slow must be found within five iterations; any other worker that is found is a false alarm. Exit
status 1 when one is not found in time, or there is a false alarm.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from slipstream.planner.job.straggler_trace import StragglerTrace, read_straggler_trace
from slipstream.runtime.coordinator.decisions.slow_detector import (
    CellTime,
    SlowDetector,
    SpeedChange,
)
from slipstream.schedules.schedule import OpKind, Worker

MOST_ITERATIONS = 5


def found_slow(trace: StragglerTrace) -> list[SpeedChange]:
    """Return all changes that the detector finds, iteration by iteration."""
    detector, found = SlowDetector(), []
    _, pipelines, stages, microbatches, _ = trace.seconds.shape
    for iteration, seconds in enumerate(trace.seconds):
        medians = np.median(seconds, axis=2)
        measured = {}
        for pipeline in range(pipelines):
            for stage in range(stages):
                forward, backward = map(float, medians[pipeline, stage])
                layers = (stage, stage + 1)
                measured[Worker(pipeline, stage)] = [
                    CellTime(OpKind.F, layers, microbatches, forward, 1.0),
                    CellTime(OpKind.B, layers, microbatches, backward, 1.0),
                ]
        found += detector.add_iteration(iteration, float(trace.measured[iteration]), measured)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE.parquet")
    wrong = False
    for path in parser.parse_args().traces:
        trace = read_straggler_trace(path)
        slow, changes = trace.slow_factors(), found_slow(trace)
        print(
            f"{path.name}: {len(trace.seconds)} iterations of {trace.measured.mean():.2f} s; slow "
            "by all of it: "
            + (", ".join(f"{worker} ({factor:.2f})" for worker, factor in slow.items()) or "none")
        )
        for change in changes:
            after = change.since + change.iterations
            print(
                f"  worker {change.worker}: {change.before:.2f} -> {change.factor:.2f} after "
                f"{after} iterations" + ("" if str(change.worker) in slow else ": a false alarm")
            )
        in_time = {
            str(change.worker)
            for change in changes
            if change.since + change.iterations <= MOST_ITERATIONS
        }
        wrong |= not slow.keys() <= in_time or any(
            str(change.worker) not in slow for change in changes
        )
    sys.exit(wrong)


if __name__ == "__main__":
    main()
