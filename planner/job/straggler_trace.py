"""Op times of ByteDance's StragglerAnalysis: parquet files with a row an op (arXiv 2505.05713).

Columns that are read: dp_rank, stage, step, optype, start_ts, duration (both in seconds), mb_id. Chunks of interleaved
stages (mc) beyond the first are refused.
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
"""The two ends of a transfer, and the stage that it goes to."""
MOST_SLOW = 1.15
"""A worker that takes so many times as long as the middle of its stage is slow."""


class StragglerTrace(NamedTuple):
    """Measured op times of a job."""

    seconds: npt.NDArray[np.float64]
    """[iterations, pipelines, stages, micro-batches, 2]: forward and whole backward."""
    optimizer: float
    """Seconds of an iteration before its first and after its last computing op: parameters are gathered, gradients
    reduced, the optimizer steps. Mean over iterations."""
    transfer: float
    """Seconds that a tensor takes from stage to stage: the median. Of the two ends of a transfer, the one that waits
    less for the other says it. 0 where none is recorded."""
    measured: npt.NDArray[np.float64]
    """[iterations]: seconds from the first op to the end of the last."""

    def stage_seconds(self) -> npt.NDArray[np.float64]:
        """[stages, 2]: means over iterations, micro-batches and the workers that are not slow."""
        usual = self._factors() == 1
        totals = np.einsum("ipsmk,ps->sk", self.seconds, usual)
        found: npt.NDArray[np.float64] = totals / usual.sum(axis=0)[:, None] / (
            self.seconds.shape[0] * self.seconds.shape[3])
        return found

    def slow(self) -> dict[str, float]:
        """By worker, how many times as long it takes as the middle of its stage, where that is much."""
        totals = np.median(self.seconds.sum(axis=4), axis=(0, 3))
        factors = totals / np.median(totals, axis=0)
        return {f"{pipeline}.{stage}": round(float(factors[pipeline, stage]), 3)
                for pipeline, stage in np.argwhere(factors > MOST_SLOW).tolist()}

    def costs(self) -> npt.NDArray[np.float64]:
        """[iterations, samples, stages, 3]: of F, I and W, as multiples of what its stage takes.

        A worker that is slow is so for all samples: that is not theirs. A replay of the job with these costs runs the
        traced times.
        """
        iterations, pipelines, stages, microbatches, _ = self.seconds.shape
        usual = self.stage_seconds() * self._factors()[:, :, None]
        relative = self.seconds / usual[None, :, :, None]
        by_sample = relative.transpose(0, 1, 3, 2, 4).reshape(iterations, pipelines * microbatches, stages, 2)
        return np.concatenate((by_sample, by_sample[..., 1:]), axis=-1)

    def _factors(self) -> npt.NDArray[np.float64]:
        """[pipelines, stages]: `slow`, else 1."""
        found = np.ones(self.seconds.shape[1:3])
        for worker, factor in self.slow().items():
            pipeline, stage = map(int, worker.split("."))
            found[pipeline, stage] = factor
        return found


def read_straggler_trace(path: Path) -> StragglerTrace:
    """Read a file. Raises ProfilerTraceError, also where pyarrow is not installed."""
    column = read_columns(path, COLUMNS)
    kinds = column["optype"]
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
    begin, end = column["start_ts"].astype(np.float64), column["start_ts"].astype(np.float64) + column["duration"]
    number_of = np.searchsorted(steps, column["step"])
    known = (number_of < len(steps)) & (steps[np.minimum(number_of, len(steps) - 1)] == column["step"])
    measured = spans(number_of, begin, end, known, len(steps))
    computed = spans(number_of, begin, end, computing, len(steps))
    return StragglerTrace(seconds, float((measured - computed).mean()), _transfer(kinds, column), measured)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Columns of a file, all as long. Raises ProfilerTraceError, also where pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ProfilerTraceError(f"{path}: parquet files are read with pyarrow, which is not installed: pip install "
                                 "-e '.[parquet]'") from None
    try:
        table: Any = parquet.read_table(path, columns=list(names))
        found = {name: np.array(table[name].to_pylist()) if name == "optype" else table[name].to_numpy()
                 for name in names if name in table.column_names}
    except (OSError, KeyError, pyarrow.ArrowException) as error:
        raise ProfilerTraceError(f"{path}: no trace of StragglerAnalysis: {str(error).splitlines()[0]}") from None
    if missing := [name for name in names if name not in found]:
        raise ProfilerTraceError(f"{path}: no column {missing[0]}; expected those of StragglerAnalysis")
    return found


def spans(step: npt.NDArray[np.int64], begin: npt.NDArray[np.float64], end: npt.NDArray[np.float64],
          some: npt.NDArray[np.bool_], steps: int) -> npt.NDArray[np.float64]:
    """[steps]: from the first begin to the last end of some ops."""
    first, last = np.full(steps, np.inf), np.full(steps, -np.inf)
    np.minimum.at(first, step[some], begin[some])
    np.maximum.at(last, step[some], end[some])
    found: npt.NDArray[np.float64] = last - first
    return found


def _transfer(kinds: npt.NDArray[np.str_], column: Mapping[str, npt.NDArray[Any]]) -> float:
    """Sends and receives have no micro-batch; the n-th send between two workers belongs to the n-th receive."""
    found = []
    for send, receive, towards in HOPS:
        ends: list[dict[tuple[int, int, int], list[float]]] = []
        for kind, moved in ((send, towards), (receive, 0)):
            ends.append(defaultdict(list))
            of = np.flatnonzero(kinds == kind)
            for row in of[np.argsort(column["start_ts"][of], kind="stable")].tolist():
                at = int(column["step"][row]), int(column["dp_rank"][row]), int(column["stage"][row]) + moved
                ends[-1][at].append(float(column["duration"][row]))
        found += [min(pair) for at, sent in ends[0].items() for pair in zip(sent, ends[1][at], strict=False)]
    return float(np.median(found)) if found else 0.0
