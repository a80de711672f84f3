"""Measures a model's stages on this machine: seconds of each op, bytes of what is held, transfers and all-reduces.

Stages are measured by workers that compute at the same time, as many as the machine will run (on CPUs: as many as have
cores of their own), since workers share caches and memory. Ops are the runtime's own (`SliceRunner`,
`PartOptimizer`, `Session`), timed over a few micro-batches in a row; the median of the rounds counts.

Where a worker is several processes, an op takes until the last of its ranks is done, and transfers and all-reduces go
from rank r to rank r, all ranks at the same time.
"""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from slipstream.runtime.config import RunConfig
from slipstream.runtime.device import choose_device
from slipstream.runtime.processes.children import ChildError, Children
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.protocol.rendezvous import host_store
from slipstream.runtime.replay.transport import choose_transport
from slipstream.runtime.tools.measurer import MeasuredNetwork, Measurement, Task
from slipstream.runtime.tools.stage_bench import StageProfile

TIMEOUT_SECONDS = 600.0
MAX_REDUCE_GROUP = 4
"""Workers that measure an all-reduce at most; more of one machine would measure its memory."""


class ProfileError(RuntimeError):
    """A measurement that failed. The message is one line."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All stages of a job on this machine."""

    stages: tuple[StageProfile, ...]
    transfer: float
    """Seconds that the largest activation takes between two workers here."""
    device: str
    device_bytes: int
    """Memory of a GPU, or of this machine."""
    sharing: int
    """How many processes of the job share that memory."""
    outside_bytes: int = 0
    """What a process takes of a GPU besides torch's tensors: its CUDA context, communicators, libraries' workspaces."""
    workers: int
    """How many computed at the same time."""
    ranks: int
    """How many processes a worker is."""
    reduce_group: int
    """How many workers took part in an all-reduce."""
    transport: str
    waiting: float
    """Share of the time in which a measuring process had to wait for others of this machine; on CPUs, about 0 is right.
    0 where it is not known: on GPUs, and where ranks wait for each other.
    """
    network: MeasuredNetwork = MeasuredNetwork()
    """Links between two workers here, and the most that reductions take from compute beside them."""


_ANSWER = msgspec.json.Decoder(Measurement)


def profile(config: RunConfig, ranges: Sequence[tuple[int, int]], *, copies: int, workers: int, microbatches: int,
            rounds: int = 7, fork_server: ForkServer | None = None, by_lengths: bool = False) -> Profile:
    """Measure the stages that hold these ranges of layers.

    `workers` of the whole job and the `copies` of each stage in it decide how many workers measure at a time,
    `microbatches` of all pipelines the scale of the loss. `by_lengths`: with documents of other lengths, too. A
    `fork_server` may serve several profiles, one after the other. Raises ConfigError and ProfileError.
    """
    training = config.training
    ranks, device = training.tensor_parallel, choose_device(training.device)
    cards = torch.cuda.device_count() if device == "cuda" else 0
    room = workers if cards and training.share_devices else \
        max(1, (cards or (os.cpu_count() or 1) // training.threads) // ranks)
    computing = min(workers, room, len(ranges) * copies)
    reduce_group = min(copies, MAX_REDUCE_GROUP)
    measuring = max(computing, reduce_group, 2 if workers > 1 else 1)
    transport = choose_transport(training.backend, device, measuring * ranks, cards, shared=training.share_devices)
    store, opened = host_store()
    tasks = [Task(config=config, ranges=tuple(ranges), microbatches=microbatches, worker=worker, rank=rank,
                  workers=measuring, computing=computing, reduce_group=reduce_group, device=device, cards=cards,
                  transport=transport, rendezvous=opened, rounds=rounds, copies=copies, by_lengths=by_lengths)
             for worker in range(measuring) for rank in range(ranks)]
    answers = _ask(tasks, fork_server)
    del store
    memory = torch.cuda.mem_get_info(0)[1] if cards else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sharing = 1 if cards and not training.share_devices else -(-workers * ranks // max(1, cards))
    return Profile(stages=_stages(tasks, answers), transfer=max(answer.transfer for answer in answers[:ranks]),
                   network=msgspec.structs.replace(
                       answers[0].network, slowdown=max(answer.network.slowdown for answer in answers)),
                   device=device, device_bytes=memory, sharing=sharing,
                   outside_bytes=max(answer.outside_bytes for answer in answers), workers=computing, ranks=ranks,
                   reduce_group=reduce_group, transport=transport, waiting=max(answer.waiting for answer in answers))


def _ask(tasks: Sequence[Task], fork_server: ForkServer | None) -> list[Measurement]:
    """Run one process a task, all at a time; none is left at the end."""
    try:
        with Children("slipstream.runtime.tools.measurer:measure", tasks, fork_server) as children:
            return [_ANSWER.decode(answer) for answer in children.answers(TIMEOUT_SECONDS)]
    except ChildError as error:
        raise ProfileError(f"measuring failed: {error}") from None
    except TimeoutError:
        raise ProfileError(f"measuring took more than {TIMEOUT_SECONDS:.0f} s") from None


def _stages(tasks: Sequence[Task], answers: Sequence[Measurement]) -> tuple[StageProfile, ...]:
    """Each stage by the ranks of the worker that was first to have it; all-reduces by those of worker 0."""
    found = []
    for stage in range(len(tasks[0].ranges)):
        first = next(task.worker for task in tasks if stage in task.stages)
        by_rank = [answer for task, answer in zip(tasks, answers, strict=True) if task.worker == first]
        of_first = [answer for task, answer in zip(tasks, answers, strict=True) if not task.worker]
        one = _slowest([answer.stages[stage] for answer in by_rank])
        found.append(msgspec.structs.replace(
            one, all_reduce=max(answer.all_reduce[stage] for answer in of_first),
            optimizer=one.optimizer + max(answer.gather[stage] for answer in of_first)))
    return tuple(found)


def _slowest(ranks: Sequence[StageProfile]) -> StageProfile:
    """The most of each value."""
    if len(ranks) == 1:
        return ranks[0]
    values = {name: [getattr(one, name) for one in ranks] for name in StageProfile.__struct_fields__}
    most: dict[str, Any] = {name: None if None in given else max(given) for name, given in values.items()}
    return StageProfile(**most)
