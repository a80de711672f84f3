"""Measures a model's stages on this machine: seconds of each op, bytes of what is held, transfers and all-reduces.

Stages are measured by processes that run at the same time, as many as the machine will run workers (on CPUs: as many
as have cores of their own), since workers share caches and memory. Ops are the runtime's own (`SliceRunner`,
`UndoableOptimizer`, `Communicator`), timed over a few micro-batches in a row; the median of the rounds counts.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from runtime.config import ConfigError, RunConfig
from runtime.device import choose_device
from runtime.model.calling import on_device
from runtime.model.clipping import watches_gradients
from runtime.model.data import Data, Microbatch, load_corpus
from runtime.model.forms import forms
from runtime.model.holding import Holding, build_holding, gradient_dtype, keeps_parts
from runtime.model.layers import LayeredModel, model_for, parameter_dtype
from runtime.model.part_optimizer import PartOptimizer
from runtime.model.part_state import elements_of
from runtime.model.parts import cut
from runtime.model.passed import Form, TensorForm, Value, carrier_form, gradient_form, made, tensors_of
from runtime.model.slices import SliceRunner
from runtime.processes.children import ChildError, Children
from runtime.protocol.rendezvous import Rendezvous, connect_store, host_store, interface_towards
from runtime.replay.communication import Communicator, Membership, Transport, choose_transport
from runtime.replay.part_exchange import PartExchange
from runtime.torch_private import LivingStorages, TCPStore, TensorWatch
from schedules.schedule import Worker

ROW = 4
"""Micro-batches run in a row: as in a run, each op finds caches filled by others."""
TIMEOUT_SECONDS = 600.0
MAX_REDUCE_GROUP = 4
"""Processes that measure an all-reduce at most; more of one machine would measure its memory."""
_LAYERS = (0, 1)
"""The name of what is reduced, whatever it is."""


class ProfileError(RuntimeError):
    """A measurement that failed. The message is one line."""


class StageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One stage: seconds of its ops for one micro-batch, bytes of what it holds."""

    forward: float
    backward_input: float
    backward_weight: float
    optimizer: float
    all_reduce: float = 0.0
    activation_bytes: int
    """For a micro-batch, from F to I."""
    stash_bytes: int
    """For a micro-batch, from I to W."""
    recomputed_bytes: int | None = None
    """For a micro-batch, from F to I, where all layers are computed again; None where that is not to be chosen."""
    static_bytes: int
    """Parameters, gradients, optimizer state, and the copies by which a step is undone."""
    undo_bytes: int


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """All stages of a job on this machine."""

    stages: tuple[StageProfile, ...]
    transfer: float
    """Seconds that the largest activation takes between two workers here."""
    device: str
    device_bytes: int
    """Memory of a GPU, or of this machine."""
    processes: int
    """How many measured at the same time."""
    reduce_group: int
    """How many took part in an all-reduce."""
    transport: str
    waiting: float
    """Share of the time in which a measuring process had to wait for others of this machine; on CPUs, about 0 is right.
    """


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a measuring process is told."""

    config: RunConfig
    ranges: tuple[tuple[int, int], ...]
    microbatches: int
    rank: int
    computing: int
    communicating: int
    reduce_group: int
    device: str
    cards: int
    transport: Transport
    rendezvous: Rendezvous
    rounds: int
    copies: int
    """Workers that hold each stage."""


class _Answer(msgspec.Struct, frozen=True):
    stages: dict[int, StageProfile]
    all_reduce: list[float]
    gather: list[float]
    """Seconds after a step, where the optimizer's state is sharded."""
    transfer: float
    waiting: float


_TASK = msgspec.json.Decoder(_Task)
_ANSWER = msgspec.json.Decoder(_Answer)


def profile(config: RunConfig, ranges: Sequence[tuple[int, int]], *, copies: int, workers: int, microbatches: int,
            rounds: int = 7) -> Profile:
    """Measure the stages that hold these ranges of layers.

    `workers` of the whole job and the `copies` of each stage in it decide how many processes measure at a time,
    `microbatches` of all pipelines the scale of the loss. Raises ConfigError and ProfileError.
    """
    if config.training.tensor_parallel > 1:
        raise ConfigError(f"training.tensor_parallel is {config.training.tensor_parallel}; workers of one process are "
                          "all that can be measured so far")
    device = choose_device(config.training.device)
    cards = torch.cuda.device_count() if device == "cuda" else 0
    room = cards or max(1, (os.cpu_count() or 1) // config.training.threads)
    computing = min(workers, room, len(ranges) * copies)
    reduce_group = min(copies, MAX_REDUCE_GROUP)
    communicating = max(reduce_group, 2 if workers > 1 else 1)
    transport = choose_transport(config.training.backend, device, communicating, cards)
    store, opened = host_store()
    tasks = [_Task(config=config, ranges=tuple(ranges), microbatches=microbatches, rank=rank, computing=computing,
                   communicating=communicating, reduce_group=reduce_group, device=device, cards=cards,
                   transport=transport, rendezvous=opened, rounds=rounds, copies=copies)
             for rank in range(max(computing, communicating))]
    answers = _ask(tasks)
    del store
    measured: dict[int, StageProfile] = {}
    for answer in reversed(answers):  # those who are first to have a stage count: the others repeat it
        measured |= answer.stages
    stages = tuple(msgspec.structs.replace(measured[index], all_reduce=answers[0].all_reduce[index],
                                           optimizer=measured[index].optimizer + answers[0].gather[index])
                   for index in range(len(ranges)))
    memory = torch.cuda.mem_get_info(0)[1] if cards else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Profile(stages=stages, transfer=answers[0].transfer, device=device, device_bytes=memory,
                   processes=computing, reduce_group=reduce_group, transport=transport,
                   waiting=max(answer.waiting for answer in answers))


def _ask(tasks: Sequence[_Task]) -> list[_Answer]:
    """Run one process a task, all at a time; none is left at the end."""
    with Children("runtime.tools.profile:measure", tasks) as children:
        try:
            return [_ANSWER.decode(answer) for answer in children.answers(TIMEOUT_SECONDS)]
        except ChildError as error:
            raise ProfileError(f"measuring failed: {error}") from None
        except TimeoutError:
            raise ProfileError(f"measuring took more than {TIMEOUT_SECONDS:.0f} s") from None


class _Measurer:
    """One measuring process."""

    def __init__(self, task: _Task) -> None:
        self._task = task
        self._device = torch.device("cuda", task.rank % task.cards) if task.cards else torch.device("cpu")
        if task.cards:
            torch.cuda.set_device(self._device)
        training = task.config.training
        torch.set_num_threads(training.threads)
        self._model: LayeredModel = model_for(task.config.model, training.seed, parameter_dtype(training),
                                              self._device)
        self._forms = forms(self._model, task.config)
        self._data = load_corpus(task.config)

    def answer(self, store: TCPStore) -> _Answer:
        """Compute at the same time as the others; then exchange tensors with them."""
        task, stages, waiting = self._task, {}, 0.0
        if task.rank < task.computing:
            mine = [index % len(task.ranges) for index in range(task.rank, max(len(task.ranges), task.rank + 1),
                                                                task.computing)]
            benches = {index: self._bench(index, task.config) for index in mine}
            memory = {index: {**bench.memory(), **self._recomputed(index)} for index, bench in benches.items()}
            for bench in benches.values():
                bench.keep(task.copies)
                bench.round()
            self._meet(store, "warm", task.computing)
            began, ran = time.perf_counter(), time.thread_time()
            for index, bench in benches.items():
                rounds = [bench.round() for _ in range(task.rounds)]
                medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
                stages[index] = StageProfile(**medians, **memory[index])  # type: ignore[arg-type]
            if self._device.type == "cpu":  # the thread that waits for a GPU is not the one that computes
                waiting = 1 - (time.thread_time() - ran) / (time.perf_counter() - began)
            # A process that is done first keeps the machine busy for the others.
            store.add("measured", 1)
            while store.add("measured", 0) < task.computing:
                bench.round()
        self._meet(store, "measured by all", max(task.computing, task.communicating))
        all_reduce, gather, transfer = [0.0] * len(task.ranges), [0.0] * len(task.ranges), 0.0
        if task.communicating > 1 and task.rank < task.communicating:
            all_reduce, gather, transfer = self._communicate(store)
        self._meet(store, "end", max(task.computing, task.communicating))
        return _Answer(stages, all_reduce, gather, transfer, waiting)

    def _bench(self, index: int, config: RunConfig) -> "_Bench":
        task, layers = self._task, self._task.ranges[index]
        holding = build_holding(self._model, range(*layers), config.training)
        stage = SliceRunner(layers, holding.modules, self._model, loss_scale=1 / task.microbatches, config=config)
        bench = _Bench(stage, holding, self._forms, config, self._data, self._device)
        bench.keep(max(1, task.copies - 1))  # there must be room for state when a worker of the stage is lost
        return bench

    def _recomputed(self, index: int) -> dict[str, int]:
        """What a micro-batch holds in a stage that computes its activations again, where the planner is to choose."""
        config = self._task.config
        if config.training.recompute != "auto":
            return {}
        again = msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, recompute="full"))
        return {"recomputed_bytes": self._bench(index, again).memory()["activation_bytes"]}

    def _communicate(self, store: TCPStore) -> tuple[list[float], list[float], float]:
        """Seconds of the all-reduce of each stage, of gathering its parameters where the optimizer's state is sharded,
        and of a transfer of the largest activation."""
        task = self._task
        everyone = [Worker(rank, 0) for rank in range(task.communicating)]
        me, reduce_group = everyone[task.rank], everyone[:task.reduce_group]
        membership = Membership(1, {worker: rank for rank, worker in enumerate(everyone)}, me)
        communicator = Communicator(membership, {_LAYERS: reduce_group} if me in reduce_group else {},
                                    transport=task.transport, device=self._device, store=store)
        passed = [carrier_form(self._forms[end]) for _, end in task.ranges]
        largest = max(passed[:-1], key=_bytes_of, default=passed[-1])
        transfer = self._median(lambda: _ping_pong(communicator, task.rank, everyone, largest, self._device) / 2)
        all_reduce, gather = [], []
        for layers in task.ranges:
            gradients = self._gradients(layers)
            if task.config.training.shard_optimizer and me in reduce_group:
                reduced, gathered = self._reduce_parts(communicator, sum(map(len, gradients)), reduce_group)
                all_reduce.append(reduced)
                gather.append(gathered)
                continue
            gather.append(0.0)
            all_reduce.append(self._median(lambda: self._timed(
                lambda: communicator.sum_over_sharers(_LAYERS, gradients))))  # noqa: B023  # called within the loop
        communicator.wait_for_all()
        communicator.drop()
        return all_reduce, gather, transfer

    def _reduce_parts(self, communicator: Communicator, total: int, members: Sequence[Worker]) -> tuple[float, float]:
        """Seconds that gradients of so many elements, and parameters, take where each has a part."""
        training, one = self._task.config.training, cut(total, members, (), sharded=True)
        if not one.sharded:
            return 0.0, 0.0
        exchange = PartExchange(communicator)
        gradients = torch.zeros(one.length, dtype=gradient_dtype(training) or parameter_dtype(training),
                                device=self._device)
        parameters = torch.zeros(one.length, dtype=parameter_dtype(training), device=self._device)

        def reduce() -> None:
            exchange.reduce(_LAYERS, gradients, one)
            exchange.wait_for_copies()

        return (self._median(lambda: self._timed(reduce)),
                self._median(lambda: self._timed(lambda: exchange.gather(_LAYERS, parameters, one)())))

    def _gradients(self, layers: tuple[int, int]) -> list[Tensor]:
        sizes: dict[torch.dtype, int] = {}
        for layer in range(*layers):
            with torch.device("meta"):
                module = self._model.build(layer)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        return [torch.zeros(size, dtype=dtype, device=self._device) for dtype, size in sizes.items()]

    def _median(self, measure: Callable[[], float]) -> float:
        measure()
        return statistics.median([measure() for _ in range(self._task.rounds)])

    def _timed(self, call: Callable[[], object]) -> float:
        return timed(call, self._device)

    @staticmethod
    def _meet(store: TCPStore, what: str, count: int) -> None:
        store.add(what, 1)
        while store.add(what, 0) < count:
            time.sleep(0.002)


class _Bench:
    """A stage under test."""

    def __init__(self, stage: SliceRunner, holding: Holding, at_layer: Sequence[Form], config: RunConfig,
                 data: Data, device: torch.device) -> None:
        self._stage = stage
        self._holding = holding
        self._takes, self._gives = at_layer[stage.layers[0]], at_layer[stage.layers[1]]
        self._config = config
        self._data = data
        self._device = device
        self._rounds = 0

    def keep(self, members: int) -> None:
        """Where workers keep parts of layers' optimizer states: keep that of one of so many, without what it was."""
        if not keeps_parts(self._config.training):
            return
        self._holding = Holding(self._holding.modules, self._config.training)
        workers = [Worker(pipeline, 0) for pipeline in range(members)]
        total = sum(map(elements_of, self._holding.modules.values()))
        one = cut(total, workers, (), sharded=self._config.training.shard_optimizer)
        self._holding.keep(self._holding.modules, {self._stage.layers: one}, workers[0], [], -1)

    def round(self) -> dict[str, float]:
        """Seconds of each op, mean over a row of micro-batches, then of an optimizer step."""
        stage, row = self._stage, [Microbatch(self._rounds, 0, index) for index in range(ROW)]
        self._rounds += 1
        gradient = None if stage.last else self._like(gradient_form(self._gives), 5e-4)
        return {
            "forward": self._timed(self._forward, row) / ROW,
            "backward_input": self._timed(lambda one: stage.backward_input(one, gradient), row) / ROW,
            "backward_weight": self._timed(stage.backward_weight, row) / ROW,
            "optimizer": self._timed(lambda _: self._step(), row[:1]),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that a micro-batch takes before and after I, and that the stage takes always."""
        stage, microbatch = self._stage, Microbatch(0, 1, 0)
        gradient = None if stage.last else self._like(gradient_form(self._gives))
        living = LivingStorages([*self._holding.parameters().values(), *self._holding.gradients()])
        with TensorWatch(living):
            self._forward(microbatch, living)
            activation = living.bytes()
            for tensor in () if gradient is None else tensors_of(gradient):
                living.watch(tensor)
            stage.backward_input(microbatch, gradient)
            del gradient
            stash = living.bytes()
            stage.backward_weight(microbatch)
        for _ in range(2):  # state appears with the first step, and is first copied by the second
            self._step()
        optimizer, undo = self._holding.optimizer, self._holding.optimizer.undo_bytes()
        if isinstance(optimizer, PartOptimizer):
            held = optimizer.state_bytes() + sum(tensor.nbytes for module in self._holding.modules.values()
                                                 for tensor in module.state_dict().values())
        else:
            held = sum(tensor.nbytes for layer in range(*stage.layers)
                       for tensor in optimizer.layer_state(layer).values())
        gradients = sum(flat.nbytes for flat in self._holding.gradients())
        return {"activation_bytes": activation, "stash_bytes": stash, "undo_bytes": undo,
                "static_bytes": held + gradients + undo}

    def _forward(self, microbatch: Microbatch, living: LivingStorages | None = None) -> None:
        stage, training = self._stage, self._config.training
        batch = on_device(self._data.batch(microbatch, training.batch, self._config.model.context), self._device) \
            if stage.reads_batch else None
        value: Value = batch[0] if batch is not None and stage.first else self._like(self._takes)
        if living is not None:
            for tensor in tensors_of(value):
                living.watch(tensor)
        stage.forward(microbatch, value, batch[1] if batch is not None and stage.last else None, batch, split=True)

    def _step(self) -> None:
        if watches_gradients(self._config.training):
            self._holding.optimizer.squares()
        self._holding.optimizer.step(self._rounds)
        self._rounds += 1
        self._holding.zero_gradients()

    def _like(self, form: Form, number: float = 0.5) -> Value:
        return made(form, lambda shape, dtype: torch.full(
            shape, number if dtype.is_floating_point else 0, dtype=dtype, device=self._device))

    def _timed(self, call: Callable[[Microbatch], object], row: Sequence[Microbatch]) -> float:
        def run() -> None:
            for microbatch in row:
                call(microbatch)

        return timed(run, self._device)


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, with all that it gives the device to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _ping_pong(communicator: Communicator, rank: int, everyone: Sequence[Worker], form: TensorForm,
               device: torch.device) -> float:
    """Seconds there and back, between the first two."""
    if rank > 1:
        return 0.0
    tensor = torch.zeros(form.shape, dtype=form.dtype, device=device)
    peer = everyone[1 - rank]

    def receive() -> None:
        communicator.receive(form.shape, form.dtype, peer, 1).take()

    def send() -> None:
        communicator.send(tensor, peer, 1).wait()

    def both() -> None:
        for step in (send, receive) if rank == 0 else (receive, send):
            step()

    return timed(both, device)


def _bytes_of(form: TensorForm) -> int:
    return torch.Size(form.shape).numel() * form.dtype.itemsize


def measure(data: bytes) -> bytes:
    """One measuring process."""
    task = _TASK.decode(data)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(task.rendezvous) or "")
    store = connect_store(task.rendezvous)
    return msgspec.json.encode(_Measurer(task).answer(store))
