"""One worker in this process, and the order in which several exchange tensors."""

import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from slipstream.runtime.computing.slices import TensorForm, WorkerSlices, find_forms
from slipstream.runtime.data.data import load_data
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.placement import (
    Placement,
    PlacementError,
    assign_workers_to_nodes,
    place_layers,
    with_end_layers,
)
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.replay.exchange import MAX_POSTED_RECEIVES, Exchange
from slipstream.runtime.replay.executor import BeforeOp, Executor
from slipstream.runtime.replay.group_cache import GenerationEndedError, GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.state.part_exchange import PartReducer
from slipstream.runtime.state.steps import StepController
from slipstream.schedules.precedence import op_key, producer_keys
from slipstream.schedules.program import RECEIVES, TransferKind, build_program
from slipstream.schedules.schedule import OpKind, Schedule, Worker
from tests import patience
from tests.generate import schedules
from tests.jobs import grid
from tests.runtime.running import judge, schedule_for, tiny

CPU = torch.device("cpu")


class Lone:
    """A worker that has everything, in this process."""

    def __init__(
        self,
        schedule: Schedule,
        iterations: int,
        before_op: BeforeOp = lambda *_: None,
        before_step: Callable[[int], None] = lambda _: None,
    ) -> None:
        config, worker = tiny(), Worker(0, 0)
        self.store, _ = host_store()
        self.session = GenerationSession(
            Membership(1, {worker: 0}, worker),
            links=GroupCache("gloo"),
            device=CPU,
            store=self.store,
        )
        model = build_model(
            config.model, config.training.seed, parameter_dtype(config.training), CPU
        )
        placement = place_layers(schedule.grid, model.layers)
        program = build_program(schedule, worker)
        self.session.connect(sharing_of(model).find_sharers(placement, program))
        self.holding = holding = build_holding(
            model, placement.held_layers(schedule, worker), config.training
        )
        holding.set_reduced_ranges(placement.reductions_of(program))
        self.slices = WorkerSlices(
            holding,
            placement.slice_layers(program),
            model,
            loss_scale=1 / schedule.grid.microbatches[0],
            config=config,
        )
        self.recorder = Recorder(CPU, 0.0)
        self.executor = Executor(
            program,
            slices=self.slices,
            session=self.session,
            recorder=self.recorder,
            before_op=before_op,
            before_step=before_step,
            reducer=PartReducer(self.session, holding),
            steps=StepController(
                holding, config.training, layers=model.layers, share=None, staggered=True
            ),
            exchange=Exchange(
                program,
                self.session,
                [find_forms(model, config)[cut] for cut in placement.cuts],
                range(iterations),
            ),
            feed=partial(load_data(config).batch, batch=1, context=16),
        )

    def run(self, iterations: int) -> list[float]:
        losses = []
        for iteration in range(iterations):
            self.recorder.start_iteration(0, traced=True)
            losses.append(self.executor.run(iteration))
        return losses


@pytest.mark.parametrize("backward", ["split", "fused"])
def test_a_lone_worker_runs_its_program_as_it_stands(backward):
    schedule = schedule_for(grid(1, 1, 3), backward=backward)
    lone = Lone(schedule, 3)
    assert lone.run(3) == pytest.approx(judge(tiny(), (3,), 3).losses, abs=1e-12)
    program = [(op.kind, op.slice, op.pipeline, op.microbatch) for op in schedule.ops(Worker(0, 0))]
    assert [
        (op.kind, op.slice, op.pipeline, op.microbatch) for op in lone.recorder.traced_ops()
    ] == program
    assert lone.slices.runners[0].count_in_flight() == 0
    lone.session.close()


def test_nothing_that_has_run_beyond_the_end_of_the_order_counts(monkeypatch):
    """Ops that have run beyond the end of the order do not count.

    Over NCCL an abort lets go of who waits for parameters as if they had come.
    """
    lone = Lone(schedule_for(grid(1, 1, 3)), 2)
    lone.run(1)
    assert lone.holding.optimizer.whole_after == 0
    monkeypatch.setattr(lone.holding.optimizer, "start_copy_steps", lone.session.abort)
    with pytest.raises(GenerationEndedError):
        lone.executor.run(1)
    assert lone.holding.optimizer.whole_after is None
    lone.session.close()


class TestReductionsBesideCompute:
    """Of a worker that has layers to compute after it has begun to reduce others."""

    SCHEDULE = schedule_for(
        grid(
            1,
            1,
            3,
            times="forward = 4\nbackward_input = 4\nbackward_weight = 4\nall_reduce = 2",
            more="[network]\noverlap = true\n[placement]\nlayers = [4]",
        )
    )
    KINDS = tuple(op.kind for op in SCHEDULE.ops(Worker(0, 0)))

    def test_go_on_while_it_computes(self, monkeypatch):
        later, began, ended = threading.Event(), list[int](), list[int]()

        def before_op(iteration: int, place: int, kind: OpKind) -> None:
            if place == self.KINDS.index(OpKind.A) + 1:
                later.set()
            if kind is OpKind.O:
                began.append(len(ended))

        def summed(*_: object) -> None:
            assert later.wait(20), "it is waited for before something else is begun"
            ended.append(1)

        lone = Lone(self.SCHEDULE, 2, before_op)
        monkeypatch.setattr(lone.session, "sum_over_sharers", summed)
        assert lone.run(2) == pytest.approx(judge(tiny(), (3,), 2).losses, abs=1e-12)
        assert len(ended) == 2 * self.KINDS.count(OpKind.A)
        starts = [op.start_seconds for op in lone.recorder.traced_ops() if op.kind is OpKind.A]
        assert starts == sorted(starts), "one after the other"
        assert all(
            op.end_seconds <= lone.recorder.traced_ops()[-1].start_seconds
            for op in lone.recorder.traced_ops()[:-1]
        )
        lone.session.close()

    def test_begin_before_other_layers_are_computed(self):
        """Reductions begin directly behind the last W of their layers.

        Another W is planned to begin at the same time.
        """
        kinds = list[OpKind]()
        lone = Lone(self.SCHEDULE, 1, lambda _iteration, _place, kind: kinds.append(kind))
        lone.run(1)
        assert "".join(kinds).endswith("WWWAWWAWWAWWAO"), "two micro-batches are cut"
        lone.session.close()

    def test_are_all_there_before_the_state_is_copied_that_a_step_overwrites(self, monkeypatch):
        """Parameters are all there before a step overwrites the state copied.

        Only then has everybody passed on something of this iteration, so that nobody undoes the
        step before.
        """
        waits, ended, copied = threading.Event(), list[int](), list[int]()

        def summed(*_: object) -> None:
            assert waits.wait(patience.SECONDS)
            ended.append(1)

        lone = Lone(self.SCHEDULE, 2, before_step=lambda _: copied.append(len(ended)))
        wait = lone.session.wait_for_reductions
        monkeypatch.setattr(lone.session, "sum_over_sharers", summed)
        monkeypatch.setattr(lone.session, "wait_for_reductions", lambda: (waits.set(), wait()))
        lone.run(2)
        assert copied == [self.KINDS.count(OpKind.A), 2 * self.KINDS.count(OpKind.A)]
        lone.session.close()

    def test_fail_as_if_it_had_waited(self, monkeypatch):
        lone = Lone(self.SCHEDULE, 1)

        def fails(*_: object) -> None:
            raise CommunicationError("nobody is there")

        monkeypatch.setattr(lone.session, "sum_over_sharers", fails)
        with pytest.raises(CommunicationError, match="nobody is there"):
            lone.run(1)
        lone.session.drain()
        lone.session.close()

    def test_change_nothing_any_more_once_the_session_has_drained(self, monkeypatch):
        """One is under way when the order ends, and others have not been begun."""
        inside, out, calls = threading.Event(), threading.Event(), list[int]()

        def summed(*_: object) -> None:
            calls.append(1)
            inside.set()
            assert out.wait(20)

        def before_op(iteration: int, place: int, kind: OpKind) -> None:
            if kind is OpKind.O:
                assert inside.wait(20)
                lone.session.abort()
                lone.session.raise_if_ended()

        lone = Lone(self.SCHEDULE, 1, before_op)
        monkeypatch.setattr(lone.session, "sum_over_sharers", summed)
        with pytest.raises(GenerationEndedError):
            lone.run(1)
        assert len(lone.session.reduction_threads()) == 1
        threading.Timer(0.05, out.set).start()
        lone.session.drain()
        assert calls == [1] and out.is_set() and not lone.session.reduction_threads()
        lone.session.close()


def test_an_executor_is_gone_with_its_last_reference():
    """It has what belongs to an order: tensors, transfers, connections.

    None waits for the garbage collector.
    """
    schedule = schedule_for(grid(1, 1, 3))
    part = SimpleNamespace(worker=Worker(0, 0), one_process=True)
    slices = SimpleNamespace(runners={0: None}, holding=None)
    program = build_program(schedule, Worker(0, 0))
    executor = Executor(
        program, slices=slices, steps=part, session=part, exchange=part, feed=part, recorder=part
    )
    there = weakref.ref(executor)
    gc.disable()
    try:
        del executor
        assert there() is None
    finally:
        gc.enable()


class Wire:
    """A transport that carries nothing, but remembers.

    Transfers are matched by their order on each pair of workers, as NCCL does.
    """

    def __init__(
        self, worker: Worker, log: list[tuple[Worker, str, Worker, int]], *, ordered: bool = True
    ) -> None:
        self.ordered = ordered
        self.worker = worker
        self._log = log

    def send(self, tensor: torch.Tensor, target: Worker, tag: int) -> "Sent":
        self._log.append((self.worker, "to", target, tag))
        return Sent(target)

    def receive(self, shape: object, dtype: object, source: Worker, tag: int) -> "Sent":
        self._log.append((self.worker, "from", source, tag))
        return Sent(self.worker)


class Sent:
    def __init__(self, target: Worker) -> None:
        self.target = target

    def wait(self) -> None: ...

    def wait_for_tensor(self) -> torch.Tensor:
        return torch.zeros(1)


def run_program(
    schedule: Schedule, worker: Worker, iterations: int, *, ordered: bool = True
) -> list[tuple[Worker, str, Worker, int]]:
    """The transfers of a worker, in the order in which it issues them."""
    log: list[tuple[Worker, str, Worker, int]] = []
    passed = [TensorForm((1,), torch.float32)] * (schedule.grid.layer_count + 1)
    wire = Wire(worker, log, ordered=ordered)
    program = build_program(schedule, worker)
    exchange = Exchange(program, wire, passed, range(iterations))  # type: ignore[arg-type]
    for iteration in range(iterations):
        run_once(exchange, program, iteration)
        exchange.end_iteration()
    exchange.flush()
    return log


def run_once(exchange, program, iteration) -> None:
    """What an executor asks for, without computing."""
    transfers = 0
    for instruction in program.instructions:
        if isinstance(instruction.kind, TransferKind):
            start = exchange.start_receive if instruction.kind in RECEIVES else exchange.start_send
            start(iteration, transfers)
            transfers += 1
            continue
        if takes := program.input_of(instruction):
            exchange.take_input(takes)
        if makes := program.output_of(instruction):
            exchange.put_output(makes, torch.zeros(1))


@settings(max_examples=40)
@given(schedules())
def test_all_workers_follow_one_order_of_transfers(schedule):
    # So they cannot wait for each other in a circle, even one transfer at a time.
    iterations = 2
    logs = {seat.worker: run_program(schedule, seat.worker, iterations) for seat in schedule.seats}
    sent = sum(way == "to" for log in logs.values() for _, way, _, _ in log)
    assert sent == sum(way == "from" for log in logs.values() for _, way, _, _ in log)
    assert sent == iterations * crossings(schedule)
    for worker, log in logs.items():
        tags = [tag for _, _, _, tag in log]
        assert tags == sorted(set(tags)) * iterations
        for _, way, other, tag in log:
            assert (other, "from" if way == "to" else "to", worker, tag) in logs[other]


def crossings(schedule: Schedule) -> int:
    """Dependencies between workers, counted without the graph that the runtime uses."""
    host = {
        op_key(op): op.worker for op in schedule.all_ops() if op.kind not in (OpKind.A, OpKind.O)
    }
    return sum(
        host[key] != host[producer]
        for key in host
        for producer in producer_keys(key, schedule.route_of(key.pipeline, key.microbatch))
        if producer in host
    )


@settings(max_examples=20)
@given(schedules())
def test_receives_may_go_ahead_of_sends_and_stay_the_same_transfers(schedule):
    for seat in schedule.seats:
        strict, ahead = (
            run_program(schedule, seat.worker, 2, ordered=ordered) for ordered in (True, False)
        )
        for way in ("to", "from"):
            sent = [op for op in strict if op[1] == way]
            assert [op for op in ahead if op[1] == way] == sent


@pytest.mark.parametrize("ordered", [True, False])
def test_receives_are_posted_ahead_but_not_without_bound(ordered):
    log: list[tuple[Worker, str, Worker, int]] = []
    worker = Worker(0, 1)
    schedule = schedule_for(grid(1, 2, 12))
    passed = [TensorForm((1,), torch.float32)] * 3
    wire = Wire(worker, log, ordered=ordered)
    program = build_program(schedule, worker)
    exchange = Exchange(program, wire, passed, range(1))  # type: ignore[arg-type]
    assert str(program.instructions[0]).startswith("1RECV_F0.0")
    exchange.start_receive(0, 0)
    exchange.take_input(program.output_of(program.instructions[0]))
    assert 1 <= len(log) <= 1 + MAX_POSTED_RECEIVES
    assert ordered or len(log) == MAX_POSTED_RECEIVES, "others are posted before the next wait"


def ranges(schedule: Schedule, layers: int) -> list[tuple[int, int]]:
    placement = place_layers(schedule.grid, layers)
    return [placement.model_range(range_) for range_ in schedule.layers_by_slice]


def test_layers_of_stages():
    assert ranges(schedule_for(grid(1, 2, 1)), 6) == [(0, 3), (3, 6)]
    schedule = schedule_for(grid(1, 2, 1, more="[placement]\nlayers = [1, 5]"))
    assert ranges(schedule, 6) == [(0, 1), (1, 6)]
    assert ranges(schedule, 8) == [(0, 2), (2, 8)], (
        "decoder layers: the embedding is with the first, the head with the last"
    )
    assert place_layers(schedule.grid, 8).cuts == (0, 2, 3, 4, 5, 6, 8) and with_end_layers(
        [1, 5], 8
    ) == [2, 6]
    assert with_end_layers([1, 5], 6) == [1, 5] and with_end_layers([6], 8) == [8]
    with pytest.raises(
        PlacementError, match="the schedule's stages hold 6 layers; the model has 7"
    ):
        place_layers(schedule.grid, 7)
    with pytest.raises(
        PlacementError, match="gives layers 1 to 1 to stage 1; expected one or more, beginning"
    ):
        place_layers(schedule_for(grid(1, 2, 1, more="[placement]\nlayers = [1, 0]")).grid, 1)


@settings(max_examples=40)
@given(schedules())
def test_what_is_held_is_what_is_run_and_reduced(schedule):
    """Of the model, where each of the schedule's layers is two."""
    placement = Placement([2 * layer for layer in range(schedule.grid.layer_count + 1)])
    layers_by_worker = placement.held_layers_by_worker(schedule)
    for worker, layers in layers_by_worker.items():
        assert placement.held_layers(schedule, worker) == layers
        program = build_program(schedule, worker)
        assert placement.model_layers(program.holds) == layers
        for start, end in placement.slice_layers(program).values():
            assert layers.issuperset(range(start, end))
        reduced = placement.reductions_of(program)
        assert sorted(layers) == [layer for start, end in reduced for layer in range(start, end)]
        for (start, end), sharers in reduced.items():
            assert sharers == sorted(
                other
                for other in layers_by_worker
                if layers_by_worker[other].issuperset(range(start, end))
            )


def test_those_who_reduce_a_stage_are_the_live_workers_that_hold_it():
    schedule = schedule_for(grid(3, 2, 2), ["1.1"])
    placement = place_layers(schedule.grid, 4)
    first, other = (
        placement.reductions_of(build_program(schedule, worker))
        for worker in (Worker(1, 0), Worker(2, 1))
    )
    assert first == {(0, 2): [Worker(0, 0), Worker(1, 0), Worker(2, 0)]}
    assert other == {(2, 4): [Worker(0, 1), Worker(2, 1)]}


@settings(max_examples=40)
@given(schedules())
def test_each_layer_is_saved_by_one_of_its_holders_and_they_take_turns(schedule):
    placement = Placement([2 * layer for layer in range(schedule.grid.layer_count + 1)])
    programs = [build_program(schedule, seat.worker) for seat in schedule.seats]
    ranges = {
        layers: workers
        for program in programs
        for layers, workers in placement.reductions_of(program).items()
    }
    by_worker = {program.worker: placement.choose_writers(program) for program in programs}
    for (start, end), sharers in ranges.items():
        saved = [by_worker[sharers[0]][layer] for layer in range(start, end)]
        assert all(
            by_worker[sharer][layer] == saved[layer - start]
            for sharer in sharers
            for layer in range(start, end)
        )
        counts = [saved.count(sharer) for sharer in sharers]
        assert sum(counts) == end - start and max(counts) - min(counts) <= 1


def test_workers_are_assigned_to_nodes_in_order():
    workers = [Worker(0, column) for column in range(5)]
    assert assign_workers_to_nodes(workers, 2) == [workers[:2], workers[2:]]
    assert assign_workers_to_nodes(workers[:1], 3) == [[], [], workers[:1]]
