"""Op times of ByteDance's StragglerAnalysis: parquet files with a row an op (arXiv 2505.05713).

Columns that are read: dp_rank, stage, step, optype, duration (seconds), mb_id. Chunks of interleaved stages (mc) beyond
the first are refused.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.planner.job.profiler_trace import ProfilerTraceError

SUFFIX = ".parquet"
COLUMNS = ("dp_rank", "stage", "step", "optype", "duration", "mb_id", "mc")
KINDS = ("forward-compute", "backward-compute")
AFTER = ("optimizer", "optimizer-clip-main-grad", "params-all-gather")
"""What ends an iteration, and takes all of its workers the same."""
REDUCED = ("grads-reduce-scatter", "embedding-grads-all-reduce")
"""What takes as long as the last worker to come is in it: others wait for that."""
MOST_SLOW = 1.15
"""A worker that takes so many times as long as the middle of its stage is slow."""


class StragglerTrace(NamedTuple):
    """Measured op times of a job."""

    seconds: npt.NDArray[np.float64]
    """[iterations, pipelines, stages, micro-batches, 2]: forward and whole backward."""
    optimizer: float
    """Seconds of what ends an iteration."""

    def stage_seconds(self) -> npt.NDArray[np.float64]:
        """[stages, 2]: means over iterations and micro-batches, the middle of pipelines."""
        found: npt.NDArray[np.float64] = np.median(self.seconds.mean(axis=(0, 3)), axis=0)
        return found

    def slow(self) -> dict[str, float]:
        """By worker, how many times as long it takes as the middle of its stage, where that is much."""
        totals = np.median(self.seconds.sum(axis=4), axis=(0, 3))
        factors = totals / np.median(totals, axis=0)
        return {f"{pipeline}.{stage}": round(float(factors[pipeline, stage]), 3)
                for pipeline, stage in np.argwhere(factors > MOST_SLOW).tolist()}

    def costs(self) -> npt.NDArray[np.float64]:
        """[iterations, samples, stages, 3]: of F, I and W, as multiples of the mean of each worker.

        A worker that is slow is so for all samples: that is not theirs.
        """
        iterations, pipelines, stages, microbatches, _ = self.seconds.shape
        relative = self.seconds / self.seconds.mean(axis=(0, 1, 3), keepdims=True)
        for worker in self.slow():
            pipeline, stage = map(int, worker.split("."))
            own = self.seconds[:, pipeline, stage]
            relative[:, pipeline, stage] = own / own.mean(axis=(0, 1))
        by_sample = relative.transpose(0, 1, 3, 2, 4).reshape(iterations, pipelines * microbatches, stages, 2)
        return np.concatenate((by_sample, by_sample[..., 1:]), axis=-1)


def read_straggler_trace(path: Path) -> StragglerTrace:
    """Read a file. Raises ProfilerTraceError, also where pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ProfilerTraceError(f"{path}: parquet files are read with pyarrow, which is not installed: pip install "
                                 "'slipstream-train[parquet]'") from None
    try:
        table: Any = parquet.read_table(path, columns=list(COLUMNS))
        kinds = np.array(table["optype"].to_pylist())
        column = {name: table[name].to_numpy() for name in COLUMNS if name != "optype"}
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ProfilerTraceError(f"{path}: no trace of StragglerAnalysis: {str(error).splitlines()[0]}") from None
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise ProfilerTraceError(f"{path}: no column {missing[0]}; expected those of StragglerAnalysis")
    computing = np.isin(kinds, KINDS)
    if not computing.any():
        raise ProfilerTraceError(f"{path}: no op is a {' or a '.join(KINDS)}")
    if column["mc"][computing].max() > 0:
        raise ProfilerTraceError(f"{path}: workers have several stages each; expected one")
    steps = np.unique(column["step"][computing])
    pipelines, stages, microbatches = (int(column[name][computing].max()) + 1 for name in ("dp_rank", "stage", "mb_id"))
    seconds = np.full((len(steps), pipelines, stages, microbatches, len(KINDS)), np.nan)
    for number, kind in enumerate(KINDS):
        of = kinds == kind
        seconds[np.searchsorted(steps, column["step"][of]), column["dp_rank"][of], column["stage"][of],
                column["mb_id"][of], number] = column["duration"][of]
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        lacking = np.argwhere(~np.isfinite(seconds) | (seconds < 0))[0].tolist()
        raise ProfilerTraceError(f"{path}: no {KINDS[lacking[4]]} of micro-batch {lacking[3]} on worker "
                                 f"{lacking[1]}.{lacking[2]} in step {steps[lacking[0]]}, or no time of it")
    after = sum(float(column["duration"][kinds == kind].mean()) for kind in AFTER if (kinds == kind).any())
    for kind in REDUCED:
        of = kinds == kind
        if of.any():
            least = np.full(len(steps), np.inf)
            np.minimum.at(least, np.searchsorted(steps, column["step"][of]), column["duration"][of])
            after += float(least[np.isfinite(least)].mean())
    return StragglerTrace(seconds, after)
