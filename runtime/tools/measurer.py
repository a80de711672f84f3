"""Profile a model in one of several processes, which compute and then exchange tensors."""

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations

import msgspec
import torch
from torch import Tensor

from slipstream.runtime.computing.forms import find_forms
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import RunConfig
from slipstream.runtime.data.data import load_data
from slipstream.runtime.models.layered_model import LayeredModel, build_model, parameter_dtype
from slipstream.runtime.protocol.network_interfaces import configure_interface
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.store import connect_store
from slipstream.runtime.ranks.worker_group import enter_group
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.layer_values import TensorForm, carrier_form, gradient_form
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import TCPStore
from slipstream.runtime.replay.transport import TransportName, set_own_nccl_host
from slipstream.runtime.state.held_layers import build_holding, build_on_meta, gradient_dtype
from slipstream.runtime.state.part_exchange import PartExchange
from slipstream.runtime.state.parts import build_partition
from slipstream.runtime.tools.stage_bench import StageBench, StageProfile, time_call
from slipstream.schedules.schedule import Worker

MAX_DOCUMENTS = 8
"""Largest number of documents in a sample with which ops are measured."""
MIN_DOCUMENT_TOKENS = 16
"""Smallest number of tokens of a document in a sample with which ops are measured."""
LARGE_BYTES = 1 << 24
"""Bytes of the tensor that is sent to measure the bandwidth between workers."""
MAX_REDUCTIONS = 1000
"""Largest number of all-reduces during compute when their effect on it is measured."""
_LAYERS = (0, 1)
"""Range of layers by which sessions know the workers that reduce; any other would do."""


class MeasuringTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of one measuring process: which stages of the job's model it measures, and how."""

    config: RunConfig
    ranges: tuple[tuple[int, int], ...]
    microbatches: int
    worker: int
    """Number of the measuring worker to which this process belongs."""
    rank: int
    """Rank of this process within the worker."""
    workers: int
    """Number of workers that measure compute, or exchange tensors, or both."""
    computing: int
    """Number of workers, from number 0 on, that measure compute at the same time.

    The first two of all workers exchange tensors, and the first `reduce_group` reduce.
    """
    reduce_group: int
    device: str
    cards: int
    transport: TransportName
    rendezvous: Rendezvous
    rounds: int
    copies: int
    """Number of workers of the job that hold each stage.

    Sharded optimizer state is divided among them.
    """
    by_lengths: bool = False
    """True to measure ops also for samples of several documents and of half the length."""

    @property
    def ranks_per_worker(self) -> int:
        """Number of processes of a worker."""
        return self.config.training.tensor_parallel

    @property
    def measured_stages(self) -> Sequence[int]:
        """Indices of the stages that this worker measures."""
        if self.worker >= self.computing:
            return ()
        # Every stage is measured by some worker; with more computing workers than stages, several
        # measure the same one.
        last = max(len(self.ranges), self.worker + 1)
        return [index % len(self.ranges) for index in range(self.worker, last, self.computing)]


class MeasuredNetwork(msgspec.Struct, frozen=True):
    """Latency and bandwidth between two workers, and how much reductions slow compute."""

    latency: float = 0.0
    """Seconds to send the smallest tensor from one worker to another."""
    bandwidth: float = 0.0
    """Bytes per second from one worker to another; 0 with only one worker."""
    slowdown: float = 0.0
    """Fraction of a reduction's time in which simultaneous compute makes no progress."""


class Measurement(msgspec.Struct, frozen=True):
    """Results of one measuring process."""

    stages: dict[int, StageProfile]
    all_reduce: list[float]
    gather: list[float]
    """Seconds to gather each stage's parameters after a step; 0 unless state is sharded."""
    transfer: float
    network: MeasuredNetwork
    waiting: float
    outside_bytes: int = 0
    """Bytes of GPU memory that this process uses besides torch's tensors."""


_TASK = msgspec.json.Decoder(MeasuringTask)


class _Measurer:
    def __init__(self, task: MeasuringTask, store: TCPStore) -> None:
        self._task, self._store = task, store
        self._device = torch.device("cpu")
        # Processes take the machine's GPUs in turn.
        if task.cards:
            self._device = torch.device(
                "cuda", (task.worker * task.ranks_per_worker + task.rank) % task.cards
            )
            torch.cuda.set_device(self._device)
        training = task.config.training
        torch.set_num_threads(training.threads)
        self._group = enter_group(task.rank, task.ranks_per_worker)
        self._model: LayeredModel = build_model(
            task.config.model, training.seed, parameter_dtype(training), self._device
        )
        self._forms = find_forms(self._model, task.config)
        self._data = load_data(task.config)
        self._benches: dict[int, StageBench] = {}

    def measure_all(self) -> Measurement:
        """Measure compute while others do, then exchanges of tensors; return the results."""
        task = self._task
        # The measuring workers connect as those of a run do; only the first two exchange tensors.
        everyone = [Worker(worker, 0) for worker in range(task.workers)]
        me, reduce_group = everyone[task.worker], everyone[: task.reduce_group]
        membership = Membership(
            1, {worker: place for place, worker in enumerate(everyone)}, me, self._group
        )
        session = GenerationSession(
            membership, links=GroupCache(task.transport), device=self._device, store=self._store
        )
        session.connect(
            {_LAYERS: reduce_group} if me in reduce_group else {},
            pairs=list(permutations(everyone[:2], 2)),
        )
        # Compute first, then communication: neither disturbs the other.
        stages, waiting = self._measure_stages() if task.measured_stages else ({}, 0.0)
        self._wait_for_processes("measured by all", task.workers)
        all_reduce, gather, transfer = [0.0] * len(task.ranges), [0.0] * len(task.ranges), 0.0
        network = MeasuredNetwork()
        if task.workers > 1:
            all_reduce, gather, transfer = self._measure_communication(session, everyone)
            network = self._measure_network(session, everyone)
        self._wait_for_processes("memory", task.workers)
        outside = self._measure_outside_bytes()
        self._wait_for_processes("end", task.workers)
        session.close()
        return Measurement(stages, all_reduce, gather, transfer, network, waiting, outside)

    def _measure_outside_bytes(self) -> int:
        """Return the GPU memory that this process uses besides torch's tensors, in bytes."""
        # All processes that share a GPU are assumed to use the same amount.
        task = self._task
        if self._device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        self._wait_for_processes("caches emptied", task.workers)
        free, total = torch.cuda.mem_get_info(self._device)
        processes = task.workers * task.ranks_per_worker
        sharing = len(
            [process for process in range(processes) if process % task.cards == self._device.index]
        )
        return max(0, (total - free) // sharing - torch.cuda.memory_reserved(self._device))

    def _measure_stages(self) -> tuple[dict[int, StageProfile], float]:
        """Return each measured stage's profile, and the share of time spent off the CPU."""
        # The share is 0 on a GPU, and for a worker of several processes.
        task = self._task
        self._benches = benches = {
            index: self._build_bench(index, task.config) for index in task.measured_stages
        }
        # Torch's modes do not see what compiled layers keep, which is at most as much as without
        # compilation.
        memory = {}
        for index, bench in benches.items():
            plain = bench
            if task.config.training.compile:
                plain = self._build_changed_bench(index, compile=False)
            memory[index] = {
                **plain.measure_memory(),
                **self._measure_recomputed(index),
                "sent_bytes": self._count_sent_bytes(index),
            }
        # From here on the benches hold what a member holds, and are warm.
        for bench in benches.values():
            bench.keep_member_part(task.copies)
            bench.measure_round()
        self._wait_for_processes("warm", task.computing)
        # The measured rounds.
        stages, waiting = {}, 0.0
        start, start_computed = time.perf_counter(), time.thread_time()
        for index, bench in benches.items():
            rounds = [bench.measure_round() for _ in range(task.rounds)]
            medians = {}
            for name in rounds[0]:
                medians[name] = statistics.median(result[name] for result in rounds)
            stages[index] = StageProfile(
                **medians,  # type: ignore[arg-type]
                **memory[index],
                by_lengths=tuple(self._measure_by_lengths(bench)),
            )
        # The thread that waits for a GPU is not the one that computes; ranks wait for each other
        # within each op.
        if self._device.type == "cpu" and self._group is None:
            computed = time.thread_time() - start_computed
            waiting = 1 - computed / (time.perf_counter() - start)
        # A worker that has finished keeps the machine busy, so that the others measure under the
        # same load.
        self._store.add("measured", 1)
        while not self._all_ranks_ready(
            self._store.add("measured", 0) >= task.computing * task.ranks_per_worker
        ):
            bench.measure_round()
        return stages, waiting

    def _measure_by_lengths(self, bench: StageBench) -> Iterator[tuple[float, ...]]:
        """Yield rows of `StageProfile.by_lengths`; none unless the task wants them."""
        # They are rows of `StageProfile.by_lengths`: first for samples of the whole context, then
        # of half of it. Each value is the median of several measurements.
        task = self._task
        if not task.by_lengths:
            return
        context = task.config.model.context
        for divisor, max_documents in ((1, MAX_DOCUMENTS), (2, MAX_DOCUMENTS // 2)):
            length = context // divisor
            model = msgspec.structs.replace(task.config.model, context=length)
            at_layer = self._forms
            if divisor > 1:
                config = msgspec.structs.replace(task.config, model=model)
                at_layer = find_forms(self._model, config)
            documents = 1
            while documents <= max_documents and length // documents >= MIN_DOCUMENT_TOKENS:
                rows = [
                    bench.measure_documents(documents, at_layer) for _ in range(1 + task.rounds)
                ]
                # The first one warms up.
                columns = zip(*rows[1:], strict=True)
                yield tuple(statistics.median(column) for column in columns)
                documents *= 2

    def _build_bench(self, index: int, config: RunConfig) -> StageBench:
        task, layers = self._task, self._task.ranges[index]
        holding = build_holding(self._model, range(*layers), config.training)
        stage = SliceRunner(
            layers, holding.modules, self._model, loss_scale=1 / task.microbatches, config=config
        )
        bench = StageBench(stage, holding, self._forms, config, self._data, self._device)
        bench.keep_member_part(task.copies)
        return bench

    def _measure_recomputed(self, index: int) -> dict[str, int]:
        """Return a dict with a stage's `recomputed_bytes`; empty unless `recompute` is "auto"."""
        # Only then may the planner choose which layers are recomputed.
        if self._task.config.training.recompute != "auto":
            return {}
        sizes = self._build_changed_bench(index, recompute="full").measure_memory()
        return {"recomputed_bytes": sizes["activation_bytes"]}

    def _count_sent_bytes(self, index: int) -> int:
        # The first stage sends no gradient.
        begin, _ = self._task.ranges[index]
        return _count_bytes(carrier_form(gradient_form(self._forms[begin]))) if begin else 0

    def _build_changed_bench(self, index: int, **training: object) -> StageBench:
        config = self._task.config
        return self._build_bench(
            index,
            msgspec.structs.replace(
                config, training=msgspec.structs.replace(config.training, **training)
            ),
        )

    def _measure_communication(
        self, session: GenerationSession, everyone: Sequence[Worker]
    ) -> tuple[list[float], list[float], float]:
        """Return seconds to reduce and gather each stage, and to transfer; all call this."""
        # Returns three results: the seconds of each stage's all-reduce, the seconds to gather each
        # stage's parameters (0 unless the optimizer's state is sharded), and the seconds to
        # transfer the largest activation from one worker to another (0 except on the first two
        # workers). All ranks of a worker measure at the same time, each with the ranks of its own
        # index.
        task = self._task
        forms = [carrier_form(self._forms[end]) for _, end in task.ranges]
        largest = max(forms[:-1], key=_count_bytes, default=forms[-1])
        transfer = self._measure_median(
            lambda: _time_round_trip(session, task.worker, everyone, largest, self._device) / 2
        )
        all_reduce, gather, reduce_group = [], [], everyone[: task.reduce_group]
        for layers in task.ranges:
            gradients = self._allocate_gradients(layers)
            if task.config.training.shard_optimizer and everyone[task.worker] in reduce_group:
                reduced, gathered = self._measure_part_exchange(
                    session, sum(map(len, gradients)), reduce_group
                )
                all_reduce.append(reduced)
                gather.append(gathered)
                continue
            gather.append(0.0)

            def reduce(gradients: list[Tensor] = gradients) -> float:
                return time_call(lambda: session.sum_over_sharers(_LAYERS, gradients), self._device)

            all_reduce.append(self._measure_median(reduce))
        return all_reduce, gather, transfer

    def _measure_network(
        self, session: GenerationSession, everyone: Sequence[Worker]
    ) -> MeasuredNetwork:
        """Measure transfers between workers, and how reductions slow compute."""
        # All workers call this together; only the first two, which exchange tensors, get valid
        # values.
        task = self._task

        def time_transfer(size: int) -> float:
            form = TensorForm((size,), torch.uint8)
            return _time_round_trip(session, task.worker, everyone, form, self._device) / 2

        # A transfer takes the latency, and its bytes over the bandwidth.
        small_seconds = self._measure_median(partial(time_transfer, 1))
        large_seconds = self._measure_median(partial(time_transfer, LARGE_BYTES))
        bandwidth = LARGE_BYTES / max(1e-9, large_seconds - small_seconds)
        self._wait_for_processes("links measured", task.workers)
        slowdown = self._measure_slowdown(session) if task.worker < task.reduce_group > 1 else 0.0
        return MeasuredNetwork(small_seconds, bandwidth, slowdown)

    def _measure_slowdown(self, session: GenerationSession) -> float:
        """Return the fraction of a reduction's time in which compute makes no progress."""
        # It compares rounds of compute alone with rounds during which another thread reduces
        # gradients of the longest stage.
        task = self._task
        gradients = self._allocate_gradients(
            max(task.ranges, key=lambda layers: layers[1] - layers[0])
        )
        bench = self._benches.get(min(self._benches, default=-1))

        def reduce() -> None:
            session.sum_over_sharers(_LAYERS, gradients)

        def reduce_all() -> None:
            stream = (
                torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
                if self._device.type == "cuda"
                else None
            )
            with torch.cuda.stream(stream):  # does nothing if the stream is None
                for _ in range(count):
                    reduce()
            if stream is not None:
                stream.synchronize()

        def compute() -> float:
            return time_call(bench.measure_round, self._device) if bench else 0.0

        # One process chooses how many reductions last for all rounds of compute.
        alone = self._measure_median(compute)
        reduction = self._measure_median(lambda: time_call(reduce, self._device))
        if task.worker == task.rank == 0:
            reductions = math.ceil((task.rounds + 1) * 2 * alone / max(reduction, 1e-6))
            self._store.set("reductions", str(min(max(reductions, 2), MAX_REDUCTIONS)))
        count = int(self._store.get("reductions"))
        # Rounds of compute while another thread reduces, for as long as all ranks' threads do.
        overlapped: list[float] = []
        thread = threading.Thread(target=reduce_all)
        thread.start()
        while self._all_ranks_ready(thread.is_alive()):
            if bench:
                overlapped.append(compute())
            else:
                time.sleep(0.001)
        thread.join()
        complete = overlapped[:-1]  # the last round ended without reductions
        return max(0.0, 1 - alone / statistics.median(complete)) if complete else 0.0

    def _measure_part_exchange(
        self, session: GenerationSession, total: int, members: Sequence[Worker]
    ) -> tuple[float, float]:
        """Return the seconds to reduce, and to gather, `total` elements sharded over `members`."""
        # Each owns one part. Both are 0 if nothing is sharded, as with one member.
        training = self._task.config.training
        shares = build_partition(total, members, (), sharded=True)
        if not shares.sharded:
            return 0.0, 0.0
        exchange = PartExchange(session)
        gradients = torch.zeros(
            shares.padded_length,
            dtype=gradient_dtype(training) or parameter_dtype(training),
            device=self._device,
        )
        parameters = torch.zeros(
            shares.padded_length, dtype=parameter_dtype(training), device=self._device
        )
        # A buddy also receives the gradients of the part that it copies.
        copies = {
            span: torch.zeros_like(gradients[slice(*span)])
            for span in shares.copied_parts(members[self._task.worker])
        }

        def reduce() -> None:
            exchange.reduce_gradients(_LAYERS, gradients, shares, copies)
            exchange.wait_for_copies()

        def gather() -> None:
            exchange.start_gather(_LAYERS, parameters, shares)()

        return (
            self._measure_median(lambda: time_call(reduce, self._device)),
            self._measure_median(lambda: time_call(gather, self._device)),
        )

    def _allocate_gradients(self, layers: tuple[int, int]) -> list[Tensor]:
        # One flat tensor for each dtype, as in training, whose numbers do not matter.
        sizes: dict[torch.dtype, int] = {}
        for layer in range(*layers):
            for parameter in build_on_meta(self._model, layer).parameters():
                if parameter.requires_grad:
                    sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return [
            torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in sizes.items()
        ]

    def _measure_median(self, measure: Callable[[], float]) -> float:
        """Return the median result of several calls of `measure`, after a first one ignored."""
        # The ranks of a worker begin each measurement together.
        results = []
        for _ in range(1 + self._task.rounds):
            self._all_ranks_ready(True)
            results.append(measure())
        return statistics.median(results[1:])

    def _all_ranks_ready(self, ready: bool) -> bool:
        """Return whether `ready` is true on all ranks of this worker; all call this together."""
        return ready if self._group is None else self._group.all_ready(ready)

    def _wait_for_processes(self, what: str, workers: int) -> None:
        """Wait until all processes of `workers` workers have called this with a new name `what`."""
        # The counter of this name in the store says how many processes have come.
        self._store.add(what, 1)
        while self._store.add(what, 0) < workers * self._task.ranks_per_worker:
            time.sleep(0.002)


def _time_round_trip(
    session: GenerationSession,
    worker: int,
    everyone: Sequence[Worker],
    form: TensorForm,
    device: torch.device,
) -> float:
    """Return the seconds of a tensor's round trip between workers 0 and 1; 0 elsewhere."""
    if worker > 1:
        return 0.0
    tensor = torch.zeros(form.shape, dtype=form.dtype, device=device)
    peer = everyone[1 - worker]

    def receive() -> None:
        session.receive(form.shape, form.dtype, peer, 1).wait_for_tensor()

    def send() -> None:
        session.send(tensor, peer, 1).wait()

    def both() -> None:
        for step in (send, receive) if worker == 0 else (receive, send):
            step()

    return time_call(both, device)


def _count_bytes(form: TensorForm) -> int:
    return torch.Size(form.shape).numel() * form.dtype.itemsize


def measure(data: bytes) -> bytes:
    """Run a measuring process: decode its `MeasuringTask`, return the encoded `Measurement`."""
    task = _TASK.decode(data)
    configure_interface(task.rendezvous)
    # NCCL refuses two ranks of one host on one GPU, so each process gets a host name of its own.
    if task.config.training.share_devices:
        set_own_nccl_host(f"{task.worker}:{task.rank}")
    return msgspec.json.encode(_Measurer(task, connect_store(task.rendezvous)).measure_all())
