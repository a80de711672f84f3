"""Profile a model in one of several processes: it computes at the same time as the others, then exchanges tensors."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import msgspec
import torch
from torch import Tensor

from slipstream.runtime.config import RunConfig
from slipstream.runtime.model.computing.forms import forms
from slipstream.runtime.model.computing.slices import SliceRunner
from slipstream.runtime.model.data.data import load_corpus
from slipstream.runtime.model.layers.layered_model import LayeredModel, model_for, parameter_dtype
from slipstream.runtime.model.layers.worker_group import enter_group
from slipstream.runtime.model.passed import TensorForm, carrier_form, gradient_form
from slipstream.runtime.model.state.holding import build_holding, gradient_dtype, without_memory
from slipstream.runtime.model.state.parts import cut
from slipstream.runtime.protocol.interfaces import name_interface
from slipstream.runtime.protocol.rendezvous import Rendezvous, connect_store
from slipstream.runtime.replay.links import Links
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.part_exchange import PartExchange
from slipstream.runtime.replay.session import Session
from slipstream.runtime.replay.transport import Transport, claim_own_host
from slipstream.runtime.tools.stage_bench import StageBench, StageProfile, timed
from slipstream.runtime.torch_private import TCPStore
from slipstream.schedules.schedule import Worker

MOST_DOCUMENTS, FEWEST_TOKENS = 8, 16
"""Limits for measuring ops by document lengths: the most documents in a sample, and the fewest tokens in a document."""
LARGE_BYTES = 1 << 24
"""Number of bytes that are sent to measure a bandwidth."""
MOST_REDUCTIONS = 1000
"""Largest number of reductions that run at the same time as compute."""
_LAYERS = (0, 1)
"""Range by which tensors are reduced. It is only a name, whatever the tensors are."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Task of one measuring process."""

    config: RunConfig
    ranges: tuple[tuple[int, int], ...]
    microbatches: int
    worker: int
    """Number of the measuring worker that this process belongs to."""
    rank: int
    """Rank of this process within the worker."""
    workers: int
    """Number of workers that measure."""
    computing: int
    """Number of workers that compute at a time, the first ones. All workers exchange tensors."""
    reduce_group: int
    device: str
    cards: int
    transport: Transport
    rendezvous: Rendezvous
    rounds: int
    copies: int
    """Number of workers that hold each stage."""
    by_lengths: bool = False
    """True to measure ops with documents of other lengths, too."""

    @property
    def ranks(self) -> int:
        """Number of processes of a worker."""
        return self.config.training.tensor_parallel

    @property
    def stages(self) -> Sequence[int]:
        """Stages that this worker measures. Each stage is measured by some worker, and no computing worker is idle."""
        if self.worker >= self.computing:
            return ()
        last = max(len(self.ranges), self.worker + 1)
        return [index % len(self.ranges) for index in range(self.worker, last, self.computing)]


class MeasuredNetwork(msgspec.Struct, frozen=True):
    """Properties of the links between workers."""

    latency: float = 0.0
    """Time to send the smallest tensor from one worker to another, in seconds."""
    bandwidth: float = 0.0
    """Bandwidth in bytes per second. 0 if there is only one worker."""
    slowdown: float = 0.0
    """Fraction of the time of a reduction in which simultaneous compute makes no progress."""


class Measurement(msgspec.Struct, frozen=True):
    """Results of one measuring process."""

    stages: dict[int, StageProfile]
    all_reduce: list[float]
    gather: list[float]
    """Time of gathering the parameters after a step, in seconds, for each stage. 0 unless the optimizer's state is
    sharded."""
    transfer: float
    network: MeasuredNetwork
    waiting: float
    outside_bytes: int = 0
    """Memory of the GPU that this process uses besides torch's tensors."""


_TASK = msgspec.json.Decoder(Task)


class _Measurer:
    """Measurements of one process."""

    def __init__(self, task: Task, store: TCPStore) -> None:
        self._task, self._store = task, store
        self._device = torch.device("cpu")
        if task.cards:
            self._device = torch.device("cuda", (task.worker * task.ranks + task.rank) % task.cards)
            torch.cuda.set_device(self._device)
        training = task.config.training
        torch.set_num_threads(training.threads)
        self._group = enter_group(task.rank, task.ranks)
        self._model: LayeredModel = model_for(task.config.model, training.seed, parameter_dtype(training),
                                              self._device)
        self._forms = forms(self._model, task.config)
        self._data = load_corpus(task.config)
        self._benches: dict[int, StageBench] = {}

    def answer(self) -> Measurement:
        """Measure compute at the same time as the other processes, then exchange tensors with them. Return all
        results."""
        task = self._task
        everyone = [Worker(worker, 0) for worker in range(task.workers)]
        me, reduce_group = everyone[task.worker], everyone[:task.reduce_group]
        membership = Membership(1, {worker: place for place, worker in enumerate(everyone)}, me, self._group)
        session = Session(membership, links=Links(task.transport), device=self._device, store=self._store)
        session.connect({_LAYERS: reduce_group} if me in reduce_group else {},
                        pairs=list(permutations(everyone[:2], 2)))
        stages, waiting = self._compute() if task.stages else ({}, 0.0)
        self._meet("measured by all", task.workers)
        all_reduce, gather, transfer = [0.0] * len(task.ranges), [0.0] * len(task.ranges), 0.0
        network = MeasuredNetwork()
        if task.workers > 1:
            all_reduce, gather, transfer = self._communicate(session, everyone)
            network = self._network(session, everyone)
        self._meet("memory", task.workers)
        outside = self._outside_bytes()
        self._meet("end", task.workers)
        session.close()
        return Measurement(stages, all_reduce, gather, transfer, network, waiting, outside)

    def _outside_bytes(self) -> int:
        """Return the memory that this process uses of its GPU besides torch's tensors. All processes that share a GPU
        are assumed to use the same amount."""
        task = self._task
        if self._device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        self._meet("caches emptied", task.workers)
        free, total = torch.cuda.mem_get_info(self._device)
        processes = task.workers * task.ranks
        sharing = len([process for process in range(processes) if process % task.cards == self._device.index])
        return max(0, (total - free) // sharing - torch.cuda.memory_reserved(self._device))

    def _compute(self) -> tuple[dict[int, StageProfile], float]:
        """Measure this worker's stages. Return their profiles, and the fraction of time in which this process waited
        for others."""
        task = self._task
        self._benches = benches = {index: self._bench(index, task.config) for index in task.stages}
        # Torch's modes do not see what compiled layers keep, which is at most as much as without compilation.
        memory = {index: {**(self._changed(index, compile=False) if task.config.training.compile else bench).memory(),
                          **self._recomputed(index), "sent_bytes": self._sent_bytes(index)}
                  for index, bench in benches.items()}
        for bench in benches.values():
            bench.keep(task.copies)
            bench.round()
        self._meet("warm", task.computing)
        stages, waiting = {}, 0.0
        began, ran = time.perf_counter(), time.thread_time()
        for index, bench in benches.items():
            rounds = [bench.round() for _ in range(task.rounds)]
            medians = {name: statistics.median(result[name] for result in rounds) for name in rounds[0]}
            stages[index] = StageProfile(**medians, **memory[index],  # type: ignore[arg-type]
                                         by_lengths=tuple(self._by_lengths(bench)))
        # The thread that waits for a GPU is not the one that computes; ranks wait for each other within each op.
        if self._device.type == "cpu" and self._group is None:
            waiting = 1 - (time.thread_time() - ran) / (time.perf_counter() - began)
        # A worker that has finished keeps the machine busy, so that the others measure under the same load.
        self._store.add("measured", 1)
        while not self._all_ranks(self._store.add("measured", 0) >= task.computing * task.ranks):
            bench.round()
        return stages, waiting

    def _by_lengths(self, bench: StageBench) -> Iterator[tuple[float, ...]]:
        """Yield median results for samples of one, two, ... documents, of the whole context and of half of it."""
        task = self._task
        if not task.by_lengths:
            return
        context = task.config.model.context
        for share, most in ((1, MOST_DOCUMENTS), (2, MOST_DOCUMENTS // 2)):
            model = msgspec.structs.replace(task.config.model, context=context // share)
            at_layer = self._forms if share == 1 else forms(
                self._model, msgspec.structs.replace(task.config, model=model))
            documents = 1
            while documents <= most and context // share // documents >= FEWEST_TOKENS:
                rows = [bench.of_documents(documents, at_layer) for _ in range(1 + task.rounds)][1:]
                yield tuple(statistics.median(column) for column in zip(*rows, strict=True))
                documents *= 2

    def _bench(self, index: int, config: RunConfig) -> StageBench:
        task, layers = self._task, self._task.ranges[index]
        holding = build_holding(self._model, range(*layers), config.training)
        stage = SliceRunner(layers, holding.modules, self._model, loss_scale=1 / task.microbatches, config=config)
        bench = StageBench(stage, holding, self._forms, config, self._data, self._device)
        bench.keep(task.copies)
        return bench

    def _recomputed(self, index: int) -> dict[str, int]:
        """Return the memory that a micro-batch takes in a stage with recomputed activations, if the planner may choose
        that."""
        if self._task.config.training.recompute != "auto":
            return {}
        return {"recomputed_bytes": self._changed(index, recompute="full").memory()["activation_bytes"]}

    def _sent_bytes(self, index: int) -> int:
        begin, _ = self._task.ranges[index]
        return _bytes_of(carrier_form(gradient_form(self._forms[begin]))) if begin else 0

    def _changed(self, index: int, **training: object) -> StageBench:
        config = self._task.config
        return self._bench(index, msgspec.structs.replace(
            config, training=msgspec.structs.replace(config.training, **training)))

    def _communicate(self, session: Session, everyone: Sequence[Worker]
                     ) -> tuple[list[float], list[float], float]:
        """Measure collectives and transfers.

        Returns the seconds of each stage's all-reduce, of gathering each stage's parameters if the optimizer's state is
        sharded, and of a transfer of the largest activation. All ranks of a worker measure at the same time, each with
        the ranks of its own index.
        """
        task = self._task
        passed = [carrier_form(self._forms[end]) for _, end in task.ranges]
        largest = max(passed[:-1], key=_bytes_of, default=passed[-1])
        transfer = self._median(lambda: _ping_pong(session, task.worker, everyone, largest, self._device) / 2)
        all_reduce, gather, reduce_group = [], [], everyone[:task.reduce_group]
        for layers in task.ranges:
            gradients = self._gradients(layers)
            if task.config.training.shard_optimizer and everyone[task.worker] in reduce_group:
                reduced, gathered = self._reduce_parts(session, sum(map(len, gradients)), reduce_group)
                all_reduce.append(reduced)
                gather.append(gathered)
                continue
            gather.append(0.0)
            all_reduce.append(self._median(lambda: timed(
                lambda: session.sum_over_sharers(_LAYERS, gradients), self._device)))  # noqa: B023  # called here
        return all_reduce, gather, transfer

    def _network(self, session: Session, everyone: Sequence[Worker]) -> MeasuredNetwork:
        """Measure the links between the first two workers, and the effect of reductions on simultaneous compute."""
        task = self._task
        little, much = (self._median(lambda: _ping_pong(
            session, task.worker, everyone, TensorForm((size,), torch.uint8), self._device) / 2)  # noqa: B023
            for size in (1, LARGE_BYTES))
        self._meet("links measured", task.workers)
        slowdown = self._slowdown(session) if task.worker < task.reduce_group > 1 else 0.0
        return MeasuredNetwork(little, LARGE_BYTES / max(1e-9, much - little), slowdown)

    def _slowdown(self, session: Session) -> float:
        """Return the fraction of a reduction's time that simultaneous compute loses. Compares rounds of compute alone
        with rounds during which another thread reduces gradients of the longest stage."""
        task = self._task
        gradients = self._gradients(max(task.ranges, key=lambda layers: layers[1] - layers[0]))
        bench = self._benches.get(min(self._benches, default=-1))

        def reduce() -> None:
            session.sum_over_sharers(_LAYERS, gradients)

        def reduce_all() -> None:
            stream = (torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                      if self._device.type == "cuda" else None)
            with torch.cuda.stream(stream):  # does nothing if the stream is None
                for _ in range(count):
                    reduce()
            if stream is not None:
                stream.synchronize()

        def compute() -> float:
            return timed(bench.round, self._device) if bench else 0.0

        alone = self._median(compute)
        once = self._median(lambda: timed(reduce, self._device))
        if task.worker == task.rank == 0:
            reductions = math.ceil((task.rounds + 1) * 2 * alone / max(once, 1e-6))
            self._store.set("reductions", str(min(max(reductions, 2), MOST_REDUCTIONS)))
        count = int(self._store.get("reductions"))
        overlapped: list[float] = []
        thread = threading.Thread(target=reduce_all)
        thread.start()
        while self._all_ranks(thread.is_alive()):
            if bench:
                overlapped.append(compute())
            else:
                time.sleep(0.001)
        thread.join()
        complete = overlapped[:-1]  # the last round ended without reductions
        return max(0.0, 1 - alone / statistics.median(complete)) if complete else 0.0

    def _reduce_parts(self, session: Session, total: int, members: Sequence[Worker]) -> tuple[float, float]:
        """Return the seconds to reduce gradients, and to gather parameters, of `total` elements of which each member
        owns a part."""
        training, shares = self._task.config.training, cut(total, members, (), sharded=True)
        if not shares.sharded:
            return 0.0, 0.0
        exchange = PartExchange(session)
        gradients = torch.zeros(shares.length, dtype=gradient_dtype(training) or parameter_dtype(training),
                                device=self._device)
        parameters = torch.zeros(shares.length, dtype=parameter_dtype(training), device=self._device)
        copies = {span: torch.zeros_like(gradients[slice(*span)]) for span in shares.copied(members[self._task.worker])}

        def reduce() -> None:
            exchange.reduce(_LAYERS, gradients, shares, copies)
            exchange.wait_for_copies()

        def gather() -> None:
            exchange.gather(_LAYERS, parameters, shares)()

        return (self._median(lambda: timed(reduce, self._device)), self._median(lambda: timed(gather, self._device)))

    def _gradients(self, layers: tuple[int, int]) -> list[Tensor]:
        sizes: dict[torch.dtype, int] = {}
        for layer in range(*layers):
            for parameter in without_memory(self._model, layer).parameters():
                if parameter.requires_grad:
                    sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return [torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in sizes.items()]

    def _median(self, measure: Callable[[], float]) -> float:
        """Return the median of several results of `measure`, after a first one that is ignored. The ranks of a worker
        begin each measurement together."""
        results = []
        for _ in range(1 + self._task.rounds):
            self._all_ranks(True)
            results.append(measure())
        return statistics.median(results[1:])

    def _all_ranks(self, ready: bool) -> bool:
        """Return whether all ranks of this worker are ready, waiting for their answers. All of them must act alike."""
        return ready if self._group is None else self._group.all_ready(ready)

    def _meet(self, what: str, workers: int) -> None:
        """Wait until all processes of `workers` workers have reached this call."""
        self._store.add(what, 1)
        while self._store.add(what, 0) < workers * self._task.ranks:
            time.sleep(0.002)


def _ping_pong(session: Session, worker: int, everyone: Sequence[Worker], form: TensorForm,
               device: torch.device) -> float:
    """Return the seconds of a round trip of a tensor between the first two workers."""
    if worker > 1:
        return 0.0
    tensor = torch.zeros(form.shape, dtype=form.dtype, device=device)
    peer = everyone[1 - worker]

    def receive() -> None:
        session.receive(form.shape, form.dtype, peer, 1).take()

    def send() -> None:
        session.send(tensor, peer, 1).wait()

    def both() -> None:
        for step in (send, receive) if worker == 0 else (receive, send):
            step()

    return timed(both, device)


def _bytes_of(form: TensorForm) -> int:
    return torch.Size(form.shape).numel() * form.dtype.itemsize


def measure(data: bytes) -> bytes:
    """Run one measuring process: decode its task, and return the encoded results."""
    task = _TASK.decode(data)
    name_interface(task.rendezvous)
    if task.config.training.share_devices:
        claim_own_host(f"{task.worker}:{task.rank}")
    return msgspec.json.encode(_Measurer(task, connect_store(task.rendezvous)).answer())
