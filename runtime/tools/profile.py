"""Measure a model's stages here: seconds of ops, bytes, transfers and all-reduces.

Stages are measured by workers that compute at the same time, as many as the machine will run (on
CPUs: as many as have cores of their own), since workers share caches and memory. Ops are the
runtime's own, timed over a few micro-batches in a row; the result is the median of the rounds. If a
worker has several processes, an op takes until the last of its ranks is done, and transfers and
all-reduces go from rank r to rank r, all ranks at the same time.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from slipstream.runtime.config import RunConfig
from slipstream.runtime.device import choose_device, choose_transport
from slipstream.runtime.processes.child_processes import ChildError, ChildProcesses
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.tools.measurer import MeasuredNetwork, Measurement, MeasuringTask
from slipstream.runtime.tools.stage_bench import StageProfile

TIMEOUT_SECONDS = 600.0
MAX_REDUCE_GROUP = 4
"""Largest number of workers in a measured all-reduce.

With more on one machine, the speed of its memory would be measured.
"""


class ProfileError(RuntimeError):
    """Raised, with one line, if a measurement fails."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of all stages of a job on this machine."""

    stages: tuple[StageProfile, ...]
    transfer: float
    """Seconds to send the largest activation from one worker here to another; 0 with one."""
    device: str
    device_bytes: int
    """Bytes of memory of a GPU, or of this machine if layers run on CPUs."""
    sharing: int
    """Number of processes of the job that share the memory of `device_bytes`."""
    outside_bytes: int = 0
    """GPU memory of a process besides torch's tensors, in bytes.

    Such are the CUDA context, communicators and workspaces.
    """
    workers: int
    """Number of workers that computed at the same time."""
    ranks: int
    """Number of processes (ranks) of each worker."""
    reduce_group: int
    """Number of workers that took part in an all-reduce."""
    transport: str
    waiting: float
    """Fraction of the time in which a process waited for others, about 0 on CPUs.

    0 if unknown: on GPUs, and for workers of several ranks, which wait for each other.
    """
    network: MeasuredNetwork = MeasuredNetwork()
    """Latency and bandwidth between two workers here, and the effect of all-reduces on compute."""


_ANSWER = msgspec.json.Decoder(Measurement)


def profile_stages(
    config: RunConfig,
    ranges: Sequence[tuple[int, int]],
    *,
    copies: int,
    workers: int,
    microbatches: int,
    rounds: int = 7,
    fork_server: ForkServer | None = None,
    by_lengths: bool = False,
) -> Profile:
    """Measure the ops, memory and transfers of stages, one for each range of layers.

    Workers that hold the measured stages compute at the same time, or as many as fit on this
    machine. Raises ConfigError for a device or backend that this machine lacks, RendezvousError if
    no port can be opened, and ProfileError if a process fails, or after `TIMEOUT_SECONDS`.

    Parameters
    ----------
    ranges
        Range of the model's layers of each stage.
    copies
        Number of workers that hold each stage.
    workers
        Number of workers of the job.
    microbatches
        Micro-batches of all pipelines together, which determine the scale of the loss.
    rounds
        Number of measurements, of which times are medians.
    fork_server
        Fork server that may serve several profiles, one after the other; None: start one. All its
        processes are killed at the end.
    by_lengths
        True to measure ops also for samples of several documents and of half the length.
    """
    training = config.training
    ranks, device = training.tensor_parallel, choose_device(training.device)
    cards = torch.cuda.device_count() if device == "cuda" else 0
    # As many workers compute as have a device, or cores, of their own.
    room = (
        workers
        if cards and training.share_devices
        else max(1, (cards or (os.cpu_count() or 1) // training.threads) // ranks)
    )
    computing = min(workers, room, len(ranges) * copies)
    # Groups for all-reduces and pairs for transfers need more workers than may compute at once.
    reduce_group = min(copies, MAX_REDUCE_GROUP)
    measuring = max(computing, reduce_group, 2 if workers > 1 else 1)
    transport = choose_transport(
        training.backend, device, measuring * ranks, cards, shared=training.share_devices
    )
    store, rendezvous = host_store()
    # One process for each rank of each measuring worker; rank 0 of worker 0 answers first.
    tasks = [
        MeasuringTask(
            config=config,
            ranges=tuple(ranges),
            microbatches=microbatches,
            worker=worker,
            rank=rank,
            workers=measuring,
            computing=computing,
            reduce_group=reduce_group,
            device=device,
            cards=cards,
            transport=transport,
            rendezvous=rendezvous,
            rounds=rounds,
            copies=copies,
            by_lengths=by_lengths,
        )
        for worker in range(measuring)
        for rank in range(ranks)
    ]
    answers = _run_tasks(tasks, fork_server)
    del store
    # What the job may use: a GPU's memory, or the machine's, and how many processes share it.
    memory = (
        torch.cuda.mem_get_info(0)[1]
        if cards
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    sharing = 1 if cards and not training.share_devices else -(-workers * ranks // max(1, cards))
    return Profile(
        stages=_combine_stages(tasks, answers),
        transfer=max(answer.transfer for answer in answers[:ranks]),
        network=msgspec.structs.replace(
            answers[0].network, slowdown=max(answer.network.slowdown for answer in answers)
        ),
        device=device,
        device_bytes=memory,
        sharing=sharing,
        outside_bytes=max(answer.outside_bytes for answer in answers),
        workers=computing,
        ranks=ranks,
        reduce_group=reduce_group,
        transport=transport,
        waiting=max(answer.waiting for answer in answers),
    )


def _run_tasks(tasks: Sequence[MeasuringTask], fork_server: ForkServer | None) -> list[Measurement]:
    """Run all tasks at once, each in a process; return their results in order."""
    try:
        with ChildProcesses(
            "slipstream.runtime.tools.measurer:measure", tasks, fork_server
        ) as children:
            return [_ANSWER.decode(answer) for answer in children.collect_results(TIMEOUT_SECONDS)]
    except ChildError as error:
        raise ProfileError(f"measuring failed: {error}") from None
    except TimeoutError:
        raise ProfileError(f"measuring took more than {TIMEOUT_SECONDS:.0f} s") from None


def _combine_stages(
    tasks: Sequence[MeasuringTask], answers: Sequence[Measurement]
) -> tuple[StageProfile, ...]:
    """Return each stage's profile, from the results of all measuring processes."""
    # All-reduces, and gathers of parameters (part of `optimizer`), were measured by worker number
    # 0; all else is from the first worker that measured the stage. Each value is the largest of any
    # rank of that worker.
    profiles = []
    for stage in range(len(tasks[0].ranges)):
        first = next(task.worker for task in tasks if stage in task.measured_stages)
        by_rank = [
            answer for task, answer in zip(tasks, answers, strict=True) if task.worker == first
        ]
        of_first = [answer for task, answer in zip(tasks, answers, strict=True) if not task.worker]
        slowest = _max_over_ranks([answer.stages[stage] for answer in by_rank])
        all_reduce = max(answer.all_reduce[stage] for answer in of_first)
        gather = max(answer.gather[stage] for answer in of_first)
        profiles.append(
            msgspec.structs.replace(
                slowest, all_reduce=all_reduce, optimizer=slowest.optimizer + gather
            )
        )
    return tuple(profiles)


def _max_over_ranks(ranks: Sequence[StageProfile]) -> StageProfile:
    """Return a stage's profile with, in each field, the largest of the ranks' values."""
    if len(ranks) == 1:
        return ranks[0]
    # An op ends when the slowest rank does, and the fullest rank limits memory.
    largest: dict[str, Any] = {}
    for name in StageProfile.__struct_fields__:
        values = [getattr(rank, name) for rank in ranks]
        largest[name] = None if None in values else max(values)
    return StageProfile(**largest)
