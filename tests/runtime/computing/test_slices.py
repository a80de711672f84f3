"""Slices run op by op, in any legal order and on any hosts.

They are compared with the plain single-process run.
"""

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from slipstream.runtime.computing.slices import SliceRunner, TensorForm, WorkerSlices, find_forms
from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data.data import ByteText, Microbatch, load_data
from slipstream.runtime.models.layered_model import LayeredModel, build_model, parameter_dtype
from slipstream.runtime.placement import split_layers
from slipstream.runtime.state.checksum import parameter_digest
from slipstream.runtime.state.held_layers import HeldLayers, build_holding
from slipstream.runtime.state.part_state import count_elements
from slipstream.runtime.state.parts import build_partition
from slipstream.runtime.tools.reference import reference_run
from slipstream.schedules.schedule import Worker

CPU = torch.device("cpu")
MODEL = {"blocks": 2, "width": 16, "heads": 2, "context": 8, "dropout": 0.2}
CONFIG = parse_run_config(MODEL, {"batch": 2, "dtype": "float64", "learning_rate": 0.01})
PARTITIONS = [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)], split_layers(4, 4)]


class Part(SliceRunner):
    """Runs layers that it holds alone."""

    def __init__(
        self, layers: tuple[int, int], model: LayeredModel, total: int, config: RunConfig
    ) -> None:
        self.holding = build_holding(model, range(*layers), config.training)
        super().__init__(layers, self.holding.modules, model, loss_scale=1 / total, config=config)


def build_parts(
    config: RunConfig, partition: list[tuple[int, int]], total: int, device: torch.device = CPU
) -> list[Part]:
    training = config.training
    model = build_model(config.model, training.seed, parameter_dtype(training), device)
    return [Part(layers, model, total, config) for layers in partition]


class Cluster:
    """Workers of a pipelines x stages grid in one process.

    Ops run in a random order that obeys the rules.
    """

    def __init__(
        self,
        config: RunConfig,
        partition: list[tuple[int, int]],
        counts: list[int],
        split: bool,
        seed: int,
        device: torch.device = CPU,
    ) -> None:
        self.config, self.counts, self.split, self.device = config, counts, split, device
        self.random = random.Random(seed)
        self.stages = len(partition)
        self.workers = [build_parts(config, partition, sum(counts), device) for _ in counts]
        self.corpus: ByteText = load_data(config)

    def iterate(self, iteration: int) -> float:
        """One iteration; each micro-batch is run at each stage by a worker drawn at random."""
        microbatches = [
            Microbatch(iteration, pipeline, index)
            for pipeline, count in enumerate(self.counts)
            for index in range(count)
        ]
        host = {
            key: self.random.choice(self.workers)[key[1]]
            for key in product(microbatches, range(self.stages))
        }
        tensors: dict[tuple[str, Microbatch, int], Tensor | None] = {}
        for kind, microbatch, stage in self.order(microbatches):
            self.run(kind, microbatch, stage, host[microbatch, stage], tensors)
        assert all(stage.count_in_flight() == 0 for row in self.workers for stage in row)
        return self.finish(iteration)

    def order(self, microbatches: list[Microbatch]) -> Iterator[tuple[str, Microbatch, int]]:
        last = self.stages - 1
        waiting = [("F", microbatch, 0) for microbatch in microbatches]
        while waiting:
            kind, microbatch, stage = op = waiting.pop(self.random.randrange(len(waiting)))
            yield op
            if kind == "F":
                waiting.append(
                    ("F", microbatch, stage + 1) if stage < last else ("I", microbatch, last)
                )
            elif kind == "I":
                waiting += [("W", microbatch, stage)] * self.split
                waiting += [("I", microbatch, stage - 1)] * (stage > 0)

    def run(
        self,
        kind: str,
        microbatch: Microbatch,
        index: int,
        stage: Part,
        tensors: dict[tuple[str, Microbatch, int], Tensor | None],
    ) -> None:
        if kind == "F":
            tokens, targets = (
                half.to(self.device)
                for half in self.corpus.batch(
                    microbatch, self.config.training.batch, self.config.model.context
                )
            )
            value = tokens if stage.first else tensors.pop(("F", microbatch, index - 1))
            assert value is not None
            target = targets if stage.last else None
            tensors["F", microbatch, index] = stage.forward(
                microbatch, value, target, split=self.split
            )
        elif kind == "W":
            stage.backward_weight(microbatch)
        else:
            backward = stage.backward_input if self.split else stage.backward
            tensors["I", microbatch, index] = backward(
                microbatch, tensors.pop(("I", microbatch, index + 1), None)
            )

    def finish(self, iteration: int) -> float:
        """A and O of every stage; the iteration's loss."""
        for peers in zip(*self.workers, strict=True):
            for flats in zip(*(peer.holding.flat_gradients() for peer in peers), strict=True):
                total = torch.stack(flats).sum(0)
                for flat in flats:
                    flat.copy_(total)
            for peer in peers:
                peer.holding.optimizer.step(iteration)
                peer.holding.zero_gradients()
        return sum(row[-1].take_loss().item() for row in self.workers)

    def parameters(self, pipeline: int) -> dict[str, Tensor]:
        return {
            name: parameter
            for stage in self.workers[pipeline]
            for name, parameter in stage.holding.parameters_by_name().items()
        }


def assert_reproduces(
    config: RunConfig, cluster: Cluster, iterations: int = 3, tolerance: float = 1e-9
) -> None:
    expected = reference_run(config, cluster.counts, iterations, cluster.device)
    losses = [cluster.iterate(iteration) for iteration in range(iterations)]
    assert losses == pytest.approx(expected.losses, rel=0, abs=tolerance)
    digests = set()
    for pipeline in range(len(cluster.counts)):
        parameters = cluster.parameters(pipeline)
        assert parameters.keys() == expected.parameters.keys()
        for name, parameter in parameters.items():
            torch.testing.assert_close(
                parameter.detach().cpu(), expected.parameters[name], rtol=0, atol=tolerance
            )
        digests.add(parameter_digest(parameters))
    assert len(digests) == 1, "peers disagree"


@settings(max_examples=25, deadline=None)
@given(
    partition=st.sampled_from(PARTITIONS),
    split=st.booleans(),
    seed=st.integers(0, 2**32),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    optimizer=st.sampled_from(["adamw", "sgd"]),
)
def test_any_order_on_any_hosts_equals_the_reference(
    partition: list[tuple[int, int]], split: bool, seed: int, counts: list[int], optimizer: str
) -> None:
    config = parse_run_config(
        MODEL,
        {
            "batch": 2,
            "dtype": "float64",
            "learning_rate": 0.01,
            "momentum": 0.5,
            "optimizer": optimizer,
        },
    )
    assert_reproduces(config, Cluster(config, partition, counts, split, seed))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("split", [False, True])
def test_on_a_gpu(split: bool) -> None:
    assert_reproduces(
        CONFIG, Cluster(CONFIG, PARTITIONS[2], [2, 1], split, 0, torch.device("cuda"))
    )


@pytest.mark.parametrize("split", [False, True])
def test_in_order_it_is_the_reference_bit_for_bit(split: bool) -> None:
    [only] = build_parts(CONFIG, [(0, 4)], 3)
    corpus = load_data(CONFIG)
    for iteration in range(3):
        for microbatch in (Microbatch(iteration, pipeline, 0) for pipeline in range(3)):
            tokens, targets = corpus.batch(microbatch, 2, 8)
            assert only.forward(microbatch, tokens, targets, split=split) is None
            assert only.backward(microbatch, None) is None
        only.holding.optimizer.step(iteration)
        only.holding.zero_gradients()
    assert (
        parameter_digest(only.holding.parameters_by_name())
        == reference_run(CONFIG, [1, 1, 1], 3).digest
    )


@pytest.mark.parametrize("split", [False, True])
def test_bf16_stays_close_to_float32(split: bool) -> None:
    configs = [
        parse_run_config({**MODEL, "dropout": 0.0}, {"batch": 2}, dtype=dtype)
        for dtype in ("bf16", "float32")
    ]
    cluster = Cluster(configs[0], PARTITIONS[2], [2, 1], split, 0)
    assert_reproduces(configs[0], cluster, tolerance=2e-3)
    assert all(parameter.dtype is torch.float32 for parameter in cluster.parameters(0).values())
    plain, rounded = (
        reference_run(config, [2, 1], 3).losses for config in (configs[1], configs[0])
    )
    assert rounded != plain
    assert rounded == pytest.approx(plain, rel=0.01)


def middle(config: RunConfig = CONFIG) -> tuple[Part, Tensor, Tensor]:
    """A stage of one block, an activation for it and a gradient."""
    stage = build_parts(config, PARTITIONS[2], 4)[1]
    generator = torch.Generator().manual_seed(0)
    value, gradient = (
        torch.randn(2, 8, 16, dtype=torch.float64, generator=generator) for _ in range(2)
    )
    return stage, value, gradient


def test_i_leaves_every_linear_weight_to_w() -> None:
    stage, value, gradient = middle()
    microbatch = Microbatch(0, 0, 0)
    stage.forward(microbatch, value, split=True)
    stage.backward_input(microbatch, gradient)
    linears = [
        module for module in stage.holding.modules[2].modules() if isinstance(module, nn.Linear)
    ]
    assert len(linears) == 4
    for linear in linears:
        for parameter in (linear.weight, linear.bias):
            assert parameter.grad is not None and not parameter.grad.any()
    deferred = sum(parameter.numel() for linear in linears for parameter in linear.parameters())
    assert deferred > 0.95 * sum(flat.numel() for flat in stage.holding.flat_gradients())
    stage.backward_weight(microbatch)
    assert all(linear.weight.grad is not None and linear.weight.grad.any() for linear in linears)


def test_i_frees_what_w_does_not_need() -> None:
    """Of a block's activations the inputs of its four products stay until W."""
    stage, value, gradient = middle()
    stored: dict[str, list[StorageWeakRef]] = {}

    def watch(name: str, tensor: Tensor) -> None:
        stored.setdefault(name, []).append(StorageWeakRef(tensor.untyped_storage()))

    for name, module in stage.holding.modules[2].named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: watch(name, output))
    microbatch = Microbatch(0, 0, 0)
    stage.forward(microbatch, value, split=True)
    assert not stored["up"][0].expired()
    stage.backward_input(microbatch, gradient)
    alive = set()
    for name, storages in stored.items():
        if not all(storage.expired() for storage in storages):
            alive.add(name)
    assert alive == {"attention_norm", "mlp_norm"}
    stage.backward_weight(microbatch)
    assert all(storage.expired() for storages in stored.values() for storage in storages)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "recompute", ["full", [0, 2], "attention", "mlp", ["attention", "mlp"], [1, "mlp"]]
)
def test_what_is_computed_again_gives_the_same_numbers(recompute: object, split: bool) -> None:
    config = parse_run_config(
        MODEL, {"batch": 2, "dtype": "float64", "learning_rate": 0.01, "recompute": recompute}
    )
    assert_reproduces(config, Cluster(config, PARTITIONS[1], [2, 1], split, 0))


def assert_as_one_that_keeps_all(
    stage, ours, microbatch: Microbatch, value: Tensor, gradient: Tensor
) -> None:
    """Bit for bit; `ours`: what the stage gave for its input."""
    plain, _, _ = middle()
    plain.forward(microbatch, value, split=True)
    theirs = plain.backward_input(microbatch, gradient)
    plain.backward_weight(microbatch)
    assert isinstance(ours, Tensor) and isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    for mine, other in zip(
        stage.holding.flat_gradients(), plain.holding.flat_gradients(), strict=True
    ):
        assert torch.equal(mine, other)


def test_what_is_computed_again_is_not_held() -> None:
    # Of a block only its input stays from F to I; W then has what it needs.
    config = parse_run_config(MODEL, {"batch": 2, "dtype": "float64", "recompute": [2]})
    stage, value, gradient = middle(config)
    storages: list[StorageWeakRef] = []
    for module in stage.holding.modules[2].modules():
        module.register_forward_hook(
            lambda module, args, output: storages.append(StorageWeakRef(output.untyped_storage()))
        )
    microbatch = Microbatch(0, 0, 0)
    output = stage.forward(microbatch, value, split=True)
    del output
    first = len(storages)
    assert first and all(storage.expired() for storage in storages[:-1])
    ours = stage.backward_input(microbatch, gradient)
    assert len(storages) > first, "the forward was not run again"
    stage.backward_weight(microbatch)
    assert_as_one_that_keeps_all(stage, ours, microbatch, value, gradient)


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        ("none", {"attention.qkv", "attention.out", "up", "down"}),
        ("attention", {"up", "down"}),
        ("mlp", {"attention.qkv", "attention.out"}),
        (["attention", "mlp"], set()),
        ([2, "mlp"], set()),
    ],
)
def test_of_a_part_that_is_computed_again_only_what_it_takes_is_held(
    recompute: object, kept: set[str]
) -> None:
    """From F to I: here looked at for what goes into the four products.

    Gradients are those of one that keeps all, bit for bit.
    """
    stage, value, gradient = middle(
        parse_run_config(MODEL, {"batch": 2, "dtype": "float64", "recompute": recompute})
    )
    stored: dict[str, StorageWeakRef] = {}
    runs = {"attention.qkv": 0, "up": 0}

    def watch(name: str, taken: Tensor) -> None:
        stored.setdefault(name, StorageWeakRef(taken.untyped_storage()))
        if name in runs:
            runs[name] += 1

    for name, module in stage.holding.modules[2].named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(
                lambda module, args, output, name=name: watch(name, args[0])
            )
    microbatch = Microbatch(0, 0, 0)
    stage.forward(microbatch, value, split=True)
    assert {name for name, storage in stored.items() if not storage.expired()} == kept
    ours = stage.backward_input(microbatch, gradient)
    assert runs == {
        "attention.qkv": 1 + ("attention.qkv" not in kept),
        "up": 1 + ("up" not in kept),
    }
    stage.backward_weight(microbatch)
    assert_as_one_that_keeps_all(stage, ours, microbatch, value, gradient)


def test_a_layer_that_is_not_there_cannot_be_computed_again() -> None:
    config = parse_run_config(MODEL, {"recompute": [1, 4]})
    with pytest.raises(
        ConfigError, match=r"^training\.recompute names layer 4; the model has layers 0 to 3$"
    ):
        find_forms(build_model(config.model, 0, torch.float32, CPU), config)


def test_stage_0_leaves_the_whole_backward_to_w() -> None:
    stage = build_parts(CONFIG, PARTITIONS[2], 4)[0]
    microbatch = Microbatch(0, 0, 0)
    output = stage.forward(microbatch, torch.zeros(2, 8, dtype=torch.int64), split=True)
    assert output is not None and not output.requires_grad
    assert stage.backward_input(microbatch, torch.ones_like(output)) is None
    assert not stage.holding.flat_gradients()[0].any()
    stage.backward_weight(microbatch)
    assert stage.holding.flat_gradients()[0].any()


def test_in_flight_counts_from_f_to_w() -> None:
    stage, value, gradient = middle()
    left, right = Microbatch(0, 0, 0), Microbatch(0, 1, 0)
    counts = []
    for step in (
        lambda: stage.forward(left, value, split=True),
        lambda: stage.forward(right, value, split=True),
        lambda: stage.backward_input(left, gradient),
        lambda: stage.backward(right, gradient),
        lambda: stage.backward_weight(left),
    ):
        step()
        counts.append(stage.count_in_flight())
    assert counts == [1, 2, 2, 1, 0]


def test_discard_forgets_an_iteration() -> None:
    *_, stage = build_parts(CONFIG, PARTITIONS[1], 2)
    value, target = torch.ones(2, 8, 16, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.int64)
    for index in range(3):
        stage.forward(Microbatch(0, 0, index), value, target, split=True)
    stage.backward_input(Microbatch(0, 0, 0), None)
    stage.backward(Microbatch(0, 0, 1), None)
    stage.discard_microbatches()
    assert stage.count_in_flight() == 0 and stage.take_loss() == 0
    stage.forward(Microbatch(0, 0, 0), value, target, split=True)


def test_losses_are_taken_once() -> None:
    *_, stage = build_parts(CONFIG, PARTITIONS[1], 2)
    value, target = torch.ones(2, 8, 16, dtype=torch.float64), torch.zeros(2, 8, dtype=torch.int64)
    for index in range(2):
        stage.forward(Microbatch(0, 0, index), value, target, split=False)
    loss = stage.take_loss()
    assert loss.dtype is torch.float64 and 4 < loss.item() < 8
    assert stage.take_loss() == 0


def test_gradients_are_one_flat_tensor() -> None:
    stage, value, gradient = middle()
    stage.forward(Microbatch(0, 0, 0), value, split=True)
    stage.backward(Microbatch(0, 0, 0), gradient)
    [flat] = stage.holding.flat_gradients()
    grads = [parameter.grad for parameter in stage.holding.parameters_by_name().values()]
    assert torch.equal(flat, torch.cat([grad.flatten() for grad in grads if grad is not None]))
    flat.zero_()
    assert not any(grad is None or grad.any() for grad in grads)


def test_who_runs_a_microbatch_does_not_matter() -> None:
    """Two workers give the same numbers for a micro-batch.

    Nothing depends on who, or when.
    """
    (stage, value, gradient), (other, _, _) = middle(), middle()
    other.forward(Microbatch(0, 0, 1), value, split=False)
    outputs = [worker.forward(Microbatch(3, 1, 2), value, split=True) for worker in (stage, other)]
    gradients = [worker.backward_input(Microbatch(3, 1, 2), gradient) for worker in (other, stage)]
    assert outputs[0] is not None and outputs[1] is not None and torch.equal(outputs[0], outputs[1])
    assert (
        gradients[0] is not None
        and gradients[1] is not None
        and torch.equal(gradients[0], gradients[1])
    )
    elsewhere = stage.forward(Microbatch(3, 2, 2), value, split=True)
    assert elsewhere is not None and not torch.equal(elsewhere, outputs[0]), (
        "dropout does not depend on the pipeline"
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float64", torch.float64), ("float32", torch.float32), ("bf16", torch.float32)],
)
def test_forms_are_what_layers_give(dtype: str, expected: torch.dtype) -> None:
    config = parse_run_config(MODEL, {"batch": 2, "dtype": dtype})
    stages = build_parts(config, PARTITIONS[2], 1)
    found = find_forms(build_model(config.model, 0, parameter_dtype(config.training), CPU), config)
    assert found[0] == TensorForm((2, 8), torch.int64)
    assert found[1] == TensorForm((2, 8, 16), expected)
    assert found[4].shape == (2, 8, 256)
    value: Tensor | None = torch.zeros(2, 8, dtype=torch.int64)
    for stage in stages[:-1]:
        assert value is not None and (value.shape, value.dtype) == found[stage.layers[0]]
        value = stage.forward(Microbatch(0, 0, 0), value, split=True)
        assert value is not None and (value.shape, value.dtype) == found[stage.layers[1]]


def test_a_slice_in_the_middle_of_a_holding_adds_to_its_gradients() -> None:
    # Two slices of the same layers, cut elsewhere, sum into the same gradients, which are laid out
    # as it is said.
    model = build_model(CONFIG.model, CONFIG.training.seed, torch.float64, CPU)
    holding = build_holding(model, range(4), CONFIG.training)
    holding.set_reduced_ranges([(2, 4), (0, 2)])
    layers = {0: (0, 2), 1: (2, 4), 2: (0, 1), 3: (1, 4), 4: (0, 4)}
    slices = WorkerSlices(holding, layers, model, loss_scale=1.0, config=CONFIG)
    tokens = torch.zeros(2, 8, dtype=torch.int64)

    def run(microbatch: Microbatch, *route: int) -> list[Tensor]:
        value: Tensor | None = tokens
        for number in route:
            assert value is not None
            value = slices.runners[number].forward(microbatch, value, tokens, split=True)
        gradient = None
        for number in reversed(route):
            gradient = slices.runners[number].backward(microbatch, gradient)
        sums = [
            flat.clone() for number in (0, 1) for flat in holding.flat_gradients(layers[number])
        ]
        slices.discard_iteration()
        return sums

    expected = run(Microbatch(0, 0, 0), 0, 1)
    for route in ((2, 3), (4,)):
        for ours, theirs in zip(run(Microbatch(0, 0, 0), *route), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert all(flat.any() for flat in expected)
    assert not any(flat.any() for flat in holding.flat_gradients())
    assert slices.take_loss() == 0


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_holdings_exchange_layers_and_go_on_as_before(optimizer: str) -> None:
    # Whoever holds a layer makes the same steps; one that is open can be undone where the layers
    # have stayed.
    config = parse_run_config(
        MODEL, {"batch": 2, "dtype": "float64", "optimizer": optimizer, "momentum": 0.5}
    )
    model = build_model(config.model, 3, torch.float64, CPU)
    whole, left, right = (
        build_holding(model, layers, config.training) for layers in (range(4), (0, 1), (2, 3))
    )

    def state(holding: HeldLayers, layer: int) -> dict[str, torch.Tensor]:
        return dict(holding.optimizer.own_states(layer)[0].tensors)

    def step(iteration: int, *holdings: HeldLayers) -> None:
        for holding in holdings:
            for layer in holding.modules:
                draw = torch.Generator().manual_seed(10 * iteration + layer)
                for parameter in holding.modules[layer].parameters():
                    gradient = parameter.grad
                    gradient.copy_(
                        torch.randn(gradient.shape, dtype=gradient.dtype, generator=draw)
                    )
            holding.optimizer.step(iteration)

    for iteration in range(3):
        step(iteration, whole, left, right)
    for holding in (whole, left, right):
        holding.optimizer.commit()
    worker, parts = Worker(0, 0), left.optimizer.own_states(1)
    moved = {}
    for layer in (1, 2, 3):
        is_there = layer in right.modules
        holder = right if is_there else build_holding(model, [layer], config.training)
        moved[layer] = holder.modules[layer]
    cuts = {}
    for layers in ((0, 1), (1, 2), (2, 4)):
        elements = sum(count_elements(whole.modules[layer]).cut for layer in range(*layers))
        cuts[layers] = build_partition(elements, [worker], (), sharded=False)
    right.hold_layers(
        moved, {layers: cuts[layers] for layers in ((1, 2), (2, 4))}, worker, parts, 2
    )
    left.hold_layers({0: left.modules[0]}, {(0, 1): cuts[0, 1]}, worker, [], 2)
    assert (
        left.modules.keys() == {0}
        and right.modules.keys() == {1, 2, 3}
        and len(right.flat_gradients((2, 4))) == 1
    )
    assert not any(flat.any() for flat in right.flat_gradients())
    step(3, whole, left, right)
    before = {name: tensor.clone() for name, tensor in state(right, 3).items()}
    step(4, right)
    right.optimizer.undo()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(right, 3).items())
    for holding in (left, right):
        for layer in holding.modules:
            for name, tensor in state(whole, layer).items():
                assert torch.equal(state(holding, layer)[name], tensor), (layer, name)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first one of a machine compiles for minutes
@pytest.mark.parametrize(
    ("more", "training", "tolerance"),
    [({"dropout": 0.2}, {"dtype": "float64"}, 1e-9), ({"dropout": 0.0}, {"dtype": "bf16"}, 5e-3)],
    ids=["dropout", "autocast"],
)
@pytest.mark.parametrize("split", [False, True])
def test_compiled_layers_give_the_numbers_of_others(
    more: dict[str, object], training: dict[str, object], tolerance: float, split: bool
) -> None:
    config = parse_run_config(
        {**MODEL, **more}, {"batch": 2, "learning_rate": 0.01, "compile": True, **training}
    )
    assert_reproduces(config, Cluster(config, PARTITIONS[2], [2, 1], split, 0), tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_leave_the_gradients_of_weights_to_w() -> None:
    """None is lost; nothing that W needs is written to by what comes before it."""
    config = parse_run_config(MODEL, {"batch": 2, "dtype": "float64", "compile": True})
    (stage, value, gradient), (plain, _, _) = middle(config), middle()
    microbatches = [Microbatch(0, 0, index) for index in range(3)]
    for microbatch in microbatches:
        for runner in (stage, plain):
            runner.forward(microbatch, value * (1 + microbatch.index), split=True)
    for microbatch in microbatches:
        for runner in (stage, plain):
            runner.backward_input(microbatch, gradient * (1 + microbatch.index))
    weights = [
        module.weight
        for module in stage.holding.modules[2].modules()
        if isinstance(module, nn.Linear)
    ]
    assert len(weights) == 4 and not any(
        weight.grad.any() for weight in weights if weight.grad is not None
    )
    for microbatch in microbatches:
        for runner in (stage, plain):
            runner.backward_weight(microbatch)
    for mine, other in zip(
        stage.holding.flat_gradients(), plain.holding.flat_gradients(), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


def test_a_micro_batch_that_counts_nothing_has_no_gradient_even_if_its_loss_is_not_a_number():
    """As a mean over no tokens is."""
    (part,) = build_parts(CONFIG, [(0, 4)], 1)
    part.loss_scale, part._loss_of = (
        (lambda _: 0.0),
        (lambda value, target, batch: (value * float("nan")).mean()),
    )
    name = Microbatch(0, 0, 0)
    tokens, targets = load_data(CONFIG).batch(name, 2, 8)
    part.forward(name, tokens, targets, split=True)
    part.backward(name, None)
    assert part.take_loss() == 0
    assert all(
        parameter.grad is None or not parameter.grad.any()
        for parameter in part.holding.parameters_by_name().values()
    )
