"""Read op times of ByteDance's StragglerAnalysis (arXiv 2505.05713), a row per op.

Of its parquet files, the columns dp_rank, stage, step, optype, start_ts, duration (both in seconds)
and mb_id are read. Traces with several stages per worker (column mc above 0) are refused.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.planner.job.profiler_trace import ProfilerTraceError

SUFFIX = ".parquet"
COLUMNS = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id", "mc")
KINDS = ("forward-compute", "backward-compute")
HOPS = (("forward-send", "forward-recv", 1), ("backward-send", "backward-recv", -1))
"""Transfers, as (kind of the send, kind of the receive, stage offset).

The offset is from the sending to the receiving stage.
"""
SLOW_FACTOR = 1.15
"""Ratio of a worker's time to its stage's median above which the worker is slow."""


class StragglerTrace(NamedTuple):
    """Op times of a real job, measured over several iterations."""

    seconds: npt.NDArray[np.float64]
    """Seconds of F and of the whole backward, [iterations, pipelines, stages, micro-batches, 2]."""
    optimizer: float
    """Mean seconds of an iteration before its first and after its last compute op.

    In this time parameters are gathered, gradients reduced, and the optimizer steps.
    """
    transfer: float
    """Median seconds that a tensor takes from stage to stage; 0 if none is recorded.

    Of the two ends of a transfer, the shorter one counts: it waits less for the other.
    """
    measured: npt.NDArray[np.float64]
    """Seconds of each iteration, from its first start to its last end, [iterations]."""

    def stage_seconds(self) -> npt.NDArray[np.float64]:
        """Return the mean seconds of F and whole backward, [stages, 2], without slow workers."""
        usual = self._worker_factors() == 1
        totals = np.einsum("ipsmk,ps->sk", self.seconds, usual)
        means: npt.NDArray[np.float64] = (
            totals / usual.sum(axis=0)[:, None] / (self.seconds.shape[0] * self.seconds.shape[3])
        )
        return means

    def slow_factors(self) -> dict[str, float]:
        """Return how much longer each slow worker's ops take than usual, by its name.

        The factor is the median time of the worker's ops, divided by the median over its stage's
        workers.
        """
        totals = np.median(self.seconds.sum(axis=4), axis=(0, 3))
        factors = totals / np.median(totals, axis=0)
        return {
            f"{pipeline}.{stage}": round(float(factors[pipeline, stage]), 3)
            for pipeline, stage in np.argwhere(factors > SLOW_FACTOR).tolist()
        }

    def sample_costs(self) -> npt.NDArray[np.float64]:
        """Return the times of F, I and W of each sample, [iterations, samples, stages, 3].

        The times are multiples of the usual time of the stage; a sample is a micro-batch of any
        pipeline. The factor of a slow worker applies to all of its samples, so it is not part of
        their costs. A replay of the job with these costs reproduces the traced times.
        """
        iterations, pipelines, stages, microbatches, _ = self.seconds.shape
        usual = self.stage_seconds() * self._worker_factors()[:, :, None]
        relative = self.seconds / usual[None, :, :, None]
        by_sample = relative.transpose(0, 1, 3, 2, 4).reshape(
            iterations, pipelines * microbatches, stages, 2
        )
        # The trace has whole backwards: I and W both get their relative cost.
        return np.concatenate((by_sample, by_sample[..., 1:]), axis=-1)

    def _worker_factors(self) -> npt.NDArray[np.float64]:
        """Return the factor on the time of each worker's ops, [pipelines, stages]; 1 is usual."""
        factors = np.ones(self.seconds.shape[1:3])
        for worker, factor in self.slow_factors().items():
            pipeline, stage = map(int, worker.split("."))
            factors[pipeline, stage] = factor
        return factors


def read_straggler_trace(path: Path) -> StragglerTrace:
    """Read the op times of a job from a parquet file of ByteDance's StragglerAnalysis.

    Raises ProfilerTraceError if pyarrow is not installed, the file cannot be read or is no such
    trace, ops are missing, or workers have several stages.
    """
    column = read_columns(path, COLUMNS)
    kinds = column["optype"]
    computing = np.isin(kinds, KINDS)
    if not computing.any():
        raise ProfilerTraceError(f"{path}: no op is a {' or a '.join(KINDS)}")
    if column["mc"][computing].max() > 0:
        raise ProfilerTraceError(f"{path}: workers have several stages each; expected one")
    steps = np.unique(column["step"][computing])
    pipelines, stages, microbatches = (
        int(column[name][computing].max()) + 1 for name in ("dp_rank", "stage", "mb_id")
    )
    # Values that no row sets stay NaN, and are found below.
    seconds = np.full((len(steps), pipelines, stages, microbatches, len(KINDS)), np.nan)
    for number, kind in enumerate(KINDS):
        is_kind = kinds == kind
        seconds[
            np.searchsorted(steps, column["step"][is_kind]),
            column["dp_rank"][is_kind],
            column["stage"][is_kind],
            column["mb_id"][is_kind],
            number,
        ] = column["duration"][is_kind]
    if not np.isfinite(seconds).all() or (seconds < 0).any():
        missing = np.argwhere(~np.isfinite(seconds) | (seconds < 0))[0].tolist()
        raise ProfilerTraceError(
            f"{path}: no {KINDS[missing[4]]} of micro-batch {missing[3]} on worker "
            f"{missing[1]}.{missing[2]} in step {steps[missing[0]]}, or no time of it"
        )
    begin = column["start_ts"].astype(np.float64)
    end = column["start_ts"].astype(np.float64) + column["duration"]
    number_of = np.searchsorted(steps, column["step"])
    # Rows of steps without compute ops do not count.
    measurable = (number_of < len(steps)) & (
        steps[np.minimum(number_of, len(steps) - 1)] == column["step"]
    )
    measured = iteration_spans(number_of, begin, end, measurable, len(steps))
    computed = iteration_spans(number_of, begin, end, computing, len(steps))
    return StragglerTrace(
        seconds, float((measured - computed).mean()), _median_transfer(kinds, column), measured
    )


def read_columns(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the named columns of a parquet file, by name.

    Raises ProfilerTraceError if pyarrow is not installed, or the file cannot be read or lacks such
    a column.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ProfilerTraceError(
            f"{path}: parquet files are read with pyarrow, which is not installed: pip install "
            "-e '.[parquet]'"
        ) from None
    try:
        # Files are large, so only these columns are loaded.
        table: Any = parquet.read_table(path, columns=list(names))
        columns = {}
        for name in names:
            if name in table.column_names:
                column = table[name]
                # Only this column is text, of which numpy makes an array of text only from a list.
                is_text = name == "optype"
                columns[name] = np.array(column.to_pylist()) if is_text else column.to_numpy()
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ProfilerTraceError(
            f"{path}: not a trace of StragglerAnalysis: {str(error).splitlines()[0]}"
        ) from None
    if missing := [name for name in names if name not in columns]:
        raise ProfilerTraceError(
            f"{path}: no column {missing[0]}; expected those of StragglerAnalysis"
        )
    return columns


def iteration_spans(
    step: npt.NDArray[np.int64],
    begin: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
    some: npt.NDArray[np.bool_],
    steps: int,
) -> npt.NDArray[np.float64]:
    """Return the seconds of each of `steps` iterations, from first start to last end.

    Only ops that `some` selects count; an iteration without any has -inf. `step` has the number of
    each op's iteration, from 0, and `begin` and `end` have the seconds at which ops start and end.
    """
    first, last = np.full(steps, np.inf), np.full(steps, -np.inf)
    np.minimum.at(first, step[some], begin[some])
    np.maximum.at(last, step[some], end[some])
    lengths: npt.NDArray[np.float64] = last - first
    return lengths


def _median_transfer(kinds: npt.NDArray[np.str_], column: Mapping[str, npt.NDArray[Any]]) -> float:
    """Return the median seconds of a transfer between two stages; 0 if there is none."""
    seconds = []
    for send, receive, towards in HOPS:
        # Sends and receives by iteration and receiving worker, in order of time: the n-th send
        # belongs to the n-th receive.
        ends: list[dict[tuple[int, int, int], list[float]]] = []
        for kind, moved in ((send, towards), (receive, 0)):
            ends.append(defaultdict(list))
            rows = np.flatnonzero(kinds == kind)
            for row in rows[np.argsort(column["start_ts"][rows], kind="stable")].tolist():
                target = (
                    int(column["step"][row]),
                    int(column["dp_rank"][row]),
                    int(column["stage"][row]) + moved,
                )
                ends[-1][target].append(float(column["duration"][row]))
        seconds += [
            min(pair)
            for target, sent in ends[0].items()
            for pair in zip(sent, ends[1][target], strict=False)
        ]
    return float(np.median(seconds)) if seconds else 0.0
